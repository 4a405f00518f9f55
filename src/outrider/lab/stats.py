"""The few statistics of a measurement: quantiles, paired ratios, intervals by resampling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

import numpy as np

__all__ = [
    "Spread", "bootstrap_median", "geometric_mean", "medians_by", "paired_ratios", "quantile",
    "spread",
]  # fmt: skip

_RESAMPLES = 5000
_LEVEL = 0.95

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Spread:
    """How some values lie: their number, middle, mean, and the outer tenths."""

    n: int
    median: float
    mean: float
    p10: float
    p90: float


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share lies, straight lines between neighbours.

    >>> quantile([1.0, 2.0, 3.0], 0.25)
    1.5
    """
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of the values that there are; ``None`` if there are none.

    >>> spread([4.0, None, 2.0])
    Spread(n=2, median=3.0, mean=3.0, p10=2.2, p90=3.8)
    """
    some = [v for v in values if v is not None]
    if not some:
        return None
    return Spread(len(some), median(some), fmean(some), quantile(some, 0.1), quantile(some, 0.9))


def medians_by(pairs: Iterable[tuple[K, float | None]]) -> dict[K, float]:
    """The median for each key, in the keys' first order; a key without a value is left out.

    >>> medians_by([("a", 1.0), ("b", None), ("a", 3.0)])
    {'a': 2.0}
    """
    found: dict[K, list[float]] = {}
    for key, value in pairs:
        if value is not None:
            found.setdefault(key, []).append(value)
    return {key: median(values) for key, values in found.items()}


def paired_ratios(ours: Mapping[K, float], base: Mapping[K, float]) -> dict[K, float]:
    """ours / base, key by key, for the keys that both have.

    >>> paired_ratios({"a": 3.0, "b": 1.0}, {"a": 2.0, "c": 1.0})
    {'a': 1.5}
    """
    return {key: ours[key] / base[key] for key in ours if base.get(key)}


def geometric_mean(values: Iterable[float]) -> float | None:
    """exp of the mean logarithm: the mean that suits ratios. ``None`` without values.

    >>> round(geometric_mean([0.5, 2.0]), 12)
    1.0
    """
    logs = [math.log(v) for v in values if v > 0]
    return math.exp(fmean(logs)) if logs else None


def bootstrap_median(
    values: Sequence[float], *, seed: int = 0, level: float = _LEVEL, resamples: int = _RESAMPLES
) -> tuple[float, float] | None:
    """An interval for the median of what the values were drawn from; ``None`` below two values.

    Parameters
    ----------
    values
        One for each prompt: prompts are what is drawn, repeats of one prompt are not.
    seed
        The same seed gives the same interval.
    level
        Probability that the interval is to hold the median.
    resamples
        How often as many values are drawn from them with replacement.

    Source: Efron 1979, the percentile interval. With few values it is too narrow.

    Example
    -------
    >>> low, high = bootstrap_median([1.0, 1.1, 1.2, 1.3, 1.4])
    >>> 1.0 <= low < 1.2 < high <= 1.4
    True
    """
    if len(values) < 2:
        return None
    drawn = np.random.default_rng(seed).choice(
        np.asarray(values, dtype=np.float64), (resamples, len(values))
    )
    low, high = np.quantile(np.median(drawn, axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
