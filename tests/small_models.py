"""Small language models of many families, with random weights, made on the spot."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from outrider.drafters.script import ScriptDrafter
from outrider.models.hf import HFModel
from outrider.models.native.architecture import Architecture
from outrider.models.native.device import DeviceModel
from outrider.models.native.eager import read_tensors
from outrider.models.native.model import NativeModel
from outrider.models.native.weights import Kind, read_weights

VOCAB = 64
WINDOW = 8

# A spread that makes laws neither flat nor certain, and greedy outputs that do not just repeat.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DENSE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_MAMBA_HEADS: dict[str, Any] = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 1,
    "mamba_chunk_size": 16,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _DENSE),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 100}),
    "qwen2": ("Qwen2", _DENSE),
    "qwen3": ("Qwen3", _DENSE | {"head_dim": 16}),
    "mistral": ("Mistral", _DENSE | {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3",
        _DENSE
        | {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("Mixtral", _DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": (
        "Mamba",
        {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "tie_word_embeddings": False},
    ),
    "falcon-h1": ("FalconH1", _DENSE | {"head_dim": 8} | _MAMBA_HEADS),
    "lfm2": ("Lfm2", _DENSE | {"layer_types": ["conv", "full_attention"]}),
    "qwen3-next": (
        "Qwen3Next",
        _DENSE
        | {
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}
PLAIN = ("llama", "gpt2", "qwen2", "qwen3", "mixtral")
WINDOWED = ("mistral", "gemma3")
RECURRENT = ("mamba", "falcon-h1", "lfm2", "qwen3-next")


def new_module(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A fresh model, float32, with the weights that the seed gives."""
    name, settings = FAMILIES[family]
    kind = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, name + kind)(**(_COMMON | settings | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(
            config
        ).eval()


@cache
def module(family: str) -> PreTrainedModel:
    """A shared one, which no test may change."""
    return new_module(family)


def shared(family: str, **options: Any) -> HFModel:
    """The runtime over the shared module."""
    return HFModel(module(family), **options)


def randomise(made: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give biases and norms values too, which a fresh model has at zero and one."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in made.named_parameters():
        if weight.ndim == 1:
            middle = 1.0 if "norm" in name else 0.0
            weight.data = middle + 0.3 * torch.randn(weight.shape, generator=generator)
    return made


def native(made: PreTrainedModel, kind: Kind = "int8", **options: Any) -> NativeModel:
    """The native runtime over a module's weights."""
    architecture = Architecture.of(made.config)
    weights = read_weights(made.state_dict().get, architecture, kind)
    return NativeModel(architecture, weights, **options)


def on_device(
    made: PreTrainedModel,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> DeviceModel:
    """The native runtime as it is on a GPU, over a module's weights."""
    architecture = Architecture.of(made.config)
    weights = read_tensors(made.state_dict().get, architecture, dtype, torch.device(device))
    return DeviceModel(architecture, weights, **options)


def new_tokenizer(words: int = VOCAB) -> PreTrainedTokenizerFast:
    """One token a word: ``w5`` is token 5."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Metaspace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def save(made: PreTrainedModel, folder: Path) -> Path:
    """A folder as users have them: configuration, weights and tokenizer."""
    made.save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    return folder


def padded(original: PreTrainedModel, rows: int) -> PreTrainedModel:
    """The same model with rows for tokens that do not exist, whose logits are the highest."""
    made = copy.deepcopy(original)
    made.resize_token_embeddings(VOCAB + rows, mean_resizing=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = made.get_output_embeddings().weight
        head.data[VOCAB:] = 30 * torch.randn_like(head[VOCAB:])
    return made


def partly_right(plain: Sequence[int], prompt_length: int) -> ScriptDrafter:
    """Drafts what comes, with a wrong token that wanders through the block."""

    def script(tokens: Sequence[int], length: int) -> list[int]:
        done = len(tokens) - prompt_length
        draft = list(plain[done : done + length])
        wrong = 7 * done % (length + 1)
        if wrong < len(draft):
            draft[wrong] = (draft[wrong] + 1) % VOCAB
        return draft

    return ScriptDrafter(script)


def garbage(tokens: Sequence[int], length: int) -> list[int]:
    """A script of tokens that have nothing to do with the text."""
    return [(len(tokens) * 13 + 7 * i) % VOCAB for i in range(length)]


def some_tokens(length: int, seed: int = 0) -> list[int]:
    """Token ids without special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
