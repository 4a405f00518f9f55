"""How much is drafted for a pass of the target."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["DraftedPerCall"]


class DraftedPerCall:
    """How much is drafted for a pass of the target.

    drafted_per_call = drafted / target calls; every node of a tree counts.
    """

    name = "drafted_per_call"
    unit = "tokens"
    formula = "drafted / target calls; every node of a tree counts"
    better: Better = None

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        rounds = record.rounds
        return sum(r.drafted for r in rounds) / len(rounds) if rounds else None
