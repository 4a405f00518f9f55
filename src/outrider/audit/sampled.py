"""Audits of real models: samples of both kinds, or token by token where tokens must be equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.audit.statistics import BIASES, ENOUGH_POWER, Look, Report, Stratum, compare
from outrider.core.chooser import Place, SeededChooser
from outrider.core.processors import Context, Sampling
from outrider.core.proposal import Proposal
from outrider.engine.engine import Engine
from outrider.engine.prefix import Prefix
from outrider.errors import UsageError

__all__ = [
    "NEAR_TIE",
    "Compared",
    "Comparer",
    "Comparing",
    "Difference",
    "Draw",
    "Drawing",
    "Drawn",
    "Pair",
    "Sampler",
    "Samples",
    "TokenReport",
    "audit_samples",
    "audit_tokens",
    "equal_tokens_promised",
    "outputs_needed",
]

NEAR_TIE = 0.5
"""In logits. bfloat16 rounds logits of 16 to 32 to multiples of 1/8, and sums over a model's
layers in another order differ by a few such steps."""

Advance = Callable[[int, int], None]
"""Called with the outputs drawn so far and those to draw in all."""

_EQUAL = ("coupled", "greedy")


def equal_tokens_promised(rule: str) -> bool:
    """Whether a rule of that name promises the very tokens of plain decoding, seed by seed."""
    return rule in _EQUAL


@dataclass(frozen=True, slots=True)
class Draw:
    """One output to be drawn: for which prompt, with or without a drafter, on which seed."""

    prompt: int
    plain: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came of it."""

    token_ids: list[int]
    drafted: int
    accepted: int


Drawing = Callable[[Sequence[Draw]], Iterator[Drawn]]
"""Draws outputs, and gives them out in order."""


class Sampler:
    """Draws outputs one after the other; parameters as in ``Samples``.

    A prompt's cache is kept from one output to the next, as in a conversation.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], request: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._request = request
        self._prefixes: dict[tuple[int, bool], Prefix] = {}

    def __call__(self, draws: Sequence[Draw]) -> Iterator[Drawn]:
        """One output for each draw, in order."""
        for draw in draws:
            prefix = self._prefixes.setdefault((draw.prompt, draw.plain), Prefix())
            generation = self._engine.stream(
                self._prompts[draw.prompt],
                seed=draw.seed,
                plain=draw.plain,
                prefix=prefix,
                **self._request,
            )
            token_ids = generation.output.token_ids
            rounds = generation.trace.rounds
            prefix.keep(generation.session)
            yield Drawn(token_ids, sum(r.drafted for r in rounds), sum(r.accepted for r in rounds))


class Samples:
    """Outputs of both kinds for each prompt, every one on a seed of its own.

    Parameters
    ----------
    engine
        Its drafter, rule and draft length are the configuration.
    prompts
        Token ids.
    seed
        The first; seeds count up from it.
    request
        ``max_tokens``, ``temperature`` and so on, as for ``Engine.generate``.
    drawing
        Who draws in place of the engine, such as the workers of a cluster.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        request: dict[str, Any],
        drawing: Drawing | None = None,
    ) -> None:
        self._drawing = drawing or Sampler(engine, prompts, request)
        self._seed = seed
        self._outputs: list[tuple[list[list[int]], list[list[int]]]] = [([], []) for _ in prompts]
        self.drafted_tokens = self.accepted_tokens = 0

    @property
    def strata(self) -> list[Stratum]:
        """What was drawn so far."""
        return [Stratum(plain, ours) for plain, ours in self._outputs]

    def draw(self, samples: int, advance: Advance | None = None) -> list[Stratum]:
        """Draw on, until there are ``samples`` of each kind for each prompt."""
        done = sum(len(outputs) for sides in self._outputs for outputs in sides)
        total = 2 * samples * len(self._outputs)
        # In turns, so that an audit that is broken off has spent its time on both.
        wanted = [
            (prompt, plain)
            for prompt, (_, ours) in enumerate(self._outputs)
            for _ in range(len(ours), samples)
            for plain in (True, False)
        ]
        draws = [Draw(*one, self._seed + done + i) for i, one in enumerate(wanted)]
        for draw, drawn in zip(draws, self._drawing(draws), strict=True):
            plain, ours = self._outputs[draw.prompt]
            (plain if draw.plain else ours).append(drawn.token_ids)
            self.drafted_tokens += drawn.drafted
            self.accepted_tokens += drawn.accepted
            done += 1
            if advance:
                advance(done, total)
        return self.strata


