"""Distillation: a small model learns its target's law, drafts by itself, and says whose it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider import Engine
from outrider.cli.drafts import app as drafts
from outrider.engine.matching import DraftMismatchWarning
from outrider.errors import (
    DraftMismatchError,
    ModelFileError,
    RollbackError,
    TokenizerMismatchError,
    UnsupportedError,
    UsageError,
)
from outrider.models import hf
from outrider.models.adapter import merge_into, read_adapter
from outrider.models.drafts import RECORD, describe, read_record
from outrider.models.locate import locate
from outrider.train.data import DataOptions, generate_data, read_data
from outrider.train.distill import Student, cut_student, distillation_loss, spread
from outrider.train.eagle import Batch, Teacher
from outrider.train.run import Recipe, train_draft
from outrider.train.target import teacher_of
from outrider.train.trainer import TrainOptions, collate
from tests.small_models import VOCAB, native, new_module, new_tokenizer, save, some_tokens
from tests.unit.test_adapter import write_adapter
from tests.unit.test_native import randomise

pytestmark = pytest.mark.usefixtures("one_thread")
D = 32


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path) -> Path:
    return save(randomise(new_module("llama", num_hidden_layers=3)), tmp_path / "base")


def load(base: Path, **options: Any) -> Engine:
    return Engine.load(str(base), **({"drafter": "none", "dtype": "int8"} | options))


def recipe(folder: Path, **changes: Any) -> Recipe:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "w{n} w{n + 3} w5"}}\n' for n in range(6, 46)))
    options: dict[str, Any] = {"epochs": 2, "batch_tokens": 64, "context": 8, "rate": 3e-3}
    options |= changes.pop("options", {})
    recipe = Recipe("distill", str(path), max_answer=14, options=TrainOptions(**options))
    return replace(recipe, **changes)


def train(engine: Engine, tmp_path: Path, name: str = "draft", **changes: Any) -> tuple[Any, Path]:
    deadline = changes.pop("deadline_s", float("inf"))
    asked = recipe(tmp_path, **({"student_layers": 1} | changes))
    return train_draft(engine, asked, tmp_path / name, deadline_s=deadline), tmp_path / name


# ---- the loss ------------------------------------------------------------------------------------


def batch_of() -> tuple[Teacher, Batch]:
    """Two texts of 11 and 6 rows, of which 4 and 1 tokens are prompts."""
    chance = torch.Generator().manual_seed(5)
    teacher = Teacher(
        torch.empty(0, D), 1 + 0.1 * torch.randn(D, generator=chance),
        torch.randn(VOCAB, D, generator=chance) * 0.3, 1e-5,
    )  # fmt: skip
    hidden = torch.randn(2, 11, 2 * D, generator=chance)
    tokens = torch.randint(VOCAB, (2, 12), generator=chance)
    return teacher, Batch(tokens, hidden, torch.tensor([11, 6]), torch.tensor([4, 1]))


JUDGED = [(0, i) for i in range(3, 11)] + [(1, i) for i in range(6)]
"""Rows after which a token of an answer comes."""


def laws(student: Student, teacher: Teacher, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """p and q at the judged rows, float64, each text by itself."""
    p, q = [], []
    for b, i in JUDGED:
        text = batch.tokens[b : b + 1, : int(batch.lengths[b])]
        mine = student.module(text).logits[0, i].double()
        q.append(torch.softmax(mine, -1).detach().numpy())
        theirs = teacher.logits(batch.hidden[b, i, -D:]).double()
        p.append(torch.softmax(theirs, -1).numpy())
    return np.array(p), np.array(q)


@pytest.mark.parametrize("variation", [0.0, 1.0, 2.5])
def test_the_loss_is_kl_and_total_variation_of_the_judged_rows(variation):
    teacher, batch = batch_of()
    student = Student(new_module("llama"), VOCAB)
    p, q = laws(student, teacher, batch)
    kl = (p * np.log(p / q)).sum(-1)
    tv = 0.5 * np.abs(p - q).sum(-1)
    found = distillation_loss(student, teacher, batch, variation).detach()
    assert float(found) == pytest.approx(float((kl + variation * tv).mean()), rel=1e-5)


def test_chunks_change_neither_the_loss_nor_its_gradients():
    teacher, batch = batch_of()
    found = []
    for chunk in (1, 4, 100):
        student = Student(new_module("llama"), VOCAB)
        student.chunk = chunk
        loss = distillation_loss(student, teacher, batch, 1.0)
        torch.autograd.backward(loss)
        grads = {name: p.grad for name, p in student.module.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        found.append((loss.detach(), grads))
    for loss, grads in found[:2]:
        torch.testing.assert_close(loss, found[2][0])
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[2][1][name], atol=1e-6, rtol=1e-4)


def test_no_more_logits_than_a_chunk_are_held():
    """Not even for the gradients: they are made again."""
    teacher, batch = batch_of()
    student = Student(new_module("llama"), VOCAB)
    student.chunk = 2
    held = []

    def pack(tensor):
        held.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        distillation_loss(student, teacher, batch, 1.0)
    wide = [shape for shape in held if shape[-1:] == (VOCAB,) and len(shape) > 1]
    assert held
    assert not [shape for shape in wide if shape[0] != D], wide


def test_steps_are_where_a_greedy_chain_goes_on():
    teacher, batch = batch_of()
    module = new_module("llama")
    with torch.no_grad():  # so that the student is often right
        best = module(batch.tokens[:, :-1]).logits.argmax(-1)
        for b, i in ((0, 3), (0, 4), (0, 5), (0, 7), (1, 0), (1, 4)):
            batch.tokens[b, i + 1] = module(batch.tokens[:, : i + 1]).logits[b, i].argmax()
        best = module(batch.tokens[:, :-1]).logits.argmax(-1)
    student = Student(module, VOCAB)
    expected: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    for b, i in JUDGED:
        first = 3 if b == 0 else 0
        for step in range(3):
            before = range(i - step, i)
            if i - step >= first and all(best[b, j] == batch.tokens[b, j + 1] for j in before):
                expected[step].append((b, i))
    assert len(expected[0]) > len(expected[1]) > len(expected[2]) > 0
    for chunk in (1, 3, 100):
        student.chunk = chunk
        mine: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
        theirs: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
        with torch.no_grad():
            for step, ours, wanted in student.steps(teacher, batch, 3):
                mine[step] += list(ours)
                theirs[step] += list(wanted)
        for step, places in expected.items():
            assert len(mine[step]) == len(places)
            for (b, i), ours, wanted in zip(places, mine[step], theirs[step], strict=True):
                whole = module(batch.tokens[b : b + 1, : i + 1]).logits[0, i]
                torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(
                    wanted, teacher.logits(batch.hidden[b, i, -D:]), atol=1e-5, rtol=1e-4
                )


def test_the_whole_target_as_its_own_student_has_nothing_to_learn(base, tmp_path):
    """Teacher, rows and tokens are in step: off by one, it would be far from its own law."""
    made = randomise(new_module("llama", num_hidden_layers=3))
    target = native(made, "float32")
    generate_data(
        target, [some_tokens(6, seed=n) for n in range(4)], tmp_path / "data",
        DataOptions((1, 2), max_tokens=12),
    )  # fmt: skip
    student = Student(cut_student(locate(str(base)), 3), VOCAB)
    teacher = teacher_of(target, torch.arange(VOCAB), embedding=False)
    batch = collate(list(read_data(tmp_path / "data")))
    assert batch.prompts is not None
    assert batch.prompts.tolist() == [6] * 4
    # What is kept in bfloat16 is off by a little.
    with torch.no_grad():
        assert distillation_loss(student, teacher, batch, 0.0) < 1e-3
        other = Student(new_module("llama"), VOCAB)
        assert distillation_loss(other, teacher, batch, 0.0) > 0.3


def test_padding_rows_of_a_vocabulary_are_left_out():
    student = Student(new_module("llama"), VOCAB - 5)
    states = student.states(torch.arange(4)[None])
    assert student.logits(states).shape == (1, 4, VOCAB - 5)


def test_a_student_whose_logits_are_more_than_a_matrix():
    config = transformers.GraniteConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, logits_scaling=3.0, initializer_range=0.3,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="more than a matrix"):
        Student(transformers.GraniteForCausalLM(config), VOCAB)


# ---- students ------------------------------------------------------------------------------------


def test_layers_are_spread_from_the_first_to_the_last():
    assert spread(30, 6) == [0, 6, 12, 17, 23, 29]
    assert spread(3, 2) == [0, 2]
    assert spread(5, 1) == [0]
    assert spread(4, 4) == [0, 1, 2, 3]
    for count in (0, 5):
        with pytest.raises(UsageError, match="has 4 layers"):
            spread(4, count)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_cut_student_has_the_target_s_own_tensors(tmp_path, family, tied):
    made = randomise(new_module(family, num_hidden_layers=3, tie_word_embeddings=tied))
    student = cut_student(locate(str(save(made, tmp_path / "base"))), 2)
    own, theirs = student.state_dict(), made.state_dict()
    assert student.config.num_hidden_layers == 2
    names = {name: name.replace("layers.1.", "layers.2.") for name in own}
    assert len(own) == len(theirs) - len([name for name in theirs if "layers.1." in name])
    for name, theirs_name in names.items():
        assert torch.equal(own[name], theirs[theirs_name]), name
    assert (student.lm_head.weight is student.model.embed_tokens.weight) is tied


def test_a_cut_student_has_the_adapter_in_it(base, tmp_path):
    names = {f"model.layers.{i}.self_attn.q_proj": (32, 32) for i in (1, 2)}
    adapter = write_adapter(tmp_path / "adapter", names)
    student = cut_student(replace(locate(str(base)), adapter=adapter), 2)
    merged = randomise(new_module("llama", num_hidden_layers=3))
    plain = merged.model.layers[2].self_attn.q_proj.weight.clone()
    merge_into(merged, read_adapter(adapter))
    found = student.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(found, merged.model.layers[2].self_attn.q_proj.weight)
    assert not torch.equal(found, plain)


def test_a_tensor_that_is_missing(base):
    state = load_file(base / "model.safetensors")
    from safetensors.torch import save_file

    del state["model.layers.2.mlp.up_proj.weight"]
    save_file(state, base / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"layers\.2\.mlp\.up_proj\.weight' of .* is missing"):
        cut_student(locate(str(base)), 2)


# ---- from a target to a draft --------------------------------------------------------------------


def test_a_model_comes_out_and_drafts(base, tmp_path):
    engine = load(base)
    found, draft = train(engine, tmp_path)
    assert len(found.acceptance) == len(found.greedy) == 3
    assert all(0.0 <= rate <= 1.0 for rate in [*found.acceptance, *found.greedy, *found.best_four])
    assert found.coverage == 1.0
    # It loads by itself, here and in transformers.
    alone = Engine.load(str(draft), drafter="none", dtype="float32")
    assert alone.generate("w7 w10", max_tokens=4).text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    assert theirs.config.num_hidden_layers == 1
    assert {p.dtype for p in load_file(draft / "model.safetensors").values()} == {torch.bfloat16}
    assert not [file for file in draft.iterdir() if "part" in file.name]
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        plain = engine.generate("w7 w10 w5", max_tokens=30, plain=True, **options)
        for drafter in (f"model:{draft}", f"model:{draft}#tree=2,1"):
            ours = engine.generate(
                "w7 w10 w5", max_tokens=30, drafter=drafter, draft_length=3, **options
            )
            assert ours.token_ids == plain.token_ids
            assert ours.trace.summary()["drafted_tokens"] > 0


def test_it_gets_better_and_what_is_promised_is_what_is_measured(base, tmp_path):
    engine = load(base)
    noisy = randomise(new_module("llama", num_hidden_layers=3))
    generator = torch.Generator().manual_seed(1)
    for weight in noisy.parameters():
        weight.data += 0.04 * torch.randn(weight.shape, generator=generator)
    student = {"student": str(save(noisy, tmp_path / "noisy")), "student_layers": None}
    short, _ = train(engine, tmp_path, "short", options={"epochs": 1, "rate": 1e-6}, **student)
    long, draft = train(engine, tmp_path, "long", options={"epochs": 30}, **student)
    assert long.acceptance[0] > short.acceptance[0] + 0.1
    assert long.greedy[0] > short.greedy[0] + 0.1
    # Prompts like those it learned from, greedy: drafts stand about as often as was said.
    kept = drafted = 0
    for n in range(6, 46, 3):
        out = engine.generate(
            f"w{n} w{n + 3} w5", max_tokens=14, drafter=f"model:{draft}", draft_length=1
        )
        summary = out.trace.summary()
        kept, drafted = kept + summary["accepted_tokens"], drafted + summary["drafted_tokens"]
    assert kept / drafted > 0.8 * long.greedy[0]


def test_training_that_was_broken_off_ends_the_same(base, tmp_path):
    engine = load(base)
    train(engine, tmp_path, "whole")
    for _ in range(3):  # each time a step and no more
        train(engine, tmp_path, "parts", deadline_s=0.0)
    train(engine, tmp_path, "parts")
    one, other = (load_file(tmp_path / n / "training/checkpoint.safetensors")
                  for n in ("whole", "parts"))  # fmt: skip
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-3)


def test_a_student_that_is_given(base, tmp_path):
    engine = load(base)
    small = save(new_module("llama", seed=3, num_hidden_layers=1), tmp_path / "small")
    _, draft = train(engine, tmp_path, student=str(small), student_layers=None)
    record = read_record(draft)
    assert record is not None
    assert record["training"]["began_from"] == {"student": str(small)}
    before, after = (load_file(f / "model.safetensors") for f in (small, draft))
    assert before.keys() == after.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (after[name].float() - before[name].float()).abs().mean()
    assert 0 < moved < 0.1 * before[name].abs().mean()
    plain = engine.generate("w7 w10", max_tokens=12, plain=True)
    ours = engine.generate("w7 w10", max_tokens=12, drafter=f"model:{draft}", draft_length=3)
    assert ours.token_ids == plain.token_ids


def test_another_family_as_a_student(base, tmp_path):
    small = save(new_module("gpt2", seed=3), tmp_path / "small")
    engine = load(base, dtype=None)
    _, draft = train(engine, tmp_path, student=str(small), student_layers=None)
    plain = engine.generate("w7 w10", max_tokens=12, plain=True)
    ours = engine.generate("w7 w10", max_tokens=12, drafter=f"model:{draft}", draft_length=3)
    assert ours.token_ids == plain.token_ids


def test_mistakes_are_told_before_any_data_are_made(base, tmp_path):
    engine = load(base)
    made = new_module("llama", num_hidden_layers=1)
    made.save_pretrained(tmp_path / "other")
    new_tokenizer(60).save_pretrained(tmp_path / "other")
    recurrent = save(new_module("mamba"), tmp_path / "mamba")
    for error, words, changes in (
        (TokenizerMismatchError, "another tokenizer", {"student": str(tmp_path / "other")}),
        (RollbackError, "cannot take tokens back", {"student": str(recurrent)}),
        (UsageError, "has 3 layers", {"student_layers": 4}),
        (UsageError, "exclude each other", {"student": str(base), "student_layers": 1}),
        (UsageError, "--start is not for --method distill", {"start": "shipped"}),
        (UsageError, "--student is not for --method eagle",
         {"method": "eagle", "student": str(base)}),
        (UsageError, "--student-layers is not for --method medusa",
         {"method": "medusa", "student_layers": 1}),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            train_draft(engine, recipe(tmp_path, **changes), tmp_path / "never")
    bare = Engine(engine.model, engine.tokenizer, drafter="none")
    with pytest.raises(UsageError, match="not loaded from files"):
        train_draft(bare, recipe(tmp_path), tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_checkpoint_of_another_student(base, tmp_path):
    engine = load(base)
    train(engine, tmp_path, deadline_s=0.0)
    with pytest.raises(UsageError, match="other training options"):
        train(engine, tmp_path, student_layers=2)


# ---- whose it is ---------------------------------------------------------------------------------


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(drafts, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_it_says_whose_it_is(base, tmp_path, monkeypatch, recwarn):
    engine = load(base)
    _, draft = train(engine, tmp_path)
    head = describe(draft)
    assert head.kind == "model"
    assert head.target == engine.fingerprint().to_dict()
    assert head.sizes == {"layers": 1, "hidden": 32, "vocab": 64}
    assert head.parameters == sum(p.numel() for p in cut_student(locate(str(base)), 1).parameters())
    assert head.about["training"]["recipe"]["method"] == "distill"
    monkeypatch.setenv("OUTRIDER_DRAFTS", str(tmp_path))
    rows = json.loads(run("list", "--json"))["heads"]
    assert [row["kind"] for row in rows if row["name"] == "draft"] == ["model"]
    assert json.loads(run("info", str(draft), "--json"))["kind"] == "model"
    found = json.loads(run("check", str(draft), "--target", str(base), "--json"))
    assert found["matches"] is True
    assert found["tokens_per_target_call"] >= 1
    load(base, drafter=f"model:{draft}", strict=True)
    assert not [one for one in recwarn if one.category is DraftMismatchWarning]


def test_another_state_of_the_target_is_told(base, tmp_path):
    adapter = write_adapter(tmp_path / "adapter")
    _, draft = train(load(base, adapter=adapter), tmp_path)
    load(base, adapter=adapter, drafter=f"model:{draft}", strict=True)
    with pytest.warns(DraftMismatchWarning, match="no adapter where there was one") as told:
        engine = load(base, drafter=f"model:{draft}")
    assert told[0].message.worth.tokens_per_target_call >= 1
    plain = engine.generate("w7 w10", max_tokens=12, plain=True)
    assert engine.generate("w7 w10", max_tokens=12, draft_length=3).token_ids == plain.token_ids
    with pytest.raises(DraftMismatchError, match="does not match the target"):
        load(base, drafter=f"model:{draft}", strict=True)
    run("check", str(draft), "--target", str(base), code=1)
    # A model that was fitted to nothing has nothing to match.
    load(base, drafter=f"model:{base}", strict=True)


def test_a_record_that_is_broken(base, tmp_path):
    assert read_record(base) is None
    for text in ("{", "[]", '{"format": "outrider-model-9"}'):
        (base / RECORD).write_text(text)
        with pytest.raises(ModelFileError, match=rf"{RECORD}' cannot be read"):
            load(base, drafter=f"model:{base}")
        with pytest.raises(ModelFileError, match=rf"{RECORD}' cannot be read"):
            describe(base)


def test_the_command_line(base, tmp_path, capsys):
    from outrider.cli.main import main

    asked, adapter = recipe(tmp_path), write_adapter(tmp_path / "adapter")
    out = tmp_path / "draft"
    command = [
        "train", "--target", str(base), "--out", str(out), "--prompts", str(asked.prompts),
        "--max-answer", "14", "--epochs", "1", "--batch-tokens", "64", "--method", "distill",
        "--student-layers", "1", "--context", "8", "--tv-weight", "0.5", "--adapter", str(adapter),
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert not ended.value.code
    told = capsys.readouterr().out
    assert f"--adapter {adapter} --drafter model:{out}" in " ".join(told.split())
    record = read_record(out)
    assert record is not None
    options = record["training"]["recipe"]["options"]
    assert options["variation"] == 0.5
    assert (options["context"], options["window"], options["rate"]) == (8, 512, 3e-4)
    assert record["target"]["adapter"]


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_s_file_is_cut_as_transformers_reads_it(monkeypatch):
    """Its rows are in llama.cpp's order, and its head is the embedding."""
    monkeypatch.undo()  # the model is in the user's cache
    tokens = torch.tensor([[1, 504, 3575, 282, 4649, 314]])
    located = locate("smollm2-135m")
    whole, _ = hf.load(located, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        found = cut_student(located, 30)(tokens).logits
        expected = whole.module(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-3)
