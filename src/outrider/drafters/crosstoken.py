"""A small language model that drafts for a large one with another tokenizer."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.proposal import Proposal
from outrider.core.sequences import common_prefix
from outrider.drafters.confidence import of_token
from outrider.drafters.respell import Reader, Words
from outrider.errors import NumericalError, RollbackError, UsageError
from outrider.protocols import CacheBytes, DraftSession, Model, Pick, Setting, Tokenizer
from outrider.registry import did_you_mean

__all__ = ["CrossTokenDrafter"]

_Utf8 = getincrementaldecoder("utf-8")

_METHODS = ["auto", "tli", "slem"]

_COMMON = 0.5
"""The least share of the draft's tokens that the target must have too for ``auto`` to use ``tli``.

The rest of the draft's probability is lost to it, while ``slem`` can spell any text."""

_SPELLED = 0.6
"""First guess of how likely a token of a spelled text is to stand."""

_STEPS_FOR_EACH_TOKEN = 4
"""A draft that spells texts with so many more tokens than the target is not worth its time."""

_TAILS = (8, 4, 2, 1, 0)
"""Committed tokens before a draft's text that are encoded along with it, the first that fit."""


class CrossTokenDrafter:
    """Runs a draft model whose tokens are not the target's; both speak the same texts.

    The committed text is read in the draft's own tokens, and two methods carry its draft back:

    - ``tli``, token-level intersection: the draft's law q over its own tokens is restricted to
      those that the target has too, q'(x) = q(x) / Σ_{y ∈ V_p ∩ V_q} q(y), and written over the
      target's ids, where the request's processors see it. Tokens are drawn from q' and q' is the
      law that the rule is given, so that any exact rule stays exact.
    - ``slem``, string-level exact match: the draft model continues the text by itself, always with
      its most probable token; the continuation is encoded by the target's tokenizer and proposed
      as tokens without chance, whose law is one-hot.

    ``auto`` is ``tli`` where tokens are sampled and at least half of the draft's are tokens of the
    target's too, else ``slem``: at temperature 0 there is no law to carry over, and the tokens that
    only the draft has would be missed for nothing. Special tokens never match, so neither proposes
    the end of a text. Where the text cannot be read or spelled, or the draft's context is full,
    nothing is proposed.

    Parameters
    ----------
    model, tokenizer
        The draft model and its own tokenizer. Its cache must roll back by length.
    target, target_tokenizer
        The target model and its tokenizer.
    method
        ``tli``, ``slem`` or ``auto``.
    default_length
        Draft length used when none is given.

    Raises
    ------
    RollbackError
        When the draft model keeps a recurrent state.
    UsageError
        When there is no such method.

    Source: Timor et al. 2025 (arXiv 2502.05202), algorithm 4 (``tli``) and algorithm 2 (``slem``);
    p is the target's law and q the draft's there too, over the vocabularies T and D.

    Example
    -------
    >>> from outrider import Engine
    >>> engine = Engine.load("toy:vocab=4", drafter="crosstoken:toy:vocab=6,seed=2,pairs=2")
    >>> engine.generate("abab", max_tokens=5).token_ids == engine.generate(
    ...     "abab", max_tokens=5, plain=True
    ... ).token_ids
    True
    """

    name = "crosstoken"
    trees = False

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        target: Model,
        target_tokenizer: Tokenizer,
        *,
        method: str = "auto",
        default_length: int = 4,
    ) -> None:
        if model.rollback != "length":
            raise RollbackError(
                f"The draft model '{model.name}' cannot take tokens back by length.",
                hint="Use a draft model with full attention, or --drafter ngram.",
            )
        _check_method(method)
        self.model = model
        self.default_length = default_length
        self._draft = Words(tokenizer, model.vocab_size)
        self._target = Words(target_tokenizer, target.vocab_size)
        ids = self._target.ids
        common = {i: ids[text] for text, i in self._draft.ids.items() if text in ids}
        if method == "auto" and len(common) < _COMMON * len(self._draft.ids):
            method = "slem"
        self.method = method
        self._common = common

    @classmethod
    def build(cls, argument: str, setting: Setting) -> CrossTokenDrafter:
        """By name: ``crosstoken:PATH`` or ``crosstoken:PATH,method=slem``; the path as a target's.

        Raises
        ------
        UsageError
            When there is no path or no such method, or when the target has no tokenizer.
        """
        path, method = argument, "auto"
        if ",method=" in argument:
            path, _, method = argument.rpartition(",method=")
        if not path:
            raise UsageError(
                "The 'crosstoken' drafter needs a draft model.",
                hint="Example: --drafter crosstoken:path/to/draft.gguf",
            )
        _check_method(method)  # before a model is loaded
        if setting.tokenizer is None or setting.load_any is None:
            raise UsageError(
                "The 'crosstoken' drafter works through texts, and this target has no tokenizer.",
                hint="Pass tokenizer=... to Engine.",
            )
        model, tokenizer = setting.load_any(path)
        return cls(model, tokenizer, setting.target, setting.tokenizer, method=method)

    def start(self, prompt: Sequence[int], capacity: int) -> DraftSession:
        """A session with a cache of its own; the prompt is fed on the first call."""
        reader, run = Reader(self._target, self._draft), _Run(self.model, capacity)
        text = _TextSession(reader, run, self._draft, self._target)
        if self.method == "slem":
            return text
        token = _TokenSession(reader, run, self._common, self._target)
        return token if self.method == "tli" else _EitherSession(token, text)

    def cache_bytes(self, tokens: int) -> int:
        """What the draft model's own cache takes, with room for twice as many tokens as the target
        has: its tokenizer may cut finer."""
        return self.model.cache_bytes(2 * tokens) if isinstance(self.model, CacheBytes) else 0


