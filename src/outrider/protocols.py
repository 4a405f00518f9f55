"""The seams: what a model, a cache, a drafter, a rule and a policy must offer.

The whole algorithm needs no more than this of its parts; see ``outrider.engine.round``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from outrider.core.chooser import Chooser
from outrider.core.distribution import Distribution
from outrider.core.price import Price
from outrider.core.proposal import Proposal
from outrider.core.verdict import Verdict

__all__ = [
    "AdaptableModel",
    "Beside",
    "Cache",
    "CacheBytes",
    "DraftSession",
    "Drafter",
    "Head",
    "LayeredModel",
    "Model",
    "Pacing",
    "ParallelHeads",
    "Pick",
    "Policy",
    "Progress",
    "Rollback",
    "Rule",
    "Setting",
    "TappedModel",
    "Target",
    "TextStream",
    "TogetherModel",
    "Tokenizer",
]

Rollback = Literal["length", "snapshot", "none"]
"""How a cache takes tokens back: by moving a length, by a saved state, or not at all."""

Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do in all, in tokens."""


@runtime_checkable
class Cache(Protocol):
    """A model's memory of the tokens it has seen."""

    @property
    def length(self) -> int:
        """Number of tokens held."""
        ...

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Make the last scored pass permanent: keep ``base`` tokens and then a path of its nodes.

        Parameters
        ----------
        base
            Tokens to keep from before the nodes of the last pass.
        path
            Nodes of the last proposal, from the top down, moved in behind them.

        A cache that goes back by snapshots may keep fewer than asked for; the engine looks at
        ``length`` afterwards and feeds the missing committed tokens again.
        """
        ...

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens, or fewer, as above."""
        ...


@runtime_checkable
class Model(Protocol):
    """A language model that scores positions.

    ``vocab_size`` counts real tokens: rows that only pad the output matrix are never returned.
    """

    name: str
    vocab_size: int
    context_length: int
    rollback: Rollback
    trees: bool

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache with room for ``capacity`` tokens."""
        ...

    def prefill(self, cache: Any, tokens: Sequence[int], progress: Progress | None) -> None:
        """Feed tokens whose logits nobody asks for, into a cache of this model's making."""
        ...

    def score(
        self, cache: Any, tokens: Sequence[int], proposal: Proposal
    ) -> Float[Tensor, "rows V"]:
        """One target call: feed tokens and a proposal after them.

        Returns the logits after the last of ``tokens`` (row 0) and after each node of the
        proposal (row 1 + node).
        """
        ...


@runtime_checkable
class CacheBytes(Protocol):
    """A model, a draft head or a drafter that says how much memory one sequence takes.

    A drafter tells what it keeps of its own; what it shares with the target is the target's.
    """

    def cache_bytes(self, tokens: int) -> int:
        """Most bytes for a sequence of so many tokens, drafts included."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What one sequence feeds in a pass: tokens, and a proposal after them or a part of it.

    ``nodes`` are those of the proposal that this pass feeds; the ones before them are in the
    cache already.
    """

    cache: Any
    tokens: Sequence[int]
    proposal: Proposal = field(default_factory=Proposal)
    nodes: range | None = None

    @property
    def fed_nodes(self) -> range:
        """The nodes, all if none are named."""
        return range(len(self.proposal)) if self.nodes is None else self.nodes

    @property
    def fed(self) -> list[int]:
        """All tokens, in the order of their slots."""
        return [*self.tokens, *(self.proposal.tokens[node] for node in self.fed_nodes)]


@runtime_checkable
class TogetherModel(Protocol):
    """A model that scores several sequences in one pass.

    ``most_rows``: tokens that a pass feeds at most.
    """

    most_rows: int

    def score_together(self, asked: Sequence[Asked]) -> list[Float[Tensor, "rows V"]]:
        """``Model.score`` for each of several sequences, at most ``most_rows`` tokens in all."""
        ...


