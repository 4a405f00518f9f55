"""What rows of the target's pass and steps of a drafter cost on this machine."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from outrider.core.chooser import SeededChooser
from outrider.core.price import NOMINAL, Price
from outrider.core.processors import Law
from outrider.core.proposal import Proposal
from outrider.drafters.beside import begin, new_cache
from outrider.engine.round import Session, make_pick
from outrider.policies.fixed import Fixed
from outrider.protocols import Drafter, Model, Rule

__all__ = ["measure_rows", "with_steps"]

_ROWS = (1, 2, 4, 5, 8, 16)
_CONTEXT = 64
_PERIOD = 7
_TURNS = 5
_NETWORKS = ("model", "head", "heads")
"""What a drafter has whose steps take time; looking something up takes next to none."""

_LONGEST_S = 0.5
"""Of measuring, after one turn over all numbers of rows: a large model is measured once."""

_LEAST_S = 1e-3
"""Passes shorter than this are a toy's, and what their times tell is the machine's noise."""


def measure_rows(model: Model) -> Price:
    """The price of rows: the least of a few passes of each kind, in turns, on a cache of their own.

    What else runs on the machine only adds to a time, and with few turns a median may be of those.

    Nominal where a pass takes no time to speak of, or where the model scores no blocks.
    """
    if model.rollback != "length" or model.context_length < _CONTEXT + max(_ROWS) + 1:
        return NOMINAL
    seconds = _seconds(model, _ROWS)
    return Price.measured(seconds) if seconds[1] >= _LEAST_S else NOMINAL


def with_steps(price: Price, model: Model, drafter: Drafter, rule: Rule) -> Price:
    """The same with a step of the drafter, or of each part of a mixed one, under a rule: drawing
    from a whole vocabulary takes longer than finding its largest number."""
    if price is NOMINAL or drafter.name == "none":
        return price
    parts: tuple[Drafter, ...] = getattr(drafter, "parts", (drafter,))
    slow = [part for part in parts if any(hasattr(part, name) for name in _NETWORKS)]
    if not slow:
        return price
    one = _seconds(model, (1,))[1]
    steps = {part.name: _step_seconds(model, part, rule) / one for part in slow}
    return replace(price, steps=steps)


def _step_seconds(model: Model, drafter: Drafter, rule: Rule) -> float:
    """Of a proposal of one token, after a text that repeats itself and grows by one each time."""
    text = [i % min(_PERIOD, model.vocab_size) for i in range(_CONTEXT + _TURNS + 1)]
    limit = len(text) + 1
    cache = new_cache(model, drafter, limit)
    session = Session(
        model=model,
        cache=cache,
        draft=begin(drafter, text[:_CONTEXT], limit, cache),
        rule=rule,
        policy=Fixed(1),
        law=Law(greedy=rule.name == "greedy"),
        chooser=SeededChooser(0),
        tokens=text[:_CONTEXT],
        prompt_length=_CONTEXT,
        limit=limit,
    )
    times = []
    for token in text[_CONTEXT:]:
        model.prefill(cache, session.tokens[cache.length : -1], None)
        pick = make_pick(session)
        started = perf_counter()
        session.draft.propose(session.tokens, 1, pick)
        times.append(perf_counter() - started)
        session.tokens.append(token)
    return min(times[1:])  # the first one feeds the whole text


def _seconds(model: Model, rows: tuple[int, ...]) -> dict[int, float]:
    cache = model.new_cache(_CONTEXT + max(rows) + 1)
    model.prefill(cache, [0] * _CONTEXT, None)
    found: dict[int, list[float]] = {n: [] for n in rows}
    began = perf_counter()
    for turn in range(_TURNS):
        for n in rows:
            started = perf_counter()
            model.score(cache, [0], Proposal.chain([0] * (n - 1)))
            found[n].append(perf_counter() - started)
            cache.rollback(_CONTEXT)
        if perf_counter() - began > _LONGEST_S and turn:
            break
    return {n: min(times) for n, times in found.items()}
