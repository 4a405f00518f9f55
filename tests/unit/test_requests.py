"""What a request may be, and that no request changes what another one gets."""

from __future__ import annotations

import numpy as np
import pytest

from outrider import Engine
from outrider.engine.engine import check_load
from outrider.engine.loading import parse_device
from outrider.engine.prefix import Prefix
from outrider.errors import OutriderError, PromptError, SamplingError, UsageError
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.rules.greedy import Greedy
from tests.small_models import module, new_tokenizer, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = some_tokens(8)
LEFT, RIGHT = ([*BASE, *some_tokens(5, seed=seed)] for seed in (1, 2))


@pytest.fixture(scope="module")
def toy() -> Engine:
    return Engine(ToyModel.random(4, seed=1), ToyTokenizer(4), drafter="ngram")


@pytest.fixture(scope="module")
def llama() -> Engine:
    return Engine(module("llama"), new_tokenizer(), drafter="ngram")


def answers(template: str = "{{ m['content'] }} w9 ") -> Engine:
    words = new_tokenizer()
    words.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    return Engine(module("llama"), words, drafter="ngram")


class TestPrefix:
    def plain(self, llama, text):
        return llama.generate(text, max_tokens=8, plain=True).token_ids

    def test_a_request_that_is_not_kept_leaves_nothing_wrong_behind(self, llama):
        prefix = Prefix()
        first = llama.stream(LEFT, max_tokens=8, prefix=prefix)
        assert first.output
        prefix.keep(first.session)
        assert llama.generate(RIGHT, max_tokens=8, prefix=prefix)
        again = llama.generate([*LEFT, 5], max_tokens=8, prefix=prefix)
        assert again.token_ids == self.plain(llama, [*LEFT, 5])

    @pytest.mark.parametrize("kept", [False, True])
    def test_requests_side_by_side(self, llama, kept):
        """Also one that was kept before its end and goes on all the same."""
        prefix = Prefix()
        one = llama.stream(LEFT, max_tokens=8, prefix=prefix)
        next(one)
        if kept:
            prefix.keep(one.session)
        other = llama.stream(RIGHT, max_tokens=8, prefix=prefix)
        for _ in range(7):
            next(one)
            next(other)
        assert one.output.token_ids == self.plain(llama, LEFT)
        assert other.output.token_ids == self.plain(llama, RIGHT)

    def test_another_models_cache_is_not_taken(self):
        prefix = Prefix()
        for seed in (1, 2):
            engine = Engine(ToyModel.random(4, seed=seed, order=9), drafter="none")
            generation = engine.stream([1, 2, 3], max_tokens=4, prefix=prefix)
            assert generation.trace.cached_tokens == 0
            assert generation.output
            prefix.keep(generation.session)

    def test_what_is_kept_is_used(self, llama):
        prefix = Prefix()
        first = llama.stream(LEFT, max_tokens=8, prefix=prefix)
        assert first.output
        prefix.keep(first.session)
        second = llama.stream([*LEFT, 5], max_tokens=8, prefix=prefix)
        assert second.trace.cached_tokens == len(LEFT)
        assert second.session.draft is first.session.draft


class TestConversation:
    def test_an_answer_read_on_after_the_next_was_asked_for(self):
        engine = answers()
        talk = engine.conversation()
        held = talk.say("w12 w13", max_tokens=8)
        next(held)
        assert list(talk.say("w12 w14", max_tokens=8))
        messages = talk.messages
        expected = engine.generate([{"role": "user", "content": "w12 w14"}], max_tokens=8)
        assert talk.last.token_ids == expected.token_ids
        with pytest.raises(UsageError, match="given up when the next"):
            next(held)
        assert talk.messages is messages

    def test_an_older_answer_that_is_closed_later_takes_nothing(self):
        talk = answers().conversation()
        held = talk.say("w12 w13", max_tokens=8)
        next(held)
        assert list(talk.say("w12 w14", max_tokens=8))
        kept = talk._prefix._kept
        held.close()
        assert talk._prefix._kept is kept

    def test_a_broken_pass_is_not_kept(self, monkeypatch):
        engine = answers()
        talk = engine.conversation()
        assert list(talk.say("w12 w13", max_tokens=8))
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "score", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                list(talk.say("w14", max_tokens=8))
        assert talk._prefix._kept is None
        assert len(talk.messages) == 2


@pytest.mark.parametrize("plain", [False, True])
class TestMaxTokens:
    @pytest.mark.parametrize(
        "value", [float("nan"), float("inf"), 2.0, 1e9, 0, -1, True, "3", None, np.float64(2)]
    )
    def test_refused(self, toy, plain, value):
        with pytest.raises(SamplingError, match="max_tokens must be a whole number"):
            toy.stream("abab", max_tokens=value, plain=plain)

    @pytest.mark.parametrize("value", [3, np.int64(3)])
    def test_taken(self, toy, plain, value):
        assert len(toy.generate("abab", max_tokens=value, plain=plain).token_ids) == 3


