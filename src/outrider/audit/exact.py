"""Exact laws of whole outputs: of the production code, by enumeration, and of the chain rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from outrider.core.chooser import Chooser, SeededChooser, enumerate_outcomes
from outrider.core.processors import Context, Law, Sampling
from outrider.core.trace import Trace
from outrider.drafters.beside import begin, new_cache
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation, Output
from outrider.engine.round import Session
from outrider.engine.transcript import Transcript
from outrider.errors import UsageError
from outrider.models.toy import ToyModel
from outrider.policies.fixed import Fixed
from outrider.protocols import Drafter, Policy, Rule

__all__ = [
    "LIMIT",
    "TOLERANCE",
    "ExactReport",
    "Outcome",
    "Outputs",
    "audit_exact",
    "chain_law",
    "exact_law",
    "largest_difference",
]

Outputs = dict[tuple[int, ...], float]
"""The probability of each whole output."""

TOLERANCE = 1e-12
"""Largest absolute difference of two probabilities that counts as rounding (float64)."""

LIMIT = 256
"""Most possible outputs, vocabulary ** max_tokens, that ``audit_exact`` walks."""

_DRAWN = 40  # outputs that a picture shows, for each prompt


def exact_law(
    target: ToyModel,
    drafter: Drafter,
    rule: Rule,
    *,
    max_tokens: int,
    draft_length: int = 2,
    law: Law | None = None,
    end_ids: frozenset[int] = frozenset(),
    prompt: Sequence[int] = (0,),
    policy: Callable[[], Policy] | None = None,
    on_course: Callable[[Trace], None] | None = None,
) -> Outputs:
    """The law of the production code's output, every course of chance walked.

    Parameters
    ----------
    target, drafter, rule
        The configuration; all its chance must come from the chooser.
    max_tokens, end_ids
        Where an output ends.
    draft_length, policy
        A fixed draft length, or what makes a policy for each course.
    law
        From logits to p; by default nothing lies between them.
    prompt
        Token ids before the output.
    on_course
        Called once for each course, with its trace.

    Raises
    ------
    AssertionError
        When noise is used twice at one place.

    Example
    -------
    >>> from outrider.drafters.script import ScriptDrafter
    >>> from outrider.rules.rejection import Rejection
    >>> target = ToyModel.random(2, seed=1)
    >>> made = exact_law(target, ScriptDrafter([1, 1]), Rejection(), max_tokens=2)
    >>> largest_difference(made, chain_law(target, max_tokens=2)) <= TOLERANCE
    True
    """

    def start() -> Generation:
        limit = len(prompt) + max_tokens
        session = Session(
            model=target,
            cache=(cache := new_cache(target, drafter, limit)),
            draft=begin(drafter, prompt, limit, cache),
            rule=rule,
            policy=policy() if policy else Fixed(draft_length),
            law=law or Law(),
            chooser=SeededChooser(0),
            tokens=list(prompt),
            prompt_length=len(prompt),
            limit=limit,
        )
        ending = Transcript(None, max_tokens=max_tokens, eos_token_ids=end_ids)
        return Generation(session, ending)

    return _walk(start, on_course)


def _walk(
    start: Callable[[], Generation], on_course: Callable[[Trace], None] | None = None
) -> Outputs:
    """The law of a generation's output, every course of its chance walked."""

    def program(chooser: Chooser) -> Output:
        generation = start()
        generation.session.chooser = chooser
        return generation.output

    outputs: Outputs = defaultdict(float)
    for output, weight in enumerate_outcomes(program):
        outputs[tuple(output.token_ids)] += weight
        if on_course:
            on_course(output.trace)
    return dict(outputs)


def chain_law(
    target: ToyModel,
    *,
    max_tokens: int,
    law: Law | None = None,
    end_ids: frozenset[int] = frozenset(),
    stopped: Callable[[Sequence[int]], bool] = lambda output: False,
    prompt: Sequence[int] = (0,),
) -> Outputs:
    """The law of plain decoding, straight from the chain rule, without the engine's loop.

    P(x_1 ... x_n) = prod_i p(x_i | prompt, x_1 ... x_{i-1}), down to an end token, to an output
    that is ``stopped``, or to ``max_tokens``. Other parameters as in ``exact_law``.
    """
    law = law or Law()
    outputs: Outputs = {}

    def grow(output: tuple[int, ...], weight: float) -> None:
        ended = output and (output[-1] in end_ids or stopped(output))
        if len(output) == max_tokens or ended:
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


def largest_difference(a: Outputs, b: Outputs) -> float:
    """Largest absolute difference of the probabilities of one output.

    >>> largest_difference({(0,): 1.0}, {(0,): 0.75, (1,): 0.25})
    0.25
    """
    return max(abs(a.get(o, 0.0) - b.get(o, 0.0)) for o in {*a, *b})


