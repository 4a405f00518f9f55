"""Passes of the target that a token takes."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["TargetCallsPerToken"]


class TargetCallsPerToken:
    """Passes of the target that a token takes.

    target_calls_per_token = target calls / emitted; the bonus token counts; plain decoding has 1.
    """

    name = "target_calls_per_token"
    unit = "calls"
    formula = "target calls / emitted; the bonus token counts; plain decoding has 1"
    better: Better = "down"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        emitted = sum(r.emitted for r in record.rounds)
        return len(record.rounds) / emitted if emitted else None
