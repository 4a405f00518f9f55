from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

from outrider import Engine
from outrider.core.proposal import Proposal
from outrider.errors import RollbackError
from outrider.models import hf_cache
from outrider.models.hf import HFModel
from outrider.models.hf_cache import GrowingLayer, HFCache, continues_from_state, rollback_of
from tests.small_models import PLAIN, RECURRENT, WINDOWED, module, new_module, shared, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = some_tokens(60)


def rows(count: int, first: float = 0.0) -> torch.Tensor:
    """Keys or values that number their positions."""
    return (first + torch.arange(count, dtype=torch.float32))[None, None, :, None].expand(
        1, 2, -1, 4
    )


class TestGrowingLayer:
    @pytest.fixture
    def layer(self):
        return GrowingLayer(lambda length: length)

    def test_shows_what_it_was_given(self, layer):
        layer.update(rows(3), -rows(3))
        keys, values = layer.update(rows(2, 3.0), -rows(2, 3.0))
        assert torch.equal(keys, rows(5))
        assert torch.equal(values, -rows(5))
        assert layer.get_seq_length() == 5
        assert layer.get_mask_sizes(4) == (9, 0)

    def test_rows_are_written_in_place(self, layer):
        layer.update(rows(3), rows(3))
        before = layer.keys.data_ptr()
        layer.update(rows(500, 3.0), rows(500, 3.0))
        assert layer.keys.data_ptr() == before

    @pytest.mark.parametrize("length", [511, 512, 513, 1024, 1500])
    def test_growing_keeps_what_is_there(self, layer, length):
        for start in range(0, length, 100):
            count = min(100, length - start)
            keys, values = layer.update(rows(count, start), -rows(count, start))
        assert torch.equal(keys, rows(length))
        assert torch.equal(values, -rows(length))
        assert layer.keys.shape[-2] % 512 == 0

    def test_taken_back_rows_are_overwritten(self, layer):
        layer.update(rows(6), rows(6))
        layer.crop(-4)
        assert layer.get_seq_length() == 2
        keys, _ = layer.update(rows(1, 9.0), rows(1, 9.0))
        assert keys[0, 0, :, 0].tolist() == [0.0, 1.0, 9.0]

    def test_more_keys_than_there_are_can_be_shown(self):
        layer = GrowingLayer(lambda length: 512)
        keys, values = layer.update(rows(3), rows(3))
        assert keys.shape[-2] == values.shape[-2] == 512
        assert not keys[..., 3:, :].any()  # zeros: a masked NaN would still spoil a sum
        assert layer.get_mask_sizes(1) == (512, 0)

    def test_a_copy_shares_the_buffer_and_has_a_length_of_its_own(self, layer):
        import copy

        layer.update(rows(3), rows(3))
        saved = copy.deepcopy(layer)
        layer.update(rows(2, 7.0), rows(2, 7.0))
        assert saved.keys.data_ptr() == layer.keys.data_ptr()
        keys, _ = saved.update(rows(1, 3.0), rows(1, 3.0))
        assert torch.equal(keys, rows(4))


class TestRollbackOf:
    @pytest.mark.parametrize("family", [*PLAIN, *WINDOWED])
    def test_attention_goes_back_by_length(self, family):
        assert rollback_of(module(family).config) == "length"

    @pytest.mark.parametrize("family", RECURRENT)
    def test_recurrent_states_go_back_by_snapshots(self, family):
        assert rollback_of(module(family).config) == "snapshot"

    def test_any_unknown_layer_means_none(self, monkeypatch):
        """Even beside layers that are known."""
        layers = [hf_cache.DynamicLayer(), DynamicIndexedLayer()]
        monkeypatch.setattr(hf_cache, "_layers", lambda config: layers)
        assert rollback_of(module("llama").config) == "none"


@pytest.fixture
def unknown(monkeypatch) -> HFModel:
    """A model that works, with a kind of cache that this package has not heard of."""

    class OddLayer(hf_cache.DynamicLayer):
        def crop(self, tokens_to_remove: int) -> None:
            raise AssertionError("rows were taken back")

    def cache(config=None):
        made = DynamicCache(config=config)
        made.layers = [OddLayer() for _ in made.layers]
        return made

    monkeypatch.setattr(hf_cache, "DynamicCache", cache)
    return HFModel(new_module("llama"))


