"""The cache of the ``hf`` runtime: transformers' own layers, with rollback by moving a length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from outrider.errors import RollbackError
from outrider.models.hidden import Hidden
from outrider.protocols import Rollback

__all__ = ["GROW_BY", "GrowingLayer", "HFCache", "continues_from_state", "rollback_of"]

GROW_BY = 512
"""Tokens that a layer makes room for at a time."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in one buffer that grows in steps.

    transformers' own dynamic layer copies the whole cache in every step; here a step writes its
    rows in place, and taking rows back moves ``length``.

    Parameters
    ----------
    visible
        From the number of keys there are to the number that attention is shown; those beyond
        the length are zero or stale, and masked.
    """

    keys: Tensor
    values: Tensor
    is_initialized: bool

    def __init__(self, visible: Callable[[int], int]) -> None:
        super().__init__()
        self.length = 0
        self._visible = visible

    def _reserve(self, capacity: int, like_k: Tensor, like_v: Tensor) -> None:
        held = self.keys.shape[-2] if self.is_initialized else 0
        if held >= capacity:
            return
        capacity = -(-capacity // GROW_BY) * GROW_BY
        # Zeros, not empty: a masked value of NaN would still spoil the sum it is weighted into.
        keys = like_k.new_zeros((*like_k.shape[:-2], capacity, like_k.shape[-1]))
        values = like_v.new_zeros((*like_v.shape[:-2], capacity, like_v.shape[-1]))
        if self.is_initialized:
            keys[..., : self.length, :] = self.keys[..., : self.length, :]
            values[..., : self.length, :] = self.values[..., : self.length, :]
        self.keys, self.values = keys, values
        self.device, self.is_initialized = keys.device, True

    def update(
        self,
        key_states: Float[Tensor, "1 KV n D"],
        value_states: Float[Tensor, "1 KV n D"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Write n rows behind the present ones; returns what attention is shown."""
        end = self.length + key_states.shape[-2]
        shown = self._visible(end)
        self._reserve(shown, key_states, value_states)
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        return self.keys[..., :shown, :], self.values[..., :shown, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that attention will be shown after a pass of this length, and their offset."""
        return self._visible(self.length + query_length), 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Take rows back: transformers' convention is a negative count."""
        self.length -= abs(tokens_to_remove)

    @torch.inference_mode()
    def compact(self, base: int, path: Sequence[int]) -> None:
        """Move the rows ``base + node`` for the nodes of a path to ``base`` and on, in order."""
        rows = torch.tensor([base + node for node in path], device=self.keys.device)
        kept = slice(base, base + len(path))
        self.keys[..., kept, :] = self.keys[..., rows, :]
        self.values[..., kept, :] = self.values[..., rows, :]

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingLayer:
        # A snapshot needs the length alone: later passes write behind it, or what they wrote
        # is written again.
        return copy.copy(self)


def _layers(config: PreTrainedConfig) -> list[Any]:
    return list(DynamicCache(config=config).layers)


def _is_plain(layer: Any) -> bool:
    return type(layer) in (DynamicLayer, GrowingLayer, DummyLayer)


def rollback_of(config: PreTrainedConfig) -> Rollback:
    """How a model with this configuration can take tokens back.

    ``length`` for full and sliding attention; ``snapshot`` where a layer keeps a recurrent
    state, which is saved before each speculative pass; ``none`` for layer kinds not known here.
    """
    kinds: set[Rollback] = {"length"}
    for layer in _layers(config):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            kinds.add("snapshot")
        elif not (_is_plain(layer) or type(layer) is DynamicSlidingWindowLayer):
            kinds.add("none")
    return next(kind for kind in ("none", "snapshot", "length") if kind in kinds)


@torch.inference_mode()
def continues_from_state(module: Any) -> bool:
    """Whether a pass of several tokens goes on from a recurrent state, as one of a single does.

    Some families (mamba, jamba) begin anew with it, without a word. Here the last layer's state is
    spoilt: a pass that uses it cannot but show that.
    """
    token = torch.zeros(
        (1, 1), dtype=torch.long, device=module.get_input_embeddings().weight.device
    )
    for kind in ("conv_states", "recurrent_states"):
        cache = DynamicCache(config=module.config)
        module(input_ids=token, cache=cache, use_cache=True)
        held: list[list[Tensor]] = [
            [state for state in getattr(layer, kind, {}).values() if state is not None]
            for layer in cache.layers
        ]
        last = next((states for states in reversed(held) if states), [])
        for state in last:
            state.fill_(torch.nan)
        logits = module(input_ids=token.expand(1, 2), cache=cache, use_cache=True).logits
        if last and bool(logits.isfinite().all()):
            return False
    return True


class HFCache:
    """One sequence's cache.

    Parameters
    ----------
    config
        Configuration of the model, which decides the kind of each layer.
    visible
        See ``GrowingLayer``.
    hidden
        Where hidden states go that a drafter asked for.

    Raises
    ------
    RollbackError
        From ``keep`` and ``rollback``, when a layer cannot take tokens back.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        visible: Callable[[int], int] = lambda length: length,
        hidden: Hidden | None = None,
    ) -> None:
        self.hidden = hidden or Hidden((), 0)
        self._config = config
        self._visible = visible
        self._clear()

    def _clear(self) -> None:
        self.layers = DynamicCache(config=self._config)
        self.layers.layers = [
            GrowingLayer(self._visible) if type(layer) is DynamicLayer else layer
            for layer in self.layers.layers
        ]
        self.kind = rollback_of(self._config)
        self.is_plain = all(_is_plain(layer) for layer in self.layers.layers)
        if not self.is_plain and self.kind == "length":
            # A sliding window drops what it no longer needs; this keeps it until the next crop.
            self.layers.activate_past_recording()
        self.length = 0
        self._recorded_from = 0
        self._saved: tuple[int, list[Any]] | None = None

    def fed(self, tokens: int) -> None:
        """Note that a pass wrote this many tokens."""
        self.length += tokens

    def save(self) -> None:
        """Remember the present state, where it cannot be found again by moving a length."""
        if self.kind == "snapshot":
            self._saved = (self.length, copy.deepcopy(self.layers.layers))

    def settle(self) -> None:
        """Declare all tokens so far final: layers may drop what only a rollback would need."""
        if not self.is_plain and self.kind == "length" and self.length > self._recorded_from:
            self._crop(0)

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Keep ``base`` tokens and a path of the nodes behind them, moved up to close the gaps.

        Only the rows of the path are moved; a chain's are in place already.
        """
        if list(path) != list(range(len(path))):
            if not self.is_plain:
                raise RollbackError(
                    f"This cache keeps chains only; the accepted path has nodes {list(path)}.",
                    hint="Use a drafter that proposes chains.",
                )
            for layer in self.layers.layers:
                if isinstance(layer, GrowingLayer):
                    layer.compact(base, path)
            for step, node in enumerate(path):
                self.hidden.move(base + node, base + step)
        self.rollback(base + len(path))

    def shown(self, length: int) -> int:
        """Keys that attention is shown when ``length`` are there."""
        return self._visible(length)

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens, or fewer where the state is gone."""
        surplus = self.length - length
        if self.is_plain:
            if surplus > 0:
                self.layers.crop(-surplus)
                self.length = length
        elif self.kind == "length":
            if surplus > self.length - self._recorded_from:
                self._clear()
                return
            if self.length:  # a sliding layer that was never fed cannot be cropped
                self._crop(max(surplus, 0))
        elif surplus > 0 and self.kind == "snapshot":
            if self._saved is None or self._saved[0] > length:
                self._clear()
                return
            self.length, self.layers.layers = self._saved
            self._saved = None
        elif surplus > 0:
            raise RollbackError(
                "A layer of this model keeps a state that cannot be taken back.",
                hint="Use --drafter none.",
            )

    def _crop(self, surplus: int) -> None:
        self.layers.crop(-surplus)
        self.length -= surplus
        self._recorded_from = self.length

    @property
    def bytes(self) -> int:
        """Memory that the cache's tensors take now."""
        return sum(
            value.element_size() * value.nelement()
            for layer in self.layers.layers
            for value in vars(layer).values()
            if isinstance(value, torch.Tensor)
        )
