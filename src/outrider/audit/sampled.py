"""Audits of real models: samples of both kinds, or token by token where tokens must be equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    "Difference",
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


class Samples:
    """Outputs of both kinds for each prompt, every one on a seed of its own.

    The prompt's cache is kept from one output to the next, as in a conversation.

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
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        request: dict[str, Any],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._seed = seed
        self._request = request
        self._sides = [(_Side(plain=True), _Side(plain=False)) for _ in prompts]
        self.drafted_tokens = self.accepted_tokens = 0

    @property
    def strata(self) -> list[Stratum]:
        """What was drawn so far."""
        return [Stratum(plain.outputs, ours.outputs) for plain, ours in self._sides]

    def draw(self, samples: int, advance: Advance | None = None) -> list[Stratum]:
        """Draw on, until there are ``samples`` of each kind for each prompt."""
        done = sum(len(side.outputs) for sides in self._sides for side in sides)
        total = 2 * samples * len(self._prompts)
        for prompt, sides in zip(self._prompts, self._sides, strict=True):
            # In turns, so that an audit that is broken off has spent its time on both.
            while len(sides[-1].outputs) < samples:
                for side in sides:
                    generation = self._engine.stream(
                        prompt,
                        seed=self._seed + done,
                        plain=side.plain,
                        prefix=side.prefix,
                        **self._request,
                    )
                    side.outputs.append(generation.output.token_ids)
                    self.drafted_tokens += sum(r.drafted for r in generation.trace.rounds)
                    self.accepted_tokens += sum(r.accepted for r in generation.trace.rounds)
                    side.prefix.keep(generation.session)
                    done += 1
                    if advance:
                        advance(done, total)
        return self.strata


@dataclass(slots=True)
class _Side:
    plain: bool
    prefix: Prefix = field(default_factory=Prefix)
    outputs: list[list[int]] = field(default_factory=list)


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
    drawn = Samples(engine, prompts, seed=seed, request=request)
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


def audit_tokens(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samples: int,
    *,
    seed: int,
    request: dict[str, Any],
    near_tie: float = NEAR_TIE,
    advance: Advance | None = None,
) -> TokenReport:
    """Decode with the same seeds both ways and compare the tokens.

    For ``coupled`` and ``greedy``. Under ``greedy`` each prompt is decoded once. Parameters as
    in ``Samples``; ``near_tie`` is the threshold in logits.

    Raises
    ------
    UsageError
        When there are fewer than one sample.
    """
    if samples < 1:
        raise UsageError(f"An audit needs at least one sample; got {samples}.")
    sampling = Sampling(**{k: v for k, v in request.items() if k in Sampling.__dataclass_fields__})
    each = 1 if sampling.greedy else samples
    differences: list[Difference] = []
    done = tokens = drafted = accepted = 0
    for number, prompt in enumerate(prompts):
        for _ in range(each):
            both = [
                engine.generate(prompt, seed=seed + done, plain=side, **request)
                for side in (True, False)
            ]
            plain, ours = (output.token_ids for output in both)
            drafted += sum(r.drafted for r in both[-1].trace.rounds)
            accepted += sum(r.accepted for r in both[-1].trace.rounds)
            tokens += len(plain)
            if plain != ours:
                differences.append(
                    _locate(
                        engine,
                        prompt,
                        plain,
                        ours,
                        number,
                        seed + done,
                        sampling,
                        request,
                        near_tie,
                    )
                )
            done += 1
            if advance:
                advance(done, each * len(prompts))
    needed = outputs_needed()
    short = not sampling.greedy and done < needed
    verdict: Literal["consistent", "different", "not enough samples"] = (
        "not enough samples" if short else "consistent"
    )
    if any(not difference.near_tie for difference in differences):
        verdict = "different"
    return TokenReport(
        verdict,
        done,
        tokens,
        near_tie,
        needed if short else None,
        tuple(differences),
        drafted,
        accepted,
    )


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
