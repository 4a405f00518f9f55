"""From a name to a loaded model, and from two names to a target and a draft that fit."""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import TokenizerMismatchError, UsageError
from outrider.models.locate import Located, locate
from outrider.models.tokenizer import difference
from outrider.protocols import Model, Tokenizer
from outrider.registry import RUNTIMES, did_you_mean

__all__ = ["load_draft", "load_model", "parse_device", "parse_dtype", "runtime_for"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name; ``auto`` and ``None`` leave the choice to the runtime."""
    if name is None or isinstance(name, torch.dtype) or name == "auto":
        return name if isinstance(name, torch.dtype) else None
    if not isinstance(name, str) or name not in _DTYPES:
        raise UsageError(f"There is no dtype '{name}'.", hint=did_you_mean(str(name), _DTYPES))
    return _DTYPES[name]


def parse_device(name: str | torch.device | None) -> str | None:
    """A device that computes here; ``auto`` and ``None`` leave the choice to the runtime.

    Raises
    ------
    UsageError
        When there is no such device, or it holds no numbers (``meta``).
    """
    if name is None or name == "auto":
        return None
    try:
        if not isinstance(name, str | torch.device):
            raise TypeError("a device's name is text")
        device = torch.device(name)
        if device.type == "meta":
            raise ValueError("it holds no numbers")
        torch.empty(0, device=device)
    except Exception as error:  # each kind of device has its own way to be missing
        lines = str(error).strip().splitlines() or [type(error).__name__]
        known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise UsageError(
            f"The device '{name}' cannot be used: {lines[0].rstrip('.')}.",
            hint=f"Known here: {', '.join(known)}.",
        ) from error
    return "cpu" if device.type == "cpu" else str(device)


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
    UsageError
        When the runtime, the dtype or the device is not known.
    ModelError
        And its kinds, when the model cannot be found, fetched, fitted or read.
    """
    if not isinstance(target, str):
        raise UsageError(
            f"A target is a name or a path, as text; got {target!r}.",
            hint="Example: smollm2-135m",
        )
    options: dict[str, Any] = {"dtype": parse_dtype(dtype), "device": parse_device(device)}
    located = locate(target)
    if runtime == "auto":
        runtime, _ = runtime_for(located)
    load = RUNTIMES.load(runtime)
    if (located.kind == "toy") != (runtime == "toy"):
        raise UsageError(
            f"The runtime '{runtime}' cannot load '{target}'.", hint="Leave --runtime at auto."
        )
    loaded: tuple[Model, Tokenizer] = load(located, **options)
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
