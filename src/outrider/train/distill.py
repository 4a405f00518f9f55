"""Distillation: a small language model fitted to the law of its target, token by token."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from outrider.drafters.model import ModelDrafter
from outrider.errors import (
    ModelFileError,
    TokenizerMismatchError,
    UnsupportedError,
    UsageError,
)
from outrider.models import hf
from outrider.models.adapter import Merging, read_adapter
from outrider.models.drafts import write_record
from outrider.models.locate import Located, locate
from outrider.models.native.source import FolderSource, GgufSource, Source
from outrider.models.tokenizer import HFTokenizer, difference
from outrider.protocols import Tokenizer
from outrider.train.eagle import Batch, Teacher

__all__ = ["Student", "cut_student", "distillation_loss", "load_student", "spread", "write_student"]

_CHUNK_NUMBERS = 1 << 24
"""Most logits at a time: with a vocabulary of 50,000, those of 335 rows."""


class Student:
    """A language model to be fitted: hidden states first, logits a few rows at a time.

    Parameters
    ----------
    module
        A causal language model of transformers, float32.
    vocab
        Tokens that it shares with its target; rows beyond them are padding.

    Raises
    ------
    UnsupportedError
        When its logits are more than a matrix times its hidden states.
    """

    def __init__(self, module: Any, vocab: int) -> None:
        self.module = module.eval().requires_grad_(True)  # without dropout
        self.vocab = vocab
        self.chunk = max(16, _CHUNK_NUMBERS // vocab)
        tokens = torch.arange(min(4, vocab))[None]
        with torch.no_grad():
            expected = module(tokens).logits[..., :vocab]
            found = self.logits(self.states(tokens))
        if not torch.allclose(found, expected, atol=1e-3, rtol=1e-3):
            raise UnsupportedError(
                f"The logits of {type(module).__name__} are more than a matrix times its hidden "
                "states.",
                hint="Choose a student of another family.",
            )

    def states(self, tokens: Int64[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """What the output matrix reads; padding behind a sequence does not matter."""
        out = self.module.base_model(
            tokens, attention_mask=torch.ones_like(tokens), use_cache=False
        )
        states: Tensor = out.last_hidden_state
        return states

    def logits(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b V"]:
        """Of the token after each."""
        logits: Tensor = self.module.get_output_embeddings()(states)
        return logits[..., : self.vocab]

    def steps(
        self, teacher: Teacher, batch: Batch, count: int
    ) -> Iterator[tuple[int, Float[Tensor, "rows V"], Float[Tensor, "rows V"]]]:
        """Its logits and the target's for each step of a greedy chain, in parts.

        A row is one of step s where the student's best tokens were the text's own at the s - 1
        rows before it: there alone a chain goes on so far.
        """
        states = self.states(batch.tokens[:, :-1])
        for sequence, judged in enumerate(_judged(batch)):
            right = 0  # rows in a row
            for rows in torch.split(judged.nonzero()[:, 0], self.chunk):
                mine = self.logits(states[sequence, rows])
                wanted = teacher.logits(_last(batch, teacher)[sequence, rows])
                hits = mine.argmax(-1) == batch.tokens[sequence, rows + 1]
                before = []
                for hit in hits.tolist():
                    before.append(right)
                    right = right + 1 if hit else 0
                reached = torch.tensor(before)
                for step in range(count):
                    kept = reached >= step
                    yield step, mine[kept], wanted[kept]


def distillation_loss(
    student: Student, teacher: Teacher, batch: Batch, variation: float
) -> Float[Tensor, ""]:
    """KL(p ‖ q) + variation · TV(p, q), the mean over the rows that say a token of an answer.

    p is the target's law, from its last hidden states in the batch, and q the student's. A sampled
    draft stands with probability 1 - TV. Logits are made and thrown away some rows at a time, and
    made again for the gradients, so that memory does not grow with the batch.

    Source: Zhou et al. 2023 (arXiv 2310.08461), DistillSpec, section 4: both distances, on text of
    the target.
    """
    judged = _judged(batch)
    states = student.states(batch.tokens[:, :-1])[judged]
    last = _last(batch, teacher)[judged]
    total = torch.zeros(())
    for mine, theirs in zip(*(torch.split(x, student.chunk) for x in (states, last)), strict=True):
        part: Any = checkpoint(_distance, student, teacher, mine, theirs, variation,
                               use_reentrant=False)  # fmt: skip
        total = total + part
    return total / max(1, len(states))


def _distance(
    student: Student, teacher: Teacher, states: Tensor, last: Tensor, variation: float
) -> Tensor:
    log_q = torch.log_softmax(student.logits(states), -1)
    with torch.no_grad():
        log_p = torch.log_softmax(teacher.logits(last), -1)
        p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum()
    return divergence + variation * 0.5 * (p - log_q.exp()).abs().sum()


def _judged(batch: Batch) -> Tensor:
    """Rows after which a token of an answer comes, bool [b, n]."""
    places = torch.arange(batch.hidden.shape[1])[None]
    first = torch.zeros(1) if batch.prompts is None else batch.prompts[:, None] - 1
    return (places >= first) & (places < batch.lengths[:, None])


def _last(batch: Batch, teacher: Teacher) -> Float[Tensor, "b n d"]:
    return batch.hidden[..., -len(teacher.norm) :]


# ---- where a student comes from ------------------------------------------------------------------


def load_student(path: str, tokenizer: Tokenizer | None) -> tuple[Any, HFTokenizer]:
    """A language model to begin from, float32, and its tokenizer, which must be the target's.

    Raises
    ------
    TokenizerMismatchError
        When the tokenizers differ; the message names the first difference.
    RollbackError
        When it could not draft, since its cache does not go back by a length.
    ModelError
        And its kinds, when it cannot be found or loaded.
    """
    model, words = hf.load(locate(path), dtype=torch.float32, device="cpu")
    if tokenizer is not None and (found := difference(tokenizer, words)):
        raise TokenizerMismatchError(
            f"The student '{path}' has another tokenizer than the target: {found}.",
            hint="Give a model of the target's own family, or --student-layers.",
        )
    ModelDrafter(model)
    if model.row_step is not None:  # the runtime's own attention is for inference
        model.module.set_attn_implementation("sdpa")
    return model.module, words


def cut_student(located: Located, layers: int | None) -> Any:
    """A target with some of its layers, float32: its embedding, those layers, spread evenly from
    the first to the last, its final norm and its output matrix, all with its adapter merged.

    Parameters
    ----------
    located
        The target's file or folder.
    layers
        How many to keep; ``None`` keeps a fifth.

    Raises
    ------
    UsageError
        When it has fewer.
    ModelFileError
        When a tensor is missing or of another shape.
    """
    path = located.path
    assert path is not None
    adapter = None if located.adapter is None else read_adapter(located.adapter)
    source: Source = GgufSource(path) if located.kind == "gguf" else FolderSource(path)
    try:
        config = copy.deepcopy(source.config)
        whole = config.num_hidden_layers
        chosen = spread(whole, max(1, whole // 5) if layers is None else layers)
        config.num_hidden_layers = len(chosen)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [config.layer_types[i] for i in chosen]
        with hf.quiet():
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        read = Merging(source.read, adapter)
        with torch.no_grad():
            for name, weight in module.named_parameters():
                found = read(_name_in_target(name, chosen))
                if found is None or found.shape != weight.shape:
                    raise ModelFileError(
                        f"The tensor '{_name_in_target(name, chosen)}' of '{path}' is missing or "
                        f"not {list(weight.shape)}.",
                        hint="The file is broken or was only partly copied; fetch it again.",
                    )
                weight.copy_(found)
    finally:
        source.close()
    return module


def spread(whole: int, count: int) -> list[int]:
    """``count`` of ``whole`` layers, the first and the last among them.

    Example
    -------
    >>> spread(30, 4)
    [0, 10, 19, 29]
    """
    if not 1 <= count <= whole:
        raise UsageError(
            f"The target has {whole} layers; {count} were asked for.",
            hint=f"Give --student-layers from 1 to {whole}.",
        )
    return [int(i) for i in np.linspace(0, whole - 1, count).round()]


def _name_in_target(name: str, chosen: list[int]) -> str:
    stem, found, rest = name.partition("model.layers.")
    if not found:
        return name
    number, _, part = rest.partition(".")
    return f"{stem}{found}{chosen[int(number)]}.{part}"


def write_student(
    module: nn.Module, save_words: Callable[[Path], None], folder: Path, about: Mapping[str, Any]
) -> None:
    """Save a model in bfloat16 with its tokenizer, as transformers reads them, and its record.

    Each file is moved into the folder whole, the configuration after the weights.

    Parameters
    ----------
    save_words
        Writes the tokenizer's files into a folder.
    about
        The target's fingerprint, and how the model was trained.
    """
    saved: Any = module.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    with hf.quiet(), TemporaryDirectory(dir=folder, prefix=".part-") as part:
        saved.save_pretrained(part)
        save_words(Path(part))
        for name in sorted(os.listdir(part), key=lambda name: (name == "config.json", name)):
            os.replace(Path(part) / name, folder / name)
    write_record(folder, about)
