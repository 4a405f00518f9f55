"""Training an EAGLE-3 head: several of its own steps unrolled over the target's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from outrider.models.heads.eagle import EagleConfig, EagleModule

__all__ = ["Batch", "Teacher", "new_eagle", "unroll"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences side by side, padded at their ends.

    Parameters
    ----------
    tokens
        int64 [b, n + 1].
    hidden
        The target's hidden states of the first n tokens.
    lengths
        Rows of ``hidden`` that are real, for each sequence.
    prompts
        Tokens of each that are its prompt; ``None`` if there are none.
    """

    tokens: Int64[Tensor, "b tokens"]
    hidden: Float[Tensor, "b n widths"]
    lengths: Int64[Tensor, " b"]
    prompts: Int64[Tensor, " b"] | None = None


@dataclass(frozen=True, slots=True)
class Teacher:
    """What training needs of the target: embeddings, and how hidden states become probabilities.

    Parameters
    ----------
    embedding
        f32 [V, d]; without a row where nobody asks for it.
    norm
        Weight of the last norm.
    head
        Rows of the output matrix for the draft vocabulary.
    epsilon
        Of the norm.
    """

    embedding: Float[Tensor, "V d"]
    norm: Float[Tensor, " d"]
    head: Float[Tensor, "draft_vocab d"]
    epsilon: float

    def logits(self, last: Float[Tensor, "*b d"]) -> Float[Tensor, "*b draft_vocab"]:
        """Over the draft vocabulary, from the last layer's hidden states."""
        return F.linear(F.rms_norm(last, self.norm.shape, self.norm, self.epsilon), self.head)


def new_eagle(
    config: EagleConfig, teacher: Teacher, ids: Int64[Tensor, " draft_vocab"], scale: Tensor
) -> EagleModule:
    """A head to begin with: the target's own output matrix, and hidden states brought to one size.

    Parameters
    ----------
    scale
        Root mean square of each tapped layer's hidden states, [taps].
    """
    module = EagleModule(config)
    d = config.hidden
    with torch.no_grad():
        module.ids.copy_(ids)
        module.lm_head.weight.copy_(teacher.head)
        module.norm.weight.copy_(teacher.norm)
        for i, size in enumerate(scale):
            part = module.fc.weight[:, i * d : (i + 1) * d]
            torch.nn.init.normal_(part, std=(3 * d) ** -0.5)
            part /= size
        for name in ("o_proj", "down_proj"):
            owner = module.midlayer.self_attn if name == "o_proj" else module.midlayer.mlp
            torch.nn.init.normal_(getattr(owner, name).weight, std=0.02)
    return module


def unroll(
    module: EagleModule, teacher: Teacher, batch: Batch, steps: int, share: float = 1.0
) -> list[tuple[Float[Tensor, " rows draft_vocab"], Float[Tensor, " rows draft_vocab"]]]:
    """The head's logits and the target's, for each of its own steps, over all real positions.

    Of the steps after the first, only a random ``share`` of the rows: the output matrix is most of
    the work. In step k the head stands k of its own outputs away from the target's hidden states:
    position i sees the keys that real hidden states gave up to i - k, and one key of each step
    since.

    Source: Li et al. 2025 (arXiv 2503.01840), EAGLE-3, section 3.2 (training-time test).
    """
    n = batch.hidden.shape[1]
    positions = torch.arange(n)
    e = teacher.embedding[batch.tokens[:, 1:]]
    g = module.fc(batch.hidden[..., : module.fc.in_features])  # the last layer may come behind
    last = batch.hidden[..., -module.config.hidden :]
    with torch.no_grad():
        wanted = teacher.logits(last)  # of token i + 1; the head at i predicts token i + 2
    group = module.config.heads // module.config.kv_heads
    real = positions[None] < batch.lengths[:, None] - 1
    keys: list[Tensor] = []
    values: list[Tensor] = []
    found = []
    for step in range(steps):
        q, k, v = module.project(e, g, positions)
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        keys.append(k)
        values.append(v)
        x = module.finish(g, _attend(q, keys, values, step))
        kept = real & (positions[None] >= step)
        if step and share < 1.0:
            kept &= torch.rand(kept.shape) < share
        # Row i is judged by the target's row at i + 1.
        rows = kept[:, :-1].nonzero(as_tuple=True)
        found.append((module.logits(x[:, :-1][rows]), wanted[:, 1:][rows]))
        g = F.pad(x[:, :-1], (0, 0, 1, 0))
    return found


def _attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], step: int) -> Tensor:
    """Attention of one unrolled step: real keys up to i - step, then one of each step since."""
    n, size = q.shape[-2:]
    if step == 0:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    scores = q @ keys[0].transpose(-1, -2) * size**-0.5
    seen = torch.ones(n, n, dtype=torch.bool).tril(-step)
    scores = scores.masked_fill(~seen, -torch.inf)
    # The key that step j left behind for position i lies at i - (step - j).
    near = [(_later(k, step - j), _later(v, step - j)) for j, (k, v) in
            enumerate(zip(keys[1:], values[1:], strict=True), 1)]  # fmt: skip
    own = torch.stack([(q * k).sum(-1) * size**-0.5 for k, _ in near], dim=-1)
    weights = torch.softmax(torch.cat([scores, own], dim=-1), dim=-1)
    out = weights[..., :n] @ values[0]
    for j, (_, v) in enumerate(near):
        out = out + weights[..., n + j, None] * v
    return out


def _later(x: Tensor, by: int) -> Tensor:
    """Every position's row moved to a later one."""
    return F.pad(x[..., : x.shape[-2] - by, :], (0, 0, by, 0)) if by else x
