"""As much draft as pays, by what drafts like it have been worth and by what a row costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.price import NOMINAL, Price
from outrider.core.proposal import ROOT, Proposal
from outrider.errors import SamplingError, UsageError
from outrider.policies.meter import Meter

__all__ = ["Adaptive"]

_EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Drafts of like confidence are counted together, between two of these."""

_LONGEST_DRAWN = 128
"""Of the lengths that are weighed for sampled drafts; rows beyond pay nowhere."""

_FAIR = 0.5
"""Tokens that an attempt may cost. The wait for one that costs twice as many, beside others say, is
four times as long: it takes more, and is less likely to pay."""

_ASKING = 0.03
"""What asking costs that finds nothing, in passes: all wait for it."""

_EVEN = 0.5
_SOME = (1, 2, 4, 8, 16)
"""What to hope for of a draft that is not known yet: its tokens' chance, and how many there are."""

_SURE = 0.8
"""What to hope for, beside others, of a drafter that was not asked yet."""

_LEEWAY, _LEEWAY_RATE = 1.0, 0.005
"""Tokens that drafts may have cost on balance, at first and for each token since, before they must
be worth more than their time."""
_BALANCE = -2.0
"""What they have gained counts no further: an earlier gain is no reason to lose it."""
_DISTRUST = 2.0
"""Tokens lost beyond the leeway that make time twice as dear to drafts."""

_IDLE, _GLANCE = 8, 4
"""After so many rounds without a draft drafters are looked at in every fourth round alone: to find
nothing takes time too, a few hundredths of a pass."""

_RATE_TRIALS = 4.0
"""Passes that the first guess of tokens a pass counts for."""


@dataclass(slots=True)
class _Rate:
    """How often something happened, older trials counting less."""

    kept: float = 0.0
    tried: float = 0.0

    def add(self, kept: float, tried: float, memory: float) -> None:
        fade = max(0.0, 1.0 - tried / memory)
        self.kept = fade * self.kept + kept
        self.tried = fade * self.tried + tried

    def mean(self, guess: float, trials: float) -> float:
        return (self.kept + trials * guess) / (self.tried + trials)


@dataclass(slots=True)
class _Wait:
    """Rounds without a draft so far, and before the next attempt."""

    patience: int
    rounds: float = 0.0


