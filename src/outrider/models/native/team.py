"""The threads that run a pass: torch's own OpenMP team, so that nothing fights over the cores.

An idle OpenMP thread spins for milliseconds in case more work comes. Two pools on the same cores
would therefore take turns at waiting; one pool, called through the OpenMP library that torch has
loaded, costs a few microseconds a pass.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_info

from outrider.models.native.kernels import drive

__all__ = ["Team", "team"]


@dataclass(frozen=True, slots=True)
class Team:
    """Addresses of the functions that a pass needs, and the one that starts it."""

    barrier: int
    thread_number: int
    team_size: int
    _start: Any

    def run(self, program: int) -> None:
        """Run a program on as many threads as torch uses."""
        self._start(drive.address, program, torch.get_num_threads(), 0)


@dataclass(frozen=True, slots=True)
class Alone:
    """One thread, where torch came without an OpenMP library of GNU's interface."""

    barrier = thread_number = team_size = 0

    def run(self, program: int) -> None:
        """Run a program on this thread."""
        ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(drive.address)(
            program, 0, 0
        )


@cache
def team() -> Team | Alone:
    """Torch's threads, or the one that asks.

    LLVM's and Intel's OpenMP libraries offer GNU's interface too.
    """
    home = Path(torch.__file__).parent
    found = [lib["filepath"] for lib in threadpool_info() if lib["user_api"] == "openmp"]
    for path in sorted(found, key=lambda path: home not in Path(path).parents):
        library = ctypes.CDLL(path)
        try:
            start, barrier = library.GOMP_parallel, library.GOMP_barrier
            number, size = library.omp_get_thread_num, library.omp_get_num_threads
        except AttributeError:
            continue
        start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        start.restype = None
        places = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (barrier, number, size)]
        return Team(places[0], places[1], places[2], start)
    return Alone()
