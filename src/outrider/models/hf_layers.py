"""Some of the layers of a transformers model, on the whole model's own weights and caches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from outrider.core.proposal import Proposal
from outrider.errors import UnsupportedError
from outrider.models.hf import HFModel
from outrider.models.hf_cache import GrowingLayer, HFCache
from outrider.models.hidden import Hidden
from outrider.models.layers import check_layers

__all__ = ["SomeLayers"]


class SomeLayers(HFModel):
    """A model without the layers that were not chosen; what it shares, it does not copy.

    Each layer of transformers knows its own place in the cache, so that a chosen one finds its own
    keys and values there, wherever it stands now.

    Parameters
    ----------
    whole
        The model.
    layers
        Those to run.

    Raises
    ------
    UnsupportedError
        When its layers are not in one list, or a cache of theirs goes back by more than a length.
    """

    def __init__(self, whole: HFModel, layers: Sequence[int]) -> None:
        vars(self).update(vars(whole))
        chosen = check_layers(layers, whole.layers, whole.name)
        kept = whole.new_cache(1).layers.layers
        if not all(isinstance(layer, GrowingLayer) for layer in kept):
            raise UnsupportedError(
                f"'{whole.name}' has layers whose cache does not go back by a length alone.",
                hint="Use the native runtime for sliding windows, or --drafter ngram.",
            )
        self.module = _with_layers(whole, chosen)

    def _pass(
        self, cache: HFCache, ids: Sequence[int], wanted: int, tree: Proposal | None = None
    ) -> Float[Tensor, "wanted V"]:
        bare = copy.copy(cache)
        bare.hidden = Hidden((), 0)  # what is set aside there is the whole model's
        try:
            return super()._pass(bare, ids, wanted, tree)
        finally:
            # Layers that were left out, or that a broken pass did not get to, keep step.
            cache.length = bare.length
            for layer in cache.layers.layers:
                layer.length = cache.length


def _with_layers(whole: HFModel, chosen: Sequence[int]) -> Any:
    """A shallow copy of a module whose decoder has some of the layers."""
    decoder = whole.module.get_decoder()
    lists = [
        (name, part)
        for name, part in decoder.named_children()
        if isinstance(part, nn.ModuleList) and len(part) == whole.layers
    ]
    if decoder is whole.module or len(lists) != 1:
        raise UnsupportedError(
            f"The layers of {type(whole.module).__name__} are not in one list of its decoder.",
            hint="Use the native runtime, or --drafter ngram.",
        )
    name, part = lists[0]
    fewer = _with(decoder, name, nn.ModuleList(part[i] for i in chosen))
    above = next((n for n, child in whole.module.named_children() if child is decoder), None)
    if above is None:
        raise UnsupportedError(
            f"The decoder of {type(whole.module).__name__} lies deeper than it was looked for.",
            hint="Use the native runtime, or --drafter ngram.",
        )
    return _with(whole.module, above, fewer)


def _with(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """The same module with another child, the original left as it is."""
    made = copy.copy(module)
    made._modules = {**module._modules, name: child}
    return made
