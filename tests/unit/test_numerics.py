"""Invariant I2 on small models loaded so as to keep it: equal bits, whatever the block."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from transformers.activations import ACT2FN

from outrider import Engine
from outrider.core.proposal import Proposal
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.script import ScriptDrafter
from outrider.errors import NumericalError
from outrider.models import attention
from outrider.models.activations import gelu_tanh, quick_gelu, silu
from outrider.models.hf import HFModel
from outrider.models.numerics import check_numbers, row_step
from outrider.models.toy import ToyModel
from tests.small_models import VOCAB, garbage, new_module, partly_right, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 2, 3, 5, 8, 48)
PROMPT = some_tokens(20)
LONG = some_tokens(700, seed=2)


@cache
def loaded(dtype: torch.dtype, family: str = "llama") -> HFModel:
    made = HFModel(new_module(family).to(dtype), same_numbers=True)
    if made.row_step is None:
        pytest.skip("this machine's matrix kernels treat rows differently in every block")
    return made


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request) -> HFModel:
    return loaded(request.param)


def one_by_one(model: HFModel, tokens: list[int]) -> torch.Tensor:
    cache = model.new_cache(len(tokens))
    return torch.cat([model.score(cache, [token], Proposal()) for token in tokens])


class TestSameBits:
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_self_check(self, dtype, threads):
        torch.set_num_threads(threads)
        model = HFModel(new_module("llama").to(dtype), same_numbers=True)
        if model.row_step is None:
            pytest.skip("this machine's matrix kernels treat rows differently in every block")
        found = check_numbers(model, some_tokens(80), widths=(1, 2, 3, 5, 8, 9, 16, 32))
        assert found.same_bits, found
        assert found.largest_difference == 0.0
        assert found.comparisons == 2 * sum(w + 1 for w in (1, 2, 3, 5, 8, 9, 16, 32))

    @pytest.mark.parametrize("family", ["qwen2", "gpt2"])
    def test_other_dense_families(self, family):
        found = check_numbers(loaded(torch.float32, family), some_tokens(80))
        assert found.same_bits, found

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("act", ["silu", "swish", "gelu_pytorch_tanh", "quick_gelu"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_rows_whose_elements_do_not_fill_vectors(self, dtype, act, threads):
        """Of 20 elements a row, the last of a pass are left over from every processor's vectors;
        of 3000, they are at the borders of three threads too."""
        torch.set_num_threads(threads)
        for width in (20, 3000):
            module = new_module("llama", intermediate_size=width, hidden_act=act)
            model = HFModel(module.to(dtype), same_numbers=True)
            if model.row_step is None:
                pytest.skip("this machine's matrix kernels treat rows differently in every block")
            found = check_numbers(model, some_tokens(80), widths=(1, 2, 3, 8, 9, 16, 32))
            assert found.same_bits, (width, found)

    def test_prefill_equals_decoding(self, model):
        alone = one_by_one(model, LONG[:40])
        for split in (0, 1, 7, 16, 39):
            cache = model.new_cache(40)
            model.prefill(cache, LONG[:split])
            rows = model.score(cache, LONG[split:40], Proposal())
            assert torch.equal(rows, alone[-1:]), split

    def test_growing_over_a_step_of_capacity(self, model):
        """Keys are shown in steps of 512: the masked ones must weigh exactly nothing."""
        alone, block = model.new_cache(530), model.new_cache(530)
        model.prefill(alone, LONG[:505])
        model.prefill(block, LONG[:505])
        rows = model.score(block, LONG[505:506], Proposal.chain(LONG[506:530]))
        for token, row in zip(LONG[505:530], rows, strict=True):
            assert torch.equal(model.score(alone, [token], Proposal())[0], row)

    def test_stale_rows_weigh_nothing(self, model):
        cache = model.new_cache(60)
        model.prefill(cache, LONG[:20])
        expected = model.score(cache, LONG[20:21], Proposal())
        cache.rollback(20)
        model.score(cache, LONG[300:301], Proposal.chain(LONG[301:330]))
        cache.rollback(20)
        assert torch.equal(model.score(cache, LONG[20:21], Proposal()), expected)

    def test_the_check_can_fail(self):
        """A model whose numbers depend on the number of rows is told on."""
        model = ToyModel.random(VOCAB, seed=1)
        score = model.score

        def uneven(cache, tokens, proposal):
            return score(cache, tokens, proposal) + 1e-9 * len(proposal)

        model.score = uneven
        found = check_numbers(model, some_tokens(40))
        assert not found.same_bits
        assert found.largest_difference == pytest.approx(16e-9, rel=1e-3)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_logits_that_are_no_numbers_are_not_the_same(self, value):
        model = ToyModel.random(VOCAB, seed=1)
        score = model.score
        model.score = lambda *given: score(*given).index_fill(1, torch.tensor([3]), value)
        with pytest.raises(NumericalError, match="not finite"):
            check_numbers(model, some_tokens(40))

    def test_tokens_that_cannot_come_are_the_same(self):
        model = ToyModel.random(VOCAB, seed=1)
        score = model.score
        model.score = lambda *given: score(*given).index_fill(1, torch.tensor([3]), -torch.inf)
        found = check_numbers(model, some_tokens(40))
        assert (found.same_bits, found.largest_difference) == (True, 0.0)


class TestRowStep:
    def test_rows_alike_in_any_multiple(self):
        made = new_module("llama")
        step = row_step(made)
        assert step in (2, 4, 8, 16, None)

    def test_none_where_no_step_will_do(self):
        class Uneven(torch.nn.Linear):
            def forward(self, rows):
                return super().forward(rows) + 1e-3 * len(rows)

        assert row_step(torch.nn.Sequential(Uneven(8, 8))) is None

    def test_largest_step_that_any_layer_needs(self):
        class Eights(torch.nn.Linear):
            """Alike in multiples of eight rows only."""

            def forward(self, rows):
                return super().forward(rows) + (len(rows) % 8)

        even = torch.nn.Linear(16, 8)
        even.forward = lambda rows: rows[:, :8]
        assert row_step(torch.nn.Sequential(even)) == 2
        assert row_step(torch.nn.Sequential(even, Eights(8, 8))) == 8


class TestActivations:
    @pytest.mark.parametrize("threads", [1, 2, 3, 4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("function", [silu, gelu_tanh, quick_gelu])
    def test_a_row_is_the_same_in_any_company(self, function, dtype, threads):
        torch.set_num_threads(threads)
        for width in (20, 1000, 8960):
            rows = torch.randn(64, width, generator=torch.Generator().manual_seed(width)) * 3
            rows = rows.to(dtype)
            alone = torch.cat([function(row[None]) for row in rows])
            for count in (2, 3, 8, 16, 64):
                assert torch.equal(function(rows[:count]), alone[:count]), (width, count)

    @pytest.mark.parametrize(
        ("function", "name"),
        [(silu, "silu"), (gelu_tanh, "gelu_pytorch_tanh"), (quick_gelu, "quick_gelu")],
    )
    def test_it_is_the_function_of_transformers(self, function, name):
        x = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, 1e-30, -1e30, 1e30])])
        torch.testing.assert_close(function(x), ACT2FN[name](x), atol=1e-6, rtol=1e-5)
        half = x.bfloat16()
        torch.testing.assert_close(function(half), ACT2FN[name](half), atol=1e-3, rtol=2e-2)

    @pytest.mark.parametrize("function", [silu, gelu_tanh, quick_gelu])
    def test_a_draft_can_be_trained_through_it(self, function):
        x = torch.linspace(-5, 5, 40, dtype=torch.float32, requires_grad=True)
        function(x).sum().backward()
        slope = function(x + 1e-2) - function(x - 1e-2)
        torch.testing.assert_close(x.grad, slope / 2e-2, atol=1e-3, rtol=1e-3)

    def test_others_stay_as_they_are(self):
        module = new_module("llama", hidden_act="relu")
        HFModel(module, same_numbers=True)
        assert isinstance(module.model.layers[0].mlp.act_fn, torch.nn.ReLU)


class TestAttention:
    @pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1)])
    def test_equals_that_of_transformers(self, heads):
        queries, keys = heads
        changes = {"num_attention_heads": queries, "num_key_value_heads": keys}
        ours = HFModel(new_module("llama", **changes), same_numbers=True)
        theirs = HFModel(new_module("llama", **changes))
        assert ours.config._attn_implementation == attention.NAME
        assert theirs.config._attn_implementation == "sdpa"
        cache = ours.new_cache(40)
        ours.prefill(cache, LONG[:11])
        rows = ours.score(cache, LONG[11:12], Proposal.chain(LONG[12:21]))
        other = theirs.new_cache(40)
        expected = theirs.score(other, LONG[:12], Proposal.chain(LONG[12:21]))
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4)

    def test_a_layer_with_another_number_of_heads(self):
        """The mask is folded for the configuration's heads; a layer may have others."""
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, h, n, 8, generator=generator) for h, n in ((4, 3), (1, 5), (1, 5))
        )
        seen = torch.ones(3, 5).tril(2).bool()
        mask = torch.zeros(1, 1, 8, 5)
        mask[0, 0, :3].masked_fill_(~seen, -torch.inf)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k.expand(1, 4, -1, -1), v.expand(1, 4, -1, -1), attn_mask=seen
        ).transpose(1, 2)
        for folded in (1, 2, 4):
            out, _ = attention._rows_attention(
                torch.nn.Identity(), q, k, v, mask.repeat(1, 1, folded, 1)
            )
            torch.testing.assert_close(out, expected)

    def test_padding_rows_are_finite(self):
        model = HFModel(new_module("llama"), same_numbers=True)
        cache = model.new_cache(8)
        assert model.score(cache, LONG[:1], Proposal()).isfinite().all()
        assert all(layer.keys.isfinite().all() for layer in cache.layers.layers)

    @pytest.mark.parametrize("n", [0, 1, 511, 512, 513])
    def test_keys_are_shown_in_whole_steps(self, n):
        shown = attention.visible_keys(n)
        assert shown % attention.KEY_STEP == 0
        assert 0 <= shown - n < attention.KEY_STEP


