from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.transcript import Transcript
from outrider.errors import SamplingError
from outrider.models.tokenizer import HFTokenizer, ToyTokenizer
from tests.tokenizers_for_tests import SMOLLM2, PieceTokenizer, real, single_bytes, small

NO_EOS: frozenset[int] = frozenset()


def reference(
    tokenizer: Any, ids: Sequence[int], max_tokens: int, eos: frozenset[int], stops: Sequence[str]
) -> tuple[int, str, str | None]:
    """How many tokens are kept, all of the text that may be shown, and the reason.

    The slow way: everything is decoded again after every token.
    """
    shown, n = "", 0
    for n, token in enumerate(ids, 1):
        ends = token in eos
        text = tokenizer.decode(ids[: n - 1] if ends else ids[:n])
        last = ends or n == max_tokens
        certain = text if last else text.removesuffix("\ufffd")
        found = [certain.find(stop) for stop in stops if stop in certain]
        if found:
            return n, certain[: min(found)], "stop"
        if last:
            return n, certain, "stop" if ends else "length"
        begun = [k for k in range(len(certain)) if any(s.startswith(certain[k:]) for s in stops)]
        shown = certain[: min(begun)] if begun else certain
    return n, shown, None


def check(
    tokenizer: Any, ids: Sequence[int], max_tokens: int, eos: frozenset[int], stops: Sequence[str]
) -> Transcript:
    """Push tokens one by one; compare with the reference after each."""
    transcript = Transcript(tokenizer, max_tokens=max_tokens, eos_token_ids=eos, stop_strings=stops)
    told = ""
    for n, token in enumerate(ids, 1):
        told += transcript.push(token)
        kept, text, reason = reference(tokenizer, ids[:n], max_tokens, eos, stops)
        assert kept == n
        assert (transcript.token_ids, told, transcript.finish_reason) == (
            list(ids[:n]),
            text,
            reason,
        )
        assert transcript.text == told
        if reason:
            with pytest.raises(RuntimeError, match="ended"):
                transcript.push(token)
            with pytest.raises(RuntimeError, match="ended"):
                transcript.close()
            break
    return transcript


# ---- Against the slow way.


@settings(max_examples=1000)
@given(
    ids=st.lists(st.integers(0, 3), max_size=14),
    max_tokens=st.integers(1, 12),
    eos=st.frozensets(st.integers(2, 3), max_size=1),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_letters(ids: list[int], max_tokens: int, eos: frozenset[int], stops: list[str]) -> None:
    check(ToyTokenizer(4), ids, max_tokens, eos, stops)


@settings(max_examples=500)
@given(
    pieces=st.lists(st.text("ab", max_size=4), min_size=1, max_size=5),
    data=st.data(),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_tokens_of_several_letters(
    pieces: list[str], data: st.DataObject, stops: list[str]
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=10))
    check(PieceTokenizer(pieces), ids, 9, NO_EOS, stops)


def cut_out(data: st.DataObject, text: str) -> list[str]:
    """Stop strings that do occur."""
    starts = data.draw(st.lists(st.integers(0, max(len(text) - 1, 0)), max_size=3))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=len(starts), max_size=len(starts)))
    return [text[a : a + n] for a, n in zip(starts, sizes, strict=True) if text[a : a + n]]


def check_random_text(tokenizer: HFTokenizer, pool: Sequence[int], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.sampled_from(pool), max_size=16))
    stops = cut_out(data, tokenizer.decode(ids))
    end = data.draw(st.sampled_from([NO_EOS, tokenizer.eos_token_ids, frozenset(ids[5:6])]))
    check(tokenizer, ids, data.draw(st.integers(1, 16)), end, stops)


@settings(max_examples=500)
@given(data=st.data())
def test_byte_level(data: st.DataObject) -> None:
    tokenizer = small("byte-level")
    pool = [
        *tokenizer.encode("你好 😀 the in"),
        *single_bytes(tokenizer)[-80:],
        *range(tokenizer.vocab_size - 4, tokenizer.vocab_size),
    ]
    check_random_text(tokenizer, pool, data)


