from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from inspect import unwrap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from outrider.errors import PromptError, UsageError
from outrider.models.tokenizer import HFTokenizer, TextStream, ToyTokenizer, difference
from tests.tokenizers_for_tests import (
    KINDS,
    QWEN_LARGE,
    QWEN_SMALL,
    SMOLLM2,
    PieceTokenizer,
    new_byte_fallback,
    new_byte_level,
    new_metaspace,
    new_word_piece,
    real,
    single_bytes,
    small,
    spell,
    wrap,
)

HARD_TEXT = "naïve 你好，世界 😀👩‍👩‍👧 Ω≈ç\n\ttabs, ﬁn. Привет مرحبا"


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.finish()]


def backend_decode(tokenizer: HFTokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True)
    return text


@cache
def ids_of(tokenizer: HFTokenizer) -> st.SearchStrategy[list[int]]:
    """Random sequences, rich in broken characters and special tokens."""
    anything = st.integers(0, tokenizer.vocab_size - 1)
    odd = [*single_bytes(tokenizer), *tokenizer._tokenizer.added_tokens_decoder]
    spelled = tokenizer.encode(HARD_TEXT)
    return st.lists(st.one_of(anything, st.sampled_from(odd), st.sampled_from(spelled)))


# ---- The stream equals the whole decode.


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "word-piece"])
@settings(max_examples=300)
@given(data=st.data())
def test_pieces_are_the_whole_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = small(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    expected = backend_decode(tokenizer, ids)
    assert tokenizer.decode(ids) == expected
    assert "".join(pieces(tokenizer, ids)) == expected


@settings(max_examples=500)
@given(data=st.data())
def test_byte_fallback_reads_bytes_as_utf8(data: st.DataObject) -> None:
    tokenizer = small("byte-fallback")
    common = tokenizer.encode("ab 你 a😀é🏽")
    ids = data.draw(
        st.lists(st.one_of(st.sampled_from(common), st.integers(0, tokenizer.vocab_size - 1)))
    )
    raw, starts_with_byte = b"", None
    for i in ids:
        word = tokenizer.vocabulary[i]
        if word in ("<unk>", "<s>", "</s>"):
            continue
        is_byte = word.startswith("<0x")
        starts_with_byte = is_byte if starts_with_byte is None else starts_with_byte
        raw += bytes([int(word[3:5], 16)]) if is_byte else word.replace("▁", " ").encode()
    expected = raw.decode(errors="replace")
    if starts_with_byte is False:
        expected = expected.removeprefix(" ")
    assert tokenizer.decode(ids) == expected
    assert "".join(pieces(tokenizer, ids)) == expected


@settings(max_examples=300)
@given(text=st.text(alphabet="ab 你é😀\n🏽ñ", min_size=1))
def test_byte_fallback_agrees_with_transformers_on_whole_characters(text: str) -> None:
    tokenizer = small("byte-fallback")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == backend_decode(tokenizer, ids) == text


def test_byte_fallback_streams_each_character_as_it_is_completed() -> None:
    tokenizer = small("byte-fallback")
    ids = tokenizer.encode("a\n😀\n")
    assert pieces(tokenizer, ids) == ["a", "\n", "", "", "", "😀", "\n", ""]


@settings(max_examples=300)
@given(data=st.data())
def test_everything_certain_is_returned_at_once(data: st.DataObject) -> None:
    tokenizer = small("byte-level")
    ids = data.draw(ids_of(tokenizer))
    told = ""
    stream = tokenizer.stream()
    for n, i in enumerate(ids, 1):
        told += stream.push(i)
        whole = backend_decode(tokenizer, ids[:n])
        assert told == whole.removesuffix("\ufffd") or told == whole


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_no_replacement_mark_for_a_character_that_is_completed(text: str) -> None:
    tokenizer = small("byte-level")
    streamed = pieces(tokenizer, tokenizer.encode(text or "a"))
    assert "".join(streamed) == (text or "a")


def test_a_split_character_is_held_through_special_tokens() -> None:
    tokenizer = small("byte-level")
    lead, *rest = tokenizer.encode("你")
    mark = tokenizer.vocabulary.index("<|mark|>")
    assert pieces(tokenizer, [lead, mark, mark, *rest, mark]) == ["", "", "", "你", "", ""]


def test_an_unfinished_character_comes_out_at_the_end_only() -> None:
    tokenizer = small("byte-level")
    first, second = tokenizer.encode("😀")
    assert pieces(tokenizer, [first]) == ["", "\ufffd"]
    assert pieces(tokenizer, [first, first, second]) == ["", "\ufffd", "😀", ""]


def test_spaces_survive_in_a_decoder_that_drops_the_first() -> None:
    tokenizer = small("metaspace")
    ids = [1, 4, *[2, 4, 3] * 20, 4]
    assert "".join(pieces(tokenizer, ids)) == backend_decode(tokenizer, ids)
    assert backend_decode(tokenizer, ids).count(" the") == 21


def test_an_added_space_is_not_taken_for_a_special_token() -> None:
    tokenizer = new_byte_fallback()
    tokenizer.add_tokens([AddedToken(" ", normalized=False)])
    wrapped, space = HFTokenizer(tokenizer), len(tokenizer) - 1
    letter = wrapped.vocabulary.index("a")
    assert pieces(wrapped, [letter, space, letter]) == ["a", " ", "a", ""]


def test_unused_ids_add_nothing() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(alphabet)} | {"ab": 300}, merges=[])
    )
    made.decoder = decoders.ByteLevel()
    tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=made))
    assert tokenizer.vocab_size == 301
    lead, *rest = (alphabet.index(letter) for letter in spell("你"))
    assert "".join(pieces(tokenizer, [lead, *[290] * 9, *rest, 300])) == "你ab"


