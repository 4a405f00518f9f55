"""Loops over a whole vocabulary, compiled: a library's call costs more than the loop where the
processor's caches hold a model's weights by the time a token is to be decided.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numba import float64, njit
from torch import Tensor

__all__ = ["as_floats", "best", "exponentials", "log_sum_exp", "softmax"]

_STRETCH = 256
_LEAST = -708.0
"""Below, e^x is no normal number; it counts as 0."""
_WHOLE = 1.5 * 2.0**52
"""Added to a number, it leaves the nearest whole one in the lowest bits."""
_LOG2_E = 1.4426950408889634
_LN_2, _LN_2_REST = 6.93147180369123816490e-01, 1.90821492927058770002e-10


def as_floats(values: Float[Tensor, "*n"]) -> Float[np.ndarray, "*n"]:
    """The same numbers as an array of numpy, which has no name for a half of a float32."""
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    return values.numpy(force=True)


@njit(cache=True, fastmath={"contract"})
def exponentials(values: Any, top: Any, out: Any) -> None:
    """out = e^(values - top), to about a unit in the last place, for values up to ``top``.

    e^x = 2^n e^r with |r| <= ln 2 / 2, and Taylor's polynomial of degree 13 for e^r. No branch and
    no call, so that it is done several at once.
    """
    bits = np.empty(_STRETCH, np.float64)
    whole = bits.view(np.int64)
    for start in range(0, len(values), _STRETCH):
        some, into = values[start : start + _STRETCH], out[start : start + _STRETCH]
        n = len(some)
        for i in range(n):
            x = float64(some[i]) - top
            x = x if x > _LEAST else _LEAST
            bits[i] = x * _LOG2_E + _WHOLE
        for i in range(n):
            x = float64(some[i]) - top
            x = x if x > _LEAST else _LEAST
            k = bits[i] - _WHOLE
            r = (x - k * _LN_2) - k * _LN_2_REST
            p = 1.6059043836821613e-10
            p = p * r + 2.08767569878681e-09
            p = p * r + 2.505210838544172e-08
            p = p * r + 2.755731922398589e-07
            p = p * r + 2.7557319223985893e-06
            p = p * r + 2.48015873015873e-05
            p = p * r + 1.984126984126984e-04
            p = p * r + 1.388888888888889e-03
            p = p * r + 8.333333333333333e-03
            p = p * r + 4.1666666666666664e-02
            p = p * r + 1.6666666666666666e-01
            p = p * r + 0.5
            p = p * r + 1.0
            into[i] = p * r + 1.0
        for i in range(n):
            whole[i] = (whole[i] + 1023) << 52
        for i in range(n):
            into[i] = into[i] * bits[i] if float64(some[i]) - top >= _LEAST else 0.0


@njit(cache=True, fastmath={"reassoc", "nsz"})
def _sum(values: Any) -> Any:
    total = 0.0
    for i in range(len(values)):
        total += values[i]
    return total


@njit(cache=True, fastmath={"reassoc", "nsz"})
def softmax(values: Any, top: Any, out: Any) -> Any:
    """out = ``exponentials`` over their sum; how many of them are not zero."""
    exponentials(values, top, out)
    scale, positive = 1.0 / _sum(out), 0
    for i in range(len(out)):
        out[i] *= scale
        positive += out[i] > 0.0
    return positive


@njit(cache=True)
def log_sum_exp(values: Any, top: Any) -> Any:
    """ln sum e^values, whose largest is ``top``."""
    out = np.empty(len(values), np.float64)
    exponentials(values, top, out)
    return top + np.log(_sum(out))


@njit(cache=True)
def best(values: Any, count: Any) -> Any:
    """Where the ``count`` largest are, the largest first; of equals, the earlier first."""
    count = min(count, len(values))
    places, found = np.empty(count, np.int64), np.full(count, -np.inf)
    filled = 0
    for i in range(len(values)):
        value = float64(values[i])
        if filled == count and not value > found[-1]:
            continue
        last = filled if filled < count else count - 1
        filled = last + 1
        while last > 0 and found[last - 1] < value:
            found[last], places[last] = found[last - 1], places[last - 1]
            last -= 1
        found[last], places[last] = value, i
    return places
