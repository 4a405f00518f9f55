"""The verdict on two servers, from all their answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.audit.endpoints.answers import Answer, Kind, Side
from outrider.audit.endpoints.logprobs import LogprobComparison, compare_logprobs, shown
from outrider.audit.statistics import Report, Stratum, Verdict, compare

__all__ = ["EndpointDifference", "EndpointReport", "report_on"]


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
    names: Mapping[int, str]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; the statistics' keys stand among the others."""
        found = asdict(replace(self, statistics=None))
        del found["statistics"]
        found["differences"] = list(found["differences"])
        found["logprobs"]["different"] = self.logprobs.different
        found["names"] = {str(number): name for number, name in self.names.items()}
        statistics = self.statistics.to_dict() if self.statistics else {}
        return {**statistics, "method": "endpoints", **found}


def report_on(
    answers: Sequence[Answer], greedy: bool, alpha: float, requests: int, retries: int, resumed: int
) -> EndpointReport:
    """Compare answers, which come in pairs: a plain one, then a speculative one.

    Parameters
    ----------
    greedy
        Whether outputs are to be equal; else only their laws are.
    alpha
        Probability of a false alarm of the statistics.
    requests, retries, resumed
        As in the report.
    """
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
        strata, names = _strata(answers, kind)
        statistics = compare(strata, alpha=alpha)
        verdict = statistics.verdict
    if differences or logprobs.different:
        verdict = "different"
    compared = len(answers) // 2 if greedy else 0
    counts = requests, retries, resumed
    return EndpointReport(
        verdict, statistics, compared, differences, logprobs, *counts, symbols=kind, names=names
    )


_Symbol = tuple[bool, str]
"""Whether it is a finish reason, and the text: no token is taken for a finish reason."""


def _symbols(answer: Answer, kind: Kind) -> list[_Symbol]:
    said = [(False, text) for text in answer.symbols(kind)]
    return [*said, (True, answer.finish_reason or "none")]


def _name(symbol: _Symbol) -> str:
    return f"<finish_reason: {shown(symbol[1])}>" if symbol[0] else shown(symbol[1])


def _strata(answers: Sequence[Answer], kind: Kind) -> tuple[list[Stratum], dict[int, str]]:
    outputs = [_symbols(answer, kind) for answer in answers]
    # Sorted: ids, which order rare bins, must not depend on the order of the answers.
    ids = {symbol: i for i, symbol in enumerate(sorted({s for o in outputs for s in o}))}
    rows: dict[tuple[int, Side], list[list[int]]] = {}
    for answer, output in zip(answers, outputs, strict=True):
        row = [ids[symbol] for symbol in output]
        rows.setdefault((answer.prompt, answer.side), []).append(row)
    prompts = len(rows) // 2
    strata = [Stratum(rows[p, "plain"], rows[p, "speculative"]) for p in range(prompts)]
    return strata, {i: _name(symbol) for symbol, i in ids.items()}


def _difference(plain: Answer, ours: Answer, kind: Kind) -> EndpointDifference | None:
    one, other = _symbols(plain, kind), _symbols(ours, kind)
    # An output ends with its finish reason, so none is the beginning of another.
    at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
    if at < 0:
        return None
    a, b = (_logprob(answer, at) if kind == "tokens" else None for answer in (plain, ours))
    gap = None if a is None or b is None else abs(a - b)
    return EndpointDifference(plain.prompt, at, _name(one[at]), _name(other[at]), a, b, gap)


def _logprob(answer: Answer, at: int) -> float | None:
    logprobs = answer.logprobs or ()
    found = logprobs[at] if at < len(logprobs) else None
    return found if found is not None and math.isfinite(found) else None
