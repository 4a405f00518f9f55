"""How long until something is seen."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["TimeToFirstToken"]


class TimeToFirstToken:
    """How long until something is seen.

    ttft_ms = time to the end of the first round, which gives the first token.
    """

    name = "ttft_ms"
    unit = "ms"
    formula = "time to the end of the first round, which gives the first token"
    better: Better = "down"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        return 1e3 * record.ttft_s if record.emitted else None
