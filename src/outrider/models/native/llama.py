"""A Llama-shaped decoder: the whole model, in the words of whatever computes it.

Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are this model with other sizes, biases and norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor

__all__ = ["EagleWeights", "Layer", "Llama", "Ops", "decoder", "eagle", "head"]

X = TypeVar("X")
Rows = TypeVar("Rows")
M = TypeVar("M")


@dataclass(frozen=True)
class Layer(Generic[M]):
    """One decoder layer; q, k and v are one matrix, and so are gate and up."""

    attention_norm: Tensor
    qkv: M
    o: M
    mlp_norm: Tensor
    gate_up: M
    down: M
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class Llama(Generic[M]):
    """A whole model's weights. ``embedding`` is ``None`` where it is tied to the head."""

    layers: list[Layer[M]]
    norm: Tensor
    head: M
    embedding: Tensor | None


@dataclass(frozen=True)
class EagleWeights(Generic[M]):
    """What an EAGLE-3 head has beside one decoder layer, a norm and an output matrix.

    ``qkv`` of the layer takes the embedding, ``hidden_qkv`` the hidden states; the layer's
    ``attention_norm`` is the embedding's.
    """

    fc: M
    hidden_norm: Tensor
    hidden_qkv: M
    inputs: int
    """Numbers that ``fc`` reads: d of each tapped layer."""


@runtime_checkable
class Ops(Protocol[X, Rows, M]):
    """What a decoder is made of.

    ``X`` are activations; ``Rows`` are ready for a linear layer, whose matrix is an ``M``.
    """

    def norm(self, x: X, weight: Tensor, *, head: bool = False) -> Rows:
        """RMS norm; with ``head``, of the rows alone whose logits are wanted."""
        ...

    def linear(self, rows: Rows, weight: M, *, head: bool = False) -> X:
        """rows · Wᵀ + bias."""
        ...

    def add_linear(self, x: X, rows: Rows, weight: M) -> X:
        """x + rows · Wᵀ + bias."""
        ...

    def attention(self, qkv: X, index: int, layer: Layer[M]) -> Rows:
        """Rotate, remember keys and values, and attend to all that a row may see."""
        ...

    def hand(self, x: X) -> Rows:
        """Rows as they are, without a norm."""
        ...

    def swiglu(self, rows: Rows, weight: M) -> Rows:
        """silu(gate) · up, both out of rows · Wᵀ + bias."""
        ...

    def tap(self, x: X, index: int) -> None:
        """Set the hidden states after a layer aside, where somebody wants them."""
        ...


def decoder(ops: Ops[X, Rows, M], w: Llama[M], x: X, layers: Sequence[int] | None = None) -> X:
    """From embeddings to the last hidden states, through some layers alone if any are named."""
    for i in range(len(w.layers)) if layers is None else layers:
        layer = w.layers[i]
        qkv = ops.linear(ops.norm(x, layer.attention_norm), layer.qkv)
        x = ops.add_linear(x, ops.attention(qkv, i, layer), layer.o)
        gated = ops.swiglu(ops.norm(x, layer.mlp_norm), layer.gate_up)
        x = ops.add_linear(x, gated, layer.down)
        ops.tap(x, i)
    return x


def head(ops: Ops[X, Rows, M], w: Llama[M], x: X) -> X:
    """From hidden states to logits."""
    return ops.linear(ops.norm(x, w.norm, head=True), w.head, head=True)


def eagle(
    ops: Ops[X, Rows, M], w: Llama[M], more: EagleWeights[M], e: X, g: X, taps: X | None
) -> X:
    """An EAGLE-3 head's layer, from embeddings and states to new states.

    ``g`` holds the states of the rows' parents; or zeros, where ``taps`` are the target's hidden
    states. See ``models.heads.eagle`` for the formula.
    """
    if taps is not None:
        g = ops.add_linear(g, ops.hand(taps), more.fc)
    layer = w.layers[0]
    qkv = ops.linear(ops.norm(e, layer.attention_norm), layer.qkv)
    qkv = ops.add_linear(qkv, ops.norm(g, more.hidden_norm), more.hidden_qkv)
    x = ops.add_linear(g, ops.attention(qkv, 0, layer), layer.o)
    gated = ops.swiglu(ops.norm(x, layer.mlp_norm), layer.gate_up)
    return ops.add_linear(x, gated, layer.down)
