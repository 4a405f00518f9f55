"""Closed forms against enumeration of the production rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.audit.acceptance import acceptance, most_covered
from outrider.core.distribution import Distribution
from outrider.core.processors import Context, Law, Sampling
from outrider.core.theory import (
    accepted_by_block,
    accepted_by_rejection,
    best_draft_length,
    tokens_per_call,
)
from outrider.drafters.model import ModelDrafter
from outrider.drafters.shape import Dynamic, Static
from outrider.models.toy import ToyModel
from outrider.registry import RULES

EXACT = [name for name in RULES if RULES.load(name).exact]
TARGET, DRAFT = ToyModel.random(3, seed=1), ToyModel.random(3, seed=2)
ROUNDING = 1e-12
SOLVER = 1e-8  # what the linear program is solved to


def laws(model):
    def after(path):
        tokens = [0, *path]
        return Law()(Context(tokens, 1), torch.log(torch.from_numpy(model.next(tokens))))

    return after


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize(
    ("rule", "closed"), [("rejection", accepted_by_rejection), ("block", accepted_by_block)]
)
def test_a_rule_accepts_what_its_closed_form_says(rule, closed, length):
    found = acceptance(TARGET, ModelDrafter(DRAFT), RULES.load(rule)(), draft_length=length)
    assert found.expected == pytest.approx(closed(laws(TARGET), laws(DRAFT), length), abs=ROUNDING)


def test_one_token_is_accepted_with_one_minus_total_variation():
    p, q = laws(TARGET)(()), laws(DRAFT)(())
    for rule in ("rejection", "block"):
        found = acceptance(TARGET, ModelDrafter(DRAFT), RULES.load(rule)(), draft_length=1)
        assert found.expected == pytest.approx(p.overlap(q), abs=ROUNDING)
        assert found.bound == pytest.approx(p.overlap(q), abs=SOLVER)


@pytest.mark.parametrize("seed", range(3, 9))
def test_block_never_accepts_less_than_rejection(seed):
    drafter = ModelDrafter(ToyModel.random(3, seed))
    by = {
        rule: acceptance(TARGET, drafter, RULES.load(rule)(), draft_length=3)
        for rule in ("rejection", "block")
    }
    assert by["rejection"].expected <= by["block"].expected + ROUNDING
    assert by["block"].expected <= by["block"].bound + SOLVER


@pytest.mark.parametrize("shape", [None, Static((2,)), Static((2, 2)), Dynamic(3, 2)], ids=str)
@pytest.mark.parametrize("rule", EXACT)
def test_no_rule_exceeds_the_bound(rule, shape):
    if shape and not RULES.load(rule).trees:
        return
    law = Sampling(temperature=0.0 if rule == "greedy" else 1.0).law(frozenset(), 3)
    found = acceptance(
        TARGET, ModelDrafter(DRAFT, shape=shape), RULES.load(rule)(), draft_length=2, law=law
    )
    assert 0 < found.expected <= found.bound + SOLVER


def test_deterministic_siblings_reach_the_bound():
    """Fixed siblings are accepted with the probability of their tokens, and no rule does better."""
    drafter = ModelDrafter(DRAFT, shape=Dynamic(6, 2))
    found = acceptance(TARGET, drafter, RULES.load("rejection")(), draft_length=2)
    assert found.expected == pytest.approx(found.bound, abs=SOLVER)


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), st.data())
def test_most_covered_by_one_draw_is_the_overlap(weights, data):
    p = Distribution.dense(weights)
    q = Distribution.dense(data.draw(st.lists(st.floats(0.01, 1), min_size=3, max_size=3)))
    best = most_covered(dict(enumerate(p.to_dense())), {frozenset({t}): q[t] for t in range(3)})
    assert best == pytest.approx(p.overlap(q), abs=1e-9)


@given(st.floats(0, 1), st.floats(0.001, 1), st.integers(0, 12))
def test_the_best_length_is_the_best(alpha, cost, most):
    def rate(length):
        return tokens_per_call(alpha, length) / (1 + cost * length)

    best = best_draft_length(alpha, cost, most)
    assert all(rate(best) >= rate(length) for length in range(most + 1))


def test_the_formula_of_the_paper():
    assert tokens_per_call(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
