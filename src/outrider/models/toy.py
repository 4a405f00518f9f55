"""Small models whose next-token probabilities are known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from outrider.core.proposal import ROOT, Proposal
from outrider.errors import UnknownNameError, UsageError
from outrider.models.locate import Located
from outrider.models.tokenizer import ToyTokenizer
from outrider.protocols import Progress, Rollback
from outrider.registry import did_you_mean

__all__ = ["ToyCache", "ToyModel", "load"]

NextToken = Callable[[tuple[int, ...]], Float64[np.ndarray, " V"]]


class ToyCache:
    """The tokens themselves. The nodes of the last pass lie behind ``length`` until kept."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: list[int] = []
        self.nodes: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Tokens held."""
        return len(self.tokens)

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Keep ``base`` tokens and the nodes along the path."""
        self.tokens = self.tokens[:base] + [self.nodes[node] for node in path]
        self.nodes = ()

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.keep(min(length, self.length), ())


class ContextModel:
    """A model whose rows are a function of the tokens before them; its cache is these tokens."""

    rollback: Rollback = "length"

    def new_cache(self, capacity: int) -> ToyCache:
        """An empty cache."""
        return ToyCache(capacity)

    def prefill(
        self, cache: ToyCache, tokens: Sequence[int], progress: Progress | None = None
    ) -> None:
        """Remember tokens."""
        cache.tokens.extend(tokens)

    def contexts(
        self, cache: ToyCache, tokens: Sequence[int], proposal: Proposal
    ) -> list[tuple[int, ...]]:
        """Take tokens and a proposal in; all tokens before each row that is to be scored.

        Raises
        ------
        ValueError
            When the cache has no room for them.
        """
        cache.tokens.extend(tokens)
        if cache.length + proposal.depth > cache.capacity:
            raise ValueError(
                f"The cache holds {cache.capacity} tokens; {cache.length + proposal.depth} came."
            )
        cache.nodes = proposal.tokens
        return [(*cache.tokens, *proposal.path_tokens(n)) for n in range(ROOT, len(proposal))]


class ToyModel(ContextModel):
    """A language model given by a function from the tokens so far to probabilities.

    Parameters
    ----------
    probabilities
        From all tokens before a position to one probability for each token, float64.
    vocab_size
        Number of tokens.
    context_length
        Longest sequence that it can hold.

    Example
    -------
    >>> model = ToyModel.random(vocab_size=4, seed=1)
    >>> round(float(model.next((0, 2)).sum()), 12)
    1.0
    """

    trees = True

    def __init__(
        self,
        probabilities: NextToken,
        vocab_size: int,
        *,
        context_length: int = 4096,
        name: str = "toy",
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.context_length = context_length
        self._probabilities = probabilities

    @classmethod
    def random(
        cls,
        vocab_size: int,
        seed: int,
        *,
        order: int = 2,
        sharpness: float = 1.5,
        context_length: int = 4096,
    ) -> ToyModel:
        """Fixed random laws, each depending on the last ``order`` tokens and their number.

        ``sharpness`` scales the logits, which are standard normal.
        """

        @lru_cache(maxsize=65536)
        def after(recent: tuple[int, ...]) -> Float64[np.ndarray, " V"]:
            rng = np.random.default_rng([seed, len(recent), *(token + 1 for token in recent)])
            weights: Float64[np.ndarray, " V"] = np.exp(sharpness * rng.standard_normal(vocab_size))
            return np.asarray(weights / weights.sum())

        def probabilities(tokens: tuple[int, ...]) -> Float64[np.ndarray, " V"]:
            return after(tokens[-order:] if order else ())

        return cls(probabilities, vocab_size, context_length=context_length, name=f"toy-{seed}")

    def next(self, tokens: Sequence[int]) -> Float64[np.ndarray, " V"]:
        """The law of the token after ``tokens``."""
        return np.asarray(self._probabilities(tuple(tokens)), dtype=np.float64)

    def score(
        self, cache: ToyCache, tokens: Sequence[int], proposal: Proposal
    ) -> Float64[Tensor, "rows V"]:
        """Logarithms of the laws after ``tokens`` and after each node."""
        laws = [self.next(context) for context in self.contexts(cache, tokens, proposal)]
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(np.stack(laws)))


def load(
    located: Located, *, dtype: torch.dtype | None = None, device: str | None = None
) -> tuple[ToyModel, ToyTokenizer]:
    """The runtime's entry: ``toy:vocab=5,seed=1,order=2,sharpness=1.5,context=4096``.

    Raises
    ------
    UsageError
        When an option is unknown, not a number or too small.
    """
    least: dict[str, float] = {
        "vocab": 1, "seed": 0, "order": 0, "context": 1, "sharpness": -math.inf
    }  # fmt: skip
    defaults: dict[str, float] = {
        "vocab": 5, "seed": 0, "order": 2, "context": 4096, "sharpness": 1.5
    }  # fmt: skip
    for name in located.options:
        if name not in defaults:
            raise UnknownNameError(
                f"A toy model has no option '{name}'.", hint=did_you_mean(name, defaults)
            )
    try:
        values = defaults | {name: float(text) for name, text in located.options.items()}
        whole = {name: int(value) for name, value in values.items() if name != "sharpness"}
        if any(whole[n] != values[n] for n in whole) or any(values[n] < least[n] for n in values):
            raise ValueError("not a whole number, or too small")
        if not math.isfinite(values["sharpness"]):
            raise ValueError("not finite")
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"A toy model's options are numbers, whole but for sharpness; got {located.options}.",
            hint="Example: toy:vocab=5,seed=1",
        ) from error
    model = ToyModel.random(
        whole["vocab"],
        whole["seed"],
        order=whole["order"],
        sharpness=values["sharpness"],
        context_length=whole["context"],
    )
    return model, ToyTokenizer(model.vocab_size)