@settings(max_examples=500)
@given(data=st.data())
def test_byte_fallback(data: st.DataObject) -> None:
    tokenizer = small("byte-fallback")
    characters = [tokenizer.encode(text)[1:] for text in ("\n", "好", "😀", "ab", " a", "<s>")]
    runs = data.draw(st.lists(st.sampled_from(characters), max_size=8))
    ids = [i for run in runs for i in run]
    stops = cut_out(data, tokenizer.decode(ids))
    check(tokenizer, ids, data.draw(st.integers(1, 16)), NO_EOS, stops)


@pytest.mark.model
@settings(max_examples=200)
@given(data=st.data())
def test_real(data: st.DataObject) -> None:
    tokenizer = real(SMOLLM2)
    pool = [*tokenizer.encode("你好，世界 😀👩‍👩‍👧 the end.\n\nUser:"), *range(300, 340), 0, 2, 5]
    check_random_text(tokenizer, pool, data)


# ---- Stop strings.


@pytest.mark.parametrize("cuts", list(product([False, True], repeat=7)))
def test_every_split_of_a_stop_string(cuts: tuple[bool, ...]) -> None:
    text, pieces = "xxSTOPyy", ["x"]
    for letter, cut in zip(text[1:], cuts, strict=True):
        if cut:
            pieces.append(letter)
        else:
            pieces[-1] += letter
    tokenizer = PieceTokenizer(pieces)
    transcript = Transcript(tokenizer, max_tokens=99, eos_token_ids=NO_EOS, stop_strings=["STOP"])
    told = ""
    for token in range(len(pieces)):
        told += transcript.push(token)
        if transcript.finish_reason:
            break
    completing = next(n for n in range(len(pieces)) if "STOP" in "".join(pieces[: n + 1]))
    assert transcript.token_ids == list(range(completing + 1))
    assert transcript.finish_reason == "stop"
    assert told == transcript.text == "xx"


def test_the_stop_string_that_starts_first_cuts() -> None:
    transcript = Transcript(
        PieceTokenizer(["xabcdx"]),
        max_tokens=9,
        eos_token_ids=NO_EOS,
        stop_strings=["cd", "abcd", "bc"],
    )
    assert transcript.push(0) == "x"


def test_the_stop_string_that_is_complete_first_ends() -> None:
    transcript = check(ToyTokenizer(4), [0, 1, 2, 3], 9, NO_EOS, ["abcd", "bc"])
    assert (transcript.token_ids, transcript.text) == ([0, 1, 2], "a")


def test_a_false_start_is_released() -> None:
    transcript = Transcript(
        ToyTokenizer(3), max_tokens=9, eos_token_ids=NO_EOS, stop_strings=["aab"]
    )
    assert [transcript.push(i) for i in (0, 0, 0, 2, 0)] == ["", "", "a", "aac", ""]
    assert transcript.close() == "a"
    assert (transcript.text, transcript.finish_reason) == ("aaaca", "length")


def test_a_stop_string_of_single_bytes_ends_at_the_token_that_completes_it() -> None:
    tokenizer = small("byte-fallback")
    ids = tokenizer.encode("a\n\nb")
    transcript = check(tokenizer, ids, 99, NO_EOS, ["\n\n"])
    assert (transcript.token_ids, transcript.text) == (ids[:-1], "a")


def test_a_stop_string_in_the_final_flush() -> None:
    tokenizer = small("byte-level")
    lead = tokenizer.encode("你")[0]
    for transcript in (
        check(tokenizer, [lead], 1, NO_EOS, ["\ufffd"]),
        check(tokenizer, [lead, 3], 9, frozenset([3]), ["\ufffd"]),
    ):
        assert (transcript.text, transcript.finish_reason) == ("", "stop")
    transcript = Transcript(tokenizer, max_tokens=9, eos_token_ids=NO_EOS, stop_strings=["\ufffd"])
    transcript.push(lead)
    assert (transcript.close("length"), transcript.finish_reason) == ("", "stop")


# ---- End tokens and max_tokens.


