"""Training data: what the target itself writes, with the hidden states that it writes it from.

A folder of shards, each a safetensors file: ``tokens`` int32 [n], ``lengths`` and ``prompts``
int32 [sequences] (tokens of each sequence, and how many of them are its prompt), ``numbers`` (which
prompt each answers), and ``hidden`` bfloat16 [n - sequences, taps · d]: a row for each token but a
sequence's last, which was never fed. A shard is written whole or not at all, so a run that was
broken off goes on with the prompts that no shard holds.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.core.proposal import Proposal
from outrider.errors import UsageError
from outrider.models.native.kernels import MAX_ROWS
from outrider.models.native.model import NativeModel
from outrider.protocols import Asked

__all__ = ["DataOptions", "Example", "answers", "generate_data", "read_data"]

_SHARD_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How continuations are drawn.

    Parameters
    ----------
    taps
        Layers whose hidden states are kept.
    max_tokens
        Most tokens of an answer.
    temperatures
        Taken in turn, prompt by prompt; 0 is greedy.
    seed
        Fixes all chance: prompt number n is answered the same whatever is answered beside it.
    """

    taps: tuple[int, ...]
    max_tokens: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer.

    Parameters
    ----------
    tokens
        int64 [n].
    prompt_length
        How many of them are the prompt.
    hidden
        The target's hidden states of all tokens but the last.
    """

    tokens: Tensor
    prompt_length: int
    hidden: Float[Tensor, "rows widths"]


def generate_data(
    model: NativeModel,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    options: DataOptions,
    *,
    ends: frozenset[int] = frozenset(),
    made_by: Mapping[str, str] | None = None,
    max_bytes: int = 8 * 2**30,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Answer prompts in batches, and keep what was written; returns the number of tokens.

    Parameters
    ----------
    model
        The target, in the native runtime.
    prompts
        Token ids.
    folder
        Where shards go; what it holds already is not made again.
    ends
        Tokens that end an answer.
    made_by
        The target's fingerprint: what other weights or another adapter say is not mixed in.
    max_bytes
        No shard is begun once the folder holds so much.
    progress
        Called with the prompts done and all of them.

    Raises
    ------
    UsageError
        When the folder holds data that were made with other options, or by another target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, options, model, made_by or {})
    done = {int(n) for path in _shards(folder) for n in _load(path, "numbers")}
    waiting = deque(n for n in range(len(prompts)) if n not in done)
    writer = _Writer(folder)
    for finished in answers(model, prompts, waiting, options, ends):
        done.add(finished.number)
        if writer.add(finished) and writer.bytes >= max_bytes:
            break
        if progress is not None:
            progress(len(done), len(prompts))
    writer.flush()
    return sum(int(_load(path, "lengths").sum()) for path in _shards(folder))


def read_data(folder: Path) -> Iterator[Example]:
    """The sequences of a folder, shard by shard."""
    for path in _shards(folder):
        with safe_open(path, "pt") as shard:
            tokens, hidden = shard.get_tensor("tokens").long(), shard.get_tensor("hidden")
            lengths, prompts = shard.get_tensor("lengths"), shard.get_tensor("prompts")
        at = row = 0
        for n, prompt_length in zip(lengths.tolist(), prompts.tolist(), strict=True):
            yield Example(tokens[at : at + n], prompt_length, hidden[row : row + n - 1])
            at, row = at + n, row + n - 1


# ---- answering in batches ------------------------------------------------------------------------


class Answer:
    """One sequence while it grows; its chance is its own."""

    def __init__(
        self, model: NativeModel, number: int, prompt: Sequence[int], options: DataOptions
    ) -> None:
        self.number = number
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.limit = min(len(prompt) + options.max_tokens, model.context_length)
        self.temperature = options.temperatures[number % len(options.temperatures)]
        self._chance = np.random.default_rng([options.seed, number])
        self.cache = model.new_cache(self.limit, options.taps)
        model.prefill(self.cache, self.tokens[:-1])

    def choose(self, logits: Float[Tensor, " V"]) -> int:
        """The next token."""
        if self.temperature == 0.0:
            return int(logits.numpy().argmax())
        # The Gumbel-max trick, on the tokens that could win.
        scores = (logits / self.temperature).numpy()
        near = np.flatnonzero(scores > scores.max() - 20.0)
        return int(near[np.argmax(scores[near] + self._chance.gumbel(size=len(near)))])

    def over(self, ends: frozenset[int]) -> bool:
        """Whether nothing comes any more."""
        return len(self.tokens) >= self.limit or self.tokens[-1] in ends


def answers(
    model: NativeModel,
    prompts: Sequence[Sequence[int]],
    waiting: deque[int],
    options: DataOptions,
    ends: frozenset[int],
) -> Iterator[Answer]:
    """Finished answers; as many grow at a time as a pass has rows."""
    growing: list[Answer] = []
    while growing or waiting:
        while waiting and len(growing) < MAX_ROWS:
            number = waiting.popleft()
            prompt = prompts[number]
            if 0 < len(prompt) < model.context_length:
                growing.append(Answer(model, number, prompt, options))
        if not growing:
            break
        asked = [Asked(one.cache, one.tokens[-1:], Proposal()) for one in growing]
        for one, logits in zip(growing, model.score_together(asked), strict=True):
            one.tokens.append(one.choose(logits[0]))
        still = []
        for one in growing:
            if one.over(ends):
                yield one
            else:
                still.append(one)
        growing = still


# ---- shards --------------------------------------------------------------------------------------


class _Writer:
    """Gathers finished answers into shards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: list[Answer] = []
        self._next = len(_shards(folder))
        self.bytes = sum(path.stat().st_size for path in _shards(folder))

    def add(self, answer: Answer) -> bool:
        """Take one; whether a shard was written."""
        self._held.append(answer)
        if sum(len(one.tokens) for one in self._held) < _SHARD_TOKENS:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write what is held."""
        if not self._held:
            return
        held, self._held = self._held, []
        state = {
            "tokens": torch.tensor([t for one in held for t in one.tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(one.tokens) for one in held], dtype=torch.int32),
            "prompts": torch.tensor([one.prompt_length for one in held], dtype=torch.int32),
            "numbers": torch.tensor([one.number for one in held], dtype=torch.int32),
            "hidden": torch.cat(
                [one.cache.hidden.first(len(one.tokens) - 1).bfloat16() for one in held]
            ),
        }
        path = self._folder / f"shard-{self._next:05}.safetensors"
        part = path.with_suffix(".part")
        save_file(state, part)
        os.replace(part, path)
        self._next += 1
        self.bytes += path.stat().st_size


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def _load(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as shard:
        found: Tensor = shard.get_tensor(name)
    return found


def _claim(
    folder: Path, options: DataOptions, model: NativeModel, made_by: Mapping[str, str]
) -> None:
    """Refuse a folder whose data are of other options, since the two would be mixed."""
    path = folder / "data.json"
    about = {"target": model.name, "precision": model.kind}
    about |= {part: made_by.get(part, "") for part in ("weights", "adapter")}
    wanted = json.loads(json.dumps(asdict(options) | about))
    if path.exists():
        # Folders that are older than these parts do not name them, and are of no adapter.
        found = {"weights": about["weights"], "adapter": ""} | json.loads(path.read_text())
        if found != wanted:
            differing = [key for key in wanted if wanted[key] != found.get(key)]
            raise UsageError(
                f"The data in '{folder}' were made with another {', '.join(differing)}.",
                hint="Give another folder, or the same options.",
            )
    else:
        path.write_text(json.dumps(wanted, indent=2))
