"""What takes seconds to find out about a model's files, noted in the cache folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from outrider.models import catalogue

__all__ = ["noted", "short"]


def noted(what: str, files: Sequence[Path], find: Callable[[], str]) -> str:
    """What ``find`` says of files, or said of them when they were as they are now.

    The table of a GGUF file takes seconds to read. Noted under the files' place, length and time.

    Parameters
    ----------
    what
        Names the question, and the way it is answered: a change of either makes notes worthless.

    Raises
    ------
    OSError
        When a file cannot be looked at.
    """
    stats = [(str(f.resolve()), (s := f.stat()).st_size, s.st_mtime_ns) for f in files]
    note = catalogue.cache_folder() / "notes" / short(f"{what} {stats}")
    with suppress(OSError):
        return note.read_text()
    found = find()
    # Where it cannot be kept, the next time is slow.
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        (part := note.with_suffix(f".{os.getpid()}")).write_text(found)
        os.replace(part, note)
    return found


def short(text: str) -> str:
    """Of a text's SHA-256, sixteen digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
