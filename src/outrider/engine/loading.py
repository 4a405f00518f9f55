"""From a name to a loaded model, and from two names to a target and a draft that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.errors import (
    ModelFileError,
    ModelNotFoundError,
    TokenizerMismatchError,
    UnknownNameError,
    UnsupportedError,
    UsageError,
)
from outrider.models.adapter import read_adapter
from outrider.models.heads.folder import read_head, shipped_head
from outrider.models.locate import Located, locate
from outrider.models.memory import INT4
from outrider.models.tokenizer import difference
from outrider.models.torchrun import SPREAD, check_started
from outrider.protocols import AdaptableModel, Head, Model, ParallelHeads, TappedModel, Tokenizer
from outrider.registry import RUNTIMES, did_you_mean

__all__ = [
    "ADAPTER_MODES", "adapted", "check_adapter_mode", "draft_device", "find_target", "load_draft",
    "load_head", "load_model", "load_parallel_heads", "parse_device", "parse_dtype",
    "read_fitting_head", "runtime_for",
]  # fmt: skip

ADAPTER_MODES = ["merged", "live"]
"""An adapter changes the weights as they are loaded, or runs beside them."""

_DTYPES = {
    "int4": INT4,
    "int8": torch.int8,
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

    ``tp`` is all processes that torchrun started, each with its own device.

    Raises
    ------
    UsageError
        When there is no such device, it holds no numbers (``meta``), or there are no processes.
    """
    if name is None or name == "auto":
        return None
    if name == SPREAD:
        check_started()
        return SPREAD
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


def draft_device(device: str | None) -> str | None:
    """Where a draft model runs beside a target on that device: whole, in the first process."""
    return None if device == SPREAD else device


def check_adapter_mode(mode: str, runtime: str = "auto") -> None:
    """Raise ``UsageError`` when there is no such mode, or the runtime does not have it."""
    if mode not in ADAPTER_MODES:
        raise UnknownNameError(
            f"There is no adapter mode '{mode}'.", hint=did_you_mean(str(mode), ADAPTER_MODES)
        )
    if mode == "live" and runtime in ("native", "toy"):
        raise UsageError(
            f"The runtime '{runtime}' has no live adapters.",
            hint="Use --runtime hf, or --adapter-mode merged.",
        )


def runtime_for(
    located: Located,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    adapter_mode: str = "merged",
) -> tuple[str, str]:
    """The runtime that takes a model, and why."""
    if located.kind == "toy":
        return "toy", "a toy model, with known probabilities"
    if adapter_mode == "live":
        return "hf", "live adapters run there alone"
    if device == SPREAD:
        return "hf", "targets are spread over processes there alone"
    from outrider.models.native.load import why_not

    reason = why_not(located, dtype, device)
    if reason is None:
        return "native", "a Llama-shaped model"
    return "hf", f"transformers runs what native does not: {reason}"


def find_target(target: str, adapter: str | Path | None = None) -> Located:
    """Locate a target and the LoRA adapter that belongs on it, if there is one.

    Raises
    ------
    UsageError
        When the target is no text, or a toy that is given an adapter.
    ModelError
        And its kinds, when either cannot be found or fetched.
    """
    if not isinstance(target, str):
        raise UsageError(
            f"A target is a name or a path, as text; got {target!r}.",
            hint="Example: smollm2-135m",
        )
    located = locate(target)
    if adapter is None:
        return located
    if located.kind == "toy":
        raise UsageError("A toy model takes no adapter.", hint="Leave --adapter out.")
    return replace(located, adapter=Path(adapter).expanduser())


