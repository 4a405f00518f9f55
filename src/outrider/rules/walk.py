"""Following a proposal for as long as it holds the target's own tokens."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.proposal import ROOT, Proposal
from outrider.core.verdict import Kind, Verdict

__all__ = ["follow"]


def follow(own_token: Callable[[int, int], int], proposal: Proposal) -> Verdict:
    """Walk down while a child holds the token that the target itself would emit.

    What is emitted is the target's own token at every step, so the proposal can change only
    how many of them one pass decides.

    Parameters
    ----------
    own_token
        From a node and the number of tokens on the path so far to the target's token after it.
    proposal
        Any tree.
    """
    path: list[int] = []
    node = ROOT
    while True:
        token = own_token(node, len(path))
        child = proposal.child_with(node, token)
        if child is None:
            kind: Kind = "correction" if proposal.children(node) else "bonus"
            return Verdict(tuple(path), token, kind)
        path.append(child)
        node = child
