"""Training Medusa heads: each against the target's law as many tokens ahead as it predicts."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from outrider.models.heads.medusa import MedusaConfig, MedusaModule
from outrider.train.eagle import Batch, Teacher

__all__ = ["medusa_rows", "new_medusa"]


def new_medusa(
    config: MedusaConfig, teacher: Teacher, ids: Int64[Tensor, " draft_vocab"]
) -> MedusaModule:
    """Heads to begin with: the target's own norm and output matrix, and nothing added to x.

    So each begins as what the target says of the very next token.

    Source: Cai et al. 2024 (arXiv 2401.10774), Medusa, section 2.1.
    """
    module = MedusaModule(config)
    with torch.no_grad():
        module.ids.copy_(ids)
        module.lm_head.weight.copy_(teacher.head)
        module.norm.weight.copy_(teacher.norm)
        module.blocks.weight.zero_()
        module.blocks.bias.zero_()
    return module


def medusa_rows(
    module: MedusaModule, teacher: Teacher, batch: Batch, share: float = 1.0
) -> list[tuple[Float[Tensor, " rows draft_vocab"], Float[Tensor, " rows draft_vocab"]]]:
    """Each head's logits and the target's, over all real positions.

    Head j at position i predicts token i + 1 + j, whose law the target gives at position i + j.
    Of the heads after the first, only a random ``share`` of the rows, as in ``eagle.unroll``. The
    hidden states may be those of several layers, of which the last is the target's last.
    """
    n = batch.hidden.shape[1]
    last = batch.hidden[..., -module.config.hidden :]
    states = module.states(last)
    with torch.no_grad():
        wanted = teacher.logits(last)  # of token i + 1
    found = []
    for ahead in range(1, module.config.count + 1):
        kept = torch.arange(n)[None] + ahead < batch.lengths[:, None]
        if ahead > 1 and share < 1.0:
            kept &= torch.rand(kept.shape) < share
        sequence, at = kept.nonzero(as_tuple=True)
        mine = module.logits(states[sequence, at, ahead - 1])
        found.append((mine, wanted[sequence, at + ahead]))
    return found