def load_model(
    target: str | Located,
    *,
    runtime: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    adapter_mode: str = "merged",
) -> tuple[Model, Tokenizer]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    target
        A catalogue name, a ``.gguf`` file, a transformers folder, a hub id, or ``toy``; or what
        ``find_target`` made of one.
    runtime
        Name of a runtime; ``auto`` picks the one that fits.
    dtype, device
        As in the runtime's own ``load``; the device ``tp`` spreads the model over the processes
        that torchrun started (``models.tensor_parallel``).
    adapter_mode
        ``merged``: the located adapter is added to the weights. ``live``: it runs beside them.

    Raises
    ------
    UsageError
        When the runtime, the dtype or the device is not known, or the runtime does not have the
        adapter mode.
    ModelError
        And its kinds, when the model cannot be found, fetched, fitted or read.
    """
    options: dict[str, Any] = {"dtype": parse_dtype(dtype), "device": parse_device(device)}
    located = target if isinstance(target, Located) else find_target(target)
    check_adapter_mode(adapter_mode, runtime)
    if runtime == "auto":
        runtime, _ = runtime_for(located, options["dtype"], options["device"], adapter_mode)
    load = RUNTIMES.load(runtime)
    if options["device"] == SPREAD:
        load = _spread(runtime)
    if (located.kind == "toy") != (runtime == "toy"):
        raise UsageError(
            f"The runtime '{runtime}' cannot load '{located.name}'.",
            hint="Leave --runtime at auto.",
        )
    beside = located.adapter if adapter_mode == "live" else None
    adapter = None if beside is None else read_adapter(beside)  # before minutes of loading
    model, tokenizer = load(replace(located, adapter=None) if beside else located, **options)
    return adapted(model, adapter) if adapter else model, tokenizer


def _spread(runtime: str) -> Callable[..., tuple[Model, Tokenizer]]:
    if runtime != "hf":
        raise UsageError(
            f"The runtime '{runtime}' runs in one process; --device {SPREAD} needs several.",
            hint="Use --runtime hf, or another --device.",
        )
    from outrider.models.tensor_parallel import load  # torch.distributed is slow to import

    return load


def adapted(model: Model, adapter: Any) -> Model:
    """The model that runs with an adapter beside the same weights, or with none.

    Raises
    ------
    UsageError
        When its runtime has no live adapters.
    ModelFileError
        When the adapter was made for another base.
    """
    if not isinstance(model, AdaptableModel):
        raise UsageError(
            f"'{model.name}' is in a runtime that has no live adapters.",
            hint="Load it with --adapter-mode live, which the hf runtime offers.",
        )
    made: Model = model.with_adapter(adapter)
    return made


Check = Callable[[Path, Mapping[str, Any]], None]


def load_head(path: str, target: Model, check: Check | None = None) -> Head:
    """Load a draft head for a target; an empty path is the head that comes with it.

    Parameters
    ----------
    check
        Called with the head's folder and what its configuration says of it, before it is put to
        work.

    Raises
    ------
    ModelError
        When there is none, it cannot be read, or it was made for a model of other sizes.
    """
    found = _load_heads(path, target, check)
    if not isinstance(found, Head):
        raise UnsupportedError(
            f"'{path}' holds heads that predict side by side, not token after token.",
            hint=f"Use --drafter medusa:{path}",
        )
    return found


def load_parallel_heads(path: str, target: Model, check: Check | None = None) -> ParallelHeads:
    """Load heads that predict side by side, as ``load_head`` does one that drafts by itself."""
    found = _load_heads(path, target, check)
    if not isinstance(found, ParallelHeads):
        raise UnsupportedError(
            f"'{path}' holds a head that drafts token after token, not several side by side.",
            hint=f"Use --drafter eagle:{path}",
        )
    return found


def _load_heads(path: str, target: Model, check: Check | None) -> Any:
    if not isinstance(target, TappedModel):
        raise UnsupportedError(
            f"'{target.name}' gives out no hidden states, which a draft head reads.",
            hint="Use --runtime native, or a drafter such as suffix.",
        )
    if path.startswith("toy"):
        return target.make_head(locate(path))
    folder, module, about = read_fitting_head(path, target)
    if check is not None:
        check(folder, about)
    return target.make_head(module)


def read_fitting_head(path: str, target: Any) -> tuple[Path, Any, dict[str, Any]]:
    """A head's folder, its weights and the rest of its configuration; an empty path is the head
    that comes with the target.

    Parameters
    ----------
    target
        A model that offers ``protocols.TappedModel``.

    Raises
    ------
    ModelError
        When there is none, it cannot be read, or it was made for a model of other sizes.
    """
    folder = Path(path) if path else shipped_head(target.name)
    if folder is None:
        raise ModelNotFoundError(
            f"No draft head comes with '{target.name}'.",
            hint="Train one (outrider train), and give its folder: --drafter eagle:FOLDER.",
        )
    module, about = read_head(folder, target.layers, target.vocab_size)
    c = module.config
    fits = c.hidden == target.hidden_size and max(c.taps) < target.layers
    if not fits or c.vocab != target.vocab_size:
        raise ModelFileError(
            f"The draft head '{folder}' was made for another target: one of width {c.hidden} with "
            f"{c.vocab} tokens; '{target.name}' has {target.hidden_size} and {target.vocab_size}.",
            hint="Train one for this target.",
        )
    return folder, module, about


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
            hint="Use a draft of the target's own family, or let this one draft by its text: "
            f"--drafter crosstoken:{path}",
        )
    return model
