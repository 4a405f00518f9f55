"""Where a model's tensors come from: a GGUF file or a folder of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from outrider.models.memory import weight_files
from outrider.models.native.architecture import Architecture

__all__ = ["FolderSource", "GgufSource", "Source"]


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
        stem, _, ending = name.rpartition(".")
        if stem.startswith("model.layers."):
            number, _, part = stem.removeprefix("model.layers.").partition(".")
            found = self._get(f"blk.{number}.{_GGUF_NAMES[part]}.{ending}")
            heads = {
                "self_attn.q_proj": self.config.num_attention_heads,
                "self_attn.k_proj": self.config.num_key_value_heads,
            }.get(part)
            if found is not None and heads and self._interleaved:
                halves = found.view(heads, len(found) // heads // 2, 2, *found.shape[1:])
                found = halves.transpose(1, 2).flatten(0, 2).contiguous()
            return found
        return self._get(f"{_GGUF_NAMES[stem]}.{ending}")

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
