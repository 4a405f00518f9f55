"""Draws the pictures that show real runs of the default model.

.venv/bin/python -m docs.picture run     docs/run.svg, the README's: a run, token by token
.venv/bin/python -m docs.picture page    docs/page.png: the server's page in Chromium
.venv/bin/python -m docs.picture bench   docs/bench.png: the page of `outrider bench`, likewise
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from outrider import Engine
from outrider.cli.demo import EDIT
from outrider.cli.screen import Screen
from tests.e2e.browser import Browser, find_chromium

FOLDER = Path(__file__).parent


def run() -> None:
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
    (FOLDER / "run.svg").write_text(svg)


def page() -> None:
    """Ask the page's first example, with the comparison, and keep what the browser shows."""
    program = _chromium()
    command = [sys.executable, "-m", "outrider.cli.main", "serve", "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        address = json.loads(server.stdout.readline())["address"]
        with tempfile.TemporaryDirectory() as profile, Browser(program, Path(profile)) as browser:
            tab = browser.open(f"{address}/#chat", width=1200, height=1720)
            tab.wait_until("document.querySelectorAll('#examples button').length > 0")
            tab.evaluate("document.getElementById('options').elements.max_tokens.value = 160")
            for control in ("#examples button", "#compare", "#send"):
                tab.evaluate(f"document.querySelector('{control}').click()")
            tab.wait_until("document.querySelector('.comparison')?.dataset.same !== undefined")
            tab.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
            tab.screenshot(FOLDER / "page.png")
    finally:
        server.terminate()
        server.wait()


def bench() -> None:
    """Measure a few prompts of each kind, and keep the upper part of the page."""
    program = _chromium()
    with tempfile.TemporaryDirectory() as folder:
        made, profile = Path(folder) / "bench.html", Path(folder) / "profile"
        asked = ["bench", "-d", "auto", "-d", "ngram", "--limit", "2", "-n", "64", "--html", made]
        subprocess.run([sys.executable, "-m", "outrider.cli.main", *asked], check=True)
        with Browser(program, profile) as browser:
            tab = browser.open(made, width=1200, height=1500)
            tab.screenshot(FOLDER / "bench.png", whole=False)


def _chromium() -> str:
    program = find_chromium()
    if program is None:
        sys.exit("This picture needs Chromium, and none is installed.")
    return program


if __name__ == "__main__":
    {"run": run, "page": page, "bench": bench}[sys.argv[1]]()
