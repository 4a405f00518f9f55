"""What the machine calls itself."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

__all__ = ["cpu_name"]


@cache
def cpu_name() -> str:
    """The processor's name as Linux tells it, or what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
