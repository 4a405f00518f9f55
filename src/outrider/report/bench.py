"""The pages of a benchmark: one file each, which loads nothing. Every text of a log is escaped.

The numbers are in ``figures``, the words in ``verdicts``, the pictures in ``gallery``.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from outrider.lab.record import Log, Record, Run
from outrider.lab.wording import notes
from outrider.report import verdicts
from outrider.report.bench_pictures import MARKERS
from outrider.report.figures import Arm, Measured, changes, measured, middle
from outrider.report.gallery import DRAWN, difference_groups, groups, hero
from outrider.report.page import Markup, render
from outrider.report.wording import percent, visible

__all__ = ["bench_page", "comparison_page"]

_TOKENS = 24_000  # of all texts in a page
_ORIGINS = {"a": "accepted", "c": "correction", "b": "bonus", "p": "plain"}
_BRIEF = 400  # characters of a condition


@dataclass(frozen=True, slots=True)
class Text:
    """One output; of each token its origin, the space before it, and the rest."""

    prompt: int
    name: str
    kind: str
    arm: str
    note: str
    tokens: Sequence[tuple[str, str, str]]


def bench_page(log: Log | Run | Measured, *, command: str = "") -> str:
    """Lay out a log of measurements as one HTML page that loads nothing.

    Parameters
    ----------
    log
        Its records are all that the page shows; a run that is not finished will do.
    command
        The command line that repeats the run; by default the one that the log has.

    Raises
    ------
    LogError
        When the log has no measurement, or is none.
    """
    run = measured(log)
    shown = run.best_lengths(DRAWN)
    keys = (f"p{n}-" for n in count(1))
    texts, left_out = _texts(run, shown)
    return render(
        "bench.html.j2",
        filters=_FILTERS,
        run=run,
        headline=verdicts.headline(run),
        facts=verdicts.facts(run),
        notes=[visible(note) for note in notes(run.summary)],
        sorted_out=verdicts.sorted_out(run, shown),
        hero=hero(run, shown, keys),
        hidden=len(run.drafted) - len(shown),
        groups=[(title, figures) for title, figures in groups(run, shown, keys) if figures],
        texts=texts,
        left_out=left_out,
        holds=any(_held(arm) for arm in run.arms),
        conditions=[row for row in verdicts.flatten(run.conditions) if row[0] != "command"],
        command=visible(command or str(run.conditions.get("command", ""))),
        **_script(),
    )


def comparison_page(
    first: Log | Run | Measured, second: Log | Run | Measured, *, names: tuple[str, str]
) -> str:
    """Lay out two logs side by side, as one HTML page that loads nothing.

    Parameters
    ----------
    first, second
        Configurations are compared that both have in the same setting, on prompts that both have.
    names
        What to call them.

    Raises
    ------
    LogError
        When one has no measurement, or is no log.
    """
    runs = measured(first), measured(second)
    found = changes(*runs)
    conditions = verdicts.side_by_side(*(run.conditions for run in runs))
    keys = (f"p{n}-" for n in count(1))
    drawn = difference_groups(found, runs[1], keys)
    return render(
        "comparison.html.j2",
        filters=_FILTERS,
        names=[visible(name) for name in names],
        headline=verdicts.compared(found, runs),
        facts=[],
        changes=found,
        groups=[(title, figures) for title, figures in drawn if figures],
        conditions=conditions,
        differing=sum(one != other for _, one, other in conditions),
        **_script(),
    )


def _texts(run: Measured, shown: Sequence[Arm]) -> tuple[list[Text], int]:
    """Some outputs: one prompt of each type, then a second one, while there is room."""
    arms = [*shown, *(arm for arm in run.arms if arm.is_plain)]
    by_prompt: dict[int, list[tuple[Arm, Record]]] = {}
    for arm in arms:
        for one in arm.records:
            if one.pieces and one.repeat == 0:
                by_prompt.setdefault(one.prompt, []).append((arm, one))
    of_kind: dict[str, int] = {}
    order = []
    for prompt, some in sorted(by_prompt.items()):
        kind = some[0][1].kind
        of_kind[kind] = turn = of_kind.get(kind, -1) + 1
        order.append((turn, prompt))
    room = _TOKENS
    chosen: list[int] = []
    for _, prompt in sorted(order):
        need = sum(len(one.pieces) for _, one in by_prompt[prompt])
        if chosen and need > room:
            break
        room -= need
        chosen.append(prompt)
    texts = [
        _text(arm, one) for prompt in sorted(chosen) for arm, one in _plain_last(by_prompt[prompt])
    ]
    return texts, len(by_prompt) - len(chosen)


def _held(arm: Arm) -> bool:
    """Whether anything is known of its memory."""
    held = arm.row.memory
    return any(v is not None for v in (held.weights_bytes, held.cache_bytes, held.peak_bytes))


def _plain_last(some: Sequence[tuple[Arm, Record]]) -> list[tuple[Arm, Record]]:
    """What was drafted is what is looked for."""
    return sorted(some, key=lambda pair: pair[0].is_plain)


def _text(arm: Arm, one: Record) -> Text:
    s = one.trace.summary()
    note = f"{s['emitted_tokens']} tokens in {s['target_calls']} target calls"
    if one.prompt in arm.ratios:
        note += f"; {arm.ratios[one.prompt]:.2f} × plain speed"
    tokens = []
    for piece, origin in zip(one.pieces, one.origins, strict=False):
        # A space at the end of a line would be a stripe of colour.
        space = " " if piece.startswith(" ") and len(piece) > 1 else ""
        shown = visible(piece[len(space) :], keep="\n\t")
        tokens.append((_ORIGINS.get(origin, "plain"), space, shown))
    return Text(
        one.prompt, visible(arm.names[one.prompt]), visible(one.kind), arm.label, note, tokens
    )


_SCRIPT = """
const form = document.getElementById("choose");
if (form) {
  const [prompt, arm] = form.querySelectorAll("select");
  const texts = [...document.querySelectorAll("details.text")];
  const show = () => {
    let any = false;
    for (const text of texts) {
      const on = text.dataset.prompt === prompt.value && text.dataset.arm === arm.value;
      text.hidden = !on;
      text.open = on;
      any ||= on;
    }
    document.getElementById("none").hidden = any;
  };
  form.hidden = false;
  form.addEventListener("change", show);
  show();
}
"""


def _script() -> dict[str, Any]:
    """The page's one script, and the only one that it lets run."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    return {"script": Markup(_SCRIPT), "script_hash": f"sha256-{digest}"}


