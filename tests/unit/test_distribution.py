"""Distributions against plain dense numpy, and the rejection step where ratios are extreme."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.core.chooser import Chooser, SeededChooser, enumerate_outcomes
from outrider.core.distribution import Distribution
from outrider.core.proposal import ROOT, Proposal
from outrider.rules.rejection import Rejection
from tests.chance import ALPHA, chi_square

weights = st.one_of(st.just(0.0), st.floats(1e-12, 1.0), st.floats(1e-3, 1.0))


@st.composite
def pairs(draw, least: int = 1, most: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Two sparse laws over one vocabulary, dense."""
    size = draw(st.integers(least, most))
    rows = [np.array(draw(st.lists(weights, min_size=size, max_size=size))) for _ in range(2)]
    assume(all(row.sum() > 0 for row in rows))
    return rows[0] / rows[0].sum(), rows[1] / rows[1].sum()


# --- making one ----------------------------------------------------------------------------------


@given(pairs())
def test_dense_keeps_only_the_support_and_gives_it_back(pair):
    p, _ = pair
    law = Distribution.dense(p)
    assert law.ids.tolist() == np.flatnonzero(p).tolist()
    assert (law.probs > 0).all()
    assert law.vocab_size == len(p)
    np.testing.assert_allclose(law.to_dense(), p, atol=1e-15)
    np.testing.assert_allclose([law[token] for token in range(len(p))], p, atol=1e-15)


def test_weights_are_normalised():
    assert Distribution.dense([2.0, 0.0, 6.0]).to_dense().tolist() == [0.25, 0.0, 0.75]


def test_of_takes_ids_of_a_larger_vocabulary():
    law = Distribution.of(np.array([2, 5, 7]), np.array([1.0, 0.0, 3.0]), 9)
    assert law.ids.tolist() == [2, 7]
    assert (law[2], law[5], law[7], law[8], law[0]) == (0.25, 0.0, 0.75, 0.0, 0.0)


def test_a_law_without_weight_is_refused():
    with pytest.raises(ValueError, match="positive weight"):
        Distribution.dense([0.0, 0.0])


def test_a_probability_that_underflows_is_not_in_the_support():
    law = Distribution.dense([5e-324, 1e10, 1.0])
    assert law.ids.tolist() == [1, 2]
    assert (law.probs > 0).all()


def test_one_hot():
    law = Distribution.one_hot(3, 5)
    assert law.to_dense().tolist() == [0, 0, 0, 1, 0]
    assert law.argmax() == 3


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_argmax_is_the_first_of_the_best(row):
    assume(sum(row) > 0)
    probs = Distribution.dense(row).to_dense()
    assert Distribution.dense(row).argmax() == int(np.argmax(probs))


def test_argmax_of_equals_is_the_lowest_id():
    assert Distribution.of(np.array([4, 6, 8]), np.array([0.2, 0.4, 0.4]), 9).argmax() == 6


