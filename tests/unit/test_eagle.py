"""EAGLE-3 heads: the same numbers in each runtime, exact drafts, hidden states in the cache."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from outrider import Engine
from outrider.core.chooser import SeededChooser
from outrider.core.processors import Sampling
from outrider.core.proposal import Proposal
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.shape import Chain, Dynamic, Static
from outrider.errors import ModelFileError, ModelNotFoundError, UsageError
from outrider.models.heads.eagle import EagleConfig, EagleModule, TorchHead
from outrider.models.heads.folder import read_head, write_head
from outrider.models.native.eagle import NativeHead
from outrider.models.toy import ToyModel
from outrider.rules.greedy import Greedy
from tests.small_models import VOCAB, native, new_module, shared, some_tokens
from tests.unit.test_native import module, randomise

TAPS = (0, 1)
TEXT = some_tokens(90, seed=4)
pytestmark = pytest.mark.usefixtures("one_thread")


def head_module(hidden: int = 32, *, draft_vocab: int = 40, seed: int = 0) -> EagleModule:
    config = EagleConfig(
        hidden=hidden, taps=TAPS, heads=4, kv_heads=2, head_dim=8, intermediate=48,
        draft_vocab=draft_vocab, vocab=VOCAB,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = EagleModule(config)
        for p in made.parameters():
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=0.2)
        made.ids.copy_(torch.randperm(VOCAB)[:draft_vocab].sort().values)
    return made


@pytest.fixture(scope="module")
def target():
    return native(module("llama"), "float32")


def test_hidden_states_are_those_of_transformers(target):
    cache = target.new_cache(len(TEXT), TAPS)
    target.prefill(cache, TEXT[:70])
    target.score(cache, TEXT[70:71], Proposal.chain(TEXT[71:]))
    other = shared_like(module("llama"))
    theirs = other.new_cache(len(TEXT), TAPS)
    other.prefill(theirs, TEXT[:40])
    other.score(theirs, TEXT[40:41], Proposal.chain(TEXT[41:]))
    with torch.inference_mode():
        whole = module("llama")(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    expected = whole[1][0]  # what the first layer hands on; the last one's are normed there
    width = target.hidden_size
    for hidden in (cache.hidden, theirs.hidden):
        found = hidden.first(len(TEXT))
        assert found.shape == (len(TEXT), 2 * width)
        torch.testing.assert_close(found[:, :width], expected, atol=1e-3, rtol=1e-3)
    a, b = cache.hidden.first(len(TEXT)), theirs.hidden.first(len(TEXT))
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def shared_like(made):
    from outrider.models.hf import HFModel

    return HFModel(made)


@pytest.mark.parametrize("runtime", ["native", "hf"])
def test_hidden_states_follow_an_accepted_path(runtime, target):
    model = target if runtime == "native" else shared_like(module("llama"))
    cache = model.new_cache(60, TAPS)
    model.prefill(cache, TEXT[:20])
    tree = Proposal((5, 6, 7, 8), (-1, -1, 1, 2), (None,) * 4)
    model.score(cache, TEXT[20:21], tree)
    cache.keep(21, [1, 2, 3])
    fresh = model.new_cache(60, TAPS)
    model.prefill(fresh, [*TEXT[:21], 6, 7, 8])
    torch.testing.assert_close(cache.hidden.first(24), fresh.hidden.first(24), atol=1e-4, rtol=1e-4)
    if runtime == "native":
        assert torch.equal(cache.hidden.first(24), fresh.hidden.first(24))


@pytest.mark.parametrize("name", ["eagle:toy:seed=x", "eagle:toy:vocab=1.5", "medusa:toy:heads=-1"])
def test_a_toy_head_of_nonsense(name):
    with pytest.raises(UsageError, match="whole numbers"):
        Engine.load("toy:vocab=5", drafter=name)


def test_a_layer_that_there_is_not(target):
    with pytest.raises(UsageError, match="layer 7"):
        target.new_cache(10, (0, 7))


@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_native_heads_and_torch_heads_agree(kind, tolerance):
    model = native(module("llama"), kind)
    made = head_module()
    cache = model.new_cache(len(TEXT), TAPS)
    model.prefill(cache, TEXT)
    hidden = cache.hidden.first(len(TEXT) - 1)

    def embed(tokens):
        return model.weights.embed(tokens)[:, :32]

    tree = Proposal((5, 6, 7, 8, 9), (-1, -1, 0, 1, 3), (None,) * 5)
    found = []
    for head in (NativeHead(made, model), TorchHead(made, embed)):
        own = head.new_cache(200)
        head.feed(own, TEXT[1:30], hidden[:29])
        own.rollback(25)
        rows = [head.feed(own, TEXT[26:], hidden[25:])]
        rows.append(head.grow(own, tree, range(2), torch.stack([rows[0][1]] * 2)))
        rows.append(head.grow(own, tree, range(2, 4), rows[1][1]))
        rows.append(head.grow(own, tree, range(4, 5), rows[2][1][1:]))
        found.append(torch.cat([logits.reshape(-1, 40) for logits, _ in rows]))
    torch.testing.assert_close(*found, atol=tolerance, rtol=tolerance)


SHAPES = [Chain(), Static((2, 2)), Dynamic(7, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["int8", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_are_those_of_plain_decoding(shape, kind, temperature):
    model = native(randomise(new_module("llama")), kind)
    head = NativeHead(head_module(), model)
    engine = Engine(model, drafter=EagleDrafter(head, model, shape))
    request = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    plain = engine.generate(TEXT[:9], plain=True, **request)
    ours = engine.generate(TEXT[:9], draft_length=4, **request)
    assert ours.token_ids == plain.token_ids
    assert ours.trace.summary()["drafted_tokens"] > 0


def test_beside_a_transformers_target():
    model = shared("llama")
    engine = Engine(model, drafter=EagleDrafter(model.make_head(head_module()), model, Chain()))
    plain = engine.generate(TEXT[:9], plain=True, max_tokens=20)
    assert engine.generate(TEXT[:9], max_tokens=20).token_ids == plain.token_ids


class Knowing:
    """A head that knows the law of a toy target."""

    taps = (0,)

    def __init__(self, model):
        self.model, self.rows = model, torch.from_numpy(model_rows(model))
        self.ids = torch.arange(model.vocab_size)

    def new_cache(self, capacity):
        return self.model.new_cache(capacity)

    def feed(self, cache, tokens, hidden):
        cache.tokens.extend(tokens)
        return self.rows[tokens[-1]], hidden[-1]

    def grow(self, cache, tree, nodes, states):
        return torch.stack([self.rows[tree.tokens[n]] for n in nodes]), states


def test_a_head_that_copies_its_target_is_always_right():
    """A toy head that knows the target's law: every draft stands, at every depth."""
    model = ToyModel.random(5, 1, order=1)
    for shape in (Chain(), Static((2, 2)), Dynamic(40, 3)):
        engine = Engine(model, drafter=EagleDrafter(Knowing(model), model, shape))
        told = engine.generate([0, 1], max_tokens=24, draft_length=3).trace.summary()
        assert told["tokens_per_target_call"] == 4.0


