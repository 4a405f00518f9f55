"""The native runtime as a model: blocks, trees and several sequences scored in one pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from threading import Lock

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.proposal import Proposal
from outrider.errors import ProposalError
from outrider.models.heads.eagle import EagleModule, TorchHead
from outrider.models.heads.medusa import MedusaModule
from outrider.models.hidden import Hidden, check_taps
from outrider.models.layers import check_layers
from outrider.models.native.architecture import Architecture
from outrider.models.native.cache import NativeCache, Shape
from outrider.models.native.feed import Feeder
from outrider.models.native.kernels import FRAME, MAX_ROWS
from outrider.models.native.recorder import Program, record
from outrider.models.native.vector import BLOCK
from outrider.models.native.weights import Weights
from outrider.protocols import Asked, Head, ParallelHeads, Progress, Rollback

__all__ = ["NativeModel"]


class NativeModel:
    """A Llama-shaped model on the CPU.

    A row's logits are the same bits alone, in a block, in a tree and beside other sequences:
    sums of int8 products are exact, and every float sum is one row's own, in the order of the
    row's own path.

    Parameters
    ----------
    architecture, weights
        The model.
    name
        What to call it.
    vocab_size
        Number of real tokens, where it is fewer than the rows of the output matrix.

    Example
    -------
    >>> from outrider import Engine
    >>> engine = Engine.load("smollm2-135m", runtime="native")  # doctest: +SKIP
    >>> engine.model.kind  # doctest: +SKIP
    'int4'
    """

    rollback: Rollback = "length"
    trees = True
    most_rows = MAX_ROWS

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        name: str = "",
        vocab_size: int | None = None,
    ) -> None:
        a = architecture
        self.architecture = a
        self.weights = weights
        self.name = name or a.family
        self.vocab_size = min(a.vocab_size, vocab_size or a.vocab_size)
        self.context_length = a.context_length
        width = -(-a.head_dim // BLOCK) * BLOCK
        cached = np.dtype(np.float32 if self.kind == "float32" else np.float16)
        self.shape = Shape(a.layers, a.kv_heads, width, cached)
        self.layers, self.hidden_size = a.layers, a.hidden
        self._only: tuple[int, ...] | None = None
        self._programs: dict[tuple[int, ...], Program] = {}
        self._feeder = Feeder(a, a.vocab_size)
        # The programs' buffers are the model's own, so that passes take turns.
        self._turn_taking = Lock()
        self._program(())

    @property
    def kind(self) -> str:
        """Precision of the weights."""
        return self.weights.kind

    def new_cache(self, capacity: int, taps: tuple[int, ...] = ()) -> NativeCache:
        """An empty cache for a sequence of at most ``capacity`` tokens.

        ``taps`` are layers whose hidden states are set aside in it.
        """
        check_taps(taps, self.layers, self.name)
        return NativeCache(self.shape, capacity, Hidden(taps, self.hidden_size))

    def cache_bytes(self, tokens: int) -> int:
        """Memory for the keys and values of so many tokens."""
        return self.shape.bytes(tokens)

    def make_head(self, module: EagleModule | MedusaModule) -> Head | ParallelHeads:
        """A draft head on this model's hidden states."""
        from outrider.models.native.eagle import NativeHead  # which are built on this module
        from outrider.models.native.medusa import NativeMedusa

        if isinstance(module, MedusaModule):
            return NativeMedusa(module, self)
        if module.config.norm_before_residual:  # the recorded layer goes round with g itself
            d = self.hidden_size
            return TorchHead(module, lambda tokens: self.weights.embed(list(tokens))[:, :d])
        return NativeHead(module, self)

    def some_layers(self, layers: Sequence[int]) -> NativeModel:
        """Some layers alone, in the same caches, where each has the place that it has here.

        Weights, and buffers that passes take turns with, are shared.
        """
        part = copy.copy(self)
        part._only = check_layers(layers, self.layers, self.name)
        part._programs = {}
        part._program(())
        return part

    def _program(self, taps: tuple[int, ...]) -> Program:
        """The pass that sets some layers' hidden states aside, recorded when first asked for."""
        if taps not in self._programs:
            self._programs[taps] = record(
                self.architecture, self.weights, self.shape.dtype, taps, self._only
            )
        return self._programs[taps]

    def prefill(
        self, cache: NativeCache, tokens: Sequence[int], progress: Progress | None = None
    ) -> None:
        """Feed tokens in chunks, no logits wanted."""
        for start in range(0, len(tokens), MAX_ROWS):
            self._pass([Asked(cache, tokens[start : start + MAX_ROWS])], 0)
            if progress is not None:
                progress(min(start + MAX_ROWS, len(tokens)), len(tokens))

    def score(
        self, cache: NativeCache, tokens: Sequence[int], proposal: Proposal
    ) -> Float[Tensor, "rows V"]:
        """Logits after the last of ``tokens`` and after each node of a tree, in one pass.

        What does not fit into one pass is fed before.
        """
        nodes = len(proposal)
        if proposal.depth > MAX_ROWS and not proposal.is_chain:
            raise ProposalError(
                f"A tree of depth {proposal.depth} was proposed; '{self.name}' scores trees of at "
                f"most {MAX_ROWS}.",
                hint="Ask for a smaller --draft-length.",
            )
        surplus = min(max(0, len(tokens) + nodes - MAX_ROWS), len(tokens) - 1)
        self.prefill(cache, tokens[:surplus])
        rest = tokens[surplus:]
        room = MAX_ROWS - len(rest)
        some = [self._pass([Asked(cache, rest, proposal, range(min(nodes, room)))], -1)]
        for start in range(room, nodes, MAX_ROWS):
            part = range(start, min(nodes, start + MAX_ROWS))
            some.append(self._pass([Asked(cache, [], proposal, part)], -1))
        logits = torch.cat(some) if len(some) > 1 else some[0]
        return logits[-1 - nodes :]

    def score_together(self, asked: Sequence[Asked]) -> list[Float[Tensor, "rows V"]]:
        """``score`` for several sequences in one pass; at most ``MAX_ROWS`` rows in all."""
        wanted = [1 + len(one.proposal) for one in asked]
        ends = np.cumsum([len(one.fed) for one in asked])
        logits = self._pass(asked, int(ends[-1]))
        return [logits[end - rows : end] for end, rows in zip(ends, wanted, strict=True)]

    @torch.inference_mode()
    def _pass(self, asked: Sequence[Asked], wanted: int) -> Float[Tensor, "wanted V"]:
        """One run of the program; logits of the last rows, or of all that could be asked for."""
        if wanted < 0:
            one = asked[0]
            wanted = len(one.fed_nodes) + bool(one.tokens)
        fed = [one.fed for one in asked]
        if (total := sum(map(len, fed))) > MAX_ROWS:
            raise ProposalError(
                f"A pass feeds at most {MAX_ROWS} tokens; {total} were given.",
                hint="Feed some of them before.",
            )
        with self._turn_taking:
            return self._run(asked, fed, wanted)

    def _run(
        self, asked: Sequence[Asked], fed: Sequence[Sequence[int]], wanted: int
    ) -> Float[Tensor, "wanted V"]:
        # Hidden states that were set aside are the whole model's.
        taps = asked[0].cache.hidden.taps if self._only is None else ()
        program = self._program(taps)
        frame = program.frame
        rows = self._feeder.fill(frame, asked, fed)
        frame[FRAME.first] = rows - wanted
        logits = torch.empty(wanted, self.weights.head.padded_outputs if wanted else 0)
        frame[FRAME.logits] = logits.data_ptr()
        program.run(logits=wanted > 0)
        row = 0
        # Only now: a pass that was broken off has fed nothing.
        for one, n in zip(asked, map(len, fed), strict=True):
            if taps:
                one.cache.hidden.put(one.cache.length, program.tapped_array[row : row + n])
            one.cache.length += n
            row += n
        return logits[:, : self.vocab_size]