def test_an_id_outside_the_vocabulary_repeats_nothing() -> None:
    tokenizer = small("byte-fallback")
    lead, letter = (tokenizer.vocabulary.index(word) for word in ("<0xE4>", "a"))
    assert "".join(pieces(tokenizer, [lead, 99999, letter])) == "\ufffda"


# ---- Its cost.


@pytest.mark.parametrize("kind", KINDS)
def test_cost_per_token_does_not_grow(kind: str) -> None:
    tokenizer = small(kind)
    decoded = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return tokenizer._text(ids)

    def cost(ids: Sequence[int]) -> int:
        nonlocal decoded
        decoded = 0
        stream = TextStream(counting, silent=tokenizer._silent, byte_values=tokenizer._byte_values)
        for i in ids:
            stream.push(i)
        stream.finish()
        return decoded

    sequences = [
        tokenizer.encode("the a 你😀 b" * 1000)[:4000],
        [tokenizer.vocab_size - 6] * 4000,
        [tokenizer.vocabulary.index("<s>")] * 4000,
    ]
    if kind == "byte-level":
        sequences.append([tokenizer.vocabulary.index(spell("À")[1])] * 4000)
    if kind == "byte-fallback":
        sequences.append([tokenizer.vocabulary.index("<0x80>"), 262] * 2000)
        sequences.append([tokenizer.vocabulary.index("<0x41>")] * 4000)
    for ids in sequences:
        assert cost(ids) <= 16 * len(ids)


# ---- Vocabulary.


def test_padding_rows_of_a_gguf_file_are_not_counted() -> None:
    bare, padded = HFTokenizer(new_byte_level()), HFTokenizer(new_byte_level(padding=7))
    assert len(padded._tokenizer) == len(bare._tokenizer) + 7
    assert padded.vocab_size == bare.vocab_size == len(bare._tokenizer)


def test_a_pad_name_that_is_no_padding_row_counts() -> None:
    tokenizer = new_byte_level()
    tokenizer.add_tokens(["[PAD0]"])
    assert HFTokenizer(tokenizer).vocab_size == len(tokenizer)


def test_end_tokens_are_the_given_and_its_own() -> None:
    own = small("byte-level")._tokenizer.eos_token_id
    assert small("byte-level").eos_token_ids == {own}
    assert HFTokenizer(new_byte_level(), [3, 5]).eos_token_ids == {3, 5, own}


