"""Expected accepted tokens of each rule on the same p and q, and the most that any rule could.

    python -m benchmarks.expected_length [--write-docs]

Exact: every course of chance of one round is walked, on toy targets of three tokens. The draft is
a mixture of the target and another random model, so agreement can be set.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from outrider.audit.acceptance import acceptance
from outrider.drafters.model import ModelDrafter
from outrider.drafters.shape import Chain, Dynamic, Shape, Static
from outrider.models.toy import ToyModel
from outrider.registry import RULES

VOCAB = 3
PAIRS = 12
SHARES = (0.8, 0.5, 0.0)
"""Of the target in the draft's mixture."""
SHAPES: tuple[tuple[str, Shape, int], ...] = (
    ("chain of 1", Chain(), 1),
    ("chain of 2", Chain(), 2),
    ("chain of 3", Chain(), 3),
    ("tree 2", Static((2,)), 1),
    ("tree 2,2", Static((2, 2)), 2),
    ("dynamic tree, 4 nodes", Dynamic(4, 2), 2),
)
COLUMNS = ("rejection", "block", "coupled")
DOCS = Path(__file__).parent.parent / "docs" / "rules.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def pair(seed: int, share: float) -> tuple[ToyModel, ToyModel]:
    target, other = ToyModel.random(VOCAB, seed), ToyModel.random(VOCAB, 1000 + seed)
    return target, ToyModel(
        lambda tokens: share * target.next(tokens) + (1 - share) * other.next(tokens), VOCAB
    )


def row(share: float, shape: Shape, length: int) -> dict[str, tuple[float, float]]:
    """Each rule's mean expected tokens, and the mean bound on its own proposals."""
    found: dict[str, tuple[float, float]] = {}
    for rule in COLUMNS:
        if not isinstance(shape, Chain) and not RULES.load(rule).trees:
            continue
        kept = []
        for seed in range(PAIRS):
            target, draft = pair(seed, share)
            drafter = ModelDrafter(draft, shape=shape)
            kept.append(acceptance(target, drafter, RULES.load(rule)(), draft_length=length))
        found[rule] = mean(k.expected for k in kept), mean(k.bound for k in kept)
    return found


def table() -> str:
    head = " | ".join(f"{rule} (most possible)" for rule in COLUMNS)
    lines = [
        f"| draft agrees | proposal | {head} |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for share in SHARES:
        for name, shape, length in SHAPES:
            found = row(share, shape, length)
            cells = [
                f"{found[r][0]:.4f} ({found[r][1]:.4f})" if r in found else "" for r in COLUMNS
            ]
            lines.append(f"| {share:.0%} | {name} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-docs", action="store_true", help=f"the table goes into {DOCS}")
    arguments = parser.parse_args()
    made = table()
    if arguments.write_docs:
        text = DOCS.read_text()
        DOCS.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n{made}\n{END}{text.split(END)[1]}")


if __name__ == "__main__":
    main()
