"""The decoder in plain torch operations, on any device.

Everything a pass depends on is a number in a frame on the device, so that the same operations at
the same addresses serve each pass: a CUDA graph can replay them. Nothing here asks the device for a
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from outrider.core.proposal import Proposal
from outrider.models.activations import silu
from outrider.models.native.architecture import Architecture
from outrider.models.native.llama import Layer, Llama, decoder, head
from outrider.models.native.weights import Read, collect

__all__ = [
    "DEPTH",
    "FIELDS",
    "frame_rows",
    "read_tensors",
    "run_pass",
]

DEPTH = 64
"""Most nodes on a path of a tree."""

_TOKEN, _POSITION, _SLOT, _BASE, _PATH = range(5)
FIELDS = _PATH + DEPTH
"""What a frame says of a row: its token, its position, the slot that its key and value go to, and
what it sees: the slots before a base, and those of a path."""


def frame_rows(
    width: int, start: int, tokens: list[int], proposal: Proposal, nodes: range, spare: int
) -> Int64[np.ndarray, "width fields"]:
    """The frame of a pass.

    Parameters
    ----------
    width
        Rows, with padding.
    start
        Tokens in the cache.
    tokens
        A chain to feed; the last of them are ``nodes``' if the proposal has branches.
    proposal, nodes
        What the last of the tokens belong to; nodes before the first of them are in the cache.
    spare
        A slot that nobody sees, for what padding rows write.
    """
    n = len(tokens)
    frame = np.zeros((width, FIELDS), np.int64)
    slots = np.arange(start, start + n)
    frame[:n, _TOKEN] = tokens
    # A row of a chain sees what is before it, and itself: the path of one, written many times.
    frame[:n, _POSITION] = frame[:n, _SLOT] = frame[:n, _BASE] = slots
    frame[:n, _PATH:] = slots[:, None]
    if not proposal.is_chain:
        top = start + n - len(nodes) - nodes.start
        for row, node in enumerate(nodes, n - len(nodes)):
            path = proposal.path(node)
            frame[row, _POSITION] = top + len(path) - 1
            frame[row, _BASE] = top
            frame[row, _PATH : _PATH + len(path)] = top + np.array(path)
    # A padding row sees the first slot: one that saw nothing would be a division by zero.
    frame[n:, _SLOT] = spare
    frame[n:, _BASE] = 1
    return frame


def read_tensors(
    read: Read, a: Architecture, dtype: torch.dtype, device: torch.device
) -> Llama[nn.Linear]:
    """A model's tensors on a device, one at a time.

    Raises
    ------
    ModelFileError
        As in ``weights.collect``.
    """

    def vector(values: Tensor) -> Tensor:
        return values.to(device, dtype)

    def matrix(weight: Tensor, bias: Tensor | None, names: Sequence[str]) -> nn.Linear:
        outputs, inputs = weight.shape
        made = nn.Linear(inputs, outputs, bias is not None, device="meta")
        made.weight = nn.Parameter(vector(weight), requires_grad=False)
        if bias is not None:
            made.bias = nn.Parameter(vector(bias), requires_grad=False)
        return made

    return collect(read, a, matrix, vector)


class _Ops:
    """``llama.Ops`` in torch."""

    def __init__(
        self,
        a: Architecture,
        kept: Float[Tensor, "layers 2 KV slots D"],
        frame: Int64[Tensor, "n fields"],
        frequencies: Float[Tensor, " half"],
        keys: int,
        taps: tuple[int, ...],
    ) -> None:
        self.a = a
        self.kept = kept
        self.slots = frame[:, _SLOT]
        self.keys = keys
        self.taps = taps
        self.tapped: dict[int, Tensor] = {}
        angles = frame[:, _POSITION, None] * frequencies
        self.cosines, self.sines = (
            (turned * a.rope_factor).float()[:, None] for turned in (angles.cos(), angles.sin())
        )
        # One mask for all layers that see equally far.
        self.masks = {window: self._mask(frame, window) for window in sorted(set(a.windows))}

    def _mask(self, frame: Int64[Tensor, "n fields"], window: int) -> Float[Tensor, "n keys"]:
        """0 where a row sees a slot, minus infinity where not."""
        base, path = frame[:, _BASE, None], frame[:, _PATH:]
        slots = torch.arange(self.keys, device=frame.device)
        seen = slots < base
        if window:
            # Slots before the base are positions; the path's nodes come behind them.
            first = frame[:, _POSITION, None] - window + 1
            seen &= slots >= first
            positions = base + torch.arange(DEPTH, device=frame.device)
            path = torch.where(positions >= first, path, frame[:, _SLOT, None])
        seen.scatter_(1, path, True)
        mask = torch.zeros(seen.shape, dtype=self.kept.dtype, device=frame.device)
        return mask.masked_fill_(~seen, -torch.inf)

    def norm(self, x: Tensor, weight: Tensor, *, head: bool = False) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.a.epsilon)

    def linear(self, rows: Tensor, weight: nn.Linear, *, head: bool = False) -> Tensor:
        return F.linear(rows, weight.weight, weight.bias)

    def add_linear(self, x: Tensor, rows: Tensor, weight: nn.Linear) -> Tensor:
        return x + self.linear(rows, weight)

    def attention(self, qkv: Tensor, index: int, layer: Layer[nn.Linear]) -> Tensor:
        a, n = self.a, len(qkv)
        q, k, v = torch.split(qkv.view(n, -1, a.head_dim), [a.heads, a.kv_heads, a.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)
        q, k = self._turn(q), self._turn(k)
        kept = self.kept[index]
        kept.index_copy_(2, self.slots, torch.stack([k, v]).transpose(1, 2))
        # Key heads as a batch: the query heads of one share its keys without a copy.
        q = q.view(n, a.kv_heads, -1, a.head_dim).permute(1, 2, 0, 3)
        k, v = (
            part[:, None, : self.keys].expand(-1, a.heads // a.kv_heads, -1, -1) for part in kept
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.masks[a.windows[index]])
        return out.permute(2, 0, 1, 3).reshape(n, -1)

    def _turn(self, x: Float[Tensor, "n heads D"]) -> Float[Tensor, "n heads D"]:
        """Rotary positions, computed in float32."""
        one, other = x.float().chunk(2, -1)
        turned = (
            one * self.cosines - other * self.sines,
            other * self.cosines + one * self.sines,
        )
        return torch.cat(turned, -1).to(x.dtype)

    def hand(self, x: Tensor) -> Tensor:
        return x

    def swiglu(self, rows: Tensor, weight: nn.Linear) -> Tensor:
        gate, up = self.linear(rows, weight).chunk(2, -1)
        return silu(gate) * up

    def tap(self, x: Tensor, index: int) -> None:
        if index in self.taps:
            self.tapped[index] = x


def run_pass(
    a: Architecture,
    w: Llama[nn.Linear],
    frame: Int64[Tensor, "n fields"],
    kept: Float[Tensor, "layers 2 KV slots D"],
    frequencies: Float[Tensor, " half"],
    keys: int,
    *,
    logits: Float[Tensor, "n V"] | None = None,
    taps: tuple[int, ...] = (),
    tapped: Float[Tensor, "n widths"] | None = None,
    layers: Sequence[int] | None = None,
) -> None:
    """One pass over what a frame says.

    Parameters
    ----------
    a, w
        The model.
    frame
        What is fed; see ``frame_rows``.
    kept
        Keys and values of one sequence.
    frequencies
        The architecture's, on the device.
    keys
        How many slots attention covers; those that a row does not see are masked.
    logits
        Where logits go, if they are wanted.
    taps, tapped
        Layers whose hidden states are wanted, and where they go, side by side.
    layers
        Those to run, if not all of them.
    """
    with _attention_kernels(frame.device):
        ops = _Ops(a, kept, frame, frequencies, keys, taps)
        table = w.head.weight if w.embedding is None else w.embedding
        hidden = decoder(ops, w, F.embedding(frame[:, _TOKEN], table), layers)
        if tapped is not None:
            tapped.copy_(torch.cat([ops.tapped[layer] for layer in taps], -1))
        if logits is not None:
            logits.copy_(head(ops, w, hidden))


def _attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, the kernels that go over a row's keys in one order, whatever their number."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
