"""What every page is: one file from a template, loading nothing, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.errors import UsageError

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
except ModuleNotFoundError as error:
    raise UsageError(
        "A report needs jinja2, which is not installed.",
        hint="Run: pip install outrider[report]",
    ) from error

__all__ = ["Markup", "render", "write_page"]


def render(template: str, *, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Fill a template of this package; every text is escaped that is not ``Markup``.

    Parameters
    ----------
    template
        Its file name.
    filters
        Functions that it may call on values.
    values
        What it shows.
    """
    environment = Environment(
        loader=PackageLoader("outrider.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    page = environment.get_template(template).render(**values)
    # A lone surrogate, as in an argument that was not UTF-8, must not make the page unwritable.
    return page.encode("utf-8", "backslashreplace").decode()


def write_page(path: str | os.PathLike[str], html: str) -> None:
    """Write a page whole or not at all: beside its place first, then into it.

    Raises
    ------
    UsageError
        When the folder does not exist, or the file cannot be written there.
    """
    place = Path(path)
    if not place.parent.is_dir():
        raise UsageError(
            f"The folder '{place.parent}' does not exist.", hint="Make it, or choose another file."
        )
    beside = ""
    try:
        handle, beside = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(html)
        # A temporary file is its owner's alone; a page is as readable as any other new file.
        mask = os.umask(0)
        os.umask(mask)
        Path(beside).chmod(0o666 & ~mask)
        Path(beside).replace(place)
    except OSError as error:
        if beside:
            with suppress(OSError):
                Path(beside).unlink()
        raise UsageError(
            f"'{place}' cannot be written: {error.strerror}.", hint="Choose another file."
        ) from error
