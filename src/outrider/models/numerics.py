"""Invariant I2 measured: are a position's logits the same bits in any company?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.core.proposal import ROOT, Proposal
from outrider.errors import NumericalError
from outrider.protocols import Model

__all__ = ["Numbers", "check_numbers", "row_step"]

_STEPS = (2, 4, 8, 16)
"""A single row is never fed alone: many kernels have one of their own for it, with another
order of sums, and two rows cost what one does."""


@torch.inference_mode()
def row_step(model: nn.Module) -> int | None:
    """The smallest step such that linear layers, fed a multiple of it, treat each row alike.

    Matrix kernels change the order of their sums with the number of rows. One layer of each
    shape is fed the same random rows in several numbers, and the results are compared bit for
    bit. ``None`` if no step up to 16 will do.
    """
    shapes = {
        (m.weight.shape, m.weight.dtype, m.bias is None): m
        for m in model.modules()
        if isinstance(m, nn.Linear) and m.weight.device.type != "meta"
    }
    generator = torch.Generator().manual_seed(0)
    candidates = list(_STEPS)
    for layer in shapes.values():
        # Heavy tails, as activations have: even rows would hide most differences in rounding.
        rows = torch.randn(4 * _STEPS[-1], layer.in_features, generator=generator) ** 3
        rows = rows.to(layer.weight.device, layer.weight.dtype)
        whole = layer(rows)
        while candidates:
            step = candidates[0]
            counts = {m * step for m in (1, 2, 3, 4)}
            if all(torch.equal(layer(rows[:n]), whole[:n]) for n in sorted(counts)):
                break
            candidates.pop(0)
    return candidates[0] if candidates else None


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the self-check found.

    Parameters
    ----------
    same_bits
        Whether every comparison was equal bit for bit: invariant I2.
    largest_difference
        Largest absolute difference of two logits that should be equal.
    comparisons
        Number of rows compared.
    same_in_trees
        Whether a path of a tree gave the same bits too; ``None`` for a model of chains.
    """

    same_bits: bool
    largest_difference: float
    comparisons: int
    same_in_trees: bool | None = None


def check_numbers(
    model: Model, tokens: Sequence[int], widths: Sequence[int] = (1, 2, 3, 5, 8, 9, 16)
) -> Numbers:
    """Score the same positions alone and in blocks of several widths, and compare.

    Parameters
    ----------
    model
        Any runtime's model.
    tokens
        A text of some length: half is context, the positions after it are compared.
    widths
        Numbers of drafted tokens scored together.

    Raises
    ------
    NumericalError
        When a row of logits has no finite maximum: of such rows nothing can be said.
    """
    half = len(tokens) // 2
    longest = min(max(widths), len(tokens) - half - 1)

    def rows(draft: int, split: int) -> Float[Tensor, "rows V"]:
        cache = model.new_cache(len(tokens) + 1)
        model.prefill(cache, tokens[: half - split], None)
        end = half + 1
        block = Proposal.chain(list(tokens[end : end + draft]))
        return model.score(cache, tokens[cache.length : end], block)

    # The reference feeds one token at a time, each a pass of its own.
    cache = model.new_cache(len(tokens) + 1)
    model.prefill(cache, tokens[:half], None)
    alone = torch.cat(
        [
            model.score(cache, tokens[half + i : half + i + 1], Proposal())
            for i in range(longest + 1)
        ]
    )
    if not alone.amax(-1).isfinite().all():
        raise NumericalError(
            f"The logits of '{model.name}' are not finite numbers.",
            hint="Try a wider dtype (float32), or check the model's weights.",
        )
    same, worst, compared = True, 0.0, 0
    for width in widths:
        if width > longest:
            continue
        for split in (0, 1):
            block = rows(width, split)
            same &= torch.equal(block, alone[: width + 1])
            # Where both are minus infinity, their difference is no number.
            worst = max(worst, float((block - alone[: width + 1]).abs().nan_to_num(0.0).max()))
            compared += width + 1
    return Numbers(same, worst, compared, _tree_check(model, tokens, half, alone))


def _tree_check(
    model: Model, tokens: Sequence[int], half: int, alone: Float[Tensor, "rows V"]
) -> bool | None:
    """Every token with a sibling before it that the path leaves aside."""
    if not model.trees:
        return None
    path, others = tokens[half + 1 : half + len(alone)][:7], []
    parents, last = [], ROOT
    for token in path:
        others += [(token + 1) % model.vocab_size, token]
        parents += [last, last]
        last = len(parents) - 1
    proposal = Proposal(tuple(others), tuple(parents), (None,) * len(others))
    cache = model.new_cache(len(tokens) + len(others))
    model.prefill(cache, tokens[:half], None)
    rows = model.score(cache, tokens[half : half + 1], proposal)
    on_path = [0, *range(2, len(others) + 1, 2)]
    return torch.equal(rows[on_path], alone[: len(path) + 1])
