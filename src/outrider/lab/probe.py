"""Measures what a plan is made from: how often drafts stand by depth, and what passes cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from outrider.core.price import Price
from outrider.core.proposal import Proposal
from outrider.core.trace import Round
from outrider.engine.engine import Engine, Prompt
from outrider.engine.generation import Output
from outrider.errors import UsageError
from outrider.lab.memory import cache_bytes, tensor_bytes
from outrider.lab.plan import Acceptance, Measured, Side
from outrider.protocols import Model

__all__ = [
    "Depths",
    "Probe",
    "check_draft",
    "draft_times",
    "pass_seconds",
    "probe",
    "run_beside_plain",
]

_FEW = 20
"""Trials below which a depth's own rate says little, and that of all depths is taken."""

_MOST_ROWS = 32
_WARM_UP = 1
_REPEATS = 5
_LONGEST_S = 20.0
"""Of measuring passes; every number of rows is measured at least once."""


@dataclass(slots=True)
class Depths:
    """Counts by depth, from rounds of chains of at most ``longest`` tokens.

    ``reached[i]``: rounds in which i tokens stood, and whether the next one did was seen;
    ``stood[i]``: those in which it did. ``asked`` and ``proposed``: rounds in which a proposal of
    more than i tokens had room, and those in which there was one.

    Example
    -------
    >>> depths = Depths(2)
    >>> depths.add([Round(2, 1, 1, 0, True, 0.0, 0.0, 0.0)], max_tokens=9)
    >>> depths.reached, depths.stood
    ([1, 1], [1, 0])
    """

    longest: int
    reached: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("reached", "stood", "asked", "proposed"):
            setattr(self, name, [0] * self.longest)

    def add(self, rounds: Iterable[Round], max_tokens: int) -> None:
        """Count the rounds of one output."""
        left = max_tokens
        for one in rounds:
            room = min(self.longest, left - 1)
            left -= one.emitted
            for depth in range(room):
                self.asked[depth] += 1
                self.proposed[depth] += one.drafted > depth
            for depth in range(one.accepted):
                self.reached[depth] += 1
                self.stood[depth] += 1
            # An end inside the draft hides what would have become of the next token.
            seen = one.corrections + one.bonuses > 0
            if seen and one.accepted < room:
                self.reached[one.accepted] += 1

    def acceptance(self) -> Acceptance:
        """Rates by depth, as far as there are enough trials.

        Raises
        ------
        UsageError
            When nothing was drafted.
        """
        if not any(self.proposed):
            raise UsageError(
                "The drafter proposed nothing on these prompts, so there is nothing to plan from.",
                hint="Give more prompts, a larger --max-tokens or another --drafter.",
            )
        rates: list[float] = []
        for tried, stood in zip(self.reached, self.stood, strict=True):
            if tried < _FEW:
                break
            rates.append(stood / tried)
        shares = [p / a if a else 0.0 for p, a in zip(self.proposed, self.asked, strict=True)]
        return Acceptance(sum(self.stood) / sum(self.reached), tuple(rates), tuple(shares))


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured.

    Parameters
    ----------
    acceptance, depths
        How often drafts stood, and the counts behind it.
    pass_s
        Seconds of the target's pass by its rows.
    draft_s, start_s
        Seconds of one more drafted token, and of drafting whatever its length, in a round.
    rest_s
        Seconds of a round besides drafting and the pass.
    target, draft
        Sizes in memory, as far as they show.
    """

    acceptance: Acceptance
    depths: Depths
    pass_s: dict[int, float]
    draft_s: float
    start_s: float
    rest_s: float
    target: Side
    draft: Side

    @property
    def price(self) -> Price:
        """The target's passes in plain ones."""
        return Price.measured(self.pass_s)

    @property
    def costs(self) -> dict[str, Any]:
        """In plain passes, by the names that ``make_plan`` has for them."""
        one = self.pass_s[1]
        return {"cost": self.draft_s / one, "start": self.start_s / one, "rest": self.rest_s / one}


def check_draft(engine: Engine) -> None:
    """Raise ``UsageError`` for a drafter of trees, whose rounds tell no depths, or for none."""
    if engine.drafter.name == "none":
        raise UsageError(
            "Without a drafter there is nothing to plan.", hint="Example: --drafter ngram"
        )
    if engine.drafter.trees:
        raise UsageError(
            f"A plan is about chains; '{engine.drafter.name}' proposes trees, whose rounds do not "
            "tell how deep a draft stood.",
            hint="Plan a chain: --drafter eagle#chain, medusa:FOLDER#chain, or model:PATH without "
            "#tree. What the tree itself is worth, outrider bench measures.",
        )


def probe(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    longest: int = 20,
    max_tokens: int = 64,
    progress: Callable[[int, int], None] | None = None,
    **request: Any,
) -> Probe:
    """Let a drafter draft as far as it may, and time the target's passes at such a context.

    Parameters
    ----------
    engine
        With a drafter of chains.
    prompts
        What to answer.
    longest
        Tokens drafted in each round.
    max_tokens, request
        As for ``Engine.generate``.
    progress
        Called with prompts done and their number.

    Raises
    ------
    UsageError
        When the drafter proposes trees or nothing.
    """
    check_draft(engine)
    depths, rounds, contexts = Depths(longest), [], []
    for number, prompt in enumerate(prompts):
        # Short drafts, too, tell what is paid for starting one.
        for length in sorted({1, longest}):
            output = engine.generate(
                prompt, max_tokens=max_tokens, draft_length=length, **_seeded(request, number)
            )
            # A draft model reads the prompt in the first round.
            rounds += output.trace.rounds[1:]
        # The context may leave less room than was asked for.
        room = min(max_tokens, engine.model.context_length - output.trace.prompt_tokens)
        depths.add(output.trace.rounds, room)
        contexts.append(output.trace.prompt_tokens + len(output.token_ids))
        if progress is not None:
            progress(number + 1, len(prompts))
    acceptance = depths.acceptance()
    context = max(1, int(median(contexts)))
    rows = [n for n in _rows(longest) if n < engine.model.context_length]
    seconds = pass_seconds(engine.model, rows, context)
    draft_s, start_s = draft_times(rounds)
    rests = [r.total_s - r.draft_s - r.score_s for r in rounds]
    own = getattr(engine.drafter, "model", None)
    draft_weights = tensor_bytes(engine.drafter, beside=engine.model)
    return Probe(
        acceptance,
        depths,
        seconds,
        draft_s,
        start_s,
        max(0.0, median(rests)) if rests else 0.0,
        _side(engine.model, tensor_bytes(engine.model), context),
        _side(own, draft_weights, context) if isinstance(own, Model) else Side(None, draft_weights),
    )


