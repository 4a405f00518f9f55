"""What is measured against plain decoding: a drafter, a rule and a draft length, by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from outrider.errors import UsageError
from outrider.registry import POLICIES, did_you_mean

__all__ = [
    "PLAIN", "Configuration", "Labelled", "check_labels", "combine", "parse_configuration",
    "parse_length",
]  # fmt: skip

PLAIN = "plain"
"""The label of the baseline."""

_KEYS = ("drafter", "rule", "draft-length", "label")
_KEY = re.compile(r"(?:^|,)\s*([A-Za-z][A-Za-z_-]*)=")
_CLOSE = 0.75  # how much like a key's name a word is that must be a misspelling of it
_EXAMPLE = "Example: --config drafter=eagle,rule=rejection,draft-length=4"


class Labelled(Protocol):
    """What is measured under a name."""

    @property
    def label(self) -> str:
        """The name."""
        ...


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to decode.

    Parameters
    ----------
    drafter, rule
        By name, as ``Engine`` takes them.
    draft_length
        A number, ``auto`` or a policy's name.
    label
        What to call it; by default its shortest spelling, which ``parse_configuration`` reads.

    Raises
    ------
    UsageError
        When it is labelled ``plain`` and is not plain decoding.

    Example
    -------
    >>> Configuration("eagle", draft_length=4).label
    'eagle,draft-length=4'
    >>> Configuration.plain().is_plain
    True
    """

    drafter: str
    rule: str = "auto"
    draft_length: int | str = "auto"
    label: str = ""

    def __post_init__(self) -> None:
        if self.label == PLAIN and self.drafter != "none":
            raise UsageError(
                f"'{PLAIN}' is the baseline's own label; got it for '{self.drafter}'.",
                hint="Give another label.",
            )
        if not self.label:
            parts = [self.drafter]
            parts += [f"rule={self.rule}"] * (self.rule != "auto")
            parts += [f"draft-length={self.draft_length}"] * (self.draft_length != "auto")
            object.__setattr__(self, "label", ",".join(parts))

    @classmethod
    def plain(cls) -> Configuration:
        """The baseline: no drafter."""
        return cls("none", label=PLAIN)

    @property
    def is_plain(self) -> bool:
        """Whether it is the baseline."""
        return self.label == PLAIN


def parse_length(text: str) -> int | str:
    """A number, ``auto``, or a policy's name.

    Raises
    ------
    UsageError
        When it is none of these.
    """
    if text.isdecimal():
        return int(text)
    name = text.partition(":")[0]
    if name != "auto" and name not in POLICIES:
        known = ["auto", *POLICIES]
        raise UsageError(
            f"A draft length (--draft-length) is a number, auto or a policy's name; got '{text}'.",
            hint=did_you_mean(name, known),
        )
    return text


def parse_configuration(text: str) -> Configuration:
    """From ``drafter=eagle,rule=rejection,draft-length=4``; ``drafter=`` may be left out.

    A drafter's argument may hold commas and signs of equality (``model:PATH#tree=4,2``), so only
    the names of keys part the text.

    Raises
    ------
    UsageError
        When a key is unknown, given twice or empty, there is no drafter, or a length is none.

    Example
    -------
    >>> parse_configuration("suffix:match=3+eagle,rule=rejection")
    Configuration(drafter='suffix:match=3+eagle', rule='rejection', draft_length='auto', \
label='suffix:match=3+eagle,rule=rejection')
    """
    text = text.strip()
    found: dict[str, str] = {}
    for key, value in _split(text):
        if key in found:
            raise UsageError(f"'{key}' is given twice in '{text}'.", hint="Leave one out.")
        if not value:
            raise UsageError(f"'{key}' has no value in '{text}'.", hint=_EXAMPLE)
        found[key] = value
    if "drafter" not in found:
        raise UsageError(f"A configuration needs a drafter; got '{text}'.", hint=_EXAMPLE)
    return Configuration(
        found["drafter"],
        found.get("rule", "auto"),
        parse_length(found.get("draft-length", "auto")),
        found.get("label", ""),
    )


def combine(
    drafters: Sequence[str], rules: Sequence[str] = (), lengths: Sequence[str] = ()
) -> list[Configuration]:
    """Every drafter with every rule and every draft length; ``auto`` where none is named.

    >>> [c.label for c in combine(["ngram"], lengths=["2", "8"])]
    ['ngram,draft-length=2', 'ngram,draft-length=8']
    """
    return [
        Configuration(drafter, rule, parse_length(length))
        for drafter in drafters or ["auto"]
        for rule in rules or ["auto"]
        for length in lengths or ["auto"]
    ]


def check_labels(configurations: Iterable[Labelled]) -> None:
    """Raise ``UsageError`` where two have one label: their figures would be taken for one."""
    seen: set[str] = set()
    for one in configurations:
        if one.label in seen:
            raise UsageError(
                f"Two configurations are called '{one.label}'.",
                hint="Leave one out, or add label=NAME to one.",
            )
        seen.add(one.label)


def _split(text: str) -> list[tuple[str, str]]:
    """Keys and values in their order."""
    cuts = []
    for match in _KEY.finditer(text):
        key = match[1].replace("_", "-")
        if key in _KEYS:
            cuts.append((match.start(), match.end(), key))
        elif match.start() == 0 or difflib.get_close_matches(key, _KEYS, n=1, cutoff=_CLOSE):
            raise UsageError(
                f"A configuration has no '{match[1]}'.", hint=did_you_mean(key, list(_KEYS))
            )
    bounds = [*cuts, (len(text), len(text), "")]
    # What stands before the first key is the drafter.
    parts = [("drafter", text[: bounds[0][0]])] if bounds[0][0] or not cuts else []
    parts += [(key, text[start:end]) for (_, start, key), (end, _, _) in pairwise(bounds)]
    return [(key, value.strip()) for key, value in parts]
