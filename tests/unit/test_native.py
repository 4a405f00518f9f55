"""The native runtime: transformers' numbers, the same bits in any company, and whole files."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from safetensors.torch import load_file, save_file

from outrider import Engine
from outrider.core.proposal import Proposal
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.script import ScriptDrafter
from outrider.drafters.shape import parse_shape
from outrider.engine.loading import runtime_for
from outrider.errors import (
    ModelFileError,
    NotEnoughMemoryError,
    ProposalError,
    UnsupportedError,
    UsageError,
)
from outrider.models import memory
from outrider.models.hf import HFModel
from outrider.models.locate import locate
from outrider.models.native import cache as native_cache
from outrider.models.native import load as loading
from outrider.models.native import recorder, weights
from outrider.models.native.cache import NativeCache, Shape
from outrider.models.native.emit import LANES
from outrider.models.native.kernels import BYTE_ROWS, FRAME, LINEAR, MAX_ROWS, UNGATED, hand_heads
from outrider.models.native.model import NativeModel
from outrider.models.native.recorder import Program
from outrider.models.native.vector import BLOCK, DOT, exponentials, float_to_bits, silu
from outrider.models.native.weights import INPUT_STEP, Linear, Nibbles, pack, quantize
from outrider.protocols import Asked
from tests.small_models import (
    VOCAB,
    garbage,
    native,
    new_module,
    partly_right,
    randomise,
    save,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = some_tokens(600, seed=2)
OTHERS = some_tokens(200, seed=3), some_tokens(70, seed=4)


def rope(kind: str, **settings: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama, tied and biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3 scaling": ("llama", rope("llama3", original_max_position_embeddings=64, **LLAMA3)),
    "yarn scaling": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=256)),
    "linear scaling": ("llama", rope("linear", factor=4.0)),
    # Nothing is a multiple of a vector or a block, and a key head has three queries.
    "odd sizes": (
        "llama",
        {
            "hidden_size": 42,
            "intermediate_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 80,
            "vocab_size": VOCAB + 6,
        },
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


@cache
def module(case: str):
    family, changes = CASES[case]
    return randomise(new_module(family, **changes))


@cache
def model(case: str = "llama", kind: str = "int8") -> NativeModel:
    return native(module(case), kind)


def in_four_bits(made: torch.nn.Module) -> torch.nn.Module:
    """A copy whose layers' matrices have the values that int4 gives them."""
    made = copy.deepcopy(made)
    for layer in made.model.layers:
        for part in layer.modules():
            if isinstance(part, torch.nn.Linear):
                weight = part.weight.data
                rounded = Nibbles.nearest(
                    torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32))
                )
                steps = (x.repeat_interleave(32, 1) for x in (rounded.scales, rounded.least))
                scales, least = steps
                part.weight.data = (rounded.q * scales + least)[:, : weight.shape[1]]
    return made


def in_blocks(model: NativeModel, text: list[int], width: int) -> torch.Tensor:
    """Logits after each token of a text that is fed so many tokens a pass."""
    cache, rows = model.new_cache(len(text)), []
    for start in range(0, len(text), width):
        fed = text[start : start + width]
        rows.append(model.score(cache, fed[:1], Proposal.chain(fed[1:])))
    return torch.cat(rows)


def prefilled(model: NativeModel, text: list[int], room: int = 100) -> NativeCache:
    cache = model.new_cache(len(text) + room)
    model.prefill(cache, text)
    return cache


def tree(parents: tuple[int, ...], seed: int = 0) -> Proposal:
    """Tokens of their own for each node, so that no branch can pass for another."""
    tokens = torch.randperm(VOCAB - 3, generator=torch.Generator().manual_seed(seed)) + 3
    return Proposal(tuple(tokens[: len(parents)].tolist()), parents, (None,) * len(parents))


