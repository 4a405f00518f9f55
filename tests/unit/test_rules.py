"""Rules one by one: scripted courses, exact laws on trees, and what they must not depend on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.chooser import (
    Chooser,
    Place,
    ScriptedChooser,
    SeededChooser,
    enumerate_outcomes,
)
from outrider.core.distribution import Distribution
from outrider.core.proposal import ROOT, Proposal
from outrider.core.verdict import Verdict
from outrider.models.toy import ToyModel
from outrider.protocols import Rule
from outrider.registry import RULES
from outrider.rules.coupled import Coupled
from outrider.rules.greedy import Greedy
from outrider.rules.rejection import Rejection

pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

Laws = Callable[[Sequence[int]], Distribution]
"""The law of the token after some drafted tokens."""


def laws_of(seed: int, vocab_size: int, zero: float = 0.0) -> Laws:
    """Random laws that depend on all of the path, some of whose tokens cannot come."""

    def law(path: Sequence[int]) -> Distribution:
        rng = np.random.default_rng([seed, len(path), *path])
        weights = np.exp(1.5 * rng.standard_normal(vocab_size))
        weights[rng.random(vocab_size) < zero] = 0.0
        weights[rng.integers(vocab_size)] += 0.2
        return Distribution.dense(weights)

    return law


def judge(rule: Rule, p: Laws, proposal: Proposal, chooser: Chooser, position: int = 0) -> Verdict:
    return rule.judge(
        lambda node: p(proposal.path_tokens(node)), proposal, chooser, position, round=0
    )


def emitted(proposal: Proposal, verdict: Verdict) -> tuple[int, ...]:
    return (*(proposal.tokens[node] for node in verdict.path), verdict.token)


@st.composite
def trees(draw, vocab_size: int = 4, most: int = 8) -> Proposal:
    """Any tree of deterministic tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.integers(ROOT, len(tokens) - 1))
        taken = {t for t, above in zip(tokens, parents, strict=True) if above == parent}
        if left := sorted(set(range(vocab_size)) - taken):
            tokens.append(draw(st.sampled_from(left)))
            parents.append(parent)
    return Proposal(tuple(tokens), tuple(parents), (None,) * len(tokens))


def fit_for(name: str, tree: Proposal) -> Proposal:
    """A rule that judges chains only is given the same tokens in a row."""
    return tree if RULES.load(name).trees else Proposal.chain(tree.tokens)


# --- every rule ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=60)
@given(tree=trees(), seed=st.integers(0, 999))
def test_the_path_is_a_path_of_the_proposal_and_the_kind_fits_it(name, tree, seed):
    tree = fit_for(name, tree)
    verdict = judge(RULES.load(name)(), laws_of(seed, 4, zero=0.2), tree, SeededChooser(seed))
    last = verdict.path[-1] if verdict.path else ROOT
    assert list(verdict.path) == tree.path(last)
    assert verdict.kind == ("correction" if tree.children(last) else "bonus")
    p = laws_of(seed, 4, zero=0.2)
    tokens = emitted(tree, verdict)
    for i, token in enumerate(tokens):
        assert p(tokens[:i])[token] > 0, "a token that the target cannot emit was emitted"


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40)
@given(tree=trees(), seed=st.integers(0, 999))
def test_a_rule_is_pure(name, tree, seed):
    tree = fit_for(name, tree)
    rule, p = RULES.load(name)(), laws_of(seed, 4)
    given_laws: dict[int, Distribution] = {}

    def target(node: int) -> Distribution:
        return given_laws.setdefault(node, p(tree.path_tokens(node)))

    before = (tree.tokens, tree.parents, tree.laws)
    first = rule.judge(target, tree, SeededChooser(seed), 3, 1)
    rule.judge(lambda node: laws_of(1, 4)([]), Proposal.chain([0, 1]), SeededChooser(5), 0, 0)
    assert rule.judge(target, tree, SeededChooser(seed), 3, 1) == first
    assert (tree.tokens, tree.parents, tree.laws) == before
    for node, law in given_laws.items():
        assert law.to_dense().tolist() == p(tree.path_tokens(node)).to_dense().tolist()


@pytest.mark.parametrize("name", RULES)
def test_without_a_draft_the_target_alone_speaks(name):
    verdict = judge(RULES.load(name)(), laws_of(1, 4), Proposal(), SeededChooser(1))
    assert (verdict.path, verdict.kind) == ((), "bonus")


# --- greedy and coupled: the proposal cannot change the text -------------------------------------


@settings(max_examples=100)
@given(tree=trees(), seed=st.integers(0, 999))
def test_greedy_output_does_not_depend_on_the_proposal(tree, seed):
    p = laws_of(seed, 4)
    tokens = emitted(tree, judge(Greedy(), p, tree, ScriptedChooser()))
    for i, token in enumerate(tokens):
        assert token == p(tokens[:i]).argmax()
    plain: list[int] = []
    for _ in range(len(tokens)):
        plain.append(p(plain).argmax())
    assert tree.child_with(_node_of(tree, plain[:-1]), plain[-1]) is None, "it stopped too soon"


