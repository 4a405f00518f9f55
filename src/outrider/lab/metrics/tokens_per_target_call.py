"""What a pass of the target gives."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["TokensPerTargetCall"]


class TokensPerTargetCall:
    """What a pass of the target gives.

    tokens_per_target_call = emitted / target calls; the bonus token counts; plain decoding has 1.
    """

    name = "tokens_per_target_call"
    unit = "tokens"
    formula = "emitted / target calls; the bonus token counts; plain decoding has 1"
    better: Better = "up"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        rounds = record.rounds
        return sum(r.emitted for r in rounds) / len(rounds) if rounds else None
