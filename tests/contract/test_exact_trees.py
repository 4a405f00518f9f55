"""Draft trees do not change the output's law: the production code, every course of chance."""

from __future__ import annotations

import pytest

from outrider import Engine
from outrider.core.distribution import Distribution
from outrider.core.processors import Sampling
from outrider.drafters.mixed import MixedDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.shape import Chain, Dynamic, Static, parse_shape
from outrider.drafters.suffix import SuffixDrafter
from outrider.errors import UsageError
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.registry import RULES
from tests.controls import DropsUnlikely, ForgetsReplacement
from tests.laws import chain_law, distance, speculative_law

TARGET = ToyModel.random(3, seed=1)
SHAPES = [Static((2,)), Static((2, 2)), Static((3, 1)), Dynamic(4, 2), Dynamic(5, 3)]
EXACT = [n for n in RULES if RULES.load(n).exact and RULES.load(n).trees]
SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=2),
    Sampling(temperature=1.0, top_p=0.8, presence_penalty=0.5),
    Sampling(),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("vocab", [2, 3, 4], ids=["trimmed", "same", "padded"])
def test_the_law_is_the_targets(rule, shape, vocab):
    drafter = ModelDrafter(ToyModel.random(vocab, seed=2), shape=shape)
    for sampling in SAMPLINGS:
        if rule == "greedy" and not sampling.greedy:
            continue
        for ends in (frozenset(), frozenset({2})):
            law = sampling.law(ends, 3)
            request = {"max_tokens": 3, "law": law, "end_ids": ends}
            for length in (1, 2):
                found = speculative_law(
                    TARGET, drafter, RULES.load(rule)(), draft_length=length, **request
                )
                assert distance(found, chain_law(TARGET, **request)) <= 1e-12


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", EXACT)
def test_trees_without_chance_leave_the_law_alone(rule, shape):
    drafter = SuffixDrafter(shape)
    prompt = (0, 1, 0, 2, 0)
    assert not drafter.start(prompt, 9).propose(prompt, 2, pick=None).is_chain
    for sampling in SAMPLINGS:
        if rule == "greedy" and not sampling.greedy:
            continue
        for ends in (frozenset(), frozenset({2})):
            law = sampling.law(ends, 3)
            request = {"max_tokens": 3, "law": law, "end_ids": ends, "prompt": prompt}
            for length in (1, 2):
                found = speculative_law(
                    TARGET, drafter, RULES.load(rule)(), draft_length=length, **request
                )
                assert distance(found, chain_law(TARGET, **request)) <= 1e-12


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("first", ["suffix", "model"])
def test_a_tree_and_a_drawn_chain_mixed(rule, first):
    """A text that does not repeat at first, so that rounds of both kinds come."""
    suffix = SuffixDrafter(Static((2, 2)))
    model = ModelDrafter(ToyModel.random(2, seed=2), default_length=2)  # it cannot read a 2
    parts = [suffix, model] if first == "suffix" else [model, suffix]
    for prompt in ((1,), (0, 2, 0)):
        request = {"max_tokens": 3, "prompt": prompt}
        if rule == "greedy":
            request["law"] = Sampling().law(frozenset(), 3)
        found = speculative_law(
            TARGET, MixedDrafter(parts), RULES.load(rule)(), draft_length=2, **request
        )
        assert distance(found, chain_law(TARGET, **request)) <= 1e-12


def test_negative_controls_are_caught():
    request = {"max_tokens": 2}
    wanted = chain_law(TARGET, **request)
    draft = ToyModel.random(3, seed=2)
    dropped = DropsUnlikely(draft, shape=Static((2,)))
    rejection = RULES.load("rejection")()
    assert distance(speculative_law(TARGET, dropped, rejection, **request), wanted) > 1e-3
    honest = ModelDrafter(draft, shape=Static((2,)))
    broken = speculative_law(TARGET, honest, ForgetsReplacement(), **request)
    assert distance(broken, wanted) > 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_seed_gives_the_same_text_in_fewer_calls(shape):
    target, other = ToyModel.random(8, seed=1), ToyModel.random(8, seed=2)
    draft = ToyModel(lambda tokens: 0.6 * target.next(tokens) + 0.4 * other.next(tokens), 8)
    engine = Engine(target, ToyTokenizer(8), drafter="none")
    request = {"max_tokens": 200, "temperature": 1.0, "seed": 3, "draft_length": 2}
    plain = engine.generate([1, 2], **request)
    chain = engine.generate([1, 2], drafter=ModelDrafter(draft), **request)
    tree = engine.generate([1, 2], drafter=ModelDrafter(draft, shape=shape), **request)
    assert tree.token_ids == chain.token_ids == plain.token_ids
    calls = [output.trace.summary()["target_calls"] for output in (tree, chain, plain)]
    assert calls[0] < calls[2]
    if isinstance(shape, Static):  # it holds the chain; a dynamic tree may drop a part of it
        assert calls[0] < calls[1]


def test_siblings_are_different_and_each_has_its_own_law():
    from outrider.core.chooser import SeededChooser

    q = Distribution.dense([0.5, 0.3, 0.2])
    for name in EXACT:
        drawn = RULES.load(name)().siblings(q, 5, SeededChooser(1), 0, 0, 0, False)
        tokens = [token for token, _ in drawn]
        assert sorted(tokens) == [0, 1, 2]
        if name == "rejection":
            assert drawn[0][1] is q
            assert drawn[1][1][tokens[0]] == 0.0
            assert drawn[2][1][tokens[2]] == 1.0


def test_what_cannot_take_a_tree_refuses_it():
    engine = Engine(TARGET, ToyTokenizer(3), drafter="none")
    drafter = ModelDrafter(ToyModel.random(3, seed=2), shape=Static((2, 2)))
    with pytest.raises(UsageError, match="block"):
        engine.generate([0], drafter=drafter, rule="block", temperature=1.0)
    chains_only = ToyModel.random(3, seed=1)
    chains_only.trees = False
    with pytest.raises(UsageError, match="chains only"):
        Engine(chains_only, ToyTokenizer(3), drafter=drafter)
    with pytest.raises(UsageError, match="chains only"):
        ModelDrafter(chains_only, shape=Dynamic(8))


def test_shapes_by_name():
    assert parse_shape("") == Chain()
    assert parse_shape("tree=4,2,1") == Static((4, 2, 1))
    assert parse_shape("tree=24") == Dynamic(24)
    for wrong in ("tree", "tree=", "tree=0", "tree=a", "bush=3", "tree=4,,1"):
        with pytest.raises(UsageError, match="tree"):
            parse_shape(wrong)
    engine = Engine.load("toy:vocab=4", drafter="model:toy:vocab=4,seed=9#tree=3,2")
    assert engine.drafter.shape == Static((3, 2))