class Adaptive:
    """The draft that decodes the most tokens in a unit of time, if drafts go on as they did.

    With λ the tokens that a unit of time has given so far, a node is worth scoring if the chance
    that it stands is above λ times what its row costs: else that time is better spent on the next
    pass. Chances are the drafter's own confidence, corrected by what became of drafts of like
    confidence in this request; prices are measured on the machine.

    - ``trim`` leaves out of a proposal what is not worth its row. Only where nothing was drawn:
      a sampled token that is dropped for what it is would bias the output.
    - ``goes_on`` ends a chain where the next token is not worth its step and its row.
    - ``hopes`` is lost where others fill the pass, and for a few rounds where nothing was drafted
      for long: no drafter is asked then.
    - ``asks`` leaves a drafter out for a while that does not pay for its own time.
    - ``took`` puts prices right by what rounds take.
    - ``length`` fixes the length of sampled drafts before anything is drawn: the γ with the most
      tokens a unit of time, each token standing with the chance that they had so far.

    Chances that were too high show in the balance: what drafts have cost, in the time of so many
    tokens, less what came of them. Where that is lost, λ is raised, so that a request which drafts
    do no good soon has few, and a text that takes to them later is still found out.

    Everything depends on earlier rounds, on what is not drawn, and on prices, so every exact rule
    stays exact. Where the text itself depends on what is drafted (``rejection``, ``block``) prices
    are nominal ones and stay so, so that a seed gives the same text on every machine.

    Parameters
    ----------
    most
        The longest draft.
    price
        What rows and steps cost.
    prior
        Trials that a first guess counts for: a confidence, or one half for a sampled draft.
    memory
        Trials that are remembered, in effect.
    retry
        Rounds without a draft before the next attempt; twice as many after each in vain, up to four
        times as many.

    Raises
    ------
    SamplingError
        When ``most`` is negative.

    Source: for a sampled chain, Leviathan et al. 2023 (arXiv 2211.17192), section 3.5; a node's
    value as the product of confidences along its path, Li et al. 2024 (arXiv 2406.16858), EAGLE-2.

    Example
    -------
    >>> policy = Adaptive(8, Price((1, 2), (1.0, 1.2)))
    >>> sure = Proposal.chain([5, 6, 7], confidence=[0.9, 0.9, 0.1])
    >>> policy.trim(sure).tokens
    (5, 6)
    """

    name = "adaptive"

    def __init__(
        self,
        most: int = 16,
        price: Price = NOMINAL,
        *,
        prior: float = 4.0,
        memory: float = 64.0,
        retry: int = 8,
    ) -> None:
        if most < 0:
            raise SamplingError(f"The longest draft must be 0 or more; got {most}.")
        self._most = most
        self._price = price if price is NOMINAL else Meter(price)
        self._prior = prior
        self._memory = memory
        self._retry = retry
        self._rates: dict[tuple[str, int], _Rate] = {}
        self._drawn: _Rate | None = None
        self._first: dict[str, _Rate] = {}
        self._asked: dict[str, _Rate] = {}
        self._waits: dict[str, _Wait] = {}
        self._trying: str | None = None
        self._granted: dict[str, int] = {}
        self._per_pass = _Rate()
        self._lost = 0.0  # tokens, that drafts have cost on balance
        self._emitted = 0
        self._idle = 0  # rounds in which drafters were looked at, and nothing was drafted
        self._rested = 0  # rounds since drafters were looked at, and before they last were
        self._passed = 1
        self._others = (0, 0.0)
        self._cheapest: dict[int, float] = {}  # the price of a drafted token, by others' rows

    @classmethod
    def build(cls, argument: str, price: Price = NOMINAL) -> Adaptive:
        """By name: ``adaptive``, or ``adaptive:24`` with the longest draft.

        Raises
        ------
        UsageError
            When the argument is not a number.
        """
        if argument and not argument.isdecimal():
            raise UsageError(
                f"The 'adaptive' policy takes the longest draft; got '{argument}'.",
                hint="Example: --draft-length adaptive:24",
            )
        return cls(int(argument), price) if argument else cls(price=price)

    def hopes(self) -> bool:
        """Whether drafters are to be looked at: if tokens that stand every other time were worth
        their rows, and the asking, and in idle times not in every round."""
        rows = self._others[0]
        self._rested += 1
        if rows and rows not in self._cheapest:
            self._cheapest[rows] = min((self._rows(n) + _ASKING) / n for n in _SOME)
        if self._value * self._cheapest[rows] >= _EVEN if rows else self._dozes:
            return False
        self._passed, self._rested = self._rested, 0
        return True

    @property
    def _dozes(self) -> bool:
        return self._idle >= _IDLE and self._rested < _GLANCE

    def length(self) -> int:
        """The longest draft; of sampled ones, the best length at the acceptance seen so far."""
        if self._drawn is None or not self._most:
            return self._most
        alpha = self._drawn.mean(0.5, self._prior / 2)
        longest = min(self._most, _LONGEST_DRAWN)
        best = max(range(longest + 1), key=lambda n: (self._speed(alpha, n), -n))
        return (
            best
            if self._pays("length", best > 0)
            else int(self._waited("length", self._value * (self._price.step + self._row(1))))
        )

    def _speed(self, alpha: float, length: int) -> float:
        tokens = length + 1 if alpha == 1.0 else (1 - alpha ** (length + 1)) / (1 - alpha)
        return tokens / (self._price.of(1 + length) + length * self._price.step)

    def asks(self, source: str) -> bool:
        """Whether a drafter's first token is worth its step, as far as is known."""
        step = self._price.step_of(source)
        if not step:
            return True
        loss = self._value * (step + self._row(1))
        known = self._asked.get(source)
        # One that was not asked yet is, unless others would wait for it.
        gain = known.mean(0.5, self._prior) if known else _SURE
        pays = gain > loss or (known is None and not self._others[0])
        if not self._pays(source, pays) and self._waited(source, loss):
            self._trying = source
        # What pays by little is left out now and then, to see what a round takes without.
        asked = (pays and (gain > 2 * loss or self._knows)) or self._trying == source
        self._granted[source] = int(asked)
        return asked

    def goes_on(self, source: str, confidence: Sequence[float]) -> bool:
        """Whether a chain is worth one more step after tokens of such confidence."""
        worth = 1.0
        for c in confidence:
            worth *= self._chance(source, c)
        first = self._first.get(source, _Rate()).mean(0.6, self._prior)
        cost = self._price.step_of(source) + self._row(1 + len(confidence))
        if worth * first <= self._value * cost:
            return False
        self._granted[source] = max(self._granted.get(source, 1), 1 + len(confidence))
        return True

    def trim(self, proposal: Proposal) -> Proposal:
        """The part of a proposal that is worth scoring, if nothing in it was drawn."""
        if not proposal.confidence or not proposal.is_fixed:
            return proposal
        worth: list[float] = []
        for parent, c in zip(proposal.parents, proposal.confidence, strict=True):
            above = 1.0 if parent == ROOT else worth[parent]
            worth.append(above * self._chance(proposal.source, c))
        # No node is worth more than its parent, so the best ones hang together.
        order = sorted(range(len(worth)), key=lambda node: (-worth[node], node))
        best, most, gain = 0, 0.0, 0.0
        for n, node in enumerate(order, 1):
            gain += worth[node]
            surplus = gain - self._value * self._rows(n)
            if surplus > most:
                best, most = n, surplus
        # A drafter that was asked to see if things have changed is to be seen.
        what = f"trim {proposal.source}"
        if not self._pays(what, best > 0) and (
            self._trying == proposal.source or self._waited(what, self._value * self._rows(1))
        ):
            best = 1
        return proposal if best == len(worth) else proposal.only(sorted(order[:best]))

    def learn(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Count a round: each node whose parent stood was tried, and those in ``path`` stood."""
        self._trying = None
        source, stood = proposal.source, {ROOT, *path}
        self._emitted += 1 + len(path)
        spent = self._rows(len(proposal)) if len(proposal) else 0.0
        for asked, steps in self._granted.items():
            if steps:  # what was not even worth scoring is time lost too
                spent += steps * self._price.step_of(asked)
                worth = float(asked == source and len(path) > 0)
                self._asked.setdefault(asked, _Rate()).add(worth, 1.0, self._memory)
        self._granted.clear()
        self._idle = 0 if len(proposal) else self._idle + (self._rested == 0)
        self._lost = max(_BALANCE, self._lost + self._pace * spent - len(path))
        cost = self._price.of(1 + len(proposal)) + proposal.depth * self._price.step_of(source)
        self._per_pass.add(1.0 + len(path), cost, self._memory)
        if not len(proposal):
            return
        first = self._first.setdefault(source, _Rate())
        first.add(float(len(path) > 0), 1.0, self._memory)
        if not proposal.is_fixed:
            self._drawn = self._drawn or _Rate()
            tries = len(path) + (len(path) < proposal.depth)
            self._drawn.add(float(len(path)), float(tries), self._memory)
        elif proposal.confidence:
            for node, parent in enumerate(proposal.parents):
                if parent in stood:
                    rate = self._rate(source, proposal.confidence[node])
                    rate.add(float(node in stood), 1.0, self._memory)

    def _pays(self, what: str, pays: bool) -> bool:
        """Note whether something pays at present: if it does, patience starts afresh."""
        if pays:
            self._waits.pop(what, None)
        return pays

    def _waited(self, what: str, loss: float) -> bool:
        """Count a round without; whether it is time to see if things have changed, which takes the
        time of so many tokens."""
        wait = self._waits.setdefault(what, _Wait(self._retry))
        wait.rounds += self._passed * (min(1.0, (_FAIR / loss) ** 2) if loss > 0 else 1.0)
        if wait.rounds <= wait.patience:
            return False
        wait.rounds, wait.patience = 0.0, min(2 * wait.patience, 4 * self._retry)
        return True

    def took(self, proposal: Proposal, draft_s: float, total_s: float) -> None:
        """Count the time of a round that nobody else's rows were part of; before ``learn``."""
        if not isinstance(self._price, Meter) or self._others[0] or not self._per_pass.tried:
            return  # the first round's draft reads the prompt
        self._price.took(1 + len(proposal), total_s - draft_s)
        asked = [(source, steps) for source, steps in self._granted.items() if steps]
        if len(asked) == 1:
            self._price.stepped(*asked[0], draft_s)

    def beside(self, rows: int, tokens: float) -> None:
        """Rows that others feed in the coming pass, and tokens that come of them: rows behind
        theirs may cost more, and the time of a pass is worth what all get from it."""
        self._others = rows, tokens

    @property
    def _knows(self) -> bool:
        """Whether the clock can tell what drafts cost, or need not."""
        price = self._price
        return not isinstance(price, Meter) or self._others[0] > 0 or price.knows_one_row

    @property
    def _value(self) -> float:
        """λ: what drafts must be worth in tokens, for the time of a one-row pass."""
        beyond = self._lost - _LEEWAY - _LEEWAY_RATE * self._emitted
        return self._pace * (1.0 + max(0.0, beyond) / _DISTRUST)

    @property
    def _pace(self) -> float:
        """Tokens in the time of a one-row pass, as they came so far."""
        rows, tokens = self._others
        own = self._per_pass.mean(1.2, _RATE_TRIALS)
        return (own + tokens) / self._price.of(1 + rows)

    def _rows(self, more: int) -> float:
        """The price of more rows than one."""
        alone = 1 + self._others[0]
        return self._price.of(alone + more) - self._price.of(alone)

    def _row(self, before: int) -> float:
        """The price of one row more than so many."""
        return max(0.0, self._rows(before) - self._rows(before - 1))

    def _chance(self, source: str, confidence: float) -> float:
        return self._rate(source, confidence).mean(confidence, self._prior)

    def _rate(self, source: str, confidence: float) -> _Rate:
        return self._rates.setdefault((source, bisect_right(_EDGES, confidence)), _Rate())
