"""The target's own layers, or some of them, as the draft model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.core.distribution import Distribution
from outrider.core.proposal import Proposal
from outrider.drafters.beside import OnItsOwn
from outrider.drafters.confidence import of_token
from outrider.drafters.shape import Chain, Shape, parse_shape
from outrider.drafters.tree import Tree
from outrider.errors import UnsupportedError, UsageError
from outrider.protocols import Cache, LayeredModel, Model, Pick, Setting

__all__ = ["EarlyExitDrafter", "parse_layers", "spell_layers"]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class EarlyExitDrafter:
    """Drafts with some of the target's layers, then its final norm and output matrix.

    No weights and no cache beside the target's: the keys and values of committed tokens are in the
    target's cache already, those of drafted ones are written behind them, and the verifying pass
    writes over these. With the first K layers they are the very same; a later layer of a subset
    reads what the whole model made of the committed tokens. Exactness asks for neither.

    How good the guess is depends on the model: one that was trained for early exits
    (``LayerSkip``) agrees with its own first layers, others hardly do. ``outrider drafts exits``
    measures it.

    Parameters
    ----------
    target
        The model that verifies.
    layers
        Those that draft, in their order.
    default_length
        Draft length used when none is given: the depth of the proposal.
    shape
        A chain, a tree of fixed widths, or a tree that grows where the draft is confident.

    Raises
    ------
    UnsupportedError
        When the target cannot run some of its layers alone.
    UsageError
        When there are no such layers, or when a tree is asked of a target that scores chains.

    Source: Elhoushi et al. 2024 (arXiv 2404.16710), LayerSkip, the first layers as the draft;
    after Schuster et al. 2022 (arXiv 2207.07061), who exit early without verifying. Zhang et al.
    2023 (arXiv 2309.08168), Draft & Verify, layers left out in between.
    """

    name = "early_exit"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        target: Model,
        layers: Sequence[int],
        default_length: int = 4,
        shape: Shape | None = None,
    ) -> None:
        if not isinstance(target, LayeredModel):
            raise UnsupportedError(
                f"'early_exit' runs some of the target's layers alone; '{target.name}' cannot.",
                hint="Use the native runtime on a CPU or the hf runtime, or --drafter ngram.",
            )
        self.target = target
        self.layers = tuple(layers)
        self.model = target.some_layers(self.layers)
        self.default_length = default_length
        self.shape = shape or Chain()
        if self.trees and not self.model.trees:
            raise UsageError(
                f"'{target.name}' scores chains only, as a draft too.",
                hint="Leave the tree out: --drafter early_exit:K.",
            )

    @property
    def trees(self) -> bool:
        """Whether its proposals may have branches."""
        return not isinstance(self.shape, Chain)

    @classmethod
    def build(cls, argument: str, setting: Setting) -> EarlyExitDrafter:
        """By name: ``early_exit:8`` for the first eight layers, ``early_exit:0-3,14,29`` for a
        choice; then ``#tree=4,2`` or ``#tree=24``."""
        layers, _, shape = argument.partition("#")
        return cls(setting.target, parse_layers(layers), shape=parse_shape(shape))

    def start(self, prompt: Sequence[int], capacity: int) -> OnItsOwn:
        """A session that feeds the target by itself; the engine calls ``start_beside``."""
        return OnItsOwn(self, self.target, prompt, capacity)

    def start_beside(self, cache: Cache, prompt: Sequence[int], capacity: int) -> _EarlyExitSession:
        """A session on the target's cache, with nothing of its own to remember."""
        return _EarlyExitSession(self.model, self.shape, cache)


class _EarlyExitSession:
    def __init__(self, model: Model, shape: Shape, cache: Cache) -> None:
        self._model = model
        self._shape = shape
        self._cache = cache

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        if length <= 0 or not pick.asks("early_exit"):
            return Proposal()
        held = self._cache.length
        draft = self._chain if isinstance(self._shape, Chain) else self._tree
        try:
            return draft(tokens[held:], length, pick)
        finally:
            # What was drafted lies behind the length, as a rejected draft does.
            self._cache.rollback(held)

    def _chain(self, feed: Sequence[int], length: int, pick: Pick) -> Proposal:
        drafted: list[int] = []
        laws: list[Distribution | None] = []
        sure: list[float] = []
        while len(drafted) < length:
            logits = self._model.score(self._cache, feed, Proposal())[0]
            token, law = pick(logits, drafted)
            drafted.append(token)
            laws.append(law)
            sure.append(of_token(logits, token, pick.shares_noise))
            if law is None and not pick.goes_on("early_exit", sure):
                break
            feed = [token]
        return Proposal.chain(drafted, laws, confidence=sure, source="early_exit")

    def _tree(self, feed: Sequence[int], length: int, pick: Pick) -> Proposal:
        tree, held = Tree(pick, "early_exit"), self._cache.length
        for depth in range(length):
            logits = self._model.score(self._cache, feed, tree.proposal())
            self._cache.rollback(held)
            tree.grow(self._shape, depth, logits)
        return tree.proposal(self._shape)


def parse_layers(text: str) -> tuple[int, ...]:
    """From ``8``, the first eight layers, or ``0-3,14`` to layers by number, from 0.

    A layer alone is written as a range: ``3-3``.

    Raises
    ------
    UsageError
        When it is neither.

    Example
    -------
    >>> parse_layers("3"), parse_layers("0-1,4")
    ((0, 1, 2), (0, 1, 4))
    """
    if text.isdecimal():
        return tuple(range(int(text)))
    found = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    layers = [n for m in found if m for n in range(int(m[1]), int(m[2] or m[1]) + 1)]
    if not layers or not all(found):
        raise UsageError(
            f"'early_exit' takes a number of layers or a choice of them; got '{text}'.",
            hint="Example: --drafter early_exit:8, or early_exit:0-3,14,29.",
        )
    return tuple(layers)


def spell_layers(layers: Sequence[int]) -> str:
    """What ``parse_layers`` reads, in short.

    >>> spell_layers([0, 1, 2]), spell_layers([0, 1, 4]), spell_layers([5])
    ('3', '0-1,4', '5-5')
    """
    if list(layers) == list(range(len(layers))):
        return str(len(layers))
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    alone = len(runs) == 1
    return ",".join(f"{r[0]}-{r[-1]}" if alone or len(r) > 1 else f"{r[0]}" for r in runs)
