"""A draft length that follows the acceptance of the rounds before."""

from __future__ import annotations

from outrider.core.theory import best_draft_length
from outrider.errors import SamplingError, UsageError

__all__ = ["Adaptive"]


class Adaptive:
    """The length that decodes the most tokens in a unit of time, if drafts go on as they did.

    The chance that one drafted token stands is estimated from this request's own rounds: a round
    that kept a of d tokens tried a of them with success, and one more without if a < d. Older
    trials count less. Between these estimates and the cost of a token drafted and scored,
    ``theory.best_draft_length`` decides. Lengths depend on earlier rounds alone, never on what is
    about to be drawn, so every exact rule stays exact.

    After ``retry`` rounds at length 0, one token is drafted to see whether things have changed.

    Parameters
    ----------
    most
        The longest draft.
    cost
        Time of one more token, drafted and scored, in passes of the target.
    prior
        Trials that the first estimate, one half, counts for.
    memory
        Trials that are remembered, in effect.
    retry
        Rounds without a draft before the next attempt.

    Raises
    ------
    SamplingError
        When ``most`` is negative.

    Example
    -------
    >>> policy = Adaptive(8)
    >>> for _ in range(20):
    ...     policy.learn(drafted=policy.length(), accepted=policy.length())
    >>> policy.length()
    8
    """

    name = "adaptive"

    def __init__(
        self,
        most: int = 16,
        *,
        cost: float = 0.1,
        prior: float = 2.0,
        memory: float = 24.0,
        retry: int = 8,
    ) -> None:
        if most < 0:
            raise SamplingError(f"The longest draft must be 0 or more; got {most}.")
        self._most = most
        self._cost = cost
        self._memory = memory
        self._retry = retry
        self._kept = prior / 2
        self._tried = prior
        self._idle = 0

    @classmethod
    def build(cls, argument: str) -> Adaptive:
        """By name: ``adaptive``, or ``adaptive:24`` with the longest draft.

        Raises
        ------
        UsageError
            When the argument is not a number.
        """
        if argument and not argument.isdecimal():
            raise UsageError(
                f"The 'adaptive' policy takes the longest draft; got '{argument}'.",
                hint="Example: --draft-length adaptive:24",
            )
        return cls(int(argument)) if argument else cls()

    def length(self) -> int:
        """The best length at the acceptance seen so far."""
        best = best_draft_length(self._kept / self._tried, self._cost, self._most)
        return best or int(self._most > 0 and self._idle >= self._retry)

    def learn(self, drafted: int, accepted: int) -> None:
        """Count the trials of a round; a round without a draft has none."""
        if not drafted:
            self._idle += 1
            return
        self._idle = 0
        trials = accepted + (accepted < drafted)
        fade = max(0.0, 1.0 - trials / self._memory)
        self._kept = fade * self._kept + accepted
        self._tried = fade * self._tried + trials
