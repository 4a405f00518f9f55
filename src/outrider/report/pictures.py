"""The pictures of an audit: laws, differences, and what would be seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.report.svg import (
    ALARM,
    CHARACTER,
    DOUBT,
    INK,
    LINE,
    MONO,
    MUTED,
    OURS,
    PLAIN,
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    columns,
    sketch,
)

__all__ = [
    "Interval",
    "Pair",
    "Part",
    "gaps",
    "intervals",
    "law",
    "parts",
    "seen",
    "standard_error",
    "strip",
]

WIDTH = 360
"""Of every picture, in its own units: about as many CSS pixels on a phone."""

_ROW = 19.0

Axes = Any


@dataclass(frozen=True, slots=True)
class Pair:
    """One output's probability on both sides, with the standard error of each."""

    label: str
    plain: float
    ours: float
    plain_error: float = 0.0
    ours_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and where the truth may lie; ``alarm`` draws it in the colour of alarm."""

    label: str
    estimate: float
    low: float
    high: float
    alarm: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A part of all outputs that were compared: ``kind`` is equal, tie or different."""

    kind: str
    count: int


def law(pairs: Sequence[Pair], *, key: str, alt: str) -> str:
    """Paired bars, plain above ours, with whiskers of two standard errors where there are any.

    Parameters
    ----------
    pairs
        In the order in which they stand, the first on top.
    key
        Prefix of all ids; another one for each picture of a page.
    alt
        What the picture shows, for those who cannot see it.
    """

    def draw(axes: Axes) -> None:
        rows = range(len(pairs))
        sides = (
            (-0.19, PLAIN, [p.plain for p in pairs], [2 * p.plain_error for p in pairs]),
            (0.19, OURS, [p.ours for p in pairs], [2 * p.ours_error for p in pairs]),
        )
        for shift, colour, values, errors in sides:
            at = [row + shift for row in rows]
            axes.barh(at, values, height=0.34, color=colour, linewidth=0)
            if any(errors):
                low = [max(0.0, v - e) for v, e in zip(values, errors, strict=True)]
                high = [v + e for v, e in zip(values, errors, strict=True)]
                axes.hlines(at, low, high, color=INK, linewidth=0.9)
        axes.set_xlim(left=0.0)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))

    return _picture([p.label for p in pairs], draw, key=key, alt=alt, row=22.0)


def intervals(rows: Sequence[Interval], *, mark: float, key: str, alt: str) -> str:
    """A forest plot with a line at ``mark``; ``key`` and ``alt`` as in ``law``."""

    def draw(axes: Axes) -> None:
        axes.axvline(mark, color=MUTED, linewidth=0.9, dashes=(3, 3))
        for at, row in enumerate(rows):
            colour = ALARM if row.alarm else INK
            axes.hlines([at], [row.low], [row.high], color=colour, linewidth=1.6)
            axes.plot([row.estimate], [at], "o", color=colour, markersize=5, clip_on=False)
        axes.set_xlim(0.0, min(1.0, 1.06 * max(mark, *(row.high for row in rows))))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))

    return _picture([row.label for row in rows], draw, key=key, alt=alt)


def seen(rows: Sequence[tuple[str, float]], *, marks: Sequence[float], key: str, alt: str) -> str:
    """For each law, the biases that would be seen, from its least one on, on a log scale."""

    def draw(axes: Axes) -> None:
        low = min(0.005, *(least for _, least in rows)) / 1.3
        for mark in marks:
            axes.axvline(mark, color=MUTED, linewidth=0.9, dashes=(3, 3))
        for at, (_, least) in enumerate(rows):
            axes.hlines([at], [low], [least], color=LINE, linewidth=5)
            axes.hlines([at], [least], [1.0], color=INK, linewidth=5)
        axes.set_xscale("log")
        axes.set_xlim(low, 1.0)
        ticks = [t for t in (1e-4, 1e-3, *marks, 0.2, 1.0) if t >= low]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))

    return _picture([label for label, _ in rows], draw, key=key, alt=alt)


