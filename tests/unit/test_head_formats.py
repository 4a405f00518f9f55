"""EAGLE-3 heads as others share them: the numbers of the paper's formula, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import Engine
from outrider.core.proposal import Proposal
from outrider.errors import ModelError, ModelFileError, UnsupportedError
from outrider.models.heads.eagle import EagleModule, TorchHead
from outrider.models.heads.export import export_speculators
from outrider.models.heads.folder import read_head, write_head
from outrider.models.native.eagle import NativeHead
from tests.small_models import VOCAB, native, new_module, some_tokens

D, HEADS, KV, HEAD_DIM, INNER, DRAFT, LAYERS = 32, 4, 2, 8, 48, 40, 8
TEXT = some_tokens(30, seed=4)
TREE = Proposal((5, 6, 7, 8, 9), (-1, -1, 0, 1, 3), (None,) * 5)
CHAIN = Proposal.chain([5, 6, 7, 8])
pytestmark = pytest.mark.usefixtures("one_thread")

FLAT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": D,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT,
}
NESTED: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
    },
    "draft_vocab_size": DRAFT,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "transformer_layer_config": {
        name: value
        for name, value in FLAT.items()
        if name not in ("architectures", "draft_vocab_size", "rope_theta", "rope_scaling")
    }
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
}


def checkpoint(seed: int = 0, draft: int = DRAFT) -> dict[str, Tensor]:
    """Random tensors, under the EAGLE repository's names."""
    chance = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance) * 0.2

    def vector() -> Tensor:
        return 1 + 0.2 * torch.randn(D, generator=chance)

    ids = torch.randperm(VOCAB, generator=chance)[:draft].sort().values
    return {
        "fc.weight": matrix(D, 3 * D),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * D),
        "midlayer.self_attn.k_proj.weight": matrix(KV * HEAD_DIM, 2 * D),
        "midlayer.self_attn.v_proj.weight": matrix(KV * HEAD_DIM, 2 * D),
        "midlayer.self_attn.o_proj.weight": matrix(D, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": matrix(INNER, D),
        "midlayer.mlp.up_proj.weight": matrix(INNER, D),
        "midlayer.mlp.down_proj.weight": matrix(D, INNER),
        "midlayer.input_layernorm.weight": vector(),
        "midlayer.hidden_norm.weight": vector(),
        "midlayer.post_attention_layernorm.weight": vector(),
        "norm.weight": vector(),
        "lm_head.weight": matrix(draft, D),
        "d2t": ids - torch.arange(draft),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }


def save(folder: Path, layout: str, state: dict[str, Tensor], **changes: Any) -> Path:
    """A folder in a layout, with values of the configuration changed."""
    folder.mkdir(parents=True, exist_ok=True)
    about = json.loads(json.dumps(FLAT if layout == "flat" else NESTED))
    for name, value in changes.items():
        inner = about.get("transformer_layer_config", about)
        (inner if name in inner else about)[name] = value
    if layout != "flat":
        state = {name.replace("midlayer", "layers.0"): value for name, value in state.items()}
    (folder / "config.json").write_text(json.dumps(about))
    save_file(state, folder / "model.safetensors")
    return folder


# ---- an EAGLE-3 layer from the paper's formula, one token at a time ------------------------------


