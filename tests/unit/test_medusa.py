"""Medusa heads: the formula in each runtime, which token each predicts, trees, files, training."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from outrider import Engine
from outrider.core.proposal import ROOT
from outrider.drafters.medusa import MedusaDrafter, _MedusaSession
from outrider.drafters.shape import Chain, Dynamic, Static
from outrider.errors import ModelFileError, UnsupportedError, UsageError
from outrider.models.heads.export import export_speculators
from outrider.models.heads.folder import read_head, write_head
from outrider.models.heads.medusa import MedusaConfig, MedusaModule, TorchMedusa
from outrider.models.native.medusa import NativeMedusa
from outrider.models.toy import ToyModel
from outrider.protocols import ParallelHeads, Setting
from outrider.registry import RULES
from outrider.train.eagle import Batch, Teacher
from outrider.train.medusa import medusa_rows, new_medusa
from tests.laws import chain_law, distance, speculative_law
from tests.small_models import VOCAB, native, new_module, shared, some_tokens
from tests.unit.test_native import module, randomise

D, COUNT, DRAFT = 32, 3, 40
TEXT = some_tokens(40, seed=4)
pytestmark = pytest.mark.usefixtures("one_thread")


def heads_module(hidden: int = D, count: int = COUNT, seed: int = 0) -> MedusaModule:
    config = MedusaConfig(hidden=hidden, taps=(1,), count=count, draft_vocab=DRAFT, vocab=VOCAB)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = MedusaModule(config)
        for p in made.parameters():
            torch.nn.init.normal_(p, std=0.2, mean=float(p is made.norm.weight))
        made.ids.copy_(torch.randperm(VOCAB)[:DRAFT].sort().values)
    return made


@pytest.fixture(scope="module")
def target():
    return native(module("llama"), "float32")


def hidden_of(model):
    cache = model.new_cache(len(TEXT), (1,))
    model.prefill(cache, TEXT)
    return cache.hidden.first(len(TEXT))


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1), ("int8", 0.2)]
)
def test_both_runtimes_give_the_formula(kind, tolerance):
    model, made = native(module("llama"), kind), heads_module()
    state = {name: value.detach() for name, value in made.state_dict().items()}
    torch_heads, native_heads = TorchMedusa(made), NativeMedusa(made, model)
    for heads in (torch_heads, native_heads):
        assert isinstance(heads, ParallelHeads)
    for h in hidden_of(model)[[3, 20, 39]]:
        x = h / (h.square().mean() + 1e-5).sqrt() * state["norm.weight"]
        wanted = []
        for j in range(COUNT):
            w, b = (state[f"blocks.{n}"][j * D : (j + 1) * D] for n in ("weight", "bias"))
            wanted.append(state["lm_head.weight"] @ (x + F.silu(w @ x + b)))
        torch.testing.assert_close(torch_heads.predict(h), torch.stack(wanted))
        found = native_heads.predict(h)
        torch.testing.assert_close(found, torch.stack(wanted), atol=tolerance, rtol=tolerance)


def test_widths_that_need_padding():
    """Pieces of a row lie next to each other, padded only at its end."""
    model, made = native(new_module("llama", hidden_size=36, head_dim=8), "int8"), heads_module(36)
    h = torch.randn(36, generator=torch.Generator().manual_seed(0))
    found, wanted = NativeMedusa(made, model).predict(h), TorchMedusa(made).predict(h)
    torch.testing.assert_close(found, wanted, atol=0.2, rtol=0.2)


SHAPES = [Chain(), Static((2, 2)), Dynamic(9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_are_those_of_plain_decoding(shape, temperature):
    model = native(randomise(new_module("llama")), "int8")
    engine = Engine(model, drafter=MedusaDrafter(model.make_head(heads_module()), model, shape))
    request = {"max_tokens": 30, "temperature": temperature, "seed": 3}
    plain = engine.generate(TEXT[:9], plain=True, **request)
    ours = engine.generate(TEXT[:9], draft_length=5, **request)  # more than there are heads
    assert ours.token_ids == plain.token_ids
    assert ours.trace.summary()["drafted_tokens"] > 0


def test_beside_a_transformers_target():
    model = shared("llama")
    engine = Engine(model, drafter=MedusaDrafter(model.make_head(heads_module()), model))
    plain = engine.generate(TEXT[:9], plain=True, max_tokens=12)
    assert engine.generate(TEXT[:9], max_tokens=12).token_ids == plain.token_ids


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_that_know_what_comes_are_always_right(shape):
    """Each token follows from the one before: head j at token i is asked for token i + 1 + j."""

    def after(token):
        return (2 * token + 1) % 5

    def law(tokens):
        p = torch.full((5,), 1e-3, dtype=torch.float64)
        p[after(tokens[-1])] = 1.0
        return (p / p.sum()).numpy()

    class Knowing:
        taps = (0,)
        ids = torch.arange(5)
        count = 3

        def predict(self, hidden):
            token = int(hidden.argmax())  # token i + 1
            rows = torch.full((3, 5), -9.0, dtype=torch.float64)
            for row in rows:
                token = after(token)
                row[token] = 9.0
            return rows

    model = ToyModel(law, 5)
    engine = Engine(model, drafter=MedusaDrafter(Knowing(), model, shape))
    told = engine.generate([0, 1], max_tokens=24, draft_length=3).trace.summary()
    assert told["tokens_per_target_call"] == 4.0


def test_the_likeliest_nodes_of_all():
    """Against every node there is, ranked by its product."""
    model = ToyModel.random(4, 1)
    chance = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 4, generator=chance, dtype=torch.float64)
    scores = torch.log_softmax(logits.float(), -1)
    paths = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth)]
    worth = {path: sum(float(scores[i, t]) for i, t in enumerate(path)) for path in paths}
    heads = model.make_head(located("toy:heads=3"))
    session = _MedusaSession(MedusaDrafter(heads, model), model.new_cache(9))
    for nodes in (1, 2, 7, 30, 200):
        found = session._likeliest(nodes, logits)
        taken = [tuple(found.path_tokens(node)) for node in range(len(found))]
        best = sorted(paths, key=lambda path: -worth[path])[:nodes]
        assert len(set(taken)) == len(taken) == len(best)
        assert set(taken) == set(best)
        assert all(parent < node for node, parent in enumerate(found.parents))
        assert found.parents[0] == ROOT


@pytest.mark.parametrize("shape", [Static((2, 2)), Static((3, 1)), Dynamic(4)], ids=str)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("vocab", [2, 3], ids=["trimmed", "whole"])
def test_trees_leave_the_law_alone(rule, shape, vocab):
    model = ToyModel.random(3, 1)
    heads = model.make_head(located(f"toy:seed=2,vocab={vocab},heads=2"))
    request = {"max_tokens": 3, "prompt": (0, 1)}
    found = speculative_law(
        model, MedusaDrafter(heads, model, shape), RULES.load(rule)(), draft_length=2, **request
    )
    assert distance(found, chain_law(model, **request)) <= 1e-12


def located(text):
    from outrider.models.locate import locate

    return locate(text)


def test_what_is_written_is_what_is_read(tmp_path):
    made = heads_module()
    write_head(made, tmp_path, {"target": {"weights": "abc"}})
    read, about = read_head(tmp_path)
    assert about == {"target": {"weights": "abc"}}
    assert isinstance(read, MedusaModule)
    assert read.config == made.config
    assert torch.equal(read.ids, made.ids)
    for (name, a), b in zip(made.named_parameters(), read.parameters(), strict=True):
        worth = a.detach().abs().amax() / 127
        torch.testing.assert_close(b, a, atol=float(worth), rtol=0.01, msg=name)
    with pytest.raises(UnsupportedError, match="no EAGLE-3 head"):
        export_speculators(tmp_path, tmp_path / "out", "org/target")


def test_by_name(tmp_path, target):
    write_head(heads_module(), tmp_path, {})
    engine = Engine(target, drafter=f"medusa:{tmp_path}#tree=2,2")
    plain = engine.generate(TEXT[:9], plain=True, max_tokens=12)
    assert engine.generate(TEXT[:9], max_tokens=12).token_ids == plain.token_ids


def test_what_is_refused(tmp_path, target):
    write_head(heads_module(), tmp_path, {})
    with pytest.raises(UnsupportedError, match="side by side") as told:
        Engine(target, drafter=f"eagle:{tmp_path}")
    assert f"medusa:{tmp_path}" in told.value.hint
    with pytest.raises(UnsupportedError, match="token after token"):
        Engine(ToyModel.random(4, 1), drafter="medusa:toy:seed=1")
    with pytest.raises(UsageError, match="takes the folder"):
        Engine(target, drafter="medusa")
    with pytest.raises(UsageError, match="cannot be made by name"):
        MedusaDrafter.build("x", Setting(target, lambda path: target))
    write_head(heads_module(hidden=48), tmp_path / "wide", {})
    with pytest.raises(ModelFileError, match="width 48"):
        Engine(target, drafter=f"medusa:{tmp_path / 'wide'}")


# ---- training ------------------------------------------------------------------------------------


def batch_of(taps: int = 1) -> tuple[Teacher, Batch]:
    chance = torch.Generator().manual_seed(5)
    teacher = Teacher(
        torch.randn(VOCAB, D, generator=chance), 1 + 0.1 * torch.randn(D, generator=chance),
        torch.randn(DRAFT, D, generator=chance) * 0.3, 1e-5,
    )  # fmt: skip
    hidden = torch.randn(2, 12, taps * D, generator=chance)
    tokens = torch.randint(VOCAB, (2, 13), generator=chance)
    return teacher, Batch(tokens, hidden, torch.tensor([12, 7]))


def test_new_heads_say_what_the_target_says_of_the_next_token():
    teacher, batch = batch_of()
    made = new_medusa(heads_module().config, teacher, torch.arange(DRAFT))
    wanted = teacher.logits(batch.hidden[0, 4])
    for row in TorchMedusa(made).predict(batch.hidden[0, 4]):
        torch.testing.assert_close(row, wanted)


@pytest.mark.parametrize("taps", [1, 3])
def test_each_head_is_judged_by_the_row_of_the_token_that_it_predicts(taps):
    teacher, batch = batch_of(taps)
    made = heads_module()
    last = batch.hidden[..., -D:]
    found = medusa_rows(made, teacher, batch)
    assert len(found) == COUNT
    for ahead, (mine, wanted) in enumerate(found, 1):
        places = [(b, i) for b, n in enumerate((12, 7)) for i in range(n - ahead)]
        assert len(mine) == len(wanted) == len(places)
        for row, (b, i) in enumerate(places):
            torch.testing.assert_close(
                mine[row], made.logits(made.states(last[b, i]))[ahead - 1], atol=1e-5, rtol=1e-4
            )
            torch.testing.assert_close(
                wanted[row], teacher.logits(last[b, i + ahead]), atol=1e-5, rtol=1e-4
            )
        assert mine.requires_grad
        assert not wanted.requires_grad
    few = medusa_rows(made, teacher, batch, share=0.3)
    assert len(few[0][0]) == len(found[0][0])
    assert len(few[1][0]) < len(found[1][0])


def test_training_brings_every_head_nearer():
    teacher, batch = batch_of()
    made = new_medusa(heads_module().config, teacher, torch.arange(DRAFT))
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)

    def losses():
        return [
            -(torch.softmax(wanted, -1) * torch.log_softmax(mine, -1)).sum(-1).mean()
            for mine, wanted in medusa_rows(made, teacher, batch)
        ]

    before = [float(loss.detach()) for loss in losses()]
    for _ in range(30):
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack(losses()).sum())
        optimizer.step()
    after = [float(loss.detach()) for loss in losses()]
    assert all(b < a - 0.1 for a, b in zip(before, after, strict=True))
