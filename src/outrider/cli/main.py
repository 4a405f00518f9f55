"""``outrider``: finds the subcommand, and turns errors into messages and exit codes."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from outrider.cli.help import show_help
from outrider.errors import OutriderError

__all__ = ["app", "main"]

_COMMANDS = (
    "generate", "chat", "demo", "audit", "bench", "report", "plan", "tune", "models", "drafts",
    "train", "serve",
)  # fmt: skip


class _Lazy(TyperGroup):
    """Imports a subcommand's module when it is asked for, so that ``--help`` is quick."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        command = typer.main.get_command(import_module(f"outrider.cli.{cmd_name}").app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Lazy,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from outrider import __version__

        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Exact speculative decoding that can be proved and measured."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake ends in a message, never in a traceback."""
    # At its end Python would go through all objects that libraries have made, for a second or two.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a question mark.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    import typer.rich_utils

    typer.rich_utils.rich_format_help = show_help
    if os.environ.get("NO_COLOR"):
        typer.rich_utils.COLOR_SYSTEM = None
    try:
        try:
            app(args=arguments)
        finally:
            sys.stdout.flush()  # a full disk shows itself here at the latest
    except OutriderError as error:
        _tell(error.problem, error.hint)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of a pipe went away, as `| head` does; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        where = f"'{error.filename}'" if error.filename else "The output"
        _tell(f"{where} could not be read or written: {error.strerror or error}.")
        _drop_output()
        sys.exit(getattr(error, "exit_code", 1))


def _tell(problem: str, hint: str = "") -> None:
    from rich.markup import escape

    from outrider.cli.screen import console

    with suppress(OSError):
        err = console(stderr=True, soft_wrap=True)
        err.print(f"[bold red]error:[/] {escape(problem)}")
        if hint:
            err.print(f"  {escape(hint)}")


def _drop_output() -> None:
    """Point standard output away, or what it still holds would fail again at exit."""
    with suppress(OSError):  # it may be no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    main()
