"""What a summary says in words, for terminals and pages alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from outrider.lab.record import BARE
from outrider.lab.summary import Row, Speedup, Summary

__all__ = ["conclusions", "notes", "peer_lines", "prompt_name", "say_speedup", "setting_of"]

_MOST_NAMED = 3
_UNSTEADY = 0.05
_FIRST = {"version": ""}  # what needs no name before it


def setting_of(row: Row) -> str:
    """The group that a row belongs to.

    ``temperature 0.7``, and the adapter and the batch size where they are something.
    """
    parts = [f"temperature {row.temperature:g}"]
    if row.batch != 1:
        parts.append(f"batch {row.batch}")
    if row.adapter:
        parts.append(f"adapter {row.adapter}")
    return ", ".join(parts)


def prompt_name(conditions: Mapping[str, Any], number: int) -> str:
    """A prompt's own id where the conditions have it, else its number from 1."""
    ids = conditions.get("prompt_ids") or []
    return str(ids[number]) if number < len(ids) else str(number + 1)


def say_speedup(speed: Speedup) -> str:
    """A speed-up with its 95 % interval: ``1.31 times plain (1.20 to 1.44)``."""
    interval = "" if speed.low is None else f" ({speed.low:.2f} to {speed.high:.2f})"
    return f"{speed.median:.2f} times plain{interval}"


def notes(summary: Summary) -> Iterator[str]:
    """What a reader of the figures has to know, a note for each matter and not for each row."""
    parted = [row for row in summary.rows if row.same and row.same.promised and row.same.parted]
    if parted:
        told = "; ".join(_parted(row, summary) for row in parted[:_MOST_NAMED])
        yield (
            f"Not plain decoding's tokens, where they should be: {told}{_more(parted)}. Near-ties "
            "may flip where numbers depend on the rows of a pass: outrider models info."
        )
    yield from _peer_notes([row for row in summary.rows if row.peer], summary)
    if summary.unsteadiness is not None and summary.unsteadiness > _UNSTEADY:
        yield (
            "The machine is not steady: plain decoding of a prompt varies by "
            f"{summary.unsteadiness:.0%} between repeats."
        )
    if workers := summary.conditions.get("workers"):
        machines = len({name.partition("/")[0] for name in workers})
        yield (
            f"Measured by {_count(len(workers), 'worker')} on {_count(machines, 'machine')}: times "
            "are of all of them, and each speed-up is of one worker's own turns."
        )
    if summary.planned is not None and summary.finished < summary.planned:
        yield f"Not finished: {summary.finished} of {summary.planned} generations."


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def _parted(row: Row, summary: Summary) -> str:
    assert row.same is not None
    first = row.same.parted[0]
    return (
        f"{_where(row)}, {len(row.same.parted)} of {row.same.compared} outputs (first prompt "
        f"{prompt_name(summary.conditions, first.prompt)}, from token {first.position})"
    )


def _peer_notes(rows: Sequence[Row], summary: Summary) -> Iterator[str]:
    """What keeps peers' figures from being compared with ours as they are."""
    others = {}
    for row in rows:
        about = summary.conditions.get("targets", {}).get(row.adapter or BARE, {})
        theirs = about.get("peers", {}).get(row.configuration, {}).get("precision")
        ours = about.get("precision")
        if theirs is not None and theirs != ours:
            others[f"{row.configuration} ({theirs})"] = ours or "exact"
    if others:
        target = next(iter(others.values()))
        yield (
            f"Another precision than the target's ({target}), so other numbers as well as another "
            f"way to decode: {', '.join(others)}."
        )
    rough = dict.fromkeys(row.configuration for row in rows if row.counted == "chunks")
    if rough:
        yield f"Pieces of a stream counted, for the server tells no tokens: {', '.join(rough)}."
    failed = [row for row in rows if row.failed]
    if failed:
        told = "; ".join(_failed(row, summary) for row in failed[:_MOST_NAMED])
        yield f"Failed answers, left out: {told}{_more(failed)}"


def _failed(row: Row, summary: Summary) -> str:
    prompt, reason = row.failed[0]
    name = prompt_name(summary.conditions, prompt)
    return f"{_where(row)}, {len(row.failed)} of {row.records} (first prompt {name}: {reason})"