def _shape(series: int) -> Markup:
    """A line's marker, for a legend."""
    shapes = {
        "o": '<circle cx="6" cy="6" r="4.5"/>',
        "s": '<rect x="2" y="2" width="8" height="8"/>',
        "^": '<path d="M6 1.2 11 10.4H1z"/>',
        "D": '<path d="M6 .8 11.2 6 6 11.2.8 6z"/>',
        "v": '<path d="M6 10.8 11 1.6H1z"/>',
        "P": '<path d="M4 1h4v3h3v4H8v3H4V8H1V4h3z"/>',
    }
    place = series % len(MARKERS)
    return Markup(
        f'<svg class="mark" viewBox="0 0 12 12" aria-hidden="true" '
        f'style="fill:var(--series-{place + 1})">{shapes[MARKERS[place]]}</svg>'
    )


_FILTERS: dict[str, Callable[..., Any]] = {
    "percent": lambda value: "–" if value is None else percent(value),
    "middle": lambda ratios: middle(ratios.values()),
    "tone": verdicts.tone_of,
    "side": lambda verdict: verdicts.WORDS[verdict],
    "times": verdicts.times,
    "span": verdicts.span,
    "size": lambda count: "–" if count is None else verdicts.size(count),
    "seen": lambda text: visible(str(text)),
    "brief": lambda text: text if len(text) <= _BRIEF else text[: _BRIEF - 1] + "…",
    "shape": _shape,
}
