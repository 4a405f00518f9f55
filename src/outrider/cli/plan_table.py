"""A plan on the terminal: bars by draft length with the best one marked, and tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outrider.core.theory import speedup_of_request
from outrider.lab.plan import ALPHAS, RATIOS
from outrider.lab.plan_wording import assumptions, headline, sentences

if TYPE_CHECKING:
    from outrider.cli.screen import Screen
    from outrider.lab.plan import At, Memory, Plan

__all__ = ["show"]

_BAR = 36
_SHORT_BAR = 16
_ROWS = 24
"""Rows of the first table at most; longer plans leave some lengths out."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_NONE = "–"


def show(screen: Screen, plan: Plan) -> None:
    """Everything, the best draft length first."""
    out = screen.out
    style = "bold green" if plan.best.draft_length else "bold yellow"
    out.print(Text(headline(plan) + ".", style))
    out.print(f"[dim]{escape(_from(plan))}[/]")
    out.print()
    out.print(_by_length(plan))
    out.print()
    out.print(_list(sentences(plan), ""), soft_wrap=False)
    out.print()
    out.print("[bold]Whole requests[/] [dim]by the share of their time that is decoding[/]")
    out.print(_shares(plan))
    out.print()
    out.print("[bold]Best speed-up[/] [dim](its draft length) by acceptance and cost ratio[/]")
    out.print(_map(plan))
    if plan.batches:
        out.print()
        out.print("[bold]Batches[/] [dim]throughput over plain decoding of as many[/]")
        out.print(_batches(plan))
    if plan.memories:
        out.print()
        context = f"caches of {plan.context_tokens} tokens a sequence"
        out.print(f"[bold]Memory[/] [dim]GB, {context}[/]")
        out.print(_memory(plan.memories))
    out.print()
    out.print(_list(assumptions(plan), "dim"), soft_wrap=False)


def _from(plan: Plan) -> str:
    drafting, about = plan.drafting, plan.about
    ratio = "drafting free" if drafting.ratio is None else f"s = {drafting.ratio:.3g}"
    told = f"α = {drafting.acceptance.alpha:.3g}, {ratio}"
    if "target" in about:
        told = f"{about['target']} with {about['drafter']}, {about['prompts']} prompts: {told}"
    return told


def _table(*columns: str, left: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def _list(lines: Iterable[str], style: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    for line in lines:
        grid.add_row(Text("·", style), Text(line, style))
    return grid


def _shown(plan: Plan) -> list[At]:
    step = -(-len(plan.points) // _ROWS)
    keep = {plan.best.draft_length, plan.chosen, plan.longest.draft_length}
    return [at for at in plan.points if at.draft_length % step == 0 or at.draft_length in keep]


def _by_length(plan: Plan) -> Table:
    """A bar for each length: full as far as the speed-up goes, dotted to what is quoted."""
    points = _shown(plan)
    quotes = any(at.quoted is not None for at in points) and not plan.drafting.acceptance.rates
    most = max(max(at.speedup, (at.quoted or 0.0) if quotes else 0.0) for at in points)
    head = ["γ", "tokens/call", "speed-up", "", *(["quoted"] if quotes else [])]
    table = _table(*head, left=[""])
    for at in points:
        best = at.draft_length == plan.best.draft_length
        style = "bold green" if best else "red" if at.speedup < 1 - 1e-12 else ""
        bar = Text(_bar(at.speedup, most), style or "blue")
        if quotes and at.quoted is not None:
            bar.append("·" * (round(_BAR * at.quoted / most) - len(bar)), "dim")
        if best:
            bar.append(" ◀ best", style)
        cells = [
            Text(f"{at.draft_length}", style),
            Text(f"{at.tokens_per_target_call:.2f}", style),
            Text(f"{at.speedup:.2f}", style),
            bar,
        ]
        table.add_row(*cells, *([Text(f"{at.quoted:.2f}", "dim")] if quotes else []))
    return table


def _bar(value: float, most: float, width: int = _BAR) -> str:
    eighths = round(8 * width * value / most)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _shares(plan: Plan) -> Table:
    table = _table("decoding", "speed-up", "at most", "", left=[""])
    most = max(gain for _, gain in plan.shares)
    for share, gain in plan.shares:
        own = plan.decode_share is not None and share == plan.decode_share
        style = "bold" if own else ""
        limit = speedup_of_request(float("inf"), share) if share < 1 else None
        bar = Text(_bar(gain, most), style or "blue").append(" ◀ here" if own else "", style)
        cells = (f"{share:.3g}", f"{gain:.2f}", _NONE if limit is None else f"{limit:.3g}")
        table.add_row(*(Text(cell, style) for cell in cells), bar)
    return table


def _map(plan: Plan) -> Table:
    table = _table("α \\ s", *(f"{s:g}" for s in RATIOS))
    for alpha, row in zip(ALPHAS, plan.map, strict=True):
        cells = [Text(f"{alpha:g}", "bold")]
        for gain, length in row:
            style = "dim" if not length else "green" if gain >= 2 else "cyan" if gain >= 1.3 else ""
            cells.append(Text(f"{gain:.2f} ({length})", style))
        table.add_row(*cells)
    return table


def _batches(plan: Plan) -> Table:
    timed = any(one.plain_pass_s is not None for one in plan.batches)
    kept = plan.best.draft_length
    head = ["sequences", "γ", "speed-up", f"with γ = {kept}", ""]
    table = _table(*head, *(["plain tok/s", "bound by"] if timed else []), left=["", "bound by"])
    most = max(one.speedup for one in plan.batches)
    for one in plan.batches:
        cells: list[str | Text] = [
            f"{one.sequences}", f"{one.draft_length}", f"{one.speedup:.2f}",
            Text(f"{one.speedup_kept:.2f}", "red" if one.speedup_kept < 1 - 1e-12 else ""),
            Text(_bar(one.speedup, most, _SHORT_BAR), "blue"),
        ]  # fmt: skip
        if timed:
            rate = one.plain_tokens_per_s
            cells += [_NONE if rate is None else f"{rate:,.0f}", one.bound or _NONE]
        table.add_row(*cells)
    return table


def _memory(rows: Iterable[Memory]) -> Table:
    table = _table("sequences", "target", "draft", "target's caches", "draft's caches", "in all")
    for one in rows:
        parts = one.target_weights, one.draft_weights, one.target_caches, one.draft_caches
        table.add_row(f"{one.sequences}", *map(_gb, parts), _gb(one.total))
    return table


def _gb(value: float | None) -> str:
    return _NONE if value is None else f"{value / 1e9:.3g}"
