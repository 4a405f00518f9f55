"""The requests of OpenAI's protocol that this server answers.

Every parameter of the protocol is named here, those that are not supported too: these take their
neutral value alone, so that none is ignored. Extensions have the names that vLLM gave them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ChatRequest", "CompletionRequest", "Request", "Speculation", "StreamOptions"]

_INT64 = 2**63

Seed = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
Count = Annotated[int, Field(ge=1)]
Top = Annotated[int, Field(ge=0, le=20)]


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
    include_obfuscation: Literal[False] | None = None


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
    speculation: Speculation | Literal[False] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn. An answer of this server may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart]
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    annotations: None = None
    audio: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates know it."""
        role = "system" if self.role == "developer" else self.role
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": role, "content": text}


class _TextFormat(_Strict):
    type: Literal["text"]


class ChatRequest(Request):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    # Not supported:
    audio: None = None
    function_call: None = None
    functions: None = None
    metadata: None = None
    modalities: list[Literal["text"]] | None = None
    moderation: None = None
    parallel_tool_calls: None = None
    prediction: None = None
    prompt_cache_key: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    response_format: _TextFormat | None = None
    safety_identifier: None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    tool_choice: None = None
    tools: None = None
    verbosity: None = None
    web_search_options: None = None


class CompletionRequest(Request):
    """The body of ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Top | None = None
    # Not supported:
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    def prompts(self) -> list[Any]:
        """One prompt or several, each a text or token ids."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)
