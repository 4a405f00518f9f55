"""Which pictures a page of a benchmark has, and what stands above each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from outrider.lab.stats import bootstrap_median
from outrider.lab.summary import ENOUGH_PROMPTS
from outrider.report import bench_pictures as draw
from outrider.report import verdicts
from outrider.report.figures import Arm, Change, Measured, middle, quarters
from outrider.report.page import Markup
from outrider.report.wording import percent, visible

__all__ = ["DRAWN", "Figure", "difference_groups", "groups", "hero"]

DRAWN = 6
"""Configurations in one picture, at most."""

_BANDS = 3  # lines that may have their bands drawn
_NAMED = 34  # characters of a label in a picture
_KINDS = 24  # strips in a facet


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its words.

    ``legend``: numbers and names of its lines; ``swatches``: colours and names of its areas;
    ``narrow``: the same for a small screen.
    """

    title: str
    note: str
    svg: Markup
    legend: Sequence[tuple[int, str]] = ()
    narrow: Markup | None = None
    swatches: Sequence[tuple[str, str]] = ()


def hero(run: Measured, shown: Sequence[Arm], keys: Iterator[str]) -> Figure | None:
    """The speed-ups of all prompts; ``None`` where nothing can be compared.

    ``keys``: prefixes of ids, another one for each picture of the page.
    """
    if not shown:
        return None
    middles = {
        kind: median([r for arm in shown for _, r in arm.by_kind.get(kind, ())] or [0.0])
        for kind in run.kinds
    }
    kinds = sorted(middles, key=lambda kind: -middles[kind])[:_KINDS]
    facets = [_facet(arm, kinds if len(kinds) > 1 else []) for arm in shown]
    told = "; ".join(
        f"{arm.label}: median {arm.speedup.median:.2f}, {arm.slower} of {arm.speedup.n} prompts "
        "slower"
        for arm in shown
    )
    alt = visible(f"Speed-ups over plain decoding, a dot for each prompt, by type. {told}.")
    return Figure(
        "Speed against plain decoding, every prompt a dot",
        "Right of the line a prompt is faster with a draft, left of it (diamonds) slower. The "
        "strong tick is the median, also given at the right; the bar holds the middle half.",
        Markup(draw.spread(facets, wide=True, key=next(keys), alt=alt)),
        narrow=Markup(draw.spread(facets, wide=False, key=next(keys), alt=alt)),
    )


def _facet(arm: Arm, kinds: Sequence[str]) -> draw.Facet:
    strips = [_strip("all", list(arm.ratios.items()), arm)]
    strips += [_strip(kind, arm.by_kind.get(kind, []), arm) for kind in kinds]
    side = verdicts.WORDS[arm.verdict]
    note = f"{side.sign} {side.word.lower()}"
    if arm.interval:
        note += f" ({verdicts.span(arm.interval)})"
    where = arm.label.removeprefix(arm.row.configuration).removeprefix(", ")
    note = f"{where} · {note}" if where else note
    return draw.Facet(visible(arm.row.configuration), visible(note), strips)


def _strip(label: str, some: Sequence[tuple[int, float]], arm: Arm) -> draw.Strip:
    dots = [
        draw.Dot(ratio, visible(f"{arm.names[prompt]}, {arm.kinds[prompt]}: {ratio:.2f} ×"))
        for prompt, ratio in some
    ]
    values = [ratio for _, ratio in some]
    return draw.Strip(
        _short(label, 18),
        dots,
        median(values) if values else None,
        quarters(values) if values else None,
    )


def groups(
    run: Measured, shown: Sequence[Arm], keys: Iterator[str]
) -> Iterator[tuple[str, list[Figure]]]:
    """Titles, with the pictures below each; ``shown`` are the arms that are drawn."""
    yield (
        "What becomes of drafts",
        [*_stood(shown, keys), *_sweeps(run, keys), *_stratified(shown, keys)],
    )
    yield (
        "Where the time goes",
        [*_budgets(run, shown, keys, True), *_budgets(run, shown, keys, False), *_costs(run, keys)],
    )


