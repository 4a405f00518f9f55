"""Where chance comes from: the law, the independence and the reach of each answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.core.chooser import (
    Chooser,
    EnumeratingChooser,
    Place,
    ScriptedChooser,
    SeededChooser,
    enumerate_outcomes,
)
from outrider.core.distribution import Distribution
from outrider.core.noise import finish_first, uniform
from tests.chance import ALPHA, chi_square


def independence(table: np.ndarray) -> float:
    """P value of a contingency table under independence of its rows and columns."""
    return float(stats.chi2_contingency(table)[1])


def test_the_chi_square_itself_can_tell():
    rng = np.random.default_rng(0)
    p = np.array([0.5, 0.3, 0.2, 0.0])
    good = rng.multinomial(20_000, p)
    assert chi_square(good, p) > 1e-3
    assert chi_square(rng.multinomial(20_000, [0.55, 0.27, 0.18, 0.0]), p) < ALPHA
    assert chi_square(good + np.array([0, 0, 0, 1]), p) == 0.0


# --- uniforms ------------------------------------------------------------------------------------


def _unmix(x: int) -> int:
    """The inverse of SplitMix64's finish, to find the noise one asks for."""
    mask = 2**64 - 1

    def unshift(y: int, by: int) -> int:
        out = y
        for _ in range(64 // by + 1):
            out = y ^ (out >> by)
        return out

    x = unshift(x, 31)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & mask
    x = unshift(x, 27)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return unshift(x, 30)


@pytest.mark.parametrize("bits", [0, 2**64 - 1, 2**64 - 2**10, 2**63])
def test_uniforms_lie_strictly_between_zero_and_one(bits):
    u = uniform(np.uint64(_unmix(bits)), 0)
    assert 0.0 < u < 1.0
    assert u == pytest.approx(bits / 2**64, abs=1e-12)


def test_uniforms_are_uniform():
    u = np.array([uniform(np.uint64(12345), counter) for counter in range(100_000)])
    assert chi_square(np.bincount((u * 100).astype(int), minlength=100), np.full(100, 0.01)) > ALPHA
    assert len(np.unique(u)) == len(u)


# --- the race, beside the same in plain numpy ----------------------------------------------------


def race(key: int, law: Distribution, split: float, count: int) -> list[int]:
    """All runners' times, sorted."""
    key, size = np.uint64(key), law.vocab_size
    heavy = law.probs > split
    runners, weights = law.ids[heavy], law.probs[heavy] - split
    times = -np.log([uniform(key, token) for token in runners]) / weights
    now, block, counter = 0.0, 8 + size // 256, -1
    while now < split * times.min(initial=np.inf):
        noise = np.array([uniform(key, counter - i) for i in range(2 * block)])
        points = now + np.cumsum(-np.log(noise[:block])) / size
        tokens = (noise[block:] * size).astype(int)
        light = np.minimum(law.at(tokens), split)
        runners = np.append(runners, tokens[light > 0])
        times = np.append(times, points[light > 0] / light[light > 0])
        now, counter = points[-1], counter - 2 * block
    return list(dict.fromkeys(runners[np.argsort(times)].tolist()))[:count]


@given(
    size=st.integers(2, 900),
    kept=st.floats(0.01, 1.0),
    steep=st.floats(0.0, 12.0),
    key=st.integers(0, 2**64 - 1),
    split=st.sampled_from([1 / 1024, 0.05, 0.6]),
    count=st.integers(1, 6),
)
def test_the_race_is_the_one_in_plain_numpy(size, kept, steep, key, split, count):
    chance = np.random.default_rng(key % 2**32)
    weights = np.exp(steep * chance.standard_normal(size))
    weights[chance.permutation(size)[int(1 + kept * (size - 1)) :]] = 0.0
    law = Distribution.dense(weights)
    found = finish_first(np.uint64(key), law.ids, law.probs, size, split, count)
    assert found.tolist() == race(key, law, split, count)


def test_the_races_of_a_seed_stay_what_they_are():
    """Whoever keeps a seed keeps its texts."""
    law = Distribution.dense(1.0 / np.arange(1.0, 3001.0))
    found = [SeededChooser(7).race(law, Place(position, "target"), 3) for position in range(4)]
    assert found == [[2, 0, 22], [130, 1303, 11], [58, 214, 0], [0, 1722, 2070]]


# --- the seeded chooser: law ---------------------------------------------------------------------


def draws(law: Distribution, n: int, seed: int = 3, purpose: str = "target") -> np.ndarray:
    chooser = SeededChooser(seed)
    return np.array([chooser.draw(law, Place(position, purpose)) for position in range(n)])


@pytest.mark.parametrize(
    "weights",
    [
        [0.5, 0.3, 0.2],
        [1e-4, 0.9, 0.0999],
        [0.25] * 4,
        [1 / 1024, 1 - 1 / 1024],
        [1.5 / 1024, 0.5 / 1024, 1 - 2 / 1024],
        [0.0, 0.7, 0.0, 0.3],
    ],
)
def test_draw_has_its_law(weights):
    law = Distribution.dense(weights)
    counts = np.bincount(draws(law, 20_000), minlength=len(weights))
    assert chi_square(counts, law.to_dense()) > ALPHA


def test_draw_has_its_law_where_most_of_it_is_in_tokens_below_one_in_1024():
    # 3 tokens hold 40 %; 4,997 tokens hold 60 %, none of them more than 1/1024.
    rng = np.random.default_rng(1)
    weights = np.concatenate([[0.2, 0.15, 0.05], 0.6 * rng.dirichlet(np.full(4997, 2.0))])
    weights = weights[order := rng.permutation(5000)]
    law = Distribution.dense(weights)
    assert law.to_dense()[law.to_dense() < 1 / 1024].sum() > 0.55
    tokens = draws(law, 20_000)
    assert len(np.unique(tokens)) > 3000
    # Cells: the three large tokens, and the rest in a hundred bins by id.
    cell = np.where(order < 3, 100 + order, np.arange(5000) % 100)
    expected = np.bincount(cell, law.to_dense(), minlength=103)
    assert chi_square(np.bincount(cell[tokens], minlength=103), expected) > ALPHA
    # And by size, so that large and small tokens of the tail are told apart.
    by_size = np.argsort(np.argsort(law.to_dense())) // 50
    expected = np.bincount(by_size, law.to_dense())
    assert chi_square(np.bincount(by_size[tokens], minlength=len(expected)), expected) > ALPHA


def test_draw_has_its_law_on_a_flat_vocabulary_of_150_thousand():
    law = Distribution.dense(np.ones(150_000))
    cells = draws(law, 3000) // 1500
    assert chi_square(np.bincount(cells, minlength=100), np.full(100, 0.01)) > ALPHA


def test_a_light_token_wins_no_more_often_where_the_tail_is_sparse():
    """1100 of 150 thousand tokens have a little less than 1/1024: their race takes long."""
    law = Distribution.of(
        np.arange(0, 110_100, 100), np.array([0.02, *[0.98 / 1100] * 1100]), 150_000
    )
    assert law.probs[1] < 1 / 1024
    n = 10_000
    won = int((draws(law, n) == 0).sum())
    assert chi_square(np.array([won, n - won]), np.array([0.02, 0.98])) > ALPHA


def test_draw_has_its_law_on_a_small_support_of_a_large_vocabulary():
    law = Distribution.of(np.array([7, 70_000, 149_999]), np.array([0.6, 0.3999, 0.0001]), 150_000)
    tokens = draws(law, 5000)
    counts = np.array([(tokens == token).sum() for token in law.ids])
    assert counts.sum() == len(tokens)
    assert chi_square(counts, law.probs) > ALPHA


@pytest.mark.parametrize("probability", [0.001, 0.3, 0.999])
def test_accept_has_its_probability(probability):
    chooser = SeededChooser(4)
    n = 20_000
    yes = sum(chooser.accept(probability, Place(i, "accept")) for i in range(n))
    assert chi_square(np.array([yes, n - yes]), np.array([probability, 1 - probability])) > ALPHA


def test_certain_things_happen_and_impossible_ones_do_not():
    chooser = SeededChooser(4)
    for i in range(1000):
        assert chooser.accept(1.0, Place(i, "accept"))
        assert not chooser.accept(0.0, Place(i, "accept"))
        assert chooser.draw(Distribution.one_hot(2, 5), Place(i, "target")) == 2


# --- the seeded chooser: determinism and independence --------------------------------------------


@given(st.integers(-(2**70), 2**70), st.integers(0, 9), st.integers(0, 99), st.integers(0, 9))
def test_an_answer_depends_on_nothing_but_seed_and_place(seed, sequence, position, round_):
    law = Distribution.dense(np.arange(1, 40))
    place = Place(position, "draft", round_, 2)
    chooser = SeededChooser(seed, sequence)
    answers = chooser.draw(law, place), chooser.accept(0.5, place._replace(purpose="accept"))
    other = SeededChooser(seed, sequence)
    for i in range(3):  # other questions in between change nothing
        other.draw(law, Place(i, "residual"))
        other.accept(0.5, Place(i, "accept", i))
    assert answers[1] == other.accept(0.5, place._replace(purpose="accept"))
    assert answers[0] == other.draw(law, place)


ELSEWHERE: dict[str, Callable[[int], tuple[SeededChooser, Place]]] = {
    "seed": lambda i: (SeededChooser(12), Place(i, "draft")),
    "negative seed": lambda i: (SeededChooser(-11), Place(i, "draft")),
    "far seed": lambda i: (SeededChooser(11 + 2**64), Place(i, "draft")),
    "sequence": lambda i: (SeededChooser(11, 1), Place(i, "draft")),
    "position": lambda i: (SeededChooser(11), Place(i + 1, "draft")),
    "purpose target": lambda i: (SeededChooser(11), Place(i, "target")),
    "purpose accept": lambda i: (SeededChooser(11), Place(i, "accept")),
    "purpose residual": lambda i: (SeededChooser(11), Place(i, "residual")),
    "round": lambda i: (SeededChooser(11), Place(i, "draft", 1)),
    "node": lambda i: (SeededChooser(11), Place(i, "draft", 0, 1)),
    "round and node swapped": lambda i: (SeededChooser(11), Place(i, "draft", 0, i)),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_different_places_have_independent_noise(what):
    law = Distribution.dense([0.4, 0.35, 0.25])
    table = np.zeros((3, 3))
    agree_and_accept = np.zeros((3, 2))
    here = SeededChooser(11)
    for i in range(1, 8001):
        a = here.draw(law, Place(i, "draft"))
        chooser, place = ELSEWHERE[what](i)
        table[a, chooser.draw(law, place)] += 1
        agree_and_accept[a, int(chooser.accept(0.5, place))] += 1
    assert independence(table) > ALPHA
    assert independence(agree_and_accept) > ALPHA


def test_the_independence_test_can_tell():
    law, other = Distribution.dense([0.4, 0.35, 0.25]), Distribution.dense([0.3, 0.3, 0.4])
    table = np.zeros((3, 3))
    for i in range(2000):
        table[
            SeededChooser(1).draw(law, Place(i, "draft")),
            SeededChooser(1).draw(other, Place(i, "draft")),
        ] += 1
    assert independence(table) < ALPHA


# --- two laws on the same noise ------------------------------------------------------------------


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def _pairs_of_laws() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(8)
    logits = 2.5 * rng.standard_normal(20_000)
    flat = rng.standard_normal(3000)
    narrow = np.zeros(1100)
    narrow[:1000] = 1
    return {
        "three tokens": (np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.1, 0.3])),
        "equal": (np.array([0.5, 0.3, 0.2]), np.array([0.5, 0.3, 0.2])),
        "a long tail": (_softmax(logits), _softmax(logits + 0.3 * rng.standard_normal(20_000))),
        "all tail": (_softmax(flat), _softmax(flat + 0.2 * rng.standard_normal(3000))),
        # All of one law lies just above 1/1024, all of the other just below.
        "about the threshold": (narrow / 1000, np.full(1100, 1 / 1100)),
        "top-k of a tail": (
            _softmax(logits),
            np.where(np.arange(20_000) < 9000, _softmax(logits), 0),
        ),
    }


