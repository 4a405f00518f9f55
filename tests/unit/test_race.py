"""The exact joint law of races on the same noise, against a closed form and Monte Carlo."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.distribution import Distribution
from outrider.core.race import conditional
from tests.chance import ALPHA, chi_square

laws = st.integers(2, 4).flatmap(
    lambda size: st.tuples(
        *[
            st.lists(st.floats(0.02, 1.0), min_size=size, max_size=size).map(Distribution.dense)
            for _ in range(3)
        ]
    )
)


def joint(*races: Distribution) -> dict[tuple[int, ...], float]:
    """The joint law of the winners, one race conditioned on the ones before it."""
    out: dict[tuple[int, ...], float] = {(): 1.0}
    for i, law in enumerate(races):
        out = {
            (*winners, token): weight * probability
            for winners, weight in out.items()
            for token, probability in (
                conditional(list(zip(races[:i], winners, strict=True)), law)
                if i
                else [(int(t), float(law[int(t)])) for t in law.ids]
            )
        }
    return out


@settings(max_examples=40)
@given(laws)
def test_two_races_agree_by_the_closed_form(three):
    """P(X = i, Y = i) = 1 / sum_k max(p_k / p_i, q_k / q_i)."""
    p, q, _ = three
    both = joint(p, q)
    for i in range(p.vocab_size):
        wanted = 1 / sum(max(p[k] / p[i], q[k] / q[i]) for k in range(p.vocab_size))
        assert both.get((i, i), 0.0) == pytest.approx(wanted, abs=1e-12)


@settings(max_examples=25)
@given(laws)
def test_every_race_keeps_its_own_law_in_any_company(three):
    winners = joint(*three)
    for which, law in enumerate(three):
        marginal = np.zeros(law.vocab_size)
        for tokens, weight in winners.items():
            marginal[tokens[which]] += weight
        np.testing.assert_allclose(marginal, law.to_dense(), atol=1e-12)


@settings(max_examples=25)
@given(laws)
def test_the_order_of_the_races_does_not_matter(three):
    forward, backward = joint(*three), joint(*three[::-1])
    for tokens, weight in forward.items():
        assert backward.get(tokens[::-1], 0.0) == pytest.approx(weight, abs=1e-12)


@settings(max_examples=15)
@given(laws)
def test_conditional_laws_sum_to_one_and_a_repeated_race_repeats(three):
    p, q, r = three
    for (x, y), weight in joint(p, q).items():
        if weight > 1e-6:  # conditions that are next to impossible have no digits left
            earlier = [(p, x), (q, y)]
            assert sum(w for _, w in conditional(earlier, r)) == pytest.approx(1.0, abs=1e-12)
            assert dict(conditional(earlier, p)) == {x: pytest.approx(1.0, abs=1e-9)}
            assert dict(conditional(earlier, q)) == {y: pytest.approx(1.0, abs=1e-9)}


@pytest.mark.parametrize(
    "rows",
    [
        [[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]],
        [[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.2, 0.2, 0.6]],
        [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]],
        [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.4, 0.2, 0.4]],
    ],
)
def test_joint_law_against_monte_carlo(rows):
    races = [Distribution.dense(row) for row in rows]
    noise = np.random.default_rng(2).exponential(size=(400_000, len(rows[0])))
    with np.errstate(divide="ignore"):
        winners = [np.argmin(noise / np.array(row), axis=1) for row in rows]
    shape = (len(rows[0]),) * len(rows)
    counts = np.bincount(np.ravel_multi_index(winners, shape), minlength=int(np.prod(shape)))
    law = np.zeros(shape)
    for tokens, weight in joint(*races).items():
        law[tokens] = weight
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    assert chi_square(counts, law) > ALPHA
    independent = races[0].to_dense()
    for race in races[1:]:
        independent = np.multiply.outer(independent, race.to_dense())
    assert chi_square(counts, independent) < ALPHA


def test_a_token_outside_the_support_never_wins():
    p, q = Distribution.dense([0.5, 0.5, 0.0]), Distribution.dense([0.0, 0.5, 0.5])
    assert {token for token, _ in conditional([(p, 0)], q)} == {1, 2}
    assert conditional([(p, 1)], Distribution.one_hot(2, 3)) == [(2, 1.0)]
