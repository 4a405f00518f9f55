"""The shape of a Llama-like model, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.errors import UnsupportedError

__all__ = ["FAMILIES", "Architecture"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and choices of a decoder with grouped-query attention and a gated MLP.

    Parameters
    ----------
    windows
        For each layer, how many of the last keys a token sees; 0 for all.
    inverse_frequencies
        Of the rotary positions, one for each pair of a head's dimensions; scaling included.
    rope_factor
        On sines and cosines, which some kinds of scaling ask for.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    epsilon: float
    tied: bool
    qk_norm: bool
    windows: tuple[int, ...]
    inverse_frequencies: Float64[np.ndarray, " half"]
    rope_factor: float

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Architecture:
        """From a configuration of transformers.

        Raises
        ------
        UnsupportedError
            When the model has a part that is not built here.
        """
        family = config.model_type
        if family not in FAMILIES:
            raise UnsupportedError(f"the family '{family}' is not one of {', '.join(FAMILIES)}")
        if config.hidden_act not in ("silu", "swish"):
            raise UnsupportedError(f"the activation '{config.hidden_act}' is not silu")
        rope = dict(getattr(config, "rope_parameters", None) or {})
        kind = rope.get("rope_type", "default")
        if kind not in _ROPES:
            raise UnsupportedError(f"the rotary scaling '{kind}' is not one of {', '.join(_ROPES)}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError("only a part of each head is rotated")
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        if kind == "default":
            pairs = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
            frequencies, factor = 1.0 / float(rope.get("rope_theta", 10000.0)) ** pairs, 1.0
        else:
            found, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
            frequencies = found.double().numpy()
        layers = config.num_hidden_layers
        return cls(
            family=family,
            layers=layers,
            hidden=hidden,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            epsilon=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            qk_norm=family == "qwen3",
            windows=_windows(config, layers),
            inverse_frequencies=frequencies,
            rope_factor=float(factor),
        )


def _windows(config: Any, layers: int) -> tuple[int, ...]:
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Families that know layers of several kinds name them; mistral's are all alike.
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
