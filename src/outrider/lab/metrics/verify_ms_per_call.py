"""What the target's pass over a draft costs."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["VerifyMsPerCall"]


class VerifyMsPerCall:
    """What the target's pass over a draft costs.

    verify_ms_per_call = time in the target's passes / target calls, the prompt's own pass left out.
    """

    name = "verify_ms_per_call"
    unit = "ms"
    formula = "time in the target's passes / target calls, the prompt's own pass left out"
    better: Better = "down"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        rounds = record.rounds
        return 1e3 * sum(r.score_s for r in rounds) / len(rounds) if rounds else None
