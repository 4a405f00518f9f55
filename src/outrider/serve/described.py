"""What answers look like, for programs that read ``/openapi.json``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["ChatAnswer", "CompletionAnswer", "Model", "Models", "Status", "answers", "refusals"]

_REFUSED = {
    400: "Something in the request is wrong, unknown, unsupported or beyond a limit.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    421: "The request is addressed to another host.",
    429: "The queue is full; `Retry-After` says when to come again.",
    500: "This output failed.",
    503: "The server is stopping, or has no memory for this just now.",
}
_ANYWHERE = (401, 421)


class _Open(BaseModel):
    """More may come with later versions."""

    model_config = ConfigDict(extra="allow")


class Fault(_Open):
    """What was expected, what was got and what to do; ``code`` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(_Open):
    """Any answer that is none."""

    error: Fault


class Usage(_Open):
    """Tokens fed and emitted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Token(_Open):
    """One emitted token, and where it came from."""

    id: int
    text: str
    origin: Literal["accepted", "correction", "bonus", "plain"]


class AboutOutput(_Open):
    """How one output came about."""

    drafter: str
    rule: str
    drafter_failed: bool
    trace: dict[str, Any]
    tokens: list[Token]


class AboutAnswer(_Open):
    """All outputs together."""

    drafter: str
    rule: str
    seed: int
    trace: dict[str, Any]


class _Choice(_Open):
    index: int
    finish_reason: str
    logprobs: dict[str, Any] | None
    outrider: AboutOutput


class Message(_Open):
    """What was said."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None


class ChatChoice(_Choice):
    """One output of a chat."""

    message: Message


class CompletionChoice(_Choice):
    """One continuation."""

    text: str


class _Answer(_Open):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    outrider: AboutAnswer


class ChatAnswer(_Answer):
    """A whole answer to messages."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(_Answer):
    """Whole continuations."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Model(_Open):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(_Open):
    """All that are."""

    object: Literal["list"]
    data: list[Model]


class Status(_Open):
    """What probes ask for."""

    status: str


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of errors, with those that any path has."""
    told: dict[int | str, dict[str, Any]] = {
        status: {"model": Refusal, "description": _REFUSED[status]}
        for status in sorted({*_ANYWHERE, *statuses})
    }
    return told | {"default": {"model": Refusal, "description": "Whatever else is wrong."}}


def answers(answer: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Descriptions of what a request for a text is answered with.

    Example
    -------
    >>> sorted(answers(ChatAnswer), key=str)[:3]
    [200, 400, 401]
    """
    stream = {"schema": {"type": "string", "description": "One JSON object after each `data: `."}}
    whole = {
        "model": answer,
        "description": "The answer, whole, or in chunks where `stream` was asked for.",
        "content": {"text/event-stream": stream},
    }
    return {200: whole, **refusals(*_REFUSED)}
