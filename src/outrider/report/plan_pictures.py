"""The pictures of a plan: what each draft length gains, why a longer one does not, and what a
batch, a long prompt and memory change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.core.theory import speedup_of_request
from outrider.lab.plan import ALPHAS, RATIOS, Plan, survival
from outrider.report.svg import (
    ALARM,
    GOOD,
    INK,
    LINE,
    MUTED,
    SERIES,
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    sketch,
)

__all__ = ["batches", "heat_map", "kept", "memory", "requests", "speedups", "tokens"]

_WIDTH, _HEIGHT = 360.0, 244.0
_LEFT, _RIGHT, _BELOW, _ABOVE = 40.0, 14.0, 42.0, 26.0
_OURS, _QUOTED, _OTHER, _FOURTH = SERIES[0], SERIES[1], SERIES[2], SERIES[3]

Axes = Any
Points = Sequence[tuple[float, float]]


def speedups(plan: Plan, *, key: str, alt: str) -> str:
    """By draft length: what is expected, what is quoted, the best, and what was measured.

    Parameters
    ----------
    plan
        What to draw.
    key, alt
        As in ``svg.sketch``.
    """
    ours = [(at.draft_length, at.speedup) for at in plan.points]
    quoted = [(at.draft_length, at.quoted) for at in plan.points if at.quoted is not None]
    best = plan.best

    def draw(axes: Axes) -> None:
        axes.axhline(1.0, color=INK, linewidth=1.0)
        if not plan.drafting.acceptance.rates:
            _dashed(axes, [(x, y) for x, y in quoted if y is not None], _QUOTED)
        _solid(axes, ours, _OURS)
        _ring(axes, best.draft_length, best.speedup, f"best: γ = {best.draft_length}")
        if plan.measured is not None:
            m = plan.measured
            axes.plot([m.draft_length], [m.decode_speedup], "D", color=ALARM, markersize=7)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))

    return _chart(draw, "draft length γ", "times plain decoding's speed", key=key, alt=alt)


def tokens(plan: Plan, *, key: str, alt: str) -> str:
    """Tokens a target call by draft length, and 1 + γα; ``key`` and ``alt`` as above."""
    alpha = plan.drafting.acceptance.alpha
    ours = [(at.draft_length, at.tokens_per_target_call) for at in plan.points]
    top = ours[-1][1]
    bound = 1 / (1 - alpha) if alpha < 1 and not plan.drafting.acceptance.rates else None

    def draw(axes: Axes) -> None:
        _dashed(axes, [(x, 1 + x * alpha) for x, _ in ours], _QUOTED)
        if bound is not None and bound < 2 * top:
            axes.axhline(bound, color=MUTED, linewidth=0.9, dashes=(3, 3))
            axes.annotate(
                f"1/(1 − α) = {bound:.3g}", (1, bound), xycoords=("axes fraction", "data"),
                xytext=(-2, 4), textcoords="offset points", ha="right", fontsize=10, color=MUTED,
            )  # fmt: skip
        _solid(axes, ours, _OURS)
        _ring(axes, plan.best.draft_length, plan.best.tokens_per_target_call)
        # What is quoted leaves the picture: the rest of it would have no room.
        axes.set_ylim(0, 1.6 * top)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))

    return _chart(draw, "draft length γ", "tokens a target call", key=key, alt=alt)


def kept(plan: Plan, *, key: str, alt: str) -> str:
    """The chance that the i-th drafted token is kept, and α for each; ``key``, ``alt`` as above."""
    alpha, longest = plan.drafting.acceptance.alpha, plan.longest.draft_length
    chances = survival(plan.drafting.acceptance, longest)

    def draw(axes: Axes) -> None:
        colours = [_OURS if i < plan.best.draft_length else MUTED for i in range(longest)]
        axes.bar(range(1, longest + 1), chances, width=0.72, color=colours, linewidth=0)
        axes.axhline(alpha, color=_QUOTED, linewidth=1.6, dashes=(4, 3))
        axes.set_ylim(0, 1)
        axes.set_xlim(0.3, longest + 0.7)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))

    return _chart(draw, "i-th drafted token", "chance that it is kept", key=key, alt=alt)


def heat_map(plan: Plan, *, key: str, alt: str) -> str:
    """The best speed-up in each cell, its draft length below; ``key`` and ``alt`` as above."""
    height = 34.0 * len(ALPHAS) + 62
    most = max(gain for row in plan.map for gain, _ in row)

    def draw(axes: Axes) -> None:
        for y, row in enumerate(plan.map):
            for x, (gain, length) in enumerate(row):
                depth = 0.04 + 0.52 * ((gain - 1) / max(most - 1, 1e-9)) ** 0.6
                axes.add_patch(_cell(x, y, GOOD if length else MUTED, depth if length else 0.10))
                text = f"{gain:.2f}" if gain < 10 else f"{gain:.1f}"
                axes.annotate(
                    text, (x, y), xytext=(0, 5 if length else 0), textcoords="offset points",
                    ha="center", va="center", fontsize=11,
                )  # fmt: skip
                if length:
                    axes.annotate(
                        f"γ {length}", (x, y), xytext=(0, -8), textcoords="offset points",
                        ha="center", va="center", fontsize=9,
                    )  # fmt: skip
        ratio = plan.drafting.ratio
        if ratio is not None and RATIOS[0] <= ratio <= RATIOS[-1]:
            here = _place(ratio, RATIOS, log=True), _place(plan.drafting.acceptance.alpha, ALPHAS)
            axes.plot(
                *([v] for v in here), "o", markersize=30, markerfacecolor="none",
                markeredgecolor=ALARM, markeredgewidth=1.8, clip_on=False,
            )  # fmt: skip
        axes.set_xlim(-0.5, len(RATIOS) - 0.5)
        axes.set_ylim(-0.5, len(ALPHAS) - 0.5)
        axes.set_xticks(range(len(RATIOS)), [f"{s:g}" for s in RATIOS])
        axes.set_yticks(range(len(ALPHAS)), [f"{a:g}" for a in ALPHAS])

    return _chart(draw, "cost ratio s", "acceptance α", key=key, alt=alt, height=height, grid=False)


def requests(plan: Plan, *, key: str, alt: str) -> str:
    """A whole request by its decode share, and the most there is; ``key``, ``alt`` as above."""
    shares = [i / 100 for i in range(101)]
    gain = plan.best.speedup

    def draw(axes: Axes) -> None:
        _dashed(
            axes, [(f, 1 / (1 - f)) for f in shares if f < 1 and 1 / (1 - f) < 1.5 * gain], MUTED
        )
        _solid(axes, [(f, speedup_of_request(gain, f)) for f in shares], _OURS, marks=False)
        if plan.decode_share is not None:
            here = speedup_of_request(gain, plan.decode_share)
            _ring(axes, plan.decode_share, here, f"{here:.2f}")
        axes.set_ylim(0, max(1.5 * gain, 1.5))
        axes.set_xlim(0, 1.02)
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))

    return _chart(draw, "share of time decoding f", "times the speed", key=key, alt=alt)


def batches(plan: Plan, *, key: str, alt: str) -> str:
    """Throughput by sequences side by side: best draft length, and the one that is best for one."""
    best = [(one.sequences, one.speedup) for one in plan.batches]
    same = [(one.sequences, one.speedup_kept) for one in plan.batches]

    def draw(axes: Axes) -> None:
        axes.axhline(1.0, color=INK, linewidth=1.0)
        axes.set_xscale("log", base=2)
        _dashed(axes, same, _QUOTED)
        _solid(axes, best, _OURS)
        high = axes.get_ylim()[1]
        for one in plan.batches:
            axes.annotate(
                f"γ {one.draft_length}", (one.sequences, one.speedup), xytext=(0, 9),
                textcoords="offset points", ha="center", fontsize=9.5, color=MUTED,
            )  # fmt: skip
        axes.set_ylim(0, 1.15 * high)
        axes.xaxis.set_major_locator(FixedLocator([one.sequences for one in plan.batches]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))

    return _chart(draw, "sequences side by side", "times plain throughput", key=key, alt=alt)


def memory(plan: Plan, *, key: str, alt: str) -> str:
    """Stacked bars of weights and caches by sequences side by side; ``key``, ``alt`` as above."""
    names = ("target_weights", "draft_weights", "target_caches", "draft_caches")

    def draw(axes: Axes) -> None:
        bottom = [0.0] * len(plan.memories)
        for name, colour in zip(names, (_OURS, _QUOTED, _OTHER, _FOURTH), strict=True):
            values = [(getattr(one, name) or 0.0) / 1e9 for one in plan.memories]
            axes.bar(range(len(values)), values, 0.72, bottom=bottom, color=colour, linewidth=0)
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        axes.set_xticks(range(len(plan.memories)), [f"{one.sequences}" for one in plan.memories])

    return _chart(draw, "sequences side by side", "GB", key=key, alt=alt)


def _chart(
    draw: Callable[[Axes], None],
    x: str,
    y: str,
    *,
    key: str,
    alt: str,
    height: float = _HEIGHT,
    grid: bool = True,
) -> str:
    def place(figure: Any) -> None:
        axes = figure.add_axes(
            (
                _LEFT / _WIDTH,
                _BELOW / height,
                1 - (_LEFT + _RIGHT) / _WIDTH,
                1 - (_BELOW + _ABOVE) / height,
            )
        )
        draw(axes)
        axes.set_xlabel(x, fontsize=11)
        axes.annotate(
            y, (0, 1), xytext=(-_LEFT + 4, 10), xycoords="axes fraction",
            textcoords="offset points", va="bottom", fontsize=11, color=MUTED,
        )  # fmt: skip
        axes.tick_params(axis="both", length=3, labelsize=10.5, labelcolor=MUTED)
        if grid:
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.grid(axis="y", color=LINE, linewidth=0.6)
            axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    return sketch(_WIDTH, height, place, key=key, alt=alt)


def _solid(axes: Axes, points: Points, colour: str, *, marks: bool = True) -> None:
    xs, ys = zip(*points, strict=True)
    style = "o-" if marks else "-"
    axes.plot(xs, ys, style, color=colour, markersize=3.6, linewidth=1.9)


def _dashed(axes: Axes, points: Points, colour: str) -> None:
    if points:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, linewidth=1.6, dashes=(4, 3))


def _ring(axes: Axes, x: float, y: float, text: str = "") -> None:
    axes.plot(
        [x], [y], "o", markersize=12, markerfacecolor="none", markeredgecolor=INK,
        markeredgewidth=1.5,
    )  # fmt: skip
    axes.annotate(
        text, (x, y), xytext=(0, -19), textcoords="offset points", ha="center", fontsize=10.5,
        fontweight="bold",
    )  # fmt: skip


def _cell(x: int, y: int, colour: str, depth: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, color=colour, alpha=depth, linewidth=0)


def _place(value: float, marks: Sequence[float], *, log: bool = False) -> float:
    """Where a value lies among marks that are drawn one apart."""
    import numpy as np

    scale = np.log if log else np.asarray
    return float(np.interp(scale(value), scale(marks), range(len(marks))))


def _percent(value: float, _: Any = None) -> str:
    return f"{100 * value:.3g} %" if value else "0"
