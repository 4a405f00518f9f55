"""In words: what a benchmark found, how sure it is, and what it was measured on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from outrider.lab.summary import ENOUGH_PROMPTS
from outrider.report.figures import Arm, Change, Measured, middle
from outrider.report.wording import percent, visible

__all__ = [
    "WORDS", "Fact", "Headline", "Side", "compared", "facts", "flatten", "headline", "side_by_side",
    "size", "sorted_out", "span", "times", "tone_of",
]  # fmt: skip

_NB = "\N{NO-BREAK SPACE}"
_BYTES = "_bytes"
_EXPECTED = ("command", "commit", "planned")  # differ from run to run, and explain nothing


@dataclass(frozen=True, slots=True)
class Side:
    """A verdict as the page shows it: its class, a sign that needs no colour, and a heading."""

    tone: str
    sign: str
    word: str


WORDS = {
    "pays": Side("faster", "▲", "Pays"),
    "unclear": Side("unclear", "●", "No clear difference"),
    "too few prompts": Side("unclear", "?", "Too few prompts to tell"),
    "costs": Side("slower", "▼", "Slower than plain"),
    "": Side("unclear", "", ""),
}
"""For each verdict of a summary."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict, its tone and a sentence."""

    text: str
    tone: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure to be seen first, with what it is."""

    value: str
    name: str
    note: str = ""


def times(ratio: float | None) -> str:
    """A ratio of speeds.

    >>> times(1.4312), times(None)
    ('1.43\\xa0×', '–')
    """
    return "–" if ratio is None else f"{ratio:.2f}{_NB}×"


def span(interval: tuple[float, float] | None) -> str:
    """An interval of ratios.

    >>> span((1.349, 1.52)), span(None)
    ('1.35–1.52', '–')
    """
    return "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}"


def headline(run: Measured) -> Headline:
    """What the run says as a whole: of its fastest configuration, and how sure that is."""
    drafted = run.drafted
    if not drafted:
        return Headline(
            "No comparison",
            "unclear",
            "No prompt was decoded both with a draft and without in the same setting, so nothing "
            "can be said about the gain.",
        )
    best = drafted[0]
    speed = best.speedup
    told = (
        f"With {visible(best.label)}, the median of {_count(speed.n, 'prompt')} runs at "
        f"{times(speed.median)} plain decoding’s speed"
    )
    if best.interval is None:
        told += f"; {ENOUGH_PROMPTS} prompts are the fewest that allow a verdict."
        return Headline("Too few prompts to tell", "unclear", told)
    told += f" (95{_NB}% interval {span(best.interval)})." + _among(drafted) + _where(best)
    text = {
        "pays": f"Speculation pays: {times(speed.median)} plain speed",
        "costs": "Speculation does not pay here",
    }.get(speed.verdict, "No gain can be told")
    return Headline(text, WORDS[speed.verdict].tone, told)


def _among(drafted: Sequence[Arm]) -> str:
    if len(drafted) < 2:
        return ""
    lost = sum(arm.verdict == "costs" for arm in drafted)
    told = f" It is the fastest of {len(drafted)} configurations"
    if not lost:
        return told + "."
    return told + f"; {lost} of them {'is' if lost == 1 else 'are'} slower than plain decoding."


def _where(best: Arm) -> str:
    medians = {kind: median(r for _, r in some) for kind, some in best.by_kind.items()}
    if len(medians) < 2:
        return ""
    most, least = max(medians, key=lambda k: medians[k]), min(medians, key=lambda k: medians[k])
    return (
        f" It gains most on {visible(most)} ({times(medians[most])}) and least on "
        f"{visible(least)} ({times(medians[least])})."
    )


def facts(run: Measured) -> list[Fact]:
    """The first figures of the fastest configuration."""
    if not run.drafted:
        return []
    best = run.drafted[0]
    speed = best.speedup
    prompt = best.names[speed.worst_prompt], best.kinds[speed.worst_prompt]
    sure = f"95{_NB}% interval {span(best.interval)}" if best.interval else "no interval"
    share = f"by more than 3{_NB}%: {percent(speed.clearly_slower)}"
    found = [
        Fact(times(speed.median), "median speed-up", sure),
        Fact(f"{best.slower} of {speed.n}", "prompts slower than plain", share),
        Fact(times(speed.worst), "worst prompt", visible(", ".join(prompt))),
        Fact(f"{speed.p10:.2f}–{speed.p90:.2f}", "p10 to p90", "of prompts"),
    ]
    same = [arm.row.same for arm in run.drafted if arm.row.same and arm.row.same.promised]
    if same:
        equal, all_ = sum(one.same for one in same), sum(one.compared for one in same)
        found.append(Fact(f"{equal} of {all_}", "outputs with plain’s tokens", "where promised"))
    return found


def sorted_out(run: Measured, some: Sequence[Arm]) -> list[tuple[Side, list[Arm]]]:
    """What pays, what does not, and what cannot be told."""
    groups = [
        (WORDS[verdict], [arm for arm in some if arm.verdict == verdict]) for verdict in WORDS
    ]
    return [(side, arms) for side, arms in groups if arms] if len(run.drafted) > 1 else []


def tone_of(interval: tuple[float, float, float] | None) -> str:
    """``faster`` or ``slower`` where a median's interval lies on one side of 1, else ``unclear``.

    >>> tone_of((1.1, 1.05, 1.2)), tone_of((1.1, 0.9, 1.2)), tone_of(None)
    ('faster', 'unclear', 'unclear')
    """
    if interval is None or interval[1] <= 1 <= interval[2] or round(interval[0], 2) == 1:
        return "unclear"  # a difference that no figure shows is none
    return "faster" if interval[1] > 1 else "slower"


def compared(changes: Sequence[Change], runs: Sequence[Measured]) -> Headline:
    """What two runs say together: of the configuration that is the second one's fastest."""
    if not changes:
        return Headline(
            "Nothing to compare",
            "unclear",
            "The two runs share no configuration on the same prompts in the same setting.",
        )
    drafted = [one for one in changes if one.gain]
    of = max(drafted, key=lambda one: one.second.speedup.median) if drafted else changes[0]
    label = visible(of.second.label)
    speed = middle(of.speed.values())
    if speed is None:
        few = f"{_count(len(of.speed), 'prompt')} in common; {ENOUGH_PROMPTS} are the fewest that "
        return Headline("Too few prompts to tell", "unclear", f"{few} allow a verdict.")
    tone = tone_of(speed)
    text = {
        "faster": f"The second run is faster: {times(speed[0])}",
        "slower": f"The second run is slower: {times(speed[0])}",
        "unclear": "No difference can be told",
    }[tone]
    told = (
        f"With {label}, the second run makes {times(speed[0])} the first one’s tokens a second on "
        f"the median of {_count(len(of.speed), 'prompt')} (95{_NB}% interval {span(speed[1:])})"
    )
    gain = middle(of.gain.values())
    told += (
        f"; its speed-up over its own plain decoding is {times(gain[0])} the first one’s "
        f"({span(gain[1:])})."
        if gain
        else "."
    )
    rows = side_by_side(*(run.conditions for run in runs))
    differing = [name for name, one, other in rows if one != other and name not in _EXPECTED]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        what = ", ".join(differing[:3]) + more
        told += f" The runs differ in {what}: a difference may come from there."
    return Headline(text, tone, told)


