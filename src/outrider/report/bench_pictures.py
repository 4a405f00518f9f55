"""The pictures of a benchmark: speed-ups prompt by prompt, time, and lines of all sorts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.report.svg import (
    ALARM,
    CHARACTER,
    DOUBT,
    GOOD,
    INK,
    LINE,
    MUTED,
    OURS,
    PLAIN,
    SERIES,
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    columns,
    sketch,
)

__all__ = [
    "MARKERS",
    "Budget",
    "Dot",
    "Facet",
    "Line",
    "Point",
    "Range",
    "Strip",
    "budgets",
    "lines",
    "ranges",
    "shorten",
    "spread",
]

MARKERS = ("o", "s", "^", "D", "v", "P")
"""Of the lines in ``SERIES``: shapes tell them apart where colours do not."""

_WIDTH = 360.0  # of a picture that has others beside it
_WIDE, _NARROW = 1080.0, 352.0  # of the one that stands alone
_TICK = 34.0  # least width between two ticks
_TICKS = (
    (0.25, 0.5, 2.0, 4.0, 8.0, 16.0),
    (0.1, 0.7, 1.5, 3.0, 6.0, 12.0),
    (0.8, 0.9, 1.1, 1.25),
    (0.85, 0.95, 1.05, 1.15),
)
"""Those of the first row are set first, then what there is room for."""

_PLACES = 8  # ticks along a line, one for each point

Axes = Any


@dataclass(frozen=True, slots=True)
class Dot:
    """One prompt's speed-up, and what a pointer that rests on it is told."""

    ratio: float
    title: str


@dataclass(frozen=True, slots=True)
class Strip:
    """All prompts of one type, with their median and its neighbours at a quarter to each side."""

    label: str
    dots: Sequence[Dot]
    median: float | None
    quarters: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Facet:
    """One configuration: a title, a line below it, and its strips, the same ones in each facet."""

    title: str
    note: str
    strips: Sequence[Strip]


@dataclass(frozen=True, slots=True)
class Budget:
    """Milliseconds that go into something, by what they are spent on."""

    label: str
    draft_ms: float
    verify_ms: float
    rest_ms: float

    @property
    def all_ms(self) -> float:
        """Their sum."""
        return self.draft_ms + self.verify_ms + self.rest_ms


@dataclass(frozen=True, slots=True)
class Point:
    """A place on a line, with where the truth may lie; ``best`` gets a ring."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    best: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """``series`` is its number among the page's colours and shapes."""

    label: str
    series: int
    points: Sequence[Point] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Range:
    """An estimate with where the truth may lie; ``tone`` is faster, slower, unclear, one, other."""

    estimate: float
    low: float
    high: float
    tone: str


_TONES = {
    "faster": (GOOD, "o"),
    "slower": (ALARM, "D"),
    "unclear": (DOUBT, "s"),
    "one": (PLAIN, "s"),
    "other": (OURS, "o"),
}


