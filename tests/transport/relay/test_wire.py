"""What a datagram to a relay looks like, and what stands for a way through one."""

from __future__ import annotations

import pytest

from quicoll_transport.net.addresses import canonical, format_address, is_detour
from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic.terms import DATAGRAM_BYTES, destinations
from quicoll_transport.relay.wire import HEAD_BYTES, MOST_PASSED, detour_address, head, label_of

LABEL = bytes(range(8))


def test_a_label_is_read_as_it_was_written() -> None:
    data = head(LABEL) + b"x"
    assert len(data) == HEAD_BYTES + 1
    assert label_of(memoryview(data)) == LABEL


@pytest.mark.parametrize("data", [b"\x01", head(LABEL), b"\x00" * 20, b"\x40" + bytes(20), b"\xc0" + bytes(1200)])
def test_what_is_quic_or_has_nothing_after_its_label_is_not_passed_on(data: bytes) -> None:
    assert label_of(memoryview(data)) is None


def test_it_fits_the_datagrams_that_paths_are_taken_to_carry() -> None:
    assert MOST_PASSED + HEAD_BYTES == DATAGRAM_BYTES
    assert MOST_PASSED >= 1200


def test_ways_have_addresses_of_their_own_which_nothing_else_has() -> None:
    ways = [detour_address(number) for number in (0, 1, 255, 256, 65536, (1 << 24) - 1)]
    assert len(set(ways)) == len(ways)
    assert all(is_detour(way) and canonical(way) == way for way in ways)
    assert format_address(ways[1]) == "by relay"
    assert detour_address(1 << 24) == ways[0]
    assert not is_detour(("24.0.0.1", 1))
    assert not is_detour(("relay.example", 1))


def test_an_endpoint_that_is_no_relay_takes_it_for_nothing_that_it_would_answer() -> None:
    data = bytearray(head(LABEL) + bytes(100))
    ((_, run),) = destinations(DatagramRun(memoryview(data), len(data), ("192.0.2.1", 1)))
    assert not run.memory[0] & 0xC0, "neither a long header nor what gets a stateless reset"
