"""What a pass of the target costs by the number of rows it scores, and a draft by its steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["NOMINAL", "Price"]


@dataclass(frozen=True, slots=True)
class Price:
    """Times in passes: 1 is the target's pass over one row, which is plain decoding.

    Parameters
    ----------
    rows, passes
        At some numbers of rows, ascending from 1, the time of one pass; in between along straight
        lines, beyond the last along the last one. More rows never cost less.
    step
        Time of one step of a drafter that is not in ``steps``: one more token of depth.
    steps
        The same by the drafter's name.

    Example
    -------
    >>> price = Price((1, 2, 4), (1.0, 1.0, 1.5))
    >>> price.of(2), price.of(3), price.of(6)
    (1.0, 1.25, 2.0)
    """

    rows: tuple[int, ...] = (1, 2)
    passes: tuple[float, ...] = (1.0, 1.03)
    step: float = 0.0
    steps: Mapping[str, float] = field(default_factory=dict)

    def of(self, rows: int) -> float:
        """The time of a pass over so many rows."""
        after = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[after - 1], self.rows[after]
        y0, y1 = self.passes[after - 1], self.passes[after]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)

    def step_of(self, drafter: str) -> float:
        """The time of one step of a drafter."""
        return self.steps.get(drafter, self.step)

    @classmethod
    def measured(cls, seconds: Mapping[int, float]) -> Price:
        """From seconds by number of rows, 1 and another one among them."""
        rows = tuple(sorted(seconds))
        highest, passes = 0.0, []
        for n in rows:
            highest = max(highest, seconds[n])
            passes.append(highest / seconds[rows[0]])
        return cls(rows, tuple(passes))


NOMINAL = Price((1, 2, 4, 8, 16), (1.0, 1.02, 1.15, 1.5, 2.5), step=0.08)
"""For decisions that must be the same on every machine, since the text depends on them: between
a processor with byte dot products and one without."""
