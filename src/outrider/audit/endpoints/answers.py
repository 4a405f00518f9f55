"""What a server said: one output, read from an answer's JSON and divided into symbols."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from outrider.errors import EndpointError

__all__ = ["SIDES", "Answer", "Kind", "Side", "Task", "malformed", "number", "read_answer", "words"]

Side = Literal["plain", "speculative"]
Kind = Literal["tokens", "words"]

SIDES: tuple[Side, Side] = ("plain", "speculative")


class Task(NamedTuple):
    """What to ask: which server, which prompt, counted from 0, and on which seed."""

    side: Side
    prompt: int
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One output.

    Parameters
    ----------
    side, prompt, seed
        Its task.
    text
        As the server gave it.
    tokens
        Token strings; ``None`` where the server told none.
    logprobs
        In nats, one for each token, ``None`` where it is no number.
    finish_reason
        ``stop``, ``length``, ...
    """

    side: Side
    prompt: int
    seed: int
    text: str
    tokens: tuple[str, ...] | None
    logprobs: tuple[float | None, ...] | None
    finish_reason: str | None

    @property
    def task(self) -> Task:
        """What was asked."""
        return Task(self.side, self.prompt, self.seed)

    def symbols(self, kind: Kind) -> tuple[str, ...]:
        """Tokens or words, without the finish reason."""
        return (self.tokens or ()) if kind == "tokens" else tuple(words(self.text))


def words(text: str) -> list[str]:
    """Words and punctuation, each with the space before it; together they are the text.

    >>> words("It's 3 p.m.,  no?")
    ['It', "'", 's', ' 3', ' p', '.', 'm', '.', ',', '  no', '?']
    """
    return re.findall(r"\s*(?:\w+|[^\w\s])|\s+", text)


def number(value: object) -> float | None:
    """What is a number in JSON; ``None`` for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def malformed(url: str, wanted: str, got: str) -> EndpointError:
    """The error for an answer that cannot be read."""
    return EndpointError(
        f"{url} was to give {wanted}; got {got}.",
        hint="Check that the URL is that of an OpenAI-style server.",
    )


def read_answer(data: bytes, task: Task, url: str) -> Answer:
    """An answer's text, tokens, logprobs and finish reason, of either kind of completion.

    Raises
    ------
    EndpointError
        When it is no such answer.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise malformed(url, "an answer in JSON", f"{len(data)} bytes that are not") from None
    choices = body.get("choices") if isinstance(body, dict) else None
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise malformed(url, "an answer with 'choices'", "one without")
    choice = choices[0]
    text = _text(choice)
    if text is None:
        raise malformed(url, "a choice with a text or a message", "one without")
    tokens, logprobs = _read_logprobs(choice.get("logprobs"))
    if tokens is not None and logprobs is not None and len(tokens) != len(logprobs):
        got = f"{len(logprobs)} for {len(tokens)} tokens"
        raise malformed(url, "a logprob for each token", got)
    if text and not tokens:
        tokens = logprobs = None
    finish = choice.get("finish_reason")
    return Answer(*task, text, tokens, logprobs, finish if isinstance(finish, str) else None)


def _text(choice: Mapping[str, Any]) -> str | None:
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    message = choice.get("message")
    if not isinstance(message, dict):
        return None
    # What a model thinks aloud is output too, and all of it where max_tokens ends it there.
    thought = message.get("reasoning_content") or message.get("reasoning")
    parts = (thought, message.get("content"))
    return "".join(part for part in parts if isinstance(part, str))


def _read_logprobs(
    found: object,
) -> tuple[tuple[str, ...] | None, tuple[float | None, ...] | None]:
    """Tokens and their logprobs in the form of completions or of chats; servers mix them."""
    if not isinstance(found, dict):
        return None, None
    if isinstance(found.get("content"), list):
        entries = [entry if isinstance(entry, dict) else {} for entry in found["content"]]
        tokens: object = [entry.get("token") for entry in entries]
        numbers: object = [entry.get("logprob") for entry in entries]
    else:
        tokens, numbers = found.get("tokens"), found.get("token_logprobs")
    if not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
        return None, None
    logprobs = tuple(number(n) for n in numbers) if isinstance(numbers, list) else None
    return tuple(tokens), logprobs
