"""Negative controls: programs that are wrong on purpose, each with a fault of a real engine.

``CONTROLS`` is the one table of them; a control puts its fault into any engine, a toy's or a real
model's. ``tests/statistical/test_controls.py`` holds that each is caught, ``docs/controls.md``
tells by how many samples, and ``benchmarks/negative_controls.py`` finds out.

The fault is never in plain decoding, with which an audit compares: what both sides have in
common, no comparison of the two can show.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from outrider import Engine
from outrider.audit.exact import ExactReport, audit_exact
from outrider.core.chooser import Place, SeededChooser
from outrider.core.distribution import Distribution
from outrider.core.noise import uniform
from outrider.core.processors import Context, Law, Sampling
from outrider.core.proposal import ROOT, Proposal
from outrider.core.verdict import Verdict
from outrider.drafters.model import ModelDrafter
from outrider.drafters.shape import Chain, Shape, Static
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.protocols import Drafter, Pick
from outrider.rules.block import Block
from outrider.rules.coupled import Coupled
from outrider.rules.greedy import Greedy
from outrider.rules.rejection import Rejection
from outrider.rules.walk import follow

# --- rules: rejection ----------------------------------------------------------------------------


def _walk(
    target, proposal, chooser, position, round, *,
    ratio=lambda p, q: p / q,
    residual=lambda p, q: p.residual(q),
    row=0,
    bonus_row=0,
    accept="accept",
    repair="residual",
) -> Verdict:  # fmt: skip
    """The rejection rule on a chain, with a place to put each fault; without one it is exact."""
    path: list[int] = []
    for node, token in enumerate(proposal.tokens):
        p = target(node - 1 + row)
        q = proposal.law(node, p.vocab_size)
        here = position + node
        if chooser.accept(min(1.0, ratio(p[token], q[token])), Place(here, accept, round, node)):
            path.append(node)
            continue
        token = chooser.draw(residual(p, q), Place(here, repair, round, node))
        return Verdict(tuple(path), token, "correction")
    p = target(max(ROOT, len(path) - 1 + (bonus_row if path else 0)))
    return Verdict(
        tuple(path), chooser.draw(p, Place(position + len(path), repair, round)), "bonus"
    )


class Faultless(Rejection):
    """The controls' own walk with no fault put in."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(target, proposal, chooser, position, round)


class NoResidual(Rejection):
    """Repairs from p."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(target, proposal, chooser, position, round, residual=lambda p, q: p)


class SwappedResidual(Rejection):
    """Repairs from max(0, q − p)."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(
            target, proposal, chooser, position, round,
            residual=lambda p, q: q.residual(p),
        )  # fmt: skip


class AbsoluteResidual(Rejection):
    """Repairs from |p − q|."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(target, proposal, chooser, position, round, residual=_absolute)


def _absolute(p: Distribution, q: Distribution) -> Distribution:
    apart = np.abs(p.to_dense() - q.to_dense())
    return Distribution.dense(apart) if apart.any() else p


class NextResidual(Rejection):
    """Repairs with the q of the tree's first node, whichever was rejected."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(
            target, proposal, chooser, position, round,
            residual=lambda p, q: p.residual(proposal.law(0, p.vocab_size)),
        )  # fmt: skip


class EpsilonRatio(Rejection):
    """Guards the ratio against a zero that cannot be."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(
            target, proposal, chooser, position, round,
            ratio=lambda p, q: p / (q + 1e-5),
        )  # fmt: skip


class CoarseEpsilon(Rejection):
    """Guards the ratio with an epsilon that is not small beside q."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(
            target, proposal, chooser, position, round,
            ratio=lambda p, q: p / (q + 0.1),
        )  # fmt: skip


class BonusFromTheRowBefore(Rejection):
    """Takes the bonus token from the law before the last accepted token."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(target, proposal, chooser, position, round, bonus_row=-1)


class JudgesByTheNextRow(Rejection):
    """Holds each draft against the law after it, in place of the law before it."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(target, proposal, chooser, position, round, row=1)


class SharedNoise(Rejection):
    """Draws the residual on the draft's noise."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(target, proposal, chooser, position, round, repair="draft")


class AcceptsOnDraftNoise(Rejection):
    """Asks for acceptance where the draft was drawn."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(target, proposal, chooser, position, round, accept="draft")


