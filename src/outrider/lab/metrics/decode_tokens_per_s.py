"""Speed once the prompt is read."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["DecodeTokensPerS"]


class DecodeTokensPerS:
    """Speed once the prompt is read.

    decode_tokens_per_s = emitted / (whole time - the prompt's pass).
    """

    name = "decode_tokens_per_s"
    unit = "tokens/s"
    formula = "emitted / (whole time - the prompt's pass)"
    better: Better = "up"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        emitted, decode_s = sum(r.emitted for r in record.rounds), record.total_s - record.prefill_s
        return emitted / decode_s if emitted and decode_s > 0 else None
