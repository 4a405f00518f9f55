"""Every error that Outrider raises on purpose.

    OutriderError
    ├── UsageError (also ValueError)     the request itself is wrong: exit code 2
    │   ├── UnknownNameError             no such drafter, rule, runtime or catalogue entry
    │   ├── SamplingError                a sampling value out of its range
    │   ├── PromptError                  an empty prompt, or one that leaves no room
    │   └── LogError                     a log of measurements is broken, or of another run
    ├── ModelError                       a model cannot be had or cannot be used
    │   ├── ModelNotFoundError           no file, folder or repository of that name
    │   ├── ModelFileError               a file is there, but broken or not a model
    │   │   └── ChecksumError            a file differs from its pinned SHA-256
    │   ├── DownloadError                fetching failed; nothing half-written is kept
    │   ├── NotEnoughMemoryError         the model does not fit; says how much it needs
    │   ├── TokenizerMismatchError       draft and target do not share a tokenizer
    │   ├── DraftMismatchError           a draft head was made for another state of the target
    │   ├── UnsupportedError             a runtime cannot run this model; another may
    │   └── RollbackError                the target's cache cannot take tokens back
    ├── EndpointError                    a server did not answer as it should
    ├── NumericalError                   NaN or infinite logits in one request
    └── ProposalError                    a drafter proposed something impossible

Each message says what was expected, what was got, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "ChecksumError",
    "DownloadError",
    "DraftMismatchError",
    "EndpointError",
    "LogError",
    "ModelError",
    "ModelFileError",
    "ModelNotFoundError",
    "NotEnoughMemoryError",
    "NumericalError",
    "OutriderError",
    "PromptError",
    "ProposalError",
    "RollbackError",
    "SamplingError",
    "TokenizerMismatchError",
    "UnknownNameError",
    "UnsupportedError",
    "UsageError",
]


class OutriderError(Exception):
    """The root of the tree: catch it to catch everything that Outrider raises on purpose.

    Parameters
    ----------
    problem
        One sentence: what was expected and what was got.
    hint
        One sentence: what the reader can do about it.

    Example
    -------
    >>> str(OutriderError("The file has 3 bytes; 5 were expected.", hint="Fetch it again."))
    'The file has 3 bytes; 5 were expected. Fetch it again.'
    """

    exit_code = 1

    def __init__(self, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{problem} {hint}".strip())
        self.problem = problem
        self.hint = hint


class UsageError(OutriderError, ValueError):
    """The request itself is wrong; running it again unchanged cannot help."""

    exit_code = 2


class UnknownNameError(UsageError):
    """No drafter, rule, runtime or model has that name."""


class SamplingError(UsageError):
    """A sampling value is outside the range it may have."""


class PromptError(UsageError):
    """The prompt is empty, or so long that no token fits after it."""


class LogError(UsageError):
    """A log of measurements is broken, or is of another run than the one that would go on."""


class ModelError(OutriderError):
    """A model cannot be had, or cannot be used the way it was asked for."""


class ModelNotFoundError(ModelError):
    """No file, folder, catalogue entry or hub repository answers to that name."""


class ModelFileError(ModelError):
    """A model file is there, but it is broken, incomplete or of another kind."""


class ChecksumError(ModelFileError):
    """A file's SHA-256 differs from the pinned one."""


class DownloadError(ModelError):
    """Fetching a model failed. Nothing half-written is left behind as if it were whole."""


class NotEnoughMemoryError(ModelError, MemoryError):
    """The model needs more memory than the machine has free; raised before loading."""


class TokenizerMismatchError(ModelError):
    """Draft and target do not share a tokenizer, so their token ids mean different things."""


class DraftMismatchError(ModelError):
    """A draft head's target had other weights, another tokenizer, template, adapter or precision;
    raised where the two must match (``strict``), told as a warning elsewhere."""


class UnsupportedError(ModelError):
    """A model or a wish that a runtime does not run; the message says what it is about it."""


class RollbackError(ModelError):
    """The target's cache cannot take tokens back, so rejected drafts would stay in it."""


class EndpointError(OutriderError):
    """A server could not be reached, refused a request, or answered what cannot be read."""


class NumericalError(OutriderError):
    """The model returned NaN or infinite logits. Only the request at hand fails."""


class ProposalError(OutriderError):
    """A drafter proposed something impossible, such as a token outside the vocabulary."""
