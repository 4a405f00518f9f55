"""An audit's outputs drawn by the workers of a cluster, on the seeds that one machine would use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.audit.sampled import (
    Compared,
    Comparer,
    Comparing,
    Draw,
    Drawing,
    Drawn,
    Pair,
    Sampler,
)
from outrider.engine.cluster import Workers
from outrider.engine.engine import Engine

__all__ = ["MakeAuditor", "spread_comparing", "spread_drawing"]

_JOBS_EACH = 8
"""Jobs for each worker: the last ones to finish wait for each other this much less."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MakeAuditor:
    """What a worker needs to draw outputs by itself.

    Parameters
    ----------
    target, load
        As for ``Engine.load``.
    prompts, request
        As for ``Samples``.
    remember
        Score no context twice.
    """

    target: str
    load: dict[str, Any]
    prompts: list[list[int]]
    request: dict[str, Any]
    remember: bool = False

    def __call__(self) -> Auditor:
        """Load the target."""
        engine = Engine.load(self.target, **self.load)
        if self.remember:
            from outrider.audit.remembered import remembering

            engine = remembering(engine)
        return Auditor(engine, self.prompts, self.request)


class Auditor:
    """One worker's engine."""

    worker = ""

    def __init__(self, engine: Engine, prompts: list[list[int]], request: dict[str, Any]) -> None:
        self._draw = Sampler(engine, prompts, request)
        self._compare = Comparer(engine, prompts, request)

    def draw(self, draws: Sequence[Draw]) -> list[Drawn]:
        """Outputs on these seeds."""
        return list(self._draw(draws))

    def compare(self, pairs: Sequence[Pair]) -> list[Compared]:
        """What decoding both ways on these seeds shows."""
        return list(self._compare(pairs))


def spread_drawing(team: Workers, count: int) -> Drawing:
    """For ``audit_samples``: ``count`` workers draw."""

    def drawing(draws: Sequence[Draw]) -> Iterator[Drawn]:
        return _in_order(team, "draw", draws, count)

    return drawing


def spread_comparing(team: Workers, count: int) -> Comparing:
    """For ``audit_tokens``: ``count`` workers decode."""

    def comparing(pairs: Sequence[Pair]) -> Iterator[Compared]:
        return _in_order(team, "compare", pairs, count)

    return comparing


def _in_order(team: Workers, method: str, work: Sequence[_T], count: int) -> Iterator[Any]:
    """Cut work into jobs, and give out the results in the work's own order."""
    size = max(1, -(-len(work) // (count * _JOBS_EACH)))
    jobs: list[tuple[Any, ...]] = [(work[i : i + size],) for i in range(0, len(work), size)]
    early: dict[int, list[Any]] = {}
    next_ = 0
    for number, results in team.map(method, jobs):
        early[number] = results
        while next_ in early:
            yield from early.pop(next_)
            next_ += 1