@cache
def plain(dtype: torch.dtype, **request) -> list[int]:
    engine = Engine(loaded(dtype), drafter="none")
    return engine.generate(PROMPT, max_tokens=100, **request).token_ids


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["garbage", "partly", "right"])
def test_greedy_ids_equal_plain(model, kind, length):
    expected = plain(model.module.dtype)
    assert len(set(expected)) > 5  # a text that only repeats would show little
    drafter = {
        "garbage": ScriptDrafter(garbage),
        "partly": partly_right(expected, len(PROMPT)),
        "right": ScriptDrafter(expected),
    }[kind]
    engine = Engine(model, drafter=drafter, draft_length=length)
    output = engine.generate(PROMPT, max_tokens=100)
    assert output.token_ids == expected
    summary = output.trace.summary()
    assert summary["drafted_tokens"] > 0
    if kind == "right":
        assert summary["acceptance_rate"] == 1.0
    else:
        assert summary["rejected_rounds"] > 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_coupled_sampling_gives_the_same_ids_for_the_same_seed(model, seed):
    request = {"temperature": 0.9, "top_p": 0.95, "seed": seed}
    expected = plain(model.module.dtype, **request)
    assert len(set(expected)) > 20
    near = copy.deepcopy(model.module)
    for weight in near.parameters():
        weight.data.mul_(1.02)
    for drafter in (
        NgramDrafter(3, 1),
        ModelDrafter(HFModel(near)),
        partly_right(expected, len(PROMPT)),
        ScriptDrafter(garbage),
    ):
        output = Engine(model, drafter=drafter).generate(PROMPT, max_tokens=100, **request)
        assert output.token_ids == expected, drafter.name
        assert output.trace.summary()["drafted_tokens"] > 0
