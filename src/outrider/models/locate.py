"""From what a user typed to where a model is."""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outrider.errors import ModelFileError, ModelNotFoundError
from outrider.models import catalogue
from outrider.models.noted import noted
from outrider.registry import did_you_mean

__all__ = ["Located", "is_present", "locate"]

_FORMS = "a catalogue name, a .gguf file, a transformers folder, a hub id (owner/name), or toy"
_GGUF_HEADER_BYTES = 24
"""Magic, version, and the numbers of tensors and of metadata pairs."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where a model is.

    Parameters
    ----------
    kind
        ``toy``, a ``gguf`` file, a transformers ``folder``, or a ``hub`` repository.
    name
        What to call it.
    path
        The file or folder.
    repo
        The hub repository.
    options
        A toy model's ``key=value`` pairs.
    adapter
        The folder of a LoRA adapter that belongs on its weights.
    """

    kind: Literal["toy", "gguf", "folder", "hub"]
    name: str
    path: Path | None = None
    repo: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    adapter: Path | None = None


def is_present(target: str) -> bool:
    """Whether using this target downloads nothing from the catalogue."""
    entry = catalogue.CATALOGUE.get(target)
    return entry is None or catalogue.is_pulled(entry)


def locate(target: str) -> Located:
    """Find a model; a catalogue entry that is not here yet is fetched and checked.

    Raises
    ------
    ModelNotFoundError
        When nothing answers to the name; near names are offered.
    ModelFileError
        When a file or folder is there, but is not a model that can be loaded.

    Example
    -------
    >>> locate("toy:vocab=5").options
    {'vocab': '5'}
    """
    name, _, argument = target.partition(":")
    if name == "toy":
        pairs = [pair.partition("=") for pair in argument.split(",") if pair.strip()]
        return Located("toy", target, options={k.strip(): v.strip() for k, _, v in pairs})
    if target in catalogue.CATALOGUE:
        return Located("gguf", target, path=catalogue.pull(target))
    try:
        path = Path(target).expanduser()
        if path.is_file():
            return Located("gguf", _known_as(_checked_gguf(path)), path=path)
        # An empty target would otherwise stand for the working directory.
        if target and path.is_dir():
            return _folder(path)
    except (OSError, RuntimeError) as error:  # too long a name, no right to look, no such home
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ModelNotFoundError(
            f"'{target}' cannot be opened: {reason}.", hint=f"A target is {_FORMS}."
        ) from error
    if target.startswith((".", "~", "/")) or path.suffix in (".gguf", ".safetensors"):
        raise ModelNotFoundError(f"There is no file or folder '{target}'.", hint=_near(path))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        return Located("hub", target.split("/")[1], repo=target)
    raise ModelNotFoundError(
        f"There is no model '{target}'; a target is {_FORMS}.",
        hint=did_you_mean(target, list(catalogue.CATALOGUE)),
    )


def _checked_gguf(path: Path) -> Path:
    with path.open("rb") as stream:
        header = stream.read(_GGUF_HEADER_BYTES)
    if header[:4] != b"GGUF":
        what = f"begins with {header[:4]!r}, not b'GGUF'" if header else "is empty"
        raise ModelFileError(
            f"'{path}' is not a GGUF file: it {what}.",
            hint="Give a .gguf file, or the folder of a transformers model.",
        )
    if len(header) < _GGUF_HEADER_BYTES:
        raise ModelFileError(
            f"'{path}' is cut off after {len(header)} bytes; a GGUF header alone takes "
            f"{_GGUF_HEADER_BYTES}.",
            hint="Copy or fetch it again.",
        )
    return path


def _known_as(path: Path) -> str:
    """The catalogue's name for a file, wherever it lies: a head may come with it."""

    def digest() -> str:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    for entry in catalogue.CATALOGUE.values():
        if entry.size_bytes == path.stat().st_size and entry.sha256 == noted(
            "sha256", [path], digest
        ):
            return entry.name
    return path.stem


def _folder(path: Path) -> Located:
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file():
        if len(ggufs) == 1:
            return Located("gguf", _known_as(_checked_gguf(ggufs[0])), path=ggufs[0])
        raise ModelFileError(
            f"The folder '{path}' has no config.json and holds {len(ggufs)} .gguf files.",
            hint="Give one .gguf file, or a folder that save_pretrained wrote.",
        )
    if not list(path.glob("*.safetensors")):
        pickles = sorted(p.name for p in (*path.glob("*.bin"), *path.glob("*.pt*")))
        reason = f"only pickled weights ({pickles[0]})" if pickles else "no weights"
        raise ModelFileError(
            f"The folder '{path}' has {reason}; *.safetensors was expected.",
            hint="Pickles can run code, so they are not loaded; convert them with "
            "model.save_pretrained(folder) on a machine that you trust them on."
            if pickles
            else "Copy the weights into the folder.",
        )
    return Located("folder", path.resolve().name, path=path)


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"The folder '{path.parent}' does not exist either."
    names = [p.name for p in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean '{path.parent / close[0]}'?" if close else "Check the path."
