"""Training: data that resume, unrolled steps that are the head's own, and heads that come out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from outrider import Engine
from outrider.core.proposal import Proposal
from outrider.engine import loading
from outrider.errors import (
    ModelFileError,
    ModelNotFoundError,
    PromptError,
    UnknownNameError,
    UnsupportedError,
    UsageError,
)
from outrider.models.heads.eagle import EagleModule, TorchHead
from outrider.models.heads.folder import read_head, write_head
from outrider.models.tokenizer import HFTokenizer
from outrider.train import own
from outrider.train.data import DataOptions, Example, generate_data, read_data
from outrider.train.eagle import unroll
from outrider.train.own import own_prompts
from outrider.train.run import Recipe, default_taps, read_prompts, train_draft
from outrider.train.target import frequent_tokens, teacher_of
from outrider.train.trainer import TrainOptions, batches, collate
from tests.small_models import VOCAB, native, new_module, new_tokenizer, save, some_tokens
from tests.unit.test_adapter import write_adapter
from tests.unit.test_eagle import head_module
from tests.unit.test_medusa import heads_module
from tests.unit.test_native import randomise

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = DataOptions((0, 1), max_tokens=12, temperatures=(0.0, 1.0))
PROMPTS = [some_tokens(5 + n % 7, seed=n) for n in range(9)]


@pytest.fixture(scope="module")
def target():
    return native(randomise(new_module("llama")), "int8")


def same(a: Example, b: Example) -> bool:
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.hidden, b.hidden)


def by_prompt(folder):
    return {tuple(one.tokens[: one.prompt_length].tolist()): one for one in read_data(folder)}


def test_answers_do_not_depend_on_their_company_and_resume(target, tmp_path):
    heard = []
    generate_data(
        target, PROMPTS, tmp_path / "whole", OPTIONS, progress=lambda *told: heard.append(told)
    )
    assert heard[-1] == (9, 9)
    generate_data(target, PROMPTS[:4], tmp_path / "parts", OPTIONS)
    generate_data(target, PROMPTS, tmp_path / "parts", OPTIONS)
    whole, parts = by_prompt(tmp_path / "whole"), by_prompt(tmp_path / "parts")
    assert len(whole) == len(parts) == 9
    assert all(same(whole[key], parts[key]) for key in whole)


def test_greedy_answers_are_plain_decoding_and_hidden_states_a_fresh_pass(target, tmp_path):
    generate_data(target, PROMPTS, tmp_path, OPTIONS)
    engine = Engine(target, drafter="none")
    made = by_prompt(tmp_path)
    for number, prompt in enumerate(PROMPTS):
        one = made[tuple(prompt)]
        assert len(one.tokens) == len(prompt) + 12
        if number % 2 == 0:
            answer = engine.generate(prompt, max_tokens=12).token_ids
            assert one.tokens[len(prompt) :].tolist() == answer
        cache = target.new_cache(40, OPTIONS.taps)
        target.prefill(cache, one.tokens[:-1].tolist())
        assert torch.equal(cache.hidden.first(len(one.tokens) - 1).bfloat16(), one.hidden)


def test_end_tokens_end_an_answer_and_bytes_are_bounded(target, tmp_path):
    ends = frozenset(range(0, VOCAB, 2))
    generate_data(target, PROMPTS, tmp_path / "ends", OPTIONS, ends=ends)
    for one in read_data(tmp_path / "ends"):
        answer = one.tokens[one.prompt_length :].tolist()
        assert not ends & set(answer[:-1])
    generate_data(target, PROMPTS, tmp_path / "few", OPTIONS, max_bytes=1)
    size = sum(path.stat().st_size for path in (tmp_path / "few").glob("shard-*"))
    generate_data(target, PROMPTS, tmp_path / "few", OPTIONS, max_bytes=1)
    assert size == sum(path.stat().st_size for path in (tmp_path / "few").glob("shard-*"))


def test_data_of_other_options_are_not_mixed(target, tmp_path):
    generate_data(target, PROMPTS[:2], tmp_path, OPTIONS)
    with pytest.raises(UsageError, match="another max_tokens"):
        generate_data(target, PROMPTS, tmp_path, replace(OPTIONS, max_tokens=3))


def test_unrolled_steps_are_what_the_head_does_when_it_drafts(target):
    """Teacher-forced logits of step k at a position are those of the k-th node of a chain."""
    module = head_module()
    text = some_tokens(24, seed=3)
    cache = target.new_cache(40, (0, 1))
    target.prefill(cache, text[:-1])
    hidden = cache.hidden.first(len(text) - 1).clone()
    one = Example(torch.tensor(text), 0, hidden)
    teacher = teacher_of(target, module.ids)
    steps = 4
    with torch.no_grad():
        found = unroll(
            module, teacher, collate([one, Example(one.tokens[:9], 0, hidden[:8])]), steps
        )

    def embed(tokens):
        return teacher.embedding[tokens]

    head = TorchHead(module, embed)
    for start in (5, 11):
        own = head.new_cache(60)
        logits, state = head.feed(own, text[1 : start + 2], hidden[: start + 1])
        rows = [logits]
        for step in range(1, steps):
            chain = Proposal.chain(text[start + 2 : start + 2 + step])
            more, states = head.grow(own, chain, range(step - 1, step), state[None])
            rows.append(more[0])
            state = states[0]
        for step, row in enumerate(rows):
            # The first sequence's rows come first, from position `step` on.
            expected = found[step][0][start + step - step]
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


def test_what_is_judged_is_the_target_s_own_law(target):
    module = head_module()
    text = some_tokens(20, seed=5)
    cache = target.new_cache(40, (0, 1))
    logits = target.score(cache, text[:1], Proposal.chain(text[1:]))
    one = Example(torch.tensor(text), 0, cache.hidden.first(19).clone())
    with torch.no_grad():
        found = unroll(module, teacher_of(target, module.ids), collate([one]), 1)
    # Row i is judged by the law of token i + 2, which is the target's row i + 1. Its own pass
    # rounds activations to bytes, so they agree as well as that lets them.
    expected = logits[1:19, module.ids]
    spread = float(expected.std())
    assert (found[0][1] - expected).abs().mean() < 0.05 * spread


@pytest.fixture
def chatting(target):
    return Engine(target, new_tokenizer(), drafter="none")


def recipe(tmp_path, method, **changes):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"w{n} w{n + 3} w5"}) + "\n" for n in range(6, 30))
    )
    options = TrainOptions(epochs=2, batch_tokens=64, **changes)
    return Recipe(method, str(path), max_answer=14, draft_vocab=40, options=options)


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_head_comes_out_and_drafts(chatting, tmp_path, method):
    told = []
    found = train_draft(chatting, recipe(tmp_path, method), tmp_path / "head", told=told.append)
    assert told[-1].step == told[-1].steps
    assert all(0.0 <= rate <= 1.0 for rate in [*found.acceptance, *found.greedy, *found.best_four])
    assert 1.0 <= found.tokens_per_call <= found.tree_tokens_per_call
    _, about = read_head(tmp_path / "head")
    assert about["training"]["recipe"]["method"] == method
    plain = chatting.generate("w7 w10 w5", max_tokens=20)
    ours = chatting.generate("w7 w10 w5", max_tokens=20, drafter=f"{method}:{tmp_path / 'head'}")
    assert ours.token_ids == plain.token_ids
    assert ours.trace.summary()["drafted_tokens"] > 0


def test_training_that_was_broken_off_ends_the_same(chatting, tmp_path):
    asked = recipe(tmp_path, "eagle", share=1.0)
    train_draft(chatting, asked, tmp_path / "whole")
    for _ in range(3):  # each time a step and no more
        train_draft(chatting, asked, tmp_path / "parts", deadline_s=0.0)
    train_draft(chatting, asked, tmp_path / "parts")
    one, other = (read_head(tmp_path / name)[0] for name in ("whole", "parts"))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_training_gets_better(chatting, tmp_path):
    asked = recipe(tmp_path, "eagle", share=1.0)
    losses = []
    long = replace(asked, options=replace(asked.options, epochs=30, rate=3e-3))
    train_draft(chatting, long, tmp_path / "head", told=lambda p: losses.append(p.loss))
    short = replace(asked, options=replace(asked.options, epochs=1))
    train_draft(chatting, short, tmp_path / "short", told=lambda p: losses.append(p.loss))
    assert losses[-2] < losses[-1]


def test_mistakes_are_told(chatting, tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'eagle'"):
        train_draft(chatting, recipe(tmp_path, "eagel"), tmp_path)
    hf = Engine(new_module("llama"), new_tokenizer())
    with pytest.raises(UsageError, match="--runtime native"):
        train_draft(hf, recipe(tmp_path, "eagle"), tmp_path)
    asked = recipe(tmp_path, "eagle")
    train_draft(chatting, asked, tmp_path / "head", deadline_s=0.0)
    other = replace(asked, options=replace(asked.options, rate=0.5))
    with pytest.raises(UsageError, match="other training options"):
        train_draft(chatting, other, tmp_path / "head")


def weights(folder):
    return dict(read_head(folder)[0].named_parameters())


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_head_that_is_begun_from_another(chatting, tmp_path, method):
    """With hardly a step it is the other one still, tokens and all; a fresh one is not."""
    first = head_module() if method == "eagle" else heads_module()
    write_head(first, tmp_path / "first", {"target": {"weights": "1"}})
    asked = recipe(tmp_path, method, rate=1e-9)
    begun = replace(asked, start=str(tmp_path / "first"), draft_vocab=7)
    train_draft(chatting, begun, tmp_path / "begun")
    train_draft(chatting, asked, tmp_path / "fresh")
    start, near, far = (weights(tmp_path / name) for name in ("first", "begun", "fresh"))
    assert start.keys() == near.keys() == far.keys()
    for name, value in start.items():
        torch.testing.assert_close(near[name], value, atol=1e-3, rtol=1e-2)
    assert any((far[name] - value).abs().max() > 0.05 for name, value in start.items()
               if far[name].shape == value.shape)  # fmt: skip
    module, about = read_head(tmp_path / "begun")
    assert torch.equal(module.ids, first.ids)
    assert about["training"]["began_from"] == {
        "head": str(tmp_path / "first"), "target": {"weights": "1"}, "training": None
    }  # fmt: skip
    assert about["training"]["recipe"]["start"] == str(tmp_path / "first")
    assert read_head(tmp_path / "fresh")[1]["training"]["began_from"] is None


def test_training_further_gets_further(chatting, tmp_path):
    asked = recipe(tmp_path, "eagle", share=1.0, rate=3e-3)
    losses = []

    def told(progress):
        losses.append(progress.loss)

    fresh = replace(asked, options=replace(asked.options, epochs=8))
    train_draft(chatting, fresh, tmp_path / "first")
    train_draft(chatting, asked, tmp_path / "fresh", told=told)
    further = replace(asked, start=str(tmp_path / "first"))
    train_draft(chatting, further, tmp_path / "further", told=told)
    assert losses[1] < losses[0]


def test_a_head_that_does_not_read_the_last_layer(chatting, tmp_path):
    """Heads that people share often do not; the target's law needs that layer all the same."""
    config = replace(head_module().config, taps=(0,))
    first = EagleModule(config)
    write_head(first, tmp_path / "first", {})
    asked = replace(recipe(tmp_path, "eagle"), start=str(tmp_path / "first"))
    train_draft(chatting, asked, tmp_path / "begun")
    assert json.loads((tmp_path / "begun/data/data.json").read_text())["taps"] == [0, 1]
    module, _ = read_head(tmp_path / "begun")
    assert module.config.taps == (0,)
    one = next(iter(read_data(tmp_path / "begun/data")))
    # Its logits are those of a head that was given its own layer alone, and its teacher the last's.
    teacher = teacher_of(chatting.model, module.ids)
    batch = collate([one])
    with torch.no_grad():
        ((mine, wanted),) = unroll(module, teacher, batch, 1)
        expected = teacher.logits(one.hidden[1:, 32:].float())
        alone = Example(one.tokens, 0, torch.cat([one.hidden[:, :32]] * 2, dim=-1))
        ((same, _),) = unroll(module, teacher, collate([alone]), 1)
    torch.testing.assert_close(wanted, expected)
    torch.testing.assert_close(mine, same)
    plain = chatting.generate("w7 w10 w5", max_tokens=20, plain=True)
    ours = chatting.generate(
        "w7 w10 w5", max_tokens=20, drafter=f"eagle:{tmp_path / 'begun'}", draft_length=3
    )
    assert ours.token_ids == plain.token_ids


