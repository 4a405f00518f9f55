"""What one request leaves behind for the next: caches that already hold a common prefix."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.sequences import common_prefix
from outrider.drafters.beside import begin, new_cache, taps_of
from outrider.engine.round import Session
from outrider.protocols import Cache, Drafter, DraftSession, Model

__all__ = ["Prefix"]


class Prefix:
    """Caches of an earlier request, with the tokens that the target's holds.

    They belong to one request at a time: once lent they are gone from here, until ``keep`` hands
    them back. A request that is never kept, or that a second one is started beside, costs the
    other one its head start and nothing more.
    """

    def __init__(self) -> None:
        self._kept: tuple[Model, Cache, list[int]] | None = None
        self._draft: tuple[Drafter, Cache, DraftSession] | None = None
        self._lent: tuple[Drafter, Cache, DraftSession] | None = None

    def keep(self, session: Session) -> None:
        """Take a session's caches; call it when the session is over, whatever its end.

        Not after an error: a pass that broke off may have fed some layers and not others.
        """
        cache = session.cache
        cache.rollback(min(cache.length, len(session.tokens)))
        self._kept = session.model, cache, session.tokens[: cache.length]
        # Should it go on all the same, it must not write into what the next request reads.
        session.cache = session.model.new_cache(session.limit)
        if self._lent is not None and self._lent[2] is session.draft:
            self._draft = self._lent

    def cache_for(self, model: Model, drafter: Drafter, ids: Sequence[int], capacity: int) -> Cache:
        """The cache to start from: rolled back to what ``ids`` has in common with it."""
        kept, self._kept = self._kept, None
        if kept is None or kept[0] is not model or taps_of(drafter) != _taps(kept[1]):
            return new_cache(model, drafter, capacity)
        _, cache, tokens = kept
        cache.rollback(common_prefix(tokens, ids[:-1]))
        return cache

    def draft_for(
        self, drafter: Drafter, ids: Sequence[int], capacity: int, cache: Cache
    ) -> DraftSession:
        """The drafter's session, the earlier one if drafter and cache are the same."""
        lent, self._draft = self._draft, None
        if lent is None or lent[0] is not drafter or lent[1] is not cache:
            lent = drafter, cache, begin(drafter, ids, capacity, cache)
        self._lent = lent
        return lent[2]


def _taps(cache: Cache) -> tuple[int, ...]:
    hidden = getattr(cache, "hidden", None)
    return () if hidden is None else tuple(hidden.taps)
