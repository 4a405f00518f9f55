"""Prompts for a target to answer, so that a draft can learn from what the target itself writes.

They come from ``prompts.json``, written for Outrider: templates by kind, lists of subjects that
fill their slots, and short notes with questions. ``{role}`` draws from the list of that name,
``{role2}`` a second and different item, ``{n:2-9}`` an integer from 2 to 9; ``{sources}`` and
``{question}`` stand for two or three numbered notes and a question that one of them answers.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from random import Random
from typing import TypedDict

from outrider.errors import UsageError

__all__ = ["bundled_prompts"]

_EACH = 600  # prompts of each kind; every kind could make several times as many

_SLOT = re.compile(r"\{([a-z_]+)(\d*)(?::(\d+)-(\d+))?\}")


class _Note(TypedDict):
    text: str
    questions: list[str]


class _Source(TypedDict):
    templates: dict[str, list[str]]
    lists: dict[str, list[str]]
    notes: list[_Note]


def bundled_prompts(count: int, seed: int = 0) -> list[str]:
    """Distinct single-turn prompts, the kinds in turn: any prefix of the list is evenly mixed.

    The same count and seed give the same prompts, and a larger count only adds to the end.

    Parameters
    ----------
    count
        How many prompts to make.
    seed
        Which of the many possible selections to make.

    Raises
    ------
    UsageError
        When ``count`` is below 1 or above what the bundled set holds.

    Example
    -------
    >>> first, second = bundled_prompts(2)
    >>> first != second
    True
    """
    source = _source()
    kinds = list(source["templates"].values())
    most = _EACH * len(kinds)
    if not 1 <= count <= most:
        raise UsageError(
            f"The bundled set holds {most} prompts; {count} were asked for.",
            hint=f"Ask for 1 to {most}.",
        )
    rng = Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        templates = kinds[len(prompts) % len(kinds)]
        prompts[_fill(rng.choice(templates), source, rng)] = None
    return list(prompts)


@cache
def _source() -> _Source:
    text = files("outrider.train").joinpath("prompts.json").read_text(encoding="utf-8")
    source: _Source = json.loads(text)
    source["lists"]["note"] = [note["text"] for note in source["notes"]]
    return source


def _fill(template: str, source: _Source, rng: Random) -> str:
    """The template with a value in each slot; the same slot twice has the same value."""
    values: dict[str, str] = {}
    if "{sources}" in template:
        values = _sources(source["notes"], rng)
    for slot in _SLOT.finditer(template):
        if slot[1] + slot[2] in values:
            continue
        if slot[3]:
            value = str(rng.randint(int(slot[3]), int(slot[4])))
        else:
            taken = values.values()
            value = rng.choice([item for item in source["lists"][slot[1]] if item not in taken])
        values[slot[1] + slot[2]] = value
    return _SLOT.sub(lambda slot: values[slot[1] + slot[2]], template)


def _sources(notes: list[_Note], rng: Random) -> dict[str, str]:
    """Two or three numbered notes, and a question about one of them."""
    chosen = rng.sample(notes, rng.randint(2, 3))
    numbered = "\n\n".join(f"[{place}] {note['text']}" for place, note in enumerate(chosen, 1))
    return {"sources": numbered, "question": rng.choice(rng.choice(chosen)["questions"])}
