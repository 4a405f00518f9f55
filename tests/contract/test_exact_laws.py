"""I1, proved on toy models: production code's exact law of whole outputs is the target's own.

Every exact rule and every drafter of the tables is run through the engine's round and commit
with every course of chance walked, and compared with the chain rule. ``TOLERANCE`` is rounding.
At the end, programs that are wrong on purpose, each of which the comparison must catch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.core.processors import Law, Sampling
from outrider.core.proposal import Proposal
from outrider.drafters.model import ModelDrafter
from outrider.models.toy import ToyModel
from outrider.protocols import Drafter, Rule
from outrider.registry import DRAFTERS, RULES
from outrider.rules.rejection import Rejection
from tests.contract.test_drafters import build
from tests.controls import (
    AcceptsOnDraftNoise,
    BonusFromTheRowBefore,
    CallsArgmaxASample,
    DropsDoubtfulDrafts,
    EpsilonRatio,
    Faultless,
    NextResidual,
    NoResidual,
    RepairsOnAcceptNoise,
    SaysUniform,
    SwappedResidual,
)
from tests.laws import chain_law, distance, speculative_law

TOLERANCE = 1e-12
EXACT = [name for name in RULES if RULES.load(name).exact]
PROMPT = (0, 1, 0, 1, 0)  # repeats itself, so that prompt lookup has something to propose


def law_for(rule: str, sampling: Sampling, ends: frozenset[int], vocab: int) -> Law:
    """``greedy`` is the rule at temperature 0; the others are at the values given."""
    if rule == "greedy":
        sampling = replace(sampling, temperature=0.0)
    return sampling.law(ends, vocab)


def check(
    rule: str,
    drafter: str,
    *,
    vocab: int = 3,
    draft_vocab: int | None = None,
    max_tokens: int = 3,
    draft_length: int = 2,
    sampling: Sampling = Sampling(temperature=1.0),  # noqa: B008, frozen
    ends: frozenset[int] = frozenset(),
    seed: int = 1,
) -> None:
    target = ToyModel.random(vocab, seed)
    law = law_for(rule, sampling, ends, vocab)
    made = speculative_law(
        target,
        build(drafter, target, draft_vocab),
        RULES.load(rule)(),
        max_tokens=max_tokens,
        draft_length=draft_length,
        law=law,
        end_ids=ends,
        prompt=PROMPT,
    )
    wanted = chain_law(target, max_tokens=max_tokens, law=law, end_ids=ends, prompt=PROMPT)
    assert sum(made.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert distance(made, wanted) <= TOLERANCE


every = pytest.mark.parametrize(
    ("rule", "drafter"), [(rule, drafter) for rule in EXACT for drafter in DRAFTERS]
)


@every
@pytest.mark.parametrize(
    ("vocab", "max_tokens"),
    [(2, n) for n in range(1, 6)] + [(3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (5, 1), (5, 2)],
)
@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
def test_lengths(rule, drafter, vocab, max_tokens, draft_length):
    """max_tokens falls inside blocks, at their ends and before any draft has room."""
    check(rule, drafter, vocab=vocab, max_tokens=max_tokens, draft_length=draft_length)


@every
@pytest.mark.parametrize("draft_length", [1, 2, 4])
def test_four_tokens(rule, drafter, draft_length):
    """Long enough for a second and a third round after a full block."""
    # Under `coupled` each head of several shares the position's noise: ten minutes at four tokens.
    max_tokens = 3 if (rule, drafter) == ("coupled", "medusa") else 4
    check(rule, drafter, max_tokens=max_tokens, draft_length=draft_length)


@every
@pytest.mark.parametrize("seed", range(2, 6))
def test_other_models(rule, drafter, seed):
    check(rule, drafter, seed=seed)


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("seed", [3, 20, 65, 93])
def test_drafts_under_which_repairs_weigh(rule, seed):
    """Block verification's repair depends on its prefix's weight only where much is left of p.

    With most drafts, and with all of three tokens, a repair that forgets the weight has the same
    law; here it differs by a per cent and more (``tests/controls.py``).
    """
    target = ToyModel.random(4, 1, sharpness=1.0)
    drafter = ModelDrafter(ToyModel.random(4, seed, sharpness=2.0))
    law = law_for(rule, Sampling(temperature=1.0), frozenset(), 4)
    # Under `coupled` the noise is shared over rounds, and three tokens of four take minutes.
    request = {"max_tokens": 2 if rule == "coupled" else 3, "law": law, "prompt": PROMPT[:3]}
    made = speculative_law(target, drafter, RULES.load(rule)(), draft_length=2, **request)
    assert distance(made, chain_law(target, **request)) <= TOLERANCE


@every
@pytest.mark.parametrize("ends", [{0}, {1}, {2}, {0, 2}])
@pytest.mark.parametrize("draft_length", [1, 3])
def test_end_tokens_in_mid_block(rule, drafter, ends, draft_length):
    check(rule, drafter, ends=frozenset(ends), draft_length=draft_length)


PROCESSORS = {
    "cold": Sampling(temperature=0.6),
    "hot": Sampling(temperature=1.8),
    "top-k": Sampling(temperature=0.9, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.75),
    "min-p": Sampling(temperature=1.0, min_p=0.3),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.7),
    "presence": Sampling(temperature=1.0, presence_penalty=1.1),
    "frequency": Sampling(temperature=1.0, frequency_penalty=0.8),
    "bias": Sampling(temperature=1.0, logit_bias={0: 1.5, 2: -2.0}),
    "min-tokens": Sampling(temperature=1.0, min_tokens=2),
    "all": Sampling(0.8, 2, 0.9, 0.05, 1.2, 0.3, 0.2, {1: 0.5}, 1),
}


@every
@pytest.mark.parametrize("values", PROCESSORS)
def test_processors(rule, drafter, values):
    check(rule, drafter, sampling=PROCESSORS[values], ends=frozenset({1}))


@every
@pytest.mark.parametrize("draft_vocab", [2, 4, 6])
@pytest.mark.parametrize("values", ["hot", "top-k"])
def test_trimmed_and_padded_draft_vocabularies(rule, drafter, draft_vocab, values):
    check(rule, drafter, draft_vocab=draft_vocab, sampling=PROCESSORS[values])


@pytest.mark.slow
@pytest.mark.parametrize("rule", EXACT)
# Those that draw, and one that does not: the others only differ in which tokens they propose.
@pytest.mark.parametrize("drafter", ["ngram", "model", "crosstoken", "eagle"])
@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
def test_a_vocabulary_of_four(rule, drafter, draft_length):
    # Under `coupled` all rounds share a position's noise; at four tokens of four that is
    # thousands of polytopes of three dimensions, and minutes instead of seconds.
    max_tokens = 3 if rule == "coupled" else 4
    check(rule, drafter, vocab=4, max_tokens=max_tokens, draft_length=draft_length)


# --- draft lengths that change from round to round -----------------------------------------------


class Waver:
    """A policy that learns: 0 to 3 tokens by what was kept before."""

    name = "waver"

    def __init__(self) -> None:
        self._next = 2

    def length(self) -> int:
        return self._next

    def learn(self, proposal: Proposal, path: Sequence[int]) -> None:
        drafted, accepted = proposal.depth, len(path)
        self._next = accepted + 1 if drafted and accepted == drafted else (0 if drafted else 1)


@every
def test_a_policy_that_learns(rule, drafter):
    target = ToyModel.random(3, 1)
    law = law_for(rule, Sampling(temperature=1.0), frozenset(), 3)
    made = speculative_law(
        target, build(drafter, target), RULES.load(rule)(),
        max_tokens=3, law=law, prompt=PROMPT, policy=Waver,
    )  # fmt: skip
    wanted = chain_law(target, max_tokens=3, law=law, prompt=PROMPT)
    assert distance(made, wanted) <= TOLERANCE


# --- negative controls: each is wrong, and enumeration must say so -------------------------------


def error_of(rule: Rule, *, drops: bool = False) -> float:
    target = ToyModel.random(3, 1)
    drafter: Drafter = ModelDrafter(ToyModel.random(3, 9))
    made = speculative_law(
        target, DropsDoubtfulDrafts(drafter) if drops else drafter, rule,
        max_tokens=3, draft_length=2, prompt=PROMPT,
    )  # fmt: skip
    return distance(made, chain_law(target, max_tokens=3, prompt=PROMPT))


def test_without_a_fault_the_controls_are_exact():
    assert error_of(Rejection()) <= TOLERANCE
    assert error_of(Faultless()) <= TOLERANCE


@pytest.mark.parametrize(
    ("rule", "least"),
    [
        (NoResidual, 1e-3),
        (SwappedResidual, 1e-3),
        (NextResidual, 1e-3),
        (EpsilonRatio, 1e-8),
        (BonusFromTheRowBefore, 1e-3),
        (CallsArgmaxASample, 1e-3),
        (SaysUniform, 1e-3),
    ],
)
def test_a_wrong_rule_is_caught(rule, least):
    assert error_of(rule()) > least > 100 * TOLERANCE


def test_dropping_a_sampled_draft_for_its_low_q_is_caught():
    assert error_of(Rejection(), drops=True) > 1e-3


@pytest.mark.parametrize("rule", [AcceptsOnDraftNoise, RepairsOnAcceptNoise])
def test_noise_used_twice_is_caught_though_its_marginals_are_right(rule):
    with pytest.raises(AssertionError, match="Noise was used twice"):
        error_of(rule())
