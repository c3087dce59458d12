"""Top-k: which numbers are kept, what comes of them, and what a reduction of kept ones gives."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_oracle import passed, reduced

from quicoll.local.large import canonical_tree
from quicoll.numerics.bundle import bundle
from quicoll.numerics.codecs import codec_of
from quicoll.numerics.dtypes import BFLOAT16, COMPLEX64, DTYPES, FLOAT32, FLOAT64, Array, DType
from quicoll.numerics.encoding import encoding_for
from quicoll.numerics.reduce import ReduceOp
from quicoll.numerics.topk import TOP_K_CHUNK


def wired(values: Array, n: int, dtype: DType = FLOAT32) -> Array:
    codec = codec_of(f"topk:1/{n}")
    wire = np.full(codec.wire_bytes(values.size, dtype), 0xAA, np.uint8)
    codec.encode(values, dtype, wire)
    return wire


def through(values: Array, n: int, dtype: DType = FLOAT32) -> Array:
    out = np.full(values.size, 7, dtype.storage)
    codec_of(f"topk:1/{n}").decode(wired(values, n, dtype), dtype, out)
    return out


def drawn(size: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 2.0 ** rng.integers(-9, 9, size)).astype(np.float32)


@pytest.mark.parametrize("n", [2, 3, 64, 100, 4096])
@pytest.mark.parametrize("size", [0, 1, 63, 65, 4095, 4096, 4097, 3 * 4096 + 1000])
def test_what_comes_out_is_what_a_scalar_reference_keeps(n: int, size: int) -> None:
    values = drawn(size)
    assert through(values, n).tobytes() == passed(f"topk:1/{n}", values).tobytes()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_bits_give_what_the_reference_keeps(data: st.DataObject) -> None:
    """With many equal ones, of either sign, with NaN of any bits and infinities."""
    few = st.sampled_from([0, 0x8000_0000, 1, 0x3F80_0000, 0xBF80_0000, 0x7F80_0000, 0xFF80_0000, 0x7F7F_FFFF])
    pattern = st.one_of(few, few, st.integers(0, (1 << 32) - 1))
    values = np.array(data.draw(st.lists(pattern, min_size=1, max_size=40)), np.uint32).view(np.float32)
    n = data.draw(st.integers(2, 50))
    found, expected = through(values, n), passed(f"topk:1/{n}", values)
    strange = np.isnan(expected)
    assert (found.view(np.uint32)[strange] == FLOAT32.nan).all()
    assert found[~strange].tobytes() == expected[~strange].tobytes()


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    values = np.tile(np.float32([1, -1]), TOP_K_CHUNK)
    found = through(values, 64).reshape(2, TOP_K_CHUNK)
    assert (found[:, :64] == values[:64]).all()
    assert not found[:, 64:].any()


def test_a_finite_number_stays_finite_and_overflows_are_seen() -> None:
    largest = (2 - 2.0**-7) * 2.0**127
    assert through(np.float32([3.4e38, -3.4e38, 0, 0]), 2).tolist() == [largest, -largest, 0, 0]
    assert through(np.array([1e300, 0]), 2, FLOAT64).tolist() == [largest, 0]
    values = np.zeros(256, np.float32)
    values[[200, 210, 220, 230, 240]] = [np.nan, 5, -np.inf, np.nan, np.inf]
    assert np.isnan(through(values, 64)[[200, 230]]).all()
    found = through(values, 64)
    assert found[[220, 240]].tolist() == [-np.inf, np.inf]
    assert found[210] == 0  # four are kept, and these are above all numbers


@pytest.mark.parametrize("n", [2, 8, 64, 1000])
def test_it_is_a_contraction(n: int) -> None:
    for seed in range(5):
        values = drawn(TOP_K_CHUNK, seed)
        before, after = map(Fraction, values.tolist()), map(Fraction, through(values, n).tolist())
        lost = sum((x - y) ** 2 for x, y in zip(before, after, strict=True))
        whole = sum(Fraction(x) ** 2 for x in values.tolist())
        kept = Fraction(-(-TOP_K_CHUNK // n), TOP_K_CHUNK)
        assert lost <= (1 - (1 - Fraction(1, 1 << 16)) * kept) * whole


def test_bytes_are_the_ones_that_are_stated() -> None:
    codec = codec_of("topk:1/64")
    assert codec.wire_bytes(TOP_K_CHUNK, FLOAT32) == 224
    assert codec.wire_bytes(1 << 20, FLOAT32) * 73 <= 4 << 20
    assert codec.wire_bytes(1 << 20, COMPLEX64) == 2 * codec.wire_bytes(1 << 20, FLOAT32)
    assert [codec.wire_bytes(size, FLOAT32) for size in (0, 1, 64, 65, 129)] == [0, 4, 4, 7, 11]
    # Three of six are kept: 3, 1 and 5, the values first; then twelve bits each of these places.
    wire = wired(np.float32([0, 2, 1, -8, 0.5, 4]), 2)
    assert wire[:6].view(np.uint16).tolist() == [0x4000, 0xC100, 0x4080]
    assert wire[6:].tolist() == [1, 3 << 4, 0, 5, 0]
    golden = wired((np.arange(9000) * 7919 % 2003 - 1001).astype(np.float32) / np.float32(3), 64)
    assert hashlib.sha256(golden.tobytes()).hexdigest()[:16] == "caa95bdc2da88ec1"


@pytest.mark.parametrize("dtype", [FLOAT64, BFLOAT16], ids=str)
def test_other_types_are_kept_by_the_same_rule(dtype: DType) -> None:
    short = drawn(5000).view(np.uint32) >> 16  # numbers that bfloat16 holds
    single = (short << 16).astype(np.uint32).view(np.float32)
    values = single.astype(np.float64) if dtype is FLOAT64 else short.astype(np.uint16)
    expected = through(single, 16)
    found = through(values, 16, dtype)
    assert found.tolist() == (expected.tolist() if dtype is FLOAT64 else (expected.view(np.uint32) >> 16).tolist())


def test_any_cut_between_chunks_gives_the_same_values() -> None:
    values = drawn(20 * TOP_K_CHUNK + 77)
    whole = through(values, 64)
    for start, stop in [(0, 1), (1, 3), (2, 20), (7, 21)]:
        piece = slice(start * TOP_K_CHUNK, stop * TOP_K_CHUNK)
        assert through(values[piece], 64).tobytes() == whole[piece].tobytes()


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_reduction_is_that_of_the_decoded_leaves_in_canonical_order_and_nothing_is_lost_of_it(
    op: ReduceOp, count: int
) -> None:
    leaves = [drawn(70_003, seed) for seed in range(count)]  # several stretches and a part of a chunk
    form = encoding_for("topk:1/16", FLOAT32, op, "default")
    out = np.empty(70_003, np.float32)
    wires = [form.encode(bundle(leaf)) for leaf in leaves]
    form.reduce(canonical_tree(count), wires, bundle(leaves[0]), op, out)
    assert out.tobytes() == reduced("topk:1/16", leaves, op.value).tobytes()


def test_tensors_of_a_list_have_chunks_of_their_own_and_complex_numbers_are_their_parts() -> None:
    tensors = [drawn(5000, 1), drawn(0), drawn(9, 2), drawn(4096, 3)]
    form = encoding_for("topk:1/64", FLOAT32, ReduceOp.SUM, "float64")
    assert form.elements([5000, 0, 9, 4096]) == form.encode(bundle(tensors)).size
    out = np.empty(9105, np.float32)
    form.reduce(canonical_tree(1), [form.encode(bundle(tensors))], bundle(tensors), ReduceOp.SUM, out)
    assert out.tobytes() == b"".join(passed("topk:1/64", each).tobytes() for each in tensors)
    pairs = torch.from_numpy(tensors[3].view(np.complex64))
    parts = encoding_for("topk:1/64", DTYPES["complex64"], ReduceOp.AVG, "default")
    assert parts.encode(bundle(pairs)).tobytes() == form.encode(bundle(tensors[3])).tobytes()


def test_an_exact_sum_of_kept_numbers_is_rounded_once() -> None:
    leaves = [np.float32([1e30, 0]), np.float32([1, 0]), np.float32([-1e30, 0])]
    form = encoding_for("topk:1/2", FLOAT32, ReduceOp.SUM, "exact")
    out = np.empty(2, np.float32)
    wires = [form.encode(bundle(leaf)) for leaf in leaves]
    form.reduce(canonical_tree(3), wires, bundle(leaves[0]), ReduceOp.SUM, out)
    assert out.tolist() == [1, 0]
