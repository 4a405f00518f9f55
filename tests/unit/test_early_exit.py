"""The target's own layers as its draft: same text, same cache, no weights of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from outrider import Engine
from outrider.cli.exits import exits
from outrider.core.processors import Context, Law, Sampling
from outrider.core.proposal import Proposal
from outrider.drafters.beside import new_cache
from outrider.drafters.early_exit import EarlyExitDrafter, parse_layers, spell_layers
from outrider.drafters.mixed import MixedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.shape import parse_shape
from outrider.engine.exits import Exit, _answered, _Bench, _thinned, best_exits, drafter_of
from outrider.errors import UnsupportedError, UsageError
from outrider.models.hf import HFModel
from outrider.models.native.device import DeviceModel
from outrider.models.native.model import NativeModel
from outrider.models.toy import ContextModel, ToyModel
from outrider.protocols import LayeredModel, Model, Pick, Setting
from outrider.registry import RULES
from tests.contract.test_drafters import pick_for
from tests.laws import chain_law, distance, speculative_law
from tests.small_models import VOCAB, native, new_module, on_device, shared, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 4
PROMPT = some_tokens(80)  # more than a block of the native cache
SUBSETS = ["1", "2", "4", "0-1,3", "1-3", "3-3"]


@cache
def target(family: str = "llama") -> NativeModel:
    return native(new_module(family, num_hidden_layers=LAYERS))


@cache
def on_hf() -> HFModel:
    module = new_module("llama", num_hidden_layers=LAYERS)
    return HFModel(module, same_numbers=True)


@cache
def on_a_device() -> DeviceModel:
    return on_device(new_module("llama", num_hidden_layers=LAYERS))


def drafter_for(model: Model, argument: str) -> EarlyExitDrafter:
    return EarlyExitDrafter.build(argument, Setting(model, load=lambda path: model))


def outputs(model: Model, argument: str, **options) -> tuple[list[int], list[int], dict]:
    """Token ids with a draft, without one, and the trace of the first."""
    engine = Engine(model, drafter=drafter_for(model, argument))
    request = {"max_tokens": 40, "seed": 3, **options}
    drafted = engine.generate(PROMPT, draft_length=4, **request)  # whether it pays or not
    return (
        drafted.token_ids,
        engine.generate(PROMPT, plain=True, **request).token_ids,
        (drafted.trace.summary()),
    )


# --- the text ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [target, on_hf, on_a_device])
def test_all_layers_agree_with_themselves(model):
    ours, plain, trace = outputs(model(), str(LAYERS))
    assert ours == plain
    assert trace["accepted_tokens"] == trace["drafted_tokens"] > 0


@pytest.mark.parametrize("argument", SUBSETS)
@pytest.mark.parametrize("shape", ["", "#tree=3,2", "#tree=12"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(argument, shape, temperature):
    """Greedy and coupled; the chance that a draft is wrong is what makes it a test."""
    ours, plain, trace = outputs(target(), argument + shape, temperature=temperature)
    assert ours == plain
    assert trace["drafted_tokens"] > 0


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("argument", ["1", "0,3"])
def test_other_families(family, argument):
    """Norms on queries and keys; a window, which is the layer's own."""
    ours, plain, _ = outputs(target(family), argument, temperature=0.8)
    assert ours == plain


