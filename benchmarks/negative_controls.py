"""How few outputs show each fault of ``tests/controls.py``; the table of ``docs/controls.md``.

    python -m benchmarks.negative_controls [--target smollm2-135m] [--only NAME] [--json FILE]
    python -m benchmarks.negative_controls --enumerate --target smollm2-135m [--json FILE]
    python -m benchmarks.negative_controls --write-docs

Tested at 50, 100, 200, ... outputs of each kind until the audit says *different*. On a real target
plain outputs are drawn once for each request and shared by all controls that make it. Each result
is added to the file as soon as it is known, and one that is there is not sought again. With
``--enumerate`` nothing is drawn from the real target: each control's exact law is walked, over few
tokens, and so is that of the same without the fault, which must be the chain rule's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.drafts import blurred
from outrider import Engine
from outrider.audit.exact import ExactReport
from outrider.audit.remembered import Remembered
from outrider.audit.sampled import NEAR_TIE, audit_tokens, equal_tokens_promised
from outrider.audit.statistics import Stratum, compare
from outrider.drafters.model import ModelDrafter
from outrider.engine.prefix import Prefix
from tests.controls import (
    CONTROLS,
    PROMPT,
    REAL_PROMPT,
    SEED,
    Control,
    enumerate_control,
    toy_engine,
)

FIRST = 50
DOCS = Path(__file__).parents[1] / "docs/controls.md"
BEGIN, END = "<!-- controls: begin -->", "<!-- controls: end -->"
TOY, REAL = "toy", "smollm2-135m"
WALKED = ", by enumeration"  # in the file, after the name of a target that was enumerated


@dataclass
class Drawn:
    """One side's outputs; the seeds are those of ``audit_samples`` with one prompt."""

    engine: Engine
    prompt: list[int]
    request: dict[str, Any]
    plain: bool
    outputs: list[list[int]] = field(default_factory=list)
    prefix: Prefix = field(default_factory=Prefix)

    def first(self, samples: int) -> list[list[int]]:
        """Draw what is missing of so many, and return them."""
        while len(self.outputs) < samples:
            seed = SEED + 2 * len(self.outputs) + (not self.plain)
            generation = self.engine.stream(
                self.prompt, seed=seed, plain=self.plain, prefix=self.prefix, **self.request
            )
            self.outputs.append(generation.output.token_ids)
            self.prefix.keep(generation.session)
        return self.outputs[:samples]


def smallest(
    control: Control, engine: Engine, most: int, plain: dict[str, Drawn], *, toy: bool
) -> int | None:
    """The least of 50, 100, 200, ... outputs of each kind that show the fault, if any does."""
    broken = control.apply(engine)
    request = control.request() if toy else control.request(engine=engine)
    prompt = PROMPT if toy else engine.encode(REAL_PROMPT)
    sizes = [FIRST * 2**k for k in range(8) if FIRST * 2**k <= most]
    if equal_tokens_promised(control.rule):
        # A toy's numbers are exact, and so are those of a target that keeps its bits.
        exact = toy or isinstance(engine.model, Remembered)
        tie = 0.0 if exact else NEAR_TIE
        sizes = [1] if control.sampling.greedy else sizes
        for size in sizes:
            report = audit_tokens(broken, [prompt], size, seed=SEED, request=request, near_tie=tie)
            if report.verdict == "different":
                return size
        return None
    # On a toy the fault's own engine decodes plainly too, on its own noise, as an audit's does:
    # then a test that audits with as many outputs sees the very same ones.
    key = f"{control.wrong if toy else control.rule} {request}"
    if key not in plain:
        sound = broken if toy else control.sound(engine)
        plain[key] = Drawn(sound, prompt, request, plain=True)
    ours = Drawn(broken, prompt, request, plain=False)
    for size in sizes:
        if compare([Stratum(plain[key].first(size), ours.first(size))]).verdict == "different":
            return size
    return None


def measure(name: str, target: str, engine: Engine | None, most: int, plain: Any) -> dict[str, Any]:
    """One control's row."""
    control = CONTROLS[name]
    row: dict[str, Any] = {"control": name, "target": target, "most": most}
    if engine is None:
        if control.enumerable:
            report = enumerate_control(control, control.apply(toy_engine(*control.walked)))
            row["enumeration"] = found(report)
        engine = toy_engine(control.vocab, control.draft_seed)
        tried = control.sampled
        toy = True
    else:
        toy, tried = False, control.real is not None
    row["tried"] = tried
    row["smallest"] = smallest(control, engine, most, plain, toy=toy) if tried else None
    return row


