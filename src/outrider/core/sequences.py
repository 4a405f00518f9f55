"""What token sequences have in common."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["common_prefix"]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix; the usual case, all of it, is compared at once.

    >>> common_prefix([1, 2, 3], (1, 2, 4, 5))
    2
    """
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])