def test_token_text_keeps_the_space_and_shows_special_tokens() -> None:
    for kind, word, text in [
        ("byte-level", "Ġthe", " the"),
        ("byte-level", "</s>", "</s>"),
        ("byte-fallback", "▁a", " a"),
        ("metaspace", "▁the", " the"),
        ("word-piece", "the", " the"),
    ]:
        tokenizer = small(kind)
        assert tokenizer.token_text(tokenizer.vocabulary.index(word)) == text


# ---- Encoding.


def test_encode_adds_what_the_tokenizer_adds() -> None:
    tokenizer = new_byte_level()
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    bare = small("byte-level").encode("the")
    assert HFTokenizer(tokenizer).encode("the") == [begin, *bare]
    assert HFTokenizer(tokenizer).encode("") == [begin]


def test_empty_text() -> None:
    tokenizer = new_byte_level()
    assert HFTokenizer(tokenizer).encode("") == [tokenizer.bos_token_id]
    tokenizer.bos_token = None
    with pytest.raises(PromptError, match="empty"):
        HFTokenizer(tokenizer).encode("")


@pytest.mark.parametrize(("text", "where"), [("\ud83d", 0), ("until \udc00 here", 6)])
def test_text_that_is_not_unicode(text: str, where: int) -> None:
    with pytest.raises(PromptError, match=f"character {where}"):
        small("byte-level").encode(text)
    with pytest.raises(PromptError, match="Unicode"):
        small("byte-level").encode_messages([{"role": "user", "content": text}])


def test_messages_go_through_the_template() -> None:
    tokenizer = small("byte-level")
    ids = tokenizer.encode_messages(
        [{"role": "system", "content": "in"}, {"role": "user", "content": "the"}]
    )
    assert ids == tokenizer.encode("<s>system\nin</s><s>user\nthe</s><s>assistant\n")
    assert ids[0] == tokenizer._tokenizer.bos_token_id


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"role": "user"}],
        [{"content": "hello"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "fine"}, {"role": 1, "content": "hello"}],
    ],
)
def test_malformed_messages(messages: Any) -> None:
    # Unwrapped, since the checker of annotations that the tests install would speak up first.
    encode_messages = unwrap(HFTokenizer.encode_messages)
    with pytest.raises(PromptError, match=r"Example|at least one"):
        encode_messages(small("byte-level"), messages)


def test_messages_that_the_template_refuses() -> None:
    with pytest.raises(PromptError, match="no tools here"):
        small("byte-level").encode_messages([{"role": "tool", "content": "x"}])


def test_messages_without_a_template() -> None:
    with pytest.raises(PromptError, match="plain string"):
        small("metaspace").encode_messages([{"role": "user", "content": "x"}])


# ---- Comparison.


def test_equal_tokenizers_do_not_differ() -> None:
    for kind, new in KINDS.items():
        assert difference(small(kind), HFTokenizer(new())) is None


def test_padding_and_end_tokens_make_no_difference() -> None:
    assert difference(small("byte-level"), HFTokenizer(new_byte_level(padding=9), [1, 2])) is None


