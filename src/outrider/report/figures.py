"""What a page of a benchmark draws, as numbers: beside the summary, what single rounds tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from outrider.core.trace import Round
from outrider.errors import LogError
from outrider.lab.configuration import PLAIN
from outrider.lab.metrics import all_metrics
from outrider.lab.record import Log, Record, Run
from outrider.lab.stats import Spread, bootstrap_median, medians_by, paired_ratios, quantile, spread
from outrider.lab.strata import Stratum
from outrider.lab.summary import ENOUGH_PROMPTS, Row, Speedup, Summary, summarize
from outrider.lab.wording import prompt_name

__all__ = ["Arm", "Change", "Measured", "Setting", "changes", "measured", "middle", "quarters"]

_LENGTH = re.compile(r",?draft-length=(\d+)(?=,|$)")
_ROUNDS = 20  # fewest rounds behind a point of a line

Setting = tuple[str, float, int]
"""Adapter, temperature and batch size: what decoding with a draft and without has in common."""


@dataclass(frozen=True)
class Arm:
    """One row of a summary, with the records behind it.

    Parameters
    ----------
    row
        Its figures.
    label
        Its configuration, with what of its setting others do not share.
    family, length
        What it shares with configurations that differ in the draft length alone, and that length
        if it is a number.
    records, plain
        Its generations, and those of plain decoding in the same setting.
    names
        Of prompts.
    strata
        Its parts, as the summary has them.
    """

    row: Row
    label: str
    family: str
    length: int | None
    records: Sequence[Record] = field(repr=False)
    plain: Sequence[Record] = field(repr=False)
    names: Mapping[int, str] = field(repr=False)
    strata: Sequence[Stratum] = field(repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether it is the baseline."""
        return self.row.configuration == PLAIN

    @property
    def setting(self) -> Setting:
        """What it shares with its baseline."""
        return self.row.adapter, self.row.temperature, self.row.batch

    @property
    def speedup(self) -> Speedup:
        """Against plain decoding; only asked of arms in ``Measured.drafted``."""
        assert self.row.speedup is not None
        return self.row.speedup

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the median speed-up, where the prompts are enough for one."""
        speed = self.row.speedup
        if speed is None or speed.low is None or speed.high is None or speed.n < ENOUGH_PROMPTS:
            return None
        return speed.low, speed.high

    @property
    def verdict(self) -> str:
        """``pays``, ``costs``, ``unclear`` or ``too few prompts``; empty for plain decoding."""
        return self.row.speedup.verdict if self.row.speedup else ""

    @cached_property
    def kinds(self) -> dict[int, str]:
        """Each prompt's type."""
        return {one.prompt: one.kind for one in self.records}

    @cached_property
    def ratios(self) -> dict[int, float]:
        """Each prompt's tokens a second over plain decoding's, as the summary counts them."""
        if self.is_plain:
            return {}
        return paired_ratios(self.by_prompt("tokens_per_s"), _by_prompt(self.plain, "tokens_per_s"))

    @cached_property
    def by_kind(self) -> dict[str, list[tuple[int, float]]]:
        """Prompts and their speed-ups, by type."""
        found: dict[str, list[tuple[int, float]]] = {}
        for prompt, ratio in self.ratios.items():
            found.setdefault(self.kinds[prompt], []).append((prompt, ratio))
        return found

    @property
    def slower(self) -> int:
        """Prompts that plain decoding is faster on."""
        return sum(ratio < 1 for ratio in self.ratios.values())

    @property
    def rounds(self) -> Iterator[Round]:
        """All of its rounds."""
        for one in self.records:
            yield from one.rounds

    def by_prompt(self, metric: str) -> dict[int, float]:
        """A metric's median for each prompt, over repeats."""
        return _by_prompt(self.records, metric)

    def stood(self) -> list[tuple[int, float]]:
        """Share of rounds in which at least so many tokens stood, of those that drafted as many.

        A tree counts by its nodes, of which only those on one path can stand.
        """
        drafted = [r for r in self.rounds if r.drafted]
        found: list[tuple[int, float]] = []
        for depth in range(1, max((r.drafted for r in drafted), default=0) + 1):
            some = [r.accepted >= depth for r in drafted if r.drafted >= depth]
            # A line ends where there is little behind it, or where nothing stands any more.
            if len(some) < min(_ROUNDS, len(drafted)) or (found and found[-1][1] == 0):
                break
            found.append((depth, fmean(some)))
        return found

    def budget(self, *, per_token: bool) -> tuple[float, float, float] | None:
        """Mean milliseconds for drafting, verifying and the rest, for a round or a token."""
        rounds = list(self.rounds)
        count = sum(r.emitted for r in rounds) if per_token else len(rounds)
        if not count:
            return None
        draft, verify = (1e3 * sum(getattr(r, n) for r in rounds) for n in ("draft_s", "score_s"))
        rest = max(0.0, 1e3 * sum(r.total_s for r in rounds) - draft - verify)
        return draft / count, verify / count, rest / count


