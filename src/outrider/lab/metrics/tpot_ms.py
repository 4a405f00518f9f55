"""The pace after the first token."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["TimePerOutputToken"]


class TimePerOutputToken:
    """The pace after the first token.

    tpot_ms = (whole time - time to first token) / (emitted - 1).
    """

    name = "tpot_ms"
    unit = "ms"
    formula = "(whole time - time to first token) / (emitted - 1)"
    better: Better = "down"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        emitted = record.emitted
        return 1e3 * (record.total_s - record.ttft_s) / (emitted - 1) if emitted > 1 else None