def test_the_head_that_comes_with_a_target(chatting, tmp_path, monkeypatch):
    write_head(head_module(), tmp_path / "with-it", {})
    monkeypatch.setattr(loading, "shipped_head", lambda name: tmp_path / "with-it")
    asked = replace(recipe(tmp_path, "eagle"), start="shipped")
    train_draft(chatting, asked, tmp_path / "head", deadline_s=0.0)
    _, about = read_head(tmp_path / "head")
    assert about["training"]["began_from"] == {
        "head": "shipped", "target": None, "training": None
    }  # fmt: skip


def test_heads_that_nothing_can_begin_from(chatting, tmp_path):
    write_head(head_module(hidden=48), tmp_path / "wide", {})
    write_head(heads_module(), tmp_path / "medusa", {})
    for error, words, start in (
        (ModelFileError, "made for another target: one of width 48", tmp_path / "wide"),
        (UnsupportedError, "no head of the kind that --method eagle fits", tmp_path / "medusa"),
        (ModelNotFoundError, "There is no draft head", tmp_path / "nowhere"),
        (ModelNotFoundError, "No draft head comes with", "shipped"),
    ):
        asked = replace(recipe(tmp_path, "eagle"), start=str(start))
        with pytest.raises(error, match=words):
            train_draft(chatting, asked, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    train_draft(chatting, recipe(tmp_path, "eagle"), tmp_path / "head", deadline_s=0.0)
    write_head(EagleModule(replace(head_module().config, taps=(1,))), tmp_path / "first", {})
    asked = replace(recipe(tmp_path, "eagle"), start=str(tmp_path / "first"))
    with pytest.raises(UsageError, match="other training options"):
        train_draft(chatting, asked, tmp_path / "head")


def test_so_much_of_a_prompt_is_fed_before_an_answer():
    one = Example(torch.arange(30), 12, torch.zeros(29, 1))
    for context, window, expected in (
        (5, 40, [(7, 29, 5)]),
        (0, 40, [(12, 29, 0)]),
        (99, 40, [(0, 29, 12)]),
        (5, 10, [(7, 17, 5), (17, 27, 0)]),  # what is left is too short
    ):
        options = TrainOptions(context=context, window=window)
        found = [w for batch in batches([one], options, 0) for w in batch]
        found.sort(key=lambda w: int(w.tokens[0]))
        assert [
            (int(w.tokens[0]), int(w.tokens[0]) + len(w.hidden), w.prompt_length) for w in found
        ] == expected


class TestAdapter:
    @pytest.fixture
    def base(self, tmp_path):
        return save(randomise(new_module("llama")), tmp_path / "target")

    def load(self, base, adapter=None, **options):
        options = {"drafter": "none", "dtype": "int8", "runtime": "native"} | options
        return Engine.load(str(base), adapter=adapter, **options)

    def test_what_it_says_is_learned_and_it_is_in_the_record(self, base, tmp_path):
        adapter = write_adapter(tmp_path / "adapter")
        asked = recipe(tmp_path, "eagle")
        engines = {None: self.load(base), adapter: self.load(base, adapter)}
        for name, engine in engines.items():
            train_draft(
                engine, asked, tmp_path / f"head-{bool(name)}", data=tmp_path / str(bool(name))
            )
        with_it, without = (by_prompt(tmp_path / str(flag)) for flag in (True, False))
        assert with_it.keys() == without.keys()
        different = [
            one for one in with_it if not torch.equal(with_it[one].tokens, without[one].tokens)
        ]
        assert len(different) > len(with_it) / 2
        prompt = different[0]
        cache = engines[adapter].model.new_cache(40, (1,))
        one = with_it[prompt]
        engines[adapter].model.prefill(cache, one.tokens[:-1].tolist())
        assert torch.equal(cache.hidden.first(len(one.hidden)).bfloat16(), one.hidden)
        _, about = read_head(tmp_path / "head-True")
        assert about["target"] == engines[adapter].fingerprint().to_dict()
        assert about["target"]["adapter"]
        self.load(base, adapter, drafter=f"eagle:{tmp_path / 'head-True'}", strict=True)

    def test_data_of_another_adapter_or_other_weights_are_not_mixed(self, base, tmp_path):
        engine = self.load(base)
        adapter = write_adapter(tmp_path / "adapter")
        data = tmp_path / "data"
        asked = recipe(tmp_path, "eagle")
        train_draft(engine, asked, tmp_path / "a", data=data, deadline_s=0.0)
        with pytest.raises(UsageError, match="made with another adapter"):
            train_draft(self.load(base, adapter), asked, tmp_path / "b", data=data)
        # Folders from before there were adapters are of none.
        about = json.loads((data / "data.json").read_text())
        assert about.pop("adapter") == ""
        weights = about.pop("weights")
        assert weights == engine.fingerprint().weights
        (data / "data.json").write_text(json.dumps(about))
        train_draft(engine, asked, tmp_path / "c", data=data, deadline_s=0.0)
        with pytest.raises(UsageError, match="made with another adapter"):
            train_draft(self.load(base, adapter), asked, tmp_path / "b", data=data)
        (data / "data.json").write_text(json.dumps(about | {"weights": "0"}))
        with pytest.raises(UsageError, match="made with another weights"):
            train_draft(engine, asked, tmp_path / "d", data=data)

    def test_a_head_is_adapted_from_the_command_line(self, base, tmp_path, capsys):
        adapter = write_adapter(tmp_path / "adapter")
        asked = recipe(tmp_path, "eagle")
        command = [
            "train", "--target", str(base), "--prompts", str(asked.prompts), "--max-answer", "14",
            "--draft-vocab", "40", "--epochs", "1", "--batch-tokens", "64", "--json",
        ]  # fmt: skip
        main = import_main()
        for more in (
            ["--out", str(tmp_path / "first")],
            ["--out", str(tmp_path / "second"), "--adapter", str(adapter), "--start",
             str(tmp_path / "first"), "--context", "4", "--window", "64"],
        ):  # fmt: skip
            with pytest.raises(SystemExit) as ended:
                main([*command, *more])
            assert not ended.value.code, capsys.readouterr().err
        _, first = read_head(tmp_path / "first")
        _, second = read_head(tmp_path / "second")
        began_from = second["training"]["began_from"]
        assert began_from == {"head": str(tmp_path / "first"), **first}
        assert second["target"] == first["target"] | {"adapter": second["target"]["adapter"]}
        assert second["target"]["adapter"] != first["target"]["adapter"] == ""
        options = second["training"]["recipe"]["options"]
        assert (options["context"], options["window"]) == (4, 64)
        options = first["training"]["recipe"]["options"]
        assert (options["context"], options["window"], options["rate"]) == (32, 256, 1e-3)


def import_main():
    from outrider.cli.main import main

    return main


@pytest.mark.parametrize(
    "text", ['{"prompt": ', '{"answer": "x"}', "[]", "", '{"turns": []}'], ids=str
)
def test_prompt_files_that_cannot_be_read(tmp_path, text):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=r"prompts\.jsonl"):
        read_prompts(str(path))
    with pytest.raises(PromptError, match="nowhere"):
        read_prompts(str(tmp_path / "nowhere.txt"))