def _where(row: Row) -> str:
    return f"{row.configuration} at {setting_of(row)}"


def _more(rows: Sequence[Row]) -> str:
    left = len(rows) - _MOST_NAMED
    return f"; {left} more" if left > 0 else ""


def peer_lines(summary: Summary) -> Iterator[str]:
    """What each peer is and how it was run, a line each."""
    told: dict[str, None] = {}
    for row in summary.rows:
        targets = summary.conditions.get("targets", {})
        about = targets.get(row.adapter or BARE, {}).get("peers", {}).get(row.configuration, {})
        if row.peer and about:
            parts = "; ".join(_FIRST.get(name, f"{name}: ") + v for name, v in about.items())
            told[f"{row.configuration}: {parts}"] = None
    yield from told


def conclusions(summary: Summary) -> list[str]:
    """What pays and what does not, a line for each target, temperature and batch size."""
    groups = groupby(summary.rows, key=setting_of)
    told = [_conclude(setting, list(rows), summary) for setting, rows in groups]
    return told or ["Nothing was measured."]


def _conclude(setting: str, rows: Sequence[Row], summary: Summary) -> str:
    everyone = [(row, row.speedup) for row in rows if row.speedup is not None]
    compared = [pair for pair in everyone if not pair[0].peer]
    peers = [f"{row.configuration} {say_speedup(s)}" for row, s in everyone if row.peer]
    head = f"At {setting}"
    if not everyone:
        return f"{head} there is nothing to compare yet."
    compared.sort(key=lambda pair: -pair[1].median)
    pays = [pair for pair in compared if pair[1].verdict == "pays"]
    costs = [pair for pair in compared if pair[1].verdict == "costs"]
    unclear = [pair for pair in compared if pair[1].verdict == "unclear"]
    few = [pair for pair in compared if pair[1].verdict == "too few prompts"]
    parts = []
    if pays:
        row, speed = pays[0]
        best = f"{row.configuration} pays: {say_speedup(speed)}, {_slower(speed)}"
        best += _losing_kinds(row, summary)
        parts.append(best)
        if pays[1:]:
            parts.append(f"{_listed(pays[1:])} {_verb(pays[1:], 'pays', 'pay')} less")
    if unclear:
        parts.append(f"{_listed(unclear)} {_verb(unclear, 'makes', 'make')} no clear difference")
    if costs:
        parts.append(
            f"{_listed(costs)} {_verb(costs, 'is', 'are')} slower than plain decoding"
            + ("" if pays else ": use --drafter none here")
        )
    if few:
        told = ", ".join(f"{row.configuration} {speed.median:.2f}" for row, speed in few)
        parts.append(f"too few prompts to say what pays ({told} times plain)")
    if peers:
        parts.append(f"other programs: {', '.join(peers)}")
    return f"{head}, {'; '.join(parts)}."


def _slower(speed: Speedup) -> str:
    if not speed.slower:
        return "slower on no prompt"
    told = f"slower on {speed.slower:.0%} of prompts"
    return f"{told}, by more than 3 % on {speed.clearly_slower:.0%}"


def _losing_kinds(row: Row, summary: Summary) -> str:
    """Kinds on which even the one that pays does not."""
    losing = [
        one.value
        for one in summary.strata
        if one.by == "kind"
        and (one.adapter, one.temperature, one.batch) == (row.adapter, row.temperature, row.batch)
        and one.configuration == row.configuration
        and one.speedup is not None
        and one.speedup < 1
    ]
    if not losing:
        return ""
    more = f" and {len(losing) - _MOST_NAMED} more kinds" if len(losing) > _MOST_NAMED else ""
    return f" (not on {', '.join(losing[:_MOST_NAMED])}{more})"


def _listed(pairs: Sequence[tuple[Row, Speedup]]) -> str:
    return ", ".join(f"{row.configuration} ({speed.median:.2f})" for row, speed in pairs)


def _verb(pairs: Sequence[object], one: str, many: str) -> str:
    return one if len(pairs) == 1 else many
