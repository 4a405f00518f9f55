"""Everything between logits and p: penalties, bias, temperature, top-k, top-p, min-p.

A processor is a function of the tokens before a position and that position's scores. It holds
no state, so it cannot count a rejected draft or count an accepted one twice: the engine calls
it with committed tokens plus the path to the node at hand, the same way for every node and for
the bonus token. Meaning and order follow transformers' ``generate``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.vectors import as_floats, log_sum_exp
from outrider.errors import NumericalError, SamplingError, UsageError

__all__ = ["Context", "Law", "Processor", "Sampling", "is_whole"]


@dataclass(frozen=True, slots=True)
class Context:
    """The tokens before a position: prompt, then committed output, then the path to the node."""

    tokens: Sequence[int]
    prompt_length: int

    @property
    def generated(self) -> Sequence[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]


_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""What float32 holds. Scores under values between these can still outgrow it, never float64."""

_NEAR = 1e6
"""With factors and terms within this, no scores of a sound model outgrow float32."""

Processor = Callable[[Context, Float[Tensor, " V"]], Float[Tensor, " V"]]
"""Scores of one position in, changed scores out; the input is never written to."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling values of one request.

    Parameters
    ----------
    temperature
        Scores are divided by it; 0 means the most probable token, always (ties: lowest id).
    top_k
        Keep the k highest scores and all that equal the k-th; 0 keeps all.
    top_p
        Keep the smallest set of most probable tokens whose probability reaches top_p.
    min_p
        Keep tokens at least min_p times as probable as the most probable one.
    repetition_penalty
        Scores of tokens seen in prompt or output are divided by it if positive, multiplied if
        negative; 1 changes nothing. Source: Keskar et al. 2019 (CTRL), section 4.1.
    presence_penalty, frequency_penalty
        Subtracted once from the score of a token that was generated, and once for each time.
    logit_bias
        Added to the score of each given token.
    min_tokens
        No end-of-sequence or stop token comes before so many tokens were generated.

    Raises
    ------
    SamplingError
        At construction, when a value is outside its range.

    Example
    -------
    >>> Sampling(temperature=0.7, top_p=0.9).greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name, low, high, wanted in (
            ("temperature", 0.0, _MOST, f"0 (greedy) or a number up to {_MOST:.3g}"),
            ("top_k", 0, math.inf, "a whole number; 0 keeps every token"),
            ("top_p", 0.0, 1.0, "a number above 0 and at most 1; 1 keeps every token"),
            ("min_p", 0.0, 1.0, "a number from 0 to 1; 0 keeps every token"),
            (
                "repetition_penalty",
                _LEAST,
                _MOST,
                f"a number from {_LEAST:.2g} to {_MOST:.2g}; 1 changes nothing",
            ),
            (
                "presence_penalty",
                -_MOST,
                _MOST,
                f"a number of at most {_MOST:.3g}, positive or negative; 0 changes nothing",
            ),
            (
                "frequency_penalty",
                -_MOST,
                _MOST,
                f"a number of at most {_MOST:.3g}, positive or negative; 0 changes nothing",
            ),
            ("min_tokens", 0, math.inf, "a whole number that is 0 or more"),
        ):
            value = getattr(self, name)
            good = (
                _is_number(value, whole=name in ("top_k", "min_tokens"))
                and low <= value <= high
                and (value > 0 or name != "top_p")
            )
            if not good:
                raise SamplingError(f"{name} must be {wanted}; got {value!r}.")
            if is_whole(value):  # numpy's integers are no JSON
                object.__setattr__(self, name, int(value))
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping):
            raise SamplingError(f"logit_bias must be a mapping; got {biases!r}.")
        for token, bias in biases.items():
            known = _is_number(token, whole=True) and token >= 0
            if not (known and _is_number(bias) and abs(bias) <= _MOST):
                raise SamplingError(
                    f"logit_bias must map token ids to numbers of at most {_MOST:.3g}, positive or "
                    f"negative; got {token!r}: {bias!r}."
                )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    def processors(self, end_ids: frozenset[int], vocab_size: int) -> list[Processor]:
        """The chain of processors that these values ask for, in transformers' order.

        Parameters
        ----------
        end_ids
            Tokens that end the output, held back until ``min_tokens`` were generated.
        vocab_size
            Number of tokens; a biased token beyond it is an error.
        """
        chain: list[Processor] = []
        if self.logit_bias:
            if (top := max(self.logit_bias)) >= vocab_size:
                raise SamplingError(
                    f"logit_bias names token {top}, but the vocabulary has {vocab_size} tokens."
                )
            chain.append(_bias(self.logit_bias))
        if self.repetition_penalty != 1.0:
            chain.append(_repetition(self.repetition_penalty))
        if self.presence_penalty or self.frequency_penalty:
            chain.append(_presence_frequency(self.presence_penalty, self.frequency_penalty))
        if self.min_tokens and end_ids:
            chain.append(_min_tokens(self.min_tokens, end_ids))
        if not self.greedy:
            if self.temperature != 1.0:
                chain.append(_temperature(self.temperature))
            if self.top_k:
                chain.append(_top_k(self.top_k))
            if self.top_p < 1.0:
                chain.append(_top_p(self.top_p))
            if self.min_p > 0.0:
                chain.append(_min_p(self.min_p))
        return chain

    def law(self, end_ids: frozenset[int], vocab_size: int, mask: Processor | None = None) -> Law:
        """From logits to p, under these values and perhaps a mask that comes before them."""
        factors = self.repetition_penalty, self.temperature or 1.0
        terms = self.presence_penalty, self.frequency_penalty, *(self.logit_bias or {}).values()
        near = all(1 / _NEAR <= f <= _NEAR for f in factors) and all(abs(t) <= _NEAR for t in terms)
        chain = self.processors(end_ids, vocab_size)
        of_ids = self.logit_bias or self.repetition_penalty != 1.0 or self.min_tokens or any(terms)
        return Law(chain, greedy=self.greedy, wide=not near, mask=mask, by_score=not of_ids)

    def to_dict(self) -> dict[str, object]:
        """The values by name, for records."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def is_whole(value: object) -> bool:
    """Whether a value is an integer of Python's or numpy's; ``True`` and ``False`` are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object, *, whole: bool = False) -> bool:
    """Whether a value is whole, or also a float."""
    return is_whole(value) or (not whole and isinstance(value, float))


class Law:
    """From one position's logits to its probabilities p, given the tokens before it.

    Parameters
    ----------
    processors
        Applied in order.
    greedy
        Whether p is all on the best token; of equal scores, the one with the lowest id.
    wide
        Whether to compute in float64, since the processors could outgrow float32.
    mask
        Applied before all others: tokens that a grammar forbids get minus infinity.
    by_score
        Whether the processors look at scores alone, not at which token has them.
    """

    def __init__(
        self,
        processors: Sequence[Processor] = (),
        *,
        greedy: bool = False,
        wide: bool = False,
        mask: Processor | None = None,
        by_score: bool = False,
    ) -> None:
        self.processors = tuple(processors)
        self.greedy = greedy
        self.wide = wide
        self.mask = mask
        self.by_score = by_score and mask is None

    def without_choice(self) -> Law:
        """The same law before the best token takes all."""
        return Law(self.processors, wide=self.wide, mask=self.mask)

    def of_draft(self, context: Context, logits: Float[Tensor, " V"]) -> Distribution:
        """q at one position: the same law of a draft's logits.

        Where a draft has none of the tokens that the mask leaves, since its vocabulary is smaller,
        or has come to where the mask cannot follow, it goes without: whatever it then proposes is
        refused.
        """
        if self.mask is not None and not self._leaves_some(context, logits):
            return Law(self.processors, greedy=self.greedy, wide=self.wide)(context, logits)
        return self(context, logits)

    def _leaves_some(self, context: Context, logits: Float[Tensor, " V"]) -> bool:
        assert self.mask is not None
        try:
            return bool(torch.isfinite(self.mask(context, logits)).any())
        except UsageError:
            return False

    def among(
        self,
        context: Context,
        ids: Int64[np.ndarray, " n"],
        logits: Float[np.ndarray, " n"],
        size: int,
    ) -> Distribution:
        """q at one position where a few of ``size`` tokens are all that could come.

        ``ids`` ascend.
        """
        if self.by_score:
            found = self(context, torch.from_numpy(logits))
            return Distribution(ids[found.ids], found.probs, size)
        all_logits = np.full(size, -math.inf, logits.dtype)
        all_logits[ids] = logits
        return self.of_draft(context, torch.from_numpy(all_logits))

    def __call__(self, context: Context, logits: Float[Tensor, " V"]) -> Distribution:
        """p at one position.

        Raises
        ------
        NumericalError
            When a logit is NaN or plus infinity, or when no token is left that could come.
        """
        scores = logits.double() if self.wide or logits.dtype == torch.float64 else logits.float()
        top, best = _best(scores)
        if not math.isfinite(top):
            raise NumericalError(
                f"The model's best logit at position {len(context.tokens)} is {top}; a finite "
                "number was expected.",
                hint="Try a wider dtype (float32), or check the model's weights.",
            )
        if self.processors or self.mask:
            if self.mask:
                scores = self.mask(context, scores)
            for processor in self.processors:
                scores = processor(context, scores)
            top, best = _best(scores)
            if not math.isfinite(top):
                raise NumericalError(
                    f"The processors left no token that could come at position "
                    f"{len(context.tokens)}.",
                    hint="Loosen logit_bias, min_tokens, the stop ids or the grammar.",
                )
        if self.greedy:
            return Distribution.one_hot(best, len(scores))
        return Distribution.softmax(scores)


def _best(scores: Float[Tensor, " V"]) -> tuple[float, int]:
    """The best score and where it is: the lowest id of several, or a NaN if there is one.

    numpy promises both of its argmax, and torch neither.
    """
    values = as_floats(scores)
    best = int(values.argmax())
    return float(values[best]), best


def _bias(bias: Mapping[int, float]) -> Processor:
    ids = torch.tensor(sorted(bias))
    values = torch.tensor([float(bias[int(i)]) for i in ids])

    def process(context: Context, scores: Tensor) -> Tensor:
        where = ids.to(scores.device)
        return scores.index_add(0, where, values.to(scores.device, scores.dtype))

    return process


def _repetition(penalty: float) -> Processor:
    def process(context: Context, scores: Tensor) -> Tensor:
        seen = torch.as_tensor(np.unique(np.asarray(context.tokens, dtype=np.int64)))
        seen = seen[seen < len(scores)].to(scores.device)
        old = scores[seen]
        return scores.index_copy(0, seen, torch.where(old < 0, old * penalty, old / penalty))

    return process


def _presence_frequency(presence: float, frequency: float) -> Processor:
    def process(context: Context, scores: Tensor) -> Tensor:
        if not len(context.generated):
            return scores
        ids, counts = np.unique(np.asarray(context.generated, dtype=np.int64), return_counts=True)
        off = torch.as_tensor(presence + frequency * counts).to(scores.device, scores.dtype)
        return scores.index_add(0, torch.as_tensor(ids).to(scores.device), -off)

    return process


def _min_tokens(least: int, end_ids: frozenset[int]) -> Processor:
    ends = torch.tensor(sorted(end_ids))

    def process(context: Context, scores: Tensor) -> Tensor:
        if len(context.generated) >= least:
            return scores
        here = ends[(ends >= 0) & (ends < len(scores))].to(scores.device)
        return scores.index_fill(0, here, -math.inf)

    return process


def _temperature(temperature: float) -> Processor:
    # Below 1e-30 the quotient overflows, and the law has long reached its limit.
    divisor = max(temperature, 1e-30)
    return lambda context, scores: scores / divisor


def _top_k(k: int) -> Processor:
    def process(context: Context, scores: Tensor) -> Tensor:
        least = torch.topk(scores, min(k, len(scores))).values[-1]
        return scores.masked_fill(scores < least, -math.inf)

    return process


def _top_p(p: float) -> Processor:
    def process(context: Context, scores: Tensor) -> Tensor:
        # The kept set is small as a rule: sort what is near the best score, and more only if
        # that does not reach p.
        top, _ = _best(scores)
        total = log_sum_exp(as_floats(scores), top)
        for margin in (8.0, 16.0, math.inf):
            near = (scores >= top - margin).nonzero()[:, 0]
            values, order = torch.sort(scores[near], descending=True, stable=True)
            mass = torch.exp(values.double() - total).cumsum(0)
            if float(mass[-1]) >= p:
                break
        # A token stays if the ones before it do not reach p: the first always does.
        kept = int((mass < p).sum()) + 1
        out = torch.full_like(scores, -math.inf)
        return out.index_copy(0, near[order[:kept]], values[:kept])

    return process


def _min_p(least: float) -> Processor:
    def process(context: Context, scores: Tensor) -> Tensor:
        return scores.masked_fill(scores < scores.max() + math.log(least), -math.inf)

    return process