def audit_samples(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samples: int,
    *,
    seed: int,
    request: dict[str, Any],
    alpha: float = 1e-3,
    looks: int = 1,
    advance: Advance | None = None,
    drawing: Drawing | None = None,
) -> Report:
    """Draw samples of both kinds and compare their laws; parameters as in ``Samples``.

    With several looks the audit stops at the first that is not short of samples. They come at
    samples / 2^(looks − 1), ..., samples / 2, samples outputs, and each tests at alpha / looks:
    by the union bound the probability of a false alarm at any of them stays below alpha, however
    the looks depend on each other. Stopping at *consistent* costs nothing, since power is told
    at the level of the look.

    Parameters
    ----------
    samples
        Outputs of each kind for each prompt, at most.
    looks
        How often to test.

    Raises
    ------
    UsageError
        When there are fewer than one sample or look, or alpha is not between 0 and 1.
    """
    if samples < 1 or looks < 1 or not 0 < alpha < 1:
        raise UsageError(
            f"An audit needs at least one sample and look and an alpha between 0 and 1; got "
            f"{samples} samples, {looks} looks and {alpha}."
        )
    drawn = Samples(engine, prompts, seed=seed, request=request, drawing=drawing)
    sizes = sorted({math.ceil(samples / 2**i) for i in range(looks)})
    level = alpha / len(sizes)
    seen: list[Look] = []
    for size in sizes:
        report = compare(drawn.draw(size, advance), alpha=level)
        seen.append(Look(size, level, report.verdict))
        if report.verdict != "not enough samples":
            break
    return replace(
        report,
        alpha=alpha,
        looks=tuple(seen),
        drafted_tokens=drawn.drafted_tokens,
        accepted_tokens=drawn.accepted_tokens,
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an output first differs from plain decoding's on the same seed.

    Parameters
    ----------
    prompt, seed, position
        Which prompt, seed, and token of the output, all counted from 0.
    plain_token, token
        What came; ``None`` where that output had ended already.
    top_2_gap
        Difference of the two highest plain logits there.
    pair_gap
        Plain logit of ``plain_token`` less that of ``token``; ``None`` where one is missing.
    near_tie
        Whether moving these two logits towards each other by the threshold in all explains it.
    """

    prompt: int
    seed: int
    position: int
    plain_token: int | None
    token: int | None
    top_2_gap: float
    pair_gap: float | None
    near_tie: bool


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What a comparison token by token found.

    Parameters
    ----------
    verdict
        ``different`` if a difference is no near-tie; else ``not enough samples`` if fewer than
        ``needed`` outputs were compared; else ``consistent``.
    compared, compared_tokens
        Outputs, and tokens in them.
    threshold
        Of near-ties, in logits.
    needed
        Outputs to compare before a fault that touches 5 % of them is seen with probability
        ``ENOUGH_POWER``; ``None`` if so many were compared, and under ``greedy``, where a
        prompt has one output and chance plays no part.
    differences
        The first one of each output that has any.
    drafted_tokens, accepted_tokens
        In all outputs with a draft.
    """

    verdict: Literal["consistent", "different", "not enough samples"]
    compared: int
    compared_tokens: int
    threshold: float
    needed: int | None
    differences: tuple[Difference, ...]
    drafted_tokens: int
    accepted_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"method": "tokens", **asdict(self)}


def outputs_needed(share: float = BIASES[-1]) -> int:
    """Outputs that show a fault which touches a share of them, with ``ENOUGH_POWER``.

    The least n with 1 - (1 - share)^n >= ``ENOUGH_POWER``.

    >>> outputs_needed(0.05)
    32
    """
    n = 1
    while 1 - (1 - share) ** n < ENOUGH_POWER:
        n += 1
    return n


@dataclass(frozen=True, slots=True)
class Pair:
    """One seed to decode both ways."""

    prompt: int
    seed: int


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of it: the plain output's length, drafts, and the first difference."""

    tokens: int
    drafted: int
    accepted: int
    difference: Difference | None


Comparing = Callable[[Sequence[Pair]], Iterator[Compared]]
"""Decodes both ways and compares, and gives out what it found in order."""


