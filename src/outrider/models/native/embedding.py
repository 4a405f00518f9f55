"""Embeddings of tokens, the latest of them unpacked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from outrider.models.native.weights import Weights

__all__ = ["Embedding"]

_ROOM = 4096


class Embedding:
    """Unpacks a token's row once and keeps it: a text says the same words over and over, and to
    take a few rows from between the tiles of a packed matrix costs a short pass several per cent.

    Serves one pass at a time.

    Parameters
    ----------
    weights
        The model's.
    width
        d, without padding.
    """

    def __init__(self, weights: Weights, width: int) -> None:
        self._weights = weights
        self._width = width
        self._rows = np.empty((_ROOM, width), np.float32)
        self._places: dict[int, int] = {}

    def put(self, tokens: Sequence[int], into: Float[Tensor, "rows padded"]) -> None:
        """Write the rows of some tokens into the first columns of the first rows."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._places]
        if len(self._places) + len(new) > _ROOM:
            self._places.clear()
            new = list(dict.fromkeys(tokens))
        if new:
            first = len(self._places)
            taken = self._weights.embed(new)[:, : self._width]
            self._rows[first : first + len(new)] = taken.numpy()
            self._places.update(zip(new, range(first, first + len(new)), strict=True))
        places = [self._places[token] for token in tokens]
        into.numpy()[: len(tokens), : self._width] = self._rows[places]
