"""The page of an audit: one file, which loads nothing.

What ``outrider audit --json`` prints goes in; every text of it is escaped on the way.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from outrider.errors import UsageError
from outrider.report import pictures, wording
from outrider.report.page import Markup, render, write_page
from outrider.report.wording import Result

__all__ = ["audit_page", "write_page"]

MARKS = (0.01, 0.02, 0.05)
"""Biases that the pictures mark."""

_MOST = 60  # pictures of laws in a page; the rest is in its data
_WIDE = 48  # columns of a label in a table


@dataclass(frozen=True, slots=True)
class _Figure:
    caption: str
    svg: Markup


@dataclass(frozen=True, slots=True)
class _Group:
    title: str
    note: str
    figures: list[_Figure]
    legend: bool = False


def audit_page(
    result: Mapping[str, Any],
    *,
    texts: Mapping[int, str] | None = None,
    versions: Mapping[str, str] | None = None,
    command: str = "",
) -> str:
    """Lay out the result of an audit as one HTML page that loads nothing.

    Parameters
    ----------
    result
        What ``outrider audit --json`` prints.
    texts
        Of token ids; without them the ids stand for themselves.
    versions
        Of what took part, by name.
    command
        The command line that repeats the audit.

    Raises
    ------
    UsageError
        When the result's method or verdict is unknown.
    """
    methods = ("enumeration", "samples", "tokens", "endpoints", "none")
    if result.get("method") not in methods or result.get("verdict") not in wording.HEADLINES:
        raise UsageError(
            f"No page can be made of an audit by '{result.get('method')}' with the verdict "
            f"'{result.get('verdict')}'.",
            hint="Give the object that outrider audit --json prints.",
        )
    names = {int(token): text for token, text in result.get("names", {}).items()}
    words = names or dict(texts or {})
    headline, sign, tone = wording.HEADLINES[result["verdict"]]
    data = json.dumps(result, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace")
    filters: dict[str, Callable[..., Any]] = {
        "percent": wording.percent,
        "number": wording.number,
        "seen": lambda text: wording.visible(str(text)),
        "label": lambda tokens: wording.label(tokens, words, _WIDE),
        "one": lambda token: "⟨end⟩" if token is None else wording.label([token], words, _WIDE),
    }
    return render(
        "audit.html.j2",
        filters=filters,
        result=result,
        headline=headline,
        sign=sign,
        tone=tone,
        sides=wording.sides(result),
        claims=wording.claims(result),
        prompts=[wording.visible(str(p), keep="\n") for p in result["prompts"]],
        tested=wording.tested(result),
        unseen=wording.unseen(result),
        groups=list(_groups(result, words)),
        sampled=bool(result.get("comparisons")),
        level=_level(result),
        looks=_looks(result),
        at_odds=_at_odds(result),
        powers=_powers_of_tokens(result),
        further=wording.further(result),
        command=wording.visible(command),
        versions=versions or {},
        data=data.decode(),
        data_base64=base64.b64encode(data).decode(),
    )


def _level(result: Result) -> float:
    """That at which the tests that are shown were made: the last look's, if there were several."""
    looks = result.get("looks")
    return float(looks[-1]["alpha"] if looks else result.get("alpha", 0.0))


def _looks(result: Result) -> Sequence[Mapping[str, Any]]:
    """The looks of a sequential audit; a single one at the whole level tells nothing new."""
    looks: Sequence[Mapping[str, Any]] = result.get("looks") or []
    return [] if len(looks) == 1 and looks[0]["alpha"] == result.get("alpha") else looks


def _at_odds(result: Result) -> Mapping[str, Any] | None:
    """The comparison that is worst."""
    return next(
        (c for c in result.get("comparisons", ()) if c["name"] == result.get("worst")), None
    )


