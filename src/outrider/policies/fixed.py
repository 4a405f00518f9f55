"""The same draft length in every round."""

from __future__ import annotations

from outrider.errors import SamplingError

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

    def length(self) -> int:
        """The fixed length."""
        return self.draft_length

    def learn(self, drafted: int, accepted: int) -> None:
        """Nothing: the length is fixed."""
