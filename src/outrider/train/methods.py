"""What can be fitted to a target: EAGLE-3 heads, Medusa heads, and small language models.

A method looks at all that it is given before any data are made, since those take long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.engine.engine import Engine
from outrider.engine.loading import read_fitting_head
from outrider.errors import UnknownNameError, UnsupportedError, UsageError
from outrider.models.heads.eagle import EagleConfig, EagleModule
from outrider.models.heads.folder import write_head
from outrider.models.heads.medusa import MedusaConfig, MedusaModule
from outrider.models.native.model import NativeModel
from outrider.models.tokenizer import HFTokenizer
from outrider.registry import did_you_mean
from outrider.train.data import Example
from outrider.train.distill import (
    Student,
    cut_student,
    distillation_loss,
    load_student,
    write_student,
)
from outrider.train.eagle import Teacher, new_eagle, unroll
from outrider.train.medusa import medusa_rows, new_medusa
from outrider.train.recipe import Recipe, default_taps
from outrider.train.target import frequent_tokens, sizes, teacher_of
from outrider.train.trainer import Fit, TrainOptions, head_fit

__all__ = ["METHODS", "Method", "find_method"]


class Method(ABC):
    """One way to make a draft.

    Parameters
    ----------
    engine, model
        Of the target.
    recipe
        What is asked for.

    ``drafter`` runs what comes out; ``defaults`` are options that fit the method; ``taps`` are the
    layers whose hidden states it learns from, the last one at the end; ``began_from`` is put down
    in the record.
    """

    drafter: ClassVar[str]
    defaults: ClassVar[TrainOptions] = TrainOptions()

    def __init__(self, engine: Engine, model: NativeModel, recipe: Recipe) -> None:
        self.engine = engine
        self.model = model
        self.recipe = recipe
        self.taps = default_taps(model.layers)
        self.began_from: dict[str, Any] | None = None

    @abstractmethod
    def fit(self, examples: Sequence[Example]) -> Fit:
        """The weights to begin with, and how they are judged."""

    @abstractmethod
    def write(self, fit: Fit, folder: Path, about: Mapping[str, Any]) -> None:
        """Save what came out."""


class _Heads(Method):
    """A head that reads hidden states, fresh or begun from another one."""

    kind: ClassVar[type[EagleModule] | type[MedusaModule]]

    def __init__(self, engine: Engine, model: NativeModel, recipe: Recipe) -> None:
        super().__init__(engine, model, recipe)
        recipe.refuse("student", "student_layers")
        self.start: Any = None
        if recipe.start is None:
            return
        shipped = recipe.start == "shipped"
        folder, self.start, about = read_fitting_head("" if shipped else recipe.start, model)
        if not isinstance(self.start, self.kind):
            raise UnsupportedError(
                f"'{folder}' holds no head of the kind that --method {recipe.method} fits.",
                hint="Give the --method that made it.",
            )
        earlier = {name: about.get(name) for name in ("target", "training")}
        self.began_from = {"head": recipe.start} | earlier

    def write(self, fit: Fit, folder: Path, about: Mapping[str, Any]) -> None:
        module: Any = fit.module
        write_head(module, folder, about)

    def _vocabulary(self, examples: Sequence[Example]) -> tuple[Tensor, Teacher]:
        """The head's tokens, and the target's law over them."""
        torch.manual_seed(self.recipe.options.seed)
        if self.start is not None:
            return self.start.ids, teacher_of(self.model, self.start.ids)
        words = self.engine.tokenizer
        ends = sorted(words.eos_token_ids) if words else []
        count = min(self.recipe.draft_vocab, self.model.vocab_size)
        ids = frequent_tokens(examples, count, ends)
        return ids, teacher_of(self.model, ids)


class Eagle(_Heads):
    """An EAGLE-3 head as wide as the target, with as many key heads as query heads: the embedding
    of a token comes in through them alone."""

    drafter = "eagle"
    kind = EagleModule

    def __init__(self, engine: Engine, model: NativeModel, recipe: Recipe) -> None:
        super().__init__(engine, model, recipe)
        if self.start is not None:
            # What judges it are the last layer's states, which it may not read itself.
            read, last = self.start.config.taps, model.layers - 1
            self.taps = read if read[-1] == last else (*read, last)

    def fit(self, examples: Sequence[Example]) -> Fit:
        ids, teacher = self._vocabulary(examples)
        a = self.model.architecture
        if self.start is None:
            config = EagleConfig(
                hidden=a.hidden, taps=self.taps, heads=a.heads, kv_heads=a.heads,
                head_dim=a.head_dim, intermediate=a.intermediate, draft_vocab=len(ids),
                vocab=self.model.vocab_size, epsilon=a.epsilon,
                rope_theta=_theta(a.inverse_frequencies), context=self.recipe.options.context,
            )  # fmt: skip
            module = new_eagle(config, teacher, ids, sizes(examples, len(self.taps)))
        else:
            module = self.start
        options = self.recipe.options
        return head_fit(
            module,
            lambda batch, share: unroll(module, teacher, batch, options.unrolled, share),
            options.unrolled,
            options,
        )


class Medusa(_Heads):
    """As many Medusa heads as an EAGLE head would be unrolled through."""

    drafter = "medusa"
    kind = MedusaModule

    def fit(self, examples: Sequence[Example]) -> Fit:
        ids, teacher = self._vocabulary(examples)
        a, options = self.model.architecture, self.recipe.options
        if self.start is None:
            vocab = self.model.vocab_size
            config = MedusaConfig(
                a.hidden, (a.layers - 1,), options.unrolled, len(ids), vocab, a.epsilon
            )
            module = new_medusa(config, teacher, ids)
        else:
            module = self.start
        return head_fit(
            module,
            lambda batch, share: medusa_rows(module, teacher, batch, share),
            module.config.count,
            options,
        )


class Distill(Method):
    """A small language model: one that is there, or the target with fewer layers."""

    drafter = "model"
    # It sees of a prompt what it is fed, and nothing else.
    defaults = TrainOptions(rate=3e-4, context=256, window=512)

    def __init__(self, engine: Engine, model: NativeModel, recipe: Recipe) -> None:
        super().__init__(engine, model, recipe)
        recipe.refuse("start")
        words: Any = engine.tokenizer
        if recipe.student is not None:
            recipe_layers = recipe.student_layers
            if recipe_layers is not None:
                raise UsageError(
                    "--student and --student-layers exclude each other.", hint="Leave one out."
                )
            module, words = load_student(recipe.student, engine.tokenizer)
            self.began_from = {"student": recipe.student}
        else:
            located = engine.located
            if located is None or located.path is None or not isinstance(words, HFTokenizer):
                raise UsageError(
                    f"'{model.name}' was not loaded from files, so no student is cut from it.",
                    hint="Load the target by name or path, or give --student.",
                )
            module = cut_student(located, recipe.student_layers)
            self.began_from = {"layers": module.config.num_hidden_layers}
        self._words: HFTokenizer = words
        rows = module.get_output_embeddings().weight.shape[0]
        self._student = Student(module, min(model.vocab_size, rows))

    def fit(self, examples: Sequence[Example]) -> Fit:
        student, options = self._student, self.recipe.options
        ids = torch.arange(student.vocab)
        teacher = teacher_of(self.model, ids, embedding=False)
        return Fit(
            student.module,
            lambda batch: distillation_loss(student, teacher, batch, options.variation),
            lambda batch: student.steps(teacher, batch, options.unrolled),
            options.unrolled,
            ids,
        )

    def write(self, fit: Fit, folder: Path, about: Mapping[str, Any]) -> None:
        write_student(fit.module, self._words.save, folder, about)


METHODS: dict[str, type[Method]] = {"eagle": Eagle, "medusa": Medusa, "distill": Distill}
"""By name."""


def find_method(name: str) -> type[Method]:
    """Raises ``UnknownNameError`` when there is none."""
    if name not in METHODS:
        raise UnknownNameError(f"There is no method '{name}'.", hint=did_you_mean(name, METHODS))
    return METHODS[name]


def _theta(frequencies: Any) -> float:
    """The base of rotary positions, from the second of its frequencies."""
    n = len(frequencies)
    return round(float(frequencies[1]) ** -n, 3) if n > 1 else 10000.0
