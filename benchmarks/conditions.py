"""What every benchmark tells beside its figures: the machine, the versions and all arguments."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from outrider.lab.provenance import machine, precision_of, software

__all__ = [
    "bandwidth",
    "conditions",
    "model_parser",
    "print_conditions",
    "print_table",
    "write_json",
]

_LINE = 240
"""Wide enough that no row of a table is broken, wherever the output goes."""


def conditions(args: argparse.Namespace, model: Any = None) -> dict[str, Any]:
    """What the figures depend on; ``model`` is one of any runtime, if there is one."""
    told = software() | machine()
    if model is not None:
        kind = precision_of(model)
        told |= {"model": model.name, "class": type(model).__name__, "kind": kind or "unknown"}
    return {**told, **vars(args)}


def print_conditions(told: dict[str, Any]) -> None:
    """One line for each."""
    print("\n".join(f"{key:14s} {value}" for key, value in told.items()), "\n", flush=True)


def print_table(title: str, head: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table that can be pasted into Markdown."""
    table = Table(box=box.MARKDOWN)
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(width=_LINE)
    with console.capture() as text:
        console.print(table, highlight=False)
    # Rich leaves a line of spaces on both sides.
    lines = [line.rstrip() for line in text.get().splitlines()]
    print(f"{title}\n", *filter(None, lines), "", sep="\n", flush=True)


def write_json(path: str, told: dict[str, Any], **found: Any) -> None:
    """Conditions and results, if a path is given."""
    if path:
        text = json.dumps({"conditions": told, **found}, indent=1, default=str)
        Path(path).write_text(text + "\n")


def bandwidth(repeats: int = 12, megabytes: int = 512) -> float:
    """Bytes a second that the threads read at best: torch's sum over float32, the best of several.

    It is the roof over a pass that reads all weights once.
    """
    values = torch.ones(megabytes * 2**18)
    best = _best_of(repeats, values.sum)
    return values.nbytes / best


def _best_of(repeats: int, run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(max(1, repeats)):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that say which model is measured, and how it runs."""
    ap = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--target", default="smollm2-135m")
    ap.add_argument("--runtime", default="auto", help="auto, native or hf")
    ap.add_argument("--dtype", default="auto", help="auto, int8, bfloat16 or float32")
    return ap
