"""What the first of several processes says to the others.

Every decision is the lead's: what is drafted, how long, which token comes. Two processes that
each decided for themselves could part at a near-tie or over a measured time, and would then wait
for each other for ever.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist

from outrider.errors import ModelError, OutriderError

__all__ = ["Line", "line"]

_PATIENCE = timedelta(days=365)
"""A server may have nothing to do for long; a process that dies is noticed at once."""


class Line:
    """What the lead says to the others, in the order in which it does it itself.

    A command is plain JSON. The lead does what it says within ``saying``, the others after
    ``hear``, so that the sums over all processes meet. Commands within a command are parts of it
    and are not said.
    """

    def __init__(self) -> None:
        self.lead = dist.get_rank() == 0
        self.gone: deque[int] = deque()
        """Numbers of what the lead has dropped, told with its next command."""
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._turn = RLock()
        self._depth = self._last = 0
        self._broken = False

    def number(self) -> int:
        """A new name for something that all processes hold."""
        with self._turn:
            self._last += 1
            return self._last

    @contextmanager
    def saying(self, do: str, **what: Any) -> Iterator[None]:
        """Say a command, and do it in the body.

        Raises
        ------
        ModelError
            When an earlier command broke off, so that the processes are out of step.
        """
        with self._turn:
            if not self._depth:
                self._say({"do": do, **what})
            self._depth += 1
            try:
                yield
            except OutriderError:
                raise  # a refusal, which the others come to as well
            except BaseException:
                self._broken = True
                raise
            finally:
                self._depth -= 1

    def end(self) -> None:
        """Let the others go; nothing can be said after that."""
        with self._turn:
            if not self._broken:
                self._say({"do": "end"})
                dist.destroy_process_group()
                self._broken = True

    def hear(self) -> dict[str, Any]:
        """The lead's next command."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        data = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        told: dict[str, Any] = json.loads(data.numpy().tobytes())
        return told

    def most(self, value: int) -> int:
        """The largest of what the processes have."""
        found = torch.tensor([value])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return int(found)

    def _say(self, command: dict[str, Any]) -> None:
        if self._broken:
            raise ModelError(
                "A pass broke off, so the processes that carry the target are out of step.",
                hint="Start them again.",
            )
        gone = [self.gone.popleft() for _ in range(len(self.gone))]
        data = bytearray(json.dumps(command | {"gone": gone}).encode())
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._group)
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._group)


@cache
def line() -> Line:
    """The one line of this process; made with the first target that is spread."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    made = Line()
    if made.lead:
        atexit.register(made.end)
    return made