class Outcome(NamedTuple):
    """One output and its probability in plain decoding and in the configuration."""

    prompt: int
    token_ids: tuple[int, ...]
    plain_probability: float
    speculative_probability: float

    @property
    def gap(self) -> float:
        """How far apart the two probabilities are."""
        return abs(self.speculative_probability - self.plain_probability)


@dataclass(frozen=True, slots=True)
class ExactReport:
    """What enumeration found.

    Parameters
    ----------
    verdict
        ``consistent`` if the laws differ nowhere by more than ``TOLERANCE``.
    largest_difference, total_variation
        Of the two laws of whole outputs; ``None`` if the walk broke off.
    courses, drafted_tokens
        Courses of chance that were walked, over all prompts, and tokens drafted in all of them.
    outputs
        Different outputs with a positive probability, over all prompts.
    worst
        The output whose probabilities differ most.
    broken
        Why the walk broke off, if it did: noise was used twice.
    laws
        The most probable outputs of each prompt, most probable first, to draw the laws from.
    """

    verdict: Literal["consistent", "different"]
    largest_difference: float | None
    total_variation: float | None
    courses: int
    outputs: int
    worst: Outcome | None = None
    broken: str = ""
    laws: tuple[Outcome, ...] = ()
    drafted_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "method": "enumeration",
            "verdict": self.verdict,
            "largest_difference": self.largest_difference,
            "total_variation": self.total_variation,
            "tolerance": TOLERANCE,
            "courses": self.courses,
            "drafted_tokens": self.drafted_tokens,
            "outputs": self.outputs,
            "worst": self.worst._asdict() if self.worst else None,
            "broken": self.broken,
            "laws": [outcome._asdict() for outcome in self.laws],
        }


def audit_exact(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop_token_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
) -> ExactReport:
    """Compare the exact law of an engine's outputs with the chain rule's.

    Every course of chance of ``Engine.stream`` itself is walked.

    Parameters
    ----------
    engine
        With a toy target; its drafter, rule and draft length are audited.
    prompts
        Token ids.
    max_tokens, sampling, stop_token_ids, stop
        The request.

    Raises
    ------
    UsageError
        When the target is not a toy, or when it has more than ``LIMIT`` possible outputs.
    """
    target = engine.model
    if not isinstance(target, ToyModel):
        raise UsageError(f"Only a toy model's law can be walked; '{target.name}' is none.")
    size = target.vocab_size**max_tokens
    if size > LIMIT:
        raise UsageError(
            f"{target.vocab_size} tokens and --max-tokens {max_tokens} make {size} outputs; at "
            f"most {LIMIT} are walked.",
            hint="Use a smaller vocabulary or fewer tokens, or draw samples with --sampled.",
        )
    eos = engine.tokenizer.eos_token_ids if engine.tokenizer else frozenset()
    ends = eos | frozenset(stop_token_ids)
    law = sampling.law(ends, target.vocab_size)
    request: dict[str, Any] = {
        **sampling.to_dict(),
        "max_tokens": max_tokens,
        "stop_token_ids": stop_token_ids,
        "stop": stop,
    }

    def stopped(output: Sequence[int]) -> bool:
        text = engine.tokenizer.decode(output) if engine.tokenizer and stop else ""
        return any(words in text for words in stop)

    courses = drafted = 0
    compared: list[list[Outcome]] = []

    def count(trace: Trace) -> None:
        nonlocal courses, drafted
        courses += 1
        drafted += sum(round_.drafted for round_ in trace.rounds)

    for number, prompt in enumerate(prompts):
        wanted = chain_law(
            target, max_tokens=max_tokens, law=law, end_ids=ends, stopped=stopped, prompt=prompt
        )
        try:
            made = _walk(partial(engine.stream, prompt, seed=0, **request), count)
        except AssertionError as error:
            outputs = sum(map(len, compared))
            return ExactReport("different", None, None, courses, outputs, broken=str(error))
        outcomes = [
            Outcome(number, o, wanted.get(o, 0.0), made.get(o, 0.0)) for o in {*made, *wanted}
        ]
        # By probability, then by tokens: the order must not depend on that of the walk.
        compared.append(sorted(outcomes, key=lambda o: (-o.plain_probability, o.token_ids)))
    worst = max((o for outcomes in compared for o in outcomes), key=lambda o: o.gap)
    return ExactReport(
        "consistent" if worst.gap <= TOLERANCE else "different",
        worst.gap,
        max(sum(o.gap for o in outcomes) / 2 for outcomes in compared),
        courses,
        sum(map(len, compared)),
        worst,
        laws=tuple(o for outcomes in compared for o in outcomes[:_DRAWN]),
        drafted_tokens=drafted,
    )
