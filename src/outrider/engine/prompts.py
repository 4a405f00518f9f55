"""Prompts to measure with: the bundled set, or a file of one's own.

The bundled set was written for Outrider. It has eight kinds, so that a drafter meets answers that
repeat their prompt (editing, extraction, code, summarization) and answers that do not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from json import JSONDecodeError
from pathlib import Path
from typing import IO, Any

from outrider.errors import PromptError, UsageError

__all__ = ["BUNDLED", "PromptRecord", "read_prompts"]

BUNDLED = "bundled"
"""The source that stands for the set in the package."""

_HINT = (
    f"Give '{BUNDLED}', a text file with one prompt a line, or a .jsonl file with 'prompt', "
    "'messages' or 'turns' in each line."
)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt of a set.

    Parameters
    ----------
    id
        The set's own name for it, or the number of its line.
    kind
        What is asked for, such as ``code``; figures are told by kind.
    prompt
        A text, or the messages of a conversation: what ``Engine.generate`` takes.
    """

    id: str
    kind: str
    prompt: str | list[dict[str, str]]


def read_prompts(source: str | Path, *, limit: int | None = None) -> list[PromptRecord]:
    """The prompts of a set, in its own order.

    Parameters
    ----------
    source
        ``bundled``; a text file, whose lines are prompts of the kind ``text``; or a ``.jsonl``
        file. There, a line has ``prompt`` (a text), ``messages``, or ``turns`` as Spec-Bench has
        them, of which the first becomes a user's message. ``category`` or ``task`` is its kind,
        else ``all``; ``question_id`` or ``id`` its id. Empty lines are left out.
    limit
        So many of each kind, the first ones; by default all.

    Raises
    ------
    PromptError
        When the file cannot be read, a line is no prompt (its number is told), or there is none.
    UsageError
        When ``limit`` is below 1.

    Example
    -------
    >>> [record.id for record in read_prompts("bundled", limit=1)][:3]
    ['chat-01', 'code-01', 'editing-01']
    """
    if limit is not None and limit < 1:
        raise UsageError(
            f"At least one prompt of each kind is needed; got a limit of {limit}.",
            hint="Leave the limit out to take all.",
        )
    with _opened(source) as (lines, is_json):
        found = list(_parse(lines, is_json, str(source)))
    if not found:
        raise PromptError(f"'{source}' holds no prompts.", hint=_HINT)
    taken: Counter[str] = Counter()
    kept = []
    for record in found:
        taken[record.kind] += 1
        if limit is None or taken[record.kind] <= limit:
            kept.append(record)
    return kept


@contextmanager
def _opened(source: str | Path) -> Iterator[tuple[IO[str], bool]]:
    """The lines of a set, and whether each is JSON."""
    bundled = source == BUNDLED
    place = files("outrider.engine").joinpath("bundled_prompts.jsonl") if bundled else Path(source)
    try:
        # Lines are those of the file: str.splitlines would also part at characters that JSON
        # allows inside a text.
        with place.open("r", encoding="utf-8-sig") as stream:
            yield stream, place.name.endswith(".jsonl")
    except (OSError, UnicodeDecodeError) as error:
        told = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PromptError(f"'{source}' cannot be read as prompts: {told}.", hint=_HINT) from error


def _parse(lines: Iterable[str], is_json: bool, source: str) -> Iterator[PromptRecord]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not is_json:
            yield PromptRecord(str(number), "text", line.rstrip("\n"))
            continue
        try:
            yield _record(json.loads(line), number)
        except ValueError as error:
            told = f"it is not JSON ({error.msg})" if isinstance(error, JSONDecodeError) else error
            raise PromptError(
                f"Line {number} of '{source}' is no prompt: {told}.", hint=_HINT
            ) from error


def _record(row: Any, number: int) -> PromptRecord:
    """From a line's object; ``ValueError`` says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f"an object was expected, got {_short(row)}")
    name = row.get("question_id", row.get("id", number))
    kind = row.get("category") or row.get("task") or "all"
    return PromptRecord(str(name), str(kind), _prompt(row))


def _prompt(row: dict[str, Any]) -> str | list[dict[str, str]]:
    if row.get("messages") is not None:
        return _messages(row["messages"])
    if row.get("prompt") is not None:
        return _text(row["prompt"], "'prompt'")
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"'turns' is a list of at least one text; got {_short(turns)}")
        return [{"role": "user", "content": _text(turns[0], "the first of 'turns'")}]
    raise ValueError("it has neither 'prompt' nor 'messages' nor 'turns'")


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"'messages' is a list of at least one message; got {_short(messages)}")
    for message in messages:
        fit = isinstance(message, dict) and {"role", "content"} <= message.keys()
        if not fit or not all(isinstance(message[k], str) for k in ("role", "content")):
            raise ValueError(
                f"a message has a 'role' and a 'content', both texts; got {_short(message)}"
            )
    _text(messages[-1]["content"], "the last message")
    return messages


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text; got {_short(value)}")
    if not value.strip():
        raise ValueError(f"{what} is empty")
    return value


def _short(value: Any) -> str:
    told = repr(value)
    return told if len(told) <= 60 else f"{told[:57]}..."
