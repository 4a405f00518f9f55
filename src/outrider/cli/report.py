"""``outrider report``: a measurement again from its log, or two side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options as o
from outrider.cli.bench_results import Csv, Html, check_places, tell
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.cli.screen import Screen
    from outrider.lab.record import Log

app = typer.Typer()


@app.command()
def report(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOG [LOG2]", help="What bench --log wrote; two are compared."),
    ],
    csv_file: Csv = None,
    page: Html = None,
    as_json: o.AsJson = False,
) -> None:
    """Tell what a log of outrider bench holds, or how two differ; nothing is measured.

    Of one log it prints what bench printed at its end. Two runs are compared configuration by
    configuration, on the prompts that both have. A run that is not finished will do.
    """
    if len(logs) > 2:
        raise UsageError(
            f"One log or two are wanted; got {len(logs)}.", hint="Compare them in pairs."
        )
    if csv_file is not None and len(logs) == 2:
        raise UsageError(
            "--csv writes the rows of one log; got two.", hint="Write a file for each."
        )
    from outrider.cli.screen import Screen
    from outrider.lab.record import Log

    # Told before the logs are read, which takes a while where they are long.
    check_places(csv_file, page)
    read = [Log(path) for path in logs]
    if len(read) == 1:
        tell(Screen(), read[0], csv_file, page, as_json)
    else:
        _compare(Screen(), read[0], read[1], page, as_json)


def _compare(screen: Screen, first: Log, second: Log, page: Path | None, as_json: bool) -> None:
    from outrider.cli.bench_table import show_changes
    from outrider.report.figures import changes, measured
    from outrider.report.verdicts import compared

    runs = measured(first), measured(second)
    found = changes(*runs)
    told = compared(found, runs)
    if page is not None:
        from outrider.report.bench import comparison_page
        from outrider.report.page import write_page

        write_page(page, comparison_page(*runs, names=(str(first.path), str(second.path))))
    if as_json:
        result = {
            "first": runs[0].summary.to_dict(),
            "second": runs[1].summary.to_dict(),
            "changes": [one.to_dict() for one in found],
            "verdict": told.text,
            "sentence": told.sentence,
        }
        typer.echo(json.dumps(result, ensure_ascii=False))
        return
    show_changes(screen, [one.to_dict() for one in found])
    screen.out.print(told.text, markup=False, style="bold")
    screen.out.print(told.sentence, markup=False)
    if page is not None:
        screen.err.print(f"The page is in {page}.", markup=False)
