"""A target that remembers its rows gives what the target itself would."""

from __future__ import annotations

import pytest
import torch

from outrider import Engine
from outrider.audit.remembered import Remembered, remembering
from outrider.core.proposal import Proposal
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.shape import Chain, Dynamic, Static
from outrider.errors import UsageError
from outrider.models.hf import HFModel
from outrider.models.toy import ToyModel
from tests.small_models import module, native, some_tokens
from tests.unit.test_eagle import head_module

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def target():
    return HFModel(module("llama"))


def drafters(target):
    draft = ToyModel.random(target.vocab_size, seed=2)
    return {
        "none": "none",
        "ngram": "ngram",
        "chain": ModelDrafter(draft),
        "tree": ModelDrafter(draft, shape=Static((3, 2))),
    }


@pytest.mark.parametrize("name", ["none", "ngram", "chain", "tree"])
def test_outputs_are_the_targets_own(target, name):
    remembered = Remembered(target)
    request = {"max_tokens": 12, "temperature": 1.0, "top_k": 4}
    for seed in range(6):
        outputs = [
            Engine(model, drafter=drafters(target)[name], rule="coupled").generate(
                some_tokens(9), seed=seed, **request
            )
            for model in (target, remembered)
        ]
        assert outputs[0].token_ids == outputs[1].token_ids


def test_rows_are_the_targets_whatever_was_asked_before(target):
    """To the bit where the target keeps I2, and else to rounding."""
    remembered = Remembered(target)
    chain = Proposal.chain([5, 6, 7])
    for tokens in ([1, 2, 3], [1, 2, 4, 5], [1], [1, 2, 3]):
        fresh, cache = target.new_cache(16), remembered.new_cache(16)
        found, wanted = (
            model.score(cache_, tokens, chain)
            for model, cache_ in ((remembered, cache), (target, fresh))
        )
        if target.row_step is None:
            torch.testing.assert_close(found, wanted)
        else:
            assert torch.equal(found, wanted)


def test_no_context_is_scored_twice(target, monkeypatch):
    calls = []
    score = target.score
    monkeypatch.setattr(
        target, "score", lambda *arguments: calls.append(arguments) or score(*arguments)
    )
    engine = Engine(Remembered(target), drafter="none", rule="coupled")
    for _ in range(3):
        engine.generate(some_tokens(5), max_tokens=6, temperature=1.0, seed=4)
    assert len(calls) == 6


def test_what_was_not_asked_for_longest_is_forgotten(target):
    remembered = Remembered(target, memory_bytes=0)
    for first in range(60):
        remembered.score(remembered.new_cache(4), [first], Proposal.chain([first]))
    assert len(remembered._rows) <= 64


@pytest.mark.parametrize("shape", [Chain(), Static((3, 2)), Dynamic(8)])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_heads_read_remembered_hidden_states(shape, rule):
    """A head's proposals, laws and all, are what they are beside the model itself."""
    model = native(module("llama"))
    drafter = EagleDrafter(model.make_head(head_module()), model, shape, 3)
    request = {"max_tokens": 12, "temperature": 1.0, "top_k": 4}
    engines = [
        Engine(made, drafter=drafter, rule=rule, draft_length=3)
        for made in (model, Remembered(model))
    ]
    for seed in range(8):
        a, b = (e.generate(some_tokens(9), seed=seed, **request) for e in engines)
        assert a.token_ids == b.token_ids
        assert [r.drafted for r in a.trace.rounds] == [r.drafted for r in b.trace.rounds]
        assert a.trace.summary()["drafted_tokens"] > 0


@pytest.mark.parametrize("drafter", ["early_exit:1", "suffix+early_exit:1"])
def test_drafts_on_the_targets_own_cache_are_refused(one_thread, drafter):
    engine = Engine(native(module("llama")), drafter=drafter, rule="rejection")
    with pytest.raises(UsageError, match="drafts on the target's own cache"):
        remembering(engine)
