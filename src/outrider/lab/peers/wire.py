"""Streamed answers of a server over HTTP, as events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.engine.servers import http_client
from outrider.errors import EndpointError

__all__ = ["LostError", "RefusedError", "Wire"]

_CONNECT_S = 10.0
_SILENCE_S = 300.0  # a server may think for so long before it says something
_LARGEST_BODY = 16_000_000
_MESSAGE = 300  # characters of a server's own words in an error


class RefusedError(EndpointError):
    """The server says that the request itself is wrong."""


class LostError(EndpointError):
    """There is no connection, or it ended before the answer did."""


class Wire:
    """A connection to one server, which is not trusted: no redirects, and all is bounded.

    Parameters
    ----------
    base
        Its URL, without the path.
    api_key
        Sent as a bearer token, and kept out of messages.
    """

    def __init__(self, base: str, api_key: str | None = None) -> None:
        self._httpx2 = httpx2 = http_client("A peer behind a URL")
        headers = {"User-Agent": "outrider", "Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self.base, self._key = base, api_key
        self._client = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(_SILENCE_S, connect=_CONNECT_S),
            follow_redirects=False,
            trust_env=False,  # a proxy's time is not the server's
        )

    def get(self, path: str) -> Any:
        """What JSON a path has.

        Raises
        ------
        EndpointError
            When there is none.
        """
        data = b"".join(self._lines("GET", path, None))
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise EndpointError(f"{self.base}{path} was to give JSON; it did not.") from None

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a server-sent stream, each as it comes.

        Raises
        ------
        RefusedError
            When the server says that the request is wrong.
        LostError
            When it cannot be reached, or goes away.
        EndpointError
            When it answers something else, or tells of an error.
        """
        for line in self._lines("POST", path, json.dumps(body).encode()):
            name, _, value = line.partition(b":")
            if name != b"data" or not value.strip():
                continue
            if value.strip() == b"[DONE]":
                return
            try:
                event = json.loads(value)
            except (ValueError, RecursionError):
                event = None
            if not isinstance(event, dict):
                raise EndpointError(
                    f"{self.base}{path} was to stream objects; it did not.",
                    hint="Check that the URL is that of such a server.",
                )
            if event.get("error"):
                raise EndpointError(f"{self.base}{path} failed: {self._message(event)}")
            yield event

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _lines(self, method: str, path: str, content: bytes | None) -> Iterator[bytes]:
        url, held, size = self.base + path, b"", 0
        try:
            with self._client.stream(method, url, content=content) as response:
                for chunk in response.iter_bytes():
                    held, size = held + chunk, size + len(chunk)
                    if size > _LARGEST_BODY:
                        raise EndpointError(f"{url} gave more than {_LARGEST_BODY} bytes.")
                    if response.status_code == 200:
                        *whole, held = held.split(b"\n")
                        yield from whole
                if response.status_code == 200:
                    yield held
                    return
                status = response.status_code
        except self._httpx2.RequestError as error:
            told = self._clean(f"{type(error).__name__} {error}")
            raise LostError(f"{url} could not be asked: {told}.") from None
        kind = RefusedError if status in (400, 422) else EndpointError
        try:
            told = self._message(json.loads(held))
        except (ValueError, RecursionError):
            told = self._clean(held.decode(errors="replace"))
        raise kind(f"{url} was to answer; got status {status}, {told}")

    def _message(self, found: Any) -> str:
        while isinstance(found, dict):
            found = next((found[n] for n in ("error", "message", "detail") if n in found), "")
        return self._clean(found if isinstance(found, str) else json.dumps(found))

    def _clean(self, text: str) -> str:
        """Fit for a terminal, short, and without the key, which a server may quote."""
        if self._key:
            text = text.replace(self._key, "***")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text[:_MESSAGE] or "no message"
