"""Reductions of encoded tensors: what they stand for, and how far off it is at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as shaped

from quicoll.errors import LocalError
from quicoll.numerics.bundle import bundle
from quicoll.numerics.canonical_order import split
from quicoll.numerics.codecs import INT8_WIRE, codec_of
from quicoll.numerics.dtypes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, Array, DType, narrow, widen
from quicoll.numerics.encoding import Encoding, encoding_for
from quicoll.numerics.reduce import ReduceOp, finish, reduce_tree

if TYPE_CHECKING:
    from quicoll.numerics.codec import Codec

WIRE_BLOCK = INT8_WIRE.block
FORMATS = [(name, dtype) for name in ("bfloat16", "int8", "int4") for dtype in codec_of(name).parts]


class Leaf:
    def __init__(self, number: int) -> None:
        self.number, self.wide = number, False


def tree(a: int, b: int) -> Any:
    return Leaf(a) if b - a == 1 else (tree(a, split(a, b)), tree(split(a, b), b))


def reduced(form: Encoding, leaves: list[Array], dtype: DType, op: ReduceOp) -> Array:
    """All of it on one rank: encoded, reduced, decoded."""
    travelling = [form.encode(bundle(leaf)) for leaf in leaves]
    out = np.empty(travelling[0].size, form.dtype.storage)
    told: list[tuple[int, int]] = []
    reduce_tree(
        tree(0, len(leaves)),
        lambda leaf: travelling[leaf.number],
        op=op,
        dtype=form.dtype,
        acc=form.acc,
        out=out,
        final=True,
        leaves=len(leaves),
        after=lambda a, b: told.append((a, b)),
    )
    assert [0, *(b for _, b in told)] == [*(a for a, _ in told), out.size]
    result = np.empty(leaves[0].size, dtype.storage)
    form.decode(out, bundle(leaves[0]), result)
    return result


def bound(codec: Codec, values: Array, dtype: DType) -> Array:
    """Of each element, how far it may be off once encoded and decoded."""
    if codec.name == "bfloat16":
        return np.array([codec.bound(abs(float(x)), dtype) for x in values])
    largest = [np.abs(values[a : a + codec.block]).max() for a in range(0, values.size, codec.block)]
    return np.repeat([codec.bound(float(m), dtype) for m in largest], codec.block)[: values.size]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([(name, dtype) for name, dtype in FORMATS if dtype is not BFLOAT16]),
    st.integers(1, 9),
    st.sampled_from([1, 3, WIRE_BLOCK, WIRE_BLOCK + 1, 2 * WIRE_BLOCK + 7]),
    st.data(),
)
def test_a_sum_is_off_by_no_more_than_what_is_stated(
    form: tuple[str, DType], leaves: int, size: int, data: st.DataObject
) -> None:
    name, dtype = form
    numbers = st.floats(-1000, 1000, width=16)
    given_leaves = [
        data.draw(shaped.arrays(dtype.storage, size, elements=numbers, fill=numbers)) for _ in range(leaves)
    ]
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        how = encoding_for(name, dtype, op, "default")
        divisor = leaves if op is ReduceOp.AVG else 1
        real = sum(leaf.astype(np.float64) for leaf in given_leaves) / divisor
        off = sum(bound(how.codec, leaf.astype(np.float64), dtype) for leaf in given_leaves) / divisor
        # What is encoded in the end is off already, and by what the accumulator (and for float16 the type) rounds.
        rounding = 2.0**-11 if dtype.itemsize == 2 else 2.0**-20
        sizes = sum(np.abs(leaf.astype(np.float64)) for leaf in given_leaves) / divisor
        off = off + rounding * (sizes + off) + 2.0**-24
        got = reduced(how, given_leaves, dtype, op).astype(np.float64)
        assert (np.abs(got - real) <= off + bound(how.codec, np.abs(real) + off, dtype)).all()


@pytest.mark.parametrize(("name", "dtype"), FORMATS)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("count", [1, 5])
def test_the_result_is_the_encoded_reduction_of_the_encoded_leaves(
    name: str, dtype: DType, op: ReduceOp, count: int
) -> None:
    """Through the codec alone, leaf by leaf, in float64 as the wider precision."""
    codec, size = codec_of(name), 33 * WIRE_BLOCK + 5  # more than one stretch of blocks
    rng = np.random.default_rng(count)
    leaves = []
    for _ in range(count):
        leaf = np.empty(size, dtype.storage)
        narrow(rng.standard_normal(size), FLOAT64, dtype, leaf)
        leaves.append(leaf)

    def passed(values: Array) -> Array:
        coded = np.empty(codec.wire_bytes(size, dtype), np.uint8)
        codec.encode(values, dtype, coded)
        out = np.empty(size, dtype.storage)
        codec.decode(coded, dtype, out)
        return out

    def combined(a: int, b: int) -> Array:
        if b - a == 1:
            wide = np.empty(size)
            widen(passed(leaves[a]), dtype, FLOAT64, wide)
            return wide
        left, right = combined(a, split(a, b)), combined(split(a, b), b)
        return {ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}.get(op, np.add)(left, right)

    expected = np.empty(size, dtype.storage)
    total = combined(0, count) / (count if op is ReduceOp.AVG else 1)
    # bfloat16 is rounded to once, from the accumulator; blocks are encoded from the type of the elements.
    if name == "bfloat16":
        short = np.empty(size, np.uint16)
        narrow(total, FLOAT64, DTYPES["bfloat16"], short)
        widen(short, DTYPES["bfloat16"], dtype, expected)
    else:
        finish(ReduceOp.SUM, total, 1, dtype, expected)
        expected = passed(expected)
    form = encoding_for(name, dtype, op, "float64")
    values = [torch_bfloat16(leaf) if dtype.name == "bfloat16" else leaf for leaf in leaves]
    travelling = [form.encode(bundle(value)) for value in values]
    out = np.empty(travelling[0].size, form.dtype.storage)
    reduce_tree(
        tree(0, count), lambda leaf: travelling[leaf.number], op=op, dtype=form.dtype, acc=form.acc, out=out,
        final=True, leaves=count,
    )  # fmt: skip
    got = np.empty(size, dtype.storage)
    form.decode(out, bundle(values[0]), got)
    assert got.tobytes() == expected.tobytes()


def torch_bfloat16(bits: Array) -> Any:
    import torch

    return torch.from_numpy(bits.view(np.uint16).copy()).view(torch.bfloat16)


def test_tensors_of_a_list_begin_blocks_of_their_own() -> None:
    form = encoding_for("int8", FLOAT32, ReduceOp.SUM, "default")
    rng = np.random.default_rng(1)
    tensors = [rng.standard_normal(size).astype(np.float32) for size in (300, 0, 256, 1)]
    whole = form.encode(bundle(tensors))
    assert whole.size == 2 + 0 + 1 + 1 == form.elements(each.size for each in tensors)
    assert whole.tobytes() == b"".join(form.encode(bundle(each)).tobytes() for each in tensors)
    out = np.empty(557, np.float32)
    form.decode(whole, bundle(tensors), out)
    alone = np.empty(300, np.float32)
    form.decode(form.encode(bundle(tensors[0])), bundle(tensors[0]), alone)
    assert out[:300].tobytes() == alone.tobytes()


@pytest.mark.parametrize(
    ("name", "dtype", "op", "message"),
    [
        ("int2", "float32", ReduceOp.SUM, "wire format 'int2' is not known"),
        ("int4", "float64", ReduceOp.SUM, "float64 cannot travel as int4"),
        ("topk:1/64", "float16", ReduceOp.SUM, "float16 cannot travel as topk:1/64"),
        ("topk:1/64", "float32", ReduceOp.MAX, "of which max means nothing: it takes sum and avg"),
        ("int8", "float64", ReduceOp.SUM, "float64 cannot travel as int8"),
        ("bfloat16", "float16", ReduceOp.SUM, "float16 cannot travel as bfloat16"),
        ("bfloat16", "int32", ReduceOp.SUM, "int32 cannot travel"),
        ("int8", "complex64", ReduceOp.PRODUCT, "a product of complex64"),
    ],
)
def test_what_cannot_travel_so_is_refused(name: str, dtype: str, op: ReduceOp, message: str) -> None:
    with pytest.raises(LocalError, match=message):
        encoding_for(name, DTYPES[dtype], op, "default")
