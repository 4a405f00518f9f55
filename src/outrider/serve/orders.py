"""From a request to what the engine is to do, checked before it waits for its turn."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, fields
from threading import Lock
from typing import Any

from outrider.core.processors import Sampling
from outrider.drafters.beside import taps_of
from outrider.engine.engine import Engine
from outrider.engine.grammar import Grammar
from outrider.errors import OutriderError, PromptError, UsageError
from outrider.models.hidden import Hidden
from outrider.protocols import CacheBytes, Drafter, Model, TappedModel
from outrider.serve.limits import Limits
from outrider.serve.refusals import RefusalError
from outrider.serve.schema import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    Request,
)
from outrider.serve.tools import Calls, functions, spelling_of

__all__ = ["Intake", "Order", "cache_bytes"]

_SAFE_DRAFTERS = ("none", "auto", "ngram", "suffix")
"""Drafters that read nothing but the text; others must be the server's own."""

_COMPLETION_TOKENS = 16
"""The protocol's default for a plain completion."""


@dataclass(frozen=True, slots=True)
class Order:
    """One output to be made.

    Parameters
    ----------
    prompt
        Token ids.
    options
        Of ``Engine.stream``.
    sequence
        Number of the output among those to the same prompt; each has chance of its own.
    top_logprobs
        How many likely tokens are told beside each one's logprob; ``None``: no logprobs.
    cache_bytes
        What its caches take when it is at its longest.
    calls
        The tools that it may call; ``None``: it is text.
    """

    prompt: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    sequence: int = 0
    top_logprobs: int | None = None
    cache_bytes: int = 0
    calls: Calls | None = None


def cache_bytes(engine: Engine, drafters: Collection[Drafter], tokens: int) -> int:
    """Most memory that one output takes: the target's cache, and what a drafter keeps beside it.

    Parameters
    ----------
    engine
        The target's.
    drafters
        Those of which it may have any one; none: it is decoded plainly.
    tokens
        Of the prompt and the output together.

    What a part does not tell (``CacheBytes``) counts as nothing.

    Example
    -------
    >>> engine = Engine.load("toy", drafter="suffix")
    >>> cache_bytes(engine, [], 100), cache_bytes(engine, [engine.drafter], 100)
    (0, 102400)
    """
    return _told(engine.model, tokens) + max(
        (_beside(drafter, engine.model, tokens) for drafter in drafters), default=0
    )


def _beside(drafter: Drafter, model: Model, tokens: int) -> int:
    taps = taps_of(drafter)
    hidden = Hidden.bytes(taps, model.hidden_size, tokens) if isinstance(model, TappedModel) else 0
    return _told(drafter, tokens) + hidden


def _told(part: object, tokens: int) -> int:
    return part.cache_bytes(tokens) if isinstance(part, CacheBytes) else 0


def _possible(engine: Engine) -> list[Drafter]:
    """The drafters that requests may have: the server's own, what it was tuned to, the safe ones.

    Made here, so that no request waits for a head that is loaded when it is first asked for.
    """
    profile = engine.profile if engine.follows_profile else None
    tuned = [profile.choice(greedy) for greedy in (True, False)] if profile else []
    made = [engine.drafter]
    for name in (*_SAFE_DRAFTERS, *(choice.drafter for choice in tuned if choice is not None)):
        with suppress(OutriderError):  # whoever asks for it is told why there is none
            made.append(engine.make_drafter(name))
    return made


