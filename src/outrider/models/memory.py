"""Whether a model fits, asked before it is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import psutil
import torch

from outrider.errors import ModelFileError, NotEnoughMemoryError
from outrider.models.locate import Located

__all__ = [
    "FOUR_BITS",
    "INT4",
    "Facts",
    "available_bytes",
    "check_bytes",
    "check_weights",
    "facts",
    "free_bytes",
    "weight_files",
]

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
"""Torch has it, and its type hints do not."""

FOUR_BITS = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}
"""GGUF's matrices of four bits a weight, and the bytes of one of their blocks."""

_OVERHEAD = 1.2
"""Activations, caches and what loading itself takes, as a factor on the weights."""

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a model's files say of themselves, read without loading them.

    Sizes that a file does not tell are ``None``. ``four_bits`` are the parameters that have four
    bits in memory if ``INT4`` is asked for: of a GGUF file those that have four there, of a folder
    all; but no embeddings, nor the output matrix.
    """

    architecture: str
    parameters: int
    file_bytes: int
    precision: str
    four_bits: int = 0
    layers: int | None = None
    hidden_size: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    context_length: int | None = None

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """Memory for the weights in a dtype."""
        # Of 8 bits each, they come with a scale and a sum of 16 bits for every 64; of 4 bits each,
        # with two such numbers for every 32.
        four = self.four_bits if dtype == INT4 else 0
        others = 17 if dtype in (INT4, torch.int8) else 16 * dtype.itemsize
        return (10 * four + others * (self.parameters - four)) // 16

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int | None:
        """Memory for one token's keys and values."""
        if self.layers is None or self.kv_heads is None or self.head_dim is None:
            return None
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


def facts(located: Located) -> Facts | None:
    """Read a model's headers; ``None`` for a toy or a repository that is not here.

    Raises
    ------
    ModelFileError
        When a header cannot be read, or weights that it names are missing.
    """
    if located.path is None:
        return None
    try:
        files = [located.path, *(located.path.iterdir() if located.path.is_dir() else [])]
        times = tuple(file.stat().st_mtime_ns for file in files)
    except OSError:
        times = ()  # the reader will say what is wrong
    return _facts_at(located.kind, located.path, times)


@lru_cache(maxsize=16)
def _facts_at(kind: str, path: Path, times: tuple[int, ...]) -> Facts:
    """Reading a large vocabulary's header takes seconds, so it is done once for a file's state."""
    try:
        return _gguf_facts(path) if kind == "gguf" else _folder_facts(path)
    except Exception as error:  # each reader has its own ways to fail on a broken file
        reason = str(error) or type(error).__name__
        raise ModelFileError(
            f"'{path}' cannot be read as a model: {reason.rstrip('.')}.",
            hint="The file is broken or was only partly copied; fetch it again.",
        ) from error


def available_bytes() -> int:
    """Memory that can still be taken: the machine's, or the container's or service's if that is
    less."""
    free = min([psutil.virtual_memory().available, *map(_left_in, _control_groups())])
    return int(free)


def _control_groups() -> list[Path]:
    """The folders of the groups that this process is in."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        lines = []
    own = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
    inner = [_CGROUP / own, *(_CGROUP / own).parents] if own else [_CGROUP]
    return [folder for folder in inner if folder.is_relative_to(_CGROUP)]


def _left_in(group: Path) -> float:
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that were read count as used, though the kernel drops them when asked for room.
        return max(0, limit - used + int(pages["inactive_file"]))
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf


def free_bytes(device: str | torch.device) -> int:
    """Memory that can still be taken on a device: a GPU's own, else the machine's."""
    device = torch.device(device)
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    # What torch holds and nobody uses is given out again.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_weights(located: Located, dtype: torch.dtype, device: str = "cpu") -> None:
    """Raise ``NotEnoughMemoryError`` when a model's weights would not fit into memory."""
    found = facts(located)
    if found is not None:
        what = f"{found.parameters / 1e6:,.0f} million weights in {str(dtype)[len('torch.') :]}"
        check_bytes(found.weights_bytes(dtype), located.name, f" for {what}", device)


def check_bytes(weights_bytes: int, name: str, why: str = "", device: str = "cpu") -> None:
    """Raise ``NotEnoughMemoryError`` when so many bytes of weights would not fit."""
    needed, free = weights_bytes * _OVERHEAD, free_bytes(device)
    if needed > free:
        raise NotEnoughMemoryError(
            f"'{name}' needs about {needed / 1e9:.1f} GB{why}; {free / 1e9:.1f} GB are free.",
            hint="Close other programs, choose a smaller model, or a narrower --dtype.",
        )


def _gguf_facts(path: Path) -> Facts:
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def value(name: str) -> object:
        field = reader.get_field(name)
        return None if field is None else field.contents()

    kind = str(value("general.architecture"))

    def number(name: str) -> int | None:
        found = value(f"{kind}.{name}")
        return found if isinstance(found, int) else None

    if not reader.tensors:
        raise ValueError("it holds no weights")
    heads, hidden = number("attention.head_count"), number("embedding_length")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    kinds = [t.tensor_type.name for t in reader.tensors if len(t.shape) > 1]
    ends = ("token_embd.weight", "output.weight")
    inner = [t for t in reader.tensors if t.name not in ends]
    return Facts(
        architecture=kind,
        parameters=sum(int(t.n_elements) for t in reader.tensors),
        file_bytes=path.stat().st_size,
        precision=max(set(kinds), key=kinds.count) if kinds else "unknown",
        four_bits=sum(int(t.n_elements) for t in inner if t.tensor_type.name in FOUR_BITS),
        layers=number("block_count"),
        hidden_size=hidden,
        kv_heads=number("attention.head_count_kv") or heads,
        head_dim=number("attention.key_length") or (hidden // heads if hidden and heads else None),
        vocab_size=len(tokens.data) if tokens is not None else None,
        context_length=number("context_length"),
    )


def _folder_facts(path: Path) -> Facts:
    from safetensors import safe_open

    config = json.loads((path / "config.json").read_text())
    if not isinstance(config, dict):
        raise ValueError(f"config.json holds no object but {str(config)[:40]!r}")
    config = config.get("text_config", config)
    parameters, inner, kinds = 0, 0, []
    files = weight_files(path)
    for file in files:
        with _named(file), safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - the handle is no mapping
                part = tensors.get_slice(name)
                parameters += prod(part.get_shape())
                if "embed_tokens" not in name and "lm_head" not in name:
                    inner += prod(part.get_shape())
                kinds.append(part.get_dtype())
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    return Facts(
        architecture=str(config.get("model_type")),
        parameters=parameters,
        file_bytes=sum(file.stat().st_size for file in files),
        precision=max(set(kinds), key=kinds.count) if kinds else "unknown",
        four_bits=inner,
        layers=config.get("num_hidden_layers"),
        hidden_size=hidden,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (hidden // heads if hidden and heads else None),
        vocab_size=config.get("vocab_size"),
        context_length=config.get("max_position_embeddings"),
    )


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """The reader of tensors does not say which file it could not read."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{file.name}: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """The files of a folder's weights, as transformers would load them: a second copy in another
    layout must not count twice."""
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole]
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if missing := [name for name in names if not (path / name).is_file()]:
        raise ValueError(f"{len(missing)} of {len(names)} shards are missing, first {missing[0]}")
    return [path / name for name in names]
