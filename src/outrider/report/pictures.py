"""The pictures of a report: SVG to put into a page, in the page's own colours and fonts.

matplotlib draws them. What it writes is then made fit to stand beside others in one page: ids get
a prefix, colours become the page's CSS variables, so that a dark page has dark pictures, and
fonts become the page's.
"""

from __future__ import annotations

import io
import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from outrider.errors import UsageError

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
except ModuleNotFoundError as error:
    raise UsageError(
        "A report needs matplotlib, which is not installed.",
        hint="Run: pip install outrider[report]",
    ) from error

__all__ = [
    "Interval",
    "Pair",
    "Part",
    "columns",
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

_INK, _MUTED, _LINE = "#010101", "#020202", "#030303"
_PLAIN, _OURS, _ALARM, _TIE = "#040404", "#050505", "#060606", "#070707"
# Stand-ins, which no drawing uses by chance, and the page's variables that take their place.
_VARIABLES = {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _LINE: "var(--line)",
    _PLAIN: "var(--plain)",
    _OURS: "var(--ours)",
    _ALARM: "var(--alarm)",
    _TIE: "var(--doubt)",
}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "outrider",
    "text.parse_math": False,  # a token may well be "$\\frac{"
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "text.color": _INK,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _MUTED,
    "xtick.color": _MUTED,
    "ytick.color": _INK,
    "axes.linewidth": 0.8,
    "axes.unicode_minus": True,
}
_MONO = "DejaVu Sans Mono"
_CHARACTER = 6.93  # width of a character of that font at 11.5 units
_ROW = 19.0
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"

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
            (-0.19, _PLAIN, [p.plain for p in pairs], [2 * p.plain_error for p in pairs]),
            (0.19, _OURS, [p.ours for p in pairs], [2 * p.ours_error for p in pairs]),
        )
        for shift, colour, values, errors in sides:
            at = [row + shift for row in rows]
            axes.barh(at, values, height=0.34, color=colour, linewidth=0)
            if any(errors):
                low = [max(0.0, v - e) for v, e in zip(values, errors, strict=True)]
                high = [v + e for v, e in zip(values, errors, strict=True)]
                axes.hlines(at, low, high, color=_INK, linewidth=0.9)
        axes.set_xlim(left=0.0)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))

    return _picture([p.label for p in pairs], draw, key=key, alt=alt, row=22.0)


def intervals(rows: Sequence[Interval], *, mark: float, key: str, alt: str) -> str:
    """A forest plot with a line at ``mark``; ``key`` and ``alt`` as in ``law``."""

    def draw(axes: Axes) -> None:
        axes.axvline(mark, color=_MUTED, linewidth=0.9, dashes=(3, 3))
        for at, row in enumerate(rows):
            colour = _ALARM if row.alarm else _INK
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
            axes.axvline(mark, color=_MUTED, linewidth=0.9, dashes=(3, 3))
        for at, (_, least) in enumerate(rows):
            axes.hlines([at], [low], [least], color=_LINE, linewidth=5)
            axes.hlines([at], [least], [1.0], color=_INK, linewidth=5)
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
        axes.axvline(mark, color=_MUTED, linewidth=0.9, dashes=(3, 3))
        for at, (_, values) in enumerate(rows):
            for colour, some in (
                (_INK, [v for v in values if v <= mark]),
                (_ALARM, [v for v in values if v > mark]),
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
    colours = {"equal": _INK, "tie": _TIE, "different": _ALARM}

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
        axes.axvline(mark, color=_MUTED, linewidth=0.9, dashes=(3, 3))
        for position, gap, tie in points:
            axes.plot(
                [abs(gap)],
                [positions.index(position)],
                "o" if tie else "D",
                color=_TIE if tie else _ALARM,
                markersize=5,
                clip_on=False,
            )
        axes.set_xlim(0.0, 1.06 * max(mark, *(abs(gap) for _, gap, _ in points)))
        axes.xaxis.set_major_locator(MaxNLocator(4))

    return _picture([f"token {p}" for p in positions], draw, key=key, alt=alt)


def _percent(value: float, _: Any = None) -> str:
    return f"{100 * value:.3g} %" if value else "0"


def columns(text: str) -> int:
    """Columns that a text takes in a fixed-width font.

    >>> columns("ab"), columns("日本")
    (2, 4)
    """
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _picture(
    labels: Sequence[str], draw: Callable[[Axes], None], *, key: str, alt: str, row: float = _ROW
) -> str:
    """Rows with labels at the left, an axis below, and whatever ``draw`` puts there."""
    height = row * len(labels) + 32
    left = min(0.48 * WIDTH, 14 + _CHARACTER * max(columns(label) for label in labels))
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # The browser has glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        axes = figure.add_axes(
            (left / WIDTH, 26 / height, 1 - (left + 20) / WIDTH, 1 - 32 / height)
        )
        draw(axes)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_yticks(range(len(labels)), labels, fontfamily=_MONO)
        axes.tick_params(axis="y", length=0, pad=5)
        axes.tick_params(axis="x", length=3, labelsize=10.5)
        axes.grid(axis="x", color=_LINE, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _fit(written.getvalue(), key=key, alt=alt)


def _fit(svg: str, *, key: str, alt: str) -> str:
    """The drawing, made to stand in a page beside others."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    # Written by matplotlib a moment ago, with every text escaped: nothing foreign is parsed.
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            # Metadata names addresses; the style would hold for the whole page.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id":
                element.set(name, key + value)
            elif name == f"{{{_XLINK}}}href":
                element.set(name, value.replace("#", f"#{key}", 1))
            elif name == "clip-path":
                element.set(name, value.replace("url(#", f"url(#{key}", 1))
            elif name == "style":
                element.set(name, _restyle(value, key))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("class", "picture")
    root.set("role", "img")
    root.set("aria-label", alt)
    root.set("stroke-linejoin", "round")
    return ElementTree.tostring(root, encoding="unicode")


def _restyle(style: str, key: str) -> str:
    for colour, variable in _VARIABLES.items():
        style = style.replace(colour, variable)
    style = style.replace("url(#", f"url(#{key}")
    family = "var(--mono)" if _MONO in style else "var(--sans)"
    # matplotlib before 3.10 wrote the short form.
    style = re.sub(r"(font: [^;]*?px) [^;]*", rf"\1 {family}", style)
    return re.sub(r"font-family: [^;]*", f"font-family: {family}", style)


def standard_error(frequency: float, samples: float) -> float:
    """Of a frequency in that many samples.

    >>> standard_error(0.5, 100)
    0.05
    """
    return math.sqrt(max(0.0, frequency * (1 - frequency)) / samples) if samples else 0.0
