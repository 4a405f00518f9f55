"""How long one pass of a target takes, by rows and context, beside what memory allows.

    .venv/bin/python -m benchmarks.step_time [--target T] [--runtime native|hf] [--dtype KIND]
        [--contexts 64,512,2048] [--widths 1,2,4,6,8,16] [--repeats 25] [--json FILE]

A pass must read every weight once, so weight bytes over the measured bandwidth bound it from
below; the cache's keys and values come on top and are told beside. Widths and contexts are
measured in turns, forwards and backwards, so that a drift of the machine's speed falls on all.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from benchmarks.conditions import (
    bandwidth,
    conditions,
    model_parser,
    print_conditions,
    print_table,
    write_json,
)
from outrider.core.proposal import Proposal
from outrider.engine.loading import load_model
from outrider.protocols import Model

WARM_UP = 2


def numbers(text: str) -> list[int]:
    """``1,2,4`` as a list."""
    return [int(part) for part in text.split(",")]


def weight_bytes(model: Any) -> int:
    """Bytes that a pass streams: all weights but an embedding of its own, which is looked up."""
    if hasattr(model, "weights"):
        return int(model.weights.streamed_bytes)
    module = model.module
    size = sum(p.nbytes for p in {id(p): p for p in module.parameters()}.values())
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    own = head is not None and head.weight is not table.weight
    return size - table.weight.nbytes if own else size


def cache_bytes(model: Any, tokens: int) -> int:
    """Keys and values of so many tokens, which a pass reads too; 0 where it is not known."""
    return int(model.shape.bytes(tokens)) if hasattr(model, "shape") else 0


def measure(
    model: Model, contexts: list[int], widths: list[int], repeats: int
) -> dict[tuple[int, int], list[float]]:
    """Seconds of each pass, by context and width."""
    caches = {}
    for context in contexts:
        caches[context] = model.new_cache(context + max(widths))
        # Token ids mean nothing here, but all equal they would be an odd case for attention.
        ids = [(7 * i + 3) % min(1000, model.vocab_size) for i in range(context)]
        model.prefill(caches[context], ids, None)
    order = [(context, width) for context in contexts for width in widths]
    times: dict[tuple[int, int], list[float]] = {place: [] for place in order}
    for turn in range(WARM_UP + repeats):
        for context, width in order if turn % 2 else order[::-1]:
            proposal = Proposal.chain(list(range(9, 8 + width)))
            started = time.perf_counter()
            model.score(caches[context], [5], proposal)
            spent = time.perf_counter() - started
            caches[context].rollback(context)
            if turn >= WARM_UP:
                times[context, width].append(spent)
        print(f"\rturn {turn + 1} of {WARM_UP + repeats}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Median and deciles in milliseconds."""
    deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return {
        "median_ms": 1e3 * statistics.median(times),
        "p10_ms": 1e3 * deciles[0],
        "p90_ms": 1e3 * deciles[-1],
    }


def main() -> None:
    """Measure and print."""
    ap = model_parser(__doc__)
    ap.add_argument("--contexts", type=numbers, default=[64, 512, 2048])
    ap.add_argument("--widths", type=numbers, default=[1, 2, 4, 6, 8, 16])
    ap.add_argument("--repeats", type=int, default=25)
    ap.add_argument("--json", default="")
    args = ap.parse_args()
    model, _ = load_model(args.target, runtime=args.runtime, dtype=args.dtype)
    told = conditions(args, model)
    print_conditions(told)

    most = model.context_length - max(args.widths)
    contexts = [context for context in args.contexts if context <= most]
    if left_out := sorted(set(args.contexts) - set(contexts)):
        print(f"left out, for a context of {model.context_length}: {left_out}\n")
    before = bandwidth()
    times = measure(model, contexts, args.widths, args.repeats)
    # Measured on both sides; the better one is the roof.
    speed = max(before, bandwidth())
    size = weight_bytes(model)
    bound_ms = 1e3 * size / speed
    print(
        f"bandwidth {speed / 1e9:.1f} GB/s, weights {size / 1e6:.1f} MB, bound {bound_ms:.2f} ms\n"
    )

    found, rows = [], []
    for (context, width), seconds in times.items():
        cache = cache_bytes(model, context)
        s: dict[str, Any] = {"context": context, "width": width, **summary(seconds)}
        s |= {
            "bound_ms": bound_ms,
            "times_bound": s["median_ms"] / bound_ms,
            "bound_with_cache_ms": 1e3 * (size + cache) / speed,
        }
        found.append(s)
        rows.append(
            (
                context,
                width,
                *(f"{s[name]:.2f}" for name in ("median_ms", "p10_ms", "p90_ms")),
                f"{bound_ms:.2f}",
                f"{s['times_bound']:.2f}",
                f"{s['bound_with_cache_ms']:.2f}" if cache else "",
            )
        )
    head = ("context", "rows", "ms", "p10", "p90", "bound ms", "times the bound", "with cache ms")
    print_table("One pass", head, rows)

    ratios = {}
    medians = {(s["context"], s["width"]): s["median_ms"] for s in found}
    for context in contexts:
        if {1, 8} <= set(args.widths):
            ratios[context] = medians[context, 8] / medians[context, 1]
    if ratios:
        print_table(
            "Eight rows against one",
            ("context", "time of 8 rows / time of 1"),
            ((context, f"{ratio:.2f}") for context, ratio in ratios.items()),
        )
    write_json(
        args.json,
        told,
        bandwidth_bytes_per_s=speed,
        weight_bytes=size,
        passes=found,
        eight_by_one=ratios,
    )


if __name__ == "__main__":
    main()