def strip(rows: Sequence[tuple[str, Sequence[float]]], *, mark: float, key: str, alt: str) -> str:
    """Differences on a log scale, a tick for each, with a line at ``mark``.

    What is exactly 0 stands at the left edge, which no other difference reaches.
    """
    zero, least, most = 1e-20, 1e-19, 1.0

    def draw(axes: Axes) -> None:
        axes.axvline(mark, color=MUTED, linewidth=0.9, dashes=(3, 3))
        for at, (_, values) in enumerate(rows):
            for colour, some in (
                (INK, [v for v in values if v <= mark]),
                (ALARM, [v for v in values if v > mark]),
            ):
                where = [max(least, v) if v else zero for v in some]
                axes.plot(where, [at] * len(where), "|", color=colour, markersize=11, clip_on=False)
        axes.set_xscale("log")
        axes.set_xlim(zero / 100, most)
        axes.xaxis.set_major_locator(FixedLocator([zero, 1e-16, mark, 1e-8, 1e-4, most]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda v, _: "0" if v <= zero else "1" if v == 1 else f"{v:.0e}")
        )

    return _picture([label for label, _ in rows], draw, key=key, alt=alt, row=26.0)


def parts(rows: Sequence[Part], *, key: str, alt: str) -> str:
    """One bar of all outputs, divided by what became of them."""
    colours = {"equal": INK, "tie": DOUBT, "different": ALARM}

    def draw(axes: Axes) -> None:
        left = 0
        for part in rows:
            axes.barh([0], [part.count], left=left, height=0.7, color=colours[part.kind])
            left += part.count
        axes.set_xlim(0, left)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))

    return _picture(["outputs"], draw, key=key, alt=alt, row=26.0)


def gaps(points: Sequence[tuple[int, float, bool]], *, mark: float, key: str, alt: str) -> str:
    """Where outputs part: a row for each position, the gap in logits across, near-ties apart.

    Parameters
    ----------
    points
        Position counted from 1, gap, whether it is a near-tie.
    mark
        The threshold of near-ties.
    key, alt
        As in ``law``.
    """
    positions = sorted({position for position, _, _ in points})

    def draw(axes: Axes) -> None:
        axes.axvline(mark, color=MUTED, linewidth=0.9, dashes=(3, 3))
        for position, gap, tie in points:
            axes.plot(
                [abs(gap)],
                [positions.index(position)],
                "o" if tie else "D",
                color=DOUBT if tie else ALARM,
                markersize=5,
                clip_on=False,
            )
        axes.set_xlim(0.0, 1.06 * max(mark, *(abs(gap) for _, gap, _ in points)))
        axes.xaxis.set_major_locator(MaxNLocator(4))

    return _picture([f"token {p}" for p in positions], draw, key=key, alt=alt)


def _percent(value: float, _: Any = None) -> str:
    return f"{100 * value:.3g} %" if value else "0"


def _picture(
    labels: Sequence[str], draw: Callable[[Axes], None], *, key: str, alt: str, row: float = _ROW
) -> str:
    """Rows with labels at the left, an axis below, and whatever ``draw`` puts there."""
    height = row * len(labels) + 32
    left = min(0.48 * WIDTH, 14 + CHARACTER * max(columns(label) for label in labels))

    def place(figure: Any) -> None:
        axes = figure.add_axes(
            (left / WIDTH, 26 / height, 1 - (left + 20) / WIDTH, 1 - 32 / height)
        )
        draw(axes)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_yticks(range(len(labels)), labels, fontfamily=MONO)
        axes.tick_params(axis="y", length=0, pad=5)
        axes.tick_params(axis="x", length=3, labelsize=10.5)
        axes.grid(axis="x", color=LINE, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)

    return sketch(WIDTH, height, place, key=key, alt=alt)


def standard_error(frequency: float, samples: float) -> float:
    """Of a frequency in that many samples.

    >>> standard_error(0.5, 100)
    0.05
    """
    return math.sqrt(max(0.0, frequency * (1 - frequency)) / samples) if samples else 0.0
