"""Passes captured once and replayed: a whole pass is then one launch, not several hundred."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, runtime_checkable

import torch

__all__ = ["Captured", "Direct", "Graphs", "graphs_for"]

_WARM_UPS = 2
"""Libraries choose their kernels and take their workspaces in the first runs."""

Captured = dict[Hashable, Any]
"""Passes over one sequence's memory, by what else is fixed in them."""


@runtime_checkable
class Graphs(Protocol):
    """Runs a pass, which reads and writes at the same addresses each time."""

    def run(self, held: Captured, key: Hashable, step: Callable[[], None]) -> None:
        """Do what ``step`` does, over what its buffers hold now.

        Parameters
        ----------
        held
            Where captured passes are kept; they live as long as the memory that they work on.
        key
            Tells passes over that memory apart.
        step
            The pass. It waits for nothing on the device and asks it for no value.
        """
        ...


class Direct:
    """Where nothing can be captured: the pass itself, each time."""

    def run(self, held: Captured, key: Hashable, step: Callable[[], None]) -> None:
        """Run it."""
        step()


class CudaGraphs:
    """Captures a pass as a CUDA graph when it first comes, and replays it.

    What passes make in between lies in one pool for all over one memory: replays take turns, and
    none leaves anything there for another. Results go to buffers outside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, held: Captured, key: Hashable, step: Callable[[], None]) -> None:
        """Capture it if it is new, then replay it: capturing runs nothing."""
        with torch.cuda.device(self._device):
            if key not in held:
                pool = next((graph.pool() for graph in held.values()), None)
                held[key] = self._capture(step, pool)
            held[key].replay()

    def _capture(self, step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            # The coming pass itself: it writes again what it has written.
            for _ in range(_WARM_UPS):
                step()
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the device meanwhile: a draft model's, say.
        with torch.cuda.graph(
            graph, pool=pool, stream=self._side, capture_error_mode="thread_local"
        ):
            step()
        return graph


def graphs_for(device: torch.device) -> Graphs:
    """What a device can do."""
    return CudaGraphs(device) if device.type == "cuda" else Direct()
