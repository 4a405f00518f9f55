"""Files that a command will write, looked at before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from outrider.errors import UsageError

__all__ = ["check_place"]


def check_place(file: Path | None) -> None:
    """Raise ``UsageError`` if a file cannot be written: better now than after an hour's work."""
    if file is None:
        return
    where = "Choose another file."
    if not file.name or file.is_dir():
        raise UsageError(f"A file was expected; '{file}' is a folder.", hint=where)
    if not file.parent.is_dir():
        raise UsageError(f"The folder '{file.parent}' does not exist.", hint=f"Make it. {where}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"'{file}' may not be written to.", hint=where)
