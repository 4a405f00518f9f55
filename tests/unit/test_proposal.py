"""Token trees: what is a tree, and what lies on its paths."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.distribution import Distribution
from outrider.core.proposal import ROOT, Proposal

# The shape checker picks the items that it looks at by `random`, which Hypothesis warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@st.composite
def trees(draw, most: int = 12) -> Proposal:
    """A tree of any shape whose siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(ROOT, node - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        tokens.append(draw(st.sampled_from(sorted(set(range(20)) - taken))))
        parents.append(parent)
    return Proposal(tuple(tokens), tuple(parents), (None,) * len(tokens))


@given(trees())
def test_paths_run_from_the_top_along_parents(tree):
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[-1] == node
        assert tree.parents[path[0]] == ROOT
        assert all(tree.parents[below] == above for above, below in pairwise(path))
        assert tree.path_tokens(node) == [tree.tokens[n] for n in path]
    assert tree.path(ROOT) == [] == tree.path_tokens(ROOT)


@given(trees())
def test_children_are_all_nodes_once_in_the_order_drawn(tree):
    seen: list[int] = []
    for node in range(ROOT, len(tree)):
        children = list(tree.children(node))
        assert children == [n for n, parent in enumerate(tree.parents) if parent == node]
        for child in children:
            assert tree.child_with(node, tree.tokens[child]) == child
        assert tree.child_with(node, 99) is None
        seen += children
    assert sorted(seen) == list(range(len(tree)))


@given(trees())
def test_a_chain_is_a_tree_where_every_path_is_a_prefix(tree):
    straight = all(tree.path(node) == list(range(node + 1)) for node in range(len(tree)))
    assert tree.is_chain == straight


@given(st.lists(st.integers(0, 5), max_size=8))
def test_chain(tokens):
    chain = Proposal.chain(tokens)
    assert chain.is_chain
    assert len(chain) == len(tokens)
    assert chain.tokens == tuple(tokens)
    assert chain.laws == (None,) * len(tokens)
    assert chain.path_tokens(len(tokens) - 1) == tokens


@given(trees(), st.data())
def test_a_parent_that_comes_later_is_refused(tree, data):
    if not len(tree):
        return
    node = data.draw(st.integers(0, len(tree) - 1))
    parents = list(tree.parents)
    parents[node] = data.draw(st.one_of(st.integers(node, node + 5), st.integers(-5, ROOT - 1)))
    with pytest.raises(ValueError, match=rf"Node {node} has parent"):
        Proposal(tree.tokens, tuple(parents), tree.laws)


def test_equal_siblings_are_refused_equal_cousins_are_not():
    with pytest.raises(ValueError, match="Two siblings"):
        Proposal((3, 3), (ROOT, ROOT), (None, None))
    assert len(Proposal((3, 4, 5, 5), (ROOT, ROOT, 0, 1), (None,) * 4)) == 4


@pytest.mark.parametrize(
    ("tokens", "parents", "laws"),
    [((1,), (), (None,)), ((1,), (ROOT,), ()), ((), (ROOT,), (None,))],
)
def test_unequal_lengths_are_refused(tokens, parents, laws):
    with pytest.raises(ValueError, match="one parent and one law"):
        Proposal(tokens, parents, laws)


def test_a_chain_with_too_few_laws_is_refused():
    with pytest.raises(ValueError, match="one parent and one law"):
        Proposal.chain([1, 2], [])
    with pytest.raises(ValueError, match="one parent and one law"):
        Proposal.chain([1, 2], [None])


def test_a_token_that_its_own_law_rules_out_is_refused():
    q = Distribution.dense([0.5, 0.5, 0.0])
    assert Proposal.chain([1], [q]).law(0, 3) is q
    with pytest.raises(ValueError, match="drawn from"):
        Proposal.chain([2], [q])


def test_law_of_a_deterministic_token_is_one_hot():
    q = Distribution.dense([0.25, 0.75, 0.0])
    proposal = Proposal.chain([1, 2], [q, None])
    assert proposal.law(0, 3) is q
    assert proposal.law(1, 3).to_dense().tolist() == [0.0, 0.0, 1.0]