@given(
    st.lists(st.one_of(st.just(-np.inf), st.floats(-900, 900)), min_size=1, max_size=12),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_softmax_is_float64_softmax_of_whatever_came_in(row, dtype):
    scores = torch.tensor(row, dtype=torch.float64).to(dtype)
    assume(bool(torch.isfinite(scores).any()) and not bool(torch.isposinf(scores).any()))
    law = Distribution.softmax(scores)
    exact = scores.double().numpy()
    expected = np.exp(exact - exact.max())
    np.testing.assert_allclose(
        law.to_dense(), expected / expected.sum(), rtol=1e-13, atol=0 if min(row) > -600 else 1e-300
    )
    assert law.probs.dtype == np.float64
    assert not np.isin(law.ids, np.flatnonzero(np.isneginf(exact))).any()


# --- overlap and residual ------------------------------------------------------------------------


@given(pairs())
def test_overlap_against_dense(pair):
    p, q = pair
    got = Distribution.dense(p).overlap(Distribution.dense(q))
    assert got == pytest.approx(np.minimum(p, q).sum(), abs=1e-14)
    assert got == pytest.approx(1 - 0.5 * np.abs(p - q).sum(), abs=1e-13)


@given(pairs())
def test_residual_against_dense(pair):
    p, q = pair
    left = np.maximum(0.0, p - q)
    assume(left.sum() > 1e-9)  # below that, the last bits of p and q are all there is
    got = Distribution.dense(p).residual(Distribution.dense(q))
    np.testing.assert_allclose(got.to_dense(), left / left.sum(), atol=1e-6)
    assert got.to_dense().sum() == pytest.approx(1.0, abs=1e-12)
    assert not np.isin(got.ids, np.flatnonzero(p == 0)).any()


@given(pairs())
def test_what_is_accepted_and_what_is_repaired_make_p(pair):
    p, q = (Distribution.dense(row) for row in pair)
    repaired = (1 - p.overlap(q)) * p.residual(q).to_dense()
    np.testing.assert_allclose(
        np.minimum(p.to_dense(), q.to_dense()) + repaired, p.to_dense(), atol=1e-13
    )


@given(pairs())
def test_equal_laws_never_leave_an_empty_residual(pair):
    p, _ = pair
    law = Distribution.dense(p)
    for same in (law, Distribution.dense(p), Distribution.dense(p * 3.0)):
        left = law.residual(same)
        assert left.probs.sum() == pytest.approx(1.0)
        assert set(left.ids) <= set(law.ids)
    assert law.residual(law).to_dense().tolist() == law.to_dense().tolist()


def test_residual_and_overlap_leave_their_arguments_alone():
    p, q = Distribution.dense([0.5, 0.3, 0.2]), Distribution.dense([0.6, 0.1, 0.3])
    before = [p.probs.copy(), q.probs.copy(), p.ids.copy(), q.ids.copy()]
    p.residual(q)
    p.overlap(q)
    for old, new in zip(before, [p.probs, q.probs, p.ids, q.ids], strict=True):
        assert old.tolist() == new.tolist()


def test_disjoint_supports():
    p, q = Distribution.dense([0.4, 0.6, 0, 0]), Distribution.dense([0, 0, 1, 0])
    assert p.overlap(q) == 0.0
    assert p.residual(q).to_dense().tolist() == p.to_dense().tolist()


# --- CASES 15: ratios from 1e-9 to almost 1 ------------------------------------------------------

RATIOS = [1e-9, 1e-6, 1e-3, 0.1, 0.5, 0.999, 1 - 1e-7, 1.0]


def extreme(dtype: torch.dtype) -> tuple[Distribution, Distribution]:
    """p and q whose ratios run from 1e-9 to almost 1, as logits of a low precision give them."""
    q = np.array([0.05, 0.1, 0.15, 0.1, 0.2, 0.15, 0.2, 0.05])
    p = q * np.array(RATIOS)
    p[-1] += 1.0 - p.sum()  # what the others lack
    laws = []
    for row in (p, q):
        logits = torch.tensor(np.log(row)).to(dtype)
        laws.append(Distribution.softmax(logits))
    return laws[0], laws[1]


def reject(p: Distribution, q: Distribution, chooser: Chooser) -> int:
    """The production rule on one draft drawn from q: the first token out."""
    rule = Rejection()
    token, law = rule.draft(q, chooser, 0, 0, 0)
    proposal = Proposal.chain([token], [law])
    verdict = rule.judge(lambda node: p, proposal, chooser, 0, 0)
    return token if verdict.path else verdict.token


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_ratios_enumerated_match_float64(dtype):
    p, q = extreme(dtype)
    law = np.zeros(p.vocab_size)
    for token, weight in enumerate_outcomes(lambda chooser: reject(p, q, chooser)):
        law[token] += weight
    # The tokens at ratio 1e-9 have p near 5e-11: a relative test sees them, an absolute one not.
    np.testing.assert_allclose(law, p.to_dense(), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_ratios_drawn_match_float64(dtype):
    p, q = extreme(dtype)
    n = 6000
    counts = np.bincount(
        [reject(p, q, SeededChooser(15, sequence)) for sequence in range(n)],
        minlength=p.vocab_size,
    )
    assert chi_square(counts, p.to_dense()) > ALPHA
    assert chi_square(counts, q.to_dense()) < ALPHA  # the same test sees a law that is wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equal_laws_always_accept(dtype):
    p, _ = extreme(dtype)
    for token in p.ids:
        proposal = Proposal.chain([int(token)], [p])
        outcomes = list(
            enumerate_outcomes(
                lambda chooser, proposal=proposal: Rejection().judge(
                    lambda node: p, proposal, chooser, 0, 0
                )
            )
        )
        assert all(verdict.path == (0,) for verdict, _ in outcomes)
        assert sum(weight for _, weight in outcomes) == pytest.approx(1.0)


def test_the_root_is_asked_for_its_law():
    asked: list[int] = []
    p = Distribution.dense([1.0, 1.0])

    def target(node: int) -> Distribution:
        asked.append(node)
        return p

    Rejection().judge(target, Proposal(), SeededChooser(0), 0, 0)
    assert asked == [ROOT]