class RepairsOnAcceptNoise(Rejection):
    """Draws the residual where acceptance was asked for."""

    def judge(self, target, proposal, chooser, position, round):
        return _walk(target, proposal, chooser, position, round, repair="accept")


class CallsArgmaxASample(Rejection):
    """Takes the most probable token, and reports q."""

    def draft(self, q, chooser, position, round, node):
        return q.argmax(), q


class CallsASampleFixed(Rejection):
    """No fault: a sampled token that claims a one-hot law is kept less often, and exact.

    Given the draft, whatever it was drawn from, the rule on a one-hot q emits p.
    """

    def draft(self, q, chooser, position, round, node):
        return super().draft(q, chooser, position, round, node)[0], None


class SaysUniform(Rejection):
    """Samples from q, and reports a flatter law."""

    def draft(self, q, chooser, position, round, node):
        token, law = super().draft(q, chooser, position, round, node)
        return token, Distribution.dense(law.to_dense() + 0.1)


class SameNoiseEveryRound(Rejection):
    """Starts its draft noise anew in each round."""

    def draft(self, q, chooser, position, round, node):
        return chooser.draw(q, Place(0, "draft", 0, node)), q


class SameNoiseEveryPosition(Rejection):
    """Draws all drafts of a round on one noise: each one's law is right, their joint law not."""

    def draft(self, q, chooser, position, round, node):
        return chooser.draw(q, Place(0, "draft", round)), q


class StaleSeed(Rejection):
    """Draws the first draft before the request's seed is set."""

    def draft(self, q, chooser, position, round, node):
        if position == 0:
            chooser = SeededChooser(0)
        return super().draft(q, chooser, position, round, node)


class ForgetsReplacement(Rejection):
    """Draws siblings without replacement, and claims the law with replacement."""

    def siblings(self, q, *arguments):
        return [(token, q) for token, _ in super().siblings(q, *arguments)]


# --- rules: block, coupled, greedy ---------------------------------------------------------------


def _block(
    target, proposal, chooser, position, round, *, cap=1.0, by_weight=False, weighed_repair=True
) -> Verdict:
    """Block verification with a place to put each fault; without one it is exact."""

    def surplus(p, q, weight):
        left = np.maximum(0.0, weight * p.to_dense() - q.to_dense())
        return float(left.sum()), Distribution.dense(left) if left.any() else p

    last = len(proposal) - 1
    p, weight, kept, repair = target(ROOT), 1.0, -1, None
    if proposal:
        _, repair = surplus(p, proposal.law(0, p.vocab_size), weight)
    for node, x in enumerate(proposal.tokens):
        weight = min(cap, weight * p[x] / proposal.law(node, p.vocab_size)[x])
        p = target(node)
        if node == last:
            chance, after = weight, p
        else:
            q = proposal.law(node + 1, p.vocab_size)
            mass, after = surplus(p, q, weight)
            chance = mass / max(mass + 1.0 - weight, 1e-300) if mass > 0.0 else 0.0
            if by_weight:
                chance = weight
            if not weighed_repair:
                _, after = surplus(p, q, 1.0)
        if chooser.accept(min(1.0, chance), Place(position + node, "accept", round, node)):
            kept, repair = node, after
    token = chooser.draw(repair or p, Place(position + kept + 1, "residual", round))
    kind = "bonus" if kept == last else "correction"
    return Verdict(tuple(range(kept + 1)), token, kind)


class FaultlessBlock(Block):
    """The controls' own block verification with no fault put in."""

    def judge(self, target, proposal, chooser, position, round):
        return _block(target, proposal, chooser, position, round)


class BlockWithoutCap(Block):
    """Forgets min(1, ·) in the weight of a prefix."""

    def judge(self, target, proposal, chooser, position, round):
        return _block(target, proposal, chooser, position, round, cap=np.inf)


class BlockTestsByWeight(Block):
    """Accepts each prefix with its weight, as if it were the whole block."""

    def judge(self, target, proposal, chooser, position, round):
        return _block(target, proposal, chooser, position, round, by_weight=True)


class BlockRepairsUnweighed(Block):
    """Repairs from max(0, p − q), whatever the weight of the prefix that stands."""

    def judge(self, target, proposal, chooser, position, round):
        return _block(target, proposal, chooser, position, round, weighed_repair=False)


