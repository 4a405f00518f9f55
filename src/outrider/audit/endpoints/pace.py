"""When a request may be sent, and sent again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

__all__ = ["LONGEST_HOLD_S", "Clock", "Pace", "retry_after"]

LONGEST_HOLD_S = 60.0
"""Longest wait before another try, whatever a server's Retry-After says."""


class Clock(Protocol):
    """Where time comes from; a test brings its own."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def sleep(self, seconds: float) -> object:
        """Wait."""
        ...


class Pace:
    """Hands out the moments at which requests may start, ``rate`` a second at most.

    Parameters
    ----------
    rate
        Requests a second, over all workers; ``None`` for no limit.
    now, sleep
        Seconds.

    Example
    -------
    >>> waits = []
    >>> pace = Pace(4.0, lambda: 0.0, waits.append)
    >>> for _ in range(3):
    ...     pace.wait()
    >>> waits
    [0.25, 0.5]
    """

    def __init__(
        self, rate: float | None, now: Callable[[], float], sleep: Callable[[float], object]
    ) -> None:
        self.now = now
        self._interval = 1 / rate if rate else 0.0
        self._sleep = sleep
        self._free = -math.inf
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Sleep until the next request may start."""
        with self._lock:
            now = self.now()
            at = max(now, self._free)
            self._free = at + self._interval
        if at > now:
            self._sleep(at - now)

    def hold(self, seconds: float) -> None:
        """Let no request start for some time: a server that is full is so for all workers."""
        with self._lock:
            self._free = max(self._free, self.now() + seconds)


def retry_after(value: str, otherwise: float) -> float:
    """Seconds to wait, from a number or a date, at most ``LONGEST_HOLD_S``.

    >>> retry_after("3", 0.5), retry_after("-1", 0.5), retry_after("1e9", 0.5)
    (3.0, 0.0, 60.0)
    >>> retry_after("", 0.5), retry_after("soon", 0.5)
    (0.5, 0.5)
    >>> retry_after("Wed, 21 Oct 2015 07:28:00 GMT", 0.5)
    0.0
    """
    try:
        seconds = float(value)
    except ValueError:
        try:
            at = parsedate_to_datetime(value)
            at = at.replace(tzinfo=at.tzinfo or UTC)
            seconds = (at - datetime.now(UTC)).total_seconds()
        except ValueError:
            seconds = otherwise
    if math.isnan(seconds):
        seconds = otherwise
    return min(max(seconds, 0.0), LONGEST_HOLD_S)
