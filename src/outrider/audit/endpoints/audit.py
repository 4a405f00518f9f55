"""The audit itself: what to ask, the workers that ask it, and what is made of the answers."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from outrider.audit.endpoints.answers import SIDES, Answer, Side, Task
from outrider.audit.endpoints.client import Asker, StoppedError, base_url
from outrider.audit.endpoints.log import Log
from outrider.audit.endpoints.pace import Clock, Pace
from outrider.audit.endpoints.report import EndpointReport, report_on
from outrider.errors import PromptError, UsageError

__all__ = ["MOST_RETRIES", "MOST_WORKERS", "audit_endpoints"]

MOST_WORKERS = 8
MOST_RETRIES = 20

_JOIN_S = 5.0
_OWN_FIELDS = {
    *("model", "prompt", "messages", "seed", "logprobs", "top_logprobs"),
    *("stream", "n", "best_of", "echo", "suffix"),
}


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
    advance: Callable[[int, int], None] | None = None,
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
    _check(prompts, samples, seed, alpha, api_key, concurrency, rate, retries)
    fields = _fields(request)
    bases: dict[Side, str] = {"plain": base_url(against), "speculative": base_url(endpoint)}
    greedy = fields.get("temperature") == 0
    tasks = _tasks(len(prompts), 1 if greedy else samples, seed)
    conditions = {
        "endpoint": bases["speculative"],
        "against": bases["plain"],
        "prompts": prompts,
        "request": fields,
        "seed": seed,
        "chat": chat,
        "model": model,
    }
    stop = threading.Event()
    now, sleep = (clock.now, clock.sleep) if clock else (time.monotonic, stop.wait)
    body = fields if model is None else {**fields, "model": model}
    asker = Asker(bases, prompts, body, chat, api_key, retries, Pace(rate, now, sleep), stop)

    def told(answer: Answer) -> None:
        answers[answer.task] = answer
        if advance:
            advance(len(answers), len(tasks))

    with closing(Log(Path(log), conditions)) if log is not None else nullcontext() as opened:
        wanted = set(tasks)  # a log of more samples has others
        found = opened.answers if opened else ()
        answers = {answer.task: answer for answer in found if answer.task in wanted}
        resumed = len(answers)
        missing = [task for task in tasks if task not in answers]
        _ask_all(missing, asker, opened, concurrency, told)
    ordered = [answers[task] for task in tasks]
    return report_on(ordered, greedy, alpha, asker.requests, asker.retried, resumed)


def _check(
    prompts: Sequence[str],
    samples: int,
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
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise UsageError("An API key has printable ASCII characters and no spaces; this one not.")


def _fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's part of a request, as JSON has it."""
    try:
        fields: dict[str, Any] = json.loads(json.dumps(dict(request), allow_nan=False))
    except (ValueError, TypeError) as error:
        raise UsageError(f"The request must be fit for JSON: {error}.") from error
    tokens = fields.get("max_tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise UsageError(f"max_tokens must be a whole number from 1; got {tokens!r}.")
    if own := sorted(_OWN_FIELDS & set(fields)):
        raise UsageError(
            f"The audit sets the request's '{own[0]}' itself, or cannot read what it brings.",
            hint="Leave it out.",
        )
    return fields


def _tasks(prompts: int, samples: int, seed: int) -> list[Task]:
    """All requests in their order: sides in turns, and prompts too, so drift falls on all.

    Seeds do not depend on ``samples``: a later run with more of them can use the log.
    """
    return [Task(SIDES[n % 2], n // 2 % prompts, seed + n) for n in range(2 * samples * prompts)]


def _ask_all(
    tasks: Sequence[Task],
    asker: Asker,
    log: Log | None,
    workers: int,
    told: Callable[[Answer], None],
) -> None:
    """Ask for all; each answer is logged by its worker, which Ctrl-C does not interrupt."""
    pending, lock = iter(tasks), threading.Lock()
    results: SimpleQueue[Answer | Exception | None] = SimpleQueue()

    def work() -> None:
        try:
            with asker.client() as client:
                while not asker.stop.is_set():
                    with lock:
                        task = next(pending, None)
                    if task is None:
                        break
                    answer = asker.ask(client, task)
                    if log:
                        log.append(answer)
                    results.put(answer)
        except StoppedError:
            pass
        except Exception as error:
            results.put(error)
        finally:
            results.put(None)

    # Daemons: after Ctrl-C nobody waits for a server that is still generating.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(tasks)))]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            while (got := results.get()) is not None:  # each puts one None, its last
                if isinstance(got, Exception):
                    raise got
                told(got)
    except Exception:
        asker.stop.set()
        until = time.monotonic() + _JOIN_S  # what the others are about to get is kept
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        raise
    finally:
        asker.stop.set()
