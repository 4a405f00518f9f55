"""The steps of a pass, compiled: each is run by all threads of a team, which then wait for all.

A step is a function of (arguments, thread, threads). ``arguments`` is the address of a list of
64-bit integers: first the frame's, which says what this pass feeds, then the step's own buffers
and sizes. Whatever a step computes for a row depends on that row alone and is done in the same
order whatever the other rows are, so a row's numbers are the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numba import carray, cfunc, float32, int8, int32, int64, njit, types, uint16

from outrider.models.native import emit, matrix, vector
from outrider.models.native.emit import LANES
from outrider.models.native.kept import kept_with
from outrider.models.native.matrix import MATRICES, MATRIX_ROWS, integer_matrix, nibble_matrix
from outrider.models.native.vector import (
    BLOCK,
    GROUPS,
    QUADS,
    QUERIES,
    ROWS,
    VECTOR_NIBBLE_ROWS,
    bits_to_float,
    call_barrier,
    call_count,
    call_step,
    columns,
    exponentials,
    float_tile,
    float_to_bits,
    integer_tile,
    next_ticket,
    nibble_tile,
    pointer,
    put_half,
    put_halves,
    row_bytes,
    row_sums,
    silu,
)

__all__ = [
    "BYTE_ROWS",
    "FRAME",
    "LINEAR",
    "MAX_ROWS",
    "SHARES",
    "SIGNED",
    "UNGATED",
    "Frame",
    "drive",
    "kernel",
]

MAX_ROWS = 64
"""Rows that one pass can feed."""
SHARES = 16
"""Stretches at most that a layer's weights are divided in, each with a counter of its own."""
_PORTION = 4
_VECTOR_ROWS = {"int4": VECTOR_NIBBLE_ROWS, "int8": ROWS, "bfloat16": ROWS, "float32": ROWS}
BYTE_ROWS, NIBBLE_ROWS = (
    MATRIX_ROWS if MATRICES else _VECTOR_ROWS[kind] for kind in ("int8", "int4")
)
"""Rows that a tile takes at most, where they are bytes."""
SIGNED = 2
"""How rows are handed to a layer whose weights have four bits."""
UNGATED = (0, 0, 0, 0)
"""The last arguments of a linear layer that makes no rows for the next one."""


class Frame(NamedTuple):
    """Places in the list of integers that says what a pass feeds."""

    rows: int = 0
    first: int = 1
    """The first row whose logits are wanted."""
    logits: int = 2
    """Where they go."""
    counters: int = 3
    """SHARES for each step: tickets for its work."""
    cosines: int = 4
    """f32 [rows, rotated / 2] at this address."""
    sines: int = 5
    scores: int = 6
    """f32 [rows, heads, keys] at this address."""
    keys: int = 7
    """Keys that there is room for in it."""
    table: int = 8
    """For each row: the address of its sequence's list of cache blocks."""
    base: int = 8 + MAX_ROWS
    """For each row: keys that it sees from the sequence's start."""
    slot: int = 8 + 2 * MAX_ROWS
    """For each row: where its own key goes."""
    nodes: int = 8 + 3 * MAX_ROWS
    """For each row: how many keys it sees beyond those."""
    token: int = 8 + 4 * MAX_ROWS
    """For each row: its token."""
    path: int = 8 + 5 * MAX_ROWS
    """For each row: the slots of the keys beyond the base, MAX_ROWS places a row."""
    size: int = 8 + (5 + MAX_ROWS) * MAX_ROWS


FRAME = Frame()

_int64_at, _float_at, _int_at = (pointer(kind) for kind in (int64, float32, int32))
_byte_at, _half_at = pointer(int8), pointer(uint16)
_row_bytes, _signed_bytes = row_bytes(signed=False), row_bytes(signed=True)
_FAST = {"reassoc", "contract", "nsz"}
"""For sums over one row: their order is the compiler's, and the same for every row."""


@njit(inline="always")
def _ints(address: Any, n: Any) -> Any:
    return carray(_int64_at(address), n)


@njit(inline="always")
def _floats(address: Any, n: Any) -> Any:
    return carray(_float_at(address), n)


@njit(inline="always")
def _words(address: Any, n: Any) -> Any:
    return carray(_int_at(address), n)


@njit(inline="always")
def _bytes(address: Any, n: Any) -> Any:
    return carray(_byte_at(address), n)


@njit(inline="always")
def _halves(address: Any, n: Any) -> Any:
    return carray(_half_at(address), n)


