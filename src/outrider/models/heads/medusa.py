"""Medusa heads in torch: trained as they are here, and run as they are here beside ``hf`` targets.

Several small networks side by side, each of which reads the target's last hidden state and
predicts one token further ahead than the one before. None knows what the others predict.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

__all__ = ["MedusaConfig", "MedusaModule", "TorchMedusa"]


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of the heads.

    Parameters
    ----------
    hidden, taps
        d of the target, and its last layer, from 0, as the only one.
    count
        Heads, which is how many tokens they predict.
    draft_vocab, vocab
        Tokens that they can propose, and the target's.
    epsilon
        Of the target's final norm.
    """

    hidden: int
    taps: tuple[int, ...]
    count: int
    draft_vocab: int
    vocab: int
    epsilon: float = 1e-5

    def to_dict(self) -> dict[str, Any]:
        """For a configuration file."""
        return asdict(self)


class MedusaModule(nn.Module):
    """The heads' weights.

    From h_i, the last layer's hidden state at token i: x = norm(h_i); head j = 1, ..., k gives the
    logits of token i + 1 + j as (x + SiLU(W_j x + b_j)) · Hᵀ over the draft vocabulary. Token
    i + 1 is the target's own to say from h_i. The W_j lie below each other in one matrix; H is
    shared by all heads.

    Source: Cai et al. 2024 (arXiv 2401.10774), Medusa-1, section 2.1; there each head has an H of
    its own.
    """

    ids: Int64[Tensor, " draft_vocab"]
    """The target's token of each row of the output matrix, ascending."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        c = self.config = config
        self.norm = nn.RMSNorm(c.hidden, c.epsilon)
        self.blocks = nn.Linear(c.hidden, c.count * c.hidden)
        self.lm_head = nn.Linear(c.hidden, c.draft_vocab, bias=False)
        self.register_buffer("ids", torch.arange(c.draft_vocab), persistent=False)

    def states(self, hidden: Float[Tensor, "*b d"]) -> Float[Tensor, "*b count d"]:
        """What the output matrix reads, for each head."""
        x = self.norm(hidden)
        pieces: Tensor = F.silu(self.blocks(x))
        states: Tensor = x[..., None, :] + pieces.view(*x.shape[:-1], self.config.count, -1)
        return states

    def logits(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b draft_vocab"]:
        """Over the draft vocabulary."""
        out: Tensor = self.lm_head(states)
        return out


class TorchMedusa:
    """Heads at work, in torch; offers ``outrider.protocols.ParallelHeads``."""

    def __init__(self, module: MedusaModule) -> None:
        self.module = module.eval()
        self.taps = module.config.taps
        self.ids = module.ids
        self.count = module.config.count

    @torch.inference_mode()
    def predict(self, hidden: Float[Tensor, " d"]) -> Float[Tensor, "count draft_vocab"]:
        """Logits of the tokens that follow the one after a hidden state's own."""
        return self.module.logits(self.module.states(hidden))
