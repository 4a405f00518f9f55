"""What weights of fewer bits do to a model's predictions, on text that anyone has.

    .venv/bin/python -m benchmarks.perplexity [--target T] [--kinds bfloat16,int8,int4,float32]
        [--tokens 20000] [--text FILE] [--json FILE]

The text is Python's own library (heapq, textwrap, argparse), this repository's README, LICENSE
and older documents, and any ``--text``; each gives an equal share of the tokens, in contexts of
1024. Every kind predicts the same tokens from the same contexts. The text's checksum is told,
since another version of Python or of the documents is another text.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import conditions, print_conditions, print_table, write_json
from outrider.core.proposal import Proposal
from outrider.engine.loading import load_model

CONTEXT = 1024
ROWS = 64
"""Rows of one pass: the most that the native runtime feeds."""
SHORTEST = 32
"""A context of fewer tokens says little and is left out."""
KINDS = ("bfloat16", "int8", "int4", "float32")
_HOME = Path(__file__).parent.parent
_OWN = ("README.md", "LICENSE", "docs/proof.md", "docs/rules.md", "docs/audits.md")


def texts(extra: list[str]) -> dict[str, str]:
    """Each source's name and text."""
    found = {
        module.__name__: Path(module.__file__).read_text()
        for module in (heapq, textwrap, argparse)
        if module.__file__
    }
    found |= {name: (_HOME / name).read_text() for name in _OWN}
    return found | {Path(name).name: Path(name).read_text() for name in extra}


def contexts(tokenizer: Any, sources: dict[str, str], tokens: int) -> list[list[int]]:
    """Stretches of at most CONTEXT tokens, an equal share from each source.

    What a short source lacks, the longer ones after it make up for.
    """
    encoded = sorted((tokenizer.encode(text) for text in sources.values()), key=len)
    found, left = [], tokens
    for number, ids in enumerate(encoded):
        share = min(len(ids), left // (len(encoded) - number))
        left -= share
        parts = [ids[start : min(start + CONTEXT, share)] for start in range(0, share, CONTEXT)]
        found += [part for part in parts if len(part) >= SHORTEST]
    return found


def predict(model: Any, parts: list[list[int]], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """For every token but the first of each part: -log p, and the token held most likely."""
    losses, best = [], []
    for number, part in enumerate(parts):
        cache = model.new_cache(len(part))
        fed = part[:-1]
        for start in range(0, len(fed), ROWS):
            first, *rest = fed[start : start + ROWS]
            logits = model.score(cache, [first], Proposal.chain(rest))
            wanted = torch.tensor(part[start + 1 : start + 2 + len(rest)])
            # One row after the other in float64: all 64 at once would take a good deal of memory.
            for row, token in zip(logits, wanted, strict=True):
                losses.append(torch.logsumexp(row.double(), 0) - row[token].double())
            best.append(logits.argmax(-1))
        print(f"\r{name}: part {number + 1} of {len(parts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return torch.stack(losses), torch.cat(best)


def main() -> None:
    """Measure each kind and print them beside bfloat16."""
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--target", default="smollm2-135m")
    ap.add_argument("--kinds", default="bfloat16,int8,int4", help=",".join(KINDS))
    ap.add_argument("--tokens", type=int, default=20_000)
    ap.add_argument("--text", action="append", default=[], help="a file more; may be repeated")
    ap.add_argument("--json", default="")
    args = ap.parse_args()
    # What the others are compared with comes first.
    kinds = ["bfloat16", *(kind for kind in args.kinds.split(",") if kind != "bfloat16")]
    if unknown := set(kinds) - set(KINDS):
        ap.error(f"no such kind: {', '.join(sorted(unknown))}")

    sources = texts(args.text)
    told = conditions(args)
    told["text_sha256"] = hashlib.sha256("".join(sources.values()).encode()).hexdigest()[:16]
    parts: list[list[int]] = []
    found: dict[str, dict[str, float]] = {}
    reference = None
    for kind in kinds:
        model, tokenizer = load_model(args.target, runtime="native", dtype=kind)
        if not parts:
            parts = contexts(tokenizer, sources, args.tokens)
            told["predicted"] = sum(len(part) - 1 for part in parts)
            told["sources"] = ", ".join(sources)
            print_conditions(told)
        losses, best = predict(model, parts, kind)
        del model
        if reference is None:
            reference = losses, best
        more = losses - reference[0]
        n = len(losses)
        # Of the log of the ratio: the same tokens are predicted, so that differences count.
        error = float(more.std() / math.sqrt(n)) if n > 1 else 0.0
        found[kind] = {
            "perplexity": math.exp(losses.mean()),
            "ratio": math.exp(more.mean()),
            "ratio_error": error,
            "top1_agreement": float((best == reference[1]).double().mean()),
        }
    rows = [
        (
            kind,
            f"{r['perplexity']:.4f}",
            "1" if kind == "bfloat16" else f"{r['ratio']:.4f} ± {r['ratio_error']:.4f}",
            f"{r['top1_agreement']:.2%}",
        )
        for kind, r in found.items()
    ]
    title = f"{args.target}, {told['predicted']} tokens (± one standard error over tokens)"
    print_table(title, ("weights", "perplexity", "of bfloat16's", "same first choice"), rows)
    write_json(args.json, told, kinds=found)


if __name__ == "__main__":
    main()