@settings(max_examples=100)
@given(tree=trees(), seed=st.integers(0, 999), position=st.integers(0, 50))
def test_coupled_output_does_not_depend_on_the_proposal(tree, seed, position):
    p, chooser = laws_of(seed, 4), SeededChooser(seed)
    tokens = emitted(tree, judge(Coupled(), p, tree, chooser, position))
    plain: list[int] = []
    for i in range(len(tokens)):
        plain.append(chooser.draw(p(plain), Place(position + i, "target")))
    assert list(tokens) == plain
    assert tree.child_with(_node_of(tree, plain[:-1]), plain[-1]) is None, "it stopped too soon"


def _node_of(tree: Proposal, tokens: Sequence[int]) -> int:
    node = ROOT
    for token in tokens:
        child = tree.child_with(node, token)
        assert child is not None
        node = child
    return node


def test_greedy_and_coupled_drafts_agree_with_an_equal_target():
    q = laws_of(4, 5)([])
    for position in range(50):
        chooser = SeededChooser(2)
        for rule in (Greedy(), Coupled()):
            token, law = rule.draft(q, chooser, position, 3, 1)
            assert law is None, "the choice is fixed given the noise, so its law is one-hot"
            verdict = rule.judge(
                lambda node: q, Proposal.chain([token], [law]), chooser, position, 7
            )
            assert verdict.path == (0,)


def test_greedy_takes_the_lowest_of_equal_tokens():
    p = Distribution.dense([0.1, 0.45, 0.45])
    chain = Proposal.chain([1])
    assert judge(Greedy(), lambda path: p, chain, ScriptedChooser()).path == (0,)
    assert judge(Greedy(), lambda path: p, Proposal.chain([2]), ScriptedChooser()) == Verdict(
        (), 1, "correction"
    )
    assert Greedy().draft(p, ScriptedChooser(), 0, 0, 0) == (1, None)


# --- rejection: scripted courses -----------------------------------------------------------------

P = Distribution.dense([0.5, 0.3, 0.2])
Q = Distribution.dense([0.6, 0.1, 0.3])


def test_rejection_scripted_all_accepted_then_bonus():
    chain = Proposal.chain([0, 2], [Q, Q])
    verdict = judge(Rejection(), lambda path: P, chain, ScriptedChooser([True, True], [1]))
    assert verdict == Verdict((0, 1), 1, "bonus")


def test_rejection_scripted_repair_comes_from_the_residual():
    chain = Proposal.chain([0, 2], [Q, Q])
    verdict = judge(Rejection(), lambda path: P, chain, ScriptedChooser([True, False], [1]))
    assert verdict == Verdict((0,), 1, "correction")
    with pytest.raises(ValueError, match="probability zero"):  # p − q leaves only token 1
        judge(Rejection(), lambda path: P, chain, ScriptedChooser([False], [0]))


def test_rejection_scripted_siblings_are_tried_in_turn():
    tree = Proposal((0, 2, 1), (ROOT, ROOT, 1), (Q, Q, None))
    verdict = judge(Rejection(), lambda path: P, tree, ScriptedChooser([False, True, True], [2]))
    assert verdict == Verdict((1, 2), 2, "bonus")


def test_rejection_asks_for_each_acceptance_with_the_ratio():
    asked: list[tuple[float, Place]] = []

    class Recorder(ScriptedChooser):
        def accept(self, probability: float, place: Place) -> bool:
            asked.append((probability, place))
            return super().accept(probability, place)

    chain = Proposal.chain([0, 1, 2], [Q, Q, Q])
    Rejection().judge(lambda node: P, chain, Recorder([True, True, False], [1]), 10, 4)
    assert [probability for probability, _ in asked] == pytest.approx([5 / 6, 1.0, 2 / 3])
    assert [place for _, place in asked] == [
        Place(10 + i, "accept", 4, node) for i, node in enumerate(range(3))
    ]


def test_rejection_draws_its_drafts_on_noise_of_their_own():
    token, law = Rejection().draft(Q, SeededChooser(1), 5, 2, 3)
    assert law is Q
    assert token == SeededChooser(1).draw(Q, Place(5, "draft", 2, 3))


# --- exact laws on trees -------------------------------------------------------------------------


def draft_tree(
    rule: Rule, q: Laws, shape: Sequence[Sequence[str]], chooser: Chooser, position: int = 0
) -> Proposal:
    """A tree drawn level by level; ``shape[d]`` says how each node's children are chosen.

    ``"s"`` is a draw by the rule from q without the siblings before it, ``"d"`` the most
    probable token left, chosen deterministically.
    """
    tokens: list[int] = []
    parents: list[int] = []
    drawn: list[Distribution | None] = []
    level = [(ROOT, ())]
    for depth, kinds in enumerate(shape):
        below = []
        for parent, path in level:
            left = q(path)
            for kind in kinds:
                node = len(tokens)
                if kind == "s":
                    token, law = rule.draft(left, chooser, position + depth, 0, node)
                else:
                    token, law = left.argmax(), None
                tokens.append(token)
                parents.append(parent)
                drawn.append(law)
                below.append((node, (*path, token)))
                rest = left.to_dense()
                rest[token] = 0.0
                if not rest.any():
                    break
                left = Distribution.dense(rest)
        level = below
    return Proposal(tuple(tokens), tuple(parents), tuple(drawn))


