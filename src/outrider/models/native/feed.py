"""What a pass feeds, said in the frame that its steps read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

from outrider.errors import UsageError
from outrider.models.native import kernels
from outrider.models.native.architecture import Architecture
from outrider.models.native.kept import kept_with
from outrider.models.native.kernels import FRAME, MAX_ROWS
from outrider.models.native.vector import BLOCK
from outrider.protocols import Asked

__all__ = ["Feeder"]

_POSITIONS_STEP = 1024
_NONE = np.zeros(0, np.int64)


class Feeder:
    """Fills frames for one architecture; its buffers serve one pass at a time."""

    def __init__(self, a: Architecture, vocab_size: int) -> None:
        self.architecture = a
        self._vocab_size = vocab_size
        self._turned = np.zeros((2, 0, len(a.inverse_frequencies)), np.float32)
        self._turns = np.zeros((2, MAX_ROWS, len(a.inverse_frequencies)), np.float32)
        self._turns_at = [t.ctypes.data for t in self._turns]
        self._scores = np.zeros(0, np.float32)
        self._scores_at = 0

    def fill(self, frame: np.ndarray, asked: Sequence[Asked], fed: Sequence[Sequence[int]]) -> int:
        """Say in the frame what the pass feeds; returns its number of rows.

        Raises
        ------
        UsageError
            When a token is none of the model's.
        """
        row = longest = 0
        for one, tokens in zip(asked, fed, strict=True):
            cache, n = one.cache, len(tokens)
            start, before = cache.length, len(one.tokens)
            cache.reserve(start + n)
            nodes = one.fed_nodes
            chain = one.proposal.is_chain
            parents = _NONE if chain else np.array(one.proposal.parents, np.int64)
            self._turn(start + n - 1)
            known = _say_rows(
                frame, row, np.array(tokens, np.int64), self._vocab_size, cache.table, start,
                n if chain else before, start + before - nodes.start, nodes.start, parents,
                self._turned, self._turns,
            )  # fmt: skip
            if not known:
                raise UsageError(
                    f"Token ids go from 0 to {self._vocab_size - 1}; got {list(tokens)}.",
                    hint="They are another tokenizer's.",
                )
            row += n
            longest = max(longest, start + n)
        self._make_room(frame, row, longest)
        frame[FRAME.rows] = row
        frame[FRAME.cosines], frame[FRAME.sines] = self._turns_at
        return row

    def _turn(self, position: int) -> None:
        """Rotary sines and cosines up to a position, made in steps of one size: a vector
        library's result for one number may depend on how many it is given."""
        while self._turned.shape[1] <= position:
            start = self._turned.shape[1]
            step = np.arange(start, start + _POSITIONS_STEP, dtype=np.float64)
            angles = step[:, None] * self.architecture.inverse_frequencies
            both = np.stack([np.cos(angles), np.sin(angles)]) * self.architecture.rope_factor
            self._turned = np.concatenate([self._turned, both.astype(np.float32)], axis=1)

    def _make_room(self, frame: np.ndarray, rows: int, keys: int) -> None:
        """Scores of every row and head; the last block of keys is scored whole."""
        heads = self.architecture.heads
        room = -(-keys // BLOCK) * BLOCK
        if rows * heads * room > len(self._scores):
            # Half as much again, so that a growing text does not ask each time.
            self._scores = np.zeros(rows * heads * room * 3 // 2, np.float32)
            self._scores_at = self._scores.ctypes.data
        frame[FRAME.scores] = self._scores_at
        frame[FRAME.keys] = room


@njit(cache=True)
@kept_with(kernels)
def _say_rows(
    frame: Any, row: Any, tokens: Any, vocab_size: Any, table: Any, start: Any, before: Any,
    top: Any, first: Any, parents: Any, turned: Any, turns: Any,
) -> Any:  # fmt: skip
    """Of one sequence's rows: their tokens, what they see, where their keys go, and how far they
    are turned. False if a token is none.

    A row of a chain sees the slots up to its own; a node of a tree those before the tree, and its
    path. ``before`` rows are no nodes of a tree; the next is the node ``first``, and the node 0
    would lie in the slot ``top``.
    """
    for i in range(len(tokens)):
        r = row + i
        position = start + i
        if not 0 <= tokens[i] < vocab_size:
            return False
        frame[FRAME.token + r] = tokens[i]
        frame[FRAME.table + r] = table.ctypes.data
        frame[FRAME.slot + r] = position
        frame[FRAME.base + r] = position + 1
        frame[FRAME.nodes + r] = 0
        if i >= before:
            depth, node = 0, first + i - before
            while node >= 0:
                depth, node = depth + 1, parents[node]
            frame[FRAME.base + r] = top
            frame[FRAME.nodes + r] = depth
            place, node = FRAME.path + r * MAX_ROWS + depth, first + i - before
            while node >= 0:
                place -= 1
                frame[place] = top + node
                node = parents[node]
            position = top + depth - 1
        turns[:, r] = turned[:, position]
    return True
