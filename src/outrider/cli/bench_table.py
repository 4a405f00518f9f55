"""What a measurement came to, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from outrider.lab.configuration import PLAIN
from outrider.lab.summary import ENOUGH_PROMPTS
from outrider.lab.wording import peer_lines, prompt_name, setting_of

if TYPE_CHECKING:
    from outrider.cli.screen import Screen
    from outrider.lab.stats import Spread
    from outrider.lab.strata import Stratum
    from outrider.lab.summary import Row, Same, Speedup, Summary

__all__ = ["show", "show_changes"]

_STYLES = {"pays": "bold green", "costs": "bold red"}
_BY = {
    "kind": "by kind of prompt",
    "position": "by place in the output, tokens (rounds alone)",
    "entropy": "by the target's entropy, nats (rounds alone)",
    "temperature": "by temperature",
    "batch": "by batch size",
}
_NONE = "–"


def show(screen: Screen, summary: Summary) -> None:
    """Conditions, tables for each target, temperature and batch size, and where it pays."""
    out = screen.out
    for line in (_conditions(summary.conditions), *peer_lines(summary)):
        out.print(f"[dim]{escape(line)}[/]")
    for setting, group in groupby(summary.rows, key=setting_of):
        rows = list(group)
        out.print()
        out.print(f"[bold]{escape(setting)}[/] [dim]{_counted(rows)}[/]")
        out.print(_speeds(rows, summary))
        out.print()
        out.print(_work(rows))
        out.print()
        out.print(_memory(rows))
        own = [one for one in summary.strata if _belongs(one, rows[0])]
        if any(one.speedup is not None for one in own):
            out.print()
            out.print(_strata(own, _drafted(rows)))
    wide = [one for one in summary.strata if None in (one.temperature, one.batch)]
    labels = list(dict.fromkeys(_drafted(summary.rows)))
    if any(one.speedup is not None for one in wide):
        out.print()
        out.print(_strata(wide, labels))
    out.print()


def show_changes(screen: Screen, changes: Sequence[Mapping[str, Any]]) -> None:
    """Second run over first, a configuration in a setting a row (``Change.to_dict``)."""
    table = _table("second over first", "prompts", "tokens/s", "95 %", "speed-up", "95 %")
    for one in changes:
        setting = f"temperature {one['temperature']:g}, batch {one['batch']}"
        told = [one["configuration"], setting, *filter(None, [one["adapter"]])]
        ratios = (one["tokens_per_s_ratio"], one["speedup_ratio"])
        cells = [cell for ratio in ratios for cell in _ratio_cells(ratio)]
        table.add_row(escape(", ".join(told)), str(one["prompts"]), *cells)
    if changes:
        screen.out.print(table)
        screen.out.print()


def _ratio_cells(found: Mapping[str, float] | None) -> tuple[str, str]:
    if found is None:
        return _NONE, _NONE
    return f"{found['median']:.2f}", f"{found['low']:.2f}–{found['high']:.2f}"


def _drafted(rows: Sequence[Row]) -> list[str]:
    """What has rounds that can be compared with plain decoding's."""
    return [row.configuration for row in rows if row.speedup is not None and not row.peer]


def _conditions(c: dict[str, Any]) -> str:
    about: dict[str, Any] = next(iter(c.get("targets", {}).values()), {})
    on_gpu = str(about.get("device")).startswith("cuda")
    parts = [
        f"{c.get('target')} ({about.get('class')}, {about.get('precision') or 'exact'})",
        str(c.get("gpu") if on_gpu else c.get("cpu")),
        f"torch {c.get('torch')}, threads: {c.get('threads')}",
        f"outrider {c.get('outrider')}" + (f" {c['commit']}" if c.get("commit") else ""),
    ]
    return " · ".join(parts)


def _counted(rows: Sequence[Row]) -> str:
    prompts, records = max(r.prompts for r in rows), sum(r.records for r in rows)
    return f"{prompts} prompt{'s' * (prompts != 1)}, {records} generations"


def _speeds(rows: Sequence[Row], summary: Summary) -> Table:
    table = _table("speed", "tokens/s", "speed-up", "95 %", "p10–p90", "slower", "worst")
    for row in rows:
        speed = row.speedup
        if speed is not None:
            cells = _speed_cells(speed, summary)
        else:
            cells = ["1.00" if row.configuration == PLAIN else _NONE]
        table.add_row(_named(row), _middle(row, "tokens_per_s", ".4g"), *cells)
    return table


