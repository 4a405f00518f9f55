"""Each processor against transformers' own, alone and in chains; and what a law refuses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import GenerationMixin

from outrider.core.processors import Context, Law, Sampling
from outrider.errors import NumericalError, SamplingError, UsageError

PROMPT = 3
END = frozenset({1, 4})


@dataclass(frozen=True)
class Case:
    """One position: its scores, and the tokens before it, three of which are the prompt."""

    scores: torch.Tensor = field(repr=False)
    tokens: tuple[int, ...]
    note: str = ""

    @property
    def context(self) -> Context:
        return Context(list(self.tokens), PROMPT)


@st.composite
def cases(draw, most: int = 60) -> Case:
    size = draw(st.integers(6, most))
    seed = draw(st.integers(0, 2**32 - 1))
    spread = draw(st.sampled_from([0.1, 1.0, 3.0, 10.0]))
    scores = spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    tokens = draw(st.lists(st.integers(0, size - 1), min_size=PROMPT, max_size=12))
    return Case(scores, tuple(tokens), f"seed {seed}, spread {spread}, size {size}")


def ours(sampling: Sampling, case: Case) -> torch.Tensor:
    scores = case.scores
    for processor in sampling.processors(END, len(case.scores)):
        scores = processor(case.context, scores)
    return scores


def theirs(processors: Sequence[Any], case: Case) -> torch.Tensor:
    ids = torch.tensor([case.tokens])
    return LogitsProcessorList(processors)(ids, case.scores[None].clone())[0]


def transformers_list(sampling: Sampling) -> list[Any]:
    """The same values as transformers' own classes, in the order in which it applies them."""
    out: list[Any] = []
    if sampling.logit_bias:
        bias = {(token,): float(value) for token, value in sampling.logit_bias.items()}
        out.append(SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty != 1.0:
        out.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.min_tokens:
        out.append(MinNewTokensLengthLogitsProcessor(PROMPT, sampling.min_tokens, sorted(END)))
    if sampling.temperature != 1.0:
        out.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        out.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        out.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        out.append(MinPLogitsWarper(sampling.min_p))
    return out


def clear_of_borders(sampling: Sampling, case: Case) -> bool:
    """Whether no token lies within rounding of a border, where float32 may fall on either side."""
    before = Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
    )
    scores = theirs(transformers_list(before), case)
    p = torch.softmax(scores.double(), 0).sort(descending=True).values
    mass = p.cumsum(0)
    near_p = (mass - sampling.top_p).abs() < 1e-5
    near_min = (p / p[0] - sampling.min_p).abs() < 1e-5 * sampling.min_p
    return not (sampling.top_p < 1 and bool(near_p.any())) and not bool(near_min.any())


def same(sampling: Sampling, case: Case) -> None:
    mine, wanted = ours(sampling, case), theirs(transformers_list(sampling), case)
    assert torch.isneginf(mine).tolist() == torch.isneginf(wanted).tolist()
    torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


# --- one at a time -------------------------------------------------------------------------------


@given(cases(), st.floats(0.05, 5.0))
def test_temperature(case, value):
    same(Sampling(temperature=value), case)


@given(cases(), st.integers(1, 80))
def test_top_k(case, value):
    same(Sampling(temperature=1.0, top_k=value), case)


@given(cases(), st.floats(0.01, 0.999))
def test_top_p(case, value):
    sampling = Sampling(temperature=1.0, top_p=value)
    assume(clear_of_borders(sampling, case))
    same(sampling, case)


@given(cases(), st.floats(1e-6, 1.0))
def test_min_p(case, value):
    sampling = Sampling(temperature=1.0, min_p=value)
    assume(value == 1.0 or clear_of_borders(sampling, case))
    same(sampling, case)


@given(cases(), st.floats(0.1, 5.0))
def test_repetition_penalty(case, value):
    same(Sampling(temperature=1.0, repetition_penalty=value), case)


@given(cases(), st.dictionaries(st.integers(0, 5), st.floats(-50, 50).filter(bool), min_size=1))
def test_logit_bias(case, bias):
    same(Sampling(temperature=1.0, logit_bias=bias), case)


@given(cases(), st.integers(1, 12))
def test_min_tokens(case, least):
    sampling = Sampling(temperature=1.0, min_tokens=least)
    same(sampling, case)
    held = torch.isneginf(ours(sampling, case)).nonzero().flatten().tolist()
    assert held == (sorted(END) if len(case.tokens) - PROMPT < least else [])


