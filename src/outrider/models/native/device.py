"""The native runtime on a GPU: passes of fixed widths over memory that never moves."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from functools import partial
from threading import Lock

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.core.proposal import Proposal
from outrider.errors import ModelError, NotEnoughMemoryError, ProposalError
from outrider.models.hidden import Hidden, check_taps
from outrider.models.layers import check_layers
from outrider.models.memory import free_bytes
from outrider.models.native.architecture import Architecture
from outrider.models.native.eager import DEPTH, FIELDS, frame_rows, run_pass
from outrider.models.native.graphs import Captured, Direct, graphs_for
from outrider.models.native.llama import Llama
from outrider.models.numerics import row_step
from outrider.protocols import Progress, Rollback

__all__ = ["KEY_STEP", "MAX_ROWS", "DeviceCache", "DeviceModel"]

WIDTHS = (8, 16, 32, 64)
"""Rows of a captured pass. One row costs what eight do, the time of reading the weights, so
narrower ones would only be more to capture, and other kernels with another order of sums."""

MAX_ROWS = WIDTHS[-1]
"""Most rows whose logits one pass gives."""

KEY_STEP = 512
"""Fewest keys that attention covers."""

_PREFILL_CHUNK = 512
_SAME_WIDTH = 16


class Room:
    """Memory for one sequence, and the passes that were captured over it.

    One slot more than it has room for takes what padding rows write; no row sees it.
    """

    def __init__(self, kept: Float[Tensor, "layers 2 KV slots D"]) -> None:
        self.kept = kept
        self.size = kept.shape[3] - 1
        self.captured: Captured = {}

    def keys(self, length: int) -> int:
        """How many slots attention covers when so many are filled."""
        return min(_doubled(length), self.size)


def _doubled(length: int) -> int:
    size = KEY_STEP
    while size < length:
        size *= 2
    return size


def _whole_steps(length: int) -> int:
    return -(-length // KEY_STEP) * KEY_STEP


class DeviceCache:
    """One sequence's keys and values, in memory that is there from the start.

    Taking tokens back moves ``length``. After a tree, the accepted path is moved together behind
    the text.

    Parameters
    ----------
    room
        The memory; it goes back to the model when the cache is gone.
    capacity
        Most tokens that it will hold. A draft may go beyond by a pass's rows, since not all of
        a tree's nodes can stand.
    hidden
        Where hidden states go that a drafter asked for.
    """

    def __init__(self, room: Room, capacity: int, hidden: Hidden) -> None:
        self.room = room
        self.capacity = capacity
        self.hidden = hidden
        self.length = 0

    @torch.inference_mode()
    def keep(self, base: int, path: Sequence[int]) -> None:
        """Keep ``base`` tokens and a path of the last proposal's nodes behind them."""
        if list(path) != list(range(len(path))):
            kept = self.room.kept
            slots = torch.tensor([base + node for node in path], device=kept.device)
            # Copied out first: a slot may be both read and written.
            kept[..., base : base + len(path), :] = kept.index_select(3, slots)
            for step, node in enumerate(path):
                self.hidden.move(base + node, base + step)
        self.rollback(base + len(path))

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.length = min(self.length, length)

    def check(self, more: int) -> None:
        """Raise ``ModelError`` when so many tokens more are beyond what was asked for."""
        if self.length + more > self.capacity + MAX_ROWS:
            raise ModelError(
                f"The cache was made for {self.capacity:,} tokens, and {MAX_ROWS} drafted ones "
                f"beyond; it holds {self.length:,}, and {more:,} more were given.",
                hint="Make it with a larger capacity, or propose fewer tokens.",
            )

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self.room.kept.nbytes


