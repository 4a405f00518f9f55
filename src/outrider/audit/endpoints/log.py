"""The log: answers in a file of JSON lines, from which an audit goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from outrider.audit.endpoints.answers import SIDES, Answer, Kind, number
from outrider.errors import EndpointError, UsageError

__all__ = ["Log"]

_HEADER = {"log": "outrider audit of endpoints", "version": 1}


class Log:
    """Answers, a line each, after a line that fixes the conditions.

    Raises
    ------
    UsageError
        When the file cannot be used, is no such log, or has other conditions.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self._path, self._lock = path, threading.Lock()
        self.answers: list[Answer] = []
        header = _line({**_HEADER, **conditions})
        try:
            data = path.read_bytes() if path.exists() else b""
            kept = data[: data.rfind(b"\n") + 1]  # a last line without an end is half-written
            if kept:
                self._read(kept, conditions)
            elif not header.startswith(data):
                raise self._unfit("is no log of an audit of endpoints")
            # Unbuffered: a line is one call, so a break leaves it whole or missing.
            self._file = FileIO(path, "r+" if path.exists() else "x+")
            self._file.truncate(len(kept))
            self._file.seek(len(kept))
            if not kept:
                self._write(header)
        except OSError as error:
            raise self._unfit(f"cannot be used: {error.strerror or error}") from error

    def _unfit(self, why: str) -> UsageError:
        return UsageError(f"The log {self._path} {why}.", hint="Name another file.")

    def _read(self, data: bytes, conditions: Mapping[str, Any]) -> None:
        first, *lines = data.splitlines()
        try:
            found = json.loads(first)
        except ValueError:
            found = None
        if not isinstance(found, dict) or any(found.get(k) != v for k, v in _HEADER.items()):
            raise self._unfit("is no log of an audit of endpoints")
        for name, wanted in conditions.items():
            if found.get(name) != wanted:
                there, here = (json.dumps(v)[:100] for v in (found.get(name), wanted))
                raise self._unfit(f"was begun with another {name}: {there} there, {here} here")
        for at, line in enumerate(lines, 2):
            try:
                self.answers.append(_answer(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise self._unfit(f"holds no answer in line {at}") from error

    def append(self, answer: Answer) -> None:
        """Add a line, unless the log was closed meanwhile.

        Raises
        ------
        EndpointError
            When it cannot be written.
        """
        try:
            with self._lock:
                if not self._file.closed:
                    self._write(_line(_record(answer)))
        except OSError as error:
            why = error.strerror or error
            raise EndpointError(
                f"An answer could not be written to the log {self._path}: {why}.",
                hint="Make room, then run the same command again.",
            ) from error

    def _write(self, line: bytes) -> None:
        at = self._file.tell()
        if self._file.write(line) != len(line):
            self._file.truncate(at)
            self._file.seek(at)
            raise OSError("the disk is full")

    def close(self) -> None:
        """Take no more answers."""
        with self._lock:
            self._file.close()


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _record(answer: Answer) -> dict[str, Any]:
    kind: Kind = "words" if answer.tokens is None else "tokens"
    return {
        "side": answer.side,
        "prompt": answer.prompt,
        "seed": answer.seed,
        "kind": kind,
        "symbols": answer.symbols(kind),
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "logprobs": answer.logprobs,
    }


def _answer(record: Mapping[str, Any]) -> Answer:
    """Back from a record; ``KeyError``, ``TypeError`` or ``ValueError`` if it is no answer."""
    symbols, logprobs, finish = record["symbols"], record["logprobs"], record["finish_reason"]
    text = record["text"]
    if not (isinstance(text, str) and all(isinstance(symbol, str) for symbol in symbols)):
        raise TypeError("no text")
    if not (finish is None or isinstance(finish, str)) or record["side"] not in SIDES:
        raise ValueError("no side or finish reason")
    return Answer(
        record["side"],
        int(record["prompt"]),
        int(record["seed"]),
        text,
        tuple(symbols) if record["kind"] == "tokens" else None,
        None if logprobs is None else tuple(number(value) for value in logprobs),
        finish,
    )
