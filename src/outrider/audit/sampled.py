"""Audits of real models: samples of both kinds, or token by token where tokens must be equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.audit.statistics import BIASES, ENOUGH_POWER, Report, Stratum, compare
from outrider.core.chooser import Place, SeededChooser
from outrider.core.processors import Context, Sampling
from outrider.core.proposal import Proposal
from outrider.engine.engine import Engine
from outrider.errors import UsageError

__all__ = [
    "NEAR_TIE",
    "Difference",
    "TokenReport",
    "audit_samples",
    "audit_tokens",
    "draw_samples",
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


def draw_samples(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samples: int,
    *,
    seed: int,
    request: dict[str, Any],
    advance: Advance | None = None,
) -> list[Stratum]:
    """Outputs of both kinds for each prompt, every one on a seed of its own.

    Parameters
    ----------
    engine
        Its drafter, rule and draft length are the configuration.
    prompts
        Token ids.
    samples
        Outputs of each kind for each prompt.
    seed
        The first; seeds count up from it.
    request
        ``max_tokens``, ``temperature`` and so on, as for ``Engine.generate``.
    """
    strata: list[Stratum] = []
    total, done = 2 * samples * len(prompts), 0
    for prompt in prompts:
        sides: tuple[list[list[int]], list[list[int]]] = ([], [])
        # In turns, so that an audit that is broken off has spent its time on both.
        for _ in range(samples):
            for side, plain in zip(sides, (True, False), strict=True):
                output = engine.generate(prompt, seed=seed + done, plain=plain, **request)
                side.append(output.token_ids)
                done += 1
                if advance:
                    advance(done, total)
        strata.append(Stratum(*sides))
    return strata


def audit_samples(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samples: int,
    *,
    seed: int,
    request: dict[str, Any],
    alpha: float = 1e-3,
    advance: Advance | None = None,
) -> Report:
    """Draw samples of both kinds and compare their laws; parameters as in ``draw_samples``.

    Raises
    ------
    UsageError
        When there are fewer than one sample, or alpha is not between 0 and 1.
    """
    if samples < 1 or not 0 < alpha < 1:
        raise UsageError(
            f"An audit needs at least one sample and an alpha between 0 and 1; got {samples} "
            f"samples and {alpha}."
        )
    strata = draw_samples(engine, prompts, samples, seed=seed, request=request, advance=advance)
    return compare(strata, alpha=alpha)


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
    """

    verdict: Literal["consistent", "different", "not enough samples"]
    compared: int
    compared_tokens: int
    threshold: float
    needed: int | None
    differences: tuple[Difference, ...]

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
    in ``draw_samples``; ``near_tie`` is the threshold in logits.

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
    done = tokens = 0
    for number, prompt in enumerate(prompts):
        for _ in range(each):
            plain, ours = (
                engine.generate(prompt, seed=seed + done, plain=side, **request).token_ids
                for side in (True, False)
            )
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
        verdict, done, tokens, near_tie, needed if short else None, tuple(differences)
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
