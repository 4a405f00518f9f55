"""The audit of two OpenAI-style servers, one that speculates and one that does not.

Outputs are drawn from both in turns, each on a seed of its own, and their laws are compared by
``outrider.audit.statistics``; at temperature 0 the outputs themselves are. Where both servers
report logprobs, those of the same token after the same tokens are compared too.

A server is not trusted: only the two URLs are asked (no redirects), a body has at most
``LARGEST_BODY`` bytes, every wait and the number of tries are bounded. With a log, an audit that
was broken off goes on where it was.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from outrider.audit.statistics import Report, Stratum, Verdict, compare
from outrider.errors import EndpointError, PromptError, UsageError

try:
    import httpx2
except ModuleNotFoundError as error:
    raise UsageError(
        "An audit of servers needs httpx2, which is not installed.",
        hint="Run: pip install outrider[audit]",
    ) from error

__all__ = [
    "ANSWER_S",
    "CONNECT_S",
    "LARGEST_BODY",
    "LOGPROB_TOLERANCE",
    "LONGEST_HOLD_S",
    "MOST_RETRIES",
    "MOST_WORKERS",
    "Answer",
    "Clock",
    "EndpointDifference",
    "EndpointReport",
    "LogprobComparison",
    "LogprobGap",
    "Pace",
    "Side",
    "audit_endpoints",
    "base_url",
    "compare_logprobs",
    "words",
]

LOGPROB_TOLERANCE = 0.5
"""In nats. Two servers that round differently are some hundredths apart; half a nat is a factor
of 1.6 in probability."""

LARGEST_BODY = 1_000_000
"""Bytes of an answer; more is refused."""

MOST_WORKERS = 8
MOST_RETRIES = 20
LONGEST_HOLD_S = 60.0
"""Longest wait before another try, whatever a server's Retry-After says."""

CONNECT_S = 10.0
ANSWER_S = 300.0
"""An answer comes whole, so a server may be silent for as long as it generates."""

_MESSAGE = 300  # characters of a server's own words in an error
_JOIN_S = 5.0
_LOG = {"log": "outrider audit of endpoints", "version": 1}
_OWN_FIELDS = {
    *("model", "prompt", "messages", "seed", "logprobs", "top_logprobs"),
    *("stream", "n", "best_of", "echo", "suffix"),
}
_REFUSES_LOGPROBS = (400, 404, 422)

Side = Literal["plain", "speculative"]
Kind = Literal["tokens", "words"]
Advance = Callable[[int, int], None]
"""Called with the outputs drawn so far and those to draw in all."""

_SIDES: tuple[Side, Side] = ("plain", "speculative")