def test_a_token_differs() -> None:
    other = HFTokenizer(new_byte_level([("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "t")]))
    token = small("byte-level").vocabulary.index("in")
    expected = f"token {token} is 'in' in the target and 'it' in the draft"
    assert difference(small("byte-level"), other) == expected


def test_sizes_differ() -> None:
    larger = new_byte_level()
    larger.add_tokens(["<more>"])
    size = small("byte-level").vocab_size
    assert difference(small("byte-level"), HFTokenizer(larger)) == f"sizes {size} and {size + 1}"


def test_merges_differ_in_order_alone() -> None:
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("t", "he"), ("t", "h")]
    swapped = HFTokenizer(new_byte_level(merges))
    found = difference(_reordered(merges), swapped)
    assert found is not None
    assert "is encoded differently" in found


def _reordered(merges: list[tuple[str, str]]) -> HFTokenizer:
    tokenizer = new_byte_level(merges)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"].reverse()
    return HFTokenizer(wrap(Tokenizer.from_str(json.dumps(state))))


def test_pre_tokenizers_differ() -> None:
    merges = [("e", "Ġ"), ("Ġ", "t")]
    whole = HFTokenizer(new_byte_level(merges, use_regex=False))
    found = difference(HFTokenizer(new_byte_level(merges)), whole)
    assert found is not None
    assert found.startswith("the text 'The quick")


def test_special_tokens_are_read_differently() -> None:
    tokenizer = new_byte_level()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] != "<|mark|>"]
    for token in ("<|mark|>", "<tool>", "<s>", "</s>"):
        state["model"]["vocab"][token] = tokenizer.get_vocab()[token]
    found = difference(
        small("byte-level"), HFTokenizer(wrap(Tokenizer.from_str(json.dumps(state))))
    )
    assert found is not None
    assert "is encoded differently" in found


def test_foreign_tokenizers_are_compared_by_their_texts() -> None:
    class Foreign(PieceTokenizer):
        def encode(self, text: str) -> list[int]:
            raise PromptError("no")

    assert difference(Foreign(["a", "b"]), ToyTokenizer(2)) is None
    assert difference(Foreign(["a", "x"]), ToyTokenizer(2)) == (
        "token 1 is 'x' in the target and 'b' in the draft"
    )


def test_kinds_differ() -> None:
    assert difference(HFTokenizer(new_metaspace()), HFTokenizer(new_word_piece())) is not None


# ---- Toy.


def test_toy_letters_are_distinct_single_characters() -> None:
    letters = ToyTokenizer(3000).vocabulary
    assert letters[:3] == ["a", "b", "c"]
    assert len(set(letters)) == 3000
    assert all(len(letter) == 1 for letter in letters)


@given(ids=st.lists(st.integers(0, 9), min_size=1))
def test_toy_round_trip_and_stream(ids: list[int]) -> None:
    tokenizer = ToyTokenizer(10, eos_token_ids=[4])
    assert tokenizer.encode("".join(map(tokenizer.token_text, ids))) == ids
    kept = "".join("abcdefghij"[i] for i in ids if i != 4)
    assert tokenizer.decode(ids) == kept
    assert "".join(pieces(tokenizer, ids)) == kept


def test_toy_errors() -> None:
    with pytest.raises(PromptError, match=r"'z'.*'a' to 'e'"):
        ToyTokenizer(5).encode("abz")
    with pytest.raises(PromptError, match="empty"):
        ToyTokenizer(5).encode("")
    with pytest.raises(PromptError, match="plain string"):
        ToyTokenizer(5).encode_messages([{"role": "user", "content": "a"}])
    for size in (0, -1, 10**7):
        with pytest.raises(UsageError, match="letters"):
            ToyTokenizer(size)


# ---- The real ones.


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(SMOLLM2, marks=pytest.mark.model),
        pytest.param(QWEN_SMALL, marks=pytest.mark.pair),
    ],
)
@settings(max_examples=500)
@given(data=st.data())
def test_real_pieces_are_the_whole_decode(file: str, data: st.DataObject) -> None:
    tokenizer = real(file)
    ids = data.draw(ids_of(tokenizer))
    expected = backend_decode(tokenizer, ids)
    assert tokenizer.decode(ids) == expected
    assert "".join(pieces(tokenizer, ids)) == expected


@pytest.mark.model
def test_real_text_streams_without_replacement_marks() -> None:
    tokenizer = real(SMOLLM2)
    streamed = pieces(tokenizer, tokenizer.encode(HARD_TEXT))
    assert "".join(streamed) == HARD_TEXT
    assert "" in streamed[:-1]


@pytest.mark.pair
def test_real_tokenizers_compare() -> None:
    large, little = real(QWEN_LARGE), real(QWEN_SMALL)
    assert large.vocab_size == 151665
    assert difference(large, little) is None


@pytest.mark.pair
def test_real_families_differ() -> None:
    assert difference(real(QWEN_SMALL), real(SMOLLM2)) == (
        "token 0 is '!' in the target and '<|endoftext|>' in the draft"
    )
