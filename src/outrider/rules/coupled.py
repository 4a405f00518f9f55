"""The reproducible rule: the target's token at a position is a function of p and the seed."""

from __future__ import annotations

from outrider.core.chooser import Chooser, Place
from outrider.core.distribution import Distribution
from outrider.core.proposal import Proposal
from outrider.core.verdict import Verdict
from outrider.protocols import Target
from outrider.rules.walk import follow

__all__ = ["Coupled"]


class Coupled:
    """Draw the target's own token from noise tied to its position; follow the draft that has it.

    At each node the token is draw(p; seed, position), an exponential race with fixed noise. Its
    law is p, whatever was drafted: exact for any drafter, any tree and any draft length. And it
    does not look at the draft at all: the same seed gives the same text with or without
    speculation. A drafter that races its q on the same noise picks the same token with
    probability at least (1 − TV)/(1 + TV), where TV is the total variation of p and q.

    Source: Daliri, Musco and Suresh 2024 (arXiv 2408.07978), "Coupling without communication
    and drafter-invariant speculative decoding"; their P is our p, their Q our q.
    """

    name = "coupled"
    exact = True
    trees = True
    invariant = True

    def draft(
        self, q: Distribution, chooser: Chooser, position: int, round: int, node: int
    ) -> tuple[int, Distribution | None]:
        """q's own winner on the target's noise: sampled in effect, but given the noise, fixed."""
        return chooser.draw(q, Place(position, "target")), None

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
        """Those that finish first in q's race on the target's noise, then its most probable."""
        first = chooser.race(q, Place(position, "target"), count)
        if len(first) < count:
            first += [token for token in q.most_probable(count) if token not in first]
        return [(token, None) for token in first[:count]]

    def judge(
        self, target: Target, proposal: Proposal, chooser: Chooser, position: int, round: int
    ) -> Verdict:
        """The longest path of the target's own tokens, and the one after it."""
        return follow(
            lambda node, depth: chooser.draw(target(node), Place(position + depth, "target")),
            proposal,
        )
