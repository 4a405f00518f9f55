"""A target's fingerprint, and what becomes of a head that was made for another."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import Engine
from outrider.engine.matching import DraftMismatchWarning, Worth, measure
from outrider.errors import DraftMismatchError, ModelFileError
from outrider.models import fingerprint as module
from outrider.models.fingerprint import Fingerprint, differences, weights_digest
from outrider.models.heads.eagle import EagleConfig, EagleModule
from outrider.models.heads.folder import write_head
from outrider.models.tokenizer import HFTokenizer
from tests.small_models import new_module, new_tokenizer, save
from tests.unit.test_adapter import write_adapter
from tests.unit.test_memory import write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = EagleConfig(
    hidden=32, taps=(0, 1), heads=4, kv_heads=4, head_dim=8, intermediate=48,
    draft_vocab=48, vocab=64,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def base(tmp_path) -> Path:
    return save(new_module("llama"), tmp_path / "base")


def load(base: Path, **options: Any) -> Engine:
    return Engine.load(str(base), **({"drafter": "none"} | options))


def of(base: Path, **options: Any) -> Fingerprint:
    found = load(base, **options).fingerprint()
    assert found is not None
    return found


def make_head(folder: Path, target: Any = None, **about: Any) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = EagleModule(SIZES)
    said = target.to_dict() if isinstance(target, Fingerprint) else target
    write_head(head, folder, ({"target": said} if said else {}) | about)
    return folder


class TestParts:
    """Each part shows one thing and nothing else."""

    def test_the_same_model_in_another_folder_and_another_process(self, base, tmp_path):
        other = save(new_module("llama"), tmp_path / "other")
        assert of(base) == of(other) == of(base)  # the last from the packed copy

    def test_weights(self, base, tmp_path):
        other = save(new_module("llama", seed=1), tmp_path / "other")
        assert differences(of(base), of(other)) == ["other weights"]

    def test_chat_template(self, base):
        before = of(base)
        words = new_tokenizer()
        words.chat_template = "{{ messages }}"
        words.save_pretrained(base)
        assert differences(before, of(base)) == ["another chat template"]

    def test_tokenizer(self, base):
        before = of(base)
        words = json.loads((base / "tokenizer.json").read_text())
        words["normalizer"] = {"type": "Lowercase"}
        (base / "tokenizer.json").write_text(json.dumps(words))
        assert differences(before, of(base)) == ["another tokenizer"]

    def test_precision(self, base):
        found = {dtype: of(base, dtype=dtype) for dtype in ("int8", "bfloat16", "float32")}
        assert {dtype: one.precision for dtype, one in found.items()} == {d: d for d in found}
        assert differences(found["int8"], found["float32"]) == ["float32 in place of int8"]
        assert of(base, runtime="hf", dtype="float32") == found["float32"]

    def test_adapter(self, base, tmp_path):
        plain = of(base)
        one, other = (
            of(base, adapter=write_adapter(tmp_path / str(seed), seed=seed)) for seed in (0, 1)
        )
        assert plain.adapter == ""
        assert differences(plain, one) == ["an adapter where there was none"]
        assert differences(one, plain) == ["no adapter where there was one"]
        assert differences(one, other) == ["another adapter"]

    def test_what_has_no_files_has_none(self, base):
        assert Engine.load("toy").fingerprint() is None
        assert Engine(new_module("llama"), drafter="none").fingerprint() is None


class TestWeightsDigest:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        folder = tmp_path / "weights"
        folder.mkdir()
        self.write(folder, {"a": torch.arange(5000.0), "b": torch.ones(3, 2)})
        return folder

    def write(self, folder: Path, tensors: dict[str, torch.Tensor], **about: str) -> None:
        save_file(tensors, folder / "model.safetensors", metadata=about or None)

    def changed(self, folder: Path, **changes: torch.Tensor) -> str:
        self.write(folder, load_file(folder / "model.safetensors") | changes)
        return weights_digest(folder)

    def test_sees_both_ends_of_a_tensor_its_shape_and_its_name(self, folder):
        found = [weights_digest(folder)]
        middle, first, last = (torch.arange(5000.0) for _ in range(3))
        first[0], last[-1], middle[2500] = -1, -1, -1
        found += [self.changed(folder, a=first), self.changed(folder, a=last)]
        found += [self.changed(folder, b=torch.ones(2, 3)), self.changed(folder, c=torch.ones(1))]
        assert len(set(found)) == len(found)
        before = self.changed(folder, a=torch.arange(5000.0))
        assert self.changed(folder, a=middle) == before, "documented as what it cannot see"

    def test_does_not_see_how_tensors_are_stored(self, folder, tmp_path):
        before = weights_digest(folder)
        self.write(folder, load_file(folder / "model.safetensors"), format="pt")
        assert weights_digest(folder) == before
        split = tmp_path / "split"
        split.mkdir()
        for name, value in load_file(folder / "model.safetensors").items():
            save_file({name: value}, split / f"{name}.safetensors")
        index = {"weight_map": {name: f"{name}.safetensors" for name in "ab"}}
        (split / "model.safetensors.index.json").write_text(json.dumps(index))
        assert weights_digest(split) == before

    def test_a_gguf_file(self, tmp_path):
        one = write_gguf(tmp_path / "one.gguf").path
        assert one is not None
        before = weights_digest(one)
        data = bytearray(one.read_bytes())
        data[-1] ^= 1
        (tmp_path / "without-an-ending").write_bytes(data)
        assert weights_digest(tmp_path / "without-an-ending") != before

    def test_is_kept_until_the_files_change(self, folder, monkeypatch, cache):
        before = weights_digest(folder)
        (kept,) = (cache / "notes").iterdir()
        assert kept.read_text() == before
        with monkeypatch.context() as patch:
            patch.setattr(module, "_safetensors", lambda file: pytest.fail("read again"))
            assert weights_digest(folder) == before
        assert self.changed(folder, b=torch.zeros(3, 2)) != before

    def test_a_cache_that_cannot_be_written_to(self, folder, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
        assert weights_digest(folder) == weights_digest(folder)

    @pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}" * 1])
    def test_broken_files(self, folder, data):
        (folder / "model.safetensors").write_bytes(data)
        if data.endswith(b"{}"):
            assert len(weights_digest(folder)) == 16  # no tensors, and nothing wrong
            return
        with pytest.raises(ModelFileError, match="cannot be read"):
            weights_digest(folder)

    def test_missing_files(self, tmp_path):
        with pytest.raises(ModelFileError, match="cannot be read"):
            weights_digest(tmp_path)


class TestRecord:
    def test_there_and_back(self, base):
        found = of(base)
        assert Fingerprint.from_dict(json.loads(json.dumps(found.to_dict()))) == found
        assert all(len(value) == 16 for value in (found.weights, found.tokenizer))

    @pytest.mark.parametrize("values", [None, [], {}, {"weights": "1"}, "text"])
    def test_broken(self, values):
        with pytest.raises(ValueError, match="a fingerprint has weights, tokenizer"):
            Fingerprint.from_dict(values)

    def test_spelling_leaves_out_settings_of_the_moment(self):
        one, other = new_tokenizer(), new_tokenizer()
        other.backend_tokenizer.enable_truncation(5)
        other.backend_tokenizer.enable_padding()
        assert HFTokenizer(one).spelling == HFTokenizer(other).spelling
        assert HFTokenizer(new_tokenizer(60)).spelling != HFTokenizer(one).spelling


@pytest.mark.filterwarnings("error::outrider.engine.matching.DraftMismatchWarning")
class TestHeads:
    def test_one_that_matches_says_nothing(self, base, tmp_path):
        head = make_head(tmp_path / "head", of(base))
        for strict in (False, True):
            engine = load(base, drafter=f"eagle:{head}", strict=strict)
            assert engine.generate("w5 w9", max_tokens=8).trace.summary()["drafted_tokens"]

    @pytest.mark.parametrize("runtime", ["native", "hf"])
    def test_another_target_is_told_with_its_price(self, base, tmp_path, runtime):
        options = {"runtime": runtime, "dtype": "float32"}
        made_for = replace(of(base, **options), weights="1", chat_template="2")
        head = make_head(tmp_path / "head", made_for)
        with pytest.warns(DraftMismatchWarning) as told:
            engine = load(base, drafter=f"eagle:{head}", **options)
        (one,) = told
        text = str(one.message)
        assert f"'{head}' was made for another state" in text
        assert "other weights, another chat template." in text
        assert one.message.worth == measure(engine, engine.drafter)
        assert f"{one.message.worth} on a few short probes" in text
        plain = load(base, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # told once
            got = engine.generate("w5 w9", max_tokens=20).token_ids
        assert got == plain.generate("w5 w9", max_tokens=20).token_ids

    def test_an_adapter_is_another_target(self, base, tmp_path):
        head = make_head(tmp_path / "head", of(base))
        adapter = write_adapter(tmp_path / "adapter")
        with pytest.warns(DraftMismatchWarning, match="an adapter where there was none"):
            load(base, drafter=f"eagle:{head}", adapter=adapter)
        make_head(head, of(base, adapter=adapter))
        load(base, drafter=f"eagle:{head}", adapter=adapter, strict=True)

    def test_strict(self, base, tmp_path):
        head = make_head(tmp_path / "head", replace(of(base), tokenizer="1"))
        with pytest.raises(DraftMismatchError, match=f"'{head}' does not match.*: another token"):
            load(base, drafter=f"eagle:{head}", strict=True)
        engine = load(base, strict=True)
        with pytest.raises(DraftMismatchError):
            engine.generate("w5", drafter=f"ngram+eagle:{head}")

    def test_as_a_part_of_a_mixed_drafter(self, base, tmp_path):
        head = make_head(tmp_path / "head", replace(of(base), weights="1"))
        with pytest.warns(DraftMismatchWarning) as told:
            load(base, drafter=f"ngram+eagle:{head}")
        assert len(told) == 1

    def test_a_head_that_does_not_say(self, base, tmp_path, monkeypatch):
        head = make_head(tmp_path / "head")
        with pytest.raises(DraftMismatchError, match="does not say which target"):
            load(base, drafter=f"eagle:{head}", strict=True)
        monkeypatch.setattr(module, "weights_digest", lambda path: pytest.fail("not needed"))
        load(base, drafter=f"eagle:{head}")

    def test_a_target_that_is_not_known(self, base, tmp_path):
        head = make_head(tmp_path / "head", of(base))
        made = new_module("llama")
        Engine(made, drafter=f"eagle:{head}")
        with pytest.raises(DraftMismatchError, match="no files to know it by"):
            Engine(made, drafter=f"eagle:{head}", strict=True)

    def test_toys_are_not_checked(self):
        Engine.load("toy:vocab=4", drafter="eagle:toy", strict=True)

    @pytest.mark.parametrize("target", [{"weights": "1"}, "text"])
    def test_a_broken_record(self, base, tmp_path, target):
        head = make_head(tmp_path / "head", target)
        with pytest.raises(ModelFileError, match=f"'target' in .*'{head}' is broken"):
            load(base, drafter=f"eagle:{head}")


class TestWorth:
    def test_in_words(self):
        assert str(Worth(0.256, 1.5)) == "1.50 tokens per target call, 26% of drafts kept"
        assert str(Worth(None, 1.0)) == "1.00 tokens per target call, nothing was drafted"

    def test_where_the_probes_do_not_fit(self):
        engine = Engine.load("toy:vocab=4", drafter="ngram")  # it has few letters
        assert measure(engine, engine.drafter) is None

    def test_a_drafter_that_is_always_right(self, base):
        engine = load(base, drafter=f"model:{base}", dtype="float32")
        worth = measure(engine, engine.drafter)
        assert worth is not None
        assert worth.acceptance_rate == 1
        assert worth.tokens_per_target_call > 3
