"""The seams: what a model, a cache, a drafter, a rule and a policy must offer.

The whole algorithm needs no more than this of its parts; see ``outrider.engine.round``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from outrider.core.chooser import Chooser
from outrider.core.distribution import Distribution
from outrider.core.proposal import Proposal
from outrider.core.verdict import Verdict

__all__ = [
    "Cache",
    "DraftSession",
    "Drafter",
    "Model",
    "Pick",
    "Policy",
    "Progress",
    "Rollback",
    "Rule",
    "Setting",
    "Target",
    "TextStream",
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

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, up to where the assistant's answer begins."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        ...

    def stream(self) -> TextStream:
        """A fresh decoder for ids that arrive one at a time."""
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
    """

    distribution: Callable[[Float[Tensor, " V"], Sequence[int]], Distribution]
    choose: Callable[[Distribution, int, int], tuple[int, Distribution | None]]
    siblings: Callable[[Distribution, int, int, int, bool], list[tuple[int, Distribution | None]]]

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

        A length of 0 proposes nothing and must leave the session fit for the next call. The
        session finds out by itself which of its earlier drafts were kept.
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
    """

    target: Model
    load: Callable[[str], Model]


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
class Rule(Protocol):
    """Decides what of a proposal stands.

    ``exact``: the target's law is kept whatever q is. ``trees``: it judges proposals with
    branches, not only chains.
    """

    name: str
    exact: bool
    trees: bool

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
    """Chooses a draft length before anything is drawn, from this request's history alone."""

    name: str

    @classmethod
    def build(cls, argument: str) -> Policy:
        """Make one from the text after the colon in ``name:argument``, which may be empty."""
        ...

    def length(self) -> int:
        """The draft length of the coming round."""
        ...

    def learn(self, drafted: int, accepted: int) -> None:
        """What became of the last round's draft: its depth, and how many of its tokens stood."""
        ...