class Clock(Protocol):
    """Where time comes from; a test brings its own."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def sleep(self, seconds: float) -> object:
        """Wait."""
        ...


class _StoppedError(Exception):
    """The audit was broken off; the worker has nothing more to do."""


class _RefusedError(EndpointError):
    """An answer with a 4xx status, at which trying again does not help."""

    def __init__(self, status: int, problem: str, *, hint: str) -> None:
        super().__init__(problem, hint=hint)
        self.status = status


# --- what a server said ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """One output.

    Parameters
    ----------
    side, prompt, seed
        Which server and prompt, counted from 0, and the seed that was sent.
    text
        As the server gave it.
    tokens
        Token strings; ``None`` where the server told none.
    logprobs
        In nats, one for each token, ``None`` where it is no number.
    finish_reason
        ``stop``, ``length``, ...
    """

    side: Side
    prompt: int
    seed: int
    text: str
    tokens: tuple[str, ...] | None
    logprobs: tuple[float | None, ...] | None
    finish_reason: str | None

    def symbols(self, kind: Kind) -> tuple[str, ...]:
        """Tokens or words, without the finish reason."""
        return (self.tokens or ()) if kind == "tokens" else tuple(words(self.text))

    def to_record(self) -> dict[str, Any]:
        """One line of the log."""
        kind: Kind = "words" if self.tokens is None else "tokens"
        return {
            "side": self.side,
            "prompt": self.prompt,
            "seed": self.seed,
            "kind": kind,
            "symbols": list(self.symbols(kind)),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "logprobs": None if self.logprobs is None else list(self.logprobs),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Answer:
        """Back from the log; ``KeyError``, ``TypeError`` or ``ValueError`` if it is no answer."""
        symbols, logprobs, finish = record["symbols"], record["logprobs"], record["finish_reason"]
        text = record["text"]
        if not (isinstance(text, str) and all(isinstance(symbol, str) for symbol in symbols)):
            raise TypeError("no text")
        if not (finish is None or isinstance(finish, str)) or record["side"] not in _SIDES:
            raise ValueError("no side or finish reason")
        return cls(
            record["side"],
            int(record["prompt"]),
            int(record["seed"]),
            text,
            tuple(symbols) if record["kind"] == "tokens" else None,
            None if logprobs is None else tuple(_number(value) for value in logprobs),
            finish,
        )


def words(text: str) -> list[str]:
    """Words and punctuation, each with the space before it; together they are the text.

    >>> words("It's 3 p.m.,  no?")
    ['It', "'", 's', ' 3', ' p', '.', 'm', '.', ',', '  no', '?']
    """
    return re.findall(r"\s*(?:\w+|[^\w\s])|\s+", text)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _read_answer(data: bytes, task: _Task, url: str) -> Answer:
    """An answer's text, tokens, logprobs and finish reason, of either kind of completion.

    Raises
    ------
    EndpointError
        When it is no such answer.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise _malformed(url, "an answer in JSON", f"{len(data)} bytes that are not") from None
    choices = body.get("choices") if isinstance(body, dict) else None
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise _malformed(url, "an answer with 'choices'", "one without")
    choice = choices[0]
    text = _text(choice)
    if text is None:
        raise _malformed(url, "a choice with a text or a message", "one without")
    finish = choice.get("finish_reason")
    tokens, logprobs = _read_logprobs(choice.get("logprobs"))
    if tokens is not None and logprobs is not None and len(tokens) != len(logprobs):
        raise _malformed(
            url, "a logprob for each token", f"{len(logprobs)} for {len(tokens)} tokens"
        )
    if text and not tokens:
        tokens = logprobs = None
    return Answer(
        task.side,
        task.prompt,
        task.seed,
        text,
        tokens,
        logprobs,
        finish if isinstance(finish, str) else None,
    )


def _text(choice: Mapping[str, Any]) -> str | None:
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    message = choice.get("message")
    if not isinstance(message, dict):
        return None
    # What a model thinks aloud is output too, and all of it where max_tokens ends it there.
    thought = message.get("reasoning_content") or message.get("reasoning")
    parts = (thought, message.get("content"))
    return "".join(part for part in parts if isinstance(part, str))


def _read_logprobs(
    found: object,
) -> tuple[tuple[str, ...] | None, tuple[float | None, ...] | None]:
    """Tokens and their logprobs in the form of completions or of chats; servers mix them."""
    if not isinstance(found, dict):
        return None, None
    if isinstance(found.get("content"), list):
        entries = [entry if isinstance(entry, dict) else {} for entry in found["content"]]
        tokens: object = [entry.get("token") for entry in entries]
        numbers: object = [entry.get("logprob") for entry in entries]
    else:
        tokens, numbers = found.get("tokens"), found.get("token_logprobs")
    if not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
        return None, None
    logprobs = tuple(_number(n) for n in numbers) if isinstance(numbers, list) else None
    return tuple(tokens), logprobs


def _malformed(url: str, wanted: str, got: str) -> EndpointError:
    return EndpointError(
        f"{url} was to give {wanted}; got {got}.",
        hint="Check that the URL is that of an OpenAI-style server.",
    )


# --- asking ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    number: int
    side: Side
    prompt: int
    seed: int


