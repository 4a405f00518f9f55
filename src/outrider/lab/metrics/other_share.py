"""How much of the decoding time goes into neither: judging, processors, stop logic, text."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["OtherShare"]


class OtherShare:
    """How much of the decoding time goes into neither: judging, processors, stop logic, text.

    other_share = (time of all rounds - proposing - the target's passes) / time of all rounds.
    """

    name = "other_share"
    unit = ""
    formula = "(time of all rounds - proposing - the target's passes) / time of all rounds"
    better: Better = "down"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        total_s = sum(r.total_s for r in record.rounds)
        known_s = sum(r.draft_s + r.score_s for r in record.rounds)
        return (total_s - known_s) / total_s if total_s > 0 else None
