"""How much of the decoding time the target takes."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["VerifyShare"]


class VerifyShare:
    """How much of the decoding time the target takes.

    verify_share = time in the target's passes / time of all rounds.
    """

    name = "verify_share"
    unit = ""
    formula = "time in the target's passes / time of all rounds"
    better: Better = None

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        total_s = sum(r.total_s for r in record.rounds)
        return sum(r.score_s for r in record.rounds) / total_s if total_s > 0 else None
