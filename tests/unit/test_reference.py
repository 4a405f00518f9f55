"""The textbook step: its law, its manners, and its agreement with the production rule."""

from __future__ import annotations

import inspect
from collections import Counter

import numpy as np
import pytest

from outrider import speculative_decode_step
from outrider.core.chooser import Chooser, enumerate_outcomes
from outrider.core.distribution import Distribution
from outrider.core.proposal import Proposal
from outrider.rules.rejection import Rejection
from tests.chance import ALPHA, chi_square

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.1, 0.3])


class Toy:
    """Context-dependent laws over 3 tokens that count how often they are asked for."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls: list[list[int]] = []
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def law(self, ids) -> np.ndarray:
        key = tuple(ids[-2:])
        if key not in self._known:
            rng = np.random.default_rng([self.seed, *key])
            self._known[key] = rng.dirichlet(np.ones(3))
        return self._known[key]

    def __call__(self, ids) -> np.ndarray:
        self.calls.append(list(ids))
        return self.law(ids)


class ParallelToy(Toy):
    """Scores several positions in one pass, and refuses to be asked for one."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.passes: list[tuple[list[int], int]] = []

    def __call__(self, ids):
        raise AssertionError("A target that scores in parallel was asked one position at a time.")

    def parallel_forward(self, ids, n_positions):
        self.passes.append((list(ids), n_positions))
        first = len(ids) - n_positions + 1
        return np.array([self.law(ids[: first + i]) for i in range(n_positions)])


# --- the worked example --------------------------------------------------------------------------


def test_overlap_of_the_example():
    assert Distribution.dense(P).overlap(Distribution.dense(Q)) == pytest.approx(0.8, abs=1e-15)


def test_the_example_keeps_50_10_20_and_repairs_20_points_of_the_second_token():
    """Exact, by enumeration of the production rule."""

    def program(chooser: Chooser) -> tuple[bool, int]:
        rule = Rejection()
        token, law = rule.draft(Distribution.dense(Q), chooser, 0, 0, 0)
        verdict = rule.judge(
            lambda node: Distribution.dense(P), Proposal.chain([token], [law]), chooser, 0, 0
        )
        return bool(verdict.path), token if verdict.path else verdict.token

    kept, repaired = np.zeros(3), np.zeros(3)
    for (accepted, token), weight in enumerate_outcomes(program):
        (kept if accepted else repaired)[token] += weight
    np.testing.assert_allclose(kept, [0.5, 0.1, 0.2], atol=1e-12)
    np.testing.assert_allclose(repaired, [0.0, 0.2, 0.0], atol=1e-12)


def test_the_example_by_draws():
    rng = np.random.default_rng(20)
    n = 40_000
    counts = np.zeros((2, 3))  # kept or repaired, by token
    target, draft = (lambda ids: P), (lambda ids: Q)
    for _ in range(n):
        new = speculative_decode_step(target, draft, [0], 1, rng)
        counts[int(len(new) == 1), new[0]] += 1  # a kept draft is followed by a bonus token
    law = np.array([[0.5, 0.1, 0.2], [0.0, 0.2, 0.0]])
    assert chi_square(counts, law) > ALPHA
    assert chi_square(counts.sum(0), P) > ALPHA
    assert chi_square(counts.sum(0), Q) < ALPHA


def test_the_repair_is_drawn_from_the_residual_and_from_nothing_else():
    class Unlucky:
        """Draws token 0 and rejects it; it notes the laws that it drew from."""

        def __init__(self) -> None:
            self.laws: list[np.ndarray] = []

        def choice(self, n, p):
            self.laws.append(p)
            return 0

        def random(self):
            return 0.9999

    rng = Unlucky()
    step = inspect.unwrap(speculative_decode_step)  # this is no numpy generator
    assert step(lambda ids: P, lambda ids: Q, [0], 2, rng) == [0]
    *drafts, repair = rng.laws
    np.testing.assert_allclose(drafts, [Q, Q], atol=1e-15)
    np.testing.assert_allclose(repair, [0.0, 1.0, 0.0], atol=1e-15)


# --- the law, with context -----------------------------------------------------------------------


def _two_tokens_match(k: int, parallel: bool, n: int) -> None:
    target, draft = (ParallelToy if parallel else Toy)(1), Toy(2)
    rng = np.random.default_rng([k, parallel, n])
    counts = np.zeros((3, 3))
    for _ in range(n):
        new = speculative_decode_step(target, draft, [2, 0], k, rng)
        while len(new) < 2:
            new += speculative_decode_step(target, draft, [2, 0, *new], k, rng)
        counts[new[0], new[1]] += 1

    def law(model: Toy) -> np.ndarray:
        return np.array([model.law([2, 0])[a] * model.law([2, 0, a]) for a in range(3)])

    assert chi_square(counts, law(target)) > ALPHA
    assert chi_square(counts, law(draft)) < ALPHA


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("parallel", [False, True])
def test_draws_match_the_target(k, parallel):
    _two_tokens_match(k, parallel, 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(5))
def test_400_thousand_draws_match_the_target(k):
    """80,000 for each draft length, 400,000 in all."""
    _two_tokens_match(k, parallel=True, n=80_000)


