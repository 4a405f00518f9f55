"""Loading for the native runtime: on the CPU, pack a model once and keep the result."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import ModelError, ModelFileError, OutriderError, UnsupportedError
from outrider.models import catalogue, hf, memory
from outrider.models.adapter import Merging, adapter_digest, read_adapter
from outrider.models.locate import Located
from outrider.models.native.architecture import FAMILIES, Architecture
from outrider.models.native.arena import arena
from outrider.models.native.device import DeviceModel
from outrider.models.native.eager import read_tensors
from outrider.models.native.llama import Llama
from outrider.models.native.model import NativeModel
from outrider.models.native.probe import fault
from outrider.models.native.source import FolderSource, GgufSource, Source
from outrider.models.native.weights import Kind, Nibbles, Weights, layout, read_weights
from outrider.models.noted import noted
from outrider.models.tokenizer import HFTokenizer

__all__ = ["DEVICE_DTYPES", "KINDS", "dtype_for", "load", "why_not"]

KINDS: dict[torch.dtype, Kind] = {
    memory.INT4: "int4",
    torch.int8: "int8",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}
"""The dtypes that weights can have on the CPU."""

DEVICE_DTYPES: dict[torch.dtype | None, torch.dtype] = {
    None: torch.bfloat16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.float32: torch.float32,
}
"""The same on another device."""

_PORTION_BYTES = 16 * 2**20
"""Of a file that is read at a time."""

W = TypeVar("W")


def dtype_for(located: Located, wanted: torch.dtype | None = None) -> torch.dtype:
    """Of a model's weights on the CPU: what is asked for; else int4 for a GGUF file most of whose
    matrices have four bits a weight, which are taken as they are, and int8 for any other.

    Raises
    ------
    ModelFileError
        When nothing is asked for, and the file's header cannot be read.
    """
    if wanted is not None:
        return wanted
    if located.kind != "gguf" or located.path is None:
        return torch.int8
    found = noted("precision", [located.path], lambda: _facts(located).precision)
    return memory.INT4 if found in memory.FOUR_BITS else torch.int8


def _kind(located: Located, dtype: torch.dtype | None) -> Kind:
    return KINDS[dtype_for(located, dtype)]


def _facts(located: Located) -> memory.Facts:
    found = memory.facts(located)
    assert found is not None
    return found


def why_not(
    located: Located, dtype: torch.dtype | None = None, device: str | None = None
) -> str | None:
    """What keeps this runtime from running a model, or ``None`` if nothing does.

    Only headers are read.
    """
    if located.path is None:
        return "it is not a file or folder on this machine"
    where = device or hf.default_device()
    width = str(dtype).removeprefix("torch.")
    if where != "cpu":
        if dtype not in DEVICE_DTYPES:
            return f"it computes with {width} on the CPU alone, and '{where}' was asked for"
    elif (reason := fault()) is not None:
        return reason
    elif dtype is not None and dtype not in KINDS:
        return f"it has no {width} on the CPU"
    elif _is_whole(_packed_folder(located.path, _kind(located, dtype), _adapter(located))):
        return None
    found = _facts(located)
    if found.architecture not in FAMILIES:
        return f"the family '{found.architecture}' is not one of {', '.join(FAMILIES)}"
    if located.kind == "folder":
        with suppress(OSError, ValueError):  # broken in some way that loading will name
            try:
                Architecture.of(
                    transformers.AutoConfig.from_pretrained(located.path, trust_remote_code=False)
                )
            except UnsupportedError as error:
                return error.problem
    return None


def load(
    located: Located, *, dtype: torch.dtype | None = None, device: str | None = None
) -> tuple[NativeModel | DeviceModel, HFTokenizer]:
    """The runtime's entry: a model and its tokenizer from a GGUF file or a folder.

    Parameters
    ----------
    located
        Where the weights are.
    dtype
        Of the weights. On the CPU int8, int4, bfloat16 or float32, by default that of
        ``dtype_for``; activations are float32, and int8 where they meet int8 or int4 weights. On
        another device bfloat16 (the default), float16 or float32, for all there is.
    device
        Such as ``cpu`` or ``cuda:0``; by default the first GPU if there is one.

    Raises
    ------
    UnsupportedError
        When the model or the wish is not one for this runtime.
    ModelFileError
        When the files are broken.
    NotEnoughMemoryError
        When the weights do not fit; raised before they are read.

    On the CPU, packed weights are kept in the cache folder, so that only the first load takes long.
    An adapter is merged into the weights before they are packed, and has packed copies of its own.
    """
    if (reason := why_not(located, dtype, device)) is not None:
        raise UnsupportedError(
            f"The native runtime cannot run '{located.name}': {reason}.", hint="Use --runtime hf."
        )
    assert located.path is not None
    where = device or hf.default_device()
    made: Callable[..., NativeModel | DeviceModel]
    try:
        with hf.quiet():
            if where == "cpu":
                made, words, ends = _on_cpu(located, dtype_for(located, dtype))
            else:
                made, words, ends = _on_device(located, DEVICE_DTYPES[dtype], where)
    except (torch.OutOfMemoryError, OutriderError):
        raise
    except Exception as error:  # each reader has its own ways to fail
        raise ModelFileError(
            f"'{located.path}' could not be loaded as a language model: {hf.first_line(error)}",
            hint="Is the file whole, and of a family that transformers knows?",
        ) from error
    tokenizer = HFTokenizer(words, ends)
    return made(name=located.name, vocab_size=tokenizer.vocab_size), tokenizer


Packed = tuple[Weights, Architecture, Any, list[int]]


def _on_cpu(
    located: Located, dtype: torch.dtype
) -> tuple[Callable[..., NativeModel], Any, list[int]]:
    """What makes the model, once its vocabulary is known; its tokenizer and its end tokens."""
    assert located.path is not None
    kind = KINDS[dtype]
    folder = _packed_folder(located.path, kind, _adapter(located))
    packed = _kept(folder)
    if packed is None:
        memory.check_weights(located, dtype)
        packed = _unpack(located, partial(_pack, kind=kind))
        if _keep(packed, folder, located):
            del packed  # freed before the copy is read
            packed = _read(folder)
    weights, a, words, ends = packed
    return partial(NativeModel, a, weights), words, ends


def _on_device(
    located: Located, dtype: torch.dtype, device: str
) -> tuple[Callable[..., DeviceModel], Any, list[int]]:
    """The same on another device; nothing is kept, since there is nothing to pack."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # each kind of device has its own way to be missing
        raise ModelError(
            f"'{located.name}' cannot be moved to the device '{device}': {hf.first_line(error)}",
            hint="Choose another --device.",
        ) from error
    memory.check_weights(located, dtype, device)

    def collect(read: Merging, a: Architecture, source: Source) -> Llama[nn.Linear]:
        return read_tensors(read, a, dtype=dtype, device=torch.device(device))

    weights, a, words, ends = _unpack(located, collect)
    return partial(DeviceModel, a, weights), words, ends