def test_prompt_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_prompts(str(tmp_path / "a.txt")) == ["one", "two"]
    first, second = ([{"role": "user", "content": text}] for text in "ac")
    lines = [{"turns": ["a", "b"]}, {"messages": second}, {"prompt": "d"}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_prompts(str(tmp_path / "b.jsonl")) == [first, second, "d"]
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(PromptError, match="Line 1"):  # half a message is none
        read_prompts(str(tmp_path / "c.jsonl"))
    assert len(read_prompts(7)) == 7


TEMPLATE = "<s> {{ messages[0]['content'] }} </s> w9"


@pytest.fixture
def writing(target, monkeypatch):
    """A target that is called on to write a message, in a tokenizer that knows few words."""
    monkeypatch.setattr(own, "_TWO", ("w5", "w6"))
    words = new_tokenizer()
    words.chat_template = TEMPLATE
    return Engine(target, HFTokenizer(words), drafter="none")


def test_messages_that_the_target_writes_itself(writing, tmp_path):
    heard = []
    some = own_prompts(writing, 3, tmp_path / "a", told=lambda *told: heard.append(told))
    assert heard == [(1, 3), (2, 3), (3, 3)]
    assert len(set(some)) == 3
    # The same again from the file, and from nothing.
    assert own_prompts(writing, 2, tmp_path / "a") == some[:2]
    assert own_prompts(writing, 3, tmp_path / "b") == some
    assert own_prompts(writing, 3, tmp_path / "c", seed=1) != some
    assert read_prompts(str(tmp_path / "a" / "prompts.jsonl")) == some
    # A run that was broken off goes on, without what it wrote half of.
    kept = tmp_path / "b" / "prompts.jsonl"
    whole = kept.read_text()
    kept.write_text(whole[: whole.index("\n") + 9])
    assert sorted(own_prompts(writing, 3, tmp_path / "b")) == sorted(some)
    assert sorted(kept.read_text().splitlines()) == sorted(whole.splitlines())
    # Each is what the target goes on with after the template's beginning, up to an end.
    assert own._beginning(writing) == [1]
    assert all("</s>" not in text and text == text.strip() for text in some)


def test_a_draft_learns_from_several_sources_of_prompts(writing, tmp_path):
    (tmp_path / "more.txt").write_text("w7 w8\nw8 w9\n")
    source = f"own:8,{tmp_path / 'more.txt'}"
    asked = replace(recipe(tmp_path, "eagle"), prompts=source)
    train_draft(writing, asked, tmp_path / "head")
    assert len(list(read_data(tmp_path / "head" / "data"))) == 10
    _, about = read_head(tmp_path / "head")
    assert about["training"]["recipe"]["prompts"] == source


@pytest.mark.parametrize("count", ["", "0", "some", "-1"])
def test_how_many_messages_of_its_own(writing, tmp_path, count):
    with pytest.raises(UsageError, match="target's own"):
        train_draft(writing, replace(recipe(tmp_path, "eagle"), prompts=f"own:{count}"), tmp_path)


def test_targets_that_write_no_messages(writing, chatting, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no chat template"):
        own_prompts(chatting, 3, tmp_path)
    monkeypatch.setattr(own, "_LONGEST", 1)  # only an end, which says nothing
    with pytest.raises(UsageError, match="0 different messages in 12"):
        own_prompts(writing, 3, tmp_path)


def test_factors_in_bfloat16(chatting, tmp_path):
    """Near what float32 comes to, and not the same; afterwards products are as they were."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    losses = []
    for products in ("float32", "bfloat16"):
        asked = recipe(tmp_path, "eagle", share=1.0, products=products)
        train_draft(chatting, asked, tmp_path / products, told=lambda p: losses.append(p.loss))
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_frequent_tokens_hold_those_that_must_be_in():
    examples = [Example(torch.tensor([5, 5, 5, 3, 3, 9]), 0, torch.zeros(5, 1))]
    assert frequent_tokens(examples, 3, [7]).tolist() == [3, 5, 7]


def test_taps():
    assert default_taps(30) == (3, 15, 29)
    assert default_taps(2) == (1,)


def test_the_command_line(tmp_path, capsys):
    main = import_main()
    folder = save(randomise(new_module("llama")), tmp_path / "target")
    asked = recipe(tmp_path, "eagle")
    out = tmp_path / "head"
    command = [
        "train", "--target", str(folder), "--out", str(out), "--prompts", str(asked.prompts),
        "--max-answer", "14", "--draft-vocab", "40", "--epochs", "1", "--batch-tokens", "64",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([*command, "--json"])
    assert not ended.value.code
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == str(out)
    assert told["validation"]["tokens_per_call"] >= 1.0
    request = ["generate", "w7 w10 w5", "--target", str(folder), "--max-tokens", "9", "--json"]
    texts = []
    for drafter in ("none", f"eagle:{out}"):
        with pytest.raises(SystemExit):
            main([*request, "--drafter", drafter])
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0]["token_ids"] == texts[1]["token_ids"]
    assert texts[1]["trace"]["drafted_tokens"] > 0
    with pytest.raises(SystemExit) as ended:
        main([*command, "--rate", "0.1"])
    assert ended.value.code == 2
    assert "other training options" in capsys.readouterr().err
