"""All that decides what a draft becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import UsageError
from outrider.train.trainer import TrainOptions

__all__ = ["Recipe", "default_taps"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a draft is made; with the target and the prompts' texts, all there is to it.

    Parameters
    ----------
    method
        ``eagle``, ``medusa`` or ``distill``.
    prompts
        How many of the bundled prompts, ``own:N`` for so many that the target writes itself, a file
        of them, or several of these with commas between.
    max_answer, options
        How continuations are drawn, and how the draft is fitted to them; a method's own options are
        its ``defaults``.
    draft_vocab
        Tokens that a head can propose.
    start
        A head's folder to begin from, or ``shipped``: the one that comes with the target.
    student
        For ``distill``, a small language model to begin from, as a name or a path.
    student_layers
        The same without one: layers of the target that are kept; a fifth of them by default.
    """

    method: str = "eagle"
    prompts: int | str = 2600
    max_answer: int = 160
    draft_vocab: int = 8192
    options: TrainOptions = field(default_factory=TrainOptions)
    start: str | None = None
    student: str | None = None
    student_layers: int | None = None

    def refuse(self, *names: str) -> None:
        """Raise ``UsageError`` if an option is set that the method has no use for."""
        for name in names:
            if getattr(self, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is not for --method {self.method}.",
                    hint="Leave it out, or choose the other kind of method: eagle and medusa fit "
                    "heads, distill fits a small model.",
                )

    def identity(self) -> dict[str, str | int | None]:
        """What a checkpoint must be of, besides ``options``, to be gone on from."""
        return {name: getattr(self, name) for name in ("method", *_BEGINNINGS)}


_BEGINNINGS = ("start", "student", "student_layers")


def default_taps(layers: int) -> tuple[int, ...]:
    """A low, a middle and the last layer."""
    return tuple(sorted({min(3, layers - 1), layers // 2, layers - 1}))
