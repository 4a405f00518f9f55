"""Speed as a user meets it."""

from __future__ import annotations

from outrider.lab.metrics import Better
from outrider.lab.record import Record

__all__ = ["TokensPerS"]


class TokensPerS:
    """Speed as a user meets it.

    tokens_per_s = emitted / whole time, the prompt's pass counted.
    """

    name = "tokens_per_s"
    unit = "tokens/s"
    formula = "emitted / whole time, the prompt's pass counted"
    better: Better = "up"

    def of(self, record: Record) -> float | None:
        """The value for one generation; ``None`` where it has none."""
        return record.emitted / record.total_s if record.emitted and record.total_s > 0 else None
