"""Where speculation pays: figures by kind of prompt, place in the output, entropy, temperature."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from outrider.core.trace import Round
from outrider.lab.configuration import PLAIN
from outrider.lab.record import Record
from outrider.lab.stats import bootstrap_median, medians_by, paired_ratios, quantile

__all__ = ["BY", "Stratum", "position_of", "strata"]

BY = ("kind", "position", "entropy", "temperature", "batch")
"""The ways to divide, in the order in which they are told."""

_FIRST_BUCKET = 16
_ENTROPY_BUCKETS = 4

Parts = Iterable[tuple[str, Sequence[Round], float]]
"""Of one record: a part, its rounds and its seconds."""


@dataclass(frozen=True, slots=True)
class Stratum:
    """A configuration on one part of the work.

    Parameters
    ----------
    adapter, temperature, batch
        ``None`` for the temperature or the batch that the division itself goes by.
    by, value
        The way of dividing, and the part.
    configuration
        Its label.
    prompts, tokens
        Prompts that have such a part, and the tokens emitted in it, over all repeats.
    acceptance_rate
        accepted / drafted, summed over the part; the bonus token does not count.
    tokens_per_target_call
        emitted / target calls, summed over the part; the bonus token counts.
    speedup, low, high
        As in ``summary.Speedup``, from this part alone: by kind, temperature and batch that of
        whole answers; by place and entropy of the rounds that begin there, the prompt's pass being
        in none. ``None`` for plain itself.
    slower
        Share of prompts below 1.
    """

    adapter: str
    temperature: float | None
    batch: int | None
    by: str
    value: str
    configuration: str
    prompts: int
    tokens: int
    acceptance_rate: float | None
    tokens_per_target_call: float | None
    speedup: float | None
    low: float | None
    high: float | None
    slower: float | None


def position_of(token: int) -> str:
    """The bucket of a place in the output: the first 16 tokens, then each as long as all before.

    >>> position_of(0), position_of(16), position_of(100)
    ('0-15', '16-31', '64-127')
    """
    low, high = 0, _FIRST_BUCKET
    while token >= high:
        low, high = high, 2 * high
    return f"{low}-{high - 1}"


def strata(records: Sequence[Record]) -> list[Stratum]:
    """Every configuration on every part, by each way in ``BY`` that has more than one part.

    A round belongs where it begins: a block that goes on into the next part counts as a whole for
    the first. Entropy has parts only where it was measured; its bounds are quartiles of plain
    decoding's, so that they do not depend on what is compared. Peers tell no rounds and have no
    parts.
    """
    records = [record for record in records if not record.peer]
    bounds = _entropy_bounds(records)
    ways: dict[str, Callable[[Record], Parts]] = {
        "kind": lambda r: [(r.kind, r.rounds, r.total_s)],
        "position": lambda r: _by_token(r, position_of),
        "entropy": lambda r: _by_entropy(r, bounds.get(r.adapter, ())),
        "temperature": lambda r: [(f"{r.temperature:g}", r.rounds, r.total_s)],
        "batch": lambda r: [(str(r.batch), r.rounds, r.total_s)],
    }
    return [row for by in BY for row in _divided(records, by, ways[by])]


@dataclass(slots=True)
class _Sums:
    """Of one configuration on one part."""

    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    calls: int = 0
    rates: list[tuple[tuple[int, float, int], float]] = field(default_factory=list)
    """Tokens a second, for each pair of a prompt and its request."""

    def add(self, record: Record, rounds: Sequence[Round], seconds: float) -> None:
        emitted = sum(r.emitted for r in rounds)
        self.drafted += sum(r.drafted for r in rounds)
        self.accepted += sum(r.accepted for r in rounds)
        self.emitted += emitted
        self.calls += len(rounds)
        if emitted and seconds:
            pair = record.prompt, record.temperature, record.batch
            self.rates.append((pair, emitted / seconds))


Group = tuple[str, float | None, int | None]


def _divided(
    records: Sequence[Record], by: str, parts: Callable[[Record], Parts]
) -> Iterator[Stratum]:
    found: dict[Group, dict[str, dict[str, _Sums]]] = defaultdict(dict)
    for record in records:
        temperature = None if by == "temperature" else record.temperature
        batch = None if by == "batch" else record.batch
        group = found[record.adapter, temperature, batch]
        for value, rounds, seconds in parts(record):
            by_configuration = group.setdefault(value, {})
            by_configuration.setdefault(record.configuration, _Sums()).add(record, rounds, seconds)
    for (adapter, temperature, batch), by_value in found.items():
        if len(by_value) < 2:
            continue  # the whole is told already
        for value in _ordered(by, by_value):
            plain = by_value[value].get(PLAIN, _Sums())
            for label, sums in by_value[value].items():
                ratios = list(_speedups(sums, plain)) if label != PLAIN else []
                interval = bootstrap_median(ratios)
                yield Stratum(
                    adapter=adapter,
                    temperature=temperature,
                    batch=batch,
                    by=by,
                    value=value,
                    configuration=label,
                    prompts=len({pair[0] for pair, _ in sums.rates}),
                    tokens=sums.emitted,
                    acceptance_rate=sums.accepted / sums.drafted if sums.drafted else None,
                    tokens_per_target_call=sums.emitted / sums.calls if sums.calls else None,
                    speedup=median(ratios) if ratios else None,
                    low=interval[0] if interval else None,
                    high=interval[1] if interval else None,
                    slower=sum(r < 1 for r in ratios) / len(ratios) if ratios else None,
                )


def _speedups(ours: _Sums, plain: _Sums) -> Iterable[float]:
    return paired_ratios(medians_by(ours.rates), medians_by(plain.rates)).values()


def _ordered(by: str, values: Mapping[str, object]) -> list[str]:
    """As they came, or by number."""
    if by == "kind":
        return list(values)
    return sorted(values, key=lambda value: float(value.split("-")[0].split(" ")[0]))


def _by_token(record: Record, value_of: Callable[[int], str]) -> Parts:
    """The rounds of each part, by the output index at which they begin."""
    found: dict[str, list[Round]] = defaultdict(list)
    at = 0
    for one in record.rounds:
        found[value_of(at)].append(one)
        at += one.emitted
    return [(value, some, sum(r.total_s for r in some)) for value, some in found.items()]


def _by_entropy(record: Record, bounds: Sequence[float]) -> Parts:
    if not bounds or len(record.entropies) < len(record.token_ids) or not record.rounds:
        return ()
    names = [f"{low:.2f} to {high:.2f}" for low, high in zip((0.0, *bounds), bounds, strict=False)]
    names.append(f"{bounds[-1]:.2f} and more")

    def value_of(token: int) -> str:
        # The last round may emit nothing after a stop; it began where the output ends.
        at = min(token, len(record.entropies) - 1)
        return names[sum(record.entropies[at] >= bound for bound in bounds)]

    return _by_token(record, value_of)


def _entropy_bounds(records: Iterable[Record]) -> dict[str, tuple[float, ...]]:
    """Quartiles for each adapter; equal ones, or one that nothing lies below, are left out."""
    seen: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.configuration == PLAIN:
            seen[record.adapter] += record.entropies
    shares = [i / _ENTROPY_BUCKETS for i in range(1, _ENTROPY_BUCKETS)]
    return {
        adapter: tuple(
            bound
            for bound in sorted({round(quantile(values, share), 2) for share in shares})
            if bound > min(values)
        )
        for adapter, values in seen.items()
        if values
    }
