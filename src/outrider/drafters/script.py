"""A drafter that says what it was told to say, for tests and demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.proposal import Proposal
from outrider.errors import UsageError
from outrider.protocols import Pick, Setting

__all__ = ["ScriptDrafter"]


class ScriptDrafter:
    """Drafts deterministically from a script.

    Parameters
    ----------
    script
        Either the whole output that it expects, token by token, or a function from the
        committed tokens and the length asked for to the tokens to propose.
    default_length
        Draft length used when none is given.

    Example
    -------
    >>> drafter = ScriptDrafter([7, 8, 9])
    >>> drafter.start([1, 2], 10).propose([1, 2, 7], 2, pick=None).tokens
    (8, 9)
    """

    name = "script"
    trees = False

    def __init__(
        self,
        script: Sequence[int] | Callable[[Sequence[int], int], Sequence[int]] = (),
        default_length: int = 4,
    ) -> None:
        self.script = script
        self.default_length = default_length

    @classmethod
    def build(cls, argument: str, setting: Setting) -> ScriptDrafter:
        """By name: ``script:7,8,9`` expects that output."""
        try:
            return cls([int(part) for part in argument.split(",") if part.strip()])
        except ValueError as error:
            raise UsageError(
                f"A script is a list of token ids; got '{argument}'.", hint="Example: script:7,8,9"
            ) from error

    def start(self, prompt: Sequence[int], capacity: int) -> _ScriptSession:
        """A session that counts from the end of this prompt."""
        return _ScriptSession(self.script, len(prompt))


class _ScriptSession:
    def __init__(
        self,
        script: Sequence[int] | Callable[[Sequence[int], int], Sequence[int]],
        prompt_length: int,
    ) -> None:
        self._script = script
        self._prompt_length = prompt_length

    def propose(self, tokens: Sequence[int], length: int, pick: Pick) -> Proposal:
        if callable(self._script):
            return Proposal.chain(list(self._script(tokens, length))[:length])
        done = len(tokens) - self._prompt_length
        return Proposal.chain(list(self._script[done : done + length]))
