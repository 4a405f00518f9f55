"""A head on the target's hidden states that drafts token after token."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.proposal import ROOT, Proposal
from outrider.core.sequences import common_prefix
from outrider.core.vectors import as_floats, best, log_sum_exp
from outrider.drafters.beside import OnItsOwn
from outrider.drafters.confidence import of_siblings, of_token
from outrider.drafters.shape import Chain, Dynamic, Shape, parse_shape
from outrider.drafters.tree import Tree
from outrider.errors import UsageError
from outrider.protocols import Cache, CacheBytes, Head, Model, Pick, Setting

__all__ = ["EagleDrafter"]

T = TypeVar("T")

_FEW = 64
"""Tokens among which a draw is foreseen."""


class EagleDrafter:
    """Drafts with an EAGLE-3 head: one layer that reads what the target made of the token before.

    The hidden states come out of the verifying pass itself. After committed tokens the head reads
    the target's own; further ahead, its own output in their place. Its vocabulary is trimmed to
    frequent tokens, and q is zero for all others.

    Parameters
    ----------
    head
        The head at work.
    target
        The model whose hidden states it reads.
    shape
        A chain, a tree of fixed widths, or one that grows where the head is confident. Chains and
        fixed trees are drawn under the rule in force; a growing tree is ranked by the head's own
        probabilities and holds no chance, so that it is exact under every rule. Where the rule
        draws the target's token on noise that is known beforehand, the tree follows that noise.
    default_length
        Depth of a proposal when none is asked for.
    context
        Tokens of the prompt that the head reads, the last ones; by default what it says itself, or
        256. Heads are trained on short texts, and a long prompt takes time.

    Source: Li et al. 2025 (arXiv 2503.01840), EAGLE-3; growing trees, Li et al. 2024 (arXiv
    2406.16858), EAGLE-2, section 4: a node's value is the product of q along its path.
    """

    name = "eagle"

    def __init__(
        self,
        head: Head,
        target: Model,
        shape: Shape | None = None,
        default_length: int = 5,
        context: int | None = None,
    ) -> None:
        self.head = head
        self.target = target
        self.shape = Dynamic(16, 4) if shape is None else shape
        self.default_length = default_length
        self.context: int = getattr(head, "context", 256) if context is None else context
        self.taps = head.taps

    @property
    def trees(self) -> bool:
        """Whether its proposals may have branches."""
        return not isinstance(self.shape, Chain)

    @classmethod
    def build(cls, argument: str, setting: Setting) -> EagleDrafter:
        """By name: ``eagle`` for the head that comes with the target, or ``eagle:FOLDER``; then
        ``#chain``, ``#tree=4,2`` or ``#tree=24`` for a shape that does not depend on the machine.
        """
        path, _, shape = argument.partition("#")
        if setting.head is None:
            raise UsageError(
                "An 'eagle' drafter cannot be made by name here.",
                hint="Pass Engine an EagleDrafter.",
            )
        head = setting.head(path)
        wanted = Chain() if shape == "chain" else parse_shape(shape) if shape else None
        return cls(head, setting.target, wanted)

    def start(self, prompt: Sequence[int], capacity: int) -> OnItsOwn:
        """A session that feeds the target by itself; the engine calls ``start_beside``."""
        return OnItsOwn(self, self.target, prompt, capacity)

    def start_beside(self, cache: Cache, prompt: Sequence[int], capacity: int) -> _EagleSession:
        """A session that reads the hidden states in the target's cache."""
        return _EagleSession(self, cache, max(0, len(prompt) - self.context), capacity)

    def cache_bytes(self, tokens: int) -> int:
        """What the head's own cache takes, where that is known."""
        return self.head.cache_bytes(tokens) if isinstance(self.head, CacheBytes) else 0


