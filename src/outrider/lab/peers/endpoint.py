"""Any server of OpenAI's protocol, timed where its stream arrives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from outrider.engine.servers import base_url
from outrider.errors import EndpointError, UsageError
from outrider.lab.peers import Ask, Reply, Stage
from outrider.lab.peers.wire import RefusedError, Wire

__all__ = ["Endpoint"]

_KEY = "OUTRIDER_API_KEY"


class Endpoint:
    """A server by its URL. What it decodes with, and on what machine, is its own affair.

    Parameters
    ----------
    url
        With or without ``/v1``.
    model
        Its model's name; by default the only one that it lists.

    Messages go to it as they are, so its own chat template is applied; a text goes as a text
    where the target has no template. A key is taken from ``OUTRIDER_API_KEY``.

    Example
    -------
    >>> Endpoint.build("http://localhost:8000/v1,model=mine").label
    'endpoint:http://localhost:8000,model=mine'
    """

    name = "endpoint"
    takes = frozenset({"top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"})

    def __init__(self, url: str, model: str = "") -> None:
        self.label = f"{self.name}:{url}" + (f",model={model}" if model else "")
        self._url, self._asked, self._model = url, model, model
        self._wire: Wire | None = None
        self._tells_usage = True
        self._chat = True

    @classmethod
    def build(cls, argument: str) -> Endpoint:
        """``URL`` or ``URL,model=NAME``."""
        url, _, model = argument.partition(",model=")
        return cls(base_url(url), model.strip())

    def start(self, stage: Stage) -> None:
        """Ask for the model's name, where none was given."""
        words = stage.engine.tokenizer
        self._chat = words is not None and words.has_chat_template
        self._wire = Wire(self._url, os.environ.get(_KEY))
        self._model = self._asked or self._only_model(self._wire)

    def about(self) -> dict[str, str]:
        """What is known of it."""
        return {
            "version": f"a server, model {self._model}",
            "precision": "unknown",
            "prompts": "messages, under the server's own chat template" if self._chat else "text",
            "time": "on the client's side, the network in it",
        }

    def answer(self, ask: Ask) -> Reply:
        """One streamed completion, from sending the request to the end of the stream."""
        assert self._wire is not None
        try:
            return self._stream(self._wire, ask)
        except RefusedError:
            if not self._tells_usage:
                raise
            # If that was not the reason, this is refused as well, and told.
            self._tells_usage = False
            return self._stream(self._wire, ask)

    def stop(self) -> None:
        """Close the connection."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _stream(self, wire: Wire, ask: Ask) -> Reply:
        body = self._body(ask)
        chat = "messages" in body
        parts: list[str] = []
        usage: int | None = None
        finish, first_s = "", 0.0
        started = perf_counter()
        for event in wire.events("/v1/chat/completions" if chat else "/v1/completions", body):
            usage = _completion_tokens(event) or usage
            choice = _choice(event)
            if piece := _piece(choice):
                first_s = first_s or perf_counter() - started
                parts.append(piece)
            finish = str(choice.get("finish_reason") or finish)
        total_s = perf_counter() - started
        if not finish:
            raise EndpointError(f"{self._url} ended its stream without a finish reason.")
        return Reply(
            text="".join(parts),
            tokens=usage or len(parts),
            counted="usage" if usage else "chunks",
            ttft_s=first_s or total_s,
            total_s=total_s,
            finish_reason="length" if finish == "length" else "stop",
        )

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "stream": True,
            **ask.sampling,
        }
        if self._tells_usage:
            body["stream_options"] = {"include_usage": True}
        if ask.ignore_eos:
            body["ignore_eos"] = True
        if not isinstance(ask.prompt, str):
            body["messages"] = [dict(message) for message in ask.prompt]
        elif self._chat:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt
        return body

    def _only_model(self, wire: Wire) -> str:
        found = wire.get("/v1/models")
        listed = found.get("data") if isinstance(found, dict) else None
        names = [str(one.get("id")) for one in listed or () if isinstance(one, dict)]
        if len(names) != 1:
            raise UsageError(
                f"{self._url} lists {len(names)} models; one was expected.",
                hint=f"Name one: --peer {self.name}:{self._url},model=NAME "
                f"(it has {', '.join(names[:5]) or 'none'}).",
            )
        return names[0]


def _choice(event: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    return first if isinstance(first, dict) else {}


def _piece(choice: Mapping[str, Any]) -> str:
    """The new text; what a model thinks aloud is output too."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        parts = (delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"))
    else:
        parts = (choice.get("text"), None)
    return "".join(part for part in parts if isinstance(part, str))


def _completion_tokens(event: Mapping[str, Any]) -> int | None:
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) else None