def _pack(read: Merging, a: Architecture, source: Source, kind: Kind) -> Weights:
    """A model's weights, packed; four bits of a file stay as they are, but for an adapter's."""
    if not isinstance(source, GgufSource):
        return read_weights(read, a, kind)

    def nibbles(name: str) -> Nibbles | None:
        return None if read.changes(name) else source.nibbles(name)

    return read_weights(read, a, kind, nibbles)


def _unpack(
    located: Located, collect: Callable[[Merging, Architecture, Source], W]
) -> tuple[W, Architecture, Any, list[int]]:
    """Read a model as it came, its adapter merged in: weights, shape, tokenizer and end tokens."""
    path = located.path
    assert path is not None
    adapter = None if located.adapter is None else read_adapter(located.adapter)
    source: Source
    if located.kind == "gguf":
        source = GgufSource(path)
        words = hf.load_words(path, path.parent, gguf_file=path.name)
    else:
        source = FolderSource(path)
        words = hf.load_words(path, path)
    try:
        a = source.architecture()
        read = Merging(source.read, adapter)
        try:
            weights = collect(read, a, source)
            read.check_all_used()
        except ModelFileError as error:
            raise ModelFileError(f"'{path}': {error.problem}", hint=error.hint) from error
        ends = _end_tokens(source.config, path if path.is_dir() else None)
    finally:
        source.close()
    return weights, a, words, ends


