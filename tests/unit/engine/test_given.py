"""What ranks give in their announcements: sealed where it is copied, compared where it is used."""

from __future__ import annotations

import pytest

from quicoll.engine.given import SEAL_BYTES, open_given, seal_given
from quicoll.local.small import Spoiled


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4])
def test_what_is_sealed_comes_out_as_it_was(data: bytes) -> None:
    assert len(seal_given(data)) == len(data) + SEAL_BYTES
    assert open_given(seal_given(data), len(data), 1) == data


@pytest.mark.parametrize("bit", [0, 31, 32, 95])
def test_a_flipped_bit_is_found_wherever_it_is(bit: int) -> None:
    given = bytearray(seal_given(b"four"))
    given[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Spoiled, match="differs from its checksum") as raised:
        open_given(bytes(given), 4, 3)
    assert (raised.value.rank, raised.value.bits) == (3, True)


@pytest.mark.parametrize("given", [b"", seal_given(b"one"), seal_given(b"five!"), b"short"])
def test_another_size_than_the_calls_is_not_taken_for_spoiled_bits(given: bytes) -> None:
    with pytest.raises(Spoiled, match="where") as raised:
        open_given(given, 4, 2)
    assert (raised.value.rank, raised.value.bits) == (2, False)
