"""What one measured generation was, as a line of a log: everything else is derived from these."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider.core.trace import Round, Trace
from outrider.engine.generation import Output
from outrider.errors import LogError
from outrider.lab.differences import differences

__all__ = ["BARE", "Log", "Record", "Run"]

BARE = "bare"
"""In conditions, the name of a target without an adapter."""

_LETTERS = {"accepted": "a", "correction": "c", "bonus": "b", "plain": "p"}
_ROUND = tuple(f.name for f in fields(Round))
_FIRST = b'{"conditions": {'
"""How a log begins."""


@dataclass(frozen=True, slots=True)
class Record:
    """One generation of one configuration.

    Parameters
    ----------
    configuration
        The configuration's label; ``plain`` is the baseline.
    prompt, kind
        The prompt's number in its set, and its type.
    repeat
        Which turn over all prompts it was part of.
    batch
        Sequences that were decoded side by side.
    temperature, seed
        Of the request.
    prompt_tokens
        Length of the prompt.
    token_ids, pieces
        What was emitted, and each token's text.
    origins
        A letter for each token: a accepted, c correction, b bonus, p plain.
    finish_reason
        ``stop`` or ``length``; ``failed`` where a peer gave no answer.
    prefill_s, ttft_s, total_s
        Seconds for the prompt, to the first token, and in all.
    rounds
        What each round drafted, kept and cost.
    entropies
        The target's entropy in nats where each token was decided, measured apart from the timing;
        empty where it was not.
    adapter
        The LoRA adapter that makes the target one of its own; empty without one.
    drafter, rule
        What the configuration came to.
    order
        Its place in the turn, from 0: all configurations take a prompt before the next one.
    cache_bytes, peak_bytes
        Of the target's cache at the end, where it is known; most memory at work: on a GPU during
        this generation, else of the whole process so far.
    peer
        Whether another program made it. Such a record has no rounds, no pieces and no origins.
    tokens, counted
        Of a peer: how many tokens it emitted, and from what that is known: ``ids``, the server's
        ``usage``, or the ``chunks`` of its stream, of which each may hold several.
    text
        A peer's output.
    failure
        Why a peer has no output; empty where it has one.
    worker
        Which worker of a cluster measured it: its machine and a number; empty without a cluster.

    Example
    -------
    >>> one = Record("plain", 0, "chat", 0, 1, 0.0, 1, 3, [5, 6], "pp", "length", total_s=0.5)
    >>> one.trace.summary()["emitted_tokens"], Record.from_dict(one.to_dict()) == one
    (0, True)
    """

    configuration: str
    prompt: int
    kind: str
    repeat: int
    batch: int
    temperature: float
    seed: int
    prompt_tokens: int
    token_ids: list[int]
    origins: str
    finish_reason: str
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    adapter: str = ""
    drafter: str = ""
    rule: str = ""
    order: int = 0
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    peer: bool = False
    tokens: int = 0
    counted: str = ""
    text: str = ""
    failure: str = ""
    worker: str = ""

    @classmethod
    def of(cls, output: Output, **about: Any) -> Record:
        """From an output; ``about`` has the fields that an output does not know."""
        trace = output.trace
        return cls(
            seed=output.seed,
            drafter=output.drafter,
            rule=output.rule,
            prompt_tokens=trace.prompt_tokens,
            token_ids=list(output.token_ids),
            origins="".join(_LETTERS[origin] for origin in output.origins),
            finish_reason=output.finish_reason,
            prefill_s=trace.prefill_s,
            ttft_s=trace.ttft_s or 0.0,
            total_s=trace.total_s,
            rounds=list(trace.rounds),
            **about,
        )

    @property
    def trace(self) -> Trace:
        """The run's trace, with all its rates."""
        return Trace(
            prompt_tokens=self.prompt_tokens,
            prefill_s=self.prefill_s,
            ttft_s=self.ttft_s,
            total_s=self.total_s,
            rounds=list(self.rounds),
        )

    @property
    def emitted(self) -> int:
        """Number of tokens: those of all rounds, or what a peer says."""
        return self.tokens if self.peer else sum(r.emitted for r in self.rounds)

    @property
    def key(self) -> tuple[str, int, int, int, float, str]:
        """What tells it from every other record of a run."""
        turn = self.prompt, self.repeat, self.batch, self.temperature, self.adapter
        return (self.configuration, *turn)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the fields, rounds as rows, and the trace's summary beside them, which
        a peer has none of."""
        told = {f.name: getattr(self, f.name) for f in fields(self)}
        told["rounds"] = [[asdict(r)[name] for name in _ROUND] for r in self.rounds]
        return told if self.peer else told | {"summary": self.trace.summary()}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Record:
        """The inverse of ``to_dict``.

        Raises
        ------
        LogError
            When fields are missing or unknown.
        """
        values = {k: v for k, v in told.items() if k != "summary"}
        try:
            values["rounds"] = [
                Round(**dict(zip(_ROUND, row, strict=True))) for row in values["rounds"]
            ]
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise LogError(f"A line of the log is no measurement: {error}.") from error


@dataclass(frozen=True, slots=True)
class Run:
    """A measurement: all that its figures depend on, and its records."""

    conditions: dict[str, Any]
    records: list[Record]


class Log:
    """A file of conditions and records, one JSON object a line, on disk when ``add`` returns.

    A run that was broken off leaves at most one half line, which is dropped when it goes on.

    Parameters
    ----------
    path
        The file; made when the first line is written.

    Example
    -------
    >>> import tempfile
    >>> log = Log(Path(tempfile.mkdtemp()) / "bench.jsonl")
    >>> log.begin({"target": "toy"})
    >>> log.add(Record("plain", 0, "chat", 0, 1, 0.0, 1, 3, [5], "p", "length"))
    >>> log.conditions()["target"], [one.configuration for one in log.records()]
    ('toy', ['plain'])
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, conditions: Mapping[str, Any], fixed: Iterable[str] = ()) -> None:
        """Write the conditions, or go on with a log that has them.

        Parameters
        ----------
        conditions
            All that the figures depend on.
        fixed
            Names of conditions that must be as they were, if the log is gone on with.

        Raises
        ------
        LogError
            When one of them is not, or the file is no log.
        """
        if self.started:
            self._refuse_other(self.conditions(), conditions, fixed)
            self._drop_half_line()
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_half_line()
        self._write({"conditions": dict(conditions)})

    @property
    def started(self) -> bool:
        """Whether there is something to go on with.

        Raises
        ------
        LogError
            When the file is something else than a log, which must not be written to.
        """
        if not self.path.exists():
            return False
        if next(self._lines(), None) is not None:
            return True
        with self.path.open("rb") as stream:
            head = stream.read(len(_FIRST))
        if head != _FIRST[: len(head)]:
            raise self._no_log()
        return False

    def update(self, conditions: Mapping[str, Any]) -> None:
        """Write conditions that have changed since ``begin``, such as the number of repeats."""
        before = self.conditions()
        changed = {k: v for k, v in conditions.items() if before.get(k) != _as_read(v)}
        if changed:
            self._write({"conditions": changed})

    def target(self, adapter: str, about: Mapping[str, Any], fixed: Iterable[str] = ()) -> None:
        """Write what is known of one target: the model with an adapter, or without one (``bare``).

        It is found again in ``conditions()["targets"][adapter]``.

        Raises
        ------
        LogError
            When the log has the same target with something else in a ``fixed`` place.
        """
        before = self.conditions().get("targets", {}).get(adapter)
        if before is None:
            self._write({"conditions": {"targets": {adapter: dict(about)}}})
        else:
            self._refuse_other(before, about, fixed)

    def _refuse_other(
        self, before: Mapping[str, Any], now: Mapping[str, Any], fixed: Iterable[str]
    ) -> None:
        found = differences(before, _as_read(now), fixed)
        if found:
            raise LogError(
                f"'{self.path}' is of another run, so it cannot be gone on with. What differs: "
                f"{'; '.join(found)}.",
                hint="Give --log another file, or repeat that run: outrider report shows how.",
            )

    def add(self, record: Record) -> None:
        """Append a record."""
        self._write(record.to_dict())

    def conditions(self) -> dict[str, Any]:
        """What ``begin`` and ``update`` wrote, and in ``targets`` what ``target`` did."""
        told: dict[str, Any] | None = None
        for line in self._lines():
            more = line.get("conditions")
            if isinstance(more, dict):
                targets = {**(told or {}).get("targets", {}), **more.get("targets", {})}
                told = {**(told or {}), **more} | ({"targets": targets} if targets else {})
            elif told is None:
                break
        if told is None:
            raise self._no_log()
        return told

    def run(self) -> Run:
        """All of it."""
        return Run(self.conditions(), list(self.records()))

    def records(self) -> Iterator[Record]:
        """All records, in the order in which they were made."""
        for line in self._lines():
            if "conditions" not in line:
                yield Record.from_dict(line)

    def _no_log(self) -> LogError:
        return LogError(
            f"'{self.path}' is no log of measurements: it does not begin with conditions.",
            hint="Give a file that outrider bench --log wrote.",
        )

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open(encoding="utf-8") as stream:
                for number, line in enumerate(stream, 1):
                    if line.endswith("\n"):
                        yield self._parse(line, number)
        except (OSError, UnicodeDecodeError) as error:
            raise LogError(f"'{self.path}' cannot be read: {error}.") from error

    def _parse(self, line: str, number: int) -> dict[str, Any]:
        try:
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError("no object")
        except ValueError as error:
            raise LogError(
                f"Line {number} of '{self.path}' is not JSON: {error}.",
                hint="Give a file that outrider bench --log wrote.",
            ) from error
        return found

    def _drop_half_line(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb+") as stream:
            text = stream.read()
            whole = text.rfind(b"\n") + 1
            if whole < len(text):
                stream.truncate(whole)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, default=str) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _as_read(value: Any) -> Any:
    """A value as it comes out of a log again."""
    return json.loads(json.dumps(value, default=str))
