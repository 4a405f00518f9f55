"""Run by several processes at once: a target on a device, asked a few things; JSON comes out.

``python -m tests.e2e.spread_target FOLDER DRAFT DEVICE``
"""

from __future__ import annotations

import json
import sys
from typing import Any

from outrider import Engine
from outrider.engine.prefix import Prefix
from outrider.models.numerics import check_numbers
from tests.small_models import some_tokens

PROMPT = [*some_tokens(9), *some_tokens(9)]
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9})


def drafters(draft: str, trees: bool) -> list[str]:
    chains = ["none", "ngram", f"model:{draft}"]
    return [*chains, f"model:{draft}#tree=3,2", "early_exit:1"] if trees else chains


def run(folder: str, draft: str, device: str) -> dict[str, Any]:
    engine = Engine.load(folder, runtime="hf", dtype="float32", device=device, drafter="none")
    found: dict[str, Any] = {"model": type(engine.model).__name__}
    for drafter in drafters(draft, engine.model.trees):
        for setting in SETTINGS:
            out = engine.generate(
                PROMPT,
                max_tokens=24,
                seed=7,
                drafter=drafter,
                draft_length=3,
                ignore_eos=True,
                **setting,
            )
            summary = out.trace.summary()
            found[f"{drafter.partition('/')[0]} {drafter.partition('#')[2]} {setting}"] = [
                out.token_ids, summary["drafted_tokens"], summary["accepted_tokens"]
            ]  # fmt: skip
    # A conversation: the second request starts from what the first one left in the caches.
    prefix = Prefix()
    for prompt in (PROMPT, [*PROMPT, 5, 6]):
        made = engine.stream(prompt, max_tokens=8, prefix=prefix, drafter="ngram", ignore_eos=True)
        found[f"turn {len(prompt)}"] = [made.output.token_ids, 0, 0]
        prefix.keep(made.session)
    numbers = check_numbers(engine.model, some_tokens(40))
    found["same bits"], found["worst"] = numbers.same_bits, numbers.largest_difference
    cache = engine.model.new_cache(8)
    engine.model.prefill(cache, PROMPT)
    found["heads"] = [layer.keys.shape[1] for layer in cache.layers.layers]
    found["logits"] = engine.model.score(cache, [5], _nothing())[0].tolist()
    return found


def _nothing() -> Any:
    from outrider.core.proposal import Proposal

    return Proposal()


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:])))
