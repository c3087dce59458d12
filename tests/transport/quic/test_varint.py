"""Variable-length integers: the RFC's examples, and that reading undoes writing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic.varint import MAX_VARINT, pull, varint, varint_size

fixed = settings(derandomize=True, deadline=None, max_examples=200)
numbers = st.one_of(
    st.integers(0, MAX_VARINT), st.sampled_from([0, 63, 64, 16383, 16384, (1 << 30) - 1, 1 << 30, MAX_VARINT])
)

RFC_9000_A_1 = [
    ("c2197c5eff14e88c", 151_288_809_941_952_652),
    ("9d7f3e7d", 494_878_333),
    ("7bbd", 15_293),
    ("25", 37),
]


@pytest.mark.parametrize(("encoded", "value"), RFC_9000_A_1)
def test_the_examples_of_rfc_9000(encoded: str, value: int) -> None:
    data = bytes.fromhex(encoded)
    assert pull(data, 0) == (value, len(data))
    assert varint(value) == data


def test_a_longer_form_than_needed_is_read() -> None:
    assert pull(bytes.fromhex("4025"), 0) == (37, 2)


@fixed
@given(value=numbers, before=st.binary(max_size=3), after=st.binary(max_size=3))
def test_reading_undoes_writing_in_any_memory(value: int, before: bytes, after: bytes) -> None:
    data = before + varint(value) + after
    for memory in (data, bytearray(data), memoryview(data)):
        assert pull(memory, len(before)) == (value, len(data) - len(after))
    assert varint_size(value) == len(varint(value))


@fixed
@given(value=numbers, data=st.data())
def test_a_number_that_is_cut_short_is_an_index_error(value: int, data: st.DataObject) -> None:
    whole = varint(value)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for memory in (cut, memoryview(cut)):
        with pytest.raises(IndexError):
            pull(memory, 0)


@pytest.mark.parametrize("value", [-1, MAX_VARINT + 1, 1 << 64])
def test_what_does_not_fit_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        varint(value)