# Two roots, paths with gaps, siblings at each depth, and one path of eight.
BUSHY = tree((-1, -1, 0, 0, 1, 2, 2, 4, 5, 5, 8, 10, 11, 12))
# A node's path may lie across three blocks of keys, with nodes of others between.
WIDE = tree((-1, *(i // 3 for i in range(55))))


class TestAgainstTransformers:
    TEXT = some_tokens(150, seed=1)

    @pytest.fixture(scope="class", params=CASES)
    def both(self, request):
        text = torch.tensor([self.TEXT])
        with torch.no_grad():
            return model(request.param, "float32"), module(request.param)(text).logits[0]

    @pytest.mark.parametrize("width", [1, 5, 13, MAX_ROWS])
    def test_blocks(self, both, width):
        found, expected = both
        rows = in_blocks(found, self.TEXT, width)
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-3)

    def test_a_prefill_of_several_passes(self, both):
        found, expected = both
        rows = found.score(prefilled(found, self.TEXT[:-1]), self.TEXT[-1:], Proposal())
        torch.testing.assert_close(rows, expected[-1:], rtol=0, atol=1e-3)

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("done", [1, 7, 60])
    def test_paths_of_a_tree(self, case, done):
        found, text = model(case, "float32"), self.TEXT[:done]
        rows = found.score(prefilled(found, text[:-1]), text[-1:], BUSHY)
        for node in range(len(BUSHY)):
            with torch.no_grad():
                path = torch.tensor([[*text, *BUSHY.path_tokens(node)]])
                expected = module(case)(path).logits[0, -1]
            torch.testing.assert_close(rows[1 + node], expected, rtol=0, atol=1e-3)

    @pytest.mark.parametrize("kind", ["int4", "int8", "bfloat16"])
    @pytest.mark.parametrize("case", ["llama, tied and biased", "mistral", "qwen3"])
    def test_narrow_weights_stay_near(self, case, kind):
        """A wrong scale or layout would leave nothing alike; rounding leaves nearly all. What four
        bits lose is lost in the model that they are compared with too."""
        text = torch.tensor([self.TEXT])
        meant = in_four_bits(module(case)) if kind == "int4" else module(case)
        with torch.no_grad():
            expected = meant(text).logits[0]
        found = in_blocks(model(case, kind), self.TEXT, 16)
        alike = torch.nn.functional.cosine_similarity(found, expected, dim=-1)
        assert float(alike.min()) > (0.99 if kind == "bfloat16" else 0.95)

    def test_rows_that_are_no_tokens_are_left_out(self):
        made = native(module("odd sizes"), vocab_size=VOCAB)
        rows = in_blocks(made, self.TEXT[:5], 5)
        assert rows.shape == (5, VOCAB)
        assert torch.equal(rows, in_blocks(model("odd sizes"), self.TEXT[:5], 5)[:, :VOCAB])


@pytest.fixture(scope="module")
def alone():
    """From a case and a kind to the logits after each token of LONG, fed one at a time."""
    return cache(lambda case, kind: in_blocks(model(case, kind), LONG, 1))


KINDS = [("llama", "int8"), ("llama, tied and biased", "int8"), ("mistral", "int8"),
         ("qwen2", "int8"), ("qwen3", "int8"), ("odd sizes", "int8"),
         ("llama", "int4"), ("odd sizes", "int4"), ("llama, tied and biased", "int4"),
         ("llama", "bfloat16"), ("mistral", "float32")]  # fmt: skip


@pytest.mark.parametrize(("case", "kind"), KINDS)
class TestSameBits:
    """Past 512 keys and across the edges of blocks of 64, in every bit."""

    @pytest.mark.parametrize("width", [*range(2, 17), 33, 63, MAX_ROWS])
    def test_blocks_of_any_width(self, alone, case, kind, width):
        # The last few hundred tokens of the long text for most widths; all of it for some.
        start = 0 if width in (3, 16, MAX_ROWS) else 430
        made = model(case, kind)
        cache, rows = prefilled(made, LONG[:start]), []
        for at in range(start, len(LONG), width):
            fed = LONG[at : at + width]
            rows.append(made.score(cache, fed[:1], Proposal.chain(fed[1:])))
        assert torch.equal(torch.cat(rows), alone(case, kind)[start:])

    @pytest.mark.parametrize("done", [1, 50, 62, 127, 200, 510])
    @pytest.mark.parametrize("shape", [BUSHY, WIDE], ids=["bushy", "wide"])
    def test_trees(self, case, kind, done, shape):
        made, text = model(case, kind), LONG[:done]
        rows = made.score(prefilled(made, text[:-1]), text[-1:], shape)
        by_path = range(len(shape)) if shape is BUSHY else (0, 3, 20, 41, 55)
        for node in by_path:
            path = [*text, *shape.path_tokens(node)]
            fresh = prefilled(made, path[:-1])
            assert torch.equal(rows[1 + node], made.score(fresh, path[-1:], Proposal())[0])

    @pytest.mark.parametrize("done", [1, 50, 62, 127, 510])
    @pytest.mark.parametrize(("shape", "node"), [(BUSHY, -1), (BUSHY, 1), (BUSHY, 13), (WIDE, 55)])
    def test_after_an_accepted_path_it_goes_on_as_if_fresh(self, case, kind, done, shape, node):
        made, text = model(case, kind), LONG[:done]
        cache = prefilled(made, text[:-1])
        made.score(cache, text[-1:], shape)
        cache.keep(done, shape.path(node))
        now = [*text, *shape.path_tokens(node)]
        assert cache.length == len(now)
        # What a later pass reads of the cache is what a fresh prefill writes.
        fresh = prefilled(made, now)
        for draft in ([], LONG[100:109]):
            rows = made.score(cache, [5], Proposal.chain(draft))
            assert torch.equal(rows, made.score(fresh, [5], Proposal.chain(draft)))
            for each in (cache, fresh):
                each.rollback(len(now))

    def test_beside_other_sequences(self, alone, case, kind):
        made = model(case, kind)
        for done in (1, 63, 300, 555):
            caches = [prefilled(made, text) for text in (*OTHERS, LONG[:done])]
            asked = [
                Asked(caches[0], [7, 8], BUSHY),
                Asked(caches[2], LONG[done : done + 3], Proposal.chain(LONG[done + 3 : done + 9])),
                Asked(caches[1], [9], Proposal.chain([3, 4])),
            ]
            rows = made.score_together(asked)
            assert [len(each) for each in rows] == [1 + len(BUSHY), 7, 3]
            assert torch.equal(rows[1], alone(case, kind)[done + 2 : done + 9])
            # The tree beside them has the numbers that it has by itself.
            by_itself = made.score(prefilled(made, OTHERS[0]), [7, 8], BUSHY)
            assert torch.equal(rows[0], by_itself)
            assert [c.length for c in caches] == [200 + 2 + len(BUSHY), 73, done + 9]


def test_threads_change_nothing(alone):
    torch.set_num_threads(2)  # `one_thread` puts back what there was
    for width in (1, 7, 50):
        assert torch.equal(in_blocks(model(), LONG[:50], width), alone("llama", "int8")[:50])


def test_a_rejected_draft_that_overflowed_leaves_no_trace(alone):
    """Scores of a whole block of keys are computed, those behind the last one too."""
    made = native(new_module("llama"))
    expected = in_blocks(made, LONG[:30], 1)
    made.weights.embedding[60] = torch.nan
    cache = prefilled(made, LONG[:9])
    assert 60 not in LONG[:30]
    assert made.score(cache, LONG[9:10], Proposal.chain([60, 60]))[1:].isnan().all()
    cache.rollback(10)
    rows = made.score(cache, LONG[10:11], Proposal.chain(LONG[11:30]))
    assert torch.equal(rows, expected[10:])
    # And a branch does not see its neighbour's.
    rows = made.score(prefilled(made, LONG[:9]), LONG[9:10], tree_of([60, LONG[10]]))
    assert torch.equal(rows[2], expected[10])


def tree_of(siblings: list[int]) -> Proposal:
    return Proposal(tuple(siblings), (-1,) * len(siblings), (None,) * len(siblings))


@pytest.mark.parametrize("nodes", [MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 40])
def test_a_chain_longer_than_a_pass(alone, nodes):
    cache = prefilled(model(), LONG[:20], 2 * nodes)
    rows = model().score(cache, LONG[20:21], Proposal.chain(LONG[21 : 21 + nodes]))
    assert torch.equal(rows, alone("llama", "int8")[20 : 21 + nodes])


def test_a_tree_of_more_nodes_than_a_pass():
    shape = Proposal(
        tuple(3 + i % 50 for i in range(100)), (*(-1,) * 50, *range(50)), (None,) * 100
    )
    rows = model().score(prefilled(model(), LONG[:20]), LONG[20:21], shape)
    for node in (0, 49, 50, 99):
        path = [*LONG[:21], *shape.path_tokens(node)]
        expected = in_blocks(model(), path, 16)[-1]
        assert torch.equal(rows[1 + node], expected)


def test_more_pending_tokens_than_a_pass(alone):
    rows = model().score(model().new_cache(300), LONG[:200], Proposal.chain(LONG[200:210]))
    assert torch.equal(rows, alone("llama", "int8")[199:210])


# ---- sums of bytes -------------------------------------------------------------------------------


def test_more_rows_than_a_pass_are_refused_and_change_nothing():
    made = model()
    caches = [made.new_cache(100) for _ in range(2)]
    asked = [Asked(cache, LONG[: MAX_ROWS // 2 + 1]) for cache in caches]
    with pytest.raises(ProposalError, match=f"at most {MAX_ROWS}"):
        made.score_together(asked)
    assert [cache.length for cache in caches] == [0, 0]


def test_threads_that_share_a_model_take_turns():
    made = model()

    def decoded(seed: int) -> torch.Tensor:
        return in_blocks(made, some_tokens(200, seed=seed), 5)

    expected = [decoded(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(decoded, range(4)), expected, strict=True):
            assert torch.equal(found, wanted)


def run_linear(
    rows: torch.Tensor, packed: Linear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes (128 taken off again) and scales that the kernel made of rows, and its result."""
    n, width = rows.shape
    blocks = width // INPUT_STEP
    values = torch.zeros(MAX_ROWS, width, dtype=torch.uint8)
    scales = torch.zeros(MAX_ROWS, blocks)
    source = torch.zeros(MAX_ROWS, width)
    source[:n] = rows
    out = torch.zeros(MAX_ROWS, packed.padded_outputs)
    frame = np.zeros(FRAME.size, np.int64)
    frame[FRAME.rows] = n
    at = frame.ctypes.data
    parts = (values, scales, packed.weight, packed.sums, packed.scales, packed.bias, out)
    sizes = (packed.padded_inputs, packed.padded_outputs, 0, 0, 1)
    handed = (source.data_ptr(), width, 1, width, width, width, values.data_ptr())
    steps = [
        (hand_heads, [at, *handed, scales.data_ptr(), 1]),
        (LINEAR["int8"], [at, *(part.data_ptr() for part in parts), *sizes, *UNGATED]),
    ]
    Program(steps, 2, frame, source, [parts]).run(logits=True)
    # Rows lie in groups, within one next to each other: [blocks, rows, INPUT_STEP].
    groups = -(-n // BYTE_ROWS)
    size = -(-n // groups)
    found, worth = [], []
    for start in range(0, n, size):
        mates = min(size, n - start)
        here = values.flatten()[start * width : (start + mates) * width]
        found.append(here.view(blocks, mates, -1).transpose(0, 1).reshape(mates, width))
        here = scales.flatten()[start * blocks : (start + mates) * blocks]
        worth.append(here.view(blocks, mates).T)
    return torch.cat(found).long() - 128, torch.cat(worth), out[:n, : packed.outputs]


def unpacked(packed: Linear) -> torch.Tensor:
    """The int8 weights, [outputs, inputs]."""
    tiles, quads, channels, four = packed.weight.shape
    rows = packed.weight.transpose(1, 2).reshape(tiles * channels, quads * four)
    return rows[: packed.outputs].long()


OUTPUTS, INPUTS = 5 * LANES, 3 * INPUT_STEP


def extreme_weights() -> dict[str, torch.Tensor]:
    ones = torch.ones(OUTPUTS, INPUTS)
    signs = ones.clone()
    signs[:, 1::2] = -1
    pairs = ones.clone()
    pairs[:, 2::4] = pairs[:, 3::4] = -1
    outlier = torch.zeros(OUTPUTS, INPUTS)
    outlier[torch.arange(OUTPUTS), torch.arange(OUTPUTS) % INPUTS] = 1000.0
    beside = 1e-3 * ones
    beside[:, 5] = 1000.0
    nearly = torch.full((OUTPUTS, INPUTS), 126.4)
    nearly[:, ::2] = 1.6  # both of a pair are rounded up
    noise = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    return {
        "all the largest": ones,
        "all the smallest": -ones,
        "alternating": signs,
        "alternating pairs": pairs,
        "one large among zeros": outlier,
        "one large among small": beside,
        "pairs that round up": nearly,
        "noise": noise,
        "none": torch.zeros(OUTPUTS, INPUTS),
    }


def extreme_rows() -> torch.Tensor:
    """One to each kind: largest, smallest, alternating, zero, and noise that is none of them."""
    rows = torch.full((9, INPUTS), 127.0)
    rows[1] = -127.0
    rows[2, 1::2] = -127.0
    rows[3, ::2] = -127.0
    rows[4, 2::4] = rows[4, 3::4] = -127.0
    rows[5] = 0.0
    rows[6] = 0.0
    rows[6, 7] = 127.0
    noise = torch.randint(-127, 128, (2, INPUTS), generator=torch.Generator().manual_seed(1))
    rows[7:] = noise.float()
    rows[7:, ::INPUT_STEP] = 127.0  # so that a unit is worth one
    return rows


WEIGHTS = extreme_weights()


def with_unit_scales(weight: torch.Tensor) -> Linear:
    """Every sum is then a whole number below 2^24, which float32 holds exactly."""
    packed = pack(weight, None, "int8")
    return replace(packed, scales=torch.ones_like(packed.scales))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 8, 9])
def test_sums_are_exact(name, count):
    rows, packed = extreme_rows()[-count:], with_unit_scales(WEIGHTS[name])
    bytes_, scales, out = run_linear(rows, packed)
    assert torch.equal(bytes_, rows.long())
    assert torch.equal(scales == 1.0, rows.unflatten(1, (-1, INPUT_STEP)).any(-1))
    assert torch.equal(out.long(), bytes_ @ unpacked(packed).T)


@pytest.mark.skipif(DOT != "pairs", reason="other instructions sum pairs in 32 bits")
def test_sums_would_saturate_without_the_bound_on_pairs(monkeypatch):
    """What the test above is able to see."""
    monkeypatch.setattr(weights, "quantize", lambda weight, bound_pairs: quantize(weight, False))
    packed = with_unit_scales(WEIGHTS["all the largest"])
    assert unpacked(packed).max() == 127
    bytes_, _, out = run_linear(extreme_rows(), packed)
    assert not torch.equal(out.long(), bytes_ @ unpacked(packed).T)


@njit
def run_exponentials(values, top):
    exponentials(values.ctypes.data, len(values), float_to_bits(np.float32(top)))


@njit
def run_silu(gate, up, out):
    silu(gate.ctypes.data, up.ctypes.data, out.ctypes.data, len(gate))


def test_exponentials_are_right_to_two_units_in_the_last_place():
    values = np.linspace(-120, 88, 64 * 999, dtype=np.float32)
    found = values.copy()
    run_exponentials(found, 0.0)
    # Below e^-87 there is nothing that float32 holds in full.
    expected = np.exp(np.maximum(values, -87).astype(np.float64))
    assert np.abs(found / expected - 1).max() < 2 * np.finfo(np.float32).eps
    odd = np.full(64, np.nan, np.float32)
    odd[1::2] = -np.inf
    run_exponentials(odd, 3.0)
    assert np.isnan(odd[::2]).all()
    assert (odd[1::2] < 1e-37).all()


def test_silu_times_another():
    gate = np.linspace(-200, 200, 64 * 50, dtype=np.float32)
    up, out = np.full_like(gate, 3.0), np.zeros_like(gate)
    run_silu(gate, up, out)
    exact = gate.astype(np.float64)
    expected = 3 * exact / (1 + np.exp(-exact))
    assert np.abs(out - expected).max() <= 1e-6 * np.abs(expected).max()
    small = np.abs(expected) > 1e-30
    assert np.abs(out[small] / expected[small] - 1).max() < 1e-5
    gate[5] = np.nan
    run_silu(gate, up, out)
    assert np.isnan(out).sum() == 1


@pytest.mark.parametrize("name", WEIGHTS)
def test_with_scales_and_a_bias_it_is_the_product(name):
    generator = torch.Generator().manual_seed(2)
    rows = 3 * torch.randn(11, INPUTS, generator=generator)
    bias = torch.randn(OUTPUTS, generator=generator)
    packed = pack(WEIGHTS[name], bias, "int8")
    bytes_, scales, out = run_linear(rows, packed)
    most = rows.unflatten(1, (-1, INPUT_STEP)).abs().amax(-1)
    torch.testing.assert_close(scales, most / 127)
    wide = scales.double().repeat_interleave(INPUT_STEP, 1)
    fed = bytes_ * wide
    assert ((fed - rows).abs() <= 0.501 * wide).all()
    meant = packed.rows(list(range(OUTPUTS))).double()
    expected = fed @ meant.T + bias
    # Of the size of what is added up, since terms of both signs may cancel.
    size = fed.abs() @ meant.abs().T + bias.abs()
    assert ((out - expected).abs() <= 1e-6 * size).all()


def check_quantized(weight: torch.Tensor, bound_pairs: bool) -> None:
    q, scales = quantize(weight, bound_pairs)
    wide = scales.double().repeat_interleave(INPUT_STEP, 1)
    assert int(q.long().abs().max()) <= 127
    if bound_pairs:
        assert int(q.long().abs().unflatten(1, (-1, 2)).sum(-1).max()) <= 128
    # No value is further off than half a unit; one that wrapped around is off by 256.
    assert ((q * wide - weight).abs() <= 0.501 * wide).all()


def blocks_of(size: st.SearchStrategy[float]) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(size, min_size=INPUT_STEP, max_size=INPUT_STEP).map(
        lambda values: torch.tensor([values])
    )


@given(
    weight=blocks_of(st.floats(-1, 1, width=32)),
    most=st.floats(1.0, 100.0, width=32),
    bound_pairs=st.booleans(),
)
def test_quantized_weights_keep_their_bounds(weight, most, bound_pairs):
    weight[0, 3] = most
    check_quantized(weight, bound_pairs)


@given(
    numbers=st.lists(st.integers(-254, 254), min_size=INPUT_STEP, max_size=INPUT_STEP),
    bound_pairs=st.booleans(),
)
def test_weights_halfway_between_two_units_keep_the_bounds(numbers, bound_pairs):
    check_quantized(torch.tensor([numbers]) / 2, bound_pairs)


@pytest.mark.parametrize("bound_pairs", [False, True])
def test_weights_whose_scale_is_a_small_half_keep_the_bounds(bound_pairs):
    """Below 2^-14 a float16 has fewer bits than the margin for its rounding counts on."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4000, INPUT_STEP, generator=generator)
    check_quantized(weight * 2.0 ** torch.linspace(-30, -4, 4000)[:, None], bound_pairs)


@pytest.mark.parametrize("most", [1.06e-5, 1e-4, 5e-4])
def test_a_small_weight_does_not_change_its_sign(most):
    q, _ = quantize(torch.full((1, INPUT_STEP), most) * torch.eye(1, INPUT_STEP), False)
    assert q[0, 0] > 0


def test_steps_compiled_by_different_processes_do_not_take_each_others_code(tmp_path):
    """A compiled step is kept on disk with its functions under names that are counted from one in
    each process. Two steps that each bring a function of one name would share the code of
    whichever was loaded first: bytes would be read as floats."""

    def start(*kinds: str) -> subprocess.Popen[str]:
        code = "from outrider.models.native import kernels, probe\n"
        code += "".join(f"kernels.LINEAR[{kind!r}].address\n" for kind in kinds)
        code += "print(probe.fault())" if len(kinds) > 1 else ""
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )

    kinds = ("float32", "int4", "int8")
    for compiling in [start(kind) for kind in kinds]:
        compiling.communicate()
    assert start(*kinds).communicate()[0] == "None\n"


# ---- numbers that are none -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int4", "int8", "bfloat16", "float32"])
class TestNotFinite:
    @pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("place", ["one", "all"])
    def test_in_an_embedding(self, kind, value, place):
        made = native(randomise(new_module("llama")), kind)
        expected = in_blocks(made, [5, 6, 8], 3)
        made.weights.embedding[7, 3 if place == "one" else slice(None)] = value
        rows = in_blocks(made, [5, 6, 7, 8], 4)
        assert torch.equal(rows[:2], expected[:2])
        assert not rows[2].isfinite().any()
        assert not rows[3].isfinite().any()  # which sees the third

    @pytest.mark.parametrize("part", ["qkv", "o", "gate_up", "down"])
    @pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
    def test_after_any_matrix(self, kind, part, value):
        """As if a product had overflowed."""
        made = native(randomise(new_module("llama")), kind)
        getattr(made.weights.layers[1], part).bias[0] = value
        assert not in_blocks(made, [5, 6, 7, 8], 4).isfinite().any()

    @pytest.mark.parametrize("head", ["q", "k", "v"])
    def test_in_queries_keys_or_values(self, kind, head):
        """Weights are checked as they are read; what they make of a text is not."""
        made = native(randomise(new_module("llama")), kind)
        a = made.architecture
        start = {"q": 0, "k": a.heads, "v": a.heads + a.kv_heads}[head] * a.head_dim
        made.weights.layers[0].qkv.bias[start : start + a.head_dim] = 3e38
        assert not in_blocks(made, [5, 6, 7, 8], 4)[1:].isfinite().any()


@pytest.mark.parametrize("part", ["k", "v"])
def test_keys_and_values_too_large_for_the_cache(part):
    """A float16 ends at 65504; beyond it there must be a number or an end, not a wrong number."""
    module = randomise(new_module("qwen2"))
    bias = getattr(module.model.layers[0].self_attn, f"{part}_proj").bias
    bias.data[:] = 1e5
    assert not in_blocks(native(module), [5, 6, 7, 8], 4).isfinite().any()


# ---- the cache -----------------------------------------------------------------------------------


class TestCache:
    SHAPE = Shape(layers=2, kv_heads=3, width=64, dtype=np.dtype(np.float16))

    def test_it_grows_in_steps_and_moves_nothing(self):
        made = NativeCache(self.SHAPE, 100_000)
        addresses, sizes = list(made.table), []
        for tokens in range(1, 20_000, 37):
            made.reserve(tokens)
            assert len(made.table) * BLOCK >= tokens
            assert list(made.table[: len(addresses)]) == addresses
            addresses = list(made.table)
            sizes.append(made.bytes)
        assert made.bytes == self.SHAPE.bytes(len(made.table) * BLOCK)
        # Few steps, and never much more than is needed.
        assert len(set(sizes)) < 25
        assert len(made.table) * BLOCK < 1.25 * 20_000 + 8 * BLOCK

    def test_it_takes_no_more_than_its_capacity(self):
        made = NativeCache(self.SHAPE, 70)
        made.reserve(3)
        assert len(made.table) == 2
        # A round may draft beyond the end of a text that is nearly full.
        made.reserve(200)
        assert len(made.table) == 4

    def test_memory_is_asked_before_it_is_taken(self, monkeypatch):
        monkeypatch.setattr(native_cache, "available_bytes", lambda: self.SHAPE.bytes(BLOCK))
        made = NativeCache(self.SHAPE, 1)
        before = made.table.copy()
        monkeypatch.setattr(np, "zeros", None)  # what would take it
        with pytest.raises(NotEnoughMemoryError, match=r"needs .* MB more to hold 500 tokens"):
            made.reserve(500)
        assert np.array_equal(made.table, before)
        with pytest.raises(NotEnoughMemoryError):
            NativeCache(self.SHAPE, 500)

    def test_a_pass_without_room_leaves_the_cache_as_it_was(self, monkeypatch, alone):
        cache = prefilled(model(), LONG[:20], 5000)
        with monkeypatch.context() as patch:
            patch.setattr(native_cache, "available_bytes", lambda: 1000)
            patch.setattr(cache, "table", cache.table[:1])
            with pytest.raises(NotEnoughMemoryError):
                model().score(cache, LONG[20:21], Proposal.chain(LONG[21:80]))
        assert cache.length == 20
        rows = model().score(cache, LONG[20:21], Proposal())
        assert torch.equal(rows, alone("llama", "int8")[20:21])

    def test_rollback_only_takes_back(self):
        made = NativeCache(self.SHAPE, 100)
        made.length = 50
        for to, then in ((60, 50), (50, 50), (7, 7), (0, 0)):
            made.rollback(to)
            assert made.length == then

    def test_a_path_is_moved_across_blocks(self):
        made = NativeCache(self.SHAPE, 1000)
        made.reserve(1000)
        for slot in range(1000):
            keys, values = made._block(slot // BLOCK)
            keys[..., slot % BLOCK] = values[..., slot % BLOCK, :] = slot
        made.length = 1000
        base, path = 60, [1, 3, 4, 70, 71, 200, 900]
        made.keep(base, path)
        assert made.length == base + len(path)
        held = [*range(base), *(base + node for node in path)]
        for slot, number in enumerate(held):
            keys, values = made._block(slot // BLOCK)
            assert (keys[..., slot % BLOCK] == number).all()
            assert (values[..., slot % BLOCK, :] == number).all()

    def test_no_block_is_beyond_the_last(self):
        with pytest.raises(IndexError):
            NativeCache(self.SHAPE, 1)._block(8)


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A saved model, with the packed copies beside it."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return save(module("llama"), tmp_path / "model")


def loaded(folder: Path, **options) -> NativeModel:
    made, _ = loading.load(locate(str(folder)), **options)
    return made


def copies(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache" / "packed").glob("*"))


def change(folder: Path, name: str, made) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = made(tensors[name])
    save_file({n: t for n, t in tensors.items() if t is not None}, file, metadata={"format": "pt"})


class TestLoading:
    @pytest.mark.parametrize("dtype", [None, torch.int8, torch.bfloat16, torch.float32])
    def test_it_is_the_model_that_was_saved_the_second_time_too(self, folder, dtype, monkeypatch):
        kind = "int8" if dtype is None else str(dtype).removeprefix("torch.")
        first = loaded(folder, dtype=dtype)
        assert first.kind == kind
        assert len(copies(folder)) == 1
        monkeypatch.setattr(loading, "read_weights", None)  # the copy needs no packing
        second = loaded(folder, dtype=dtype)
        expected = in_blocks(model("llama", kind), LONG[:40], 8)
        for made in (first, second):
            assert torch.equal(in_blocks(made, LONG[:40], 8), expected)
            assert made.name == "model"
            assert made.vocab_size == VOCAB
            assert made.context_length == 1024

    @pytest.mark.parametrize("case", ["llama, tied and biased", "yarn scaling", "mistral", "qwen3"])
    def test_whatever_a_family_has_of_its_own_is_kept(self, folder, case):
        save(module(case), folder)
        expected = in_blocks(model(case), LONG[:40], 8)
        for _ in range(2):
            assert torch.equal(in_blocks(loaded(folder), LONG[:40], 8), expected)

    def test_a_tokenizer_comes_with_it(self, folder):
        for _ in range(2):
            _, words = loading.load(locate(str(folder)))
            assert words.encode("w5 w9") == [5, 9]
            assert words.decode([5, 9]) == "w5w9"
            assert list(words.eos_token_ids) == [2]

    def test_another_file_in_its_place_is_packed_again(self, folder):
        first = in_blocks(loaded(folder), LONG[:9], 9)
        change(folder, "model.norm.weight", lambda weight: -weight)
        second = in_blocks(loaded(folder), LONG[:9], 9)
        torch.testing.assert_close(second, -first)
        assert len(copies(folder)) == 1  # the older one is of no more use

    def test_another_configuration_is_packed_again(self, folder):
        first = in_blocks(loaded(folder), LONG[:9], 9)
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 50.0
        (folder / "config.json").write_text(json.dumps(config))
        assert not torch.equal(in_blocks(loaded(folder), LONG[:9], 9), first)

    def test_another_chat_template_is_taken(self, folder):
        for first in (9, 8):
            (folder / "chat_template.jinja").write_text(f"w{first} {{{{ messages[0].content }}}}")
            _, words = loading.load(locate(str(folder)))
            assert words.encode_messages([{"role": "user", "content": "w5"}]) == [first, 5]

    def test_a_copy_that_cannot_be_kept_is_a_warning(self, folder, monkeypatch):
        (folder.parent / "file").write_text("")
        monkeypatch.setenv("OUTRIDER_CACHE", str(folder.parent / "file"))
        with pytest.warns(UserWarning, match=r"could not be kept.*OUTRIDER_CACHE"):
            made = loaded(folder)
        assert torch.equal(in_blocks(made, LONG[:9], 9), in_blocks(model(), LONG[:9], 9))

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.1.mlp.up_proj.weight",
            "model.layers.0.self_attn.k_proj.weight",
            "model.norm.weight",
            "model.embed_tokens.weight",
            "lm_head.weight",
        ],
    )
    @pytest.mark.parametrize(
        ("spoil", "problem"),
        [
            (lambda weight: None, "is missing"),
            (lambda weight: weight[:-1].clone(), "was expected"),
            (lambda weight: weight.index_fill(0, torch.tensor([3]), torch.nan), "not finite"),
            (lambda weight: weight.index_fill(0, torch.tensor([3]), torch.inf), "not finite"),
        ],
        ids=["lost", "reshaped", "nan", "inf"],
    )
    def test_a_broken_tensor_is_named(self, folder, name, spoil, problem):
        change(folder, name, spoil)
        with pytest.raises(ModelFileError, match=problem) as caught:
            loaded(folder)
        assert f"'{name}'" in str(caught.value)
        assert caught.value.hint
        assert not copies(folder)

    def test_a_truncated_file_is_named(self, folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ModelFileError, match=r"model\.safetensors"):
            loaded(folder)
        assert not copies(folder)

    @pytest.mark.parametrize("part", ["weights.safetensors", "config.json", "tokenizer.json"])
    def test_a_packed_copy_that_was_spoilt(self, folder, part):
        """Whatever happened to the copy, the model itself is whole, and is packed again."""
        expected = in_blocks(loaded(folder), LONG[:9], 9)
        file = copies(folder)[0] / part
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        assert torch.equal(in_blocks(loaded(folder), LONG[:9], 9), expected)

    @pytest.mark.parametrize("again", [False, True])
    def test_memory_is_asked_before_weights_are_read(self, folder, again, monkeypatch):
        if again:
            loaded(folder)
        monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
        monkeypatch.setattr(loading, "read_weights", None)
        monkeypatch.setattr(loading, "safe_open", None)
        with pytest.raises(NotEnoughMemoryError, match=r"needs about .* GB"):
            loaded(folder)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"dtype": torch.float16, "device": "cpu"}, "it has no float16 on the CPU"),
            ({"dtype": torch.int8, "device": "cuda"}, "int8 on the CPU alone"),
            ({"dtype": torch.int8, "device": "cuda:1"}, "int8 on the CPU alone"),
        ],
    )
    def test_what_it_does_not_do_goes_to_transformers(self, folder, options, reason):
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=reason) as caught:
                loaded(folder, **options)
            assert "--runtime hf" in caught.value.hint
            runtime, why = runtime_for(locate(str(folder)), **options)
            assert runtime == "hf"
            assert reason in why
            loaded(folder)  # with a packed copy there, it is refused all the same

    @pytest.mark.parametrize("family", ["gpt2", "gemma3", "mixtral", "mamba", "lfm2"])
    def test_other_families_go_to_transformers(self, folder, family):
        other = save(new_module(family), folder.parent / family)
        runtime, why = runtime_for(locate(str(other)))
        assert runtime == "hf"
        assert re_family(why) == json.loads((other / "config.json").read_text())["model_type"]
        with pytest.raises(UnsupportedError, match="family"):
            loaded(other)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"hidden_act": "gelu"}, "'gelu' is not silu"),
            (rope("dynamic", factor=2.0), "'dynamic' is not one of"),
            (rope("default", partial_rotary_factor=0.5), "only a part"),
        ],
        ids=["activation", "rope", "partial"],
    )
    def test_other_parts_go_to_transformers(self, folder, changes, reason):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        runtime, why = runtime_for(locate(str(folder)))
        assert runtime == "hf"
        assert reason in why

    def test_its_own_families_come_here(self, folder):
        for family in ("llama", "mistral", "qwen2", "qwen3"):
            made = save(new_module(family), folder.parent / family)
            assert runtime_for(locate(str(made)))[0] == "native"
            assert isinstance(Engine.load(str(made), drafter="none").model, NativeModel)

    def test_asked_for_by_name_transformers_takes_it(self, folder):
        assert isinstance(Engine.load(str(folder), runtime="hf").model, HFModel)


