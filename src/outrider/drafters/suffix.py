"""Drafts what most often followed the longest suffix of the text that is known from somewhere."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush, nlargest
from itertools import count
from math import inf
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

from outrider.core.proposal import ROOT, Proposal
from outrider.core.sequences import common_prefix
from outrider.drafters.confidence import ALWAYS, of_match
from outrider.drafters.shape import Chain, Dynamic, Shape, parse_shape
from outrider.errors import PromptError, UsageError
from outrider.protocols import Pick, Setting, Tokenizer
from outrider.registry import did_you_mean

__all__ = ["Continuation", "SuffixAutomaton", "SuffixDrafter", "read_corpus"]

_INDEX_BYTES = 1024
"""Most that a token takes in an index: two states, each with a table."""


class SuffixDrafter:
    """Proposes the commonest continuations of the longest suffix that occurred before.

    It looks in the request's own text, in a corpus, and in the texts of earlier requests, the
    last two only where asked for; the longest match wins, and of equal ones the first source. A
    token's worth is the product of the shares along its path,

        share(x | w) = count(w x) / Σ_y count(w y),

    where w is the text before x, as far back as the match goes. Nodes are added best worth first;
    of equally common tokens the latest comes first. At the end of a known text it goes on after
    the longest suffix that has a continuation. With m matched tokens a proposal is at most
    ``factor`` · m tokens deep, and a dynamic tree or a chain has no more nodes than that: a short
    match is weak evidence. All of it is without chance, so each token's law is ``None``.

    Parameters
    ----------
    shape
        A chain; or a tree, which goes on after several candidates where the text did.
    corpus
        Texts as token ids, indexed once: outputs like the ones expected.
    store_tokens
        Most tokens of earlier requests to keep for later ones; 0 keeps nothing. A request's text
        counts from when its session is let go, and from the next ``start`` on. Requests then share
        what they hold: how fast one runs can tell what another one said.
    factor
        Tokens proposed for each matched one, the paper's α.
    shortest
        Matched tokens below which nothing is proposed, so that another drafter may be asked.
    longest
        Longest n-gram that is counted, so the longest match is one less.
    default_length
        Draft length used when none is given.

    Raises
    ------
    UsageError
        When ``store_tokens`` is negative, ``factor`` below 1 or ``longest`` below 2.

    Source: Oliaro et al. 2024 (arXiv 2411.04975), "SuffixDecoding", section 3; the counts are kept
    in a suffix automaton (Blumer et al. 1985) in place of a suffix tree.

    Example
    -------
    >>> text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    >>> SuffixDrafter().start(text, 16).propose(text, 3, pick=None).tokens
    (4, 1, 2)
    >>> tree = SuffixDrafter(Dynamic(4)).start([1, 2, 1, 3, 1], 16)
    >>> proposal = tree.propose([1, 2, 1, 3, 1], 3, pick=None)
    >>> proposal.tokens, proposal.parents
    ((3, 2, 1, 1), (-1, -1, 0, 1))
    """

    name = "suffix"

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        corpus: Iterable[Sequence[int]] = (),
        store_tokens: int = 0,
        factor: int = 4,
        shortest: int = 1,
        longest: int = 32,
        default_length: int = 12,
    ) -> None:
        if store_tokens < 0 or factor < 1 or not 1 <= shortest < longest:
            raise UsageError(
                f"A suffix drafter needs store_tokens of 0 or more, a factor of 1 or more, and a "
                f"shortest match of 1 or more that is below its longest n-gram; got "
                f"{store_tokens}, {factor}, {shortest} and {longest}."
            )
        self.shortest = shortest
        self.shape = shape or Chain()
        self.factor = factor
        self.longest = longest
        self.default_length = default_length
        self.corpus = SuffixAutomaton(longest)
        for text in corpus:
            self.corpus.add_text(text)
        self.store = _Store(store_tokens, longest)

    @property
    def trees(self) -> bool:
        """Whether its proposals may have branches."""
        return not isinstance(self.shape, Chain)

    @classmethod
    def build(cls, argument: str, setting: Setting) -> SuffixDrafter:
        """By name: ``suffix``, ``suffix:FILE,FILE,store=200000,match=3#tree=24``, and each part
        alone."""
        parts, _, shape = argument.partition("#")
        corpus: list[list[int]] = []
        options = {"store": 0, "match": 1}
        for part in filter(None, parts.split(",")):
            name, mark, value = part.partition("=")
            if mark and not Path(part).exists():
                options[name] = _option(name, value, options)
            else:
                corpus += read_corpus(part, setting.tokenizer, setting.target.vocab_size)
        store, match = options["store"], options["match"]
        return cls(parse_shape(shape), corpus=corpus, store_tokens=store, shortest=match)

    def start(self, prompt: Sequence[int], capacity: int) -> _SuffixSession:
        """A session with the prompt indexed, and the texts of finished requests in the store."""
        self.store.settle()
        return _SuffixSession(self, prompt)

    def cache_bytes(self, tokens: int) -> int:
        """What the index of a text takes."""
        return _INDEX_BYTES * tokens


class _SuffixSession:
    def __init__(self, drafter: SuffixDrafter, prompt: Sequence[int]) -> None:
        self._drafter = drafter
        self._text: list[int] = []
        self._own = SuffixAutomaton(drafter.longest)
        self._followed: set[tuple[int, ...]] = set()
        """Of the shortest matches, those that the text has gone on from."""
        self._note(prompt)
        # A drafter is not told when a request is over: its session is let go then. The text alone
        # is held on to, and no text is worth keeping at the end of the program.
        if drafter.store.tokens:
            weakref.finalize(self, drafter.store.put, self._text).atexit = False

    def _note(self, tokens: Sequence[int]) -> None:
        known = len(self._text)
        if common_prefix(self._text, tokens) < known:  # another text than the one so far
            self._text.clear()
            self._followed.clear()
            self._own, known = SuffixAutomaton(self._drafter.longest), 0
        self._text.extend(tokens[known:])
        least = self._drafter.shortest
        for end in range(max(least, known), len(self._text)):
            self._followed.add(tuple(self._text[end - least : end]))

    def _own_place(self) -> Place:
        """Where the text's longest suffix was before. To index a token takes as long as to look up
        fifty, so the text is indexed only when its end has been there before."""
        if tuple(self._text[-self._drafter.shortest :]) not in self._followed:
            return Place(0, 0)
        self._own.extend(self._text[self._own.size :])
        return self._own.end()

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        drafter = self._drafter
        if length <= 0 and not drafter.store.tokens:
            return Proposal()  # what came since is noted when it is of use
        self._note(tokens)
        if length <= 0:
            return Proposal()
        best, place = self._own, self._own_place()
        with drafter.store.lock:
            for index in (drafter.corpus, *drafter.store.generations):
                found = index.match(tokens) if index.size else Place(0, 0)
                if found.length > place.length:
                    best, place = index, found
            if place.length < drafter.shortest:
                return Proposal()
            return _grow(best, place, drafter.shape, length, drafter.factor * place.length)


def _grow(index: SuffixAutomaton, place: Place, shape: Shape, length: int, bound: int) -> Proposal:
    """The worthiest nodes that follow a place, at most ``length`` and ``bound`` deep."""
    deepest = min(length, bound)
    most = min(shape.nodes, bound) if isinstance(shape, Dynamic) else inf
    tokens: list[int] = []
    parents: list[int] = []
    shares: list[float] = []
    # No node is worth more than its parent, so the best of those on offer is the best left.
    offered: list[tuple[float, int, int, int, Continuation]] = []
    turn = count()  # of equal worth the one offered first; beyond it nothing is compared

    def offer(parent: int, depth: int, worth: float, place: Place) -> None:
        for found in index.continuations(place, shape.width_at(depth)):
            item = (-worth * found.share, next(turn), parent, depth, found)
            heappush(offered, item)

    offer(ROOT, 0, 1.0, place)
    while offered and len(tokens) < most:
        worth, _, parent, depth, found = heappop(offered)
        if depth + 1 < deepest:
            offer(len(tokens), depth + 1, -worth, found.place)
        tokens.append(found.token)
        parents.append(parent)
        shares.append(found.share * of_match(place.length + depth, ALWAYS))
    laws = (None,) * len(tokens)
    return Proposal(tuple(tokens), tuple(parents), laws, tuple(shares), "suffix")


# --- the index -----------------------------------------------------------------------------------


class Place(NamedTuple):
    """A substring of the indexed texts: the state that holds it, and its length."""

    state: int
    length: int


class Continuation(NamedTuple):
    """A token that followed, its share of all that followed, and where it leads."""

    token: int
    share: float
    place: Place


class SuffixAutomaton:
    """All substrings of some texts, with how often and how lately each occurred.

    A state holds the substrings that end at the same places, suffixes of one another; its link
    leads to the longest suffix that also ends elsewhere. There are at most two states for each
    token, and adding one takes amortised constant time, and time for counting: each of the at
    most ``longest`` states that hold a suffix of the text is counted up. Some 0.5 kB and some
    microseconds a token.

    Parameters
    ----------
    longest
        Substrings up to this length are counted; longer ones are not told apart from what their
        last tokens say. Without a limit a text of one token over and over would take quadratic
        time.

    Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text".

    Example
    -------
    >>> index = SuffixAutomaton(longest=8)
    >>> index.add_text([1, 2, 3, 1, 2, 4, 1, 2, 4])
    >>> place = index.match([7, 1, 2])
    >>> place.length, [(c.token, round(c.share, 2)) for c in index.continuations(place, 2)]
    (2, [(4, 0.67), (3, 0.33)])
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.size = 0
        """Tokens added so far."""
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring that a state holds
        self._count = [0]
        self._latest = [0]
        self._last = 0  # holds the whole text so far
        self._counted = Place(0, 0)  # the text's longest suffix that is counted

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add a text of its own: no substring runs on from the one before into it."""
        self._last, self._counted = 0, Place(0, 0)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with the last text."""
        for token in tokens:
            self._last = self._step(token)
            self.size += 1
            # States may have been split since the place was noted.
            state = self._within(*self._counted).state
            longer = Place(self._next[state][token], self._counted.length + 1)
            self._counted = self._within(longer.state, min(longer.length, self.longest))
            state = self._counted.state
            while state:
                self._count[state] += 1
                self._latest[state] = self.size
                state = self._link[state]

    def match(self, tokens: Sequence[int]) -> Place:
        """The longest suffix of ``tokens`` that something followed, in at most ``longest`` - 1.

        Of the text that is being extended the end itself does not count: nothing follows there.
        """
        state, length = 0, 0
        for token in tokens[-(self.longest - 1) :]:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return self._followed(Place(state, length))

    def end(self) -> Place:
        """``match`` of the text that is being extended, which needs no search."""
        most = min(self._length[self._last], self.longest - 1)
        return self._followed(self._within(self._last, most))

    def continuations(self, place: Place, most: int) -> list[Continuation]:
        """What followed a substring, or its longest suffix that anything followed.

        At most ``most`` tokens, the commonest first, of equally common ones the latest; none
        after the empty string, for then nothing speaks for any of them.
        """
        place = self._followed(place)
        if not place.length:
            return []
        after = self._next[place.state]
        total = sum(self._count[state] for state in after.values())
        best = nlargest(
            most, after.items(), key=lambda item: (self._count[item[1]], self._latest[item[1]])
        )
        length = min(place.length + 1, self.longest - 1)
        return [
            Continuation(token, self._count[state] / total, self._within(state, length))
            for token, state in best
        ]

    def _followed(self, place: Place) -> Place:
        """The longest suffix with a continuation; only the end of a text may have none."""
        state, length = place
        while state and not self._next[state]:
            state = self._link[state]
            length = self._length[state]
        return Place(state, length)

    def _within(self, state: int, length: int) -> Place:
        """The place of the suffix of a given length of what a state holds."""
        while state and self._length[self._link[state]] >= length:
            state = self._link[state]
        return Place(state, length)

    def _step(self, token: int) -> int:
        """The state that holds the text and ``token`` after it, made if need be."""
        before = self._last
        known = self._next[before].get(token)
        if known is not None:  # an earlier text began like this one
            return self._ending_at(before, token, known)
        made = self._state({}, self._length[before] + 1)
        while before >= 0 and token not in self._next[before]:
            self._next[before][token] = made
            before = self._link[before]
        if before >= 0:
            self._link[made] = self._ending_at(before, token, self._next[before][token])
        return made

    def _ending_at(self, before: int, token: int, state: int) -> int:
        """The state whose longest substring is that of ``before`` and ``token``.

        It is ``state``, where ``token`` leads, or one that is split from it: the shorter
        substrings in there are about to end at a place where the longer ones do not.
        """
        if self._length[state] == self._length[before] + 1:
            return state
        split = self._state(dict(self._next[state]), self._length[before] + 1)
        self._link[split], self._link[state] = self._link[state], split
        self._count[split] = self._count[state]
        self._latest[split] = self._latest[state]
        while before >= 0 and self._next[before].get(token) == state:
            self._next[before][token] = split
            before = self._link[before]
        return split

    def _state(self, after: dict[int, int], length: int) -> int:
        self._next.append(after)
        self._link.append(0)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(0)
        return len(self._next) - 1