def draft_times(rounds: Iterable[Round]) -> tuple[float, float]:
    """Seconds of one more drafted token and of starting, from rounds of several lengths.

    A straight line through the median time at each length, weighted by its rounds. Neither is
    below 0; from rounds of one length alone, all time goes to the tokens.

    Example
    -------
    >>> some = [Round(n, 0, 1, 0, True, 0.5 + 0.25 * n, 1.0, 2.0) for n in (1, 1, 4)]
    >>> draft_times(some)
    (0.25, 0.5)
    """
    times: dict[int, list[float]] = {}
    for one in rounds:
        times.setdefault(one.drafted, []).append(one.draft_s)
    times.pop(0, None)
    if not times:
        return 0.0, 0.0
    n = np.array(list(times), dtype=np.float64)
    seconds = np.array([median(some) for some in times.values()])
    weights = np.array([len(some) for some in times.values()], dtype=np.float64)
    middle, mean = np.average(n, weights=weights), np.average(seconds, weights=weights)
    spread = np.average((n - middle) ** 2, weights=weights)
    slope = np.average((n - middle) * (seconds - mean), weights=weights) / spread if spread else 0.0
    if slope > 0 and mean >= slope * middle:
        return float(slope), float(mean - slope * middle)
    through_zero = float(mean / middle)
    return (0.0, float(mean)) if spread and slope <= 0 else (through_zero, 0.0)


def run_beside_plain(
    engine: Engine,
    prompts: Sequence[Prompt],
    length: int,
    *,
    max_tokens: int = 64,
    progress: Callable[[int, int], None] | None = None,
    **request: Any,
) -> tuple[Measured, float]:
    """Prompts with drafts of one length and without any, in turns.

    Returns the measured speed-ups, and the median share of a plain request's time that it spends
    decoding.
    """
    ours: list[Output] = []
    plains: list[Output] = []
    for number, prompt in enumerate(prompts):
        same = _seeded(request, number)
        for outputs, plain in [(ours, False), (plains, True)][:: 1 if number % 2 else -1]:
            outputs.append(
                engine.generate(
                    prompt, max_tokens=max_tokens, draft_length=length, plain=plain, **same
                )
            )
        if progress is not None:
            progress(number + 1, len(prompts))
    summaries = [(a.trace.summary(), b.trace.summary()) for a, b in zip(ours, plains, strict=True)]

    def gain(name: str) -> float:
        return float(median(a[name] / b[name] for a, b in summaries if a[name] and b[name]))

    calls = sum(a["target_calls"] for a, _ in summaries)
    emitted = sum(a["emitted_tokens"] for a, _ in summaries)
    share = median(1 - b["prefill_time_ms"] / b["total_time_ms"] for _, b in summaries)
    measured = Measured(
        length, gain("decode_tokens_per_s"), gain("tokens_per_s"), emitted / calls, len(prompts)
    )
    return measured, share


def pass_seconds(model: Model, rows: Sequence[int], context: int) -> dict[int, float]:
    """Median seconds of the target's pass by its rows, in turns, after ``context`` tokens."""
    context = max(1, min(context, model.context_length - max(rows) - 1))
    cache = model.new_cache(context + max(rows) + 1)
    # All equal, tokens would be an odd case for attention.
    model.prefill(cache, [(7 * i + 3) % min(1000, model.vocab_size) for i in range(context)], None)
    found: dict[int, list[float]] = {n: [] for n in rows}
    began = perf_counter()
    for turn in range(_WARM_UP + _REPEATS):
        for n in rows if turn % 2 else rows[::-1]:
            chain = Proposal.chain([i % model.vocab_size for i in range(n - 1)])
            started = perf_counter()
            logits = model.score(cache, [0], chain)
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
            spent = perf_counter() - started
            cache.rollback(context)
            if turn >= _WARM_UP:
                found[n].append(spent)
        if turn >= _WARM_UP and perf_counter() - began > _LONGEST_S:
            break
    return {n: median(times) for n, times in found.items()}


def _rows(longest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and those of the longest draft; batches have more than that."""
    most = max(_MOST_ROWS, longest + 1)
    steps = [1, *(n for i in range(1, 12) for n in (2**i, 3 * 2 ** (i - 1)))]
    return sorted({*(n for n in steps if n <= most), longest + 1})


def _side(model: Any, weights: int | None, context: int) -> Side:
    cache = model.new_cache(context)
    # Caches that grow hold nothing before they are written to.
    model.prefill(cache, [i % model.vocab_size for i in range(context)], None)
    taken = cache_bytes(cache)
    return Side(None, weights, taken / context if taken else None)


def _seeded(request: dict[str, Any], number: int) -> dict[str, Any]:
    return request | {"seed": request.get("seed", 0) + number}
