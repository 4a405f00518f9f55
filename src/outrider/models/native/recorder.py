"""The decoder on a CPU: recorded once as a list of compiled steps, replayed for every pass.

Recording is what makes a small model fast. Every buffer has its place and every step its
arguments before the first token; a pass fills in what it feeds (the frame) and starts the team
once. The same list serves any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.models.native.architecture import Architecture
from outrider.models.native.emit import LANES
from outrider.models.native.kernels import (
    FRAME,
    LINEAR,
    MAX_ROWS,
    SHARES,
    SIGNED,
    UNGATED,
    Kernel,
    attend,
    hand_heads,
    look_up_floats,
    look_up_int8,
    norm,
    remember,
    tap,
)
from outrider.models.native.llama import EagleWeights, decoder, eagle, head
from outrider.models.native.team import team
from outrider.models.native.vector import BLOCK, GROUPS
from outrider.models.native.weights import INPUT_STEP, Kind, Layer, Linear, Weights

__all__ = ["Program", "Rows", "Steps", "padded_inputs", "record", "record_head"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows where a linear layer expects them, with the numbers that it needs of each block."""

    values: Tensor
    scales: Tensor


class Program:
    """Recorded steps and the buffers that they work on.

    Parameters
    ----------
    steps
        Each step's kernel and arguments.
    body
        How many of them come before the head: a prefill runs these alone.
    frame
        What the coming pass feeds; see ``kernels.Frame``.
    hidden
        Hidden states, f32 [MAX_ROWS, d].
    held
        Whatever else must outlive the recording.
    tapped
        Hidden states that were set aside, or that a draft head reads, f32 [MAX_ROWS, taps · d].
    """

    def __init__(
        self,
        steps: list[tuple[Kernel, list[int]]],
        body: int,
        frame: np.ndarray,
        hidden: Tensor,
        held: list[object],
        tapped: Tensor | None = None,
    ) -> None:
        self.frame = frame
        self.hidden = hidden
        self.tapped = hidden[:, :0] if tapped is None else tapped
        # The same memory: between passes torch takes longer over a small copy than numpy.
        self.tapped_array, self.hidden_array = self.tapped.numpy(), self.hidden.numpy()
        self._arguments = [np.array(arguments, np.int64) for _, arguments in steps]
        self._counters = np.zeros(len(steps) * SHARES, np.int64)
        frame[FRAME.counters] = self._counters.ctypes.data
        self._team = team()
        functions = (self._team.barrier, self._team.thread_number, self._team.team_size)
        listed = [
            address
            for (kernel, _), arguments in zip(steps, self._arguments, strict=True)
            for address in (kernel.address, arguments.ctypes.data)
        ]
        self._whole = np.array([len(steps), *functions, *listed], np.int64)
        self._body = np.array([body, *functions, *listed], np.int64)
        self._held = held

    def run(self, *, logits: bool) -> None:
        """One pass over what the frame says."""
        self._counters.fill(0)
        self._team.run((self._whole if logits else self._body).ctypes.data)


