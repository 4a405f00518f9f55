"""Drawings that fit into a page: SVG by matplotlib, in the page's own colours and fonts.

What matplotlib writes is made fit to stand beside others in one page: ids get a prefix, colours
become the page's CSS variables, so that a dark page has dark pictures, and fonts become the page's.
"""

from __future__ import annotations

import io
import re
import unicodedata
import warnings
from collections.abc import Callable, Mapping
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
    "ALARM",
    "CHARACTER",
    "DOUBT",
    "GOOD",
    "INK",
    "LINE",
    "MONO",
    "MUTED",
    "OURS",
    "PLAIN",
    "SERIES",
    "FixedLocator",
    "FuncFormatter",
    "MaxNLocator",
    "NullLocator",
    "columns",
    "sketch",
]

INK, MUTED, LINE = "#010101", "#020202", "#030303"
PLAIN, OURS, ALARM, DOUBT, GOOD = "#040404", "#050505", "#060606", "#070707", "#080808"
SERIES = ("#090909", "#0a0a0a", "#0b0b0b", "#0c0c0c", "#0d0d0d", "#0e0e0e")
"""Colours of lines that must be told apart."""

# Stand-ins, which no drawing uses by chance, and the page's variables that take their place.
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    PLAIN: "var(--plain)",
    OURS: "var(--ours)",
    ALARM: "var(--alarm)",
    DOUBT: "var(--doubt)",
    GOOD: "var(--good)",
} | {colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "outrider",
    "text.parse_math": False,  # a token may well be "$\\frac{"
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.linewidth": 0.8,
    "axes.unicode_minus": True,
}
MONO = "DejaVu Sans Mono"
CHARACTER = 6.93
"""Width of a character of that font at 11.5 units."""

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"


def columns(text: str) -> int:
    """Columns that a text takes in a fixed-width font.

    >>> columns("ab"), columns("日本")
    (2, 4)
    """
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def sketch(
    width: float,
    height: float,
    draw: Callable[[Any], None],
    *,
    key: str,
    alt: str,
    titles: Mapping[str, str] | None = None,
) -> str:
    """What ``draw`` puts on a matplotlib figure, as SVG for a page.

    Parameters
    ----------
    width, height
        In the drawing's own units, of which 72 make a matplotlib inch.
    draw
        Given the empty figure.
    key
        Prefix of all ids; another one for each picture of a page.
    alt
        What the picture shows, for those who cannot see it.
    titles
        Of artists by their ``gid``: shown where a pointer rests on them.

    Example
    -------
    >>> svg = sketch(90, 30, lambda figure: figure.text(0, 0, "a < b"), key="p1-", alt="Text")
    >>> svg[:24], "a &lt; b" in svg
    ('<svg xmlns="http://www.w', True)
    """
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # The browser has glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(width / 72, height / 72))
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _fit(written.getvalue(), key=key, alt=alt, titles=titles or {})


def _fit(svg: str, *, key: str, alt: str, titles: Mapping[str, str]) -> str:
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
                if value in titles:
                    title = ElementTree.Element(f"{{{_SVG}}}title")
                    title.text = titles[value]
                    element.insert(0, title)
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
    family = "var(--mono)" if MONO in style else "var(--sans)"
    # matplotlib before 3.10 wrote the short form.
    style = re.sub(r"(font: [^;]*?px) [^;]*", rf"\1 {family}", style)
    return re.sub(r"font-family: [^;]*", f"font-family: {family}", style)
