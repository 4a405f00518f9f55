"""No drafter: plain decoding, one token for each target call."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.proposal import Proposal
from outrider.protocols import Pick, Setting
from outrider.registry import refuse_argument

__all__ = ["NoDrafter"]


class NoDrafter:
    """Proposes nothing, ever. Its own session, since there is nothing to remember."""

    name = "none"
    trees = False
    default_length = 0

    @classmethod
    def build(cls, argument: str, setting: Setting) -> NoDrafter:
        """By name; it takes no argument."""
        refuse_argument(cls.name, argument)
        return cls()

    def start(self, prompt: Sequence[int], capacity: int) -> NoDrafter:
        """Itself."""
        return self

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        """The empty proposal."""
        return Proposal()
