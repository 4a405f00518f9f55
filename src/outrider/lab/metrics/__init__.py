"""What is derived from a record, one file a metric; ``METRICS`` in the registry names them."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from outrider.lab.record import Record
from outrider.registry import METRICS

__all__ = ["Better", "Metric", "all_metrics"]

Better = Literal["up", "down"] | None
"""Which way is better; ``None`` where neither is by itself."""


@runtime_checkable
class Metric(Protocol):
    """One number of a generation.

    ``unit``: ``ms``, ``tokens/s``, ...; empty for a share. ``formula``: in words, and whether the
    bonus token counts, where that is a question.
    """

    name: str
    unit: str
    formula: str
    better: Better

    def of(self, record: Record) -> float | None:
        """The value; ``None`` where there is none, such as a rate without a denominator."""
        ...


def all_metrics() -> dict[str, Metric]:
    """One of each in the registry, by name.

    >>> all_metrics()["acceptance_rate"].formula
    'accepted / drafted; the bonus token does not count'
    """
    return {name: METRICS.load(name)() for name in METRICS}
