"""Compressed wire formats: equal bits everywhere, within the stated bound, for all values."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.errors import LocalError
from quicoll.numerics.codecs import BFLOAT16_WIRE, INT4_WIRE, INT8_WIRE, codec_of
from quicoll.numerics.dtypes import BFLOAT16, COMPLEX64, DTYPES, FLOAT16, FLOAT32, FLOAT64, Array, DType, narrow, widen

if TYPE_CHECKING:
    from quicoll.numerics.codec import Codec

WIRE_BLOCK = INT8_WIRE.block
CODECS = (BFLOAT16_WIRE, INT8_WIRE, INT4_WIRE)
BLOCKS = (INT8_WIRE, INT4_WIRE)
SUPPORTED = [(codec, part) for codec in CODECS for part in codec.parts]
IDS = [f"{part} as {codec.name}" for codec, part in SUPPORTED]


def encoded(codec: Codec, values: Array, dtype: DType) -> Array:
    wire = np.full(codec.wire_bytes(values.size, dtype), 0xAA, np.uint8)
    codec.encode(values, dtype, wire)
    return wire


def decoded(codec: Codec, wire: Array, dtype: DType, size: int) -> Array:
    out = np.empty(size, dtype.storage)
    codec.decode(wire, dtype, out)
    return out


def through(codec: Codec, values: Array, dtype: DType) -> Array:
    return decoded(codec, encoded(codec, values, dtype), dtype, values.size)


def of(dtype: DType, numbers: Any) -> Array:
    out = np.empty(len(numbers), dtype.storage)
    narrow(np.array(numbers, np.float64), FLOAT64, dtype, out)
    return out


def plain(dtype: DType, values: Array) -> Array:
    out = np.empty(values.size)
    widen(values, dtype, FLOAT64, out)
    return out


def check_bound(codec: Codec, dtype: DType, values: Array) -> None:
    before, after = plain(dtype, values), plain(dtype, through(codec, values, dtype))
    finite = np.isfinite(before)
    np.testing.assert_array_equal(before[~finite], after[~finite])
    sizes = np.where(finite, np.abs(before), 0)
    for a in range(0, values.size, codec.block):
        block = slice(a, a + codec.block)
        largest = float(sizes[block].max())
        if codec is BFLOAT16_WIRE and largest >= (2 - 2.0**-8) * 2.0**127:
            assert np.isinf(after[block]).all()
            continue
        with np.errstate(invalid="ignore"):
            worst = np.abs(before[block] - after[block])[finite[block]]
        bound = codec.bound(largest, dtype, finite=bool(finite[block].all()))
        assert (worst <= bound).all(), (largest, worst.max())


# ---------------------------------------------------------------------------------------------------------------------
# The bound


@pytest.mark.parametrize(("codec", "dtype"), SUPPORTED, ids=IDS)
def test_the_error_is_within_the_bound_for_values_of_every_size(codec: Codec, dtype: DType) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, (40 * WIRE_BLOCK + 7, dtype.itemsize), dtype=np.uint8).view(dtype.bits)[:, 0]
    check_bound(codec, dtype, bits.view(dtype.storage))
    for exponent in (-170, -149, -146, -140, -126, -60, -24, -14, 0, 10, 100, 127):
        check_bound(codec, dtype, of(dtype, rng.standard_normal(3 * WIRE_BLOCK + 1) * 2.0**exponent))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_the_error_is_within_the_bound_for_any_bits(data: st.DataObject) -> None:
    codec, dtype = data.draw(st.sampled_from(SUPPORTED))
    pattern = st.one_of(
        st.integers(0, (1 << 8 * dtype.itemsize) - 1),
        st.integers(0, 3),
        st.integers(dtype.top - 3, dtype.top + 1),
    )
    patterns = data.draw(st.lists(pattern, min_size=1, max_size=2 * WIRE_BLOCK // 3))
    check_bound(codec, dtype, np.array(patterns, dtype.bits).view(dtype.storage))


@pytest.mark.parametrize("codec", BLOCKS, ids=str)
@pytest.mark.parametrize("strange", [[], [np.inf]])
def test_the_bounds_of_blocks_are_nearly_reached(codec: Codec, strange: list[float]) -> None:
    largest = np.float32(1.001)  # of int4, whose scale has 8 bits, close to where it is rounded up farthest
    values = np.linspace(-1, 1, 100 * WIRE_BLOCK).astype(np.float32).reshape(-1, codec.block)
    values[:, 0] = largest
    values[:, 1 : 1 + len(strange)] = strange
    flat = values.reshape(-1)
    back = plain(FLOAT32, through(codec, flat, FLOAT32))
    finite = np.isfinite(flat)
    worst = np.abs(back[finite] - flat[finite]).max()
    bound = codec.bound(float(largest), FLOAT32, finite=not strange)
    assert 0.97 * bound < worst <= bound


def test_the_largest_16_bit_numbers_stay_finite_in_int4() -> None:
    for dtype, largest in ((FLOAT16, 65504.0), (BFLOAT16, (2 - 2.0**-7) * 2.0**127), (FLOAT32, 3.4028234663852886e38)):
        values = of(dtype, [largest, -largest, largest / 2])
        assert plain(dtype, through(INT4_WIRE, values, dtype)).tolist()[:2] == [largest, -largest]


def test_int4_encodes_what_it_decoded_to_the_same_bytes() -> None:
    rng = np.random.default_rng(9)
    for exponent in (-120, -60, 0, 100, 124):
        values = (rng.uniform(-2, 2, 5 * WIRE_BLOCK + 3) * 2.0**exponent).astype(np.float32)
        values[::64] = 2.0**exponent  # no block has a smaller largest
        values[[70, 71, 72]] = [np.inf, -np.inf, np.nan]
        wire = encoded(INT4_WIRE, values, FLOAT32)
        again = encoded(INT4_WIRE, decoded(INT4_WIRE, wire, FLOAT32, values.size), FLOAT32)
        assert again.tobytes() == wire.tobytes()


def test_bfloat16_is_the_nearest_and_overflows_to_infinity() -> None:
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.3961775e38, 3.396e38, -0.0], np.float32)
    assert through(BFLOAT16_WIRE, values, FLOAT32).tolist()[:3] == [1, 1 + 2.0**-6, np.inf]
    assert np.signbit(through(BFLOAT16_WIRE, values, FLOAT32)[4])
    assert through(BFLOAT16_WIRE, np.array([1e300, -1e300]), FLOAT64).tolist() == [np.inf, -np.inf]


# ---------------------------------------------------------------------------------------------------------------------
# Special values


@pytest.mark.parametrize(("codec", "dtype"), SUPPORTED, ids=IDS)
def test_infinities_and_nan_come_out_and_spoil_no_neighbour(codec: Codec, dtype: DType) -> None:
    ordinary = np.sin(np.arange(2 * WIRE_BLOCK))
    values = ordinary.copy()
    values[[3, 40, 41, 300]] = [np.inf, -np.inf, np.nan, -np.nan]
    result = through(codec, of(dtype, values), dtype)
    numbers = plain(dtype, result)
    assert numbers[3] == np.inf
    assert numbers[40] == -np.inf
    assert result.view(dtype.bits)[41] == result.view(dtype.bits)[300] == dtype.nan
    others = np.delete(np.arange(2 * WIRE_BLOCK), [3, 40, 41, 300])
    if codec is INT4_WIRE:  # its neighbours have six levels for seven
        others = others[(others // 64 != 0) & (others // 64 != 300 // 64)]
        check_bound(codec, dtype, of(dtype, values))
    np.testing.assert_array_equal(numbers[others], plain(dtype, through(codec, of(dtype, ordinary), dtype))[others])


@pytest.mark.parametrize("codec", BLOCKS, ids=str)
def test_blocks_of_zeros_and_of_nothing_finite(codec: Codec) -> None:
    zeros = np.zeros(WIRE_BLOCK, np.float32)
    assert through(codec, -zeros, FLOAT32).tobytes() == zeros.tobytes()
    nothing = np.full(WIRE_BLOCK, np.inf, np.float32)
    assert through(codec, nothing, FLOAT32).tobytes() == nothing.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# Bits


def test_bytes_are_the_ones_they_always_were() -> None:
    """Golden, so that ranks with different versions agree, or it is known that they do not."""
    values = ((np.arange(1000) * 7919 % 2003 - 1001) / np.float32(4096)).astype(np.float32) / np.float32(3)
    found = [hashlib.sha256(encoded(codec, values, FLOAT32).tobytes()).hexdigest()[:16] for codec in CODECS]
    assert found == ["69689598a56b265f", "50a2b563104082d9", "f8b341ed2d2e2385"]
    numbers = np.array([1, -0.5, 0.26, np.inf], np.float32)
    assert encoded(INT8_WIRE, numbers, FLOAT32)[4:8].view(np.int8).tolist() == [126, -63, 33, 127]
    tiny = encoded(INT4_WIRE, numbers, FLOAT32)
    # A sixth rounded up to bfloat16, with the sign that tells of the infinity; in the low halves 6, -3, 2, 7.
    assert tiny[:2].view(np.uint16).tolist() == [0x8000 | 0x3E2B]
    assert [byte & 15 for byte in tiny[2:6].tolist()] == [6, -3 & 15, 2, 7]
    assert not tiny[6:].any()


@pytest.mark.parametrize("largest", [1.0, 3.0, 0.7, 1e-39, 3e38])
def test_a_scale_is_rounded_up_so_that_no_code_exceeds_126(largest: float) -> None:
    values = np.array([largest, -largest / 2], np.float32)
    wire = encoded(INT8_WIRE, values, FLOAT32)
    scale = wire[:4].view(np.float32)[0]
    # As a float64 the quotient is itself rounded.
    assert Fraction(float(scale)) >= Fraction(float(values[0]) / 126)
    assert Fraction(float(np.nextafter(scale, np.float32(0)))) < Fraction(float(values[0]) / 126)
    assert wire[4:6].view(np.int8).tolist() == [126, -63]


@pytest.mark.parametrize(("codec", "dtype"), SUPPORTED, ids=IDS)
def test_any_cut_at_blocks_gives_the_same_values(codec: Codec, dtype: DType) -> None:
    values = of(dtype, np.random.default_rng(2).standard_normal(150 * WIRE_BLOCK + 31))
    whole = through(codec, values, dtype)
    for start, stop in [(0, 1), (1, 3), (2, 149), (63, 66), (64, 151)]:  # of 256 numbers, a multiple of every block
        piece = slice(start * WIRE_BLOCK, stop * WIRE_BLOCK)
        assert through(codec, values[piece], dtype).tobytes() == whole[piece].tobytes()


def test_complex_numbers_are_their_parts() -> None:
    parts = np.random.default_rng(3).standard_normal(700).astype(np.float32)
    for codec in CODECS:
        numbers = parts.view(np.complex64)
        assert codec.wire_bytes(350, COMPLEX64) == codec.wire_bytes(700, FLOAT32)
        assert encoded(codec, numbers, COMPLEX64).tobytes() == encoded(codec, parts, FLOAT32).tobytes()
        assert through(codec, numbers, COMPLEX64).tobytes() == through(codec, parts, FLOAT32).tobytes()


@pytest.mark.parametrize("codec", [*BLOCKS, codec_of("topk:1/7")], ids=str)
def test_any_bytes_decode_without_a_warning(codec: Codec) -> None:
    wire = np.random.default_rng(4).integers(0, 256, codec.wire_bytes(5000, FLOAT32), dtype=np.uint8)
    result = decoded(codec, wire, FLOAT32, 5000)
    assert decoded(codec, wire, FLOAT32, 5000).tobytes() == result.tobytes()
    assert (result.view(np.uint32)[np.isnan(result)] == FLOAT32.nan).all()


@pytest.mark.parametrize(("codec", "dtype"), SUPPORTED, ids=IDS)
def test_sizes(codec: Codec, dtype: DType) -> None:
    for size in (0, 1, 255, 256, 257, 1024):
        whole = {BFLOAT16_WIRE: 2 * size, INT8_WIRE: 260 * -(-size // 256), INT4_WIRE: 34 * -(-size // 64)}
        expected = whole[codec]
        assert codec.wire_bytes(size, dtype) == expected
        assert through(codec, of(dtype, [0.5] * size), dtype).size == size
    assert codec.wire_bytes(1 << 20, dtype) < (1 << 20) * dtype.itemsize


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def test_types_that_would_not_shrink_or_have_no_sense_are_refused() -> None:
    for codec in CODECS:
        allowed = set(codec.parts)
        for dtype in DTYPES.values():
            if (dtype.part or dtype) not in allowed:
                with pytest.raises(LocalError, match=f"{dtype} cannot travel as {codec.name}; that takes float32"):
                    codec.wire_bytes(1, dtype)
    assert FLOAT16 not in BFLOAT16_WIRE.parts
    assert BFLOAT16 not in BFLOAT16_WIRE.parts


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    assert codec_of("int8") is INT8_WIRE
    assert codec_of("topk:1/64") is codec_of("topk:1/64")
    known = "use one of bfloat16, int8, int4, topk:1/n or topk-2bit:1/n with n from 2 to 4096"
    for name in ("fp4", "topk", "topk:1/1", "topk:1/4097", "topk:1/064", "topk:2/64", "topk:1/64 ", "topk:1/\u0664", 8):
        with pytest.raises(LocalError, match=f"is not known; {known}"):
            codec_of(name)


def test_memory_of_another_size_or_type_is_refused() -> None:
    values = np.ones(4, np.float32)
    for wire in (np.empty(7, np.uint8), np.empty(260, np.int8), np.empty((2, 130), np.uint8)):
        with pytest.raises(LocalError, match="4 elements of float32 are 260 bytes as int8"):
            INT8_WIRE.encode(values, FLOAT32, wire)
        with pytest.raises(LocalError, match="4 elements of float32 are 260 bytes as int8"):
            INT8_WIRE.decode(wire, FLOAT32, values)
    with pytest.raises(LocalError, match=r"shape \(2, 2\) and float32 are not flat float32"):
        INT8_WIRE.encode(values.reshape(2, 2), FLOAT32, np.empty(260, np.uint8))
    with pytest.raises(LocalError, match="are not flat float32"):
        INT8_WIRE.encode(values.astype(np.float64), FLOAT32, np.empty(260, np.uint8))
