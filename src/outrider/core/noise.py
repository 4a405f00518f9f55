"""Noise that is a function of a key and a counter, and the race that is run on it.

Compiled: a token of plain decoding costs one race, and a drafted one two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float64, njit, uint64

__all__ = ["finish_first", "uniform"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_STRETCH = 128
"""Probabilities looked at together: in a large vocabulary hardly any is above the split."""


@njit(cache=True)
def uniform(key: Any, counter: Any) -> Any:
    """A number in (0, 1) for each counter: SplitMix64 at any place of its stream.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    x = uint64(key) + uint64(counter) * _GOLDEN
    x = (x ^ (x >> uint64(30))) * _MIX_1
    x = (x ^ (x >> uint64(27))) * _MIX_2
    x = x ^ (x >> uint64(31))
    # 52 bits and a half: with one bit more, the largest would round to 1.
    return (float64(x >> uint64(12)) + 0.5) * 2.0**-52


@njit(cache=True, error_model="numpy")
def finish_first(key: Any, ids: Any, probs: Any, size: Any, split: Any, count: Any) -> Any:
    """Who finishes first, and up to ``count`` in all of those that come close, in their order.

    See ``SeededChooser`` for what is raced: weights above ``split`` on noise of the token's own
    counter, and what is left of each on the points of a Poisson process, from counter -1 down.

    Parameters
    ----------
    key
        Of the place, uint64.
    ids, probs
        A law: int64 tokens, ascending, and their float64 probabilities.
    size
        Tokens in the vocabulary.
    split
        Where weights are split.
    count
        Most runners to name.
    """
    first, finish = np.empty(count, np.int64), np.full(count, np.inf)
    for start in range(0, len(probs), _STRETCH):
        stretch = probs[start : start + _STRETCH]
        if not _any_above(stretch, split):
            continue
        for i in range(len(stretch)):
            if stretch[i] > split:
                token = ids[start + i]
                time = -np.log(uniform(key, token)) / (stretch[i] - split)
                if time < finish[-1]:
                    _enter(first, finish, token, time)
    # Points a block at a time, and all of a block: who is named does not depend on how a block
    # is gone through.
    now, block, counter = 0.0, 8 + size // 256, -1
    while now < split * finish[0]:
        gaps = 0.0
        for i in range(block):
            gaps -= np.log(uniform(key, counter - i))
            token = np.int64(uniform(key, counter - block - i) * size)
            place = token if len(ids) == size else np.searchsorted(ids, token)
            if place < len(ids) and ids[place] == token:
                time = (now + gaps / size) / min(probs[place], split)
                if time < finish[-1]:
                    _enter(first, finish, token, time)
        now += gaps / size
        counter -= 2 * block
    return first[: np.sum(np.isfinite(finish))]


@njit(cache=True)
def _any_above(values: Any, least: Any) -> Any:
    """Without a way out before the end, which vectors do not have."""
    found = False
    for i in range(len(values)):
        found |= values[i] > least
    return found


@njit(cache=True)
def _enter(first: Any, finish: Any, token: Any, time: Any) -> None:
    """Put a runner in its place among the first; whoever runs twice is there once."""
    place = 0
    while finish[place] <= time:
        if first[place] == token:
            return
        place += 1
    last = place
    while last < len(first) - 1 and np.isfinite(finish[last]) and first[last] != token:
        last += 1
    for i in range(last, place, -1):
        first[i], finish[i] = first[i - 1], finish[i - 1]
    first[place], finish[place] = token, time
