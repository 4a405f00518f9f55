"""A small language model that drafts for a large one with the same tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.distribution import Distribution
from outrider.core.proposal import Proposal
from outrider.core.sequences import common_prefix
from outrider.drafters.confidence import of_token
from outrider.drafters.shape import Chain, Shape, parse_shape
from outrider.drafters.tree import Tree
from outrider.errors import RollbackError, UsageError
from outrider.protocols import CacheBytes, Model, Pick, Setting

__all__ = ["ModelDrafter"]


class ModelDrafter:
    """Runs a draft model ahead of the target, one level of the proposal a step.

    Each token's law is kept as it was drawn from: the draft's logits under the request's own
    processors. Vocabularies that differ only in padding are fine; padding rows are never
    proposed, since models score real tokens only. Once a text holds a token that the draft lacks,
    nothing more is proposed.

    Parameters
    ----------
    model
        The draft model. Its cache must roll back by length.
    default_length
        Draft length used when none is given: the depth of the proposal.
    shape
        A chain, a tree of fixed widths, or a tree that grows where the draft is confident; a
        tree needs a draft model that scores trees.

    Raises
    ------
    RollbackError
        When the draft model keeps a recurrent state: every round would feed it all over again.
    UsageError
        When a tree is asked of a draft model that cannot score one.
    """

    name = "model"

    def __init__(self, model: Model, default_length: int = 4, shape: Shape | None = None) -> None:
        if model.rollback != "length":
            raise RollbackError(
                f"The draft model '{model.name}' cannot take tokens back by length.",
                hint="Use a draft model with full attention, or --drafter ngram.",
            )
        self.model = model
        self.default_length = default_length
        self.shape = shape or Chain()
        if not isinstance(self.shape, Chain) and not model.trees:
            raise UsageError(
                f"The draft model '{model.name}' scores chains only.",
                hint="Leave the tree out: --drafter model:PATH.",
            )

    @property
    def trees(self) -> bool:
        """Whether its proposals may have branches."""
        return not isinstance(self.shape, Chain)

    @classmethod
    def build(cls, argument: str, setting: Setting) -> ModelDrafter:
        """By name: ``model:PATH`` or ``model:PATH#tree=4,2``; the path is as for a target."""
        path, _, shape = argument.partition("#")
        if not path:
            raise UsageError(
                "The 'model' drafter needs a draft model.",
                hint="Example: --drafter model:path/to/draft.gguf",
            )
        return cls(setting.load(path), shape=parse_shape(shape))

    def start(self, prompt: Sequence[int], capacity: int) -> _ModelSession:
        """A session with a cache of its own; the prompt is fed on the first call."""
        return _ModelSession(self.model, capacity, self.shape)

    def cache_bytes(self, tokens: int) -> int:
        """What the draft model's own cache takes, where that is known."""
        return self.model.cache_bytes(tokens) if isinstance(self.model, CacheBytes) else 0


class _ModelSession:
    def __init__(self, model: Model, capacity: int, shape: Shape) -> None:
        self._model = model
        self._cache = model.new_cache(capacity)
        self._shape = shape
        self._fed: list[int] = []

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        # The draft's own context may be shorter than the target's.
        length = min(length, self._model.context_length - len(tokens))
        if length <= 0 or not pick.asks("model"):
            return Proposal()
        # What the last round rejected is taken back here, and what it added is fed: however
        # many rounds went by without a draft, this one starts from the committed tokens.
        self._cache.rollback(min(common_prefix(self._fed, tokens), len(tokens) - 1))
        self._fed = list(tokens[: self._cache.length])
        # A text with a token that the draft has no row for is one that it cannot read.
        if max(tokens[self._cache.length :]) >= self._model.vocab_size:
            return Proposal()
        # As a rule one or two tokens are new, the last draft and the bonus: one pass for both.
        last = max(self._cache.length, len(tokens) - 2)
        self._model.prefill(self._cache, tokens[self._cache.length : last], None)
        if isinstance(self._shape, Chain):
            return self._chain(tokens, last, length, pick)
        tree = Tree(pick, "model")
        for depth in range(length):
            logits = self._model.score(self._cache, tokens[last:], tree.proposal())
            self._cache.rollback(last)
            tree.grow(self._shape, depth, logits)
        self._fed = list(tokens[:last])
        return tree.proposal(self._shape)

    def _chain(self, tokens: Sequence[int], last: int, length: int, pick: Pick) -> Proposal:
        feed = tokens[last:]
        drafted: list[int] = []
        laws: list[Distribution | None] = []
        sure: list[float] = []
        while len(drafted) < length:
            logits = self._model.score(self._cache, feed, Proposal())[0]
            token, law = pick(logits, drafted)
            drafted.append(token)
            laws.append(law)
            sure.append(of_token(logits, token, pick.shares_noise))
            if law is None and not pick.goes_on("model", sure):
                break
            feed = [token]
        self._fed = [*tokens, *drafted[:-1]]
        return Proposal.chain(drafted, laws, confidence=sure, source="model")