class Reference:
    """Written from the paper's section 3 on plain tensors; keys are kept as a list along a path."""

    def __init__(self, w: dict[str, Tensor], embedding: Tensor, normed: bool = False) -> None:
        self.w, self.embedding, self.normed = w, embedding, normed

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def turn(self, x: Tensor, position: int) -> Tensor:
        """Rotary positions, pair (i, i + half) by position / theta^(2 i / size)."""
        half = x.shape[-1] // 2
        angle = position * 5000.0 ** (-torch.arange(half).double() * 2 / x.shape[-1])
        c, s = angle.cos().float(), angle.sin().float()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * c - b * s, a * s + b * c], -1)

    def step(self, token: int, g: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The layer's output for one token, whose key and value join ``past``."""
        m, at = "midlayer", "midlayer.self_attn"
        e = self.embedding[token]
        u = torch.cat([self.norm(e, f"{m}.input_layernorm"), self.norm(g, f"{m}.hidden_norm")])
        q, k, v = ((self.w[f"{at}.{n}_proj.weight"] @ u).view(-1, HEAD_DIM) for n in "qkv")
        position = len(past)
        past.append((self.turn(k, position), v))
        q = self.turn(q, position)
        mixed = []
        for head in range(HEADS):
            kv = head // (HEADS // KV)
            keys, values = (torch.stack([pair[i][kv] for pair in past]) for i in (0, 1))
            mixed.append(torch.softmax(keys @ q[head] / HEAD_DIM**0.5, 0) @ values)
        if self.normed:  # norm_before_residual, as the speculators library has it
            g = self.norm(g, f"{m}.hidden_norm")
        x = g + self.w[f"{at}.o_proj.weight"] @ torch.cat(mixed)
        y = self.norm(x, f"{m}.post_attention_layernorm")
        gate, up = (self.w[f"{m}.mlp.{n}_proj.weight"] @ y for n in ("gate", "up"))
        return x + self.w[f"{m}.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def logits(self, x: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ self.norm(x, "norm")

    def rows(self, tokens: list[int], hidden: Tensor, tree: Proposal) -> Tensor:
        """Logits after the tokens, then after each node."""
        past: list[tuple[Tensor, Tensor]] = []
        for token, states in zip(tokens, hidden, strict=True):
            x = self.step(token, self.w["fc.weight"] @ states, past)
        found = [self.logits(x)]
        for node in range(len(tree)):
            own, g = list(past), x
            for above in tree.path(node):
                g = self.step(tree.tokens[above], g, own)
            found.append(self.logits(g))
        return torch.stack(found)


@pytest.fixture(scope="module")
def target():
    return native(new_module("llama", num_hidden_layers=LAYERS), "float32")


def rows_of(head: Any, hidden: Tensor, tree: Proposal) -> Tensor:
    """The same rows from a head at work, level by level."""
    cache = head.new_cache(100)
    logits, state = head.feed(cache, TEXT[1:], hidden)
    found, states = [logits[None]], {-1: state}
    depths = [len(tree.path(node)) for node in range(len(tree))]
    for depth in range(1, tree.depth + 1):
        level = [node for node in range(len(tree)) if depths[node] == depth]
        above = torch.stack([states[tree.parents[node]] for node in level])
        more, after = head.grow(cache, tree, range(level[0], level[-1] + 1), above)
        found.append(more)
        states |= dict(zip(level, after, strict=True))
    return torch.cat(found)


def check(module: EagleModule, state: dict[str, Tensor], target: Any) -> None:
    """Both runtimes' logits are the formula's, on a chain and on a tree."""
    assert module.ids.tolist() == (state["d2t"] + torch.arange(len(state["d2t"]))).tolist()
    cache = target.new_cache(len(TEXT), module.config.taps)
    target.prefill(cache, TEXT)
    hidden = cache.hidden.first(len(TEXT) - 1)
    embedding = target.weights.embed(list(range(VOCAB)))[:, :D]
    for tree in (CHAIN, TREE):
        normed = module.config.norm_before_residual
        wanted = Reference(state, embedding, normed).rows(TEXT[1:], hidden, tree)
        for head in (target.make_head(module), TorchHead(module, lambda ids: embedding[ids])):
            assert isinstance(head, TorchHead if normed else (NativeHead, TorchHead))
            torch.testing.assert_close(rows_of(head, hidden, tree), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["flat", "speculators"])
def test_logits_are_those_of_the_formula(tmp_path, target, layout):
    state = checkpoint()
    module, about = read_head(save(tmp_path, layout, state), LAYERS, VOCAB)
    assert isinstance(module, EagleModule)
    assert module.config.taps == (1, 3, 4)  # inputs of 2, 4 and 5
    assert about["draft_vocab_size"] == DRAFT
    check(module, state, target)


@pytest.mark.parametrize("layout", ["flat", "speculators"])
def test_a_head_that_goes_round_attention_with_the_norm(tmp_path, target, layout):
    state = checkpoint()
    source = save(tmp_path / "in", layout, state, norm_before_residual=True)
    check(read_head(source, LAYERS, VOCAB)[0], state, target)
    taps = read_head(source, LAYERS)[0].config.taps
    save(tmp_path / "in", layout, state, norm_before_residual=True,
         eagle_aux_hidden_state_layer_ids=[tap + 1 for tap in taps])  # fmt: skip
    export_speculators(source, tmp_path / "out", "org/target")
    check(read_head(tmp_path / "out")[0], state, target)
    write_head(read_head(source)[0], tmp_path / "ours", {})
    assert read_head(tmp_path / "ours")[0].config.norm_before_residual


@pytest.mark.parametrize("layout", ["flat", "speculators"])
def test_an_export_is_read_with_the_same_numbers(tmp_path, target, layout):
    state = checkpoint()
    source = save(tmp_path / "in", layout, state, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    export_speculators(source, tmp_path / "out", "org/target")
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert about["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["d2t"], state["d2t"])
    assert torch.equal(stored["t2d"], state["t2d"])
    module, _ = read_head(tmp_path / "out")
    assert isinstance(module, EagleModule)
    check(module, state, target)


def test_our_own_layout_goes_out_and_comes_back(tmp_path):
    """Ours is int8; what is exported is just what it stands for."""
    shared, _ = read_head(save(tmp_path / "in", "flat", checkpoint()), LAYERS)
    write_head(shared, tmp_path / "ours", {})
    ours, _ = read_head(tmp_path / "ours")
    export_speculators(tmp_path / "ours", tmp_path / "out", "org/target", target_rows=VOCAB + 8)
    back, _ = read_head(tmp_path / "out", vocab=VOCAB)
    assert back.config == ours.config
    assert torch.equal(back.ids, ours.ids)
    for (name, a), b in zip(ours.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_shared_head_drafts_for_an_engine(tmp_path, target):
    folder = save(tmp_path, "flat", checkpoint())
    engine = Engine(target, drafter=f"eagle:{folder}#tree=3,2")
    plain = engine.generate(TEXT[:9], plain=True, max_tokens=20)
    ours = engine.generate(TEXT[:9], draft_length=3, max_tokens=20)
    assert ours.token_ids == plain.token_ids
    assert ours.trace.summary()["drafted_tokens"] > 0


def test_which_layers_are_read(tmp_path):
    """vLLM counts what goes into a layer, SGLang what comes out of it."""
    state = checkpoint()
    said = save(tmp_path / "a", "speculators", state, eagle_aux_hidden_state_layer_ids=[6, 1, 3])
    assert read_head(said)[0].config.taps == (0, 2, 5)
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True}
    said = save(tmp_path / "b", "flat", state, eagle_config=nested)
    assert read_head(said)[0].config.taps == (1, 3, 6)
    with pytest.raises(ModelFileError, match="does not say which layers"):
        read_head(save(tmp_path / "c", "flat", state))
    with pytest.raises(UnsupportedError, match="outputs of a layer"):
        read_head(tmp_path / "c", 4)
    said = save(tmp_path / "d", "speculators", state, eagle_aux_hidden_state_layer_ids=[0, 3, 6])
    with pytest.raises(UnsupportedError, match="outputs of a layer"):
        read_head(said)


def test_draft_ids_in_any_order_and_rows_that_pad(tmp_path):
    state = checkpoint()
    shuffled = torch.randperm(DRAFT, generator=torch.Generator().manual_seed(1))
    ids = state["d2t"] + torch.arange(DRAFT)
    moved = state | {
        "lm_head.weight": state["lm_head.weight"][shuffled],
        "d2t": ids[shuffled] - torch.arange(DRAFT),
    }
    module, _ = read_head(save(tmp_path, "flat", moved), LAYERS)
    assert torch.equal(module.ids, ids)
    assert torch.equal(module.lm_head.weight, state["lm_head.weight"])
    short, _ = read_head(tmp_path, LAYERS, VOCAB - 10)
    assert short.config.vocab == VOCAB - 10
    assert short.ids.tolist() == [token for token in ids.tolist() if token < VOCAB - 10]
    assert len(short.lm_head.weight) == len(short.ids) < DRAFT


def test_a_whole_vocabulary_needs_no_mapping(tmp_path):
    state = {k: v for k, v in checkpoint(draft=VOCAB).items() if k not in ("d2t", "t2d")}
    module, _ = read_head(save(tmp_path, "flat", state, draft_vocab_size=VOCAB), LAYERS)
    assert torch.equal(module.ids, torch.arange(VOCAB))
    export_speculators(
        save(tmp_path, "flat", state, eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        tmp_path / "out", "org/target",
    )  # fmt: skip
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")


def test_the_targets_own_tensors_may_be_there(tmp_path):
    state = checkpoint() | {"embed_tokens.weight": torch.zeros(VOCAB, D)}
    assert len(read_head(save(tmp_path, "speculators", state), LAYERS)[0].ids) == DRAFT


@pytest.mark.parametrize(
    "changes",
    [
        {"speculators_model_type": "eagle"},
        {"num_hidden_layers": 2},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"norm_before_residual": "sometimes"},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"embed_requires_grad": True},
        {"target_hidden_size": 64},
        {"sliding_window": 512},
        {"layer_types": ["sliding_attention"]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_network_is_refused_by_what_is_other(tmp_path, changes):
    folder = save(tmp_path, "speculators", checkpoint(), **changes)
    with pytest.raises(UnsupportedError, match=next(iter(changes))):
        read_head(folder, LAYERS)


def test_other_tensors_are_refused_by_name(tmp_path):
    state = checkpoint() | {"midlayer.self_attn.q_norm.weight": torch.ones(HEAD_DIM)}
    with pytest.raises(UnsupportedError, match=r"has a tensor 'midlayer\.self_attn\.q_norm"):
        read_head(save(tmp_path, "flat", state), LAYERS)
    state = checkpoint()
    del state["fc.weight"]
    with pytest.raises(UnsupportedError, match=r"has no tensor 'fc.weight'"):
        read_head(save(tmp_path, "flat", state), LAYERS)


def test_pickles_are_refused_with_a_way_out(tmp_path):
    folder = save(tmp_path, "flat", checkpoint())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="pickle") as told:
        read_head(folder, LAYERS)
    assert "save_file" in told.value.hint
    assert "weights_only=True" in told.value.hint


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("d2t", None, "no 'd2t'"),
        ("d2t", torch.zeros(3, dtype=torch.long), "a token of its own"),
        ("d2t", -torch.arange(DRAFT), "a token of its own"),
        ("d2t", torch.full((DRAFT,), VOCAB), "out of the vocabulary"),
        ("t2d", torch.ones(VOCAB, dtype=torch.bool), "name other tokens"),
        ("fc.weight", torch.zeros(D, 2 * D), "size mismatch|Error"),
        ("norm.weight", torch.full((D,), torch.nan), "not finite"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, name, value, reason):
    state = checkpoint() | {name: value}
    if value is None:
        del state[name]
    folder = save(tmp_path, "flat", state)
    with pytest.raises(ModelFileError, match=reason):
        read_head(folder, LAYERS)


def test_a_missing_size_is_named(tmp_path):
    folder = save(tmp_path, "flat", checkpoint())
    about = json.loads((folder / "config.json").read_text())
    del about["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(ModelError, match="says nothing of 'intermediate_size'"):
        read_head(folder, LAYERS)
