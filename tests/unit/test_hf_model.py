"""The ``hf`` runtime over families of models, and what loading refuses.

Cases are numbered as in the project's list of faults that speculative decoders have had.
"""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from outrider import Engine
from outrider.core.proposal import Proposal
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.script import ScriptDrafter
from outrider.drafters.shape import parse_shape
from outrider.engine import round as engine_round
from outrider.engine.prefix import Prefix
from outrider.errors import (
    ModelError,
    ModelFileError,
    NotEnoughMemoryError,
    RollbackError,
    UnsupportedError,
)
from outrider.models import hf, memory
from outrider.models.hf import HFModel
from outrider.models.locate import Located, locate
from tests.small_models import (
    FAMILIES,
    PLAIN,
    RECURRENT,
    VOCAB,
    WINDOW,
    garbage,
    module,
    new_module,
    new_tokenizer,
    padded,
    partly_right,
    save,
    shared,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = some_tokens(9)


@cache
def plain_ids(family: str, length: int = len(PROMPT), count: int = 40) -> list[int]:
    engine = Engine(shared(family), drafter="none")
    return engine.generate(some_tokens(length), max_tokens=count).token_ids


def drafters(plain: list[int], prompt_length: int = len(PROMPT)) -> dict[str, object]:
    return {
        "ngram": NgramDrafter(3, 1),
        "model": ModelDrafter(shared("qwen2")),
        "garbage": ScriptDrafter(garbage),
        "partly": partly_right(plain, prompt_length),
        "right": ScriptDrafter(plain),
    }


@pytest.mark.parametrize("family", FAMILIES)
class TestFamilies:
    def test_plain_ids_are_those_of_transformers(self, family):
        ids = torch.tensor([PROMPT])
        expected = module(family).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
        )
        assert plain_ids(family) == expected[0, len(PROMPT) :].tolist()
        assert len(set(plain_ids(family))) > 3

    @pytest.mark.parametrize("k", [1, 3, 8])
    def test_greedy_ids_equal_plain(self, family, k):
        expected = plain_ids(family)
        for name, drafter in drafters(expected).items():
            output = Engine(shared(family), drafter=drafter, draft_length=k).generate(
                PROMPT, max_tokens=40
            )
            assert output.token_ids == expected, name
            summary = output.trace.summary()
            if name in ("garbage", "partly"):
                assert summary["rejected_rounds"] > 0
            if name == "right":
                assert summary["acceptance_rate"] == 1.0

    def test_first_logits_are_the_same_whatever_is_drafted(self, family):
        """Case 7: another split of the prefill must not flip the first token."""
        model = shared(family)
        for length in (1, 2, 9, 30):
            prompt, rows = some_tokens(length), []
            for draft in ([], [5], garbage(prompt, 8)):
                cache = model.new_cache(64)
                model.prefill(cache, prompt[:-1])
                rows.append(model.score(cache, prompt[-1:], Proposal.chain(draft))[0])
            assert float((rows[0] - rows[1]).abs().max()) < 1e-4
            assert float((rows[0] - rows[2]).abs().max()) < 1e-4

    def test_a_later_request_finds_nothing_of_an_earlier_one(self, family):
        engine = Engine(shared(family), drafter=ScriptDrafter(garbage))
        first = engine.generate(PROMPT, max_tokens=12).token_ids
        engine.generate(some_tokens(20, seed=5), max_tokens=12)
        assert engine.generate(PROMPT, max_tokens=12).token_ids == first

    def test_the_cache_of_an_earlier_turn_serves_a_later_one(self, family):
        prefix, engine = Prefix(), Engine(shared(family), drafter=ScriptDrafter(garbage))
        text = PROMPT
        for turn in range(3):
            generation = engine.stream(text, max_tokens=7, prefix=prefix)
            output = generation.output
            prefix.keep(generation.session)
            assert output.token_ids == engine.generate(text, max_tokens=7).token_ids
            # The second turn goes on, the third branches off earlier.
            text = [*text, *output.token_ids, *some_tokens(3, seed=turn)]
            if turn == 1:
                text = [*text[:12], *some_tokens(3, seed=9)]


