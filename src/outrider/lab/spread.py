"""A bench on the workers of a cluster: all turns of a prompt on one, so that pairs stay pairs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.engine.cluster import Workers
from outrider.engine.engine import Engine
from outrider.engine.prompts import PromptRecord
from outrider.lab.bench import Bench, Key
from outrider.lab.configuration import Configuration
from outrider.lab.provenance import machine
from outrider.lab.record import Record

__all__ = ["MakeMeasurer", "Measurer", "groups", "spread_run"]


@dataclass(frozen=True, slots=True)
class MakeMeasurer:
    """What a worker needs to measure by itself.

    Parameters
    ----------
    target, load
        As for ``Engine.load``.
    prompts, configurations, options
        As for ``Bench``.
    """

    target: str
    load: dict[str, Any]
    prompts: Sequence[PromptRecord]
    configurations: Sequence[Configuration]
    options: dict[str, Any]

    def __call__(self) -> Measurer:
        """Load the target, and run every configuration once."""
        engine = Engine.load(self.target, **self.load)
        bench = Bench(engine, self.prompts, self.configurations, **self.options)
        bench.warm_up()
        return Measurer(bench)


class Measurer:
    """One worker's bench."""

    worker = ""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def about(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The worker's name, its machine, and what is known of the target there."""
        return self.worker, machine(), self._bench.about()

    def measure(self, prompts: Collection[int], done: Collection[Key]) -> list[Record]:
        """All that these prompts lack."""
        return [replace(one, worker=self.worker) for one in self._bench.run(done, prompts)]


def groups(prompts: int, batches: Sequence[int]) -> list[range]:
    """Prompts that may not be parted: those that share a batch, in any of the batch sizes.

    >>> groups(5, [1, 2])
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    size = math.lcm(*batches)
    return [range(i, min(i + size, prompts)) for i in range(0, prompts, size)]


def spread_run(
    team: Workers, prompts: int, batches: Sequence[int], done: Collection[Key]
) -> Iterator[Record]:
    """Measure, and give out the records of a group of prompts when it is finished."""
    jobs = [(group, [key for key in done if key[1] in group]) for group in groups(prompts, batches)]
    for _, records in team.map("measure", jobs):
        yield from records
