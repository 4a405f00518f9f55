"""Statistics for tests, with their false-alarm rate.

Every statistical test in the suite fails a correct program with probability at most ``ALPHA``
over the choice of its seeds; there are fewer than a hundred, so together at most 1e-6 a run.
(Seeds are fixed, so a run that passed passes again.)
"""

from __future__ import annotations

import numpy as np
from scipy import stats

__all__ = ["ALPHA", "chi_square"]

ALPHA = 1e-8


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """P value of counts under a law; cells that expect fewer than 5 are taken together."""
    counts, law = np.ravel(counts), np.ravel(law)
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    small = expected < 5
    observed = [*counts[~small], counts[small].sum()]
    wanted = [*expected[~small], expected[small].sum()]
    if wanted[-1] < 1e-2:  # too little to test, but what came must be next to nothing
        if observed.pop() > 3:
            return 0.0
        wanted.pop()
    wanted_array = np.array(wanted)
    statistic = ((np.array(observed) - wanted_array) ** 2 / wanted_array).sum()
    return float(stats.chi2.sf(statistic, len(wanted) - 1))
