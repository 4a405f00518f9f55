"""The loop that fits a draft: batches, steps, checkpoints, a validation that means something."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.errors import UsageError
from outrider.train.data import Example
from outrider.train.eagle import Batch

__all__ = ["Fit", "Progress", "TrainOptions", "Validation", "head_fit", "train", "validate"]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a draft is fitted.

    Parameters
    ----------
    epochs
        Passes over the data.
    unrolled
        Of its own steps that a head is trained through; steps ahead at which a draft is judged.
    batch_tokens
        Tokens of a batch, about.
    window
        Longest stretch of a sequence in a batch.
    rate, warmup
        Highest learning rate, and the share of all steps on the way up to it; down by a cosine.
    decay
        Weight decay.
    discount
        Weight of each further unrolled step.
    share
        Of positions whose further steps are judged, drawn anew in each batch.
    context
        Tokens of the prompt that are fed before an answer.
    variation
        Weight of the total variation beside the divergence, where a language model is fitted.
    seed
        Of the order of batches.
    products
        ``float32``, or ``bfloat16`` for factors that are rounded to it before they are multiplied;
        sums and weights stay float32. On processors that multiply bfloat16 it is twice as fast.
    """

    epochs: float = 2.0
    unrolled: int = 3
    batch_tokens: int = 2048
    window: int = 256
    rate: float = 1e-3
    warmup: float = 0.05
    decay: float = 0.01
    discount: float = 0.8
    share: float = 0.5
    context: int = 32
    variation: float = 1.0
    seed: int = 0
    products: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, slots=True)
class Validation:
    """How good a draft is on text that it was not trained on.

    Parameters
    ----------
    acceptance
        1 - TV of the draft's law and the target's at each step, given that the steps before were
        right: the chance that a sampled draft stands.
    greedy
        How often both have the same best token, at each step.
    best_four
        How often the target's best token is among the draft's four best.
    coverage
        Share of the text's tokens that are in the draft vocabulary; the rates count the others as
        rejected.
    """

    acceptance: list[float]
    greedy: list[float]
    best_four: list[float]
    coverage: float

    @property
    def tokens_per_call(self) -> float:
        """Of a greedy chain as long as the validated steps: 1 + sum of products of ``greedy``."""
        return _tokens(self.greedy)

    @property
    def tree_tokens_per_call(self) -> float:
        """The same of a tree with four siblings everywhere."""
        return _tokens(self.best_four)


def _tokens(rates: Sequence[float]) -> float:
    total = chance = 1.0
    for rate in rates:
        chance *= rate
        total += chance
    return total


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands, for a reader."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    validation: Validation | None = None


def batches(
    examples: Sequence[Example], options: TrainOptions, epoch: int
) -> Iterator[list[Example]]:
    """Examples of like length together, in an order that depends on the epoch alone."""
    chance = random.Random(f"{options.seed}/{epoch}")
    windows = list(_windows(examples, options))
    # Sorted with some chance, so that padding is little and company differs from epoch to epoch.
    windows.sort(key=lambda one: len(one.hidden) * chance.uniform(0.8, 1.25))
    made: list[list[Example]] = []
    held: list[Example] = []
    longest = 0
    for one in windows:
        longest = max(longest, len(one.hidden))
        if held and longest * (len(held) + 1) > options.batch_tokens:
            made.append(held)
            held, longest = [], len(one.hidden)
        held.append(one)
    if held:
        made.append(held)
    chance.shuffle(made)
    yield from made


def _windows(examples: Sequence[Example], options: TrainOptions) -> Iterator[Example]:
    """Answers with the end of their prompts, in stretches."""
    for one in examples:
        rows = len(one.hidden)
        for start in range(max(0, one.prompt_length - options.context), rows, options.window):
            end = min(rows, start + options.window)
            if end - start > options.unrolled:
                prompt = max(0, one.prompt_length - start)
                yield Example(one.tokens[start : end + 1], prompt, one.hidden[start:end])


def collate(examples: Sequence[Example]) -> Batch:
    """Side by side, padded with zeros."""
    longest = max(len(one.hidden) for one in examples)
    tokens = torch.zeros(len(examples), longest + 1, dtype=torch.long)
    hidden = torch.zeros(len(examples), longest, examples[0].hidden.shape[1])
    for row, one in enumerate(examples):
        tokens[row, : len(one.tokens)] = one.tokens
        hidden[row, : len(one.hidden)] = one.hidden.float()
    lengths, prompts = (
        torch.tensor(counts)
        for counts in zip(*((len(one.hidden), one.prompt_length) for one in examples), strict=True)
    )
    return Batch(tokens, hidden, lengths, prompts)


Judged = Callable[[Batch, float], list[tuple[Tensor, Tensor]]]
"""From a batch, and the share of its rows to judge after the first step, to the head's logits and
the target's for each step ahead."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A draft that is being fitted.

    Parameters
    ----------
    module
        Its weights.
    loss
        What they are to make small on a batch.
    steps
        From a batch to parts of how it does: a step ahead, from 0, with the draft's logits and the
        target's where a chain goes on so far.
    count
        Of these steps.
    ids
        Tokens that it can propose.
    """

    module: nn.Module
    loss: Callable[[Batch], Tensor]
    steps: Callable[[Batch], Iterable[tuple[int, Tensor, Tensor]]]
    count: int
    ids: Int64[Tensor, " draft_vocab"]


def head_fit(module: Any, judged: Judged, count: int, options: TrainOptions) -> Fit:
    """A head, trained through all of its steps at once."""

    def steps(batch: Batch) -> Iterator[tuple[int, Tensor, Tensor]]:
        for step, (mine, wanted) in enumerate(judged(batch, 1.0)):
            yield step, mine, wanted

    def loss(batch: Batch) -> Tensor:
        return _loss(judged(batch, options.share), options.discount)

    return Fit(module, loss, steps, count, module.ids)


