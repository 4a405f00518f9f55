"""The exact joint law of several exponential races run on the same noise.

With E_x independent and exponential, the race under weights w is won by argmin_x E_x / w(x).
Winning is a condition on ratios only, and the normalised noises are uniform on the simplex, so
the probability of any set of outcomes is the volume of a polytope over that of the simplex:
no sampling, no quadrature. Sizes are those of toy vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import factorial

import numpy as np
from jaxtyping import Float64

from outrider.core.distribution import Distribution

__all__ = ["conditional"]


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

    Example
    -------
    >>> p = Distribution.dense([0.25, 0.75])
    >>> conditional([(p, 1)], p)
    [(1, 1.0)]
    """
    races = tuple((tuple(d.to_dense().tolist()), winner) for d, winner in earlier)
    weights = tuple(law.to_dense().tolist())
    volumes = [_volume((*races, (weights, int(token)))) for token in law.ids]
    total = sum(volumes)
    return [(int(t), v / total) for t, v in zip(law.ids, volumes, strict=True) if v > 0.0]


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
