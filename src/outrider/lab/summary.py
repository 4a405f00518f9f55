"""What a run's records come to: speed-ups over plain decoding, and all else, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Literal

from outrider.lab.configuration import PLAIN
from outrider.lab.metrics import all_metrics
from outrider.lab.record import BARE, Record, Run
from outrider.lab.stats import (
    Spread,
    bootstrap_median,
    geometric_mean,
    medians_by,
    paired_ratios,
    quantile,
    spread,
)
from outrider.lab.strata import Stratum, strata

__all__ = [
    "CLEARLY_SLOWER",
    "ENOUGH_PROMPTS",
    "Memory",
    "Parted",
    "Row",
    "Same",
    "Speedup",
    "Summary",
    "Verdict",
    "same_tokens_promised",
    "summarize",
]  # fmt: skip

CLEARLY_SLOWER = 0.97
"""Below this a prompt counts as more than 3 % slower."""

ENOUGH_PROMPTS = 6
"""With fewer, no word is given: all of five lie on one side of the median by chance in one case of
16, all of six in one of 32."""

_ROUGHNESS = ("", "ids", "usage", "chunks")
"""From what a peer's tokens are counted, the surest first."""

Verdict = Literal["pays", "costs", "unclear", "too few prompts"]


@dataclass(frozen=True, slots=True)
class Speedup:
    """Tokens a second over those of plain decoding, prompt by prompt, the prompt's pass counted.

    The one definition of a speed-up in the lab: on the terminal, on pages and in JSON.

    Parameters
    ----------
    n
        Prompts that both have finished.
    median, low, high
        Over prompts, and its 95 % interval (``None`` below two prompts).
    mean, geometric_mean, p10, p90
        Over prompts.
    slower, clearly_slower
        Shares of prompts below 1, and more than 3 % below.
    worst, worst_prompt
        The lowest ratio, and the number of its prompt.
    verdict
        ``pays`` where the interval lies above 1, ``costs`` where below, else ``unclear``.
    """

    n: int
    median: float
    low: float | None
    high: float | None
    mean: float
    geometric_mean: float | None
    p10: float
    p90: float
    slower: float
    clearly_slower: float
    worst: float
    worst_prompt: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Parted:
    """Where an output parts from plain decoding's."""

    prompt: int
    repeat: int
    position: int