class TestRecurrent:
    @pytest.mark.parametrize("family", RECURRENT)
    def test_case_7_partial_rejections(self, family):
        expected = plain_ids(family)
        output = Engine(
            shared(family), drafter=partly_right(expected, len(PROMPT)), draft_length=3
        ).generate(PROMPT, max_tokens=40)
        assert output.token_ids == expected
        summary = output.trace.summary()
        assert 0 < summary["accepted_tokens"] < summary["drafted_tokens"]

    @pytest.mark.parametrize("family", RECURRENT)
    def test_accepted_tokens_gather_only_so_far(self, family, monkeypatch):
        """Each partly rejected round leaves its tokens to be fed again; that must end."""
        monkeypatch.setattr(engine_round, "_MOST_PENDING", 6)
        expected = plain_ids(family)
        model = HFModel(module(family))
        fed: list[tuple[int, int]] = []
        score = model.score

        def watched(cache, tokens, proposal):
            fed.append((len(tokens), len(proposal)))
            return score(cache, tokens, proposal)

        model.score = watched

        def last_wrong(tokens, length):
            draft = expected[len(tokens) - len(PROMPT) :][:length]
            return [*draft[:-1], *((token + 1) % VOCAB for token in draft[-1:])]

        output = Engine(model, drafter=ScriptDrafter(last_wrong), draft_length=3).generate(
            PROMPT, max_tokens=40
        )
        assert output.token_ids == expected
        assert max(pending for pending, _ in fed) <= 6 + 3 + 1
        assert any(pending > 6 and not drafted for pending, drafted in fed)  # a settling round
        assert all(not drafted for pending, drafted in fed if pending > 6)
        after = [fed[i + 1][0] for i, (pending, _) in enumerate(fed[:-1]) if pending > 6]
        assert after
        assert set(after) == {1}

    @pytest.mark.parametrize("family", RECURRENT)
    def test_as_a_draft_model_it_is_refused(self, family):
        with pytest.raises(RollbackError, match="by length"):
            ModelDrafter(shared(family))


class TestSlidingWindow:
    @pytest.mark.parametrize("family", ["mistral", "gemma3"])
    @pytest.mark.parametrize("length", range(WINDOW - 5, WINDOW + 6))
    def test_case_8_across_the_windows_edge(self, family, length):
        expected = plain_ids(family, length, 3 * WINDOW)
        for name, drafter in drafters(expected, length).items():
            output = Engine(shared(family), drafter=drafter, draft_length=5).generate(
                some_tokens(length), max_tokens=3 * WINDOW
            )
            assert output.token_ids == expected, name

    @pytest.mark.parametrize("same_numbers", [False, True])
    def test_loaded_the_other_way_the_window_still_holds(self, same_numbers):
        model = HFModel(new_module("mistral"), same_numbers=same_numbers)
        cache = model.new_cache(64)
        text = some_tokens(40)
        model.prefill(cache, text[:20])
        rows = model.score(cache, text[20:21], Proposal.chain(text[21:]))
        with torch.no_grad():
            expected = module("mistral")(torch.tensor([text])).logits[0, 20:]
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4)
        with torch.no_grad():
            other = module("llama")(torch.tensor([text])).logits[0, 20:]
        assert not torch.allclose(rows, other, atol=0.1)  # same weights, no window


