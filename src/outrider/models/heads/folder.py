"""A draft head on disk: ``config.json`` and ``model.safetensors`` in one folder.

The tensors bear the module's names, for EAGLE-3 those that checkpoints share; matrices are int8
with a float16 scale for every 64 inputs of a row (``NAME.q``, ``NAME.scale``), or floating point as
they are. Other projects' layouts are read too (``formats``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ModelFileError, ModelNotFoundError
from outrider.models.heads.eagle import EagleConfig, EagleModule
from outrider.models.heads.formats import is_shared, read_shared
from outrider.models.heads.medusa import MedusaConfig, MedusaModule

__all__ = ["CONFIG", "read_head", "shipped_head", "write_head"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_BLOCK = 64
_FORMATS: dict[str, tuple[Any, Any]] = {
    "outrider-eagle-1": (EagleConfig, EagleModule),
    "outrider-medusa-1": (MedusaConfig, MedusaModule),
}


def shipped_head(target: str) -> Path | None:
    """The folder of the head that comes with a target of the catalogue, if there is one."""
    folder = Path(__file__).parent / "shipped" / target
    return folder if target and (folder / CONFIG).is_file() else None


def write_head(module: EagleModule | MedusaModule, folder: Path, about: Mapping[str, Any]) -> None:
    """Save a head, each file in one step.

    Parameters
    ----------
    about
        What else belongs in ``config.json``: the target's fingerprint, how it was trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {"ids": module.ids.to(torch.int32)}
    for name, value in module.state_dict().items():
        if value.ndim == 2:
            state[f"{name}.q"], state[f"{name}.scale"] = _quantize(value.float())
        else:
            state[name] = value.float()
    save_file(state, part := folder / f"{WEIGHTS}.part")
    os.replace(part, folder / WEIGHTS)
    name = next(name for name, (_, kind) in _FORMATS.items() if isinstance(module, kind))
    config = {"format": name, "head": module.config.to_dict(), **about}
    (part := folder / f"{CONFIG}.part").write_text(json.dumps(config, indent=2) + "\n")
    os.replace(part, folder / CONFIG)


def read_head(
    folder: Path, layers: int | None = None, vocab: int | None = None
) -> tuple[EagleModule | MedusaModule, dict[str, Any]]:
    """A head, and the rest of its ``config.json``; also in the layouts that people share.

    Parameters
    ----------
    layers, vocab
        Of the target that it is for, which those layouts may leave open; see ``read_shared``.

    Raises
    ------
    ModelNotFoundError
        When there is no such folder.
    ModelFileError
        When a file is missing, broken, or of another kind; it names the file and the reason.
    UnsupportedError
        When it is a network that is not run here.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"There is no draft head '{folder}'.", hint="Give the folder that training made."
        )
    try:
        about = json.loads((folder / CONFIG).read_text())
        module = (
            read_shared(folder, about, layers, vocab) if is_shared(about) else _own(folder, about)
        )
        if not all(bool(p.isfinite().all()) for p in module.parameters()):
            raise ValueError("it holds numbers that are not finite")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError,
            SafetensorError) as error:  # fmt: skip
        reason = str(error).strip().splitlines()[0].rstrip(".")
        if isinstance(error, KeyError):
            reason = f"it says nothing of {reason}"
        raise ModelFileError(
            f"The draft head '{folder}' cannot be read: {reason}.",
            hint="Train it anew, or copy it again.",
        ) from error
    return module, {name: about[name] for name in about if name not in ("head", "format")}


def _own(folder: Path, about: Mapping[str, Any]) -> EagleModule | MedusaModule:
    """A head that ``write_head`` wrote."""
    if about.get("format") not in _FORMATS:
        raise ValueError(f"its format is {about.get('format')!r}, none of {', '.join(_FORMATS)}")
    sizes, kind = _FORMATS[about["format"]]
    fields = dict(about["head"])
    config = sizes(**(fields | {"taps": tuple(fields["taps"])}))
    module: EagleModule | MedusaModule = kind(config)
    with safe_open(folder / WEIGHTS, "pt") as stored:
        state = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    ids = state.pop("ids").long()
    if ids.shape != module.ids.shape or not ((ids >= 0) & (ids < config.vocab)).all():
        raise ValueError("its draft vocabulary does not fit its sizes")
    module.ids.copy_(ids)
    module.load_state_dict({name: _whole(state, name) for name in module.state_dict()})
    return module


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 for every block of inputs of a row."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % _BLOCK))
    blocks = padded.view(len(weight), -1, _BLOCK)
    scale = (blocks.abs().amax(-1) / 127 * (1 + 2**-10)).clamp_min(2**-24).half()
    q = (blocks / scale.float()[..., None]).round().to(torch.int8)
    return q.flatten(1)[:, : weight.shape[1]].contiguous(), scale


def _whole(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name in state:
        return state[name].float()
    q, scale = state[f"{name}.q"], state[f"{name}.scale"]
    worth = scale.float().repeat_interleave(_BLOCK, dim=1)[:, : q.shape[1]]
    return q.float() * worth
