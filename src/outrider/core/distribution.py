"""A probability distribution over the vocabulary, kept only where it is not zero.

After top-k or top-p, at temperature 0 and for a deterministic draft, all but a few of the
vocabulary's probabilities are zero, so the support is what is stored. Everything is float64:
ratios of probabilities lose their meaning in half precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from outrider.core.vectors import as_floats, softmax

__all__ = ["Distribution"]


@lru_cache(maxsize=8)
def _all_ids(size: int) -> Int64[np.ndarray, " V"]:
    """0 ... size - 1, which every law over a whole vocabulary shares."""
    ids = np.arange(size)
    ids.flags.writeable = False
    return ids


@dataclass(frozen=True, eq=False, slots=True)
class Distribution:
    """Probabilities ``probs[i] > 0`` of the tokens ``ids[i]``, ids ascending, summing to one.

    Parameters
    ----------
    ids
        Tokens with positive probability, in ascending order.
    probs
        Their probabilities, float64.
    vocab_size
        Number of tokens there are, with or without probability.

    Example
    -------
    >>> p = Distribution.dense([0.5, 0.3, 0.2])
    >>> q = Distribution.dense([0.6, 0.1, 0.3])
    >>> round(p.overlap(q), 12), p.residual(q).to_dense().tolist()
    (0.8, [0.0, 1.0, 0.0])
    """

    ids: Int64[np.ndarray, " S"]
    probs: Float64[np.ndarray, " S"]
    vocab_size: int

    @classmethod
    def of(
        cls,
        ids: Int64[np.ndarray, " S"],
        weights: Float64[np.ndarray, " S"],
        vocab_size: int,
    ) -> Distribution:
        """Normalise non-negative weights over ascending ids; weights of zero are left out."""
        total = weights.sum()
        if not total > 0.0:
            raise ValueError("A distribution needs at least one token with a positive weight.")
        probs = weights / total
        if not probs.all():  # a zero among the weights, or one that underflowed here
            keep = probs > 0
            ids, probs = ids[keep], probs[keep]
        return cls(ids, probs, vocab_size)

    @classmethod
    def dense(cls, weights: object) -> Distribution:
        """From one non-negative weight for each token of the vocabulary, normalised."""
        array = np.asarray(weights, dtype=np.float64)
        return cls.of(_all_ids(len(array)), array, len(array))

    @classmethod
    def one_hot(cls, token: int, vocab_size: int) -> Distribution:
        """All probability on one token: the law of a deterministic choice."""
        return cls(np.array([token]), np.ones(1), vocab_size)

    @classmethod
    def softmax(cls, scores: Float[Tensor, " V"]) -> Distribution:
        """exp(scores) normalised; a score of minus infinity is a token that cannot come."""
        values = as_floats(scores)
        ids, probs = _all_ids(len(values)), np.empty(len(values))
        if softmax(values, float(values.max()), probs) < len(values):
            keep = probs > 0
            ids, probs = ids[keep], probs[keep]
        return cls(ids, probs, len(values))

    def __getitem__(self, token: int) -> float:
        """The probability of one token; 0.0 outside the support."""
        at = int(np.searchsorted(self.ids, token))
        if at < len(self.ids) and self.ids[at] == token:
            return float(self.probs[at])
        return 0.0

    def argmax(self) -> int:
        """The most probable token; of equals, the one with the lowest id."""
        return int(self.ids[int(np.argmax(self.probs))])

    def most_probable(self, count: int) -> list[int]:
        """The ``count`` most probable tokens, best first; of equals, the lower id first."""
        if count < len(self.ids):
            least = np.partition(self.probs, -count)[-count]
            near = np.flatnonzero(self.probs >= least)
        else:
            near = np.arange(len(self.ids))
        order = near[np.argsort(-self.probs[near], kind="stable")][:count]
        return [int(token) for token in self.ids[order]]

    def without(self, token: int) -> Distribution | None:
        """The law given that the token does not come; ``None`` if nothing else can."""
        kept = self.ids != token
        if not kept.any():
            return None
        return Distribution.of(self.ids[kept], self.probs[kept], self.vocab_size)

    def to_dense(self) -> Float64[np.ndarray, " V"]:
        """One probability for each token of the vocabulary."""
        out = np.zeros(self.vocab_size)
        out[self.ids] = self.probs
        return out

    def at(self, tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """The probabilities of several tokens; 0.0 outside the support."""
        if len(tokens) == len(self.ids) and np.array_equal(tokens, self.ids):
            return self.probs
        at = np.searchsorted(self.ids, tokens)
        at[at == len(self.ids)] = 0
        return np.where(self.ids[at] == tokens, self.probs[at], 0.0)

    def overlap(self, other: Distribution) -> float:
        """sum_x min(p(x), q(x)) = 1 − TV(p, q): the rejection rule's chance of acceptance.

        Source: Leviathan et al. 2023 (arXiv 2211.17192), Theorem 3.5; p and q as there.
        """
        return float(np.minimum(self.probs, other.at(self.ids)).sum())

    def residual(self, other: Distribution) -> Distribution:
        """max(0, p − q) normalised: what is left of p once q has had its share.

        Where p = q nothing is left, but there a rejection has probability zero; the limit
        returned then is p itself, so that rounding can never leave an empty law.
        """
        left = self.probs - other.at(self.ids)
        np.maximum(left, 0.0, out=left)
        return Distribution.of(self.ids, left, self.vocab_size) if left.any() else self
