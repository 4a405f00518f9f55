"""The rule at temperature 0: a draft stands while it is the target's most probable token."""

from __future__ import annotations

from outrider.core.chooser import Chooser
from outrider.core.distribution import Distribution
from outrider.core.proposal import Proposal
from outrider.core.verdict import Verdict
from outrider.protocols import Target
from outrider.rules.walk import follow

__all__ = ["Greedy"]


class Greedy:
    """Keep x while x = argmax p; of equals, the lowest id. No chance is involved.

    Any tree is followed along the target's own choices, so with equal logits the output is
    that of plain greedy decoding, token for token.
    """

    name = "greedy"
    exact = True
    trees = True
    invariant = True

    def draft(
        self, q: Distribution, chooser: Chooser, position: int, round: int, node: int
    ) -> tuple[int, Distribution | None]:
        """The draft's most probable token, chosen deterministically."""
        return q.argmax(), None

    def siblings(
        self,
        q: Distribution,
        count: int,
        chooser: Chooser,
        position: int,
        round: int,
        node: int,
        droppable: bool,
    ) -> list[tuple[int, Distribution | None]]:
        """The draft's most probable tokens, chosen deterministically."""
        return [(token, None) for token in q.most_probable(count)]

    def judge(
        self, target: Target, proposal: Proposal, chooser: Chooser, position: int, round: int
    ) -> Verdict:
        """The longest path of argmax tokens, and the argmax after it."""
        return follow(lambda node, depth: target(node).argmax(), proposal)
