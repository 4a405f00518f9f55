"""``model.generate(custom_generate=outrider.transformers_generate)`` against plain ``generate``."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from scipy.stats import chi2
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation import SynthIDTextWatermarkingConfig

from outrider import transformers_generate
from outrider.drafters.script import ScriptDrafter
from outrider.errors import PromptError, UsageError
from outrider.integrations.transformers import _given_to_generate
from tests.small_models import VOCAB, garbage, module, new_module, partly_right, save, some_tokens
from tests.tokenizers_for_tests import new_byte_level

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = torch.tensor([some_tokens(9)])
NEW = 40


@pytest.fixture(scope="module")
def model():
    return module("qwen2")


def plain(model, ids=PROMPT, **settings):
    settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None} | settings
    settings.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **settings)


def speculative(model, ids=PROMPT, drafter="ngram", **settings):
    return plain(model, ids, custom_generate=transformers_generate, drafter=drafter, **settings)


def drafters(expected):
    """A shallow copy for a draft, and scripts with right and wrong tokens."""
    new = expected[0, PROMPT.shape[1] :].tolist()
    return {
        "ngram": "ngram",
        "none": "none",
        "model": new_module("qwen2", num_hidden_layers=1),
        "partly": partly_right(new, PROMPT.shape[1]),
        "right": ScriptDrafter(new, default_length=8),
        "garbage": ScriptDrafter(garbage),
    }


class Odd(LogitsProcessor):
    """Depends on the number of tokens and on the last one: a wrong prefix would show."""

    def __call__(self, input_ids, scores):
        scores[:, (input_ids.shape[1] + int(input_ids[0, -1])) % VOCAB] += 3.0
        return scores


SETTINGS = {
    "no processors": {},
    "repetition": {"repetition_penalty": 1.4},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(2, 40))},
    "suppress": {"suppress_tokens": [0, 40, 46, 10]},
    "suppress first": {"begin_suppress_tokens": [0]},
    "bad words": {"bad_words_ids": [[0], [40, 46]]},
    "bias": {"sequence_bias": [[[7], 6.0], [[7, 8], 9.0]]},
    "forced end": {"forced_eos_token_id": 5},
    "max_length": {"max_new_tokens": None, "max_length": 21},
    "one token": {"max_new_tokens": 1},
    "own processor": {"logits_processor": [Odd()]},
    "all together": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 5,
        "eos_token_id": [2, 9, 11],
        "logits_processor": [Odd()],
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_greedy_ids_equal_plain(model, settings):
    expected = plain(model, **settings)
    for name, drafter in drafters(expected).items():
        found = speculative(model, drafter=drafter, **settings)
        assert torch.equal(found, expected), name
        assert found.dtype == expected.dtype


@pytest.mark.parametrize("family", ["llama", "mixtral", "mistral", "falcon-h1"])
def test_other_families(family):
    made = module(family)
    expected = plain(made, repetition_penalty=1.1)
    for name, drafter in drafters(expected).items():
        found = speculative(made, drafter=drafter, repetition_penalty=1.1)
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("at", range(10))
def test_end_tokens_at_every_offset_of_a_block(model, at):
    whole = plain(model)
    new = whole[0, PROMPT.shape[1] :].tolist()
    ends = [new[at], new[at + 7]]
    expected = plain(model, eos_token_id=ends)
    assert expected.shape[1] < whole.shape[1]
    for drafter in (ScriptDrafter(new, default_length=8), "ngram"):
        found = speculative(model, drafter=drafter, eos_token_id=ends)
        assert torch.equal(found, expected)


class SumReached(StoppingCriteria):
    """Ends a row by its own tokens; remembers what it was asked about."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.asked: list[list[int]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.extend(input_ids.tolist())
        return input_ids.sum(1) >= self.least