class Intake:
    """Makes orders of requests, or refuses them.

    Safe to use from several threads beside a running engine: it only reads.

    Parameters
    ----------
    engine
        The server's.
    model_name
        What clients call the target.
    limits
        What a client may ask for.
    drafter
        The drafter's name that the server was started with.
    cache_bytes
        Memory for the caches of all outputs side by side; ``None``: no limit.
    """

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        limits: Limits,
        *,
        drafter: str = "auto",
        cache_bytes: int | None = None,
    ) -> None:
        self.engine, self.model_name, self.limits = engine, model_name, limits
        self.drafters = tuple(dict.fromkeys((*_SAFE_DRAFTERS, drafter)))
        self._own = drafter
        self._cache_bytes = cache_bytes
        self._possible = _possible(engine)
        # Fast tokenizers may refuse two callers at once.
        self._tokenizing = Lock()

    def orders(self, request: Request) -> list[Order]:
        """All outputs of a request: those to the first prompt, then to the second, and so on.

        Raises
        ------
        RefusalError
            When something in it is wrong, not supported or beyond a limit.
        """
        self._check(request)
        calls: Calls | None = None
        tools: list[dict[str, Any]] = []
        if isinstance(request, ChatRequest):
            prompts: list[Any] = [[message.plain() for message in request.messages]]
            calls = self._calls(request)
            if calls is not None:
                tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
        else:
            assert isinstance(request, CompletionRequest)
            prompts = request.prompts()
        n = request.n or 1
        if not prompts:
            raise RefusalError(400, "There is no prompt.", code="invalid_prompt", param="prompt")
        if len(prompts) * n > self.limits.sequences:
            raise _too_many("n" if n > 1 else "prompt", "outputs", self.limits.sequences)
        common = self._options(request) | self._grammar(request, calls)
        made: list[Order] = []
        for prompt in prompts:
            ids = self._encode(prompt, tools)
            options = common | {"max_tokens": self._max_tokens(request, len(ids))}
            beside = [] if options.get("plain") else self._possible
            need = cache_bytes(self.engine, beside, len(ids) + options["max_tokens"])
            if self._cache_bytes is not None and need > self._cache_bytes:
                raise RefusalError(
                    400,
                    f"This request's cache would take {need / 1e6:,.0f} MB; the server has "
                    f"{self._cache_bytes / 1e6:,.0f} MB for all. Ask for fewer tokens.",
                    code="out_of_memory",
                    param="max_tokens",
                )
            top = _top_logprobs(request)
            made += [Order(ids, options, k, top, need, calls) for k in range(n)]
        return made

    def _check(self, request: Request) -> None:
        limits = self.limits
        if request.model != self.model_name:
            raise RefusalError(
                404,
                f"There is no model '{request.model}' here; there is '{self.model_name}'.",
                code="model_not_found",
                param="model",
            )
        if request.stream_options is not None and not request.stream:
            raise RefusalError(
                400,
                "'stream_options' needs 'stream': true.",
                code="invalid_value",
                param="stream_options",
            )
        if isinstance(request, ChatRequest):
            if len(request.messages) > limits.messages:
                raise _too_many("messages", "messages", limits.messages)
            if len(request.tools or []) > limits.tools:
                raise _too_many("tools", "tools", limits.tools)
            if request.top_logprobs and not request.logprobs:
                raise RefusalError(
                    400,
                    "'top_logprobs' needs 'logprobs': true.",
                    code="invalid_value",
                    param="top_logprobs",
                )
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stops) > limits.stops:
            raise _too_many("stop", "stop strings", limits.stops)
        if any(len(stop) > limits.stop_characters for stop in stops):
            raise _too_many("stop", "characters in a stop string", limits.stop_characters)
        if "" in stops:
            raise RefusalError(400, "A stop string is empty.", code="invalid_value", param="stop")
        rows = self.engine.model.vocab_size
        if wrong := [token for token in request.stop_token_ids or [] if not 0 <= token < rows]:
            raise RefusalError(
                400,
                f"'stop_token_ids' go from 0 to {rows - 1}; got {wrong[0]}.",
                code="invalid_value",
                param="stop_token_ids",
            )
        if len(request.stop_token_ids or []) > limits.stop_token_ids:
            raise _too_many("stop_token_ids", "tokens", limits.stop_token_ids)
        if len(request.logit_bias or {}) > limits.logit_bias:
            raise _too_many("logit_bias", "tokens", limits.logit_bias)

    def _options(self, request: Request) -> dict[str, Any]:
        values: dict[str, Any] = {"temperature": 1.0}  # the protocol's default
        for name in (f.name for f in fields(Sampling)):
            if (value := getattr(request, name)) is not None:
                values[name] = value
        if request.logit_bias is not None:
            values["logit_bias"] = _token_ids(request.logit_bias)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        options: dict[str, Any] = {
            **values,
            **self._speculation(request),
            "seed": seed,
            "stop": request.stop,
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": bool(request.ignore_eos),
        }
        try:
            sampling = Sampling(**values)
            # Raises when a bias is for a token that there is not.
            sampling.law(frozenset(), self.engine.model.vocab_size)
            self.engine.make_rule(sampling, options.get("rule"))
        except UsageError as error:
            name = str(error).partition(" ")[0]
            param = name if name in values else "speculation" if "rule" in options else None
            raise RefusalError(400, str(error), code="invalid_value", param=param) from error
        return options

    def _speculation(self, request: Request) -> dict[str, Any]:
        asked = request.speculation
        if asked is None:
            return {}
        if asked is False:
            return {"plain": True}
        if asked.drafter is not None and asked.drafter not in self.drafters:
            raise RefusalError(
                400,
                f"There is no drafter '{asked.drafter}' here; there is {', '.join(self.drafters)}.",
                code="invalid_value",
                param="speculation",
            )
        length = asked.draft_length
        if isinstance(length, int) and not 0 <= length <= self.limits.draft_length:
            raise RefusalError(
                400,
                f"'draft_length' goes from 0 to {self.limits.draft_length}; got {length}.",
                code="invalid_value",
                param="speculation",
            )
        # The server's own drafter is one object, loaded once, and known to the engine by default.
        own = asked.drafter == self._own
        given = {
            "drafter": None if own else asked.drafter,
            "rule": asked.rule,
            "draft_length": length,
        }
        return {name: value for name, value in given.items() if value is not None}

    def _calls(self, request: ChatRequest) -> Calls | None:
        """What a chat may call, and must."""
        choice, tools = request.tool_choice, request.tools
        if tools is None:
            for param in ("tool_choice", "parallel_tool_calls"):
                if getattr(request, param) is not None and choice != "none":
                    raise _refused(f"'{param}' needs 'tools'.", param)
            return None
        parameters = functions([tool.model_dump() for tool in tools])
        if len(parameters) < len(tools):
            raise _refused("Two of the tools have the same name.", "tools")
        if choice == "none":
            return None
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in parameters:
                raise _refused(f"There is no tool '{name}' among the tools.", "tool_choice")
            parameters = {name: parameters[name]}
        words = self.engine.tokenizer
        spelling = None if words is None else spelling_of(words)
        if spelling is None:
            raise RefusalError(
                400,
                "This model's chat template names no tools, or spells calls in a way that is not "
                "known here; leave 'tools' out, or serve another model.",
                code="unsupported_parameter",
                param="tools",
            )
        if isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat):
            raise RefusalError(
                400,
                "'response_format' together with 'tools' is not supported; leave one of them out, "
                "or set 'tool_choice' to \"none\".",
                code="unsupported_parameter",
                param="response_format",
            )
        required = choice is not None and choice != "auto"
        several = request.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        return Calls(spelling, parameters, required, several)

    def _grammar(self, request: Request, calls: Calls | None) -> dict[str, Any]:
        """The option of that name, compiled here, where nobody else waits for it."""
        wanted = request.response_format if isinstance(request, ChatRequest) else None
        param = "response_format" if calls is None else "tools"
        try:
            if calls is not None:
                grammar = calls.grammar()
            elif isinstance(wanted, JsonObjectFormat):
                grammar = Grammar.json_object()
            elif isinstance(wanted, JsonSchemaFormat):
                grammar = Grammar.json_schema(wanted.json_schema.json_schema)
            else:
                return {}
            self.engine.grammars.compile(grammar)
        except UsageError as error:
            raise _refused(str(error), param) from error
        return {"grammar": grammar}

    def _encode(self, prompt: Any, tools: list[dict[str, Any]]) -> list[int]:
        try:
            with self._tokenizing:
                ids = self.engine.encode(prompt, tools)
        except PromptError as error:
            raise RefusalError(400, str(error), code="invalid_prompt", param="prompt") from error
        context = self.engine.model.context_length
        if len(ids) >= context:
            raise RefusalError(
                400,
                f"The prompt has {len(ids)} tokens; the context holds {context}, and at least one "
                "must be left for the answer. Shorten the prompt.",
                code="context_length_exceeded",
                param="prompt",
            )
        return ids

    def _max_tokens(self, request: Request, prompt_tokens: int) -> int:
        most, room = self.limits.max_tokens, self.engine.model.context_length - prompt_tokens
        name, asked = "max_tokens", request.max_tokens
        if isinstance(request, ChatRequest):
            other = request.max_completion_tokens
            if asked is not None and other is not None and asked != other:
                raise RefusalError(
                    400,
                    "'max_tokens' and 'max_completion_tokens' differ; give one of them.",
                    code="invalid_value",
                    param="max_tokens",
                )
            name = "max_completion_tokens" if asked is None else name
            asked = other if asked is None else asked
        if asked is None:
            default = most if isinstance(request, ChatRequest) else _COMPLETION_TOKENS
            asked = min(default, most, room)
        if asked > most:
            raise _too_many(name, "tokens", most)
        if asked > room:
            raise RefusalError(
                400,
                f"The prompt has {prompt_tokens} tokens and {asked} more are asked for; the "
                f"context holds {room + prompt_tokens}.",
                code="context_length_exceeded",
                param=name,
            )
        if (request.min_tokens or 0) > asked:
            raise _refused(
                f"'min_tokens' is {request.min_tokens}, '{name}' {asked}: no text has both.",
                "min_tokens",
            )
        return asked


def _top_logprobs(request: Request) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return request.logprobs


_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")


def _token_ids(biases: dict[str, float]) -> dict[int, float]:
    # Digits alone: of "7" and "+7", which are one token to int(), one would be ignored.
    if wrong := [token for token in biases if not _TOKEN_ID.fullmatch(token)]:
        raise _refused(
            f"'logit_bias' maps token ids to numbers; got the token {wrong[0]!r}.", "logit_bias"
        )
    return {int(token): bias for token, bias in biases.items()}


def _refused(message: str, param: str) -> RefusalError:
    return RefusalError(400, message, code="invalid_value", param=param)


def _too_many(param: str, what: str, most: int) -> RefusalError:
    return RefusalError(
        400,
        f"'{param}' asks for too many {what}; at most {most:,} are served here.",
        code="limit_exceeded",
        param=param,
    )
