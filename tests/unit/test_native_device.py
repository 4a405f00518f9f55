"""The native runtime as it is on a GPU: the same passes on the CPU, and captured where one is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from outrider import Engine
from outrider.core.proposal import Proposal
from outrider.drafters.early_exit import EarlyExitDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.script import ScriptDrafter
from outrider.drafters.shape import parse_shape
from outrider.engine.loading import runtime_for
from outrider.errors import ModelError, NotEnoughMemoryError, ProposalError
from outrider.models import memory
from outrider.models.locate import locate
from outrider.models.native import device as native_device
from outrider.models.native import load as loading
from outrider.models.native.device import KEY_STEP, MAX_ROWS, DeviceCache, DeviceModel
from outrider.models.native.eager import DEPTH
from outrider.models.native.graphs import Captured
from outrider.models.numerics import check_numbers
from tests.small_models import (
    VOCAB,
    garbage,
    new_module,
    on_device,
    partly_right,
    randomise,
    save,
    some_tokens,
)
from tests.unit.test_native import BUSHY, CASES, LONG, PROMPT, REQUESTS, WIDE, module

pytestmark = pytest.mark.usefixtures("one_thread")

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", "taped", pytest.param("cuda", marks=GPU)]


class Tape(TorchDispatchMode):
    """What was done to tensors, to be done again: what a captured pass amounts to.

    Whatever the pass read from anywhere but its buffers is frozen in it, as it would be there.
    """

    ASKS = (
        *("item", "is_nonzero", "_local_scalar_dense", "nonzero", "equal", "masked_select"),
        *("index", "lift_fresh"),  # with a mask; a number made into a tensor
    )

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        with self:
            step()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.ASKS, f"{name} would ask the device for a value"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        now: dict[int, Any] = {}

        def moved(value: Any) -> Any:
            return now.get(id(value), value)

        for func, args, kwargs, made in self.calls:
            again = func(*tree_map(moved, args), **tree_map(moved, kwargs))
            for before, after in zip(tree_leaves(made), tree_leaves(again), strict=True):
                now[id(before)] = after


class Tapes:
    """``Graphs`` that can be had on a CPU."""

    def run(self, held: Captured, key: Hashable, step: Callable[[], None]) -> None:
        if key not in held:
            held[key] = Tape(step)
        held[key].replay()


def made_on(device: str, case: str, dtype: torch.dtype = torch.float32) -> DeviceModel:
    made = on_device(module(case), "cuda" if device == "cuda" else "cpu", dtype)
    if device == "taped":
        made._graphs = Tapes()
    return made


@cache
def model(case: str = "llama", device: str = "cpu") -> DeviceModel:
    return made_on(device, case)


def in_blocks(model: DeviceModel, text: list[int], width: int) -> torch.Tensor:
    """Logits after each token of a text that is fed so many tokens a pass."""
    cache, rows = model.new_cache(len(text)), []
    for start in range(0, len(text), width):
        fed = text[start : start + width]
        rows.append(model.score(cache, fed[:1], Proposal.chain(fed[1:])).cpu())
    return torch.cat(rows)


def prefilled(model: DeviceModel, text: list[int], room: int = 100) -> DeviceCache:
    cache = model.new_cache(len(text) + room)
    model.prefill(cache, text)
    return cache


def expected_rows(case: str, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return module(case)(torch.tensor([text])).logits[0]


def near(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-3) -> None:
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=0, atol=atol)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
class TestAgainstTransformers:
    TEXT = some_tokens(150, seed=1)

    def test_blocks(self, case, device):
        expected = expected_rows(case, self.TEXT)
        for width in (1, 5, 13, MAX_ROWS):
            near(in_blocks(model(case, device), self.TEXT, width), expected)

    def test_a_prefill_of_several_chunks(self, case, device):
        made = model(case, device)
        cache = prefilled(made, LONG[:-1])
        near(made.score(cache, LONG[-1:], Proposal()), expected_rows(case, LONG)[-1:])

    def test_paths_of_a_tree(self, case, device):
        made = model(case, device)
        for done in (1, 7, 60):
            text = self.TEXT[:done]
            rows = made.score(prefilled(made, text[:-1]), text[-1:], BUSHY)
            for node in range(len(BUSHY)):
                path = [*text, *BUSHY.path_tokens(node)]
                near(rows[1 + node], expected_rows(case, path)[-1])

    def test_after_an_accepted_path_it_goes_on_as_if_fresh(self, case, device):
        made = model(case, device)
        for done, shape, node in ((1, BUSHY, 13), (50, BUSHY, 1), (50, BUSHY, -1), (500, WIDE, 55)):
            text = LONG[:done]
            cache = prefilled(made, text[:-1])
            made.score(cache, text[-1:], shape)
            cache.keep(done, shape.path(node))
            now = [*text, *shape.path_tokens(node)]
            assert cache.length == len(now)
            # The cache itself is what a prefill writes.
            fresh = prefilled(made, now)
            held = (each.room.kept[..., : len(now), :] for each in (cache, fresh))
            near(*held, atol=1e-4)
            rows = made.score(cache, [5], Proposal.chain(LONG[100:109]))
            near(rows, expected_rows(case, [*now, 5, *LONG[100:109]])[-10:])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["llama, tied and biased", "mistral", "qwen3"])
def test_narrow_weights_stay_near(case, dtype, device):
    made = made_on(device, case, dtype)
    assert made.kind == str(dtype).removeprefix("torch.")
    found = in_blocks(made, LONG[:100], 16)
    assert found.dtype is torch.float32
    alike = torch.nn.functional.cosine_similarity(found, expected_rows(case, LONG[:100]), dim=-1)
    assert float(alike.min()) > 0.99


def test_rows_that_are_no_tokens_are_left_out():
    made = on_device(module("odd sizes"), vocab_size=VOCAB)
    rows = in_blocks(made, LONG[:5], 5)
    assert rows.shape == (5, VOCAB)
    near(rows, in_blocks(model("odd sizes"), LONG[:5], 5)[:, :VOCAB], atol=0)


def test_a_tied_head_is_the_embedding():
    assert model("llama, tied and biased").weights.embedding is None


@pytest.mark.parametrize("device", DEVICES)
class TestPasses:
    def test_a_chain_longer_than_a_pass(self, device):
        made = model("llama", device)
        for nodes in (MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 40):
            cache = prefilled(made, LONG[:20], 2 * nodes)
            rows = made.score(cache, LONG[20:21], Proposal.chain(LONG[21 : 21 + nodes]))
            near(rows, expected_rows("llama", LONG[: 21 + nodes])[20:])

    def test_a_tree_of_more_nodes_than_a_pass(self, device):
        parents = (*(-1,) * 50, *range(50))
        shape = Proposal(tuple(3 + i % 50 for i in range(100)), parents, (None,) * 100)
        made = model("mistral", device)
        rows = made.score(prefilled(made, LONG[:20]), LONG[20:21], shape)
        for node in (0, 49, 50, 99):
            path = [*LONG[:21], *shape.path_tokens(node)]
            near(rows[1 + node], expected_rows("mistral", path)[-1])

    def test_more_pending_tokens_than_a_pass(self, device):
        made = model("llama", device)
        rows = made.score(made.new_cache(300), LONG[:200], Proposal.chain(LONG[200:210]))
        near(rows, expected_rows("llama", LONG[:210])[199:])

    def test_progress_is_told(self, device):
        told: list[tuple[int, int]] = []
        made = model("llama", device)
        made.prefill(made.new_cache(600), LONG, lambda done, of: told.append((done, of)))
        assert told == [(512, 600), (600, 600)]

    def test_what_one_pass_left_is_not_in_the_next(self, device):
        made = made_on(device, "llama")
        alone = in_blocks(made, LONG[:9], 9)
        made.score(prefilled(made, LONG[:300]), [5], WIDE)
        near(in_blocks(made, LONG[:9], 9), alone, atol=0)

    @pytest.mark.parametrize("value", [torch.nan, 1e4])
    def test_padding_rows_and_stale_slots_are_not_seen(self, device, value):
        made = model("mistral", device)
        for text in (LONG[:30], LONG[:530]):
            clean, spoilt = prefilled(made, text), prefilled(made, text)
            # Nobody sees the spare slot, whatever is in it. Slots behind the text are masked:
            # numbers there make no difference.
            spoilt.room.kept[..., -1, :] = value
            if value == value:
                spoilt.room.kept[..., len(text) + 4 :, :] = value
            rows = [made.score(each, [5], Proposal.chain([6, 7])) for each in (clean, spoilt)]
            near(*rows, atol=0)

    def test_hidden_states_are_set_aside(self, device):
        made = model("llama", device)
        cache = made.new_cache(100, taps=(1, 0))
        made.prefill(cache, LONG[:20])
        made.score(cache, LONG[20:21], BUSHY)
        cache.keep(21, BUSHY.path(13))
        text = [*LONG[:21], *BUSHY.path_tokens(13)]
        with torch.no_grad():
            layers = module("llama").model.layers
            seen: dict[int, torch.Tensor] = {}
            hooks = [
                layer.register_forward_hook(lambda _, __, out, i=i: seen.update({i: out[0]}))
                for i, layer in enumerate(layers)
            ]
            module("llama")(torch.tensor([text]))
            for hook in hooks:
                hook.remove()
        near(cache.hidden.first(len(text)), torch.cat([seen[1], seen[0]], -1))


def test_a_tree_that_is_too_deep():
    parents = (*range(-1, DEPTH), -1)
    shape = Proposal((*(3 + i % 50 for i in range(DEPTH + 1)), 60), parents, (None,) * len(parents))
    with pytest.raises(ProposalError, match=f"at most {DEPTH}"):
        model().score(model().new_cache(200), [5], shape)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3"])
def test_numbers_in_company(case, device):
    """Across the length at which attention covers more keys, too."""
    made = made_on(device, case)
    if made.row_step is None and device == "cpu":
        pytest.skip("this machine's matrix kernels treat rows differently in every block")
    for text in (LONG[:97], some_tokens(1030, seed=5)):
        found = check_numbers(made, text)
        assert found.same_bits, found


class TestMemory:
    def test_beyond_the_capacity_is_an_error_that_changes_nothing(self):
        made = model()
        cache = prefilled(made, LONG[:20], room=10)
        for tokens, draft in ((LONG[:75], []), (LONG[:1], LONG[:74]), (LONG[:600], [])):
            with pytest.raises(ModelError, match="was made for 30 tokens") as caught:
                made.score(cache, tokens, Proposal.chain(draft))
            assert "capacity" in caught.value.hint
            assert cache.length == 20
        with pytest.raises(ModelError, match="was made for 30 tokens"):
            made.prefill(cache, LONG)
        near(made.score(cache, [5], Proposal()), expected_rows("llama", [*LONG[:20], 5])[-1:])

    def test_a_draft_may_go_beyond(self):
        cache = prefilled(model(), LONG[:20], room=1)
        assert len(model().score(cache, [5], Proposal.chain(LONG[: MAX_ROWS - 1]))) == MAX_ROWS

    def test_it_is_asked_for_before_it_is_taken(self, monkeypatch):
        made = made_on("cpu", "llama")
        monkeypatch.setattr(native_device, "free_bytes", lambda device: 1000)
        monkeypatch.setattr(torch, "zeros", None)  # what would take it
        with pytest.raises(NotEnoughMemoryError, match=r"needs .* MB to hold 500 tokens"):
            made.new_cache(500)

    def test_its_size_is_what_was_stated(self):
        made = made_on("cpu", "llama")
        a = made.architecture
        one = 2 * a.layers * a.kv_heads * a.head_dim * 4
        for capacity, slots in ((1, 512), (448, 512), (449, 1024), (1024, 1536), (3000, 3072)):
            # Doubled, but to no more than the context needs.
            assert made.new_cache(capacity).bytes == one * (slots + 1), capacity
            made._free.clear()

    def test_a_room_is_taken_over_empty(self):
        made = made_on("taped", "llama")
        cache = prefilled(made, LONG[:30])
        room = cache.room
        room.kept.fill_(torch.nan)
        assert not made._free
        del cache
        gc.collect()
        assert made._free == [room]
        again = prefilled(made, LONG[:30])
        assert again.room is room
        assert room.captured
        near(made.score(again, [5], Proposal()), expected_rows("llama", [*LONG[:30], 5])[-1:])
        assert made.new_cache(10).room is not room

    def test_rooms_that_nobody_uses_make_way(self, monkeypatch):
        made = made_on("cpu", "llama")
        made.new_cache(10)
        gc.collect()
        assert len(made._free) == 1
        monkeypatch.setattr(
            native_device, "free_bytes", lambda device: 0 if made._free else 1 << 40
        )
        cache = made.new_cache(600)
        assert cache.room.size == 2 * KEY_STEP
        assert not made._free


@pytest.fixture
def folder(tmp_path):
    return save(module("llama"), tmp_path / "model")


class TestLoading:
    @pytest.mark.parametrize("dtype", loading.DEVICE_DTYPES)
    @pytest.mark.parametrize("device", ["cuda", "cuda:1"])
    def test_it_takes_a_model_on_another_device(self, folder, dtype, device):
        assert runtime_for(locate(str(folder)), dtype, device)[0] == "native"

    @pytest.mark.parametrize("family", ["gpt2", "gemma3"])
    def test_other_families_go_to_transformers_there_too(self, tmp_path, family):
        other = save(new_module(family), tmp_path / family)
        runtime, why = runtime_for(locate(str(other)), device="cuda")
        assert runtime == "hf"
        assert "family" in why

    def test_it_is_the_model_that_was_saved(self, folder):
        made, words, ends = loading._on_device(locate(str(folder)), torch.float32, "cpu")
        near(in_blocks(made(), LONG[:40], 8), in_blocks(model(), LONG[:40], 8), atol=0)
        assert words.encode("w5 w9", add_special_tokens=False) == [5, 9]
        assert ends == [2]

    def test_memory_is_asked_before_weights_are_read(self, folder, monkeypatch):
        monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
        monkeypatch.setattr(loading, "_unpack", None)
        with pytest.raises(NotEnoughMemoryError, match=r"needs about .* GB"):
            loading._on_device(locate(str(folder)), torch.float32, "cpu")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_device_that_is_not_here(self, folder):
        with pytest.raises(ModelError, match="moved to the device 'cuda'") as caught:
            loading.load(locate(str(folder)), device="cuda")
        assert "--device" in caught.value.hint

    @GPU
    def test_on_the_gpu(self, folder):
        engine = Engine.load(str(folder), device="cuda", dtype="float32", drafter="none")
        assert isinstance(engine.model, DeviceModel)
        near(in_blocks(engine.model, LONG[:40], 8), in_blocks(model(), LONG[:40], 8))
        assert engine.model._graphs is not engine.model._direct


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("device", DEVICES)
def test_whatever_drafts_the_output_is_the_plain_one(device, request_):
    made, options = model("llama", device), {"max_tokens": 40} | REQUESTS[request_]
    plain = Engine(made, drafter="none").generate(PROMPT, **options).token_ids
    assert len(set(plain)) > 3
    draft = model("qwen2", device)
    drafters = {
        "ngram": NgramDrafter(3, 1),
        "garbage": ScriptDrafter(garbage),
        "right": ScriptDrafter(plain),
        "partly": partly_right(plain, len(PROMPT)),
        "itself": ModelDrafter(made),
        "tree": ModelDrafter(draft, shape=parse_shape("tree=3,2")),
        "growing tree": ModelDrafter(draft, shape=parse_shape("tree=24")),
        "first layer": EarlyExitDrafter(made, (0,)),
    }
    for name, drafter in drafters.items():
        output = Engine(made, drafter=drafter).generate(PROMPT, draft_length=5, **options)
        assert output.token_ids == plain, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_greedy_ids_are_those_of_transformers(case, device):
    ids = torch.tensor([PROMPT])
    expected = module(case).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False,
        eos_token_id=None,
    )  # fmt: skip
    engine = Engine(model(case, device), drafter="ngram")
    found = engine.generate(PROMPT, max_tokens=30, ignore_eos=True).token_ids
    assert found == expected[0, len(PROMPT) :].tolist()


@GPU
class TestCapture:
    def test_a_pass_is_captured_once_for_a_width_and_a_number_of_keys(self):
        made = made_on("cuda", "llama")
        cache = prefilled(made, LONG[:40], room=1000)
        for draft in (1, 3, 7, 7):
            made.score(cache, [5], Proposal.chain(LONG[:draft]))
            cache.rollback(40)
        captured = dict(cache.room.captured)
        made.prefill(cache, LONG[:500])
        made.score(cache, [5], Proposal())
        assert all(cache.room.captured[key] is graph for key, graph in captured.items())
        assert len(cache.room.captured) > len(captured)

    def test_replays_are_the_passes_themselves(self):
        captured, direct = made_on("cuda", "mistral"), made_on("cuda", "mistral")
        direct._graphs = direct._direct
        for width in (1, 5, 13, MAX_ROWS):
            near(
                in_blocks(captured, LONG, width),
                in_blocks(direct, LONG, width),
                atol=0,
            )

    def test_two_models_take_turns(self):
        one, other = made_on("cuda", "llama"), made_on("cuda", "qwen3")
        caches = one.new_cache(100), other.new_cache(100)
        for at in range(20):
            for case, made, held in zip(("llama", "qwen3"), (one, other), caches, strict=True):
                rows = made.score(held, LONG[at : at + 1], Proposal())
                near(rows, expected_rows(case, LONG[: at + 1])[-1:])


def test_a_tape_replays_what_it_saw():
    """What the tests on tapes rely on: results are those of the buffers as they are now."""
    held: Captured = {}
    x, out = torch.ones(3), torch.zeros(3)

    def step() -> None:
        y = x + 1
        y[1].fill_(5.0)
        out.copy_(y * 2)

    with torch.inference_mode():
        for value in (1.0, 7.0):
            x.fill_(value)
            Tapes().run(held, "key", step)
            assert out.tolist() == [2 * value + 2, 10.0, 2 * value + 2]
        with pytest.raises(AssertionError, match="would ask the device"):
            Tape(lambda: x.sum().item())  # type: ignore[arg-type, return-value]


def test_randomised_weights_reach_every_part():
    """A bias or a norm that was left out would show: none is at its neutral value."""
    made = on_device(randomise(new_module("qwen2")))
    assert made.weights.layers[0].qkv.bias.abs().min() > 0