def _end_tokens(config: Any, folder: Path | None) -> list[int]:
    settings = transformers.GenerationConfig.from_model_config(config)
    if folder is not None and (folder / "generation_config.json").is_file():
        settings = transformers.GenerationConfig.from_pretrained(folder)
    ends = settings.eos_token_id
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def _keep(made: Packed, folder: Path, located: Located) -> bool:
    """Save packed weights for the next time; where they cannot be, the next time is slow."""
    weights, a, words, ends = made
    state = dict(weights.state())
    size_bytes = sum(t.nbytes for t in state.values())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free <= 4 * size_bytes:
            return False
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
            save_file(state, Path(part) / "weights.safetensors")
            words.save_pretrained(part)
            (Path(part) / "config.json").write_text(json.dumps(_config(a, ends) | _origin(located)))
            # Renamed in one step, so that a folder with this name is always whole; a second
            # process that was as quick has written the same.
            with suppress(OSError):
                Path(part).rename(folder)
                Path(part).mkdir()
        _drop_older(folder, located)
        return True
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"The packed model could not be kept in '{folder.parent}', so it is packed each "
            f"time: {hf.first_line(error).rstrip('.')}. Set OUTRIDER_CACHE to a folder that can be "
            "written to.",
            stacklevel=2,
        )
        return False


def _origin(located: Located) -> dict[str, str]:
    """The places that a packed copy was made from."""
    assert located.path is not None
    adapter = str(located.adapter.resolve()) if located.adapter else ""
    return {"source": str(located.path.resolve()), "adapter": adapter}


def _adapter(located: Located) -> str:
    """What tells an adapter's packed copies from others; empty without one."""
    return adapter_digest(located.adapter) if located.adapter else ""


def _drop_older(folder: Path, located: Located) -> None:
    """Copies of the same source and adapter as they were before, in the same precision, are of no
    more use."""
    kind = folder.name.split("-")[-2]
    for other in folder.parent.glob(f"*-{kind}-*"):
        with suppress(OSError, ValueError):
            stored = json.loads((other / "config.json").read_text())
            # Copies that are older than adapters do not name one.
            of = {"source": stored.get("source"), "adapter": stored.get("adapter", "")}
            if other != folder and of == _origin(located):
                shutil.rmtree(other)


def _kept(folder: Path) -> Packed | None:
    """The copy of an earlier load; one that was damaged is thrown away."""
    if not _is_whole(folder):
        return None
    try:
        return _read(folder)
    except MemoryError:  # that is not the copy's fault
        raise
    except Exception:  # whatever is wrong with it, the source is there to make another
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _is_whole(folder: Path) -> bool:
    with suppress(OSError):  # no right to look
        return (folder / "config.json").is_file()
    return False


def _read(folder: Path) -> Packed:
    memory.check_bytes((folder / "weights.safetensors").stat().st_size, folder.name)
    stored = json.loads((folder / "config.json").read_text())
    ends = stored.pop("end_tokens")
    for place in ("source", "adapter"):
        stored.pop(place, None)
    stored["inverse_frequencies"] = torch.tensor(
        stored["inverse_frequencies"], dtype=torch.float64
    ).numpy()
    stored["windows"] = tuple(stored["windows"])
    a = Architecture(**stored)
    state = _read_into_arena(folder / "weights.safetensors")
    return Weights.from_state(state, a.layers), a, hf.load_words(folder, folder), ends


def _config(a: Architecture, ends: list[int]) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(a) | {"inverse_frequencies": a.inverse_frequencies.tolist(), "end_tokens": ends}


def _read_into_arena(file: Path) -> dict[str, Tensor]:
    """A file's tensors in an arena.

    The file is mapped, and what was read of it stays in memory until it is closed; so it is opened
    anew every now and then, or all of it would be there twice.
    """
    with safe_open(file, "pt") as tensors:
        likes = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        kinds = {name: (like.dtype, like.shape) for name, like in likes.items()}
        sizes = {name: like.nbytes for name, like in likes.items()}
        del likes  # not a byte of them was looked at
    out = arena(kinds)
    for names in _portions(sizes):
        with safe_open(file, "pt") as tensors:
            for name in names:
                out[name].copy_(tensors.get_tensor(name))
    return out


def _portions(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in their order, some megabytes at a time."""
    portion: list[str] = []
    held = 0
    for name, size in sizes.items():
        if portion and held + size > _PORTION_BYTES:
            yield portion
            portion, held = [], 0
        portion.append(name)
        held += size
    if portion:
        yield portion


def _packed_folder(path: Path, kind: Kind, adapter: str = "") -> Path:
    """Named after the files' place, length and time, the adapter's contents, and what the packing
    depends on."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    parts: list[object] = [path.resolve(), layout(kind), transformers.__version__]
    parts += [adapter] if adapter else []  # without one, the name that copies always had
    for file in files:
        stat = file.stat()
        parts += [file.name, stat.st_size, stat.st_mtime_ns]
    key = hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]
    return catalogue.cache_folder() / "packed" / f"{path.stem}-{kind}-{key}"