@pytest.mark.parametrize("same_numbers", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
class TestContextEnd:
    """Case 9; gpt2 looks positions up in a table, so one too many is an error or worse."""

    def model(self, family: str, same_numbers: bool) -> HFModel:
        limit = {"n_positions": 100} if family == "gpt2" else {"max_position_embeddings": 100}
        return HFModel(new_module(family, **limit), same_numbers=same_numbers)

    def test_case_9(self, family, same_numbers):
        model = self.model(family, same_numbers)
        prompt = some_tokens(90)
        plain = Engine(model, drafter="none").generate(prompt, max_tokens=50)
        assert len(plain.token_ids) == 10
        assert plain.finish_reason == "length"
        limits = {"max_position_embeddings": 94}
        found = drafters(plain.token_ids, 90)
        found["same context"] = ModelDrafter(self.model(family, same_numbers))
        found["shorter context"] = ModelDrafter(HFModel(new_module("llama", **limits)))
        found["no room at all"] = ModelDrafter(HFModel(new_module("gpt2", n_positions=60)))
        for name, drafter in found.items():
            output = Engine(model, drafter=drafter, draft_length=5).generate(prompt, max_tokens=50)
            assert output.token_ids == plain.token_ids, name
            assert output.finish_reason == "length"

    @pytest.mark.parametrize("length", [1, 97, 98, 99])
    def test_prompts_of_one_token_and_of_nearly_all(self, family, same_numbers, length):
        model = self.model(family, same_numbers)
        prompt = some_tokens(length)
        expected = Engine(model, drafter="none").generate(prompt, max_tokens=100)
        assert len(expected.token_ids) == 100 - length
        output = Engine(model, drafter=ScriptDrafter(garbage), draft_length=5).generate(
            prompt, max_tokens=100
        )
        assert output.token_ids == expected.token_ids


@pytest.mark.parametrize("same_numbers", [False, True])
def test_a_tree_wider_than_the_room_that_is_left(same_numbers):
    """Its nodes share positions, so it fits; the padding behind it must not look any further."""
    model = HFModel(new_module("gpt2", n_positions=20), same_numbers=same_numbers)
    text, width = some_tokens(18), 10
    cache = model.new_cache(20)
    model.prefill(cache, text[:-1])
    tree = Proposal(tuple(range(width)), (-1,) * width, (None,) * width)
    rows = model.score(cache, text[-1:], tree)
    cache.keep(18, [7])
    alone = model.new_cache(20)
    expected = model.score(alone, text, Proposal.chain([7]))
    torch.testing.assert_close(rows[[0, 8]], expected, rtol=0, atol=1e-4)


class TestPaddedVocabulary:
    """Case 10: rows that stand for no token, and would win if they were let in."""

    @pytest.fixture(scope="class")
    @staticmethod
    def folders(tmp_path_factory):
        root = tmp_path_factory.mktemp("padded")
        target, draft = new_module("llama"), new_module("llama", num_hidden_layers=1)
        draft.load_state_dict(target.state_dict(), strict=False)
        return {
            "target": save(target, root / "target"),
            "draft": save(draft, root / "draft"),
            "padded target": save(padded(target, 128), root / "padded-target"),
            "padded draft": save(padded(draft, 128), root / "padded-draft"),
        }

    def test_the_rows_would_win(self, folders):
        made = transformers.AutoModelForCausalLM.from_pretrained(folders["padded target"])
        with torch.no_grad():
            best = made(torch.tensor([PROMPT])).logits.argmax(-1)
        assert (best >= VOCAB).all()

    @pytest.mark.parametrize("runtime", ["hf", "native"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        ("target", "draft"),
        [("padded target", "draft"), ("target", "padded draft"), ("padded target", "padded draft")],
    )
    def test_output_equals_plain(self, folders, target, draft, temperature, runtime):
        request = {"max_tokens": 40, "temperature": temperature, "seed": 3, "ignore_eos": True}
        options = {"dtype": "float32", "runtime": runtime}
        plain = Engine.load(str(folders["target"]), drafter="none", **options)
        expected = plain.generate(PROMPT, **request).token_ids
        engine = Engine.load(str(folders[target]), drafter=f"model:{folders[draft]}", **options)
        assert engine.model.vocab_size == VOCAB
        for length in (1, 4):
            output = engine.generate(PROMPT, draft_length=length, **request)
            assert output.token_ids == expected
            assert output.trace.summary()["accepted_tokens"] > 0


class TestUsersOwnModel:
    def test_nothing_about_it_is_changed(self):
        made = new_module("llama")
        before = copy.deepcopy(made.generation_config.to_dict()), made.config.to_dict()
        Engine(made, drafter=ScriptDrafter(garbage)).generate(PROMPT, max_tokens=8)
        assert made.config._attn_implementation == "sdpa"
        assert (made.generation_config.to_dict(), made.config.to_dict()) == before
        assert not any(weight.requires_grad is False for weight in made.parameters())

    def test_in_training_it_decodes_without_dropout_and_stays_in_training(self):
        made = new_module("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
        expected = Engine(made, drafter="none").generate(PROMPT, max_tokens=12).token_ids
        made.train()
        made.transformer.h[0].eval()  # a part that its owner has frozen
        before = [part.training for part in made.modules()]
        output = Engine(made, drafter=ScriptDrafter(garbage)).generate(PROMPT, max_tokens=12)
        assert output.token_ids == expected
        assert [part.training for part in made.modules()] == before

    def test_a_failed_pass_puts_training_mode_back(self):
        made = new_module("llama").train()
        model = HFModel(made)
        with pytest.raises(IndexError):
            model.score(model.new_cache(8), [VOCAB + 5], Proposal())
        assert made.training


class TestRefused:
    def test_encoder_decoders(self):
        config = transformers.T5Config(
            vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
        )
        made = transformers.T5ForConditionalGeneration(config)
        with pytest.raises(ModelError, match="T5ForConditionalGeneration is not a decoder-only"):
            Engine(made)

    def test_encoders_that_were_set_up_as_such(self):
        config = transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
        with pytest.raises(ModelError, match=r"reads ahead.*is_decoder=true"):
            Engine(transformers.BertLMHeadModel(config))
        config.is_decoder = True
        made = transformers.BertLMHeadModel(config)
        output = Engine(made, drafter=ScriptDrafter(garbage)).generate(PROMPT, max_tokens=4)
        assert (
            output.token_ids
            == Engine(made, drafter="none").generate(PROMPT, max_tokens=4).token_ids
        )

    def test_models_without_transformers_cache(self):
        config = transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2)
        with pytest.raises(ModelError, match="does not take transformers' cache"):
            Engine(transformers.RwkvForCausalLM(config))

    def test_models_without_an_output_matrix_for_tokens(self):
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2,
        )  # fmt: skip
        with pytest.raises(ModelError, match="not a decoder-only language model"):
            Engine(transformers.LlamaModel(config))


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return r"model\.safetensors"


def garble(folder):
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 200)
    return r"model\.safetensors"