def _tasks(prompts: int, samples: int, seed: int) -> list[_Task]:
    """All requests in their order: sides in turns, and prompts too, so drift falls on all.

    Numbers do not depend on ``samples``: a later run with more of them can use the log.
    """
    return [
        _Task(number, _SIDES[number % 2], number // 2 % prompts, seed + number)
        for number in range(2 * samples * prompts)
    ]


class Pace:
    """Hands out the moments at which requests may start, ``rate`` a second at most.

    Parameters
    ----------
    rate
        Requests a second, over all workers; ``None`` for no limit.
    now, sleep
        Seconds.

    Example
    -------
    >>> waits = []
    >>> pace = Pace(4.0, lambda: 0.0, waits.append)
    >>> for _ in range(3):
    ...     pace.wait()
    >>> waits
    [0.25, 0.5]
    """

    def __init__(
        self, rate: float | None, now: Callable[[], float], sleep: Callable[[float], object]
    ) -> None:
        self._interval = 1 / rate if rate else 0.0
        self._now, self._sleep = now, sleep
        self._free = -math.inf
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Sleep until the next request may start."""
        with self._lock:
            now = self._now()
            at = max(now, self._free)
            self._free = at + self._interval
        if at > now:
            self._sleep(at - now)

    def hold(self, seconds: float) -> None:
        """Let no request start for some time: a server that is full is so for all workers."""
        with self._lock:
            self._free = max(self._free, self._now() + seconds)


@dataclass
class _Counts:
    requests: int = 0
    retries: int = 0


class _Asker:
    """Sends requests, again where that may help, and reads answers. Shared by all workers."""

    def __init__(
        self,
        urls: Mapping[Side, str],
        prompts: Sequence[str],
        fields: Mapping[str, Any],
        *,
        chat: bool,
        api_key: str | None,
        retries: int,
        pace: Pace,
        now: Callable[[], float],
        stop: threading.Event,
    ) -> None:
        self._urls, self._prompts, self._fields, self._chat = urls, prompts, fields, chat
        self._key, self._retries, self._pace = api_key, retries, pace
        self._now, self._stop = now, stop
        self._logprobs: dict[Side, bool] = {"plain": True, "speculative": True}
        self._lock = threading.Lock()
        self.counts = _Counts()

    def client(self) -> httpx2.Client:
        """A client for one worker."""
        headers = {"User-Agent": "outrider", "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            follow_redirects=False,
        )

    def ask(self, client: httpx2.Client, task: _Task) -> Answer:
        """One answer; a server that refuses logprobs is not asked for them again.

        Raises
        ------
        EndpointError
            When none can be had.
        """
        url = self._urls[task.side]
        wanted = self._logprobs[task.side]
        try:
            data = self._post(client, url, self._body(task, wanted))
        except _RefusedError as error:
            if not wanted or error.status not in _REFUSES_LOGPROBS:
                raise
            # If the logprobs were not the reason, this is refused as well, and told.
            data = self._post(client, url, self._body(task, False))
            self._logprobs[task.side] = False
        return _read_answer(data, task, url)

    def _body(self, task: _Task, logprobs: bool) -> bytes:
        text = self._prompts[task.prompt]
        body: dict[str, Any] = {**self._fields, "seed": task.seed}
        if self._chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": 1} if self._chat else {"logprobs": 1}
        return json.dumps(body).encode()

    def _post(self, client: httpx2.Client, url: str, body: bytes) -> bytes:
        for tried in range(self._retries + 1):
            self._pace.wait()
            if self._stop.is_set():
                raise _StoppedError
            with self._lock:
                self.counts.requests += 1
                self.counts.retries += tried > 0
            backoff = min(0.5 * 2**tried, LONGEST_HOLD_S)
            try:
                status, headers, data = self._exchange(client, url, body)
            except httpx2.TransportError as error:
                what = f"{type(error).__name__}, {self._clean(str(error))}"
            except httpx2.RequestError as error:
                raise _malformed(url, "an answer", self._clean(str(error))) from None
            else:
                if status == 200:
                    return data
                what = f"status {status}, {self._message(data)}"
                if status in (429, 503):
                    backoff = _retry_after(headers.get("Retry-After"), backoff)
                elif status < 500:
                    raise self._refused(status, url, what, headers)
            if tried < self._retries:
                self._pace.hold(backoff)
        raise EndpointError(
            f"{url} was to answer within {self._retries + 1} tries; the last one gave {what}",
            hint="Check that the server runs and has room; ask it less often, or try again later.",
        )

    def _exchange(
        self, client: httpx2.Client, url: str, body: bytes
    ) -> tuple[int, httpx2.Headers, bytes]:
        started, data = self._now(), bytearray()
        with client.stream("POST", url, content=body) as response:
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > LARGEST_BODY:
                    if response.status_code != 200:
                        break  # the beginning of an error says enough
                    raise _malformed(
                        url, f"at most {LARGEST_BODY} bytes", "an answer that is longer"
                    )
                if self._now() - started > ANSWER_S:
                    raise httpx2.ReadTimeout(f"not whole after {ANSWER_S:g} s")
            return response.status_code, response.headers, bytes(data)

    def _refused(self, status: int, url: str, what: str, headers: httpx2.Headers) -> EndpointError:
        if status < 400:
            to = self._clean(headers.get("Location", "nowhere"))
            return EndpointError(
                f"{url} was to answer itself; got status {status}, pointing to {to}.",
                hint="Redirects are not followed: give the URL that answers.",
            )
        hint = "Check the model's name and the request's fields against what the server takes."
        if status in (401, 403):
            hint = "Check the API key."
        elif status == 404:
            hint = "Check the URL and the model's name."
        return _RefusedError(status, f"{url} was to answer; got {what}", hint=hint)

    def _message(self, data: bytes) -> str:
        """A server's own words, wherever servers put them."""
        try:
            found: Any = json.loads(data)
        except (ValueError, RecursionError):
            found = data.decode(errors="replace")
        while isinstance(found, dict):
            found = next((found[n] for n in ("error", "message", "detail") if n in found), "")
        return self._clean(found if isinstance(found, str) else json.dumps(found))

    def _clean(self, text: str) -> str:
        """Fit for a terminal, short, and without the key, which a server may quote."""
        if self._key:
            text = text.replace(self._key, "***")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text[:_MESSAGE] or "no message"


def _retry_after(value: str | None, otherwise: float) -> float:
    """Seconds to wait, from a number or a date, at most ``LONGEST_HOLD_S``."""
    seconds = otherwise
    try:
        seconds = float(value or "")
    except ValueError:
        try:
            at = parsedate_to_datetime(value or "")
            at = at if at.tzinfo else at.replace(tzinfo=UTC)
            seconds = (at - datetime.now(UTC)).total_seconds()
        except ValueError:
            pass
    if math.isnan(seconds):
        seconds = otherwise
    return min(max(seconds, 0.0), LONGEST_HOLD_S)


def _ask_all(
    tasks: Sequence[_Task],
    asker: _Asker,
    log: _Log | None,
    workers: int,
    stop: threading.Event,
    told: Callable[[Answer], None],
) -> None:
    """Ask for all; each answer is logged by its worker, which Ctrl-C does not interrupt."""
    pending, lock = iter(tasks), threading.Lock()
    results: SimpleQueue[Answer | Exception | None] = SimpleQueue()

    def work() -> None:
        try:
            with asker.client() as client:
                while not stop.is_set():
                    with lock:
                        task = next(pending, None)
                    if task is None:
                        break
                    answer = asker.ask(client, task)
                    if log:
                        log.append(answer)
                    results.put(answer)
        except _StoppedError:
            pass
        except Exception as error:
            results.put(error)
        finally:
            results.put(None)

    # Daemons: after Ctrl-C nobody waits for a server that is still generating.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(tasks)))]
    failed: Exception | None = None
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running and failed is None:
            got = results.get()
            if isinstance(got, Exception):
                failed = got
            elif got is None:
                running -= 1
            else:
                told(got)
    finally:
        stop.set()
    if failed is not None:
        until = time.monotonic() + _JOIN_S  # what the others are about to get is kept
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        raise failed


# --- the log --------------------------------------------------------------------------------------


class _Log:
    """Answers, a line each, after a line that fixes the conditions.

    Raises
    ------
    UsageError
        When the file cannot be used, is no such log, or has other conditions.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self._path, self._lock = path, threading.Lock()
        self.answers: list[Answer] = []
        header = _line({**_LOG, **conditions})
        try:
            data = path.read_bytes() if path.exists() else b""
            kept = data[: data.rfind(b"\n") + 1]  # a last line without an end is half-written
            if not kept and data and not header.startswith(data):
                raise self._unfit("is no log of an audit of endpoints")
            if kept:
                self._read(kept, conditions)
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
        if not isinstance(found, dict) or any(found.get(k) != v for k, v in _LOG.items()):
            raise self._unfit("is no log of an audit of endpoints")
        for name, wanted in conditions.items():
            if found.get(name) != wanted:
                there, here = (json.dumps(v)[:100] for v in (found.get(name), wanted))
                raise self._unfit(f"was begun with another {name}: {there} there, {here} here")
        for number, line in enumerate(lines, 2):
            try:
                self.answers.append(Answer.from_record(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise self._unfit(f"holds no answer in line {number}") from error

    def append(self, answer: Answer) -> None:
        """Add a line, unless the log was closed meanwhile.

        Raises
        ------
        EndpointError
            When it cannot be written.
        """
        with self._lock:
            if not self._file.closed:
                try:
                    self._write(_line(answer.to_record()))
                except OSError as error:
                    raise EndpointError(
                        f"An answer could not be written to the log {self._path}: "
                        f"{error.strerror or error}.",
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


@contextmanager
def _opened(path: Path, conditions: Mapping[str, Any]) -> Iterator[_Log]:
    log = _Log(path, conditions)
    try:
        yield log
    finally:
        log.close()


# --- what was found -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """One token's logprobs, in nats, by both servers: after which tokens of which prompt."""

    prompt: int
    prefix: tuple[str, ...]
    token: str
    plain: float
    speculative: float
    difference: float


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    """Reported logprobs of the same tokens after the same tokens.

    Parameters
    ----------
    compared
        Tokens in their places that both servers reported a logprob for.
    largest
        The largest absolute difference; ``None`` if none was compared.
    tolerance
        In nats; beyond it the servers differ.
    told
        A sentence for each server whose logprobs cannot be right; they are not compared.
    """

    compared: int
    largest: LogprobGap | None
    tolerance: float
    told: tuple[str, ...]

    @property
    def different(self) -> bool:
        """Whether the largest difference is beyond the tolerance."""
        return self.largest is not None and self.largest.difference > self.tolerance


def compare_logprobs(
    answers: Iterable[Answer], tolerance: float = LOGPROB_TOLERANCE
) -> LogprobComparison:
    """Compare what both servers say of the same token in the same place.

    Where a server said several things of it, those that are furthest apart are compared.
    """
    answers = list(answers)
    told = tuple(filter(None, (_implausible(side, answers) for side in _SIDES)))
    if told:
        return LogprobComparison(0, None, tolerance, told)
    nodes: dict[tuple[int, str], int] = {}  # a tree of tokens; the root of a prompt is negative
    ranges: dict[tuple[int, Side], tuple[float, float]] = {}
    for answer in answers:
        node = -1 - answer.prompt
        for token, logprob in zip(answer.tokens or (), answer.logprobs or (), strict=False):
            node = nodes.setdefault((node, token), len(nodes))
            if logprob is not None and _plausible(logprob):
                low, high = ranges.get((node, answer.side), (logprob, logprob))
                ranges[node, answer.side] = min(low, logprob), max(high, logprob)
    places = list(nodes)
    compared, largest, at = 0, (0.0, 0.0), -1
    for node in range(len(places)):
        if (node, "plain") not in ranges or (node, "speculative") not in ranges:
            continue
        compared += 1
        plain, ours = ranges[node, "plain"], ranges[node, "speculative"]
        for pair in ((plain[0], ours[1]), (plain[1], ours[0])):
            if at < 0 or abs(pair[0] - pair[1]) > abs(largest[0] - largest[1]):
                largest, at = pair, node
    if at < 0:
        return LogprobComparison(0, None, tolerance, ())
    parent, token = places[at]
    prefix: list[str] = []
    while parent >= 0:
        parent, before = places[parent]
        prefix.insert(0, before)
    difference = abs(largest[0] - largest[1])
    gap = LogprobGap(-1 - parent, tuple(map(_shown, prefix)), _shown(token), *largest, difference)
    return LogprobComparison(compared, gap, tolerance, ())


def _plausible(logprob: float) -> bool:
    return math.isfinite(logprob) and logprob < 1e-3  # rounding may leave a little above 0


def _implausible(side: Side, answers: Iterable[Answer]) -> str | None:
    found = [n for a in answers if a.side == side for n in a.logprobs or ()]
    if found and all(n is None or not math.isfinite(n) or n >= 0 for n in found):
        return (
            f"The {side} server's {len(found)} logprobs are all 0, positive or no numbers, so "
            "they were not compared."
        )
    return None


@dataclass(frozen=True, slots=True)
class EndpointDifference:
    """Where two greedy outputs first differ.

    Parameters
    ----------
    prompt, position
        Which prompt, and which symbol of the output, counted from 0.
    plain, speculative
        The symbols.
    plain_logprob, speculative_logprob
        What each server reports for its own symbol, in nats, if it does.
    gap
        Their absolute difference. Only near 0 can rounding alone, at a near-tie, be the cause.
    """

    prompt: int
    position: int
    plain: str
    speculative: str
    plain_logprob: float | None
    speculative_logprob: float | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """A verdict on two servers and all that it rests on.

    Parameters
    ----------
    verdict
        ``different`` if outputs or logprobs are; else what the statistics say of outputs.
    statistics
        ``None`` at temperature 0.
    compared
        Pairs of outputs compared for equality, at temperature 0.
    differences
        The first one of each such pair that has any.
    logprobs
        The comparison of reported logprobs.
    requests, retries, resumed
        HTTP requests sent, with retries; those that were retries; answers taken from the log.
    symbols
        What outputs are sequences of: ``tokens``, or ``words`` where a server tells no tokens.
    names
        From the statistics' token ids to texts. The last symbol of an output is its finish
        reason.
    """

    verdict: Verdict
    statistics: Report | None
    compared: int
    differences: tuple[EndpointDifference, ...]
    logprobs: LogprobComparison
    requests: int
    retries: int
    resumed: int
    symbols: Kind
    names: Mapping[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; the statistics' keys stand among the others."""
        statistics = self.statistics.to_dict() if self.statistics else {}
        return {
            **statistics,
            "method": "endpoints",
            "verdict": self.verdict,
            "compared": self.compared,
            "differences": [asdict(difference) for difference in self.differences],
            "logprobs": {**asdict(self.logprobs), "different": self.logprobs.different},
            "requests": self.requests,
            "retries": self.retries,
            "resumed": self.resumed,
            "symbols": self.symbols,
            "names": {str(number): name for number, name in self.names.items()},
        }


_Symbol = tuple[bool, str]
"""Whether it is a finish reason, and the text: no token is taken for a finish reason."""


def _symbols(answer: Answer, kind: Kind) -> list[_Symbol]:
    said = [(False, text) for text in answer.symbols(kind)]
    return [*said, (True, answer.finish_reason or "none")]


def _name(symbol: _Symbol) -> str:
    return f"<finish_reason: {_shown(symbol[1])}>" if symbol[0] else _shown(symbol[1])


def _shown(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # half a surrogate pair prints nowhere


def _strata(
    answers: Sequence[Answer], prompts: int, kind: Kind
) -> tuple[list[Stratum], dict[int, str]]:
    outputs = [_symbols(answer, kind) for answer in answers]
    # Sorted: ids, which order rare bins, must not depend on the order of the answers.
    ids = {symbol: i for i, symbol in enumerate(sorted({s for o in outputs for s in o}))}
    sides: dict[tuple[int, Side], list[list[int]]] = {}
    for answer, output in zip(answers, outputs, strict=True):
        row = [ids[symbol] for symbol in output]
        sides.setdefault((answer.prompt, answer.side), []).append(row)
    strata = [Stratum(sides[p, "plain"], sides[p, "speculative"]) for p in range(prompts)]
    return strata, {i: _name(symbol) for symbol, i in ids.items()}


def _difference(plain: Answer, ours: Answer, kind: Kind) -> EndpointDifference | None:
    one, other = _symbols(plain, kind), _symbols(ours, kind)
    # An output ends with its finish reason, so none is the beginning of another.
    at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
    if at < 0:
        return None
    said = [
        answer.logprobs[at]
        if kind == "tokens" and answer.logprobs and at < len(answer.logprobs)
        else None
        for answer in (plain, ours)
    ]
    a, b = (n if n is not None and math.isfinite(n) else None for n in said)
    gap = None if a is None or b is None else abs(a - b)
    return EndpointDifference(plain.prompt, at, _name(one[at]), _name(other[at]), a, b, gap)


# --- the audit ------------------------------------------------------------------------------------


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


def _check(
    prompts: Sequence[str],
    samples: int,
    request: Mapping[str, Any],
    seed: int,
    alpha: float,
    api_key: str | None,
    concurrency: int,
    rate: float | None,
    retries: int,
) -> None:
    if samples < 1 or not 0 < alpha < 1:
        raise UsageError(
            f"An audit needs at least one sample and an alpha between 0 and 1; got {samples} "
            f"samples and {alpha}."
        )
    if not prompts or not all(prompts):
        raise PromptError("A prompt is missing or empty.", hint="Say what to generate from.")
    if not 1 <= concurrency <= MOST_WORKERS:
        raise UsageError(f"concurrency must be from 1 to {MOST_WORKERS}; got {concurrency}.")
    if not 0 <= retries <= MOST_RETRIES:
        raise UsageError(f"retries must be from 0 to {MOST_RETRIES}; got {retries}.")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"rate must be a positive number of requests a second; got {rate}.")
    if not 0 <= seed < 2**63 - 2 * samples * len(prompts):
        raise UsageError(f"seed must leave all requests one of 63 bits; got {seed}.")
    tokens = request.get("max_tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise UsageError(f"max_tokens must be a whole number from 1; got {tokens!r}.")
    if own := sorted(_OWN_FIELDS & set(request)):
        raise UsageError(
            f"The audit sets the request's '{own[0]}' itself, or cannot read what it brings.",
            hint="Leave it out.",
        )
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise UsageError("An API key has printable ASCII characters and no spaces; this one not.")


def audit_endpoints(
    endpoint: str,
    against: str,
    prompts: Sequence[str],
    samples: int,
    *,
    request: Mapping[str, Any],
    seed: int,
    alpha: float = 1e-3,
    log: str | Path | None = None,
    model: str | None = None,
    chat: bool = False,
    api_key: str | None = None,
    concurrency: int = 1,
    rate: float | None = None,
    retries: int = 5,
    advance: Advance | None = None,
    clock: Clock | None = None,
) -> EndpointReport:
    """Draw outputs from two servers and compare them.

    There are 2 * samples * prompts requests (2 * prompts at temperature 0), each with up to
    ``retries`` more where it failed, and once more without logprobs where those are refused.

    Parameters
    ----------
    endpoint, against
        URLs of the server that speculates and of the one that does not, with or without ``/v1``.
        Both should be of one kind of server: tokens and finish reasons are taken as they come.
    prompts
        Texts to continue, or, with ``chat``, messages to answer.
    samples
        Outputs of each server for each prompt; at temperature 0 there is one.
    request
        ``max_tokens``, ``temperature`` and so on, sent to both as they are.
    seed
        The first; seeds count up from it.
    alpha
        Probability of a false alarm of the statistics.
    log
        Where finished answers are written, and taken from when the audit is run again.
    model
        The name that both servers know the model by.
    chat
        Whether to ask ``/v1/chat/completions``.
    api_key
        Sent to both servers, written nowhere.
    concurrency
        Requests at a time, from 1 to ``MOST_WORKERS``.
    rate
        Requests a second at most, over both servers.
    retries
        Of one request, from 0 to ``MOST_RETRIES``.
    advance
        Called with the outputs there are and those to be had in all.
    clock
        For tests.

    Raises
    ------
    UsageError
        When an argument is out of its range, or the log is of another audit.
    EndpointError
        When a server cannot be reached, refuses a request or answers what cannot be read.
    """
    prompts = list(prompts)
    _check(prompts, samples, request, seed, alpha, api_key, concurrency, rate, retries)
    bases: dict[Side, str] = {"plain": base_url(against), "speculative": base_url(endpoint)}
    try:
        fields: dict[str, Any] = json.loads(json.dumps(dict(request), allow_nan=False))
    except (ValueError, TypeError) as error:
        raise UsageError(f"The request must be fit for JSON: {error}.") from error
    conditions = {
        "endpoint": bases["speculative"],
        "against": bases["plain"],
        "prompts": prompts,
        "request": fields,
        "seed": seed,
        "chat": chat,
        "model": model,
    }
    greedy = fields.get("temperature") == 0
    tasks = _tasks(len(prompts), 1 if greedy else samples, seed)
    stop = threading.Event()
    now = clock.now if clock else time.monotonic
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asker = _Asker(
        {side: base + path for side, base in bases.items()},
        prompts,
        fields if model is None else {**fields, "model": model},
        chat=chat,
        api_key=api_key,
        retries=retries,
        pace=Pace(rate, now, clock.sleep if clock else stop.wait),
        now=now,
        stop=stop,
    )
    wanted = {(task.side, task.prompt, task.seed): task for task in tasks}
    answers: dict[int, Answer] = {}

    def keep(answer: Answer) -> None:
        task = wanted.get((answer.side, answer.prompt, answer.seed))
        if task:  # a log of more samples has others
            answers[task.number] = answer

    def told(answer: Answer) -> None:
        keep(answer)
        if advance:
            advance(len(answers), len(tasks))

    with _opened(Path(log), conditions) if log is not None else nullcontext() as opened:
        for answer in opened.answers if opened else ():
            keep(answer)
        resumed = len(answers)
        missing = [task for task in tasks if task.number not in answers]
        if missing:
            _ask_all(missing, asker, opened, concurrency, stop, told)
    return _report(
        [answers[task.number] for task in tasks], len(prompts), greedy, alpha, asker.counts, resumed
    )


def _report(
    answers: Sequence[Answer],
    prompts: int,
    greedy: bool,
    alpha: float,
    counts: _Counts,
    resumed: int,
) -> EndpointReport:
    # An empty output has no tokens to tell.
    kind: Kind = "words" if any(a.tokens is None and a.text for a in answers) else "tokens"
    logprobs = compare_logprobs(answers)
    statistics: Report | None = None
    names: dict[int, str] = {}
    differences: tuple[EndpointDifference, ...] = ()
    verdict: Verdict = "consistent"
    if greedy:
        pairs = zip(answers[::2], answers[1::2], strict=True)
        differences = tuple(d for pair in pairs if (d := _difference(*pair, kind)))
    else:
        strata, names = _strata(answers, prompts, kind)
        statistics = compare(strata, alpha=alpha)
        verdict = statistics.verdict
    if differences or logprobs.different:
        verdict = "different"
    return EndpointReport(
        verdict,
        statistics,
        len(answers) // 2 if greedy else 0,
        differences,
        logprobs,
        counts.requests,
        counts.retries,
        resumed,
        kind,
        names,
    )
