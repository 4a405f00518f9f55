"""The drafts on this machine that were fitted to a target, and what each says of itself.

A draft head says it in its ``config.json``. A small language model is a folder of transformers,
whose ``config.json`` is not ours, so there it is in ``outrider.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from outrider.errors import ModelFileError, ModelNotFoundError
from outrider.models import catalogue
from outrider.models.heads.formats import is_shared

__all__ = ["RECORD", "DraftHead", "describe", "find_heads", "read_record", "write_record"]

RECORD = "outrider.json"
_CONFIG = "config.json"
_MODEL = "outrider-model-1"
_SIZES = {"layers": "num_hidden_layers", "hidden": "hidden_size", "vocab": "vocab_size"}
_SHIPPED = Path(__file__).parent / "heads" / "shipped"


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A draft head or model, as its folder describes it; read without loading it.

    Parameters
    ----------
    folder
        Where it is.
    kind
        The drafter that runs it: ``--drafter KIND:FOLDER``.
    sizes
        Its shape: ``hidden``, ``taps``, ``draft_vocab``, ``vocab`` and so on, as its kind has them,
        ``layers`` for a model;
        all of the configuration in a layout of another project.
    parameters
        Number of weights.
    file_bytes
        Of its folder's files for running it.
    target
        The fingerprint of the target that it was made for; ``None`` if it does not say.
    about
        What else its configuration holds, such as how it was trained.
    """

    folder: Path
    kind: str
    sizes: dict[str, Any]
    parameters: int
    file_bytes: int
    target: dict[str, str] | None
    about: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "folder": str(self.folder),
            "kind": self.kind,
            **self.sizes,
            "parameters": self.parameters,
            "file_bytes": self.file_bytes,
            "target": self.target,
            "about": self.about,
        }


def find_heads() -> Iterator[tuple[str, Path]]:
    """Folders that hold a draft, each with where it was found: those that come with the
    package, those in the cache folder's ``drafts``, and those in the folders that the variable
    ``OUTRIDER_DRAFTS`` names."""
    yield from (("shipped", folder) for folder in _heads_in(_SHIPPED))
    yield from (("cache", folder) for folder in _heads_in(catalogue.cache_folder() / "drafts"))
    for place in filter(None, os.environ.get("OUTRIDER_DRAFTS", "").split(os.pathsep)):
        yield from (("OUTRIDER_DRAFTS", folder) for folder in _heads_in(Path(place).expanduser()))


def write_record(folder: Path, about: Mapping[str, Any]) -> None:
    """Say of a language model what it was fitted to, and how."""
    (part := folder / f"{RECORD}.part").write_text(
        json.dumps({"format": _MODEL, **about}, indent=2) + "\n"
    )
    os.replace(part, folder / RECORD)


def read_record(folder: Path) -> dict[str, Any] | None:
    """What a language model says of its target and training; ``None`` if it does not say.

    Raises
    ------
    ModelFileError
        When it says so in a file that is broken.
    """
    file = folder / RECORD
    try:
        if not file.is_file():
            return None
        about = json.loads(file.read_text())
        if not isinstance(about, dict) or about.get("format") != _MODEL:
            raise ValueError(f"its format is not {_MODEL}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(
            f"'{file}' cannot be read as a draft model's: {reason.rstrip('.')}.",
            hint="Train the model anew, or copy it again.",
        ) from error
    return about


def describe(folder: Path) -> DraftHead:
    """What a folder's draft is.

    Raises
    ------
    ModelNotFoundError
        When there is no such folder.
    ModelFileError
        When it holds no head, or a broken one; it names the file and the reason.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"There is no draft head '{folder}'.", hint="Give the folder that training made."
        )
    file = folder / _CONFIG
    try:
        about = json.loads(file.read_text())
        if not isinstance(about, dict):
            raise ValueError("it holds no object")
        target = about.pop("target", None)
        if (record := read_record(folder)) is not None:
            kind, target = "model", record.pop("target", None)
            sizes = {name: about.get(key) for name, key in _SIZES.items()}
            about = {name: record[name] for name in record if name != "format"}
        elif is_shared(about):
            kind, sizes, about = "eagle", about, {}
        else:
            form = about.pop("format", None)
            if not isinstance(form, str) or not form.startswith("outrider-"):
                raise ValueError(f"its format is {form!r}, none that is known")
            # outrider-eagle-1 is the first layout of what the drafter 'eagle' runs.
            kind = form.removeprefix("outrider-").rpartition("-")[0]
            sizes = dict(about.pop("head"))
        weights = sorted(folder.glob("*.safetensors"))
        if not weights:
            raise ValueError("there are no weights beside it")
        parameters = 0
        for file in weights:
            with safe_open(file, "pt") as stored:
                # A scale is no weight, but a part of those that it scales.
                parameters += sum(
                    prod(stored.get_slice(name).get_shape())
                    for name in stored.keys()  # noqa: SIM118 - the handle is no mapping
                    if not name.endswith(".scale") and name != "ids"
                )
        size_bytes = sum(file.stat().st_size for file in (folder / _CONFIG, *weights))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, KeyError):
            reason = f"it lacks {error}"
        raise ModelFileError(
            f"'{file}' cannot be read as a draft head's: {reason.rstrip('.')}.",
            hint="Train it anew, or copy it again.",
        ) from error
    return DraftHead(folder, kind, sizes, parameters, size_bytes, target, about)


def _heads_in(place: Path) -> list[Path]:
    """A folder itself, if it is a head's, or those in it that are."""
    if (place / _CONFIG).is_file():
        return [place]
    return sorted(file.parent for file in place.glob(f"*/{_CONFIG}"))
