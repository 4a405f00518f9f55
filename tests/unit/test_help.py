"""``--help`` on a narrow terminal: no name is cut, no line too long."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import typer

from outrider.cli.main import app, main

GROUPS = ("models", "drafts")
ROOT = typer.main.get_command(app)


def commands() -> list[list[str]]:
    """Every command, as it is typed."""
    found: list[list[str]] = [[]]
    for name in ROOT.list_commands(None):
        found.append([name])
        if name in GROUPS:
            inner = ROOT.get_command(None, name)
            found += [[name, one] for one in inner.list_commands(None)]
    return found


def command_of(words: list[str]):
    command = ROOT
    for word in words:
        command = command.get_command(None, word)
    return command


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_fits_80_columns(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    assert left.value.code in (0, None)
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: ")
    assert max(map(len, shown.splitlines())) <= 80
    names = [name for param in command_of(words).params for name in param.opts
             if name.startswith("--") and "completion" not in name]  # fmt: skip
    lines = shown.splitlines()
    for name in names:
        assert any(re.match(rf"  (-\w, )?{name}( |$)", line) for line in lines), name
    assert ("--install-completion" in shown) == (words == [])


def test_commands_are_listed_with_a_line_of_what_they_do(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert re.search(r"^  bench +Measure drafters, rules", shown, re.MULTILINE)


def test_the_end_of_a_command_is_not_waited_for():
    """What libraries have made is not gone through once more; it took seconds."""
    told = "import atexit, gc; atexit.register(lambda: print('kept', gc.get_freeze_count() > 1000))"
    command = f"{told}; from outrider.cli.main import main; main(['--help'])"
    shown = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=120
    )
    assert shown.stdout.splitlines()[-1] == "kept True"
