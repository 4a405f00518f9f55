"""Exact laws of whole outputs; they live in the package, where `outrider audit` uses them too."""

from __future__ import annotations

from outrider.audit.exact import Outputs, chain_law
from outrider.audit.exact import exact_law as speculative_law
from outrider.audit.exact import largest_difference as distance
from outrider.core.chooser import Place

__all__ = ["Outputs", "Place", "chain_law", "distance", "speculative_law"]
