"""An EAGLE-3 head in the native runtime: its one layer recorded as a target's passes are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.proposal import Proposal
from outrider.models.heads.eagle import EagleModule
from outrider.models.hidden import Hidden
from outrider.models.native.architecture import Architecture
from outrider.models.native.arena import gathered
from outrider.models.native.cache import NativeCache, Shape
from outrider.models.native.feed import Feeder
from outrider.models.native.kernels import FRAME, MAX_ROWS
from outrider.models.native.llama import EagleWeights, Layer
from outrider.models.native.model import NativeModel
from outrider.models.native.recorder import Program, record_head
from outrider.models.native.vector import BLOCK
from outrider.models.native.weights import Linear, Weights, in_turns, pack
from outrider.protocols import Asked

__all__ = ["NativeHead"]


class NativeHead:
    """A head at work; offers ``outrider.protocols.Head``.

    Parameters
    ----------
    module
        Its weights, packed in the target's precision.
    target
        Whose embeddings it reads.
    """

    def __init__(self, module: EagleModule, target: NativeModel) -> None:
        c = module.config
        self.taps, self.context = c.taps, c.context
        self.ids = module.ids
        self._architecture = a = Architecture(
            family="eagle3", layers=1, hidden=c.hidden, intermediate=c.intermediate,
            heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, vocab_size=c.draft_vocab,
            context_length=target.context_length, epsilon=c.epsilon, tied=False, qk_norm=False,
            windows=(0,), inverse_frequencies=module.frequencies.double().numpy(), rope_factor=1.0,
        )  # fmt: skip
        layer, d = module.midlayer, c.hidden
        at = layer.self_attn

        def packed(*weights: Tensor, gated: bool = False) -> Linear:
            whole = torch.cat([w.detach().float() for w in weights])
            return pack(in_turns(whole) if gated else whole, None, target.weights.kind)

        def norm(of: torch.nn.RMSNorm) -> Tensor:
            return of.weight.detach().float().contiguous()

        qkv = [p.weight for p in (at.q_proj, at.k_proj, at.v_proj)]
        own = Layer(
            norm(layer.input_layernorm),
            packed(*(w[:, :d] for w in qkv)),
            packed(at.o_proj.weight),
            norm(layer.post_attention_layernorm),
            packed(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, gated=True),
            packed(layer.mlp.down_proj.weight),
        )
        output = packed(module.lm_head.weight)
        more = EagleWeights(
            packed(module.fc.weight),
            norm(layer.hidden_norm),
            packed(*(w[:, d:] for w in qkv)),
            len(c.taps) * d,
        )
        w, more = gathered((Weights([own], norm(module.norm), output, None), more))
        self.weights = w
        cached = target.shape.dtype
        self._shape = Shape(1, c.kv_heads, -(-c.head_dim // BLOCK) * BLOCK, cached)
        table = target.weights
        self._feeder = Feeder(a, target.architecture.vocab_size)
        self._first = record_head(a, w, more, table, cached, fused=True)
        self._later = record_head(a, w, more, table, cached, fused=False)

    def new_cache(self, capacity: int) -> NativeCache:
        """An empty cache for the head's one layer."""
        return NativeCache(self._shape, capacity, Hidden((), 0))

    def cache_bytes(self, tokens: int) -> int:
        """Memory for the keys and values of so many tokens."""
        return self._shape.bytes(tokens)

    def feed(
        self, cache: NativeCache, tokens: Sequence[int], hidden: Float[Tensor, "n widths"]
    ) -> tuple[Float[Tensor, " draft_vocab"], Float[Tensor, " d"]]:
        """Committed tokens, each with the target's hidden states of the one before it."""
        program, seen = self._first, hidden.numpy(force=True)
        for start in range(0, len(tokens), MAX_ROWS):
            some = tokens[start : start + MAX_ROWS]
            program.tapped_array[: len(some)] = seen[start : start + len(some)]
            program.hidden_array[: len(some)] = 0.0
            last = start + len(some) == len(tokens)
            logits, states = self._run(program, Asked(cache, some), int(last))
        return logits[-1], states[-1]

    def grow(
        self, cache: NativeCache, tree: Proposal, nodes: range, states: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n draft_vocab"], Float[Tensor, "n d"]]:
        """Nodes of a tree whose earlier ones are in the cache, each with its parent's state."""
        self._later.hidden_array[: len(nodes), : states.shape[1]] = states.numpy(force=True)
        return self._run(self._later, Asked(cache, [], tree, nodes), len(nodes))

    @torch.inference_mode()
    def _run(self, program: Program, asked: Asked, wanted: int) -> tuple[Tensor, Tensor]:
        frame: np.ndarray = program.frame
        d = self._architecture.hidden
        rows = self._feeder.fill(frame, [asked], [asked.fed])
        frame[FRAME.first] = rows - wanted
        logits = torch.empty(wanted, self.weights.head.padded_outputs if wanted else 0)
        frame[FRAME.logits] = logits.data_ptr()
        program.run(logits=wanted > 0)
        asked.cache.length += rows
        states = torch.from_numpy(program.hidden_array[:rows, :d].copy())
        return logits[:, : len(self.ids)], states
