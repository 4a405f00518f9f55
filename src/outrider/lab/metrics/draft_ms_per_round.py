"""What drafting costs in a round."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["DraftMsPerRound"]


class DraftMsPerRound:
    """What drafting costs in a round.

    draft_ms_per_round = time spent proposing / rounds.
    """

    name = "draft_ms_per_round"
    unit = "ms"
    formula = "time spent proposing / rounds"
    better: Better = "down"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        rounds = record.rounds
        return 1e3 * sum(r.draft_s for r in rounds) / len(rounds) if rounds else None
