"""Draws docs/run.svg, the README's picture: a real run, token by token.

.venv/bin/python docs/picture.py
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from outrider import Engine
from outrider.cli.demo import EDIT
from outrider.cli.screen import Screen


def main() -> None:
    """Run the demo's edit and keep what the terminal would show."""
    screen = Screen()
    screen.out = screen.err = Console(
        record=True, width=100, file=io.StringIO(), force_terminal=True, highlight=False
    )
    screen.coloured = True
    engine = Engine.load("smollm2-135m", drafter="ngram")
    stream = engine.stream([{"role": "user", "content": EDIT}], max_tokens=160)
    screen.legend()
    screen.out.print()
    screen.stream(stream)
    screen.out.print()
    screen.summary(stream.output)
    svg = screen.out.export_svg(title="outrider generate --drafter ngram")
    Path(__file__).with_name("run.svg").write_text(svg)


if __name__ == "__main__":
    main()
