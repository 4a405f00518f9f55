"""One stretch of memory for all weights of a model."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["arena", "gathered"]

_ALIGNED = 64

P = TypeVar("P")


def arena(kinds: Mapping[str, tuple[torch.dtype, torch.Size]]) -> dict[str, Tensor]:
    """Zeroed tensors in one stretch of huge pages: with small ones, a pass over a model's
    weights spends a good part of its time on looking pages up.

    ``kinds`` names them with their types and shapes.
    """
    sizes = {name: dtype.itemsize * shape.numel() for name, (dtype, shape) in kinds.items()}
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // _ALIGNED) * _ALIGNED
    # Memory that other processes could share, as it is unless one says so, has small pages.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(total, 1), flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not built into this kernel
            memory.madvise(mmap.MADV_HUGEPAGE)
    return {
        name: torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=offsets[name]).view(
            shape
        )
        for name, (dtype, shape) in kinds.items()
    }


def gathered(part: P) -> P:
    """The same dataclass, its tensors side by side in an arena."""
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _with(part, find)
    places = arena({str(i): (tensor.dtype, tensor.shape) for i, tensor in enumerate(found)})
    for i, tensor in enumerate(found):
        places[str(i)].copy_(tensor)
    moved = iter(places.values())
    made: P = _with(part, lambda tensor: next(moved))
    return made


def _with(part: Any, what: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass with other tensors, in the order of its fields."""
    if isinstance(part, Tensor):
        return what(part)
    if isinstance(part, list | tuple):
        return type(part)(_with(one, what) for one in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: _with(getattr(part, f.name), what) for f in fields(part)})
    return part