class _EagleSession:
    def __init__(self, drafter: EagleDrafter, cache: Cache, skipped: int, capacity: int) -> None:
        self._head = drafter.head
        self._ids: Int64[np.ndarray, " Vd"] = drafter.head.ids.numpy(force=True)
        self._shape = drafter.shape
        self._vocab = drafter.target.vocab_size
        self._target_cache = cache
        self._skipped = skipped
        self._cache = self._head.new_cache(capacity - skipped)
        self._fed: list[int] = []

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        pairs = len(tokens) - 1  # each of a token and the hidden states of the one before
        if length <= 0 or pairs <= self._skipped or self._target_cache.length < pairs:
            return Proposal()
        if not pick.asks("eagle"):
            return Proposal()
        # The last pair is fed again where nothing is new: its output is where drafting starts.
        start = max(self._skipped, min(common_prefix(self._fed, tokens) - 1, pairs - 1))
        self._cache.rollback(start - self._skipped)
        hidden: Float[Tensor, "n widths"] = self._target_cache.hidden.first(pairs)[start:]  # type: ignore[attr-defined]
        logits, state = self._head.feed(self._cache, tokens[start + 1 :], hidden)
        self._fed = list(tokens)
        if isinstance(self._shape, Dynamic):
            found = self._likeliest(self._shape, logits, state, length, pick)
        elif isinstance(self._shape, Chain):
            found = self._chain(logits, state, length, pick)
        else:
            found = self._drawn(logits, state, length, pick)
        self._cache.rollback(pairs - self._skipped)
        return found

    def _chain(
        self, logits: Float[Tensor, " Vd"], state: Float[Tensor, " d"], length: int, pick: Pick
    ) -> Proposal:
        drafted: list[int] = []
        laws: list[Distribution | None] = []
        sure: list[float] = []
        while True:
            wide = self._widen(logits)
            token, law = pick(wide, drafted)
            drafted.append(token)
            laws.append(law)
            sure.append(of_token(wide, token, pick.shares_noise))
            more = law is not None or pick.goes_on("eagle", sure)
            if len(drafted) == length or not more:
                return Proposal.chain(drafted, laws, confidence=sure, source="eagle")
            last = range(len(drafted) - 1, len(drafted))
            rows, states = self._head.grow(self._cache, Proposal.chain(drafted), last, state[None])
            logits, state = rows[0], states[0]

    def _drawn(
        self, logits: Float[Tensor, " Vd"], state: Float[Tensor, " d"], length: int, pick: Pick
    ) -> Proposal:
        """A shape that is fixed before anything is drawn, under the rule in force."""
        tree = Tree(pick, "eagle")
        rows, states = [self._widen(logits)], [state]
        for depth in range(length):
            before = len(rows) - 1
            tree.grow(self._shape, depth, torch.stack(rows))
            grown = tree.proposal()
            if depth + 1 < length and len(grown) > before:
                nodes = range(before, len(grown))
                above = torch.stack([states[grown.parents[node] - ROOT] for node in nodes])
                more, after = self._head.grow(self._cache, grown, nodes, above)
                rows += [self._widen(row) for row in more]
                states += list(after)
        return tree.proposal()

    def _likeliest(
        self,
        shape: Dynamic,
        logits: Float[Tensor, " Vd"],
        state: Float[Tensor, " d"],
        length: int,
        pick: Pick,
    ) -> Proposal:
        """The likeliest nodes of a tree of which each level's likeliest are expanded, as far as
        that is worth a step."""
        tokens: list[int] = []
        parents: list[int] = []
        worth: list[float] = []
        sure: list[float] = []
        expanded = Proposal()  # those nodes that went through the head, and where they are in all
        places: list[int] = []
        rows, states, level = logits[None], state[None], [ROOT]
        for depth in range(length):
            first = len(tokens)
            if pick.shares_noise:
                offers = [
                    self._foreseen(row, _path(node, parents, tokens), shape.width, pick)
                    for row, node in zip(rows, level, strict=True)
                ]
            else:
                offers = self._probable(rows, shape.width)
            for node, offer in zip(level, offers, strict=True):
                above = 0.0 if node == ROOT else worth[node]
                for token, chance in offer:
                    tokens.append(token)
                    parents.append(node)
                    sure.append(chance)
                    worth.append(above + log(chance) if chance > 0.0 else -inf)
            if depth + 1 == length:
                break
            new = sorted(range(first, len(tokens)), key=lambda node: -worth[node])[: shape.width]
            order = sorted(n for n in new if pick.goes_on("eagle", _path(n, parents, sure)))
            if not order:
                break
            number = {ROOT: ROOT} | {place: i for i, place in enumerate(places)}
            above_rows = [level.index(parents[node]) for node in order]
            before = len(places)
            places += order
            expanded = Proposal(
                (*expanded.tokens, *(tokens[node] for node in order)),
                (*expanded.parents, *(number[parents[node]] for node in order)),
                (None,) * len(places),
            )
            rows, states = self._head.grow(
                self._cache, expanded, range(before, len(places)), states[above_rows]
            )
            level = order
        kept = sorted(sorted(range(len(tokens)), key=lambda n: (-worth[n], n))[: shape.nodes])
        laws: tuple[Distribution | None, ...] = (None,) * len(tokens)
        grown = Proposal(tuple(tokens), tuple(parents), laws, tuple(sure), "eagle")
        return grown.only(kept)

    def _probable(self, rows: Float[Tensor, "n Vd"], width: int) -> list[list[tuple[int, float]]]:
        """The head's most probable tokens after each row, each with its probability."""
        found = []
        for row in as_floats(rows):
            places = best(row, width)
            total = log_sum_exp(row, float(row[places[0]]))
            chances = np.exp(row[places].astype(np.float64) - total).tolist()
            found.append(list(zip(self._ids[places].tolist(), chances, strict=True)))
        return found

    def _foreseen(
        self, row: Float[Tensor, " Vd"], path: Sequence[int], width: int, pick: Pick
    ) -> list[tuple[int, float]]:
        """The token that the target would draw if its law were the head's, and the next best.

        A few likely tokens are enough to draw among: what is drafted need not follow q's law
        where the rule keeps no draft for its law.
        """
        values = as_floats(row)
        places = best(values, _FEW)
        places = places[np.argsort(self._ids[places])]
        assert pick.among is not None  # who shares noise has it
        q = pick.among(self._ids[places], values[places], path)
        depth = len(path)
        found = [token for token, _ in pick.siblings(q, width, depth, depth, True)]
        return list(zip(found, of_siblings(q, found, foreseen=True), strict=True))

    def _widen(self, logits: Float[Tensor, " Vd"]) -> Float[Tensor, " V"]:
        """Over the target's vocabulary."""
        wide = logits.new_full((self._vocab,), -torch.inf)
        wide[self._head.ids] = logits
        return wide


def _path(node: int, parents: Sequence[int], values: Sequence[T]) -> list[T]:
    """The values at the nodes from the top down to one node."""
    found = []
    while node != ROOT:
        found.append(values[node])
        node = parents[node]
    return found[::-1]
