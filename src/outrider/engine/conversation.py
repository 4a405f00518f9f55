"""A chat whose earlier turns stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from outrider.engine.generation import Output, Piece
from outrider.engine.prefix import Prefix

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
    before it.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self._engine = engine
        self._prefix = Prefix()
        self.messages: list[dict[str, str]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self.last: Output | None = None

    def say(self, text: str, **options: Any) -> Iterator[Piece]:
        """Add a user message and stream the answer; takes the options of ``Engine.stream``.

        Once all pieces were handed out, the answer is among ``messages`` and ``last`` holds it.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        generation = self._engine.stream(turn, prefix=self._prefix, **options)
        try:
            yield from generation
        except GeneratorExit:
            # The reader left between two rounds, where the caches are whole.
            self._prefix.keep(generation.session)
            raise
        except BaseException:
            # Somewhere inside a pass: some layers may have seen tokens that others have not.
            self._prefix = Prefix()
            raise
        self._prefix.keep(generation.session)
        self.last = generation.output
        self.messages = [*turn, {"role": "assistant", "content": self.last.text}]