# numba knows what a processor can do, but not what Linux lets a process do with it.
_with_tiles = kept_with(emit, vector, matrix, more=str(MATRICES))


class Kernel:
    """A step that is compiled when its address is first asked for, or read from numba's cache."""

    def __init__(self, function: Any) -> None:
        self._function = _with_tiles(function)

    @cached_property
    def address(self) -> int:
        """Where its machine code is."""
        signature = types.void(int64, int64, int64)
        compiled = cfunc(signature, cache=True, error_model="numpy")(self._function)
        # Kept, or the code would be freed.
        self._compiled = compiled
        found: int = compiled.address
        return found


kernel = Kernel


# ---- elementwise pieces --------------------------------------------------------------------------


@njit(fastmath=_FAST)
def _sum_of_squares(x: Any) -> Any:
    total = float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total


@njit(fastmath=_FAST)
def _sum(x: Any) -> Any:
    total = float32(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


@njit
def _largest(x: Any) -> Any:
    """max x, by bits turned into integers in the same order, which vectors compare."""
    best = int32(-2147483648)
    for i in range(len(x)):
        bits = float_to_bits(x[i])
        best = max(best, int32(bits ^ ((bits >> int32(31)) & int32(0x7FFFFFFF))))
    return bits_to_float(int32(best ^ ((best >> int32(31)) & int32(0x7FFFFFFF))))


# ---- a row made ready for a linear layer ---------------------------------------------------------


@njit(inline="always")
def _block_rows(rows: Any, most: Any) -> Any:
    """Rows of each block but the last: as even as can be."""
    blocks = (rows + most - 1) // most
    return (rows + blocks - 1) // blocks


@njit(inline="always")
def _parts(padded: Any, thread: Any, threads: Any) -> Any:
    """A thread's share of what rows are divided in, INPUT_STEP numbers each.

    It takes that of all rows: they lie side by side, and two threads that write to the same lines
    would wait for each other.
    """
    parts = padded // (4 * QUADS)
    return parts * thread // threads, parts * (thread + 1) // threads


@njit(inline="always")
def _mates(rows: Any, quantized: Any) -> Any:
    """Rows of each block but the last where the coming layer's tiles read them."""
    size = ROWS
    if quantized:
        size = NIBBLE_ROWS if quantized == SIGNED else BYTE_ROWS
    return rows if rows <= size else _block_rows(rows, size)


@njit(inline="always")
def _places(row: Any, rows: Any, size: Any, a: Any) -> Any:
    """Where the tiles of a linear layer expect a row: next to its block-mates.

    Rows go in blocks of as many as a tile takes; within one, f32 [inputs, rows]
    (``quantized`` 0), or bytes [parts, rows, INPUT_STEP], with numbers for each part: with 128
    added, and the row's scale (1); or as they are, and its scale and the sums of both halves
    (``SIGNED``).
    ``size``: as ``_mates`` says; ``a``: the padded width, where rows and scales go, ``quantized``.

    It tells where the first part goes and how much further each is; the same for its numbers, and
    how far apart these are; then ``quantized``. All in bytes.
    """
    padded, out, scales, quantized = a[0], a[1], a[2], a[3]
    width = 4 * QUADS
    start = 0 if rows == size else row // size * size
    mates, place = min(size, rows - start), row - start
    if quantized == 0:
        return out + 4 * (start * padded + place), 4 * width * mates, 0, 0, mates, quantized
    numbers = 3 if quantized == SIGNED else 1
    first = scales + 4 * (numbers * start * (padded // width) + place)
    at = out + start * padded + width * place
    return at, width * mates, first, 4 * numbers * mates, mates, quantized


@njit(inline="always")
def _hand_over(piece: Any, part: Any, places: Any) -> None:
    """Write a part of a row where it is expected."""
    at, hop, first, numbers_hop, mates, quantized = places
    if quantized == 0:
        into = _floats(at + part * hop, (len(piece) - 1) * mates + 1)
        for i in range(len(piece)):
            into[i * mates] = piece[i]
    elif quantized == SIGNED:
        numbers = first + part * numbers_hop
        _signed_bytes(piece.ctypes.data, at + part * hop, numbers, 4 * mates)
    else:
        _row_bytes(piece.ctypes.data, at + part * hop, first + part * numbers_hop, 4 * mates)


@kernel
def norm(arguments: Any, thread: Any, threads: Any) -> None:
    """RMS norm: y = x / sqrt(mean(x²) + eps) · w, for the rows from the wanted one on."""
    a = _ints(arguments, 11)
    frame = _ints(a[0], FRAME.size)
    source, stride, weight_at, width = a[1], a[2], a[3], a[4]
    epsilon = _floats(a[5], 1)[0]
    into, first = a[7:], frame[FRAME.first] if a[6] else 0
    rows = frame[FRAME.rows] - first
    start, end = _parts(into[0], thread, threads)
    mates = _mates(rows, into[3])
    weight, y = _floats(weight_at, width), np.zeros(4 * QUADS, np.float32)
    for row in range(rows):
        x = _floats(source + 4 * (first + row) * stride, width)
        scale = float32(1.0) / np.sqrt(_sum_of_squares(x) / float32(width) + epsilon)
        places = _places(row, rows, mates, into)
        for part in range(start, end):
            at = part * len(y)
            own = min(len(y), width - at)
            for i in range(own):
                y[i] = x[at + i] * scale * weight[at + i]
            y[own:] = float32(0.0)
            _hand_over(y, part, places)


@kernel
def lift(arguments: Any, thread: Any, threads: Any) -> None:
    """norm(x) + silu(g), where the g of row j is the j-th piece of that row: a Medusa block's."""
    a = _ints(arguments, 11)
    rows = _ints(a[0], FRAME.size)[FRAME.rows]
    source, weight_at, width, pieces, stride, into = a[1], a[2], a[3], a[5], a[6], a[7:]
    epsilon = _floats(a[4], 1)[0]
    start, end = _parts(into[0], thread, threads)
    mates = _mates(rows, into[3])
    weight, y = _floats(weight_at, width), np.zeros(4 * QUADS, np.float32)
    ones = np.ones(4 * QUADS, np.float32)
    for row in range(rows):
        x = _floats(source + 4 * row * width, width)
        scale = float32(1.0) / np.sqrt(_sum_of_squares(x) / float32(width) + epsilon)
        places = _places(row, rows, mates, into)
        for part in range(start, end):
            at = part * len(y)
            own = min(len(y), width - at)
            g = pieces + 4 * (row * (stride + width) + at)
            silu(g, ones.ctypes.data, y.ctypes.data, own)
            for i in range(own):
                y[i] += x[at + i] * scale * weight[at + i]
            y[own:] = float32(0.0)
            _hand_over(y, part, places)


@kernel
def tap(arguments: Any, thread: Any, threads: Any) -> None:
    """Copy the first numbers of each row to where they are kept."""
    a = _ints(arguments, 6)
    rows = _ints(a[0], FRAME.size)[FRAME.rows]
    width = a[5]
    for row in range(thread, rows, threads):
        source = _floats(a[1] + 4 * row * a[2], width)
        into = _floats(a[3] + 4 * row * a[4], width)
        for i in range(width):
            into[i] = source[i]


# ---- embeddings ----------------------------------------------------------------------------------
#
# Each row's token is looked up in the table, or, where that is tied to the head, between the tiles
# of the packed matrix, ``wide`` channels side by side; a table of its own has one.


@kernel
def look_up_int8(arguments: Any, thread: Any, threads: Any) -> None:
    """A token's bytes times the scale of their block."""
    a = _ints(arguments, 8)
    frame = _ints(a[0], FRAME.size)
    wide, inputs, width = a[3], a[4], a[5]
    blocks = inputs // (4 * QUADS)
    for row in range(thread, frame[FRAME.rows], threads):
        tile, place = frame[FRAME.token + row] // wide, frame[FRAME.token + row] % wide
        own = _bytes(a[1] + tile * inputs * wide, inputs * wide)
        scales = _halves(a[2] + 2 * tile * blocks * wide, blocks * wide)
        into = _floats(a[6] + 4 * row * a[7], width)
        for i in range(width):
            # A half without a sign: its bits are a float32's, but for the exponent's origin.
            half = int32(scales[i // (4 * QUADS) * wide + place])
            scale = bits_to_float(int32(half << int32(13))) * float32(2.0**112)
            into[i] = float32(own[4 * (i // 4 * wide + place) + i % 4]) * scale


@kernel
def look_up_floats(arguments: Any, thread: Any, threads: Any) -> None:
    """A token's numbers; those of bfloat16 are the first halves of float32s."""
    a = _ints(arguments, 9)
    frame = _ints(a[0], FRAME.size)
    wide, inputs, width, half = a[3], a[4], a[5], a[8]
    for row in range(thread, frame[FRAME.rows], threads):
        tile, place = frame[FRAME.token + row] // wide, frame[FRAME.token + row] % wide
        into = _floats(a[6] + 4 * row * a[7], width)
        if half:
            short = _halves(a[1] + 2 * tile * inputs * wide, inputs * wide)
            for i in range(width):
                into[i] = bits_to_float(int32(int32(short[i * wide + place]) << int32(16)))
        else:
            own = _floats(a[1] + 4 * tile * inputs * wide, inputs * wide)
            for i in range(width):
                into[i] = own[i * wide + place]


# ---- linear layers -------------------------------------------------------------------------------


def _compiled(function: Any, kind: str) -> Any:
    """Under a name of its own: numba tells functions of one name apart by a number that is only
    unique within a process, so steps that two processes compiled could take each other's."""
    function.__name__ = function.__qualname__ = f"{function.__name__}_{kind}"
    return njit(function)


def _chosen(tiles: Sequence[Any], name: str) -> Any:
    """The tile for a number of rows from 1 on, chosen as the program runs."""
    n, tile = len(tiles), tiles[-1]
    if n == 1:

        def one(rows: Any, *arguments: Any) -> None:
            tile(*arguments)

        return _compiled(one, name)
    fewer = _chosen(tiles[:-1], name)

    def chosen(rows: Any, *arguments: Any) -> None:
        if rows == n:
            tile(*arguments)
        else:
            fewer(rows, *arguments)

    return _compiled(chosen, f"{name}_{n}")


def _tile(kind: str) -> Any:
    """The tile for a number of rows."""
    tiles: dict[str, Callable[[int, int], Any]] = {
        "int4": nibble_tile,
        "int8": integer_tile,
        "bfloat16": partial(float_tile, half=True),
        "float32": partial(float_tile, half=False),
    }
    most = _VECTOR_ROWS[kind]
    few = _chosen([tiles[kind](rows, GROUPS) for rows in range(1, most + 1)], kind)
    matrices = {"int4": nibble_matrix, "int8": integer_matrix} if MATRICES else {}
    if kind not in matrices:
        return few
    matrix = matrices[kind]()

    def many(rows: Any, *arguments: Any) -> None:
        if rows <= most:
            few(rows, *arguments)
        else:
            matrix(*arguments, rows)

    return _compiled(many, kind)


def _linear(kind: str) -> Any:
    """The work of a linear layer, for weights of a kind.

    Where it is told of rows for the next layer, its channels are INPUT_STEP of a gate, then as many
    of what that lets through, and so on: silu(gate) · up is handed on, and not kept in memory.
    """
    tile = _tile(kind)
    row_bytes, weight_bits = {
        "int4": (1, 4), "int8": (1, 8), "bfloat16": (4, 16), "float32": (4, 32)
    }[kind]  # fmt: skip
    together = 4 * QUADS if row_bytes == 1 else 1
    # Of weights in four bits half a block has a scale, and of rows that meet them both have a sum.
    halves, numbers = (2, 3) if kind == "int4" else (1, 1)
    most = {"int4": NIBBLE_ROWS, "int8": BYTE_ROWS}.get(kind, ROWS)
    wide, step = GROUPS * LANES, 4 * QUADS

    @njit
    def hand_on(own: Any, part: Any, rows: Any, into: Any) -> None:
        y, mates = np.empty(step, np.float32), _mates(rows, into[3])
        for row in range(rows):
            gate = own.ctypes.data + 4 * row * 2 * step
            silu(gate, gate + 4 * step, y.ctypes.data, step)
            _hand_over(y, part, _places(row, rows, mates, into))

    def work(arguments: Any, thread: Any, threads: Any) -> None:
        # Threads draw portions, since a machine that does something else besides would otherwise
        # keep all of them waiting for the slowest: first of a stretch of the weights that is
        # their own, as memory likes best, then of what others have left.
        a = _ints(arguments, 17)
        frame = _ints(a[0], FRAME.size)
        x, row_scales, w, init, scales, bias = a[1], a[2], a[3], a[4], a[5], a[6]
        out, inputs, outputs, add, head, number = a[7], a[8], a[9], a[10], a[11], a[12]
        rows = frame[FRAME.rows]
        if head:
            rows -= frame[FRAME.first]
            out = frame[FRAME.logits]
        size, blocks, gated = _block_rows(rows, most), inputs // together, a[13] > 0
        unit = 2 * step // wide if gated else 1
        units, shares, stride = outputs // (unit * wide), min(threads, SHARES), 4 * outputs
        own = np.empty((rows if gated else 0, 2 * step), np.float32)
        if gated:
            out, stride = own.ctypes.data, 4 * 2 * step
        portion = max(1, min(_PORTION // unit, units // (8 * threads)))
        for turn in range(shares):
            share = (thread + turn) % shares
            first, last = units * share // shares, units * (share + 1) // shares
            counter = frame[FRAME.counters] + 8 * (SHARES * number + share)
            while True:
                start = first + next_ticket(counter) * portion
                if start >= last:
                    break
                for u in range(start, min(last, start + portion)):
                    for t in range(u * unit, (u + 1) * unit):
                        scaled = 2 * wide * t * blocks * halves
                        column = 4 * wide * (t - u * unit if gated else t)
                        for row in range(0, rows, size):
                            tile(
                                min(size, rows - row),
                                x + row * inputs * row_bytes,
                                w + t * wide * inputs * weight_bits // 8,
                                blocks,
                                init + scaled,
                                scales + scaled,
                                bias + 4 * wide * t,
                                row_scales + 4 * row * blocks * numbers,
                                out + row * stride + column,
                                stride,
                                add,
                            )
                    if gated:
                        hand_on(own, u, rows, a[13:])

    return _compiled(work, kind)


_int4, _int8 = _linear("int4"), _linear("int8")
_bfloat16, _float32 = _linear("bfloat16"), _linear("float32")


@kernel
def linear_int4(arguments: Any, thread: Any, threads: Any) -> None:
    """x Wᵀ + bias with bytes times four bits, four inputs at a time: sums are exact."""
    _int4(arguments, thread, threads)


@kernel
def linear_int8(arguments: Any, thread: Any, threads: Any) -> None:
    """x Wᵀ + bias with bytes times bytes, four inputs at a time: sums are exact."""
    _int8(arguments, thread, threads)


@kernel
def linear_bfloat16(arguments: Any, thread: Any, threads: Any) -> None:
    """float32 rows times bfloat16 weights, summed in float32, one input after the other."""
    _bfloat16(arguments, thread, threads)


@kernel
def linear_float32(arguments: Any, thread: Any, threads: Any) -> None:
    """float32 throughout, one input after the other."""
    _float32(arguments, thread, threads)


LINEAR = {
    "int4": linear_int4,
    "int8": linear_int8,
    "bfloat16": linear_bfloat16,
    "float32": linear_float32,
}

# ---- attention -----------------------------------------------------------------------------------


@njit
def _rotate(x: Any, cosines: Any, sines: Any, scale: Any, norm_at: Any, epsilon: Any) -> None:
    """Norm of one head if there is one, then rotary positions, then a factor; in place."""
    if norm_at:
        weight = _floats(norm_at, len(x))
        by = float32(1.0) / np.sqrt(_sum_of_squares(x) / float32(len(x)) + epsilon)
        for i in range(len(x)):
            x[i] = x[i] * by * weight[i]
    half = len(cosines)
    for i in range(half):
        one, other = x[i], x[i + half]
        x[i] = one * cosines[i] - other * sines[i]
        x[i + half] = other * cosines[i] + one * sines[i]
    for i in range(len(x)):
        x[i] *= scale


@kernel
def remember(arguments: Any, thread: Any, threads: Any) -> None:
    """Rotate queries and keys, and write keys and values into the cache.

    A block of the cache holds for each layer and key head: keys [width, BLOCK], then values
    [BLOCK, width], in float16 or float32.
    """
    a = _ints(arguments, 15)
    frame = _ints(a[0], FRAME.size)
    size = a[14]
    qkv, stride, heads, kv_heads, width, padded = a[1], a[2], a[3], a[4], a[5], a[6]
    layer, queries, half, q_norm, k_norm = a[7], a[8], a[9], a[10], a[11]
    epsilon, scale = _floats(a[12], 1)[0], _floats(a[13], 1)[0]
    all_heads = heads + 2 * kv_heads
    # A thread takes some heads of all rows: their keys lie side by side, and most of what it reads
    # it has computed itself, as its share of the layer before.
    rows = frame[FRAME.rows]
    start, end = all_heads * thread // threads, all_heads * (thread + 1) // threads
    for item in range(rows * (end - start)):
        row, head = item % rows, start + item // rows
        x = _floats(qkv + 4 * (row * stride + head * width), width)
        cosines = _floats(frame[FRAME.cosines] + 4 * row * half, half)
        sines = _floats(frame[FRAME.sines] + 4 * row * half, half)
        if head < heads:
            _rotate(x, cosines, sines, scale, q_norm, epsilon)
            into = _floats(queries + 4 * (row * heads + head) * padded, padded)
            for i in range(width):
                into[i] = x[i]
            continue
        slot = frame[FRAME.slot + row]
        kv = (head - heads) % kv_heads
        block = _block(frame, row, slot // BLOCK, size * (layer * kv_heads + kv), padded)
        at = slot % BLOCK
        if head < heads + kv_heads:
            _rotate(x, cosines, sines, float32(1.0), k_norm, epsilon)
            place, step = at, BLOCK
        else:
            place, step = padded * BLOCK + at * padded, 1
        if size == 2:
            whole_vectors = width // LANES * LANES
            if whole_vectors:
                put_halves(x.ctypes.data, block + 2 * place, 2 * step, whole_vectors)
            for i in range(whole_vectors, width):
                put_half(block + 2 * (place + i * step), x[i])
        else:
            whole = _floats(block, 2 * padded * BLOCK)
            for i in range(width):
                whole[place + i * step] = x[i]


@njit(inline="always")
def _block(frame: Any, row: Any, number: Any, before: Any, padded: Any) -> Any:
    """The address of a block of keys, ``before`` pairs of bytes a number; its values follow."""
    table = _ints(frame[FRAME.table + row], number + 1)
    return table[number] + 2 * before * BLOCK * padded


@njit(inline="always")
def _last_slot(frame: Any, row: Any) -> Any:
    """The last key that a row sees."""
    nodes = frame[FRAME.nodes + row]
    if nodes:
        return frame[FRAME.path + row * MAX_ROWS + nodes - 1]
    return frame[FRAME.base + row] - 1


@njit(inline="always")
def _first_seen(frame: Any, row: Any, window: Any) -> Any:
    """How many of its first keys a row does not see for a sliding window."""
    keys = frame[FRAME.base + row] + frame[FRAME.nodes + row]
    return max(0, keys - window) if window else 0


def _row_sums(half: bool, add: bool) -> Any:
    """The tile for a number of queries."""
    name = f"{'half' if half else 'whole'}_{'more' if add else 'first'}"
    return _chosen([row_sums(n, half, add) for n in range(1, QUERIES + 1)], name)


_scores, _whole_scores = (_row_sums(half, add=False) for half in (True, False))
_mixed, _whole_mixed = (_row_sums(half, add=True) for half in (True, False))
_COLUMNS = tuple(columns(n) for n in range(QUERIES + 1))


@njit
def _sum_rows(
    size: Any, add: Any, places: Any, many: Any, rows: Any, ahead: Any, stride: Any, count: Any,
    wide: Any,
) -> None:  # fmt: skip
    """``row_sums`` over ``wide`` columns for up to QUERIES queries, whose addresses are given;
    ``size`` is of a number in the cache, in bytes."""
    at, step = places.ctypes.data, _COLUMNS[many]
    if many == 0:
        return
    for c in range(0, wide, step):
        if add:
            if size == 2:
                _mixed(many, at, rows + size * c, ahead, stride, count, 4 * c)
            else:
                _whole_mixed(many, at, rows + size * c, ahead, stride, count, 4 * c)
        elif size == 2:
            _scores(many, at, rows + size * c, ahead, stride, count, 4 * c)
        else:
            _whole_scores(many, at, rows + size * c, ahead, stride, count, 4 * c)


class _Attention(NamedTuple):
    """Places in the arguments of ``attend``."""

    queries: int = 1
    heads: int = 2
    kv_heads: int = 3
    width: int = 4
    """Of a head, without and with padding."""
    padded: int = 5
    layer: int = 6
    window: int = 7
    number: int = 8
    """Of the step."""
    size: int = 9
    """Of a number in the cache, in bytes."""
    out: int = 10
    stride: int = 11
    places: int = 12


_A = _Attention()


class _Asked(NamedTuple):
    """What is known of a query before its context is gone over."""

    query: int = 0
    scores: int = 1
    out: int = 2
    table: int = 3
    base: int = 4
    nodes: int = 5
    first: int = 6
    """The first key that it sees, the block of that, and the block of its last key."""
    first_block: int = 7
    last_block: int = 8
    row: int = 9
    size: int = 10


_Q = _Asked()


@njit
def _ask(a: Any, frame: Any, asked: Any, kv: Any, start: Any, n: Any) -> Any:
    """Fill in ``asked`` for some queries of a key head; how many blocks they see."""
    heads, padded = a[_A.heads], a[_A.padded]
    group, blocks = heads // a[_A.kv_heads], 0
    row, head = start // group, start % group
    for i in range(n):
        base, nodes = frame[FRAME.base + row], frame[FRAME.nodes + row]
        first, item = _first_seen(frame, row, a[_A.window]), kv * group + head
        asked[i, _Q.query] = a[_A.queries] + 4 * (row * heads + item) * padded
        asked[i, _Q.scores] = frame[FRAME.scores] + 4 * (row * heads + item) * frame[FRAME.keys]
        asked[i, _Q.out] = a[_A.out] + 4 * (row * a[_A.stride] + item * padded)
        asked[i, _Q.table] = frame[FRAME.table + row]
        asked[i, _Q.base], asked[i, _Q.nodes] = base, nodes
        asked[i, _Q.first], asked[i, _Q.first_block] = first, first // BLOCK
        # A path's nodes lie behind the base, perhaps with gaps of more than a block.
        asked[i, _Q.last_block] = _last_slot(frame, row) // BLOCK
        asked[i, _Q.row] = row
        blocks = max(blocks, asked[i, _Q.last_block] + 1)
        head += 1
        if head == group:
            row, head = row + 1, 0
    return blocks


@njit(inline="always")
def _block_of(asked: Any, i: Any, number: Any, before: Any) -> Any:
    """The address of a block that a query sees, and how far on the next lies if it sees that."""
    table = _ints(asked[i, _Q.table], number + 2)
    own = table[number]
    return own + before, table[number + 1] - own if number < asked[i, _Q.last_block] else 0


@njit
def _compare(a: Any, asked: Any, places: Any, n: Any, before: Any, blocks: Any) -> None:
    """Scores q kᵀ of some queries of a key head, with each block that they see, where it lies."""
    width, size = a[_A.width], a[_A.size]
    step = size * BLOCK
    for number in range(blocks):
        keys, ahead, many = 0, 0, 0
        for i in range(n):
            if number > asked[i, _Q.last_block] or number < asked[i, _Q.first_block]:
                continue
            own, next_block = _block_of(asked, i, number, before)
            if many and own != keys:  # another sequence's
                _sum_rows(size, False, places, many, keys, ahead, step, width, BLOCK)
                many = 0
            keys, ahead = own, next_block
            places[many, 0] = asked[i, _Q.query]
            places[many, 1] = asked[i, _Q.scores] + 4 * number * BLOCK
            many += 1
        _sum_rows(size, False, places, many, keys, ahead, step, width, BLOCK)


@njit
def _soften(frame: Any, asked: Any, query: Any) -> None:
    """Softmax over the keys that a row sees, put into the order of its path first.

    So a node of a tree, a token of a block and the same token alone add up the same numbers in
    the same order.
    """
    row, first = asked[query, _Q.row], asked[query, _Q.first]
    base, nodes = asked[query, _Q.base], asked[query, _Q.nodes]
    s = _floats(asked[query, _Q.scores], frame[FRAME.keys])
    for i in range(nodes):  # each lies at or beyond where it goes, and they are in order
        s[base + i] = s[frame[FRAME.path + row * MAX_ROWS + i]]
    e = s[first : base + nodes]
    # Whole vectors, of which the first may begin before and the last end behind.
    start = first // LANES * LANES
    exponentials(s[start:].ctypes.data, base + nodes - start, float_to_bits(_largest(e)))
    for i in range(first):
        s[i] = float32(0.0)
    scale = float32(1.0) / _sum(e)
    for i in range(len(e)):
        e[i] *= scale


@njit
def _mix(a: Any, frame: Any, asked: Any, places: Any, n: Any, before: Any, blocks: Any) -> None:
    """The values that some queries see, weighted, added in the order of the row's path."""
    padded, size = a[_A.padded], a[_A.size]
    step = size * padded
    before += step * BLOCK  # values lie behind the keys
    for number in range(blocks):
        values, ahead, seen, many = 0, 0, 0, 0
        for i in range(n):
            count = min(BLOCK, asked[i, _Q.base] - number * BLOCK)
            if count <= 0 or number < asked[i, _Q.first_block]:
                continue
            own, next_block = _block_of(asked, i, number, before)
            if many and (own != values or count != seen):
                _sum_rows(size, True, places, many, values, ahead, step, seen, padded)
                many = 0
            values, seen, ahead = own, count, next_block
            places[many, 0] = asked[i, _Q.scores] + 4 * number * BLOCK
            places[many, 1] = asked[i, _Q.out]
            many += 1
        _sum_rows(size, True, places, many, values, ahead, step, seen, padded)
    for i in range(n):
        table, row = _ints(asked[i, _Q.table], blocks), asked[i, _Q.row]
        for node in range(asked[i, _Q.nodes]):
            slot = frame[FRAME.path + row * MAX_ROWS + node]
            value = table[slot // BLOCK] + before + step * (slot % BLOCK)
            places[0, 0] = asked[i, _Q.scores] + 4 * (asked[i, _Q.base] + node)
            places[0, 1] = asked[i, _Q.out]
            _sum_rows(size, True, places, 1, value, 0, step, 1, padded)


@kernel
def attend(arguments: Any, thread: Any, threads: Any) -> None:
    """softmax(q kᵀ) v for every row and head.

    A thread takes a few queries of one key head and goes over the whole context with them: their
    scores stay in its own cache, and each block that it fetches serves them all.
    """
    a = _ints(arguments, _A.places)
    frame = _ints(a[0], FRAME.size)
    heads, kv_heads, padded = a[_A.heads], a[_A.kv_heads], a[_A.padded]
    rows, group = frame[FRAME.rows], heads // kv_heads
    pair = a[_A.size] * BLOCK * 2 * padded  # of keys and values
    # With few rows a thread takes fewer, so that there is work for all.
    some = max(2, rows * heads // (3 * threads))
    some = min(QUERIES, some + some % 2)  # of three queries the sums leave registers idle
    parts = (rows * group + some - 1) // some
    places, asked = np.empty((QUERIES, 2), np.int64), np.empty((QUERIES, _Q.size), np.int64)
    shares = min(threads, SHARES)
    for turn in range(shares):  # neighbours share a key head: its blocks are near then
        share = (thread + turn) % shares
        first, last = kv_heads * parts * share // shares, kv_heads * parts * (share + 1) // shares
        counter = frame[FRAME.counters] + 8 * (SHARES * a[_A.number] + share)
        while True:
            ticket = first + next_ticket(counter)
            if ticket >= last:
                break
            kv, start = ticket // parts, ticket % parts * some
            n = min(rows * group - start, some)
            blocks = _ask(a, frame, asked, kv, start, n)
            before = pair * (a[_A.layer] * kv_heads + kv)
            _compare(a, asked, places, n, before, blocks)
            for i in range(n):
                _soften(frame, asked, i)
                # Each head has a place of its own, padding included.
                found = _floats(asked[i, _Q.out], padded)
                for d in range(padded):
                    found[d] = float32(0.0)
            _mix(a, frame, asked, places, n, before, blocks)


@kernel
def hand_heads(arguments: Any, thread: Any, threads: Any) -> None:
    """What the heads found, side by side without their padding, for the next linear layer."""
    a = _ints(arguments, 10)
    rows = _ints(a[0], FRAME.size)[FRAME.rows]
    source, stride, heads, width, padded, into = a[1], a[2], a[3], a[4], a[5], a[6:]
    start, end = _parts(into[0], thread, threads)
    mates = _mates(rows, into[3])
    y = np.zeros(4 * QUADS, np.float32)
    for row in range(rows):
        places = _places(row, rows, mates, into)
        for part in range(start, end):
            at = part * len(y)
            own = max(0, min(len(y), heads * width - at))
            if width == padded:
                x = _floats(source + 4 * (row * stride + at), own)
                for i in range(own):
                    y[i] = x[i]
            else:
                x = _floats(source + 4 * row * stride, heads * padded)
                for i in range(own):
                    head = (at + i) // width
                    y[i] = x[head * padded + at + i - head * width]
            y[own:] = float32(0.0)
            _hand_over(y, part, places)


# ---- the whole pass ------------------------------------------------------------------------------


@kernel
def drive(program: Any, unused: Any, unused_too: Any) -> None:
    """Run a list of steps, all threads of a team together.

    ``program``: the number of steps, the addresses of a team's functions ``barrier``,
    ``thread_number`` and ``team_size`` (0 where there is no team), then the address of each
    step's function and of its arguments.
    """
    head = _ints(program, 4)
    steps, barrier = head[0], head[1]
    thread, threads = 0, 1
    if barrier:
        thread, threads = call_count(head[2]), call_count(head[3])
    listed = _ints(program + 32, 2 * steps)
    for i in range(steps):
        call_step(listed[2 * i], listed[2 * i + 1], thread, threads)
        if threads > 1:
            call_barrier(barrier)
