"""I1 and the coupled rule's promise under a grammar: chains, trees, every rule and draft length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider import Engine, Grammar
from outrider.audit.exact import TOLERANCE
from outrider.core.processors import Sampling
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.script import ScriptDrafter
from outrider.drafters.shape import Dynamic, Static
from outrider.engine.grammar import Grammars, Guided
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.registry import RULES
from tests.laws import chain_law, distance, speculative_law

# a, b, c and an end.
VOCAB, END = 4, 3
WORDS = ToyTokenizer(VOCAB, [END])
TARGET = ToyModel.random(VOCAB, seed=1)
PROMPT = (0, 1, 0, 1, 0)

GRAMMARS = {
    "choice": Grammar.regex("(a|bb)(c|ab)?"),
    "loop": Grammar.regex("(ab|c)*b"),
    "forced": Grammar.regex("abca?"),
    "nested": Grammar.lark('start: "a" start "b" | "c"'),
}
DRAFTERS = {
    "ngram": lambda vocab: NgramDrafter(3, 1),
    "past the end": lambda vocab: ScriptDrafter([0, 1, 2, 3, 0, 1]),
    "chain": lambda vocab: ModelDrafter(ToyModel.random(vocab, seed=9)),
    "static tree": lambda vocab: ModelDrafter(ToyModel.random(vocab, 9), shape=Static((2, 2))),
    "dynamic tree": lambda vocab: ModelDrafter(ToyModel.random(vocab, 9), shape=Dynamic(4, 2)),
}
EXACT = [name for name in RULES if RULES.load(name).exact]


class Guiding:
    """A drafter whose sessions know the grammar, as the engine's do."""

    def __init__(self, drafter, mask):
        self._drafter, self._mask = drafter, mask
        self.name, self.trees = drafter.name, drafter.trees
        self.default_length = drafter.default_length

    def start(self, prompt, capacity):
        return Guided(self._drafter.start(prompt, capacity), self._mask, len(prompt))


def compare(rule, drafter, grammar, length, sampling, vocab, guided):
    if rule == "greedy":
        sampling = replace(sampling, temperature=0.0)
    mask = Grammars(WORDS).mask(grammar, VOCAB)
    ends = frozenset({END})
    request = {
        "max_tokens": 3, "law": sampling.law(ends, VOCAB, mask), "end_ids": ends, "prompt": PROMPT
    }  # fmt: skip
    draft = DRAFTERS[drafter](vocab)
    made = speculative_law(
        TARGET, Guiding(draft, mask) if guided else draft, RULES.load(rule)(),
        draft_length=length, **request,
    )  # fmt: skip
    # A mask of its own: the chain rule's contexts come in another order.
    request["law"] = sampling.law(ends, VOCAB, Grammars(WORDS).mask(grammar, VOCAB))
    wanted = chain_law(TARGET, **request)
    assert distance(made, wanted) <= TOLERANCE
    return wanted


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("rule", EXACT)
def test_the_law_is_the_chain_rules(rule, grammar, length):
    how = Sampling(temperature=0.8)
    for drafter in DRAFTERS:
        if RULES.load(rule).trees or "tree" not in drafter:
            compare(rule, drafter, GRAMMARS[grammar], length, how, VOCAB, guided=True)
    compare(rule, "past the end", GRAMMARS[grammar], length, how, VOCAB, guided=False)
    # A draft that lacks a letter and the end must do no harm.
    compare(rule, "chain", GRAMMARS[grammar], length, how, 2, guided=False)


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_p=0.6),
        Sampling(temperature=0.7, top_k=1),
        Sampling(temperature=1.0, repetition_penalty=1.7, logit_bias={0: 3.0, 3: -2.0}),
    ],
    ids=["top-p", "top-k", "penalties"],
)
def test_other_processors_work_on_what_the_mask_leaves(rule, sampling):
    for drafter in ("past the end", "chain"):
        wanted = compare(rule, drafter, GRAMMARS["loop"], 2, sampling, VOCAB, guided=True)
        assert wanted


def test_the_law_is_that_of_the_target_renormalised_by_hand():
    """P(x) = p(x) / sum over what the grammar allows, worked out without any code of the mask."""
    mask = Grammars(WORDS).mask(Grammar.regex("(a|b)c"), VOCAB)
    law = Sampling(temperature=1.0).law(frozenset({END}), VOCAB, mask)
    made = speculative_law(
        TARGET, ModelDrafter(ToyModel.random(VOCAB, 9)), RULES.load("rejection")(),
        max_tokens=3, law=law, end_ids=frozenset({END}), prompt=PROMPT,
    )  # fmt: skip
    p = TARGET.next(PROMPT)
    wanted = {(x, 2, END): p[x] / (p[0] + p[1]) for x in (0, 1)}
    assert distance(made, wanted) <= TOLERANCE


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_seed_gives_the_same_text_with_and_without_a_draft(grammar, temperature):
    plain = Engine(TARGET, WORDS, drafter=NoDrafter())
    engines = [
        Engine(TARGET, WORDS, drafter=make(VOCAB), draft_length=k)
        for make in DRAFTERS.values()
        for k in (1, 5)
    ]
    for seed in range(6):
        how = {"grammar": GRAMMARS[grammar], "seed": seed, "temperature": temperature}
        wanted = plain.generate("ababa", max_tokens=9, **how)
        for engine in engines:
            made = engine.generate("ababa", max_tokens=9, **how)
            assert (made.token_ids, made.finish_reason) == (wanted.token_ids, wanted.finish_reason)
