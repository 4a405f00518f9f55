"""What every rule promises; each entry of the table is covered without an edit here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.chooser import Chooser, SeededChooser, enumerate_outcomes
from outrider.core.distribution import Distribution
from outrider.core.proposal import ROOT, Proposal
from outrider.core.verdict import Verdict
from outrider.errors import ProposalError
from outrider.protocols import Rule
from outrider.registry import RULES

pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@pytest.fixture(params=list(RULES))
def rule(request) -> Rule:
    return RULES.load(request.param)()


def law_after(seed: int, path: list[int], vocab_size: int = 4) -> Distribution:
    rng = np.random.default_rng([seed, len(path), *path])
    return Distribution.dense(rng.dirichlet(np.ones(vocab_size)))


def play(
    rule: Rule, seed: int, length: int, chooser: Chooser, vocab_size: int = 4
) -> tuple[Proposal, Verdict]:
    """A chain drafted as the rule says, and what it makes of it."""
    tokens: list[int] = []
    laws: list[Distribution | None] = []
    for depth in range(length):
        q = law_after(seed + 1, tokens, vocab_size)
        token, law = rule.draft(q, chooser, 5 + depth, 2, depth)
        tokens.append(token)
        laws.append(law)
    chain = Proposal.chain(tokens, laws)
    verdict = rule.judge(
        lambda node: law_after(seed, chain.path_tokens(node), vocab_size), chain, chooser, 5, 2
    )
    return chain, verdict


def test_it_is_a_rule_and_says_whether_it_is_exact(rule):
    assert isinstance(rule, Rule)
    assert RULES[rule.name]
    assert rule.exact in (True, False)
    assert type(rule).__doc__


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), length=st.integers(0, 5))
def test_the_verdict_is_a_path_and_a_token(rule, seed, length):
    chain, verdict = play(rule, seed, length, SeededChooser(seed))
    kept = len(verdict.path)
    assert verdict.path == tuple(range(kept))
    assert verdict.kind == ("bonus" if kept == len(chain) else "correction")
    assert 0 <= verdict.token < 4


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), length=st.integers(0, 5))
def test_the_same_place_and_seed_give_the_same_verdict(rule, seed, length):
    first = play(rule, seed, length, SeededChooser(seed))
    play(rule, seed + 1, 3, SeededChooser(seed))  # nothing of this may linger
    again = play(rule, seed, length, SeededChooser(seed))
    assert (first[0].tokens, first[1]) == (again[0].tokens, again[1])


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 4))
def test_a_draft_says_which_law_it_was_drawn_from(rule, seed, length):
    chain, _ = play(rule, seed, length, SeededChooser(seed))
    for node, law in enumerate(chain.laws):
        q = law_after(seed + 1, list(chain.tokens[:node]))
        assert q[chain.tokens[node]] > 0
        assert law is None or law.to_dense().tolist() == q.to_dense().tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["greedy", "rejection", "coupled", "block"])
def test_these_rules_always_accept_where_target_and_draft_are_equal(name, seed):
    """Their own claim, no part of the contract: a rule that rejects every draft is exact too."""
    rule, q = RULES.load(name)(), law_after(seed, [])

    def program(chooser: Chooser) -> bool:
        token, law = rule.draft(q, chooser, 0, 0, 0)
        chain = Proposal.chain([token], [law])
        return rule.judge(lambda node: q, chain, chooser, 0, 0).path == (0,)

    assert all(accepted for accepted, _ in enumerate_outcomes(program))


@pytest.mark.parametrize("seed", range(3))
def test_enumerated_weights_sum_to_one(rule, seed):
    """And no noise is used twice, which the enumerating chooser would refuse."""
    weights = [w for _, w in enumerate_outcomes(lambda c: play(rule, seed, 2, c, 3)[1])]
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)


def test_trees_are_judged_along_one_path_or_refused(rule):
    """A row that no emitted token is decided from need not be made into a distribution."""
    if not rule.trees:
        tree = Proposal((0, 1), (ROOT, ROOT), (None, None))
        with pytest.raises(ProposalError, match="chains"):
            rule.judge(lambda node: law_after(0, []), tree, SeededChooser(0), 0, 0)
        return
    tree = Proposal((0, 1, 2, 3), (ROOT, 0, 1, ROOT), (None,) * 4)
    for seed in range(20):
        asked: list[int] = []

        def target(node: int, asked: list[int] = asked, seed: int = seed) -> Distribution:
            asked.append(node)
            return law_after(seed, tree.path_tokens(node))

        verdict = rule.judge(target, tree, SeededChooser(seed), 0, 0)
        assert asked == [ROOT, *verdict.path]
