"""Reductions whose bits depend on the inputs in canonical order, and on nothing else.

The order is that of the canonical tree (`quicoll.numerics.canonical_order`).

The arithmetic. IEEE 754 defines sum, product and quotient of two numbers to the last bit, so each combination is
the same on every processor that obeys it (`dtypes.require_ieee` asks). What it leaves open is closed here:

- NaN: a result that is NaN carries the bits of `DType.nan` for all operands. This is done once, in
  `finish`.
- Signed zeros: for min and max -0.0 is less than +0.0. numpy gives either, depending on the vector unit and on
  the place in the array.
- Contraction: one operation is one numpy call on stored operands, so that no multiply is fused with an add.
- Precision: 8-bit and 16-bit floats accumulate in float32 (or float64 if asked), so that there is one rounding to
  the narrow type, at the end. avg is the sum and then one division by L in the accumulator, for any number of
  ranks. complex64 accumulates in two float32 as float32 does in one, complex128 in two float64.
- Complex: a sum adds the parts. (a+bi)(c+di) is (ac - bd) + (ad + bc)i, four products, a difference and a sum, each
  rounded; infinities are not recovered (C's Annex G would, libraries differ), so (inf+0i)(1+0i) is inf+nan i.
  avg divides both parts. Each part that is NaN becomes the one NaN; the other part stays. There is no order, hence
  no min and no max.
- Integers: sum and product wrap modulo 2**n, hence are exact and free of order. avg sums in 64 bits, wrapping
  there, then divides towards minus infinity. Overflow of floats gives infinity; nothing warns.

Everything works in blocks of a size that stays in a core's second-level cache: a tree is evaluated block by block,
so the memory it takes grows with the tree's depth and not with the number of leaves or their length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from struct import pack, pack_into, unpack
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.codec import BlockType
from quicoll.numerics.dtypes import (
    BOOL,
    COMPLEX64,
    COMPLEX128,
    DTYPES,
    FLOAT32,
    FLOAT64,
    INT64,
    UINT64,
    Array,
    DType,
    NumberKind,
    narrow_unguarded,
    require_ieee,
    stored_as,
    widen,
    widen_unguarded,
)
from quicoll.numerics.exact import exact_accumulator

__all__ = [
    "DTYPES",
    "LONG_REDUCE_BLOCK",
    "REDUCE_BLOCK",
    "After",
    "Array",
    "DType",
    "Precision",
    "ReduceOp",
    "accumulator",
    "block_accumulator",
    "combine",
    "finish",
    "reduce_few",
    "reduce_rows",
    "reduce_tree",
    "widen",
]

Precision: TypeAlias = Literal["default", "float64", "exact"]

# Elements of one block: 128 to 256 KiB of a floating-point accumulator. Bits do not depend on it
# (tests/unit/numerics/test_reduce.py).
REDUCE_BLOCK = 32768
# Of two leaves of the accumulator's type, where nothing is kept between the steps. Numpy gives the interpreter's lock
# up in each of its calls, and a thread that computes has to be woken for it again: fewer calls cost it less.
LONG_REDUCE_BLOCK = 4 * REDUCE_BLOCK


class ReduceOp(StrEnum):
    """The operations of a reduction. band, bor and bxor are bitwise, on integers and bools."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    @staticmethod
    def parse(value: str) -> ReduceOp:
        """Return the operation of this name, in any case; a ReduceOp is itself. Raises LocalError."""
        try:
            return ReduceOp(value.lower())
        except (ValueError, AttributeError):
            raise LocalError(f"op {value!r} is not supported; use one of {', '.join(ReduceOp)}") from None


# ---------------------------------------------------------------------------------------------------------------------
# The operations


