"""Exact laws of whole outputs: of the production code, by enumeration, and of the chain rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.audit.remembered import remembering
from outrider.core.chooser import Chooser, SeededChooser, enumerate_outcomes
from outrider.core.processors import Context, Law, Sampling
from outrider.core.proposal import Proposal
from outrider.core.trace import Trace
from outrider.drafters.beside import begin, new_cache
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation, Output
from outrider.engine.round import Session
from outrider.engine.transcript import Transcript
from outrider.errors import UsageError
from outrider.models.toy import ToyModel
from outrider.policies.fixed import Fixed
from outrider.protocols import Drafter, Model, Policy, Rule

__all__ = [
    "COURSES",
    "LIMIT",
    "OUTPUTS",
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
"""Most possible outputs of a toy, vocabulary ** max_tokens, that ``audit_exact`` walks."""

OUTPUTS = 1000
"""Most possible outputs of one prompt that are walked on any other model: each takes up to a pass
of the target, some 50 ms of ``smollm2-135m`` on two busy cores."""

COURSES = 6000
"""Most courses of chance, over all prompts, that are walked on any other model: a minute or two."""

_DRAWN = 40  # outputs that a picture shows, for each prompt
_LOST = 1e-9  # of probability, by rounding in a sum over all courses
_STEPS = 1000  # of progress, for each prompt

_FEWER = (
    "Use a smaller --top-k, --top-p or --temperature or fewer --max-tokens, or draw samples "
    "(without --enumerate)."
)


def exact_law(
    target: Model,
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
    start: Callable[[], Generation],
    on_course: Callable[[Trace], None] | None = None,
    seen: Callable[[float], None] = lambda share: None,
) -> Outputs:
    """The law of a generation's output, every course of its chance walked.

    ``seen`` hears after each course what probability those walked so far have together.
    """

    def program(chooser: Chooser) -> Output:
        generation = start()
        generation.session.chooser = chooser
        return generation.output

    outputs: Outputs = defaultdict(float)
    share = 0.0
    for output, weight in enumerate_outcomes(program):
        outputs[tuple(output.token_ids)] += weight
        if on_course:
            on_course(output.trace)
        seen(share := share + weight)
    return dict(outputs)


def chain_law(
    target: Model,
    *,
    max_tokens: int,
    law: Law | None = None,
    end_ids: frozenset[int] = frozenset(),
    stopped: Callable[[Sequence[int]], bool] = lambda output: False,
    prompt: Sequence[int] = (0,),
    most: int | None = None,
) -> Outputs:
    """The law of plain decoding, straight from the chain rule, without the engine's loop.

    P(x_1 ... x_n) = prod_i p(x_i | prompt, x_1 ... x_{i-1}), down to an end token, to an output
    that is ``stopped``, or to ``max_tokens``. The logits of each context come from a pass of its
    own over a fresh cache. Other parameters as in ``exact_law``.

    Raises
    ------
    UsageError
        When there are more than ``most`` possible outputs.
    """
    law = law or Law()
    outputs: Outputs = {}
    growing: Outputs = {(): 1.0}
    for reached in range(1, max_tokens + 1):
        longer: Outputs = {}
        for output, weight in growing.items():
            tokens = [*prompt, *output]
            p = law(Context(tokens, len(prompt)), _logits(target, tokens))
            for token, probability in zip(p.ids.tolist(), p.probs.tolist(), strict=True):
                grown = (*output, token)
                ended = len(grown) == max_tokens or token in end_ids or stopped(grown)
                (outputs if ended else longer)[grown] = weight * probability
            if most is not None and (count := len(outputs) + len(longer)) > most:
                raise UsageError(
                    f"More than {most} outputs are possible: {count} were reached at token "
                    f"{reached} of {max_tokens}.",
                    hint=_FEWER,
                )
        growing = longer
    return outputs


def _logits(target: Model, tokens: Sequence[int]) -> Float[Tensor, " V"]:
    """Of the token after a context."""
    if isinstance(target, ToyModel):  # its laws themselves, without its cache
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(target.next(tokens)))
    cache = target.new_cache(len(tokens))
    target.prefill(cache, tokens[:-1], None)
    return target.score(cache, tokens[-1:], Proposal())[0]


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
    target
        The model's name.
    remembered
        Whether its contexts were scored once and remembered, so that its own cache had no part.
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
    target: str = ""
    remembered: bool = False

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
        } | ({"remembered": True} if self.remembered else {})


def audit_exact(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop_token_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    advance: Callable[[int, int], None] | None = None,
) -> ExactReport:
    """Compare the exact law of an engine's outputs with the chain rule's.

    Every course of chance of ``Engine.stream`` itself is walked. The chain rule has the logits of
    each context from one plain pass; on a model that is no toy they are remembered, and the walk
    is given the same, so that what is compared is all but the model's own cache.

    Parameters
    ----------
    engine
        Its drafter, rule and draft length are audited. A target that is neither a toy nor
        ``Remembered`` is wrapped in ``Remembered`` here.
    prompts
        Token ids.
    max_tokens, sampling, stop_token_ids, stop
        The request.
    advance
        Called with how much is done and how much there is to do.

    Raises
    ------
    UsageError
        When the drafter runs layers of the target on its cache. When there is too much to walk:
        more than ``LIMIT`` possible outputs of a toy; of any other model more than ``OUTPUTS`` of
        one prompt, or ``COURSES`` of chance over all prompts. When draft and target draw among more
        than ``core.race.MOST`` tokens on one noise. When the drafter changes from course to course.
    RollbackError
        When the target's cache does not roll back by length.

    Example
    -------
    >>> from outrider.audit.remembered import Remembered
    >>> model = Remembered(ToyModel.random(30, seed=1))
    >>> few = Sampling(temperature=1.0, top_k=2)
    >>> engine = Engine(model, rule="rejection")
    >>> audit_exact(engine, [[0, 1, 0]], max_tokens=2, sampling=few).verdict
    'consistent'
    """
    toy = isinstance(engine.model, ToyModel)
    if not toy:
        engine = remembering(engine)
    target = engine.model
    if toy and (size := target.vocab_size**max_tokens) > LIMIT:
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

    courses = drafted = number = 0
    share = 0.0
    compared: list[list[Outcome]] = []

    def count(trace: Trace) -> None:
        nonlocal courses, drafted
        if not toy and courses == COURSES:
            raise UsageError(
                f"More than {COURSES} courses of chance: at prompt {number + 1} of {len(prompts)} "
                f"those walked so far have a probability of {share:.2g} together.",
                hint=_FEWER,
            )
        courses += 1
        drafted += sum(round_.drafted for round_ in trace.rounds)

    def seen(walked: float) -> None:
        nonlocal share
        share = walked
        if advance:
            advance(round(_STEPS * (number + walked)), _STEPS * len(prompts))

    facts: dict[str, Any] = {"target": target.name, "remembered": not toy}
    for number, prompt in enumerate(prompts):
        share = 0.0
        try:
            wanted = chain_law(
                target, max_tokens=max_tokens, law=law, end_ids=ends, stopped=stopped,
                prompt=prompt, most=None if toy else OUTPUTS,
            )  # fmt: skip
        except UsageError as error:
            raise UsageError(f"Prompt {number + 1}: {error.problem}", hint=error.hint) from error
        start = partial(engine.stream, prompt, seed=0, **request)
        try:
            made = _walk(start, count, seen)
        except AssertionError as error:
            outputs = sum(map(len, compared))
            return ExactReport(
                "different", None, None, courses, outputs, broken=str(error), **facts
            )
        if abs(share - 1) > _LOST:
            raise UsageError(
                f"Prompt {number + 1}: the courses of chance have a probability of {share:.6g} "
                "together, not 1, so something besides chance changes from one to the next.",
                hint="Use a drafter that keeps nothing of earlier requests.",
            )
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
        **facts,
    )
