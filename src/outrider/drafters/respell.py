"""A text that one tokenizer has cut into tokens, in the tokens of another."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from outrider.errors import PromptError
from outrider.protocols import Tokenizer

__all__ = ["Reader", "Words"]

_Utf8 = getincrementaldecoder("utf-8")

# Many tokenizers put a space before a text, or drop one. Behind something else they do not, and
# what it was is cut off again. None of these grows together with every text.
_BEFORE = ("", "a", "\n", "。")

_LONGEST = 384
"""Characters that are encoded in one piece; each round encodes the last such piece again."""


class Words:
    """A tokenizer's tokens as bytes, and its encoding of texts that begin in the middle.

    Parameters
    ----------
    tokenizer
        Whose words these are.
    rows
        Tokens that its model scores; higher ids are no tokens.

    Example
    -------
    >>> from outrider.models.tokenizer import ToyTokenizer
    >>> pairs = Words(ToyTokenizer(4, pairs=1), 4)  # ab, a, b, c
    >>> pairs.middle("cab"), pairs.spell([3, 0])
    ([3, 0], b'cab')
    """

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self._tokenizer = tokenizer
        self.pieces = list(tokenizer.pieces()[:rows])
        self.pieces += [None] * (rows - len(self.pieces))
        # Of several tokens with one text the last: a byte's token comes before the letter's.
        self.ids = {piece: i for i, piece in enumerate(self.pieces) if piece}
        self.special = {w: i for w, i in tokenizer.special_tokens().items() if i < rows}
        self._names = {i: name for name, i in self.special.items()}
        alone = self._encode("a")
        ordinary = [n for n, i in enumerate(alone) if i not in self._names]
        # What the tokenizer puts around a text of its own accord.
        self.begin = alone[: ordinary[0]] if ordinary else []
        self._end = len(alone) - 1 - ordinary[-1] if ordinary else 0

    def name(self, token: int) -> str | None:
        """A special token's name."""
        return self._names.get(token)

    def spell(self, tokens: Sequence[int]) -> bytes | None:
        """The bytes of tokens in the middle of a text; ``None`` if one has none."""
        pieces = [self.pieces[i] if i < len(self.pieces) else None for i in tokens]
        return None if None in pieces else b"".join(p for p in pieces if p is not None)

    def first(self, text: str) -> list[int] | None:
        """A text's tokens at the beginning, what ``begin`` holds left out; ``None`` if it has none.

        A space may be put before it, as the tokenizer's way is.
        """
        ids = self._encode(text)
        return ids[len(self.begin) : len(ids) - self._end] or None

    def middle(self, text: str) -> list[int] | None:
        """A text's tokens in the middle of a longer one; ``None`` if they cannot spell it."""
        wanted = text.encode()
        for before in _BEFORE:
            cut = (self.first(before) or []) if before else []
            ids = self.first(before + text) or []
            if ids[: len(cut)] == cut and self.spell(ids[len(cut) :]) == wanted:
                return ids[len(cut) :]
        return None

    def part(self, piece: bytes) -> list[int] | None:
        """Tokens of a part of a character; ``None`` if there are none."""
        if piece in self.ids:
            return [self.ids[piece]]
        ids = [self.ids.get(bytes([byte]), -1) for byte in piece]
        return None if -1 in ids else ids

    def _encode(self, text: str) -> list[int]:
        try:
            ids = self._tokenizer.encode(text)
        except PromptError:  # no text, or one that it cannot spell
            return []
        return ids if max(ids) < len(self.pieces) else []


class Reader:
    """A growing sequence of the target's tokens, in the tokens of the draft.

    What it reads is a function of the sequence alone, and it takes time for what is new: the text
    is encoded in pieces, cut where a word begins, and a piece that is over is never looked at
    again. A special token of the target's stands for the draft's of the same name, or nothing.

    Parameters
    ----------
    target, draft
        The two vocabularies.

    Example
    -------
    >>> from outrider.models.tokenizer import ToyTokenizer
    >>> letters, pairs = Words(ToyTokenizer(3), 3), Words(ToyTokenizer(4, pairs=1), 4)
    >>> Reader(letters, pairs).read([0, 1, 2])
    [0, 3]
    """

    def __init__(self, target: Words, draft: Words) -> None:
        self._target = target
        self._draft = draft
        self._clear()

    def _clear(self) -> None:
        self._seen: list[int] = []
        self._ids = list(self._draft.begin)
        self._fits = True
        self._text = ""  # of the piece that is not over
        self._utf8 = _Utf8("replace")

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """The draft's tokens; ``None`` when it has none for some part of the text."""
        known = len(self._seen)
        if list(tokens[:known]) != self._seen:  # another text than the one read so far
            self._clear()
            known = 0
        for token in tokens[known:]:
            self._take(token)
        self._seen += tokens[known:]
        if not self._fits:
            return None
        last = self._encoded(self._text)
        part = self._draft.part(self._utf8.getstate()[0])
        return None if last is None or part is None else self._ids + last + part

    def _take(self, token: int) -> None:
        piece = self._target.pieces[token]
        if piece is None:
            self._close(len(self._text))
            self._utf8.reset()
            special = self._draft.special.get(self._target.name(token) or "")
            # Both may begin a text with the same mark, and one is enough.
            if special is not None and not ([special] == self._ids == self._draft.begin):
                self._ids.append(special)
            return
        self._text += self._utf8.decode(piece)
        while len(self._text) > _LONGEST:
            self._close(_cut(self._text))

    def _close(self, end: int) -> None:
        ids = self._encoded(self._text[:end])
        self._text = self._text[end:]
        if ids is None:
            self._fits = False
        else:
            self._ids += ids

    def _encoded(self, text: str) -> list[int] | None:
        if not text:
            return []
        if self._ids != self._draft.begin and (ids := self._draft.middle(text)) is not None:
            return ids
        return self._draft.first(text)


def _cut(text: str) -> int:
    """Where the last word begins in the first characters of a text, or else where these end."""
    for at in range(_LONGEST, _LONGEST // 2, -1):
        if text[at].isspace() and not text[at - 1].isspace():
            return at
    return _LONGEST
