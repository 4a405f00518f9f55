"""Between text and token ids, also token by token; and whether two models speak the same ids."""

from __future__ import annotations

import json
import re
import reprlib
import string
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import PromptError, UsageError
from outrider.protocols import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["HFTokenizer", "TextStream", "ToyTokenizer", "difference"]

_INCOMPLETE = "\ufffd"

# An incomplete character has at most three bytes and each token of a window adds at least one, so
# a window of three tokens cannot begin inside the character that it ends in. Nor can it hide that
# some decoders drop a space at the very start of a text: that touches its first token alone.
_WINDOW = 3

_Utf8 = getincrementaldecoder("utf-8")

# Bytes that Latin-1 shows are spelled by themselves, the others by the letters from 256 on.
# Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode` in their encoder.
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTE_LEVEL = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + n): byte for n, byte in enumerate(_HIDDEN)
}


class TextStream:
    """Text from token ids that arrive one at a time; incomplete characters are held back.

    All pieces together equal the decoding of all ids at once. A push costs the decoding of a few
    tokens, however long the output has grown.

    Parameters
    ----------
    decode
        From ids to text. The text of a sequence must begin with the text of its beginning, but
        for a last character that is still incomplete and reads as U+FFFD.
    silent
        Ids that add no text wherever they stand, such as special tokens.
    byte_values
        Tokens that stand for a single byte each, where characters outside the vocabulary are
        spelled so.

    Example
    -------
    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [stream.push(byte) for byte in "né".encode()], stream.finish()
    (['n', '', 'é'], '')
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        silent: Container[int] = (),
        byte_values: Mapping[int, int] | None = None,
    ) -> None:
        self._decode = decode
        self._silent = silent
        self._byte_values = byte_values or {}
        self._bytes = _Utf8("replace")
        self._in_bytes = False
        self._window: list[int] = []
        self._text = ""  # of the window
        self._told = 0  # characters of it that were returned

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often a word, sometimes nothing."""
        if token_id in self._silent:
            return ""
        if token_id in self._byte_values:
            return self._push_byte(token_id)
        piece = self._end_bytes()
        self._window.append(token_id)
        self._text = self._decode(self._window)
        certain = max(self._told, len(self._text) - self._text.endswith(_INCOMPLETE))
        piece += self._text[self._told : certain]
        self._told = certain
        if len(self._window) > 2 * _WINDOW:
            self._slide()
        return piece

    def finish(self) -> str:
        """What is left: nothing, or a U+FFFD for a last character that was never completed."""
        rest = self._end_bytes() + self._text[self._told :]
        self._told = len(self._text)
        return rest

    def _push_byte(self, token_id: int) -> str:
        # Decoders judge a run of bytes as a whole: one bad byte at its end would take back every
        # character before it. Nothing could be streamed before the run is over (for some scripts
        # the whole output), so characters are completed here, one by one.
        piece = "" if self._in_bytes else self.finish()
        self._in_bytes = True
        self._window.append(token_id)
        return piece + self._bytes.decode(bytes([self._byte_values[token_id]]))

    def _end_bytes(self) -> str:
        if not self._in_bytes:
            return ""
        self._in_bytes = False
        self._text = self._decode(self._window)
        self._told = len(self._text)
        return self._bytes.decode(b"", final=True)

    def _slide(self) -> None:
        self._window = self._window[-_WINDOW:]
        held = len(self._text) - self._told
        self._text = self._decode(self._window)
        self._told = len(self._text) - held


