"""Which of a model's own layers draft for it best, by measured time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

from outrider.core.proposal import Proposal
from outrider.drafters.early_exit import EarlyExitDrafter, spell_layers
from outrider.engine.engine import Engine, Prompt
from outrider.errors import UnsupportedError, UsageError
from outrider.protocols import LayeredModel, Model, Progress

__all__ = ["Exit", "best_exits", "drafter_of"]

_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Exit:
    """A choice of layers as a draft, and what it is worth.

    Parameters
    ----------
    layers
        Those that draft.
    acceptance_rate
        The chance that the first drafted token is the model's own, greedily.
    draft_length
        γ with the highest predicted speed.
    tokens_per_target_call
        Expected at that length, the target's own token counted.
    draft_step_ms, verify_ms, plain_ms
        One drafted token; the pass that verifies γ of them; a pass of plain decoding.
    measured_speedup
        Of whole requests, in turns with plain decoding; ``None`` if they were not run.
    """

    layers: tuple[int, ...]
    acceptance_rate: float
    draft_length: int
    tokens_per_target_call: float
    draft_step_ms: float
    verify_ms: float
    plain_ms: float
    measured_speedup: float | None = None

    @property
    def drafter(self) -> str:
        """What ``--drafter`` takes."""
        return f"early_exit:{spell_layers(self.layers)}"

    @property
    def predicted_speedup(self) -> float:
        """E[emitted] · plain / (γ · step + verify): rates over that of plain decoding."""
        round_ms = self.draft_length * self.draft_step_ms + self.verify_ms
        return self.tokens_per_target_call * self.plain_ms / round_ms

    @property
    def speedup(self) -> float:
        """The measured one, or what is predicted where none was measured."""
        return self.predicted_speedup if self.measured_speedup is None else self.measured_speedup

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "drafter": self.drafter,
            "layers": list(self.layers),
            "acceptance_rate": self.acceptance_rate,
            "draft_length": self.draft_length,
            "tokens_per_target_call": self.tokens_per_target_call,
            "draft_step_ms": self.draft_step_ms,
            "verify_ms": self.verify_ms,
            "plain_ms": self.plain_ms,
            "plain_tokens_per_s": 1e3 / self.plain_ms,
            "predicted_tokens_per_s": self.predicted_speedup * 1e3 / self.plain_ms,
            "predicted_speedup": self.predicted_speedup,
            "measured_speedup": self.measured_speedup,
        }


def drafter_of(exits: Sequence[Exit]) -> str:
    """What to draft with: the first of ``best_exits``, or ``none`` where plain decoding wins.

    Only what was run counts: a prediction leaves out what a request costs beside its passes.
    """
    first = exits[0] if exits else None
    pays = first is not None and (first.measured_speedup or 0.0) > 1.0
    return first.drafter if first is not None and pays else "none"


def best_exits(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 64,
    longest: int = 8,
    exits: int = 6,
    subsets: bool = True,
    finalists: int = 2,
    turns: int = 3,
    repeats: int = 9,
    progress: Progress | None = None,
) -> list[Exit]:
    """Early exits and subsets of layers, the fastest first.

    The model answers each prompt greedily. Every choice of layers then drafts blocks of that
    answer, on the cache as a request would have it, and is timed; so each draft length has its
    speed. Subsets leave out, one at a time, the layer without which the answer is guessed best.
    The most promising are at last run in turns with plain decoding, and stand before the rest.

    Parameters
    ----------
    engine
        With the model; its drafter does not matter.
    prompts
        What to answer.
    max_tokens
        Of each answer.
    longest
        Most tokens in a draft.
    exits
        How many first layers to try, spread over the depth.
    subsets
        Whether to leave layers out in between, down to half of them.
    finalists
        How many to run.
    turns
        Runs of each finalist and of plain decoding.
    repeats
        Times that each pass is timed; the median counts.
    progress
        Called with choices tried and those there are to try; subsets may end sooner.

    Raises
    ------
    UnsupportedError
        When the model cannot run some of its layers alone.
    UsageError
        When there are no prompts, or answers too short to draft anything.

    Source: the greedy search is in place of the Bayesian one of Zhang et al. 2023 (arXiv
    2309.08168), section 3.3.
    """
    model = engine.model
    if not isinstance(model, LayeredModel):
        raise UnsupportedError(
            f"'{engine.model.name}' cannot run some of its layers alone.",
            hint="Use the native runtime on a CPU or the hf runtime.",
        )
    texts = [_answered(engine, prompt, max_tokens) for prompt in prompts]
    if not any(len(text.answer) > 1 for text in texts):
        raise UsageError(
            "No prompt has an answer of two tokens or more, so there is nothing to draft.",
            hint="Give more prompts, or a larger --max-tokens.",
        )
    bench = _Bench(engine.model, texts, longest, repeats)
    spread = {max(1, round(model.layers * i / (exits + 1))) for i in range(1, exits + 1)}
    choices = [tuple(range(k)) for k in sorted(spread) if k < model.layers]
    fewest = -(-model.layers // 2)
    most = len(choices) + (model.layers - fewest if subsets else 0)
    found: list[Exit] = []

    def tried(layers: tuple[int, ...]) -> None:
        found.append(bench.exit(layers))
        if progress is not None:
            progress(len(found), most)

    for layers in choices:
        tried(layers)
    if subsets:
        for layers in _thinned(model.layers, fewest, bench.kept):
            tried(layers)
    found.sort(key=lambda one: -one.speedup)
    run = [_run(engine, one, prompts, max_tokens, turns) for one in found[:finalists]]
    return sorted(run, key=lambda one: -one.speedup) + found[finalists:]


def _thinned(
    layers: int, fewest: int, worth: Callable[[tuple[int, ...]], float]
) -> list[tuple[int, ...]]:
    """Choices with one layer less each time, the one that is missed least.

    What leaving a layer out was found to be worth is looked at again only while it would win
    (Minoux 1978, accelerated greedy): a few trials a step in place of one for each layer.
    """
    here = tuple(range(layers))
    found: list[tuple[int, ...]] = []
    heap: list[tuple[float, int]] = []
    while len(here) > max(fewest, 1):
        fresh: set[int] = set()
        if not heap:  # the first step is the only one that tries them all
            heap = sorted((-worth(here[:i] + here[i + 1 :]), i) for i in here)
            fresh = set(here)
        while heap[0][1] not in fresh:
            layer = heap[0][1]
            without = tuple(i for i in here if i != layer)
            heapq.heapreplace(heap, (-worth(without), layer))
            fresh.add(layer)
        _, layer = heapq.heappop(heap)
        here = tuple(i for i in here if i != layer)
        found.append(here)
    return found


@dataclass(frozen=True, slots=True)
class _Text:
    prompt: list[int]
    answer: list[int]


def _answered(engine: Engine, prompt: Prompt, max_tokens: int) -> _Text:
    ids = engine.encode(prompt)
    output = engine.generate(ids, plain=True, max_tokens=max_tokens, temperature=0.0)
    return _Text(ids, output.token_ids)


class _Bench:
    """Blocks of known answers, for choices of layers to guess; and a clock.

    Parameters
    ----------
    model
        The whole model.
    texts
        What it wrote.
    longest
        Tokens in a block.
    repeats
        Times that a pass is timed.
    """

    def __init__(self, model: Any, texts: Sequence[_Text], longest: int, repeats: int) -> None:
        self._model = model
        self._longest = longest
        self._repeats = repeats
        self._texts = [text for text in texts if len(text.answer) > 1]
        self._caches = []
        for text in self._texts:
            cache = model.new_cache(len(text.prompt) + len(text.answer) + longest + 1)
            model.prefill(cache, text.prompt[:-1], None)
            self._caches.append(cache)
        self._lengths: dict[tuple[int, ...], list[int]] = {}

    def kept(self, layers: tuple[int, ...]) -> float:
        """Tokens of a block that are guessed before the first wrong one, on average."""
        lengths = self._guessed(layers)
        return sum(lengths) / len(lengths)

    def _guessed(self, layers: tuple[int, ...]) -> list[int]:
        """For each block, how many of its first tokens a draft of these layers would have kept."""
        if layers not in self._lengths:
            part = self._model.some_layers(layers)
            self._lengths[layers] = [
                length
                for text, cache in zip(self._texts, self._caches, strict=True)
                for length in self._in_text(part, text, cache)
            ]
        return self._lengths[layers]

    def _in_text(self, part: Model, text: _Text, cache: Any) -> list[int]:
        tokens = [*text.prompt, *text.answer]
        found: list[int] = []
        start = len(text.prompt) - 1
        cache.rollback(start)
        # A block that the answer's end cuts short would count as a wrong guess.
        while start + self._longest < len(tokens) or not found:
            block = tokens[start + 1 : start + 1 + self._longest]
            # As if the guesses before were right: the rows after the first wrong one count for
            # nothing anyway. What the draft wrote is then written over by the whole model.
            rows = part.score(cache, tokens[start : start + 1], Proposal.chain(block[:-1]))
            cache.rollback(start)
            right = (rows.argmax(-1).cpu()[: len(block)].tolist(), block)
            wrong = (i for i, (a, b) in enumerate(zip(*right, strict=True)) if a != b)
            found.append(next(wrong, len(block)))
            end = start + len(block)
            self._model.prefill(cache, tokens[start:end], None)
            start = end
        return found

    def exit(self, layers: tuple[int, ...]) -> Exit:
        """Guesses and times of one choice, at the draft length that is best for it."""
        lengths = self._guessed(layers)
        plain, step, *verify = self._clock(layers)
        tries = [
            Exit(
                layers,
                sum(length > 0 for length in lengths) / len(lengths),
                n,
                1 + sum(min(length, n) for length in lengths) / len(lengths),
                step,
                verify[n - 1],
                plain,
            )
            for n in range(1, self._longest + 1)
        ]
        return max(tries, key=lambda one: one.predicted_speedup)

    def _clock(self, layers: tuple[int, ...]) -> list[float]:
        """Milliseconds of a plain pass, a draft step, and passes that verify 1, 2, ... tokens.

        In turns, forwards and backwards, so that a drift of the machine's speed falls on all.
        """
        text, cache = self._texts[0], self._caches[0]
        part: Model = self._model.some_layers(layers)
        start = len(text.prompt) - 1
        cache.rollback(start)
        last = text.prompt[-1:]
        block = (text.answer * self._longest)[: self._longest]
        passes: list[tuple[Model, int]] = [(self._model, 0), (part, 0)]
        passes += [(self._model, n) for n in range(1, self._longest + 1)]
        times: list[list[float]] = [[] for _ in passes]
        for turn in range(_WARM_UP + self._repeats):
            order = range(len(passes))
            for i in order if turn % 2 else reversed(order):
                model, n = passes[i]
                started = perf_counter()
                # Reading the best token waits for a device that works on its own.
                model.score(cache, last, Proposal.chain(block[:n])).argmax(-1).tolist()
                spent_ms = (perf_counter() - started) * 1e3
                cache.rollback(start)
                if turn >= _WARM_UP:
                    times[i].append(spent_ms)
        return [median(some) for some in times]


def _run(engine: Engine, one: Exit, prompts: Sequence[Prompt], max_tokens: int, turns: int) -> Exit:
    """The same choice with its measured speed: decoding time of all prompts, in turns."""
    drafter = EarlyExitDrafter(engine.model, one.layers)
    ratios = []
    for turn in range(turns):
        spent = {True: 0.0, False: 0.0}
        for plain in (True, False) if turn % 2 else (False, True):
            for prompt in prompts:
                trace = engine.generate(
                    prompt,
                    plain=plain,
                    drafter=drafter,
                    draft_length=one.draft_length,
                    max_tokens=max_tokens,
                    temperature=0.0,
                ).trace
                spent[plain] += trace.total_s - trace.prefill_s
        ratios.append(spent[True] / spent[False])
    return replace(one, measured_speedup=median(ratios))