def test_criteria_are_asked_after_each_single_token(model):
    least = int(plain(model)[0, :25].sum())
    ours, theirs = SumReached(least), SumReached(least)
    expected = plain(model, stopping_criteria=StoppingCriteriaList([theirs]))
    assert PROMPT.shape[1] + 5 < expected.shape[1] < PROMPT.shape[1] + NEW
    new = expected[0, PROMPT.shape[1] :].tolist()
    drafter = ScriptDrafter([*new, 5, 5, 5, 5], default_length=8)
    found = speculative(model, drafter=drafter, stopping_criteria=StoppingCriteriaList([ours]))
    assert torch.equal(found, expected)
    assert ours.asked == theirs.asked


class TestBatches:
    @pytest.fixture
    def batch(self):
        lengths = (9, 3, 6, 1)
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, length in enumerate(lengths):
            ids[i, -length:] = torch.tensor(some_tokens(length, seed=i))
            mask[i, -length:] = 1
        return {"ids": ids, "attention_mask": mask, "pad_token_id": 0}

    @pytest.mark.parametrize("ends", [None, [2, 9, 33], list(range(2, 20))])
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"repetition_penalty": 1.3, "min_new_tokens": 4},
            {"encoder_repetition_penalty": 1.5},
            {"encoder_no_repeat_ngram_size": 1},
            # The rule for a row depends on which row it is.
            {"prefix_allowed_tokens_fn": lambda row, ids: list(range(5 + row, VOCAB, 2))},
        ],
        ids=lambda settings: " ".join(settings),
    )
    def test_left_padding(self, model, batch, ends, settings):
        expected = plain(model, eos_token_id=ends, **batch, **settings)
        for drafter in ("ngram", ScriptDrafter(garbage), new_module("qwen2", num_hidden_layers=1)):
            found = speculative(model, drafter=drafter, eos_token_id=ends, **batch, **settings)
            assert torch.equal(found, expected)

    def test_padding_token_inside_a_prompt_counts_as_a_token(self, model):
        ids = PROMPT.clone()
        ids[0, 4] = 0
        expected = plain(model, ids, pad_token_id=0)
        assert torch.equal(speculative(model, ids, pad_token_id=0), expected)

    def test_right_padding_is_refused(self, model):
        mask = torch.ones_like(PROMPT)
        mask[0, -2:] = 0
        with pytest.raises(PromptError, match=r"hides tokens.*padding_side"):
            speculative(model, attention_mask=mask)

    def test_an_empty_mask_is_refused(self, model):
        with pytest.raises(PromptError):
            speculative(model, attention_mask=torch.zeros_like(PROMPT))

    def test_returned_sequences_differ_when_sampled(self, model):
        torch.manual_seed(0)
        found = speculative(model, do_sample=True, num_return_sequences=6)
        assert found.shape == (6, PROMPT.shape[1] + NEW)
        assert torch.equal(found[:, : PROMPT.shape[1]], PROMPT.expand(6, -1))
        assert len({tuple(row.tolist()) for row in found}) == 6

    def test_returned_sequences_know_their_prompt(self, model, batch):
        """Two from each prompt: rows are grouped, and an allowed set goes with the prompt."""
        found = speculative(
            model,
            do_sample=True,
            num_return_sequences=2,
            prefix_allowed_tokens_fn=lambda row, ids: [10 * row + 10, 10 * row + 11],
            encoder_repetition_penalty=1.2,
            **batch,
        )[:, batch["ids"].shape[1] :]
        assert [sorted(set(row)) for row in found.tolist()] == [
            [10 * (i // 2) + 10, 10 * (i // 2) + 11] for i in range(8)
        ]

    def test_a_batch_of_one_kind_of_prompt(self, model):
        ids = PROMPT.repeat(3, 1)
        assert torch.equal(speculative(model, ids), plain(model, ids))


class TestStopStrings:
    """transformers 5.24 gives a callable no tokenizer, and looks for one itself too late."""

    @pytest.fixture
    def words(self):
        return new_byte_level()

    @pytest.fixture
    def llama(self, words):
        return new_module("llama", vocab_size=len(words))

    @pytest.fixture
    def whole(self, llama):
        """All that comes without a stop string."""
        return plain(llama)

    def test_as_in_plain_generate(self, llama, words, whole):
        """Strings that end a token, that two tokens make, and that never come."""
        new = whole[0, PROMPT.shape[1] :].tolist()
        starts = [i for i in range(12) if words.decode(new[i : i + 2]).isascii()]
        for start in starts:
            both = words.decode(new[start : start + 2])
            for stop in (both, [both[-1], "never"]):
                settings = {"stop_strings": stop, "tokenizer": words}
                expected = plain(llama, **settings)
                assert expected.shape[1] < whole.shape[1]
                for drafter in ("ngram", ScriptDrafter(new, default_length=8)):
                    found = speculative(llama, drafter=drafter, **settings)
                    assert torch.equal(found, expected)
        assert starts

    def test_for_each_row_of_a_batch(self, llama, words):
        ids = torch.tensor([some_tokens(9, seed=seed) for seed in range(3)])
        # Plain generate pads a row that ends early only where there is an end token too.
        settings = {"eos_token_id": 258, "pad_token_id": 0}
        row = plain(llama, ids, **settings)[1, ids.shape[1] :].tolist()
        settings |= {"stop_strings": [words.decode(row[6])], "tokenizer": words}
        expected = plain(llama, ids, **settings)
        assert torch.equal(speculative(llama, ids, **settings), expected)

    def test_without_a_tokenizer(self, llama):
        with pytest.raises(UsageError, match=r"need the model's tokenizer.*tokenizer=tokenizer"):
            speculative(llama, stop_strings=["z"])

    def test_a_tokenizer_alone_changes_nothing(self, llama, words, whole):
        assert torch.equal(speculative(llama, tokenizer=words), whole)

    def test_bound_to_the_function(self, llama, words, whole):
        custom = functools.partial(transformers_generate, tokenizer=words)
        stop = words.decode(whole[0, PROMPT.shape[1] + 4])
        found = plain(llama, custom_generate=custom, stop_strings=[stop])
        assert torch.equal(found, plain(llama, stop_strings=[stop], tokenizer=words))


class Recorder:
    def __init__(self) -> None:
        self.put_so_far: list[list] = []
        self.ended = 0

    def put(self, value):
        assert not self.ended
        self.put_so_far.append(value.tolist())

    def end(self):
        self.ended += 1


class TestStreamer:
    @pytest.mark.parametrize("ends", [None, [9, 33]])
    def test_hears_what_it_hears_from_plain_generate(self, model, ends):
        ours, theirs = Recorder(), Recorder()
        plain(model, streamer=theirs, eos_token_id=ends)
        speculative(model, streamer=ours, eos_token_id=ends)
        assert ours.put_so_far == theirs.put_so_far
        assert ours.ended == theirs.ended == 1

    def test_through_wrappers_of_either_function(self, model):
        """transformers decorates ``generate``, and users wrap what they pass to it."""
        expected = Recorder()
        plain(model, streamer=expected)

        def wrapped(*args, **kwargs):
            return transformers_generate(*args, **kwargs)

        for custom in (
            functools.partial(transformers_generate, drafter="none"),
            torch.no_grad()(wrapped),
            wrapped,
        ):
            heard = Recorder()
            with torch.inference_mode():
                plain(model, streamer=heard, custom_generate=custom)
            assert heard.put_so_far == expected.put_so_far
            assert heard.ended == 1

    def test_none_outside_of_generate(self):
        streamer = Recorder()  # a local of the same name means nothing
        assert _given_to_generate() == {}
        assert not streamer.ended

    def test_called_directly(self, model):
        called = {}

        def catch(model, input_ids, **kwargs):
            called.update(kwargs, model=model, input_ids=input_ids)
            return input_ids

        plain(model, custom_generate=catch)
        streamer = Recorder()
        kwargs = {k: v for k, v in called.items() if k != "synced_gpus"}
        assert torch.equal(transformers_generate(**kwargs), plain(model))
        assert not streamer.put_so_far
        transformers_generate(**kwargs, streamer=streamer)
        assert [token for (token,) in streamer.put_so_far] == plain(model)[0, 9:].tolist()


class TestDictOutput:
    def test_scores_and_logits(self, model):
        settings = {
            "return_dict_in_generate": True,
            "output_scores": True,
            "output_logits": True,
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 2,
        }
        expected = plain(model, **settings)
        for drafter in drafters(expected.sequences).values():
            found = speculative(model, drafter=drafter, **settings)
            assert torch.equal(found.sequences, expected.sequences)
            for ours, theirs in (
                (found.scores, expected.scores),
                (found.logits, expected.logits),
            ):
                assert len(ours) == len(theirs) == NEW
                for one, other in zip(ours, theirs, strict=True):
                    assert one.dtype == other.dtype
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
                    assert not one.is_inference()  # or a caller could not compute with it

    def test_only_what_was_asked_for(self, model):
        found = speculative(model, return_dict_in_generate=True)
        assert found.scores is None
        assert found.logits is None
        found = speculative(model, return_dict_in_generate=True, output_logits=True)
        assert found.scores is None
        assert len(found.logits) == NEW

    def test_no_more_rows_than_tokens_when_an_end_token_cuts_a_block(self, model):
        new = plain(model)[0, PROMPT.shape[1] :].tolist()
        found = speculative(
            model,
            drafter=ScriptDrafter(new, default_length=8),
            eos_token_id=new[5],
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert len(found.scores) == new.index(new[5]) + 1 == found.sequences.shape[1] - 9

    def test_one_prompt_at_a_time(self, model):
        with pytest.raises(UsageError, match="one prompt at a time; got 2"):
            speculative(
                model,
                PROMPT.repeat(2, 1),
                return_dict_in_generate=True,
                output_scores=True,
            )


class TestSampling:
    def test_torchs_seed_reproduces(self, model):
        def run(seed, drafter="ngram"):
            torch.manual_seed(seed)
            return speculative(model, drafter=drafter, do_sample=True, temperature=0.8)

        assert torch.equal(run(1), run(1))
        assert not torch.equal(run(1), run(2))
        # Under the coupled rule the drafter changes nothing.
        assert torch.equal(run(1), run(1, ScriptDrafter(garbage)))
        torch.manual_seed(1)
        first = speculative(model, do_sample=True)
        assert not torch.equal(speculative(model, do_sample=True), first)

    @pytest.mark.parametrize("rule", ["coupled", "rejection"])
    def test_law_of_the_first_two_tokens(self, model, rule):
        """Pearson's statistic against the chain rule, to be exceeded once in 10^8 runs."""
        count, top = 1500, 5
        settings = {"do_sample": True, "top_k": top, "temperature": 1.3, "max_new_tokens": 2}
        torch.manual_seed(7)
        found = speculative(
            model,
            drafter=new_module("qwen2", num_hidden_layers=1),
            rule=rule,
            num_return_sequences=count,
            **settings,
        )[:, -2:]
        law = {}
        for first, p in self.next_token(model, PROMPT, top):
            ids = torch.cat([PROMPT, torch.tensor([[first]])], 1)
            for second, p2 in self.next_token(model, ids, top):
                law[first, second] = p * p2
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
        seen = dict.fromkeys(law, 0)
        for pair in found.tolist():
            seen[tuple(pair)] += 1  # a KeyError is a token that cannot come
        rare = [pair for pair in law if count * law[pair] < 5]
        cells = [(seen[pair], count * law[pair]) for pair in law if pair not in rare]
        if rare:
            cells.append((sum(seen[p] for p in rare), count * sum(law[p] for p in rare)))
        statistic = sum((got - due) ** 2 / due for got, due in cells)
        assert len(cells) >= 8
        assert statistic < chi2.isf(1e-8, len(cells) - 1)

    @staticmethod
    def next_token(model, ids, top):
        with torch.no_grad():
            values, tokens = (model(ids).logits[0, -1] / 1.3).topk(top)
        return list(zip(tokens.tolist(), values.softmax(0).tolist(), strict=True))


class TestDrafters:
    def test_by_name_with_a_folder(self, model, tmp_path):
        folder = save(new_module("qwen2", num_hidden_layers=1), tmp_path / "draft")
        assert torch.equal(speculative(model, drafter=f"model:{folder}"), plain(model))

    def test_model_without_a_path(self, model):
        with pytest.raises(UsageError, match="needs a draft model"):
            speculative(model, drafter="model")

    @pytest.mark.parametrize("length", [0, 1, 8, "auto"])
    def test_draft_lengths(self, model, length):
        assert torch.equal(speculative(model, draft_length=length), plain(model))


class TestModelIsLeftAlone:
    @pytest.mark.parametrize("training", [False, True])
    def test_settings_and_modes(self, training):
        made = new_module("qwen2").train(training)
        draft = new_module("qwen2", num_hidden_layers=1).train(training)
        before = [
            (copy.deepcopy(m.generation_config.to_dict()), m.config.to_dict())
            for m in (made, draft)
        ]
        found = speculative(made, drafter=draft, max_new_tokens=10)
        for m, (generation, config) in zip((made, draft), before, strict=True):
            assert m.generation_config.to_dict() == generation
            assert m.config.to_dict() == config
            assert m.config._attn_implementation == "sdpa"
            assert all(part.training is training for part in m.modules())
            assert all(weight.requires_grad for weight in m.parameters())
        assert torch.equal(found, plain(module("qwen2"), max_new_tokens=10))

    def test_it_can_be_trained_afterwards(self):
        made = new_module("qwen2")
        speculative(made, max_new_tokens=5)
        made(PROMPT, labels=PROMPT).loss.backward()
        assert all(weight.grad is not None for weight in made.parameters())


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"num_beams": 2}, "num_beams"),
            ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
            (
                {"output_hidden_states": True, "return_dict_in_generate": True},
                "output_hidden_states",
            ),
            ({"guidance_scale": 1.5}, "guidance_scale"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_settings(self, model, settings, words):
        with pytest.raises(UsageError, match=f"cannot honour {words}.*Leave {words} out"):
            speculative(model, **settings)

    def test_watermarks_with_a_memory(self, model):
        watermark = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
        with pytest.raises(UsageError, match="cannot honour watermarking_config"):
            speculative(model, do_sample=True, watermarking_config=watermark)

    def test_a_cache_that_holds_tokens(self, model):
        cache = DynamicCache(config=model.config)
        model(PROMPT[:, :4], cache=cache, use_cache=True)
        with pytest.raises(UsageError, match=r"already holds 4 tokens.*conversation"):
            speculative(model, cache=cache)

    def test_an_empty_cache_is_fine(self, model):
        cache = DynamicCache(config=model.config)
        assert torch.equal(speculative(model, cache=cache), plain(model))

    def test_inputs_besides_text(self, model):
        settings = speculative_arguments(model)
        with pytest.raises(UsageError, match="besides text are not understood: pixel_values"):
            transformers_generate(**settings, pixel_values=torch.zeros(1))

    def test_embeddings_in_place_of_tokens(self, model):
        embeddings = model.get_input_embeddings()(PROMPT).detach()
        with pytest.raises(UsageError, match="inputs_embeds"):
            model.generate(
                inputs_embeds=embeddings, custom_generate=transformers_generate, max_new_tokens=3
            )


def speculative_arguments(model) -> dict:
    """What ``generate`` hands to a callable."""
    called = {}

    def catch(model, input_ids, **kwargs):
        called.update(kwargs, model=model, input_ids=input_ids)
        return input_ids

    plain(model, custom_generate=catch)
    return called
