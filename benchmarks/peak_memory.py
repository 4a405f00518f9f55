"""The most memory that a target takes, beside its weights and its cache.

    python -m benchmarks.peak_memory --target T [--context 2048] [--drafter D] [--json FILE]

What the process held before the target was loaded (Python, torch and all libraries) is taken off;
the first load of a model, which packs its weights, is done beforehand in a process of its own.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import psutil

import outrider.models.native.load  # noqa: F401, a part of what is held beforehand
from benchmarks.conditions import (
    conditions,
    model_parser,
    print_conditions,
    print_table,
    write_json,
)
from outrider import Engine
from outrider.lab.memory import cache_bytes, tensor_bytes


def main() -> None:
    parser = model_parser(__doc__)
    parser.add_argument("--context", type=int, default=2048, help="Tokens of the prompt.")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    pack = f"from outrider import Engine; Engine.load({args.target!r}, drafter='none')"
    subprocess.run([sys.executable, "-c", pack], check=True, stdout=subprocess.DEVNULL)

    toy = Engine.load("toy:vocab=4", drafter="ngram")  # the imports that any request needs
    toy.generate("abab", max_tokens=4)
    before = psutil.Process().memory_info().rss
    engine = Engine.load(args.target, drafter=args.drafter, runtime=args.runtime, dtype=args.dtype)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stream = engine.stream(
        [i % 1000 for i in range(args.context)], max_tokens=args.max_tokens, ignore_eos=True
    )
    for _ in stream:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = tensor_bytes(engine.model) or 0
    draft = tensor_bytes(engine.drafter, beside=engine.model) or 0
    cache = cache_bytes(stream.session.cache) or 0
    parts = {"weights": weights, "draft": draft, "cache": cache}
    told = conditions(args, engine.model)
    print_conditions(told)
    rows = [(name, f"{n / 2**20:.1f}") for name, n in parts.items()]
    rows += [
        ("most while loading", f"{(loaded - before) / 2**20:.1f}"),
        ("most in all", f"{(peak - before) / 2**20:.1f}"),
        ("most in all / (weights + draft + cache)", f"{(peak - before) / sum(parts.values()):.2f}"),
    ]
    print_table(f"MiB, {args.context} tokens of prompt", ("", "MiB"), rows)
    write_json(args.json, told, bytes=parts, loaded=loaded - before, peak=peak - before)


if __name__ == "__main__":
    main()
