"""What goes round every request: its id, its key, its line in the log, counters and a span."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Collection
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve import page
from outrider.serve.address import host_of
from outrider.serve.logs import log
from outrider.serve.metrics import Metrics
from outrider.serve.refusals import RefusalError

if TYPE_CHECKING:  # what it needs is an extra
    from outrider.serve.tracing import Tracing

__all__ = ["Envelope", "note"]

_OPEN = ("/health", "/ready")
"""What probes ask for, without a key."""

_BODY_S = 30.0
"""What a client has to send its request in."""

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Envelope:
    """Middleware. A request's id is the client's ``X-Request-Id`` if that is fit to be printed.

    Parameters
    ----------
    app
        What it goes round.
    metrics
        Where requests are counted.
    paths
        Those that are counted by name.
    body_bytes
        Most that a request may hold; what is longer is not read on.
    api_key
        Asked for everywhere but by probes and for the page; ``None``: by nobody.
    hosts
        Names that a request may be addressed to, but by probes; ``None``: any. A web page whose
        name has been made to mean this machine (DNS rebinding) sends its own.
    tracing
        Where spans are made, if they are.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        paths: Collection[str],
        body_bytes: int,
        api_key: str | None = None,
        hosts: Collection[str] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths
        self._body_bytes = body_bytes
        self._key = None if api_key is None else api_key.encode()
        self._hosts = None if hosts is None else frozenset(hosts)
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = monotonic(), 0
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _ID.fullmatch(asked) else uuid4().hex
        noted: dict[str, Any] = {}
        span = None
        if self._tracing is not None:
            span = self._tracing.begin(scope["method"], scope["path"], headers)
        scope["outrider"] = {"request_id": request_id, "noted": noted, "span": span}

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        error: Exception | None = None
        try:
            if (refused := self._refusal(scope["path"], headers)) is None:
                await self._app(scope, self._bounded(receive), send_on)
            else:
                note(scope, code=refused.code)
                await refused.response()(scope, receive, send_on)
        except Exception as broken:
            error = broken
            if not status:
                internal = RefusalError(500, "The server failed.", code="internal_error")
                await internal.response()(scope, receive, send_on)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            status = noted.pop("status", status)
            self._metrics.requests.labels(path, str(status)).inc()
            seconds = monotonic() - started
            if span is not None:
                span.end(request_id, status, noted)
            if path.startswith("/v1/"):
                self._metrics.request_seconds.observe(seconds)
            watched = path in (*_OPEN, "/metrics") or page.asks_for_it(scope["path"], headers)
            quiet = status < 400 and watched
            log(
                "request",
                level=logging.DEBUG if quiet else logging.ERROR if error else logging.INFO,
                error=error,
                request_id=request_id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(seconds, 4),
                **noted,
            )

    def _bounded(self, receive: Receive) -> Receive:
        """Reads a body in time, and no more of it than may come."""
        left, deadline = self._body_bytes, monotonic() + _BODY_S
        whole = False

        async def read() -> Message:
            nonlocal left, whole
            if whole:  # what comes now is the client's farewell, whenever that is
                return await receive()
            try:
                async with asyncio.timeout(deadline - monotonic()):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408) from None
            body = message.get("body", b"")
            left -= len(body)
            whole = not message.get("more_body", False)
            if left < 0:
                raise HTTPException(413)
            if b"\0" in body:  # in another encoding than UTF-8, which a parser might take
                raise HTTPException(400)
            return message

        return read

    def _refusal(self, path: str, headers: Headers) -> RefusalError | None:
        """Why a request goes no further, if so."""
        host = host_of(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts and path not in _OPEN:
            return RefusalError(
                421,
                f"This server is not known as '{host}'; it is known as "
                f"{', '.join(sorted(self._hosts))}. Behind a proxy, start it with --allow-host.",
                code="wrong_host",
            )
        if not self._admits(path, headers):
            return RefusalError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )
        return None

    def _admits(self, path: str, headers: Headers) -> bool:
        if self._key is None or path in _OPEN or page.asks_for_it(path, headers):
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        # In constant time, so that a key cannot be guessed letter by letter.
        right = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key)
        return right and kind.lower() == "bearer"


def note(scope: Scope, **values: Any) -> None:
    """Add to the request's line in the log."""
    scope["outrider"]["noted"].update(values)
