"""Whether drafted output is plain output, token for token, on many prompts.

    .venv/bin/python -m benchmarks.same_outputs --log same.jsonl [--target T] [--runtime R]
        [--drafters ngram,script,model:PATH] [--prompts 200] [--max-tokens 256]
        [--temperatures 0,0.7] [--file PROMPTS.jsonl]

Each prompt is decoded plainly and with each drafter: at temperature 0 by the greedy rule, else by
the coupled one with a seed of the prompt's own. Differences and exceptions are counted, and where
a difference begins is told. Everything goes into the log as it is found; the same command
continues a log that was broken off, and plain outputs are never computed twice.

Drafters are named as for --drafter. ``script`` alone is a drafter that knows the plain output but
for every seventh token, so that long drafts are kept and every round is broken off somewhere.

A file has one JSON object a line, with ``prompt`` (a text), ``messages`` or Spec-Bench's
``turns``, of which the first is asked. Without a file, the prompts are the twenty of
tests/e2e/prompts.py, then each of them behind each of sixteen openings ("Answer in one
sentence."), then pairs of them ("Do two things."), until there are as many as wanted.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.conditions import (
    conditions,
    model_parser,
    print_conditions,
    print_table,
    write_json,
)
from outrider import Engine
from outrider.drafters.script import ScriptDrafter
from outrider.protocols import Drafter
from outrider.registry import DRAFTERS
from tests.e2e.prompts import PROMPTS

Prompt = str | list[dict[str, str]]

OPENINGS = (
    "Answer in one sentence.",
    "Answer in as much detail as you can.",
    "Answer in French.",
    "Answer as a list of points.",
    "Answer twice, in different words.",
    "Answer in the style of an old letter.",
    "Think step by step.",
    "Begin with a summary.",
    "End with a question.",
    "Write in capital letters.",
    "Write for a child of six.",
    "Write for an expert.",
    "Quote the request before the answer.",
    "Answer as JSON.",
    "Answer as a Python program that prints the answer.",
    "Be brief and polite.",
)
WRONG = 7
"""Every so manieth token that ``script`` expects is another than the plain output's."""
AGREE = ("target", "class", "kind", "max_tokens")
"""Conditions without which a log cannot be continued."""


# ---- prompts -------------------------------------------------------------------------------------


def generated() -> Iterator[str]:
    """The prompts of the tests, and variants of them."""
    yield from PROMPTS
    for opening, prompt in itertools.product(OPENINGS, PROMPTS):
        yield f"{opening} {prompt}"
    for one, other in itertools.permutations(PROMPTS, 2):
        yield f"Do two things. First: {one}\n\nSecond: {other}"


def from_file(path: str) -> Iterator[Prompt]:
    """A file's prompts; turns are asked as a conversation's first message."""
    for line in Path(path).read_text().splitlines():
        if not line.strip():
            continue
        stored = json.loads(line)
        if "prompt" in stored:
            yield stored["prompt"]
        elif "messages" in stored:
            yield stored["messages"]
        elif "turns" in stored:
            yield _asked(stored["turns"][0])
        else:
            raise SystemExit(f"{path}: a line has neither prompt, messages nor turns.")


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def collect(args: argparse.Namespace) -> list[Prompt]:
    """As many prompts as wanted, or as the file has."""
    if args.file:
        return list(itertools.islice(from_file(args.file), args.prompts))
    return [_asked(text) for text in itertools.islice(generated(), args.prompts)]


def key_of(prompt: Prompt) -> str:
    """A prompt's name in the log: a log survives a change of the list of prompts."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


# ---- drafters ------------------------------------------------------------------------------------


def split_drafters(text: str) -> list[str]:
    """Names with commas between them; those inside an argument stay."""
    names = "|".join(map(re.escape, DRAFTERS))
    return re.split(rf",(?=(?:{names})(?:[:,]|$))", text)


def drafter_for(name: str, plain: list[int], vocab_size: int) -> str | Drafter:
    """A drafter for one prompt; ``script`` depends on its plain output."""
    if name != "script":
        return name
    script = [
        (token + 1) % vocab_size if i % WRONG == WRONG - 1 else token
        for i, token in enumerate(plain)
    ]
    return ScriptDrafter(script, default_length=WRONG + 1)


# ---- the log -------------------------------------------------------------------------------------


class Log:
    """What was found so far, and where the rest goes."""

    def __init__(self, path: str, told: dict[str, Any]) -> None:
        self.found: dict[tuple[str, str, float], dict[str, Any]] = {}
        self._path = Path(path) if path else None
        self._stream = None
        if self._path is None:
            return
        text = self._path.read_text() if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a line that was broken off is not one
        for line in whole.splitlines():
            record = json.loads(line)
            if "conditions" in record:
                self._compare(record["conditions"], told)
            else:
                self._remember(record)
        if whole != text:
            self._path.write_text(whole)
        self._stream = self._path.open("a")
        # Each run tells its own conditions: the commit may be another.
        self._write({"conditions": told})

    def _compare(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in AGREE:
            if before.get(name) != now.get(name):
                raise SystemExit(
                    f"{self._path} was made with {name} {before.get(name)}, not {now.get(name)}; "
                    "choose another --log."
                )
        if before["commit"] != now["commit"]:
            print(f"the log was begun at commit {before['commit']}", file=sys.stderr)

    def _remember(self, record: dict[str, Any]) -> None:
        self.found[record["how"], record["prompt"], record["temperature"]] = record

    def _write(self, record: dict[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps(record, default=str) + "\n")
            self._stream.flush()

    def add(self, record: dict[str, Any]) -> None:
        """Keep one result."""
        self._remember(record)
        self._write(record)


# ---- runs ----------------------------------------------------------------------------------------


def run(
    engine: Engine, prompt: Prompt, temperature: float, args: argparse.Namespace, **how: Any
) -> dict[str, Any]:
    """One output's tokens, or the exception in its place."""
    seed = int(key_of(prompt)[:8], 16)
    started = time.perf_counter()
    try:
        out = engine.generate(
            prompt, max_tokens=args.max_tokens, temperature=temperature, seed=seed, **how
        )
    except Exception as error:  # counted, whatever it is
        return {"error": f"{type(error).__name__}: {error}"}
    told = out.trace.summary()
    kept = {name: told[name] for name in ("target_calls", "drafted_tokens", "accepted_tokens")}
    return {"ids": list(out.token_ids), "seconds": time.perf_counter() - started, **kept}


