"""The one door through which all chance comes in.

A rule or a drafter never calls a random generator: it asks a ``Chooser`` to *accept* with a
probability, or to *draw* from a distribution, and says at which place the question arises.

* ``SeededChooser`` answers from a counter-based stream: the answer is a function of the seed
  and the place alone, so requests reproduce whatever runs beside them.
* ``EnumeratingChooser`` walks every outcome with its exact probability, so the production code
  of a rule can be run to its exact output law.
* ``ScriptedChooser`` answers from a list, for tests.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from outrider.core.distribution import Distribution
from outrider.core.noise import finish_first, uniform

__all__ = [
    "Chooser",
    "EnumeratingChooser",
    "Place",
    "Purpose",
    "ScriptedChooser",
    "SeededChooser",
    "enumerate_outcomes",
]

Purpose = Literal["target", "draft", "accept", "residual"]
T = TypeVar("T")


class Place(NamedTuple):
    """Where a question of chance arises. Two different places never share noise.

    Parameters
    ----------
    position
        Index of the token in the output; 0 is the first generated one.
    purpose
        ``target``: the target's own token at this position, which the ``coupled`` rule and a
        drafter that wants to agree with it draw from the same noise, on purpose.
        ``draft``, ``accept``, ``residual``: the three draws of the rejection rule, independent.
    round
        Number of the round; 0 for ``target``, whose noise must not depend on the rounds.
    node
        Node of the proposal, where several share one position.
    """

    position: int
    purpose: Purpose
    round: int = 0
    node: int = 0


@runtime_checkable
class Chooser(Protocol):
    """Accept with a probability, or draw from a distribution, at a place."""

    def accept(self, probability: float, place: Place) -> bool:
        """True with the given probability."""
        ...

    def draw(self, law: Distribution, place: Place) -> int:
        """A token with the given law."""
        ...

    def race(self, law: Distribution, place: Place, count: int) -> list[int]:
        """What ``draw`` gives, and further tokens, as many at most, in the order in which they
        would be drawn if those before them could not come."""
        ...


class SeededChooser:
    """Answers that depend on the seed, the sequence and the place, and on nothing else.

    ``draw`` is an exponential race (the Gumbel-max trick in another dress): token x finishes at
    E_x / p(x) with E_x exponential, and the first to finish is drawn; its law is p. Noise for a
    vocabulary of 152 k is drawn only where it can still win. Each token enters twice, with the
    weights max(0, p(x) − c) and min(p(x), c), c = 1/1024: two races whose weights sum to p(x).
    The first has at most 1024 runners. In the second nobody weighs more than c, so of its
    noises, which come in ascending order as the points of a Poisson process with a token at
    each, only those below c times the best finish so far can win: some 150 of 152 k.

    Two laws drawn at one place agree with probability at least (1 − TV)/(1 + TV), tail or no
    tail, since splitting every weight at the same c leaves TV as it is. This layout is part of
    the meaning of a seed.

    Source: Daliri et al. 2024 (arXiv 2408.07978) for the bound; Maddison 2016 (arXiv
    1602.05986), "A Poisson process model for Monte Carlo", for noise in ascending order.

    Parameters
    ----------
    seed
        Any integer.
    sequence
        Number of the sequence within the request, so that several answers to one prompt differ.

    Example
    -------
    >>> chooser, place = SeededChooser(7), Place(0, "target")
    >>> p = Distribution.dense([0.5, 0.3, 0.2])
    >>> chooser.draw(p, place) == SeededChooser(7).draw(p, place)
    True
    """

    SPLIT = 1 / 1024

    def __init__(self, seed: int, sequence: int = 0) -> None:
        self.seed = seed
        self.sequence = sequence

    def _key(self, place: Place) -> int:
        position, purpose, round, node = place
        text = f"{self.seed} {self.sequence} {position} {purpose} {round} {node}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def accept(self, probability: float, place: Place) -> bool:
        """True if the place's one uniform falls below the probability."""
        return bool(uniform(np.uint64(self._key(place)), 0) < probability)

    def draw(self, law: Distribution, place: Place) -> int:
        """The winner of the exponential race at this place."""
        return self.race(law, place, 1)[0]

    def race(self, law: Distribution, place: Place, count: int) -> list[int]:
        """The first to finish: the winner, and up to ``count`` in all of those that come close."""
        if len(law.ids) == 1:
            return [int(law.ids[0])]
        key = np.uint64(self._key(place))
        found = finish_first(key, law.ids, law.probs, law.vocab_size, self.SPLIT, count)
        return [int(token) for token in found]


