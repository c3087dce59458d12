"""Top-k in two bits: what comes out, against a scalar reference, and what is lost."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.local.large import canonical_tree
from quicoll.numerics.buffers import source
from quicoll.numerics.bundle import Bundle, bundle
from quicoll.numerics.codecs import codec_of
from quicoll.numerics.dtypes import BFLOAT16, FLOAT32, FLOAT64, Array, DType
from quicoll.numerics.encoding import encoding_for
from quicoll.numerics.feedback import ErrorFeedback
from quicoll.numerics.reduce import ReduceOp
from quicoll.numerics.topk import TOP_K_CHUNK


def through(values: Array, n: int, dtype: DType = FLOAT32) -> Array:
    codec = codec_of(f"topk-2bit:1/{n}")
    wire = np.full(codec.wire_bytes(values.size, dtype), 0xAA, np.uint8)
    codec.encode(values, dtype, wire)
    out = np.full(values.size, 7, dtype.storage)
    codec.decode(wire, dtype, out)
    return out


def drawn(size: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 2.0 ** rng.integers(-3, 3, size)).astype(np.float32)


def rounded_down(size: float) -> float:
    """To bfloat16, towards zero."""
    size = min(size, (2 - 2.0**-7) * 2.0**127)
    if size < 2.0**-126:
        return 0.0
    mantissa, exponent = np.frexp(size)
    return float(np.ldexp(np.floor(np.ldexp(mantissa, 8)), exponent - 8))


def reference(values: Array, n: int) -> Array:
    """One number after the other, as the module's head has it."""
    out = np.zeros(values.size, np.float32)
    for start in range(0, values.size, TOP_K_CHUNK):
        chunk = [float(each) for each in values[start : start + TOP_K_CHUNK]]
        kept = -(-len(chunk) // n)
        places = sorted(range(len(chunk)), key=lambda place: (-abs(chunk[place]), place))[:kept]
        high = kept // 4
        top, rest = (rounded_down(abs(chunk[places[at]])) for at in (high // 2, (high + kept) // 2))
        for place in places:
            size = top if 2 * abs(chunk[place]) > top + rest else rest
            out[start + place] = np.copysign(size, chunk[place])
    return out


@pytest.mark.parametrize("n", [2, 3, 16, 100, 4096])
@pytest.mark.parametrize("size", [0, 1, 2, 63, 65, 4095, 4096, 3 * 4096 + 1000])
def test_what_comes_out_is_what_a_scalar_reference_gives(n: int, size: int) -> None:
    values = drawn(size)
    assert through(values, n).tobytes() == reference(values, n).tobytes()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60), st.integers(2, 50)
)
def test_any_finite_numbers_give_what_the_reference_gives_and_nothing_grows(given_values: list[float], n: int) -> None:
    values = np.array(given_values, np.float32)
    found = through(values, n)
    assert found.tobytes() == reference(values, n).tobytes()
    lost = sum((Fraction(x) - Fraction(y)) ** 2 for x, y in zip(values.tolist(), found.tolist(), strict=True))
    assert lost <= sum(Fraction(x) ** 2 for x in values.tolist())
    bound = codec_of(f"topk-2bit:1/{n}").bound(float(np.abs(values).max()), FLOAT32)
    assert np.abs(values.astype(np.float64) - found).max() <= bound


def test_of_numbers_as_they_are_found_most_of_what_top_k_keeps_is_kept() -> None:
    for seed in range(3):
        values = drawn(8 * TOP_K_CHUNK, seed)
        whole = np.sum(values.astype(np.float64) ** 2)
        short, two = (
            1 - np.sum((values - found.astype(np.float64)) ** 2) / whole
            for found in (_in_16_bits(values, 16), through(values, 16))
        )
        assert two > 0.85 * short


def _in_16_bits(values: Array, n: int) -> Array:
    codec, out = codec_of(f"topk:1/{n}"), np.empty_like(values)
    wire = np.empty(codec.wire_bytes(values.size, FLOAT32), np.uint8)
    codec.encode(values, FLOAT32, wire)
    codec.decode(wire, FLOAT32, out)
    return out


def test_what_is_fed_back_arrives_in_the_end() -> None:
    values, form = drawn(5000), encoding_for("topk-2bit:1/16", FLOAT32, ReduceOp.SUM, "default")
    residual, came = np.zeros_like(values), np.zeros(values.size)
    for rounds in range(1, 401):
        feedback = ErrorFeedback([residual], [Bundle.of(source(values))], form, apart_from=[values])
        (wire,) = feedback.encode()
        out = [np.empty_like(values)]
        form.decode_numbers(wire, out)
        feedback.commit()
        came += out[0]
        if rounds in (100, 400):
            error = np.linalg.norm(came / rounds - values) / np.linalg.norm(values)
            assert error < 12 / rounds, (rounds, error)


def test_bytes_are_the_ones_that_are_stated_and_golden() -> None:
    codec = codec_of("topk-2bit:1/16")
    assert codec.wire_bytes(TOP_K_CHUNK, FLOAT32) == 260
    assert codec.wire_bytes(1 << 20, FLOAT32) * 63 <= 4 << 20
    assert codec.wire_bytes(0, FLOAT32) == 0
    # Two of four are kept, at 1 and 3, as -8 and 2: h = 0, so both sizes are the second of the descending ones, 2.
    wire = np.empty(codec_of("topk-2bit:1/2").wire_bytes(4, FLOAT32), np.uint8)
    codec_of("topk-2bit:1/2").encode(np.float32([0, -8, 1, 2]), FLOAT32, wire)
    assert wire[:4].view(np.uint16).tolist() == [0x4100, 0x4000]
    assert wire[4:].tolist() == [0b0011, 0b0101, 0b11]


def test_overflows_are_seen() -> None:
    for strange in (np.inf, -np.inf, np.nan):
        values = drawn(2 * TOP_K_CHUNK)
        values[17] = strange
        found = through(values, 64)
        assert np.count_nonzero(np.isnan(found[:TOP_K_CHUNK])) == 64
        assert (found[np.isnan(found)].view(np.uint32) == FLOAT32.nan).all()
        assert np.isfinite(found[TOP_K_CHUNK:]).all()


@pytest.mark.parametrize("dtype", [FLOAT64, BFLOAT16], ids=str)
def test_other_types_are_kept_by_the_same_rule(dtype: DType) -> None:
    short = drawn(5000).view(np.uint32) >> 16  # numbers that bfloat16 holds
    single = (short << 16).astype(np.uint32).view(np.float32)
    values = single.astype(np.float64) if dtype is FLOAT64 else short.astype(np.uint16)
    expected, found = through(single, 16), through(values, 16, dtype)
    assert found.tolist() == (expected.tolist() if dtype is FLOAT64 else (expected.view(np.uint32) >> 16).tolist())


def test_any_cut_between_chunks_gives_the_same_values() -> None:
    values = drawn(20 * TOP_K_CHUNK + 77)
    whole = through(values, 16)
    for start, stop in [(0, 1), (1, 3), (2, 20), (7, 21)]:
        piece = slice(start * TOP_K_CHUNK, stop * TOP_K_CHUNK)
        assert through(values[piece], 16).tobytes() == whole[piece].tobytes()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_bytes_stand_for_some_numbers(data: st.DataObject) -> None:
    n, size = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 100))
    codec = codec_of(f"topk-2bit:1/{n}")
    nbytes = codec.wire_bytes(size, FLOAT32)
    wire = np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8)
    out = np.empty(size, np.float32)
    codec.decode(wire, FLOAT32, out)
    assert np.count_nonzero(out) <= -(-size // n)


def test_a_reduction_is_that_of_the_decoded_leaves_in_canonical_order() -> None:
    leaves = [drawn(9000, seed) for seed in range(3)]
    form = encoding_for("topk-2bit:1/16", FLOAT32, ReduceOp.SUM, "default")
    out = np.empty(9000, np.float32)
    form.reduce(canonical_tree(3), [form.encode(bundle(leaf)) for leaf in leaves], bundle(leaves[0]), ReduceOp.SUM, out)
    a, b, c = (through(leaf, 16) for leaf in leaves)
    assert out.tobytes() == ((a + b) + c).tobytes()
