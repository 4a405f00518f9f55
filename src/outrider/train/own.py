"""Prompts that a target writes itself.

A chat model that is given its template up to where a user's message begins goes on with such a
message: one like those that it was trained on, which are of more kinds than anybody would list.

Source: Xu et al. 2024, "Magpie" (arXiv 2406.08464), section 2.1.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

from outrider.engine.engine import Engine
from outrider.errors import UsageError
from outrider.models.native.model import NativeModel
from outrider.train.data import DataOptions, answers

__all__ = ["OWN", "own_prompts"]

OWN = "own:"
"""How ``--prompts`` begins that asks for so many of them."""

_LONGEST = 400
_TEMPERATURES = (1.0, 0.8)
_TWO = "A", "\u2042"
"""Messages that begin with different tokens."""
_TRIES = 4
"""Times as many as are wanted that are tried at most: some are said twice, or have no end."""


def own_prompts(
    engine: Engine,
    count: int,
    folder: Path,
    seed: int = 0,
    told: Callable[[int, int], None] | None = None,
) -> list[str]:
    """So many different messages. They are kept in a folder's ``prompts.jsonl``, each as it comes,
    so that a run that was broken off goes on.

    Parameters
    ----------
    engine
        Of a chat model in the native runtime.
    count
        How many.
    folder
        Where they are kept: a line each, as ``--prompts`` takes them too.
    seed
        Fixes all chance.
    told
        Called with the prompts there are and all of them.

    Raises
    ------
    UsageError
        When the target does not chat, or has no more to say.
    """
    path = folder / "prompts.jsonl"
    made = _read(path)
    if len(made) >= count:
        return list(made)[:count]
    model = engine.model
    assert isinstance(model, NativeModel)
    words, start = engine.tokenizer, _beginning(engine)
    if not start:
        raise UsageError(
            "The target's chat template begins with the message, so nothing calls for one.",
            hint="Give prompts: --prompts FILE, or a number of the bundled ones.",
        )
    assert words is not None
    options = DataOptions((), _LONGEST, _TEMPERATURES, seed)
    prompts = [start] * (_TRIES * count)
    waiting = deque(n for n in range(len(prompts)) if n not in set(made.values()))
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for answer in answers(model, prompts, waiting, options, words.eos_token_ids):
            said = answer.tokens[answer.prompt_length :]
            text = words.decode(said[:-1]).strip()
            if said[-1] not in words.eos_token_ids or not text or text in made:
                continue
            made[text] = answer.number
            line = {"prompt": text, "number": answer.number}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            if told is not None:
                told(len(made), count)
            if len(made) == count:
                return list(made)
    raise UsageError(
        f"The target wrote {len(made)} different messages in {len(prompts)} attempts; "
        f"{count} were asked for.",
        hint="Ask for fewer.",
    )


def _read(path: Path) -> dict[str, int]:
    """What was written before, and in which attempt; a line that was broken off is taken out."""
    if not path.exists():
        return {}
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        path.write_bytes(b"".join(lines[:-1]))
        lines.pop()
    found = map(json.loads, lines)
    return {line["prompt"]: line["number"] for line in found}


def _beginning(engine: Engine) -> list[int]:
    """The template's tokens before a user's first message."""
    words = engine.tokenizer
    if words is None or not words.has_chat_template:
        raise UsageError(
            "The target has no chat template, so it writes no messages of its own.",
            hint="Give prompts: --prompts FILE, or a number of the bundled ones.",
        )
    one, other = (engine.encode([{"role": "user", "content": text}]) for text in _TWO)
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), 0)]
