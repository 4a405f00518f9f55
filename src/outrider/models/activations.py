"""Activation functions whose numbers do not depend on where in a tensor an element lies.

Torch's CPU kernels take a tensor in vectors and the elements left over one by one, with another
exponential; and they cut a large tensor among threads, wherever that falls. So a row's SiLU would
depend on how many rows are beside it, against invariant I2. ``exp`` and ``tanh`` by themselves
have one way of computing an element, and sums and products have one result: of these are the
functions made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import activations

__all__ = ["gelu_tanh", "quick_gelu", "silu", "switch_activations"]


def silu(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x / (1 + exp(-x)), in float32; on a GPU, where each element has a thread, torch's own."""
    if x.is_cuda:
        return F.silu(x)
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def quick_gelu(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x / (1 + exp(-1.702 x)), in float32."""
    wide = x.float()
    return (wide / (1 + torch.exp(wide * -1.702))).to(x.dtype)


def gelu_tanh(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), in float32 (Hendrycks and Gimpel 2016)."""
    wide = x.float()
    inner = (wide * wide * wide * 0.044715 + wide) * math.sqrt(2 / math.pi)
    return ((1 + torch.tanh(inner)) * wide * 0.5).to(x.dtype)


class _Steady(nn.Module):
    """In the place of a module of transformers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function


def _function(part: nn.Module) -> Callable[[Tensor], Tensor] | None:
    if isinstance(part, nn.SiLU | activations.SiLUActivation):
        return silu
    if isinstance(part, activations.GELUTanh) or (
        isinstance(part, nn.GELU) and part.approximate == "tanh"
    ):
        return gelu_tanh
    return quick_gelu if isinstance(part, activations.QuickGELUActivation) else None


def switch_activations(module: nn.Module) -> None:
    """Put these functions in the places of their like; others stay as they are."""
    for part in module.modules():
        for name, child in part.named_children():
            function = _function(child)
            if function is not None:
                setattr(part, name, _Steady(function))
