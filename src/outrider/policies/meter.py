"""Prices as rounds turn out: what was measured beforehand, put right by the clock."""

from __future__ import annotations

from outrider.core.price import Price

__all__ = ["Meter"]

_MEMORY = 64.0
"""Rounds that are remembered, in effect."""

_DOUBT = 0.3
"""What the price measured beforehand weighs, in squared rows: single rounds are off by a tenth
for no reason, the price of a row by a sixth of a pass for good ones."""

_TRIALS = 4.0
"""Steps that the step measured beforehand weighs."""

_SEEN = 1.0
"""Rounds of one row that are enough, older ones counting less."""

_MOST = 1.5
"""No round counts for more than this times what it was to take: something else ran."""

_DEAREST = 1.0
"""The most that a row may cost beyond its price, in passes. Less than its price it never does: many
rows that each gave a little back would make a pass that costs nothing."""


class Meter:
    """A price that learns from the clock.

    A pass over n rows, with all that goes with it, takes u · (price(n) + a · (n - 1)) seconds: u
    those of one row, a what a row costs beyond its price, since longer texts make rows dearer, and
    so do processors that sort a vocabulary for each. A step of a drafter takes s times its price.
    a and s are fitted to the rounds so far, older ones counting less; they start at 0 and 1.

    Parameters
    ----------
    price
        As measured beforehand.

    Example
    -------
    >>> meter = Meter(Price((1, 2, 4), (1.0, 1.1, 1.3)))
    >>> for _ in range(30):
    ...     meter.took(1, 0.010)
    ...     meter.took(2, 0.013)
    >>> round(meter.of(2), 1)
    1.3
    """

    def __init__(self, price: Price) -> None:
        self._price = price
        self._more = 0.0
        self._one = 0.0
        # Sums over rounds of seconds y, price p and further rows z, and of their products.
        self._y = self._p = self._z = self._zy = self._zp = self._zz = 0.0
        self._alone = 0.0
        self._steps: dict[str, tuple[float, float]] = {}

    @property
    def knows_one_row(self) -> bool:
        """Whether one row was seen lately, if any were: else none tells what more of them cost."""
        return not self._p or self._alone >= _SEEN

    def of(self, rows: int) -> float:
        """The time of a pass over so many rows, in passes over one."""
        return self._price.of(rows) + self._more * (rows - 1)

    def step_of(self, drafter: str) -> float:
        """The time of one step of a drafter, in passes over one row."""
        taken, planned = self._steps.get(drafter, (0.0, 0.0))
        return self._price.step_of(drafter) * (taken + _TRIALS) / (planned + _TRIALS)

    @property
    def step(self) -> float:
        """The time of a step of a drafter that has no price of its own."""
        return self._price.step

    def took(self, rows: int, seconds: float) -> None:
        """Count a round that took so long but for its draft."""
        if seconds <= 0:
            return  # a clock that stood still tells nothing
        p, z, kept = self._price.of(rows), rows - 1, 1 - 1 / _MEMORY
        y = min(seconds, _MOST * self._one * self.of(rows)) if self._one else seconds
        self._y, self._p, self._z = kept * self._y + y, kept * self._p + p, kept * self._z + z
        self._zy, self._zp = kept * self._zy + z * y, kept * self._zp + z * p
        self._zz = kept * self._zz + z * z
        self._alone = kept * self._alone + (z == 0)
        # Least squares in turns for u and for a.
        self._one = self._y / (self._p + self._more * self._z)
        more = (self._zy / self._one - self._zp) / (self._zz + _DOUBT)
        self._more = min(max(more, 0.0), _DEAREST)

    def stepped(self, drafter: str, steps: int, seconds: float) -> None:
        """Count a draft: how many steps it had, and how long it took."""
        price = self._price.step_of(drafter)
        if not price or not self._one:
            return
        most = _MOST * steps * self.step_of(drafter) / price
        taken, planned = self._steps.get(drafter, (0.0, 0.0))
        kept = 1 - 1 / _MEMORY
        self._steps[drafter] = (
            kept * taken + min(seconds / (self._one * price), most),
            kept * planned + steps,
        )
