"""One thread that owns the engine: who waits, who runs, and one round of all at a time."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Condition, Thread
from time import monotonic

from outrider.core.chooser import SeededChooser
from outrider.core.trace import Round
from outrider.engine.batch import Batch, Step
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation, Output, Piece
from outrider.errors import NotEnoughMemoryError, NumericalError, RollbackError, UsageError
from outrider.serve.guard import Guard
from outrider.serve.logprobs import TokenLogprobs, token_logprobs
from outrider.serve.logs import log
from outrider.serve.metrics import Metrics
from outrider.serve.orders import Order
from outrider.serve.refusals import RefusalError

__all__ = ["Done", "Event", "Failed", "Job", "Scheduler", "Tokens"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one round emitted, and its record."""

    pieces: list[Piece]
    round: Round
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """An output's end. ``drafter_failed``: from some round on it was decoded plainly."""

    output: Output
    drafter_failed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """An output that ended in an error."""

    error: Exception


Event = Tokens | Done | Failed
Tell = Callable[[int, Event], None]
"""Called in the scheduler's thread, with the number of the output."""


@dataclass(eq=False, slots=True)
class _Ticket:
    """One output, from its order to its end."""

    job: Job
    index: int
    order: Order
    generation: Generation | None = None
    drafter_failed: bool = False

    def tell(self, event: Event) -> None:
        self.job.tell(self.index, event)


@dataclass(eq=False, slots=True)
class Job:
    """One request: its outputs, which need not run at the same time."""

    tell: Tell
    request_id: str = ""
    started_s: float = field(default_factory=monotonic)
    gone: bool = False


