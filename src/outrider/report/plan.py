"""The page of a plan: one file, which loads nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from outrider.core.theory import speedup_of_request
from outrider.lab.plan import Plan
from outrider.lab.plan_wording import WHY, assumptions, headline, sentences
from outrider.report import plan_pictures as pictures
from outrider.report.page import Markup, render

__all__ = ["plan_page"]

_QUOTED = "what is often quoted"


@dataclass(frozen=True, slots=True)
class _Figure:
    """A drawing; ``keys`` are pairs of a colour, dashed if it begins with -, and what it is."""

    title: str
    note: str
    svg: Markup
    keys: list[tuple[str, str]] = field(default_factory=list)


def plan_page(plan: Plan, *, command: str = "") -> str:
    """Lay out a plan as one HTML page that loads nothing.

    Parameters
    ----------
    plan
        What is expected.
    command
        The command line that makes it again.

    Example
    -------
    >>> from outrider.lab.plan import Acceptance, make_plan
    >>> "Draft 5 tokens" in plan_page(make_plan(Acceptance(0.8), 1 / 8))
    True
    """
    data = json.dumps(plan.to_dict(), ensure_ascii=False, indent=1)
    encoded = data.encode("utf-8", "backslashreplace")
    best = plan.best
    return render(
        "plan.html.j2",
        filters={"two": lambda v: "–" if v is None else f"{v:.2f}"},
        plan=plan,
        best=best,
        headline=headline(plan),
        facts=list(_facts(plan)),
        sentences=sentences(plan),
        assumptions=assumptions(plan),
        figures=list(_figures(plan)),
        quotes=not plan.drafting.acceptance.rates and plan.drafting.ratio is not None,
        command=command,
        data=encoded.decode(),
        data_base64=base64.b64encode(encoded).decode(),
    )


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    drafting, best, about = plan.drafting, plan.best, plan.about
    if "target" in about:
        yield "Target", str(about["target"])
        yield "Drafter", str(about["drafter"])
        yield "Prompts", str(about["prompts"])
    yield "Acceptance α", f"{drafting.acceptance.alpha:.3g}"
    ratio = drafting.ratio
    yield "Cost ratio s", "drafting is free" if ratio is None else f"{ratio:.3g}"
    yield "Best draft length γ", str(best.draft_length)
    yield "Tokens a call", f"{best.tokens_per_target_call:.2f}"
    if plan.decode_share is not None:
        whole = speedup_of_request(best.speedup, plan.decode_share)
        yield "Whole requests", f"{whole:.2f} times ({plan.decode_share:.0%} decoding)"
    if plan.measured is not None:
        yield "Measured", f"{plan.measured.decode_speedup:.2f} times"


def _figures(plan: Plan) -> Iterator[_Figure]:
    keys = (f"p{number}-" for number in count(1))

    def figure(draw: Any, title: str, note: str, alt: str, *legend: tuple[str, str]) -> _Figure:
        return _Figure(title, note, Markup(draw(plan, key=next(keys), alt=alt)), list(legend))

    best, far, alpha = plan.best, plan.longest, plan.drafting.acceptance.alpha
    by_depth = bool(plan.drafting.acceptance.rates)
    quoted = [] if by_depth or best.quoted is None else [("-series-2", _QUOTED)]
    measured = [] if plan.measured is None else [("alarm", "measured")]
    yield figure(
        pictures.speedups,
        "Speed by draft length",
        "Longer drafts cost more and give less and less.",
        f"Line: speed-up by draft length; {best.speedup:.2f} at {best.draft_length}, the best, and "
        f"{far.speedup:.2f} at {far.draft_length}."
        + (f" The quoted formula goes up to {far.quoted:.2f}." if quoted else ""),
        ("series-1", "expected"), *quoted, *measured,
    )  # fmt: skip
    yield figure(
        pictures.tokens,
        "Tokens a target call",
        "The target's own token counted.",
        f"Line: tokens a target call by draft length; {best.tokens_per_target_call:.2f} at "
        f"{best.draft_length}, {far.tokens_per_target_call:.2f} at {far.draft_length}; 1 + γα "
        "goes straight up.",
        ("series-1", "expected"), ("-series-2", "1 + γα"),
    )  # fmt: skip
    yield figure(
        pictures.kept,
        "Why: one rejection ends the run",
        "A drafted token is kept only if all before it were."
        + ("" if by_depth else f" So the i-th is with α^i; the quoted form: {WHY.split(',')[0]}."),
        f"Bars: chance that the i-th drafted token is kept, falling from {alpha:.2f}; a line at α.",
        ("series-1", "in the best draft"), ("muted", "beyond it"), ("-series-2", "α"),
    )  # fmt: skip
    ring = "; the ring is this plan" if plan.drafting.ratio else ""
    yield figure(
        pictures.heat_map,
        "Best speed-up by acceptance and cost",
        f"Each cell has its own best draft length γ{ring}. Grey: plain decoding is the fastest.",
        "Table in colours: "
        + "; ".join(
            f"at acceptance {row['alpha']:g} and cost ratio {row['cost_ratio']:g}: "
            f"{row['speedup']:.2f}"
            for row in plan.to_dict()["map"]
        ),
    )
    yield figure(
        pictures.requests,
        "What a whole request gains",
        "Reading the prompt is not made faster: 1/((1 − f) + f/S).",
        "Line: speed-up of a whole request by the share of its time that is decoding, from 1 to "
        f"{best.speedup:.2f}.",
        ("series-1", f"with S = {best.speedup:.2f}"), ("-muted", "the most that any draft could"),
    )  # fmt: skip
    if plan.batches:
        yield figure(
            pictures.batches,
            "Batches",
            "Rows of all sequences share a pass; when arithmetic is full, each row costs.",
            "Lines: throughput by sequences side by side. "
            + "; ".join(f"{b.sequences}: {b.speedup:.2f}" for b in plan.batches),
            ("series-1", "best draft length"),
            ("-series-2", f"γ = {best.draft_length}, the best for one"),
        )
    if plan.memories:
        known = plan.memories[0]
        parts = [
            ("series-1", "target", known.target_weights),
            ("series-2", "draft", known.draft_weights),
            ("series-3", "target's caches", known.target_caches),
            ("series-4", "draft's caches", known.draft_caches),
        ]
        unknown = [name for _, name, value in parts if value is None]
        note = f"Caches of {plan.context_tokens} tokens a sequence."
        if unknown:
            note += f" Not known, and left out: {', '.join(unknown)}."
        yield figure(
            pictures.memory,
            "Memory",
            note,
            "Bars: gigabytes by sequences side by side. "
            + "; ".join(f"{m.sequences}: {m.total / 1e9:.3g}" for m in plan.memories),
            *((colour, name) for colour, name, value in parts if value is not None),
        )