def lose_a_tensor(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    return r"(lacks 1 of \d+ tensors|tensor).*model\.layers\.1\.mlp\.up_proj\.weight"


def reshape_a_tensor(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return r"model\.layers\.1\.mlp\.up_proj\.weight.*47.*48"


def other_family(folder):
    """The configuration of one family, the weights of another."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    file.write_text(json.dumps(config))
    return "lacks .* tensors"


def unknown_family(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "gtp9"}))
    return "gtp9"


def no_language_model(folder):
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return "T5Config"


def pickled_only(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return r"only pickled weights \(pytorch_model\.bin\)"


def no_json(folder):
    (folder / "config.json").write_text("{")
    return "cannot be read"


def config_is_a_list(folder):
    (folder / "config.json").write_text("[]")
    return r"config\.json holds no object"


def no_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return "tokenizer files of .* missing or broken"


def no_tokenizer_where_one_would_be_made_up(folder):
    save(new_module("gpt2"), folder)
    return no_tokenizer(folder)


def broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{")
    return "tokenizer files of .* missing or broken"


BROKEN = [
    truncate,
    garble,
    lose_a_tensor,
    reshape_a_tensor,
    other_family,
    unknown_family,
    no_language_model,
    pickled_only,
    no_json,
    config_is_a_list,
    no_tokenizer,
    no_tokenizer_where_one_would_be_made_up,
    broken_tokenizer,
]


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("role", "runtime"), [("target", "hf"), ("target", "auto"), ("draft", "hf")]
)
def test_case_20_a_model_that_cannot_be_loaded_is_told_by_file_and_reason(
    tmp_path, spoil, role, runtime
):
    """Whichever runtime was to load it; a target's need not be the draft's."""
    target = save(new_module("llama"), tmp_path / "target")
    bad = save(new_module("llama"), tmp_path / "broken-one")
    reason = spoil(bad)
    names = (str(bad), "none") if role == "target" else (str(target), f"model:{bad}")
    with pytest.raises(ModelFileError, match=reason) as caught:
        Engine.load(names[0], drafter=names[1], dtype="float32", runtime=runtime)
    message = str(caught.value)
    assert str(bad) in message
    assert caught.value.hint
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tied_weights_are_not_missing(tmp_path, family):
    made = new_module(family, tie_word_embeddings=True)
    folder = save(made, tmp_path / family)
    stored = load_file(folder / "model.safetensors")
    assert len(stored) < len(made.state_dict())
    engine = Engine.load(str(folder), drafter="none", dtype="float32", runtime="hf")
    expected = Engine(made, drafter="none").generate(PROMPT, max_tokens=12).token_ids
    assert engine.generate(PROMPT, max_tokens=12, ignore_eos=True).token_ids == expected


@pytest.mark.parametrize("family", [*PLAIN, "mistral", "mamba", "lfm2"])
def test_a_folder_loads_as_the_model_that_was_saved(tmp_path, family):
    folder = save(new_module(family), tmp_path / family)
    engine = Engine.load(str(folder), drafter=ScriptDrafter(garbage), dtype="float32", runtime="hf")
    output = engine.generate(PROMPT, max_tokens=40, ignore_eos=True)
    assert output.token_ids == plain_ids(family)
    assert output.text


def test_memory_is_asked_before_weights_are_read(tmp_path, monkeypatch):
    folder = save(new_module("llama"), tmp_path / "large")
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)

    def read(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(NotEnoughMemoryError, match=r"'large' needs about .* GB .* GB are free"):
        Engine.load(str(folder), runtime="hf")
    assert memory.facts(locate(str(folder))).parameters == sum(
        weight.numel() for weight in module("llama").parameters()
    )


@pytest.mark.parametrize("shape", ["", "#tree=2,2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_fewer_rows_than_the_target(shape, temperature):
    """A text with a token that the draft lacks is one that it cannot read, from there on."""
    target = module("llama")
    draft = ModelDrafter(HFModel(new_module("llama", vocab_size=40)), shape=parse_shape(shape[1:]))
    engine = Engine(target, drafter=draft, rule="auto", draft_length=3)
    request = {"max_tokens": 30, "temperature": temperature, "seed": 1}
    for prompt in ([50, 51], [5, 50, 6, 7], [5, 6, 7]):
        prefix = Prefix()
        for text in (prompt, [*prompt, 4, 5], [6, 7, 8, 9]):
            plain = engine.generate(text, plain=True, **request).token_ids
            generation = engine.stream(text, prefix=prefix, **request)
            output = generation.output
            prefix.keep(generation.session)
            assert output.token_ids == plain
            drafted = output.trace.summary()["drafted_tokens"]
            assert bool(drafted) == (max(text) < 40)


def test_a_device_that_fails_is_not_blamed_on_the_file(tmp_path):
    folder = save(new_module("llama"), tmp_path / "sound")
    with pytest.raises(ModelError, match="could not be moved to the device 'cuda:99'") as caught:
        hf.load(locate(str(folder)), device="cuda:99")
    assert not isinstance(caught.value, ModelFileError)


def test_an_unpacked_model_that_cannot_be_kept_is_a_warning(tmp_path, monkeypatch):
    """Where the cache is no folder, a sound file still loads."""
    file = tmp_path / "sound.gguf"
    file.write_bytes(b"GGUF")
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "check_weights", lambda *_: None)
    monkeypatch.setattr(hf, "_from_gguf", lambda *_: (new_module("llama"), new_tokenizer()))
    with pytest.warns(UserWarning, match=r"could not be kept.*OUTRIDER_CACHE") as heard:
        model, _ = hf.load(Located("gguf", "sound", path=file), device="cpu")
    assert len(heard) == 1
    assert model.vocab_size == VOCAB


def test_prefill_tells_of_its_progress():
    model = shared("llama")
    heard: list[tuple[int, int]] = []
    model.prefill(model.new_cache(1024), some_tokens(700), lambda *told: heard.append(told))
    assert heard == [(512, 700), (700, 700)]


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_whole_numbers_are_for_the_native_runtime(tmp_path, dtype):
    save(new_module("llama"), tmp_path)
    with pytest.raises(UnsupportedError, match=f"--dtype {dtype}"):
        Engine.load(str(tmp_path), runtime="hf", dtype=dtype)
