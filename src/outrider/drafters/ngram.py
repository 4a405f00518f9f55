"""Prompt lookup: what followed the last time the text was at this point?"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.proposal import Proposal
from outrider.drafters.confidence import ONE_OF_MANY, of_match
from outrider.errors import SamplingError
from outrider.protocols import Pick, Setting
from outrider.registry import refuse_argument

__all__ = ["NgramDrafter"]


_TOKENS_FOR_EACH_MATCHED = 4


class NgramDrafter:
    """Copies the continuation of the longest suffix that occurred before.

    The last n tokens, for the largest n up to ``longest``, are looked up in prompt and output;
    of several occurrences the most recent wins. A short match is weak evidence, so at most 4 n
    tokens are proposed. Costs next to nothing and needs no model, and
    it pays where output repeats input: editing, extraction, summaries with quotes, code.

    Parameters
    ----------
    longest, shortest
        Most and fewest tokens that must match.
    default_length
        Draft length used when none is given.

    Raises
    ------
    SamplingError
        When ``shortest`` is below 1 or above ``longest``.

    Source: Saxena 2023, "Prompt lookup decoding"; Yang et al. 2023 (arXiv 2304.04487).

    Example
    -------
    >>> session = NgramDrafter().start([1, 2, 3, 9, 1, 2], 16)
    >>> session.propose([1, 2, 3, 9, 1, 2], 2, pick=None).tokens
    (3, 9)
    """

    name = "ngram"
    trees = False

    def __init__(self, longest: int = 5, shortest: int = 1, default_length: int = 12) -> None:
        if not 1 <= shortest <= longest:
            raise SamplingError(
                f"An n-gram match must have at least 1 token; got {shortest} to {longest}."
            )
        self.longest = longest
        self.shortest = shortest
        self.default_length = default_length

    @classmethod
    def build(cls, argument: str, setting: Setting) -> NgramDrafter:
        """By name; it takes no argument."""
        refuse_argument(cls.name, argument)
        return cls()

    def start(self, prompt: Sequence[int], capacity: int) -> _NgramSession:
        """A session with an index of its own."""
        return _NgramSession(self.longest, self.shortest)


class _NgramSession:
    """An index from each n-gram to the place after its two latest occurrences.

    Two, since the latest one of the text's own last n tokens is the end of the text itself.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def _index(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        if list(tokens[:known]) != self._tokens:  # another text than the one indexed so far
            self._tokens, self._after, known = [], {}, 0
        for end in range(known + 1, len(tokens) + 1):
            for size in self._sizes:
                if size <= end:
                    gram = tuple(tokens[end - size : end])
                    latest = self._after.get(gram)
                    self._after[gram] = (end, latest[0] if latest else None)
        self._tokens.extend(tokens[known:])

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        self._index(tokens)
        if length <= 0:
            return Proposal()
        for size in self._sizes:
            before = self._after.get(tuple(tokens[-size:]), (0, None))[1]
            if before is not None and size < len(tokens):
                length = min(length, _TOKENS_FOR_EACH_MATCHED * size)
                copied = _continue(self._tokens, before, length)
                sure = [of_match(size + i, ONE_OF_MANY) for i in range(length)]
                return Proposal.chain(copied, confidence=sure, source="ngram")
        return Proposal()


def _continue(tokens: Sequence[int], start: int, length: int) -> list[int]:
    """Read on from ``start``; past the end of the text, read what was just copied."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(length)]