class ScriptedChooser:
    """Answers from two lists, in order; for tests that need one particular course of events."""

    def __init__(self, accepts: Sequence[bool] = (), draws: Sequence[int] = ()) -> None:
        self._accepts = iter(accepts)
        self._draws = iter(draws)

    def accept(self, probability: float, place: Place) -> bool:
        """The next scripted answer."""
        return next(self._accepts)

    def draw(self, law: Distribution, place: Place) -> int:
        """The next scripted token; it must be possible under the law."""
        token = next(self._draws)
        if law[token] == 0.0:
            raise ValueError(f"Token {token} was scripted, but it has probability zero here.")
        return token

    def race(self, law: Distribution, place: Place, count: int) -> list[int]:
        """As many scripted tokens."""
        return _one_after_another(self, law, place, count)


class EnumeratingChooser:
    """One walk through a program's tree of chances, along a given prefix of outcomes.

    ``weight`` is the probability of the walk so far. A place may be asked only once: a second
    question there would reuse noise, which independent random numbers hide and which biases
    real output. The one exception is a draw for ``target``, whose noise is shared on purpose;
    there the outcomes are enumerated jointly, by the exact law of an exponential race run
    several times on the same noise (``outrider.core.race``). ``SeededChooser`` splits each
    runner in two, so its joint law is a little different; each draw's own law, the one that
    exactness rests on, is the same.
    """

    def __init__(self, prefix: Sequence[int]) -> None:
        self._prefix = prefix
        self._asked: dict[Place, list[tuple[Distribution, int]]] = {}
        self.taken: list[int] = []
        self.options: list[list[int]] = []
        self.weight = 1.0

    def _choose(self, outcomes: Sequence[tuple[int, float]]) -> int:
        if any(math.isnan(weight) for _, weight in outcomes):
            raise ArithmeticError("A probability in the enumerated program is not a number.")
        possible = {outcome: weight for outcome, weight in outcomes if weight > 0.0}
        step = len(self.taken)
        outcome = self._prefix[step] if step < len(self._prefix) else next(iter(possible))
        self.taken.append(outcome)
        self.options.append(list(possible))
        self.weight *= possible[outcome]
        return outcome

    def _ask(self, place: Place, *, shared: bool) -> list[tuple[Distribution, int]]:
        """Earlier draws at a place: none, unless its noise is shared on purpose."""
        if place in self._asked and not (shared and self._asked[place]):
            raise AssertionError(f"Noise was used twice at {place}.")
        return self._asked.setdefault(place, [])

    def accept(self, probability: float, place: Place) -> bool:
        """Both answers are walked, with their probabilities."""
        self._ask(place, shared=False)
        probability = min(max(probability, 0.0), 1.0)  # in this order a NaN stays one
        return bool(self._choose([(1, probability), (0, 1.0 - probability)]))

    def draw(self, law: Distribution, place: Place) -> int:
        """Every token of the support is walked, with its probability."""
        earlier = self._ask(place, shared=place.purpose == "target")
        if not earlier:
            outcomes = [(int(i), float(p)) for i, p in zip(law.ids, law.probs, strict=True)]
        else:
            from outrider.core.race import conditional

            outcomes = conditional(earlier, law)
        token = self._choose(outcomes)
        earlier.append((law, token))
        return token

    def race(self, law: Distribution, place: Place, count: int) -> list[int]:
        """Every order of finish is walked: who comes second wins without the first."""
        return _one_after_another(self, law, place, count)


def _one_after_another(chooser: Chooser, law: Distribution, place: Place, count: int) -> list[int]:
    found: list[int] = []
    left: Distribution | None = law
    while left is not None and len(found) < count:
        found.append(chooser.draw(left, place))
        left = left.without(found[-1])
    return found


def enumerate_outcomes(program: Callable[[Chooser], T]) -> Iterator[tuple[T, float]]:
    """Run a program once for every course that chance can take.

    Yields each result with its exact probability; the probabilities sum to one.

    Parameters
    ----------
    program
        A function whose only source of chance is the chooser it is given.

    Example
    -------
    >>> p = Distribution.dense([0.25, 0.75])
    >>> sorted(enumerate_outcomes(lambda chooser: chooser.draw(p, Place(0, "residual"))))
    [(0, 0.25), (1, 0.75)]
    """
    waiting: list[list[int]] = [[]]
    while waiting:
        prefix = waiting.pop()
        chooser = EnumeratingChooser(prefix)
        result = program(chooser)
        for step in range(len(prefix), len(chooser.taken)):
            for other in chooser.options[step]:
                if other != chooser.taken[step]:
                    waiting.append([*chooser.taken[:step], other])
        yield result, chooser.weight
