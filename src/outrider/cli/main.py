"""``outrider``: finds the subcommand, and turns errors into messages and exit codes."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from outrider.errors import OutriderError

__all__ = ["app", "main"]

_COMMANDS = ("generate", "chat", "demo", "audit", "models")


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
    try:
        app(args=arguments)
    except OutriderError as error:
        from rich.console import Console

        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[bold red]error:[/] {_escape(error.problem)}")
        if error.hint:
            console.print(f"  {_escape(error.hint)}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of a pipe went away, as `| head` does; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(1)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