@given(cases(), st.floats(-2.0, 2.0), st.floats(-2.0, 2.0))
def test_presence_and_frequency_count_generated_tokens_only(case, presence, frequency):
    """OpenAI's penalty: score − count · frequency − (count > 0) · presence."""
    sampling = Sampling(temperature=1.0, presence_penalty=presence, frequency_penalty=frequency)
    wanted = case.scores.double().clone()
    for token, count in Counter(case.tokens[PROMPT:]).items():
        wanted[token] -= presence + frequency * count
    torch.testing.assert_close(ours(sampling, case).double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_prompt_counts_for_repetition_but_not_for_presence():
    case = Case(torch.ones(6), (0, 1, 2))
    assert ours(Sampling(repetition_penalty=2.0), case).tolist() == [0.5, 0.5, 0.5, 1, 1, 1]
    assert ours(Sampling(presence_penalty=1.0, frequency_penalty=1.0), case).tolist() == [1.0] * 6
    case = Case(torch.tensor([1.0, -1.0, 0.0, 1, 1, 1]), (0, 1, 2, 3, 3, 0))
    assert ours(Sampling(repetition_penalty=2.0), case).tolist() == [0.5, -2.0, 0.0, 0.5, 1, 1]
    penalised = ours(Sampling(presence_penalty=1.0, frequency_penalty=0.5), case)
    assert penalised.tolist() == [-0.5, -1.0, 0.0, -1.0, 1, 1]


# --- together ------------------------------------------------------------------------------------

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 20]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.sampled_from([None, {0: 2.0}, {2: -100.0, 5: 1.5}]),
    min_tokens=st.sampled_from([0, 2, 5]),
)


@settings(max_examples=400)
@given(cases(), samplings)
def test_chains(case, sampling):
    assume(clear_of_borders(sampling, case))
    same(sampling, case)
    law = sampling.law(END, len(case.scores))(case.context, case.scores)
    wanted = torch.softmax(theirs(transformers_list(sampling), case).double(), 0)
    np.testing.assert_allclose(law.to_dense(), wanted.numpy(), atol=1e-6)


def test_the_order_is_the_one_that_transformers_builds():
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.3,
        sequence_bias=[[[1], 2.0]],
        min_new_tokens=2,
        eos_token_id=[1, 4],
    )
    config._eos_token_tensor = torch.tensor([1, 4])

    class Mixed(GenerationMixin):
        class config:  # noqa: N801
            is_encoder_decoder = False

        generation_config = config

    built = Mixed()._get_logits_processor(config, input_ids_seq_length=PROMPT, device="cpu")
    mine = transformers_list(Sampling(0.7, 5, 0.9, 0.1, 1.3, logit_bias={1: 2.0}, min_tokens=2))
    wanted = [type(p) for p in built]
    assert [type(p) for p in mine] == wanted


@given(cases(), samplings, st.floats(-1, 1), st.floats(-1, 1))
def test_processors_are_functions(case, sampling, presence, frequency):
    """The input is never written to, and a second call, on the same or other things, agrees."""
    values = sampling.to_dict() | {"presence_penalty": presence, "frequency_penalty": frequency}
    chain = Sampling(**values).processors(END, len(case.scores))
    other = Case(torch.zeros(len(case.scores)), (*case.tokens, 0, 0, 2))
    for processor in chain:
        before, tokens = case.scores.clone(), case.tokens
        first = processor(case.context, case.scores).clone()
        processor(other.context, other.scores)
        again = processor(case.context, case.scores)
        assert torch.equal(first, again)
        assert torch.equal(case.scores, before)
        assert not other.scores.any()
        assert case.tokens == tokens


def test_values_that_change_nothing_add_no_processor():
    assert Sampling(temperature=1.0).processors(END, 10) == []
    assert Sampling(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5).processors(END, 10) == []
    assert Sampling(temperature=1.0, min_tokens=3).processors(frozenset(), 10) == []


def test_end_tokens_beyond_the_vocabulary_are_no_trouble():
    law = Sampling(temperature=1.0, min_tokens=1).law(frozenset({2, 900}), 4)
    assert law(Context([0], 1), torch.zeros(4)).ids.tolist() == [0, 1, 3]


# --- top-p on a large vocabulary -----------------------------------------------------------------