def output_law(rule: Rule, p: Laws, q: Laws, shape: Sequence[Sequence[str]]) -> np.ndarray:
    """The exact law of the first len(shape) + 1 tokens, plain decoding filling what is missing."""
    size = p(()).vocab_size
    length = len(shape) + 1

    def program(chooser: Chooser) -> tuple[int, ...]:
        tree = draft_tree(rule, q, shape, chooser)
        return emitted(tree, judge(rule, p, tree, chooser))

    rounds: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, weight in enumerate_outcomes(program):
        rounds[tokens] += weight
    law = np.zeros((size,) * length)
    for tokens, weight in rounds.items():
        for rest in product(range(size), repeat=length - len(tokens)):
            whole = (*tokens, *rest)
            law[whole] += weight * np.prod(
                [p(whole[:i])[whole[i]] for i in range(len(tokens), length)]
            )
    return law


def chain_rule(p: Laws, size: int, length: int) -> np.ndarray:
    law = np.zeros((size,) * length)
    for whole in product(range(size), repeat=length):
        law[whole] = np.prod([p(whole[:i])[whole[i]] for i in range(length)])
    return law


SHAPES = ["s", "s s", "s s s", "ss", "sss", "ss s", "s ss", "dd", "sd", "ds", "sds", "ss d", "d sd"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("zero", [0.0, 0.4])
def test_rejection_is_exact_on_any_tree(shape, seed, zero):
    p, q = laws_of(seed, 3, zero), laws_of(seed + 50, 3, zero)
    levels = shape.split()
    law = output_law(Rejection(), p, q, levels)
    np.testing.assert_allclose(law, chain_rule(p, 3, len(levels) + 1), atol=1e-12, rtol=0)


@settings(max_examples=15)
@given(
    shape=st.lists(st.text("sd", min_size=1, max_size=2), min_size=1, max_size=2),
    seed=st.integers(0, 10_000),
    zero=st.sampled_from([0.0, 0.3]),
)
def test_rejection_is_exact_on_random_trees(shape, seed, zero):
    p, q = laws_of(seed, 3, zero), laws_of(seed + 1, 3, zero)
    law = output_law(Rejection(), p, q, shape)
    np.testing.assert_allclose(law, chain_rule(p, 3, len(shape) + 1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", ["s", "s s", "ss", "sd", "dd", "ds s"])
@pytest.mark.parametrize("seed", [0, 1])
def test_coupled_is_exact_on_any_tree(shape, seed):
    p, q = laws_of(seed, 3), laws_of(seed + 50, 3)
    levels = shape.split()
    law = output_law(Coupled(), p, q, levels)
    np.testing.assert_allclose(law, chain_rule(p, 3, len(levels) + 1), atol=1e-12, rtol=0)


def test_the_tree_check_can_tell_siblings_drawn_from_another_law():
    """Siblings without replacement whose reported law is q with all tokens in it: biased."""

    class Misreported(Rejection):
        def draft(self, q, chooser, position, round, node):
            token, _ = super().draft(q, chooser, position, round, node)
            return token, laws_of(50, 3)(())

    p, q = laws_of(0, 3), laws_of(50, 3)
    law = output_law(Misreported(), p, q, ["ss"])
    assert np.abs(law - chain_rule(p, 3, 2)).max() > 1e-3


def test_rejection_accepts_the_overlap_on_a_chain_and_more_with_siblings():
    p, q = laws_of(3, 3), laws_of(53, 3)

    def kept(shape: Sequence[str]) -> float:
        def program(chooser: Chooser) -> bool:
            tree = draft_tree(Rejection(), q, shape, chooser)
            return bool(judge(Rejection(), p, tree, chooser).path)

        return sum(weight for yes, weight in enumerate_outcomes(program) if yes)

    assert kept(["s"]) == pytest.approx(p(()).overlap(q(())), abs=1e-12)
    assert kept(["ss"]) > kept(["s"]) + 1e-3
    assert kept(["sss"]) == pytest.approx(1.0, abs=1e-12)


def test_a_toy_model_gives_the_laws_that_it_scores():
    model = ToyModel.random(4, seed=3)
    cache = model.new_cache(10)
    tree = Proposal((1, 2, 3), (ROOT, ROOT, 0), (None,) * 3)
    rows = model.score(cache, [0], tree).exp().numpy()
    for node in range(ROOT, 3):
        np.testing.assert_allclose(
            rows[node + 1], model.next([0, *tree.path_tokens(node)]), atol=1e-15
        )
    cache.keep(1, [0, 2])
    assert cache.tokens == [0, 1, 3]
