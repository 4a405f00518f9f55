"""EAGLE-3 heads as other projects share them, read as ours.

Two layouts of the same tensors. The EAGLE repository's: a flat ``config.json`` and ``midlayer.*``.
The ``speculators`` library's, which vLLM reads: the layer's sizes under
``transformer_layer_config``, and ``layers.0.*``. Either trims its vocabulary by ``d2t``, the
distance of each draft id to the target's, and ``t2d``, a mask over the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from safetensors import safe_open
from torch import Tensor

from outrider.errors import ModelFileError, UnsupportedError
from outrider.models.heads.eagle import EagleConfig, EagleModule

__all__ = ["is_shared", "read_shared"]

# The target has these; heads are trained with its embeddings as they are.
_TARGETS_OWN = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
# Whatever a configuration may say, and what our module does: anything else is another network.
_ONLY: dict[str, tuple[Any, ...]] = {
    "speculators_model_type": ("eagle3",),
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "partial_rotary_factor": (None, 1.0),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias", "bias"), (None, False)),
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), (None, False)),
    "embed_requires_grad": (None, False),
    "norm_before_residual": (None, False, True),
    "logit_scale": (None, 1.0),
}


def is_shared(about: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is one of those that people share."""
    named = str(about.get("architectures", "")).lower()
    return "speculators_model_type" in about or "draft_vocab_size" in about or "eagle3" in named


