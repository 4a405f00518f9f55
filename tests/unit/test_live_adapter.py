"""Adapters beside the weights: PEFT's formula, the same bits in blocks, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from outrider import Engine
from outrider.cli.generate import app as generate
from outrider.core.proposal import Proposal
from outrider.engine import engine as engine_module
from outrider.engine.matching import DraftMismatchWarning
from outrider.errors import (
    DraftMismatchError,
    ModelFileError,
    ModelNotFoundError,
    UnknownNameError,
    UsageError,
)
from outrider.models import hf
from outrider.models.adapter import LiveAdapter, merge_into, read_adapter
from outrider.models.heads.folder import write_head
from outrider.models.hf import HFModel
from outrider.models.numerics import check_numbers
from outrider.protocols import AdaptableModel
from tests.small_models import new_module, new_tokenizer, partly_right, save, some_tokens
from tests.unit.test_adapter import DOWN, SHAPES, Q, halves, write_adapter
from tests.unit.test_eagle import head_module

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = some_tokens(40)
CONV1D = {"transformer.h.0.attn.c_attn": (96, 32), "transformer.h.1.mlp.c_proj": (32, 128)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path) -> Path:
    words = new_tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    folder = save(new_module("llama"), tmp_path / "base")
    words.save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(tmp_path) -> Path:
    return write_adapter(tmp_path / "adapter")


@pytest.fixture
def other(tmp_path) -> Path:
    return write_adapter(tmp_path / "other", seed=1)


def load(base: Path, adapter: Path | None = None, **options: Any) -> Engine:
    options = {"drafter": "none", "dtype": "float32", "adapter_mode": "live"} | options
    return Engine.load(str(base), adapter=adapter, **options)


def logits(model: Any) -> torch.Tensor:
    return model.score(model.new_cache(len(TEXT)), TEXT[:1], Proposal.chain(TEXT[1:]))


class ByHand(nn.Module):
    """What PEFT's ``lora.Linear.forward`` computes, at inference."""

    def __init__(self, base: nn.Module, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.base, self.a, self.b, self.scaling = base, a, b, scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        x = x.to(self.a.dtype)
        return (result + ((x @ self.a.T) @ self.b.T) * self.scaling).to(result.dtype)


class TestFormula:
    @pytest.mark.parametrize(
        ("family", "shapes"), [("llama", SHAPES), ("gpt2", CONV1D)], ids=["linear", "conv1d"]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_it_is_peft_s(self, tmp_path, family, shapes, dtype):
        adapter = write_adapter(tmp_path / "adapter", shapes, lora_alpha=6)
        found = logits(HFModel(new_module(family).to(dtype)).with_adapter(read_adapter(adapter)))
        made = new_module(family).to(dtype)
        for name in shapes:
            above, _, last = name.rpartition(".")
            parent = made.get_submodule(above)
            setattr(parent, last, ByHand(getattr(parent, last), *halves(adapter, name), 6 / 4))
        expected = logits(HFModel(made))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert (found - logits(HFModel(new_module(family).to(dtype)))).abs().max() > 0.1

    @pytest.mark.parametrize(
        ("family", "shapes"), [("llama", SHAPES), ("gpt2", CONV1D)], ids=["linear", "conv1d"]
    )
    @pytest.mark.parametrize("config", [{}, {"use_rslora": True}], ids=str)
    def test_it_is_the_merged_one_to_rounding(self, tmp_path, family, shapes, config):
        adapter = read_adapter(write_adapter(tmp_path / "adapter", shapes, **config))
        merged = new_module(family)
        merge_into(merged, adapter)
        found = logits(HFModel(new_module(family)).with_adapter(adapter))
        torch.testing.assert_close(found, logits(HFModel(merged)), atol=1e-4, rtol=1e-4)

    def test_an_output_matrix_that_is_the_embedding_too(self, tmp_path):
        """The former alone is changed, which merging could not do."""
        adapter = write_adapter(tmp_path / "adapter", {"lm_head": (64, 32)})
        made = new_module("llama", tie_word_embeddings=True)
        found = logits(HFModel(made).with_adapter(read_adapter(adapter)))
        a, b = halves(adapter, "lm_head")
        with torch.no_grad():
            last = made.model(torch.tensor([TEXT])).last_hidden_state[0]
            expected = last @ (made.lm_head.weight + 2 * (b @ a)).T
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    def test_weights_and_the_model_without_it_stay_as_they_are(self, adapter):
        module = new_module("llama")
        plain = HFModel(module)
        before, weights = logits(plain), {k: v.clone() for k, v in module.state_dict().items()}
        live = plain.with_adapter(read_adapter(adapter))
        changed = logits(live)
        assert torch.equal(logits(plain), before)
        assert torch.equal(logits(live), changed)
        assert torch.equal(logits(live.with_adapter(None)), before)
        assert plain.adapter is None is live.with_adapter(None).adapter
        assert live.adapter is not None
        assert live.adapter.folder == adapter
        assert module.state_dict().keys() == weights.keys()
        assert all(torch.equal(module.state_dict()[k], v) for k, v in weights.items())

    def test_a_pass_that_fails_leaves_no_hook_behind(self, adapter):
        module = new_module("llama")
        live = LiveAdapter(module, read_adapter(adapter))

        def broken_pass() -> None:
            with live.beside():
                assert any(part._forward_hooks for part in module.modules())
                raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            broken_pass()
        assert not any(part._forward_hooks for part in module.modules())

    @pytest.mark.parametrize(
        ("shapes", "reason"),
        [
            ({Q: (32, 16)}, rf"its change of '{Q}.weight' is \[32, 16\], the weight \[32, 32\]"),
            ({"model.layers.7.mlp.up_proj": (48, 32)}, r"layers\.7\.mlp\.up_proj\.weight', which"),
            ({"model.embed_tokens": (64, 32)}, r"embed_tokens\.weight', which"),
            ({"model.norm": (32, 1)}, r"norm\.weight', which"),
        ],
        ids=["shape", "absent", "embedding", "norm"],
    )
    def test_another_base(self, base, tmp_path, shapes, reason):
        adapter = write_adapter(tmp_path / "adapter", shapes)
        with pytest.raises(ModelFileError, match=f"'{adapter}'.*another base.*{reason}"):
            load(base, adapter)


class TestNumbers:
    def test_the_same_bits_in_any_block(self, adapter):
        plain = HFModel(new_module("llama"), same_numbers=True)
        live = plain.with_adapter(read_adapter(adapter))
        if plain.row_step is None:
            pytest.skip("this machine's kernels do not keep I2 for the base either")
        found = check_numbers(live, TEXT)
        assert found.same_bits is (live.row_step is not None)
        assert live.row_step is not None, "rank 4 needs a step of more than 16 rows here"

    def test_the_self_check_sees_what_an_adapter_does(self, adapter):
        """A second part that looks at its company is found out."""
        live = HFModel(new_module("llama"), same_numbers=True).with_adapter(read_adapter(adapter))

        def with_company(_layer, inputs, out):
            return out + inputs[0].mean(1, keepdim=True) @ torch.ones(32, out.shape[-1])

        live._live._hooks = [(live._live._hooks[0][0], with_company)]
        found = check_numbers(live, TEXT)
        assert not found.same_bits
        assert found.largest_difference > 1e-3

    def test_passes_are_padded_to_the_coarser_step(self, adapter, monkeypatch):
        plain = HFModel(new_module("llama"), same_numbers=True)
        read = read_adapter(adapter)
        plain._steps = (4,)
        for found, expected in ((2, 4), (8, 8), (None, None)):
            monkeypatch.setattr(hf, "row_step", lambda halves, found=found: found)
            live = plain.with_adapter(read)
            assert live.row_step == expected
            assert live.with_adapter(None).row_step == 4
        plain._steps = (None,)
        monkeypatch.setattr(hf, "row_step", lambda halves: 2)
        assert plain.with_adapter(read).row_step is None

    def test_the_probe_is_fed_every_half(self, adapter, monkeypatch):
        probed = []
        monkeypatch.setattr(hf, "row_step", lambda halves: probed.append(halves) or 2)
        plain = HFModel(new_module("llama"), same_numbers=True)
        plain.with_adapter(read_adapter(adapter))
        shapes = [tuple(half.weight.shape) for half in probed[-1]]
        assert shapes == [(4, 32), (32, 4), (4, 48), (32, 4)]


DRAFTERS = ["ngram", "early_exit:1", "model"]


class TestEngine:
    @pytest.mark.parametrize("drafter", DRAFTERS)
    @pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 4}], ids=str)
    def test_with_speculation_as_without(self, base, adapter, drafter, options):
        engine = load(base, adapter, drafter=f"model:{base}" if drafter == "model" else drafter)
        prompt = [*TEXT, *TEXT[:20]]
        plain = engine.generate(prompt, max_tokens=40, plain=True, ignore_eos=True, **options)
        ours = engine.generate(prompt, max_tokens=40, draft_length=4, ignore_eos=True, **options)
        assert ours.token_ids == plain.token_ids
        assert ours.trace.summary()["drafted_tokens"] > 0
        bare = load(base).generate(prompt, max_tokens=40, ignore_eos=True, **options)
        assert bare.token_ids != plain.token_ids

    def test_swapping(self, base, adapter, other):
        engine = load(base)
        assert isinstance(engine.model, AdaptableModel)
        assert engine.model.kind == "float32"
        module = engine.model.module
        expected = {one: logits(load(base, one).model) for one in (None, adapter, other)}
        prints = {
            one: load(base, one, adapter_mode="merged", runtime="hf").fingerprint()
            for one in expected
        }
        for one in (adapter, other, None, str(other), adapter):
            engine.use_adapter(one)
            path = None if one is None else Path(one)
            assert torch.equal(logits(engine.model), expected[path])
            assert engine.fingerprint() == prints[path]
            assert engine.located.adapter == path
            assert engine.model.module is module
        assert len({one.adapter for one in prints.values()}) == 3

    def test_a_transformers_model_takes_one_too(self, adapter):
        engine = Engine(new_module("llama"), drafter="none")
        before = engine.generate(TEXT, max_tokens=20).token_ids
        engine.use_adapter(adapter)
        assert engine.generate(TEXT, max_tokens=20).token_ids != before
        assert engine.fingerprint() is None
        engine.use_adapter(None)
        assert engine.generate(TEXT, max_tokens=20).token_ids == before

    @pytest.mark.parametrize("drafter", DRAFTERS)
    def test_a_conversation_uses_no_cache_of_another_adapter(self, base, adapter, drafter):
        drafter = f"model:{base}" if drafter == "model" else drafter
        engine = load(base, adapter, drafter=drafter)
        talk = engine.conversation()

        def say(talk: Any, text: str) -> Any:
            for _ in talk.say(text, max_tokens=8, draft_length=3, ignore_eos=True):
                pass
            return talk.last

        say(talk, "w5 w9 w11 w5 w9")
        assert say(talk, "w12 w8").trace.cached_tokens > 0
        engine.use_adapter(None)
        messages = list(talk.messages)
        last = say(talk, "w7 w9")
        assert last.trace.cached_tokens == 0
        fresh = load(base, drafter="none").conversation()
        fresh.messages = messages
        assert last.token_ids == say(fresh, "w7 w9").token_ids
        assert say(talk, "w3").trace.cached_tokens > 0

    def test_a_request_goes_on_as_it_began(self, base, adapter, other):
        engine = load(base, adapter, drafter="ngram")
        prompt = [*TEXT, *TEXT[:20]]
        whole = engine.generate(prompt, max_tokens=30, ignore_eos=True)
        begun = engine.stream(prompt, max_tokens=30, ignore_eos=True, draft_length=3)
        for _ in range(7):
            next(begun)
        engine.use_adapter(other)
        swapped = engine.generate(prompt, max_tokens=30, ignore_eos=True)
        assert begun.output.token_ids == whole.token_ids != swapped.token_ids
        assert swapped.token_ids == load(base, other).generate(
            prompt, max_tokens=30, ignore_eos=True
        ).token_ids  # fmt: skip

    def test_a_draft_model_is_not_loaded_again(self, base, adapter):
        engine = load(base, drafter=f"model:{base}")
        draft = engine.drafter.model
        engine.use_adapter(adapter)
        assert engine.drafter.model is draft
        assert not torch.equal(logits(draft), logits(engine.model))

    def test_a_profile_is_looked_up_for_each(self, base, adapter, monkeypatch):
        asked = []
        monkeypatch.setattr(engine_module, "has_profiles", lambda: True)
        monkeypatch.setattr(
            engine_module, "find_profile", lambda found, device: asked.append(found.adapter)
        )
        engine = load(base, drafter="auto")
        for one in (None, adapter):
            engine.use_adapter(one)
            engine.generate(TEXT, max_tokens=2)
            engine.generate(TEXT, max_tokens=2)
        assert asked == ["", engine.fingerprint().adapter]

    def test_a_head_follows_and_is_told(self, base, adapter, tmp_path):
        plain = load(base)
        write_head(head_module(), tmp_path / "head", {"target": plain.fingerprint().to_dict()})
        engine = load(base, drafter=f"eagle:{tmp_path / 'head'}", strict=True)
        before, drafter = engine.model, engine.drafter
        with pytest.raises(DraftMismatchError, match="an adapter where there was none"):
            engine.use_adapter(adapter)
        assert engine.model is before
        assert engine.drafter is drafter
        assert engine.fingerprint() == plain.fingerprint()
        engine.strict = False
        with pytest.warns(DraftMismatchWarning, match="an adapter where there was none"):
            engine.use_adapter(adapter)
        plain.use_adapter(adapter)
        asked = {"max_tokens": 30, "ignore_eos": True}
        ours = engine.generate(TEXT, draft_length=3, **asked)
        assert ours.token_ids == plain.generate(TEXT, **asked).token_ids
        assert ours.trace.summary()["drafted_tokens"] > 0

    def test_where_it_cannot_be(self, base, adapter, other, tmp_path):
        native = Engine.load(str(base), drafter="none", dtype="float32", runtime="native")
        with pytest.raises(UsageError, match=r"no live adapters.*--adapter-mode live"):
            native.use_adapter(adapter)
        with pytest.raises(UsageError, match="no live adapters"):
            Engine.load("toy").use_adapter(adapter)
        merged = load(base, adapter, adapter_mode="merged", runtime="hf")
        for one in (other, None):
            with pytest.raises(UsageError, match=f"'{adapter}' is merged into the weights"):
                merged.use_adapter(one)
        for runtime in ("native", "toy"):
            with pytest.raises(UsageError, match=f"'{runtime}' has no live adapters"):
                load(base, adapter, runtime=runtime)
        with pytest.raises(UnknownNameError, match="Did you mean 'live'"):
            load(base, adapter, adapter_mode="life")
        live = load(base, adapter)
        before = logits(live.model)
        with pytest.raises(ModelNotFoundError, match="no adapter"):
            live.use_adapter(tmp_path / "nowhere")
        wide = write_adapter(tmp_path / "wide", {DOWN: (32, 7)})
        with pytest.raises(ModelFileError, match="another base"):
            live.use_adapter(wide)
        assert torch.equal(logits(live.model), before)
        assert live.located.adapter == adapter

    def test_auto_goes_to_the_runtime_that_has_it(self, base, adapter):
        assert isinstance(load(base, adapter).model, HFModel)
        assert isinstance(load(base).model, HFModel)
        assert not isinstance(load(base, adapter, adapter_mode="merged").model, HFModel)