@runtime_checkable
class TappedModel(Protocol):
    """A model that can set hidden states aside for a drafter, in the cache of each sequence."""

    layers: int
    hidden_size: int

    def new_cache(self, capacity: int, taps: tuple[int, ...] = ()) -> Any:
        """An empty cache; its ``hidden.first(n)`` are rows of the first n tokens [n, taps · d]."""
        ...

    def make_head(self, weights: Any) -> Any:
        """A ``Head`` or ``ParallelHeads`` on this model, in its own runtime and precision."""
        ...


@runtime_checkable
class AdaptableModel(Protocol):
    """A model that can run with a LoRA adapter beside its weights."""

    @property
    def adapter(self) -> Any:
        """The one that it runs with, or ``None``."""
        ...

    def with_adapter(self, adapter: Any) -> Any:
        """Another ``Model`` on the same weights, with this adapter or with none."""
        ...


@runtime_checkable
class LayeredModel(Protocol):
    """A model that can run some of its layers alone, on its own weights and caches."""

    layers: int

    def some_layers(self, layers: Sequence[int]) -> Model:
        """These layers, then the final norm and the output matrix.

        It scores into the caches of the whole model: each layer reads and writes its own place
        there. Hidden states set aside in them are left alone.
        """
        ...


@runtime_checkable
class Head(Protocol):
    """A small network that predicts further tokens from a target's hidden states.

    ``taps``: the layers that it reads; ``ids``: the target's token of each of its logits.
    """

    taps: tuple[int, ...]
    ids: Int64[Tensor, " Vd"]

    def new_cache(self, capacity: int) -> Any:
        """An empty cache of its own; rolled back by length."""
        ...

    def feed(
        self, cache: Any, tokens: Sequence[int], hidden: Float[Tensor, "n widths"]
    ) -> tuple[Float[Tensor, " Vd"], Float[Tensor, " d"]]:
        """Committed tokens, each with the target's hidden states of the one before it.

        Returns the logits after the last, and the state from which to go on.
        """
        ...

    def grow(
        self, cache: Any, tree: Proposal, nodes: range, states: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n Vd"], Float[Tensor, "n d"]]:
        """Some nodes of a tree, those before them fed already, each with its parent's state."""
        ...


@runtime_checkable
class ParallelHeads(Protocol):
    """Small networks that predict several further tokens at once, each by itself.

    ``taps``: the layers whose hidden states they read; ``ids``: the target's token of each of
    their logits; ``count``: how many tokens they predict.
    """

    taps: tuple[int, ...]
    ids: Int64[Tensor, " Vd"]
    count: int

    def predict(self, hidden: Float[Tensor, " widths"]) -> Float[Tensor, "count Vd"]:
        """From the hidden states at token i to logits of tokens i + 2, ..., i + 1 + count."""
        ...


@runtime_checkable
class TextStream(Protocol):
    """Text from token ids that arrive one at a time; incomplete characters are held back."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        ...

    def finish(self) -> str:
        """What is left; all pieces together equal the decoding of all ids at once."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Between text and token ids."""

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        ...

    @property
    def chat_template(self) -> str:
        """By which they are; empty where they cannot."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the highest real token id."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt."""
        ...

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The ids of a conversation, up to where the assistant's answer begins.

        ``tools``: functions that the assistant may call, in OpenAI's shape.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        ...

    def stream(self) -> TextStream:
        """A fresh decoder for ids that arrive one at a time."""
        ...

    def pieces(self) -> Sequence[bytes | None]:
        """What each id adds in the middle of a text, in UTF-8, be it a part of a character.

        ``None`` for special tokens and for ids that nothing uses.
        """
        ...

    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that mark places in a text and leave none in it, by name."""
        ...


Target = Callable[[int], Distribution]
"""p after a node of the proposal, or after the last committed token (``ROOT``); made when asked."""


@dataclass(frozen=True, slots=True)
class Pick:
    """How a drafter chooses a token from its own logits, under the rule in force.

    Parameters
    ----------
    distribution
        From the draft's logits and the drafted path so far to q: the request's own processors
        are applied to the draft too, since a draft under the same law agrees more often.
    choose
        From q, the depth (0 is the first drafted position) and the node to a token and the law
        that it was drawn from; ``None`` for a deterministic choice.
    siblings
        From q, a number of children, their depth, the first one's node and whether some may be
        left out afterwards to as many tokens at most, each with its law.
    ranking
        Like ``distribution``, for a tree's siblings: where the request takes the best token only,
        the draft's next best still have their probabilities. ``None`` if it is the same.
    pacing
        Who decides how much of a draft is worth its time; ``None`` takes all.
    among
        Like ``distribution``, where a few tokens, ids ascending, with their logits, are all that
        could come: cheaper. ``None`` if there is no such way.
    shares_noise
        Whether ``choose`` and ``siblings`` tell what the target would draw if its law were q, on
        the very noise of its draw: a guess like any other, that may be dropped.
    """

    distribution: Callable[[Float[Tensor, " V"], Sequence[int]], Distribution]
    choose: Callable[[Distribution, int, int], tuple[int, Distribution | None]]
    siblings: Callable[[Distribution, int, int, int, bool], list[tuple[int, Distribution | None]]]
    ranking: Callable[[Float[Tensor, " V"], Sequence[int]], Distribution] | None = None
    pacing: Pacing | None = None
    among: (
        Callable[[Int64[np.ndarray, " n"], Float[np.ndarray, " n"], Sequence[int]], Distribution]
        | None
    ) = None
    shares_noise: bool = False

    def asks(self, source: str) -> bool:
        """Whether a drafter of that name is wanted in this round, for the time that it takes."""
        return self.pacing is None or self.pacing.asks(source)

    def goes_on(self, source: str, confidence: Sequence[float]) -> bool:
        """Whether another step is wanted after tokens of such confidence; for what is not drawn."""
        return self.pacing is None or self.pacing.goes_on(source, confidence)

    def __call__(
        self, logits: Float[Tensor, " V"], path: Sequence[int]
    ) -> tuple[int, Distribution | None]:
        """The next token of a chain after a drafted path."""
        return self.choose(self.distribution(logits, path), len(path), len(path))


@runtime_checkable
class DraftSession(Protocol):
    """A drafter at work on one sequence."""

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        """At most ``length`` tokens deep, after the committed ``tokens``.

        A length of 0 proposes nothing and must leave the session fit for the next call; the last
        call of a request is one, with the whole text. The session finds out by itself which of its
        earlier drafts were kept.
        """
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What a drafter that is made by name may use.

    Parameters
    ----------
    target
        The target model.
    load
        From a name or path to a draft model that shares the target's tokenizer; raises
        ``TokenizerMismatchError`` when it does not.
    tokenizer
        The target's, if it has one.
    load_any
        From a name or path to a model of any kind, with the tokenizer that is its own.
    drafter
        From a drafter's name, with its argument, to the drafter.
    head
        From a folder to the draft head in it, on this target; from an empty text to the head that
        comes with the target.
    parallel
        From a folder to the parallel heads in it, on this target.
    """

    target: Model
    load: Callable[[str], Model]
    tokenizer: Tokenizer | None = None
    load_any: Callable[[str], tuple[Model, Tokenizer]] | None = None
    drafter: Callable[[str], Drafter] | None = None
    head: Callable[[str], Head] | None = None
    parallel: Callable[[str], ParallelHeads] | None = None


@runtime_checkable
class Drafter(Protocol):
    """A source of proposals.

    ``default_length`` is the draft length used when none is given, a proposal's depth;
    ``trees``: proposals may have branches.
    """

    name: str
    default_length: int

    @property
    def trees(self) -> bool:
        """Whether proposals may have branches, which target and rule must then be fit for."""
        ...

    @classmethod
    def build(cls, argument: str, setting: Setting) -> Drafter:
        """Make one from the text after the colon in ``name:argument``, which may be empty."""
        ...

    def start(self, prompt: Sequence[int], capacity: int) -> DraftSession:
        """A session for one sequence that will grow to at most ``capacity`` tokens."""
        ...


@runtime_checkable
class Beside(Protocol):
    """A drafter that works on the target's own cache, beside what ``Drafter`` asks for.

    ``taps``: the layers whose hidden states it wants in that cache.
    """

    taps: tuple[int, ...]

    def start_beside(self, cache: Any, prompt: Sequence[int], capacity: int) -> DraftSession:
        """A session for the sequence in ``cache``, which holds all committed tokens but the last
        whenever the session is asked, and is as it was afterwards."""
        ...


@runtime_checkable
class Rule(Protocol):
    """Decides what of a proposal stands.

    ``exact``: the target's law is kept whatever q is. ``trees``: it judges proposals with
    branches, not only chains. ``invariant``: what comes out is the same text whatever is drafted,
    so that how much is drafted may depend on the machine.
    """

    name: str
    exact: bool
    trees: bool
    invariant: bool

    def draft(
        self, q: Distribution, chooser: Chooser, position: int, round: int, node: int
    ) -> tuple[int, Distribution | None]:
        """How a drafter should choose under this rule: the token, and the law it was drawn from."""
        ...

    def siblings(
        self,
        q: Distribution,
        count: int,
        chooser: Chooser,
        position: int,
        round: int,
        node: int,
        droppable: bool,
    ) -> list[tuple[int, Distribution | None]]:
        """At most ``count`` different tokens for the children of one node, the likeliest first.

        The first child is node ``node`` of the proposal, the next ``node + 1``, and so on; each
        comes with the law that it was drawn from, given the ones before it. ``droppable``: the
        drafter may leave some out for what they are, so none may be drawn for ``judge`` to test.
        """
        ...

    def judge(
        self, target: Target, proposal: Proposal, chooser: Chooser, position: int, round: int
    ) -> Verdict:
        """What stands, and the token that the target adds.

        ``position`` is the output index of the first drafted token, ``round`` the round's number.
        """
        ...


@runtime_checkable
class Policy(Protocol):
    """Chooses a draft length before anything is drawn, from this request's history alone.

    One that also offers ``Pacing`` has a say in what else is drafted and scored.
    """

    name: str

    @classmethod
    def build(cls, argument: str, price: Price) -> Policy:
        """Make one from the text after the colon in ``name:argument``, which may be empty.

        ``price`` says what rows and steps cost.
        """
        ...

    def length(self) -> int:
        """The draft length of the coming round."""
        ...

    def learn(self, proposal: Proposal, path: Sequence[int]) -> None:
        """What became of the last round's draft: the nodes that stood, from the top down."""
        ...


@runtime_checkable
class Pacing(Protocol):
    """Decides how much of a draft is worth its time, beside what ``Policy`` asks for.

    It may look at all but what was drawn: a sampled token stays, whatever it is.
    """

    def hopes(self) -> bool:
        """Whether any draft could be worth its row in this round; if none, no drafter is asked."""
        ...

    def asks(self, source: str) -> bool:
        """Whether a drafter of that name is wanted in this round."""
        ...

    def goes_on(self, source: str, confidence: Sequence[float]) -> bool:
        """Whether a chain without chance is worth one more step after such tokens."""
        ...

    def trim(self, proposal: Proposal) -> Proposal:
        """The part of a proposal to score: all of it, if anything in it was drawn."""
        ...

    def beside(self, rows: int, tokens: float) -> None:
        """What other sequences feed and emit in the coming pass, about; nothing when alone."""
        ...

    def took(self, proposal: Proposal, draft_s: float, total_s: float) -> None:
        """The time of the round that scored a proposal, and of its draft. Told before ``learn``,
        and only where the text is the same whatever is drafted."""
        ...
