"""Hidden states that a model sets aside for a drafter, one row for each token in its cache."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.errors import UsageError

__all__ = ["Hidden", "check_taps"]

_FEWEST = 256


def check_taps(taps: tuple[int, ...], layers: int, name: str) -> None:
    """Raise ``UsageError`` when hidden states are wanted of a layer that there is not."""
    if wrong := [tap for tap in taps if not 0 <= tap < layers]:
        raise UsageError(
            f"Hidden states of layer {wrong[0]} are wanted; '{name}' has layers 0 to {layers - 1}.",
            hint="The draft was made for another target.",
        )


class Hidden:
    """What some layers made of each token of one sequence, side by side.

    Rows lie where the cache has its slots: taken back by the cache's length, and moved with it.

    Parameters
    ----------
    taps
        The layers, from 0; a layer's hidden states are what it hands to the next.
    width
        Of one layer's hidden states, d.

    Example
    -------
    >>> hidden = Hidden((0, 2), 3)
    >>> hidden.put(0, torch.ones(4, 6))
    >>> hidden.first(2).shape
    torch.Size([2, 6])
    """

    def __init__(self, taps: tuple[int, ...], width: int) -> None:
        self.taps = taps
        # Kept by numpy: a tensor made in inference mode could not be written to outside it.
        self._rows = np.empty((0, len(taps) * width), np.float32)

    @staticmethod
    def bytes(taps: tuple[int, ...], width: int, tokens: int) -> int:
        """Most memory for so many tokens: rows grow by doubling."""
        return 4 * len(taps) * width * max(_FEWEST, 2 * tokens)

    def put(
        self, start: int, rows: Float[Tensor, "n widths"] | Float[np.ndarray, "n widths"]
    ) -> None:
        """Rows of the tokens from a slot on; those behind them mean nothing any more."""
        if not self.taps:
            return
        end = start + len(rows)
        if end > len(self._rows):
            room = max(_FEWEST, 2 * len(self._rows), end)
            more = np.zeros((room, self._rows.shape[1]), np.float32)
            more[:start] = self._rows[:start]
            self._rows = more
        self._rows[start:end] = rows if isinstance(rows, np.ndarray) else rows.numpy(force=True)

    def move(self, source: int, to: int) -> None:
        """Make one slot's row another's."""
        if self.taps:
            self._rows[to] = self._rows[source]

    def first(self, length: int) -> Float[Tensor, "length widths"]:
        """The rows of the first so many slots."""
        return torch.from_numpy(self._rows[:length])