def accumulator(dtype: DType, op: ReduceOp, precision: Precision = "default") -> DType:
    """Return the type in which partial results are held and travel.

    min, max and the bitwise operations need no other than `dtype`. sum, avg and product of float8, float16 and bfloat16
    take float32, of float32 float32, of float64 float64. Complex types and integers keep their own, except that avg of
    integers takes int64 or uint64.

    Args:
        dtype: The leaves' type.
        op: What is computed.
        precision: "float64" takes float64 (complex128) for sums, avgs and products; "exact" an accumulator of
            `quicoll.numerics.exact` for sum and avg of floats and complex numbers.
    Returns:
        The accumulator's type.
    Raises:
        LocalError: Not defined: bitwise operations on floats, an order of complex numbers, arithmetic on bools, an
            exact product, an unknown precision.
    """
    if precision not in ("default", "float64", "exact"):
        raise LocalError(f"precision {precision!r} is not known; use 'default', 'float64' or 'exact'")
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if dtype.kind is NumberKind.COMPLEX:
            raise LocalError(
                f"{op} of {dtype} is not defined: complex numbers have no order; reduce their absolute values"
            )
        return dtype
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        if dtype.kind in (NumberKind.FLOAT, NumberKind.COMPLEX):
            raise LocalError(f"{op} is bitwise and {dtype} is not an integer; use an integer tensor or a view of one")
        return dtype
    if dtype is BOOL:
        raise LocalError(f"{op} of bools is not defined; use band, bor, bxor, min, max, or an integer tensor")
    if precision == "exact" and dtype.kind in (NumberKind.FLOAT, NumberKind.COMPLEX):
        if op is ReduceOp.PRODUCT:
            raise LocalError(f"product of {dtype} has no exact form; use precision 'default' or 'float64'")
        return exact_accumulator(dtype).wide
    if dtype.kind is NumberKind.FLOAT:
        return FLOAT64 if precision == "float64" or dtype is FLOAT64 else FLOAT32
    if dtype.kind is NumberKind.COMPLEX:
        return COMPLEX128 if precision == "float64" or dtype is COMPLEX128 else COMPLEX64
    if op is ReduceOp.AVG:
        return INT64 if dtype.kind is NumberKind.INT else UINT64
    return dtype


@cache
def block_accumulator(acc: DType, numbers: int) -> BlockType:
    """Return the accumulator of blocks of so many numbers that accumulate in `acc`: that of each number."""
    return BlockType(f"blocks_of_{acc}", numbers * acc.itemsize, acc, numbers)


def combine(op: ReduceOp, acc: DType, left: Array, right: Array, out: Array) -> None:
    """Combine two partial results.

    Args:
        op: What is computed.
        acc: The accumulator's type; for exact ones see `quicoll.numerics.exact.Accumulator.combine`.
        left: 1-D, of `acc`.
        right: The same size.
        out: Gets left op right; may be `left` or `right` itself.
    """
    with np.errstate(all="ignore"):
        _combine(op, acc, left, right, out)


def finish(op: ReduceOp, total: Array, leaves: int, dtype: DType, out: Array) -> None:
    """Turn the tree's root into the result: divide if `op` is avg, round once, make every NaN the one.

    Args:
        op: What is computed.
        total: 1-D, in the accumulator of (`dtype`, `op`) or in `dtype`; unchanged, unless it is `out`.
        leaves: How many were reduced.
        dtype: The result's type.
        out: 1-D, of `dtype`, the same size.
    """
    with np.errstate(all="ignore"):
        _finish(op, total, leaves, dtype, out)


def _combine(op: ReduceOp, acc: DType, left: Array, right: Array, out: Array) -> None:
    if acc.kind is NumberKind.FLOAT and op in (ReduceOp.MIN, ReduceOp.MAX):
        (_order_small if acc.itemsize <= 2 else _order_floats)(op, acc, left, right, out)
    elif acc.part is not None:
        parts = (values.view(acc.part.storage) for values in (left, right, out))
        (_multiply_complex if op is ReduceOp.PRODUCT else np.add)(*parts)
    else:
        _PLAIN[op](left, right, out=out)


# On bools numpy computes with truth and not with bits, so that a byte of 2, made through a view, is not lost in 2 &
# 1.
_PLAIN = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def _order_floats(op: ReduceOp, acc: DType, left: Array, right: Array, out: Array) -> None:
    """min or max of float32 and float64. numpy propagates NaN; the sign of a zero is put right where there is one.

    A minimum of zero means that neither operand is below it, so the sign is the "or" of both signs; a maximum of
    zero likewise the "and".
    """
    extreme = (np.minimum if op is ReduceOp.MIN else np.maximum)(left, right)
    zero = extreme == 0
    if zero.any():
        signs = np.bitwise_or if op is ReduceOp.MIN else np.bitwise_and
        of_both = signs(left.view(acc.bits)[zero], right.view(acc.bits)[zero])
        extreme.view(acc.bits)[zero] = of_both & acc.bits.type(1 << (8 * acc.itemsize - 1))
    np.copyto(out, extreme)


