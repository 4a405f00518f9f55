"""What speculation can be expected to gain, from how often drafts stand and what passes cost.

Pure: numbers in, numbers out. They are given, or come from ``lab.probe``, which measures them.
Time is counted in plain passes: the target's pass over one row is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from outrider.core.price import Price
from outrider.core.theory import (
    quoted_speedup,
    roofline_s,
    speedup,
    speedup_of_request,
    tokens_by_depth,
)
from outrider.errors import UsageError

__all__ = [
    "ALPHAS",
    "BATCHES",
    "RATIOS",
    "SHARES",
    "Acceptance",
    "At",
    "Batch",
    "Drafting",
    "Machine",
    "Measured",
    "Memory",
    "Plan",
    "Side",
    "make_plan",
    "survival",
]

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
RATIOS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Where the best speed-up is mapped."""

SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Decode shares of a request's time."""

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)

FLAT = Price((1, 2), (1.0, 1.0))
"""A pass costs the same whatever its rows."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often drafted tokens stand.

    Parameters
    ----------
    alpha
        The chance for a token all of whose predecessors stood; it holds wherever ``rates`` ends.
    rates
        The same by depth, from the first drafted token on, where it was measured. A round in
        which the drafter proposed nothing so deep counts as one in which nothing stood.
    proposed
        By depth, the share of rounds in which the drafter proposed a token so deep; by default
        all.

    Raises
    ------
    UsageError
        When one of them is no probability.

    Example
    -------
    >>> Acceptance(0.5).tokens(2), Acceptance(0.5, rates=(0.8,)).tokens(2)
    (1.75, 2.2)
    """

    alpha: float
    rates: tuple[float, ...] = ()
    proposed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for value in (self.alpha, *self.rates, *self.proposed):
            _check(0.0 <= value <= 1.0, "An acceptance rate", "from 0 to 1", value)

    def rate(self, depth: int) -> float:
        """The chance at a depth, which counts from 1."""
        return self.rates[depth - 1] if depth <= len(self.rates) else self.alpha

    def tokens(self, length: int) -> float:
        """Expected tokens a target call, its own included."""
        return tokens_by_depth([self.rate(depth) for depth in range(1, length + 1)])

    def share(self, depth: int) -> float:
        """Of rounds with a proposal so deep."""
        if not self.proposed:
            return 1.0
        return self.proposed[min(depth, len(self.proposed)) - 1]

    def drafted(self, length: int) -> float:
        """Expected drafted tokens a round."""
        return sum(self.share(depth) for depth in range(1, length + 1))

    def verify(self, length: int, price: Price) -> float:
        """Expected time of the pass that verifies: a row more than was proposed."""
        first = price.of(1)
        extra = (
            self.share(depth) * (price.of(depth + 1) - price.of(depth))
            for depth in range(1, length + 1)
        )
        return first + sum(extra)


@dataclass(frozen=True, slots=True)
class Side:
    """A model's size, as far as it is known.

    Parameters
    ----------
    parameters
        How many; two floating-point operations for each and row.
    weights_bytes
        What a pass reads, and what they take in memory.
    cache_bytes_per_token
        Keys and values; ``None`` where not known.
    """

    parameters: float | None = None
    weights_bytes: float | None = None
    cache_bytes_per_token: float | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "weights_bytes", "cache_bytes_per_token"):
            value = getattr(self, name)
            if value is not None:
                what = f"A model's {name.replace('_', ' ')}"
                _check(0 < value < math.inf, what, "above 0", value)


