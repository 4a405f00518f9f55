"""Whether a draft was made for the target it is loaded on, and what it is worth if it was not.

A head, or a small model that was fitted to a target, predicts that target's text. On another state
of it, with other weights, another template, an adapter, outputs stay exact, since the target
decides; they only come more slowly. So the difference is told with its price, which is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.trace import Trace
from outrider.errors import DraftMismatchError, ModelFileError, OutriderError
from outrider.models.fingerprint import Fingerprint, differences

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.protocols import Drafter

__all__ = ["DraftMismatchWarning", "Mismatch", "Worth", "measure", "mismatch", "recorded_target"]

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five things to do before moving to another city.",
)
"""Probes of several kinds of text."""

_PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Worth:
    """What a drafter was worth on a few probes, decoded greedily.

    Parameters
    ----------
    acceptance_rate
        Accepted / drafted tokens; ``None`` if nothing was drafted.
    tokens_per_target_call
        The bonus token counts; plain decoding has 1.
    """

    acceptance_rate: float | None
    tokens_per_target_call: float

    def __str__(self) -> str:
        rate = self.acceptance_rate
        kept = "nothing was drafted" if rate is None else f"{rate:.0%} of drafts kept"
        return f"{self.tokens_per_target_call:.2f} tokens per target call, {kept}"


class DraftMismatchWarning(UserWarning):
    """A draft was made for another state of the target.

    Parameters
    ----------
    message
        What differs, and what the draft is worth here.
    worth
        The same as numbers; ``None`` if it could not be measured.
    """

    def __init__(self, message: str, worth: Worth | None = None) -> None:
        super().__init__(message)
        self.worth = worth


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A draft, and in what its target differs from the one at hand."""

    folder: Path
    differences: list[str]

    def error(self) -> DraftMismatchError:
        """Where draft and target must match."""
        return DraftMismatchError(
            f"The draft '{self.folder}' does not match the target: {', '.join(self.differences)}.",
            hint="Use the target that it was made for, train one for this target (outrider train), "
            "or go without --strict: outputs are exact with any draft.",
        )

    def warning(self, worth: Worth | None) -> DraftMismatchWarning:
        """Elsewhere."""
        price = f"worth {worth} on a few short probes" if worth else "not measured"
        return DraftMismatchWarning(
            f"The draft '{self.folder}' was made for another state of this target: "
            f"{', '.join(self.differences)}. Outputs stay exact; here the draft is {price}. Train "
            "one for this target (outrider train) for more.",
            worth,
        )


def recorded_target(folder: Path, about: Mapping[str, Any]) -> Fingerprint | None:
    """The fingerprint in a draft's configuration, of the target that it was made for.

    Raises
    ------
    ModelFileError
        When there is one, but broken.
    """
    if about.get("target") is None:
        return None
    try:
        return Fingerprint.from_dict(about["target"])
    except ValueError as error:
        raise ModelFileError(
            f"The 'target' in the configuration of the draft '{folder}' is broken: {error}.",
            hint="Copy the draft again, or train it anew.",
        ) from error


def mismatch(
    folder: Path, about: Mapping[str, Any], target: Fingerprint | None, *, strict: bool
) -> Mismatch | None:
    """In what a target differs from the one that a draft was made for; ``None`` if in nothing.

    Where either is not known, there is nothing to compare, which only ``strict`` minds.

    Raises
    ------
    ModelFileError
        When the draft's record of its target is broken.
    """
    made_for = recorded_target(folder, about)
    if made_for is None or target is None:
        unknown = (
            "it does not say which target it was made for"
            if made_for is None
            else "the target has no files to know it by"
        )
        return Mismatch(folder, [unknown]) if strict else None
    found = differences(made_for, target)
    return Mismatch(folder, found) if found else None


def measure(engine: Engine, drafter: Drafter) -> Worth | None:
    """What a drafter is worth on a few short probes; ``None`` if the target cannot run them."""
    trace = Trace()
    words = engine.tokenizer
    # A context or a vocabulary too small for the probes is no reason to fail a load.
    with suppress(OutriderError):
        for text in PROMPTS:
            chat = words is not None and words.has_chat_template
            output = engine.generate(
                [{"role": "user", "content": text}] if chat else text,
                max_tokens=_PROBE_TOKENS,
                ignore_eos=True,
                seed=0,
                drafter=drafter,
                rule="greedy",
                draft_length="auto",
            )
            trace.rounds += output.trace.rounds
    summary = trace.summary()
    if summary["tokens_per_target_call"] is None:
        return None
    return Worth(summary["acceptance_rate"], summary["tokens_per_target_call"])
