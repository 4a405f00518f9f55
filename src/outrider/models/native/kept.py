"""Names under which numba keeps compiled functions.

It knows a kept function by its own file's contents. A function that takes code or constants from
another file would be taken up again, as it was, when only the other has changed, by an update of
the package for one: with an old layout of its arguments it reads and writes where it should not.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

__all__ = ["kept_with"]

F = TypeVar("F", bound=Callable[..., object])


def kept_with(*sources: ModuleType, more: str = "") -> Callable[[F], F]:
    """Name a function after the contents of the modules that it takes code or constants from.

    ``more``: what else it depends on, as text.
    """
    text = "".join([more, *map(inspect.getsource, sources)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    def name(function: F) -> F:
        function.__qualname__ = f"{function.__qualname__}-{digest}"
        return function

    return name