@pytest.mark.parametrize("offset", range(9))
def test_an_end_token_at_every_offset(offset: int) -> None:
    ids = [0, 1, 2, 3, 0, 1, 2, 3]
    ids.insert(offset, 4)
    transcript = check(ToyTokenizer(5), ids, 99, frozenset([4]), [])
    assert transcript.token_ids == ids[: offset + 1]
    assert transcript.text == "abcdabcd"[:offset]
    assert transcript.finish_reason == "stop"


def test_no_end_token() -> None:
    transcript = check(ToyTokenizer(5, eos_token_ids=[4]), [0, 4, 1], 3, NO_EOS, [])
    assert (transcript.token_ids, transcript.text) == ([0, 4, 1], "ab")
    assert transcript.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens(max_tokens: int) -> None:
    transcript = check(ToyTokenizer(5), [0, 1, 2, 3], max_tokens, NO_EOS, [])
    assert transcript.token_ids == [0, 1, 2][:max_tokens]
    assert transcript.finish_reason == "length"


def test_stop_wins_over_length() -> None:
    by_token = check(ToyTokenizer(5), [0, 1], 2, frozenset([1]), [])
    by_string = check(ToyTokenizer(5), [0, 1], 2, NO_EOS, ["ab"])
    assert by_token.finish_reason == by_string.finish_reason == "stop"


def test_max_tokens_inside_a_stop_string_releases_it() -> None:
    transcript = check(ToyTokenizer(5), [0, 1, 2], 2, NO_EOS, ["abc"])
    assert (transcript.text, transcript.finish_reason) == ("ab", "length")


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("text", ["😀", "a你", "好😀"])
def test_max_tokens_inside_a_character(kind: str, text: str) -> None:
    tokenizer = small(kind)
    ids = tokenizer.encode(text)
    for max_tokens in range(1, len(ids) + 1):
        transcript = Transcript(tokenizer, max_tokens=max_tokens, eos_token_ids=NO_EOS)
        pieces = [transcript.push(i) for i in ids[:max_tokens]]
        assert "\ufffd" not in "".join(pieces[:-1])
        assert "".join(pieces) == transcript.text == tokenizer.decode(ids[:max_tokens])
        assert transcript.text.endswith("\ufffd") == (transcript.text not in text)
    assert transcript.text == text


# ---- The rest.


def test_without_a_tokenizer_there_is_no_text() -> None:
    transcript = Transcript(None, max_tokens=3, eos_token_ids=frozenset([7]))
    assert [transcript.push(5), transcript.push(7)] == ["", ""]
    assert (transcript.token_ids, transcript.text) == ([5, 7], "")
    assert transcript.finish_reason == "stop"


@pytest.mark.parametrize(
    ("tokenizer", "max_tokens", "stops"),
    [
        (ToyTokenizer(3), 0, []),
        (ToyTokenizer(3), -1, []),
        (ToyTokenizer(3), 1, ["a", ""]),
        (None, 1, ["a"]),
    ],
)
def test_bad_requests(tokenizer: Any, max_tokens: int, stops: list[str]) -> None:
    with pytest.raises(SamplingError):
        Transcript(tokenizer, max_tokens=max_tokens, eos_token_ids=NO_EOS, stop_strings=stops)


def test_close_tells_the_reason() -> None:
    transcript = Transcript(ToyTokenizer(3), max_tokens=9, eos_token_ids=NO_EOS)
    transcript.push(0)
    assert transcript.close("stop") == ""
    assert transcript.finish_reason == "stop"


def test_cost_per_token_does_not_grow() -> None:
    def decoded(length: int) -> int:
        tokenizer = PieceTokenizer(["a", "ab", "b ", "你"])
        transcript = Transcript(
            tokenizer, max_tokens=9999, eos_token_ids=NO_EOS, stop_strings=["bc", "aaa"]
        )
        for i in range(length):
            transcript.push(i % 4)
        assert transcript.finish_reason is None
        return tokenizer.decoded_ids

    assert decoded(4000) <= 4.1 * decoded(1000)
    assert decoded(4000) <= 16 * 4000
