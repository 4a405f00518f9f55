"""Several drafters in one: the next is asked where the one before has nothing to say."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.core.proposal import Proposal
from outrider.drafters.beside import begin, taps_of
from outrider.errors import UsageError
from outrider.protocols import Cache, CacheBytes, Drafter, DraftSession, Pick, Setting
from outrider.registry import DRAFTERS

__all__ = ["MixedDrafter", "split_parts"]


class MixedDrafter:
    """Asks its parts in turn, every round anew, until one proposes enough.

    Enough is ``least`` tokens deep, or all that was asked for; if none does, the deepest proposal
    stands, of equal ones the first. A proposal with drawn tokens stands whatever its depth: those
    that come next would be drawn with the same noise. A part that is not asked falls behind, which
    is nothing new to it: a session finds out by itself what became of the text.

    The draft length is shared out by the parts' own defaults: a part whose default is a third of
    the longest one's is asked for a third of the tokens, rounded up.

    Parameters
    ----------
    parts
        The drafters, the cheapest first as a rule.
    least
        Tokens that are enough.

    Raises
    ------
    UsageError
        When there are fewer than two parts, or ``least`` is below 1.

    Example
    -------
    >>> from outrider.drafters.ngram import NgramDrafter
    >>> from outrider.drafters.script import ScriptDrafter
    >>> drafter = MixedDrafter([NgramDrafter(), ScriptDrafter([7, 8], default_length=12)])
    >>> session = drafter.start([1, 2], 10)
    >>> drafter.name, session.propose([1, 2], 2, pick=None).tokens
    ('ngram+script', (7, 8))
    >>> session.propose([1, 2, 1], 2, pick=None).tokens
    (2, 1)
    """

    name = "mixed"

    def __init__(self, parts: Sequence[Drafter], least: int = 1) -> None:
        if len(parts) < 2 or least < 1:
            raise UsageError(
                f"A mixed drafter has two parts or more, and least is 1 or more; got "
                f"{len(parts)} and {least}."
            )
        if len({taps for part in parts if (taps := taps_of(part))}) > 1:
            raise UsageError(
                "Two parts of a mixed drafter read hidden states of different layers.",
                hint="Mix one of them with drafters that read none.",
            )
        self.parts = tuple(parts)
        self.least = least
        self.name = "+".join(part.name for part in parts)
        self.default_length = max(part.default_length for part in parts)

    @property
    def trees(self) -> bool:
        """Whether any part's proposals may have branches."""
        return any(part.trees for part in self.parts)

    @classmethod
    def build(cls, argument: str, setting: Setting) -> MixedDrafter:
        """By name: ``mixed:suffix+model:PATH``, in short ``suffix+model:PATH``."""
        names = split_parts(argument)
        if len(names) < 2 or not all(names):
            raise UsageError(
                f"A mixed drafter is two drafters or more with a '+' between; got '{argument}'.",
                hint="Example: --drafter suffix+model:path/to/draft.gguf",
            )
        if setting.drafter is None:
            raise UsageError(
                f"The drafters of '{argument}' cannot be made by name here.",
                hint="Pass Engine a MixedDrafter of drafter objects.",
            )
        return cls([setting.drafter(name) for name in names])

    def start(self, prompt: Sequence[int], capacity: int) -> _MixedSession:
        """A session of each part."""
        return _MixedSession(self, [part.start(prompt, capacity) for part in self.parts])

    def start_beside(self, cache: Cache, prompt: Sequence[int], capacity: int) -> _MixedSession:
        """A session of each part, on the target's cache where that part works on it."""
        return _MixedSession(self, [begin(part, prompt, capacity, cache) for part in self.parts])

    def cache_bytes(self, tokens: int) -> int:
        """What all parts keep."""
        return sum(part.cache_bytes(tokens) for part in self.parts if isinstance(part, CacheBytes))

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose hidden states the parts want: all that want any want the same."""
        return next(filter(None, map(taps_of, self.parts)), ())


class _MixedSession:
    def __init__(self, drafter: MixedDrafter, sessions: list[DraftSession]) -> None:
        self._drafter = drafter
        self._sessions = sessions

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        deepest = Proposal()
        if length <= 0:  # there may be something to learn from the text all the same
            for session in self._sessions:
                session.propose(tokens, 0, pick)
            return deepest
        for part, session in zip(self._drafter.parts, self._sessions, strict=True):
            share = -(-length * part.default_length // max(self._drafter.default_length, 1))
            proposal = session.propose(tokens, share, pick)
            drawn = any(law is not None for law in proposal.laws)
            if drawn or proposal.depth >= min(self._drafter.least, length):
                return proposal
            deepest = max(deepest, proposal, key=lambda p: p.depth)
        return deepest


def split_parts(text: str) -> list[str]:
    """The drafters' names in ``a+b``, each with its argument.

    A '+' after a colon may belong to a path, and does unless a drafter's name comes next.

    >>> split_parts("suffix:c++.txt+model:my+draft.gguf#tree=24+ngram")
    ['suffix:c++.txt', 'model:my+draft.gguf#tree=24', 'ngram']
    """
    parts: list[str] = []
    for piece in text.split("+"):
        name = re.split("[:#]", piece)[0]
        if parts and ":" in parts[-1] and name not in DRAFTERS:
            parts[-1] += f"+{piece}"
        else:
            parts.append(piece)
    return parts
