"""I1 over all combinations: rule, shape, policy, processors, end tokens, draft vocabulary.

``test_exact_laws.py`` turns one knob at a time; here they are turned together. The whole product
is long and marked slow; a sample of it, drawn with a fixed seed, runs with every ``make test``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from outrider.audit.exact import TOLERANCE
from outrider.core.price import Price
from outrider.core.processors import Sampling
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.script import ScriptDrafter
from outrider.drafters.shape import Dynamic, Static
from outrider.models.toy import ToyModel
from outrider.policies.adaptive import Adaptive
from outrider.policies.fixed import Fixed
from outrider.registry import POLICIES, RULES
from tests.laws import chain_law, distance, speculative_law

VOCAB = 3
PROMPT = (0, 1, 0, 1, 0)
TARGET = ToyModel.random(VOCAB, seed=1)

DRAFTERS = {
    "ngram": lambda vocab: NgramDrafter(3, 1),
    "script": lambda vocab: ScriptDrafter([1, 0, 0, 1]),
    "chain": lambda vocab: ModelDrafter(ToyModel.random(vocab, seed=9)),
    "static tree": lambda vocab: ModelDrafter(ToyModel.random(vocab, 9), shape=Static((2, 2))),
    "dynamic tree": lambda vocab: ModelDrafter(ToyModel.random(vocab, 9), shape=Dynamic(4, 2)),
}
POLICY = {
    "fixed": lambda: Fixed(2),
    "adaptive": Adaptive,
    "adaptive, dear rows": lambda: Adaptive(
        4, Price((1, 2), (1.0, 1.4), step=0.1), prior=1.0, memory=2.0, retry=1
    ),
    "eager adaptive": lambda: Adaptive(3, prior=1.0, memory=3.0, retry=1),
}
PROCESSORS = {
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=0.9, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.75),
    "min-p": Sampling(temperature=1.0, min_p=0.3),
    "penalties": Sampling(
        temperature=1.0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.8
    ),
    "bias": Sampling(temperature=1.0, logit_bias={0: 1.5, 2: -2.0}, min_tokens=2),
}
COMBINATIONS = [
    c
    for c in product(
        [name for name in RULES if RULES.load(name).exact],
        DRAFTERS,
        POLICY,
        PROCESSORS,
        [frozenset(), frozenset({1})],
        [2, 3, 5],
    )
    if RULES.load(c[0]).trees or "tree" not in c[1]
]
QUICK = random.Random(7).sample(COMBINATIONS, 160)


def check(rule, drafter, policy, processors, ends, draft_vocab):
    sampling = PROCESSORS[processors]
    if rule == "greedy":
        sampling = replace(sampling, temperature=0.0)
    request = {
        "max_tokens": 3, "law": sampling.law(ends, VOCAB), "end_ids": ends, "prompt": PROMPT
    }  # fmt: skip
    made = speculative_law(
        TARGET, DRAFTERS[drafter](draft_vocab), RULES.load(rule)(),
        policy=POLICY[policy], **request,
    )  # fmt: skip
    assert distance(made, chain_law(TARGET, **request)) <= TOLERANCE


def name(combination):
    *words, ends, vocab = combination
    return " ".join([*words, "with an end" if ends else "endless", f"draft of {vocab}"])


@pytest.mark.parametrize("combination", QUICK, ids=name)
def test_a_sample_of_all_combinations(combination):
    check(*combination)


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted({c[0] for c in COMBINATIONS}))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_all_combinations(rule, drafter):
    for combination in COMBINATIONS:
        if combination[:2] == (rule, drafter):
            check(*combination)


def test_the_sample_holds_every_value_of_every_knob():
    for knob in range(6):
        assert {c[knob] for c in QUICK} == {c[knob] for c in COMBINATIONS}
    assert set(POLICIES) <= set(POLICY)