class RepairsOnFreshNoise(Coupled):
    """After a draft that does not match, draws the target's token again, on noise of its own."""

    def judge(self, target, proposal, chooser, position, round):
        verdict = super().judge(target, proposal, chooser, position, round)
        if verdict.kind == "bonus":
            return verdict
        last = verdict.path[-1] if verdict.path else ROOT
        where = Place(position + len(verdict.path), "residual", round)
        return replace(verdict, token=chooser.draw(target(last), where))


class KeepsLikelyDrafts(Coupled):
    """Keeps every draft that the target gives a tenth or more."""

    def judge(self, target, proposal, chooser, position, round):
        def token(node, depth):
            p = target(node)
            for child in proposal.children(node):
                if p[proposal.tokens[child]] >= 0.1:
                    return proposal.tokens[child]
            return chooser.draw(p, Place(position + depth, "target"))

        return follow(token, proposal)


def _instead(verdict, proposal, token, other):
    """Another token for one that speculation would add; plain decoding is left as it is."""
    if len(proposal) and verdict.token == token:
        return replace(verdict, token=other)
    return verdict


class SlipsUp(Coupled):
    """Emits token 4 for 3; not in the table, since it needs a target that emits 3."""

    def judge(self, target, proposal, *where):
        return _instead(super().judge(target, proposal, *where), proposal, 3, 4)


class TiesToTheLast(Greedy):
    """Of tokens 0 and 1 takes 1; not in the table, since it needs a target that ties these."""

    def judge(self, target, proposal, *where):
        return _instead(super().judge(target, proposal, *where), proposal, 0, 1)


# --- drafters ------------------------------------------------------------------------------------


class _Wraps:
    """A drafter of chains around another."""

    name = "wraps"
    default_length = 2
    trees = False

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    def start(self, prompt, capacity):
        self._session = self._inner.start(prompt, capacity)
        return self

    @classmethod
    def build(cls, argument, setting):
        return cls(ModelDrafter.build(argument, setting))


class DropsDoubtfulDrafts(_Wraps):
    """Leaves out a sampled token, and all after it, when its own q is low."""

    name = "drops"

    def propose(self, tokens, length, pick):
        whole = self._session.propose(tokens, length, pick)
        kept = 0
        while kept < len(whole) and whole.laws[kept][whole.tokens[kept]] > 0.3:
            kept += 1
        return Proposal.chain(whole.tokens[:kept], whole.laws[:kept])


class _RawPick(Pick):
    """Says of each token that it was drawn from the law before the processors."""

    __slots__ = ()

    def __call__(self, logits, path):
        return super().__call__(logits, path)[0], Distribution.softmax(logits)


class ReportsRawQ(_Wraps):
    """Draws after the processors, and reports the law before them."""

    name = "raw"

    def propose(self, tokens, length, pick):
        raw = _RawPick(*(getattr(pick, part.name) for part in fields(pick)))
        return self._session.propose(tokens, length, raw)


class ForgetsThePath(_Wraps):
    """Reports for every draft the q of the block's first."""

    name = "forgets"

    def propose(self, tokens, length, pick):
        whole = self._session.propose(tokens, length, pick)
        laws = [
            whole.laws[0] if whole.laws[0][token] > 0.0 else law
            for token, law in zip(whole.tokens, whole.laws, strict=True)
        ]
        return Proposal.chain(whole.tokens, laws)


class DropsUnlikely(ModelDrafter):
    """Drops sampled siblings whose own q is low after they were drawn."""

    def start(self, prompt, capacity):
        session = super().start(prompt, capacity)
        propose = session.propose

        def biased(tokens, length, pick):
            def siblings(q, *place):
                drawn = pick.siblings(q, *place)
                return [(token, law) for token, law in drawn if q[token] > 0.3]

            honest = type(pick)(pick.distribution, pick.choose, siblings)
            return propose(tokens, length, honest)

        session.propose = biased
        return session


# --- engines -------------------------------------------------------------------------------------