def side_by_side(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Conditions of two runs by name; what one does not have is a dash.

    >>> side_by_side({"seed": 1}, {"seed": 2, "gpu": "none"})
    [('seed', '1', '2'), ('gpu', '–', 'none')]
    """
    one, other = dict(flatten(first)), dict(flatten(second))
    return [(name, one.get(name, "–"), other.get(name, "–")) for name in {**one, **other}]


def flatten(conditions: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Conditions as rows of a table, those one level down behind the name of their group.

    >>> list(flatten({"target": "t", "machine": {"memory_bytes": 2**34, "cpu": None}}))
    [('target', 't'), ('machine · memory', '16 GiB'), ('machine · cpu', '–')]
    """
    for key, value in conditions.items():
        name = f"{above}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name} · ")
        elif str(key).endswith(_BYTES) and isinstance(value, (int, float, type(None))):
            yield visible(name.removesuffix(" bytes")), "–" if value is None else size(value)
        else:
            yield visible(name), visible(_told(str(key), value))


def size(count: float) -> str:
    """Bytes in words.

    >>> size(3 * 2**30), size(2**19)
    ('3 GiB', '0.5 MiB')
    """
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def _told(key: str, value: Any) -> str:
    if value is None or value in ([], {}, ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        if key in ("arguments", "command"):
            return shlex.join(map(str, value))
        if all(isinstance(one, (str, int, float)) for one in value):
            return ", ".join(map(str, value))
        if all(isinstance(one, Mapping) and "label" in one for one in value):
            return ", ".join(str(one["label"]) for one in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"