class TestCommandLine:
    def test_generate(self, base, adapter):
        def run(*more: str) -> list[int]:
            done = CliRunner().invoke(
                generate,
                ["w5 w9", "--target", str(base), "--json", "--raw", "--dtype", "float32",
                 "--adapter", str(adapter), *more],
                catch_exceptions=False,
            )  # fmt: skip
            return json.loads(done.stdout)["token_ids"]

        expected = load(base, adapter).generate("w5 w9").token_ids
        assert run("--adapter-mode", "live") == expected
        with pytest.raises(UsageError, match="has no live adapters"):
            run("--adapter-mode", "live", "--runtime", "native")

    def test_models_info(self, base, adapter):
        from outrider.cli.models import app

        def run(*more: str) -> dict[str, Any]:
            arguments = ["info", str(base), "--json", "--dtype", "float32", *more]
            done = CliRunner().invoke(app, arguments, catch_exceptions=False)
            return json.loads(done.stdout)

        assert "adapter" not in run("--no-numbers")
        for mode, runtime in (("merged", "native"), ("live", "hf")):
            found = run("--adapter", str(adapter), "--adapter-mode", mode)
            assert (found["adapter"], found["adapter_mode"]) == (str(adapter), mode)
            assert found["adapter_digest"] == load(base, adapter).fingerprint().adapter
            assert found["runtime"] == runtime
            assert found["rollback"] == "length"
            assert isinstance(found["same_numbers_in_any_block"], bool)
        # The whole model is read with it, so one of another base is found out.
        with pytest.raises(ModelNotFoundError, match="no adapter"):
            run("--adapter", "nowhere")

    def test_drafts_check_and_exits(self, base, adapter, tmp_path):
        from outrider.cli.drafts import app

        engine = load(base, adapter)
        write_head(head_module(), tmp_path / "head", {"target": engine.fingerprint().to_dict()})
        rest = ["--adapter", str(adapter), "--adapter-mode", "live", "--dtype", "float32", "--json"]
        arguments = ["check", str(tmp_path / "head"), "--target", str(base), *rest]
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0
        assert json.loads(done.stdout)["matches"]
        (tmp_path / "prompts.txt").write_text("w5 w9 w12\n")
        asked = ["exits", str(base), "--prompts", str(tmp_path / "prompts.txt"), "--max-tokens",
                 "24", "--exits", "1", "--no-subsets", "--longest", "2"]  # fmt: skip
        rates = {}
        for one in (None, adapter):
            more = rest if one else rest[2:]
            done = CliRunner().invoke(app, [*asked, *more], catch_exceptions=False)
            assert done.exit_code == 0, done.output
            rates[one] = json.loads(done.stdout)["exits"][0]["acceptance_rate"]
        assert rates[None] != rates[adapter]


