"""Several drafters in one: who is asked, for how much, and what the whole is called."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider import Engine
from outrider.core.distribution import Distribution
from outrider.core.proposal import Proposal
from outrider.drafters.mixed import MixedDrafter, split_parts
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.script import ScriptDrafter
from outrider.drafters.shape import Static
from outrider.drafters.suffix import SuffixDrafter
from outrider.errors import RollbackError, UnknownNameError, UsageError
from outrider.models.toy import ToyModel
from outrider.protocols import Setting
from tests.unit.test_drafters import NEVER


class Scripted:
    """Proposes what it is told to, and notes what it was asked for."""

    trees = False

    def __init__(self, tokens: Sequence[int] = (), default: int = 4, drawn: bool = False) -> None:
        self.name, self.default_length = "scripted", default
        self.tokens, self.drawn = list(tokens), drawn
        self.asked: list[int] = []

    @classmethod
    def build(cls, argument: str, setting: Setting) -> Scripted:
        return cls()

    def start(self, prompt: Sequence[int], capacity: int) -> Scripted:
        return self

    def propose(self, tokens: Sequence[int], length: int, pick) -> Proposal:
        self.asked.append(length)
        said = self.tokens[:length]
        laws = [Distribution.one_hot(token, 9) if self.drawn else None for token in said]
        return Proposal.chain(said, laws)


def ask(*parts: Scripted, length: int = 4, least: int = 1) -> list[int]:
    session = MixedDrafter(parts, least).start([0], 9)
    return list(session.propose([0], length, NEVER).tokens)


def test_the_next_is_asked_only_where_the_one_before_has_nothing():
    first, second, third = Scripted([1]), Scripted([2, 3]), Scripted([4])
    assert ask(first, second, third) == [1]
    assert (first.asked, second.asked, third.asked) == ([4], [], [])
    first.tokens = []
    assert ask(first, second, third) == [2, 3]
    assert (first.asked, second.asked, third.asked) == ([4, 4], [4], [])
    second.tokens = third.tokens = []
    assert ask(first, second, third) == []


def test_all_see_the_text_where_nothing_is_wanted():
    first = Scripted([1])
    assert ask(first, first, length=0) == ask(first, first, length=-1) == []
    assert first.asked == [0, 0, 0, 0]


def test_least():
    assert ask(Scripted([1]), Scripted([2, 3]), least=2) == [2, 3]
    assert ask(Scripted([1]), Scripted([2]), least=2) == [1]  # of equal ones the first
    assert ask(Scripted([1, 2]), Scripted([3]), least=3) == [1, 2]  # the deepest
    assert ask(Scripted([1]), Scripted([2, 3]), least=2, length=1) == [1]  # all that was asked for


def test_drawn_tokens_are_not_thrown_away():
    second = Scripted([2, 3])
    assert ask(Scripted([1], drawn=True), second, least=2) == [1]
    assert second.asked == []


def test_each_is_asked_for_its_share():
    long, short, none = Scripted(default=12), Scripted(default=4), Scripted(default=0)
    for length in (12, 24, 6, 1):
        ask(none, long, short, length=length)
    assert long.asked == [12, 24, 6, 1]
    assert short.asked == [4, 8, 2, 1]
    assert none.asked == [0, 0, 0, 0]


def test_what_the_whole_is():
    chain, tree = ModelDrafter(ToyModel.random(4, 1)), SuffixDrafter(Static((2,)))
    assert not MixedDrafter([NgramDrafter(), chain]).trees
    mixed = MixedDrafter([chain, tree, NoDrafter()])
    assert mixed.trees
    assert mixed.name == "model+suffix+none"
    assert mixed.default_length == 12
    for parts in ([], [chain]):
        with pytest.raises(UsageError, match="two parts"):
            MixedDrafter(parts)
    with pytest.raises(UsageError, match="least"):
        MixedDrafter([chain, tree], least=0)


def test_a_part_that_was_not_asked_is_as_good_as_a_fresh_one():
    model = ModelDrafter(ToyModel.random(4, 1), default_length=3)
    script = ScriptDrafter(lambda tokens, length: [0] if len(tokens) % 3 else [], 3)
    engine = Engine(ToyModel.random(4, 1), drafter=MixedDrafter([script, model]))
    output = engine.generate([1], max_tokens=60)
    assert output.token_ids == engine.generate([1], max_tokens=60, plain=True).token_ids
    summary = output.trace.summary()
    # The model is the target's twin, so all that it drafts stands.
    assert summary["accepted_tokens"] > 10
    assert output.drafter == "script+model"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a+b", ["a", "b"]),
        ("suffix", ["suffix"]),
        ("suffix+model:x", ["suffix", "model:x"]),
        ("model:x#tree=4,2+suffix#tree=8", ["model:x#tree=4,2", "suffix#tree=8"]),
        ("suffix:c++.txt+model:/c++/my+draft", ["suffix:c++.txt", "model:/c++/my+draft"]),
        ("ngram+sufix+none", ["ngram", "sufix", "none"]),
        ("suffix+", ["suffix", ""]),
    ],
)
def test_parts_of_a_name(text, parts):
    assert split_parts(text) == parts


def test_by_name():
    engine = Engine.load("toy:vocab=4", drafter="suffix+model:toy:vocab=4,seed=9")
    assert engine.drafter.name == "suffix+model"
    assert engine.make_drafter("mixed:suffix+ngram").name == "suffix+ngram"
    assert engine.make_drafter("suffix#tree=8+ngram").trees
    assert engine.make_drafter("suffix+auto").parts[1].name == "ngram"
    # What was loaded once is not loaded again.
    model = engine.make_drafter("model:toy:vocab=4,seed=9")
    assert engine.drafter.parts[1] is model


def test_wrong_names():
    for text in ("mixed", "mixed:", "mixed:suffix", "suffix+", "mixed:+suffix"):
        with pytest.raises(UsageError, match="two drafters or more"):
            Engine.load("toy:vocab=4", drafter=text)
    for text in ("ngram+modle", "mixed:modle:x+ngram"):
        with pytest.raises(UnknownNameError, match=r"named 'modle'.*Did you mean 'model'"):
            Engine.load("nowhere/to-be-found", drafter=text)
    setting = Setting(ToyModel.random(4, 0), lambda name: pytest.fail("loads nothing"))
    with pytest.raises(UsageError, match="cannot be made by name here"):
        MixedDrafter.build("suffix+ngram", setting)


def test_a_target_that_cannot_take_a_part_refuses_the_whole():
    target = ToyModel.random(4, 0)
    target.trees = False
    with pytest.raises(UsageError, match="chains only"):
        Engine(target, drafter="ngram+suffix#tree=8")
    target.rollback = "none"
    with pytest.raises(RollbackError, match="cannot take rejected drafts back"):
        Engine(target, drafter="suffix+ngram")
