"""Linear layers of a 1.5B model: our kernels beside torch's, by number of rows.

    .venv/bin/python -m benchmarks.kernels [--rows 1,2,4,6,8,16,32] [--repeats 15]
        [--only NAME,...] [--shapes 8960x1536,...] [--megabytes M] [--json FILE]

Each shape is held in so many copies that the weights do not fit the last cache (--megabytes is
the least in all, by default four times that cache), and one measurement goes through all of
them; what is told is for one copy. The numbers of rows are measured in turns. Rows are ready
beforehand for every kernel: quantizing them, which a model does once for several layers, is not
timed. GB/s are bytes of weights, with their scales, over time.

The column "exact" says whether sums of byte products are what they are in 64-bit integers, with
values as extreme as a kernel's own weights and rows can be; if not, how far they are off at
worst, of what the products come to without their signs. On AVX2 without VNNI torch's kernels add
two products in 16 bits, which do not hold them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.conditions import (
    bandwidth,
    conditions,
    print_conditions,
    print_table,
    write_json,
)
from outrider.models.native.arena import arena
from outrider.models.native.emit import LANES
from outrider.models.native.kernels import BYTE_ROWS, FRAME, LINEAR, MAX_ROWS, SHARES, UNGATED
from outrider.models.native.team import team
from outrider.models.native.vector import DOT, GROUPS, QUADS
from outrider.models.native.weights import INPUT_STEP, Kind, Linear, pack

SHAPES = "8960x1536,1536x8960,2048x1536"
WARM_UP = 2
CHECKED = (256, 1536)
"""Outputs and inputs of the matrix that exactness is checked on."""


@dataclass(frozen=True)
class Ready:
    """A kernel with its weights.

    Parameters
    ----------
    feed
        From a number of rows to what runs all copies once.
    size
        Bytes of one copy's weights.
    """

    feed: Callable[[int], Callable[[], object]]
    size: int


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Parameters
    ----------
    make
        From outputs, inputs and the number of copies to a kernel.
    width
        Bytes of a weight, for the number of copies.
    exact
        Largest error of a sum, see ``_error``; ``None`` where sums are not of integers.
    """

    make: Callable[[int, int, int], Ready]
    width: int
    exact: Callable[[], float] | None = None


