"""How sure the target is where each token is decided: its entropy there, measured afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.core.proposal import Proposal
from outrider.protocols import Model

__all__ = ["token_entropies"]

_ROWS = 16


@torch.inference_mode()
def token_entropies(
    model: Model, prompt: Sequence[int], output: Sequence[int], cache: Any = None
) -> list[float]:
    """−Σ p ln p before each token of an output, in nats.

    p is the model's own law, softmax of its logits at temperature 1 with no processors: at
    temperature 0 the request's law holds one token and says nothing. The output is fed in blocks,
    apart from any timing.

    Parameters
    ----------
    model
        The target.
    prompt, output
        Token ids; the prompt has at least one.
    cache
        One of this model's that holds the prompt, such as that of the session that is over; it
        saves reading the prompt again, where it can be rolled back by a length.

    Example
    -------
    >>> from outrider.models.toy import ToyModel
    >>> even = ToyModel(lambda tokens: [0.5, 0.5], 2)
    >>> [round(h, 6) for h in token_entropies(even, [0], [1, 0])]
    [0.693147, 0.693147]
    """
    tokens = [*prompt, *output]
    by_length = model.rollback == "length"
    if cache is None or not by_length:
        cache = model.new_cache(len(tokens))
    cache.rollback(len(prompt) - 1)
    model.prefill(cache, tokens[cache.length : len(prompt) - 1], None)
    # A cache that goes back by snapshots would have to be fed the same tokens again and again.
    nodes = _ROWS - 1 if by_length else 0
    found: list[float] = []
    while (at := len(prompt) + len(found)) < len(tokens):
        # The last token decides nothing that was written.
        block = tokens[at : min(at + nodes, len(tokens) - 1)]
        rows = model.score(cache, tokens[cache.length : at], Proposal.chain(block))
        cache.keep(at, range(len(block)))
        p = torch.softmax(rows.double(), dim=-1)
        found += torch.special.entr(p).sum(-1).tolist()
    return found
