"""What everything that asks a server over HTTP begins with."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from outrider.errors import UsageError

__all__ = ["base_url", "http_client"]


def http_client(what: str) -> Any:
    """The package ``httpx2``; ``UsageError`` says what needs it where it is not installed."""
    try:
        import httpx2
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{what} needs httpx2, which is not installed.", hint="Run: pip install outrider[audit]"
        ) from error
    return httpx2


def base_url(url: str) -> str:
    """A server's URL without a trailing ``/v1``.

    Raises
    ------
    UsageError
        When it is not a plain http or https URL. What follows a ``?`` or stands before an ``@``
        is often a key, and keys are kept out of logs.

    >>> base_url("http://localhost:8000/v1/")
    'http://localhost:8000'
    """
    hint = "Example: http://localhost:8000/v1"
    httpx2 = http_client("A server")
    try:
        parts = urlsplit(url)
        valid = bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
        httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL):
        valid = False
    if not valid:
        raise UsageError(
            "An endpoint is the http or https URL of a server; got another.", hint=hint
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise UsageError(
            "An endpoint's URL has a user, a query or a fragment; none was expected.",
            hint=f"Give a key as the API key. {hint}",
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
