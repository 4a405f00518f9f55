"""The search for what is fastest here: many ways on few prompts, then few ways on many.

Every way is timed on a prompt in turn with plain decoding, in a shuffled order, and judged by the
ratio of the two times on that prompt. After each round the slower half is dropped, and what is
left gets twice the prompts, until half of them are used. The winner is then judged by the other
half alone: who wins among many has also been lucky. Plain decoding is what stays when nothing is
faster for certain.

Source: successive halving, Karnin et al. 2013, "Almost optimal exploration in multi-armed bandits",
section 3; pairing each arm with plain decoding on the same prompt is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import NormalDist, fmean, stdev
from time import monotonic

from outrider.engine.engine import Engine
from outrider.engine.profile import Choice
from outrider.lab.configuration import Configuration, check_labels
from outrider.lab.stats import geometric_mean
from outrider.models.heads.folder import shipped_head

__all__ = ["ENOUGH", "Clock", "Found", "Round", "Standing", "candidates", "tune"]

Clock = Callable[[Configuration, int], float]
"""From a way to decode and a prompt's number to seconds a token."""

ENOUGH = 6
"""Prompts to judge a way by."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How one way did: its speed against plain decoding, prompt by prompt.

    ``speedup`` is the geometric mean; ``low`` and ``high`` its interval, where there are six
    prompts or more.
    """

    configuration: Configuration
    ratios: tuple[float, ...]
    speedup: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Round:
    """A round of the search: who took part, the fastest first, and who is dropped after it.

    ``prompts`` are those of the round, ``seen`` all up to its end.
    """

    prompts: int
    seen: int
    standings: tuple[Standing, ...]
    dropped: tuple[Configuration, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What the search came to.

    Parameters
    ----------
    best
        The fastest way, or ``None``: nothing is faster than plain decoding for certain.
    leader
        The fastest one, certain or not, as the last prompts have it.
    rounds
        All of them.
    stopped
        Whether time ran out before the search was over.
    """

    best: Standing | None
    leader: Standing
    rounds: list[Round] = field(default_factory=list)
    stopped: bool = False

    def choice(self, level: float) -> Choice:
        """For a profile."""
        if self.best is None:
            return Choice("none", prompts=len(self.leader.ratios), level=level)
        c, s = self.best.configuration, self.best
        return Choice(
            c.drafter, c.rule, c.draft_length, s.speedup, s.low, s.high, len(s.ratios), level
        )


def tune(
    ways: Sequence[Configuration],
    clock: Clock,
    prompts: int,
    *,
    first: int = 4,
    level: float = 0.95,
    seed: int = 0,
    deadline_s: float = math.inf,
    told: Callable[[Round], None] | None = None,
) -> Found:
    """Search for the way that takes the least time.

    Parameters
    ----------
    ways
        To decode, besides plain decoding.
    clock
        Times one of them, or plain decoding, on a prompt. It is asked once for each.
    prompts
        How many there are.
    first
        Prompts of the first round; each further one has twice as many.
    level
        Of intervals, and so of certainty.
    seed
        Of the order of prompts, of turns and of resampling.
    deadline_s
        Seconds after which no further round begins; without the last, nothing is certain.
    told
        Called after each round.

    Raises
    ------
    UsageError
        When two ways have one label.

    Example
    -------
    >>> ways = [Configuration("ngram"), Configuration("suffix")]
    >>> times = {"plain": 1.0, "ngram": 0.8, "suffix": 0.5}
    >>> found = tune(ways, lambda way, prompt: times[way.label], prompts=16)
    >>> found.best.configuration.label, found.best.speedup
    ('suffix', 2.0)
    """
    plain = Configuration.plain()
    check_labels([plain, *ways])
    chance, began = Random(seed), monotonic()
    order = list(range(prompts))
    chance.shuffle(order)
    ratios: dict[str, list[float]] = {way.label: [] for way in ways}
    rounds = list[Round]()

    def late() -> bool:
        return monotonic() - began > deadline_s

    def play(alive: Sequence[Configuration], some: Sequence[int], keep: int) -> list[Standing]:
        for prompt in some:
            turn = [plain, *alive]
            chance.shuffle(turn)
            seconds = {way.label: clock(way, prompt) for way in turn}
            for way in alive:
                ratios[way.label].append(seconds[plain.label] / seconds[way.label])
        found = [_standing(way, ratios[way.label], level) for way in alive]
        found.sort(key=lambda s: -s.speedup)
        dropped = tuple(s.configuration for s in found[keep:])
        seen = sum(r.prompts for r in rounds) + len(some)
        rounds.append(Round(len(some), seen, tuple(found), dropped))
        if told is not None:
            told(rounds[-1])
        return found[:keep]

    alive, seen, half = list(ways), 0, max(1, prompts // 2)
    while len(alive) > 1 and seen < half and not (rounds and late()):
        until = min(half, seen + max(1, first) * 2 ** len(rounds))
        keep = 1 if until == half else math.ceil(len(alive) / 2)
        alive = [s.configuration for s in play(alive, order[seen:until], keep)]
        seen = until
    leader = rounds[-1].standings[0] if rounds else _standing(alive[0], (), level)
    fresh = order[seen:]
    if len(alive) > 1 or (rounds and late()) or not fresh:
        return Found(None, leader, rounds, stopped=True)
    winner = alive[0]
    ratios[winner.label].clear()
    (leader,) = play([winner], fresh, 1)
    return Found(leader if leader.low > 1.0 else None, leader, rounds)


def _standing(way: Configuration, ratios: Sequence[float], level: float) -> Standing:
    low, high = _interval(ratios, level)
    return Standing(way, tuple(ratios), geometric_mean(ratios) or 1.0, low, high)


def _interval(ratios: Sequence[float], level: float) -> tuple[float, float]:
    """Student's interval for the geometric mean; unbounded where there are too few values."""
    n = len(ratios)
    if n < ENOUGH:
        return 0.0, math.inf
    logs = [math.log(ratio) for ratio in ratios]
    half = _student(level, n - 1) * stdev(logs) / math.sqrt(n)
    return math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)


def _student(level: float, freedom: int) -> float:
    """The quantile of Student's t that a two-sided interval takes, to a per cent for 5 degrees of
    freedom and better beyond.

    Source: Abramowitz and Stegun 1964, 26.7.5, its first three terms beyond the normal's.

    >>> round(_student(0.95, 10), 2), round(_student(0.95, 1000), 2)
    (2.23, 1.96)
    """
    z, v = NormalDist().inv_cdf((1 + level) / 2), freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def candidates(engine: Engine, greedy: bool) -> Iterator[Configuration]:
    """What there is to choose from without files of the user's: lookups, and the head that comes
    with the target, each with its adaptive length and with some fixed ones."""
    drafters = ["ngram", "suffix"]
    if shipped_head(engine.model.name) is not None:
        drafters += ["eagle", "eagle#chain", "suffix:match=3+eagle", "suffix:match=2+eagle#chain"]
    for drafter in drafters:
        for length in ("auto", 2, 4, 8):
            yield Configuration(drafter, "auto", length)
        if not greedy and "tree" not in drafter:
            chain = drafter if drafter != "eagle" else "eagle#chain"
            if chain == drafter:
                yield Configuration(drafter, "rejection", "auto")
