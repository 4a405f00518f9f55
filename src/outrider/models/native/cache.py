"""The native runtime's cache: blocks of 64 tokens, grown in steps, taken back by a length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from outrider.errors import NotEnoughMemoryError
from outrider.models.hidden import Hidden
from outrider.models.memory import available_bytes
from outrider.models.native.vector import BLOCK

__all__ = ["NativeCache", "Shape"]

_GROW_BY = 8
"""Blocks added at a time, and more as the cache grows: a quarter of what there is."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a token takes: keys and values of every layer and key head."""

    layers: int
    kv_heads: int
    width: int
    """Of a head, padded to a whole number of ``BLOCK``."""
    dtype: np.dtype[Any]
    """float16, or float32 beside float32 weights."""

    @property
    def block_numbers(self) -> int:
        """Numbers in one block of tokens."""
        return 2 * self.layers * self.kv_heads * self.width * BLOCK

    def bytes(self, tokens: int) -> int:
        """Memory for so many tokens."""
        return self.dtype.itemsize * self.block_numbers * -(-tokens // BLOCK)


class NativeCache:
    """One sequence's keys and values.

    A block holds, for each layer and key head, keys [width, 64] (side by side, as scoring
    reads them) and values [64, width]. Nothing is ever moved but the accepted path of a
    tree: growing adds blocks to a list, and taking tokens back moves ``length``.

    Parameters
    ----------
    shape
        What a token takes.
    capacity
        Most tokens that it will hold; memory for them is taken as they come.
    hidden
        Where hidden states go that a drafter asked for.

    Raises
    ------
    NotEnoughMemoryError
        When it would not fit, before anything is taken; also from ``reserve``.
    """

    def __init__(self, shape: Shape, capacity: int, hidden: Hidden | None = None) -> None:
        self.shape = shape
        self.hidden = hidden or Hidden((), 0)
        self.capacity = capacity
        self.length = 0
        self._chunks: list[np.ndarray] = []
        self.table: Int64[np.ndarray, " blocks"] = np.empty(0, np.int64)
        self.reserve(min(capacity, 1))

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens in all."""
        lacking = -(-tokens // BLOCK) - len(self.table)
        if lacking <= 0:
            return
        most = -(-max(self.capacity, tokens) // BLOCK) - len(self.table)
        blocks = min(most, max(lacking, _GROW_BY, len(self.table) // 4))
        size_bytes = blocks * self.shape.bytes(BLOCK)
        if size_bytes > (free := available_bytes()):
            raise NotEnoughMemoryError(
                f"The cache needs {size_bytes / 1e6:,.0f} MB more to hold {tokens:,} tokens; "
                f"{free / 1e6:,.0f} MB are free.",
                hint="Ask for fewer tokens, or close other programs.",
            )
        # Zeros cost nothing until they are written to.
        chunk = np.zeros((blocks, self.shape.block_numbers), self.shape.dtype)
        self._chunks.append(chunk)
        start, step = chunk.ctypes.data, self.shape.bytes(BLOCK)
        self.table = np.append(self.table, start + step * np.arange(blocks, dtype=np.int64))

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Keep ``base`` tokens and a path of the last proposal's nodes behind them."""
        for step, node in enumerate(path):
            self._move(base + node, base + step)
        self.rollback(base + len(path))

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.length = min(self.length, length)

    def _move(self, source: int, to: int) -> None:
        if source == to:
            return
        keys, values = self._block(source // BLOCK)
        into_keys, into_values = self._block(to // BLOCK)
        into_keys[..., to % BLOCK] = keys[..., source % BLOCK]
        into_values[..., to % BLOCK, :] = values[..., source % BLOCK, :]
        self.hidden.move(source, to)

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys [layers, heads, width, 64] and values [layers, heads, 64, width] of one block."""
        for chunk in self._chunks:
            if number < len(chunk):
                s = self.shape
                both = chunk[number].reshape(s.layers, s.kv_heads, 2, -1)
                keys = both[:, :, 0].reshape(s.layers, s.kv_heads, s.width, BLOCK)
                return keys, both[:, :, 1].reshape(s.layers, s.kv_heads, BLOCK, s.width)
            number -= len(chunk)
        raise IndexError(number)

    @property
    def bytes(self) -> int:
        """Memory that the blocks take."""
        return sum(chunk.nbytes for chunk in self._chunks)
