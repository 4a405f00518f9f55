"""A draft tree while it grows, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from jaxtyping import Float
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.proposal import ROOT, Proposal
from outrider.drafters.confidence import of_siblings
from outrider.drafters.shape import Dynamic, Shape
from outrider.protocols import Pick

__all__ = ["Tree"]


class Tree:
    """Nodes in the order in which they were added, which puts parents before their children.

    Parameters
    ----------
    pick
        How tokens are chosen under the rule in force.
    source
        The drafter's name.
    """

    def __init__(self, pick: Pick, source: str = "") -> None:
        self._pick = pick
        self._source = source
        self._sure: list[float] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._laws: list[Distribution | None] = []
        self._worth: list[float] = []  # log of the chances along the path, for dynamic shapes
        self._level: list[int] = [ROOT]

    def grow(self, shape: Shape, depth: int, logits: Float[Tensor, "rows V"]) -> None:
        """Add one level.

        Parameters
        ----------
        shape
            Of the whole tree.
        depth
            Of the new level; 0 is the first drafted position.
        logits
            The draft's: row 0 after the committed tokens, row 1 + node after each node.
        """
        level = self._level
        if isinstance(shape, Dynamic):
            level = sorted(level, key=self._value, reverse=True)[: shape.width]
        before, self._level = level, []
        for parent in before:
            rank = self._pick.ranking or self._pick.distribution
            q = rank(logits[parent - ROOT], self._path(parent))
            width, droppable = shape.width_at(depth), isinstance(shape, Dynamic)
            children = self._pick.siblings(q, width, depth, len(self._tokens), droppable)
            chances = of_siblings(q, [t for t, _ in children], self._pick.shares_noise)
            for (token, law), chance in zip(children, chances, strict=True):
                self._level.append(len(self._tokens))
                self._worth.append(self._value(parent) + log(chance))
                self._sure.append(chance)
                self._tokens.append(token)
                self._parents.append(parent)
                self._laws.append(law)

    def proposal(self, shape: Shape | None = None) -> Proposal:
        """All nodes, or those that a dynamic shape keeps; these hang together, since no node is
        worth more than its parent.
        """
        kept: Sequence[int] = range(len(self._tokens))
        if isinstance(shape, Dynamic):
            best = sorted(kept, key=lambda node: (-self._worth[node], node))
            kept = sorted(best[: shape.nodes])
        number = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return Proposal(
            tuple(self._tokens[n] for n in kept),
            tuple(number[self._parents[n]] for n in kept),
            tuple(self._laws[n] for n in kept),
            tuple(self._sure[n] for n in kept),
            self._source,
        )

    def _value(self, node: int) -> float:
        return 0.0 if node == ROOT else self._worth[node]

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(self._tokens[node])
            node = self._parents[node]
        return path[::-1]