def _check_method(method: str) -> None:
    if method not in _METHODS:
        raise UsageError(
            f"There is no method '{method}' of drafting across tokenizers.",
            hint=did_you_mean(method, _METHODS),
        )


class _Run:
    """The draft model on one text, whose cache goes wherever the next token is wanted.

    How many tokens the draft needs for a text is not known beforehand, so a cache that gets too
    small makes way for one of twice its size. The latest logits stay, since two may ask for them.
    """

    def __init__(self, model: Model, capacity: int) -> None:
        self.context_length = model.context_length
        self._model = model
        self._room = capacity
        self._cache = model.new_cache(capacity)
        self._fed: list[int] = []
        self._latest: Float[Tensor, " Vq"] | None = None

    def after(self, ids: Sequence[int]) -> Float[Tensor, " Vq"]:
        """The logits after the draft's tokens, at least one."""
        if self._latest is not None and ids == self._fed:
            return self._latest
        self._latest = None
        if len(ids) > self._room:
            self._room = max(2 * self._room, len(ids))
            self._cache = self._model.new_cache(self._room)
            self._fed = []
        self._cache.rollback(min(common_prefix(self._fed, ids), len(ids) - 1))
        known = self._cache.length
        self._fed = list(ids[:known])
        # As a rule one or two tokens are new, the last draft and the bonus: one pass for both.
        last = max(known, len(ids) - 2)
        self._model.prefill(self._cache, ids[known:last], None)
        logits = self._model.score(self._cache, ids[last:], Proposal())[0]
        self._fed, self._latest = list(ids), logits
        return logits


class _TokenSession:
    """Token-level intersection."""

    def __init__(self, reader: Reader, run: _Run, common: dict[int, int], target: Words) -> None:
        self._reader = reader
        self._run = run
        self._rows = len(target.pieces)
        self._from = torch.tensor(list(common), dtype=torch.long)
        self._to = torch.tensor(list(common.values()), dtype=torch.long)
        self._back = {there: here for here, there in common.items()}

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        if length <= 0 or not self._back or not pick.asks("crosstoken"):
            return Proposal()
        ids = self._reader.read(tokens)
        drafted: list[int] = []
        laws: list[Distribution | None] = []
        sure: list[float] = []
        while ids and len(ids) < self._run.context_length and len(drafted) < length:
            logits = self._run.after(ids)
            try:
                token, law = pick(self._on_target(logits), drafted)
            except NumericalError:
                if logits.isnan().any():
                    raise
                break  # nothing that both have can come here
            drafted.append(token)
            laws.append(law)
            ids.append(self._back[token])
            sure.append(of_token(logits, self._back[token], pick.shares_noise))
            if law is None and not pick.goes_on("crosstoken", sure):
                break
        return Proposal.chain(drafted, laws, confidence=sure, source="crosstoken")

    def samples(self, tokens: Sequence[int], pick: Pick) -> bool:
        """Whether the request's law leaves more than one token that could be drafted."""
        ids = self._reader.read(tokens)
        if not ids or len(ids) >= self._run.context_length:
            return False
        try:
            return len(pick.distribution(self._on_target(self._run.after(ids)), []).ids) > 1
        except NumericalError:
            return False

    def _on_target(self, logits: Float[Tensor, " Vq"]) -> Float[Tensor, " V"]:
        """The draft's logits at the target's ids; minus infinity for what only one side has."""
        there = logits.new_full((self._rows,), -torch.inf)
        there[self._to.to(logits.device)] = logits[self._from.to(logits.device)]
        return there


class _TextSession:
    """String-level exact match."""

    def __init__(self, reader: Reader, run: _Run, draft: Words, target: Words) -> None:
        self._reader = reader
        self._run = run
        self._draft = draft
        self._target = target

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        if length <= 0 or not pick.asks("crosstoken"):
            return Proposal()
        ids = self._reader.read(tokens)
        text = b""
        drafted: list[int] = []
        for _ in range(_STEPS_FOR_EACH_TOKEN * length):
            if not ids or len(ids) >= self._run.context_length or len(drafted) >= length:
                break
            best = int(self._run.after(ids).float().numpy(force=True).argmax())
            piece = self._draft.pieces[best]
            if piece is None:  # it would end the text here
                break
            ids.append(best)
            text += piece
            drafted = self._spelled(tokens, text)
        drafted = drafted[:length]
        sure = [_SPELLED] * len(drafted)
        return Proposal.chain(drafted, confidence=sure, source="crosstoken")

    def _spelled(self, tokens: Sequence[int], text: bytes) -> list[int]:
        """A continuation in the target's tokens.

        A few committed tokens are encoded with it, since where a word is cut depends on what
        comes before. They must come out as they are: where the text would be cut across the seam
        (``hel`` stands, and ``lo`` makes it ``hello``), or the target has spelled it in its own
        way, fewer are taken, and at last none. A character that is not whole yet is left out.
        """
        for count in _TAILS:
            tail = list(tokens[len(tokens) - count :]) if count <= len(tokens) else []
            before = self._target.spell(tail)
            if len(tail) != count or before is None:
                continue
            try:
                whole = _Utf8("strict").decode(before + text)
            except UnicodeDecodeError:  # it begins within a character, or holds no text
                continue
            ids = self._target.middle(whole) if whole else None
            if ids is not None and ids[:count] == tail:
                return ids[count:]
        return []


class _EitherSession:
    """Tokens where they are sampled, a text where they are certain.

    Which it is depends on the committed tokens and q, never on what is drawn.
    """

    def __init__(self, token: _TokenSession, text: _TextSession) -> None:
        self._token = token
        self._text = text

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        if length <= 0:
            return Proposal()
        session = self._token if self._token.samples(tokens, pick) else self._text
        return session.propose(tokens, length, pick)
