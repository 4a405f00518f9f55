"""What ``--help`` prints: a group of options under its heading, no name ever cut or broken."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import Any

from rich.text import Text

__all__ = ["show_help"]

_NAMES = 26
"""Columns for names; a longer one has a line of its own."""

_MOST = 100
"""Columns in all: longer lines are hard to read."""

_OF_THE_PROGRAM = ("install_completion", "show_completion")
"""Options that every command has, and that are about all of them."""

Rows = list[tuple[str, str]]


def show_help(*, obj: Any, ctx: Any, markup_mode: Any = None) -> None:
    """Print a command's help, in the place of ``typer.rich_utils.rich_format_help``.

    Typer's own puts names, types and words into one table of six columns, which at 80 columns
    leaves the words a few letters a line.
    """
    from outrider.cli.screen import console

    out = console(highlight=False, soft_wrap=True)
    width = min(out.width, _MOST)
    usage = obj.get_usage(ctx).replace("\n", " ")
    out.print(Text("\n".join(wrap(usage, width, subsequent_indent="    "))))
    for paragraph in inspect.cleandoc(obj.help or "").split("\n\n"):
        out.print()
        out.print(Text("\n".join(_lines(paragraph, width))))
    for title, rows in _panels(obj, ctx):
        out.print()
        out.print(Text(title, "bold"))
        for name, words in rows:
            out.print(_row(name, words, width))


def _panels(obj: Any, ctx: Any) -> Iterator[tuple[str, Rows]]:
    """Arguments and options by the panels that they are declared in, then commands."""
    found: dict[str, Rows] = {"Arguments": [], "Options": []}
    for param in obj.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None and (ctx.parent is None or param.name not in _OF_THE_PROGRAM):
            default = "Options" if param.param_type_name == "option" else "Arguments"
            panel = getattr(param, "rich_help_panel", None) or default
            found.setdefault(panel, []).append((_plain(record[0]), record[1]))
    if hasattr(obj, "list_commands"):
        commands = ((name, obj.get_command(ctx, name)) for name in obj.list_commands(ctx))
        found["Commands"] = [(name, _brief(command.help)) for name, command in commands]
    yield from ((title, rows) for title, rows in found.items() if rows)


def _plain(name: str) -> str:
    """With the type of one value: that an option may be repeated, its words say.

    >>> _plain("--batch <list[int]>"), _plain("--port <int range>")
    ('--batch <int>', '--port <int>')
    """
    return re.sub(r"<(?:list\[)?(\w+)(?:\]| range)?>", r"<\1>", name)


def _brief(help_: str | None) -> str:
    """The first paragraph."""
    return inspect.cleandoc(help_ or "").partition("\n\n")[0]


def _row(name: str, words: str, width: int) -> Text:
    lines = _lines(words, width - _NAMES) or [""]
    names = f"  {name}"
    if len(names) + 2 > _NAMES:
        lines.insert(0, "")
    text = Text(f"{names:<{_NAMES}}" if lines[0] else names, "cyan")
    return text.append(_under(lines), "default")


def _under(lines: Iterable[str]) -> str:
    return f"\n{' ' * _NAMES}".join(lines)


def _lines(words: str, width: int) -> list[str]:
    # An option's name is not broken at its hyphens.
    return wrap(" ".join(words.split()), width, break_on_hyphens=False, break_long_words=False)
