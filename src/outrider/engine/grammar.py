"""Output that follows a grammar: a JSON schema, a regular expression, or Lark's own notation.

A grammar is a mask in the law: a token that cannot go on a valid text has probability zero, in the
target's law and in the draft's alike, so every rule stays exact. Which tokens these are is
llguidance's affair; here its matcher is kept at the place that is asked for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from outrider.core.processors import Context
from outrider.core.proposal import Proposal
from outrider.core.sequences import common_prefix
from outrider.errors import UsageError
from outrider.protocols import DraftSession, Pick, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Grammar", "GrammarMask", "Grammars", "Guided", "json_rule"]

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the parts of a JSON text. Bounded, since a small model may go on with it for ever."""

_MASKS = 64
"""Masks kept for one output, each with a byte for each token: those of the round at hand."""

_COMPILED = 64
"""Grammars kept compiled for one tokenizer."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output may be; made by one of its class methods.

    Whether it can be used is told when it is, since that depends on the tokenizer.

    Parameters
    ----------
    source
        The grammar in llguidance's variant of Lark's notation.

    Example
    -------
    >>> from outrider import Engine
    >>> from outrider.models.tokenizer import ToyTokenizer
    >>> from outrider.models.toy import ToyModel
    >>> engine = Engine(ToyModel.random(5, seed=1), ToyTokenizer(5, eos_token_ids=[4]))
    >>> output = engine.generate("ab", grammar=Grammar.regex("(ab|ba)c"), seed=1)
    >>> output.text in ("abc", "bac"), output.finish_reason
    (True, 'stop')
    """

    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """A JSON text that a schema describes; properties come in the schema's own order.

        Parameters
        ----------
        schema
            An object, or its text. A keyword that llguidance does not know is an error, never
            ignored.

        Raises
        ------
        UsageError
            When it is no JSON object.
        """
        return cls(f"start: {json_rule(schema)}")

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches from end to end.

        Source of the notation: https://docs.rs/regex/latest/regex/#syntax
        """
        return cls(f"start: /(?:{_llguidance().regex_to_lark(pattern, '')})/")

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """A grammar in Lark's notation, whose first rule is ``start``.

        Source of the notation: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
        """
        return cls(source)


def json_rule(schema: Mapping[str, Any] | str) -> str:
    """A JSON schema as a part of a rule.

    Raises
    ------
    UsageError
        When it is no JSON object.
    """
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(read, Mapping):
            raise ValueError(f"it is {read!r}")
        options = dict(read.get("x-guidance", {}))
        if "whitespace_flexible" not in options:
            options.setdefault("whitespace_pattern", _WHITESPACE)
        return f"%json {json.dumps({**read, 'x-guidance': options}, allow_nan=False)}"
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"A JSON schema must be a JSON object; this is none: {error}.",
            hint='Example: {"type": "object", "properties": {"age": {"type": "integer"}}}',
        ) from error


class Grammars:
    """Grammars in the tokens of one tokenizer; compiled once each.

    Parameters
    ----------
    tokenizer
        The target's.

    Raises
    ------
    UsageError
        When the tokenizer has no end token, or llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        library, words = _llguidance(), _Words(tokenizer)
        self._library = library
        self._text_ids = frozenset(range(len(words.tokens))) - words.ends
        self._tokens = library.LLTokenizer(words, eos_token=sorted(words.ends))
        self._compiled = lru_cache(maxsize=_COMPILED)(self._compile)

    def mask(self, grammar: Grammar, vocab_size: int) -> GrammarMask:
        """The mask of one output.

        Raises
        ------
        UsageError
            When the grammar is broken, holds what llguidance does not know, or cannot be spelt
            with these tokens.
        """
        return GrammarMask(self.compile(grammar).deep_copy(), vocab_size, self._text_ids)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """At its start; to be copied, not fed. Raises as ``mask`` does."""
        if not isinstance(grammar, Grammar):
            raise UsageError(
                f"A grammar is an outrider.Grammar; got {grammar!r}.",
                hint="Make one with Grammar.json_schema, json_object, regex or lark.",
            )
        return self._compiled(grammar.source)

    def _compile(self, source: str) -> LLMatcher:
        limits = self._library.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = self._library.LLMatcher(
            self._tokens, source, log_level=0, limits=limits
        )
        if matcher.is_error():
            raise UsageError(f"The grammar cannot be used: {_reason(matcher)}.")
        return matcher


