"""Exact laws of whole outputs: of the production code, by enumeration, and of the chain rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from outrider.core.chooser import Chooser, Place, enumerate_outcomes
from outrider.core.processors import Context, Law
from outrider.engine.generation import Generation
from outrider.engine.round import Session
from outrider.engine.transcript import Transcript
from outrider.models.toy import ToyModel
from outrider.policies.fixed import Fixed
from outrider.protocols import Drafter, Policy, Rule

Outputs = dict[tuple[int, ...], float]


def speculative_law(
    target: ToyModel,
    drafter: Drafter,
    rule: Rule,
    *,
    max_tokens: int,
    draft_length: int = 2,
    law: Law | None = None,
    end_ids: frozenset[int] = frozenset(),
    prompt: tuple[int, ...] = (0,),
    policy: Callable[[], Policy] | None = None,
) -> Outputs:
    """The law of the production code's output, every course of chance walked."""

    def program(chooser: Chooser) -> tuple[int, ...]:
        limit = len(prompt) + max_tokens
        session = Session(
            model=target,
            cache=target.new_cache(limit),
            draft=drafter.start(prompt, limit),
            rule=rule,
            policy=policy() if policy else Fixed(draft_length),
            law=law or Law(),
            chooser=chooser,
            tokens=list(prompt),
            prompt_length=len(prompt),
            limit=limit,
        )
        ending = Transcript(None, max_tokens=max_tokens, eos_token_ids=end_ids)
        return tuple(Generation(session, ending).output.token_ids)

    outputs: Outputs = defaultdict(float)
    for output, weight in enumerate_outcomes(program):
        outputs[output] += weight
    return dict(outputs)


def chain_law(
    target: ToyModel,
    *,
    max_tokens: int,
    law: Law | None = None,
    end_ids: frozenset[int] = frozenset(),
    prompt: tuple[int, ...] = (0,),
) -> Outputs:
    """The law of plain decoding, straight from the chain rule, without the engine's loop."""
    law = law or Law()
    outputs: Outputs = {}

    def grow(output: tuple[int, ...], weight: float) -> None:
        if len(output) == max_tokens or (output and output[-1] in end_ids):
            outputs[output] = outputs.get(output, 0.0) + weight
            return
        tokens = [*prompt, *output]
        logits = torch.log(torch.from_numpy(target.next(tokens)))
        p = law(Context(tokens, len(prompt)), logits).to_dense()
        for token, probability in enumerate(p):
            if probability > 0:
                grow((*output, token), weight * float(probability))

    grow((), 1.0)
    return outputs


def distance(a: Outputs, b: Outputs) -> float:
    """Largest absolute difference of two laws."""
    return max(abs(a.get(o, 0.0) - b.get(o, 0.0)) for o in {*a, *b})


__all__ = ["Outputs", "Place", "chain_law", "distance", "speculative_law"]
