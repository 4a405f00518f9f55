"""Block verification keeps at least as much as one-by-one rejection, and on average more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.chooser import Chooser, ScriptedChooser, enumerate_outcomes
from outrider.core.distribution import Distribution
from outrider.core.proposal import Proposal
from outrider.rules.block import Block
from outrider.rules.rejection import Rejection


def law_after(seed: int, path: tuple[int, ...], vocab_size: int = 3) -> Distribution:
    rng = np.random.default_rng([seed, len(path), *path])
    return Distribution.dense(rng.dirichlet(np.ones(vocab_size)))


def expected_accepted(rule, seed: int, length: int) -> float:
    """Mean number of accepted drafts, by enumeration."""

    def program(chooser: Chooser) -> int:
        tokens, laws = [], []
        for depth in range(length):
            q = law_after(seed + 1, tuple(tokens))
            token, law = rule.draft(q, chooser, depth, 0, depth)
            tokens.append(token)
            laws.append(law)
        chain = Proposal.chain(tokens, laws)
        verdict = rule.judge(
            lambda node: law_after(seed, tuple(chain.path_tokens(node))), chain, chooser, 0, 0
        )
        return len(verdict.path)

    return sum(kept * weight for kept, weight in enumerate_outcomes(program))


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 4))
def test_it_never_accepts_fewer_in_expectation(seed, length):
    block, single = (expected_accepted(rule, seed, length) for rule in (Block(), Rejection()))
    assert block >= single - 1e-12
    if length == 1:  # one token leaves nothing to judge together
        assert block == pytest.approx(single, abs=1e-12)


def test_it_does_accept_more():
    gains = [
        expected_accepted(Block(), seed, 3) - expected_accepted(Rejection(), seed, 3)
        for seed in range(0, 40, 2)
    ]
    assert max(gains) > 0.02
    assert sum(g > 1e-6 for g in gains) > len(gains) / 2


def test_a_worked_example():
    """The paper's first example: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 11/9 against 10/9."""
    p, q = Distribution.dense([1.0, 2.0]), Distribution.dense([2.0, 1.0])

    def mean(rule):
        def program(chooser):
            drafted = [rule.draft(q, chooser, depth, 0, depth) for depth in range(2)]
            chain = Proposal.chain(*zip(*drafted, strict=True))
            return len(rule.judge(lambda node: p, chain, chooser, 0, 0).path)

        return sum(kept * weight for kept, weight in enumerate_outcomes(program))

    assert mean(Rejection()) == pytest.approx(10 / 9)
    assert mean(Block()) == pytest.approx(11 / 9)


def test_a_later_prefix_can_stand_though_an_earlier_one_was_refused():
    p, q = Distribution.dense([1.0, 2.0]), Distribution.dense([2.0, 1.0])
    chain = Proposal.chain([0, 1], [q, q])
    verdict = Block().judge(lambda node: p, chain, ScriptedChooser([False, True], [1]), 0, 0)
    assert verdict.path == (0, 1)
    assert verdict.kind == "bonus"
