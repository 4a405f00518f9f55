"""Shared fixtures. With OUTRIDER_SHAPES=1 the shapes in the package's annotations are checked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Before the package is imported anywhere. The checks cost more than what they check, so one test
# runs a part of the suite with them (tests/unit/test_shapes.py).
if os.environ.get("OUTRIDER_SHAPES"):
    # What checks an annotation cannot be compiled.
    import outrider.core.noise
    import outrider.core.vectors  # noqa: F401

    install_import_hook("outrider", "beartype.beartype")

# Workers share the cores: one thread each, or they would wait for each other.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["OMP_NUM_THREADS"] = "1"

import torch

settings.register_profile(
    "outrider",
    deadline=None,  # speed is measured by benchmarks, never by a test
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("outrider")

PAIR_TOOL = Path(__file__).resolve().parents[2] / "shared/tools/get_pair.py"


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> Iterator[None]:
    """Thread counts change the order of float sums; two is what the project is tested on."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small models: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _packed_copies_of_test_models(tmp_path_factory) -> Iterator[None]:
    """Models made in a temporary folder leave no packed copy in the user's cache."""
    from outrider.models.native import load

    base = tmp_path_factory.getbasetemp().resolve()
    place = load._packed_folder

    def beside(path: Path, kind: str, adapter: str = "") -> Path:
        found = place(path, kind, adapter)
        inside = path.resolve().is_relative_to(base) and not found.resolve().is_relative_to(base)
        return base / "packed" / found.name if inside else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_packed_folder", beside)
        yield


@pytest.fixture(scope="session")
def smollm():
    """The default model's engine; fetched, and checked, on first use."""
    from outrider import Engine
    from outrider.errors import DownloadError

    try:
        return Engine.load("smollm2-135m")
    except DownloadError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def pair() -> tuple[str, str]:
    """Paths of the development pair: a 1.5B target and a 0.5B draft."""
    if not PAIR_TOOL.exists():
        pytest.skip("the development pair is fetched by a tool that is not beside this checkout")
    done = subprocess.run([sys.executable, str(PAIR_TOOL)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the development pair cannot be fetched here: {done.stderr[-200:]}")
    target, draft = done.stdout.split()
    return target, draft