class GrammarMask:
    """Which tokens may come next, as the first part of a ``Law``.

    A function of the tokens before a position, whatever was asked before. That it is cheap comes
    from asking along one text: the matcher stands where it was asked last, and goes back and on
    from there. After tokens that break the grammar, which only a draft can hold, all is allowed:
    no such place is ever reached.

    Parameters
    ----------
    matcher
        At its start; from now on this object's alone.
    vocab_size
        Number of the target's tokens.
    text_ids
        Tokens that the matcher may be fed. End tokens are none of them: what comes after one is
        no part of the output, and the matcher is not asked about it.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, text_ids: frozenset[int]) -> None:
        self._start, self._matcher = matcher, matcher.deep_copy()
        self._vocab_size, self._text_ids = vocab_size, text_ids
        self._held: list[int] = []
        self._masks: dict[int, Bool[Tensor, " V"]] = {}
        self._forbidden([])  # what cannot even begin is told before any token is paid for

    def __call__(self, context: Context, scores: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """Minus infinity for what the grammar forbids.

        Raises
        ------
        UsageError
            When no token is left, or the grammar has grown too complex for llguidance.
        """
        forbidden = self._forbidden(list(context.generated))
        if forbidden is None:
            return scores
        return scores.masked_fill(forbidden.to(scores.device), -math.inf)

    def forced(self, output: Sequence[int]) -> list[int]:
        """The tokens that must come next, as the tokenizer spells them; often none.

        Raises
        ------
        UsageError
            When the grammar has grown too complex for llguidance, as in a call.
        """
        if not self._go(list(output)) or self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()

    def allows(self, output: Sequence[int], path: Sequence[int]) -> bool:
        """Whether a path of tokens may follow."""
        fit = self._go(list(output)) and self._text_ids.issuperset(path)
        return fit and self._matcher.validate_tokens(list(path)) == len(path)

    def _forbidden(self, output: list[int]) -> Bool[Tensor, " V"] | None:
        at = len(output)
        if at in self._masks and self._held[:at] == output:
            return self._masks[at]
        if not self._go(output):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise self._failed(at)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        if len(self._masks) == _MASKS:
            del self._masks[min(self._masks)]
        self._masks[at] = torch.from_numpy(allowed == 0)
        return self._masks[at]

    def _go(self, output: list[int]) -> bool:
        """Bring the matcher behind these tokens; whether they keep to the grammar."""
        base = _shared(self._held, output)
        if base < len(self._held):
            self._matcher.rollback(len(self._held) - base)
            del self._held[base:]
            self._masks = {at: mask for at, mask in self._masks.items() if at <= base}
        new = output[base:]
        fit = next((i for i, token in enumerate(new) if token not in self._text_ids), len(new))
        taken = self._matcher.try_consume_tokens(new[:fit])
        if self._matcher.is_error():  # not the same as tokens that break the grammar
            raise self._failed(base + taken)
        self._held += new[:taken]
        return taken == len(new)

    def _failed(self, at: int) -> UsageError:
        """What to raise for a matcher that cannot go on; it stays so, and so another takes its
        place: only a draft may have led it there."""
        reason = _reason(self._matcher)
        self._matcher = self._start.deep_copy()
        self._held.clear()
        self._masks.clear()
        return UsageError(
            f"The grammar leaves no token that could come after {at}: {reason}.",
            hint="Simplify it; or the tokenizer has no token for a character that it wants.",
        )


class Guided:
    """A draft session that knows the grammar.

    Where the grammar leaves one way to go on, that is the draft, for nothing. Of a draft without
    chance, what the grammar forbids is left out before it costs a row; tokens that were drawn stay,
    since leaving them out for what they are would bend the law.

    Parameters
    ----------
    draft
        The session within.
    mask
        The output's own.
    prompt_length
        Tokens before the output.
    """

    def __init__(self, draft: DraftSession, mask: GrammarMask, prompt_length: int) -> None:
        self._draft, self._mask, self._prompt_length = draft, mask, prompt_length

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        """The forced tokens, if there are several; else what the session within proposes."""
        output = tokens[self._prompt_length :]
        forced = self._mask.forced(output)[:length] if length > 1 else []
        if len(forced) > 1:  # one alone is no reason to pass over a draft that goes on behind it
            return Proposal.chain(forced, confidence=[1.0] * len(forced), source="grammar")
        proposal = self._draft.propose(tokens, length, pick)
        if not proposal.is_fixed:
            return proposal
        paths = [proposal.path_tokens(node) for node in range(len(proposal))]
        kept = [node for node, path in enumerate(paths) if self._mask.allows(output, path)]
        return proposal if len(kept) == len(proposal) else proposal.only(kept)


class _Words:
    """A tokenizer as llguidance wants it: bytes for each token, and spellings of texts."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces, special = tokenizer.pieces(), tokenizer.special_tokens()
        size = len(pieces)
        self.ends = frozenset(i for i in tokenizer.eos_token_ids if 0 <= i < size)
        if not self.ends:
            raise UsageError(
                "A grammar needs an end token, and this tokenizer has none.",
                hint="Use a model whose tokenizer names one.",
            )
        names = {i: name.encode() for name, i in special.items()}
        self.tokens = [names.get(i, piece or b"") for i, piece in enumerate(pieces)]
        self.special_token_ids = [*names]
        self.eos_token_id = min(self.ends)
        self._tokenizer, self._pieces = tokenizer, pieces
        longest: dict[bytes, int] = {piece: i for i, piece in enumerate(pieces) if piece}
        self._ids, self._longest = longest, max(map(len, longest), default=1)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text in the middle of another one.

        As the tokenizer spells it where that is certain: some put a space before every text, and
        most put special tokens there. Else the longest token that fits, and so on.
        """
        wanted = text.encode()
        for before in ("", "\n", "a"):
            head = self._encoded(before) if before else []
            ids = self._encoded(before + text)
            rest = ids[len(head) :]
            if ids[: len(head)] == head and b"".join(map(self._piece, rest)) == wanted:
                return rest
        return self._longest_first(wanted)

    def _encoded(self, text: str) -> list[int]:
        try:
            ids = self._tokenizer.encode(text)
        except UsageError:  # a character that is no token
            return []
        return [i for i in ids if self._pieces[i] is not None]

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] or b""

    def _longest_first(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            fits = (self._ids.get(text[at : at + size]) for size in sizes)
            token = next((i for i in fits if i is not None), None)
            if token is None:  # nothing spells it, so nothing is forced from here on
                break
            ids.append(token)
            at += len(self._piece(token))
        return ids


def _shared(held: list[int], output: list[int]) -> int:
    """Length of the common prefix; one text differs from the one before near its end."""
    base, step = min(len(held), len(output)), 1
    while held[:base] != output[:base]:
        base, step = max(0, base - step), 2 * step
    return base + common_prefix(held[base:], output[base:])


def _reason(matcher: LLMatcher) -> str:
    """What llguidance says, without the excerpt of the grammar that it adds."""
    told = re.split(r"\n\s+\d+ \| ", matcher.get_error())[0]
    return " ".join(told.split()).rstrip(".")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            "Grammars need the package llguidance.", hint="pip install 'outrider[grammar]'"
        ) from error
    return llguidance