@dataclass(frozen=True)
class Measured:
    """A run, its summary and its arms."""

    summary: Summary
    arms: Sequence[Arm]

    @property
    def conditions(self) -> Mapping[str, Any]:
        """All that the figures depend on."""
        return self.summary.conditions

    @property
    def drafted(self) -> list[Arm]:
        """All arms that can be compared with plain decoding, the fastest first; no peers."""
        some = [arm for arm in self.arms if arm.row.speedup and not arm.row.peer]
        return sorted(some, key=lambda arm: -arm.speedup.median)

    @property
    def kinds(self) -> list[str]:
        """Types of prompts, in the order in which they came."""
        return list(dict.fromkeys(kind for arm in self.arms for kind in arm.kinds.values()))

    def best_lengths(self, most: int) -> list[Arm]:
        """Of each family and setting the fastest arm, so many at most."""
        best: dict[tuple[str, Setting], Arm] = {}
        for arm in self.drafted:
            best.setdefault((arm.family, arm.setting), arm)
        return list(best.values())[:most]

    def sweeps(self) -> Iterator[tuple[Setting, dict[str, list[Arm]], Arm | None]]:
        """For each setting: families of which several draft lengths were run, and the baseline."""
        for setting in dict.fromkeys(arm.setting for arm in self.arms):
            families: dict[str, list[Arm]] = {}
            some = [arm for arm in self.arms if arm.setting == setting]
            for arm in some:
                if arm.length is not None:
                    families.setdefault(arm.family, []).append(arm)
            several = {name: arms for name, arms in families.items() if len(arms) > 1}
            if several:
                yield setting, several, next((arm for arm in some if arm.is_plain), None)

    def costs(self) -> dict[int, list[tuple[int, Spread]]]:
        """For each batch size: rows in a verify pass, and its milliseconds."""
        times: dict[int, dict[int, list[float]]] = {}
        for arm in self.arms:
            rows = times.setdefault(arm.row.batch, {})
            for one in arm.rounds:
                rows.setdefault(one.drafted + 1, []).append(1e3 * one.score_s)
        return {
            batch: [
                (n, some)
                for n, values in sorted(rows.items())
                if len(values) >= _ROUNDS and (some := spread(values)) is not None
            ]
            for batch, rows in sorted(times.items())
        }


