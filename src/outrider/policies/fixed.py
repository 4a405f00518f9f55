"""The same draft length in every round."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.price import NOMINAL, Price
from outrider.core.proposal import Proposal
from outrider.errors import SamplingError, UsageError

__all__ = ["Fixed"]


class Fixed:
    """Always ``draft_length`` tokens, as far as the request and the context leave room.

    Raises
    ------
    SamplingError
        When the length is negative. 0 is plain decoding.

    Example
    -------
    >>> Fixed(5).length()
    5
    """

    name = "fixed"

    def __init__(self, draft_length: int) -> None:
        if draft_length < 0:
            raise SamplingError(f"draft_length must be 0 or more; got {draft_length}.")
        self.draft_length = draft_length

    @classmethod
    def build(cls, argument: str, price: Price = NOMINAL) -> Fixed:
        """By name: ``fixed:5``.

        Raises
        ------
        UsageError
            When it is not a number.
        """
        if not argument.isdecimal():
            raise UsageError(
                f"The 'fixed' policy needs a draft length; got '{argument}'.",
                hint="Example: --draft-length 5",
            )
        return cls(int(argument))

    def length(self) -> int:
        """The fixed length."""
        return self.draft_length

    def learn(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Nothing: the length is fixed."""
