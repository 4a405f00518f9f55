"""Drafters that work beside the target, on the target's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.core.proposal import Proposal
from outrider.core.sequences import common_prefix
from outrider.errors import UsageError
from outrider.protocols import Beside, Cache, Drafter, DraftSession, Model, Pick, TappedModel

__all__ = ["OnItsOwn", "begin", "new_cache", "taps_of"]


def taps_of(drafter: Drafter) -> tuple[int, ...]:
    """The layers whose hidden states a drafter wants set aside."""
    return drafter.taps if isinstance(drafter, Beside) else ()


def new_cache(model: Model, drafter: Drafter, capacity: int) -> Cache:
    """A cache of a target for a drafter to work beside.

    Raises
    ------
    UsageError
        When the drafter wants hidden states and the model does not give them out.
    """
    taps = taps_of(drafter)
    if not taps:
        return model.new_cache(capacity)
    if not isinstance(model, TappedModel):
        raise UsageError(
            f"The drafter '{drafter.name}' reads hidden states; '{model.name}' gives out none.",
            hint="Use another runtime, or a drafter such as ngram.",
        )
    cache: Cache = model.new_cache(capacity, taps)
    return cache


def begin(drafter: Drafter, prompt: Sequence[int], capacity: int, cache: Cache) -> DraftSession:
    """A drafter's session for the sequence that the target keeps in ``cache``."""
    if isinstance(drafter, Beside):
        return drafter.start_beside(cache, prompt, capacity)
    return drafter.start(prompt, capacity)


class _DrafterBeside(Drafter, Beside, Protocol):
    """Both at once."""


class OnItsOwn:
    """A session of such a drafter where no target's cache is at hand: it keeps one of its own.

    Each call feeds the target what is new, at the target's full cost; the engine shares its cache
    instead.
    """

    def __init__(
        self, drafter: _DrafterBeside, model: Model, prompt: Sequence[int], capacity: int
    ) -> None:
        self._model = model
        self._cache = new_cache(model, drafter, capacity)
        self._held: list[int] = []
        self._session = drafter.start_beside(self._cache, prompt, capacity)

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        """As the session on a shared cache does."""
        wanted = list(tokens[:-1])
        self._cache.rollback(common_prefix(self._held, wanted))
        self._model.prefill(self._cache, wanted[self._cache.length :], None)
        self._held = wanted
        return self._session.propose(tokens, length, pick)