class Steps:
    """Norms and linear layers, written down.

    Parameters
    ----------
    kind
        Precision of the weights: int8 also where some have four bits.
    widest
        Inputs of the widest linear layer, padded.
    epsilon
        Of norms.
    """

    def __init__(self, kind: Kind, widest: int, epsilon: float) -> None:
        self.kind = kind
        self.frame = np.zeros(FRAME.size, np.int64)
        self.steps: list[tuple[Kernel, list[int]]] = []
        self.held: list[object] = [self.frame]
        # Rows for the coming linear layer; no two are needed at once, but where one layer makes
        # them of others.
        self.rows, self.gated = self._room(widest), self._room(widest)
        self.epsilon = self._number(epsilon)

    def buffer(self, width: int) -> Tensor:
        """Room for MAX_ROWS rows."""
        self.held.append(made := torch.zeros(MAX_ROWS, width))
        return made

    def _room(self, width: int) -> Rows:
        values = self.buffer(width) if self.kind != "int8" else self._bytes(width)
        return Rows(values, self.buffer(3 * (width // INPUT_STEP)))

    def _bytes(self, width: int) -> Tensor:
        self.held.append(made := torch.zeros(MAX_ROWS, width, dtype=torch.uint8))
        return made

    def _number(self, value: float) -> int:
        self.held.append(made := torch.tensor([value]))
        return made.data_ptr()

    def _step(self, kernel: Kernel, *arguments: int) -> None:
        self.steps.append((kernel, [self.frame.ctypes.data, *arguments]))

    def _into(self, width: int, rows: Rows | None = None) -> tuple[int, int, int, int]:
        """What a step is told of the rows that it makes for a linear layer."""
        rows = rows or self.rows
        places = rows.values.data_ptr(), rows.scales.data_ptr()
        return (padded_inputs(width), *places, int(self.kind == "int8"))

    def norm(self, x: Tensor, weight: Tensor, *, head: bool = False) -> Rows:
        """RMS norm; with ``head``, of the rows alone whose logits are wanted."""
        width = len(weight)
        into = (width, self.epsilon, int(head), *self._into(width))
        self._step(norm, x.data_ptr(), x.shape[1], weight.data_ptr(), *into)
        return self.rows

    def _linear(
        self,
        rows: Rows,
        w: Linear,
        out: int,
        *,
        add: bool = False,
        head: bool = False,
        gated: tuple[int, ...] = UNGATED,
    ) -> None:
        if w.kind == "int4":  # the step before hands it its rows, and is told how
            _, arguments = self.steps[-1]
            arguments[arguments.index(rows.scales.data_ptr()) + 1] = SIGNED
        parts = (rows.values, rows.scales, w.weight, w.sums, w.scales, w.bias)
        sizes = (w.padded_inputs, w.padded_outputs, int(add), int(head), len(self.steps))
        self._step(LINEAR[w.kind], *(part.data_ptr() for part in parts), out, *sizes, *gated)


class _Recorder(Steps):
    """``llama.Ops`` that writes down what is to be done. Activations are buffers used in turn."""

    def __init__(
        self,
        a: Architecture,
        w: Weights,
        cached: np.dtype[Any],
        taps: tuple[int, ...] = (),
        inputs: int = 0,
    ) -> None:
        first = w.layers[0]
        layer = (first.qkv.padded_inputs, first.o.padded_inputs, first.down.padded_inputs)
        super().__init__(w.head.kind, max(*layer, padded_inputs(inputs)), a.epsilon)
        self.a = a
        self.taps = taps
        self.cached = cached.itemsize
        self.held.append(w)
        self.hidden = self.buffer(first.o.padded_outputs)
        self.width = -(-a.head_dim // BLOCK) * BLOCK
        self.queries = self.buffer(a.heads * self.width)
        self.mixed = self.buffer(a.heads * self.width)
        self.qkv = self.buffer(first.qkv.padded_outputs)
        self.tapped = self.buffer(len(taps) * a.hidden)
        self.query_scale = self._number(a.head_dim**-0.5)

    def look_up(self, table: Weights, into: Tensor) -> Tensor:
        """The embeddings of what is fed."""
        own, head, width = table.embedding, table.head, self.a.hidden
        kind, numbers, wide, inputs = (
            (head.kind, head.weight, GROUPS * LANES, head.padded_inputs)
            if own is None
            else ("float32" if own.dtype == torch.float32 else "bfloat16", own, 1, own.shape[1])
        )
        places = (numbers.data_ptr(), head.scales.data_ptr(), wide, inputs, width)
        where = (*places, into.data_ptr(), into.shape[1])
        if kind == "int8":
            self._step(look_up_int8, *where)
        else:
            self._step(look_up_floats, *where, int(kind == "bfloat16"))
        self.held.append(table)
        return into

    def linear(self, rows: Rows, weight: Linear, *, head: bool = False) -> Tensor:
        self._linear(rows, weight, 0 if head else self.qkv.data_ptr(), head=head)
        return self.qkv

    def add_linear(self, x: Tensor, rows: Rows, weight: Linear) -> Tensor:
        self._linear(rows, weight, x.data_ptr(), add=True)
        return x

    def attention(self, qkv: Tensor, index: int, layer: Layer) -> Rows:
        a = self.a
        norms = [0 if n is None else n.data_ptr() for n in (layer.q_norm, layer.k_norm)]
        heads = (a.heads, a.kv_heads, a.head_dim, self.width)
        queries, half = self.queries.data_ptr(), len(a.inverse_frequencies)
        self._step(
            remember, qkv.data_ptr(), qkv.shape[1], *heads, index, queries, half, *norms,
            self.epsilon, self.query_scale, self.cached,
        )  # fmt: skip
        window, mixed, here = a.windows[index], self.mixed, self.mixed.data_ptr()
        seen = (window, len(self.steps), self.cached)
        self._step(attend, queries, *heads, index, *seen, here, mixed.shape[1])
        sizes = (mixed.shape[1], a.heads, a.head_dim, self.width)
        self._step(hand_heads, here, *sizes, *self._into(a.heads * a.head_dim))
        return self.rows

    def swiglu(self, rows: Rows, weight: Linear) -> Rows:
        self._linear(rows, weight, 0, gated=self._into(self.a.intermediate, self.gated))
        return self.gated

    def hand(self, x: Tensor) -> Rows:
        """Rows as they are, without a norm."""
        width = x.shape[1]
        self._step(hand_heads, x.data_ptr(), width, 1, width, width, *self._into(width))
        return self.rows

    def tap(self, x: Tensor, index: int) -> None:
        width = self.a.hidden
        for place, layer in enumerate(self.taps):
            if layer == index:
                into = self.tapped.data_ptr() + 4 * place * width
                self._step(tap, x.data_ptr(), x.shape[1], into, self.tapped.shape[1], width)


def padded_inputs(width: int) -> int:
    """Inputs of a linear layer, as its tiles take them."""
    return -(-width // INPUT_STEP) * INPUT_STEP


def record_head(
    a: Architecture,
    w: Weights,
    more: EagleWeights[Linear],
    table: Weights,
    cached: np.dtype[Any],
    *,
    fused: bool,
) -> Program:
    """Write a draft head down; ``fused`` where it reads the target's hidden states.

    ``tapped`` holds these, and ``hidden`` the states: the parents' before, and the rows' own after.
    The embeddings are the target's, out of ``table``.
    """
    width = more.fc.padded_inputs
    ops = _Recorder(a, w, cached, inputs=width)
    ops.held.append(more)
    taken = ops.buffer(more.inputs)
    embedded = ops.look_up(table, ops.buffer(a.hidden))
    x = eagle(ops, w, more, embedded, ops.hidden, taken if fused else None)
    body = len(ops.steps)
    head(ops, w, x)
    return Program(ops.steps, body, ops.frame, ops.hidden, ops.held, taken)


def record(
    a: Architecture,
    w: Weights,
    cached: np.dtype[Any],
    taps: tuple[int, ...] = (),
    layers: Sequence[int] | None = None,
) -> Program:
    """Write a model down as a program, with a cache of a dtype; ``taps`` are layers.

    ``layers``: those to run, if not all of them.
    """
    ops = _Recorder(a, w, cached, taps)
    hidden = decoder(ops, w, ops.look_up(w, ops.hidden), layers)
    body = len(ops.steps)
    head(ops, w, hidden)
    return Program(ops.steps, body, ops.frame, ops.hidden, ops.held, ops.tapped)
