"""Outrider: exact speculative decoding that can be proved and measured.

>>> from outrider import Engine
>>> engine = Engine.load("toy:vocab=4", drafter="ngram")
>>> engine.generate("abab", max_tokens=3).finish_reason
'length'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.generation import Output, Piece
    from outrider.engine.grammar import Grammar
    from outrider.errors import OutriderError
    from outrider.integrations.transformers import transformers_generate
    from outrider.rules.reference import speculative_decode_step

__all__ = [
    "Engine",
    "Grammar",
    "Output",
    "OutriderError",
    "Piece",
    "__version__",
    "speculative_decode_step",
    "transformers_generate",
]

__version__ = "0.1.0"

# Resolved on first use, so that `outrider --help` does not wait for torch.
_WHERE = {
    "Engine": "outrider.engine.engine",
    "Grammar": "outrider.engine.grammar",
    "Output": "outrider.engine.generation",
    "OutriderError": "outrider.errors",
    "Piece": "outrider.engine.generation",
    "speculative_decode_step": "outrider.rules.reference",
    "transformers_generate": "outrider.integrations.transformers",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
