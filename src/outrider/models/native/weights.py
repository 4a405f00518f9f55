"""Weights as the tiles of a linear layer read them, in int8, bfloat16 or float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Float16, Int16, Shaped, UInt8
from torch import Tensor

from outrider.errors import ModelFileError
from outrider.models.native import llama
from outrider.models.native.architecture import Architecture
from outrider.models.native.emit import LANES
from outrider.models.native.vector import DOT, GROUPS, QUADS

__all__ = [
    "INPUT_STEP",
    "Kind",
    "Layer",
    "Linear",
    "Nibbles",
    "Read",
    "Weights",
    "collect",
    "in_turns",
    "layout",
    "pack",
    "pack_nibbles",
    "quantize",
    "read_weights",
]

Kind = Literal["int4", "int8", "bfloat16", "float32"]
INPUT_STEP = 4 * QUADS
"""Rows of activations are padded to a multiple of this, and weights with them."""
_HALF = INPUT_STEP // 2

_WIDE = GROUPS * LANES

M = TypeVar("M")
Read = Callable[[str], Tensor | None]
"""From transformers' name of a tensor to its values; ``None`` if the model has none."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix, with what its tiles need.

    Parameters
    ----------
    kind
        Precision of the weights. Rows that meet int8 or int4 weights are int8 themselves.
    weight
        [outputs / C, inputs / t, C, t], where t is 4 for int8 and 1 otherwise: the C channels
        of a tile side by side. Both sizes are padded with zeros. For int4 [outputs / C,
        inputs / 8, C, 4]: four inputs in the lower halves of bytes, the next four in the upper.
    scales
        For int8, [outputs / C, inputs / INPUT_STEP, C]: what a unit is worth in each channel and
        block of inputs; for int4, of half a block.
    sums
        Laid out alike. For int8, each channel's sum over a block, since rows are fed with 128
        added; for int4, the least value of half a block, in float16.
    bias
        Zeros if there is none.
    outputs
        Real channels.
    """

    kind: Kind
    weight: Tensor
    scales: Float16[Tensor, "tiles blocks C"]
    sums: Int16[Tensor, "tiles blocks C"] | Float16[Tensor, "tiles blocks C"]
    bias: Float[Tensor, " N"]
    outputs: int

    @property
    def padded_outputs(self) -> int:
        """Channels with padding."""
        return self.weight.shape[0] * _WIDE

    @property
    def padded_inputs(self) -> int:
        """Inputs with padding."""
        return self.weight.shape[1] * self.weight.shape[3] * (2 if self.kind == "int4" else 1)

    def rows(self, tokens: list[int]) -> Float[Tensor, "n K"]:
        """Some channels' weights as they were: an embedding, where it is tied to the head."""
        ids = torch.tensor(tokens)
        taken = self.weight[ids // _WIDE, :, ids % _WIDE].flatten(1).float()
        if self.kind != "int8":
            return taken
        scales = self.scales[ids // _WIDE, :, ids % _WIDE].float()
        blocks: Tensor = taken.view(*scales.shape, INPUT_STEP) * scales[..., None]
        return blocks.flatten(1)


Layer = llama.Layer[Linear]
_KINDS: dict[torch.dtype, Kind] = {
    torch.uint8: "int4",
    torch.int8: "int8",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


@dataclass(frozen=True, slots=True)
class Nibbles:
    """A matrix of four bits a weight, w = scale · q + least for each 32 inputs of a channel.

    Parameters
    ----------
    q
        0 to 15.
    scales, least
        What a unit is worth, and a weight of 0.
    """

    q: UInt8[Tensor, "N K"]
    scales: Float[Tensor, "N halves"]
    least: Float[Tensor, "N halves"]

    @classmethod
    def nearest(cls, weight: Float[Tensor, "N K"]) -> Nibbles:
        """The grid from the least to the largest of each 32, and on it the nearest to each."""
        blocks = weight.view(len(weight), -1, _HALF)
        least = blocks.amin(-1).half().float()
        scales = ((blocks.amax(-1) - least) / 15).half().float()
        steps = (blocks - least[..., None]) / scales.clamp_min(2**-24)[..., None]
        return cls(steps.round_().clamp_(0, 15).to(torch.uint8).flatten(1), scales, least)


@dataclass(frozen=True, slots=True)
class Weights(llama.Llama[Linear]):
    """A whole model's, packed."""

    def embed(self, tokens: list[int]) -> Float[Tensor, "n d"]:
        """The rows of tokens, float32."""
        if self.embedding is None:
            return self.head.rows(tokens)
        return self.embedding[torch.tensor(tokens)].float()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with a name, for saving."""
        yield "norm", self.norm
        if self.embedding is not None:
            yield "embedding", self.embedding
        yield from _state("head", self.head)
        for i, layer in enumerate(self.layers):
            yield from _state(f"layers.{i}", layer)

    @property
    def kind(self) -> Kind:
        """Precision of the layers: the least of any."""
        kinds = {w.kind for layer in self.layers for w in _linears(layer)}
        return "int4" if "int4" in kinds else self.head.kind

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], layers: int) -> Weights:
        """Undo ``state``."""

        def linear(name: str) -> Linear:
            weight, scales, sums, bias, outputs = (
                state[f"{name}.{part}"] for part in ("weight", "scales", "sums", "bias", "outputs")
            )
            return Linear(_KINDS[weight.dtype], weight, scales, sums, bias, int(outputs))

        def layer(name: str) -> Layer:
            made: dict[str, Any] = {}
            for field in fields(llama.Layer):
                path = f"{name}.{field.name}"
                if f"{path}.weight" in state:
                    made[field.name] = linear(path)
                elif path in state:
                    made[field.name] = state[path]
            return Layer(**made)

        return cls(
            [layer(f"layers.{i}") for i in range(layers)],
            state["norm"],
            linear("head"),
            state.get("embedding"),
        )

    @property
    def streamed_bytes(self) -> int:
        """What one pass reads: all but an embedding of its own."""
        return sum(value.nbytes for name, value in self.state() if name != "embedding")


def _linears(layer: Layer) -> Iterator[Linear]:
    values = (getattr(layer, field.name) for field in fields(layer))
    return (value for value in values if isinstance(value, Linear))


def _state(prefix: str, part: Any) -> Iterator[tuple[str, Tensor]]:
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Linear):
            yield from _state(f"{prefix}.{field.name}", value)
        elif isinstance(value, Tensor):
            yield f"{prefix}.{field.name}", value
        elif isinstance(value, int):
            yield f"{prefix}.{field.name}", torch.tensor(value)


def layout(kind: Kind) -> str:
    """What a packed copy depends on besides its source: another machine's may not fit here."""
    return f"7-{kind}-{LANES}-{DOT if kind in ('int4', 'int8') else ''}"


def quantize(weight: Float[Tensor, "N K"], bound_pairs: bool) -> tuple[Tensor, Tensor]:
    """Symmetric int8 for each output channel and block of inputs: w ≈ scale · q, |q| <= 127.

    Returns q, and the scales [N, K / INPUT_STEP] in float16.

    Parameters
    ----------
    bound_pairs
        Keep |q_2i| + |q_2i+1| <= 128, so that two products with a byte fit 16 bits with a sign:
        255 · 128 < 2^15. That spares AVX2 wider sums, which would take twice as long.
    """
    blocks = weight.view(len(weight), -1, INPUT_STEP)
    most = blocks.abs().amax(-1)
    if bound_pairs:
        # Rounding adds at most one to a pair's sum.
        most = torch.maximum(most, blocks.abs().view(*blocks.shape[:2], -1, 2).sum(-1).amax(-1))
    # A little more, since float16 may round down: by a part of the scale, or, where it is
    # subnormal, by a part of its smallest step.
    scales = (most / 127 * (1 + 2**-10) + 2**-25).clamp_min(2**-24).half()
    return (blocks / scales.float()[..., None]).round_().to(torch.int8).flatten(1), scales


def in_turns(gate_up: Shaped[Tensor, "N *K"]) -> Shaped[Tensor, "M *K"]:
    """Rows of a gate and of what it lets through, INPUT_STEP of one and then of the other.

    So whatever computes them in order has both at hand. Each is padded with zeros to a multiple.
    """
    gate, up = gate_up.chunk(2)
    more = gate.new_zeros(-len(gate) % INPUT_STEP, *gate.shape[1:])
    both = [torch.cat([part, more]).view(-1, INPUT_STEP, *part.shape[1:]) for part in (gate, up)]
    return torch.stack(both, dim=1).flatten(0, 2)


def pack_nibbles(made: Nibbles, bias: Tensor | None) -> Linear:
    """Pad and lay out one matrix of four bits a weight."""
    outputs, inputs = made.q.shape
    N, K = (-(-size // step) * step for size, step in
            ((outputs, _WIDE), (inputs, INPUT_STEP)))  # fmt: skip
    q = torch.nn.functional.pad(made.q, (0, K - inputs, 0, N - outputs))
    groups = q.view(N // _WIDE, _WIDE, K // 8, 2, 4)
    weight = (groups[:, :, :, 0] | (groups[:, :, :, 1] << 4)).transpose(1, 2).contiguous()

    def by_tile(values: Tensor) -> Tensor:
        whole = torch.nn.functional.pad(values, (0, K // _HALF - values.shape[1], 0, N - outputs))
        return whole.half().view(-1, _WIDE, K // _HALF).transpose(1, 2).contiguous()

    full = torch.zeros(N)
    if bias is not None:
        full[:outputs] = bias
    return Linear("int4", weight, by_tile(made.scales), by_tile(made.least), full, outputs)


def pack(weight: Float[Tensor, "N K"], bias: Tensor | None, kind: Kind) -> Linear:
    """Pad, quantize and lay out one matrix."""
    outputs, inputs = weight.shape
    if kind == "int4":
        padded = torch.nn.functional.pad(weight.float(), (0, -inputs % _HALF))
        return pack_nibbles(Nibbles.nearest(padded), bias)
    N, K = (-(-size // step) * step for size, step in
            ((outputs, _WIDE), (inputs, INPUT_STEP)))  # fmt: skip
    padded = torch.nn.functional.pad(weight.float(), (0, K - inputs, 0, N - outputs))
    scales, sums = torch.zeros(1, 1, 1).half(), torch.zeros(1, 1, 1, dtype=torch.int16)
    together = 1
    if kind == "int8":

        def by_tile(values: Tensor) -> Tensor:
            return values.view(-1, _WIDE, values.shape[1]).transpose(1, 2).contiguous()

        padded, scales = quantize(padded, bound_pairs=DOT == "pairs")
        sums = by_tile(padded.view(N, -1, INPUT_STEP).sum(-1, dtype=torch.int16))
        scales, together = by_tile(scales), 4
    elif kind == "bfloat16":
        padded = padded.bfloat16()
    tiles = padded.view(N // _WIDE, _WIDE, K // together, together)
    full = torch.zeros(N)
    if bias is not None:
        full[:outputs] = bias
    return Linear(kind, tiles.transpose(1, 2).contiguous(), scales, sums, full, outputs)


def collect(
    read: Read,
    a: Architecture,
    matrix: Callable[[Tensor, Tensor | None, Sequence[str]], M],
    vector: Callable[[Tensor], Tensor],
) -> llama.Llama[M]:
    """Put a model together from its tensors, one layer at a time.

    Parameters
    ----------
    matrix
        From a weight, float32 [outputs, inputs], a bias and the names of the tensors that the
        weight is made of, one below the other, to what a linear layer holds.
    vector
        The same for a norm's weight, and for an embedding that is not the head's.

    Raises
    ------
    ModelFileError
        When a tensor is missing, has another shape than the configuration says, or holds a
        number that is none.
    """

    def tensor(name: str, *shape: int, needed: bool = True) -> Tensor | None:
        found = read(name)
        if found is None:
            if needed:
                raise ModelFileError(f"The tensor '{name}' is missing.", hint=_AGAIN)
            return None
        if tuple(found.shape) != shape:
            raise ModelFileError(
                f"The tensor '{name}' is {list(found.shape)}; {list(shape)} was expected.",
                hint=_AGAIN,
            )
        found = found.float()
        if not found.isfinite().all():
            raise ModelFileError(
                f"The tensor '{name}' holds numbers that are not finite.", hint=_AGAIN
            )
        return found

    def linear(prefix: str, inputs: int, **outputs: int) -> M:
        names = [f"{prefix}.{n}.weight" for n in outputs]
        sizes = outputs.values()
        weights = [tensor(n, size, inputs) for n, size in zip(names, sizes, strict=True)]
        biases = [tensor(f"{prefix}.{n}.bias", size, needed=False) for n, size in outputs.items()]
        bias = None
        if any(b is not None for b in biases):
            pairs = zip(biases, sizes, strict=True)
            bias = torch.cat([torch.zeros(size) if b is None else b for b, size in pairs])
        return matrix(torch.cat([w for w in weights if w is not None]), bias, names)

    def norm(name: str, size: int = a.hidden, needed: bool = True) -> Any:
        found = tensor(f"{name}.weight", size, needed=needed)
        return None if found is None else vector(found)

    d, q, kv = a.hidden, a.heads * a.head_dim, a.kv_heads * a.head_dim

    def layer(i: int) -> llama.Layer[M]:
        at = f"model.layers.{i}"
        names = {"gate_proj": a.intermediate, "up_proj": a.intermediate}
        return llama.Layer(
            norm(f"{at}.input_layernorm"),
            linear(f"{at}.self_attn", d, q_proj=q, k_proj=kv, v_proj=kv),
            linear(f"{at}.self_attn", q, o_proj=d),
            norm(f"{at}.post_attention_layernorm"),
            linear(f"{at}.mlp", d, **names),
            linear(f"{at}.mlp", a.intermediate, down_proj=d),
            *(norm(f"{at}.self_attn.{n}_norm", a.head_dim, needed=a.qk_norm) for n in "qk"),
        )

    layers = [layer(i) for i in range(a.layers)]
    table = tensor("model.embed_tokens.weight", a.vocab_size, d)
    assert table is not None
    own = None if a.tied else tensor("lm_head.weight", a.vocab_size, d)
    embedding = None if own is None else vector(table)
    head = matrix(table if own is None else own, None, ())
    return llama.Llama(layers, norm("model.norm"), head, embedding)


def read_weights(
    read: Read,
    a: Architecture,
    kind: Kind,
    nibbles: Callable[[str], Nibbles | None] | None = None,
) -> Weights:
    """Collect and pack a model's tensors.

    With int4 the head, and an embedding that is tied to it, are int8.

    Parameters
    ----------
    nibbles
        For int4, from a tensor's name to its four bits a weight; what has none becomes int8.
        Without it, whatever there is becomes int4.

    Raises
    ------
    ModelFileError
        As in ``collect``.
    """

    def vector(values: Tensor) -> Tensor:
        embeds = values.ndim == 2 and kind != "float32"
        return values.bfloat16() if embeds else values.contiguous()

    def matrix(weight: Tensor, bias: Tensor | None, names: Sequence[str]) -> Linear:
        gated = any("gate_proj" in name for name in names)
        if gated:
            weight, bias = in_turns(weight), None if bias is None else in_turns(bias)
        if kind != "int4" or not names:
            return pack(weight, bias, "int8" if kind == "int4" else kind)
        if nibbles is None:
            return pack(weight, bias, kind)
        found = [made for made in map(nibbles, names) if made is not None]
        if len(found) < len(names):
            return pack(weight, bias, "int8")
        parts = zip(*((made.q, made.scales, made.least) for made in found), strict=True)
        whole = map(torch.cat, parts)
        return pack_nibbles(Nibbles(*(map(in_turns, whole) if gated else whole)), bias)

    made = collect(read, a, matrix, vector)
    return Weights(made.layers, made.norm, made.head, made.embedding)


_AGAIN = "The file is broken or was only partly copied; fetch it again."
