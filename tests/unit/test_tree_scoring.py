"""A tree scored in one pass: each node as if its path had been scored alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import Engine
from outrider.core.proposal import ROOT, Proposal
from outrider.drafters.model import ModelDrafter
from outrider.drafters.shape import Dynamic, Static
from outrider.errors import ProposalError
from outrider.models.hf import HFModel
from tests.small_models import VOCAB, new_module

TREE_FAMILIES = ["llama", "qwen2", "gpt2", "mixtral"]
PROMPT = [5, 9, 3, 7, 11, 2, 8]


@st.composite
def trees(draw, most: int = 9) -> Proposal:
    """Any tree, siblings with different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(1, most))):
        parent = draw(st.integers(ROOT, node - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        tokens.append(draw(st.integers(3, VOCAB - 1).filter(lambda t, taken=taken: t not in taken)))
        parents.append(parent)
    return Proposal(tuple(tokens), tuple(parents), (None,) * len(tokens))


def fed(model: HFModel, tokens: list[int]):
    cache = model.new_cache(200)
    model.prefill(cache, tokens, None)
    return cache


@pytest.fixture(scope="module")
def switched() -> HFModel:
    """With the attention that keeps numbers the same in any block of a chain."""
    return HFModel(new_module("llama"), same_numbers=True)


@settings(max_examples=12)
@given(tree=trees(), pending=st.integers(1, 3), data=st.data())
def test_nodes_and_compaction_equal_chains(switched, tree, pending, data):
    """To rounding: the gaps between a path's keys change the order of the sums over keys."""
    model, (context, last) = switched, (PROMPT[:-pending], PROMPT[-pending:])
    cache = fed(model, context)
    rows = model.score(cache, last, tree)
    close = {"atol": 1e-4, "rtol": 1e-4}
    for node in range(len(tree)):
        alone = model.score(fed(model, context), last, Proposal.chain(tree.path_tokens(node)))
        torch.testing.assert_close(rows[1 + node], alone[-1], **close)
    # Any node may turn out to be the last accepted one.
    node = data.draw(st.integers(ROOT, len(tree) - 1))
    path = tree.path(node)
    cache.keep(len(PROMPT), path)
    assert cache.length == len(PROMPT) + len(path)
    fresh = fed(model, [*PROMPT, *tree.path_tokens(node)])
    for ours, theirs in zip(cache.layers.layers, fresh.layers.layers, strict=True):
        kept = slice(0, cache.length)
        torch.testing.assert_close(ours.keys[..., kept, :], theirs.keys[..., kept, :], **close)
        torch.testing.assert_close(ours.values[..., kept, :], theirs.values[..., kept, :], **close)
    after = model.score(cache, [4], Proposal.chain([6, 5]))
    torch.testing.assert_close(after, model.score(fresh, [4], Proposal.chain([6, 5])), **close)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_other_attentions_agree_to_rounding(family, attention):
    module = new_module(family)
    module.set_attn_implementation(attention)
    model = HFModel(module)
    assert model.trees
    tree = Proposal((4, 5, 6, 4, 9, 8), (ROOT, ROOT, 0, 0, 1, 4), (None,) * 6)
    rows = model.score(fed(model, PROMPT[:-1]), PROMPT[-1:], tree)
    for node in range(len(tree)):
        path = Proposal.chain(tree.path_tokens(node))
        alone = model.score(fed(model, PROMPT[:-1]), PROMPT[-1:], path)
        torch.testing.assert_close(rows[1 + node], alone[-1], atol=2e-4, rtol=2e-4)


def test_a_sliding_window_scores_chains_only():
    model = HFModel(new_module("mistral"))
    assert not model.trees
    with pytest.raises(ProposalError, match="chains"):
        model.score(fed(model, [1]), [2], Proposal((4, 5), (ROOT, ROOT), (None, None)))


@pytest.mark.parametrize("shape", [Static((3, 2, 1)), Static((2, 2, 2)), Dynamic(10, 3)], ids=str)
def test_text_is_plain_decodings_text_whatever_tree_is_drafted(switched, shape):
    torch.manual_seed(1)
    other = new_module("llama")
    with torch.no_grad():
        for weight in other.parameters():  # a draft that agrees now and then
            weight.add_(0.02 * torch.randn_like(weight))
    drafter = ModelDrafter(HFModel(other, same_numbers=True), shape=shape)
    engine = Engine(switched, drafter="none")
    for request in (
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2},
    ):
        plain = engine.generate(PROMPT, max_tokens=60, **request)
        tree = engine.generate(PROMPT, max_tokens=60, drafter=drafter, draft_length=3, **request)
        assert tree.token_ids == plain.token_ids
        assert tree.trace.summary()["accepted_tokens"] > 0
    hot = engine.generate(
        PROMPT, max_tokens=60, drafter=drafter, rule="rejection", temperature=1.0, seed=1
    )
    assert len(hot.token_ids) == 60
