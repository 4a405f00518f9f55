from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

from outrider.errors import ModelFileError, NotEnoughMemoryError
from outrider.models import memory
from outrider.models.locate import Located
from outrider.models.memory import INT4, Facts, available_bytes, check_weights, facts

V, H, LAYERS, KV_HEADS, HEAD_DIM = 96, 64, 2, 1, 16
NORMS = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.1.attn_norm.weight")
PARAMETERS = 3 * V * H + len(NORMS) * H
CONFIG = {
    "model_type": "llama",
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H // HEAD_DIM,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": V,
    "max_position_embeddings": 256,
}


def write_gguf(path: Path, *, weights: bool = True, kind: str = "Q4_1") -> Located:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(H)
    writer.add_block_count(LAYERS)
    writer.add_head_count(H // HEAD_DIM)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_token_list([f"t{i}" for i in range(V)])
    if weights:
        for name in NORMS:
            writer.add_tensor(name, np.ones(H, np.float32))
        for name in ("token_embd.weight", "output.weight", "blk.0.ffn_up.weight"):
            made_of, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            packed = np.zeros((V, H // made_of * size), np.uint8)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Located("gguf", path.stem, path=path)


@pytest.fixture
def gguf(tmp_path) -> Located:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def folder(tmp_path) -> Callable[..., Located]:
    """Writes a transformers folder; each keyword is a file of weights."""

    def write(config: object = CONFIG, **files: dict[str, torch.Tensor]) -> Located:
        path = tmp_path / "model"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        for stem, tensors in files.items():
            save_file(tensors, path / f"{stem}.safetensors")
        return Located("folder", "model", path=path)

    return write


def shards(located: Located, weight_map: dict[str, str]) -> None:
    assert located.path is not None
    index = located.path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


EMBEDDING = {"embed": torch.zeros(V, H, dtype=torch.bfloat16)}


class TestFacts:
    def test_gguf(self, gguf):
        assert facts(gguf) == Facts(
            architecture="llama",
            parameters=PARAMETERS,
            file_bytes=gguf.path.stat().st_size,
            precision="Q4_1",  # the matrices', though the norms are as many
            four_bits=V * H,
            layers=LAYERS,
            hidden_size=H,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=V,
            context_length=256,
        )

    def test_folder(self, folder):
        located = folder(model=EMBEDDING)
        assert facts(located) == Facts(
            architecture="llama",
            parameters=V * H,
            file_bytes=(located.path / "model.safetensors").stat().st_size,
            precision="BF16",
            four_bits=V * H,
            layers=LAYERS,
            hidden_size=H,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=V,
            context_length=256,
        )

    def test_embeddings_never_have_four_bits(self, folder):
        names = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight")
        found = facts(folder(model={name: torch.zeros(V, H) for name in names}))
        assert (found.parameters, found.four_bits) == (3 * V * H, V * H)
        # With a scale and a second number of 16 bits for every 32, or for every 64 of 8 bits.
        assert found.weights_bytes(torch.int8) == 3 * V * H * 17 // 16
        assert found.weights_bytes(INT4) == V * H * 10 // 16 + 2 * V * H * 17 // 16

    def test_head_dim_of_the_config_wins(self, folder):
        assert facts(folder(CONFIG | {"head_dim": 24}, model=EMBEDDING)).head_dim == 24

    def test_text_part_of_a_larger_config(self, folder):
        found = facts(folder({"model_type": "outer", "text_config": CONFIG}, model=EMBEDDING))
        assert (found.architecture, found.vocab_size) == ("llama", V)

    def test_unknown_sizes_are_none(self, folder):
        found = facts(folder({"model_type": "odd"}, model=EMBEDDING))
        assert found.parameters == V * H
        assert found.layers is found.vocab_size is found.head_dim is None
        assert found.cache_bytes_per_token(torch.float32) is None

    def test_all_shards_count(self, folder):
        located = folder(one=EMBEDDING, two={"norm": torch.ones(H)})
        shards(located, {"embed": "one.safetensors", "norm": "two.safetensors"})
        assert facts(located).parameters == V * H + H

    def test_second_layout_of_the_same_weights_does_not_count(self, folder):
        assert facts(folder(model=EMBEDDING, consolidated=EMBEDDING)).parameters == V * H

    def test_second_layout_beside_shards_does_not_count(self, folder):
        located = folder(one=EMBEDDING, consolidated=EMBEDDING)
        shards(located, {"embed": "one.safetensors"})
        assert facts(located).parameters == V * H

    def test_whole_file_comes_before_shards(self, folder):
        located = folder(model=EMBEDDING, one={"norm": torch.ones(H)})
        shards(located, {"norm": "one.safetensors"})
        assert facts(located).parameters == V * H

    def test_nothing_to_read(self):
        assert facts(Located("toy", "toy")) is None
        assert facts(Located("hub", "name", repo="org/name")) is None

    def test_sizes_in_memory(self, gguf):
        found = facts(gguf)
        assert found.weights_bytes(torch.bfloat16) == 2 * found.parameters
        assert found.weights_bytes(torch.float32) == 4 * found.parameters
        # Keys and values, in each layer, two bytes a number.
        assert found.cache_bytes_per_token(torch.bfloat16) == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2


class TestBroken:
    @pytest.mark.parametrize("share", [0.001, 0.3, 0.7, 0.99])
    def test_gguf_cut_anywhere(self, gguf, share):
        data = gguf.path.read_bytes()
        gguf.path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ModelFileError, match=r"tiny\.gguf' cannot be read.*fetch it again"):
            facts(gguf)

    def test_gguf_without_weights(self, tmp_path):
        with pytest.raises(ModelFileError, match="holds no weights"):
            facts(write_gguf(tmp_path / "vocabulary.gguf", weights=False))

    def test_safetensors_cut(self, folder):
        located = folder(model=EMBEDDING)
        file = located.path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(ModelFileError, match="model' cannot be read"):
            facts(located)

    @pytest.mark.parametrize("text", ["", "{", "[]"])
    def test_config(self, folder, text):
        located = folder(model=EMBEDDING)
        (located.path / "config.json").write_text(text)
        with pytest.raises(ModelFileError, match="model' cannot be read"):
            facts(located)

    def test_missing_shard_is_named(self, folder):
        located = folder(one=EMBEDDING)
        shards(located, {"embed": "one.safetensors", "norm": "two.safetensors"})
        with pytest.raises(ModelFileError, match=r"1 of 2 shards .* two\.safetensors"):
            facts(located)


class TestAvailable:
    @pytest.fixture(autouse=True)
    def machine(self, tmp_path, monkeypatch):
        """A machine with 8 GB free, and a control group's folder to fill."""
        free = psutil.virtual_memory()._replace(available=8 * 10**9)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
        monkeypatch.setattr(memory, "_CGROUP", tmp_path)
        monkeypatch.setattr(memory, "_OWN_CGROUP", tmp_path / "own")
        (tmp_path / "own").write_text("0::/system.slice/outrider.service\n")

        def limit(most: str, used: int, files: int = 0, group: str = "") -> None:
            folder = tmp_path / group
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{most}\n")
            (folder / "memory.current").write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"anon {used - files}\ninactive_file {files}\n")

        return limit

    def test_no_group(self):
        assert available_bytes() == 8 * 10**9

    def test_group_without_a_limit(self, machine):
        machine("max", 10**9)
        assert available_bytes() == 8 * 10**9

    def test_group_with_a_lower_limit(self, machine):
        machine(str(3 * 10**9), 10**9)
        assert available_bytes() == 2 * 10**9

    def test_group_with_a_higher_limit(self, machine):
        machine(str(64 * 10**9), 10**9)
        assert available_bytes() == 8 * 10**9

    def test_files_that_were_read_can_be_dropped(self, machine):
        machine(str(4 * 10**9), 4 * 10**9 - 1, files=3 * 10**9)
        assert available_bytes() == 3 * 10**9 + 1

    @pytest.mark.parametrize("group", ["system.slice", "system.slice/outrider.service"])
    def test_a_service_has_a_limit_of_its_own(self, machine, group):
        machine("max", 10**9)
        machine(str(2 * 10**9), 10**9, group=group)
        assert available_bytes() == 10**9

    def test_limits_of_other_groups_are_not_ours(self, machine):
        machine("1000", 100, group="user.slice")
        assert available_bytes() == 8 * 10**9

    @pytest.mark.parametrize("line", ["", "12:memory:/x", "0::/", "0::/../.."])
    def test_no_group_of_our_own(self, machine, tmp_path, line):
        (tmp_path / "own").write_text(line)
        machine(str(3 * 10**9), 10**9)
        assert available_bytes() == 2 * 10**9

    def test_group_over_its_limit(self, machine):
        machine("1000", 2000)
        assert available_bytes() == 0


class TestCheckWeights:
    def test_fits(self, gguf, monkeypatch):
        monkeypatch.setattr(memory, "available_bytes", lambda: 10**9)
        check_weights(gguf, torch.float32)

    def test_room_is_left_beside_the_weights(self, gguf, monkeypatch):
        weights = facts(gguf).weights_bytes(torch.float32)
        monkeypatch.setattr(memory, "available_bytes", lambda: weights)
        with pytest.raises(NotEnoughMemoryError):
            check_weights(gguf, torch.float32)
        check_weights(gguf, torch.bfloat16)

    def test_message_says_what_is_needed_and_what_helps(self, gguf, monkeypatch):
        found = Facts("llama", 1_500_000_000, 1, "Q4_K")
        monkeypatch.setattr(memory, "facts", lambda located: found)
        monkeypatch.setattr(memory, "available_bytes", lambda: 2 * 10**9)
        with pytest.raises(NotEnoughMemoryError) as caught:
            check_weights(gguf, torch.bfloat16)
        text = str(caught.value)
        for words in ("'tiny'", "3.6 GB", "1,500 million", "bfloat16", "2.0 GB are free"):
            assert words in text
        assert "smaller model" in caught.value.hint
        assert "--dtype" in caught.value.hint
