"""Errors in the shape of OpenAI's, which its clients turn into exceptions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from outrider.errors import (
    NotEnoughMemoryError,
    NumericalError,
    OutriderError,
    PromptError,
    UsageError,
)
from outrider.registry import did_you_mean

__all__ = ["RefusalError", "of_error", "of_status", "of_validation"]


class RefusalError(Exception):
    """A request that is answered with an error.

    Parameters
    ----------
    status
        Of HTTP.
    message
        What was expected, what was got and what to do.
    code
        For programs.
    param
        The parameter at fault.
    retry_after_s
        When to try again, where that can help.

    Example
    -------
    >>> RefusalError(429, "The queue is full.", code="queue_full").body["error"]["type"]
    'rate_limit_error'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            status, "server_error" if status >= 500 else "invalid_request_error"
        )
        # A client's text may hold what is no character; the answer must be one.
        message = message.encode(errors="backslashreplace").decode()
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}

    def response(self) -> JSONResponse:
        """As an answer."""
        return JSONResponse(self.body, self.status, self.headers)


def of_error(error: Exception) -> RefusalError:
    """From what the engine raised for one request."""
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, PromptError):
        return RefusalError(400, str(error), code="invalid_prompt")
    if isinstance(error, UsageError):
        return RefusalError(400, str(error), code="invalid_value")
    if isinstance(error, NumericalError):
        return RefusalError(500, str(error), code="numerical_error")
    if isinstance(error, NotEnoughMemoryError):
        return RefusalError(503, str(error), code="out_of_memory", retry_after_s=5)
    if isinstance(error, OutriderError):
        return RefusalError(500, str(error), code="engine_error")
    # Whatever else it says may name files of the server.
    return RefusalError(500, f"The server failed: {type(error).__name__}.", code="internal_error")


_BY_STATUS = {
    400: ("invalid_json", "The body cannot be read: it must be JSON in UTF-8, not too deep."),
    404: ("not_found", ""),
    405: ("method_not_allowed", ""),
    408: ("body_timeout", "The body did not come in time."),
    413: ("body_too_large", "The body is too large."),
}


def of_status(status: int, message: str = "") -> RefusalError:
    """From a status that the framework gives, with words of its own if there are none.

    >>> of_status(413).code
    'body_too_large'
    """
    code, told = _BY_STATUS.get(status, (None, ""))
    return RefusalError(status, message or told or f"{HTTPStatus(status).phrase}.", code=code)


_FORM = re.compile(r"str|int|float|bool|[A-Z_]\w*|[\w-]+\[.*\]")
"""Pydantic names the form of a value that it tried, beside where the value is."""


def _place(error: Mapping[str, Any]) -> list[str]:
    parts = [str(part) for part in error["loc"] if part != "body"]
    return [part for i, part in enumerate(parts) if not (i and _FORM.fullmatch(part))]


def of_validation(
    errors: Sequence[Mapping[str, Any]], known: list[str] | None = None
) -> RefusalError:
    """From the first of pydantic's complaints.

    ``known`` are the parameters that there are.
    """
    first = errors[0]
    where = _place(first)
    name = where[0] if where else None
    kind = first["type"]
    if kind == "json_invalid":
        told = first.get("ctx", {}).get("error", "it cannot be read")
        return RefusalError(400, f"The body is no JSON: {told}.", code="invalid_json")
    if kind == "extra_forbidden":
        hint = did_you_mean(where[-1], known or []) if len(where) == 1 else ""
        message = f"There is no parameter '{'.'.join(where)}'. {hint}".strip()
        return RefusalError(400, message, code="unknown_parameter", param=name)
    if kind == "none_required" or name == "response_format":
        message = f"'{name}' is not supported by this server in this form; leave it out."
        return RefusalError(400, message, code="unsupported_parameter", param=name)
    if name is None:
        message = "The body must be a JSON object, sent as application/json."
        return RefusalError(400, message, code="invalid_json")
    # Of a parameter that has several forms, each has its own complaint.
    told = dict.fromkeys(str(one["msg"]) for one in errors if _place(one)[:1] == [name])
    message = f"'{'.'.join(where)}': {', or '.join(told)}."
    return RefusalError(400, message, code="invalid_value", param=name)