@pytest.mark.parametrize("name", _pairs_of_laws())
def test_two_laws_on_the_same_noise_agree_as_often_as_promised(name):
    p, q = (Distribution.dense(row) for row in _pairs_of_laws()[name])
    distance = 1 - p.overlap(q)
    promised = (1 - distance) / (1 + distance)
    n = 3000
    agreed = int((draws(p, n, seed=5) == draws(q, n, seed=5)).sum())
    assert stats.binom.cdf(agreed, n, promised) > ALPHA
    if distance < 1e-12:
        assert agreed == n


# --- the scripted chooser ------------------------------------------------------------------------


def test_scripted_answers_come_in_order_and_must_be_possible():
    chooser = ScriptedChooser([True, False], [1, 0])
    law, place = Distribution.dense([0.0, 1.0]), Place(0, "target")
    assert chooser.accept(0.1, place)
    assert not chooser.accept(0.9, place)
    assert chooser.draw(law, place) == 1
    with pytest.raises(ValueError, match="probability zero"):
        chooser.draw(law, place)


# --- enumeration ---------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3), min_size=1, max_size=4))
def test_enumerated_weights_sum_to_one_and_are_products(rows):
    laws = [Distribution.dense(row) for row in rows]

    def program(chooser: Chooser) -> tuple[int, ...]:
        return tuple(chooser.draw(law, Place(i, "residual")) for i, law in enumerate(laws))

    outcomes = list(enumerate_outcomes(program))
    assert len(outcomes) == np.prod([len(row) for row in rows])
    assert len({tokens for tokens, _ in outcomes}) == len(outcomes)
    assert sum(weight for _, weight in outcomes) == pytest.approx(1.0, abs=1e-12)
    for tokens, weight in outcomes:
        wanted = np.prod([law[token] for law, token in zip(laws, tokens, strict=True)])
        assert weight == pytest.approx(wanted, rel=1e-12)