class Spoilt(Engine):
    """An engine whose speculative requests are spoilt before their first round."""

    def __init__(self, engine: Engine, spoil: Callable[[Any], None]) -> None:
        super().__init__(
            engine.model,
            engine.tokenizer,
            drafter=engine.drafter,
            rule=engine.rule,
            draft_length=engine.draft_length,
        )
        self._spoil = spoil

    def stream(self, prompt, *, plain=False, **options):
        generation = super().stream(prompt, plain=plain, **options)
        if not plain:
            self._spoil(generation)
        return generation


def _leak_penalties(generation) -> None:
    """Every draft of an earlier round stays in the penalties' counts, kept or not."""
    session = generation.session
    propose, law, start = session.draft.propose, session.law, session.prompt_length

    earlier: list[int] = []

    class Watch:
        def propose(self, tokens, length, pick):
            earlier.extend(fresh)
            proposal = propose(tokens, length, pick)
            fresh[:] = proposal.tokens
            return proposal

    fresh: list[int] = []

    class Leaky(Law):
        def without_choice(self):
            return Leaky(self.processors, wide=self.wide)

        def __call__(self, context, logits):
            # The round's own drafts are counted along the path, as they should be.
            tokens = [*context.tokens[:start], *earlier, *context.tokens[start:]]
            return super().__call__(Context(tokens, start), logits)

    session.draft = Watch()
    session.law = Leaky(law.processors, greedy=law.greedy, wide=law.wide)


def _miss_stops(generation) -> None:
    """Only the last token of a block is looked at for an end."""
    ending, commit = generation._ending, generation._commit

    def careless(played):
        push, ends, left = ending.push, ending._eos, len(played.emitted)

        def count(token):
            nonlocal left
            left -= 1
            ending._eos = frozenset() if left else ends
            return push(token)

        ending.push = count
        try:
            return commit(played)
        finally:
            ending.push, ending._eos = push, ends

    generation._commit = careless


class _LastOfEquals(Law):
    def __call__(self, context, logits):
        scores = logits.float()
        for processor in self.processors:
            scores = processor(context, scores)
        last = int((scores == scores.max()).nonzero()[-1])
        return Distribution.one_hot(last, len(scores))


def _take_the_last_of_equals(generation) -> None:
    law = generation.session.law
    generation.session.law = _LastOfEquals(law.processors, greedy=True)


class _WinnersNoise(SeededChooser):
    """Answers whether a draft stands from the very number by which its token won the draw."""

    def __init__(self, seed):
        super().__init__(seed)
        self._won: dict[Place, int] = {}

    def draw(self, law, place):
        token = super().draw(law, place)
        if place.purpose == "draft":
            self._won[place] = token
        return token

    def accept(self, probability, place):
        draft = place._replace(purpose="draft")
        winner = self._won[draft]  # its token id is the counter that the race reads
        return bool(uniform(np.uint64(self._key(draft)), winner) < probability)


def _accept_on_the_winners_noise(generation) -> None:
    generation.session.chooser = _WinnersNoise(generation.session.chooser.seed)


def _with_a_stale_row(engine: Engine) -> Engine:
    """A model that, where the last round rejected a draft, goes on from that draft's row."""
    model = copy.copy(engine.model)
    score = engine.model.score

    def stale(cache, tokens, proposal):
        before, drafted = getattr(cache, "last_pass", (0, ()))
        rejected = cache.length - before
        if len(tokens) and 0 <= rejected < len(drafted):
            tokens = [drafted[rejected], *tokens[1:]]
        cache.last_pass = (cache.length + len(tokens), proposal.tokens)
        return score(cache, tokens, proposal)

    model.score = stale
    return _with(engine, model=model)


# --- the table -----------------------------------------------------------------------------------

HOT = Sampling(temperature=1.0)
TOP_P = Sampling(temperature=1.0, top_p=0.7)
COLD = Sampling(temperature=0.5)
PENALISED = Sampling(temperature=1.0, presence_penalty=4.0)
TIES = Sampling(logit_bias={1: 1e18, 2: 1e18})  # beside that, all logits are equal