def _figure(
    title: str,
    note: str,
    series: Sequence[draw.Line],
    keys: Iterator[str],
    **options: Any,
) -> Iterator[Figure]:
    """A picture of lines, if there are any."""
    some = [line for line in series if len(line.points) > 1]
    if not some:
        return
    names = options.get("names", ())
    told = "; ".join(
        f"{line.label}: "
        + ", ".join(
            f"{p.y:.3g} at {names[int(p.x)] if names else format(p.x, 'g')}" for p in line.points
        )
        for line in some
    )
    bands = len(some) <= _BANDS
    svg = draw.lines(some, key=next(keys), alt=visible(f"{title}. {told}."), bands=bands, **options)
    legend = [(line.series, line.label) for line in some] if len(series) > 1 else []
    yield Figure(title, note, Markup(svg), legend=legend)


def _stood(shown: Sequence[Arm], keys: Iterator[str]) -> Iterator[Figure]:
    series = [
        draw.Line(arm.label, place, [draw.Point(*point) for point in arm.stood()])
        for place, arm in enumerate(shown)
    ]
    yield from _figure(
        "How deep drafts stand",
        "Share of rounds in which at least so many drafted tokens stood, of the rounds that "
        "drafted as many.",
        series,
        keys,
        x="position in the draft",
        y="rounds",
        percent=True,
    )


def _stratified(shown: Sequence[Arm], keys: Iterator[str]) -> Iterator[Figure]:
    """Speed-up and acceptance by parts of the work, where there are several."""
    yield from _by_part(
        shown,
        keys,
        "position",
        "Speed-up along the output",
        "In rounds that begin at these tokens of the output, the prompt’s own pass left out. "
        "Medians over prompts.",
        x="tokens of the output",
    )
    uncertainty = (
        "In rounds that begin where the target is as unsure as this: entropy in nats, by quarters "
        "of plain decoding’s tokens. "
    )
    yield from _by_part(
        shown,
        keys,
        "entropy",
        "Speed-up where the target is sure, and where not",
        uncertainty + "Medians over prompts.",
        x="entropy, nats",
    )
    yield from _by_part(
        shown,
        keys,
        "entropy",
        "Drafts kept where the target is sure, and where not",
        uncertainty + "Accepted tokens over drafted ones.",
        x="entropy, nats",
        acceptance=True,
    )


def _by_part(
    shown: Sequence[Arm],
    keys: Iterator[str],
    by: str,
    title: str,
    note: str,
    *,
    x: str,
    acceptance: bool = False,
) -> Iterator[Figure]:
    parts: list[str] = []
    series = []
    for place, arm in enumerate(shown):
        points = []
        for part in arm.strata:
            if part.by != by or part.prompts < ENOUGH_PROMPTS:
                continue
            if part.value not in parts:
                parts.append(part.value)
            at = parts.index(part.value)
            if acceptance and part.acceptance_rate is not None:
                points.append(draw.Point(at, part.acceptance_rate))
            elif not acceptance and part.speedup is not None:
                points.append(draw.Point(at, part.speedup, part.low, part.high))
        series.append(draw.Line(arm.label, place, points))
    names = [_part_name(part) for part in parts]
    yield from _figure(
        title,
        note,
        series,
        keys,
        x=x,
        y="drafts kept" if acceptance else "times plain speed",
        mark=None if acceptance else 1.0,
        percent=acceptance,
        names=names,
    )


def _part_name(part: str) -> str:
    """Short enough to stand below an axis.

    >>> _part_name("0.50 to 1.20"), _part_name("1.20 and more"), _part_name("64-127")
    ('0.50–1.20', '≥ 1.20', '64–127')
    """
    if part.endswith(" and more"):
        return f"≥ {part.removesuffix(' and more')}"
    return part.replace(" to ", "–").replace("-", "–")