def _order_small(op: ReduceOp, acc: DType, left: Array, right: Array, out: Array) -> None:
    """min or max of 8-bit and 16-bit floats by integers.

    Flipping the low bits of negative numbers makes the order of the bits as signed integers that of the values,
    -0.0 below +0.0, with -NaN below and +NaN above everything. Shifted round the circle of 256 or 65536 patterns,
    both kinds of NaN stand at the same end: the top for max, the bottom for min, and win there.
    """
    unsigned, signed = acc.bits.type, np.dtype(f"i{acc.itemsize}")
    circle, low = (1 << 8 * acc.itemsize) - 1, unsigned((1 << (8 * acc.itemsize - 1)) - 1)
    nan_patterns = acc.top + 1
    turn = unsigned((nan_patterns if op is ReduceOp.MIN else -nan_patterns) & circle)
    sign_place = signed.type(8 * acc.itemsize - 1)

    def turned(values: Array) -> Array:
        bits = values.view(signed)
        keys: Array = np.right_shift(bits, sign_place).view(acc.bits)
        keys &= low
        keys ^= bits.view(acc.bits)
        keys -= turn
        return keys

    a, b = turned(left), turned(right)
    (np.minimum if op is ReduceOp.MIN else np.maximum)(a, b, out=a)
    a += turn
    np.right_shift(a.view(signed), sign_place, out=b.view(signed))
    b &= low
    np.bitwise_xor(a, b, out=out.view(acc.bits))


def _multiply_complex(left: Array, right: Array, out: Array) -> None:
    """(ac - bd) + (ad + bc)i of arrays in which real and imaginary parts alternate, by real operations.

    numpy's own product of complex numbers leaves to the compiler, and to the processor's vector unit, whether it fuses
    a multiply with the add that follows.
    """
    a, b, c, d = left[::2], left[1::2], right[::2], right[1::2]
    real = np.multiply(a, c)
    np.subtract(real, np.multiply(b, d), out=real)
    imaginary = np.multiply(a, d)
    np.add(imaginary, np.multiply(b, c), out=imaginary)
    out[::2], out[1::2] = real, imaginary


def _finish(op: ReduceOp, total: Array, leaves: int, dtype: DType, out: Array) -> None:
    acc = stored_as(total, dtype)
    if op is ReduceOp.AVG and leaves > 1:
        divide = np.floor_divide if dtype.kind in (NumberKind.INT, NumberKind.UINT) else np.divide
        target = out if acc is dtype else np.empty_like(total)
        storage = acc.storage if acc.part is None else acc.part.storage
        divide(total.view(storage), np.array(leaves, storage), out=target.view(storage))
        total = target
    narrow_unguarded(total, acc, dtype, out)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation of a whole tree


class Operand(Protocol):
    """A leaf of a tree that is to be evaluated; `wide`: its values are in the accumulator's type."""

    @property
    def wide(self) -> bool: ...


OperandT = TypeVar("OperandT", bound=Operand)

After: TypeAlias = Callable[[int, int], None]
"""Told of elements that have been reduced: the first, and the one after the last."""

# Memory that calls work in and leave to later ones, by bytes: the system maps so much anew each time, which takes as
# long as to fill it. Whoever is in the middle of a call has taken his out.
_SPARE_SIZES = (4 * REDUCE_BLOCK, 8 * REDUCE_BLOCK)
_MOST_SPARE = 8
_spare: dict[int, list[Array]] = {nbytes: [] for nbytes in _SPARE_SIZES}


def _borrow(nbytes: int) -> Array:
    try:
        return _spare[nbytes].pop()
    except (KeyError, IndexError):
        return np.empty(nbytes, np.uint8)


def _give_back(memory: Array) -> None:
    spare = _spare.get(memory.size)
    if spare is not None and len(spare) < _MOST_SPARE:
        spare.append(memory)


