"""Closed forms: how many tokens a draft can be expected to gain, the most that it could, and what
that is worth in time.

Letters: p target, q draft, α the probability that one drafted token stands, γ the draft length, c
the time of one drafted token in passes of the target over one row (plain decoding's), s = 1/c, v
the time of the pass that verifies, in the same unit.
Expected numbers of *accepted* tokens leave the target's own token (correction or bonus) out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from outrider.core.distribution import Distribution

__all__ = [
    "accepted_by_block",
    "accepted_by_rejection",
    "best_draft_length",
    "cache_bytes_per_token",
    "quoted_speedup",
    "roofline_s",
    "speedup",
    "speedup_of_request",
    "tokens_by_depth",
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


def tokens_by_depth(rates: Sequence[float]) -> float:
    """E[emitted] = 1 + Σ_i Π_{j≤i} a_j, the target's own token included.

    a_j is the probability that the token at depth j stands, given that all before it did; where
    all are α it is ``tokens_per_call``.

    >>> tokens_by_depth([0.5, 0.5]), tokens_by_depth([0.9, 0.0, 1.0])
    (1.75, 1.9)
    """
    return 1.0 + float(sum(accumulate(rates, mul)))


def speedup(tokens: float, draft: float, verify: float = 1.0, rest: float = 0.0) -> float:
    """E[emitted] · (1 + rest) / (draft + v + rest): tokens in the time of one of plain decoding.

    With ``tokens_per_call(α, γ)``, ``draft`` = γ·c, v = 1 and no rest it is the paper's improvement
    factor. ``rest`` is what a round takes besides drafting and the pass, with a draft or without.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Theorem 3.8.

    >>> round(speedup(tokens_per_call(0.8, 4), 4 / 8), 3)
    2.241
    """
    return tokens * (1.0 + rest) / (draft + verify + rest)


def quoted_speedup(alpha: float, length: int, ratio: float) -> float:
    """(1 + γα) / (1 + γ/s): often quoted, and too high from γ = 2 on. For comparison only.

    It counts each drafted token as kept with probability α, whatever became of the ones before
    it; but a rejected token ends the run, and all after it are lost. It grows with γ up to α·s,
    so by it no draft is ever too long.

    >>> round(quoted_speedup(0.8, 4, 8), 3)
    2.8
    """
    return (1 + length * alpha) / (1 + length / ratio)


def speedup_of_request(speedup: float, decode_share: float) -> float:
    """1 / ((1 − f) + f/S): of a whole request, of whose plain time decoding is the share f.

    Source: Amdahl 1967.

    >>> speedup_of_request(2.0, 1.0), round(speedup_of_request(2.0, 0.5), 4)
    (2.0, 1.3333)
    """
    return 1.0 / ((1.0 - decode_share) + decode_share / speedup)


def roofline_s(
    rows: int, moved_bytes: float, flops_per_row: float, bytes_per_s: float, flops_per_s: float
) -> float:
    """max(bytes / bandwidth, rows · flops / compute): the least seconds of one pass.

    Memory is read once for all rows; arithmetic is done for each.

    Source: Williams, Waterman and Patterson 2009, the roofline model.

    >>> roofline_s(1, 1e9, 1e9, 1e9, 1e10), roofline_s(40, 1e9, 1e9, 1e9, 1e10)
    (1.0, 4.0)
    """
    return max(moved_bytes / bytes_per_s, rows * flops_per_row / flops_per_s)


def cache_bytes_per_token(layers: int, kv_heads: int, head_dim: int, number_bytes: float) -> float:
    """2 · layers · heads · width · bytes: keys and values of one token.

    >>> cache_bytes_per_token(32, 8, 128, 2)
    131072
    """
    return 2 * layers * kv_heads * head_dim * number_bytes


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
