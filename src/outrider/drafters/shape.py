"""Shapes of a draft tree: how many children each node gets, and which nodes are worth scoring."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import UsageError

__all__ = ["Chain", "Dynamic", "Shape", "Static", "parse_shape"]


@dataclass(frozen=True, slots=True)
class Chain:
    """One path."""

    def width_at(self, depth: int) -> int:
        """Children of a node at a depth."""
        return 1


@dataclass(frozen=True, slots=True)
class Static:
    """``widths[d]`` children for every node at depth d; deeper nodes get one.

    The shape is fixed before anything is drawn, so siblings may be sampled.
    """

    widths: tuple[int, ...]

    def width_at(self, depth: int) -> int:
        """Children of a node at a depth."""
        return self.widths[depth] if depth < len(self.widths) else 1


@dataclass(frozen=True, slots=True)
class Dynamic:
    """The ``nodes`` likeliest nodes of a tree that grows where the draft is confident.

    Each level expands the ``width`` likeliest nodes of the level before, by the product of the
    draft's probabilities along the path, into ``width`` children each; of all of them the
    likeliest ``nodes`` are proposed. Which nodes stay depends on their own q, so the rule is
    told that they may be dropped, and picks them without chance of their own.

    Source: Li et al. 2024 (arXiv 2406.16858), EAGLE-2, section 4.
    """

    nodes: int
    width: int = 4

    def width_at(self, depth: int) -> int:
        """Children of a node at a depth."""
        return self.width


Shape = Chain | Static | Dynamic


def parse_shape(text: str) -> Shape:
    """From ``""``, ``tree=4,2,1`` or ``tree=24`` to a shape.

    Raises
    ------
    UsageError
        When it is neither a list of widths nor a number of nodes.

    Example
    -------
    >>> parse_shape("tree=4,2"), parse_shape("tree=16")
    (Static(widths=(4, 2)), Dynamic(nodes=16, width=4))
    """
    if not text:
        return Chain()
    name, _, value = text.partition("=")
    parts = [part.strip() for part in value.split(",")]
    if name.strip() != "tree" or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise UsageError(
            f"A draft tree is 'tree=4,2,1' (children at each depth) or 'tree=24' (the likeliest "
            f"nodes); got '{text}'.",
            hint="Example: --drafter model:draft.gguf#tree=24",
        )
    widths = tuple(int(p) for p in parts)
    return Static(widths) if len(widths) > 1 else Dynamic(widths[0])
