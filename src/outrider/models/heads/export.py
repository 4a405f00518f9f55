"""Our EAGLE-3 heads, written as other projects read them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.errors import UnsupportedError
from outrider.models.heads.eagle import EagleModule
from outrider.models.heads.folder import CONFIG, WEIGHTS, read_head

__all__ = ["export_speculators"]


def export_speculators(
    folder: Path,
    to: Path,
    target_name: str,
    *,
    architecture: str = "LlamaForCausalLM",
    target_rows: int | None = None,
    context_length: int = 8192,
    draft_length: int = 3,
) -> None:
    """Write an EAGLE-3 head in the ``speculators`` layout, which vLLM reads.

    The weights are float32, just as ours are when they are read; embeddings are the target's.

    Parameters
    ----------
    folder, to
        The head, in any layout that is read here; and where the other one goes.
    target_name, architecture
        The target by its hub id or path, and its class in transformers.
    target_rows
        Rows of the target's embedding, where some of them only pad it.
    context_length
        Longest sequence that the head may meet; vLLM goes no further.
    draft_length
        Tokens that are drafted unless the reader says otherwise.

    Raises
    ------
    UnsupportedError
        When the folder holds a head of another kind.
    ModelError
        As in ``read_head``.

    Example
    -------
    >>> export_speculators(Path("head"), Path("out"), "org/model")  # doctest: +SKIP

    Source: ``Eagle3SpeculatorConfig`` and ``Eagle3DraftModel`` of github.com/vllm-project/
    speculators, 0.9.
    """
    module, _ = read_head(folder)
    if not isinstance(module, EagleModule):
        raise UnsupportedError(
            f"The draft head '{folder}' is no EAGLE-3 head, and the layout is for these alone.",
            hint="Give the folder of an EAGLE-3 head.",
        )
    c = module.config
    rows = target_rows or c.vocab
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_length}],
            "verifier": {"name_or_path": target_name, "architectures": [architecture]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": c.hidden,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "intermediate_size": c.intermediate,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": c.epsilon,
            # Versions of transformers before 5 and since look at different ones.
            "rope_theta": c.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "max_position_embeddings": context_length,
            "tie_word_embeddings": False,
            "vocab_size": rows,
        },
        "draft_vocab_size": c.draft_vocab,
        # Counted by what goes into a layer; ours are counted by what comes out.
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in c.taps],
        "norm_before_residual": c.norm_before_residual,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    state = {
        name.replace("midlayer.", "layers.0."): value.float().contiguous()
        for name, value in module.state_dict().items()
    }
    if c.draft_vocab < rows:  # all tokens of a whole vocabulary have their own numbers
        state["d2t"] = module.ids - torch.arange(c.draft_vocab)
        state["t2d"] = torch.zeros(rows, dtype=torch.bool).index_fill_(0, module.ids, True)
    to.mkdir(parents=True, exist_ok=True)
    save_file(state, part := to / f"{WEIGHTS}.part")
    os.replace(part, to / WEIGHTS)
    (part := to / f"{CONFIG}.part").write_text(json.dumps(config, indent=2) + "\n")
    os.replace(part, to / CONFIG)
