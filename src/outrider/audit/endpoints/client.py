"""Asking a server over HTTP: URLs, bodies, tries, and what is told where none helped."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.audit.endpoints.answers import Answer, Side, Task, malformed, read_answer
from outrider.audit.endpoints.pace import LONGEST_HOLD_S, Pace, retry_after
from outrider.engine.servers import base_url
from outrider.errors import EndpointError, UsageError

try:
    import httpx2
except ModuleNotFoundError as error:
    raise UsageError(
        "An audit of servers needs httpx2, which is not installed.",
        hint="Run: pip install outrider[audit]",
    ) from error

__all__ = ["LARGEST_BODY", "Asker", "StoppedError", "base_url"]

LARGEST_BODY = 1_000_000
"""Bytes of an answer; more is refused."""

_CONNECT_S = 10.0
_ANSWER_S = 300.0  # an answer comes whole: a server may be silent for as long as it generates
_MESSAGE = 300  # characters of a server's own words in an error
_REFUSES_LOGPROBS = (400, 404, 422)
_HINT = "Check the model's name and the request's fields against what the server takes."
_HINTS = {
    401: "Check the API key.",
    403: "Check the API key.",
    404: "Check the URL and the model's name.",
}


class StoppedError(Exception):
    """The audit was broken off; the worker has nothing more to do."""


class _RefusedError(EndpointError):
    """The request was refused, perhaps for its logprobs."""


@dataclass(eq=False, repr=False)  # a repr would show the key
class Asker:
    """Sends requests, again where that may help, and reads answers. Shared by all workers.

    ``stop`` breaks it off; ``requests`` and ``retried`` count those sent, and those sent again.
    """

    bases: Mapping[Side, str]
    prompts: Sequence[str]
    fields: Mapping[str, Any]
    chat: bool
    api_key: str | None
    retries: int
    pace: Pace
    stop: threading.Event
    requests: int = field(default=0, init=False)
    retried: int = field(default=0, init=False)
    _without_logprobs: set[Side] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def client(self) -> httpx2.Client:
        """A client for one worker."""
        headers = {"User-Agent": "outrider", "Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S),
            follow_redirects=False,
        )

    def ask(self, client: httpx2.Client, task: Task) -> Answer:
        """One answer; a server that refuses logprobs is not asked for them again.

        Raises
        ------
        EndpointError
            When none can be had.
        """
        url = self.bases[task.side] + ("/v1/chat/completions" if self.chat else "/v1/completions")
        wanted = task.side not in self._without_logprobs
        try:
            data = self._post(client, url, self._body(task, wanted))
        except _RefusedError:
            if not wanted:
                raise
            # If the logprobs were not the reason, this is refused as well, and told.
            data = self._post(client, url, self._body(task, False))
            self._without_logprobs.add(task.side)
        return read_answer(data, task, url)

    def _body(self, task: Task, logprobs: bool) -> bytes:
        text = self.prompts[task.prompt]
        body: dict[str, Any] = {**self.fields, "seed": task.seed}
        if self.chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": 1} if self.chat else {"logprobs": 1}
        return json.dumps(body).encode()

    def _post(self, client: httpx2.Client, url: str, body: bytes) -> bytes:
        for tried in range(self.retries + 1):
            self.pace.wait()
            if self.stop.is_set():
                raise StoppedError
            with self._lock:
                self.requests += 1
                self.retried += tried > 0
            backoff = min(0.5 * 2**tried, LONGEST_HOLD_S)
            try:
                status, headers, data = self._exchange(client, url, body)
            except httpx2.TransportError as error:
                what = f"{type(error).__name__}, {self._clean(str(error))}"
            except httpx2.RequestError as error:
                raise malformed(url, "an answer", self._clean(str(error))) from None
            else:
                if status == 200:
                    return data
                what = f"status {status}, {self._message(data)}"
                if status in (429, 503):
                    backoff = retry_after(headers.get("Retry-After", ""), backoff)
                elif status < 500:
                    raise self._refused(status, url, what, headers)
            if tried < self.retries:
                self.pace.hold(backoff)
        raise EndpointError(
            f"{url} was to answer within {self.retries + 1} tries; the last one gave {what}",
            hint="Check that the server runs and has room; ask it less often, or try again later.",
        )

    def _exchange(
        self, client: httpx2.Client, url: str, body: bytes
    ) -> tuple[int, httpx2.Headers, bytes]:
        started, data = self.pace.now(), bytearray()
        with client.stream("POST", url, content=body) as response:
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > LARGEST_BODY:
                    if response.status_code != 200:
                        break  # the beginning of an error says enough
                    wanted = f"at most {LARGEST_BODY} bytes"
                    raise malformed(url, wanted, "an answer that is longer")
                if self.pace.now() - started > _ANSWER_S:
                    raise httpx2.ReadTimeout(f"not whole after {_ANSWER_S:g} s")
            return response.status_code, response.headers, bytes(data)

    def _refused(self, status: int, url: str, what: str, headers: httpx2.Headers) -> EndpointError:
        if status < 400:
            to = self._clean(headers.get("Location", "nowhere"))
            return EndpointError(
                f"{url} was to answer itself; got status {status}, pointing to {to}.",
                hint="Redirects are not followed: give the URL that answers.",
            )
        kind = _RefusedError if status in _REFUSES_LOGPROBS else EndpointError
        return kind(f"{url} was to answer; got {what}", hint=_HINTS.get(status, _HINT))

    def _message(self, data: bytes) -> str:
        """A server's own words, wherever servers put them."""
        try:
            found: Any = json.loads(data)
        except (ValueError, RecursionError):
            found = data.decode(errors="replace")
        while isinstance(found, dict):
            found = next((found[n] for n in ("error", "message", "detail") if n in found), "")
        return self._clean(found if isinstance(found, str) else json.dumps(found))

    def _clean(self, text: str) -> str:
        """Fit for a terminal, short, and without the key, which a server may quote."""
        if self.api_key:
            text = text.replace(self.api_key, "***")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text[:_MESSAGE] or "no message"
