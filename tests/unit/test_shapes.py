"""The shapes and types that annotations promise, checked at run time on a part of the suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = [
    "tests/unit/test_distribution.py",
    "tests/unit/test_proposal.py",
    "tests/unit/test_reference.py",
    "tests/unit/test_cases.py::test_case_10_vocabularies_of_different_size",
    "tests/unit/test_cases.py::test_case_16_rates",
    "tests/unit/test_shapes.py",
]


@pytest.mark.skipif("OUTRIDER_SHAPES" in os.environ, reason="this run checks shapes already")
def test_annotations_hold():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *QUICK],
        cwd=root,
        env=os.environ | {"OUTRIDER_SHAPES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif("OUTRIDER_SHAPES" not in os.environ, reason="shapes are not checked here")
def test_a_wrong_shape_is_caught():
    import torch

    from outrider.core.distribution import Distribution

    with pytest.raises(Exception, match=r"scores|type|shape"):
        Distribution.softmax(torch.zeros(2, 3))