def re_family(why: str) -> str:
    return why.partition("the family '")[2].partition("'")[0]


# ---- generation ----------------------------------------------------------------------------------


PROMPT = some_tokens(9)
REQUESTS = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "seed": 7},
    "coupled, cut": {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.9},
}


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3"])
def test_whatever_drafts_the_output_is_the_plain_one(case, request_):
    made, options = model(case), {"max_tokens": 40} | REQUESTS[request_]
    plain = Engine(made, drafter="none").generate(PROMPT, **options).token_ids
    assert len(set(plain)) > 3
    draft = model("qwen2")
    drafters = {
        "ngram": NgramDrafter(3, 1),
        "garbage": ScriptDrafter(garbage),
        "right": ScriptDrafter(plain),
        "partly": partly_right(plain, len(PROMPT)),
        "itself": ModelDrafter(native(module(case), "bfloat16")),
        "model": ModelDrafter(draft),
        "tree": ModelDrafter(draft, shape=parse_shape("tree=3,2")),
        "its own tree": ModelDrafter(made, shape=parse_shape("tree=3,2")),
        "growing tree": ModelDrafter(made, shape=parse_shape("tree=24")),
    }
    for name, drafter in drafters.items():
        engine = Engine(made, drafter=drafter)
        for length in (1, 5):
            output = engine.generate(PROMPT, draft_length=length, **options)
            assert output.token_ids == plain, (name, length)
            summary = output.trace.summary()
            if name in ("right", "its own tree") and request_ == "greedy":
                assert summary["acceptance_rate"] > (0.9 if name == "right" else 0.1)
            if name in ("garbage", "partly") and length > 1:
                assert summary["rejected_rounds"] > 0


