"""From a name to a loaded model, and from two names to a target and a draft that fit."""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import TokenizerMismatchError, UsageError
from outrider.models.locate import Located, locate
from outrider.models.tokenizer import difference
from outrider.protocols import Model, Tokenizer
from outrider.registry import RUNTIMES, did_you_mean

__all__ = ["load_draft", "load_model", "parse_dtype", "runtime_for"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name; ``auto`` and ``None`` leave the choice to the runtime."""
    if name is None or isinstance(name, torch.dtype) or name == "auto":
        return name if isinstance(name, torch.dtype) else None
    if name not in _DTYPES:
        raise UsageError(f"There is no dtype '{name}'.", hint=did_you_mean(name, _DTYPES))
    return _DTYPES[name]


def runtime_for(located: Located) -> tuple[str, str]:
    """The runtime that takes a model, and why."""
    if located.kind == "toy":
        return "toy", "a toy model, with known probabilities"
    return "hf", "any causal language model of transformers"


def load_model(
    target: str,
    *,
    runtime: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
) -> tuple[Model, Tokenizer]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    target
        A catalogue name, a ``.gguf`` file, a transformers folder, a hub id, or ``toy``.
    runtime
        Name of a runtime; ``auto`` picks the one that fits.
    dtype, device
        As in the runtime's own ``load``.

    Raises
    ------
    ModelError
        And its kinds, when the model cannot be found, fetched, fitted or read.
    """
    located = locate(target)
    if runtime == "auto":
        runtime, _ = runtime_for(located)
    load = RUNTIMES.load(runtime)
    if (located.kind == "toy") != (runtime == "toy"):
        raise UsageError(
            f"The runtime '{runtime}' cannot load '{target}'.", hint="Leave --runtime at auto."
        )
    loaded: tuple[Model, Tokenizer] = load(located, dtype=parse_dtype(dtype), device=device)
    return loaded


def load_draft(path: str, tokenizer: Tokenizer | None, **options: Any) -> Model:
    """Load a draft model and make sure that its token ids mean what the target's mean.

    Raises
    ------
    TokenizerMismatchError
        When they do not; the message names the first difference.
    """
    model, words = load_model(path, **options)
    if tokenizer is not None and (found := difference(tokenizer, words)):
        raise TokenizerMismatchError(
            f"The draft model '{path}' has another tokenizer than the target: {found}.",
            hint="Use a draft of the target's own family, or a drafter that needs no model: ngram.",
        )
    return model
