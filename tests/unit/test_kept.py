"""Compiled functions are not taken up again when what they are made of has changed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from outrider.models.native import feed, kernels

DEPENDENT = """
from numba import njit
import constants
from constants import NUMBER
from outrider.models.native.kept import kept_with

@njit(cache=True)
{how}
def told():
    return NUMBER

print(told(), sum(told.stats.cache_hits.values()))
"""


@pytest.mark.parametrize(
    ("how", "second"), [("@kept_with(constants)", "2 0"), ("", "1 1")], ids=["kept", "as numba"]
)
def test_a_changed_constant_is_seen(tmp_path, how, second):
    """And without, what numba does: the number is the one that was compiled in."""
    (tmp_path / "dependent.py").write_text(DEPENDENT.format(how=how))
    told = []
    for number in (1, 1, 2):
        (tmp_path / "constants.py").write_text(f"NUMBER = {number}\n")
        done = subprocess.run(
            [sys.executable, "-B", "dependent.py"], cwd=tmp_path, capture_output=True, text=True,
            check=True, env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept")},
        )  # fmt: skip
        told.append(done.stdout.strip())
    assert told == ["1 0", "1 1", second]


def test_what_is_compiled_here_is_named_so():
    steps = [value for value in vars(kernels).values() if isinstance(value, kernels.Kernel)]
    names = {step._function.__qualname__ for step in steps}
    assert len(names) == len(steps) >= 10
    (suffix,) = {name.rsplit("-", 1)[1] for name in names}
    assert len(suffix) == 12
    assert "-" in feed._say_rows.py_func.__qualname__
