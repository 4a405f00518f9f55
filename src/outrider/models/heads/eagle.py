"""The EAGLE-3 head in torch: trained as it is here, and run as it is here beside ``hf`` targets.

One decoder layer that reads, for each token, its embedding and the target's hidden states of the
token before (low, middle and high layers, fused), and predicts the token after. Further ahead its
own output stands in for the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from outrider.core.proposal import Proposal

__all__ = ["EagleConfig", "EagleModule", "TorchHead"]


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes of a head.

    Parameters
    ----------
    hidden, layers_tapped
        d of the target, and the layers whose hidden states are read, from 0.
    heads, kv_heads, head_dim, intermediate
        Of the head's own layer.
    draft_vocab, vocab
        Tokens that it can propose, and the target's.
    rope_theta, epsilon
        Of rotary positions and RMS norms.
    norm_before_residual
        Whether what goes round the attention is the norm of g, as in some heads that were made with
        the ``speculators`` library, and not g itself.
    context
        Tokens of a prompt that are enough for it, the last ones: as many as it was trained with.
    """

    hidden: int
    taps: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    draft_vocab: int
    vocab: int
    rope_theta: float = 10000.0
    epsilon: float = 1e-5
    norm_before_residual: bool = False
    context: int = 256

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"its context must be at least one token; got {self.context}")

    def to_dict(self) -> dict[str, Any]:
        """For a configuration file."""
        return asdict(self)


class _Attention(nn.Module):
    """Projections; named as in the checkpoints that people share."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)


class _MLP(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class _Layer(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(c)
        self.mlp = _MLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden, c.epsilon)
        self.hidden_norm = nn.RMSNorm(c.hidden, c.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.epsilon)


class EagleModule(nn.Module):
    """The head's weights, and its layer over any set of keys.

    Letters: e the embedding of token i + 1, g the hidden states at token i (fused, or the head's
    own); u = [norm e; norm g]; x = g + attention(u); x = x + mlp(norm x); logits of token i + 2 =
    norm(x) · Hᵀ over the draft vocabulary.

    Source: Li et al. 2025 (arXiv 2503.01840), EAGLE-3, section 3; the draft vocabulary, Zhao et al.
    2025 (arXiv 2502.14856), FR-Spec.
    """

    ids: Int64[Tensor, " draft_vocab"]
    """The target's token of each row of the output matrix, ascending."""
    frequencies: Float64[Tensor, " half"]
    """Of the rotary positions."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(len(c.taps) * c.hidden, c.hidden, bias=False)
        self.midlayer = _Layer(c)
        self.norm = nn.RMSNorm(c.hidden, c.epsilon)
        self.lm_head = nn.Linear(c.hidden, c.draft_vocab, bias=False)
        self.register_buffer("ids", torch.arange(c.draft_vocab), persistent=False)
        pairs = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
        self.register_buffer("frequencies", c.rope_theta**-pairs, persistent=False)

    def project(
        self, e: Float[Tensor, "*b n d"], g: Float[Tensor, "*b n d"], positions: Int64[Tensor, " n"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [*b, heads, n, head_dim], rotated."""
        c, layer = self.config, self.midlayer
        u = torch.cat([layer.input_layernorm(e), layer.hidden_norm(g)], dim=-1)
        a = layer.self_attn
        q, k, v = (
            f(u).unflatten(-1, (-1, c.head_dim)).transpose(-2, -3)
            for f in (a.q_proj, a.k_proj, a.v_proj)
        )
        angles = (positions[:, None].double() * self.frequencies).float()
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish(
        self, g: Float[Tensor, "*b n d"], mixed: Float[Tensor, "*b heads n head_dim"]
    ) -> Float[Tensor, "*b n d"]:
        """From what attention mixed to the layer's output."""
        layer = self.midlayer
        if self.config.norm_before_residual:
            g = layer.hidden_norm(g)
        x = g + layer.self_attn.o_proj(mixed.transpose(-2, -3).flatten(-2))
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out

    def logits(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n draft_vocab"]:
        """Over the draft vocabulary."""
        out: Tensor = self.lm_head(self.norm(x))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-other, one], dim=-1) * sin


class _HeadCache:
    """Keys and values of the head's one layer."""

    def __init__(self, config: EagleConfig) -> None:
        empty = torch.zeros(config.kv_heads, 0, config.head_dim)
        self.keys, self.values = empty, empty

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def rollback(self, length: int) -> None:
        self.keys, self.values = self.keys[:, :length], self.values[:, :length]

    def append(self, k: Tensor, v: Tensor) -> None:
        self.keys = torch.cat([self.keys, k], dim=1)
        self.values = torch.cat([self.values, v], dim=1)


class TorchHead:
    """A head at work, in torch; offers ``outrider.protocols.Head``.

    Parameters
    ----------
    module
        Its weights.
    embed
        From token ids to the target's embeddings [n, d].
    """

    def __init__(self, module: EagleModule, embed: Any) -> None:
        self.module = module.eval()
        self.taps, self.context = module.config.taps, module.config.context
        self.ids = module.ids
        self._embed = embed

    def new_cache(self, capacity: int) -> _HeadCache:
        """An empty cache."""
        return _HeadCache(self.module.config)

    def cache_bytes(self, tokens: int) -> int:
        """Memory for the keys and values of so many tokens, and for the copy when one is added."""
        c, (weight, *_) = self.module.config, self.module.parameters()
        return 2 * 2 * c.kv_heads * c.head_dim * tokens * weight.dtype.itemsize

    @torch.inference_mode()
    def feed(
        self, cache: _HeadCache, tokens: Sequence[int], hidden: Float[Tensor, "n widths"]
    ) -> tuple[Float[Tensor, " draft_vocab"], Float[Tensor, " d"]]:
        """Committed tokens, each with the target's hidden states of the one before it."""
        n, start = len(tokens), cache.length
        seen = torch.ones(n, start + n, dtype=torch.bool).tril(start)
        positions = torch.arange(start, start + n)
        x = self._run(cache, tokens, self.module.fc(hidden), positions, seen)[-1:]
        return self.module.logits(x)[0], x[0]

    @torch.inference_mode()
    def grow(
        self,
        cache: _HeadCache,
        tree: Proposal,
        nodes: range,
        states: Float[Tensor, "n d"],
    ) -> tuple[Float[Tensor, "n draft_vocab"], Float[Tensor, "n d"]]:
        """Nodes of a tree whose earlier ones are in the cache, each with its parent's state."""
        base = cache.length - nodes.start
        seen = torch.zeros(len(nodes), base + nodes.stop, dtype=torch.bool)
        seen[:, :base] = True
        paths = [tree.path(node) for node in nodes]
        for row, path in enumerate(paths):
            seen[row, [base + node for node in path]] = True
        positions = torch.tensor([base + len(path) - 1 for path in paths])
        tokens = [tree.tokens[node] for node in nodes]
        x = self._run(cache, tokens, states, positions, seen)
        return self.module.logits(x), x

    def _run(
        self,
        cache: _HeadCache,
        tokens: Sequence[int],
        g: Float[Tensor, "n d"],
        positions: Int64[Tensor, " n"],
        seen: Bool[Tensor, "n keys"],
    ) -> Float[Tensor, "n d"]:
        q, k, v = self.module.project(self._embed(list(tokens)), g, positions)
        cache.append(k, v)
        mixed = F.scaled_dot_product_attention(
            q[None], cache.keys[None], cache.values[None], attn_mask=seen[None], enable_gqa=True
        )
        return self.module.finish(g, mixed[0])
