"""Tiles of many rows on the processor's own matrices of bytes (Intel's AMX).

The sums of ``vector``'s tiles, in the same order and so the same bits: only the products of a block
are the processor's, and those are whole numbers. With eight rows or fewer vectors are as fast.

Eight matrices of 16 lines of 64 bytes: sums in 0 to 3, rows in 4 and 5, weights in 6 and 7. Their
sizes are set once for each tile: some tens of cycles of thousands. The products of a block are made
while those of the one before are scaled and added up, since it takes long until they can be read.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from outrider.models.native.emit import (
    FEATURES,
    LANES,
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
from outrider.models.native.vector import DOT, GROUPS, QUADS

__all__ = ["MATRICES", "MATRIX_ROWS", "integer_matrix", "nibble_matrix"]


def _offered() -> bool:
    """Whether the processor has them, and Linux lets us: a process has to ask, since every
    thread's registers grow by eight kilobytes."""
    if DOT != "vnni" or not (FEATURES.get("amx-tile") and FEATURES.get("amx-int8")):
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


MATRICES = _offered()

MATRIX_ROWS = 16
"""Rows that such a tile takes at most."""

_LINE = 4 * LANES
_byte, _short, _long = (ir.IntType(bits) for bits in (8, 16, 64))
_bytes, _shorts = ir.VectorType(_byte, _LINE), ir.VectorType(_short, LANES)
_integers, _floats = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
_halves, _void = ir.VectorType(ir.HalfType(), LANES), ir.VoidType()


class _Matrices:
    """The instructions, for so many ``rows`` and ``depth`` groups of four inputs at once."""

    def __init__(self, b: Any, rows: Any, depth: int) -> None:
        self._b = b
        sizes = self.room(64)
        store(b, ir.Constant(_bytes, [1, *[0] * 63]), sizes)
        for i, width in enumerate([_LINE] * 4 + [4 * depth] * 2 + [_LINE] * 2):
            store(b, ir.Constant(_short, width), b.add(sizes, constant(16 + 2 * i)))
            lines = ir.Constant(_byte, depth) if i >= 6 else b.trunc(rows, _byte)
            store(b, lines, b.add(sizes, constant(48 + i)))
        self._tell("ldtilecfg", address=sizes)

    def room(self, size: int) -> Any:
        """The address of so many bytes of the function's frame."""
        with self._b.goto_entry_block():
            made = self._b.alloca(ir.ArrayType(_byte, size))
            made.align = 64
            return self._b.ptrtoint(made, _long)

    def _tell(self, name: str, *numbers: int, address: Any = None, line: int = 0) -> None:
        b, values = self._b, [ir.Constant(_byte, number) for number in numbers]
        if address is not None:
            values.append(b.inttoptr(address, ir.PointerType(_byte)))
        if line:
            values.append(constant(line))
        b.call(declare(b, f"llvm.x86.{name}", _void, *(value.type for value in values)), values)

    def load(self, number: int, address: Any, line: int) -> None:
        """From lines that lie so many bytes apart."""
        self._tell("tileloadd64", number, address=address, line=line)

    def product(self, name: str, number: int, rows: int, weights: int, into: Any) -> None:
        """rows · weights, of bytes with and without signs as ``name`` says."""
        self._tell("tilezero", number)
        self._tell(name, number, rows, weights)
        self._tell("tilestored64", number, address=into, line=_LINE)

    def release(self) -> None:
        """Linux has nothing of them to keep when it turns to another thread."""
        self._tell("tilerelease")


