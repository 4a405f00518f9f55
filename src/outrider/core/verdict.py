"""What a rule decides about a proposal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Kind", "Verdict"]

Kind = Literal["correction", "bonus"]
"""What the target's own token is. A plain round's only token is a bonus with no draft."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path, and the one token that the target adds after it.

    Parameters
    ----------
    path
        Accepted nodes of the proposal, from the top down; empty if the first was rejected.
    token
        The token after the path: the target's own.
    kind
        ``correction`` if a draft was rejected there, ``bonus`` if all of a path was accepted.
    """

    path: tuple[int, ...]
    token: int
    kind: Kind
