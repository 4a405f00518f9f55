"""``outrider report``: the page of a measurement again from its log, or of two side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import options as o
from outrider.cli.places import check_place
from outrider.errors import UsageError

app = typer.Typer()


@app.command()
def report(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOG [LOG2]", help="What bench --log wrote; two are compared."),
    ],
    page: Annotated[
        Path | None, typer.Option("--html", help="Write a page with the pictures.")
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Tell what a log of outrider bench holds, or how two differ; nothing is measured.

    Two runs are compared configuration by configuration, on the prompts that both have. A run that
    is not finished will do.
    """
    if len(logs) > 2:
        raise UsageError(
            f"One log or two are wanted; got {len(logs)}.", hint="Compare them in pairs."
        )
    from outrider.cli.screen import Screen
    from outrider.lab.record import Log
    from outrider.report.bench import bench_page, comparison_page
    from outrider.report.figures import changes, measured
    from outrider.report.page import write_page
    from outrider.report.verdicts import compared, headline

    # Told before the logs are read, which takes a while where they are long.
    check_place(page)
    read = [Log(path) for path in logs]
    runs = [measured(log) for log in read]
    result: dict[str, Any]
    if len(runs) == 1:
        told = headline(runs[0])
        result = runs[0].summary.to_dict()
    else:
        found = changes(*runs)
        told = compared(found, runs)
        result = {
            "first": runs[0].summary.to_dict(),
            "second": runs[1].summary.to_dict(),
            "changes": [one.to_dict() for one in found],
        }
    if page is not None:
        names = (str(logs[0]), str(logs[-1]))
        html = bench_page(runs[0]) if len(runs) == 1 else comparison_page(*runs, names=names)
        write_page(page, html)
    if as_json:
        typer.echo(json.dumps(result | {"verdict": told.text, "sentence": told.sentence}))
        return
    screen = Screen()
    screen.out.print(told.text, markup=False, style="bold")
    screen.out.print(told.sentence, markup=False)
    if page is not None:
        screen.err.print(f"The page is in {page}.", markup=False)
