"""What one request leaves behind for the next: caches that already hold a common prefix."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.round import Session
from outrider.protocols import Cache, Drafter, DraftSession, Model

__all__ = ["Prefix"]


class Prefix:
    """Caches of an earlier request, with the tokens that the target's holds."""

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._tokens: list[int] = []
        self._draft: tuple[Drafter, DraftSession] | None = None

    def keep(self, session: Session) -> None:
        """Remember a session's caches; call it when the session is over, whatever its end."""
        session.cache.rollback(min(session.cache.length, len(session.tokens)))
        self._cache = session.cache
        self._tokens = session.tokens[: session.cache.length]

    def cache_for(self, model: Model, ids: Sequence[int], capacity: int) -> Cache:
        """The cache to start from: rolled back to what ``ids`` has in common with it."""
        if self._cache is None:
            self._cache = model.new_cache(capacity)
        common = 0
        for ours, theirs in zip(self._tokens, ids[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        self._cache.rollback(common)
        return self._cache

    def draft_for(self, drafter: Drafter, ids: Sequence[int], capacity: int) -> DraftSession:
        """The drafter's session, the earlier one if the drafter is the same."""
        if self._draft is None or self._draft[0] is not drafter:
            self._draft = (drafter, drafter.start(ids, capacity))
        return self._draft[1]