def read_shared(
    folder: Path, about: Mapping[str, Any], layers: int | None = None, vocab: int | None = None
) -> EagleModule:
    """A head from such a folder.

    Parameters
    ----------
    about
        Its ``config.json``.
    layers
        Of the target. Where the configuration names no layers to read, they follow from it.
    vocab
        Real tokens of the target. The configuration may count rows that only pad its matrices;
        those are left out.

    Raises
    ------
    UnsupportedError
        When the network is another than ours; it says in what.
    ModelFileError
        When there are only pickled weights, or no layers can be told.
    ValueError, KeyError
        When sizes or tensors are missing, or do not fit each other.
    """
    c = {**about, **about.get("transformer_layer_config", {})}
    _refuse_others(folder, c)
    state = _tensors(folder)
    ids = _ids(state, rows := int(c["vocab_size"]))
    # Ascending, as ties among equal logits go to the lowest id.
    order = ids.argsort()
    order = order[ids[order] < (vocab or rows)]
    state["lm_head.weight"] = state["lm_head.weight"][order]
    heads = int(c["num_attention_heads"])
    config = EagleConfig(
        hidden=int(c["hidden_size"]),
        taps=_taps(folder, c, layers),
        heads=heads,
        kv_heads=int(c.get("num_key_value_heads") or heads),
        head_dim=int(c.get("head_dim") or c["hidden_size"] // heads),
        intermediate=int(c["intermediate_size"]),
        draft_vocab=len(order),
        vocab=min(rows, vocab or rows),
        rope_theta=float((c.get("rope_parameters") or c).get("rope_theta") or 10000.0),
        epsilon=float(c["rms_norm_eps"]),
        norm_before_residual=bool(c.get("norm_before_residual")),
    )
    module = EagleModule(config)
    module.ids.copy_(ids[order])
    wanted = module.state_dict()
    if wrong := sorted(set(state) ^ set(wanted)):
        kind = "has no" if wrong[0] in wanted else "has a"
        raise UnsupportedError(
            f"The draft head '{folder}' {kind} tensor '{wrong[0]}': it is another network than "
            "EAGLE-3 with one Llama layer.",
            hint="Use a head of that kind, such as yuhuili/EAGLE3-LLaMA3.1-Instruct-8B.",
        )
    module.load_state_dict({name: value.float() for name, value in state.items()})
    return module


def _refuse_others(folder: Path, c: Mapping[str, Any]) -> None:
    """Say which value makes it another network."""
    wrong = {name: c[name] for name, fine in _ONLY.items() if name in c and c[name] not in fine}
    rope = c.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1:
        wrong["rope_parameters"] = rope
    if "sliding_attention" in (c.get("layer_types") or ()):
        wrong["layer_types"] = c["layer_types"]
    if c.get("target_hidden_size") not in (None, c.get("hidden_size")):
        wrong["target_hidden_size"] = c["target_hidden_size"]
    if wrong:
        name, value = next(iter(wrong.items()))
        raise UnsupportedError(
            f"The draft head '{folder}' has {name} = {value!r}, which is not run here.",
            hint="Heads of one plain Llama layer are: no biases, no rope scaling, no other norms.",
        )


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Weights by the EAGLE repository's names, all files of the folder taken together."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and (pickles := sorted(folder.glob("*.bin"))):
        name = pickles[0].name
        raise ModelFileError(
            f"The draft head '{folder}' has its weights in '{name}' only, a pickle, which can run "
            "code when it is opened.",
            hint="Convert it where you trust it: from safetensors.torch import save_file; "
            f"save_file({{k: v.contiguous() for k, v in torch.load('{name}', weights_only=True)"
            ".items()}, 'model.safetensors')",
        )
    if not files:
        raise ValueError("it has no safetensors file")
    state: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                if name not in _TARGETS_OWN:
                    at = name.replace("layers.0.", "midlayer.", 1)
                    state[at] = stored.get_tensor(name)
    return state


def _ids(state: dict[str, Tensor], vocab: int) -> Int64[Tensor, " draft_vocab"]:
    """The target's token of each draft id; takes both mappings out of the tensors."""
    rows = len(state["lm_head.weight"])
    offsets, mask = state.pop("d2t", None), state.pop("t2d", None)
    if offsets is None and rows != vocab:
        raise ValueError(f"it has {rows} of {vocab} tokens, and no 'd2t' that says which")
    ids = torch.arange(rows) if offsets is None else torch.arange(len(offsets)) + offsets.long()
    ascending = ids.sort().values
    if len(ids) != rows or bool((ascending.diff() <= 0).any()):
        raise ValueError("its 'd2t' does not give each row of 'lm_head' a token of its own")
    if not 0 <= int(ascending[0]) <= int(ascending[-1]) < vocab:
        raise ValueError("its 'd2t' leads out of the vocabulary")
    if mask is not None and not torch.equal(mask.nonzero()[:, 0], ascending):
        raise ValueError("its 'd2t' and 't2d' name other tokens")
    return ids


def _taps(folder: Path, c: Mapping[str, Any], layers: int | None) -> tuple[int, ...]:
    """The layers whose output the head reads, ascending, as all capture them in one pass.

    Everybody else counts what goes *into* a layer: with n layers the default is 2, n // 2 and
    n - 3 (``if idx==len(self.layers)-3 or idx==len(self.layers)//2 or idx==2`` before the layer
    is called, in eagle/model/modeling_llama_kv.py of github.com/SafeAILab/EAGLE; the same in vLLM's
    get_eagle3_aux_hidden_state_layers), and vLLM takes ``eagle_aux_hidden_state_layer_ids``
    alike. Only SGLang's, nested in ``eagle_config``, counts outputs as we do: it adds one
    (set_eagle3_layers_to_capture).
    """
    nested = (c.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    inputs = c.get("eagle_aux_hidden_state_layer_ids")
    if nested:
        inputs = [tap + 1 for tap in nested]
    elif not inputs:
        if layers is None:
            raise ModelFileError(
                f"The draft head '{folder}' does not say which layers it reads.",
                hint="They follow from the target: load it with one, or name them in config.json "
                'as "eagle_aux_hidden_state_layer_ids".',
            )
        inputs = [2, layers // 2, layers - 3]
    if min(inputs) < 1 or len(set(inputs)) < len(inputs):
        raise UnsupportedError(
            f"The draft head '{folder}' reads the inputs of layers {list(inputs)}; here they must "
            "be different ones, and outputs of a layer.",
            hint="A target of six layers or more has such layers by default.",
        )
    return tuple(sorted(int(tap) - 1 for tap in inputs))
