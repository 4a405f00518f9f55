"""A draft for audits, which often agrees with its target and often does not, at next to no cost."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from outrider import Engine
from outrider.core.proposal import Proposal
from outrider.drafters.model import ModelDrafter
from outrider.drafters.shape import Shape
from outrider.models.toy import ToyModel

__all__ = ["blurred"]

REMEMBERED = 1500  # contexts; a row of 49 k probabilities takes 200 kB


def blurred(engine: Engine, shape: Shape | None = None) -> ModelDrafter:
    """The target itself, its logits flattened and noised, and remembered for each context.

    The target's own first layers would do for greedy decoding, but under sampling they agree
    with it once in seventy drafts, and what is hardly ever kept can hardly be kept wrongly.
    """
    model = engine.model
    noise = torch.randn(model.vocab_size, generator=torch.Generator().manual_seed(0))

    @lru_cache(maxsize=REMEMBERED)
    def after(tokens: tuple[int, ...]) -> np.ndarray:
        cache = model.new_cache(len(tokens))
        model.prefill(cache, tokens[:-1], None)
        logits = model.score(cache, tokens[-1:], Proposal())[0].float()
        return torch.softmax(0.8 * logits + noise, dim=-1).numpy()

    draft = ToyModel(after, model.vocab_size, context_length=model.context_length, name="blurred")
    return ModelDrafter(draft, shape=shape)
