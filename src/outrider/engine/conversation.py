"""A chat whose earlier turns stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from outrider.engine.generation import Generation, Output, Piece
from outrider.engine.prefix import Prefix
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

__all__ = ["Conversation"]


class Conversation:
    """Messages that grow turn by turn.

    Parameters
    ----------
    engine
        The engine that answers.
    system
        A system message to begin with.

    A turn that is broken off, by an error or by the reader, leaves the messages as they were
    before it. Answers come one after another: asking for the next gives up the one before.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self._engine = engine
        self._prefix = Prefix()
        self._current: Generation | None = None
        self.messages: list[dict[str, str]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self.last: Output | None = None

    def say(self, text: str, **options: Any) -> Iterator[Piece]:
        """Add a user message and stream the answer; takes the options of ``Engine.stream``.

        Once all pieces were handed out, the answer is among ``messages`` and ``last`` holds it.

        Raises
        ------
        UsageError
            When an answer is read on after the next one was asked for.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        generation = self._engine.stream(turn, prefix=self._prefix, **options)
        self._current = generation
        for piece in generation:
            try:
                yield piece
            except GeneratorExit:
                # The reader left between two rounds, where the caches are whole.
                if self._current is generation:
                    self._prefix.keep(generation.session)
                raise
            if self._current is not generation:
                raise UsageError(
                    "This answer was given up when the next one was asked for.",
                    hint="Read an answer to its end, or close it, before the next say().",
                )
        self._prefix.keep(generation.session)
        self.last = generation.output
        self.messages = [*turn, {"role": "assistant", "content": self.last.text}]
