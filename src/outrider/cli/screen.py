"""What the terminal shows: tokens by their origin, progress, and what a run cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from outrider.engine.generation import Output, Piece
    from outrider.protocols import Progress as Report

__all__ = ["Screen", "console", "load_engine", "prefill_bar"]

_STYLES = {
    "accepted": "green",
    "correction": "bold yellow",
    "bonus": "cyan",
    "plain": "",
}
_LEGEND = (
    ("accepted", "drafted and kept"),
    ("correction", "repaired by the target"),
    ("bonus", "bonus after a kept draft"),
    ("plain", "no draft"),
)
_LONG_PROMPT_TOKENS = 512
_UNSTEADY = 1.5  # turns that differ by more than this say little


def console(**options: Any) -> Console:
    """A console that, where ``NO_COLOR`` is set, writes no dim or bold letters either."""
    plain: dict[str, Any] = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Console(**plain, **options)


class Screen:
    """Text goes to standard output, everything else to standard error.

    Colours appear only where standard output is a terminal and ``NO_COLOR`` is not set.
    """

    def __init__(self) -> None:
        self.out = console(highlight=False, soft_wrap=True)
        self.err = console(stderr=True, highlight=False)
        self.err.soft_wrap = not self.err.is_terminal
        self.coloured = self.out.is_terminal and not os.environ.get("NO_COLOR")

    def legend(self) -> None:
        """Which colour means what; nothing where there are no colours."""
        if self.coloured:
            words = [Text("■ ", _STYLES[o]).append(name, "dim") for o, name in _LEGEND]
            self.err.print(Text("   ").join(words))

    def piece(self, piece: Piece) -> None:
        """One token's text, in the colour of its origin."""
        if piece.text:
            style = _STYLES[piece.origin] if self.coloured else ""
            self.out.print(Text(piece.text, style), end="")
            self.out.file.flush()

    def stream(self, pieces: Any) -> None:
        """All pieces of a generation, and a line's end after them."""
        for piece in pieces:
            self.piece(piece)
        self.out.print()

    def summary(self, output: Output) -> None:
        """What was drafted, kept and repaired, and how long it took."""
        s = output.trace.summary()
        self.err.print(
            f"[dim]{_count(s['emitted_tokens'], 'token')} in {s['total_time_ms'] / 1e3:.2f} s "
            f"({s['tokens_per_s']:.1f} tokens/s) · {_count(s['target_calls'], 'target call')}, "
            f"{s['tokens_per_target_call']:.2f} tokens each · drafted {s['drafted_tokens']}, kept "
            f"{s['accepted_tokens']}{_percent(s['acceptance_rate'])}, repaired "
            f"{s['correction_tokens']} · {output.drafter}/{output.rule} · ended by "
            f"{output.finish_reason}[/]"
        )

    def comparison(self, with_draft: list[Output], plain: list[Output]) -> None:
        """Speculation beside plain decoding of the same prompt, medians of all turns."""
        table = Table(title=None, box=None, pad_edge=False, header_style="bold")
        for column in ("", "tokens/s", "time s", "first ms", "calls", "tokens/call", "kept"):
            table.add_column(column, justify="left" if not column else "right")
        for name, runs in ((with_draft[0].drafter, with_draft), ("plain", plain)):
            s = [run.trace.summary() for run in runs]
            table.add_row(
                name,
                f"{median(r['tokens_per_s'] for r in s):.1f}",
                f"{median(r['total_time_ms'] for r in s) / 1e3:.2f}",
                f"{median(r['ttft_ms'] for r in s):.0f}",
                f"{s[0]['target_calls']}",
                f"{s[0]['tokens_per_target_call']:.2f}",
                _percent(s[0]["acceptance_rate"]).strip(" ()") or "none drafted",
            )
        self.err.print(table)
        turns = speedups(with_draft, plain)
        self.err.print(
            f"[bold]{median(turns):.2f} times the speed of plain decoding[/] "
            f"(turns: {min(turns):.2f} to {max(turns):.2f})",
            end="; ",
        )
        ours, theirs = with_draft[0].token_ids, plain[0].token_ids
        if ours == theirs:
            self.err.print(f"all {len(ours)} tokens are the same.")
        if max(turns) > _UNSTEADY * min(turns):
            self.err.print("[yellow]The turns disagree: other work runs on this machine.[/]")
        if ours == theirs:
            return
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        at = min(len(ours), len(theirs)) if at is None else at
        self.err.print(f"The texts part at token {at}. Plain decoding says:")
        self.out.print(Text(plain[0].text))


def speedups(with_draft: list[Output], plain: list[Output]) -> list[float]:
    """Ratio of token rates in each turn: what slows a turn down slows both sides."""
    rates = ([o.trace.summary()["tokens_per_s"] for o in runs] for runs in (with_draft, plain))
    return [ours / theirs for ours, theirs in zip(*rates, strict=True)]


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def _percent(rate: float | None) -> str:
    return "" if rate is None else f" ({rate:.0%})"


def load_engine(
    screen: Screen,
    target: str,
    *,
    temperature: float = 0.0,
    adapter: str | None = None,
    strict: bool = False,
    **options: Any,
) -> Any:
    """``Engine.load`` with a sign of life while torch and the weights come in.

    A mistake in the options is told before anything is fetched. ``temperature`` is that of the
    requests to come, which the rule must be fit for.
    """
    from outrider.models.locate import is_present
    from outrider.models.torchrun import follows

    # Off a terminal, a spinner would leave an empty line behind; and one process draws for all.
    def waiting() -> AbstractContextManager[Any]:
        drawn = screen.err.is_terminal and not follows(options.get("device"))
        return screen.err.status(f"loading {target} ...") if drawn else nullcontext()

    with waiting():
        from outrider import Engine
        from outrider.engine.engine import check_load

        check_load(**options, temperature=temperature)
    if not is_present(target):
        from outrider.cli.models import pull_with_bar

        pull_with_bar(target)
    with waiting():
        return Engine.load(target, adapter=adapter, strict=strict, **options)


@contextmanager
def prefill_bar(screen: Screen) -> Iterator[Report]:
    """A bar that appears only if the prompt is long."""
    bar = Progress(
        TextColumn("reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen.err,
        transient=True,
    )
    task = bar.add_task("prefill")

    def report(done: int, total: int) -> None:
        if total > _LONG_PROMPT_TOKENS:
            bar.start()
            bar.update(task, completed=done, total=total)
            if done >= total:  # the text is about to come
                bar.stop()

    try:
        yield report
    finally:
        # A bar that was never started would still end with an empty line.
        if bar.live.is_started:
            bar.stop()
