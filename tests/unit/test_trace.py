"""The record of a run: by hand, and that its rates are rates."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.chooser import SeededChooser
from outrider.core.processors import Law
from outrider.core.trace import Round, Trace
from outrider.drafters.script import ScriptDrafter
from outrider.engine.generation import Generation
from outrider.engine.round import Session
from outrider.engine.transcript import Transcript
from outrider.models.toy import ToyModel
from outrider.policies.fixed import Fixed
from outrider.registry import RULES

RATES = ["acceptance_rate", "tokens_per_target_call", "target_calls_per_token",
         "tokens_per_s", "decode_tokens_per_s"]  # fmt: skip


@st.composite
def rounds(draw) -> Round:
    """A round as a chain gives it."""
    drafted = draw(st.integers(0, 8))
    accepted = draw(st.integers(0, drafted))
    rejected = accepted < drafted and draw(st.booleans())
    own = draw(st.booleans())
    seconds = [draw(st.floats(0, 1)) for _ in range(2)]
    return Round(
        drafted, accepted, int(own and rejected), int(own and not rejected), rejected,
        *seconds, sum(seconds),
    )  # fmt: skip


def test_by_hand():
    trace = Trace(
        prompt_tokens=7,
        cached_tokens=2,
        prefill_s=0.5,
        ttft_s=0.75,
        total_s=2.5,
        rounds=[
            Round(4, 4, 0, 1, False, 0.010, 0.200, 0.220),
            Round(4, 1, 1, 0, True, 0.020, 0.300, 0.330),
            Round(0, 0, 0, 1, False, 0.000, 0.100, 0.100),
            Round(3, 2, 0, 0, True, 0.030, 0.400, 0.440),
        ],
    )
    assert trace.summary() == {
        "prompt_tokens": 7,
        "cached_tokens": 2,
        "drafted_tokens": 11,
        "accepted_tokens": 7,
        "correction_tokens": 1,
        "bonus_tokens": 2,
        "rejected_rounds": 2,
        "target_calls": 4,
        "emitted_tokens": 10,
        "prefill_time_ms": 500.0,
        "draft_time_ms": pytest.approx(60.0),
        "verify_time_ms": pytest.approx(1000.0),
        "total_time_ms": 2500.0,
        "ttft_ms": 750.0,
        "acceptance_rate": 7 / 11,
        "tokens_per_target_call": 2.5,
        "target_calls_per_token": 0.4,
        "tokens_per_s": 4.0,
        "decode_tokens_per_s": 5.0,
    }


def test_rates_without_a_denominator_are_none():
    nothing = Trace().summary()
    assert [nothing[name] for name in RATES] == [None] * 5
    assert nothing["ttft_ms"] is None
    undrafted = Trace(total_s=1.0, rounds=[Round(0, 0, 0, 1, False, 0.0, 0.1, 0.1)] * 3).summary()
    assert undrafted["acceptance_rate"] is None
    assert undrafted["tokens_per_target_call"] == 1.0
    all_prefill = Trace(total_s=1.0, prefill_s=1.0, rounds=[Round(0, 0, 0, 1, False, 0, 0, 0)])
    assert all_prefill.summary()["decode_tokens_per_s"] is None


@given(st.lists(rounds(), max_size=8))
def test_sums_and_ranges(some):
    trace = Trace(total_s=sum(r.total_s for r in some), rounds=some)
    s = trace.summary()
    assert s["emitted_tokens"] == s["accepted_tokens"] + s["correction_tokens"] + s["bonus_tokens"]
    assert s["emitted_tokens"] == sum(r.emitted for r in some)
    if s["drafted_tokens"]:
        assert 0 <= s["acceptance_rate"] <= 1
    else:
        assert s["acceptance_rate"] is None
    if s["emitted_tokens"]:
        assert s["tokens_per_target_call"] * s["target_calls_per_token"] == pytest.approx(1)


def test_every_count_and_time_of_a_round_is_in_the_summary():
    """A round's field that the summary forgets would be a number nobody sees."""
    nothing = Trace(rounds=[Round(0, 0, 0, 0, False, 0.0, 0.0, 0.0)]).summary()
    for f in fields(Round):
        if f.name == "total_s":  # the trace's own total covers it
            continue
        one = Trace(rounds=[Round(**{g.name: int(g is f) for g in fields(Round)})]).summary()
        assert one != nothing, f.name


# --- CASES 16: what a run really records ---------------------------------------------------------


def run(rule: str, script: list[int], draft_length: int, max_tokens: int = 11) -> Generation:
    model = ToyModel.random(4, seed=3)
    limit = 1 + max_tokens
    session = Session(
        model=model,
        cache=model.new_cache(limit),
        draft=ScriptDrafter(script).start([0], limit),
        rule=RULES.load(rule)(),
        policy=Fixed(draft_length),
        law=Law(greedy=rule == "greedy"),
        chooser=SeededChooser(5),
        tokens=[0],
        prompt_length=1,
        limit=limit,
    )
    return Generation(session, Transcript(None, max_tokens=max_tokens, eos_token_ids=frozenset()))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft_length", [1, 4, 7])
def test_an_exact_copy_is_accepted_at_a_rate_of_at_most_one(rule, draft_length):
    plain = run(rule, [], draft_length).output
    copied = run(rule, plain.token_ids, draft_length)
    s = copied.output.trace.summary()
    assert s["emitted_tokens"] == 11 == len(copied.output.token_ids)
    assert s["emitted_tokens"] == s["accepted_tokens"] + s["correction_tokens"] + s["bonus_tokens"]
    assert 0 <= s["acceptance_rate"] <= 1
    if rule in ("greedy", "coupled"):
        assert copied.output.token_ids == plain.token_ids
        assert s["acceptance_rate"] == 1.0
        assert s["rejected_rounds"] == s["correction_tokens"] == 0
        # k drafts and a bonus a round; the last round drafts no more than there is room for.
        assert s["target_calls"] == -(-11 // (draft_length + 1))


@pytest.mark.parametrize("rule", RULES)
def test_a_run_without_drafts_has_no_acceptance_rate(rule):
    s = run(rule, [], 4).output.trace.summary()
    assert s["acceptance_rate"] is None
    assert (s["drafted_tokens"], s["accepted_tokens"], s["correction_tokens"]) == (0, 0, 0)
    assert s["bonus_tokens"] == s["target_calls"] == s["emitted_tokens"] == 11
    assert s["tokens_per_target_call"] == 1.0


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_is_always_wrong_scores_nought(rule):
    plain = run(rule, [], 4).output.token_ids
    wrong = [(token + 1) % 4 for token in plain]
    s = run(rule, wrong, 1).output.trace.summary()
    if rule in ("greedy", "coupled"):
        assert s["acceptance_rate"] == 0.0
        assert s["rejected_rounds"] == s["correction_tokens"] == 10  # the last has no room to draft
        assert s["tokens_per_target_call"] == 1.0
    assert s["emitted_tokens"] == 11
