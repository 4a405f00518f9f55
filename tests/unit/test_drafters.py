"""What each drafter proposes, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.chooser import Place, SeededChooser
from outrider.core.distribution import Distribution
from outrider.core.processors import Context, Law
from outrider.core.proposal import Proposal
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.script import ScriptDrafter
from outrider.errors import RollbackError, SamplingError, UsageError
from outrider.models.toy import ToyCache, ToyModel
from outrider.policies.fixed import Fixed
from outrider.protocols import Pick, Setting
from outrider.rules.greedy import Greedy
from outrider.rules.rejection import Rejection


def pick_by(rule, chooser, tokens: Sequence[int], law: Law | None = None) -> Pick:
    """As the engine makes it."""
    return Pick(
        lambda logits, path: (law or Law())(Context([*tokens, *path], 1), logits),
        lambda q, depth, node: rule.draft(q, chooser, depth, 0, node),
        lambda q, count, depth, node, droppable: rule.siblings(
            q, count, chooser, depth, 0, node, droppable
        ),
    )


NEVER = Pick(
    lambda logits, path: pytest.fail("this drafter has no logits to pick from"),
    lambda q, depth, node: pytest.fail("this drafter has nothing to choose"),
    lambda q, count, depth, node, droppable: pytest.fail("this drafter grows no tree"),
)


def proposed(drafter, tokens: Sequence[int], length: int) -> list[int]:
    proposal = drafter.start(list(tokens), 100).propose(list(tokens), length, NEVER)
    assert proposal.is_chain
    assert proposal.laws == (None,) * len(proposal)
    return list(proposal.tokens)


# --- none and script -----------------------------------------------------------------------------


def test_none_proposes_nothing():
    assert proposed(NoDrafter(), [1, 2, 1, 2], 5) == []
    assert NoDrafter().default_length == 0


def test_script_goes_on_from_where_the_output_stands():
    session = ScriptDrafter([7, 8, 9]).start([1, 2], 10)
    assert session.propose([1, 2], 2, NEVER).tokens == (7, 8)
    assert session.propose([1, 2, 5], 5, NEVER).tokens == (8, 9)
    assert session.propose([1, 2, 5, 5, 5], 5, NEVER).tokens == ()
    assert session.propose([1, 2], 0, NEVER).tokens == ()


def test_a_script_may_be_a_function_and_is_cut_to_length():
    session = ScriptDrafter(lambda tokens, length: [tokens[-1]] * 9).start([1], 10)
    assert session.propose([1, 4], 3, NEVER).tokens == (4, 4, 4)
    assert session.propose([1, 4], 0, NEVER).tokens == ()


def test_script_by_name():
    setting = Setting(ToyModel.random(4, 0), lambda name: pytest.fail("loads nothing"))
    assert ScriptDrafter.build("7, 8,9", setting).script == [7, 8, 9]
    assert ScriptDrafter.build("", setting).script == []
    with pytest.raises(UsageError, match="list of token ids"):
        ScriptDrafter.build("7,x", setting)


# --- ngram ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "length", "wanted"),
    [
        ([1, 2, 3, 9, 1, 2], 2, [3, 9]),
        ([1, 2, 3, 9, 1, 2], 1, [3]),
        ([1, 2, 3, 9, 1, 2], 9, [3, 9, 1, 2, 3, 9, 1, 2]),  # past the end; 4 for each matched
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # of two occurrences the later
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1, [7]),  # of two lengths the longer match
        ([1, 2, 3, 4], 4, []),  # nothing repeats
        ([1, 2, 1], 4, [2, 1, 2, 1]),
        ([4, 4, 4], 4, [4, 4, 4, 4]),
        ([4, 4], 9, [4, 4, 4, 4]),
        ([4], 4, []),
        ([], 4, []),
        ([1, 2, 3, 9, 1, 2], 0, []),
        ([1, 2, 3, 9, 1, 2], -1, []),
    ],
)
def test_ngram(tokens, length, wanted):
    assert proposed(NgramDrafter(), tokens, length) == wanted


def test_ngram_sizes():
    tokens = [1, 2, 7, 3, 2]
    assert proposed(NgramDrafter(longest=1, shortest=1), tokens, 2) == [7, 3]
    assert proposed(NgramDrafter(longest=3, shortest=2), tokens, 2) == []
    for longest, shortest in ((2, 0), (1, 2), (0, 0)):
        with pytest.raises(SamplingError, match="n-gram"):
            NgramDrafter(longest, shortest)


def _by_searching(tokens: list[int], length: int, longest: int = 5, shortest: int = 1) -> list[int]:
    """Prompt lookup as its definition reads, by search from the end."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for i in range(min(length, 4 * size)):
                    text.append(text[start + size + i])
                return text[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(0, 6))
def test_ngram_is_what_a_search_finds(tokens, length):
    assert proposed(NgramDrafter(), tokens, length) == _by_searching(tokens, length)


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=6))
def test_ngram_indexes_growing_and_changed_texts_alike(pieces):
    session = NgramDrafter().start([], 100)
    text: list[int] = []
    for i, piece in enumerate(pieces):
        text = text[: len(text) - 2] + piece if i % 3 == 2 else text + piece
        assert list(session.propose(text, 4, NEVER).tokens) == _by_searching(text, 4)