def test_greedy_ids_are_those_of_transformers():
    for case in CASES:
        ids = torch.tensor([PROMPT])
        expected = module(case).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        engine = Engine(model(case, "float32"), drafter="ngram")
        found = engine.generate(PROMPT, max_tokens=30, ignore_eos=True).token_ids
        assert found == expected[0, len(PROMPT) :].tolist(), case


@pytest.mark.parametrize("kind", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "llama, tied and biased"])
def test_embeddings_are_the_weights_own(family, kind):
    model = native(module(family), kind)
    a, d = model.architecture, model.hidden_size
    ops = recorder._Recorder(a, model.weights, model.shape.dtype)
    into = ops.buffer(d + 3)
    ops.look_up(model.weights, into)
    program = Program(ops.steps, len(ops.steps), ops.frame, into, ops.held)
    for rows in (1, 5, MAX_ROWS):
        tokens = [random.Random(rows).randrange(model.vocab_size) for _ in range(rows)]
        tokens[-1] = model.vocab_size - 1
        into.fill_(7.0)
        ops.frame[FRAME.rows] = rows
        ops.frame[FRAME.token : FRAME.token + rows] = tokens
        program.run(logits=False)
        assert torch.equal(into[:rows, :d], model.weights.embed(tokens)[:, :d])
        assert (into[rows:] == 7.0).all()
        assert (into[:, d:] == 7.0).all()


def test_the_least_scales_are_read_as_they_are():
    """A scale may be a subnormal half."""
    weight = (
        torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        * 2.0 ** -torch.arange(32.0)[:, None]
    )
    packed = pack(weight, None, "int8")
    assert packed.scales.float().min() < 2.0**-14
    model = native(module("llama, tied and biased"), "int8")
    table = replace(model.weights, head=packed)
    ops = recorder._Recorder(
        replace(model.architecture, hidden=64), model.weights, model.shape.dtype
    )
    into = ops.look_up(table, ops.buffer(64))
    program = Program(ops.steps, len(ops.steps), ops.frame, into, ops.held)
    ops.frame[FRAME.rows] = 32
    ops.frame[FRAME.token : FRAME.token + 32] = range(32)
    program.run(logits=False)
    assert torch.equal(into[:32], packed.rows(list(range(32))))


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_that_is_none_of_the_models_feeds_nothing(token):
    model = native(module("llama"), "int8")
    cache = model.new_cache(8)
    with pytest.raises(UsageError, match="another tokenizer"):
        model.prefill(cache, [1, token])
    assert cache.length == 0
