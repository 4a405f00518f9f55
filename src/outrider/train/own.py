"""Prompts that a target writes itself.

A chat model that is given its template up to where a user's message begins goes on with such a
message: one like those that it was trained on, which are of more kinds than anybody would list.

Source: Xu et al. 2024, "Magpie" (arXiv 2406.08464), section 2.1.
"""

from __future__ import annotations

import json
import os
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
    """So many different messages, in a folder's ``prompts.jsonl``; those that it holds stay.

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
    if path.exists():
        found = [json.loads(line)["prompt"] for line in path.read_text("utf-8").splitlines()]
        if len(found) >= count:
            return found[:count]
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
    prompts, made = [start] * (_TRIES * count), dict[str, None]()
    waiting = deque(range(len(prompts)))
    for answer in answers(model, prompts, waiting, options, words.eos_token_ids):
        said = answer.tokens[answer.prompt_length :]
        text = words.decode(said[:-1]).strip()
        if said[-1] in words.eos_token_ids and text and text not in made:
            made[text] = None
            if told is not None:
                told(len(made), count)
            if len(made) == count:
                break
    if len(made) < count:
        raise UsageError(
            f"The target wrote {len(made)} different messages in {len(prompts)} attempts; "
            f"{count} were asked for.",
            hint=f"Ask for fewer: --prompts {OWN}{len(made)}",
        )
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    lines = (json.dumps({"prompt": text}, ensure_ascii=False) for text in made)
    part.write_text("\n".join(lines) + "\n", "utf-8")
    os.replace(part, path)
    return list(made)


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