def spread(facets: Sequence[Facet], *, wide: bool, key: str, alt: str) -> str:
    """Every prompt a dot on a logarithmic scale of speed-ups, configurations side by side.

    Parameters
    ----------
    facets
        With the same strips in the same order.
    wide
        Up to three facets in a row, for a desk; otherwise one below the other, for a hand.
    key, alt
        As in ``svg.sketch``.
    """
    across = {1: 1, 2: 2, 4: 2}.get(len(facets), 3) if wide else 1
    down = math.ceil(len(facets) / across)
    strips = len(facets[0].strips)
    width, size = (_WIDE, 13.0) if wide else (_NARROW, 11.5)
    row, head, foot, gap, number = (30.0 if wide else 27.0), 52.0, 30.0, 14.0, 40.0
    longest = max(columns(strip.label) for strip in facets[0].strips)
    left = min(0.4 * width, 14 + CHARACTER * size / 11.5 * longest * 0.92)
    inner = row * strips
    height = down * (head + inner + foot)
    each = (width - left - 4) / across
    ratios = [dot.ratio for facet in facets for strip in facet.strips for dot in strip.dots]
    low, high = min(0.9, *ratios) / 1.08, max(1.12, *ratios) * 1.08
    titles: dict[str, str] = {}

    def place(figure: Any) -> None:
        for number_, facet in enumerate(facets):
            x, y = left + each * (number_ % across), height - inner
            y -= head + (number_ // across) * (head + inner + foot)
            axes = figure.add_axes(
                (x / width, y / height, (each - gap - number) / width, inner / height)
            )
            _facet(
                axes, facet, low, high, size, named=number_ % across == 0, titles=titles,
                prefix=f"f{number_}", width=each - gap - number, row=row,
            )  # fmt: skip

    return sketch(width, height, place, key=key, alt=alt, titles=titles)


def _facet(
    axes: Axes,
    facet: Facet,
    low: float,
    high: float,
    size: float,
    *,
    named: bool,
    titles: dict[str, str],
    prefix: str,
    width: float,
    row: float,
) -> None:
    per_unit = math.log(high / low) / width
    axes.axvspan(low, 1.0, color=ALARM, alpha=0.07, linewidth=0)
    axes.axvline(1.0, color=INK, linewidth=1.3)
    for at, strip in enumerate(facet.strips):
        if strip.median is None or strip.quarters is None:
            continue
        axes.hlines([at], *strip.quarters, color=INK, linewidth=9, alpha=0.13)
        offsets = _swarm([dot.ratio for dot in strip.dots], 7.5 * per_unit, 5.2 / row)
        for index, (dot, offset) in enumerate(zip(strip.dots, offsets, strict=True)):
            name = f"{prefix}-{at}-{index}"
            titles[name] = dot.title
            slower = dot.ratio < 1
            axes.plot(
                [dot.ratio],
                [at + offset],
                "D" if slower else "o",
                color=ALARM if slower else GOOD,
                markersize=5.2 if slower else 6.2,
                markeredgewidth=0,
                alpha=0.72,
                gid=name,
            )
        axes.vlines([strip.median], at - 0.36, at + 0.36, color=INK, linewidth=2.4, zorder=4)
        axes.annotate(
            f"{strip.median:.2f}",
            (1, at),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=size,
            fontweight="bold" if at == 0 else "normal",
            color=ALARM if strip.median < 1 else INK,
        )
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(len(facet.strips) - 0.5, -0.5)
    axes.axhline(0.5, color=LINE, linewidth=1.0)
    axes.grid(axis="x", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    _ratio_axis(axes, low, high, width)
    labels = [strip.label for strip in facet.strips] if named else [""] * len(facet.strips)
    axes.set_yticks(range(len(labels)), labels, fontsize=size)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", length=3, labelsize=size - 1)
    _bare(axes)
    top = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    title, note = (
        shorten(text, int((width + 40) / (share * size)))
        for text, share in ((facet.title, 0.66), (facet.note, 0.5))
    )
    axes.annotate(title, (0, 1), xytext=(0, 24), fontsize=size + 1, fontweight="bold", **top)
    axes.annotate(note, (0, 1), xytext=(0, 7), fontsize=size - 0.5, color=MUTED, **top)


def shorten(text: str, most: int) -> str:
    """A text of so many characters at most.

    >>> shorten("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def _swarm(ratios: Sequence[float], near: float, step: float) -> list[float]:
    """Offsets that keep dots from hiding each other: each to the middle, or else beside it.

    >>> _swarm([1.0, 1.0, 1.0, 2.0], 0.1, 0.2)
    [0.0, 0.2, -0.2, 0.0]
    """
    placed: list[tuple[float, float]] = []
    offsets: dict[int, float] = {}
    ways = [0.0]
    for level in range(1, max(1, int(0.4 / step)) + 1):
        ways += [level * step, -level * step]
    for index in sorted(range(len(ratios)), key=lambda i: ratios[i]):
        x = math.log(ratios[index])
        taken = [offset for other, offset in placed if abs(other - x) < near]
        # A full row starts over: dots then lie on each other, and are seen to.
        free = [way for way in ways if way not in taken] or [
            min(ways, key=lambda way: (taken.count(way), abs(way)))
        ]
        offsets[index] = free[0]
        placed.append((x, free[0]))
    return [offsets[index] for index in range(len(ratios))]


def budgets(rows: Sequence[Budget], *, key: str, alt: str) -> str:
    """Bars of drafting, verifying and the rest, each below its label; ``key``, ``alt`` as above."""
    most = max(row.all_ms for row in rows) or 1.0

    def draw(axes: Axes) -> None:
        for at, row in enumerate(rows):
            left = 0.0
            for value, colour in (
                (row.verify_ms, PLAIN),
                (row.draft_ms, OURS),
                (row.rest_ms, MUTED),
            ):
                axes.barh([at], [value], left=left, height=0.4, color=colour, linewidth=0)
                left += value
            _beside(axes, left, at, f"{left:.3g} ms" if left < 1000 else f"{left:.0f} ms")
        axes.set_xlim(0, 1.24 * most)
        axes.xaxis.set_major_locator(MaxNLocator(5))

    return _below_labels([row.label for row in rows], draw, key=key, alt=alt)


def ranges(rows: Sequence[tuple[str, Sequence[Range]]], *, key: str, alt: str) -> str:
    """Ratios with their intervals below a label, on a logarithmic scale with 1 marked.

    Parameters
    ----------
    rows
        A label and one range, or two to compare.
    key, alt
        As in ``svg.sketch``.
    """
    every = [one for _, some in rows for one in some]
    low = min(0.93, *(one.low for one in every)) / 1.05
    high = max(1.08, *(one.high for one in every)) * 1.05
    high *= (high / low) ** 0.18  # room for the figures at the right

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        for at, (_, some) in enumerate(rows):
            axes.barh([at], [1 - low], left=low, height=0.56, color=ALARM, alpha=0.07, linewidth=0)
            axes.vlines([1.0], at - 0.28, at + 0.28, color=INK, linewidth=1.2)
            for shift, one in zip(_shifts(len(some)), some, strict=True):
                colour, marker = _TONES[one.tone]
                axes.hlines([at + shift], [one.low], [one.high], color=colour, linewidth=2.2)
                axes.plot([one.estimate], [at + shift], marker, color=colour, markersize=6)
                _beside(axes, one.high, at + shift, f"{one.estimate:.2f}")
        _ratio_axis(axes, low, high, _WIDTH - 28)

    return _below_labels([label for label, _ in rows], draw, key=key, alt=alt)


def lines(
    series: Sequence[Line],
    *,
    x: str,
    y: str,
    key: str,
    alt: str,
    mark: float | None = None,
    percent: bool = False,
    bands: bool = True,
    names: Sequence[str] = (),
) -> str:
    """Lines with their bands.

    Parameters
    ----------
    series
        The lines.
    x, y
        What the axes are.
    key, alt
        As in ``svg.sketch``.
    mark
        Draws a line across at this value.
    percent
        The values are shares.
    bands
        Draws where the truth may lie; many bands hide each other.
    names
        Of the places 0, 1, ... along the x axis, instead of numbers.
    """
    height, left, below, above = 236.0, 46.0, 44.0, 26.0

    def place(figure: Any) -> None:
        axes = figure.add_axes(
            (
                left / _WIDTH,
                below / height,
                1 - (left + 16) / _WIDTH,
                1 - (below + above) / height,
            )
        )
        if mark is not None:
            axes.axhline(mark, color=INK, linewidth=1.1)
        for line in series:
            _line(axes, line, bands)
        _frame(axes, series, mark, percent, bands, names)
        axes.set_xlabel(x, fontsize=11)
        axes.annotate(
            y,
            (0, 1),
            xytext=(-left + 4, 10),
            xycoords="axes fraction",
            textcoords="offset points",
            va="bottom",
            fontsize=11,
            color=MUTED,
        )

    return sketch(_WIDTH, height, place, key=key, alt=alt)


def _line(axes: Axes, line: Line, bands: bool) -> None:
    colour, marker = SERIES[line.series % len(SERIES)], MARKERS[line.series % len(MARKERS)]
    points = sorted(line.points, key=lambda point: point.x)
    xs, ys = [p.x for p in points], [p.y for p in points]
    for some in _runs(points) if bands else ():
        axes.fill_between(
            [p.x for p in some],
            [p.low for p in some],
            [p.high for p in some],
            color=colour,
            alpha=0.16,
            linewidth=0,
        )
    axes.plot(xs, ys, marker + "-", color=colour, markersize=5, linewidth=1.7, clip_on=False)
    for point in points:
        if point.best:
            axes.plot(
                [point.x],
                [point.y],
                "o",
                markersize=13,
                markerfacecolor="none",
                markeredgecolor=INK,
                markeredgewidth=1.4,
                clip_on=False,
            )


def _frame(
    axes: Axes,
    series: Sequence[Line],
    mark: float | None,
    percent: bool,
    bands: bool,
    names: Sequence[str],
) -> None:
    points = [point for line in series for point in line.points]
    # A wild end of an interval must not press the lines to the ground.
    tops = [min(p.high, 1.8 * p.y) if p.high is not None and bands else p.y for p in points]
    top = max([*tops, mark or 0.0])
    axes.set_ylim(0, min(1.0, 1.12 * top) if percent and top <= 1 else 1.12 * top or 1.0)
    spread_x = max(p.x for p in points) - min(p.x for p in points) or 1.0
    axes.set_xlim(
        min(p.x for p in points) - 0.05 * spread_x, max(p.x for p in points) + 0.05 * spread_x
    )
    if names:
        axes.set_xticks(range(len(names)), names)
        axes.tick_params(axis="x", labelsize=10 if len(names) < 6 else 8.5)
    elif len(places := sorted({point.x for point in points})) <= _PLACES:
        axes.xaxis.set_major_locator(FixedLocator(places))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %" if v else "0"))
    axes.tick_params(axis="both", length=3, labelcolor=MUTED)
    axes.tick_params(axis="y", labelsize=10.5)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _runs(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Stretches of neighbours that have an interval."""
    some: list[Point] = []
    for point in points:
        if point.low is None or point.high is None:
            if len(some) > 1:
                yield some
            some = []
        else:
            some.append(point)
    if len(some) > 1:
        yield some


def _shifts(count: int) -> Sequence[float]:
    return (0.0,) if count == 1 else (-0.14, 0.14)


def _beside(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text, (x, y), xytext=(7, 0), textcoords="offset points", va="center", fontsize=10.5
    )


def _below_labels(
    labels: Sequence[str], draw: Callable[[Axes], None], *, key: str, alt: str
) -> str:
    """Rows with their labels above them, so that long ones have room."""
    row = 44.0
    height = row * len(labels) + 34

    def place(figure: Any) -> None:
        axes = figure.add_axes((14 / _WIDTH, 26 / height, 1 - 28 / _WIDTH, 1 - 34 / height))
        draw(axes)
        for at, label in enumerate(labels):
            axes.annotate(
                label,
                (0, at),
                xycoords=("axes fraction", "data"),
                xytext=(0, 12),
                textcoords="offset points",
                va="bottom",
                fontsize=11,
            )
        axes.set_ylim(len(labels) - 0.55, -0.75)
        axes.set_yticks([])
        axes.tick_params(axis="x", length=3, labelsize=10.5)
        axes.grid(axis="x", color=LINE, linewidth=0.6)
        axes.set_axisbelow(True)
        _bare(axes)

    return sketch(_WIDTH, height, place, key=key, alt=alt)


def _ratio_axis(axes: Axes, low: float, high: float, width: float) -> None:
    """Ticks on a logarithmic scale that leave each other room; 1 is always there."""
    least = _TICK * math.log(high / low) / width
    ticks = [1.0]
    for tick in (tick for some in _TICKS for tick in some):
        if low <= tick <= high and all(abs(math.log(tick / t)) >= least for t in ticks):
            ticks.append(tick)
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def _bare(axes: Axes) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
