"""The benchmarks can be started, and the kernels' table runs what it measures."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.kernels import ENTRIES

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_how_it_is_used(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in ENTRIES if name.startswith("native")])
def test_our_kernels_are_measured(name):
    ready = ENTRIES[name].make(64, 128, 2)
    assert ready.size > 0
    for rows in (1, 8, 16):
        ready.feed(rows)()