def reduce_tree(
    tree: OperandT | tuple[Any, Any],
    view: Callable[[OperandT], Array],
    *,
    op: ReduceOp,
    dtype: DType,
    acc: DType,
    out: Array,
    final: bool,
    leaves: int = 1,
    block: int = REDUCE_BLOCK,
    after: After | None = None,
) -> None:
    """Evaluate a tree of operands.

    Takes (depth of the tree + 1) * block elements of memory. An exact accumulator takes the operands as they come,
    since its sum has no order, and memory of its own. Blocks are reduced number by number: leaves are decoded, and
    a final value is encoded.

    Args:
        tree: An operand, or a pair of trees: left op right.
        view: Gives an operand's values, 1-D and as long as `out`, of `acc` if the operand is wide, else of `dtype`.
            Called once for each operand.
        op: What is computed.
        dtype: The leaves' type.
        acc: The accumulator's type.
        out: 1-D, apart from every operand's memory; of `dtype` if final, else of `acc`.
        final: Finish the reduction.
        leaves: How many leaves are reduced, for avg.
        block: Elements that are worked on at a time; changes no bits.
        after: Called with the first of them and the one after the last, when they are done: what was read for them and
            what was written is in the processor's caches then.
    Raises:
        LocalError: This thread does not compute by IEEE 754, or an operand has another size.
    """
    require_ieee()
    if acc.kind is NumberKind.BLOCKS:
        _reduce_blocks(_bind(tree, view, out.size), op=op, dtype=dtype, acc=acc, out=out, final=final, leaves=leaves)
    elif acc.kind is NumberKind.EXACT:
        found = _operands(tree)
        exact_accumulator(dtype).reduce(
            [(_checked(view(operand), out.size), operand.wide) for operand in found],
            out,
            final=final,
            leaves=leaves,
            avg=op is ReduceOp.AVG,
        )
    if acc.kind in (NumberKind.BLOCKS, NumberKind.EXACT):
        if after is not None:
            after(0, out.size)
        return
    bound = _bind(tree, view, out.size)
    borrowed: list[Array] = []
    registers: list[Array] = []
    width = min(block, out.size)

    def register(depth: int) -> Array:
        while len(registers) <= depth:
            borrowed.append(_borrow(width * acc.storage.itemsize))
            registers.append(borrowed[-1].view(acc.storage))
        return registers[depth]

    def evaluate(node: Any, a: int, b: int, depth: int, target: Array | None) -> Array:
        """The node's values over [a, b), in an operand's memory, in `target` or in register `depth`."""
        if len(node) == 1:
            operand, wide = node[0]
            if wide or acc is dtype:
                part: Array = operand[a:b]
                return part
            values = register(depth)[: b - a] if target is None else target
            widen_unguarded(operand[a:b], dtype, acc, values)
            return values
        left = evaluate(node[0], a, b, depth, target)
        right = evaluate(node[1], a, b, depth + 1, None)
        values = register(depth)[: b - a] if target is None else target
        _combine(op, acc, left, right, values)
        return values

    with np.errstate(all="ignore"):
        for a in range(0, out.size, block):
            b = min(a + block, out.size)
            piece = out[a:b]
            value = evaluate(bound, a, b, 0, piece if acc is dtype or not final else None)
            if final:
                _finish(op, value, leaves, dtype, piece)
            elif value is not piece:
                np.copyto(piece, value)
            if after is not None:
                after(a, b)
    for memory in borrowed:
        _give_back(memory)


def reduce_rows(rows: Array, *, op: ReduceOp, dtype: DType, acc: DType, out: Array) -> bool:
    """Reduce the canonical tree over leaves that stand one after the other, where numpy can do it a level at a time.

    Each level of that tree combines neighbours in pairs and keeps the last one of an odd number, so it is one call of
    numpy, and of few elements the calls are what takes time.

    Args:
        rows: 2-D, a leaf in each row, of `dtype`.
        op: What is computed.
        dtype: The leaves' type.
        acc: The accumulator's type.
        out: 1-D, of `dtype`; the finished result.
    Returns:
        Whether it was done; nothing is, where `reduce_tree` does other than combine plain numbers.
    Raises:
        LocalError: This thread does not compute by IEEE 754.
    """
    if acc is not dtype or op not in _BY_LEVEL or dtype.kind not in _BY_LEVEL_KINDS:
        return False
    require_ieee()
    combine_all, leaves = _PLAIN[op], len(rows)
    with np.errstate(all="ignore"):
        values = rows
        while (many := len(values)) > 1:
            paired = combine_all(values[: many - 1 : 2], values[1::2])
            values = paired if many % 2 == 0 else np.concatenate((paired, values[-1:]))
        _finish(op, values[0], leaves, dtype, out)
    return True