class DeviceModel:
    """A Llama-shaped model on any device of torch, in bfloat16, float16 or float32.

    On a CUDA device each kind of pass is captured when it first comes, and replayed from then on.
    Its rows are padded to one of ``WIDTHS``, its keys to ``KEY_STEP`` or a doubling of it. Doubling
    reads at most twice the keys there are, little beside the weights, and takes few captures;
    covering all of the memory would make a short text in a long context pay for the whole. Long
    pieces of a prompt are not captured: they are bound by arithmetic.

    Every pass of up to 16 rows has one width or, where ``row_step`` is set, linear layers were
    found to give a row the same bits at every width that is used. So a chain's rows should not
    depend on their company; that is measured (``models.numerics.check_numbers``), not proved. A
    tree's agree with them to rounding, since gaps between a path's keys change the order of sums,
    and so do those of a text whose prompt was fed in other pieces. A value that overflows in one
    row may spoil the other rows of its pass, which ends the request with an error, never with
    another text.

    Parameters
    ----------
    architecture, weights
        The model.
    name
        What to call it.
    vocab_size
        Number of real tokens, where it is fewer than the rows of the output matrix.
    """

    rollback: Rollback = "length"
    trees = True

    def __init__(
        self,
        architecture: Architecture,
        weights: Llama[nn.Linear],
        *,
        name: str = "",
        vocab_size: int | None = None,
    ) -> None:
        a, w = architecture, weights
        self.architecture = a
        self.weights = w
        self.name = name or a.family
        self.vocab_size = min(a.vocab_size, vocab_size or a.vocab_size)
        self.context_length = a.context_length
        self.layers, self.hidden_size = a.layers, a.hidden
        self.device = w.norm.device
        linears = [w.head, *(m for layer in w.layers for m in
                   (layer.qkv, layer.o, layer.gate_up, layer.down))]  # fmt: skip
        self.row_step = row_step(nn.ModuleList(linears))
        self.widths = [width for width in WIDTHS if width >= (self.row_step or _SAME_WIDTH)]
        wide = torch.float32 if self.device.type == "mps" else torch.float64  # it has no float64
        self._frequencies = torch.tensor(a.inverse_frequencies, dtype=wide).to(self.device)
        # At addresses that captured passes rely on.
        self._frame = torch.zeros(_PREFILL_CHUNK, FIELDS, dtype=torch.int64, device=self.device)
        self._logits = torch.zeros(MAX_ROWS, a.vocab_size, device=self.device)
        self._tapped: dict[tuple[int, ...], Tensor] = {}
        self._only: tuple[int, ...] | None = None
        self._graphs, self._direct = graphs_for(self.device), Direct()
        self._free: list[Room] = []
        # Frame and results are the model's own, so that passes take turns.
        self._turn_taking = Lock()

    @property
    def kind(self) -> str:
        """Precision of weights, activations and cache."""
        return str(self.weights.norm.dtype).removeprefix("torch.")

    def new_cache(self, capacity: int, taps: tuple[int, ...] = ()) -> DeviceCache:
        """An empty cache for a sequence of at most ``capacity`` tokens, all of its memory taken.

        ``taps`` are layers whose hidden states are set aside in it.

        Raises
        ------
        NotEnoughMemoryError
            When it would not fit, before anything is taken.
        """
        check_taps(taps, self.layers, self.name)
        with self._turn_taking:
            room = self._room(capacity)
        cache = DeviceCache(room, capacity, Hidden(taps, self.hidden_size))
        # The next sequence takes it over with the passes that were captured over it.
        weakref.finalize(cache, self._free.append, room).atexit = False
        return cache

    def some_layers(self, layers: Sequence[int]) -> DeviceModel:
        """Some layers alone, in the same caches, where each has the place that it has here.

        Weights, and buffers that passes take turns with, are shared.
        """
        part = copy.copy(self)
        part._only = check_layers(layers, self.layers, self.name)
        return part

    def cache_bytes(self, tokens: int) -> int:
        """Memory for a cache of so many tokens, which is taken at once."""
        return self._shape(tokens).numel() * self.weights.norm.dtype.itemsize

    def _shape(self, capacity: int) -> torch.Size:
        # In a few sizes, so that one room serves many sequences.
        needed = _whole_steps(capacity + MAX_ROWS)
        longest = _whole_steps(self.context_length + MAX_ROWS)
        size = max(needed, min(_doubled(needed), longest))
        a = self.architecture
        return torch.Size((a.layers, 2, a.kv_heads, size + 1, a.head_dim))

    def _room(self, capacity: int) -> Room:
        needed = _whole_steps(capacity + MAX_ROWS)
        free = [room for room in self._free if room.size >= needed]
        if free:
            room = min(free, key=lambda room: room.size)
            self._free.remove(room)
            # Masked values are weighted with zero, which does not help if they are no numbers.
            room.kept.zero_()
            return room
        shape, dtype = self._shape(capacity), self.weights.norm.dtype
        size_bytes = self.cache_bytes(capacity)
        if size_bytes > free_bytes(self.device):
            self._free.clear()
        if size_bytes > (left := free_bytes(self.device)):
            raise NotEnoughMemoryError(
                f"The cache needs {size_bytes / 1e6:,.0f} MB to hold {capacity:,} tokens; "
                f"{left / 1e6:,.0f} MB are free.",
                hint="Ask for fewer tokens, or close other programs.",
            )
        return Room(torch.zeros(shape, dtype=dtype, device=self.device))

    def prefill(
        self, cache: DeviceCache, tokens: Sequence[int], progress: Progress | None = None
    ) -> None:
        """Feed tokens in chunks, no logits wanted."""
        cache.check(len(tokens))
        for start in range(0, len(tokens), _PREFILL_CHUNK):
            self._pass(cache, tokens[start : start + _PREFILL_CHUNK], Proposal(), range(0), 0)
            if progress is not None:
                progress(min(start + _PREFILL_CHUNK, len(tokens)), len(tokens))

    def score(
        self, cache: DeviceCache, tokens: Sequence[int], proposal: Proposal
    ) -> Float[Tensor, "rows V"]:
        """Logits after the last of ``tokens`` and after each node of a tree, in one pass.

        What does not fit into one pass is fed before. They are float32, on the device.
        """
        nodes = len(proposal)
        if proposal.depth > DEPTH and not proposal.is_chain:
            raise ProposalError(
                f"A tree of depth {proposal.depth} was proposed; '{self.name}' scores trees of at "
                f"most {DEPTH}.",
                hint="Ask for a smaller --draft-length.",
            )
        cache.check(len(tokens) + nodes)
        surplus = min(max(0, len(tokens) + nodes - MAX_ROWS), len(tokens) - 1)
        self.prefill(cache, tokens[:surplus])
        rest = tokens[surplus:]
        room = MAX_ROWS - len(rest)
        first = range(min(nodes, room))
        some = [self._pass(cache, rest, proposal, first, 1 + len(first))]
        for start in range(room, nodes, MAX_ROWS):
            part = range(start, min(nodes, start + MAX_ROWS))
            some.append(self._pass(cache, [], proposal, part, len(part)))
        return torch.cat(some) if len(some) > 1 else some[0]

    @torch.inference_mode()
    def _pass(
        self,
        cache: DeviceCache,
        tokens: Sequence[int],
        proposal: Proposal,
        nodes: range,
        wanted: int,
    ) -> Float[Tensor, "wanted V"]:
        """Feed tokens and some nodes of a proposal; logits of the last rows."""
        fed = [*tokens, *(proposal.tokens[node] for node in nodes)]
        start, n = cache.length, len(fed)
        width = next((w for w in self.widths if w >= n), -(-n // MAX_ROWS) * MAX_ROWS)
        # Hidden states that are set aside are the whole model's.
        room, taps = cache.room, cache.hidden.taps if self._only is None else ()
        keys = room.keys(start + n)
        filled = frame_rows(width, start, fed, proposal, nodes, room.size)
        with self._turn_taking:
            # The copy waits until it is done, so that the next pass cannot overtake it.
            self._frame[:width].copy_(torch.from_numpy(filled))
            tapped = self._tapped_rows(taps)  # made before anything is captured over it
            step = partial(self._step, room, width, keys, wanted > 0, taps)
            graphs = self._graphs if width <= MAX_ROWS else self._direct
            graphs.run(room.captured, (width, keys, wanted > 0, taps, self._only), step)
            logits = self._logits[n - wanted : n, : self.vocab_size].clone()
            if taps:
                cache.hidden.put(start, tapped[:n].cpu())
        cache.length += n  # only now: a pass that was broken off has fed nothing
        return logits

    def _step(self, room: Room, width: int, keys: int, logits: bool, taps: tuple[int, ...]) -> None:
        """The pass over what the frame says: what is captured."""
        run_pass(
            self.architecture,
            self.weights,
            self._frame[:width],
            room.kept,
            self._frequencies,
            keys,
            logits=self._logits[:width] if logits else None,
            taps=taps,
            tapped=self._tapped[taps][:width] if taps else None,
            layers=self._only,
        )

    def _tapped_rows(self, taps: tuple[int, ...]) -> Float[Tensor, "rows widths"]:
        """Where hidden states of some layers go, made when they are first asked for."""
        if taps not in self._tapped:
            width = len(taps) * self.hidden_size
            self._tapped[taps] = torch.zeros(_PREFILL_CHUNK, width, device=self.device)
        return self._tapped[taps]