def _budgets(
    run: Measured, shown: Sequence[Arm], keys: Iterator[str], per_token: bool
) -> Iterator[Figure]:
    settings = {arm.setting for arm in shown}
    arms = [arm for arm in run.arms if arm.is_plain and arm.setting in settings]
    yield from _budget_of([(arm.label, arm) for arm in [*arms, *shown]], keys, per_token=per_token)


def _budget_of(
    arms: Sequence[tuple[str, Arm]], keys: Iterator[str], *, per_token: bool
) -> Iterator[Figure]:
    rows = [
        draw.Budget(_short(label, 52), *spent)
        for label, arm in arms
        if (spent := arm.budget(per_token=per_token))
    ]
    if not rows:
        return
    told = "; ".join(
        f"{row.label}: drafting {row.draft_ms:.3g} ms, verifying {row.verify_ms:.3g} ms, the rest "
        f"{row.rest_ms:.3g} ms"
        for row in rows
    )
    title = "Time for each token" if per_token else "Time for each round"
    note = (
        "What a token that comes out has cost: a round’s time over the tokens that it emits."
        if per_token
        else "Means over all rounds. A round emits one token, and more where drafts stand."
    )
    yield Figure(
        title,
        note,
        Markup(draw.budgets(rows, key=next(keys), alt=visible(f"{title}. {told}."))),
        swatches=[("plain", "verifying"), ("ours", "drafting"), ("muted", "the rest")],
    )


def _costs(run: Measured, keys: Iterator[str]) -> Iterator[Figure]:
    costs = run.costs()
    series = [
        draw.Line(
            f"batch {batch}",
            place,
            [draw.Point(n, some.median, some.p10, some.p90) for n, some in points],
        )
        for place, (batch, points) in enumerate(costs.items())
    ]
    yield from _figure(
        "What a pass costs",
        "Milliseconds of the target’s pass by the rows that it scores: the last token and the "
        "drafts. Medians over rounds, with the band from p10 to p90.",
        series,
        keys,
        x="rows in a pass",
        y="ms",
    )


def _sweeps(run: Measured, keys: Iterator[str]) -> Iterator[Figure]:
    several = len({arm.setting for arm in run.arms}) > 1
    for (adapter, temperature, batch), families, base in run.sweeps():
        series = []
        for place, (family, arms) in enumerate(list(families.items())[:DRAWN]):
            values = {arm.length: list(arm.by_prompt("tokens_per_s").values()) for arm in arms}
            best = max(values, key=lambda length: median(values[length]))
            points = []
            for length, some in sorted(values.items(), key=lambda pair: pair[0] or 0):
                low, high = bootstrap_median(some) or (None, None)
                points.append(draw.Point(length or 0, median(some), low, high, best=length == best))
            series.append(draw.Line(f"{family}: best at {best}", place, points))
        plain = base.row.metrics["tokens_per_s"] if base else None
        title = "Speed by draft length"
        if several:
            title += f", temperature {temperature:g}, batch {batch}" + f", {adapter}" * bool(
                adapter
            )
        note = "Tokens a second, medians over prompts. The ring marks the best length"
        if len(series) == 1:
            note += f", {best}"
        yield from _figure(
            title,
            note
            + (", the line across plain decoding" if plain else "")
            + ". Where bands overlap, lengths are not told apart.",
            series,
            keys,
            x="draft length",
            y="tokens/s",
            mark=plain.median if plain else None,
        )


def difference_groups(
    pairs: Sequence[Change], second: Measured, keys: Iterator[str]
) -> Iterator[tuple[str, list[Figure]]]:
    """The same for two runs: how far apart they are, and what is behind it."""
    best = second.best_lengths(DRAWN)
    of = {id(change.second): change for change in pairs if change.gain}
    drafted = [of[id(arm)] for arm in best if id(arm) in of]
    settings = {change.second.setting for change in drafted}
    plain = [c for c in pairs if c.second.is_plain and c.second.setting in settings]
    figures = [*_both_speedups(drafted, keys), *_ratios_of([*plain, *drafted], keys)]
    if drafted:
        figures += _ratios_by_kind(drafted[0], keys)
    yield "How far apart", figures
    further = [*_both_stood(drafted[:_BANDS], keys)]
    sides = [
        (f"{arm.label} · {which}", arm)
        for change in [*plain, *drafted]
        for which, arm in (("first run", change.first), ("second run", change.second))
    ]
    yield "What is behind it", [*further, *_budget_of(sides, keys, per_token=True)]


