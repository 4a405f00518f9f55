"""The exact joint law of several exponential races run on the same noise.

With E_x independent and exponential, the race under weights w is won by argmin_x E_x / w(x).
Winning is a condition on ratios only, and the normalised noises are uniform on the simplex, so
the probability of any set of outcomes is the volume of a polytope over that of the simplex:
no sampling, no quadrature. Sizes are those of toy vocabularies, or of what few tokens of a large
one can come.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import factorial

import numpy as np
from jaxtyping import Float64

from outrider.core.distribution import Distribution
from outrider.errors import UsageError

__all__ = ["MOST", "conditional"]

MOST = 10
"""Runners at most that races on one noise are walked with: a volume in one dimension less."""


def conditional(
    earlier: Sequence[tuple[Distribution, int]], law: Distribution
) -> list[tuple[int, float]]:
    """The law of one more race, given the winners of earlier ones on the same noise.

    Parameters
    ----------
    earlier
        Laws of the earlier races, each with the token that won.
    law
        Law of the race to come.

    Returns
    -------
    list
        Each possible winner with its probability; they sum to one.

    Tokens that no race can give are left out: ratios of the others' noises do not depend on theirs.
    Those that one race alone can give, and that none gave, run as one: the first of several
    exponential noises to finish is exponential too, at the sum of their rates, and which of them
    it was says nothing of when.

    Raises
    ------
    UsageError
        When more than ``MOST`` runners are left.

    Example
    -------
    >>> p = Distribution.dense([0.25, 0.75])
    >>> conditional([(p, 1)], p)
    [(1, 1.0)]
    """
    laws = [*(d for d, _ in earlier), law]
    winners = [token for _, token in earlier]
    ids = np.unique(np.concatenate([d.ids for d in laws]))
    weights = np.stack([d.at(ids) for d in laws])
    alone = ((weights > 0).sum(axis=0) == 1) & ~np.isin(ids, winners)
    groups = np.where(alone, len(ids) + weights.argmax(axis=0), np.arange(len(ids)))
    names, runner = np.unique(groups, return_inverse=True)
    if len(names) > MOST:
        raise UsageError(
            f"Draft and target draw among {len(names)} tokens on the same noise; at most {MOST} "
            "are walked.",
            hint="Leave fewer tokens: a smaller --top-k, --top-p or --temperature.",
        )
    merged = [tuple(np.bincount(runner, row, len(names)).tolist()) for row in weights]
    won = [int(runner[np.searchsorted(ids, token)]) for token in winners]
    races = tuple(zip(merged[:-1], won, strict=True))
    volumes = np.array(
        [_volume((*races, (merged[-1], i))) if w > 0 else 0.0 for i, w in enumerate(merged[-1])]
    )
    own = runner[np.searchsorted(ids, law.ids)]
    chances = volumes[own] / volumes.sum() * law.probs / np.array(merged[-1])[own]
    pairs = zip(law.ids.tolist(), chances.tolist(), strict=True)
    return [(token, chance) for token, chance in pairs if chance > 0.0]


@lru_cache(maxsize=65536)
def _volume(races: tuple[tuple[tuple[float, ...], int], ...]) -> float:
    """Share of the simplex on which every given race has its given winner."""
    n = len(races[0][0])
    rows = [-np.eye(n)[x] for x in range(n)]  # -E_x <= 0
    for weights, winner in races:
        for x, weight in enumerate(weights):
            if x != winner and weight > 0.0:
                row = np.zeros(n)
                row[winner], row[x] = weight, -weights[winner]  # E_win * w_x <= E_x * w_win
                rows.append(row / np.abs(row).max())
    # The last noise is one minus the others: drop it from the coordinates.
    A = np.array([row[:-1] - row[-1] for row in rows])
    b = np.array([-row[-1] for row in rows])
    return _polytope_volume(A, b) * factorial(n - 1)


def _polytope_volume(A: Float64[np.ndarray, "m d"], b: Float64[np.ndarray, " m"]) -> float:
    """Volume of {x : A x <= b}, which is bounded; 0.0 if it has no interior."""
    if A.shape[1] == 0:
        return 1.0
    if A.shape[1] == 1:
        a = A[:, 0]
        high = float(np.min(b[a > 0] / a[a > 0], initial=np.inf))
        low = float(np.max(b[a < 0] / a[a < 0], initial=-np.inf))
        return max(0.0, high - low)
    from scipy.optimize import linprog
    from scipy.spatial import ConvexHull, HalfspaceIntersection

    # The centre of the largest ball inside: Qhull needs a point that is not on the border.
    lengths = np.linalg.norm(A, axis=1, keepdims=True)
    kept = lengths[:, 0] > 0
    if (b[~kept] < 0).any():
        return 0.0
    A, b, lengths = A[kept], b[kept], lengths[kept]
    best = linprog(
        np.append(np.zeros(A.shape[1]), -1.0),
        A_ub=np.hstack([A, lengths]),
        b_ub=b,
        bounds=[(None, None)] * A.shape[1] + [(0, None)],
    )
    if not best.success or best.x[-1] < 1e-13:
        return 0.0
    corners = HalfspaceIntersection(np.hstack([A, -b[:, None]]), best.x[:-1]).intersections
    return float(ConvexHull(corners).volume)
