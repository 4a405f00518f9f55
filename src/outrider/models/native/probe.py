"""What this machine's processor does with the compiled steps, asked before they are relied on."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from outrider.models.native.kernels import BYTE_ROWS, FRAME, LINEAR, SHARES, UNGATED, Kernel
from outrider.models.native.team import team
from outrider.models.native.vector import QUADS
from outrider.models.native.weights import INPUT_STEP, Linear, pack

__all__ = ["fault", "multiply"]


def multiply(w: Linear, rows: Tensor, scales: Tensor) -> Tensor:
    """Rows of bytes (128 added) times a matrix, by the compiled step alone.

    Parameters
    ----------
    w
        An int8 matrix.
    rows
        u8 [n, K], n at most ``BYTE_ROWS``.
    scales
        f32 [n, K / INPUT_STEP], each row's.
    """
    n, width = rows.shape
    frame = np.zeros(FRAME.size, np.int64)
    counters = np.zeros(SHARES, np.int64)
    frame[FRAME.rows], frame[FRAME.counters] = n, counters.ctypes.data
    fed = rows.view(n, -1, INPUT_STEP).transpose(0, 1).contiguous()
    worth = scales.t().contiguous()
    out = torch.zeros(n, w.padded_outputs)
    parts = (fed, worth, w.weight, w.sums, w.scales, w.bias, out)
    numbers = [frame.ctypes.data, *(part.data_ptr() for part in parts)]
    arguments = np.array([*numbers, width, w.padded_outputs, 0, 0, 0, *UNGATED], np.int64)
    kernel: Kernel = LINEAR["int8"]
    step = (kernel.address, arguments.ctypes.data)
    crew = team()
    program = np.array([1, crew.barrier, crew.thread_number, crew.team_size, *step], np.int64)
    crew.run(program.ctypes.data)
    return out


@cache
def fault() -> str | None:
    """Why the compiled steps cannot be used here, or ``None`` if their sums are exact.

    The largest weights and rows that there can be meet: sums that are cut off somewhere on the
    way, as those of some processors are, come out wrong here.
    """
    try:
        weight = torch.ones(64, 2 * INPUT_STEP)
        weight[::2] *= -1
        weight[1::3, 1::2] *= -1
        w = pack(weight, None, "int8")
        rows = torch.full((BYTE_ROWS, weight.shape[1]), 255, dtype=torch.uint8)
        rows[1::2, ::2], rows[2] = 0, 0
        scales = torch.ones(BYTE_ROWS, weight.shape[1] // INPUT_STEP)
        found = multiply(w, rows, scales).double()
        q = w.weight.double().permute(0, 2, 1, 3).reshape(-1, weight.shape[1])
        worth = w.scales.double().transpose(1, 2).reshape(-1, scales.shape[1])
        products = (rows.double() - 128)[:, None] * q
        blocks = products.view(BYTE_ROWS, len(q), -1, 4 * QUADS).sum(-1)
        expected = (blocks * worth).sum(-1)
        if torch.allclose(found, expected, rtol=1e-5, atol=1e-3):
            return None
        return "this processor sums products of bytes wrongly"
    except Exception as error:  # a compiler has many ways to refuse
        return f"its steps could not be compiled here ({type(error).__name__}: {error})"
