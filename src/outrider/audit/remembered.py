"""A target that scores nothing twice, so that an audit of many short outputs takes minutes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.proposal import Proposal
from outrider.core.sequences import common_prefix
from outrider.models.toy import ContextModel, ToyCache
from outrider.protocols import Cache, Model

__all__ = ["Remembered"]

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