def model_rows(model):
    import numpy as np

    return np.log(np.stack([model.next((0, token)) for token in range(model.vocab_size)]))


def test_a_tree_at_temperature_zero_holds_the_next_best_too():
    """The law is one-hot there, and would give every node one child."""
    from outrider.drafters.model import ModelDrafter
    from outrider.engine.round import Session, play_round
    from outrider.policies.fixed import Fixed

    model, draft = ToyModel.random(6, 1), ToyModel.random(6, 2)
    cache = model.new_cache(20)
    session = Session(
        model=model, cache=cache, draft=ModelDrafter(draft, shape=Static((3, 2))).start([0], 20),
        rule=Greedy(), policy=Fixed(2), law=Sampling().law(frozenset(), 6),
        chooser=SeededChooser(0), tokens=[0, 1], prompt_length=2, limit=20,
    )  # fmt: skip
    assert len(play_round(session).proposal) == 3 + 6


def test_what_is_written_is_what_is_read(tmp_path):
    made = head_module()
    write_head(made, tmp_path, {"target": {"weights": "abc"}})
    read, about = read_head(tmp_path)
    assert about == {"target": {"weights": "abc"}}
    assert torch.equal(read.ids, made.ids)
    for (name, a), b in zip(made.named_parameters(), read.parameters(), strict=True):
        worth = a.detach().abs().amax() / 127
        torch.testing.assert_close(b, a, atol=float(worth), rtol=0.01, msg=name)
    write_head(read, tmp_path / "again", {})
    again, _ = read_head(tmp_path / "again")
    assert all(
        torch.allclose(a, b, atol=1e-3)
        for a, b in zip(read.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize("break_it", ["no config", "half a file", "other sizes", "nan", "format"])
def test_a_broken_head_is_told_with_its_name(tmp_path, break_it):
    made = head_module()
    if break_it == "nan":
        with torch.no_grad():
            made.norm.weight[0] = torch.nan
    write_head(made, tmp_path, {})
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    if break_it == "no config":
        config.unlink()
    elif break_it == "half a file":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif break_it == "other sizes":
        config.write_text(config.read_text().replace('"intermediate": 48', '"intermediate": 50'))
    elif break_it == "format":
        config.write_text(config.read_text().replace("outrider-eagle-1", "something-else"))
    with pytest.raises(ModelFileError, match=tmp_path.name):
        read_head(tmp_path)


def test_no_folder_and_no_head_with_the_target(tmp_path):
    model = native(module("llama"), "float32")
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        Engine(model, drafter=f"eagle:{tmp_path / 'nowhere'}")
    with pytest.raises(ModelNotFoundError, match="No draft head comes with"):
        Engine(model, drafter="eagle")


def test_a_head_for_another_target(tmp_path):
    write_head(head_module(hidden=48), tmp_path, {})
    with pytest.raises(ModelFileError, match="width 48"):
        Engine(native(module("llama"), "float32"), drafter=f"eagle:{tmp_path}")


def test_a_conversation_keeps_the_head_in_step():
    model = native(module("llama"), "int8")
    engine = Engine(model, drafter=EagleDrafter(NativeHead(head_module(), model), model))
    from outrider.engine.prefix import Prefix

    prefix, text = Prefix(), TEXT[:12]
    for _ in range(3):
        generation = engine.stream(text, max_tokens=9, prefix=prefix)
        ids = generation.output.token_ids
        prefix.keep(generation.session)
        assert ids == engine.generate(text, max_tokens=9, plain=True).token_ids
        text = [*text, *ids, *TEXT[40:44]]


def test_under_sampling_a_tree_follows_the_noise_that_the_target_is_drawn_on():
    """A head that knows the target's law foresees what will be drawn."""
    model = ToyModel.random(6, 1, order=1)
    drafter = EagleDrafter(Knowing(model), model, Dynamic(1, 1))
    engine = Engine(model, drafter=drafter, rule="coupled")
    request = {"max_tokens": 60, "temperature": 1.0, "draft_length": 1}
    foreseen = [engine.generate([0, 1], seed=seed, **request) for seed in range(4)]
    for seed, output in enumerate(foreseen):
        assert output.trace.summary()["tokens_per_target_call"] == 2.0
        plain = engine.generate([0, 1], seed=seed, plain=True, **request)
        assert output.token_ids == plain.token_ids
    drawn = engine.generate([0, 1], seed=0, rule="rejection", **request)
    assert drawn.trace.summary()["tokens_per_target_call"] < 1.8


def test_a_head_reads_the_end_of_a_long_prompt_alone():
    """What it reads decides what it drafts, never what comes out."""
    model = native(randomise(new_module("llama")), "float32")
    head = NativeHead(head_module(), model)
    fed = []

    class Watched:
        taps, ids = head.taps, head.ids
        new_cache, grow = head.new_cache, head.grow

        def feed(self, cache, tokens, hidden):
            fed.append((len(tokens), len(hidden)))
            return head.feed(cache, tokens, hidden)

    text = [*TEXT, *TEXT]
    plain = Engine(model, drafter="none").generate(text, max_tokens=30)
    for context in (8, len(text) - 1, len(text), 1000):
        fed.clear()
        drafter = EagleDrafter(Watched(), model, Dynamic(6, 3), context=context)
        output = Engine(model, drafter=drafter).generate(text, max_tokens=30, draft_length=3)
        assert output.token_ids == plain.token_ids
        assert fed[0] == (min(context, len(text)) - 1,) * 2
        assert all(n <= 6 for n, _ in fed[1:])


def test_a_head_says_how_much_of_a_prompt_is_enough(target, tmp_path):
    module = head_module()
    module.config = replace(module.config, context=7)
    write_head(module, tmp_path / "head", {})
    read, _ = read_head(tmp_path / "head")
    model = target
    for head in (model.make_head(read), TorchHead(read, model.weights.embed)):
        assert EagleDrafter(head, model).context == 7
        assert EagleDrafter(head, model, context=9).context == 9
    told = json.loads((tmp_path / "head" / "config.json").read_text())
    told["head"]["context"] = 0
    (tmp_path / "head" / "config.json").write_text(json.dumps(told))
    with pytest.raises(ModelFileError, match="context must be at least one token"):
        read_head(tmp_path / "head")
