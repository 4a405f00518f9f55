"""The record of one output, which alone decides where the output ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.core.processors import is_whole
from outrider.engine.generation import FinishReason
from outrider.errors import SamplingError
from outrider.protocols import Tokenizer

__all__ = ["Transcript"]


class Transcript:
    """One request's output, token by token, and where it ends.

    Tokens are pushed one at a time, also those of an accepted block, so an output ends exactly
    where decoding one token at a time would end it:

    - at an end token: it stays in ``token_ids`` and adds no text; reason ``stop``;
    - at the token that completes a stop string: the text ends just before the stop string that
      starts first; reason ``stop``;
    - at ``max_tokens`` tokens; reason ``length``, unless the last token also stops.

    Text that may turn out to begin a stop string, or that is an incomplete character, is held
    back. All pieces returned together are ``text``.

    Parameters
    ----------
    tokenizer
        Decodes tokens; with ``None`` there is no text.
    max_tokens
        Most tokens to take, at least 1.
    room
        Places that the context has left, where they are known: the end of the context ends the
        output like ``max_tokens``, which becomes the lesser of the two.
    eos_token_ids
        Tokens that end the output.
    stop_strings
        One text or several that end the output.

    Raises
    ------
    SamplingError
        When ``max_tokens`` is not a whole number of at least 1, a stop string is empty or no
        text, or there are stop strings but no tokenizer.

    Example
    -------
    >>> from outrider.models.tokenizer import ToyTokenizer
    >>> output = Transcript(
    ...     ToyTokenizer(5), max_tokens=9, eos_token_ids=frozenset(), stop_strings=["cd"]
    ... )
    >>> [output.push(token) for token in (0, 2, 1, 2, 3)]
    ['a', '', 'cb', '', '']
    >>> output.text, output.finish_reason
    ('acb', 'stop')
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        stop_strings: str | Sequence[str] | None = (),
        room: int | None = None,
    ) -> None:
        if not (is_whole(max_tokens) and max_tokens >= 1):
            raise SamplingError(
                f"max_tokens must be a whole number, at least 1; got {max_tokens!r}."
            )
        stops = [stop_strings] if isinstance(stop_strings, str) else stop_strings or ()
        if not isinstance(stops, Iterable) or not all(isinstance(s, str) for s in stops):
            raise SamplingError(
                f"Stop strings must be a text or a list of texts; got {stop_strings!r}.",
                hint="For tokens there is stop_token_ids.",
            )
        if "" in stops:
            raise SamplingError(
                "A stop string is empty, so it would end every output at once.",
                hint="Leave it out.",
            )
        if stops and tokenizer is None:
            raise SamplingError(
                "Stop strings need a tokenizer, and this engine has none.",
                hint="Use stop_token_ids.",
            )
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.max_tokens = int(max_tokens) if room is None else min(int(max_tokens), room)
        self._eos = eos_token_ids
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=1)
        self._stream = tokenizer.stream() if tokenizer else None
        self._pieces: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """The text returned so far; once the output has ended, all of it."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Append a token; the text that is certain now and was not before.

        Raises
        ------
        RuntimeError
            When the output has ended already.
        """
        self._check_open()
        self.token_ids.append(token_id)
        if token_id in self._eos:
            return self.close("stop")
        if self._stream:
            self._held += self._stream.push(token_id)
        if self._cut_at_stop():
            return self._release(len(self._held))
        if len(self.token_ids) == self.max_tokens:
            return self.close("length")
        return self._release(len(self._held) - self._undecided())

    def close(self, reason: FinishReason = "length") -> str:
        """End the output from outside; the text that was held back.

        The reason becomes ``stop`` if that text turns out to hold a stop string.

        Raises
        ------
        RuntimeError
            When the output has ended already.
        """
        self._check_open()
        if self._stream:
            self._held += self._stream.finish()
        if not self._cut_at_stop():
            self.finish_reason = reason
        return self._release(len(self._held))

    def _check_open(self) -> None:
        if self.finish_reason is not None:
            raise RuntimeError(f"The output has ended already, by '{self.finish_reason}'.")

    def _cut_at_stop(self) -> bool:
        """Whether a stop string is complete; what is held then ends before it."""
        # Only what is held need be searched: it begins no later than any stop string begun.
        starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            self._held = self._held[: min(starts)]
            self.finish_reason = "stop"
        return bool(starts)

    def _undecided(self) -> int:
        """Length of the end of the held text that may begin a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self._pieces.append(piece)
        return piece
