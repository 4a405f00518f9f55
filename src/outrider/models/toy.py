"""Small models whose next-token probabilities are known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from outrider.core.proposal import ROOT, Proposal
from outrider.errors import UnknownNameError, UsageError
from outrider.models.hidden import check_taps
from outrider.models.layers import check_layers
from outrider.models.locate import Located
from outrider.models.tokenizer import ToyTokenizer
from outrider.protocols import Progress, Rollback
from outrider.registry import did_you_mean

__all__ = ["ToyCache", "ToyHead", "ToyMedusa", "ToyModel", "load"]

NextToken = Callable[[tuple[int, ...]], Float64[np.ndarray, " V"]]


class _ToyHidden:
    """A toy's hidden states: the logarithms of the laws after each token, once for each tap."""

    def __init__(self, cache: ToyCache, taps: tuple[int, ...], after: NextToken | None) -> None:
        self.taps = taps
        self._cache = cache
        self._after = after

    def first(self, length: int) -> Float64[Tensor, "length widths"]:
        """Of the first tokens."""
        assert self._after is not None
        tokens = tuple(self._cache.tokens)
        rows = [np.log(self._after(tokens[: i + 1]) + 1e-9) for i in range(length)]
        return torch.from_numpy(np.stack(rows)).repeat(1, len(self.taps))


class ToyCache:
    """The tokens themselves. The nodes of the last pass lie behind ``length`` until kept."""

    def __init__(
        self, capacity: int, taps: tuple[int, ...] = (), after: NextToken | None = None
    ) -> None:
        self.capacity = capacity
        self.hidden: Any = _ToyHidden(self, taps, after)
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
    layers = 1

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
        self.hidden_size = vocab_size
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

    def new_cache(self, capacity: int, taps: tuple[int, ...] = ()) -> ToyCache:
        """An empty cache."""
        check_taps(taps, self.layers, self.name)
        return ToyCache(capacity, taps, self.next)

    def make_head(self, located: Located) -> ToyHead | ToyMedusa:
        """A head of random weights: ``toy:seed=3``, and ``vocab=2`` for a trimmed vocabulary.

        ``heads=3``: so many that predict side by side.
        """
        values = [str(located.options.get(n, "0")) for n in ("seed", "vocab", "heads")]
        if not all(value.isdecimal() for value in values):
            raise UsageError(
                f"A toy head's options are whole numbers of 0 or more; got {located.options}.",
                hint="Example: eagle:toy:seed=3,vocab=2",
            )
        seed, vocab, count = map(int, values)
        vocab = min(vocab or self.vocab_size, self.vocab_size)
        return ToyMedusa(self, seed, vocab, count) if count else ToyHead(self, seed, vocab)

    def some_layers(self, layers: Sequence[int]) -> ToyModel:
        """A toy has no layers to leave out: half its own law and half a random one stand in."""
        check_layers(layers, self.layers, self.name)
        other = ToyModel.random(self.vocab_size, seed=97)

        def mixed(tokens: tuple[int, ...]) -> Float64[np.ndarray, " V"]:
            return np.asarray((self.next(tokens) + other.next(tokens)) / 2)

        return ToyModel(mixed, self.vocab_size, context_length=self.context_length, name=self.name)

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


class ToyHead:
    """A head of random weights: state' = tanh(A state + B token), logits = 2 C state'.

    Parameters
    ----------
    target
        The toy whose hidden states it reads.
    seed
        Of its weights.
    vocab
        Tokens that it can propose: the first ones.
    """

    def __init__(self, target: ToyModel, seed: int, vocab: int) -> None:
        self.taps = (0,)
        self.ids = torch.arange(vocab)
        chance = torch.Generator().manual_seed(seed)
        V = target.vocab_size
        self._a, self._b, self._c = (
            torch.randn(n, V, generator=chance, dtype=torch.float64) for n in (V, V, vocab)
        )

    def new_cache(self, capacity: int) -> ToyCache:
        """An empty cache."""
        return ToyCache(capacity)

    def feed(
        self, cache: ToyCache, tokens: Sequence[int], hidden: Float64[Tensor, "n d"]
    ) -> tuple[Float64[Tensor, " Vd"], Float64[Tensor, " d"]]:
        """Committed tokens, with the target's hidden states."""
        cache.tokens.extend(tokens)
        logits, states = self._step(tokens[-1:], hidden[-1:])
        return logits[0], states[0]

    def grow(
        self, cache: ToyCache, tree: Proposal, nodes: range, states: Float64[Tensor, "n d"]
    ) -> tuple[Float64[Tensor, "n Vd"], Float64[Tensor, "n d"]]:
        """Some nodes of a tree, with their parents' states."""
        return self._step([tree.tokens[node] for node in nodes], states)

    def _step(
        self, tokens: Sequence[int], states: Float64[Tensor, "n d"]
    ) -> tuple[Float64[Tensor, "n Vd"], Float64[Tensor, "n d"]]:
        after = torch.tanh(states @ self._a.T + self._b[list(tokens)])
        return 2 * after @ self._c.T, after


class ToyMedusa:
    """Heads of random weights side by side: logits = 2 C_j tanh(A_j state).

    Parameters
    ----------
    target
        The toy whose hidden states they read.
    seed
        Of their weights.
    vocab
        Tokens that they can propose: the first ones.
    count
        Heads.
    """

    def __init__(self, target: ToyModel, seed: int, vocab: int, count: int) -> None:
        self.taps = (0,)
        self.ids = torch.arange(vocab)
        self.count = count
        chance = torch.Generator().manual_seed(seed)
        V = target.vocab_size
        self._a, self._c = (
            torch.randn(count, n, V, generator=chance, dtype=torch.float64) for n in (V, vocab)
        )

    def predict(self, hidden: Float64[Tensor, " d"]) -> Float64[Tensor, "count Vd"]:
        """One row for each head."""
        states = torch.tanh(self._a @ hidden)
        return 2 * (self._c @ states[..., None])[..., 0]


def load(
    located: Located, *, dtype: torch.dtype | None = None, device: str | None = None
) -> tuple[ToyModel, ToyTokenizer]:
    """The runtime's entry: ``toy:vocab=5,seed=1,order=2,sharpness=1.5,context=4096,pairs=0``.

    ``pairs``: so many tokens stand for two letters each; see ``ToyTokenizer``.

    Raises
    ------
    UsageError
        When an option is unknown, not a number or too small.
    """
    least: dict[str, float] = {
        "vocab": 1, "seed": 0, "order": 0, "context": 1, "pairs": 0, "sharpness": -math.inf
    }  # fmt: skip
    defaults: dict[str, float] = {
        "vocab": 5, "seed": 0, "order": 2, "context": 4096, "pairs": 0, "sharpness": 1.5
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
    return model, ToyTokenizer(model.vocab_size, pairs=whole["pairs"])
