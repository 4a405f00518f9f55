"""The logprobs that two servers report, compared token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.audit.endpoints.answers import SIDES, Answer, Side

__all__ = ["LogprobComparison", "LogprobGap", "compare_logprobs", "shown"]

_TOLERANCE = 0.5
"""In nats. Two servers that round differently are some hundredths apart; half a nat is a factor
of 1.6 in probability."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """One token's logprobs, in nats, by both servers: after which tokens of which prompt."""

    prompt: int
    prefix: tuple[str, ...]
    token: str
    plain: float
    speculative: float
    difference: float


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    """Reported logprobs of the same tokens after the same tokens.

    Parameters
    ----------
    compared
        Tokens in their places that both servers reported a logprob for.
    largest
        The largest absolute difference; ``None`` if none was compared.
    tolerance
        In nats; beyond it the servers differ.
    told
        A sentence for each server whose logprobs cannot be right; they are not compared.
    """

    compared: int = 0
    largest: LogprobGap | None = None
    tolerance: float = _TOLERANCE
    told: tuple[str, ...] = ()

    @property
    def different(self) -> bool:
        """Whether the largest difference is beyond the tolerance."""
        return self.largest is not None and self.largest.difference > self.tolerance


def compare_logprobs(answers: Sequence[Answer]) -> LogprobComparison:
    """Compare what both servers say of the same token in the same place.

    Where a server said several things of it, those that are furthest apart are compared.
    """
    if told := tuple(filter(None, (_implausible(side, answers) for side in SIDES))):
        return LogprobComparison(told=told)
    nodes: dict[tuple[int, str], int] = {}  # a tree of tokens; the root of a prompt is negative
    ranges: dict[Side, dict[int, tuple[float, float]]] = {side: {} for side in SIDES}
    for answer in answers:
        node, found = -1 - answer.prompt, ranges[answer.side]
        for token, logprob in zip(answer.tokens or (), answer.logprobs or (), strict=False):
            node = nodes.setdefault((node, token), len(nodes))
            if logprob is not None and _plausible(logprob):
                low, high = found.get(node, (logprob, logprob))
                found[node] = min(low, logprob), max(high, logprob)
    plain, ours = ranges["plain"], ranges["speculative"]
    both = sorted(plain.keys() & ours.keys())
    if not both:
        return LogprobComparison()
    difference, a, b, node = max(
        (
            (abs(a - b), a, b, node)
            for node in both
            for a, b in zip(plain[node], reversed(ours[node]), strict=True)
        ),
        key=lambda gap: gap[0],
    )
    places, path = list(nodes), []
    while node >= 0:
        node, token = places[node]
        path.append(shown(token))
    last, *before = path
    gap = LogprobGap(-1 - node, tuple(reversed(before)), last, a, b, difference)
    return LogprobComparison(len(both), gap)


def shown(text: str) -> str:
    """Fit to be printed: half a surrogate pair is not."""
    return text.encode(errors="backslashreplace").decode()


def _plausible(logprob: float) -> bool:
    return math.isfinite(logprob) and logprob < 1e-3  # rounding may leave a little above 0


def _implausible(side: Side, answers: Sequence[Answer]) -> str | None:
    found = [n for a in answers if a.side == side for n in a.logprobs or ()]
    if found and all(n is None or not math.isfinite(n) or n >= 0 for n in found):
        return (
            f"The {side} server's {len(found)} logprobs are all 0, positive or no numbers, so "
            "they were not compared."
        )
    return None
