"""A target that scores nothing twice, so that an audit of many short outputs takes minutes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.proposal import Proposal
from outrider.core.sequences import common_prefix
from outrider.drafters.early_exit import EarlyExitDrafter
from outrider.engine.engine import Engine
from outrider.errors import RollbackError, UsageError
from outrider.models.toy import ContextModel, ToyCache
from outrider.protocols import Cache, Model, TappedModel

__all__ = ["Remembered", "remembering"]

_BYTES = 2 * 2**30


class Remembered(ContextModel):
    """Another model's logits, each context's asked for once.

    Where a model keeps I2, the logits after some tokens are a function of these tokens, so what
    comes back is what a new pass would give. Session, drafter, rule, processors and stop logic
    are run as ever; what goes untested is the model's cache from round to round.

    Parameters
    ----------
    model
        Whose logits; its cache must roll back by length.
    memory_bytes
        For rows; of more, those that were not asked for longest are forgotten.

    Example
    -------
    >>> from outrider.models.toy import ToyModel
    >>> model = Remembered(ToyModel.random(4, seed=1))
    >>> cache = model.new_cache(8)
    >>> model.score(cache, [0, 1], Proposal.chain([2])).shape
    torch.Size([2, 4])
    """

    def __init__(self, model: Model, memory_bytes: int = _BYTES) -> None:
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.trees = model.trees
        self._model = model
        self._rows: OrderedDict[tuple[int, ...], Float[Tensor, " V"]] = OrderedDict()
        self._most = max(64, memory_bytes // (4 * model.vocab_size))
        self._cache: Cache = model.new_cache(model.context_length)
        self._held: list[int] = []
        self._hidden: dict[tuple[int, ...], _Hidden] = {}
        if isinstance(model, TappedModel):
            self.layers, self.hidden_size = model.layers, model.hidden_size

    def new_cache(self, capacity: int, taps: tuple[int, ...] = ()) -> ToyCache:
        """An empty cache; with taps, hidden states are remembered by their context too."""
        cache = ToyCache(capacity)
        if taps:
            if taps not in self._hidden:
                self._hidden[taps] = _Hidden(self._model, taps)
            cache.hidden = _HiddenOf(cache, self._hidden[taps])
        return cache

    def make_head(self, weights: Any) -> Any:
        """The model's own."""
        return cast(TappedModel, self._model).make_head(weights)

    def score(
        self, cache: ToyCache, tokens: Sequence[int], proposal: Proposal
    ) -> Float[Tensor, "rows V"]:
        """The model's rows, from memory where all are there."""
        contexts = self.contexts(cache, tokens, proposal)
        if any(context not in self._rows for context in contexts):
            for context, row in zip(contexts, self._ask(cache.tokens, proposal), strict=True):
                self._rows.setdefault(context, row.clone())
        for context in contexts:
            self._rows.move_to_end(context)
        found = torch.stack([self._rows[context] for context in contexts])
        while len(self._rows) > self._most:
            self._rows.popitem(last=False)
        return found

    def _ask(self, tokens: Sequence[int], proposal: Proposal) -> Float[Tensor, "rows V"]:
        self._cache.rollback(common_prefix(self._held, tokens[:-1]))
        start = self._cache.length
        self._model.prefill(self._cache, tokens[start:-1], None)
        rows = self._model.score(self._cache, tokens[-1:], proposal)
        self._cache.keep(len(tokens), ())
        self._held = list(tokens[: self._cache.length])
        return rows


class _Hidden:
    """The hidden states of one choice of layers after each context that was asked for."""

    def __init__(self, model: Any, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self._model = model
        self._cache = model.new_cache(model.context_length, taps)
        self._held: list[int] = []
        self._rows: dict[tuple[int, ...], Float[Tensor, " widths"]] = {}

    def after(self, tokens: tuple[int, ...]) -> Float[Tensor, "n widths"]:
        """A row after each of the tokens; those that are not known come from one pass."""
        if tokens not in self._rows:
            self._cache.rollback(common_prefix(self._held, tokens))
            self._model.prefill(self._cache, tokens[self._cache.length :], None)
            self._held = list(tokens)
            for n, row in enumerate(self._cache.hidden.first(len(tokens)), 1):
                self._rows.setdefault(tokens[:n], row.clone())
        return torch.stack([self._rows[tokens[: n + 1]] for n in range(len(tokens))])


class _HiddenOf:
    """What is set aside for one cache's tokens."""

    def __init__(self, cache: ToyCache, hidden: _Hidden) -> None:
        self.taps = hidden.taps
        self._cache = cache
        self._states = hidden

    def first(self, length: int) -> Float[Tensor, "length widths"]:
        """Of the first tokens."""
        return self._states.after(tuple(self._cache.tokens[:length]))


def remembering(engine: Engine) -> Engine:
    """The same engine, its target's contexts scored once.

    Raises
    ------
    UsageError
        When the drafter runs layers of the target on the target's own cache.
    RollbackError
        When the target's cache does not roll back by length.
    """
    parts = getattr(engine.drafter, "parts", (engine.drafter,))
    if any(isinstance(part, EarlyExitDrafter) for part in parts):
        raise UsageError(
            f"'{engine.drafter.name}' drafts on the target's own cache, which has no part where "
            "contexts are remembered.",
            hint="Use another drafter, or draw samples (without --enumerate and --remember).",
        )
    if isinstance(engine.model, Remembered):
        return engine
    if engine.model.rollback != "length":
        raise RollbackError(
            f"The cache of '{engine.model.name}' does not roll back by length, so its contexts "
            "cannot be remembered.",
            hint="Draw samples (without --enumerate and --remember).",
        )
    engine = copy(engine)
    engine.model = Remembered(engine.model)
    return engine
