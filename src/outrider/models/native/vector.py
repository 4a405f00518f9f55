"""The few loops that must be vectors, written as LLVM vectors.

Numba compiles everything else. These three are where the time goes, and where the order of a
float sum must not depend on what a compiler makes of a loop: each accumulates one term at a
time, in the order of the keys or inputs, with a fused multiply-add. ``<64 x float>`` and the like
are split by LLVM into whatever registers the processor has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from outrider.models.native.emit import (
    FEATURES,
    LANES,
    WIDE,
    Loop,
    constant,
    declare,
    finish,
    fma,
    intrinsic_of,
    load,
    prefetch,
    splat,
    store,
)

__all__ = [
    "BLOCK",
    "DOT",
    "GROUPS",
    "QUADS",
    "QUERIES",
    "ROWS",
    "VECTOR_NIBBLE_ROWS",
    "bits_to_float",
    "call_barrier",
    "call_count",
    "call_step",
    "columns",
    "exponentials",
    "float_tile",
    "float_to_bits",
    "integer_tile",
    "next_ticket",
    "nibble_tile",
    "pointer",
    "put_half",
    "put_halves",
    "row_bytes",
    "row_sums",
    "silu",
]

BLOCK = 64
"""Keys in a block of the cache; a head's width is padded to a multiple of it."""


def _dot_kind() -> str:
    if WIDE and FEATURES.get("avx512vnni"):
        return "vnni"
    if FEATURES.get("avxvnni") and not WIDE:
        return "vnni"
    return "pairs" if FEATURES.get("avx2") and not WIDE else "portable"


DOT = _dot_kind()
"""How four products of bytes are summed into a lane.

``vnni``: one instruction, exact. ``pairs``: AVX2 first sums two products in 16 bits, which
saturate; weights are quantized so that no pair can reach that (see ``quantize``), and then it is
exact too. ``portable``: plain widening, exact everywhere.
"""

GROUPS = 2
"""Vectors of channels side by side in a tile, and so in a layer's layout."""

ROWS = 8
"""Rows that a tile takes at most."""
_AT_ONCE = 8 if WIDE else 6
"""Rows that it sums at a time: sixteen registers hold twelve sums, two weights and a value. The
others follow while the block of weights is still near."""

QUADS = 16
"""Groups of four inputs that share a row's scale. One scale for a whole row would leave most of
its values a few levels, since a few of them are large: 64 inputs keep the perplexity of a 135M
model within a percent, whole rows miss it by four."""

_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_f32 = ir.FloatType()
_void = ir.VoidType()
_int64 = types.int64
_halves = ir.VectorType(ir.HalfType(), LANES)


def _f(value: float) -> float:
    """The nearest float32."""
    return float(np.float32(value))


def _anew(b: Any, number: Any) -> Any:
    """The same number, and LLVM does not know which."""
    kind = ir.FunctionType(_i64, [_i64])
    return b.asm(kind, "", "=r,0", [number], side_effect=True)


def _dot4(b: Any, acc: Any, x: Any, w: Any) -> Any:
    """acc + four byte products for each lane: x unsigned, w signed."""
    n = LANES
    bytes_, words = ir.VectorType(_i8, 4 * n), ir.VectorType(_i16, 2 * n)
    longs = ir.VectorType(_i32, n)
    if DOT == "vnni":
        call = declare(b, f"llvm.x86.avx512.vpdpbusd.{32 * n}", longs, longs, bytes_, bytes_)
        return b.call(call, [acc, x, w])
    if DOT == "pairs":
        pairs = declare(b, "llvm.x86.avx2.pmadd.ub.sw", words, bytes_, bytes_)
        sums = declare(b, "llvm.x86.avx2.pmadd.wd", longs, words, words)
        ones = ir.Constant(words, [1] * (2 * n))
        return b.add(acc, b.call(sums, [b.call(pairs, [x, w]), ones]))
    wide = ir.VectorType(_i32, 4 * n)
    product = b.mul(b.zext(x, wide), b.sext(w, wide))
    for part in range(4):
        mask = ir.Constant(ir.VectorType(_i32, n), list(range(part, 4 * n, 4)))
        acc = b.add(acc, b.shuffle_vector(product, product, mask))
    return acc


