"""One JSON object a line on standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["log", "to_stderr"]

_LOGGER = logging.getLogger("outrider.serve")


def log(
    event: str, *, level: int = logging.INFO, error: Exception | None = None, **values: Any
) -> None:
    """Write what happened, with what is to be known about it; never the text of a request.

    Example
    -------
    >>> log("ready", address="http://127.0.0.1:8000")
    """
    info = None if error is None else (type(error), error, error.__traceback__)
    _LOGGER.log(level, event, extra={"values": values}, exc_info=info)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def to_stderr(stream: TextIO | None = None) -> None:
    """Send this package's lines, and the warnings of uvicorn and tracing, to standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json())
    others = ("uvicorn", "opentelemetry")
    for name in ("outrider.serve", *others):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING if name in others else logging.INFO)
