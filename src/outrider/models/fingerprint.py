"""What a draft head was made for: short hashes of all that its target's text depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from outrider.errors import ModelFileError
from outrider.models.adapter import adapter_digest
from outrider.models.locate import Located
from outrider.models.memory import weight_files
from outrider.models.noted import noted, short
from outrider.models.tokenizer import HFTokenizer
from outrider.protocols import Tokenizer

__all__ = ["Fingerprint", "differences", "fingerprint", "weights_digest"]

_EDGE_BYTES = 4096
_LAYOUT = 1
"""Of what is hashed: a change of it makes kept digests worthless."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of a target as it was loaded; what is equal in two targets is equal in their fingerprints.

    Parameters
    ----------
    weights
        Of the tensors; see ``weights_digest`` for what it can and cannot see.
    tokenizer
        Of vocabulary, merges, normalizer and all else that makes ids of a text.
    chat_template
        Of its text; that of an empty text where there is none.
    adapter
        Of a LoRA adapter's files; empty where there is none.
    precision
        Of the weights in memory: ``int8``, ``bfloat16``, ...
    """

    weights: str
    tokenizer: str
    chat_template: str
    adapter: str
    precision: str

    def to_dict(self) -> dict[str, str]:
        """For a configuration file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Fingerprint:
        """Undo ``to_dict``.

        Raises
        ------
        ValueError
            When a part is missing or no text.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or any(
            not isinstance(values.get(name), str) for name in names
        ):
            raise ValueError(f"a fingerprint has {', '.join(names)}, all text; got {values!r}")
        return cls(**{name: values[name] for name in names})


def fingerprint(located: Located, tokenizer: Tokenizer, precision: str) -> Fingerprint | None:
    """The fingerprint of a located model; ``None`` where there are no files to look at: for a toy,
    and for a hub repository that is not on this machine.

    Parameters
    ----------
    precision
        Of the weights in memory.

    Raises
    ------
    ModelFileError
        When the weights cannot be read.
    """
    path = located.path or _hub_folder(located.repo)
    if path is None or not isinstance(tokenizer, HFTokenizer):
        return None
    return Fingerprint(
        weights=weights_digest(path),
        tokenizer=short(tokenizer.spelling),
        chat_template=short(tokenizer.chat_template),
        adapter=adapter_digest(located.adapter) if located.adapter else "",
        precision=precision,
    )


def differences(made_for: Fingerprint, found: Fingerprint) -> list[str]:
    """The parts of a target that are not what a head was made for, in words.

    Example
    -------
    >>> a = Fingerprint("1", "2", "3", "", "int8")
    >>> differences(a, Fingerprint("9", "2", "3", "4", "bfloat16"))
    ['other weights', 'an adapter where there was none', 'bfloat16 in place of int8']
    """
    words = {
        "weights": "other weights",
        "tokenizer": "another tokenizer",
        "chat_template": "another chat template",
        "adapter": "another adapter"
        if made_for.adapter and found.adapter
        else "an adapter where there was none"
        if found.adapter
        else "no adapter where there was one",
        "precision": f"{found.precision} in place of {made_for.precision}",
    }
    return [said for part, said in words.items() if getattr(made_for, part) != getattr(found, part)]


def weights_digest(path: Path) -> str:
    """A short SHA-256 of a GGUF file's or a folder's tensors, by name.

    Of each tensor it sees the name, the type, the shape, and the first and last 4 KiB. Training,
    merging and quantizing change every tensor that they touch all over, so they show. What it
    cannot see: bytes changed in the middle of a tensor alone (a flipped bit is a matter for a
    checksum of the whole file), and settings beside the tensors, such as a rotary base. The order
    of tensors and how they are shared out among files do not count.

    Raises
    ------
    ModelFileError
        When the files cannot be read.
    """
    try:
        files = [path] if path.is_file() else weight_files(path)
        return noted(f"digest {_LAYOUT}", files, partial(_digest, files))
    except Exception as error:  # each reader has its own ways to fail on a broken file
        raise _unreadable(path, error) from error


def _digest(files: list[Path]) -> str:
    found = hashlib.sha256()
    table = _safetensors if files[0].suffix == ".safetensors" else _gguf_tensors
    tensors = [tensor for file in files for tensor in table(file)]
    for tensor in sorted(tensors, key=lambda one: one.name):
        found.update(f"{tensor.name} {tensor.kind} {tensor.shape} {tensor.size_bytes}".encode())
        with tensor.file.open("rb") as stream:
            for start in (0, max(0, tensor.size_bytes - _EDGE_BYTES)):
                stream.seek(tensor.start + start)
                found.update(stream.read(min(_EDGE_BYTES, tensor.size_bytes)))
    return found.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor's bytes are."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size_bytes: int


def _gguf_tensors(file: Path) -> Iterator[_Tensor]:
    from gguf import GGUFReader

    for t in GGUFReader(file).tensors:
        shape = tuple(map(int, t.shape))
        kind = t.tensor_type.name
        yield _Tensor(t.name, kind, shape, file, int(t.data_offset), int(t.n_bytes))


def _safetensors(file: Path) -> Iterator[_Tensor]:
    """The table at the file's beginning: eight bytes of its length, then JSON."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        table = json.loads(stream.read(size))
    for name, one in table.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            yield _Tensor(
                name, one["dtype"], tuple(one["shape"]), file, 8 + size + begin, end - begin
            )


def _hub_folder(repo: str | None) -> Path | None:
    """Where a hub repository's files are on this machine."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json") if repo else None
    return Path(found).parent if isinstance(found, str) else None


def _unreadable(path: Path, error: Exception) -> ModelFileError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ModelFileError(
        f"The weights of '{path}' cannot be read: {lines[0].rstrip('.')}.",
        hint="The file is broken or was only partly copied; fetch it again.",
    )