@dataclass(frozen=True)
class Change:
    """One arm in two runs: second over first, prompt by prompt.

    Parameters
    ----------
    first, second
        The arm in each. Prompts are the same where their names are.
    """

    first: Arm
    second: Arm

    @cached_property
    def speed(self) -> dict[str, float]:
        """Tokens a second, second over first."""
        return paired_ratios(_named(self.second, "speed"), _named(self.first, "speed"))

    @cached_property
    def gain(self) -> dict[str, float]:
        """Speed-ups over each run's own plain decoding, second over first."""
        return paired_ratios(_named(self.second, "gain"), _named(self.first, "gain"))

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Each prompt's type, by its name."""
        return {self.second.names[prompt]: kind for prompt, kind in self.second.kinds.items()}

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; a ratio without enough prompts for its interval is ``None``."""
        told: dict[str, Any] = {"configuration": self.second.row.configuration}
        told |= zip(("adapter", "temperature", "batch"), self.second.setting, strict=True)
        for name, ratios in (("tokens_per_s_ratio", self.speed), ("speedup_ratio", self.gain)):
            found = middle(ratios.values())
            told[name] = found and dict(zip(("median", "low", "high"), found, strict=True))
        return told | {"prompts": len(self.speed)}


def measured(log: Log | Run | Measured) -> Measured:
    """All that a page shows of a run; what is that already is returned.

    Raises
    ------
    LogError
        When there is no measurement in it, or it is no log.

    Example
    -------
    >>> one = Record("plain", 0, "chat", 0, 1, 0.0, 1, 3, [5], "p", "length")
    >>> measured(Run({"target": "toy"}, [one])).arms[0].label
    'plain'
    """
    if isinstance(log, Measured):
        return log
    run = log.run() if isinstance(log, Log) else log
    if not run.records:
        where = f"'{log.path}'" if isinstance(log, Log) else "The log"
        raise LogError(
            f"{where} has conditions, and no measurement yet.",
            hint="Let outrider bench go on until a prompt is done.",
        )
    summary = summarize(run)
    return Measured(summary, list(_arms(run, summary)))


def changes(first: Measured, second: Measured) -> list[Change]:
    """The arms that both runs have, in the second's order."""
    ours = {(arm.row.configuration, arm.setting): arm for arm in first.arms}
    found = (
        Change(ours[key], arm)
        for arm in second.arms
        if (key := (arm.row.configuration, arm.setting)) in ours
    )
    return [change for change in found if change.speed]


def middle(values: Iterable[float]) -> tuple[float, float, float] | None:
    """Median and 95 % interval; ``None`` for fewer prompts than an interval takes."""
    some = list(values)
    interval = bootstrap_median(some) if len(some) >= ENOUGH_PROMPTS else None
    return (quantile(some, 0.5), *interval) if interval else None


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """The middle half's ends.

    >>> quarters([1.0, 2.0, 3.0])
    (1.5, 2.5)
    """
    return quantile(values, 0.25), quantile(values, 0.75)


def _arms(run: Run, summary: Summary) -> Iterator[Arm]:
    records: dict[tuple[str, Setting], list[Record]] = {}
    for one in run.records:
        setting = one.adapter, one.temperature, one.batch
        records.setdefault((one.configuration, setting), []).append(one)
    names = {one.prompt: prompt_name(run.conditions, one.prompt) for one in run.records}
    made_of = {one["label"]: one for one in run.conditions.get("configurations", ())}
    several = [
        len({getattr(row, name) for row in summary.rows}) > 1
        for name in ("temperature", "batch", "adapter")
    ]
    for row in summary.rows:
        told = (f"temperature {row.temperature:g}", f"batch {row.batch}", row.adapter or "bare")
        label = ", ".join(
            [row.configuration, *(text for text, on in zip(told, several, strict=True) if on)]
        )
        family, length = _family(row.configuration, made_of.get(row.configuration))
        setting = row.adapter, row.temperature, row.batch
        yield Arm(
            row,
            label,
            family,
            length,
            records[row.configuration, setting],
            records.get((PLAIN, setting), []),
            names,
            [s for s in summary.strata if _of(s, row)],
        )


def _family(label: str, made_of: Mapping[str, Any] | None) -> tuple[str, int | None]:
    """What configurations that differ in the draft length alone share, and that length."""
    if made_of and "drafter" in made_of:
        parts = [made_of["drafter"]]
        if made_of.get("rule", "auto") != "auto":
            parts.append(f"rule={made_of['rule']}")
        length = made_of.get("draft_length")
        return ",".join(parts), length if isinstance(length, int) else None
    found = _LENGTH.search(label)
    return _LENGTH.sub("", label), int(found[1]) if found else None


def _of(stratum: Stratum, row: Row) -> bool:
    return (
        stratum.configuration == row.configuration
        and stratum.adapter == row.adapter
        and stratum.temperature in (None, row.temperature)
        and stratum.batch in (None, row.batch)
    )


def _by_prompt(records: Iterable[Record], metric: str) -> dict[int, float]:
    of = all_metrics()[metric].of
    return medians_by((one.prompt, of(one)) for one in records)


def _named(arm: Arm, what: str) -> dict[str, float]:
    values = arm.ratios if what == "gain" else arm.by_prompt("tokens_per_s")
    return {arm.names[prompt]: value for prompt, value in values.items()}
