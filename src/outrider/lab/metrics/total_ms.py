"""How long the whole answer takes."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["TotalMs"]


class TotalMs:
    """How long the whole answer takes.

    total_ms = prompt and all rounds, the time of a slow reader left out.
    """

    name = "total_ms"
    unit = "ms"
    formula = "prompt and all rounds, the time of a slow reader left out"
    better: Better = "down"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        return 1e3 * record.total_s if record.emitted else None