REAL_HOT = Sampling(temperature=0.5, top_p=0.9)
# For faults that need a rare course of chance: few words, none of them unlikely.
REAL_FLAT_2 = Sampling(temperature=4.0, top_k=2)
REAL_FLAT_3 = Sampling(temperature=1.5, top_k=3)
REAL_FLAT_4 = Sampling(temperature=2.0, top_k=4)
REAL_PENALISED = Sampling(temperature=0.5, top_p=0.9, presence_penalty=4.0)
# The target's own law over a few tokens, alike at every position: what two draws on one noise have
# to say of each other shows only where the same tokens can come of both. Token 0 is among them for
# faults that share its noise alone, and then the draft thinks too much of one of the others.
REAL_DIGITS = Sampling(temperature=1.5, logit_bias=dict.fromkeys(range(32, 36), 100.0))
REAL_FIRST_IDS = Sampling(temperature=3.0, logit_bias=dict.fromkeys((0, 33, 34), 100.0))
REAL_ONE_TOO_LIKELY = Sampling(temperature=1.0, logit_bias=dict.fromkeys((0, 59, 60), 100.0))

# For enumeration of a real target: few tokens, so that few courses of chance are left.
FEW = Sampling(temperature=1.0, top_k=3)
FEW_2 = Sampling(temperature=1.0, top_k=2)
FEW_TOP_P = Sampling(temperature=1.0, top_k=3, top_p=0.7)
FEW_COLD = Sampling(temperature=0.5, top_k=3)
FEW_COLD_2 = Sampling(temperature=0.5, top_k=2)
FEW_PENALISED = Sampling(temperature=1.0, top_k=3, presence_penalty=4.0)

PROMPT = [0, 1, 0]
REAL_PROMPT = "The best thing about this town is"
SEED = 1


def _with(engine: Engine, **changes: Any) -> Engine:
    """The same engine with some parts exchanged."""
    parts: dict[str, Any] = {
        "drafter": engine.drafter, "rule": engine.rule, "draft_length": engine.draft_length
    }  # fmt: skip
    model = changes.pop("model", engine.model)
    return Engine(model, engine.tokenizer, **(parts | changes))


@dataclass(frozen=True)
class Control:
    """One fault, and the request under which it shows.

    Parameters
    ----------
    wrong
        What is wrong, in a sentence.
    family
        Whose fault it is.
    spoil
        From a sound engine to one with the fault.
    rule
        The sound rule's name.
    sampling, stop_token_ids
        The request on a toy.
    real
        Changes of the request on a real target: ``sampling``, ``stop_text``, and so on; ``None``
        where the fault cannot show there, and ``unseen`` says why.
    few
        The sampling values under which a real target is enumerated.
    shape
        Of the draft.
    vocab, draft_seed
        Of the toy that is sampled.
    walked
        The same of the toy that is enumerated.
    enumerable
        Whether the fault lies in what enumeration walks.
    sampled
        Whether it is large enough for samples.
    """

    wrong: str
    family: Literal["rule", "drafter", "engine"]
    spoil: Callable[[Engine], Engine]
    rule: str = "rejection"
    sampling: Sampling = HOT
    max_tokens: int = 3
    draft_length: int = 2
    stop_token_ids: tuple[int, ...] = ()
    real: Mapping[str, Any] | None = field(default_factory=dict)
    few: Sampling = FEW
    shape: Shape = Chain()  # noqa: RUF009, frozen
    vocab: int = 4
    draft_seed: int = 37
    walked: tuple[int, int] = (3, 37)
    enumerable: bool = True
    sampled: bool = True
    unseen: str = ""

    def sound(self, engine: Engine) -> Engine:
        """The same configuration without the fault."""
        drafter = ModelDrafter(engine.drafter.model, shape=self.shape)
        return _with(engine, drafter=drafter, rule=self.rule, draft_length=self.draft_length)

    def apply(self, engine: Engine) -> Engine:
        """An engine around the same target and the same draft model that has the fault."""
        return self.spoil(self.sound(engine))

    def real_stops(self, engine: Engine) -> tuple[int, ...]:
        """Tokens that end a real engine's output."""
        texts = (self.real or {}).get("stop_texts", ())
        return tuple(engine.tokenizer.encode(text)[-1] for text in texts)

    def request(self, *, engine: Engine | None = None) -> dict[str, Any]:
        """What to ask a toy for, or a real engine."""
        sampling, stops = self.sampling, self.stop_token_ids
        if engine:
            assert self.real is not None
            sampling = self.real.get("sampling", REAL_HOT)
            stops = self.real_stops(engine)
        request = {"max_tokens": self.max_tokens, **sampling.to_dict()}
        return request | ({"stop_token_ids": stops} if stops else {})


