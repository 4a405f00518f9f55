"""The server's web page: its files, who gets them, and the headers that keep it to itself."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

__all__ = ["FOLDER", "answer", "asks_for_it"]

FOLDER = "/page/"
"""Where what the page loads is."""

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, and in nobody's frame.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",  # programs get JSON from the same path
}
_FILES = {
    file.name: file.read_bytes()
    for file in files(__name__).iterdir()
    if PurePath(file.name).suffix in _TYPES
}


def asks_for_it(path: str, headers: Headers) -> bool:
    """Whether a request is for the page or a part of it; browsers name HTML among what they take.

    Example
    -------
    >>> browser = Headers({"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    >>> asks_for_it("/", browser), asks_for_it("/", Headers({"accept": "*/*"}))
    (True, False)
    """
    if path == "/":
        return "text/html" in headers.get("accept", "").lower()
    return path.startswith(FOLDER)


def answer(name: str = "index.html") -> Response:
    """One of the files.

    Raises
    ------
    HTTPException
        404 where there is none of that name.
    """
    if name not in _FILES:
        raise HTTPException(404)
    kind = _TYPES[PurePath(name).suffix]
    return Response(_FILES[name], media_type=f"{kind}; charset=utf-8", headers=_HEADERS)