class HFTokenizer:
    """A transformers tokenizer.

    Parameters
    ----------
    tokenizer
        Any ``PreTrainedTokenizerBase``.
    eos_token_ids
        Tokens that end an output, besides the tokenizer's own end token: a model's generation
        config often names more.

    Example
    -------
    >>> from transformers import AutoTokenizer
    >>> words = HFTokenizer(AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct"))
    ... # doctest: +SKIP
    >>> words.decode(words.encode("Hello"))  # doctest: +SKIP
    'Hello'
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        ids: dict[str, int] = tokenizer.get_vocab()
        words: list[str | None] = [None] * (max(ids.values()) + 1)
        for word, token_id in ids.items():
            words[token_id] = word
        # The rows that pad a model's matrix are entries of the vocabulary in a GGUF file, under
        # the names that llama.cpp's converter gives them.
        while words[-1] == f"[PAD{len(words) - 1}]":
            words.pop()
        self.vocabulary: list[str] = [word or "" for word in words]
        """Token strings by id, in the tokenizer's own spelling; empty where an id is unused."""
        own = tokenizer.eos_token_id
        self._eos = frozenset(eos_token_ids) | ({own} if own is not None else frozenset())
        self._silent = frozenset(
            [i for i, word in enumerate(words) if not word]
            # Twice, since a decoder may drop the first space of a text.
            + [i for i in tokenizer.added_tokens_decoder if not self._text([i, i])]
        )
        spelled = {ids.get(f"<0x{value:02X}>", -1): value for value in range(256)}
        self._byte_values = {} if -1 in spelled else spelled

    def save(self, folder: Path) -> None:
        """Write its files as transformers reads them."""
        self._tokenizer.save_pretrained(folder)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str:
        """Its text; empty where there is none, JSON where there are several by name."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else json.dumps(template, sort_keys=True)

    @property
    def spelling(self) -> str:
        """All that decides which ids a text has, as JSON: vocabulary, merges, normalizer, ..."""
        if (backend := getattr(self._tokenizer, "backend_tokenizer", None)) is None:
            return json.dumps([type(self._tokenizer).__name__, self.vocabulary])
        parts = json.loads(backend.to_str())
        for passing in ("truncation", "padding"):  # settings of the moment
            parts.pop(passing, None)
        return json.dumps(parts, sort_keys=True)

    @property
    def vocab_size(self) -> int:
        """One more than the highest real token id; rows that pad the model's matrix not counted."""
        return len(self.vocabulary)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output."""
        return self._eos

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the tokenizer itself adds.

        An empty text becomes the token that begins a text.

        Raises
        ------
        PromptError
            When the text is empty and the tokenizer has no such token, or is not valid Unicode.
        """
        _check_unicode(text)
        ids: list[int] = self._tokenizer.encode(text)
        if ids:
            return ids
        begin = self._tokenizer.bos_token_id
        if begin is None:
            raise PromptError(
                "The prompt is empty, and this model has no token that begins a text.",
                hint="Give at least one character.",
            )
        return [begin]

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The ids of a conversation, up to where the assistant's answer begins.

        Parameters
        ----------
        messages
            Each has ``role`` and ``content``, both text. An assistant's may have ``tool_calls``
            instead of the content, whose arguments are objects, not text.
        tools
            Functions that the assistant may call, in OpenAI's shape.

        Raises
        ------
        PromptError
            When ``messages`` are not of that form, when the model has no chat template, when its
            template refuses them, or when it would leave tools or calls out.
        """
        from jinja2 import TemplateError

        if not messages:
            raise PromptError("The conversation is empty.", hint="Give at least one message.")
        for number, message in enumerate(messages):
            _check_message(number, message)
        if not self._tokenizer.chat_template:
            raise PromptError(
                "This model has no chat template, so it does not answer messages.",
                hint="Pass a plain string.",
            )
        self._check_tools(messages, tools)
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                [{**message, "content": message.get("content") or ""} for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                return_dict=False,
            )
        except TemplateError as error:
            raise PromptError(f"The model's chat template refuses the messages: {error}") from error
        return ids

    def _check_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Refuse what the template says nothing of: it would be left out without a word."""
        _check_unicode(json.dumps(list(tools), ensure_ascii=False))
        for needed, word in (
            (bool(tools), "tools"),
            (any(message.get("tool_calls") for message in messages), "tool_calls"),
        ):
            if needed and not re.search(rf"\b{word}\b", self.chat_template):
                raise PromptError(
                    f"This model's chat template does not know '{word}', so the model would not "
                    "see them.",
                    hint="Use a model that was made to call tools.",
                )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        if self._byte_values.keys().isdisjoint(ids):
            return self._text(ids)
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.finish()

    def token_text(self, token_id: int) -> str:
        """A token as it reads in the middle of a text, special tokens in full."""
        once, twice = (self._text([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return twice[len(once) :]

    def stream(self) -> TextStream:
        """A fresh decoder for ids that arrive one at a time."""
        return TextStream(self._text, silent=self._silent, byte_values=self._byte_values)

    def pieces(self) -> list[bytes | None]:
        """What each id adds in the middle of a text, in UTF-8, be it a part of a character.

        ``None`` for special tokens and for ids that nothing uses.
        """
        added = self._tokenizer.added_tokens_decoder
        none = self._silent | self._eos
        plain = [i for i in range(self.vocab_size) if i not in added and i not in none]
        # Decoding every id by itself takes seconds for a large vocabulary, reading its spelling
        # a moment. Which spelling it is shows on a few hundred tokens.
        sample = plain[:: 1 + len(plain) // 256]
        for read in (self._read_byte_level, self._read_marked, self._read_decoded):
            try:
                spelled = dict(zip(plain, map(read, plain), strict=True))
            except KeyError:
                continue
            if read == self._read_decoded or all(
                _is_part(spelled[i]) or spelled[i].decode() == self.token_text(i) for i in sample
            ):
                break
        spelled |= {i: token.content.encode() for i, token in added.items() if i not in none}
        return [spelled.get(i) for i in range(self.vocab_size)]

    def special_tokens(self) -> dict[str, int]:
        """Tokens that mark places in a text and leave none in it, by name."""
        ids = sorted(self._silent | self._eos)
        names = {i: self.vocabulary[i] for i in ids if 0 <= i < self.vocab_size}
        return {name: i for i, name in names.items() if name}

    def _read_byte_level(self, token_id: int) -> bytes:
        """GPT-2's spelling: a visible character for each byte."""
        return bytes(_BYTE_LEVEL[letter] for letter in self.vocabulary[token_id])

    def _read_marked(self, token_id: int) -> bytes:
        """SentencePiece's spelling: a mark for spaces, and perhaps tokens for single bytes."""
        if token_id in self._byte_values:
            return bytes([self._byte_values[token_id]])
        return self.vocabulary[token_id].replace("▁", " ").encode()

    def _read_decoded(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def _text(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text


class ToyTokenizer:
    """One letter a token: a, b, c and so on, then A to Z, then other alphabets.

    Parameters
    ----------
    vocab_size
        Number of tokens.
    eos_token_ids
        Tokens that end an output; they leave no letter in a text.
    pairs
        So many tokens, the first ones, stand for two letters each: ab, bc, and so on. Letters then
        have other ids than without, and a text several spellings.

    Raises
    ------
    UsageError
        When there are not that many letters.

    Example
    -------
    >>> words = ToyTokenizer(4, eos_token_ids=[3])
    >>> words.encode("cab"), words.decode([2, 0, 1, 3])
    ([2, 0, 1], 'cab')
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: Iterable[int] = (), *, pairs: int = 0
    ) -> None:
        letters = chain(
            string.ascii_letters, filter(str.isalpha, map(chr, range(0xC0, sys.maxunicode + 1)))
        )
        singles = list(islice(letters, max(vocab_size, 2)))
        neighbours = map("".join, islice(pairwise(singles), max(0, min(pairs, vocab_size - 1))))
        self.vocabulary: list[str] = [*neighbours, *singles][: max(vocab_size, 0)]
        """The letters, by id."""
        if not 1 <= vocab_size <= len(self.vocabulary):
            raise UsageError(
                f"A toy vocabulary has 1 to some 130,000 letters; {vocab_size} were asked for.",
                hint="Use a small number, such as 5.",
            )
        self._ids = {letter: i for i, letter in enumerate(self.vocabulary)}
        self._eos = frozenset(eos_token_ids)

    has_chat_template = False
    chat_template = ""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.vocabulary)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output."""
        return self._eos

    def encode(self, text: str) -> list[int]:
        """The ids of a text's letters.

        Raises
        ------
        PromptError
            When the text is empty, or holds a character that is no token.
        """
        if not text:
            raise PromptError("The prompt is empty.", hint="Give at least one letter.")
        ids: list[int] = []
        at = 0
        while at < len(text):
            word = text[at : at + 2] if text[at : at + 2] in self._ids else text[at]
            if word not in self._ids:
                raise PromptError(
                    f"The character {word!r} is not in the vocabulary of this toy model.",
                    hint=f"Use letters from {self.vocabulary[0]!r} to {self.vocabulary[-1]!r}.",
                )
            ids.append(self._ids[word])
            at += len(word)
        return ids

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Never: a toy model answers no messages.

        Raises
        ------
        PromptError
            Always.
        """
        raise PromptError(
            "A toy model has no chat template, so it does not answer messages.",
            hint="Pass a plain string.",
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The letters of ids, those of end tokens left out."""
        return "".join(self.vocabulary[i] for i in ids if i not in self._eos)

    def token_text(self, token_id: int) -> str:
        """A token's letter, also of an end token."""
        return self.vocabulary[token_id]

    def stream(self) -> TextStream:
        """A fresh decoder for ids that arrive one at a time."""
        return TextStream(self.decode, silent=self._eos)

    def pieces(self) -> list[bytes | None]:
        """What each id adds to a text; ``None`` for end tokens."""
        return [None if i in self._eos else word.encode() for i, word in enumerate(self.vocabulary)]

    def special_tokens(self) -> dict[str, int]:
        """The end tokens, by letter."""
        return {word: i for i, word in enumerate(self.vocabulary) if i in self._eos}


_PROBES = (
    "The quick brown fox's 12345 jumps,  over\n\n\tthe lazy dog!?",
    "def f(x):\n    return x**2  # café, naïve, ﬁn, Å",
    " leading and trailing ",
    "你好，世界 😀👩‍👩‍👧 Привет مرحبا",
    "HELLO hello DON'T don't",
)


def difference(a: Tokenizer, b: Tokenizer) -> str | None:
    """The first difference between a target's tokenizer and a draft's, or ``None``.

    Compares what every id stands for, then how a few texts are encoded, and one of both sides'
    special tokens. Padding of the models' matrices does not count, nor do end tokens: which tokens
    end an output is the target's affair.

    Parameters
    ----------
    a
        The target's.
    b
        The draft's.

    Returns
    -------
    str or None
        What differs, to be put behind a colon.

    Example
    -------
    >>> difference(ToyTokenizer(5), ToyTokenizer(5)) is None
    True
    >>> difference(ToyTokenizer(5), ToyTokenizer(6))
    'sizes 5 and 6'
    """
    words = _vocabulary(a), _vocabulary(b)
    for i, (one, other) in enumerate(zip(*words, strict=False)):
        if one != other:
            return (
                f"token {i} is {_token_text(a, i)!r} in the target "
                f"and {_token_text(b, i)!r} in the draft"
            )
    if len(words[0]) != len(words[1]):
        return f"sizes {len(words[0])} and {len(words[1])}"
    for text in (*_PROBES, _added_tokens(a), _added_tokens(b)):
        if _encoded(a, text) != _encoded(b, text):
            return f"the text {reprlib.repr(text)} is encoded differently"
    return None


def _vocabulary(tokenizer: Tokenizer) -> Sequence[str]:
    if isinstance(tokenizer, HFTokenizer | ToyTokenizer):
        return tokenizer.vocabulary
    return [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    if isinstance(tokenizer, HFTokenizer | ToyTokenizer):
        return tokenizer.token_text(token_id)
    return tokenizer.decode([token_id])


def _added_tokens(tokenizer: Tokenizer) -> str:
    if not isinstance(tokenizer, HFTokenizer):
        return ""
    added = tokenizer._tokenizer.get_added_vocab()
    return " a ".join(word for word, i in added.items() if i < tokenizer.vocab_size)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except PromptError:
        return []


def _is_part(piece: bytes) -> bool:
    """Whether bytes begin or end within a character."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False


def _check_message(number: int, message: Any) -> None:
    calls = isinstance(message, Mapping) and bool(message.get("tool_calls"))
    texts = ("role",) if calls and message.get("content") is None else ("role", "content")
    if not isinstance(message, Mapping) or not all(isinstance(message.get(t), str) for t in texts):
        raise PromptError(
            f"Message {number} is {message!r}; a message has 'role' and 'content', both text.",
            hint='Example: {"role": "user", "content": "Hello"}',
        )
    _check_unicode(message.get("content") or "")
    _check_unicode(json.dumps(message.get("tool_calls"), ensure_ascii=False, default=str))


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The prompt is not valid Unicode at character {error.start}.",
            hint="Remove the unpaired surrogate.",
        ) from error