# --- texts of earlier requests and of files ------------------------------------------------------


class _Store:
    """What finished requests said, for later ones: at most ``tokens`` tokens of it.

    Nothing can be taken out of an automaton, so there are two: when the younger one is full, it
    becomes the older one, and what that one held is dropped. ``lock`` is for who reads
    ``generations``.
    """

    def __init__(self, tokens: int, longest: int) -> None:
        self.tokens = tokens
        self.lock = Lock()
        self.generations: tuple[SuffixAutomaton, ...] = ()
        self._longest = longest
        # Texts come in from finalizers, which may run in any thread and at any time, and so in
        # the midst of a change by the same thread: a lock would not help, this queue does.
        self._finished: SimpleQueue[list[int]] = SimpleQueue()

    def put(self, text: list[int]) -> None:
        """Hand in the text of a finished request."""
        self._finished.put(text)

    def settle(self) -> None:
        """Index what was handed in."""
        with self.lock:
            while not self._finished.empty():
                self._add(self._finished.get())

    def _add(self, text: list[int]) -> None:
        room = self.tokens // 2
        text = text[max(0, len(text) - room) :]
        if not self.generations or self.generations[0].size + len(text) > room:
            self.generations = (SuffixAutomaton(self._longest), *self.generations[:1])
        self.generations[0].add_text(text)


