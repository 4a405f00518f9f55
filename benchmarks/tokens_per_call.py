"""Tokens per target call and speed of drafters on a file of prompts, by kind of prompt.

    python -m benchmarks.tokens_per_call --prompts bundled --drafter suffix --drafter eagle

Greedy unless --temperature is given, then by --rule; plain decoding runs in turn with each
drafter, prompt by prompt, so that drift falls on all. A finished prompt is logged at once, so a run
goes on where it stopped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.conditions import conditions, model_parser, print_conditions, print_table
from outrider import Engine
from outrider.engine.prompts import read_prompts


def measure(engine: Engine, messages: Any, drafter: str, request: dict[str, Any]) -> dict[str, Any]:
    output = engine.generate(messages, drafter=drafter, **request)
    told = output.trace.summary()
    names = ("target_calls", "total_time_ms", "draft_time_ms", "verify_time_ms", "drafted_tokens")
    return {
        "drafter": drafter,
        "tokens": len(output.token_ids),
        "ids": output.token_ids,
        **{name: told[name] for name in names},
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Means of tokens per call over prompts, and medians of the speed against plain."""
    plain = {row["number"]: row for row in rows if row["drafter"] == "none"}
    by: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["drafter"] != "none" and row["number"] in plain:
            by[row["drafter"], row["kind"]].append(row)
            by[row["drafter"], "all"].append(row)
    cells = []
    for (drafter, kind), some in sorted(by.items(), key=lambda item: item[0]):
        base = [plain[row["number"]] for row in some]
        gains = sorted(_speed(row) / _speed(p) for row, p in zip(some, base, strict=True))
        same = sum(row["ids"] == p["ids"] for row, p in zip(some, base, strict=True))
        calls = mean(row["tokens"] / row["target_calls"] for row in some)
        share = f"{same} of {len(some)}"
        gain, worst = f"{median(gains):.2f}", f"{gains[len(gains) // 10]:.2f}"
        cells.append((drafter, kind, len(some), f"{calls:.2f}", gain, worst, share))
    head = ("drafter", "prompts", "n", "tokens/call", "of plain, median", "p10", "same tokens")
    print_table("Tokens per target call, and speed against plain decoding", head, cells)


def _speed(row: dict[str, Any]) -> float:
    return row["tokens"] / row["total_time_ms"]


def main() -> None:
    parser = model_parser(__doc__)
    parser.add_argument("--prompts", default="bundled", help="bundled, or a .txt or .jsonl file")
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--limit", type=int, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--draft-length",
        type=int,
        help="depth of a proposal; all of it is scored, whatever it costs",
    )
    parser.add_argument("--rule", default="auto", help="other than by auto, tokens may differ")
    parser.add_argument("--log", type=Path, help="JSON lines; resumed")
    args = parser.parse_args()
    engine = Engine.load(args.target, runtime=args.runtime, dtype=args.dtype)
    request = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    request |= {"seed": 1, "rule": args.rule}
    if args.draft_length is not None:
        request["draft_length"] = args.draft_length
    rows = []
    if args.log and args.log.exists():
        rows = [json.loads(line) for line in args.log.read_text().splitlines()]
    done = {(row["number"], row["drafter"]) for row in rows}
    print_conditions(conditions(args, engine.model))
    for number, prompt in enumerate(read_prompts(args.prompts, limit=args.limit)):
        text = prompt.prompt
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        for drafter in ["none", *args.drafter]:
            if (number, drafter) in done:
                continue
            row = {"number": number, "kind": prompt.kind} | measure(
                engine, messages, drafter, request
            )
            rows.append(row)
            if args.log:
                with args.log.open("a") as log:
                    log.write(json.dumps(row) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
