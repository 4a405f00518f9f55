"""The classic rule: keep a draft with probability min(1, p/q), else repair from the residual."""

from __future__ import annotations

from outrider.core.chooser import Chooser, Place
from outrider.core.distribution import Distribution
from outrider.core.proposal import ROOT, Proposal
from outrider.core.verdict import Kind, Verdict
from outrider.protocols import Target

__all__ = ["Rejection"]


class Rejection:
    """Keep x ~ q with probability min(1, p(x)/q(x)); else draw from max(0, p − q), normalised.

    The emitted token has law p: x comes out of the first branch with probability
    min(p(x), q(x)), and the second adds exactly what is missing, p(x) − min(p(x), q(x)).
    With siblings, each is tried in the order in which it was drawn, against what the earlier
    ones have left of p (recursive rejection); exact as long as each sibling's law is the one
    that it was drawn from, given the siblings before it.

    Source: Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), Algorithm 1, with p and q as
    here; Chen et al. 2023 (arXiv 2302.01318), Algorithm 2, whose q is the target and p the
    draft. Siblings: Miao et al. 2023 (arXiv 2305.09781), section 4.3; without replacement, Jeon
    et al. 2024 (arXiv 2402.14160).
    """

    name = "rejection"
    exact = True
    trees = True
    invariant = False

    def draft(
        self, q: Distribution, chooser: Chooser, position: int, round: int, node: int
    ) -> tuple[int, Distribution | None]:
        """A draw from q on noise of its own."""
        return chooser.draw(q, Place(position, "draft", round, node)), q

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
        """Draws from q without replacement, each with the law that was left to draw it from.

        Where some may be left out, the most probable tokens instead: leaving out a drawn one
        for its low q would bias the rule.
        """
        if droppable:
            return [(token, None) for token in q.most_probable(count)]
        drawn: list[tuple[int, Distribution | None]] = []
        left: Distribution | None = q
        while left is not None and len(drawn) < count:
            drawn.append(self.draft(left, chooser, position, round, node + len(drawn)))
            left = left.without(drawn[-1][0])
        return drawn

    def judge(
        self, target: Target, proposal: Proposal, chooser: Chooser, position: int, round: int
    ) -> Verdict:
        """Walk down from the root, one acceptance test for each child, until none stands."""
        path: list[int] = []
        node = ROOT
        while True:
            here = position + len(path)
            p = target(node)
            for child in proposal.children(node):
                q = proposal.law(child, p.vocab_size)
                x = proposal.tokens[child]
                if chooser.accept(min(1.0, p[x] / q[x]), Place(here, "accept", round, child)):
                    path.append(child)
                    node = child
                    break
                p = p.residual(q)
            else:
                kind: Kind = "correction" if proposal.children(node) else "bonus"
                token = chooser.draw(p, Place(here, "residual", round))
                return Verdict(tuple(path), token, kind)