class Comparer:
    """Decodes both ways one after the other; parameters as in ``audit_tokens``."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        request: dict[str, Any],
        near_tie: float = NEAR_TIE,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._request = request
        self._near_tie = near_tie

    def __call__(self, pairs: Sequence[Pair]) -> Iterator[Compared]:
        """What is found for each pair, in order."""
        for pair in pairs:
            prompt = self._prompts[pair.prompt]
            plain, ours = (
                self._engine.generate(prompt, seed=pair.seed, plain=side, **self._request)
                for side in (True, False)
            )
            found = None
            if plain.token_ids != ours.token_ids:
                found = _locate(
                    self._engine,
                    prompt,
                    plain.token_ids,
                    ours.token_ids,
                    pair.prompt,
                    pair.seed,
                    _sampling(self._request),
                    self._request,
                    self._near_tie,
                )
            rounds = ours.trace.rounds
            yield Compared(
                len(plain.token_ids),
                sum(r.drafted for r in rounds),
                sum(r.accepted for r in rounds),
                found,
            )


def audit_tokens(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samples: int,
    *,
    seed: int,
    request: dict[str, Any],
    near_tie: float = NEAR_TIE,
    advance: Advance | None = None,
    comparing: Comparing | None = None,
) -> TokenReport:
    """Decode with the same seeds both ways and compare the tokens.

    For ``coupled`` and ``greedy``. Under ``greedy`` each prompt is decoded once. Parameters as
    in ``Samples``; ``near_tie`` is the threshold in logits, ``comparing`` who decodes in place of
    the engine.

    Raises
    ------
    UsageError
        When there are fewer than one sample.
    """
    if samples < 1:
        raise UsageError(f"An audit needs at least one sample; got {samples}.")
    greedy = _sampling(request).greedy
    each = 1 if greedy else samples
    pairs = [Pair(i // each, seed + i) for i in range(each * len(prompts))]
    found: list[Compared] = []
    for one in (comparing or Comparer(engine, prompts, request, near_tie))(pairs):
        found.append(one)
        if advance:
            advance(len(found), len(pairs))
    differences = tuple(one.difference for one in found if one.difference is not None)
    needed = outputs_needed()
    short = not greedy and len(found) < needed
    verdict: Literal["consistent", "different", "not enough samples"] = (
        "not enough samples" if short else "consistent"
    )
    if any(not difference.near_tie for difference in differences):
        verdict = "different"
    return TokenReport(
        verdict,
        len(found),
        sum(one.tokens for one in found),
        near_tie,
        needed if short else None,
        differences,
        sum(one.drafted for one in found),
        sum(one.accepted for one in found),
    )


def _sampling(request: dict[str, Any]) -> Sampling:
    return Sampling(**{k: v for k, v in request.items() if k in Sampling.__dataclass_fields__})


def _locate(
    engine: Engine,
    prompt: Sequence[int],
    plain: list[int],
    ours: list[int],
    number: int,
    seed: int,
    sampling: Sampling,
    request: dict[str, Any],
    near_tie: float,
) -> Difference:
    """The first difference, and whether the plain logits there make it a near-tie."""
    both = min(len(plain), len(ours))
    at = next((i for i in range(both) if plain[i] != ours[i]), both)
    context = [*prompt, *plain[:at]]
    cache = engine.model.new_cache(len(context))
    engine.model.prefill(cache, context[:-1], None)
    row: Float[Tensor, " V"] = engine.model.score(cache, context[-1:], Proposal())[0].double().cpu()
    top = torch.topk(row, min(2, len(row))).values
    top_2_gap = float(top[0] - top[-1])
    if at == both:  # one output is the other's beginning: no arithmetic explains that
        ended = (plain[at] if at < len(plain) else None, ours[at] if at < len(ours) else None)
        return Difference(number, seed, at, *ended, top_2_gap, None, False)
    a, b = plain[at], ours[at]
    eos = engine.tokenizer.eos_token_ids if engine.tokenizer else frozenset()
    if request.get("ignore_eos"):
        eos = frozenset()
    law = sampling.law(eos | frozenset(request.get("stop_token_ids", ())), len(row))
    tilted = row.clone()
    tilted[a] -= near_tie / 2
    tilted[b] += near_tie / 2
    p = law(Context(context, len(prompt)), tilted)
    token = SeededChooser(seed).draw(p, Place(at, "target"))
    return Difference(number, seed, at, a, b, top_2_gap, float(row[a] - row[b]), token == b)