def read_corpus(path: str, tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """The texts of a file as token ids: a text file is one, each line of a ``.jsonl`` file is one.

    Of a line's object the first of ``token_ids``, ``text`` and ``output`` counts, a text or a list
    of the target's token ids; ``outrider generate --json`` prints such objects.

    Raises
    ------
    UsageError
        When the file cannot be read, is no text, has a line without such a field, holds no tokens
        or ids outside the vocabulary, or when it needs a tokenizer that is not there or refuses it.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
        if "\0" in content:
            raise ValueError("it holds zero bytes")
    except FileNotFoundError as error:
        raise UsageError(
            f"There is no corpus file '{path}'.", hint="Example: --drafter suffix:outputs.txt"
        ) from error
    except OSError as error:
        raise UsageError(f"The corpus file '{path}' cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(
            f"The corpus file '{path}' is not UTF-8 text.", hint="Give a .txt or a .jsonl file."
        ) from error
    texts: list[list[int]] = []
    for where, text in _records(path, content):
        ids = _encode(where, text, tokenizer) if isinstance(text, str) else text
        wrong = [t for t in ids if type(t) is not int or not 0 <= t < vocab_size]
        if wrong:
            raise UsageError(
                f"{where} holds {wrong[0]!r}; token ids are whole numbers from 0 to "
                f"{vocab_size - 1}.",
                hint="Give the target's own token ids, or text.",
            )
        texts.append(ids)
    if not any(texts):
        raise UsageError(f"The corpus file '{path}' is empty.", hint="Give one that holds text.")
    return texts


def _encode(where: str, text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise UsageError(
            f"{where} is text, and there is no tokenizer to read it with.",
            hint="Give a .jsonl file with token_ids, or the engine a tokenizer.",
        )
    try:
        return tokenizer.encode(text)
    except PromptError as error:
        raise UsageError(
            f"{where} cannot be made into the target's tokens: {error.problem}", hint=error.hint
        ) from error


def _records(path: str, content: str) -> Iterable[tuple[str, Any]]:
    """Of each text in a file that is not empty, where it stands and what it is."""
    if not path.endswith(".jsonl"):
        if content.strip():
            yield f"The corpus file '{path}'", content
        return
    for number, line in enumerate(content.splitlines(), 1):
        where = f"Line {number} of the corpus file '{path}'"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = next(record[name] for name in ("token_ids", "text", "output") if name in record)
            if not isinstance(text, str | list):
                raise TypeError("neither text nor ids")
        except (ValueError, TypeError, StopIteration) as error:
            raise UsageError(
                f"{where} has no text: an object with 'token_ids', 'text' or 'output' was "
                f"expected; got {line[:60]!r}."
            ) from error
        if text:
            yield where, text


def _option(name: str, value: str, known: Mapping[str, int]) -> int:
    if name not in known:
        raise UsageError(
            f"'suffix' has no option '{name}', and there is no file '{name}={value}'.",
            hint=did_you_mean(name, known),
        )
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(
            f"'{name}' is a number of tokens, 1 or more; got '{value}'.",
            hint="Example: --drafter suffix:store=200000,match=2",
        )
    return int(value)