@pytest.mark.parametrize("p", [0.001, 0.5, 0.9])
def test_top_p_on_a_flat_vocabulary_needs_the_full_sort(p):
    size = 50_000
    ramp = torch.linspace(0.001, 0.0, size)[torch.randperm(size, generator=torch.Generator())]
    case = Case(ramp, (0, 0, 0))
    law = Sampling(temperature=1.0, top_p=p).law(frozenset(), size)(case.context, case.scores)
    probs = torch.softmax(case.scores.double(), 0)
    order = probs.argsort(descending=True)
    kept = int((probs[order].cumsum(0) < p).sum()) + 1
    if p > 0.1:
        assert kept > 1024, "the shape does not fall through to the full sort"
    assert abs(len(law.ids) - kept) <= 1  # a sum in another order may move the border by one
    assert law.probs.min() >= 0
    assert set(law.ids.tolist()) <= set(order[: kept + 1].tolist())
    wanted = theirs([TopPLogitsWarper(p)], case)
    assert abs(int(torch.isfinite(wanted).sum()) - kept) < 0.001 * size  # float32 sums of theirs


def test_top_p_that_no_rounded_sum_reaches_keeps_everything():
    scores = torch.zeros(3000)
    law = Sampling(temperature=1.0, top_p=1 - 1e-16).law(frozenset(), 3000)
    assert len(law(Context([0], 1), scores).ids) >= 2999


# --- greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [{}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}])
@given(size=st.integers(1, 40), data=st.data())
def test_greedy_ties_go_to_the_lowest_id(dtype, values, size, data):
    best = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    scores = torch.full((size,), -1.5, dtype=dtype)
    scores[sorted(best)] = 2.25
    law = Sampling(**values).law(END, size)(Context([0], 1), scores)
    assert law.to_dense().tolist() == np.eye(size)[min(best)].tolist()


def test_greedy_ties_go_to_the_lowest_id_where_argmax_takes_the_last(monkeypatch):
    """torch promises no order among equal maxima; another device may take another."""
    last = lambda scores: (scores == scores.max()).nonzero()[-1, 0]  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "argmax", last)
    law = Law(greedy=True)(Context([0], 1), torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0]))
    assert law.ids.tolist() == [1]


def test_greedy_ties_made_by_bf16_go_to_the_lowest_id():
    exact = torch.tensor([10.0, 10.01, 10.02, 9.0])
    assert Law(greedy=True)(Context([0], 1), exact).argmax() == 2
    assert Law(greedy=True)(Context([0], 1), exact.bfloat16()).argmax() == 0


def test_greedy_ties_in_a_large_vocabulary():
    scores = torch.zeros(150_000)
    scores[[149_999, 80_000, 77]] = 1.0
    assert Law(greedy=True)(Context([0], 1), scores).ids.tolist() == [77]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_1_at_a_temperature_shares_out_equal_tokens(dtype):
    """As in transformers: all that equal the k-th best are kept."""
    scores = torch.tensor([1.0, 3.0, 3.0, 0.0], dtype=dtype)
    law = Sampling(temperature=0.7, top_k=1).law(END, 4)(Context([0], 1), scores)
    assert law.to_dense().tolist() == [0.0, 0.5, 0.5, 0.0]


def test_half_precision_logits_become_float64_probabilities():
    scores = torch.tensor([11.0, -9.0], dtype=torch.float16)
    law = Law()(Context([0], 1), scores)
    assert law[1] == pytest.approx(math.exp(-20.0) / (1 + math.exp(-20.0)), rel=1e-12)


def test_a_tiny_temperature_is_nearly_greedy():
    scores = torch.tensor([3.0, -2.0, 2.999, 3.0])
    law = Sampling(temperature=1e-42).law(END, 4)(Context([0], 1), scores)
    assert law.to_dense().tolist() == [0.5, 0.0, 0.0, 0.5]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_nan_or_infinite_logits_fail(greedy, dtype, bad, at):
    scores = torch.arange(5).to(dtype)
    scores[at] = bad
    with pytest.raises(NumericalError, match="finite number"):
        Law(greedy=greedy)(Context([0, 1], 1), scores)


def test_nothing_but_minus_infinity_fails():
    with pytest.raises(NumericalError):
        Law()(Context([0], 1), torch.full((3,), -math.inf))


def test_tokens_ruled_out_by_the_model_stay_out():
    law = Law()(Context([0], 1), torch.tensor([-math.inf, 0.0, 0.0]))
    assert law.to_dense().tolist() == [0.0, 0.5, 0.5]


def test_processors_that_leave_nothing_fail_and_say_so():
    law = Sampling(temperature=1.0, min_tokens=1).law(frozenset({0, 1}), 2)
    with pytest.raises(NumericalError, match="left no token"):
        law(Context([0], 1), torch.zeros(2))


