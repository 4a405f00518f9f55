"""Closed forms: how many tokens a draft can be expected to gain, and the most that it could.

Letters: p target, q draft, α the probability that one drafted token stands, γ the draft length.
Expected numbers of *accepted* tokens leave the target's own token (correction or bonus) out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.distribution import Distribution

__all__ = [
    "accepted_by_block",
    "accepted_by_rejection",
    "best_draft_length",
    "tokens_per_call",
]

Laws = Callable[[Sequence[int]], Distribution]
"""From drafted tokens to the law of the next one."""


def tokens_per_call(alpha: float, length: int) -> float:
    """E[emitted] = (1 − α^(γ+1)) / (1 − α), the target's own token included.

    Every drafted token stands with probability α, independently, until one does not.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.

    >>> tokens_per_call(0.5, 2), tokens_per_call(1.0, 4)
    (1.75, 5.0)
    """
    return float(sum(alpha**i for i in range(length + 1)))


def best_draft_length(alpha: float, cost: float, most: int) -> int:
    """The γ from 0 to ``most`` with the most tokens in a unit of time; of equals, the least.

    Maximises ``tokens_per_call(α, γ)`` / (1 + cost · γ), where ``cost`` is the time of one more
    token, drafted and scored, in passes of the target.

    >>> best_draft_length(0.8, 0.1, 16), best_draft_length(0.05, 0.1, 16)
    (6, 0)
    """
    return max(range(most + 1), key=lambda n: (tokens_per_call(alpha, n) / (1 + cost * n), -n))


def accepted_by_rejection(p: Laws, q: Laws, length: int) -> float:
    """Expected accepted tokens of a sampled chain under the ``rejection`` rule.

    Σ_i Σ_{x_1..x_i} Π_j min(p(x_j), q(x_j)), each after the tokens before it: one token stands
    with probability 1 − TV(p, q).

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Theorem 3.5, unrolled over contexts.
    """
    return _over_paths(p, q, length, lambda weight, p_x, q_x: weight * min(1.0, p_x / q_x))


def accepted_by_block(p: Laws, q: Laws, length: int) -> float:
    """Expected accepted tokens of a sampled chain under ``block``: the most that any rule can.

    Σ_i E[w_i] with w_i = min(1, w_{i−1} p(x_i)/q(x_i)), x_i ~ q.

    Source: Sun et al. 2024 (arXiv 2403.10444), Theorem 2; their M_b is our p, M_s our q.
    """
    return _over_paths(p, q, length, lambda weight, p_x, q_x: min(1.0, weight * p_x / q_x))


def _over_paths(
    p: Laws, q: Laws, length: int, step: Callable[[float, float, float], float]
) -> float:
    """Σ_i E[w_i] over paths drawn from q, with w_i = step(w_{i−1}, p(x_i), q(x_i))."""

    def below(path: tuple[int, ...], drawn: float, weight: float) -> float:
        if len(path) == length:
            return 0.0
        after_p, after_q, total = p(path), q(path), 0.0
        for token, q_x in zip(after_q.ids, after_q.probs, strict=True):
            here = step(weight, after_p[int(token)], float(q_x))
            if here > 0.0:
                chance = drawn * float(q_x)
                total += chance * here
                total += below((*path, int(token)), chance, here)
        return total

    return below((), 1.0, 1.0)
