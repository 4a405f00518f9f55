"""What a drafted token costs, whether it stands or not."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["DraftMsPerToken"]


class DraftMsPerToken:
    """What a drafted token costs, whether it stands or not.

    draft_ms_per_token = time spent proposing / drafted; every node of a tree counts.
    """

    name = "draft_ms_per_token"
    unit = "ms"
    formula = "time spent proposing / drafted; every node of a tree counts"
    better: Better = "down"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        drafted = sum(r.drafted for r in record.rounds)
        return 1e3 * sum(r.draft_s for r in record.rounds) / drafted if drafted else None
