"""Running a session to its end: rounds in, pieces of output and a trace out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from outrider.core.trace import Round, Trace
from outrider.engine.round import Played, Session, close, play_round
from outrider.protocols import Progress

__all__ = ["Ending", "FinishReason", "Generation", "Output", "Piece", "PieceOrigin"]

FinishReason = Literal["stop", "length"]
PieceOrigin = Literal["accepted", "correction", "bonus", "plain"]
"""Where a token came from; ``plain`` for a token of a round in which nothing was drafted."""


@runtime_checkable
class Ending(Protocol):
    """Decides, one token at a time, where an output ends."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, once it has."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        ...

    @property
    def text(self) -> str:
        """The text so far."""
        ...

    def push(self, token_id: int) -> str:
        """Add a token; the text that is certain now and was not before."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a streamed output. ``text`` may be empty while a character is incomplete."""

    text: str
    token_id: int
    origin: PieceOrigin
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One finished generation.

    Parameters
    ----------
    text
        Decoded output, without end tokens, cut before a stop string.
    token_ids
        Emitted tokens, with the one that ended the output.
    finish_reason
        ``stop`` for an end token, a stop token or a stop string; ``length`` for max_tokens or
        the context's end.
    trace
        What every round drafted, kept and cost; ``trace.summary()`` gives the totals.
    seed
        With which the same request gives the same output again.
    origins
        Where each token came from.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    trace: Trace
    seed: int
    drafter: str = ""
    rule: str = ""
    origins: list[PieceOrigin] = field(default_factory=list)


class Generation:
    """An iterator of ``Piece``; when it is exhausted, ``output`` holds the whole.

    ``logits`` has the row that each token was decided from, if the session keeps them.

    Parameters
    ----------
    session
        A sequence whose prompt is in place; what its cache lacks of it is fed first.
    ending
        Where the output ends.
    seed, drafter, rule
        For the record.
    progress
        Called while a long prompt is fed.
    """

    def __init__(
        self,
        session: Session,
        ending: Ending,
        *,
        seed: int = 0,
        drafter: str = "",
        rule: str = "",
        progress: Progress | None = None,
    ) -> None:
        self.session = session
        self.trace = Trace(prompt_tokens=session.prompt_length, cached_tokens=session.cache.length)
        self._ending = ending
        self._progress = progress
        self._record = (seed, drafter, rule)
        self._origins: list[PieceOrigin] = []
        self.logits: list[Float[Tensor, " V"]] = []
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def output(self) -> Output:
        """The finished output; whatever was not iterated yet is run now."""
        for _ in self:
            pass
        reason = self._ending.finish_reason
        assert reason is not None
        seed, drafter, rule = self._record
        return Output(
            self._ending.text,
            list(self._ending.token_ids),
            reason,
            self.trace,
            seed,
            drafter,
            rule,
            self._origins,
        )

    def _run(self) -> Iterator[Piece]:
        self.feed()
        while not self.finished:
            # Time that a slow reader takes between pieces is not the engine's, so it is not
            # counted: pieces are handed out when the round is over.
            started = perf_counter()
            yield from self.settle(play_round(self.session), started)

    def feed(self, most: int | None = None) -> bool:
        """Feed the prompt, or at most so many tokens more of it; whether all of it is in.

        All but the last token: that one is scored in the first round, with a draft behind it, so
        the first token needs no code of its own.
        """
        s, trace = self.session, self.trace
        if trace.rounds:
            return True
        started = perf_counter()
        left = s.tokens[s.cache.length : -1]
        s.model.prefill(s.cache, left[:most], self._progress)
        trace.prefill_s += perf_counter() - started
        trace.total_s = trace.prefill_s
        return most is None or len(left) <= most

    @property
    def finished(self) -> bool:
        """Whether the output has come to its end."""
        return self._ending.finish_reason is not None

    def settle(self, played: Played, started: float) -> list[Piece]:
        """Commit a round that began at ``started`` by the clock ``perf_counter``."""
        pieces, s = self._commit(played), self.session
        if s.pacing is not None and s.rule.invariant:
            s.pacing.took(played.proposal, played.draft_s, perf_counter() - started)
        s.policy.learn(played.proposal, played.verdict.path)
        self._book(played, pieces, perf_counter() - started)
        if self.trace.ttft_s is None:
            self.trace.ttft_s = self.trace.total_s
        if self.finished:
            close(s)
        return pieces

    def _commit(self, played: Played) -> list[Piece]:
        """Push emitted tokens one by one, as one-token decoding would, and stop where it would."""
        pieces: list[Piece] = []
        last = len(played.verdict.path)
        for i, token in enumerate(played.emitted):
            origin: PieceOrigin = "accepted" if i < last else played.verdict.kind
            if not len(played.proposal):
                origin = "plain"
            text = self._ending.push(token)
            self.session.tokens.append(token)
            self._origins.append(origin)
            if played.logits is not None:
                self.logits.append(played.logits[played.rows[i]])
            pieces.append(Piece(text, token, origin, self._ending.finish_reason))
            if self._ending.finish_reason is not None:
                break
        return pieces

    def _book(self, played: Played, pieces: list[Piece], total_s: float) -> None:
        accepted = sum(piece.origin == "accepted" for piece in pieces)
        own = len(pieces) - accepted
        rejected = played.verdict.kind == "correction"
        record = Round(
            drafted=len(played.proposal),
            accepted=accepted,
            corrections=own if rejected else 0,
            bonuses=0 if rejected else own,
            rejected=rejected,
            draft_s=played.draft_s,
            score_s=played.score_s,
            total_s=total_s,
        )
        self.trace.rounds.append(record)
        self.trace.total_s += total_s