def last_cache_bytes() -> int:
    """The largest cache that Linux tells of, or 32 MiB."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 2**10, "M": 2**20}
    texts = [path.read_text().strip() for path in sizes]
    return max((int(text[:-1]) * units[text[-1]] for text in texts), default=32 * 2**20)


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In huge pages, where a model's weights lie too."""
    out = arena({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        out[name].copy_(tensor)
    return out


# ---- ours ----------------------------------------------------------------------------------------


class Native:
    """Copies of one linear layer as a program of their own, as ``recorder`` writes it."""

    def __init__(self, linear: Linear, copies: int) -> None:
        parts = ("weight", "scales", "sums", "bias")
        self._held = _copied({f"{i}.{p}": getattr(linear, p) for i in range(copies) for p in parts})
        inputs, outputs = linear.padded_inputs, linear.padded_outputs
        self.rows = torch.zeros(MAX_ROWS, inputs, dtype=_row_type(linear.kind))
        self.row_scales = torch.ones(MAX_ROWS, inputs // INPUT_STEP)
        self.out = torch.zeros(MAX_ROWS, outputs)
        self._frame = np.zeros(FRAME.size, np.int64)
        self._counters = np.zeros(copies * SHARES, np.int64)
        self._frame[FRAME.counters] = self._counters.ctypes.data
        kernel, self._arguments = LINEAR[linear.kind], []
        for i in range(copies):
            weight, scales, sums, bias = (self._held[f"{i}.{p}"] for p in parts)
            tensors = (self.rows, self.row_scales, weight, sums, scales, bias, self.out)
            places = [t.data_ptr() for t in tensors]
            step = [self._frame.ctypes.data, *places, inputs, outputs, 0, 0, i, *UNGATED]
            self._arguments.append(np.array(step, np.int64))
        self._team = team()
        functions = (self._team.barrier, self._team.thread_number, self._team.team_size)
        listed = [v for a in self._arguments for v in (kernel.address, a.ctypes.data)]
        self._program = np.array([copies, *functions, *listed], np.int64)

    def run(self, rows: int) -> None:
        """All copies once, for so many rows."""
        self._frame[FRAME.rows] = rows
        self._counters.fill(0)
        self._team.run(self._program.ctypes.data)


def _row_type(kind: str) -> torch.dtype:
    return torch.uint8 if kind == "int8" else torch.float32


def native(kind: Kind) -> Callable[[int, int, int], Ready]:
    """Our kernel for weights of a kind."""

    def make(outputs: int, inputs: int, copies: int) -> Ready:
        linear = pack(torch.randn(outputs, inputs), None, kind)
        made = Native(linear, copies)
        if kind == "int8":
            made.rows.random_(1, 256)
        else:
            made.rows.normal_()
        size = linear.weight.nbytes
        if kind == "int8":
            size += linear.scales.nbytes + linear.sums.nbytes
        return Ready(lambda rows: lambda: made.run(rows), size)

    return make


def native_error() -> float:
    """The worst of every block of inputs and every number of rows that has a tile of its own.

    A block's sum is seen alone where its scales are 1 and the other blocks' are 0.
    """
    outputs, inputs = CHECKED
    worst = 0.0
    for weight in extreme_weights(outputs, inputs):
        linear = pack(weight.float(), None, "int8")
        # [tiles, quads, channels, 4] to [outputs, inputs], the bytes that are really there.
        q = linear.weight.transpose(1, 2).flatten(2).flatten(0, 1).long()
        made = Native(replace(linear, scales=torch.ones_like(linear.scales)), 1)
        for count in range(1, BYTE_ROWS + 1):
            for values in extreme_rows(count, inputs, q):
                parts = (values + 128).to(torch.uint8).unflatten(1, (-1, INPUT_STEP))
                made.rows.flatten()[: values.numel()] = parts.transpose(0, 1).flatten()
                for block in range(inputs // INPUT_STEP):
                    scales = torch.zeros(inputs // INPUT_STEP, count)
                    scales[block] = 1.0
                    made.row_scales.flatten()[: scales.numel()] = scales.flatten()
                    made.run(count)
                    part = slice(INPUT_STEP * block, INPUT_STEP * (block + 1))
                    error = _error(made.out[:count], values[:, part], q[:, part])
                    worst = max(worst, error)
    return worst


# ---- values as extreme as they get ---------------------------------------------------------------


def extreme_weights(outputs: int, inputs: int) -> list[Tensor]:
    """All at the end, at either end, and anything; int64."""
    ends = torch.randint(0, 2, (outputs, inputs)) * 254 - 127
    return [torch.full((outputs, inputs), 127), ends, torch.randint(-127, 128, (outputs, inputs))]


def extreme_rows(count: int, inputs: int, weights: Tensor) -> list[Tensor]:
    """All at either end, with a channel's own signs, and anything; int64."""
    full = torch.full((count, inputs), 127)
    signs = torch.where(weights[:count] < 0, -127, 127)
    return [full, -full, signs, -signs, torch.randint(-127, 128, (count, inputs))]


def _error(found: Tensor, rows: Tensor, weights: Tensor) -> float:
    """Zero if every sum is the float32 nearest to the exact one; else the largest gap, relative
    to what the sum's products come to without their signs."""
    wanted = (rows @ weights.T).float()
    if torch.equal(found.float(), wanted):
        return 0.0
    sizes = (rows.abs() @ weights.abs().T).clamp_min(1)
    return float(((found.double() - wanted.double()).abs() / sizes).max())


def torch_error(run: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], float]:
    """For a function of rows and weights, whole numbers with scales of 1."""

    def check() -> float:
        worst = 0.0
        for weight in extreme_weights(*CHECKED):
            for rows in extreme_rows(8, CHECKED[1], weight):
                worst = max(worst, _error(run(rows, weight), rows, weight))
        return worst

    return check


# ---- torch's -------------------------------------------------------------------------------------


def _all(
    run: Callable[[Tensor, Any], Tensor], copies: list[Any], x: Tensor
) -> Callable[[], object]:
    def once() -> None:
        for copy in copies:
            run(x, copy)

    return once


def _copies(weight: Tensor, copies: int) -> list[Tensor]:
    return list(_copied({str(i): weight for i in range(copies)}).values())


def matmul(dtype: torch.dtype) -> Callable[[int, int, int], Ready]:
    """x Wᵀ with floats."""

    def make(outputs: int, inputs: int, copies: int) -> Ready:
        weights = _copies(torch.randn(outputs, inputs).to(dtype), copies)

        def feed(rows: int) -> Callable[[], object]:
            return _all(lambda x, w: x @ w.T, weights, torch.randn(rows, inputs).to(dtype))

        return Ready(feed, weights[0].nbytes)

    return make


def _whole_numbers(outputs: int, inputs: int) -> Tensor:
    return torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)


def int8pack(outputs: int, inputs: int, copies: int) -> Ready:
    """bfloat16 rows times int8 weights with a scale for each channel."""
    weights = _copies(_whole_numbers(outputs, inputs), copies)
    scales = torch.rand(outputs).bfloat16()

    def feed(rows: int) -> Callable[[], object]:
        x = torch.randn(rows, inputs).bfloat16()
        return _all(lambda x, w: torch.ops.aten._weight_int8pack_mm(x, w, scales), weights, x)

    return Ready(feed, weights[0].nbytes + scales.nbytes)


def _fbgemm_pack(weight: Tensor, scales: Tensor) -> Any:
    zeros = torch.zeros(len(weight), dtype=torch.long)
    q = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(q, None)


def _fbgemm(x: Tensor, packed: Any) -> Tensor:
    # Rows come divided by their scales, so that one input scale, 1, does for all.
    op = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    found: Tensor = op(x, 1.0, 128, packed)
    return found


def quantized_linear(outputs: int, inputs: int, copies: int) -> Ready:
    """float32 rows made into bytes, times int8 weights."""
    scales = torch.rand(outputs) + 0.5
    weights = [_fbgemm_pack(_whole_numbers(outputs, inputs), scales) for _ in range(copies)]

    def feed(rows: int) -> Callable[[], object]:
        return _all(_fbgemm, weights, torch.randint(-127, 128, (rows, inputs)).float())

    return Ready(feed, outputs * inputs + scales.nbytes)


def quantized_error(rows: Tensor, weight: Tensor) -> Tensor:
    """``quantized_linear`` with weights' scales of 1."""
    return _fbgemm(rows.float(), _fbgemm_pack(weight.to(torch.int8), torch.ones(len(weight))))


def _onednn(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    zero = 128 if x.dtype == torch.uint8 else 0
    found: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, zero, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return found


def _to_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x + 128 if dtype == torch.uint8 else x).to(dtype)


def onednn_linear(dtype: torch.dtype) -> Callable[[int, int, int], Ready]:
    """Bytes, with a sign or with 128 added, times int8 weights."""

    def make(outputs: int, inputs: int, copies: int) -> Ready:
        scales, zeros = torch.rand(outputs) + 0.5, torch.zeros(outputs, dtype=torch.int32)
        pack_one = torch.ops.onednn.qlinear_prepack
        weights = [pack_one(_whole_numbers(outputs, inputs), [1, inputs]) for _ in range(copies)]

        def feed(rows: int) -> Callable[[], object]:
            x = _to_bytes(torch.randint(-127, 128, (rows, inputs)), dtype)
            return _all(lambda x, w: _onednn(x, w, scales, zeros), weights, x)

        return Ready(feed, outputs * inputs + scales.nbytes)

    return make


def onednn_error(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """``onednn_linear`` with weights' scales of 1."""

    def run(rows: Tensor, weight: Tensor) -> Tensor:
        n = len(weight)
        packed = torch.ops.onednn.qlinear_prepack(weight.to(torch.int8), list(rows.shape))
        zeros = torch.zeros(n, dtype=torch.int32)
        return _onednn(_to_bytes(rows, dtype), packed, torch.ones(n), zeros)

    return run


ENTRIES = {
    "native int8": Entry(native("int8"), 1, native_error),
    "native bfloat16": Entry(native("bfloat16"), 2),
    "native float32": Entry(native("float32"), 4),
    "torch int8 quantized.linear": Entry(quantized_linear, 1, torch_error(quantized_error)),
    "torch int8 onednn s8": Entry(
        onednn_linear(torch.int8), 1, torch_error(onednn_error(torch.int8))
    ),
    "torch int8 onednn u8": Entry(
        onednn_linear(torch.uint8), 1, torch_error(onednn_error(torch.uint8))
    ),
    "torch int8 weights alone": Entry(int8pack, 1),
    "torch bfloat16": Entry(matmul(torch.bfloat16), 2),
    "torch float32": Entry(matmul(torch.float32), 4),
}


# ---- measuring -----------------------------------------------------------------------------------


def measure(
    entry: Entry, shape: tuple[int, int], rows: list[int], repeats: int, least: int
) -> dict[str, Any]:
    """Median milliseconds of one copy by number of rows."""
    outputs, inputs = shape
    copies = max(2, -(-least // (outputs * inputs * entry.width)))
    ready = entry.make(outputs, inputs, copies)
    runs = {count: ready.feed(count) for count in rows}
    times: dict[int, list[float]] = {count: [] for count in rows}
    for turn in range(WARM_UP + repeats):
        for count in rows if turn % 2 else rows[::-1]:
            started = time.perf_counter()
            runs[count]()
            if turn >= WARM_UP:
                times[count].append((time.perf_counter() - started) / copies)
    medians = {count: statistics.median(seconds) for count, seconds in times.items()}
    return {
        "copies": copies,
        "bytes": ready.size,
        "ms": {count: 1e3 * s for count, s in medians.items()},
        "gb_per_s": {count: ready.size / s / 1e9 for count, s in medians.items()},
    }


def exactness(entry: Entry) -> dict[str, Any]:
    """Whether the sums are exact, and what to write in the table."""
    if entry.exact is None:
        return {"exact": None, "told": "floats"}
    error = entry.exact()
    return {
        "exact": error == 0.0,
        "relative_error": error,
        "told": "yes" if error == 0.0 else f"NO, {error:.0%} off",
    }


def main() -> None:
    """Check, measure and print."""
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--rows", default="1,2,4,6,8,16,32")
    ap.add_argument("--shapes", default=SHAPES, help="outputs x inputs")
    ap.add_argument("--only", default="", help="parts of kernels' names, with commas")
    ap.add_argument("--repeats", type=int, default=15)
    ap.add_argument("--megabytes", type=int, default=0, help="least size of all copies")
    ap.add_argument("--json", default="")
    args = ap.parse_args()
    # That torch's quantized tensors are to go is no news to who measures them.
    warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
    torch.manual_seed(0)
    torch.backends.quantized.engine = "x86"
    rows = [int(part) for part in args.rows.split(",")]
    if not 1 <= min(rows) <= max(rows) <= MAX_ROWS:
        ap.error(f"rows are 1 to {MAX_ROWS}")
    shapes = [tuple(int(n) for n in shape.split("x")) for shape in args.shapes.split(",")]
    parts = args.only.split(",")
    entries = {name: e for name, e in ENTRIES.items() if any(part in name for part in parts)}
    cache = last_cache_bytes()
    least = args.megabytes * 10**6 or max(4 * cache, 128 * 10**6)

    told = conditions(args)
    told |= {
        "dot": DOT,
        "tile": f"{BYTE_ROWS} rows x {GROUPS} x {LANES} channels, blocks of {4 * QUADS}",
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "last_cache_MB": cache / 1e6,
        "all_copies_MB": least / 1e6,
    }
    print_conditions(told)
    speed = bandwidth()

    found: dict[str, Any] = {}
    for name, entry in entries.items():
        print(f"checking and measuring {name}", file=sys.stderr, flush=True)
        try:
            found[name] = exactness(entry)
            for outputs, inputs in shapes:
                timed = measure(entry, (outputs, inputs), rows, args.repeats, least)
                found[name][f"{outputs}x{inputs}"] = timed
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            # Not built into this torch, or not for this processor.
            found[name] = {"exact": None, "told": "not here", "error": str(error).splitlines()[0]}
    speed = max(speed, bandwidth())

    for shape in (f"{outputs}x{inputs}" for outputs, inputs in shapes):
        timed = {name: r for name, r in found.items() if shape in r}
        for unit, key, digits in (("milliseconds", "ms", 3), ("GB/s of weights", "gb_per_s", 1)):
            print_table(
                f"{shape}: {unit} by number of rows",
                ("kernel", "exact", *map(str, rows)),
                (
                    (name, r["told"], *(f"{r[shape][key][count]:.{digits}f}" for count in rows))
                    for name, r in timed.items()
                ),
            )
    for name, r in found.items():
        if "error" in r:
            print(f"{name}: {r['error']}")
    print(f"reading memory, at best: {speed / 1e9:.1f} GB/s")
    write_json(args.json, told, bandwidth_bytes_per_s=speed, kernels=found)


if __name__ == "__main__":
    main()
