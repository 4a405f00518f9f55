"""Attention whose result for a row does not depend on how many rows are scored with it.

Invariant I2 asks that a position's logits be the same bits alone or in a block. A softmax over
keys is a float sum, and its order depends on the shapes a kernel is called with. Here every
call covers a whole number of ``KEY_STEP`` keys (the unseen ones masked, adding exact zeros) and
of ``ROW_STEP`` rows for each head, and the query heads that share a key head are folded into
rows, which also spares the copy that repeats keys for them. ``numerics.probe`` measures whether
that is enough on the machine at hand; it is on CPUs with torch's flash kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import sdpa_mask

__all__ = ["KEY_STEP", "NAME", "fold", "visible_keys"]

NAME = "outrider_rows"
KEY_STEP = 512
"""Keys are covered in multiples of this: the size of the kernel's own blocks of keys."""
ROW_STEP = 8


def visible_keys(length: int) -> int:
    """The number of keys that a call covers when ``length`` are there."""
    return -(-length // KEY_STEP) * KEY_STEP


def _rows_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H n D"],
    key: Float[Tensor, "1 KV C D"],
    value: Float[Tensor, "1 KV C D"],
    attention_mask: Float[Tensor, "1 1 group_rows C"],
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 n H D"], None]:
    """softmax(q kᵀ · scaling + mask) v, one query head's rows after the other's."""
    _, H, n, D = query.shape
    KV, rows = key.shape[1], _whole_steps(n)
    if rows > n:
        query = F.pad(query, (0, 0, 0, rows - n))
    q = query.reshape(1, KV, H // KV * rows, D)
    if attention_mask.shape[2] != q.shape[2]:  # a layer with another number of heads
        attention_mask = attention_mask[:, :, :rows].repeat(1, 1, H // KV, 1)
    out = F.scaled_dot_product_attention(q, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(1, H, rows, -1)[:, :, :n].transpose(1, 2).contiguous(), None


def _rows_mask(
    *args: Any, dtype: torch.dtype, config: PreTrainedConfig, **kwargs: Any
) -> Float[Tensor, "1 1 group_rows C"]:
    """Made once a pass, and used by every layer."""
    return fold(sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False})), dtype, config)


def fold(
    seen: Bool[Tensor, "1 1 n C"], dtype: torch.dtype, config: PreTrainedConfig
) -> Float[Tensor, "1 1 group_rows C"]:
    """The mask in this attention's layout: 0 where a row sees a key, minus infinity where not."""
    n = seen.shape[2]
    # A padding row sees every key: a row that saw none would be NaN.
    mask: Tensor = seen.new_zeros((1, 1, _whole_steps(n), seen.shape[3]), dtype=dtype)
    mask[:, :, :n].masked_fill_(~seen, -torch.inf)
    heads = config.num_attention_heads
    return mask.repeat(1, 1, heads // (getattr(config, "num_key_value_heads", None) or heads), 1)


def _whole_steps(rows: int) -> int:
    return -(-rows // ROW_STEP) * ROW_STEP


AttentionInterface.register(NAME, _rows_attention)
AttentionMaskInterface.register(NAME, _rows_mask)
