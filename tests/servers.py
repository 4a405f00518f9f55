"""OpenAI-style servers of toy models on this machine, which misbehave when they are told to."""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from outrider import Engine
from outrider.drafters.model import ModelDrafter
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel

__all__ = ["Loopback", "ToyServer", "toy_engine"]

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k")


def toy_engine(rule: Any = "rejection", vocab: int = 4, eos: tuple[int, ...] = ()) -> Engine:
    """A small target, and a drafter far enough from it that a wrong rule shows."""
    return Engine(
        ToyModel.random(vocab, 1, sharpness=1.0),
        ToyTokenizer(vocab, eos),
        drafter=ModelDrafter(ToyModel.random(vocab, 37, sharpness=2.0)),
        rule=rule,
        draft_length=2,
    )


class Loopback:
    """A server in a thread, on a free port of this machine; a context manager."""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """What answers requests; it is asked for once, when the server starts."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"


class ToyServer(Loopback):
    """Answers with a toy model.

    Parameters
    ----------
    engine
        What answers.
    plain
        Whether it answers without a drafter.
    logprobs
        Whether it tells tokens and logprobs; if not, it refuses to be asked for them.
    options
        More arguments for ``Engine.generate``.
    change
        Changes an answer's choice before it is sent.
    on_request
        Called when a request has come.

    ``tricks`` holds what it does to the next requests, one each: ``ok``, a status, ``drop``,
    ``not json``, ``no choices``, ``huge``, ``redirect``, or a tuple of status, headers and body.
    ``always`` does so to all of them. ``requests`` are the bodies that came.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        plain: bool,
        logprobs: bool = True,
        options: dict[str, Any] | None = None,
        change: Callable[[dict[str, Any]], None] = lambda choice: None,
        on_request: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.plain, self.logprobs = engine, plain, logprobs
        self.options, self.change, self.on_request = options or {}, change, on_request
        self.tricks: deque[Any] = deque()
        self.always: Any = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self._lock = threading.Lock()  # engines are not made for several threads

    def handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet, so that no acknowledgement is waited for

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner._lock:
                    owner._answer(self, body)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.requests.append(body)
        self.headers.append(dict(handler.headers))
        self.paths.append(handler.path)
        self.on_request()
        trick = self.tricks.popleft() if self.tricks else self.always
        if trick == "drop":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"choices": [')
            handler.close_connection = True
        elif trick == "not json":
            self._send(handler, 200, b"<html>")
        elif trick == "no choices":
            self._send(handler, 200, b'{"choices": []}')
        elif trick == "huge":
            self._send(handler, 200, b" " * 1_100_000)
        elif trick == "redirect":
            self._send(handler, 302, b"", {"Location": "http://127.0.0.1:9/"})
        elif isinstance(trick, int):
            self._send(handler, trick, b'{"error": {"message": "no room"}}')
        elif isinstance(trick, tuple):
            status, headers, data = trick
            self._send(handler, status, data, headers)
        elif body.get("logprobs") and not self.logprobs:
            self._send(handler, 400, b'{"error": {"message": "logprobs are not supported"}}')
        else:
            choice = self._choice(body)
            self.change(choice)
            self._send(handler, 200, json.dumps({"choices": [choice]}).encode())

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        chat = "messages" in body
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        ids = self.engine.encode(text)
        output = self.engine.generate(
            ids,
            seed=body["seed"],
            plain=self.plain,
            **{name: body[name] for name in _SAMPLING if name in body},
            **self.options,
        )
        choice: dict[str, Any] = {"finish_reason": output.finish_reason}
        choice |= {"message": {"content": output.text}} if chat else {"text": output.text}
        if body.get("logprobs"):
            tokens = [self.engine.tokenizer.token_text(i) for i in output.token_ids]
            numbers = [
                math.log(self.engine.model.next([*ids, *output.token_ids[:i]])[token])
                for i, token in enumerate(output.token_ids)
            ]
            pairs = zip(tokens, numbers, strict=True)
            choice["logprobs"] = (
                {"content": [{"token": t, "logprob": n} for t, n in pairs]}
                if chat
                else {"tokens": tokens, "token_logprobs": numbers}
            )
        return choice