NAN, INF = math.nan, math.inf
HUGE = 10**400  # too large for a float
INVALID: dict[str, list[Any]] = {
    "temperature": [-0.1, 1e39, NAN, INF, -INF, "1", None, True, HUGE, [1.0]],
    "top_k": [-1, 1.5, 2.0, NAN, "3", None, True],
    "top_p": [0.0, -0.5, 1.0001, NAN, INF, "0.9", None, False],
    "min_p": [-0.01, 1.01, NAN, INF, "0.1", None, True],
    "repetition_penalty": [0.0, -1.0, 1e-45, 1e39, NAN, INF, "1.1", None, True, HUGE],
    "presence_penalty": [1e39, -1e308, NAN, INF, -INF, "0", None, True, HUGE],
    "frequency_penalty": [1e39, -1e308, NAN, INF, -INF, "0", None, True, -HUGE],
    "min_tokens": [-1, 1.0, 0.5, NAN, "2", None, True],
    "logit_bias": [
        {-1: 1.0}, {"a": 1.0}, {1.5: 1.0}, {True: 1.0}, {None: 1.0},
        {0: NAN}, {0: INF}, {0: -INF}, {0: "1"}, {0: None}, {0: True}, {0: HUGE}, {0: [1.0]},
        {0: 1.0, 1: NAN}, {0: 1e39},
        [1, 2], "12", 3,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in INVALID.items() for value in values],
    ids=lambda x: str(x)[:24],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(SamplingError, match=name) as caught:
        Sampling(**{name: value})
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_code == 2


VALID: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1, 1e-3, 100.0, 3e38, 1e-300, np.float64(0.5)],
    "top_k": [0, 1, 10**9, HUGE, np.int64(3)],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "min_p": [0, 0.0, 1, 1.0],
    "repetition_penalty": [1e-3, 1, 10.0, 1.2e-38, 3e38],
    "presence_penalty": [-2.0, 0, 2, 3e38, -3e38],
    "frequency_penalty": [-2.0, 0, 2, 3e38, -3e38],
    "min_tokens": [0, 1, 10**6],
    "logit_bias": [None, {}, {0: 1}, {3: -100.0}, {0: 3e38}, {0: -3e38}],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in VALID.items() for value in values],
    ids=lambda x: str(x)[:24],
)
def test_values_at_the_edges_are_taken_and_give_a_law(name, value):
    sampling = Sampling(**{"temperature": 1.0, name: value})
    law = sampling.law(END, 8)(Context([0, 1, 2, 3], PROMPT), torch.linspace(-2, 2, 8))
    assert law.probs.sum() == pytest.approx(1.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0, 3e38])
def test_values_that_outgrow_float32_together_still_give_a_law(temperature):
    """The favoured token wins, as the numbers say, and a banned one stays banned."""
    sampling = Sampling(
        temperature=temperature,
        repetition_penalty=1.2e-38,
        presence_penalty=-3e38,
        frequency_penalty=-3e38,
        logit_bias={2: 3e38, 1: -3e38},
        min_tokens=9,
    )
    law = sampling.law(frozenset({0}), 4)(Context([0, 1, 2, 2], 1), torch.linspace(-2, 2, 4))
    assert law.argmax() == 2
    assert law[2] > 0.99
    assert law[0] == 0.0


def test_a_bias_beyond_the_vocabulary_is_refused_when_the_vocabulary_is_known():
    with pytest.raises(SamplingError, match=r"token 8.* 8 tokens"):
        Sampling(logit_bias={8: 1.0}).processors(END, 8)


def test_values_come_back_by_name():
    values = Sampling(temperature=0.5, top_k=3).to_dict()
    assert Sampling(**values) == Sampling(temperature=0.5, top_k=3)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 5, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.9, "top_p": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.0, "logit_bias": {7: 3.0}, "min_tokens": 4},
        {"temperature": 0.0},
    ],
)
def test_a_law_among_a_few_tokens_is_that_of_all_where_the_others_cannot_come(values):
    law = Sampling(**values).law(frozenset([9]), 40)
    rng = torch.Generator().manual_seed(1)
    for length in (3, 20):
        context = Context([1, 7, *range(length)], 1)
        ids = torch.randperm(40, generator=rng)[:12].sort().values
        logits = 3 * torch.randn(12, generator=rng)
        wide = torch.full((40,), -torch.inf)
        wide[ids] = logits
        found, wanted = law.among(context, ids.numpy(), logits.numpy(), 40), law(context, wide)
        assert found.ids.tolist() == wanted.ids.tolist()
        np.testing.assert_allclose(found.probs, wanted.probs, rtol=1e-12)
        assert found.vocab_size == 40