def _rule(rule: type) -> Callable[[Engine], Engine]:
    return lambda engine: _with(engine, rule=rule())


def _drafter(wrap: type) -> Callable[[Engine], Engine]:
    return lambda engine: _with(engine, drafter=wrap(engine.drafter))


def _engine(spoil: Callable[[Any], None]) -> Callable[[Engine], Engine]:
    return lambda engine: Spoilt(engine, spoil)


def _unlikely(engine: Engine) -> Engine:
    drafter = DropsUnlikely(engine.drafter.model, shape=engine.drafter.shape)
    return _with(engine, drafter=drafter)


_TREE = Static((2,))

CONTROLS: dict[str, Control] = {
    "repairs from p": Control(
        "After a rejection the token is drawn from p, not from the residual.",
        "rule", _rule(NoResidual),
    ),
    "repairs from q - p": Control(
        "The residual is max(0, q − p): target and draft are exchanged.",
        "rule", _rule(SwappedResidual),
    ),
    "repairs from |p - q|": Control(
        "The residual is |p − q|: the maximum with 0 is forgotten.",
        "rule", _rule(AbsoluteResidual),
    ),
    "another node's q": Control(
        "The residual takes off the q of the block's first draft, whichever was rejected.",
        "rule", _rule(NextResidual),
    ),
    "coarse epsilon": Control(
        "The ratio is p / (q + 0.1).",
        "rule", _rule(CoarseEpsilon),
    ),
    "tiny epsilon": Control(
        "The ratio is p / (q + 0.00001).",
        "rule", _rule(EpsilonRatio), real=None, sampled=False,
        unseen="too small for samples: some 1e10 would be needed",
    ),
    "bonus from the row before": Control(
        "The bonus token is drawn from the law before the last accepted draft.",
        "rule", _rule(BonusFromTheRowBefore),
    ),
    "judged by the next row": Control(
        "Each draft is held against the target's row after it: off by one position.",
        "rule", _rule(JudgesByTheNextRow),
    ),
    "residual on draft noise": Control(
        "The residual is drawn on the noise that the rejected draft was drawn on.",
        "rule", _rule(SharedNoise), vocab=3,
        real={"sampling": REAL_FLAT_3},
    ),
    "acceptance on draft noise": Control(
        "Acceptance is asked for at the place where the draft was drawn.",
        "rule", _rule(AcceptsOnDraftNoise), vocab=3, draft_seed=93,
        real={"sampling": REAL_FIRST_IDS},
    ),
    "residual on acceptance noise": Control(
        "The residual is drawn at the place where acceptance was asked for.",
        "rule", _rule(RepairsOnAcceptNoise), vocab=3, draft_seed=88,
        real={"sampling": REAL_ONE_TOO_LIKELY},
    ),
    "acceptance on the winner's noise": Control(
        "A draft stands by the very number by which its token won the draw.",
        "engine", _engine(_accept_on_the_winners_noise), enumerable=False,
        unseen="the fault is in the seeded noise, in whose place enumeration puts its own",
    ),
    "same noise every round": Control(
        "The noise of drafts begins anew in each round.",
        "rule", _rule(SameNoiseEveryRound), draft_length=1,
        real={"sampling": REAL_FLAT_2},
    ),
    "same noise every position": Control(
        "All drafts of a block are drawn on one noise: each law is right, the joint law is not.",
        "rule", _rule(SameNoiseEveryPosition), vocab=2,
        real={"sampling": REAL_DIGITS},
    ),
    "stale seed": Control(
        "The first draft of every request is drawn before its seed is set.",
        "rule", _rule(StaleSeed),
    ),
    "argmax called a sample": Control(
        "The most probable token is drafted, with q for its law in place of a one-hot one.",
        "rule", _rule(CallsArgmaxASample),
    ),
    "flattened q": Control(
        "The law reported for a sampled draft is flatter than the one it was drawn from.",
        "rule", _rule(SaysUniform),
    ),
    "siblings claim replacement": Control(
        "Siblings are drawn without replacement, and claim the law with replacement.",
        "rule", _rule(ForgetsReplacement), shape=_TREE,
        real={"sampling": REAL_FLAT_3},
    ),
    "block weight without cap": Control(
        "Block verification forgets min(1, ·) in the weight of a prefix.",
        "rule", _rule(BlockWithoutCap), rule="block", vocab=2,
        real={"sampling": REAL_FLAT_4},
    ),
    "block prefix tested by its weight": Control(
        "Block verification accepts every prefix with its weight, right for the whole block only.",
        "rule", _rule(BlockTestsByWeight), rule="block", vocab=3,
        real={"sampling": REAL_FLAT_4},
    ),
    "block repair without the weight": Control(
        "Block verification repairs from max(0, p − q), whatever the prefix weighs.",
        "rule", _rule(BlockRepairsUnweighed), rule="block", draft_seed=65, walked=(4, 65),
        few=FEW_COLD_2, real=None,
        unseen="the draft of the real target hides all but 0.4 % of it, too little for samples",
    ),
    "coupled, repairs on fresh noise": Control(
        "After a draft that does not match, the target's token is drawn on other noise.",
        "rule", _rule(RepairsOnFreshNoise), rule="coupled",
    ),
    "coupled, keeps likely drafts": Control(
        "A draft that the target gives a tenth or more is kept, whatever the noise says.",
        "rule", _rule(KeepsLikelyDrafts), rule="coupled",
    ),
    "raw q after top-p": Control(
        "The drafter samples under top-p, and reports the law before it.",
        "drafter", _drafter(ReportsRawQ), sampling=TOP_P, few=FEW_TOP_P,
        real={"sampling": Sampling(temperature=1.0, top_p=0.5)},
    ),
    "draft temperature ignored": Control(
        "The drafter samples at the request's temperature, and reports the law at 1.",
        "drafter", _drafter(ReportsRawQ), sampling=COLD, few=FEW_COLD,
        real={"sampling": Sampling(temperature=0.5)},
    ),
    "q of the first draft": Control(
        "Every draft of a block claims the law of its first.",
        "drafter", _drafter(ForgetsThePath),
        real={"sampling": REAL_FLAT_4},
    ),
    "low-q draft dropped": Control(
        "A sampled draft whose q is below 0.3 is left out after it was drawn.",
        "drafter", _drafter(DropsDoubtfulDrafts),
    ),
    "low-q siblings dropped": Control(
        "Sampled siblings whose q is below 0.3 are left out after they were drawn.",
        "drafter", _unlikely, shape=_TREE, few=FEW_2,
    ),
    "stale cache row": Control(
        "The cache keeps a rejected draft's row, and the next round goes on from it.",
        "engine", _with_a_stale_row,
    ),
    "penalty leak": Control(
        "Rejected drafts stay in the penalties' counts.",
        "engine", _engine(_leak_penalties), sampling=PENALISED, few=FEW_PENALISED,
        real={"sampling": REAL_PENALISED},
    ),
    "stop missed in mid-block": Control(
        "Only the last token of a block is looked at for an end.",
        "engine", _engine(_miss_stops), stop_token_ids=(1,),
        real={"stop_texts": (" the", " its", " that", " a")},
    ),
    "ties to the last index": Control(
        "Of equal logits, speculation takes the last and plain decoding the first.",
        "engine", _engine(_take_the_last_of_equals), rule="greedy", sampling=TIES, few=TIES,
        real={"sampling": TIES},
    ),
}  # fmt: skip


# --- toys, and enumeration of a whole engine -----------------------------------------------------


def toy_engine(vocab: int, draft_seed: int = 37) -> Engine:
    """A draft far enough from its target that every fault moves the law by some per cent."""
    return Engine(
        ToyModel.random(vocab, 1, sharpness=1.0),
        ToyTokenizer(vocab),
        drafter=ModelDrafter(ToyModel.random(vocab, draft_seed, sharpness=2.0)),
    )


def enumerate_control(control: Control, engine: Engine, *, real: bool = False) -> ExactReport:
    """``audit_exact``'s report, of a toy or of a real target whose contexts are remembered."""
    if real:
        return audit_exact(
            engine, [engine.encode(REAL_PROMPT)], max_tokens=control.max_tokens,
            sampling=control.few, stop_token_ids=control.real_stops(engine),
        )  # fmt: skip
    return audit_exact(
        engine, [PROMPT], max_tokens=control.max_tokens, sampling=control.sampling,
        stop_token_ids=control.stop_token_ids,
    )  # fmt: skip
