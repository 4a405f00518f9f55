"""The algorithm: propose, score, judge, commit. Everything else serves these lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from outrider.core.chooser import Chooser
from outrider.core.distribution import Distribution
from outrider.core.processors import Context, Law
from outrider.core.proposal import ROOT, Proposal
from outrider.core.verdict import Verdict
from outrider.errors import ProposalError
from outrider.protocols import Cache, DraftSession, Model, Pacing, Pick, Policy, Rule

__all__ = ["Drafted", "Played", "Session", "close", "draft", "judge", "make_pick", "play_round"]

_MOST_PENDING = 32
"""A cache that goes back by snapshots leaves accepted tokens to be fed again; when so many
have gathered, a round without a draft settles them."""


@dataclass(slots=True)
class Session:
    """One sequence being decoded.

    ``tokens`` are committed: prompt and output. The cache holds all of them but the last, or
    fewer; what it lacks is fed along with the next proposal. ``limit`` is the most tokens the
    sequence may ever have.
    """

    model: Model
    cache: Cache
    draft: DraftSession
    rule: Rule
    policy: Policy
    law: Law
    chooser: Chooser
    tokens: list[int]
    prompt_length: int
    limit: int
    round: int = 0
    keep_logits: bool = False
    pacing: Pacing | None = field(init=False)

    def __post_init__(self) -> None:
        self.pacing = self.policy if isinstance(self.policy, Pacing) else None


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a round wants scored: committed tokens that the cache lacks, and a proposal."""

    pending: list[int]
    proposal: Proposal
    draft_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """What one round did, before anything is cut off its end."""

    proposal: Proposal
    verdict: Verdict
    draft_s: float
    score_s: float
    logits: Float[Tensor, "rows V"] | None = None

    @property
    def rows(self) -> list[int]:
        """For each emitted token, the row of the logits that it was decided from."""
        return [node - ROOT for node in (ROOT, *self.verdict.path)]

    @property
    def emitted(self) -> list[int]:
        """Accepted tokens, then the target's own."""
        return [*(self.proposal.tokens[n] for n in self.verdict.path), self.verdict.token]


def play_round(s: Session) -> Played:
    """One round. The caller commits what it emits, or as much as the stop logic lets stand."""
    drafted = draft(s)
    started = perf_counter()
    logits = s.model.score(s.cache, drafted.pending, drafted.proposal)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return judge(s, drafted, logits, perf_counter() - started)


def draft(s: Session) -> Drafted:
    """The first half of a round: what the target is to score after the cached tokens."""
    started = perf_counter()
    pending = s.tokens[s.cache.length :]
    # The target adds one token of its own, so a draft may fill all but one of the places left.
    length = min(s.policy.length(), s.limit - len(s.tokens) - 1)
    if len(pending) > _MOST_PENDING:
        length = 0

    if s.pacing is not None and not s.pacing.hopes():
        return Drafted(pending, Proposal(), perf_counter() - started)
    proposal = s.draft.propose(s.tokens, length, make_pick(s))
    _check(proposal, length, s.model.vocab_size)
    if s.pacing is not None:
        proposal = s.pacing.trim(proposal)
    return Drafted(pending, proposal, perf_counter() - started)


def judge(s: Session, drafted: Drafted, logits: Float[Tensor, "rows V"], score_s: float) -> Played:
    """The second half: what stands of the proposal, by the target's logits."""
    proposal, position = drafted.proposal, len(s.tokens) - s.prompt_length

    def target(node: int) -> Distribution:
        context = Context([*s.tokens, *proposal.path_tokens(node)], s.prompt_length)
        return s.law(context, logits[node - ROOT])

    verdict = s.rule.judge(target, proposal, s.chooser, position, s.round)
    s.cache.keep(len(s.tokens), verdict.path)
    s.round += 1
    kept = logits if s.keep_logits else None
    return Played(proposal, verdict, drafted.draft_s, score_s, kept)


def close(s: Session) -> None:
    """Let the drafter see how the text ended: a call for nothing, as in a round without a draft."""
    s.draft.propose(s.tokens, 0, make_pick(s))


def make_pick(s: Session) -> Pick:
    """How the drafter is to choose in this round, under the rule and the processors in force."""
    position = len(s.tokens) - s.prompt_length

    def pick_law(logits: Float[Tensor, " Vq"], path: Sequence[int]) -> Distribution:
        context = Context([*s.tokens, *path], s.prompt_length)
        return s.law.of_draft(context, _widen(logits, s.model.vocab_size))

    def pick_among(
        ids: Int64[np.ndarray, " n"], logits: Float[np.ndarray, " n"], path: Sequence[int]
    ) -> Distribution:
        context = Context([*s.tokens, *path], s.prompt_length)
        return s.law.among(context, ids, logits, s.model.vocab_size)

    def pick_token(q: Distribution, depth: int, node: int) -> tuple[int, Distribution | None]:
        return s.rule.draft(q, s.chooser, position + depth, s.round, node)

    def pick_siblings(
        q: Distribution, count: int, depth: int, node: int, droppable: bool
    ) -> list[tuple[int, Distribution | None]]:
        return s.rule.siblings(q, count, s.chooser, position + depth, s.round, node, droppable)

    def rank(logits: Float[Tensor, " Vq"], path: Sequence[int]) -> Distribution:
        # At temperature 0 the law holds the best token alone; a tree asks for the next best too.
        context = Context([*s.tokens, *path], s.prompt_length)
        return s.law.without_choice().of_draft(context, _widen(logits, s.model.vocab_size))

    greedy = s.law.greedy and s.rule.name == "greedy"
    shares_noise = s.rule.invariant and not s.law.greedy
    ranking = rank if greedy else pick_law
    return Pick(pick_law, pick_token, pick_siblings, ranking, s.pacing, pick_among, shares_noise)


def _widen(logits: Float[Tensor, " Vq"], vocab_size: int) -> Float[Tensor, " V"]:
    """A draft's logits over the target's vocabulary: what it lacks cannot come."""
    if len(logits) >= vocab_size:
        return logits[:vocab_size]
    missing = logits.new_full((vocab_size - len(logits),), -torch.inf)
    return torch.cat([logits, missing])


def _check(proposal: Proposal, length: int, vocab_size: int) -> None:
    if any(not 0 <= token < vocab_size for token in proposal.tokens):
        raise ProposalError(
            f"The drafter proposed {list(proposal.tokens)}; token ids go from 0 to "
            f"{vocab_size - 1}.",
            hint="Its vocabulary is not the target's.",
        )
    if proposal.depth > max(length, 0):
        raise ProposalError(
            f"The drafter proposed {proposal.depth} tokens; {max(length, 0)} were asked for.",
            hint="A drafter may propose fewer tokens than asked for, never more.",
        )
