"""First tokens drawn for real: the engine's own pieces, seeded noise, and a chi-square.

Enumeration (``tests/contract/test_exact_laws.py``) proves the law of the code; what it cannot
see is whether seeded noise behaves as independent noise. Each test here fails a correct program
with probability at most ``ALPHA`` = 1e-8 over the choice of seeds: a few tests, together well
below 1e-6 a run. A wrong residual must fail the very same test.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core.chooser import SeededChooser
from outrider.core.processors import Context, Law, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.engine.generation import Generation
from outrider.engine.round import Session
from outrider.engine.transcript import Transcript
from outrider.models.toy import ToyModel
from outrider.policies.fixed import Fixed
from outrider.protocols import Rule
from outrider.registry import RULES
from outrider.rules.rejection import Rejection
from tests.chance import ALPHA, chi_square
from tests.controls import NoResidual

VOCAB = 4
PROMPT = (2, 0)
# Seeds under which both faults below would move the law by much, so that the test has power.
TARGET = ToyModel.random(VOCAB, seed=4, sharpness=1.0)
DRAFT = ToyModel.random(VOCAB, seed=116, sharpness=1.0)
SAMPLING = Sampling(temperature=0.9, top_p=0.95, presence_penalty=0.4)
RUNS = 10_000


def two_tokens(rule: Rule, *, seed: int, draft_length: int, law: Law) -> tuple[int, int]:
    """The first two tokens of one request; its seed is all that sets it apart."""
    limit = len(PROMPT) + 2 + draft_length  # room for a draft beyond what is asked for
    session = Session(
        model=TARGET,
        cache=TARGET.new_cache(limit),
        draft=ModelDrafter(DRAFT).start(PROMPT, limit),
        rule=rule,
        policy=Fixed(draft_length),
        law=law,
        chooser=SeededChooser(seed),
        tokens=list(PROMPT),
        prompt_length=len(PROMPT),
        limit=limit,
    )
    ending = Transcript(None, max_tokens=2, eos_token_ids=frozenset())
    first, second = Generation(session, ending).output.token_ids
    return first, second


def law_of(model: ToyModel, law: Law) -> np.ndarray:
    """The chain rule's law of the first two tokens."""
    table = np.zeros((VOCAB, VOCAB))

    def after(tokens: list[int]) -> np.ndarray:
        logits = torch.log(torch.from_numpy(model.next(tokens)))
        return law(Context(tokens, len(PROMPT)), logits).to_dense()

    for first, p in enumerate(after(list(PROMPT))):
        if p > 0:
            table[first] = p * after([*PROMPT, first])
    return table


def count(rule: Rule, draft_length: int, law: Law, first_seed: int) -> np.ndarray:
    counts = np.zeros((VOCAB, VOCAB))
    for seed in range(first_seed, first_seed + RUNS):
        counts[two_tokens(rule, seed=seed, draft_length=draft_length, law=law)] += 1
    return counts


SAMPLED = [name for name in RULES if RULES.load(name).exact and name != "greedy"]


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize(("draft_length", "processed"), [(1, False), (3, True)])
def test_first_tokens_have_the_law_of_the_target(name, draft_length, processed):
    law = SAMPLING.law(frozenset(), VOCAB) if processed else Law()
    counts = count(RULES.load(name)(), draft_length, law, first_seed=100_000 * draft_length)
    wanted = law_of(TARGET, law)
    assert chi_square(counts.sum(1), wanted.sum(1)) > ALPHA
    assert chi_square(counts, wanted) > ALPHA
    assert chi_square(counts, law_of(DRAFT, law)) < ALPHA


class SharesNoise(SeededChooser):
    """Draws residuals on the draft's noise, the fault that marginals do not show."""

    def draw(self, law, place):
        return super().draw(law, place._replace(purpose="draft", node=0))


def test_a_wrong_residual_fails_the_same_test():
    counts = count(NoResidual(), 1, Law(), first_seed=100_000)
    wanted = law_of(TARGET, Law())
    assert chi_square(counts.sum(1), wanted.sum(1)) < ALPHA
    assert chi_square(counts, wanted) < ALPHA


def test_draft_noise_used_again_fails_the_same_test(monkeypatch):
    monkeypatch.setitem(globals(), "SeededChooser", SharesNoise)
    counts = count(Rejection(), 1, Law(), first_seed=100_000)
    assert chi_square(counts, law_of(TARGET, Law())) < ALPHA


def test_seeds_give_independent_requests():
    """Neighbouring seeds: the first token of one says nothing about that of the next."""
    law = Law()
    first = [
        two_tokens(Rejection(), seed=seed, draft_length=1, law=law)[0] for seed in range(RUNS // 2)
    ]
    table = np.zeros((VOCAB, VOCAB))
    np.add.at(table, (first[:-1], first[1:]), 1)
    p = law_of(TARGET, law).sum(1)
    assert chi_square(table, np.outer(p, p)) > ALPHA