def reduce_few(data: bytes, *, op: ReduceOp, dtype: DType, acc: DType, out: Array) -> bool:
    """Reduce the canonical tree over leaves of one number each, where there are few of them, without numpy.

    Of a loss or a norm that all ranks sum, numpy's calls are most of the time, and above all so where another process
    had the caches before. Python's floats are float64. What an operation on two float32 gives in float64, rounded once
    more, is what it gives in float32, because 53 bits are at least 2 * 24 + 2 (S. Figueroa, "When is double rounding
    innocuous?", 1995).

    Args:
        data: The leaves, one after the other, of `dtype`.
        op: What is computed.
        dtype: The leaves' type.
        acc: The accumulator's type.
        out: One element, of `dtype`; the finished result, or anything where nothing was done.
    Returns:
        Whether it was done: not where there are more leaves, where they are no floats, or where something is not
        finite, of which the bits are a matter of rules that the other ways have.
    Raises:
        LocalError: This thread does not compute by IEEE 754.
    """
    letter, leaves = _LETTERS.get(dtype), len(data) // dtype.itemsize
    if letter is None or acc is not dtype or op not in _BY_LEVEL or not 0 < leaves <= _HANDFUL:
        return False
    require_ieee()
    try:
        values: Sequence[float] = unpack(f"={leaves}{letter}", data)
        while (many := len(values)) > 1:
            paired: list[float] = []
            for a, b in zip(values[: many - 1 : 2], values[1::2], strict=True):
                paired.append(a * b if op is ReduceOp.PRODUCT else a + b)
            if many % 2:
                paired.append(values[-1])
            values = paired
            if letter == "f":
                code = f"={len(paired)}f"
                values = unpack(code, pack(code, *paired))
        total = values[0] / leaves if op is ReduceOp.AVG else values[0]
        if not math.isfinite(total):
            return False
        pack_into(f"={letter}", out.data, 0, total)
    except OverflowError:  # of a float32, which is infinite then
        return False
    return True


_LETTERS = {FLOAT32: "f", FLOAT64: "d"}
_HANDFUL = 8  # numbers; of more numpy takes less
_BY_LEVEL = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
_BY_LEVEL_KINDS = (NumberKind.FLOAT, NumberKind.INT, NumberKind.UINT)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """An operand of blocks over some of them, as numbers."""

    values: Array
    wide: bool


def _reduce_blocks(
    tree: tuple[Any, ...], *, op: ReduceOp, dtype: DType, acc: DType, out: Array, final: bool, leaves: int
) -> None:
    """`reduce_tree` of blocks. One stretch of them at a time, in which each leaf is decoded when it is needed."""
    part, inner = dtype.part, acc.part
    if not isinstance(dtype, BlockType) or dtype.codec is None or part is None or inner is None:
        raise AssertionError(f"{dtype} and {acc} are not blocks")
    codec, block = dtype.codec, dtype.numbers
    stretch = 8192 // block  # blocks: each leaf takes 32 KiB meanwhile

    for a in range(0, out.size, stretch):
        b = min(a + stretch, out.size)
        size = (b - a) * block

        def numbers(operand: _Numbers, a: int = a, b: int = b, size: int = size, inner: DType = inner) -> Array:
            if operand.wide:
                return operand.values[a:b].view(inner.storage)
            values = np.empty(size, part.storage)
            codec.decode(operand.values[a:b].view(np.uint8), part, values)
            return values

        target = np.empty(size, part.storage) if final else out[a:b].view(inner.storage)
        reduce_tree(_with_numbers(tree), numbers, op=op, dtype=part, acc=inner, out=target, final=final, leaves=leaves)
        if final:
            codec.encode(target, part, out[a:b].view(np.uint8))


def _with_numbers(tree: tuple[Any, ...]) -> Any:
    if len(tree) == 1:
        return _Numbers(*tree[0])
    return _with_numbers(tree[0]), _with_numbers(tree[1])


def _bind(tree: Any, view: Callable[[Any], Array], size: int) -> tuple[Any, ...]:
    """The tree with arrays for operands, each in a tuple of one so that the length tells operands from pairs."""
    if isinstance(tree, tuple):
        left, right = tree
        return _bind(left, view, size), _bind(right, view, size)
    return ((_checked(view(tree), size), tree.wide),)


def _operands(tree: Any) -> list[Any]:
    """The operands of a tree, left to right."""
    found, pending = [], [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, tuple):
            pending += [node[1], node[0]]
        else:
            found.append(node)
    return found


def _checked(values: Array, size: int) -> Array:
    if values.ndim != 1 or values.size != size:
        raise LocalError(f"an operand of shape {values.shape} in a reduction of {size} elements")
    return values