def compare(plain: list[int], drafted: list[int]) -> dict[str, Any]:
    """Whether two outputs are one, and where they part."""
    if plain == drafted:
        return {"same": True}
    pairs = enumerate(zip(plain, drafted, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(drafted)))
    return {"same": False, "first_difference": place}


def summarize(
    log: Log, drafters: list[str], temperatures: list[float], keys: list[str]
) -> list[dict[str, Any]]:
    """Counts for each drafter and temperature, over the prompts of this run."""
    found = []
    for how, temperature in itertools.product(["plain", *drafters], temperatures):
        records = [log.found.get((how, key, temperature)) for key in keys]
        there = [record for record in records if record is not None]
        whole = [record for record in there if "error" not in record]
        totals: Counter[str] = Counter()
        for record in whole:
            totals.update({name: record[name] for name in ("drafted_tokens", "accepted_tokens")})
            totals["tokens"] += record["tokens"] if how != "plain" else len(record["ids"])
        found.append(
            {
                "how": how,
                "temperature": temperature,
                "outputs": len(there),
                "exceptions": len(there) - len(whole),
                "differences": sum(record.get("same") is False for record in whole),
                **totals,
            }
        )
    return found


def main() -> None:
    """Run what the log lacks and tell what it holds."""
    ap = model_parser(__doc__)
    ap.add_argument("--drafters", default="ngram,script")
    ap.add_argument("--draft-length", default="auto", help="a number, auto or adaptive")
    ap.add_argument("--prompts", type=int, default=200)
    ap.add_argument("--max-tokens", type=int, default=256)
    ap.add_argument("--temperatures", default="0,0.7")
    ap.add_argument("--file", default="", help="JSONL of prompts")
    ap.add_argument("--log", default="", help="JSONL of results, continued if it is there")
    ap.add_argument("--json", default="")
    args = ap.parse_args()
    temperatures = [float(part) for part in args.temperatures.split(",")]
    drafters = split_drafters(args.drafters)
    length = int(args.draft_length) if args.draft_length.isdecimal() else args.draft_length
    prompts = collect(args)
    if len(prompts) < args.prompts:
        print(f"there are {len(prompts)} prompts, fewer than {args.prompts}")

    engine = Engine.load(
        args.target,
        drafter="none",
        draft_length=length,
        runtime=args.runtime,
        dtype=args.dtype,
    )
    for name in drafters:
        engine.make_drafter(name)  # a mistake is told before hours are spent
    told = conditions(args, engine.model)
    print_conditions(told)
    log = Log(args.log, told)

    bad: Counter[str] = Counter()
    for number, prompt in enumerate(prompts):
        key = key_of(prompt)
        for temperature in temperatures:
            place = {"prompt": key, "temperature": temperature}
            if ("plain", key, temperature) not in log.found:
                made = run(engine, prompt, temperature, args, plain=True)
                log.add({"how": "plain", **place, **made})
            plain = log.found["plain", key, temperature]
            bad["exceptions"] += "error" in plain
            for name in drafters:
                # Another draft length is another experiment.
                how = name if length == "auto" else f"{name} k={length}"
                if "error" not in plain and (how, key, temperature) not in log.found:
                    drafter = drafter_for(name, plain["ids"], engine.model.vocab_size)
                    made = run(engine, prompt, temperature, args, drafter=drafter)
                    if (ids := made.pop("ids", None)) is not None:
                        made |= compare(plain["ids"], ids) | {"tokens": len(ids)}
                        # What differs is kept, so that it can be looked into.
                        made |= {} if made["same"] else {"ids": ids}
                    log.add({"how": how, **place, **made})
                found = log.found.get((how, key, temperature), {})
                bad["exceptions"] += "error" in found
                bad["differences"] += found.get("same") is False
        print(
            f"\r{number + 1} of {len(prompts)} prompts, {bad['differences']} differences, "
            f"{bad['exceptions']} exceptions",
            end="",
            file=sys.stderr,
            flush=True,
        )
    print(file=sys.stderr)

    names = [name if length == "auto" else f"{name} k={length}" for name in drafters]
    counts = summarize(log, names, temperatures, [key_of(prompt) for prompt in prompts])
    head = ("how", "temperature", "outputs", "tokens", "drafted", "kept", "differ", "exceptions")
    rows = [
        (
            c["how"],
            c["temperature"],
            c["outputs"],
            c.get("tokens", 0),
            c.get("drafted_tokens", 0),
            c.get("accepted_tokens", 0),
            "" if c["how"] == "plain" else c["differences"],
            c["exceptions"],
        )
        for c in counts
    ]
    print_table(f"{args.target}, against plain decoding", head, rows)
    write_json(args.json, told, counts=counts)
    # A difference is a failure, so that a script notices.
    sys.exit(1 if bad.total() else 0)


if __name__ == "__main__":
    main()
