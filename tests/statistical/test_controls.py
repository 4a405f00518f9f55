"""Every negative control is caught, and what has no fault is not.

Seeds are fixed, and the sample sizes are those that ``docs/controls.md`` records.
"""

from __future__ import annotations

import pytest

from benchmarks.negative_controls import DOCS, rows_of
from outrider.audit.exact import audit_exact
from outrider.audit.sampled import audit_samples, audit_tokens, equal_tokens_promised
from tests.controls import (
    CONTROLS,
    HOT,
    PROMPT,
    SEED,
    CallsASampleFixed,
    Faultless,
    FaultlessBlock,
    _with,
    enumerate_control,
    toy_engine,
)

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = {row[0]: row for row in rows_of(DOCS.read_text())}
SAMPLED = [name for name, control in CONTROLS.items() if control.sampled]
NO_FAULT = [Faultless, FaultlessBlock, CallsASampleFixed]


def verdict(control, engine, samples):
    request = control.request()
    if equal_tokens_promised(control.rule):
        return audit_tokens(
            engine, [PROMPT], samples, seed=SEED, request=request, near_tie=0.0
        ).verdict
    return audit_samples(engine, [PROMPT], samples, seed=SEED, request=request).verdict


def test_the_docs_name_every_control_and_nothing_else():
    assert list(RECORDED) == list(CONTROLS)
    assert len(CONTROLS) >= 15
    assert {control.family for control in CONTROLS.values()} == {"rule", "drafter", "engine"}


@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_is_caught_by_something(name):
    assert CONTROLS[name].enumerable or CONTROLS[name].sampled


@pytest.mark.parametrize("name", [n for n, control in CONTROLS.items() if control.enumerable])
def test_enumeration_catches_it_and_passes_the_same_without_the_fault(name):
    control = CONTROLS[name]
    report = enumerate_control(control, control.apply(toy_engine(*control.walked)))
    assert report.verdict == "different"
    if report.broken:
        assert "Noise was used twice" in report.broken
        assert RECORDED[name][2] == "noise used twice"
    else:
        assert RECORDED[name][2] == f"{report.largest_difference:.2g}"
        assert report.largest_difference > 1e-8
    sound = enumerate_control(control, control.sound(toy_engine(*control.walked)))
    assert sound.verdict == "consistent"


@pytest.mark.parametrize("name", [n for n, control in CONTROLS.items() if not control.enumerable])
def test_what_enumeration_cannot_see_is_said_and_true(name):
    control = CONTROLS[name]
    assert control.sampled
    assert control.unseen
    report = enumerate_control(control, control.apply(toy_engine(*control.walked)))
    assert report.verdict == "consistent"


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_catch_it_at_the_recorded_size(name):
    control = CONTROLS[name]
    engine = control.apply(toy_engine(control.vocab, control.draft_seed))
    assert verdict(control, engine, int(RECORDED[name][3])) == "different"


def test_samples_pass_the_same_without_the_fault():
    """Once for each different request, at the largest size that a fault under it needed."""
    largest = {}
    for name in SAMPLED:
        c = CONTROLS[name]
        key = (c.rule, c.vocab, c.draft_seed, c.draft_length, str(c.shape), str(c.request()))
        size = int(RECORDED[name][3])
        if size > largest.get(key, (0, None))[0]:
            largest[key] = (size, c)
    for size, control in largest.values():
        engine = control.sound(toy_engine(control.vocab, control.draft_seed))
        assert verdict(control, engine, size) != "different", control.wrong


@pytest.mark.parametrize("rule", NO_FAULT)
def test_what_only_looks_like_a_fault_is_none(rule):
    engine = _with(toy_engine(3), rule=rule(), draft_length=2)
    assert audit_exact(engine, [PROMPT], max_tokens=3, sampling=HOT).verdict == "consistent"
    request = {"max_tokens": 3, "temperature": 1.0}
    found = audit_samples(engine, [PROMPT], 800, seed=SEED, request=request)
    assert found.verdict != "different"
