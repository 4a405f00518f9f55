"""From a target and prompts to a draft in a folder, each step resumable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.prompts import read_prompts as records
from outrider.errors import UsageError
from outrider.models.native.model import NativeModel
from outrider.train.data import DataOptions, generate_data, read_data
from outrider.train.methods import find_method
from outrider.train.own import OWN, own_prompts
from outrider.train.prompts import bundled_prompts
from outrider.train.recipe import Recipe, default_taps
from outrider.train.trainer import Progress, Validation, train

__all__ = ["Recipe", "default_taps", "read_prompts", "train_draft"]

_HELD_OUT = 40
"""One sequence of so many is kept for validation; of few, eight all the same."""


def read_prompts(source: int | str, seed: int = 0) -> list[Any]:
    """So many of the bundled training prompts, or those of a file that ``bench`` reads too.

    Raises
    ------
    PromptError
        When the file cannot be read as such, or holds no prompt.
    """
    if isinstance(source, int):
        return list(bundled_prompts(source, seed))
    return [record.prompt for record in records(source)]


def train_draft(
    engine: Engine,
    recipe: Recipe,
    folder: Path,
    *,
    data: Path | None = None,
    about: dict[str, Any] | None = None,
    told_data: Callable[[int, int], None] | None = None,
    told: Callable[[Progress], None] | None = None,
    max_bytes: int = 8 * 2**30,
    deadline_s: float = math.inf,
) -> Validation:
    """Generate data, fit a draft, and write it.

    Parameters
    ----------
    engine
        Of the target, in the native runtime.
    folder
        Where the draft goes; checkpoints go into ``folder/training``.
    data
        Where data go; ``folder/data`` by default.
    about
        What else to put down in the draft's record.
    told_data, told
        Called as data are generated, and as the draft is fitted.

    Raises
    ------
    UsageError
        When the target's runtime gives no hidden states, an option is not for the method, or
        options differ from those of an earlier run in the same folder.
    ModelError
        When what it is to begin from cannot be read, or does not fit the target.
    """
    chosen = find_method(recipe.method)
    model = engine.model
    if not isinstance(model, NativeModel):
        raise UsageError(
            f"Training reads hidden states in the native runtime; '{model.name}' is not in it.",
            hint="Use --runtime native, if the model is of a family that it runs.",
        )
    method = chosen(engine, model, recipe)
    data = data or folder / "data"
    prompts = [
        engine.encode(p if not isinstance(p, str) else _message(engine, p))
        for p in _prompts(engine, recipe, data, told_data)
    ]
    ends = engine.tokenizer.eos_token_ids if engine.tokenizer else frozenset()
    drawn = DataOptions(method.taps, recipe.max_answer, seed=recipe.options.seed)
    made_for = engine.fingerprint()
    target = None if made_for is None else made_for.to_dict()
    generate_data(
        model, prompts, data, drawn, ends=ends, made_by=target, max_bytes=max_bytes,
        progress=told_data,
    )  # fmt: skip
    examples = list(read_data(data))
    every = max(2, min(_HELD_OUT, len(examples) // 8))
    held_out = examples[::every]
    kept = [one for i, one in enumerate(examples) if i % every]
    fit = method.fit(kept)
    found = train(
        fit, kept, held_out, folder / "training", recipe.options, told,
        identity=recipe.identity(), deadline_s=deadline_s,
    )  # fmt: skip
    training = {
        "recipe": asdict(recipe),
        "began_from": method.began_from,
        "tokens": sum(len(e.tokens) for e in kept),
        "validation": asdict(found),
    }
    record: dict[str, Any] = {} if target is None else {"target": target}
    method.write(fit, folder, record | {"training": training} | (about or {}))
    return found


def _prompts(
    engine: Engine, recipe: Recipe, data: Path, told: Callable[[int, int], None] | None
) -> list[Any]:
    """Those of each source that the recipe names, one after the other."""
    source, seed = recipe.prompts, recipe.options.seed
    if isinstance(source, int) or Path(source).exists():
        return read_prompts(source, seed)
    found: list[Any] = []
    for one in source.split(","):
        if not one.startswith(OWN):
            found += read_prompts(int(one) if one.isdecimal() else one, seed)
            continue
        count = one.removeprefix(OWN)
        if not count.isdecimal() or int(count) < 1:
            raise UsageError(
                f"How many prompts of the target's own? Got '{one}'.",
                hint=f"Example: --prompts {OWN}2000",
            )
        found += own_prompts(engine, int(count), data, seed, told)
    return found


def _message(engine: Engine, text: str) -> Any:
    """A text as a user's message, where the target chats."""
    chats = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    return [{"role": "user", "content": text}] if chats else text