# --- model ---------------------------------------------------------------------------------------


class CountingModel(ToyModel):
    """Counts passes and fed tokens."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.scored: list[int] = []
        self.fed = 0

    def prefill(self, cache, tokens, progress=None):
        self.fed += len(tokens)
        super().prefill(cache, tokens, progress)

    def score(self, cache, tokens, proposal):
        self.scored.append(len(tokens))
        return super().score(cache, tokens, proposal)


def counting(seed: int = 1, vocab_size: int = 4, **kwargs) -> CountingModel:
    plain = ToyModel.random(vocab_size, seed)
    return CountingModel(plain.next, vocab_size, **kwargs)


def test_model_greedy_follows_its_own_argmax():
    model = counting()
    tokens = [0, 1, 2]
    proposal = (
        ModelDrafter(model)
        .start(tokens, 20)
        .propose(tokens, 3, pick_by(Greedy(), SeededChooser(0), tokens))
    )
    text = list(tokens)
    for token in proposal.tokens:
        assert token == int(model.next(text).argmax())
        text.append(token)
    assert len(proposal) == 3
    assert proposal.laws == (None,) * 3


def test_model_reports_the_law_that_each_token_was_drawn_from():
    model, tokens = counting(), [0, 1]
    tempered = Law([lambda context, scores: scores / 0.5])
    chooser = SeededChooser(4)
    proposal = (
        ModelDrafter(model)
        .start(tokens, 20)
        .propose(tokens, 4, pick_by(Rejection(), chooser, tokens, tempered))
    )
    for node, (token, law) in enumerate(zip(proposal.tokens, proposal.laws, strict=True)):
        path = [*tokens, *proposal.tokens[:node]]
        wanted = Distribution.softmax(torch.from_numpy(model.next(path)).log() / 0.5)
        assert law.to_dense() == pytest.approx(wanted.to_dense(), abs=1e-14)
        assert token == chooser.draw(law, Place(node, "draft", 0, node))


def test_model_feeds_each_token_once():
    model = counting()
    session = ModelDrafter(model).start([0], 100)
    pick = pick_by(Greedy(), SeededChooser(0), [0])
    tokens = [0, 1, 2, 3]
    first = session.propose(tokens, 3, pick)
    assert (model.fed, model.scored) == (2, [2, 1, 1])
    # All accepted and a bonus: the last draft and the bonus are new, and go in one pass.
    tokens += [*first.tokens, 0]
    model.fed, model.scored = 0, []
    session.propose(tokens, 2, pick)
    assert (model.fed, model.scored) == (0, [2, 1])
    # All rejected: what was drafted is taken back, the correction alone is fed.
    model.fed, model.scored = 0, []
    tokens.append((session.propose(tokens, 1, pick).tokens[0] + 1) % 4)
    model.fed, model.scored = 0, []
    session.propose(tokens, 1, pick)
    assert (model.fed, sum(model.scored)) in {(0, 1), (0, 2)}


def test_model_stops_at_its_own_context():
    model = counting(context_length=6)
    session = ModelDrafter(model).start([0], 100)
    pick = pick_by(Greedy(), SeededChooser(0), [0])
    for held, room in ((3, 3), (5, 1), (6, 0), (9, 0)):
        assert len(session.propose([0] * held, 4, pick)) == min(4, room)


def test_model_fills_a_cache_that_is_just_large_enough():
    model = counting()
    session = ModelDrafter(model).start([0], 6)
    proposal = session.propose([0, 1, 2], 3, pick_by(Greedy(), SeededChooser(0), [0]))
    assert len(proposal) == 3


def test_model_without_rollback_is_refused_at_once():
    model = ToyModel.random(4, 0)
    for way in ("snapshot", "none"):
        model.rollback = way
        with pytest.raises(RollbackError, match="by length"):
            ModelDrafter(model)


def test_model_needs_a_name():
    setting = Setting(ToyModel.random(4, 0), lambda name: ToyModel.random(4, 1))
    with pytest.raises(UsageError, match="needs a draft model"):
        ModelDrafter.build("", setting)
    assert ModelDrafter.build("anything", setting).model.name == "toy-1"


# --- toy caches and the fixed policy -------------------------------------------------------------


def test_a_toy_cache_that_is_full_says_so():
    model = ToyModel.random(4, 0)
    cache = model.new_cache(3)
    model.score(cache, [0, 1], Proposal.chain([2]))
    with pytest.raises(ValueError, match="holds 3"):
        model.score(cache, [0], Proposal.chain([2]))


def test_a_toy_cache_rolls_back():
    cache = ToyCache(9)
    ToyModel.random(4, 0).prefill(cache, [0, 1, 2])
    cache.rollback(5)
    assert cache.tokens == [0, 1, 2]
    cache.rollback(1)
    assert (cache.tokens, cache.length) == ([0], 1)


@pytest.mark.parametrize("length", [0, 1, 9])
def test_fixed_stays_fixed(length):
    policy = Fixed(length)
    policy.learn(Proposal.chain([1, 2, 3]), [])
    assert policy.length() == length


def test_fixed_refuses_less_than_nothing():
    with pytest.raises(SamplingError, match="draft_length"):
        Fixed(-1)