def test_enumeration_follows_branches_whose_length_depends_on_chance():
    def program(chooser: Chooser) -> int:
        heads = 0
        while heads < 5 and chooser.accept(0.25, Place(heads, "accept")):
            heads += 1
        return heads

    outcomes = dict(enumerate_outcomes(program))
    assert outcomes == {n: pytest.approx(0.25**n * (0.75 if n < 5 else 1)) for n in range(6)}


def test_impossible_branches_are_not_walked():
    outcomes = list(
        enumerate_outcomes(
            lambda c: (c.accept(0.0, Place(0, "accept")), c.accept(1.5, Place(1, "accept")))
        )
    )
    assert outcomes == [((False, True), 1.0)]


@pytest.mark.parametrize("purpose", ["draft", "residual", "accept"])
def test_noise_used_twice_is_caught(purpose):
    law, place = Distribution.dense([0.5, 0.5]), Place(2, purpose, 1, 3)
    asks = {
        "draw": lambda chooser: chooser.draw(law, place),
        "accept": lambda chooser: chooser.accept(0.5, place),
    }
    for first in asks.values():
        for second in asks.values():
            chooser = EnumeratingChooser([])
            first(chooser)
            with pytest.raises(AssertionError, match="twice"):
                second(chooser)


def test_shared_target_noise_is_enumerated_jointly():
    p, q = Distribution.dense([0.5, 0.3, 0.2]), Distribution.dense([0.6, 0.1, 0.3])

    def program(chooser: Chooser) -> tuple[int, int]:
        return chooser.draw(q, Place(0, "target")), chooser.draw(p, Place(0, "target"))

    joint = np.zeros((3, 3))
    for (x, y), weight in enumerate_outcomes(program):
        joint[x, y] += weight
    np.testing.assert_allclose(joint.sum(1), q.to_dense(), atol=1e-12)
    np.testing.assert_allclose(joint.sum(0), p.to_dense(), atol=1e-12)
    assert joint.trace() > np.outer(q.to_dense(), p.to_dense()).trace() + 0.2


