"""LoRA adapters: merged as PEFT merges them, in both runtimes, and never mixed up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider import Engine
from outrider.cli.generate import app as generate
from outrider.core.proposal import Proposal
from outrider.errors import ModelFileError, ModelNotFoundError, UsageError
from outrider.models.adapter import Merging, adapter_digest, merge_into, read_adapter
from outrider.models.locate import locate
from outrider.models.native import load as native_load
from tests.small_models import new_module, save, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = some_tokens(20)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (32, 32), DOWN: (32, 48)}


def write_adapter(
    folder: Path, shapes: dict[str, tuple[int, int]] = SHAPES, *, seed: int = 0, **config: Any
) -> Path:
    """A folder as PEFT writes it, with a change of each matrix [outputs, inputs]."""
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [], "bias": "none"}
    settings |= config
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        rank = settings.get("rank_pattern", {}).get(name.rpartition(".")[2], settings["r"])
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            drawn = 0.3 * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = drawn
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def halves(folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    stored = load_file(folder / "adapter_model.safetensors")
    a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    return a, b


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def base(tmp_path) -> Path:
    return save(new_module("llama"), tmp_path / "base")


@pytest.fixture
def adapter(tmp_path) -> Path:
    return write_adapter(tmp_path / "adapter")


def logits(engine: Engine) -> torch.Tensor:
    cache = engine.model.new_cache(len(TEXT))
    return engine.model.score(cache, TEXT[:1], Proposal.chain(TEXT[1:]))


def load(base: Path, adapter: Path | None = None, **options: Any) -> Engine:
    options = {"drafter": "none", "dtype": "float32"} | options
    return Engine.load(str(base), adapter=adapter, **options)


def merged_by_hand(adapter: Path, scale: float) -> Any:
    """The base with W + scale · B A."""
    made = new_module("llama")
    for name in SHAPES:
        a, b = halves(adapter, name)
        made.get_submodule(name).weight.data += scale * (b @ a)
    return made


class TestMerging:
    @pytest.mark.parametrize(
        ("config", "scale"),
        [
            ({}, 8 / 4),
            ({"use_rslora": True}, 8 / math.sqrt(4)),
            ({"lora_alpha": 3}, 3 / 4),
        ],
        ids=str,
    )
    def test_both_runtimes_compute_what_was_merged_by_hand(self, base, tmp_path, config, scale):
        adapter = write_adapter(tmp_path / "adapter", **config)
        expected = merged_by_hand(adapter, scale)(torch.tensor([TEXT])).logits[0]
        with_hf, with_native = (load(base, adapter, runtime=r) for r in ("hf", "native"))
        assert with_native.model.kind == with_hf.model.kind == "float32"
        torch.testing.assert_close(logits(with_hf), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(logits(with_native), logits(with_hf), rtol=0, atol=1e-3)
        assert (logits(load(base, runtime="hf")) - expected).abs().max() > 0.1

    def test_on_the_way_to_another_device(self, base, adapter):
        located = replace(locate(str(base)), adapter=adapter)
        made, _, _ = native_load._on_device(located, torch.float32, "cpu")
        model = made(name="m", vocab_size=64)
        got = model.score(model.new_cache(30), TEXT[:1], Proposal.chain(TEXT[1:]))
        expected = merged_by_hand(adapter, 2)(torch.tensor([TEXT])).logits[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)

    def test_ranks_and_factors_of_some_modules(self, tmp_path):
        adapter = write_adapter(
            tmp_path / "adapter", rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.mlp.*": 6}
        )
        changes = read_adapter(adapter).changes
        assert changes[f"{Q}.weight"].a.shape == (2, 32)
        assert changes[f"{Q}.weight"].scale == 8 / 2
        assert changes[f"{DOWN}.weight"].scale == 6 / 4

    def test_in_the_dtype_of_the_model_computed_in_float32(self, adapter):
        made = new_module("llama").to(torch.bfloat16)
        before = made.get_submodule(Q).weight.clone()
        a, b = halves(adapter, Q)
        merge_into(made, read_adapter(adapter))
        after = made.get_submodule(Q).weight
        assert after.dtype == torch.bfloat16
        torch.testing.assert_close(after, (before.float() + 2 * (b @ a)).bfloat16(), rtol=0, atol=0)

    def test_matrices_that_are_stored_the_other_way_round(self, tmp_path):
        name = "transformer.h.0.attn.c_attn"
        adapter = write_adapter(tmp_path / "adapter", {name: (96, 32)}, fan_in_fan_out=True)
        made = new_module("gpt2")
        before = made.get_submodule(name).weight.clone()
        merge_into(made, read_adapter(adapter))
        a, b = halves(adapter, name)
        torch.testing.assert_close(made.get_submodule(name).weight, before + 2 * (b @ a).T)

    def test_nothing_merges_into_nothing(self):
        read = Merging({"w": torch.ones(2)}.get, None)
        assert read("w").tolist() == [1, 1]
        assert read("v") is None
        read.check_all_used()


class TestPackedCopies:
    def packed(self, base: Path, adapter: Path | None) -> Path:
        located = replace(locate(str(base)), adapter=adapter)
        key = native_load._adapter(located)
        return native_load._packed_folder(base, "float32", key)

    def test_each_adapter_has_its_own(self, base, adapter, tmp_path):
        other = write_adapter(tmp_path / "other", seed=1)
        places = {self.packed(base, one) for one in (None, adapter, other)}
        assert len(places) == 3
        engines = [load(base, one, runtime="native") for one in (None, adapter, other)]
        first = [logits(engine) for engine in engines]
        assert all(place.is_dir() for place in places), "loading one threw another's away"
        again = [logits(load(base, one, runtime="native")) for one in (None, adapter, other)]
        for one, two in zip(first, again, strict=True):
            assert torch.equal(one, two)
        assert not torch.equal(first[0], first[1])
        assert not torch.equal(first[1], first[2])

    def test_an_adapter_that_changed_gets_a_new_one_and_drops_the_old(self, base, adapter):
        load(base, adapter, runtime="native")
        old = self.packed(base, adapter)
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
        load(base, adapter, runtime="native")
        assert self.packed(base, adapter).is_dir()
        assert not old.exists()

    def test_without_an_adapter_the_name_is_as_it_was(self, base):
        assert native_load._packed_folder(base, "int8") == native_load._packed_folder(
            base, "int8", ""
        )


class TestDigest:
    def test_every_byte_counts(self, adapter, tmp_path):
        same = write_adapter(tmp_path / "same")
        assert adapter_digest(adapter) == adapter_digest(same)
        data = bytearray((same / "adapter_model.safetensors").read_bytes())
        data[len(data) * 2 // 3] ^= 1
        (same / "adapter_model.safetensors").write_bytes(data)
        assert adapter_digest(adapter) != adapter_digest(same)


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            ({"use_dora": True}, "DoRA"),
            ({"modules_to_save": ["lm_head"]}, "replaces whole modules"),
            ({"bias": "all"}, "changes biases"),
            ({"lora_bias": True}, "changes biases"),
            ({"peft_type": "IA3"}, "of the kind IA3, not LORA"),
            ({"init_lora_weights": "pissa_niter_4"}, "a base that pissa_niter_4 changed too"),
            ({"alora_invocation_tokens": [1]}, "a part of a text only"),
        ],
        ids=str,
    )
    def test_more_than_lora(self, tmp_path, config, reason):
        adapter = write_adapter(tmp_path / "adapter", **config)
        with pytest.raises(ModelFileError, match=r"adapter_config\.json.*" + reason):
            read_adapter(adapter)

    def test_a_tensor_that_is_no_half(self, adapter):
        file = adapter / "adapter_model.safetensors"
        name = f"base_model.model.{Q}.lora_magnitude_vector"
        save_file(load_file(file) | {name: torch.ones(32)}, file)
        with pytest.raises(ModelFileError, match="lora_magnitude_vector' is not a part of a LoRA"):
            read_adapter(adapter)

    def test_an_embedding(self, tmp_path, adapter):
        file = adapter / "adapter_model.safetensors"
        name = "base_model.model.model.embed_tokens.lora_embedding_A"
        save_file(load_file(file) | {name: torch.ones(4, 64)}, file)
        with pytest.raises(ModelFileError, match="lora_embedding_A' is not a part"):
            read_adapter(adapter)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda t: t | {f"base_model.model.{Q}.lora_B.weight": torch.ones(32, 5)}, "rank 4"),
            (lambda t: {k: v for k, v in t.items() if "lora_B" not in k}, "lacks lora_B"),
            (lambda t: {k: v * math.inf for k, v in t.items()}, "not finite"),
            (lambda t: {}, "holds no changes"),
        ],
        ids=["ranks", "a half", "infinite", "empty"],
    )
    def test_broken_halves(self, adapter, change, reason):
        file = adapter / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)
        with pytest.raises(ModelFileError, match=r"adapter_model\.safetensors.*" + reason):
            read_adapter(adapter)

    def test_missing_files(self, tmp_path, adapter):
        with pytest.raises(ModelNotFoundError, match="no adapter"):
            read_adapter(tmp_path / "nowhere")
        (adapter / "adapter_model.safetensors").rename(adapter / "kept")
        with pytest.raises(ModelFileError, match=r"no weights; adapter_model\.safetensors was"):
            read_adapter(adapter)
        (adapter / "adapter_model.bin").write_bytes(b"pickle")
        with pytest.raises(ModelFileError, match=r"only pickled weights \(adapter_model\.bin\)"):
            adapter_digest(adapter)
        (adapter / "adapter_config.json").unlink()
        with pytest.raises(ModelFileError, match=r"adapter_config\.json.*No such file"):
            read_adapter(adapter)

    def test_files_that_are_none(self, adapter):
        (adapter / "adapter_model.safetensors").write_bytes(b"no tensors at all")
        with pytest.raises(ModelFileError, match=r"adapter_model\.safetensors"):
            read_adapter(adapter)
        (adapter / "adapter_config.json").write_text("[]")
        with pytest.raises(ModelFileError, match="it holds no object"):
            read_adapter(adapter)

    @pytest.mark.parametrize("runtime", ["hf", "native"])
    @pytest.mark.parametrize(
        ("shapes", "reason"),
        [
            ({Q: (32, 16)}, rf"its change of '{Q}.weight' is \[32, 16\], the weight \[32, 32\]"),
            ({"model.layers.7.mlp.up_proj": (48, 32)}, r"layers\.7\.mlp\.up_proj\.weight', which"),
        ],
        ids=["shape", "absent"],
    )
    def test_another_base(self, base, tmp_path, runtime, shapes, reason):
        adapter = write_adapter(tmp_path / "adapter", shapes)
        with pytest.raises(ModelFileError, match=f"'{adapter}'.*another base.*{reason}"):
            load(base, adapter, runtime=runtime)

    @pytest.mark.parametrize("runtime", ["hf", "native"])
    def test_an_output_matrix_that_is_the_embedding_too(self, tmp_path, runtime):
        base = save(new_module("llama", tie_word_embeddings=True), tmp_path / "base")
        adapter = write_adapter(tmp_path / "adapter", {"lm_head": (64, 32)})
        with pytest.raises(ModelFileError, match=r"'lm_head\.weight'.*a part of another weight"):
            load(base, adapter, runtime=runtime)

    def test_a_toy(self, adapter):
        with pytest.raises(UsageError, match="A toy model takes no adapter"):
            Engine.load("toy", adapter=adapter)


def test_a_draft_model_does_not_get_the_adapter(base, adapter):
    engine = load(base, adapter, drafter=f"model:{base}")
    draft = Engine(engine.drafter.model, drafter="none")
    assert torch.equal(logits(draft), logits(load(base)))
    assert not torch.equal(logits(draft), logits(engine))


def test_command_line(base, adapter):
    def run(*more: str) -> list[int]:
        done = CliRunner().invoke(
            generate,
            ["w5 w9", "--target", str(base), "--json", "--raw", "--dtype", "float32", *more],
            catch_exceptions=False,
        )
        return json.loads(done.stdout)["token_ids"]

    expected = load(base, adapter).generate("w5 w9").token_ids
    assert run("--adapter", str(adapter)) == expected != run()