class TestUnknownCache:
    def test_a_drafter_is_refused_before_the_first_token(self, unknown):
        assert unknown.rollback == "none"
        with pytest.raises(RollbackError, match=r"cannot take rejected drafts back.*drafter none"):
            Engine(unknown, drafter="ngram")
        with pytest.raises(RollbackError):
            Engine(unknown, drafter="none").stream(TEXT, drafter="ngram")

    def test_plain_decoding_works(self, unknown):
        expected = Engine(shared("llama"), drafter="none").generate(TEXT, max_tokens=12)
        assert Engine(unknown, drafter="none").generate(TEXT, max_tokens=12).token_ids == (
            expected.token_ids
        )

    def test_the_cache_itself_refuses_too(self, unknown):
        cache = unknown.new_cache(20)
        unknown.prefill(cache, TEXT[:5])
        cache.rollback(5)
        with pytest.raises(RollbackError):
            cache.rollback(4)


class TestRollback:
    @pytest.mark.parametrize("family", ["mistral", "falcon-h1"])
    def test_a_path_that_is_no_chain_is_refused(self, family):
        model = shared(family)
        cache = model.new_cache(20)
        model.score(cache, TEXT[:3], Proposal.chain(TEXT[3:6]))
        with pytest.raises(RollbackError, match="chains only"):
            cache.keep(3, [1])

    def test_a_path_through_a_tree_is_moved_up(self):
        model = shared("llama")
        cache = model.new_cache(20)
        model.score(cache, TEXT[:3], Proposal((5, 6, 7, 8), (-1, -1, 1, 2), (None,) * 4))
        held = [layer.keys[..., [0, 1, 2, 4, 6], :].clone() for layer in cache.layers.layers]
        cache.keep(3, [1, 3])
        assert cache.length == 5
        for layer, expected in zip(cache.layers.layers, held, strict=True):
            assert torch.equal(layer.keys[..., :5, :], expected)

    def test_sliding_window_beyond_what_it_still_holds(self):
        model = shared("mistral")
        cache = model.new_cache(60)
        model.prefill(cache, TEXT[:30])
        cache.rollback(20)
        assert cache.length == 0  # to be fed again: what left the window is gone

    def test_snapshot_goes_back_to_before_the_draft(self):
        model = shared("falcon-h1")
        cache = model.new_cache(60)
        model.prefill(cache, TEXT[:10])
        model.score(cache, TEXT[10:12], Proposal.chain(TEXT[12:17]))
        cache.keep(12, [0, 1])
        assert cache.length == 10
        cache.rollback(10)
        assert cache.length == 10

    def test_snapshot_is_not_needed_when_all_is_kept(self):
        model = shared("falcon-h1")
        cache = model.new_cache(60)
        model.score(cache, TEXT[:12], Proposal.chain(TEXT[12:17]))
        cache.keep(12, range(5))
        assert cache.length == 17

    def test_without_a_snapshot_everything_is_fed_again(self):
        model = shared("falcon-h1")
        cache = model.new_cache(60)
        model.prefill(cache, TEXT[:10])
        cache.rollback(9)
        assert cache.length == 0

    def test_a_snapshot_does_not_copy_keys_and_values(self):
        model = shared("lfm2")
        cache = model.new_cache(60)
        model.prefill(cache, TEXT[:10])
        before = [layer.keys.data_ptr() for layer in cache.layers.layers if hasattr(layer, "keys")]
        cache.save()
        saved = [layer.keys.data_ptr() for layer in cache._saved[1] if hasattr(layer, "keys")]
        assert before == saved
        assert before

    def test_dense_models_save_nothing(self):
        model = shared("llama")
        cache = model.new_cache(60)
        model.score(cache, TEXT[:12], Proposal.chain(TEXT[12:17]))
        assert cache._saved is None


def test_bytes_are_those_of_the_buffers():
    model = shared("llama")
    cache = model.new_cache(60)
    assert cache.bytes == 0
    model.prefill(cache, TEXT[:10])
    config = model.config
    rows_held = 512 * config.num_key_value_heads * config.head_dim * 4
    assert cache.bytes == 2 * config.num_hidden_layers * rows_held


@pytest.mark.parametrize("family", RECURRENT)
def test_passes_that_begin_anew_are_found_out(family):
    """transformers' mamba ignores its state when it is fed more than one token."""
    made = module(family)
    tokens = torch.tensor([TEXT[:12]])
    with torch.no_grad():
        whole = made(tokens).logits
        cache = DynamicCache(config=made.config)
        made(tokens[:, :6], cache=cache, use_cache=True)
        split = made(tokens[:, 6:], cache=cache, use_cache=True).logits
    continues = torch.allclose(split, whole[:, 6:], atol=1e-3)
    assert continues_from_state(made) == continues
    assert shared(family)._continues == continues


def test_layers_of_a_fresh_cache_grow_in_place():
    cache = HFCache(module("llama").config)
    assert cache.is_plain
    assert all(type(layer) is GrowingLayer for layer in cache.layers.layers)
    assert not HFCache(module("mistral").config).is_plain
