"""Small tokenizers of every kind of decoder, made on the spot, and the real ones where present."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.models.tokenizer import HFTokenizer, TextStream

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN_SMALL = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
QWEN_LARGE = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ m['role'] }}\n{{ m['content'] }}</s>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def spell(text: str) -> str:
    """A text in the byte-level alphabet: one visible character a byte."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[
        0
    ][0]


def wrap(tokenizer: Tokenizer, **options: object) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options
    )


def new_byte_level(
    merges: Sequence[tuple[str, str]] = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n")),
    *,
    padding: int = 0,
    use_regex: bool = True,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2, Qwen and SmolLM2 have it: tokens may split a character."""
    halves = [(spell("😀")[:2], spell("😀")[2:]), (spell("你")[:1], spell("你")[1:])]
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    for half in halves:
        words += half
    steps = [(half[0], half[1]) for pair in halves for half in pair if len(half) == 2]
    steps += list(merges)
    words += ["".join(step) for step in merges]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=steps))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|mark|>"])
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    first = made.get_vocab_size()
    made.add_tokens([f"[PAD{i}]" for i in range(first, first + padding)])
    return wrap(made, chat_template=TEMPLATE)


def new_byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have it: words with a mark for spaces, single bytes for the rest."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "é", "你", "▁a", "ab", "▁▁", "\ufffd"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    model = models.BPE(
        vocab={word: i for i, word in enumerate(words)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrap(made, unk_token="<unk>")


def new_metaspace() -> PreTrainedTokenizerFast:
    """As T5 and ALBERT have it: the first token's space is dropped."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁the", "s", "▁▁", "你", "a▁"]
    made = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<s>", "</s>"])
    return wrap(made)


def new_word_piece() -> PreTrainedTokenizerFast:
    """As BERT has it: spaces before whole words, none before endings."""
    words = ["[UNK]", "<s>", "</s>", "the", "##s", ".", "##你", "do", "n't"]
    vocabulary = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["<s>", "</s>"])
    return wrap(made)


KINDS = {
    "byte-level": new_byte_level,
    "byte-fallback": new_byte_fallback,
    "metaspace": new_metaspace,
    "word-piece": new_word_piece,
}


@cache
def small(kind: str) -> HFTokenizer:
    return HFTokenizer(KINDS[kind]())


@cache
def _load(path: Path) -> HFTokenizer:
    return HFTokenizer(AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))


def real(file: str) -> HFTokenizer:
    """A tokenizer out of a GGUF file; skips the test where there is none."""
    folder = Path(os.environ.get("OUTRIDER_DEV_CACHE", "~/.cache/outrider-dev")).expanduser()
    if not (folder / file).is_file():
        pytest.skip(f"{file} is not in {folder}")
    return _load(folder / file)


@cache
def single_bytes(tokenizer: HFTokenizer) -> list[int]:
    """The tokens of a byte-level vocabulary that stand for one byte."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    return [i for i, word in enumerate(tokenizer.vocabulary) if word in alphabet]


class PieceTokenizer:
    """One token for each of the given texts."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self.vocab_size = len(pieces)
        self.eos_token_ids: frozenset[int] = frozenset()
        self.decoded_ids = 0

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_messages(self, messages: object, tools: object = ()) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded_ids += len(ids)
        return "".join(self.pieces[i] for i in ids)

    def stream(self) -> TextStream:
        return TextStream(self.decode)