_RUNS = [("plain", "first run"), ("ours", "second run")]


def _both_speedups(pairs: Sequence[Change], keys: Iterator[str]) -> Iterator[Figure]:
    rows = [
        (
            _short(change.second.label, 48),
            [
                _range(arm.speedup.median, arm.interval, tone)
                for arm, tone in ((change.first, "one"), (change.second, "other"))
            ],
        )
        for change in pairs
    ]
    title = "Speed-up over plain decoding, in each run"
    note = f"Medians over each run’s prompts, with {percent(0.95)} intervals."
    yield from _range_figure(title, note, rows, keys, swatches=_RUNS)


def _ratios_of(pairs: Sequence[Change], keys: Iterator[str]) -> Iterator[Figure]:
    for what, title in (
        ("speed", "Tokens a second, second run over first"),
        ("gain", "Speed-up over plain, second run over first"),
    ):
        rows = []
        for change in pairs:
            values = list(getattr(change, what).values())
            if values:
                rows.append((_short(change.second.label, 48), [_ratio(values)]))
        note = f"Medians over the prompts that both have, with {percent(0.95)} intervals."
        yield from _range_figure(title, note, rows, keys)


def _ratios_by_kind(change: Change, keys: Iterator[str]) -> Iterator[Figure]:
    by_kind: dict[str, list[float]] = {}
    for prompt, ratio in change.speed.items():
        by_kind.setdefault(change.kinds[prompt], []).append(ratio)
    if len(by_kind) > 1:
        rows = [(_short(kind, 48), [_ratio(some)]) for kind, some in list(by_kind.items())[:_KINDS]]
        title = f"The same by type of prompt: {change.second.label}"
        note = "Tokens a second, second run over first. A type with few prompts has no interval."
        yield from _range_figure(title, note, rows, keys)


def _both_stood(pairs: Sequence[Change], keys: Iterator[str]) -> Iterator[Figure]:
    for change in pairs:
        series = [
            draw.Line(name, place, [draw.Point(*point) for point in arm.stood()])
            for place, (name, arm) in enumerate(
                (("first run", change.first), ("second run", change.second))
            )
        ]
        yield from _figure(
            f"How deep drafts stand: {change.second.label}",
            "Share of rounds in which at least so many drafted tokens stood.",
            series,
            keys,
            x="position in the draft",
            y="rounds",
            percent=True,
        )


def _ratio(values: Sequence[float]) -> draw.Range:
    found = middle(values)
    return _range(median(values), found and found[1:], verdicts.tone_of(found))


def _range(estimate: float, interval: tuple[float, float] | None, tone: str) -> draw.Range:
    return draw.Range(estimate, *(interval or (estimate, estimate)), tone=tone)


def _range_figure(
    title: str,
    note: str,
    rows: Sequence[tuple[str, Sequence[draw.Range]]],
    keys: Iterator[str],
    swatches: Sequence[tuple[str, str]] = (),
) -> Iterator[Figure]:
    if not rows:
        return
    told = "; ".join(
        f"{label}: " + ", ".join(f"{r.estimate:.2f} ({r.low:.2f} to {r.high:.2f})" for r in some)
        for label, some in rows
    )
    svg = draw.ranges(rows, key=next(keys), alt=visible(f"{title}. {told}."))
    yield Figure(visible(title), note, Markup(svg), swatches=swatches)


def _short(label: str, most: int = _NAMED) -> str:
    return draw.shorten(visible(label), most)
