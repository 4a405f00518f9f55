"""Several requests decoded side by side: in each step one pass scores every one's round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from jaxtyping import Float
from torch import Tensor

from outrider.engine.generation import Generation, Piece
from outrider.engine.round import Drafted, draft, judge
from outrider.errors import UsageError
from outrider.protocols import Asked, Model, TogetherModel

__all__ = ["Batch", "Step"]

_CHUNK = 64
"""Prompt tokens that a newcomer feeds in one step, so that it holds nobody up for long."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did for one request.

    ``error`` is what ended it, if that was no end of its own; ``finished`` whether it is over.
    """

    generation: Generation
    pieces: list[Piece] = field(default_factory=list)
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether the request has left the batch."""
        return self.error is not None or self.generation.finished


class Batch:
    """Requests that join and leave between rounds, each with its own drafter, rule and length.

    A step feeds each newcomer a piece of its prompt, and plays one round of all others, scored in
    one pass where the model can (``TogetherModel``) and fits them in, else in as many as it takes.
    Where the model's logits do not depend on company, as the native runtime's do not, a request's
    output is the same alone and in a batch, bit for bit.

    A request's times are what its reader sees: they go on while others are fed and judged.

    What goes wrong in one request, a drafter that raises or logits that are no numbers, ends that
    one alone; a pass that fails ends those that it was for.

    Parameters
    ----------
    model
        The target of all requests.

    Example
    -------
    >>> from outrider import Engine
    >>> engine = Engine.load("toy:vocab=4", drafter="ngram")
    >>> batch = Batch(engine.model)
    >>> requests = [engine.stream(text, max_tokens=5) for text in ("abab", "cdcd")]
    >>> for request in requests:
    ...     batch.add(request)
    >>> while len(batch):
    ...     steps = batch.step()
    >>> [len(request.output.token_ids) for request in requests]
    [5, 5]
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._running: list[Generation] = []
        self._rows: dict[int, int] = {}  # of each request's last round, by its id
        self._tokens: dict[int, float] = {}
        self._since: dict[int, float] = {}  # when each joined, or its last round ended

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._running)

    def add(self, generation: Generation) -> None:
        """Let a request join; it must not have been iterated.

        Raises
        ------
        UsageError
            When it is of another model, or is here already.
        """
        begun = generation.trace.rounds or generation.finished
        if generation.session.model is not self.model or generation in self._running or begun:
            raise UsageError(
                "A batch takes each request once, before its first token, and only those of its "
                "own model.",
                hint="Make it with stream() of the same engine.",
            )
        self._running.append(generation)
        self._since[id(generation)] = perf_counter()

    def drop(self, generation: Generation) -> None:
        """Let a request go before its end; nothing happens if it is not here."""
        if generation in self._running:
            self._leave(generation)

    def step(self) -> list[Step]:
        """One round of every request; what each emitted."""
        steps: list[Step] = []
        ready = [one for one in list(self._running) if self._fed(one, steps)]
        asked: list[tuple[Generation, Drafted]] = []
        fed = sum(self._rows.get(id(one), 1) for one in ready)
        tokens = sum(self._tokens.get(id(one), 1.0) for one in ready)
        for one in ready:
            self._tell_load(one, fed, tokens)
            try:
                asked.append((one, draft(one.session)))
            except Exception as error:
                steps.append(Step(one, error=error))
        for group in self._groups(asked):
            scoring = perf_counter()
            try:
                rows = self._score(group)
            except Exception as error:  # memory for a longer text, say; other passes go on
                steps += [Step(one, error=error) for one, _ in group]
                continue
            score_s = perf_counter() - scoring
            for (one, drafted), logits in zip(group, rows, strict=True):
                steps.append(self._settle(one, drafted, logits, score_s))
        for step in steps:
            if step.finished:
                self._leave(step.generation)
        return steps

    def _fed(self, one: Generation, steps: list[Step]) -> bool:
        """Whether the whole prompt is in the cache; if not, a piece more of it is now."""
        try:
            return one.feed(_CHUNK)
        except Exception as error:
            steps.append(Step(one, error=error))
            return False

    def _settle(self, one: Generation, drafted: Drafted, logits: Tensor, score_s: float) -> Step:
        since = self._since[id(one)]
        if not one.trace.rounds:
            since += one.trace.prefill_s  # which is in the trace already
        try:
            played = judge(one.session, drafted, logits, score_s)
            pieces = one.settle(played, since)
        except Exception as error:
            return Step(one, error=error)
        self._since[id(one)] = perf_counter()
        self._rows[id(one)] = 1 + len(drafted.proposal)
        self._tokens[id(one)] = 0.8 * self._tokens.get(id(one), 1.0) + 0.2 * len(pieces)
        return Step(one, pieces)

    def _tell_load(self, one: Generation, rows: int, tokens: float) -> None:
        """What the others feed and emit, of all. A text that depends on what is drafted must not
        depend on company, so there nothing is told."""
        session, key = one.session, id(one)
        if session.pacing is not None and session.rule.invariant:
            rows -= self._rows.get(key, 1)
            session.pacing.beside(rows, tokens - self._tokens.get(key, 1.0))

    def _groups(
        self, asked: Sequence[tuple[Generation, Drafted]]
    ) -> Iterator[list[tuple[Generation, Drafted]]]:
        """As many at a time as fit into one pass."""
        most = self.model.most_rows if isinstance(self.model, TogetherModel) else 0
        group: list[tuple[Generation, Drafted]] = []
        rows = 0
        for one in asked:
            n = len(one[1].pending) + len(one[1].proposal)
            if group and (rows + n > most or _taps(one[0]) != _taps(group[0][0])):
                yield group
                group, rows = [], 0
            group.append(one)
            rows += n
        if group:
            yield group

    def _score(self, group: Sequence[tuple[Generation, Drafted]]) -> list[Float[Tensor, "rows V"]]:
        if len(group) > 1 and isinstance(self.model, TogetherModel):
            return self.model.score_together(
                [Asked(one.session.cache, d.pending, d.proposal) for one, d in group]
            )
        (one, drafted), *_ = group
        return [self.model.score(one.session.cache, drafted.pending, drafted.proposal)]

    def _leave(self, generation: Generation) -> None:
        self._running.remove(generation)
        self._rows.pop(id(generation), None)
        self._tokens.pop(id(generation), None)
        self._since.pop(id(generation), None)


def _taps(one: Generation) -> tuple[int, ...]:
    """Layers that its cache sets aside: a pass does so for all or for none."""
    return tuple(getattr(getattr(one.session.cache, "hidden", None), "taps", ()))