@dataclass(frozen=True, slots=True)
class Machine:
    """What memory and arithmetic allow.

    Parameters
    ----------
    bytes_per_s
        Of the memory that the weights are in.
    flops_per_s
        In the precision of the arithmetic.
    """

    bytes_per_s: float
    flops_per_s: float

    def __post_init__(self) -> None:
        _check(0 < self.bytes_per_s < math.inf, "The bandwidth", "above 0", self.bytes_per_s)
        _check(0 < self.flops_per_s < math.inf, "The compute", "above 0", self.flops_per_s)

    def pass_s(self, side: Side, rows: int, sequences: int, context_tokens: int) -> float:
        """Seconds of one pass, which reads each sequence's cache; attention's sums are left out."""
        assert side.parameters is not None
        assert side.weights_bytes is not None
        cache = sequences * context_tokens * (side.cache_bytes_per_token or 0.0)
        moved = side.weights_bytes + cache
        return roofline_s(rows, moved, 2 * side.parameters, self.bytes_per_s, self.flops_per_s)

    def balance_rows(self, side: Side) -> float:
        """Rows at which arithmetic takes as long as reading the weights."""
        assert side.parameters is not None
        assert side.weights_bytes is not None
        reading_s = side.weights_bytes / self.bytes_per_s
        return reading_s * self.flops_per_s / (2 * side.parameters)


@dataclass(frozen=True, slots=True)
class At:
    """What is expected at one draft length.

    ``draft`` and ``verify`` are times in plain passes; ``quoted`` is the formula that overstates,
    ``None`` where drafting costs nothing.
    """

    draft_length: int
    tokens_per_target_call: float
    draft: float
    verify: float
    speedup: float
    quoted: float | None