def _named(row: Row) -> str:
    """The configuration; and the drafter, where the machine or the model chose it."""
    if row.peer:
        failed = f", {len(row.failed)} failed" if row.failed else ""
        return f"{escape(row.configuration)} [dim]peer{failed}[/]"
    chosen = "auto" in row.configuration and row.drafter not in row.configuration
    return escape(row.configuration) + (f" [dim]= {escape(row.drafter)}[/]" if chosen else "")


def _speed_cells(speed: Speedup, summary: Summary) -> list[str]:
    style = _STYLES.get(speed.verdict)
    middle = f"{speed.median:.2f}"
    return [
        f"[{style}]{middle}[/]" if style else middle,
        _NONE if speed.low is None else f"{speed.low:.2f}–{speed.high:.2f}",
        f"{speed.p10:.2f}–{speed.p90:.2f}",
        f"{speed.slower:.0%}",
        f"{speed.worst:.2f} [dim]{escape(prompt_name(summary.conditions, speed.worst_prompt))}[/]",
    ]


def _work(rows: Sequence[Row]) -> Table:
    table = _table(
        "work", "kept", "tokens/call", "first ms", "draft", "verify", "rest", "same tokens"
    )
    for row in rows:
        table.add_row(
            escape(row.configuration),
            _middle(row, "acceptance_rate", ".0%"),
            _middle(row, "tokens_per_target_call", ".2f"),
            _middle(row, "ttft_ms", ",.1f"),
            _middle(row, "draft_share", ".0%"),
            _middle(row, "verify_share", ".0%"),
            _middle(row, "other_share", ".0%"),
            _same(row),
        )
    return table


def _same(row: Row) -> str:
    same: Same | None = row.same
    if same is None:
        return _NONE if row.peer else ""
    if not same.promised and not row.peer:  # chance may take another course
        return "[dim]law alone[/]"
    told = f"{same.same} of {same.compared}"
    return f"[yellow]{told}[/]" if same.parted and same.promised else told


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold", min_width=len(first))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=column != "worst")
    return table


def _middle(row: Row, metric: str, form: str) -> str:
    found: Spread | None = row.metrics.get(metric)
    return _NONE if found is None else f"{found.median:{form}}"


def _memory(rows: Sequence[Row]) -> Table:
    table = _table("memory", "weights", "draft", "cache", "most in all")
    for row in rows:
        held = row.memory
        draft = "0" if row.configuration == PLAIN else _bytes(held.draft_bytes)
        ours = (_bytes(held.weights_bytes), draft, _bytes(held.cache_bytes))
        # A peer holds weights and caches of its own, of which it tells nothing.
        parts = (_NONE,) * len(ours) if row.peer else ours
        table.add_row(escape(row.configuration), *parts, _bytes(held.peak_bytes))
    return table


def _bytes(count: float | None) -> str:
    if count is None:
        return _NONE
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def _belongs(one: Stratum, row: Row) -> bool:
    return (one.adapter, one.temperature, one.batch) == (row.adapter, row.temperature, row.batch)


def _strata(strata: Sequence[Stratum], labels: Sequence[str]) -> Table:
    """Speed-ups; a part a row, a configuration a column."""
    table = _table("speed-up by parts", "prompts")
    for label in labels:
        table.add_column(escape(label), justify="right", overflow="fold")
    for by, group in groupby(strata, key=lambda one: one.by):
        table.add_row(f"[dim]{_BY[by]}[/]")
        for value, parts in groupby(group, key=_part):
            found = {one.configuration: one for one in parts}
            table.add_row(
                f"  {escape(value)}",
                str(max(one.prompts for one in found.values())),
                *(_cell(found.get(label)) for label in labels),
            )
    return table


def _part(one: Stratum) -> str:
    """Its value; and of a division across settings, what of the setting it does not go by."""
    told = [one.value]
    if one.by == "temperature" and one.batch != 1:
        told.append(f"batch {one.batch}")
    if one.by == "batch":
        told.append(f"temperature {one.temperature:g}")
    if None in (one.temperature, one.batch) and one.adapter:
        told.append(f"adapter {one.adapter}")
    return ", ".join(told)


def _cell(one: Stratum | None) -> str:
    if one is None or one.speedup is None:
        return _NONE
    told = f"{one.speedup:.2f}"
    if one.prompts >= ENOUGH_PROMPTS and one.low is not None and one.high is not None:
        if one.low > 1:
            return f"[green]{told}[/]"
        if one.high < 1:
            return f"[red]{told}[/]"
    return told
