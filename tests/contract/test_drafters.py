"""What every drafter promises; each entry of the table is covered without an edit here.

A drafter that needs an argument to be built by name has it in ``ARGUMENTS``; every other one
refuses an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.chooser import SeededChooser
from outrider.core.processors import Context, Law
from outrider.core.proposal import ROOT, Proposal
from outrider.engine.loading import load_head, load_model, load_parallel_heads
from outrider.engine.round import _widen
from outrider.errors import UsageError
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.protocols import Drafter, DraftSession, Model, Pick, Setting
from outrider.registry import DRAFTERS, RULES

ARGUMENTS = {
    "model": "toy:vocab={vocab},seed=9",
    "crosstoken": "toy:vocab={vocab},seed=9,pairs=1",  # ab, a, b, c, ...: no id is the target's
    "eagle": "toy:vocab={vocab},seed=9#chain",
    "early_exit": "1",
    "medusa": "toy:vocab={vocab},seed=9,heads=3#chain",
    "script": "1,0,0,1",
    "mixed": "suffix+model:toy:vocab={vocab},seed=9",
}

VOCAB = 4
CAPACITY = 40


def build(name: str, target: Model, vocab: int | None = None) -> Drafter:
    """A drafter by name, as the engine makes it; ``vocab`` is that of its own model, if any."""
    argument = ARGUMENTS.get(name, "").format(vocab=vocab or target.vocab_size)
    drafter: Drafter = DRAFTERS.load(name).build(argument, setting_for(target))
    return drafter


def setting_for(target: Model) -> Setting:
    """What a drafter by name may use, as the engine makes it."""

    def part(text: str) -> Drafter:
        name, _, argument = text.partition(":")
        made: Drafter = DRAFTERS.load(name).build(argument, setting)
        return made

    words = ToyTokenizer(target.vocab_size)
    setting = Setting(
        target, lambda path: load_model(path)[0], words, load_model, part,
        lambda path: load_head(path, target), lambda path: load_parallel_heads(path, target),
    )  # fmt: skip
    return setting


def pick_for(tokens: Sequence[int], rule: str, round_: int) -> Pick:
    chosen, chooser, law = RULES.load(rule)(), SeededChooser(3), Law()
    return Pick(
        lambda logits, path: law(Context([*tokens, *path], 1), _widen(logits, VOCAB)),
        lambda q, depth, node: chosen.draft(q, chooser, len(tokens) - 1 + depth, round_, node),
        lambda q, count, depth, node, droppable: chosen.siblings(
            q, count, chooser, len(tokens) - 1 + depth, round_, node, droppable
        ),
    )


def depth_of(proposal: Proposal) -> int:
    return max((len(proposal.path(node)) for node in range(len(proposal))), default=0)


def same(a: Proposal, b: Proposal) -> bool:
    laws = [
        (x is None and y is None)
        or (x is not None and y is not None and x.to_dense().tolist() == y.to_dense().tolist())
        for x, y in zip(a.laws, b.laws, strict=True)
    ]
    return (a.tokens, a.parents) == (b.tokens, b.parents) and all(laws)


@pytest.fixture(params=list(DRAFTERS))
def name(request) -> str:
    return request.param


@pytest.fixture
def target() -> ToyModel:
    return ToyModel.random(VOCAB, seed=1)


def test_it_is_a_drafter(name, target):
    drafter = build(name, target)
    assert isinstance(drafter, Drafter)
    assert isinstance(drafter.start([0], CAPACITY), DraftSession)
    assert type(drafter).name == name  # one of several parts may go by their names
    assert isinstance(drafter.default_length, int)
    assert drafter.default_length >= 0


def test_an_argument_is_taken_or_refused_never_ignored(name, target):
    # A drafter that takes none says so; one that does fails in its own way on a bad one.
    expected = Exception if name in ARGUMENTS else UsageError
    with pytest.raises(expected, match=f"nonsense!|{name}"):
        DRAFTERS.load(name).build("nonsense!", setting_for(target))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("vocab", [2, VOCAB, 7])
def test_no_more_than_length_and_nothing_outside_the_vocabulary(name, target, rule, length, vocab):
    """A draft model's vocabulary may be smaller than the target's, or padded."""
    for tokens in ([0], [0, 1, 0, 1, 0], [1, 1, 1, 1], [0, 1] * 8):
        session = build(name, target, vocab).start(tokens, CAPACITY)
        proposal = session.propose(tokens, length, pick_for(tokens, rule, 0))
        assert depth_of(proposal) <= length
        assert all(0 <= token < VOCAB for token in proposal.tokens)
        if length == 0:
            assert len(proposal) == 0


@st.composite
def histories(draw) -> list[tuple[int, int, int, int]]:
    """What befalls a session, a round at a time: length asked for, tokens kept, what is added."""
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 1, 2, 4]),  # rounds without a draft come often
                st.integers(0, 4),
                st.integers(0, VOCAB - 1),
                st.integers(0, 2),
            ),
            min_size=1,
            max_size=6,
        )
    )


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), history=histories())
def test_a_session_is_as_good_as_a_fresh_one_after_any_commits(name, target, rule, prompt, history):
    """Accepted prefixes, corrections, rounds without a draft: only the tokens count."""
    drafter = build(name, target)
    session = drafter.start(prompt, CAPACITY)
    tokens = list(prompt)
    for round_, (length, kept, own, forced) in enumerate(history):
        pick = pick_for(tokens, rule, round_)
        proposal = session.propose(tokens, length, pick)
        fresh = drafter.start(prompt, CAPACITY).propose(tokens, length, pick)
        assert same(proposal, fresh), f"round {round_}: {proposal.tokens} is not {fresh.tokens}"
        assert depth_of(proposal) <= length
        node = ROOT
        for _ in range(kept):  # down some path, as a rule would go
            below = proposal.children(node)
            if not below:
                break
            node = below[own % len(below)]
        # What follows are rounds in which the drafter was not asked at all.
        tokens = [*tokens, *proposal.path_tokens(node), own, *[own] * forced]


@pytest.mark.parametrize("rule", RULES)
def test_sessions_of_one_drafter_do_not_disturb_each_other(name, target, rule):
    drafter = build(name, target)
    texts = [[0, 1, 0, 1], [3, 2, 3, 2, 3]]
    together = [drafter.start(text, CAPACITY) for text in texts]
    for extra in range(3):
        for text, session in zip(texts, together, strict=True):
            grown = [*text, *[1, 0, 1][:extra]]
            pick = pick_for(grown, rule, extra)
            alone = drafter.start(text, CAPACITY)
            assert same(session.propose(grown, 3, pick), alone.propose(grown, 3, pick))


def test_the_committed_tokens_are_left_alone(name, target):
    tokens = [0, 1, 0, 1, 0]
    build(name, target).start(tokens, CAPACITY).propose(tokens, 4, pick_for(tokens, "greedy", 0))
    assert tokens == [0, 1, 0, 1, 0]


def test_some_history_makes_it_propose(name, target):
    """Else the promises above would hold for want of proposals."""
    tokens = [0, 1, 0, 1, 0]
    session = build(name, target).start([0], CAPACITY)
    proposals = [
        len(session.propose(tokens[: i + 1], 3, pick_for(tokens[: i + 1], "greedy", i)))
        for i in range(len(tokens))
    ]
    assert (max(proposals) > 0) == (name != "none")
