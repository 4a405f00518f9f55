"""What `outrider tune` found fastest for a target on this machine, kept for later runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.errors import UsageError
from outrider.models.catalogue import cache_folder
from outrider.models.fingerprint import Fingerprint
from outrider.models.machine import cpu_name

__all__ = [
    "Choice",
    "Profile",
    "check_profiles",
    "find_profile",
    "forget_profile",
    "has_profiles",
    "here",
    "profile_path",
    "write_profile",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to decode, and what it was worth where it was chosen.

    Parameters
    ----------
    drafter, rule, draft_length
        By name, as ``Engine`` takes them; the drafter ``none`` is plain decoding.
    speedup, low, high
        Against plain decoding on the prompts it was chosen on: the geometric mean over prompts, and
        its interval.
    prompts, level
        How many prompts that were, and the interval's level.
    """

    drafter: str
    rule: str = "auto"
    draft_length: int | str = "auto"
    speedup: float = 1.0
    low: float = 1.0
    high: float = 1.0
    prompts: int = 0
    level: float = 0.95


@dataclass(frozen=True, slots=True)
class Profile:
    """The choices for one target on one machine.

    Parameters
    ----------
    target
        Its name.
    fingerprint
        Of its weights, tokenizer, template, adapter and precision.
    machine
        Processor and threads, or GPU.
    greedy, sampled
        The choice at temperature 0, and above; ``None`` where it was not tuned.
    about
        How it was tuned.
    """

    target: str
    fingerprint: dict[str, str]
    machine: dict[str, Any]
    greedy: Choice | None = None
    sampled: Choice | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def choice(self, greedy: bool) -> Choice | None:
        """What to use."""
        return self.greedy if greedy else self.sampled


def here(model: Any) -> dict[str, Any]:
    """What of the machine and of the model's runtime a profile depends on."""
    told: dict[str, Any] = {"runtime": type(model).__name__}
    device = str(getattr(model, "device", "cpu"))
    if device.startswith("cuda"):
        return told | {"gpu": torch.cuda.get_device_name(device)}
    return told | {"cpu": cpu_name(), "threads": torch.get_num_threads()}


def profile_path(fingerprint: Fingerprint, machine: Mapping[str, Any]) -> Path:
    """Where the profile of a target on a machine is kept."""
    told = json.dumps([fingerprint.to_dict(), dict(machine)], sort_keys=True)
    return cache_folder() / "profiles" / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"


def check_profiles() -> None:
    """Raise ``UsageError`` if none can be kept: better before a long search than after it."""
    folder = cache_folder() / "profiles"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".part").touch()
        (folder / ".part").unlink()
    except OSError as error:
        raise UsageError(
            f"No profile can be kept in '{folder}': {error.strerror}.",
            hint="Set OUTRIDER_CACHE to a folder that can be written to, or add --dry-run.",
        ) from error


def has_profiles() -> bool:
    """Whether there are any: a fingerprint takes a moment, and most have none."""
    return any((cache_folder() / "profiles").glob("*.json"))


def find_profile(fingerprint: Fingerprint | None, model: Any) -> Profile | None:
    """The profile of a target, in the runtime of ``model``, on this machine, if there is one.

    Raises
    ------
    UsageError
        When the file is broken.
    """
    if fingerprint is None:
        return None
    path = profile_path(fingerprint, here(model))
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(told[name], dict) for name in ("fingerprint", "machine", "about")):
            raise TypeError("its parts are no objects")
        choices = {
            name: _choice(told[name]) if told[name] is not None else None
            for name in ("greedy", "sampled")
        }
        return Profile(told["target"], told["fingerprint"], told["machine"], about=told["about"],
                       **choices)  # fmt: skip
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"The profile '{path}' cannot be read: {error}.",
            hint="Delete it, or run outrider tune again.",
        ) from error


def _choice(told: Mapping[str, Any]) -> Choice:
    made = Choice(**told)
    numbers = made.speedup, made.low, made.high, made.level, made.prompts
    texts = made.drafter, made.rule
    if not (
        all(isinstance(x, int | float) for x in numbers)
        and all(isinstance(x, str) for x in texts)
        and isinstance(made.draft_length, int | str)
    ):
        raise TypeError("a choice holds something of another kind")
    return made


def write_profile(profile: Profile) -> Path:
    """Keep a profile, in one step; where it lies."""
    path = profile_path(Fingerprint.from_dict(profile.fingerprint), profile.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)
    return path


def forget_profile(fingerprint: Fingerprint, model: Any) -> bool:
    """Delete the profile that ``find_profile`` would find; whether there was one."""
    path = profile_path(fingerprint, here(model))
    if not path.exists():
        return False
    path.unlink()
    return True
