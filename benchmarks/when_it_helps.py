"""Where speculation pays on the default model, and where it does not.

    .venv/bin/python -m benchmarks.when_it_helps [--target T] [--drafter D] [--runtime R]
        [--dtype KIND] [--json FILE]

Each prompt is decoded with the drafter and without, in turns, and the ratio of the two median
times is taken prompt by prompt, so that a drift of the machine's speed falls on both. The first
table is the README's; the second is the cost of scoring more rows in one pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.conditions import conditions, print_conditions, write_json
from outrider import Engine
from outrider.core.proposal import Proposal
from tests.e2e.prompts import EDITS, ORDINARY

WIDTHS = (1, 2, 4, 8, 16, 32)
SETS = {"edits and extractions": EDITS, "ordinary questions": ORDINARY}


def compare(
    engine: Engine, prompts: list[str], args: argparse.Namespace, temperature: float
) -> dict[str, Any]:
    """Both ways of decoding each prompt, in turns."""
    ratios: list[float] = []
    totals = dict.fromkeys(
        ("target_calls", "emitted_tokens", "drafted_tokens", "accepted_tokens"), 0
    )
    same = True
    for number, prompt in enumerate(prompts):
        message = [{"role": "user", "content": prompt}]
        request = {"max_tokens": args.max_tokens, "temperature": temperature, "seed": number}
        seconds: dict[bool, list[float]] = {True: [], False: []}
        ids = {}
        for turn in range(args.repeats):
            for plain in (True, False) if (turn + number) % 2 else (False, True):
                out = engine.generate(message, plain=plain, **request)
                seconds[plain].append(out.trace.total_s)
                ids[plain] = out.token_ids
                if not plain and not turn:
                    for name in totals:
                        totals[name] += out.trace.summary()[name]
        ratios.append(statistics.median(seconds[True]) / statistics.median(seconds[False]))
        same &= ids[True] == ids[False]
    deciles = statistics.quantiles(ratios, n=10)
    return {
        "prompts": len(prompts),
        "tokens_per_target_call": totals["emitted_tokens"] / totals["target_calls"],
        "acceptance_rate": totals["accepted_tokens"] / max(totals["drafted_tokens"], 1),
        "speedup_p10": deciles[0],
        "speedup_median": statistics.median(ratios),
        "speedup_p90": deciles[-1],
        "speedup_worst": min(ratios),
        "same_tokens_as_plain": same,
    }


def cost_of_width(engine: Engine, context: int = 256) -> dict[int, float]:
    """Milliseconds for one pass over so many rows: medians of 15, the widths in turns."""
    model = engine.model
    cache = model.new_cache(context + max(WIDTHS))
    model.prefill(cache, [7] * context, None)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(15):
        for width in WIDTHS:
            started = time.perf_counter()
            model.score(cache, [5], Proposal.chain([9] * (width - 1)))
            times[width].append(time.perf_counter() - started)
            cache.rollback(context)
    return {width: 1e3 * statistics.median(t) for width, t in times.items()}


def row(*cells: object) -> None:
    """One row of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def main() -> None:
    """Run both measurements and print them as Markdown."""
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--target", default="smollm2-135m")
    ap.add_argument("--drafter", default="ngram")
    ap.add_argument("--runtime", default="auto", help="auto, native or hf")
    ap.add_argument("--dtype", default="auto", help="auto, int8, bfloat16 or float32")
    ap.add_argument("--max-tokens", type=int, default=128)
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--json", default="")
    args = ap.parse_args()
    engine = Engine.load(args.target, drafter=args.drafter, runtime=args.runtime, dtype=args.dtype)
    engine.generate("warm up", max_tokens=8)

    told = conditions(args, engine.model)
    print_conditions(told)
    row("prompts", "temperature", "tokens per call", "kept", "speed p10", "median", "p90", "same")
    row(*["---"] * 8)
    found = {}
    for name, prompts in SETS.items():
        for temperature in (0.0, 0.7):
            r = found[f"{name}, {temperature}"] = compare(engine, prompts, args, temperature)
            row(
                f"{name} ({r['prompts']})",
                temperature,
                f"{r['tokens_per_target_call']:.2f}",
                f"{r['acceptance_rate']:.0%}",
                f"{r['speedup_p10']:.2f}",
                f"{r['speedup_median']:.2f}",
                f"{r['speedup_p90']:.2f}",
                "yes" if r["same_tokens_as_plain"] else "no",
            )
    passes = cost_of_width(engine)
    print()
    row("rows in one pass", *WIDTHS)
    row(*["---"] * (1 + len(WIDTHS)))
    row("milliseconds", *(f"{ms:.1f}" for ms in passes.values()))
    write_json(args.json, told, prompts=found, pass_ms=passes)


if __name__ == "__main__":
    main()
