"""A LoRA adapter in PEFT's format, added to a model's weights as they are loaded, or beside them.

W' = W + s · B A with s = α / r, or α / √r where its configuration says ``use_rslora``. Merged, the
weights are changed; live, a layer adds s · B (A x) to what it gives. PEFT itself is not needed, and
nothing is unpickled.

Source: Hu et al. 2021 (arXiv 2106.09685), LoRA, section 4.1; √r, Kalajdzievski 2023 (arXiv
2312.03732), rsLoRA.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from outrider.errors import ModelFileError, ModelNotFoundError

__all__ = [
    "Adapter",
    "Change",
    "LiveAdapter",
    "Merging",
    "adapter_digest",
    "merge_into",
    "read_adapter",
]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_REFUSED = {
    "use_dora": "it is a DoRA adapter, which also scales whole rows of the weights",
    "modules_to_save": "it replaces whole modules (modules_to_save)",
    "trainable_token_indices": "it replaces rows of the embedding (trainable_token_indices)",
    "layer_replication": "it repeats layers (layer_replication)",
    "alora_invocation_tokens": "it acts on a part of a text only (alora_invocation_tokens)",
    "use_qalora": "it is a QA-LoRA adapter, which pools its inputs",
    "lora_bias": "it changes biases (lora_bias)",
}
"""What makes an adapter more than W + s · B A."""

_OWN_BASE = ("pissa", "olora", "corda", "loftq")
"""Beginnings (``init_lora_weights``) that also change the base, which is not in the file."""

_MERGE = "Merge it into its base (merge_and_unload in PEFT) and load the result."


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter adds to one matrix: scale · B A."""

    a: Float[Tensor, "r K"]
    b: Float[Tensor, "N r"]
    scale: float

    @property
    def shape(self) -> list[int]:
        """[N, K], as the matrix has them."""
        return [len(self.b), self.a.shape[1]]

    def delta(self) -> Float[Tensor, "N K"]:
        """Computed in float32, whatever the file has."""
        return self.scale * (self.b.float() @ self.a.float())


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read.

    Parameters
    ----------
    folder
        Where it came from.
    changes
        By the name of the weight, as transformers spells it.
    """

    folder: Path
    changes: Mapping[str, Change]

    def on(self, name: str, weight: Tensor, *, transposed: bool = False) -> Tensor:
        """A weight with its change, float32; as it came where there is none.

        Parameters
        ----------
        transposed
            The weight is stored [inputs, outputs], as GPT-2's are.

        Raises
        ------
        ModelFileError
            When the shapes do not fit.
        """
        change = self.changes.get(name)
        if change is None:
            return weight
        self.check(name, weight, transposed=transposed)
        delta = change.delta().to(weight.device)
        return weight.float() + (delta.T if transposed else delta)

    def check(self, name: str, weight: Tensor, *, transposed: bool = False) -> None:
        """Raise ``ModelFileError`` if the change of a weight is of another shape."""
        shape = self.changes[name].shape
        shape = shape[::-1] if transposed else shape
        if shape != list(weight.shape):
            raise ModelFileError(
                f"The adapter '{self.folder}' was made for another base: its change of '{name}' is "
                f"{shape}, the weight {list(weight.shape)}.",
                hint="Give the base that it was trained on.",
            )

    def absent(self, name: str) -> ModelFileError:
        """The error for a weight that the base does not have."""
        return ModelFileError(
            f"The adapter '{self.folder}' was made for another base: it changes '{name}', which "
            "this one does not have, or only as a part of another weight.",
            hint="Give the base that it was trained on.",
        )


class Merging:
    """A reader of tensors by name, with an adapter's changes on them.

    Parameters
    ----------
    read
        From a name to a tensor, or ``None`` if there is none of that name.
    adapter
        ``None`` changes nothing.
    """

    def __init__(self, read: Callable[[str], Tensor | None], adapter: Adapter | None) -> None:
        self._read = read
        self._adapter = adapter or Adapter(Path(), {})
        self._left = set(self._adapter.changes)

    def __call__(self, name: str) -> Tensor | None:
        """A tensor, changed if the adapter changes it."""
        found = self._read(name)
        if found is None:
            return None
        self._left.discard(name)
        return self._adapter.on(name, found)

    def changes(self, name: str) -> bool:
        """Whether the adapter changes a tensor."""
        return name in self._adapter.changes

    def check_all_used(self) -> None:
        """Raise ``ModelFileError`` if the adapter changes what nobody asked for."""
        if self._left:
            raise self._adapter.absent(min(self._left))


@torch.no_grad()
def merge_into(module: Any, adapter: Adapter) -> None:
    """Add an adapter to a transformers model, in the model's own dtype.

    Raises
    ------
    ModelFileError
        When a weight is absent, shared with another, or of another shape.
    """
    weights = dict(module.named_parameters(remove_duplicate=False))
    owners = Counter(map(id, weights.values()))
    for name in adapter.changes:
        weight = weights.get(name)
        # An output matrix that is the embedding too would change both.
        if weight is None or owners[id(weight)] > 1:
            raise adapter.absent(name)
        layer = module.get_submodule(name.rpartition(".")[0])
        weight.copy_(adapter.on(name, weight, transposed=_is_transposed(layer)))


def _is_transposed(layer: nn.Module) -> bool:
    """The kind of layer decides, as in PEFT: ``fan_in_fan_out`` is often left at its default."""
    return type(layer).__name__ == "Conv1D"


class LiveAdapter:
    """An adapter at work beside a transformers model's weights, which stay as they are.

    In each layer that it changes, y = W x becomes y = W x + s · B (A x), the second part in float32
    as in PEFT. An output matrix that is the embedding too changes as the former alone.

    Parameters
    ----------
    module
        The model.
    adapter
        What to run beside it.

    Raises
    ------
    ModelFileError
        When a layer is absent, of another shape, or not a linear one.
    """

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        self.adapter = adapter
        self.halves = nn.ModuleList()
        """All A and B, as the linear layers that they are."""
        self._hooks: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        layers = dict(module.named_modules(remove_duplicate=False))
        for name, change in adapter.changes.items():
            layer = layers.get(name.removesuffix(".weight"))
            if layer is None or not (isinstance(layer, nn.Linear) or _is_transposed(layer)):
                raise adapter.absent(name)
            weight: Any = layer.weight
            adapter.check(name, weight, transposed=_is_transposed(layer))
            a, b = (_linear(half, weight.device) for half in (change.a, change.b))
            self.halves.extend([a, b])
            self._hooks.append((layer, _adding(a, b, change.scale)))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """For one pass of the model; without it, the model is the base alone."""
        with ExitStack() as hooks:
            for layer, hook in self._hooks:
                hooks.callback(layer.register_forward_hook(hook).remove)
            yield


def _linear(weight: Float[Tensor, "N K"], device: torch.device) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.to(device, torch.float32), requires_grad=False)
    return made


def _adding(a: nn.Linear, b: nn.Linear, scale: float) -> Callable[..., Tensor]:
    def hook(_layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        added: Tensor = b(a(inputs[0].float()))
        return (out + added * scale).to(out.dtype)

    return hook


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter that ``save_pretrained`` of PEFT wrote.

    Raises
    ------
    ModelNotFoundError
        When there is no such folder.
    ModelFileError
        When a file is missing, broken or pickled, or the adapter is more than LoRA on matrices;
        it names the file and the reason.
    """
    config = _config(folder)
    file = folder / WEIGHTS
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - the handle is no mapping
                found = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", name)
                if found is None:
                    raise ValueError(f"'{name}' is not a part of a LoRA on a matrix")
                halves.setdefault(found[1], {})[found[2]] = stored.get_tensor(name)
        if not halves:
            raise ValueError("it holds no changes")
        changes = {f"{at}.weight": _change(at, pair, config) for at, pair in halves.items()}
    except (OSError, ValueError, KeyError, TypeError, re.error, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelFileError(
            f"The adapter '{file}' cannot be used: {reason}.", hint=f"Copy it again. {_MERGE}"
        ) from error
    return Adapter(folder, changes)


def adapter_digest(folder: Path) -> str:
    """A short SHA-256 of an adapter's two files, every byte of them.

    Raises
    ------
    ModelError
        As in ``read_adapter``, when the files are missing.
    """
    _config(folder)
    files = [folder / CONFIG, folder / WEIGHTS]
    stats = tuple((file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return _digest(tuple(file.resolve() for file in files), stats)


@lru_cache(maxsize=16)
def _digest(files: tuple[Path, ...], stats: tuple[tuple[int, int], ...]) -> str:
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()[:16]


def _config(folder: Path) -> dict[str, Any]:
    """An adapter's configuration, if it is for plain LoRA and the weights are beside it."""
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"There is no adapter '{folder}'.",
            hint="Give the folder that save_pretrained of PEFT wrote.",
        )
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
        if (kind := config.get("peft_type", "LORA")) != "LORA":
            raise ValueError(f"it is of the kind {kind}, not LORA")
        for name, reason in _REFUSED.items():
            if config.get(name):
                raise ValueError(reason)
        if config.get("bias", "none") != "none":
            raise ValueError(f"it changes biases (bias: {config['bias']!r})")
        begun = config.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_OWN_BASE):
            raise ValueError(f"it belongs to a base that {begun} changed too")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(
            f"The adapter's '{file}' cannot be used: {reason}.", hint=_MERGE
        ) from error
    if not (folder / WEIGHTS).is_file():
        pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt*")))
        reason = f"only pickled weights ({pickles[0]})" if pickles else "no weights"
        raise ModelFileError(
            f"The adapter '{folder}' has {reason}; {WEIGHTS} was expected.",
            hint="Pickles can run code, so they are not loaded; convert them with PEFT's "
            "save_pretrained on a machine that you trust them on."
            if pickles
            else "Copy the weights into the folder.",
        )
    return config


def _change(at: str, pair: Mapping[str, Tensor], config: Mapping[str, Any]) -> Change:
    """The change of one module, if its halves fit each other and the configuration."""
    if missing := {"A", "B"} - pair.keys():
        raise ValueError(f"'{at}' lacks lora_{missing.pop()}")
    a, b = pair["A"], pair["B"]
    rank = int(_for_module(at, config, "rank_pattern", config["r"]))
    alpha = float(_for_module(at, config, "alpha_pattern", config["lora_alpha"]))
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank or rank < 1:
        raise ValueError(
            f"the halves of '{at}' are {list(a.shape)} and {list(b.shape)}, not of rank {rank}"
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(f"the change of '{at}' holds numbers that are not finite")
    return Change(a, b, alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _for_module(at: str, config: Mapping[str, Any], patterns: str, default: Any) -> Any:
    """A value that the configuration may set for some modules, by the ends of their names."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", at):
            return value
    return default
