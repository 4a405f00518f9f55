"""How much of everything one client may ask for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a client controls; beyond one a request is refused, never cut.

    Parameters
    ----------
    body_bytes
        Of a request's body.
    messages, tools
        In a conversation.
    max_tokens
        Of one output; also the default of a chat, as far as the context has room.
    sequences
        Outputs of one request: prompts times ``n``.
    stops, stop_characters
        Stop strings, and the length of each.
    stop_token_ids
        Stop tokens.
    logit_bias
        Tokens with a bias.
    draft_length
        Tokens drafted in a round.

    Example
    -------
    >>> Limits(max_tokens=64).sequences
    16
    """

    body_bytes: int = 1_000_000
    messages: int = 1024
    tools: int = 128
    max_tokens: int = 4096
    sequences: int = 16
    stops: int = 16
    stop_characters: int = 256
    stop_token_ids: int = 64
    logit_bias: int = 1024
    draft_length: int = 64