@dataclass(frozen=True, slots=True)
class Same:
    """Outputs that have the very tokens of plain decoding with the same seed.

    ``promised``: greedily, and under the greedy and coupled rules, they all should where the
    runtime's numbers are the same in any block; elsewhere only the law is the same.
    """

    compared: int
    same: int
    promised: bool
    parted: tuple[Parted, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, ``None`` where unknown.

    Weights of the target; what the drafter holds beside them; the target's cache at the end of an
    answer (median); the most in all: on a GPU while this configuration worked, else of the whole
    process.
    """

    weights_bytes: int | None
    draft_bytes: int | None
    cache_bytes: float | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration at one temperature and batch size, on one target.

    ``metrics``: each metric's spread over prompts, the median of a prompt's repeats standing for
    it; ``None`` where no record has a value. ``speedup`` and ``same`` are ``None`` for plain
    decoding. A ``peer`` is another program: its tokens are compared at temperature 0, where it
    tells any, and nothing is promised of them; ``failed`` are prompts and reasons of answers that
    it did not give; ``counted`` is from what its tokens are known.
    """

    adapter: str
    temperature: float
    batch: int
    configuration: str
    drafter: str
    rule: str
    prompts: int
    records: int
    metrics: dict[str, Spread | None]
    speedup: Speedup | None
    same: Same | None
    memory: Memory
    peer: bool = False
    failed: tuple[tuple[int, str], ...] = ()
    counted: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures: for the terminal, for pages and for scripts.

    Parameters
    ----------
    conditions
        All that the figures depend on.
    metrics
        Of each metric its unit, formula and which way is better.
    rows
        Each group (target, temperature, batch size) in its order, plain decoding first.
    strata
        The same by parts of the work.
    unsteadiness
        Median over prompts of (slowest − fastest) / median of plain decoding's times over
        repeats: below it, differences of one prompt say nothing. ``None`` without repeats.
    finished, planned
        Generations.
    """

    conditions: dict[str, Any]
    metrics: dict[str, dict[str, str | None]]
    rows: tuple[Row, ...]
    strata: tuple[Stratum, ...]
    unsteadiness: float | None
    finished: int
    planned: int | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def same_tokens_promised(rule: str, temperature: float) -> bool:
    """Whether plain decoding's very tokens are promised, and not its law alone."""
    return temperature == 0 or rule in ("greedy", "coupled")


def summarize(run: Run) -> Summary:
    """Derive every figure from a run's records."""
    metrics = all_metrics()
    targets = run.conditions.get("targets", {})
    asked = ("configurations", "peers")
    named = [PLAIN, *(one["label"] for kind in asked for one in run.conditions.get(kind, ()))]
    groups: dict[tuple[str, float, int], list[Record]] = defaultdict(list)
    for record in run.records:
        groups[record.adapter, record.temperature, record.batch].append(record)
    return Summary(
        conditions=run.conditions,
        metrics={
            name: {"unit": m.unit, "formula": m.formula, "better": m.better}
            for name, m in metrics.items()
        },
        rows=tuple(
            row
            for (adapter, *_), records in groups.items()
            for row in _rows(records, metrics, targets.get(adapter or BARE, {}), named)
        ),
        strata=tuple(strata(run.records)),
        unsteadiness=_unsteadiness(run.records),
        finished=len(run.records),
        planned=run.conditions.get("planned"),
    )


def _rows(
    group: Sequence[Record],
    metrics: Mapping[str, Any],
    about: Mapping[str, Any],
    named: Sequence[str],
) -> Iterator[Row]:
    by_label: dict[str, list[Record]] = defaultdict(list)
    for record in group:
        by_label[record.configuration].append(record)
    plain = by_label.get(PLAIN, [])

    def place(label: str) -> tuple[bool, bool, int]:
        # Orders are shuffled, so the first to be finished says nothing: plain first, peers last.
        return by_label[label][0].peer, label not in named, [*named, label].index(label)

    for label in sorted(by_label, key=place):
        records = by_label[label]
        first = records[0]
        yield Row(
            adapter=first.adapter,
            temperature=first.temperature,
            batch=first.batch,
            configuration=label,
            drafter=first.drafter,
            rule=first.rule,
            prompts=len({record.prompt for record in records}),
            records=len(records),
            metrics={
                name: spread(medians_by((r.prompt, metric.of(r)) for r in records).values())
                for name, metric in metrics.items()
            },
            speedup=_speedup(records, plain, metrics) if label != PLAIN else None,
            same=_same(records, plain) if label != PLAIN else None,
            memory=_memory(records, about),
            peer=first.peer,
            failed=tuple((r.prompt, r.failure) for r in records if r.failure),
            counted=max((r.counted for r in records), key=_ROUGHNESS.index),
        )


def _speedup(
    ours: Sequence[Record], plain: Sequence[Record], metrics: Mapping[str, Any]
) -> Speedup | None:
    rate = metrics["tokens_per_s"].of
    by_prompt = paired_ratios(
        *(medians_by((r.prompt, rate(r)) for r in side) for side in (ours, plain))
    )
    if not by_prompt:
        return None
    values = list(by_prompt.values())
    interval = bootstrap_median(values)
    worst = min(by_prompt, key=lambda prompt: by_prompt[prompt])
    return Speedup(
        n=len(values),
        median=median(values),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        mean=fmean(values),
        geometric_mean=geometric_mean(values),
        p10=quantile(values, 0.1),
        p90=quantile(values, 0.9),
        slower=sum(v < 1 for v in values) / len(values),
        clearly_slower=sum(v < CLEARLY_SLOWER for v in values) / len(values),
        worst=by_prompt[worst],
        worst_prompt=worst,
        verdict=_verdict(len(values), interval),
    )


def _verdict(prompts: int, interval: tuple[float, float] | None) -> Verdict:
    if prompts < ENOUGH_PROMPTS or interval is None:
        return "too few prompts"
    if interval[0] > 1:
        return "pays"
    return "costs" if interval[1] < 1 else "unclear"


def _same(ours: Sequence[Record], plain: Sequence[Record]) -> Same | None:
    peer = ours[0].peer
    if peer:
        ours = [r for r in ours if r.token_ids and r.temperature == 0]
        if not ours:
            return None
    theirs = {(r.prompt, r.repeat): r.token_ids for r in plain}
    pairs = [(r, theirs[r.prompt, r.repeat]) for r in ours if (r.prompt, r.repeat) in theirs]
    parted = tuple(
        Parted(record.prompt, record.repeat, _first_difference(record.token_ids, tokens))
        for record, tokens in pairs
        if record.token_ids != tokens
    )
    return Same(
        compared=len(pairs),
        same=len(pairs) - len(parted),
        promised=not peer and same_tokens_promised(ours[0].rule, ours[0].temperature),
        parted=parted,
    )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    places = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, min(len(one), len(other)))


def _memory(records: Sequence[Record], about: Mapping[str, Any]) -> Memory:
    caches = [r.cache_bytes for r in records if r.cache_bytes is not None]
    peaks = [r.peak_bytes for r in records if r.peak_bytes is not None]
    return Memory(
        weights_bytes=about.get("weights_bytes"),
        draft_bytes=(about.get("draft_bytes") or {}).get(records[0].configuration),
        cache_bytes=median(caches) if caches else None,
        peak_bytes=max(peaks) if peaks else None,
    )


def _unsteadiness(records: Sequence[Record]) -> float | None:
    times: dict[tuple[str, float, int, int], list[float]] = defaultdict(list)
    for r in records:
        if r.configuration == PLAIN and r.total_s > 0:
            times[r.adapter, r.temperature, r.batch, r.prompt].append(r.total_s)
    shares = [(max(t) - min(t)) / median(t) for t in times.values() if len(t) > 1]
    return median(shares) if shares else None
