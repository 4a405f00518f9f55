"""What drafting does to the throughput of a full batch, step by step beside plain decoding.

    .venv/bin/python -m benchmarks.batch_load [--target T] [--drafter auto] [--sizes 1,4,8,16]
        [--prompts bundled] [--requests 3] [--repeats 8] [--max-tokens 64] [--temperature 0]
        [--json FILE]

Two batches of the same requests on the same model, one plain and one with the drafter, draft length
and price that `outrider serve` takes by itself, are stepped in turns: a step of one, a step of the
other. A drift of the machine's speed therefore falls on both within tens of milliseconds, and small
differences can be told: a server's turns of seconds (`benchmarks.serve_load`) differ by a tenth on
a shared machine. Whenever a request ends the next one joins, so that a batch stays full; a repeat
is over when either batch has begun its last request and could not be filled again. Prompts are fed
in the same steps, as they are in a server.

Throughput is tokens over the seconds of a batch's own steps. What is told is the median over the
repeats of the drafting batch's by the plain one's, with an interval of 95 % by resampling. Texts
are compared; where any differs the exit status is 1.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.conditions import (
    conditions,
    model_parser,
    print_conditions,
    print_table,
    write_json,
)
from outrider import Engine
from outrider.engine.batch import Batch
from outrider.engine.generation import Generation
from outrider.engine.prompts import read_prompts
from outrider.lab.stats import bootstrap_median


@dataclass
class Lane:
    """A batch that is kept full, and what its steps came to."""

    batch: Batch
    coming: Iterator[tuple[int, Generation]]
    size: int
    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    running: dict[int, int] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)

    def fill(self) -> bool:
        """Let requests join; whether the batch is full."""
        while len(self.batch) < self.size:
            following = next(self.coming, None)
            if following is None:
                return False
            number, generation = following
            self.running[id(generation)] = number
            self.batch.add(generation)
        return True

    def step(self) -> None:
        """One step, timed."""
        started = time.perf_counter()
        steps = self.batch.step()
        self.seconds += time.perf_counter() - started
        for one in steps:
            self.tokens += len(one.pieces)
            if one.error is not None:
                raise one.error
            if one.finished:
                output = one.generation.output
                self.texts[self.running.pop(id(one.generation))] = output.text
                self.drafted += output.trace.summary()["drafted_tokens"]


def repeat(
    engine: Engine, prompts: list[Any], size: int, request: dict[str, Any], ours_first: bool
) -> tuple[Lane, Lane]:
    """The drafting batch and the plain one, after the same requests step by step."""

    def lane(plain: bool) -> Lane:
        coming = (
            (number, engine.stream(prompt, plain=plain, seed=number, **request))
            for number, prompt in enumerate(prompts)
        )
        return Lane(Batch(engine.model), coming, size)

    ours, plain = lane(False), lane(True)
    order = (ours, plain) if ours_first else (plain, ours)
    while all(one.fill() for one in order):
        for one in order:
            one.step()
    return ours, plain


def main() -> None:
    """Measure and print."""
    ap = model_parser(__doc__)
    ap.add_argument("--drafter", default="auto")
    ap.add_argument("--sizes", default="1,4,8,16", help="of the batch")
    ap.add_argument("--prompts", default="bundled", help="bundled, or a .txt or .jsonl file")
    ap.add_argument("--requests", type=int, default=3, help="in a repeat, times the batch's size")
    ap.add_argument("--repeats", type=int, default=8)
    ap.add_argument("--max-tokens", type=int, default=64)
    ap.add_argument("--temperature", type=float, default=0.0)
    ap.add_argument("--json", default="")
    args = ap.parse_args()
    engine = Engine.load(args.target, drafter=args.drafter, runtime=args.runtime, dtype=args.dtype)
    told = conditions(args, engine.model)
    print_conditions(told)
    prompts = [record.prompt for record in read_prompts(args.prompts)]
    request = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    repeat(engine, prompts[:2], 1, request, True)  # what is compiled or measured once

    rows: list[dict[str, Any]] = []
    differing = 0
    for size in map(int, args.sizes.split(",")):
        ratios, ours_s, plain_s, drafted, tokens = [], [], [], 0, 0
        for turn in range(args.repeats):
            shift = turn * size * args.requests % len(prompts)
            some = (prompts[shift:] + prompts[:shift])[: size * args.requests]
            ours, plain = repeat(engine, some, size, request, turn % 2 == 0)
            speeds = [lane.tokens / lane.seconds for lane in (ours, plain)]
            ours_s.append(speeds[0])
            plain_s.append(speeds[1])
            ratios.append(speeds[0] / speeds[1])
            drafted, tokens = drafted + ours.drafted, tokens + ours.tokens
            both = ours.texts.keys() & plain.texts.keys()
            differing += sum(ours.texts[number] != plain.texts[number] for number in both)
            print(f"\rbatch {size}: {turn + 1} repeats", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        rows.append(
            {
                "batch": size,
                "plain_tokens_per_s": median(plain_s),
                "tokens_per_s": median(ours_s),
                "ratio": median(ratios),
                "interval": bootstrap_median(ratios),
                "drafted_per_token": drafted / max(1, tokens),
                "ratios": ratios,
            }
        )
    cells = [
        (
            row["batch"],
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*row["interval"]) if row["interval"] else "",
            f"{row['drafted_per_token']:.2f}",
        )
        for row in rows
    ]
    head = (
        "batch",
        "plain, tokens/s",
        f"{args.drafter}, tokens/s",
        "ratio",
        "95 %",
        "drafted a token",
    )
    print_table(f"{engine.model.name}: a full batch, step by step", head, cells)
    print(f"texts that were not the same: {differing}")
    write_json(args.json, told, rows=rows)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
