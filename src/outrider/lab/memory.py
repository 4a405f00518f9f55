"""Memory by what takes it: the target's weights, the draft, caches, and the most at any time."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import psutil
import torch

__all__ = ["cache_bytes", "peak_bytes", "tensor_bytes"]

Held = dict[int, int]
"""Bytes of each piece of memory by its address: what two parts share counts once."""


def tensor_bytes(part: Any, *, beside: Any = None) -> int | None:
    """Bytes of the tensors that a model or a drafter holds; ``None`` where it holds none.

    What ``beside`` holds too is left out: a draft head shares its target's embedding.

    Example
    -------
    >>> tensor_bytes([torch.zeros(5), torch.zeros(5).numpy()]), tensor_bytes("nothing")
    (40, None)
    """
    shared = _held(beside)
    own = {place: size for place, size in _held(part).items() if place not in shared}
    return sum(own.values()) or None


def cache_bytes(cache: Any) -> int | None:
    """Bytes that a cache has taken; ``None`` where that is not known."""
    told = getattr(cache, "bytes", None)
    return int(told) if isinstance(told, int) else tensor_bytes(cache)


def peak_bytes(device: torch.device | str) -> int | None:
    """Most memory so far: of a GPU since its counter was set back, else of this process."""
    place = torch.device(device)
    if place.type == "cuda":
        return torch.cuda.max_memory_allocated(place)
    if place.type != "cpu":
        return None
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows keeps it elsewhere
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0)) or None
    peak = getrusage(RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _held(part: Any) -> Held:
    found: Held = {}
    seen: set[int] = set()
    todo = [part]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            if storage.device.type != "meta":
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, np.ndarray):
            while isinstance(one.base, np.ndarray):
                one = one.base
            found[one.ctypes.data] = one.nbytes
        else:
            todo.extend(_inside(one))
    found.pop(0, None)  # where nothing is held
    return found


def _inside(one: Any) -> Iterable[Any]:
    """What an object holds, where it is a container, a module of torch or a part of Outrider."""
    if isinstance(one, torch.nn.Module):
        return [*one.parameters(), *one.buffers()]
    if isinstance(one, Mapping):
        return one.values()
    if isinstance(one, list | tuple):
        return one
    owner = type(one).__module__.partition(".")[0]
    if isinstance(one, type) or owner not in ("outrider", "transformers"):
        return ()
    return _attributes(one)


def _attributes(one: Any) -> Iterator[Any]:
    yield from getattr(one, "__dict__", {}).values()
    for cls in type(one).__mro__:
        for name in getattr(cls, "__slots__", ()):
            yield getattr(one, name, None)
