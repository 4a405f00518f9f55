"""What every runtime promises: logits that depend on the committed tokens and nothing else.

A new entry of the ``RUNTIMES`` table is covered once ``BUILDERS`` says how to make a model of it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.proposal import Proposal
from outrider.errors import ProposalError
from outrider.models.hf import HFModel
from outrider.models.native.model import NativeModel
from outrider.models.toy import ToyModel
from outrider.protocols import Cache, Model
from outrider.registry import RUNTIMES
from tests.small_models import (
    FAMILIES,
    VOCAB,
    module,
    native,
    new_module,
    on_device,
    padded,
    randomise,
    shared,
    some_tokens,
)

BUILDERS = {
    "toy": {"random": lambda: ToyModel.random(VOCAB, seed=1)},
    "hf": {family: lambda family=family: shared(family) for family in FAMILIES}
    | {"llama, same numbers": lambda: HFModel(new_module("llama"), same_numbers=True)},
    "native": {
        f"{family}, {kind}": lambda family=family, kind=kind: native(
            randomise(new_module(family)), kind
        )
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for kind in ("int4", "int8", "bfloat16", "float32")
    }
    | {
        f"{family}, on {device}": lambda family=family, device=device: on_device(
            randomise(new_module(family)), device
        )
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for device in ("cpu", "cuda")
    },
}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = some_tokens(40)
OTHER = some_tokens(40, seed=1)


def test_every_runtime_has_a_builder():
    assert set(BUILDERS) == set(RUNTIMES)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((runtime, name), marks=[GPU] if name.endswith("on cuda") else [])
        for runtime, made in BUILDERS.items()
        for name in made
    ],
    ids=lambda pair: f"{pair[0]}: {pair[1]}",
)
def model(request) -> Model:
    runtime, name = request.param
    return BUILDERS[runtime][name]()


@pytest.fixture(scope="module")
def alone(model):
    """From a text to the logits after each of its tokens, each fed in a pass of its own."""
    known = {}

    def score(tokens):
        tokens = tuple(tokens)
        if tokens not in known:
            cache = model.new_cache(len(tokens))
            rows = [model.score(cache, [token], Proposal()) for token in tokens]
            known[tokens] = torch.cat(rows)
        return known[tokens]

    return score


@pytest.fixture(scope="module")
def close(model):
    """Two scores of one text agree: to rounding, or in every bit where a runtime says so."""
    atol = 0 if isinstance(model, NativeModel) else 3e-4

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)

    return check


def feed(model: Model, cache: Cache, tokens: list[int], draft: list[int]) -> torch.Tensor:
    """Bring the cache to all but the last token, as the engine does, and score a round."""
    return model.score(cache, tokens[cache.length :], Proposal.chain(draft))


@given(data=st.data())
@settings(max_examples=25)
def test_a_block_scores_as_its_tokens_do_alone(model, alone, close, data):
    prefilled = data.draw(st.integers(0, 30))
    pending = data.draw(st.integers(1, 8))
    drafted = data.draw(st.integers(0, len(TEXT) - prefilled - pending))
    cache = model.new_cache(len(TEXT))
    model.prefill(cache, TEXT[:prefilled], None)
    end = prefilled + pending
    rows = feed(model, cache, TEXT[:end], TEXT[end : end + drafted])
    close(rows, alone(TEXT)[end - 1 : end + drafted])


@given(length=st.integers(1, 39), to=st.integers(0, 39), parts=st.integers(1, 3))
@settings(max_examples=25)
def test_rolled_back_anywhere_it_goes_on_as_if_fresh(model, alone, close, length, to, parts):
    cache = model.new_cache(2 * len(TEXT))
    for part in range(parts):
        model.prefill(cache, TEXT[part * length // parts : (part + 1) * length // parts], None)
    to = min(to, length)
    cache.rollback(to)
    assert cache.length <= to
    text = [*TEXT[:to], *OTHER[to : to + 5]]
    rows = feed(model, cache, text, [])
    close(rows, alone(text)[-1:])


@given(rounds=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6))
@settings(max_examples=25)
def test_rejected_drafts_leave_no_trace(model, alone, close, rounds):
    cache = model.new_cache(len(TEXT) + 8)
    done = 4
    model.prefill(cache, TEXT[: done - 1], None)
    for drafted, kept in rounds:
        kept = min(kept, drafted)
        # Right up to where it is cut off, wrong from there on.
        draft = [*TEXT[done : done + kept], *OTHER[done + kept : done + drafted]][:drafted]
        if done + drafted >= len(TEXT):
            break
        rows = feed(model, cache, TEXT[:done], draft)
        close(rows[: kept + 1], alone(TEXT)[done - 1 : done + kept])
        cache.keep(done, list(range(kept)))
        assert cache.length <= done + kept
        done += kept + 1
    close(feed(model, cache, TEXT[:done], []), alone(TEXT)[done - 1 : done])


@given(data=st.data())
@settings(max_examples=25)
def test_a_tree_scores_as_its_paths_do_alone(model, alone, close, data):
    done = data.draw(st.integers(1, 20))
    parents = tuple(data.draw(st.integers(-1, i - 1)) for i in range(data.draw(st.integers(2, 9))))
    tokens = tuple(OTHER[0] + i for i in range(len(parents)))  # no two alike
    tree = Proposal(tuple(token % VOCAB for token in tokens), parents, (None,) * len(parents))
    cache = model.new_cache(len(TEXT))
    model.prefill(cache, TEXT[: done - 1], None)
    if not (tree.is_chain or model.trees):
        with pytest.raises(ProposalError, match="scores chains"):
            model.score(cache, TEXT[done - 1 : done], tree)
        return
    rows = model.score(cache, TEXT[done - 1 : done], tree)
    assert len(rows) == 1 + len(tree)
    for node in range(len(tree)):
        close(rows[1 + node], alone([*TEXT[:done], *tree.path_tokens(node)])[-1])
    # Whichever path is kept, what comes after it sees that path and no other branch.
    path = tree.path(data.draw(st.integers(-1, len(tree) - 1)))
    cache.keep(done, path)
    text = [*TEXT[:done], *(tree.tokens[node] for node in path), OTHER[9]]
    close(feed(model, cache, text, OTHER[10:12]), alone([*text, *OTHER[10:12]])[-3:])


def test_a_cache_that_was_never_fed_can_be_rolled_back(model, alone, close):
    cache = model.new_cache(8)
    cache.rollback(0)
    assert cache.length == 0
    close(feed(model, cache, TEXT[:3], []), alone(TEXT)[2:3])


def test_two_caches_do_not_meet(model, alone, close):
    one, two = model.new_cache(40), model.new_cache(40)
    for end in (4, 7):
        close(feed(model, one, TEXT[:end], []), alone(TEXT)[end - 1 : end])
        close(feed(model, two, OTHER[:end], []), alone(OTHER)[end - 1 : end])


def test_rows_are_over_the_vocabulary(model):
    rows = feed(model, model.new_cache(8), TEXT[:3], TEXT[3:5])
    assert rows.shape == (3, model.vocab_size)
    assert rows.is_floating_point()


def test_rows_that_pad_the_output_matrix_are_never_returned():
    plain = shared("llama")
    made = HFModel(padded(module("llama"), 128), vocab_size=VOCAB)
    assert made.module.get_output_embeddings().weight.shape[0] == VOCAB + 128
    expected = feed(plain, plain.new_cache(8), TEXT[:3], TEXT[3:5])
    found = feed(made, made.new_cache(8), TEXT[:3], TEXT[3:5])
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-4)