def test_one_step_of_reference_and_production_agree_in_law():
    """Production exactly, the reference by draws; lengths and all."""
    target, draft, k, context = Toy(3), Toy(4), 2, [0, 1]

    def program(chooser: Chooser) -> tuple[int, ...]:
        rule = Rejection()
        tokens: list[int] = []
        laws = []
        for i in range(k):
            q = Distribution.dense(draft.law([*context, *tokens]))
            token, law = rule.draft(q, chooser, i, 0, i)
            tokens.append(token)
            laws.append(law)
        chain = Proposal.chain(tokens, laws)
        verdict = rule.judge(
            lambda node: Distribution.dense(target.law([*context, *chain.path_tokens(node)])),
            chain,
            chooser,
            0,
            0,
        )
        return (*(tokens[node] for node in verdict.path), verdict.token)

    law: Counter[tuple[int, ...]] = Counter()
    for new, weight in enumerate_outcomes(program):
        law[new] += weight
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    rng = np.random.default_rng(7)
    drawn = Counter(
        tuple(speculative_decode_step(target, draft, context, k, rng)) for _ in range(20_000)
    )
    outputs = sorted({*law, *drawn})
    counts = np.array([drawn[output] for output in outputs])
    assert chi_square(counts, np.array([law[output] for output in outputs])) > ALPHA


# --- manners -------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 4])
def test_one_parallel_pass_and_k_draft_calls(k):
    for seed in range(20):
        target, draft = ParallelToy(5), Toy(6)
        new = speculative_decode_step(target, draft, [1, 2], k, np.random.default_rng(seed))
        assert 1 <= len(new) <= k + 1
        assert len(draft.calls) == k
        [(ids, n_positions)] = target.passes
        assert n_positions == k + 1
        assert len(ids) == 2 + k
        assert ids[:2] == [1, 2]
        assert [ids[: 2 + i] for i in range(k)] == draft.calls
        assert ids[2 : 2 + len(new) - 1] == new[:-1]


def test_a_plain_target_is_asked_at_every_prefix():
    target, draft = Toy(5), Toy(6)
    speculative_decode_step(target, draft, [1], 3, np.random.default_rng(0))
    assert [len(ids) for ids in target.calls] == [1, 2, 3, 4]
    assert [len(ids) for ids in draft.calls] == [1, 2, 3]


def test_the_context_is_left_alone():
    context = [1, 2]
    speculative_decode_step(Toy(5), Toy(6), context, 3, np.random.default_rng(0))
    assert context == [1, 2]


def test_the_same_seed_gives_the_same_step():
    steps = [
        speculative_decode_step(Toy(5), Toy(6), [0], 4, np.random.default_rng(3)) for _ in range(2)
    ]
    assert steps[0] == steps[1]


def test_equal_laws_accept_everything():
    for seed in range(200):
        new = speculative_decode_step(Toy(5), Toy(5), [0], 3, np.random.default_rng(seed))
        assert len(new) == 4


def test_disjoint_laws_accept_nothing():
    for seed in range(50):
        new = speculative_decode_step(
            lambda ids: np.array([0.5, 0.5, 0.0]),
            lambda ids: np.array([0.0, 0.0, 1.0]),
            [0],
            3,
            np.random.default_rng(seed),
        )
        assert len(new) == 1
        assert new[0] in (0, 1)


BAD = [
    np.array([0.5, 0.6, -0.1]),
    np.array([0.5, 0.3, 0.1]),
    np.array([np.nan, 0.5, 0.5]),
    np.array([np.inf, 0.0, 0.0]),
    np.array([[0.5, 0.3, 0.2]]),
    np.array([]),
    np.array(1.0),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad.tolist()))
def test_vectors_that_are_no_probabilities_are_refused(bad):
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="The target must return a vector of probabilities"):
        speculative_decode_step(lambda ids: bad, lambda ids: Q, [0], 1, rng)
    with pytest.raises(ValueError, match="The draft must return a vector of probabilities"):
        speculative_decode_step(lambda ids: P, lambda ids: bad, [0], 1, rng)


def test_a_negative_k_is_refused():
    with pytest.raises(ValueError, match="k must be 0 or more"):
        speculative_decode_step(lambda ids: P, lambda ids: Q, [0], -1, np.random.default_rng(0))


@pytest.mark.parametrize("rows", [0, 1, 2, 4])
def test_a_parallel_target_that_returns_another_number_of_rows_is_refused(rows):
    class Wrong(Toy):
        def parallel_forward(self, ids, n_positions):
            return np.tile(P, (rows, 1))

    with pytest.raises(ValueError, match="3 positions"):
        speculative_decode_step(Wrong(1), lambda ids: Q, [0], 2, np.random.default_rng(0))


@pytest.mark.parametrize("size", [2, 4])
def test_a_draft_with_another_vocabulary_is_refused(size):
    draft = lambda ids: np.full(size, 1 / size)  # noqa: E731
    for seed in range(5):
        with pytest.raises(ValueError, match="vocabulary"):
            speculative_decode_step(lambda ids: P, draft, [0], 2, np.random.default_rng(seed))
