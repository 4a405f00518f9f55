"""What tiles are written with: LLVM's instructions, on addresses and counts of 64 bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "FEATURES",
    "LANES",
    "WIDE",
    "Loop",
    "constant",
    "declare",
    "finish",
    "fma",
    "intrinsic_of",
    "load",
    "prefetch",
    "splat",
    "store",
]

FEATURES = llvm.get_host_cpu_features()
WIDE = bool(FEATURES.get("avx512f") and FEATURES.get("avx512bw"))
LANES = 16 if WIDE else 8
"""Output channels side by side in a tile: the 32-bit lanes of a vector register."""


_AHEAD, _NEAR = (12288, 2) if WIDE else (1024, 3)
"""Bytes that weights are fetched ahead, and into which cache (3: the first, 2: the second): without
it a wide tile waits for memory and computes in turn, and eight rows cost twice as much as they need
to. Measured on processors of both kinds: those with wide vectors have a larger second cache and a
longer way to memory, and their first cache waits for too few lines at once."""

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_VOID, _ADDRESS = ir.VoidType(), types.int64


def constant(value: int) -> ir.Constant:
    """An address' part, or a count."""
    return ir.Constant(_I64, value)


def load(b: Any, address: Any, kind: Any, align: int = 1) -> Any:
    """What is of this type at an address."""
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align, typ=kind)


def store(b: Any, value: Any, address: Any, align: int = 1) -> None:
    """Write a value to an address."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=align)


def splat(b: Any, value: Any, lanes: int) -> Any:
    """A vector full of a value."""
    kind = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def declare(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A function of LLVM's, or an instruction of the processor's."""
    kind = ir.FunctionType(result, list(arguments))
    return cgutils.get_or_insert_function(b.module, kind, name)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once."""
    fma = declare(b, f"llvm.fma.v{z.type.count}f32", z.type, z.type, z.type, z.type)
    return b.call(fma, [x, y, z])


def prefetch(b: Any, address: Any, size: int, before: int = _AHEAD, near: int = _NEAR) -> None:
    """Ask for the lines that ``size`` bytes at this address will be followed by."""
    pointer = ir.PointerType(_I8)
    call = declare(b, "llvm.prefetch.p0", _VOID, pointer, _I32, _I32, _I32)
    read, keep, data = (ir.Constant(_I32, value) for value in (0, near, 1))
    for line in range(0, size, 64):
        ahead = b.inttoptr(b.add(address, constant(before + line)), pointer)
        b.call(call, [ahead, read, keep, data])


class Loop:
    """``for i in range(0, count, step)`` over vector accumulators; ``count`` is at least 1."""

    def __init__(self, b: Any, count: Any, step: int, start: list[Any]) -> None:
        self.b, self.count, self.step = b, count, step
        before = b.block
        self.body = b.append_basic_block("loop")
        b.branch(self.body)
        b.position_at_end(self.body)
        self.i = b.phi(_I64)
        self.i.add_incoming(constant(0), before)
        self.held = [b.phi(value.type) for value in start]
        for phi, value in zip(self.held, start, strict=True):
            phi.add_incoming(value, before)

    def close(self, values: list[Any]) -> None:
        """The end of its body, and what is held from there on."""
        b = self.b
        following = b.add(self.i, constant(self.step))
        self.i.add_incoming(following, b.block)
        for phi, value in zip(self.held, values, strict=True):
            phi.add_incoming(value, b.block)
        after = b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", following, self.count), self.body, after)
        b.position_at_end(after)


def intrinsic_of(arguments: int, emit: Callable[..., None]) -> Any:
    """A numba function of so many int64 addresses and counts that returns nothing."""

    def function(typingctx: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit(builder, *values)
            return context.get_dummy_value()

        return types.void(*[_ADDRESS] * arguments), codegen

    # numba reads the number of arguments off the signature.
    names = ["typingctx", *(f"a{i}" for i in range(arguments))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in names]
    )
    return intrinsic(function)


def finish(b: Any, held: list[Any], rows: int, groups: int, out: tuple[Any, ...]) -> None:
    """Add the bias and (if asked) what is there already, and store."""
    _, bias, _, address, stride, add = out
    kind = ir.VectorType(ir.FloatType(), LANES)
    keep = b.icmp_signed("!=", add, constant(0))
    for r in range(rows):
        row = b.add(address, b.mul(stride, constant(r)))
        for g in range(groups):
            at, value = constant(4 * LANES * g), held[r * groups + g]
            value = b.fadd(value, load(b, b.add(bias, at), kind, 4))
            place = b.add(row, at)
            old = b.select(keep, load(b, place, kind, 4), ir.Constant(kind, [0.0] * LANES))
            store(b, b.fadd(value, old), place, 4)
