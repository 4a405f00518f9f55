"""Where figures come from: versions, machine, model, code and arguments."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from outrider.models.machine import cpu_name

__all__ = ["commit", "cpu_name", "machine", "model_conditions", "precision_of", "software"]

_PACKAGES = ("outrider", "torch", "transformers", "numba", "numpy")
_GIT_S = 10.0


def commit(folder: Path | None = None) -> str | None:
    """The state of the repository that holds this code; ``-dirty`` where files differ from it.

    ``None`` for code outside a repository, such as an installed package: a repository around it
    that does not track it says nothing about it.
    """
    place = folder or Path(__file__).parent
    if _git(place, "ls-files", "--error-unmatch", ".") is None:
        return None
    return _git(place, "describe", "--always", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def software() -> dict[str, Any]:
    """Versions of what takes part, and the state of the code."""
    told: dict[str, Any] = {"commit": commit(), "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            told[name] = version(name)
        except PackageNotFoundError:
            told[name] = None
    return told


def machine() -> dict[str, Any]:
    """Processor, threads, memory, and the GPUs that there are."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": ", ".join(gpu.name for gpu in gpus) or None,
        "gpu_memory_bytes": [gpu.total_memory for gpu in gpus] or None,
        "cuda": torch.version.cuda,
    }


def precision_of(model: Any) -> str | None:
    """Of a model's weights; ``None`` where it does not tell."""
    kind = getattr(model, "kind", None)
    return None if kind is None else str(kind)


def _choices(profile: Any) -> dict[str, Any] | None:
    """What `auto` stands for, where outrider tune has said so."""
    if profile is None:
        return None
    found = {"greedy": profile.greedy, "sampled": profile.sampled}
    return {name: asdict(one) if one is not None else None for name, one in found.items()}


def model_conditions(engine: Any) -> dict[str, Any]:
    """What is known of an engine's target: its name, class, precision, place and fingerprint."""
    model = engine.model
    print_ = engine.fingerprint()
    return {
        "model": model.name,
        "class": type(model).__name__,
        "precision": precision_of(model),
        "device": str(getattr(model, "device", "cpu")),
        "vocab_size": model.vocab_size,
        "fingerprint": None if print_ is None else print_.to_dict(),
        "profile": _choices(engine.profile),
    }
