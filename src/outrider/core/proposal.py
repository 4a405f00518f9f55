"""What a drafter puts forward: a tree of tokens, each with the law it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.distribution import Distribution

__all__ = ["ROOT", "Proposal"]

ROOT = -1
"""The node above the tree: the last committed token."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A token tree in an order in which parents come before their children.

    Parameters
    ----------
    tokens
        The token at each node.
    parents
        The index of each node's parent; ``ROOT`` for a child of the last committed token.
    laws
        The law q that each node's token was really drawn from, given its earlier siblings:
        after processors, after vocabulary trimming, in float64. ``None`` for a token that was
        chosen deterministically, whose law is one-hot.
    confidence
        The drafter's guess, for each node, of the probability that it stands if its parent does;
        empty if it makes none. It decides how much of a proposal is worth scoring, never what
        stands.
    source
        The name of the drafter that proposed it.

    Example
    -------
    >>> chain = Proposal.chain([5, 7])
    >>> chain.parents, chain.path(1), chain.is_chain
    ((-1, 0), [0, 1], True)
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    laws: tuple[Distribution | None, ...] = ()
    confidence: tuple[float, ...] = field(default=(), compare=False)
    source: str = field(default="", compare=False)
    depth: int = field(init=False, compare=False)
    """Number of tokens on the longest path."""
    _children: dict[int, list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.laws):
            raise ValueError(
                f"A proposal needs one parent and one law for each token; got {len(self.tokens)} "
                f"tokens, {len(self.parents)} parents and {len(self.laws)} laws."
            )
        if self.confidence and len(self.confidence) != len(self.tokens):
            raise ValueError(
                f"A proposal needs a confidence for each of its {len(self.tokens)} tokens or for "
                f"none; got {len(self.confidence)}."
            )
        children: dict[int, list[int]] = {}
        depths = {ROOT: 0}
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"Node {node} has parent {parent}; parents must come first.")
            siblings = children.setdefault(parent, [])
            if any(self.tokens[s] == self.tokens[node] for s in siblings):
                raise ValueError(f"Two siblings under node {parent} hold {self.tokens[node]}.")
            siblings.append(node)
            depths[node] = depths[parent] + 1
            law = self.laws[node]
            if law is not None and law[self.tokens[node]] == 0.0:
                raise ValueError(
                    f"Node {node} holds {self.tokens[node]}, which has probability zero under the "
                    "law that it was drawn from."
                )
        object.__setattr__(self, "_children", children)
        object.__setattr__(self, "depth", max(depths.values()))

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        laws: Sequence[Distribution | None] | None = None,
        *,
        confidence: Sequence[float] = (),
        source: str = "",
    ) -> Proposal:
        """A tree of one path; without laws, a deterministic one."""
        n = len(tokens)
        drawn = (None,) * n if laws is None else tuple(laws)
        return cls(tuple(tokens), tuple(range(-1, n - 1)), drawn, tuple(confidence), source)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_fixed(self) -> bool:
        """Whether no token was drawn, so that any part may be left out for what it is."""
        return all(law is None for law in self.laws)

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs below the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def children(self, node: int) -> Sequence[int]:
        """The nodes below one node, in the order in which they were drawn."""
        return self._children.get(node, ())

    def child_with(self, node: int, token: int) -> int | None:
        """The child of a node that holds a token, if there is one."""
        return next((c for c in self.children(node) if self.tokens[c] == token), None)

    def only(self, nodes: Sequence[int]) -> Proposal:
        """Some of the nodes, ascending, with every node's parent among them.

        >>> Proposal((5, 6, 7), (-1, -1, 0), (None,) * 3).only([0, 2]).parents
        (-1, 0)
        """
        if len(nodes) == len(self):
            return self
        number = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
        return Proposal(
            tuple(self.tokens[n] for n in nodes),
            tuple(number[self.parents[n]] for n in nodes),
            tuple(self.laws[n] for n in nodes),
            tuple(self.confidence[n] for n in nodes) if self.confidence else (),
            self.source,
        )

    def law(self, node: int, vocab_size: int) -> Distribution:
        """The law that the node's token was drawn from, one-hot if it was not drawn."""
        return self.laws[node] or Distribution.one_hot(self.tokens[node], vocab_size)

    def path(self, node: int) -> list[int]:
        """The nodes from the top of the tree down to one node, that one included."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens along ``path(node)``."""
        return [self.tokens[n] for n in self.path(node)]
