"""Logprobs as OpenAI tells them: of the model's own logits, before any processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.protocols import Tokenizer

__all__ = ["TokenLogprobs", "Words", "for_chat", "for_completion", "token_logprobs"]

_LEAST = -9999.0
"""JSON has no infinity; the protocol says this for a token that cannot come."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's logprob, and the likeliest tokens with theirs, the best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Float[Tensor, " V"], token_id: int, top: int) -> TokenLogprobs:
    """From the row that a token was decided from, in float64.

    Example
    -------
    >>> found = token_logprobs(torch.tensor([0.0, 1.0, 2.0]), 0, top=2)
    >>> round(found.logprob, 3), [token for token, _ in found.top]
    (-2.408, [2, 1])
    """
    law = torch.log_softmax(logits.double(), 0)
    values, ids = torch.topk(law, min(top, len(law)))
    best = zip(ids.tolist(), map(_told, values.tolist()), strict=True)
    return TokenLogprobs(token_id, _told(float(law[token_id])), tuple(best))


def _told(logprob: float) -> float:
    return max(logprob, _LEAST)


class Words:
    """What each token reads as, looked up when first asked for.

    Example
    -------
    >>> from outrider.models.tokenizer import ToyTokenizer
    >>> words = Words(ToyTokenizer(3, eos_token_ids=[2]))
    >>> words.text(0), words.bytes(0), words.text(2)
    ('a', [97], 'c')
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._reading = Lock()
        self._pieces: list[bytes] = []

    def _piece(self, token_id: int) -> bytes:
        with self._reading:
            if not self._pieces:  # takes a moment for a large vocabulary
                pieces = [piece or b"" for piece in self._tokenizer.pieces()]
                for name, special in self._tokenizer.special_tokens().items():
                    pieces[special] = name.encode()
                self._pieces = pieces
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def text(self, token_id: int) -> str:
        """Its letters; U+FFFD for a part of a character."""
        return self._piece(token_id).decode(errors="replace")

    def bytes(self, token_id: int) -> list[int]:
        """Its bytes in UTF-8."""
        return list(self._piece(token_id))


def for_chat(found: Sequence[TokenLogprobs], words: Words) -> dict[str, Any]:
    """In a chat's form."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": words.text(token_id),
            "logprob": logprob,
            "bytes": words.bytes(token_id),
        }

    content = [
        entry(one.token_id, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def for_completion(found: Sequence[TokenLogprobs], words: Words, offset: int = 0) -> dict[str, Any]:
    """In a completion's form; ``offset`` is where in the text the first token begins."""
    tokens = [words.text(one.token_id) for one in found]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [{words.text(i): value for i, value in one.top} for one in found],
        "text_offset": offsets,
    }