def _powers_of_tokens(result: Result) -> list[tuple[float, float]]:
    """Shares of outputs that a fault may touch, and with what probability it is seen."""
    if result["method"] != "tokens" or result.get("sampling", {}).get("temperature") == 0:
        return []
    return [(share, 1 - (1 - share) ** result["compared"]) for share in MARKS]


def _groups(result: Result, texts: Mapping[int, str]) -> Iterator[_Group]:
    keys = (f"p{i}-" for i in count(1))
    if result["method"] == "enumeration" and result["laws"]:
        yield _exact_laws(result, texts, keys)
        yield _exact_gaps(result, keys)
    elif result.get("comparisons"):
        yield _tests(result, keys)
        yield _sampled_laws(result, texts, keys)
    elif result["method"] == "tokens":
        yield _tokens(result, keys)


def _by_prompt(laws: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for outcome in laws:
        found.setdefault(outcome["prompt"], []).append(outcome)
    return found


def _exact_laws(result: Result, texts: Mapping[int, str], keys: Iterator[str]) -> _Group:
    figures = []
    by_prompt = _by_prompt(result["laws"])
    for prompt, outcomes in list(by_prompt.items())[:_MOST]:
        pairs = [
            pictures.Pair(
                wording.label(o["token_ids"], texts),
                o["plain_probability"],
                o["speculative_probability"],
            )
            for o in outcomes
        ]
        gap = max(abs(p.plain - p.ours) for p in pairs)
        alt = (
            f"Paired bars: probabilities of the {len(pairs)} most probable outputs for prompt "
            f"{prompt + 1}, in plain decoding and in this configuration. The largest difference "
            f"among them is {gap:.2g}."
        )
        svg = pictures.law(pairs, key=next(keys), alt=alt)
        figures.append(_Figure(f"Prompt {prompt + 1}, whole outputs", Markup(svg)))
    note = "Probability of each whole output; the most probable ones of each prompt."
    return _Group("The laws, side by side", note, figures, legend=True)


def _exact_gaps(result: Result, keys: Iterator[str]) -> _Group:
    rows = [
        (
            f"prompt {prompt + 1}",
            [abs(o["plain_probability"] - o["speculative_probability"]) for o in outcomes],
        )
        for prompt, outcomes in list(_by_prompt(result["laws"]).items())[:_MOST]
    ]
    if result["worst"]:  # it may be too improbable to be among those that are drawn
        worst = result["worst"]
        gap = abs(worst["plain_probability"] - worst["speculative_probability"])
        rows = [
            (name, [*values, gap]) if name == f"prompt {worst['prompt'] + 1}" else (name, values)
            for name, values in rows
        ]
    alt = (
        "Differences of the two probabilities of each output on a logarithmic scale. The largest "
        f"is {wording.number(result['largest_difference'])}; up to {result['tolerance']:g} is "
        "rounding."
    )
    svg = pictures.strip(rows, mark=result["tolerance"], key=next(keys), alt=alt)
    note = (
        "Each tick is one output’s difference of probability, on a logarithmic scale. Left of the "
        f"dashed line, at {result['tolerance']:g}, it is rounding."
    )
    return _Group("How far apart", note, [_Figure("Differences", Markup(svg))])


def _tests(result: Result, keys: Iterator[str]) -> _Group:
    comparisons, level = result["comparisons"], _level(result)
    rows = [
        pictures.Interval(c["name"], c["tv"], c["tv_low"], c["tv_high"], c["adjusted_p"] <= level)
        for c in comparisons
    ]
    told = "; ".join(
        f"{r.label}: {wording.percent(r.low)} to {wording.percent(r.high)}" for r in rows
    )
    forest = pictures.intervals(
        rows,
        mark=MARKS[-1],
        key=next(keys),
        alt=f"Total variation between the two sides, 95 % intervals. {told}.",
    )
    least = [(c["name"], c["smallest_bias"]) for c in comparisons]
    told = "; ".join(f"{name}: from {wording.percent(bias)} on" for name, bias in least)
    power = pictures.seen(
        least, marks=MARKS, key=next(keys), alt=f"Biases that would be seen. {told}."
    )
    figures = [
        _Figure(
            f"Total variation, with {wording.percent(0.95)} interval; dashed: "
            f"{wording.percent(MARKS[-1])}. In the colour of alarm where a "
            "test tells the sides apart.",
            Markup(forest),
        ),
        _Figure(
            "Size of a bias: a strong line where it would be seen with a probability of "
            f"{wording.percent(0.8)} or more; dashed: 1, 2 and {wording.percent(MARKS[-1])}.",
            Markup(power),
        ),
    ]
    return _Group("How far apart, and what would be seen", "", figures)


def _sampled_laws(result: Result, texts: Mapping[int, str], keys: Iterator[str]) -> _Group:
    prompts = max(1, len(result["prompts"]))
    sizes = result["plain_samples"] / prompts, result["speculative_samples"] / prompts
    each = max(1, _MOST // max(1, len(result["comparisons"])))
    figures, left_out = [], 0
    one, other = wording.sides(result)
    for comparison in result["comparisons"]:
        laws = _by_prompt(comparison["laws"])
        # If not all can be drawn, then those most at odds.
        order = sorted(laws, key=lambda p: -max(abs(b["z"]) for b in laws[p]))
        left_out += len(order[each:])
        for prompt in sorted(order[:each]):
            pairs = [
                pictures.Pair(
                    wording.label(b["token_ids"], texts),
                    b["plain_frequency"],
                    b["speculative_frequency"],
                    pictures.standard_error(b["plain_frequency"], sizes[0]),
                    pictures.standard_error(b["speculative_frequency"], sizes[1]),
                )
                for b in laws[prompt]
            ]
            gap = max(abs(p.plain - p.ours) for p in pairs)
            alt = (
                f"Paired bars: frequencies at {comparison['name']} for prompt {prompt + 1}, "
                f"{one} and {other}. The largest difference is {wording.percent(gap)}."
            )
            svg = pictures.law(pairs, key=next(keys), alt=alt)
            figures.append(_Figure(f"{comparison['name']}, prompt {prompt + 1}", Markup(svg)))
    note = (
        "Frequency of each token, pair of tokens or whole output, the most frequent first; the "
        "whiskers are two standard errors to each side."
    )
    if left_out:
        note += f" {left_out} more pictures are left out; their numbers are in the data below."
    return _Group("The laws, side by side", note, figures, legend=True)


def _tokens(result: Result, keys: Iterator[str]) -> _Group:
    differences = result["differences"]
    ties = sum(d["near_tie"] for d in differences)
    faults = len(differences) - ties
    equal = result["compared"] - len(differences)
    told = f"{equal} equal, {ties} parted at a near-tie, {faults} different"
    bar = pictures.parts(
        [
            pictures.Part("equal", equal),
            pictures.Part("tie", ties),
            pictures.Part("different", faults),
        ],
        key=next(keys),
        alt=f"Of {result['compared']} outputs: {told}.",
    )
    figures = [_Figure(f"Of {result['compared']} outputs: {told}.", Markup(bar))]
    points = [
        (d["position"] + 1, d["pair_gap"], d["near_tie"])
        for d in differences
        if d["pair_gap"] is not None
    ]
    if points:
        svg = pictures.gaps(
            points,
            mark=result["threshold"],
            key=next(keys),
            alt=f"Gap in logits between the two tokens at each of {len(points)} places where "
            f"outputs part, against the threshold of {result['threshold']:g}.",
        )
        caption = (
            "Gap of the two tokens’ plain logits where outputs part; dashed: "
            f"{result['threshold']:g}, the threshold of near-ties. Dots are near-ties, diamonds "
            "are not."
        )
        figures.append(_Figure(caption, Markup(svg)))
    return _Group("The outputs, token by token", "", figures)