def _add_up(
    b: Any,
    rows: Any,
    blocks: Any,
    depth: int,
    sums_of_a_block: int,
    multiply: Callable[[_Matrices, Any, Any], None],
    scaled: Callable[[Any], Callable[[Any], Callable[[int, Any, Any], Any]]],
    out: tuple[Any, ...],
) -> None:
    """The loop over blocks, and what becomes of the sums.

    Parameters
    ----------
    sums_of_a_block
        For each row, in vectors.
    multiply
        Given the matrices, a block's number and an address: the block's products, to [sums of a
        block, MATRIX_ROWS, LANES] there.
    scaled
        Given a block's number, and with it what all rows share; then given a row: from a group of
        channels, where its products lie and the total to the total with them.
    """
    matrices = _Matrices(b, rows, depth)
    size = sums_of_a_block * MATRIX_ROWS * _LINE
    totals, found = matrices.room(GROUPS * MATRIX_ROWS * _LINE), matrices.room(2 * size)

    def total(row: Any, group: int) -> Any:
        return b.add(totals, b.add(b.mul(row, constant(_LINE * GROUPS)), constant(_LINE * group)))

    clear = Loop(b, rows, 1, [])
    for g in range(GROUPS):
        store(b, ir.Constant(_floats, [0.0] * LANES), total(clear.i, g), _LINE)
    clear.close([])
    multiply(matrices, constant(0), found)
    outer = Loop(b, blocks, 1, [])
    after = b.add(outer.i, constant(1))
    # Behind the last block the last is made once more, where it is.
    after = b.select(b.icmp_signed("<", after, blocks), after, outer.i)
    multiply(matrices, after, b.add(found, b.mul(b.and_(after, constant(1)), constant(size))))
    here = b.add(found, b.mul(b.and_(outer.i, constant(1)), constant(size)))
    of_row = scaled(outer.i)
    inner = Loop(b, rows, 1, [])
    with_row = of_row(inner.i)
    for g in range(GROUPS):
        products = b.add(here, b.mul(inner.i, constant(_LINE)))
        place = total(inner.i, g)
        store(b, with_row(g, products, load(b, place, _floats, _LINE)), place, _LINE)
    inner.close([])
    outer.close([])
    matrices.release()
    last = Loop(b, rows, 1, [])
    held = [load(b, total(last.i, g), _floats, _LINE) for g in range(GROUPS)]
    scales, bias, numbers, address, stride, add = out
    row = b.add(address, b.mul(stride, last.i))
    finish(b, held, 1, GROUPS, (scales, bias, numbers, row, stride, add))
    last.close([])


def _half(b: Any, address: Any, number: int) -> Any:
    at = b.add(address, constant(2 * LANES * number))
    return b.fpext(load(b, at, _halves, 2), _floats)


def _spread(b: Any, address: Any, number: Any) -> Any:
    """One float of a list, in all lanes."""
    at = b.add(address, b.mul(number, constant(4)))
    return splat(b, load(b, at, ir.FloatType(), 4), LANES)


def integer_matrix() -> Any:
    """``integer_tile`` for up to ``MATRIX_ROWS`` rows.

    tile(x, w, blocks, init, scales, bias, row_scales, out, out_stride, add, rows)
    """

    def emit(b: Any, x: Any, w: Any, blocks: Any, init: Any, *others: Any) -> None:
        *out, rows = others
        weight_scales, _, row_scales = out[:3]
        seven = ir.Constant(_integers, [7] * LANES)

        def multiply(matrices: _Matrices, block: Any, into: Any) -> None:
            own = b.add(w, b.mul(block, constant(QUADS * _LINE * GROUPS)))
            prefetch(b, own, QUADS * _LINE * GROUPS)
            fed = b.add(x, b.mul(block, b.mul(rows, constant(4 * QUADS))))
            matrices.load(4, fed, 4 * QUADS)
            for g in range(GROUPS):
                matrices.load(6 + g, b.add(own, constant(_LINE * g)), _LINE * GROUPS)
                at = b.add(into, constant(_LINE * MATRIX_ROWS * g))
                matrices.product("tdpbusd", g, 4, 6 + g, at)

        def scaled(block: Any) -> Any:
            start, worth = (
                b.add(base, b.mul(block, constant(2 * LANES * GROUPS)))
                for base in (init, weight_scales)
            )
            too_much = [
                b.shl(b.sext(load(b, b.add(start, constant(2 * LANES * g)), _shorts, 2), _integers),
                      seven)
                for g in range(GROUPS)
            ]  # fmt: skip
            worths = [_half(b, worth, g) for g in range(GROUPS)]

            def of_row(r: Any) -> Any:
                scale = _spread(b, row_scales, b.add(b.mul(block, rows), r))

                def with_row(g: int, products: Any, total: Any) -> Any:
                    at = b.add(products, constant(_LINE * MATRIX_ROWS * g))
                    whole = b.sub(load(b, at, _integers, _LINE), too_much[g])
                    return fma(b, b.fmul(b.sitofp(whole, _floats), worths[g]), scale, total)

                return with_row

            return of_row

        _add_up(b, rows, blocks, QUADS, GROUPS, multiply, scaled, tuple(out))

    return intrinsic_of(11, emit)


