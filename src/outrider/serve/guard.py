"""A drafter that fails costs its request the speed-up, never the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.proposal import Proposal
from outrider.errors import ProposalError
from outrider.protocols import Cache, DraftSession, Pick

__all__ = ["Guard"]


class Guard:
    """A draft session that drafts nothing any more once the one within has failed.

    Under a rule that is ``invariant`` the text is what it would have been. Under the others the
    law is kept as long as what makes a drafter fail is not what it drew.

    Parameters
    ----------
    draft
        The session within.
    cache
        The target's, which some drafters work on: it is put right after a failure.
    vocab_size
        Number of the target's tokens.
    failed
        Told of the failure, once.

    Example
    -------
    >>> from outrider import Engine
    >>> session = Engine.load("toy:vocab=4").stream("abab").session
    >>> session.draft = Guard(session.draft, session.cache, 4, failed=print)
    """

    def __init__(
        self,
        draft: DraftSession,
        cache: Cache,
        vocab_size: int,
        failed: Callable[[Exception], None],
    ) -> None:
        self._draft: DraftSession | None = draft
        self._cache = cache
        self._vocab_size = vocab_size
        self._failed = failed

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        """What the session within proposes, if that can be."""
        if self._draft is None:
            return Proposal()
        held = self._cache.length
        try:
            proposal = self._draft.propose(tokens, length, pick)
            self._check(proposal, length)
        except Exception as error:  # whatever a drafter may raise
            self._draft = None
            if self._cache.length > held:
                self._cache.rollback(held)
            self._failed(error)
            return Proposal()
        return proposal

    def _check(self, proposal: Proposal, length: int) -> None:
        if not isinstance(proposal, Proposal):
            raise ProposalError(f"The drafter proposed {type(proposal).__name__}, no Proposal.")
        if any(not 0 <= token < self._vocab_size for token in proposal.tokens):
            raise ProposalError(
                f"The drafter proposed a token beyond the target's {self._vocab_size}."
            )
        if proposal.depth > max(length, 0):
            raise ProposalError(
                f"The drafter proposed {proposal.depth} tokens; {length} were asked for."
            )