def train(
    fit: Fit,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    folder: Path,
    options: TrainOptions,
    report: Callable[[Progress], None] | None = None,
    *,
    identity: Mapping[str, Any] | None = None,
    every: int = 100,
    deadline_s: float = math.inf,
) -> Validation:
    """Fit a draft, going on from the folder's checkpoint if there is one; what it is worth.

    Parameters
    ----------
    fit
        Its weights, and how they do on a batch.
    identity
        What else a checkpoint must be of.
    every
        Steps between validations and checkpoints.
    deadline_s
        Seconds after which training stops as if its steps were all done but not cooled down; what
        was reached is kept, and a later call goes on.

    Raises
    ------
    UsageError
        When the checkpoint is of other options.
    """
    plan = [(epoch, batch) for epoch in range(math.ceil(options.epochs))
            for batch in batches(examples, options, epoch)]  # fmt: skip
    steps = max(1, int(len(plan) * options.epochs / math.ceil(options.epochs)))
    module = fit.module
    told = asdict(options) | dict(identity or {})
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=options.rate, weight_decay=options.decay, betas=(0.9, 0.95)
    )
    start = _resume(module, optimizer, folder, told)
    began, fed = time.monotonic(), 0
    losses: list[float] = []
    checked: Validation | None = None
    for step in range(start, steps):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * _schedule(step, steps, options.warmup)
        batch = collate(plan[step][1])
        optimizer.zero_grad(set_to_none=True)
        with _products(options.products):
            loss = fit.loss(batch)
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        fed += int(batch.lengths.sum())
        late = time.monotonic() - began > deadline_s
        if (step + 1) % every == 0 or step + 1 == steps or late:
            _checkpoint(module, optimizer, folder, told, step + 1)
            checked = validate(fit, held_out, options)
            if report is not None:
                speed = fed / (time.monotonic() - began)
                recent = losses[-every:]
                report(Progress(step + 1, steps, sum(recent) / len(recent), speed, checked))
        if late:
            break
    return checked or validate(fit, held_out, options)


@contextmanager
def _products(kind: str) -> Iterator[None]:
    backend: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = backend.fp32_precision
    backend.fp32_precision = "bf16" if kind == "bfloat16" else before
    try:
        yield
    finally:
        backend.fp32_precision = before


def _schedule(step: int, steps: int, warmup: float) -> float:
    up = max(1, int(steps * warmup))
    if step < up:
        return (step + 1) / up
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - up) / max(1, steps - up)))


def _loss(
    found: Sequence[tuple[Float[Tensor, "rows V"], Float[Tensor, "rows V"]]], discount: float
) -> Tensor:
    """Cross-entropy with the target's law over the draft vocabulary, step by step."""
    total = torch.zeros(())
    for step, (mine, wanted) in enumerate(found):
        part = -(torch.softmax(wanted, -1) * torch.log_softmax(mine, -1)).sum(-1).mean()
        total = total + discount**step * part
    return total


@torch.no_grad()
def validate(fit: Fit, examples: Sequence[Example], options: TrainOptions) -> Validation:
    """Acceptance on held-out text, at each step ahead."""
    windows = list(_windows(examples, options))
    if not windows:
        raise UsageError(
            "No held-out answer is long enough to judge a draft by.",
            hint="Give more prompts, or allow longer answers.",
        )
    sums, counts = torch.zeros(3, fit.count), torch.zeros(fit.count)
    for one in windows:
        for step, mine, wanted in fit.steps(collate([one])):
            p, q = torch.softmax(wanted, -1), torch.softmax(mine, -1)
            best = wanted.argmax(-1)
            top = mine.topk(4, -1).indices
            sums[0, step] += torch.minimum(p, q).sum()
            sums[1, step] += (top[:, 0] == best).sum()
            sums[2, step] += (top == best[:, None]).any(-1).sum()
            counts[step] += len(best)
    coverage = _coverage(fit.ids, windows)
    rates = (coverage * sums / counts.clamp_min(1)).tolist()
    acceptance, greedy, best_four = rates
    return Validation(acceptance, greedy, best_four, coverage)


def _coverage(ids: Int64[Tensor, " draft_vocab"], examples: Sequence[Example]) -> float:
    """Share of the tokens that the draft can propose at all."""
    known = torch.isin(torch.cat([one.tokens for one in examples]), ids)
    return float(known.float().mean())


def _checkpoint(
    module: nn.Module, optimizer: Any, folder: Path, told: Mapping[str, Any], step: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Parameters and not the state, in which those that are shared come twice.
    state = {f"module.{name}": value.detach() for name, value in module.named_parameters()}
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        for name, value in optimizer.state[p].items():
            state[f"optimizer.{i}.{name}"] = torch.as_tensor(value)
    part = folder / "checkpoint.part"
    save_file(
        {k: v.contiguous() for k, v in state.items()}, part,
        metadata={"step": str(step), "options": json.dumps(told)},
    )  # fmt: skip
    os.replace(part, folder / "checkpoint.safetensors")


@torch.no_grad()
def _resume(module: nn.Module, optimizer: Any, folder: Path, told: Mapping[str, Any]) -> int:
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return 0
    from safetensors import safe_open

    with safe_open(path, "pt") as stored:
        about = stored.metadata()
    if json.loads(about["options"]) != told:
        raise UsageError(
            f"'{path}' was made with other training options.",
            hint="Give another folder, or the same options.",
        )
    state = load_file(path)
    for name, value in module.named_parameters():
        value.copy_(state[f"module.{name}"])
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        prefix = f"optimizer.{i}."
        optimizer.state[p] = {
            k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)
        }
    return int(about["step"])