def test_other_places_stay_independent_of_shared_noise():
    p = Distribution.dense([0.5, 0.5])

    def program(chooser: Chooser) -> tuple[int, ...]:
        return tuple(chooser.draw(p, Place(i, "target")) for i in range(3))

    assert all(weight == 0.125 for _, weight in enumerate_outcomes(program))
    assert all(a != b for a, b in pairwise(sorted(t for t, _ in enumerate_outcomes(program))))


def test_a_probability_that_is_not_a_number_stops_the_enumeration():
    law = Distribution(np.array([0, 1]), np.array([0.5, np.nan]), 2)
    programs: list[Callable[[Chooser], object]] = [
        lambda chooser: chooser.draw(law, Place(0, "draft")),
        lambda chooser: chooser.accept(np.nan, Place(0, "accept")),
    ]
    for program in programs:
        with pytest.raises(ArithmeticError, match="not a number"):
            list(enumerate_outcomes(program))


# --- who comes next -------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [5, 5000])
def test_a_race_begins_with_what_is_drawn_and_names_nobody_twice(vocab):
    law = Distribution.dense(np.random.default_rng(vocab).random(vocab) ** 6)
    for seed in range(200):
        chooser, place = SeededChooser(seed), Place(seed % 7, "target")
        first = chooser.race(law, place, 4)
        assert first[0] == chooser.draw(law, place)
        assert len(set(first)) == len(first) <= 4
        assert all(law[token] > 0 for token in first)


def test_who_comes_second_would_win_without_the_first():
    """Of two tokens: the other one. Of three with the law of Plackett and Luce."""
    p = np.array([0.5, 0.3, 0.2])
    law, n = Distribution.dense(p), 20_000
    counts = np.zeros((3, 3), dtype=int)
    for seed in range(n):
        first, second, _ = SeededChooser(seed).race(law, Place(0, "target"), 3)
        counts[first, second] += 1
    expected = p[:, None] * p[None, :] / (1 - p[:, None])
    np.fill_diagonal(expected, 0.0)
    assert chi_square(counts.ravel(), expected.ravel()) > ALPHA


def test_enumeration_walks_the_same_orders():
    p = np.array([0.5, 0.3, 0.2])
    law = Distribution.dense(p)
    orders = {}
    for order, weight in enumerate_outcomes(
        lambda chooser: tuple(chooser.race(law, Place(0, "target"), 3))
    ):
        orders[order] = orders.get(order, 0.0) + weight
    assert len(orders) == 6
    for (first, second, third), weight in orders.items():
        assert weight == pytest.approx(p[first] * p[second] / (p[second] + p[third]), abs=1e-12)


def test_a_scripted_race_takes_as_many_tokens():
    law = Distribution.dense([0.5, 0.3, 0.2])
    assert ScriptedChooser(draws=[2, 0, 1]).race(law, Place(0, "target"), 2) == [2, 0]
