"""What a choice of a model's layers must be."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import UsageError

__all__ = ["check_layers"]


def check_layers(layers: Sequence[int], count: int, name: str) -> tuple[int, ...]:
    """A choice of layers, if it is one of some out of ``count``, in their order.

    Raises
    ------
    UsageError
        When it is empty, out of order, or names a layer that there is not.

    Example
    -------
    >>> check_layers(range(2), 30, "smollm2-135m")
    (0, 1)
    """
    chosen = tuple(layers)
    if (
        not chosen
        or list(chosen) != sorted(set(chosen))
        or not 0 <= chosen[0] <= chosen[-1] < count
    ):
        raise UsageError(
            f"Some of the layers 0 to {count - 1} of '{name}' were expected, in their order; got "
            f"{list(chosen)}.",
            hint="Example: --drafter early_exit:1 for the first, early_exit:0-3,7 for a choice.",
        )
    return chosen
