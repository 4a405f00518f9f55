"""What a log of measurements holds: on the terminal, as JSON, as rows and as a page."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from outrider.cli.places import check_place

if TYPE_CHECKING:
    from outrider.cli.screen import Screen
    from outrider.lab.record import Log, Run

__all__ = ["Csv", "Html", "check_places", "tell"]

_RESULTS = "Results"

Csv = Annotated[
    Path | None,
    typer.Option("--csv", help="Write a row for each generation.", rich_help_panel=_RESULTS),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write a page with pictures.", rich_help_panel=_RESULTS),
]


def check_places(csv_file: Path | None, page: Path | None) -> None:
    """Tell what cannot be written before anything is measured or read for it."""
    if page is not None:
        import outrider.report.bench  # noqa: F401, tells a missing jinja2
    for file in (csv_file, page):
        check_place(file)


def tell(screen: Screen, log: Log, csv_file: Path | None, page: Path | None, as_json: bool) -> None:
    """Everything that was asked for, from the log alone."""
    from outrider.lab.summary import summarize
    from outrider.lab.wording import conclusions, notes

    run = log.run()
    summary = summarize(run)
    told = list(notes(summary))
    if csv_file is not None:
        _write_csv(csv_file, run)
    if page is not None:
        from outrider.report.bench import bench_page
        from outrider.report.page import write_page

        write_page(page, bench_page(run))
    if as_json:
        result = {**summary.to_dict(), "notes": told, "conclusions": conclusions(summary)}
        typer.echo(json.dumps(result, ensure_ascii=False))
        return
    from outrider.cli.bench_table import show

    show(screen, summary)
    for note in told:
        screen.out.print(f"[yellow]{escape(note)}[/]")
    for name, file in (("rows are", csv_file), ("page is", page)):
        if file is not None:
            screen.err.print(f"The {name} in {file}.", markup=False)
    for line in conclusions(summary):
        screen.out.print(f"[bold]{escape(line)}[/]")


def _write_csv(path: Path, run: Run) -> None:
    """Whole or not at all."""
    from outrider.lab.table import columns, table_rows

    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, columns())
            writer.writeheader()
            writer.writerows(table_rows(run))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