def integer_tile(rows: int, groups: int) -> Any:
    """``rows`` rows of bytes times ``groups`` groups of ``LANES`` channels.

    tile(x, w, blocks, init, scales, bias, row_scales, out, out_stride, add)

    x
        u8 [blocks, rows, 4 · QUADS], the row's values plus 128.
    w
        s8 [blocks, QUADS, GROUPS, LANES, 4], of which the tile takes the first ``groups``.
    scales
        f16 [blocks, GROUPS, LANES]: of the weights.
    init
        s16 [blocks, GROUPS, LANES]: the sum of the channel's weights in the block, which the 128
        added to each value makes come in 128 times too often.
    row_scales
        f32 [blocks, rows]. Products are summed exactly within a block, and blocks in order.
    """

    def emit(b: Any, x: Any, w: Any, blocks: Any, init: Any, *out: Any) -> None:
        weight_scales, _, row_scales = out[:3]
        shorts, longs = ir.VectorType(_i16, LANES), ir.VectorType(_i32, LANES)
        bytes_, floats = ir.VectorType(_i8, 4 * LANES), ir.VectorType(_f32, LANES)
        seven = ir.Constant(longs, [7] * LANES)
        nothing = ir.Constant(longs, [0] * LANES)
        outer = Loop(b, blocks, 1, [ir.Constant(floats, [0.0] * LANES)] * (rows * groups))
        sums = b.add(init, b.mul(outer.i, constant(2 * LANES * GROUPS)))
        first = []
        for g in range(groups):
            short = load(b, b.add(sums, constant(2 * LANES * g)), shorts, 2)
            first.append(b.sub(nothing, b.shl(b.sext(short, longs), seven)))
        x_block = b.add(x, b.mul(outer.i, constant(4 * QUADS * rows)))
        w_block = b.add(w, b.mul(outer.i, constant(4 * QUADS * LANES * GROUPS)))
        parts, held = -(-rows // _AT_ONCE), []
        for part in range(parts):
            some = range(rows * part // parts, rows * (part + 1) // parts)
            loop = Loop(
                b, _anew(b, constant(QUADS)), 1, [first[g] for _ in some for g in range(groups)]
            )
            at = b.add(w_block, b.mul(loop.i, constant(4 * LANES * GROUPS)))
            if part == 0:
                prefetch(b, at, 4 * LANES * groups)
            weights = [load(b, b.add(at, constant(4 * LANES * g)), bytes_) for g in range(groups)]
            summed, row = [], b.add(x_block, b.mul(loop.i, constant(4)))
            for r in some:
                quad = splat(b, load(b, b.add(row, constant(4 * QUADS * r)), _i32, 4), LANES)
                for g in range(groups):
                    acc = loop.held[(r - some.start) * groups + g]
                    summed.append(_dot4(b, acc, b.bitcast(quad, bytes_), weights[g]))
            loop.close(summed)
            held += summed
        halves = b.add(weight_scales, b.mul(outer.i, constant(2 * LANES * GROUPS)))
        worth = [
            b.fpext(load(b, b.add(halves, constant(2 * LANES * g)), _halves, 2), floats)
            for g in range(groups)
        ]
        scales = b.add(row_scales, b.mul(outer.i, constant(4 * rows)))
        totals = []
        for r in range(rows):
            scale = splat(b, load(b, b.add(scales, constant(4 * r)), _f32, 4), LANES)
            for g in range(groups):
                i = r * groups + g
                value = b.fmul(b.sitofp(held[i], floats), worth[g])
                totals.append(fma(b, value, scale, outer.held[i]))
        outer.close(totals)
        finish(b, totals, rows, groups, out)

    return intrinsic_of(10, emit)


_PAIRS = QUADS // 4
"""Pairs of groups of four inputs in half a block: what shares a scale and a least value where
weights have four bits."""

VECTOR_NIBBLE_ROWS = 8 if WIDE else 4
"""Rows that a tile of such weights takes at most: more sums than there are registers for would be
set aside and fetched again at the end of each half block."""


def nibble_tile(rows: int, groups: int) -> Any:
    """``rows`` rows of bytes times ``groups`` groups of ``LANES`` channels of four bits.

    tile(x, w, blocks, least, scales, bias, row_numbers, out, out_stride, add)

    A weight is scale · q + least with 0 <= q <= 15, and 32 inputs share scale and least. So
    Σ w x = scale · Σ q x + least · Σ x, the first sum exact and in 16 bits: 32 · 15 · 127 in
    products of a byte's pairs is 8 · 2 · 15 · 127 = 30480 at most.

    x
        s8 [blocks, rows, 4 · QUADS].
    w
        u8 [blocks, QUADS / 2, GROUPS, LANES, 4], of which the tile takes the first ``groups``: the
        lower half of a byte is of one group of four inputs, the upper half of the next.
    scales, least
        f16 [blocks, 2, GROUPS, LANES].
    row_numbers
        f32 [blocks, 3, rows]: a row's scale, and the sums of its two halves of the block.
    """

    def emit(b: Any, x: Any, w: Any, blocks: Any, least: Any, *out: Any) -> None:
        weight_scales, _, row_numbers = out[:3]
        longs, floats = ir.VectorType(_i32, LANES), ir.VectorType(_f32, LANES)
        bytes_, words = ir.VectorType(_i8, 4 * LANES), ir.VectorType(_i16, 2 * LANES)
        low, four = (ir.Constant(bytes_, [value] * (4 * LANES)) for value in (15, 4))
        sums, size = (words, 2 * LANES) if DOT == "pairs" else (longs, LANES)
        nothing = ir.Constant(sums, [0] * size)
        line = 4 * LANES * GROUPS

        def add(acc: Any, q: Any, quad: Any) -> Any:
            if DOT != "pairs":
                return _dot4(b, acc, q, quad)
            pairs = declare(b, "llvm.x86.avx2.pmadd.ub.sw", words, bytes_, bytes_)
            return b.add(acc, b.call(pairs, [q, quad]))

        def whole(acc: Any) -> Any:
            if DOT == "pairs":
                both = declare(b, "llvm.x86.avx2.pmadd.wd", longs, words, words)
                acc = b.call(both, [acc, ir.Constant(words, [1] * (2 * LANES))])
            return b.sitofp(acc, floats)

        def halves(start: Any, half: int, g: int) -> Any:
            at = b.add(start, constant(2 * LANES * (GROUPS * half + g)))
            return b.fpext(load(b, at, _halves, 2), floats)

        outer = Loop(b, blocks, 1, [ir.Constant(floats, [0.0] * LANES)] * (rows * groups))
        x_block = b.add(x, b.mul(outer.i, constant(4 * QUADS * rows)))
        w_block = b.add(w, b.mul(outer.i, constant(2 * _PAIRS * line)))
        numbers = b.add(row_numbers, b.mul(outer.i, constant(12 * rows)))
        scales, leasts = (
            b.add(start, b.mul(outer.i, constant(4 * LANES * GROUPS)))
            for start in (weight_scales, least)
        )
        found: list[Any] = []
        for half in range(2):
            # Unrolled, it would fetch further ahead than there are registers for many rows.
            count = constant(_PAIRS) if rows <= 2 else _anew(b, constant(_PAIRS))
            loop = Loop(b, count, 1, [nothing] * (rows * groups))
            at = b.add(
                w_block, b.add(b.mul(loop.i, constant(line)), constant(half * _PAIRS * line))
            )
            prefetch(b, at, line)
            both = [load(b, b.add(at, constant(4 * LANES * g)), bytes_) for g in range(groups)]
            weights = [[b.and_(q, low) for q in both], [b.lshr(q, four) for q in both]]
            first = b.add(b.mul(loop.i, constant(8)), constant(half * 8 * _PAIRS))
            held = list(loop.held)
            for quad in range(2):
                row = b.add(b.add(x_block, first), constant(4 * quad))
                for r in range(rows):
                    at_row = b.add(row, constant(4 * QUADS * r))
                    value = splat(b, load(b, at_row, _i32, 4), LANES)
                    for g in range(groups):
                        i = r * groups + g
                        held[i] = add(held[i], weights[quad][g], b.bitcast(value, bytes_))
            loop.close(held)
            worth = [halves(scales, half, g) for g in range(groups)]
            for i, acc in enumerate(held):
                value = whole(acc)
                if half:
                    found[i] = fma(b, value, worth[i % groups], found[i])
                else:
                    found.append(b.fmul(value, worth[i % groups]))
        base = [[halves(leasts, half, g) for g in range(groups)] for half in range(2)]
        totals = []
        for r in range(rows):
            scale, *row_sums = (
                splat(b, load(b, b.add(numbers, constant(4 * (rows * n + r))), _f32, 4), LANES)
                for n in range(3)
            )
            for g in range(groups):
                total = fma(b, found[r * groups + g], scale, outer.held[r * groups + g])
                for half, row_sum in enumerate(row_sums):
                    total = fma(b, base[half][g], row_sum, total)
                totals.append(total)
        outer.close(totals)
        finish(b, totals, rows, groups, out)

    return intrinsic_of(10, emit)


def float_tile(rows: int, groups: int, half: bool) -> Any:
    """The same for floats: x f32 [inputs, rows]; w f32 or bf16 [inputs, GROUPS, LANES].

    It takes the same arguments; ``init`` and the scales are not read.
    """

    def emit(b: Any, x: Any, w: Any, inputs: Any, init: Any, *out: Any) -> None:
        size = 2 if half else 4
        floats = ir.VectorType(_f32, LANES)
        parts, held = -(-rows // _AT_ONCE), []
        for part in range(parts):
            some = range(rows * part // parts, rows * (part + 1) // parts)
            zeros = [ir.Constant(floats, [0.0] * LANES)] * (len(some) * groups)
            loop = Loop(b, inputs, 1, zeros)
            line = b.add(w, b.mul(loop.i, constant(size * LANES * GROUPS)))
            prefetch(b, line, size * LANES * groups)
            weights = []
            for g in range(groups):
                at = b.add(line, constant(size * LANES * g))
                if half:  # a bfloat16 is the upper half of a float32
                    short = load(b, at, ir.VectorType(_i16, LANES))
                    bits = b.zext(short, ir.VectorType(_i32, LANES))
                    shift = ir.Constant(ir.VectorType(_i32, LANES), [16] * LANES)
                    weights.append(b.bitcast(b.shl(bits, shift), floats))
                else:
                    weights.append(load(b, at, floats))
            summed, row = [], b.add(x, b.mul(loop.i, constant(4 * rows)))
            for r in some:
                value = splat(b, load(b, b.add(row, constant(4 * r)), _f32, 4), LANES)
                for g in range(groups):
                    acc = loop.held[(r - some.start) * groups + g]
                    summed.append(fma(b, value, weights[g], acc))
            loop.close(summed)
            held += summed
        finish(b, held, rows, groups, out)

    return intrinsic_of(10, emit)


QUERIES = 12 if WIDE else 6
"""Queries that an attention tile takes at most: a number of the cache is widened once for all."""
_FEW = 6 if WIDE else 2


def columns(queries: int) -> int:
    """Keys, or dimensions of values, that a tile of so many queries takes: as many as there are
    registers for sums."""
    return 4 * LANES if queries <= _FEW else 2 * LANES


def _widen(b: Any, address: Any, half: bool, lanes: int) -> Any:
    """Numbers of the cache as float32."""
    if not half:
        return load(b, address, ir.VectorType(_f32, lanes), 4)
    halves = load(b, address, ir.VectorType(ir.HalfType(), lanes), 2)
    return b.fpext(halves, ir.VectorType(_f32, lanes))


def row_sums(queries: int, half: bool, add: bool) -> Any:
    """Each query's sum of a block's rows, with a factor for each row, one after the other.

    out_q[c] = Σ_i x_q[i] · rows[i, c], or that much more than before with ``add``. With keys
    [width, BLOCK] for rows and a query for x it gives scores; with values [BLOCK, width] and
    weights, what the query finds.

    row_sums(places, rows, ahead, stride, count, column), with the stride and the column in bytes of
    rows and of out

    places
        i64 [queries, 2]: the address of x_q, and the one of out_q.
    rows
        f16 or f32 [count, columns]
    ahead
        How far on are the rows that come next, in bytes. They are asked for a line at a time, since
        memory takes only so many requests at once: a whole block of them would hold up the sums.
    """
    lanes = columns(queries)
    kind = ir.VectorType(_f32, lanes)

    def emit(
        b: Any, places: Any, rows: Any, ahead: Any, stride: Any, count: Any, column: Any
    ) -> None:
        def address(number: int) -> Any:
            return load(b, b.add(places, constant(8 * number)), _i64, 8)

        pairs = [(address(2 * q), b.add(address(2 * q + 1), column)) for q in range(queries)]
        outs = [out for _, out in pairs]
        zeros = ir.Constant(kind, [0.0] * lanes)
        loop = Loop(b, count, 1, [load(b, out, kind, 4) if add else zeros for out in outs])
        here = b.add(rows, b.mul(loop.i, stride))
        prefetch(b, b.add(here, ahead), lanes * (2 if half else 4), 0, 3)
        row = _widen(b, here, half, lanes)
        held, at = [], b.mul(loop.i, constant(4))
        for q, (x, _) in enumerate(pairs):
            value = splat(b, load(b, b.add(x, at), _f32, 4), lanes)
            held.append(fma(b, value, row, loop.held[q]))
        loop.close(held)
        for out, value in zip(outs, held, strict=True):
            store(b, value, out, 4)

    return intrinsic_of(6, emit)


def _constants(kind: Any) -> Callable[[Any], ir.Constant]:
    """From a number to a vector full of it; its bits where the vector is of integers."""
    return lambda value: ir.Constant(kind, [value] * kind.count)


def _exp(b: Any, x: Any) -> Any:
    """e^x for x <= 88 to about two units in the last place; NaN stays NaN.

    2^n e^r with |r| <= ln 2 / 2, and a polynomial of degree 6 for e^r (Cephes' expf). A product and
    a sum are rounded one after the other, so that it is the same on every processor.
    """
    integers = ir.VectorType(_i32, x.type.count)
    real, whole = _constants(x.type), _constants(integers)

    def line(p: Any, by: Any, plus: Any) -> Any:
        return b.fadd(b.fmul(p, by), plus)

    least = real(-87.0)
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    floor = declare(b, f"llvm.floor.v{x.type.count}f32", x.type, x.type)
    n = b.call(floor, [line(x, real(_f(1.44269504)), real(0.5))])
    r = b.fsub(x, b.fmul(n, real(_f(0.693359375))))
    r = b.fsub(r, b.fmul(n, real(_f(-2.12194440e-4))))
    p = real(_f(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = line(p, r, real(_f(c)))
    p = b.fadd(b.fadd(b.fmul(b.fmul(p, r), r), r), real(1.0))
    power = b.shl(b.add(b.fptosi(n, integers), whole(127)), whole(23))
    return b.fmul(p, b.bitcast(power, x.type))


def _exponentials(b: Any, values: Any, count: Any, top: Any) -> None:
    kind = ir.VectorType(_f32, LANES)
    most = splat(b, b.bitcast(b.trunc(top, _i32), _f32), LANES)
    loop = Loop(b, count, LANES, [])
    at = b.add(values, b.mul(loop.i, constant(4)))
    store(b, _exp(b, b.fsub(load(b, at, kind, 4), most)), at, 4)
    loop.close([])


exponentials = intrinsic_of(3, _exponentials)
"""e^(x - top), in place, of ``count`` float32s at an address and of those that fill the last
vector up to ``LANES``; ``top`` as its bits."""


def _silu(b: Any, gate: Any, up: Any, out: Any, count: Any) -> None:
    kind = ir.VectorType(_f32, LANES)
    most, one = (_constants(kind)(value) for value in (88.0, 1.0))
    loop = Loop(b, count, LANES, [])
    at = b.mul(loop.i, constant(4))
    x = load(b, b.add(gate, at), kind, 4)
    # Where the exponent would overflow, silu is zero to more than float32 holds.
    minus = b.fsub(_constants(kind)(-0.0), x)
    minus = b.select(b.fcmp_ordered(">", minus, most), most, minus)
    y = b.fmul(b.fdiv(x, b.fadd(one, _exp(b, minus))), load(b, b.add(up, at), kind, 4))
    store(b, y, b.add(out, at), 4)
    loop.close([])


silu = intrinsic_of(4, _silu)
"""silu(gate) · up of ``count`` float32s, and of those that fill the last vector up to ``LANES``.

silu(gate, up, out, count)
"""


def row_bytes(signed: bool) -> Any:
    """``4 · QUADS`` float32s of a row as bytes, with a scale of their own.

    row_bytes(x, out, numbers, number_stride), the stride in bytes

    numbers
        Where its scale goes: the largest size over 127. Then, if ``signed``, the sums of both
        halves times the scale; without it, 128 is added to each byte.
    """

    def emit(b: Any, x: Any, out: Any, numbers: Any, stride: Any) -> None:
        width = 4 * QUADS
        floats, integers = ir.VectorType(_f32, width), ir.VectorType(_i32, width)
        real, whole = _constants(floats), _constants(integers)
        values = load(b, x, floats, 4)
        # As integers, sizes are in the same order, and NaN is larger than any number: it would
        # vanish in a byte, but does not in the scale.
        sizes = b.and_(b.bitcast(values, integers), whole(0x7FFFFFFF))
        largest = declare(b, f"llvm.vector.reduce.smax.v{width}i32", _i32, integers)
        most = b.bitcast(b.call(largest, [sizes]), _f32)
        top = ir.Constant(_f32, 127.0)
        scale = b.fdiv(most, top)
        zero = ir.Constant(_f32, 0.0)
        inverse = b.select(b.fcmp_ordered(">", most, zero), b.fdiv(top, most), zero)
        # Adding 1.5 · 2^23 rounds to a whole number, ties to even, in the lowest bits.
        moved = b.fadd(b.fmul(values, splat(b, inverse, width)), real(12582912.0))
        small = b.trunc(b.bitcast(moved, integers), ir.VectorType(_i8, width))
        store(b, scale, numbers, 4)
        if signed:
            half = width // 2
            add = declare(b, f"llvm.vector.reduce.add.v{half}i32", _i32, ir.VectorType(_i32, half))
            for number in range(2):
                lanes = ir.Constant(
                    ir.VectorType(_i32, half), list(range(half * number, half * (number + 1)))
                )
                some = b.shuffle_vector(small, small, lanes)
                total = b.call(add, [b.sext(some, ir.VectorType(_i32, half))])
                place = b.add(numbers, b.mul(stride, constant(number + 1)))
                store(b, b.fmul(b.sitofp(total, _f32), scale), place, 4)
        else:
            small = b.add(small, _constants(small.type)(-128))
        store(b, small, out)

    return intrinsic_of(4, emit)


@intrinsic
def put_half(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a float32 in half precision."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        store(builder, builder.fptrunc(values[1], ir.HalfType()), values[0], 2)
        return context.get_dummy_value()

    return types.void(_int64, types.float32), codegen


def _put_halves(b: Any, values: Any, into: Any, stride: Any, count: Any) -> None:
    loop = Loop(b, count, LANES, [])
    some = load(b, b.add(values, b.mul(loop.i, constant(4))), ir.VectorType(_f32, LANES), 4)
    halves = b.fptrunc(some, _halves)
    for lane in range(LANES):
        place = b.add(into, b.mul(stride, b.add(loop.i, constant(lane))))
        store(b, b.extract_element(halves, ir.Constant(_i32, lane)), place, 2)
    loop.close([])


put_halves = intrinsic_of(4, _put_halves)
"""Write float32s in half precision, at a stride in bytes.

put_halves(values, into, stride, count), where LANES divides the count
"""


def pointer(kind: Any) -> Any:
    """A numba function from an address to a pointer to a type."""

    @intrinsic
    def cast(typingctx: Any, address: Any) -> Any:
        result = types.CPointer(kind)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(result))

        return result(_int64), codegen

    return cast


@intrinsic
def bits_to_float(typingctx: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _f32)

    return types.float32(types.int32), codegen


@intrinsic
def float_to_bits(typingctx: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _i32)

    return types.int32(types.float32), codegen


@intrinsic
def next_ticket(typingctx: Any, counter: Any) -> Any:
    """The value of a counter, which is moved on by one; threads draw work with it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.inttoptr(values[0], _i64.as_pointer())
        return builder.atomic_rmw("add", place, constant(1), "monotonic")

    return _int64(_int64), codegen


@intrinsic
def call_step(typingctx: Any, function: Any, arguments: Any, thread: Any, threads: Any) -> Any:
    """Call a compiled step by its address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_void, [_i64] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[_int64] * 4), codegen


@intrinsic
def call_barrier(typingctx: Any, function: Any) -> Any:
    """Call a C function that takes and returns nothing."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_void, [])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(_int64), codegen


@intrinsic
def call_count(typingctx: Any, function: Any) -> Any:
    """Call a C function that returns an int."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_i32, [])
        found = builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return builder.sext(found, _i64)

    return _int64(_int64), codegen