WRONG = [
    ({"stop_token_ids": [-1]}, SamplingError, "from 0 to 3"),
    ({"stop_token_ids": [-999]}, SamplingError, "-999"),
    ({"stop_token_ids": [4]}, SamplingError, "got 4"),
    ({"stop_token_ids": [1.0]}, SamplingError, "1.0"),
    ({"stop_token_ids": [True]}, SamplingError, "True"),
    ({"stop_token_ids": 2}, SamplingError, "in a list"),
    ({"stop": [5]}, SamplingError, "a list of texts"),
    ({"stop": 5}, SamplingError, "got 5"),
    ({"rule": 5}, UsageError, "A rule is"),
    ({"rule": Greedy}, UsageError, "A rule is"),
    ({"rule": ""}, UsageError, "rule named ''"),
    ({"drafter": 5}, UsageError, "A drafter is"),
    ({"drafter": object()}, UsageError, "A drafter is"),
    ({"drafter": ""}, UsageError, "drafter named ''"),
    ({"drafter": "auto:1"}, UsageError, "'auto' takes no argument"),
]


@pytest.mark.parametrize(("options", "kind", "words"), WRONG, ids=lambda v: str(v)[:30])
def test_what_a_request_cannot_be(toy, options, kind, words):
    with pytest.raises(kind, match=words):
        toy.stream("abab", max_tokens=3, min_tokens=2, **options)


@pytest.mark.parametrize(
    "options",
    [{"stop": None}, {"stop_token_ids": None}, {"stop_token_ids": []}, {"rule": None}],
    ids=str,
)
def test_none_is_none(toy, options):
    expected = toy.generate("abab", max_tokens=5)
    assert toy.generate("abab", max_tokens=5, **options).token_ids == expected.token_ids


def test_numpys_integers_are_token_ids(toy):
    end = toy.generate("abab", max_tokens=5).token_ids[0]
    output = toy.generate(np.array([0, 1, 0, 1]), max_tokens=5, stop_token_ids=np.array([end]))
    assert output.token_ids == [end]
    assert toy.encode(iter([1, 2])) == [1, 2]
    assert all(type(token) is int for token in toy.encode(np.array([1, 2])))


@pytest.mark.parametrize("prompt", [None, 5, [], [1.5], [4], [-1], [True], [[1]]], ids=str)
def test_what_a_prompt_cannot_be(toy, prompt):
    with pytest.raises(PromptError) as caught:
        toy.generate(prompt, max_tokens=3)
    assert caught.value.hint


def test_an_end_token_that_the_model_has_no_row_for_bans_nothing():
    """Some models' settings name -1 as their end token."""
    model = ToyModel.random(4, seed=1)
    request = {"max_tokens": 9, "min_tokens": 9, "temperature": 1.0, "seed": 1}
    expected = Engine(model, ToyTokenizer(4), drafter="none").generate("ab", **request)
    odd = Engine(model, ToyTokenizer(4, eos_token_ids=[-1, 9]), drafter="none")
    assert odd.generate("ab", **request).token_ids == expected.token_ids


def test_a_tokenizer_with_more_words_than_the_model_has_rows():
    words = new_tokenizer(100)
    words.chat_template = "{{ messages[0]['content'] }}"
    engine = Engine(module("llama"), words, drafter="none")
    assert engine.generate("w5 w63", max_tokens=2).token_ids
    for prompt in ("w5 w90", [{"role": "user", "content": "w90"}]):
        with pytest.raises(PromptError, match=r"token 90, 'w90'.* 64 "):
            engine.generate(prompt, max_tokens=2)


@pytest.mark.parametrize("part", [None, 5, object()], ids=["None", "5", "object"])
def test_an_engine_of_what_is_no_part(part):
    for name in ("drafter", "rule"):
        with pytest.raises(UsageError, match=f"A {name} is"):
            Engine(ToyModel.random(4, seed=1), **{name: part})


@pytest.mark.parametrize(
    "options",
    [
        {"rule": None}, {"drafter": None}, {"runtime": None}, {"dtype": 5}, {"dtype": []},
        {"device": "meta"}, {"device": "cpuu"}, {"device": "cuda:99"}, {"device": 5},
        {"device": ""}, {"drafter": "auto:1"}, {"runtime": "x"},
        {"rule": "greedy", "temperature": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_told_before_loading(monkeypatch, options):
    def reached(*args, **kwargs):
        raise AssertionError("loading began")

    monkeypatch.setattr("outrider.engine.engine.load_model", reached)
    with pytest.raises(UsageError) as caught:
        check_load(**options)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    if "temperature" not in options:
        with pytest.raises(UsageError):
            Engine.load("toy", **options)


@pytest.mark.parametrize("target", [5, None, b"toy"])
def test_a_target_is_text(target):
    with pytest.raises(OutriderError, match="as text"):
        Engine.load(target)


def test_devices_have_one_spelling():
    assert [parse_device(name) for name in (None, "auto", "cpu", "cpu:0")] == [
        None, None, "cpu", "cpu",
    ]  # fmt: skip
