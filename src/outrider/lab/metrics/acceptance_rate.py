"""How many drafted tokens stood."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["AcceptanceRate"]


class AcceptanceRate:
    """How many drafted tokens stood.

    acceptance_rate = accepted / drafted; the bonus token does not count.
    """

    name = "acceptance_rate"
    unit = ""
    formula = "accepted / drafted; the bonus token does not count"
    better: Better = "up"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        drafted = sum(r.drafted for r in record.rounds)
        return sum(r.accepted for r in record.rounds) / drafted if drafted else None