@dataclass(frozen=True, slots=True)
class Batch:
    """So many sequences side by side: the best draft length, and what it gains in throughput.

    ``speedup_kept`` is that of the length that is best for one sequence; ``plain_pass_s`` is
    ``None`` where only ratios are known; ``bound`` is what limits the verifying pass.
    """

    sequences: int
    draft_length: int
    speedup: float
    speedup_kept: float
    plain_pass_s: float | None
    bound: str | None

    @property
    def plain_tokens_per_s(self) -> float | None:
        """All sequences together, without drafts."""
        return None if self.plain_pass_s is None else self.sequences / self.plain_pass_s


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what takes them, for so many sequences; ``None`` where a size is not known."""

    sequences: int
    target_weights: float | None
    draft_weights: float | None
    target_caches: float | None
    draft_caches: float | None

    @property
    def total(self) -> float:
        """Of all that is known."""
        parts = (self.target_weights, self.draft_weights, self.target_caches, self.draft_caches)
        return sum(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Measured:
    """What requests really took, beside what is expected.

    Parameters
    ----------
    draft_length
        With which they were run.
    decode_speedup, request_speedup
        Medians over prompts of rates over plain decoding's, the prompt's pass left out or in.
    tokens_per_target_call
        Over all of them.
    prompts
        How many.
    """

    draft_length: int
    decode_speedup: float
    request_speedup: float
    tokens_per_target_call: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Drafting:
    """What is known of drafting and verifying.

    Parameters
    ----------
    acceptance
        How often drafts stand.
    cost
        c, the time of one drafted token in plain passes.
    price
        The target's passes by their rows; ``None`` where it is not known, and taken to be flat.
    start
        What drafting takes in each round, whatever its length, in plain passes.
    rest
        What a round takes besides drafting and the pass, with a draft or without.
    """

    acceptance: Acceptance
    cost: float
    price: Price | None = None
    start: float = 0.0
    rest: float = 0.0

    def __post_init__(self) -> None:
        _check(0 <= self.cost < math.inf, "The cost of a drafted token", "0 or more", self.cost)
        _check(0 <= self.start < math.inf, "The cost of a draft's start", "0 or more", self.start)
        _check(0 <= self.rest < math.inf, "The rest of a round", "0 or more", self.rest)

    @property
    def ratio(self) -> float | None:
        """s, the time of a plain pass in drafted tokens; ``None`` where these cost nothing."""
        return 1.0 / self.cost if self.cost else None

    def at(self, length: int) -> At:
        """What is expected at a draft length."""
        tokens = self.acceptance.tokens(length)
        draft = self.draft(length)
        verify = self.acceptance.verify(length, self.price or FLAT)
        quoted = None
        if self.ratio is not None:
            quoted = quoted_speedup(self.acceptance.alpha, length, self.ratio)
        gain = speedup(tokens, draft, verify, self.rest)
        return At(length, tokens, draft, verify, gain, quoted)

    def draft(self, length: int) -> float:
        """Expected time of drafting in a round."""
        if not length:
            return 0.0
        return self.start + self.cost * self.acceptance.drafted(length)

    def best(self, longest: int) -> At:
        """The draft length with the highest speed-up; of equals the shortest. 0 is plain."""
        return max(map(self.at, range(longest + 1)), key=lambda at: (at.speedup, -at.draft_length))


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is expected.

    Parameters
    ----------
    drafting
        What it was made from.
    points
        By draft length, from 0 on, which is plain decoding.
    chosen
        A draft length of interest: the best, or the one that was asked for.
    decode_share
        f, decoding's share of a request's plain time; ``None`` where it is not known.
    map
        The best speed-up and its draft length by α (rows, ``ALPHAS``) and s (``RATIOS``), with the
        same price of rows.
    batches, memories
        By numbers of sequences; empty where too little is known.
    balance_rows
        Rows from which a pass is bound by arithmetic; ``None`` where it is not known.
    measured
        What was measured beside it.
    """

    drafting: Drafting
    points: tuple[At, ...]
    chosen: int
    decode_share: float | None
    map: tuple[tuple[tuple[float, int], ...], ...]
    batches: tuple[Batch, ...] = ()
    memories: tuple[Memory, ...] = ()
    balance_rows: float | None = None
    context_tokens: int = 0
    measured: Measured | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> At:
        """The draft length with the highest speed-up."""
        return max(self.points, key=lambda at: (at.speedup, -at.draft_length))

    @property
    def longest(self) -> At:
        """The longest draft that was looked at."""
        return self.points[-1]

    @property
    def shares(self) -> list[tuple[float, float]]:
        """By the decode share f: the best speed-up of a whole request."""
        own = () if self.decode_share is None else (self.decode_share,)
        return [(f, speedup_of_request(self.best.speedup, f)) for f in sorted({*SHARES, *own})]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, by the names used everywhere in Outrider."""
        drafting, best = self.drafting, self.best
        price = drafting.price
        told: dict[str, Any] = {
            **self.about,
            "alpha": drafting.acceptance.alpha,
            "acceptance_by_depth": list(drafting.acceptance.rates),
            "proposed_by_depth": list(drafting.acceptance.proposed),
            "cost_ratio": drafting.ratio,
            "start_cost": drafting.start,
            "rest_cost": drafting.rest,
            "verify_cost": None
            if price is None
            else dict(zip(map(str, price.rows), price.passes, strict=True)),
            "draft_length": best.draft_length,
            "speedup": best.speedup,
            "tokens_per_target_call": best.tokens_per_target_call,
            "points": [
                {
                    "draft_length": at.draft_length,
                    "tokens_per_target_call": at.tokens_per_target_call,
                    "draft_cost": at.draft,
                    "verify_cost": at.verify,
                    "speedup": at.speedup,
                    "quoted_speedup": at.quoted,
                }
                for at in self.points
            ],
            "decode_share": self.decode_share,
            "request_speedups": [{"decode_share": f, "speedup": s} for f, s in self.shares],
            "map": [
                {"alpha": a, "cost_ratio": s, "speedup": gain, "draft_length": length}
                for a, row in zip(ALPHAS, self.map, strict=True)
                for s, (gain, length) in zip(RATIOS, row, strict=True)
            ],
            "context_tokens": self.context_tokens,
            "balance_rows": self.balance_rows,
            "batches": [
                {
                    "batch": one.sequences,
                    "draft_length": one.draft_length,
                    "speedup": one.speedup,
                    "speedup_at_best_of_one": one.speedup_kept,
                    "plain_pass_ms": None if one.plain_pass_s is None else 1e3 * one.plain_pass_s,
                    "plain_tokens_per_s": one.plain_tokens_per_s,
                    "bound": one.bound,
                }
                for one in self.batches
            ],
            "memory": [
                {
                    "batch": one.sequences,
                    "target_weights_bytes": one.target_weights,
                    "draft_weights_bytes": one.draft_weights,
                    "target_cache_bytes": one.target_caches,
                    "draft_cache_bytes": one.draft_caches,
                    "total_bytes": one.total,
                }
                for one in self.memories
            ],
        }
        if self.measured is not None:
            m = self.measured
            told["measured"] = {
                "draft_length": m.draft_length,
                "expected_speedup": self.points[m.draft_length].speedup,
                "decode_speedup": m.decode_speedup,
                "request_speedup": m.request_speedup,
                "tokens_per_target_call": m.tokens_per_target_call,
                "prompts": m.prompts,
            }
        return told


def make_plan(
    acceptance: Acceptance,
    cost: float | None = None,
    *,
    price: Price | None = None,
    start: float = 0.0,
    rest: float = 0.0,
    longest: int = 20,
    chosen: int | None = None,
    decode_share: float | None = None,
    target: Side | None = None,
    draft: Side | None = None,
    machine: Machine | None = None,
    context_tokens: int = 2048,
    batches: Sequence[int] = BATCHES,
    measured: Measured | None = None,
    about: Mapping[str, Any] | None = None,
) -> Plan:
    """What to expect of speculation.

    Parameters
    ----------
    acceptance
        How often drafts stand.
    cost
        c, the time of one drafted token in plain passes. Where it is not known, that of one pass
        of ``draft`` on ``machine``.
    price
        The target's passes by their rows. Where it is not known, that of ``target`` on
        ``machine``; without these, flat.
    start, rest
        As in ``Drafting``.
    longest
        The longest draft to look at.
    chosen
        A draft length of interest; by default the best.
    decode_share
        f, decoding's share of a request's plain time.
    target, draft
        Sizes of the models.
    machine
        Bandwidth and compute.
    context_tokens
        Length of each sequence, for its cache.
    batches
        Numbers of sequences side by side.
    measured, about
        To be kept with it.

    Raises
    ------
    UsageError
        When a number is out of its range, or the cost of a draft can be had from nowhere.

    Example
    -------
    >>> plan = make_plan(Acceptance(0.8), 1 / 8)
    >>> plan.best.draft_length, round(plan.best.speedup, 2), round(plan.points[4].quoted, 2)
    (5, 2.27, 2.8)
    """
    _check(1 <= longest <= 1000, "The longest draft", "from 1 to 1000", longest)
    _check(context_tokens >= 0, "A context", "0 or more", context_tokens)
    for size in batches:
        _check(size >= 1, "A batch", "1 or more", size)
    if chosen is not None:
        _check(0 <= chosen <= longest, "A draft length", f"from 0 to {longest}", chosen)
    if decode_share is not None:
        _check(0 <= decode_share <= 1, "A decode share", "from 0 to 1", decode_share)
    target, draft = target or Side(), draft or Side()
    roof = machine if machine and target.parameters and target.weights_bytes else None
    own_draft = draft if draft.parameters and draft.weights_bytes else None
    if cost is None:
        if roof is None or own_draft is None:
            raise UsageError(
                "What a drafted token costs is not known.",
                hint="Give --cost-ratio, or --params, --draft-params, --bandwidth-gbs, --tflops.",
            )
        first = roof.pass_s(own_draft, 1, 1, context_tokens)
        cost = first / roof.pass_s(target, 1, 1, context_tokens)
    if price is None and roof is not None:
        rows = tuple(range(1, longest + 2))
        price = Price.measured({n: roof.pass_s(target, n, 1, context_tokens) for n in rows})
    drafting = Drafting(acceptance, cost, price, start, rest)
    points = tuple(map(drafting.at, range(longest + 1)))
    best = drafting.best(longest).draft_length
    mapped = tuple(
        tuple(_cell(Drafting(Acceptance(a), 1 / s, price), longest) for s in RATIOS) for a in ALPHAS
    )
    # A draft whose cache is not known would seem to read none.
    known = (
        own_draft
        if bool(draft.cache_bytes_per_token) >= bool(target.cache_bytes_per_token)
        else None
    )
    load = _Load(drafting, longest, target, known, roof, context_tokens)
    return Plan(
        drafting=drafting,
        points=points,
        chosen=best if chosen is None else chosen,
        decode_share=decode_share,
        map=mapped,
        # Without a price, what more rows cost is not known, and a batch is nothing but rows.
        batches=tuple(load.batch(size, best) for size in batches if load.knows(size)),
        memories=_memories(target, draft, context_tokens, batches),
        balance_rows=roof.balance_rows(target) if roof else None,
        context_tokens=context_tokens,
        measured=measured,
        about=dict(about or {}),
    )


def _cell(drafting: Drafting, longest: int) -> tuple[float, int]:
    best = drafting.best(longest)
    return best.speedup, best.draft_length


@dataclass(frozen=True, slots=True)
class _Load:
    """The same drafting for several sequences at once, whose rows share each pass."""

    drafting: Drafting
    longest: int
    target: Side
    draft: Side | None
    machine: Machine | None
    context_tokens: int

    def _target(self, rows: int, sequences: int) -> float:
        """A pass, in seconds where the machine is known and in plain passes otherwise."""
        if self.machine is None:
            return (self.drafting.price or FLAT).of(rows)
        return self.machine.pass_s(self.target, rows, sequences, self.context_tokens)

    def knows(self, sequences: int) -> bool:
        """Whether what so many rows cost is known, and not only guessed."""
        price = self.drafting.price
        return self.machine is not None or (price is not None and sequences <= price.rows[-1])

    def _grown(self, sequences: int) -> float:
        """How much longer drafting takes than for one sequence, as the draft's passes do, or, where
        its size is not known, as the target's."""
        if self.machine is None or self.draft is None:
            return self._target(sequences, sequences) / self._target(1, 1)
        one, all_ = (
            self.machine.pass_s(self.draft, n, n, self.context_tokens) for n in (1, sequences)
        )
        return all_ / one

    def speedup(self, sequences: int, length: int) -> float:
        """Of all sequences together, over plain decoding of as many.

        Of several, the rows of a pass are taken to be as many as on average.
        """
        if sequences == 1 and self.machine is None:
            return self.drafting.at(length).speedup
        acceptance = self.drafting.acceptance
        one, plain = self._target(1, 1), self._target(sequences, sequences)
        draft = self.drafting.draft(length) * one * self._grown(sequences)
        rows = sequences * (1 + acceptance.drafted(length))
        low = math.floor(rows)
        at = self._target(low, sequences), self._target(low + 1, sequences)
        verify = at[0] + (rows - low) * (at[1] - at[0])
        tokens = acceptance.tokens(length)
        return speedup(tokens, draft / plain, verify / plain, self.drafting.rest * one / plain)

    def batch(self, sequences: int, kept: int) -> Batch:
        """The best draft length at this size, and what ``kept`` would give."""
        gains = [self.speedup(sequences, n) for n in range(self.longest + 1)]
        best = max(range(len(gains)), key=lambda n: (gains[n], -n))
        plain_s = bound = None
        if self.machine is not None:
            plain_s = self._target(sequences, sequences)
            rows = sequences * (1 + best)
            grows = self._target(rows, sequences) > self._target(0, sequences)
            bound = "arithmetic" if grows else "memory"
        return Batch(sequences, best, gains[best], gains[kept], plain_s, bound)


def _memories(
    target: Side, draft: Side, context_tokens: int, batches: Sequence[int]
) -> tuple[Memory, ...]:
    if target.weights_bytes is None:
        return ()

    def caches(side: Side, sequences: int) -> float | None:
        each = side.cache_bytes_per_token
        return None if each is None else each * context_tokens * sequences

    return tuple(
        Memory(
            size,
            target.weights_bytes,
            draft.weights_bytes,
            caches(target, size),
            caches(draft, size),
        )
        for size in batches
    )


def survival(acceptance: Acceptance, longest: int) -> list[float]:
    """The chance that at least 1, 2, ... drafted tokens stand.

    >>> survival(Acceptance(0.5), 3)
    [0.5, 0.25, 0.125]
    """
    rates = (acceptance.rate(depth) for depth in range(1, longest + 1))
    return list(accumulate(rates, lambda a, b: a * b))


def _check(fits: bool, what: str, allowed: str, value: float) -> None:
    if not fits:  # NaN fits nothing
        raise UsageError(f"{what} must be {allowed}; got {value:g}.", hint="Correct the number.")
