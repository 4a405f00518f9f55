"""Requests side by side: each one's output is what it is alone."""

from __future__ import annotations

import random

import pytest
import torch

from outrider import Engine
from outrider.core.price import Price
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.script import ScriptDrafter
from outrider.engine.batch import Batch
from outrider.errors import NumericalError, ProposalError, UsageError
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.policies import adaptive
from outrider.policies.adaptive import Adaptive
from tests.small_models import garbage, module, native, some_tokens

REQUESTS = [
    {"drafter": "ngram", "temperature": 0.0},
    {"drafter": "none", "temperature": 0.0},
    {"drafter": "early_exit:1", "temperature": 0.8, "rule": "coupled"},
    {"drafter": "early_exit:1", "temperature": 0.8, "rule": "rejection"},
    {"drafter": "early_exit:1#tree=3,2", "temperature": 1.0, "rule": "rejection"},
    {"drafter": "ngram", "temperature": 1.0, "rule": "block", "top_p": 0.9},
    {"drafter": "suffix", "temperature": 0.0, "draft_length": 7},
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(native(module("llama")))


def requests(engine: Engine, count: int) -> list[dict]:
    """Ragged prompts and lengths, every kind of request."""
    chance = random.Random(3)
    found = []
    for i in range(count):
        prompt = some_tokens(chance.choice([1, 2, 9, 70, 150]), i)
        how = REQUESTS[i % len(REQUESTS)]
        found.append({"prompt": prompt, "max_tokens": chance.randint(1, 25), "seed": i, **how})
    return found


def run(batch: Batch, waiting: list, width: int) -> None:
    """At most ``width`` side by side; one joins whenever one leaves."""
    while waiting or len(batch):
        while waiting and len(batch) < width:
            batch.add(waiting.pop(0))
        for step in batch.step():
            assert step.error is None


@pytest.mark.parametrize("width", [2, 5, 14])
def test_outputs_are_the_same_in_company(engine, width):
    asked = requests(engine, 14)
    alone = [engine.generate(**how).token_ids for how in asked]
    generations = [engine.stream(**how) for how in asked]
    run(Batch(engine.model), list(generations), width)
    assert [one.output.token_ids for one in generations] == alone


def test_several_are_scored_in_one_pass(engine, monkeypatch):
    sizes = []
    together = engine.model.score_together

    def spy(asked):
        sizes.append(len(asked))
        return together(asked)

    monkeypatch.setattr(engine.model, "score_together", spy)
    batch = Batch(engine.model)
    for i in range(6):
        batch.add(engine.stream(some_tokens(5, i), max_tokens=4, drafter="none"))
    while len(batch):
        batch.step()
    assert sizes == [6, 6, 6, 6]


def test_a_pass_that_is_full_is_followed_by_another(engine):
    batch = Batch(engine.model)
    script = ScriptDrafter(garbage, default_length=30)
    asked = [{"prompt": some_tokens(4, i), "max_tokens": 32} for i in range(5)]
    for how in asked:
        batch.add(engine.stream(**how, drafter=script, draft_length=30))
    generations = list(batch)
    while len(batch):
        batch.step()
    plain = [engine.generate(**how, plain=True).token_ids for how in asked]
    assert [g.output.token_ids for g in generations] == plain


def test_a_long_prompt_holds_nobody_up(engine):
    batch = Batch(engine.model)
    quick = engine.stream(some_tokens(3), max_tokens=20, drafter="none", ignore_eos=True)
    batch.add(quick)
    batch.step()
    batch.add(engine.stream(some_tokens(200), max_tokens=1, drafter="none"))
    emitted = [len(step.pieces) for _ in range(3) for step in batch.step()]
    assert emitted == [1, 1, 1]  # the newcomer has 64 tokens of its prompt fed each time
    assert len(quick.trace.rounds) == 4


def test_what_goes_wrong_in_one_leaves_the_others_alone(engine, monkeypatch):
    class Breaks:
        name, trees, default_length = "breaks", False, 2

        def start(self, prompt, capacity):
            return self

        def propose(self, tokens, length, pick):
            raise RuntimeError("broken draft")

    batch = Batch(engine.model)
    good = engine.stream(some_tokens(4), max_tokens=6, drafter="ngram")
    broken = engine.stream(some_tokens(5), max_tokens=6, drafter=_drafter(Breaks))
    nonsense = engine.stream(
        some_tokens(6), max_tokens=6, drafter=ScriptDrafter(lambda tokens, n: [10**6])
    )
    for one in (good, broken, nonsense):
        batch.add(one)
    steps = {step.generation: step for step in batch.step()}
    assert isinstance(steps[broken].error, RuntimeError)
    assert isinstance(steps[nonsense].error, ProposalError)
    assert steps[good].error is None
    assert list(batch) == [good]
    while len(batch):
        batch.step()
    assert len(good.output.token_ids) == 6


def _drafter(kind):
    from outrider.drafters.none import NoDrafter

    return type("Broken", (NoDrafter,), {**kind.__dict__, "name": "breaks", "default_length": 2})()


def test_logits_that_are_no_numbers_end_one_request():
    model = ToyModel.random(5, 1)
    engine = Engine(model, ToyTokenizer(5), drafter="none")
    score = model.score

    def spoiled(cache, tokens, proposal):
        rows = score(cache, tokens, proposal)
        return rows * torch.nan if cache.tokens[0] == 4 else rows

    model.score = spoiled
    batch = Batch(model)
    good, bad = engine.stream([1, 2], max_tokens=3), engine.stream([4, 2], max_tokens=3)
    batch.add(good)
    batch.add(bad)
    steps = {step.generation: step for step in batch.step()}
    assert isinstance(steps[bad].error, NumericalError)
    assert steps[good].error is None


def test_a_pass_that_fails_ends_those_that_it_was_for(engine, monkeypatch):
    together, score = engine.model.score_together, engine.model.score

    def full(asked):
        raise MemoryError("no room for a longer text")

    monkeypatch.setattr(engine.model, "score_together", full)
    batch = Batch(engine.model)
    script = ScriptDrafter(garbage, default_length=62)
    # The third does not fit beside the two others and gets a pass of its own.
    for i, how in enumerate(({}, {}, {"drafter": script, "draft_length": 62})):
        batch.add(engine.stream(some_tokens(4, i), max_tokens=64, **{"drafter": "none"} | how))
    last = list(batch)[2]
    steps = batch.step()
    assert [type(step.error) for step in steps] == [MemoryError, MemoryError, type(None)]
    assert list(batch) == [last]
    monkeypatch.setattr(engine.model, "score_together", together)
    assert engine.model.score == score
    assert len(batch.step()) == 1


def test_who_leaves_early_is_gone_at_once(engine):
    batch = Batch(engine.model)
    stays = engine.stream(some_tokens(4), max_tokens=9, drafter="none", ignore_eos=True)
    goes = engine.stream(some_tokens(5), max_tokens=9, drafter="none", ignore_eos=True)
    batch.add(stays)
    batch.add(goes)
    batch.step()
    batch.drop(goes)
    batch.drop(goes)
    assert [step.generation for step in batch.step()] == [stays]


def test_only_requests_of_its_own_model_and_each_once(engine):
    batch = Batch(engine.model)
    one = engine.stream([1, 2], max_tokens=2)
    batch.add(one)
    with pytest.raises(UsageError, match="once"):
        batch.add(one)
    one.output  # noqa: B018, runs it
    with pytest.raises(UsageError, match="before its first token"):
        Batch(engine.model).add(one)
    other = Engine(ToyModel.random(4, 1), ToyTokenizer(4))
    with pytest.raises(UsageError, match="its own model"):
        batch.add(other.stream([1, 2], max_tokens=2))


# --- load ----------------------------------------------------------------------------------------


def test_drafts_shrink_as_others_fill_the_pass():
    from outrider.core.proposal import Proposal

    price = Price((1, 8, 16), (1.0, 1.0, 2.0))  # eight rows cost what one does
    policy = Adaptive(8, price)
    chain = Proposal.chain(range(4), confidence=[0.8] * 4)
    alone = len(policy.trim(chain))
    policy.beside(12, 12.0)
    crowded = len(policy.trim(chain))
    policy.beside(0, 0.0)
    assert (alone, crowded, len(policy.trim(chain))) == (4, 0, 4)


def test_in_a_crowd_no_drafter_is_asked_and_afterwards_it_is_again(engine, monkeypatch):
    """Asking takes time that all wait for; the drafter then sees at once what it missed."""
    crowd, asked = [0], []
    monkeypatch.setattr(
        Adaptive, "beside", lambda self, *_: setattr(self, "_others", (crowd[0], float(crowd[0])))
    )
    monkeypatch.setattr(adaptive, "_IDLE", 99)  # not for want of drafts
    price = Price((1, 2), (1.0, 1.5))
    monkeypatch.setattr(type(engine), "price", lambda *_: price)
    start = NgramDrafter.start

    def counted(drafter, prompt, capacity):
        session = start(drafter, prompt, capacity)
        propose = session.propose

        def count(tokens, length, pick):
            asked.append(len(tokens))
            return propose(tokens, length, pick)

        session.propose = count
        return session

    monkeypatch.setattr(NgramDrafter, "start", counted)
    text = some_tokens(6) * 3
    how = {"max_tokens": 24, "ignore_eos": True}
    plain = engine.generate(text, drafter="none", **how).token_ids
    batch, one = Batch(engine.model), engine.stream(text, drafter="ngram", **how)
    batch.add(one)
    while len(batch):
        done = len(one.trace.rounds)
        crowd[0] = 12 if 3 <= done < 7 else 0
        before = len(asked)
        batch.step()
        assert len(asked) - before == (0 if crowd[0] and not one.finished else 1 + one.finished)
    assert one.output.token_ids == plain


def test_company_decides_nothing_where_the_text_depends_on_drafts(engine, monkeypatch):
    told = []
    monkeypatch.setattr(Adaptive, "beside", lambda self, rows, tokens: told.append(rows))
    batch = Batch(engine.model)
    for i, rule in enumerate(("rejection", "block", "coupled")):
        how = {"temperature": 1.0, "rule": rule, "drafter": "ngram"}
        batch.add(engine.stream(some_tokens(4, i), max_tokens=3, **how))
    batch.step()
    assert told == [2]


def test_times_are_what_a_reader_waits(engine):
    from time import perf_counter

    batch = Batch(engine.model)
    generations = [engine.stream(some_tokens(70, i), max_tokens=6) for i in range(4)]
    began = perf_counter()
    for one in generations:
        batch.add(one)
    ends = {}
    while len(batch):
        for step in batch.step():
            if step.finished:
                ends[id(step.generation)] = perf_counter() - began
    for one in generations:
        assert 0.9 * one.trace.total_s <= ends[id(one)] <= 1.1 * one.trace.total_s + 0.05
        assert one.trace.prefill_s <= one.trace.ttft_s <= one.trace.total_s
