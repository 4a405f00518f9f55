"""Calls of tools: how a model spells them, as a grammar and as text that is read again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import JSONDecoder
from typing import Any
from uuid import uuid4

from outrider.engine.grammar import Grammar, json_rule
from outrider.protocols import Tokenizer

__all__ = ["Calls", "Reader", "Spelling", "functions", "spelling_of"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls stand in an answer: ``begin {"name": NAME, "arguments": {...}} end``.

    Parameters
    ----------
    begin, end
        Around each call. Where both are empty, an answer is one call or none.
    arguments
        The key of the arguments.
    marks
        Of these two, the special tokens, which leave nothing in a text, by id.
    """

    begin: str
    end: str
    arguments: str
    marks: Mapping[int, str] = field(default_factory=dict)


def spelling_of(tokenizer: Tokenizer) -> Spelling | None:
    """The spelling that a model's chat template asks for; ``None`` if it asks for no known one.

    Example
    -------
    >>> from outrider.models.tokenizer import ToyTokenizer
    >>> spelling_of(ToyTokenizer(4)) is None
    True
    """
    template = tokenizer.chat_template.replace('\\"', '"')
    if not re.search(r"\btools\b", template):
        return None
    if "<tool_call>" in template:  # Hermes, Qwen; others put no JSON between these marks
        if '"arguments"' not in template:
            return None
        special = tokenizer.special_tokens()
        marks = {special[m]: m for m in ("<tool_call>", "</tool_call>") if m in special}
        return Spelling("<tool_call>", "</tool_call>", "arguments", marks)
    if re.search(r'"name".{1,80}"parameters"', template, re.DOTALL):  # Llama 3
        return Spelling("", "", "parameters")
    return None


@dataclass(frozen=True, slots=True)
class Calls:
    """What one request may call.

    Parameters
    ----------
    spelling
        The model's.
    parameters
        The JSON schema of each function's arguments, by its name.
    required
        Whether there must be a call.
    several
        Whether there may be more than one.

    Example
    -------
    >>> schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    >>> calls = Calls(Spelling("<tool_call>", "</tool_call>", "arguments"), {"weather": schema})
    >>> reader = calls.reader()
    >>> reader.push('<tool_call>\\n{"name": "weather", "arguments": {}}\\n</tool_call>', 7)
    >>> [call["function"]["name"] for call in reader.calls]
    ['weather']
    """

    spelling: Spelling
    parameters: Mapping[str, Mapping[str, Any]]
    required: bool = False
    several: bool = True

    def grammar(self) -> Grammar:
        """Of the answer: text, then calls; or calls alone where they are required.

        Raises
        ------
        UsageError
            When a schema is no JSON object.
        """
        how = self.spelling
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(self.parameters)))}"]
        for i, (name, schema) in enumerate(self.parameters.items()):
            head = f'{{"name": {json.dumps(name)}, {json.dumps(how.arguments)}: '
            rules.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"')
            rules.append(f"arguments_{i}: {json_rule(schema)}")
        rules.append(r"TEXT: /(.|\n)*/")
        if not how.begin:
            rules.append(r"NO_CALL: /([^{](.|\n)*)?/")
            return Grammar.lark("\n".join([f"start: {self._start('call', 'NO_CALL')}", *rules]))
        begin, end = (m if m in how.marks.values() else f'"{m}"' for m in (how.begin, how.end))
        more = f'("\\n" {begin} rest)*' if self.several else ""
        lazy = "" if begin in how.marks.values() else "[lazy]"
        rules.append(f'rest: "\\n" call "\\n" {end}')
        rules.append(f"head{lazy}: TEXT {begin}")
        first = f"{begin} rest {more}" if self.required else f"head rest {more}"
        return Grammar.lark("\n".join([f"start: {self._start(first, 'TEXT')}", *rules]))

    def _start(self, call: str, text: str) -> str:
        return call if self.required else f"{text} | {call}"

    def reader(self) -> Reader:
        """Of one answer."""
        return Reader(self.spelling, frozenset(self.parameters))


class Reader:
    """Reads an answer as it comes: text for its reader, and calls once they are whole.

    ``content`` and ``calls`` hold all that came. What an answer that was cut short holds of a call
    is no call, and stays text.

    Parameters
    ----------
    spelling
        The model's.
    names
        Of the functions that there are.
    """

    def __init__(self, spelling: Spelling, names: frozenset[str]) -> None:
        self._how, self._names = spelling, names
        self._held = ""
        self.content = ""
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, token_id: int) -> None:
        """A token, with the text that is certain with it."""
        self._held += text + self._how.marks.get(token_id, "")
        if not self._how.begin:
            if not self._held.startswith("{") or self.content:
                self._tell(len(self._held))
            return
        while self._how.begin in self._held and self._how.end in self._held:
            start = self._held.index(self._how.begin)
            length = self._read(self._held[start + len(self._how.begin) :])
            if not length:
                break
            self._tell(start)
            self._held = self._held[len(self._how.begin) + length :]
        self._tell(self._certain())

    def finish(self) -> None:
        """The answer is over."""
        if not self._how.begin and self._read(self._held):
            self._held = ""
        self._tell(len(self._held))

    def _certain(self) -> int:
        """How much of what is held is text, whatever comes."""
        begin = self._how.begin
        if begin in self._held:
            return self._held.index(begin)
        parts = range(len(begin) - 1, 0, -1)
        return len(self._held) - next((n for n in parts if self._held.endswith(begin[:n])), 0)

    def _tell(self, length: int) -> None:
        told, self._held = self._held[:length], self._held[length:]
        # Between calls there is white space, which belongs to their spelling.
        if not self.calls or told.strip():
            self.content += told

    def _read(self, text: str) -> int:
        """Length of the call that a text begins with, which is noted then; 0 if it is none."""
        how = self._how
        try:
            call, length = JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
            name, arguments = call["name"], call[how.arguments]
        except (ValueError, TypeError, KeyError):
            return 0
        rest = text[length:].lstrip()
        whole = rest.startswith(how.end) if how.end else not rest
        if not whole or name not in self._names or not isinstance(arguments, dict):
            return 0
        self.calls.append(
            {
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
        )
        return len(text) - len(rest) + len(how.end)


def functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each function's arguments, by its name; without one it takes none."""
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    return {t["function"]["name"]: t["function"].get("parameters") or none for t in tools}