def found(report: ExactReport) -> str | float | None:
    """What enumeration says of a fault."""
    return (report.broken and "noise used twice") or report.largest_difference


def walk(name: str, target: str, engine: Engine, passed: dict[str, ExactReport]) -> dict[str, Any]:
    """One control's row, by enumeration of a real target.

    ``passed`` holds what was found of configurations without a fault.

    Raises
    ------
    AssertionError
        When the same without the fault is not consistent.
    """
    control = CONTROLS[name]
    row: dict[str, Any] = {"control": name, "target": target + WALKED}
    if control.enumerable:
        c = control
        key = f"{c.rule} {c.shape} {c.draft_length} {c.few} {c.real_stops(engine)}"
        if key not in passed:
            passed[key] = enumerate_control(control, control.sound(engine), real=True)
        sound = passed[key]
        assert sound.verdict == "consistent", f"{name}, without the fault: {sound}"
        report = enumerate_control(control, control.apply(engine), real=True)
        if report.verdict == "different":
            row["enumeration"] = found(report)
        row |= {"outputs": sound.outputs, "courses": sound.courses}
    return row


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The finished results of a file of JSON lines; a line that was cut off does not count."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["control"], row["target"]] = row
    return rows


def cell(row: dict[str, Any] | None) -> str:
    """A smallest sample size, as the table shows it."""
    if row is None:
        return ""
    if not row["tried"]:
        return "—"
    return str(row["smallest"] or f"> {row['most']}")


def walked(row: dict[str, Any] | None) -> str:
    """What enumeration found, as the table shows it."""
    if row is None:
        return ""
    seen = row.get("enumeration", "not seen")
    return f"{seen:.2g}" if isinstance(seen, float) else seen


def table(rows: dict[tuple[str, str], dict[str, Any]], known: list[list[str]]) -> str:
    """The table; cells that the results lack are taken from the known one."""
    before = {cells[0]: cells for cells in known}
    lines = [
        f"| control | what is wrong | by enumeration | on the toy | on {REAL} | by enumeration on "
        f"{REAL} |",
        "|---|---|---|---|---|---|",
    ]
    for name, control in CONTROLS.items():
        old = [*before.get(name, []), *[""] * 6]
        toy, real = rows.get((name, TOY)), rows.get((name, REAL))
        wrong = control.wrong.replace("|", "\\|") + (f" ({control.unseen}.)" * bool(control.unseen))
        cells = [
            name.replace("|", "\\|"), wrong, walked(toy) or old[2], cell(toy) or old[3],
            cell(real) or old[4], walked(rows.get((name, REAL + WALKED))) or old[5],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(text: str) -> list[list[str]]:
    """The cells of the table between the two marker lines."""
    body = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    bar = "\0"
    cut = [line.replace("\\|", bar).strip().strip("|").split("|") for line in body]
    return [[c.strip().replace(bar, "|") for c in cells] for cells in cut]


def write_docs(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Put the table between the two marker lines."""
    text = DOCS.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    DOCS.write_text(f"{head}{BEGIN}\n{table(rows, rows_of(text))}\n{END}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=TOY)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--only", action="append", choices=list(CONTROLS))
    parser.add_argument("--most", type=int, help="outputs of each kind (default: 6400)")
    parser.add_argument("--json", type=Path, default=Path("controls.jsonl"))
    parser.add_argument("--enumerate", action="store_true", help="walk a real target's laws")
    parser.add_argument("--write-docs", action="store_true", help="write what the file holds")
    args = parser.parse_args()
    rows = read(args.json)
    if args.write_docs:
        return write_docs(rows)
    toy = args.target == TOY
    if toy and args.enumerate:
        parser.error("--enumerate is for a real --target; a toy is enumerated anyway")
    most = args.most or 6400
    engine = None
    if not toy:
        engine = Engine.load(args.target, runtime=args.runtime)
        engine.drafter = blurred(engine)
        if args.enumerate:  # few contexts, each asked for hundreds of times
            engine.drafter = ModelDrafter(Remembered(engine.drafter.model))
        engine.model = Remembered(engine.model)
    plain: dict[str, Drawn] = {}
    passed: dict[str, ExactReport] = {}
    for name in args.only or CONTROLS:
        if (name, args.target + WALKED * args.enumerate) in rows:
            continue
        if args.enumerate and engine is not None:
            row = walk(name, args.target, engine, passed)
        else:
            row = measure(name, args.target, engine, most, plain)
        with args.json.open("a") as out:
            out.write(json.dumps(row) + "\n")
        told = row.get("enumeration", ""), "" if args.enumerate else cell(row)
        print(name, *told, sep=" | ", flush=True)
    return None


if __name__ == "__main__":
    main()