def nibble_matrix() -> Any:
    """``nibble_tile`` for up to ``MATRIX_ROWS`` rows. Weights are spread out to a byte each first.

    tile(x, w, blocks, least, scales, bias, row_numbers, out, out_stride, add, rows)
    """
    half_block = QUADS // 2

    def emit(b: Any, x: Any, w: Any, blocks: Any, least: Any, *others: Any) -> None:
        *out, rows = others
        weight_scales, _, row_numbers = out[:3]
        low, four = (ir.Constant(_bytes, [value] * _LINE) for value in (15, 4))
        apart: list[Any] = []

        def multiply(matrices: _Matrices, block: Any, into: Any) -> None:
            if not apart:
                apart.append(matrices.room(QUADS * _LINE * GROUPS))
            own = b.add(w, b.mul(block, constant(half_block * _LINE * GROUPS)))
            prefetch(b, own, half_block * _LINE * GROUPS)
            for g in range(GROUPS):
                for pair in range(half_block):
                    both = load(b, b.add(own, constant(_LINE * (GROUPS * pair + g))), _bytes)
                    at = b.add(apart[0], constant(_LINE * (QUADS * g + 2 * pair)))
                    store(b, b.and_(both, low), at, _LINE)
                    store(b, b.lshr(both, four), b.add(at, constant(_LINE)), _LINE)
            fed = b.add(x, b.mul(block, b.mul(rows, constant(4 * QUADS))))
            for half in range(2):
                matrices.load(4 + half, b.add(fed, constant(4 * half_block * half)), 4 * QUADS)
                for g in range(GROUPS):
                    at = b.add(apart[0], constant(_LINE * (QUADS * g + half_block * half)))
                    matrices.load(6 + g, at, _LINE)
                    number = GROUPS * half + g
                    place = b.add(into, constant(_LINE * MATRIX_ROWS * number))
                    matrices.product("tdpbsud", number, 4 + half, 6 + g, place)

        def scaled(block: Any) -> Any:
            worth, base = (
                [
                    _half(b, b.add(start, b.mul(block, constant(4 * LANES * GROUPS))), number)
                    for number in range(2 * GROUPS)
                ]
                for start in (weight_scales, least)
            )

            def of_row(r: Any) -> Any:
                first = b.add(b.mul(b.mul(block, constant(3)), rows), r)
                scale, *row_sums = (
                    _spread(b, row_numbers, b.add(first, b.mul(rows, constant(n))))
                    for n in range(3)
                )

                def with_row(g: int, products: Any, total: Any) -> Any:
                    one, other = (
                        b.sitofp(
                            load(b, b.add(products, constant(_LINE * MATRIX_ROWS * number)),
                                 _integers, _LINE),
                            _floats,
                        )
                        for number in (g, GROUPS + g)
                    )  # fmt: skip
                    value = fma(b, other, worth[GROUPS + g], b.fmul(one, worth[g]))
                    total = fma(b, value, scale, total)
                    for half, row_sum in enumerate(row_sums):
                        total = fma(b, base[GROUPS * half + g], row_sum, total)
                    return total

                return with_row

            return of_row

        _add_up(b, rows, blocks, half_block, 2 * GROUPS, multiply, scaled, tuple(out))

    return intrinsic_of(11, emit)
