"""Processes that torchrun started to carry a target together: the first leads, the others follow.

Apart from the rest, so that a mistake is told before torch is loaded.
"""

from __future__ import annotations

import os
from typing import Any

from outrider.errors import UsageError

__all__ = ["SPREAD", "check_started", "follows"]

SPREAD = "tp"
"""The device of a target that is spread over processes: tensor parallel."""


def _started() -> bool:
    """Whether torchrun started this process, beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def follows(device: Any) -> bool:
    """Whether this process only carries a part of a target: ``tp``, and not the first of them.

    >>> follows("cpu")
    False
    """
    return device == SPREAD and _started() and int(os.environ["RANK"]) > 0


def check_started() -> None:
    """Raise ``UsageError`` where there are no processes to spread a target over."""
    if not _started():
        raise UsageError(
            "The device 'tp' spreads a target over the processes that torchrun started; this one "
            "is alone.",
            hint="Example: torchrun --nproc-per-node 2 --no-python outrider generate ... "
            "--device tp",
        )
