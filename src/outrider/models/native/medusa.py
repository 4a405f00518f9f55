"""Medusa heads in the native runtime: all of them in one pass of as many rows."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.models.heads.medusa import MedusaModule
from outrider.models.native.arena import gathered
from outrider.models.native.kernels import FRAME, lift
from outrider.models.native.model import NativeModel
from outrider.models.native.recorder import Program, Rows, Steps, padded_inputs
from outrider.models.native.weights import Linear, pack

__all__ = ["NativeMedusa"]


class _Heads(Steps):
    """Every row holds the same hidden state, and goes through all blocks: the weights are read once
    whatever the rows, and these are few. Then row j keeps what block j made of it."""

    def lift(self, x: Tensor, weight: Tensor, pieces: Tensor) -> Rows:
        width = len(weight)
        places = (weight.data_ptr(), width, self.epsilon, pieces.data_ptr(), pieces.shape[1])
        self._step(lift, x.data_ptr(), *places, *self._into(width))
        return self.rows

    def record(self, norm: Tensor, blocks: Linear, head: Linear) -> Program:
        """The pass, for hidden states in ``hidden``."""
        self.held += [norm, blocks, head]
        hidden, pieces = self.buffer(len(norm)), self.buffer(blocks.padded_outputs)
        self._linear(self.norm(hidden, norm), blocks, pieces.data_ptr())
        self._linear(self.lift(hidden, norm, pieces), head, 0, head=True)
        steps = self.steps
        return Program(steps, len(steps), self.frame, hidden, self.held)


class NativeMedusa:
    """Heads at work; offers ``outrider.protocols.ParallelHeads``.

    Parameters
    ----------
    module
        Their weights, packed in the target's precision.
    target
        Whose hidden states they read.
    """

    def __init__(self, module: MedusaModule, target: NativeModel) -> None:
        c = module.config
        self.taps, self.ids, self.count = c.taps, module.ids, c.count
        kind = target.weights.head.kind
        norm, blocks, bias, head = (
            p.detach().float().contiguous()
            for p in (
                module.norm.weight, module.blocks.weight, module.blocks.bias, module.lm_head.weight
            )
        )  # fmt: skip
        packed, self._head = gathered((pack(blocks, bias, kind), pack(head, None, kind)))
        steps = _Heads(kind, padded_inputs(c.hidden), c.epsilon)
        self._program = steps.record(norm, packed, self._head)

    @torch.inference_mode()
    def predict(self, hidden: Float[Tensor, " d"]) -> Float[Tensor, "count draft_vocab"]:
        """Logits of the tokens that follow the one after a hidden state's own."""
        program, frame = self._program, self._program.frame
        program.hidden[: self.count] = hidden
        logits = torch.empty(self.count, self._head.padded_outputs)
        frame[FRAME.rows], frame[FRAME.first] = self.count, 0
        frame[FRAME.logits] = logits.data_ptr()
        program.run(logits=True)
        return logits[:, : len(self.ids)]
