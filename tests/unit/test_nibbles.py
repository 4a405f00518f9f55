"""Weights of four bits: the numbers of the file that they come from, and exact sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider import Engine
from outrider.core.proposal import Proposal
from outrider.models.adapter import Adapter, Change, Merging
from outrider.models.locate import Located
from outrider.models.memory import INT4
from outrider.models.native.architecture import Architecture
from outrider.models.native.emit import LANES
from outrider.models.native.kernels import FRAME, MAX_ROWS, hand_heads
from outrider.models.native.load import _pack, dtype_for
from outrider.models.native.recorder import Program, Steps
from outrider.models.native.source import GgufSource, nibbles_of
from outrider.models.native.weights import INPUT_STEP, Linear, Nibbles, in_turns, pack, pack_nibbles
from tests.small_models import new_module
from tests.unit.test_memory import write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

OUTPUTS, INPUTS = 5 * LANES, 3 * INPUT_STEP
HALF = INPUT_STEP // 2


def some(seed: int = 0, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Nibbles:
    chance = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (outputs, inputs), generator=chance).to(torch.uint8)
    scales = torch.rand(outputs, inputs // HALF, generator=chance).half().float()
    least = torch.randn(outputs, inputs // HALF, generator=chance).half().float()
    return Nibbles(q, scales, least)


def values_of(made: Nibbles) -> Tensor:
    """The weights themselves, float64."""
    wide = (part.double().repeat_interleave(HALF, 1) for part in (made.scales, made.least))
    scales, least = wide
    return made.q.double() * scales + least


def product(packed: Linear, rows: Tensor) -> Tensor:
    """Rows times the matrix, by the compiled steps."""
    width = packed.padded_inputs
    ops = Steps("int8", width, 1e-5)
    x, out = ops.buffer(width), ops.buffer(packed.padded_outputs)
    x[: len(rows), : rows.shape[1]] = rows
    ops._step(hand_heads, x.data_ptr(), width, 1, width, width, *ops._into(width))
    ops._linear(ops.rows, packed, out.data_ptr())
    program = Program(ops.steps, len(ops.steps), ops.frame, x, ops.held)
    program.frame[FRAME.rows] = len(rows)
    program.run(logits=False)
    return out[: len(rows), : packed.outputs].clone()


# ---- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0, 15, "both"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, MAX_ROWS])
def test_sums_are_exact_at_the_extremes(q, count):
    """The largest that there are: a sum that was cut off anywhere would show."""
    chance = torch.Generator().manual_seed(count)
    digits = torch.full((OUTPUTS, INPUTS), 0 if q == "both" else q, dtype=torch.uint8)
    if q == "both":
        digits[torch.rand(OUTPUTS, INPUTS, generator=chance) < 0.5] = 15
    halves = OUTPUTS, INPUTS // HALF
    packed = pack_nibbles(Nibbles(digits, torch.ones(halves), torch.zeros(halves)), None)
    rows = torch.where(torch.rand(count, INPUTS, generator=chance) < 0.5, -127.0, 127.0)
    rows[0], rows[-1] = 127.0, -127.0
    assert torch.equal(product(packed, rows).double(), rows.double() @ digits.double().T)


@pytest.mark.parametrize("inputs", [HALF, INPUT_STEP, INPUT_STEP + HALF, INPUTS])
def test_with_scales_least_values_and_a_bias_it_is_the_product(inputs):
    made, chance = some(1, inputs=inputs), torch.Generator().manual_seed(2)
    bias = torch.randn(OUTPUTS, generator=chance)
    rows = 3 * torch.randn(11, inputs, generator=chance)
    padded = torch.nn.functional.pad(rows, (0, -inputs % INPUT_STEP))
    blocks = padded.unflatten(1, (-1, INPUT_STEP))
    unit = blocks.abs().amax(-1, keepdim=True) / 127
    fed = ((blocks / unit).round() * unit).flatten(1)[:, :inputs].double()
    weights = values_of(made)
    expected = fed @ weights.T + bias
    size = fed.abs() @ weights.abs().T + bias.abs()
    # A value halfway between two units may be rounded either way.
    error = (product(pack_nibbles(made, bias), rows) - expected).abs()
    assert float((error / size).max()) < 1e-5


@pytest.mark.parametrize("count", range(1, 17))
def test_a_row_is_the_same_in_any_company(count):
    packed = pack_nibbles(some(3), None)
    rows = torch.randn(MAX_ROWS, INPUTS, generator=torch.Generator().manual_seed(4))
    assert torch.equal(product(packed, rows[:count]), product(packed, rows)[:count])


# ---- how weights become four bits ----------------------------------------------------------------


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=HALF, max_size=HALF),
    size=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_the_nearest_of_sixteen(values, size):
    weight = size * torch.tensor([values])
    made = Nibbles.nearest(weight)
    assert int(made.q.max()) <= 15
    step = float((weight.max() - weight.min()) / 15)
    # Half a step, and what float16 rounds off the least value and sixteen steps.
    margin = 0.51 * step + 2e-3 * float(weight.abs().max()) + 1e-6
    assert float((values_of(made) - weight).abs().max()) <= margin


def test_packing_by_kind_goes_through_the_nearest():
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5))
    packed, direct = pack(weight, None, "int4"), pack_nibbles(Nibbles.nearest(weight), None)
    assert packed.kind == "int4"
    assert torch.equal(packed.weight, direct.weight)
    assert (packed.padded_inputs, packed.padded_outputs) == (INPUTS, 6 * LANES)


# ---- out of a file -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size", "weights"), [("Q4_0", 18, 32), ("Q4_1", 20, 32), ("Q4_K", 144, 256)]
)
def test_a_files_four_bits_are_taken_as_they_are(kind, size, weights):
    chance = np.random.default_rng(6)
    blocks = chance.integers(0, 256, (7, 3, size), dtype=np.uint8)
    for at in (0, 2)[: 1 + (kind != "Q4_0")]:  # scales, and not just any bits
        numbers = chance.standard_normal((7, 3, 1)).astype(np.float16)
        blocks[..., at : at + 2] = numbers.view(np.uint8)
    data = blocks.reshape(7, -1)
    made = nibbles_of(data, kind)
    expected = dequantize(data, GGMLQuantizationType[kind])
    assert expected.shape == (7, 3 * weights)
    np.testing.assert_allclose(values_of(made).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q5_0", "F16", "F32"])
def test_others_are_left_alone(kind):
    assert nibbles_of(np.zeros((2, 64), np.uint8), kind) is None


class _File(GgufSource):
    """A file whose queries and keys of the first layer have four bits, and whose rows have an order
    of its own."""

    def __init__(self, module) -> None:
        self.config, self._interleaved = module.config, True
        self._tensors = {}
        self._known = module.state_dict()
        d = module.config.hidden_size
        self._made = {"q": some(7, d, d), "k": some(8, d // 2, d), "v": some(9, d // 2, d)}

    def read(self, name):
        return self._known.get(name)

    def nibbles(self, name):
        part = name.removeprefix("model.layers.0.self_attn.").removesuffix("_proj.weight")
        return self._made.get(part)


def test_a_matrix_of_which_all_parts_have_four_bits_keeps_them():
    module = new_module("llama", hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    source = _File(module)
    weights = _pack(Merging(source.read, None), Architecture.of(module.config), source, "int4")
    first, second = weights.layers
    kinds = [w.kind for w in (first.qkv, first.o, first.gate_up, first.down, second.qkv)]
    assert kinds == ["int4", "int8", "int8", "int8", "int8"]
    assert (weights.kind, weights.head.kind) == ("int4", "int8")
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(10))
    parts = torch.cat(
        [product(pack_nibbles(made, None), rows) for made in source._made.values()], 1
    )
    assert torch.equal(product(first.qkv, rows), parts)


@pytest.mark.parametrize("width", [20, 64, 100, 128])
def test_gates_and_what_they_let_through_come_in_turns(width):
    gate, up = torch.arange(1.0, width + 1), -torch.arange(1.0, width + 1)
    for more in ((), (3,)):  # a bias, and a matrix
        both = torch.cat([gate, up]).view(-1, *(1 for _ in more)).expand(-1, *more)
        turns = in_turns(both).view(-1, 2, INPUT_STEP, *more)
        for side, values in enumerate((gate, up)):
            found = turns[:, side].flatten(0, 1).reshape(len(turns) * INPUT_STEP, -1)[:, 0]
            assert torch.equal(found[:width], values)
            assert not found[width:].any()


def test_what_an_adapter_changes_has_eight():
    module = new_module("llama", hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    source, name = _File(module), "model.layers.0.self_attn.v_proj.weight"
    adapter = Adapter(Path(), {name: Change(torch.ones(1, 32), torch.ones(16, 1), 0.1)})
    weights = _pack(Merging(source.read, adapter), Architecture.of(module.config), source, "int4")
    assert weights.kind == "int8"


@pytest.mark.parametrize(
    ("kind", "own"), [("Q4_0", INT4), ("Q4_1", INT4), ("Q8_0", torch.int8), ("Q5_1", torch.int8)]
)
def test_a_file_keeps_its_four_bits_unless_something_else_is_asked_for(kind, own, tmp_path):
    located = write_gguf(tmp_path / "some.gguf", kind=kind)
    assert dtype_for(located) == own
    assert dtype_for(located, torch.bfloat16) == torch.bfloat16
    assert dtype_for(located, torch.int8) == torch.int8


def test_weights_of_a_folder_become_int8(tmp_path):
    assert dtype_for(Located("folder", "some", path=tmp_path)) == torch.int8


@pytest.mark.model
class TestTheDefaultModel:
    def test_it_keeps_its_four_bits(self, smollm):
        assert (smollm.model.kind, smollm.fingerprint().precision) == ("int4", "int4")

    def test_its_matrices_are_those_of_its_file(self, smollm):
        source = GgufSource(smollm.located.path)
        for layer in (0, 17):
            for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
                name = f"model.layers.{layer}.{part}.weight"
                found, expected = values_of(source.nibbles(name)), source.read(name)
                torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-7)
        assert source.nibbles("model.embed_tokens.weight") is None
        source.close()

    def test_its_numbers_are_nearer_to_the_files_than_those_of_eight_bits(self, smollm):
        ids = smollm.encode("The quick brown fox jumps over the lazy dog. In 1998, a small company")

        def logits(kind: str) -> Tensor:
            model = Engine.load("smollm2-135m", dtype=kind, drafter="none").model
            assert model.kind == kind
            return model.score(model.new_cache(len(ids)), ids[:1], Proposal.chain(ids[1:]))

        meant = logits("float32").log_softmax(-1)
        off = {
            kind: float((meant.exp() * (meant - logits(kind).log_softmax(-1))).sum(-1).mean())
            for kind in ("int4", "int8")
        }
        assert off["int4"] < min(0.03, off["int8"])
