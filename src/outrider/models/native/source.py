"""Where a model's tensors come from: a GGUF file or a folder of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import transformers
from torch import Tensor

from outrider.models.memory import FOUR_BITS, weight_files
from outrider.models.native.architecture import Architecture
from outrider.models.native.weights import Nibbles

__all__ = ["FolderSource", "GgufSource", "Source", "nibbles_of"]


@runtime_checkable
class Source(Protocol):
    """A model's configuration and tensors, under transformers' names."""

    config: Any

    def read(self, name: str) -> Tensor | None:
        """A tensor, or ``None`` if there is none of that name."""
        ...

    def architecture(self) -> Architecture:
        """Its shape."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


class FolderSource:
    """A folder that ``save_pretrained`` wrote."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        self._files = ExitStack()
        self._where: dict[str, Any] = {}
        for file in weight_files(path):
            opened = self._files.enter_context(safe_open(file, "pt"))
            self._where |= dict.fromkeys(opened.keys(), opened)

    def read(self, name: str) -> Tensor | None:
        """A tensor, or ``None`` if there is none of that name."""
        file = self._where.get(name)
        return None if file is None else file.get_tensor(name)

    def architecture(self) -> Architecture:
        """Its shape."""
        return Architecture.of(self.config)

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_GGUF_NAMES[part]}.{ending}"
    return f"{_GGUF_NAMES[stem]}.{ending}"


def nibbles_of(data: np.ndarray, kind: str) -> Nibbles | None:
    """A matrix of a GGUF file, where it has four bits a weight.

    Parameters
    ----------
    data
        u8 [N, bytes], as they lie in the file.
    kind
        The file's name for how they are packed. Q4_0 has a scale for 32 weights, Q4_1 and Q4_K a
        least value too, the latter both in six bits for each of eight blocks; others are not these.
    """
    size = FOUR_BITS.get(kind)
    if size is None:
        return None
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, size)

    def halves(at: int) -> np.ndarray:
        return blocks[..., at : at + 2].copy().view(np.float16)[..., 0].astype(np.float32)

    scales = halves(0)
    if kind == "Q4_K":  # 32 bytes hold two blocks of 32, one in their lower halves
        packed = blocks[..., 4:16].astype(np.uint8)
        low, high, more = packed[..., :4], packed[..., 4:8], packed[..., 8:]
        factors = np.concatenate([low & 63, (more & 15) | (low >> 6 << 4)], axis=-1)
        offsets = np.concatenate([high & 63, (more >> 4) | (high >> 6 << 4)], axis=-1)
        least = -halves(2)[..., None] * offsets
        scales = scales[..., None] * factors
        packed = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    else:  # 16 bytes hold one, the first half of it in their lower halves
        least = -8 * scales if kind == "Q4_0" else halves(2)
        packed = blocks[..., -16:]
    q = np.stack([packed & 15, packed >> 4], axis=-2)
    made = (torch.from_numpy(part.reshape(len(data), -1)) for part in (q, scales, least))
    return Nibbles(*made)


class GgufSource:
    """A GGUF file; its packed tensors are unpacked one at a time."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.config = transformers.AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
        self._reader: Any = GGUFReader(path)
        self._tensors: Mapping[str, Any] = {t.name: t for t in self._reader.tensors}
        # A file without a matrix of its own for the head shares the embedding's.
        self.config.tie_word_embeddings = "output.weight" not in self._tensors
        kind = self._reader.get_field("general.architecture")
        # llama.cpp turns neighbouring dimensions of a head together, transformers a dimension
        # and its counterpart in the other half; for this family the rows were put in that order.
        self._interleaved = kind is not None and kind.contents() == "llama"

    def read(self, name: str) -> Tensor | None:
        """A tensor, or ``None`` if there is none of that name."""
        found = self._get(_gguf_name(name))
        return None if found is None else self._in_order(name, found)

    def nibbles(self, name: str) -> Nibbles | None:
        """A matrix that has four bits a weight, as it is; ``None`` for any other."""
        tensor = self._tensors.get(_gguf_name(name))
        made = None if tensor is None else nibbles_of(tensor.data, tensor.tensor_type.name)
        if made is None:
            return None
        parts = (made.q, made.scales, made.least)
        return Nibbles(*(self._in_order(name, part) for part in parts))

    def _in_order(self, name: str, found: Tensor) -> Tensor:
        """The rows of queries and keys as transformers has them."""
        part = name.split(".", 3)[-1].removesuffix(".weight").removesuffix(".bias")
        heads = {
            "self_attn.q_proj": self.config.num_attention_heads,
            "self_attn.k_proj": self.config.num_key_value_heads,
        }.get(part)
        if not heads or not self._interleaved:
            return found
        halves = found.view(heads, len(found) // heads // 2, 2, *found.shape[1:])
        return halves.transpose(1, 2).flatten(0, 2).contiguous()

    def _get(self, name: str) -> Tensor | None:
        from gguf import dequantize

        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        values = dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(values.copy() if not values.flags.writeable else values)

    def architecture(self) -> Architecture:
        """Its shape; factors on the rotary frequencies are a tensor of the file."""
        from dataclasses import replace

        a = Architecture.of(self.config)
        factors = self._get("rope_freqs.weight")
        if factors is None:
            return a
        return replace(a, inverse_frequencies=a.inverse_frequencies / factors.double().numpy())

    def close(self) -> None:
        """Let go of the file."""
        self._tensors, self._reader = {}, None