@pytest.mark.parametrize("model", [on_hf, on_a_device])
@pytest.mark.parametrize("argument", SUBSETS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_on_other_runtimes(model, argument, temperature):
    ours, plain, trace = outputs(model(), argument, temperature=temperature)
    assert ours == plain
    assert trace["drafted_tokens"] > 0


@pytest.mark.parametrize("model", [on_hf, on_a_device])
def test_a_tree_on_other_runtimes(model):
    ours, plain, _ = outputs(model(), "2#tree=3,2")
    assert ours == plain


def test_it_mixes_with_others():
    drafter = MixedDrafter([NgramDrafter(), drafter_for(target(), "2")])
    engine = Engine(target(), drafter=drafter)
    request = {"max_tokens": 40, "seed": 3}
    ours = engine.generate(PROMPT, **request)
    assert ours.token_ids == engine.generate(PROMPT, plain=True, **request).token_ids


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_the_exact_law_of_trees(rule):
    toy = ToyModel.random(3, 1)
    drafter = drafter_for(toy, "1#tree=2,1")
    request = {"max_tokens": 3, "prompt": (0, 1)}
    made = speculative_law(toy, drafter, RULES.load(rule)(), draft_length=2, **request)
    assert distance(made, chain_law(toy, law=Law(), **request)) <= 1e-12


# --- the layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [target, on_hf, on_a_device])
@pytest.mark.parametrize("argument", ["2", "0,2-3"])
def test_some_layers_are_the_model_that_has_no_others(model, argument):
    """On a cache that they alone have filled, they are a smaller model with those weights."""
    layers = parse_layers(argument)
    module = new_module("llama", num_hidden_layers=LAYERS)
    weights = module.state_dict()
    smaller = new_module("llama", num_hidden_layers=len(layers))
    kept = {f"layers.{layer}.": f"layers.{place}." for place, layer in enumerate(layers)}
    renamed = {}
    for name, weight in weights.items():
        parts = [part for part in kept if f".{part}" in name]
        if parts:
            renamed[name.replace(parts[0], kept[parts[0]])] = weight
        elif ".layers." not in name:
            renamed[name] = weight
    smaller.load_state_dict(renamed)
    make = {target: native, on_a_device: on_device}
    alone = make[model](smaller) if model in make else HFModel(smaller, same_numbers=True)
    chain = Proposal.chain(PROMPT[70:78])

    def rows(of: Model) -> torch.Tensor:
        held = of.new_cache(100)
        of.prefill(held, PROMPT[:69], None)
        return of.score(held, PROMPT[69:70], chain)

    assert torch.equal(rows(model().some_layers(layers)), rows(alone))


def test_nothing_is_copied():
    part = target().some_layers([0, 2])
    assert part.weights is target().weights
    assert part._turn_taking is target()._turn_taking
    other = on_a_device().some_layers([0, 2])
    assert other.weights is on_a_device().weights
    assert other._turn_taking is on_a_device()._turn_taking
    theirs = {id(p) for p in on_hf().module.parameters()}
    assert {id(p) for p in on_hf().some_layers([0, 2]).module.parameters()} < theirs
    assert len(on_hf().module.get_decoder().layers) == LAYERS


# --- the cache -----------------------------------------------------------------------------------


def held(cache, length: int) -> list[np.ndarray]:
    """Keys and values of the first slots, and the hidden states set aside."""
    if hasattr(cache, "table"):
        kept = [cache._block(number) for number in range(-(-length // 64))]
        keys = np.concatenate([k for k, _ in kept], axis=-1)[..., :length]
        values = np.concatenate([v for _, v in kept], axis=-2)[..., :length, :]
    else:
        layers = cache.layers.layers
        keys = np.stack([x.keys[..., :length, :].numpy() for x in layers])
        values = np.stack([x.values[..., :length, :].numpy() for x in layers])
    return [keys, values, cache.hidden.first(length).numpy()]


def filled(model: Model, taps: tuple[int, ...] = ()):
    made = model.new_cache(200, taps)
    model.prefill(made, PROMPT[:-1], None)
    return made


@pytest.mark.parametrize("model", [target, on_hf])
@pytest.mark.parametrize("argument", ["2", "0-1,3", "1,3#tree=3,2", "2#tree=9"])
@pytest.mark.parametrize("taps", [(), (1, 3)])
def test_drafting_leaves_the_cache_as_it_was(model, argument, taps):
    """And the verifying pass gives what it gives on a cache in which nothing was drafted."""
    made, fresh = filled(model(), taps), filled(model(), taps)
    session = drafter_for(model(), argument).start_beside(made, PROMPT, 200)
    proposal = session.propose(PROMPT, 3, pick_for(PROMPT, "coupled", 0))
    assert proposal.depth == 3
    assert made.length == fresh.length == len(PROMPT) - 1
    for ours, theirs in zip(held(made, made.length), held(fresh, fresh.length), strict=True):
        assert np.array_equal(ours, theirs)
    chain = Proposal.chain(some_tokens(5, seed=8))
    rows = [model().score(kept, PROMPT[-1:], chain) for kept in (made, fresh)]
    assert torch.equal(*rows)
    end = made.length
    for ours, theirs in zip(held(made, end), held(fresh, end), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("model", [target, on_hf])
@pytest.mark.parametrize("shape", ["", "#tree=3,2"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_whatever_breaks_off_leaves_it_too(model, shape, error):
    made, fresh = filled(model(), (1,)), filled(model(), (1,))
    pick = pick_for(PROMPT, "coupled", 0)

    def choose(q, depth, node):
        if depth == 1:
            raise error
        return pick.choose(q, depth, node)

    def siblings(q, count, depth, node, droppable):
        if depth == 1:
            raise error
        return pick.siblings(q, count, depth, node, droppable)

    broken = Pick(pick.distribution, choose, siblings)
    session = drafter_for(model(), "0,3" + shape).start_beside(made, PROMPT, 200)
    with pytest.raises(error):
        session.propose(PROMPT, 3, broken)
    assert made.length == len(PROMPT) - 1
    for ours, theirs in zip(held(made, made.length), held(fresh, fresh.length), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_pass_that_breaks_off_among_the_layers_leaves_them_in_step():
    made = filled(on_hf())
    drafter = drafter_for(on_hf(), "0-1,3")

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = on_hf().module.get_decoder().layers[1].register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            drafter.start_beside(made, PROMPT, 200).propose(
                PROMPT, 3, pick_for(PROMPT, "greedy", 0)
            )
    finally:
        hook.remove()
    assert {layer.length for layer in made.layers.layers} == {made.length} == {len(PROMPT) - 1}


def test_a_text_of_one_token():
    for model in (target(), on_hf()):
        engine = Engine(model, drafter=drafter_for(model, "1,3"))
        request = {"max_tokens": 8, "seed": 1}
        ours = engine.generate([5], **request).token_ids
        assert ours == engine.generate([5], plain=True, **request).token_ids


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers"),
    [("1", (0,)), ("3", (0, 1, 2)), ("0-2,5", (0, 1, 2, 5)), ("4-4", (4,)), (" 1, 3", (1, 3))],
)
def test_layers_are_read_and_spelt(text, layers):
    assert parse_layers(text) == layers
    assert parse_layers(spell_layers(layers)) == layers


@pytest.mark.parametrize("text", ["", "x", "1,", "0-", "-1", "3-1", "1;2"])
def test_what_is_no_choice_of_layers_is_refused(text):
    with pytest.raises(UsageError, match="early_exit"):
        parse_layers(text)


@pytest.mark.parametrize("model", [target, on_hf, lambda: ToyModel.random(3, 1)])
@pytest.mark.parametrize("argument", ["0", "7", "1,0", "0,0", "0,9"])
def test_layers_that_are_not_there_are_refused(model, argument):
    with pytest.raises(UsageError, match="Some of the layers 0 to"):
        drafter_for(model(), argument)


def test_a_model_that_cannot_is_refused():
    class Bare(ContextModel):
        name = "bare"

    bare = Bare()
    assert not isinstance(bare, LayeredModel)
    with pytest.raises(UnsupportedError, match="'bare' cannot"):
        EarlyExitDrafter(bare, [0])


@pytest.mark.parametrize("family", ["mistral", "mamba", "qwen3-next"])
def test_caches_that_do_not_go_back_by_a_length_are_refused(family):
    with pytest.raises(UnsupportedError, match="go back by a length"):
        drafter_for(shared(family), "1")


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3", "mixtral"])
def test_families_on_transformers(family):
    model = shared(family, same_numbers=False)
    engine = Engine(model, drafter=drafter_for(model, "1"))
    request = {"max_tokens": 12, "seed": 1}
    prompt = PROMPT[:20]
    ours = engine.generate(prompt, draft_length=4, **request)
    assert ours.token_ids == engine.generate(prompt, plain=True, **request).token_ids
    assert ours.trace.summary()["drafted_tokens"] > 0


def test_the_vocabulary_and_the_shape_are_the_targets():
    drafter = drafter_for(target(), "2#tree=4,2")
    assert drafter.model.vocab_size == target().vocab_size == VOCAB
    assert drafter.shape == parse_shape("tree=4,2")
    assert drafter.trees
    assert new_cache(target(), drafter, 8).hidden.taps == ()


# --- which layers to choose ----------------------------------------------------------------------


def test_choices_are_tried_and_ranked():
    engine = Engine(target(), drafter="none")
    told: list[tuple[int, int]] = []
    found = best_exits(
        engine,
        [some_tokens(10), some_tokens(20, seed=1)],
        max_tokens=20,
        longest=4,
        exits=3,
        finalists=1,
        turns=1,
        repeats=1,
        progress=lambda done, total: told.append((done, total)),
    )
    choices = [one.layers for one in found]
    assert {(0,), (0, 1), (0, 1, 2)} <= set(choices)
    assert {len(layers) for layers in choices} == {1, 2, 3}
    assert told == [(n, 5) for n in range(1, 6)]
    assert [one.measured_speedup is None for one in found] == [False, True, True, True, True]
    predicted = [one.predicted_speedup for one in found[1:]]
    assert predicted == sorted(predicted, reverse=True)
    for one in found:
        assert drafter_for(target(), one.drafter.partition(":")[2]).layers == one.layers
        assert 1 <= one.draft_length <= 4
        assert 1 <= one.tokens_per_target_call <= 1 + one.draft_length


@pytest.mark.parametrize("layers", [(0, 1), (0, 2, 3), (0, 1, 2, 3)])
def test_guesses_are_what_a_request_keeps(layers):
    """A block of the answer, guessed at once, and the drafter drafting as much."""
    engine = Engine(target(), drafter="none")
    text = _answered(engine, PROMPT, 24)
    bench = _Bench(target(), [text], 4, 1)
    tokens = [*text.prompt, *text.answer]
    law = Sampling(temperature=0.0).law(frozenset(), VOCAB)
    best = Pick(
        lambda logits, path: law(Context([*tokens, *path], 1), logits),
        lambda q, depth, node: (q.argmax(), None),
        lambda *_: [],
    )
    wanted = []
    for start in range(len(text.prompt), len(tokens) - 3, 4):
        made = target().new_cache(200)
        target().prefill(made, tokens[: start - 1], None)
        session = EarlyExitDrafter(target(), layers).start_beside(made, tokens[:start], 200)
        drafted = session.propose(tokens[:start], 4, best).tokens
        same = [a == b for a, b in zip(drafted, tokens[start:], strict=False)]
        wanted.append([*same, False].index(False))
    assert bench._guessed(layers) == wanted
    if len(layers) == LAYERS:
        assert set(wanted) == {4}


def test_the_layer_that_is_missed_least_goes_first():
    weight = [5.0, 1.0, 4.0, 2.0, 3.0]
    tried = []

    def worth(layers):
        tried.append(layers)
        return sum(weight[i] for i in layers)

    assert _thinned(5, 2, worth) == [(0, 2, 3, 4), (0, 2, 4), (0, 2)]
    assert len(tried) == 5 + 1 + 3  # not 5 + 4 + 3: of the second step three could not have won
    assert _thinned(1, 1, worth) == []


def test_plain_decoding_is_recommended_where_nothing_pays():
    one = Exit((0, 1), 0.9, 4, 3.5, 1.0, 2.0, 2.0, measured_speedup=1.1)
    assert one.predicted_speedup == pytest.approx(3.5 * 2 / (4 * 1 + 2))
    assert drafter_of([one]) == "early_exit:2"
    assert drafter_of([replace(one, measured_speedup=0.98)]) == "none"
    assert drafter_of([replace(one, measured_speedup=None)]) == "none"
    assert drafter_of([]) == "none"


def test_the_command(tmp_path):
    """A toy has one layer, so there is nothing to leave out, and plain decoding is the best."""
    file = tmp_path / "prompts.txt"
    file.write_text("aaa\nab\n")
    app = typer.Typer()
    app.command()(exits)
    run = CliRunner().invoke(app, ["toy:vocab=4", "--prompts", str(file), "--json"])
    assert json.loads(run.stdout) == {"target": "toy:vocab=4", "best": "none", "exits": []}
    run = CliRunner().invoke(app, ["toy:vocab=4", "--prompts", str(file)])
    assert "plain" in run.stdout
