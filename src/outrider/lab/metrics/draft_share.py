"""How much of the decoding time goes into proposing."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["DraftShare"]


class DraftShare:
    """How much of the decoding time goes into proposing.

    draft_share = time spent proposing / time of all rounds.
    """

    name = "draft_share"
    unit = ""
    formula = "time spent proposing / time of all rounds"
    better: Better = "down"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        total_s = sum(r.total_s for r in record.rounds)
        return sum(r.draft_s for r in record.rounds) / total_s if total_s > 0 else None
