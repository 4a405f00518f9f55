"""The textbook step, in plain numpy: the oracle of the tests, and a reader's way in.

Nothing here is used by the engine. It says in forty lines what the engine's moving parts do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

__all__ = ["speculative_decode_step"]

NextToken = Callable[[Sequence[int]], Float64[np.ndarray, " V"]]


@runtime_checkable
class _Parallel(Protocol):
    def parallel_forward(
        self, ids: Sequence[int], n_positions: int
    ) -> Float64[np.ndarray, "n_positions V"]: ...


def speculative_decode_step(
    target: NextToken,
    draft: NextToken,
    context: Sequence[int],
    k: int,
    rng: np.random.Generator,
) -> list[int]:
    """One round: draft k tokens, score them at once, keep a prefix, repair or add one.

    Keep x ~ q with probability min(1, p(x)/q(x)); at the first rejection emit one token from
    max(0, p − q) / sum_y max(0, p(y) − q(y)) and stop; if all k stand, emit a bonus token from
    p after them. The emitted tokens have the law of sampling from the target alone.

    Parameters
    ----------
    target
        From a list of token ids to the next token's probabilities p. If it also offers
        ``parallel_forward(ids, n_positions)``, that is called once and must return p for the
        last ``n_positions`` prefixes of ``ids``, the whole of ``ids`` being the last.
    draft
        From a list of token ids to the draft's probabilities q; called once for each draft.
    context
        Committed token ids.
    k
        Draft length; 0 is plain sampling.
    rng
        Source of all chance.

    Returns
    -------
    list[int]
        From 1 to k + 1 new token ids.

    Raises
    ------
    ValueError
        When k is negative, a probability vector is negative, not finite or does not sum to 1,
        vectors differ in length, or ``parallel_forward`` returns another number of them.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1, with the same p and q.

    Example
    -------
    >>> target = lambda ids: np.array([0.5, 0.3, 0.2])
    >>> draft = lambda ids: np.array([0.6, 0.1, 0.3])
    >>> new = speculative_decode_step(target, draft, [0], k=3, rng=np.random.default_rng(0))
    >>> 1 <= len(new) <= 4
    True
    """
    if k < 0:
        raise ValueError(f"k must be 0 or more; got {k}.")
    context = list(context)

    # Propose. Each q is kept: the test below needs the very law its token was drawn from.
    drafted: list[int] = []
    qs: list[Float64[np.ndarray, " V"]] = []
    for _ in range(k):
        q = _probabilities(draft(context + drafted), "draft")
        drafted.append(int(rng.choice(len(q), p=q)))
        qs.append(q)

    # Score: p after the context and after each drafted token.
    if isinstance(target, _Parallel):
        rows = list(target.parallel_forward(context + drafted, k + 1))
        if len(rows) != k + 1:
            raise ValueError(f"The target was asked for {k + 1} positions; got {len(rows)}.")
    else:
        rows = [target(context + drafted[:i]) for i in range(k + 1)]
    ps = [_probabilities(row, "target") for row in rows]
    if len(sizes := {len(law) for law in (*ps, *qs)}) > 1:
        raise ValueError(f"Target and draft must share one vocabulary; got sizes {sorted(sizes)}.")

    # Judge.
    emitted: list[int] = []
    for x, p, q in zip(drafted, ps, qs, strict=False):
        if rng.random() * q[x] < p[x]:  # u < p/q without a ratio
            emitted.append(x)
            continue
        residual = np.maximum(0.0, p - q)
        if residual.sum() == 0.0:  # p = q to the last bit: the limit of the residual is p
            residual = p
        return [*emitted, int(rng.choice(len(p), p=residual / residual.sum()))]
    return [*emitted, int(rng.choice(len(ps[-1]), p=ps[-1]))]


def _probabilities(values: object, whose: str) -> Float64[np.ndarray, " V"]:
    p = np.asarray(values, dtype=np.float64)
    total = p.sum()
    if p.ndim != 1 or not np.isfinite(total) or (p < 0).any() or abs(total - 1.0) > 1e-6:
        raise ValueError(
            f"The {whose} must return a vector of probabilities that sums to 1; got shape "
            f"{p.shape} with sum {total:.6g} and minimum {p.min(initial=0.0):.3g}."
        )
    normalised: Float64[np.ndarray, " V"] = p / total
    return normalised
