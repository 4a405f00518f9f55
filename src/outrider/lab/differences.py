"""What differs between the conditions of two runs, in words rather than in digests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["differences"]

_DIGEST = re.compile(r"[0-9a-f]{16,}")
_PROMPTS = "prompts_sha256"
_GROUPS = {
    "model": ("target", "fingerprint", "precision", "device", "class", "profile"),
    "prompts": (_PROMPTS,),
    "machine": ("system", "cpu", "threads", "gpu"),
    "versions": ("outrider", "torch", "transformers", "numba"),
}
"""What a condition is a part of; all others are arguments."""

_OWN_WORDS = {"class": "program", "profile": "what tune chose"}


def differences(then: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The named conditions that differ, gathered by what they are a part of.

    Parameters
    ----------
    then, now
        Conditions as JSON has them; what one lacks is ``None``.
    names
        Those that are compared.

    Example
    -------
    >>> differences({"seed": 1, "torch": "2.1"}, {"seed": 2, "torch": "2.2"}, ["seed", "torch"])
    ['arguments (seed was 1, here 2)', 'versions (torch was 2.1, here 2.2)']
    >>> differences({"prompts_sha256": "a"}, {"prompts_sha256": "b"}, ["prompts_sha256"])
    ['prompts (other texts)']
    """
    found: dict[str, list[str]] = {}
    for name in names:
        if then.get(name) != now.get(name):
            group = next((g for g, some in _GROUPS.items() if name in some), "arguments")
            said = (
                [_prompts(then, now)]
                if name == _PROMPTS
                else list(_told(_OWN_WORDS.get(name, _words(name)), then.get(name), now.get(name)))
            )
            found.setdefault(group, []).extend(said)
    return [f"{group} ({', '.join(said)})" for group, said in found.items()]


def _prompts(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Texts are not kept in a log; how many there were, and their names, are."""
    before, here = (list(one.get("prompt_ids") or ()) for one in (then, now))
    if len(before) != len(here):
        return f"{len(before)} there, {len(here)} here"
    changed = [(a, b) for a, b in zip(before, here, strict=True) if a != b]
    if not changed:
        return "other texts"
    return f"other prompts, first {changed[0][0]} there, {changed[0][1]} here"


def _told(name: str, then: Any, now: Any) -> Iterator[str]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in {**then, **now}:
            if then.get(key) != now.get(key):
                yield from _told(_words(key), then.get(key), now.get(key))
        return
    values = [_value(one) for one in (then, now)]
    # A digest says that something differs and nothing about what, and long values no more.
    if values[0] == values[1] or None in values:
        yield f"other {name}"
    else:
        yield f"{name} was {values[0]}, here {values[1]}"


def _value(one: Any) -> str | None:
    """Short enough to be read; ``None`` for a digest."""
    if isinstance(one, list):
        parts = [str(each["label"] if _labelled(each) else each) for each in one]
        return ", ".join(parts) or "none"
    if isinstance(one, Mapping) or (isinstance(one, str) and _DIGEST.fullmatch(one)):
        return None
    return "none" if one is None or one == "" else str(one)


def _labelled(one: Any) -> bool:
    return isinstance(one, Mapping) and "label" in one


def _words(name: str) -> str:
    return str(name).replace("_", " ")
