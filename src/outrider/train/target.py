"""What training takes from a target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from outrider.models.native.model import NativeModel
from outrider.train.data import Example
from outrider.train.eagle import Teacher

__all__ = ["frequent_tokens", "sizes", "teacher_of"]

_STEP = 4096


def teacher_of(
    target: NativeModel, ids: Int64[Tensor, " draft_vocab"], *, embedding: bool = True
) -> Teacher:
    """A native target's embeddings and output matrix, as its own passes see them."""
    w, d = target.weights, target.hidden_size
    tokens = torch.split(torch.arange(target.vocab_size), _STEP) if embedding else ()
    table = torch.cat([torch.empty(0, d), *(w.embed(some.tolist())[:, :d] for some in tokens)])
    head = torch.cat([w.head.rows(some.tolist())[:, :d] for some in torch.split(ids, _STEP)])
    return Teacher(table, w.norm[:d].clone(), head, target.architecture.epsilon)


def frequent_tokens(
    examples: Sequence[Example], count: int, always: Sequence[int]
) -> Int64[Tensor, " count"]:
    """The tokens that come most often, ascending, and some that must be among them.

    Source: Zhao et al. 2025 (arXiv 2502.14856), FR-Spec, section 3.
    """
    found = torch.bincount(torch.cat([one.tokens for one in examples]))
    found[torch.tensor(list(always))] = found.max() + 1
    return found.argsort(descending=True, stable=True)[:count].sort().values


def sizes(examples: Sequence[Example], taps: int) -> Float[Tensor, " taps"]:
    """Root mean square of each tapped layer's hidden states; a sequence's first, which are of
    another order of magnitude in many models, are left out."""
    rows = torch.cat([one.hidden[4:].float() for one in examples[:64]])
    return rows.view(len(rows), taps, -1).square().mean((0, 2)).sqrt()
