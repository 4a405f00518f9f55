"""The raw record of a run: what each round drafted, kept and cost. Rates are derived from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Round", "Trace"]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: propose, score, judge, commit.

    Parameters
    ----------
    drafted
        Nodes in the proposal.
    accepted
        Drafted tokens that were emitted; a stop inside the block leaves the rest out.
    corrections, bonuses
        The target's own token: 1 and 0 after a rejection, 0 and 1 after none, and 0 and 0 when
        the output ended on an accepted token before it.
    rejected
        Whether the rule rejected a draft in this round, emitted correction or not.
    draft_s, score_s, total_s
        Seconds spent proposing, in the target's pass, and in all.
    """

    drafted: int
    accepted: int
    corrections: int
    bonuses: int
    rejected: bool
    draft_s: float
    score_s: float
    total_s: float

    @property
    def emitted(self) -> int:
        """Tokens that this round added to the output."""
        return self.accepted + self.corrections + self.bonuses


@dataclass(slots=True)
class Trace:
    """All rounds of one request.

    ``prefill_s`` is the pass over the prompt without its last token; the last token is scored
    in the first round, so every emitted token comes from a counted target call.

    Example
    -------
    >>> trace = Trace(rounds=[Round(4, 2, 1, 0, True, 0.001, 0.02, 0.022)])
    >>> summary = trace.summary()
    >>> summary["acceptance_rate"], summary["tokens_per_target_call"]
    (0.5, 3.0)
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)

    def _sum(self, name: str) -> int:
        return sum(getattr(r, name) for r in self.rounds)

    def summary(self) -> dict[str, Any]:
        """Counts, milliseconds and rates by the names used everywhere in Outrider.

        ``acceptance_rate`` = accepted / drafted (the bonus token does not count);
        ``tokens_per_target_call`` = emitted / target calls (it does; plain decoding: 1).
        A rate without a denominator is ``None``. ``decode_tokens_per_s`` leaves the prefill out.
        """
        drafted, accepted, emitted = (self._sum(n) for n in ("drafted", "accepted", "emitted"))
        calls = len(self.rounds)
        decode_s = self.total_s - self.prefill_s
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "correction_tokens": self._sum("corrections"),
            "bonus_tokens": self._sum("bonuses"),
            "rejected_rounds": sum(r.rejected for r in self.rounds),
            "target_calls": calls,
            "emitted_tokens": emitted,
            "prefill_time_ms": self.prefill_s * 1e3,
            "draft_time_ms": sum(r.draft_s for r in self.rounds) * 1e3,
            "verify_time_ms": sum(r.score_s for r in self.rounds) * 1e3,
            "total_time_ms": self.total_s * 1e3,
            "ttft_ms": None if self.ttft_s is None else self.ttft_s * 1e3,
            "acceptance_rate": accepted / drafted if drafted else None,
            "tokens_per_target_call": emitted / calls if calls else None,
            "target_calls_per_token": calls / emitted if emitted else None,
            "tokens_per_s": emitted / self.total_s if self.total_s else None,
            "decode_tokens_per_s": emitted / decode_s if decode_s > 0 else None,
        }