@pytest.mark.parametrize("mode", ["merged", "live"])
@pytest.mark.parametrize("drafter", ["eagle", "medusa", "script"])
@pytest.mark.parametrize("runtime", ["hf", "native"])
def test_an_adapter_changes_the_books_nowhere(base, adapter, tmp_path, mode, drafter, runtime):
    """Exact with any draft, and each token of the output is in the trace once."""
    if (mode, runtime) == ("live", "native"):
        pytest.skip("the native runtime merges")
    engine = load(base, adapter, adapter_mode=mode, runtime=runtime)
    prompt, tokens = TEXT[:20], 40
    request = {"max_tokens": tokens, "ignore_eos": True}
    draft: Any
    for options in ({}, {"temperature": 0.9, "seed": 11}, {"temperature": 0.9, "rule": "block"}):
        plain = engine.generate(prompt, **request, **options)
        if drafter == "script":
            draft = partly_right(plain.token_ids, len(prompt))
        else:
            from tests.unit.test_medusa import heads_module

            module = head_module() if drafter == "eagle" else heads_module()
            write_head(module, tmp_path / drafter, {})
            draft = f"{drafter}:{tmp_path / drafter}#chain"
        ours = engine.generate(prompt, drafter=draft, draft_length=4, **request, **options)
        if options.get("rule") != "block":
            assert ours.token_ids == plain.token_ids
        summary, rounds = ours.trace.summary(), ours.trace.rounds
        assert summary["emitted_tokens"] == len(ours.token_ids) == len(ours.origins) == tokens
        assert summary["drafted_tokens"] == sum(one.drafted for one in rounds) > 0
        assert summary["accepted_tokens"] == ours.origins.count("accepted")
        assert all(0 <= one.accepted <= one.drafted for one in rounds)
        assert sum(one.corrections for one in rounds) == ours.origins.count("correction")
        others = ours.origins.count("bonus") + ours.origins.count("plain")
        assert sum(one.bonuses for one in rounds) == others
        assert summary["target_calls"] == len(rounds)
        assert summary["acceptance_rate"] == pytest.approx(
            summary["accepted_tokens"] / summary["drafted_tokens"]
        )
        if drafter == "script" and not options:
            # The same adapter the other way has the same books, round by round.
            again = load(base, adapter, adapter_mode="merged", runtime="hf").generate(
                prompt, drafter=draft, draft_length=4, **request
            )
            books = [[(r.drafted, r.accepted) for r in t.rounds] for t in (ours.trace, again.trace)]
            assert books[0] == books[1]
