"""A log of measurements as a run would leave one, from a small model of what rounds cost."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.trace import Round
from outrider.lab.record import Log, Record

__all__ = ["CONFIGURATIONS", "KINDS", "Configuration", "records", "write_log"]

KINDS = {
    "summary": 0.62,
    "translation": 0.38,
    "code": 0.72,
    "chat": 0.45,
    "maths": 0.55,
    "retrieval": 0.68,
}
"""Types of prompts, and how often a draft stands there."""

_WORDS = """
the of and to in a is that it for on with as was at by an be this from which or had not are but
have one they all were their when there been no said would so if what up out about into more time
"""


@dataclass(frozen=True)
class Configuration:
    """How a simulated configuration drafts: its length, its skill and its cost."""

    length: int
    skill: float  # added to how often a draft stands
    draft_ms: float  # for each drafted token
    reach: float = 1.0  # share of rounds in which it drafts at all


CONFIGURATIONS = {
    "plain": Configuration(0, 0.0, 0.0),
    "eagle": Configuration(4, 0.12, 0.9),
    "ngram": Configuration(8, 0.10, 0.02, reach=0.3),
    "model:small": Configuration(4, 0.15, 5.0),
}


def _rounds(
    chance: random.Random, how: Configuration, skill: float, tokens: int, entropies: Sequence[float]
) -> Iterator[tuple[Round, str]]:
    done = 0
    while done < tokens:
        drafted = how.length if chance.random() < how.reach else 0
        accepted = 0
        while accepted < drafted and chance.random() < skill * 1.25 * (
            1 - 0.22 * entropies[min(done + accepted, tokens - 1)]
        ):
            accepted += 1
        rejected = accepted < drafted
        own = done + accepted < tokens
        accepted = min(accepted, tokens - done)
        noise = chance.lognormvariate(0.0, 0.05)
        score_s = noise * (14.0 + 0.25 * drafted + 0.06 * max(0, drafted - 3) ** 2) / 1e3
        draft_s = chance.lognormvariate(0.0, 0.1) * how.draft_ms * drafted / 1e3
        rest_s = 0.0004 + 0.0001 * drafted
        letters = "a" * accepted + (("c" if rejected else "b" if drafted else "p") if own else "")
        yield (
            Round(
                drafted,
                accepted,
                int(own and rejected),
                int(own and not rejected),
                rejected,
                draft_s,
                score_s,
                draft_s + score_s + rest_s,
            ),
            letters,
        )
        done += accepted + own


def records(
    configurations: dict[str, Configuration] | None = None,
    *,
    prompts: int = 8,
    tokens: int = 96,
    temperatures: Sequence[float] = (0.0,),
    repeats: int = 1,
    seed: int = 1,
    noise: int = 1,
    pieces: Sequence[str] = (),
    kinds: dict[str, float] | None = None,
) -> Iterator[Record]:
    """Records of every configuration on ``prompts`` prompts of each type.

    ``pieces`` begin every text; the rest is words. Another ``noise`` is another run of the same.
    """
    kinds = KINDS if kinds is None else kinds
    number = -1
    for kind, often in kinds.items():
        for _ in range(prompts):
            number += 1
            chance = random.Random(f"{seed} {number}")
            skill = min(0.9, max(0.1, chance.gauss(often, 0.1)))
            length = int(tokens * chance.uniform(0.6, 1.0))
            words = [*pieces, *(f" {chance.choice(_WORDS.split())}" for _ in range(length))][
                :length
            ]
            entropies = [min(4.0, chance.expovariate(1.0)) for _ in words]
            for temperature in temperatures:
                for repeat in range(repeats):
                    for name, how in (configurations or CONFIGURATIONS).items():
                        course = random.Random(f"{noise} {number} {temperature} {repeat} {name}")
                        played = list(
                            _rounds(
                                course,
                                how,
                                min(0.97, skill + how.skill) * (1 - 0.25 * temperature),
                                length,
                                entropies,
                            )
                        )
                        total_s = 0.02 + sum(r.total_s for r, _ in played)
                        yield Record(
                            configuration=name,
                            prompt=number,
                            kind=kind,
                            repeat=repeat,
                            batch=1,
                            temperature=temperature,
                            seed=number,
                            prompt_tokens=40 + number,
                            token_ids=[hash_word(word) for word in words],
                            origins="".join(letters for _, letters in played),
                            finish_reason="length",
                            prefill_s=0.02,
                            ttft_s=0.02 + played[0][0].total_s,
                            total_s=total_s,
                            rounds=[r for r, _ in played],
                            entropies=entropies,
                            pieces=list(words),
                        )


def hash_word(word: str) -> int:
    """A token id for a word, the same in every process."""
    return int.from_bytes(word.encode("utf-8", "surrogatepass")[:3], "big") % 49152


def write_log(path: Path, conditions: dict[str, Any] | None = None, **how: Any) -> Log:
    """A log on disk, with conditions like a real run's."""
    log = Log(path)
    log.begin(
        {
            "target": "smollm2-135m",
            "prompts": "prompts.jsonl",
            "max_tokens": how.get("tokens", 96),
            "machine": {"processor": "AMD EPYC", "cores": 2, "memory_gib": 16.0},
            "versions": {"outrider": "0.1.0", "torch": "2.13.0", "Python": "3.11.7"},
            "arguments": ["bench", "--target", "smollm2-135m", "--prompts", "prompts.jsonl"],
        }
        | (conditions or {})
    )
    for record in records(**how):
        log.add(record)
    return log
