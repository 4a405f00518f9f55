"""Block verification: judge the drafted tokens together, and keep more of them on average."""

from __future__ import annotations

from outrider.core.chooser import Chooser, Place
from outrider.core.distribution import Distribution
from outrider.core.proposal import ROOT, Proposal
from outrider.core.verdict import Verdict
from outrider.errors import ProposalError
from outrider.protocols import Target

__all__ = ["Block"]


class Block:
    """Keep the longest prefix that a test of the whole prefix accepts; repair after it.

    With w_0 = 1 and w_i = min(1, w_{i−1} · p(x_i)/q(x_i)), the prefix x_1 … x_i is accepted with
    probability

        h_i = S_i / (S_i + 1 − w_i),   S_i = sum_x max(0, w_i p(x) − q(x)),

    p and q after the prefix, and h_γ = w_γ. Every prefix is tested, on noise of its own, and
    the longest accepted one stands. If that is not the whole block, the token after it comes
    from max(0, w_i p − q), normalised; else from p. The law is p's, and no rule accepts more
    tokens of a chain in expectation.

    Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 2; their M_b is our p, M_s our q, and
    their p_i our w_i.

    Raises
    ------
    ProposalError
        From ``judge``, when the proposal has branches.
    """

    name = "block"
    exact = True
    trees = False
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
        """One draw, since block verification judges chains; the likeliest if it may be dropped."""
        chosen: tuple[int, Distribution | None] = (q.argmax(), None)
        if not droppable:
            chosen = self.draft(q, chooser, position, round, node)
        return [chosen][:count]

    def judge(
        self, target: Target, proposal: Proposal, chooser: Chooser, position: int, round: int
    ) -> Verdict:
        """The longest accepted prefix, and the token after it."""
        if not proposal.is_chain:
            raise ProposalError(
                "Block verification judges chains; a tree with branches was proposed.",
                hint="Use --rule rejection or coupled, or a drafter that proposes chains.",
            )
        last = len(proposal) - 1
        p, weight, kept, repair = target(ROOT), 1.0, -1, None
        if proposal:
            _, repair = _surplus(p, proposal.law(0, p.vocab_size), weight)
        for node, x in enumerate(proposal.tokens):
            weight = min(1.0, weight * p[x] / proposal.law(node, p.vocab_size)[x])
            p = target(node)
            if node == last:
                chance, after = weight, p
            else:
                mass, after = _surplus(p, proposal.law(node + 1, p.vocab_size), weight)
                chance = mass / (mass + 1.0 - weight) if mass > 0.0 else 0.0
            if chooser.accept(chance, Place(position + node, "accept", round, node)):
                kept, repair = node, after
        token = chooser.draw(repair or p, Place(position + kept + 1, "residual", round))
        path = tuple(range(kept + 1))
        return Verdict(path, token, "bonus" if kept == last else "correction")


def _surplus(p: Distribution, q: Distribution, weight: float) -> tuple[float, Distribution]:
    """Mass and law of max(0, weight · p − q)."""
    left = weight * p.probs - q.at(p.ids)
    left[left < 0.0] = 0.0
    mass = float(left.sum())
    return mass, Distribution.of(p.ids, left, p.vocab_size) if mass > 0.0 else p
