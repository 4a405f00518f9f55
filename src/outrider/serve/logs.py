"""One JSON object a line on standard error."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from queue import Full, Queue
from threading import Thread
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


class _Writer(logging.Handler):
    """Hands lines to a thread that writes them.

    Whoever reads the log may stop reading, and a disk may be full: neither may stop the server. Of
    lines that nobody takes, so many wait; how many were lost beyond is told as soon as it can be.
    """

    WAITING = 10_000
    PATIENCE_S = 2.0

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: Queue[str | None] = Queue(self.WAITING)
        self._lost = 0
        self._thread = Thread(target=self._write, name="outrider-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except Full:
            self._lost += 1

    def _write(self) -> None:
        put = _raw(self._stream)
        while (line := self._lines.get()) is not None:
            if self._lost:
                lost, self._lost = self._lost, 0
                line = json.dumps({"event": "log_lines_lost", "lines": lost}) + "\n" + line
            with suppress(OSError, ValueError):  # no room, or nobody there any more
                put(line + "\n")

    def close(self) -> None:
        """Write what waits, for a moment."""
        with suppress(Full):
            self._lines.put(None, timeout=self.PATIENCE_S)
        self._thread.join(self.PATIENCE_S)
        super().close()


def _raw(stream: TextIO) -> Callable[[str], object]:
    """Writes past Python's own buffer: a thread that hangs in there would hold up the exit."""
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, AttributeError, ValueError):
        return stream.write

    def put(text: str) -> None:
        left = text.encode()
        while left:
            left = left[os.write(descriptor, left) :]

    return put


def to_stderr(stream: TextIO | None = None) -> None:
    """Send this package's lines, and the warnings of uvicorn and tracing, to standard error."""
    handler = _Writer(stream or sys.stderr)
    handler.setFormatter(_Json())
    others = ("uvicorn", "opentelemetry")
    for name in ("outrider.serve", *others):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING if name in others else logging.INFO)
