"""Heads that each predict one further token, all from the same hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import exp

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.proposal import ROOT, Proposal
from outrider.drafters.beside import OnItsOwn
from outrider.drafters.shape import Chain, Dynamic, Shape, parse_shape
from outrider.drafters.tree import Tree
from outrider.errors import UsageError
from outrider.protocols import Cache, Model, ParallelHeads, Pick, Setting

__all__ = ["MedusaDrafter"]


class MedusaDrafter:
    """Drafts with Medusa heads: one look at a hidden state gives the laws of all drafted tokens.

    When a round starts, the last committed token has not been through the target yet. What there
    is, is the hidden state of the one before it: from there the target itself has said the last
    token, and head j says the j-th after it. A head does not know what the ones before it said, so
    a node's children are the same wherever they stand at its depth.

    Parameters
    ----------
    heads
        The heads at work.
    target
        The model whose hidden states they read.
    shape
        A chain, a tree of fixed widths, or the likeliest nodes of all. Chains and fixed trees are
        drawn under the rule in force; the likeliest nodes are ranked by the heads' own
        probabilities and hold no chance, so that they are exact under every rule.

    Source: Cai et al. 2024 (arXiv 2401.10774), Medusa, sections 2.1 and 2.3: the tree is a
    Cartesian product of the heads' best tokens, of which the nodes with the highest products of
    probabilities are kept; here by the probabilities at hand, not by accuracies measured before.
    """

    name = "medusa"

    def __init__(self, heads: ParallelHeads, target: Model, shape: Shape | None = None) -> None:
        self.heads = heads
        self.target = target
        self.shape = Dynamic(16) if shape is None else shape
        self.default_length = heads.count
        self.taps = heads.taps

    @property
    def trees(self) -> bool:
        """Whether its proposals may have branches."""
        return not isinstance(self.shape, Chain)

    @classmethod
    def build(cls, argument: str, setting: Setting) -> MedusaDrafter:
        """By name: ``medusa:FOLDER``, then ``#chain``, ``#tree=4,2`` or ``#tree=24`` for another
        shape."""
        path, _, shape = argument.partition("#")
        if setting.parallel is None:
            raise UsageError(
                "A 'medusa' drafter cannot be made by name here.",
                hint="Pass Engine a MedusaDrafter.",
            )
        if not path:
            raise UsageError(
                "'medusa' takes the folder of its heads.", hint="Example: --drafter medusa:FOLDER"
            )
        wanted = Chain() if shape == "chain" else parse_shape(shape) if shape else None
        return cls(setting.parallel(path), setting.target, wanted)

    def start(self, prompt: Sequence[int], capacity: int) -> OnItsOwn:
        """A session that feeds the target by itself; the engine calls ``start_beside``."""
        return OnItsOwn(self, self.target, prompt, capacity)

    def start_beside(self, cache: Cache, prompt: Sequence[int], capacity: int) -> _MedusaSession:
        """A session that reads the hidden states in the target's cache."""
        return _MedusaSession(self, cache)


class _MedusaSession:
    """It remembers nothing: the hidden state in the target's cache is all that it needs."""

    def __init__(self, drafter: MedusaDrafter, cache: Cache) -> None:
        self._heads = drafter.heads
        self._shape = drafter.shape
        self._vocab = drafter.target.vocab_size
        self._cache = cache

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        known = len(tokens) - 1  # tokens whose hidden states there are
        length = min(length, self._heads.count)
        if length <= 0 or known < 1 or self._cache.length < known:
            return Proposal()
        hidden: Float[Tensor, " widths"] = self._cache.hidden.first(known)[-1]  # type: ignore[attr-defined]
        logits = self._heads.predict(hidden)[:length]
        if isinstance(self._shape, Dynamic):
            return self._likeliest(self._shape.nodes, logits)
        return self._drawn(logits, pick)

    def _drawn(self, logits: Float[Tensor, "depths Vd"], pick: Pick) -> Proposal:
        """A shape that is fixed before anything is drawn, under the rule in force."""
        tree = Tree(pick, "medusa")
        wide = logits.new_full((len(logits), self._vocab), -torch.inf)
        wide[:, self._heads.ids] = logits
        for depth, row in enumerate(wide):
            # The same row after every node there is.
            tree.grow(self._shape, depth, row.expand(len(tree.proposal()) + 1, -1))
        return tree.proposal()

    def _likeliest(self, nodes: int, logits: Float[Tensor, "depths Vd"]) -> Proposal:
        """The nodes with the highest products of probabilities, the best first.

        Nothing is better than its parent, or than its elder sibling: whenever a node is taken, only
        its first child and its next sibling come into question beside those that waited.
        """
        ranked = torch.log_softmax(logits.float(), dim=-1).topk(min(nodes, logits.shape[1]))
        scores, tokens = ranked.values.tolist(), self._heads.ids[ranked.indices].tolist()
        chosen: list[int] = []
        parents: list[int] = []
        sure: list[float] = []
        # Minus log of the product; then depth, rank and parent, which settle ties.
        waiting = [(-scores[0][0], 0, 0, ROOT)]
        while waiting and len(chosen) < nodes:
            cost, depth, rank, parent = heappop(waiting)
            if depth + 1 < len(scores):
                heappush(waiting, (cost - scores[depth + 1][0], depth + 1, 0, len(chosen)))
            if rank + 1 < len(scores[depth]):
                step = scores[depth][rank] - scores[depth][rank + 1]
                heappush(waiting, (cost + step, depth, rank + 1, parent))
            chosen.append(tokens[depth][rank])
            parents.append(parent)
            sure.append(exp(scores[depth][rank]))
        laws = (None,) * len(chosen)
        return Proposal(tuple(chosen), tuple(parents), laws, tuple(sure), "medusa")