class Scheduler:
    """Runs orders side by side, first come first served.

    An output begins when one of ``max_batch`` places is free and its cache fits beside the
    others'; whoever cannot begin waits, in a queue of so many requests. All but ``submit``,
    ``cancel``, ``drain`` and the properties happen in one thread.

    Parameters
    ----------
    engine
        Used by this thread alone while it runs, but for reading.
    metrics
        Where things are counted.
    max_batch
        Outputs side by side.
    queue
        Requests that may wait; 0: none.
    cache_bytes
        Memory for all caches; ``None``: no limit.

    Example
    -------
    >>> from outrider import Engine
    >>> scheduler = Scheduler(Engine.load("toy:vocab=4"), Metrics("toy"))
    >>> scheduler.start()
    >>> events = []
    >>> job = scheduler.submit([Order([0, 1], {"max_tokens": 3})], lambda i, e: events.append(e))
    >>> scheduler.drain()
    >>> scheduler.stop(wait=True)
    >>> len(events[-1].output.token_ids)
    3
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        *,
        max_batch: int = 8,
        queue: int = 64,
        cache_bytes: int | None = None,
    ) -> None:
        self.engine, self.metrics = engine, metrics
        self.max_batch, self.queue = max_batch, queue
        self._budget = math.inf if cache_bytes is None else cache_bytes
        self._batch = Batch(engine.model)
        self._wake = Condition()  # guards all below
        self._waiting: deque[_Ticket] = deque()
        self._running: list[_Ticket] = []
        self._draining = self._stopping = False
        self._error: Exception | None = None
        self._thread: Thread | None = None
        self._mean_s = 1.0  # how long an output takes, about
        metrics.watch("running", "Outputs that are being made.", lambda: len(self._running))
        metrics.watch("waiting", "Outputs that wait for their turn.", lambda: len(self._waiting))

    # --- from any thread --------------------------------------------------------------------------

    @property
    def accepts(self) -> bool:
        """Whether new requests are taken."""
        return self.alive and not self._draining

    @property
    def alive(self) -> bool:
        """Whether the thread runs as it should."""
        return self._thread is not None and self._thread.is_alive() and self._error is None

    @property
    def failure(self) -> Exception | None:
        """What ended the thread before its time."""
        return self._error

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nobody waits."""
        with self._wake:
            return not self._running and not self._waiting

    def start(self) -> None:
        """Run the first tokens, for what is measured or compiled then, and begin.

        Raises
        ------
        OutriderError
            When the model gives no sound token.
        """
        if self.engine.model.context_length > 2:
            order = Order([0], {"max_tokens": 2, "seed": 0, "ignore_eos": True})
            for _ in self._stream(order, lambda error: _log_drafter(error, "")):
                pass
        self._thread = Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    def submit(self, orders: Sequence[Order], tell: Tell, request_id: str = "") -> Job:
        """Put a request's outputs in line; events follow.

        Raises
        ------
        RefusalError
            When the queue is full, or the server is about to stop.
        """
        job = Job(tell, request_id)
        with self._wake:
            if not self.accepts:
                raise RefusalError(
                    503,
                    "The server is stopping, or its engine has failed.",
                    code="not_available",
                    retry_after_s=5,
                )
            places = max(0, self.max_batch - len(self._running))
            queued = {ticket.job for ticket in islice(self._waiting, places, None)}
            if len(self._waiting) >= places and len(queued) >= self.queue:
                self.metrics.queue_full.inc()
                raise RefusalError(
                    429,
                    f"All {self.max_batch} places are taken and {self.queue} requests wait.",
                    code="queue_full",
                    retry_after_s=self._patience(),
                )
            self._waiting.extend(_Ticket(job, i, order) for i, order in enumerate(orders))
            self._wake.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Let a request go; its places are free before the next round. No more events follow."""
        with self._wake:
            job.gone = True
            self._waiting = deque(ticket for ticket in self._waiting if ticket.job is not job)
            self._wake.notify()

    def drain(self) -> None:
        """Take no new requests; those that were taken go on."""
        with self._wake:
            self._draining = True

    def stop(self, *, wait: bool = False) -> None:
        """End the thread: after the round at hand, or when all is done.

        What is not done then ends in a ``RefusalError``.
        """
        with self._wake:
            self._draining = True
            if wait and self._error is None:
                self._wake.wait_for(lambda: not self._running and not self._waiting)
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _patience(self) -> int:
        """Seconds until a place may be free, about."""
        ahead = (len(self._waiting) + 1) / self.max_batch
        return max(1, min(60, math.ceil(ahead * self._mean_s)))

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # a mistake of this class: better told than hidden
            self._error = error
            log("engine_failed", level=logging.ERROR, error=error)
        stopped = RefusalError(503, "The server stopped before this was done.", code="stopped")
        with self._wake:
            left = [*self._running, *self._waiting]
            self._waiting.clear()
        for ticket in left:
            self._end(ticket, Failed(self._error or stopped))

    def _turn(self) -> bool:
        """Who is gone leaves, who has a place joins, and all play a round."""
        with self._wake:
            self._wake.wait_for(lambda: self._running or self._waiting or self._stopping)
            if self._stopping:
                return False
            gone = [ticket for ticket in self._running if ticket.job.gone]
        for ticket in gone:
            self._end(ticket)
        while (ticket_ := self._next()) is not None:
            self._begin(ticket_)
        if self._running:
            self._step()
        return True

    def _next(self) -> _Ticket | None:
        """The first in line, if it can begin. Nobody overtakes, or large ones might never begin."""
        with self._wake:
            if not self._waiting or len(self._running) >= self.max_batch:
                return None
            held = sum(ticket.order.cache_bytes for ticket in self._running)
            if self._running and held + self._waiting[0].order.cache_bytes > self._budget:
                return None
            ticket = self._waiting.popleft()
            self._running.append(ticket)
            return ticket

    def _begin(self, ticket: _Ticket) -> None:
        def failed(error: Exception) -> None:
            ticket.drafter_failed = True
            self.metrics.drafter_failures.inc()
            _log_drafter(error, ticket.job.request_id)

        try:
            ticket.generation = self._stream(ticket.order, failed)
            self._batch.add(ticket.generation)
        except Exception as error:
            self._end(ticket, Failed(error))

    def _stream(self, order: Order, failed: Callable[[Exception], None]) -> Generation:
        """A generation whose drafter may fail, now or later."""
        try:
            generation = self.engine.stream(order.prompt, **order.options)
        except (UsageError, RollbackError, NotEnoughMemoryError):
            raise  # no fault of a drafter
        except Exception as error:
            generation = self.engine.stream(order.prompt, **{**order.options, "plain": True})
            failed(error)
        session = generation.session
        session.keep_logits = order.top_logprobs is not None
        if order.sequence and isinstance(session.chooser, SeededChooser):
            session.chooser = SeededChooser(session.chooser.seed, order.sequence)
        session.draft = Guard(session.draft, session.cache, session.model.vocab_size, failed)
        return generation

    def _step(self) -> None:
        tickets = {ticket.generation: ticket for ticket in self._running}
        self.metrics.passes.inc()
        try:
            steps = self._batch.step()
        except Exception as error:  # the pass itself, so nobody's cache can be trusted
            log("pass_failed", level=logging.ERROR, error=error)
            for ticket in tickets.values():
                self._end(ticket, Failed(error))
            return
        for step in steps:
            self._settle(tickets[step.generation], step)

    def _settle(self, ticket: _Ticket, step: Step) -> None:
        generation = step.generation
        if step.error is not None:
            self._end(ticket, Failed(step.error))
            return
        self.metrics.round(generation.trace.rounds[-1])
        logprobs = None
        if (top := ticket.order.top_logprobs) is not None:
            rows, generation.logits = generation.logits, []  # a row has a number for every token
            pairs = zip(rows, step.pieces, strict=True)
            logprobs = [token_logprobs(row, piece.token_id, top) for row, piece in pairs]
        if not ticket.job.gone:
            ticket.tell(Tokens(step.pieces, generation.trace.rounds[-1], logprobs))
        if step.finished:
            output = generation.output
            self.metrics.finished(output.trace, output.finish_reason)
            self._mean_s += 0.1 * (monotonic() - ticket.job.started_s - self._mean_s)
            self._end(ticket, Done(output, ticket.drafter_failed))

    def _end(self, ticket: _Ticket, event: Event | None = None) -> None:
        """Free a place, and tell what became of it; nothing if nobody wants to know."""
        if ticket.generation is not None:
            self._batch.drop(ticket.generation)
            ticket.generation = None
        if isinstance(event, Failed):
            self.metrics.failures.inc()
            self.metrics.numerical_errors.inc(isinstance(event.error, NumericalError))
            if not isinstance(event.error, RefusalError | UsageError):
                log(
                    "output_failed",
                    level=logging.ERROR,
                    error=event.error,
                    request_id=ticket.job.request_id,
                )
        with self._wake:
            if ticket in self._running:
                self._running.remove(ticket)
            self._wake.notify_all()
        if event is not None and not ticket.job.gone:
            ticket.tell(event)


def _log_drafter(error: Exception, request_id: str) -> None:
    log("drafter_failed", level=logging.WARNING, error=error, request_id=request_id)
