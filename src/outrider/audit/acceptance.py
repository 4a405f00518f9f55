"""How many drafted tokens a rule keeps, exactly, and the most that any rule could."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array

from outrider.core.chooser import Chooser, enumerate_outcomes
from outrider.core.processors import Context, Law
from outrider.core.proposal import Proposal
from outrider.drafters.beside import begin, new_cache
from outrider.engine.round import Session, play_round
from outrider.models.toy import ToyModel
from outrider.policies.fixed import Fixed
from outrider.protocols import Drafter, Rule

__all__ = ["Acceptance", "acceptance", "most_covered"]

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens accepted in one round, the target's own left out.

    Parameters
    ----------
    expected
        Of the production code: the mean over every course of chance.
    bound
        The most that any rule could accept of the same proposals: over depths i, the best
        chance that the first i tokens of the target's output are a path of the tree. A chain
        rule that must decide before it sees all of the target's laws may be unable to reach it.
    """

    expected: float
    bound: float


def acceptance(
    target: ToyModel,
    drafter: Drafter,
    rule: Rule,
    *,
    draft_length: int,
    law: Law | None = None,
    prompt: Sequence[int] = (0,),
) -> Acceptance:
    """Expected accepted tokens of the round after a prompt, and their bound.

    Example
    -------
    >>> from outrider.drafters.script import ScriptDrafter
    >>> from outrider.rules.rejection import Rejection
    >>> target = ToyModel.random(2, seed=1)
    >>> kept = acceptance(target, ScriptDrafter([1]), Rejection(), draft_length=1)
    >>> round(kept.expected - float(target.next([0])[1]), 12)
    0.0
    """
    law = law or Law()
    limit = len(prompt) + draft_length + 1

    def program(chooser: Chooser) -> tuple[int, Proposal]:
        session = Session(
            model=target,
            cache=(cache := new_cache(target, drafter, limit)),
            draft=begin(drafter, prompt, limit, cache),
            rule=rule,
            policy=Fixed(draft_length),
            law=law,
            chooser=chooser,
            tokens=list(prompt),
            prompt_length=len(prompt),
            limit=limit,
        )
        played = play_round(session)
        return len(played.verdict.path), played.proposal

    expected = 0.0
    proposed: list[dict[frozenset[Path], float]] = [defaultdict(float) for _ in range(draft_length)]
    for (accepted, proposal), weight in enumerate_outcomes(program):
        expected += weight * accepted
        paths = [tuple(proposal.path_tokens(node)) for node in range(len(proposal))]
        for depth, sets in enumerate(proposed, start=1):
            sets[frozenset(path for path in paths if len(path) == depth)] += weight
    bound = sum(
        most_covered(_prefixes(target, law, prompt, depth), sets)
        for depth, sets in enumerate(proposed, start=1)
    )
    return Acceptance(expected, bound)


def most_covered(p: Mapping[Path, float], sets: Mapping[frozenset[Path], float]) -> float:
    """The best chance that x ~ p is in a random set S, over all couplings of the two.

    The largest flow that moves the probability of each S to items in it, p(x) at most to each x:
    no rule, whatever it knows, accepts more often. For S = {x'}, x' ~ q, it is 1 − TV(p, q); for
    a fixed S it is p(S).

    Parameters
    ----------
    p
        The probability of each beginning of an output.
    sets
        The probability of each set of beginnings that is proposed.

    Source: the transport problem of Sun et al. 2023 (arXiv 2310.15141), SpecTr, section 4.

    >>> one = {frozenset([(0,)]): 0.6, frozenset([(1,)]): 0.1, frozenset([(2,)]): 0.3}
    >>> round(most_covered({(0,): 0.5, (1,): 0.3, (2,): 0.2}, one), 9)
    0.8
    """
    drawn, items = list(sets), list(p)
    row = {item: len(drawn) + i for i, item in enumerate(items)}
    flows = [(i, row[item]) for i, s in enumerate(drawn) for item in s if item in row]
    if not flows:
        return 0.0
    # Each flow counts against what its set has to give and against what its item can take.
    limits = coo_array(
        (np.ones(2 * len(flows)), (np.ravel(flows), np.repeat(np.arange(len(flows)), 2))),
        shape=(len(drawn) + len(items), len(flows)),
    )
    most = [*sets.values(), *p.values()]
    return -float(linprog(-np.ones(len(flows)), A_ub=limits, b_ub=most, method="highs").fun)


def _prefixes(target: ToyModel, law: Law, prompt: Sequence[int], length: int) -> dict[Path, float]:
    """The target's law of the first ``length`` tokens."""
    found: dict[Path, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Path, float] = {}
        for path, weight in found.items():
            tokens = [*prompt, *path]
            logits = torch.log(torch.from_numpy(target.next(tokens)))
            p = law(Context(tokens, len(prompt)), logits)
            for token, chance in zip(p.ids, p.probs, strict=True):
                longer[(*path, int(token))] = weight * float(chance)
        found = longer
    return found
