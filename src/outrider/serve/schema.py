"""The requests of OpenAI's protocol that this server answers.

Every parameter of the protocol is named here, those that are not supported too: these take their
neutral value alone, so that none is ignored. Extensions have the names that vLLM gave them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "Message",
    "NamedTool",
    "Request",
    "Speculation",
    "StreamOptions",
    "Tool",
]

_INT64 = 2**63

Seed = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
Count = Annotated[int, Field(ge=1)]
Top = Annotated[int, Field(ge=0, le=20)]


def _is_bool(value: object) -> object:
    """A literal takes what is equal to it too, 0.0 for one."""
    if not isinstance(value, bool):
        raise ValueError("false was expected")
    return value


def _is_number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("1 was expected")
    return value


Off = Annotated[Literal[False], BeforeValidator(_is_bool)]
One = Annotated[Literal[1], BeforeValidator(_is_number)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speculation(_Strict):
    """How one request is drafted for; what is left out is as the server was started."""

    drafter: str | None = None
    rule: str | None = None
    draft_length: int | Literal["auto"] | None = None


class StreamOptions(_Strict):
    """``include_usage``: one more chunk at the end, with the counts."""

    include_usage: bool | None = None
    include_obfuscation: Off | None = None


class Request(_Strict):
    """What both kinds of completion have in common."""

    model: str
    n: Count | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | Off | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _CalledFunction(_Strict):
    name: str
    arguments: str


class _ToolCall(_Strict):
    id: str
    type: Literal["function"]
    function: _CalledFunction

    def plain(self) -> dict[str, Any]:
        """As chat templates know it: with the arguments as an object."""
        arguments = json.loads(self.function.arguments)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments of a call are a JSON object, as text")
        called = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": called}


class Message(_Strict):
    """One turn. An answer of this server may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    function_call: None = None
    annotations: None = None
    audio: None = None

    @model_validator(mode="before")
    @classmethod
    def _content_of_a_call(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("tool_calls"):
            return {"content": None, **given}
        return given

    @model_validator(mode="after")
    def _parts_that_belong_together(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has 'tool_calls'")
        if self.content is None and not self.tool_calls:
            raise ValueError("'content' is missing")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message of the role 'tool', and no other, has a 'tool_call_id'")
        for call in self.tool_calls or []:
            call.plain()
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        role = "system" if self.role == "developer" else self.role
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        told: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            told["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            told["tool_call_id"] = self.tool_call_id
        return told


class _TextFormat(_Strict):
    type: Literal["text"]


class JsonObjectFormat(_Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class _NamedSchema(_Strict):
    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(_Strict):
    """A JSON text by a schema; it is kept to with ``strict`` and without."""

    type: Literal["json_schema"]
    json_schema: _NamedSchema


ResponseFormat = Annotated[
    _TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class _Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A function that the model may call; its schema is kept to with ``strict`` and without."""

    type: Literal["function"]
    function: _Function


class _FunctionName(_Strict):
    name: str


class NamedTool(_Strict):
    """The one function to call."""

    type: Literal["function"]
    function: _FunctionName


class ChatRequest(Request):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Not supported:
    audio: None = None
    function_call: None = None
    functions: None = None
    metadata: None = None
    modalities: list[Literal["text"]] | None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_key: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    safety_identifier: None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Off | None = None
    verbosity: None = None
    web_search_options: None = None


class CompletionRequest(Request):
    """The body of ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Top | None = None
    # Not supported:
    best_of: One | None = None
    echo: Off | None = None
    suffix: None = None

    def prompts(self) -> list[Any]:
        """One prompt or several, each a text or token ids."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)
