"""Where datagrams lead, read from a run at once."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic.terms import destination_cid, destinations

ADDRESS = ("192.0.2.1", 1)
SHORT, LONG = b"\x40", b"\xc0\x00\x00\x00\x01\x08"
ONE, OTHER = b"12345678", b"12345679"

datagram = st.builds(
    lambda first, flags, cid, rest: bytes([first[0] | flags]) + first[1:] + cid + rest,
    st.sampled_from([SHORT, LONG, LONG[:5] + b"\x07", b"\xc0"]),
    st.sampled_from([0, 1, 0x3F]),
    st.sampled_from([ONE, OTHER]),
    st.binary(min_size=20, max_size=20),
)


def run_of(data: list[bytes], size: int) -> DatagramRun:
    """Cut or filled up to `size` all but the last, as a run has them."""
    even = [each[:size].ljust(size, b"\0") for each in data[:-1]]
    return DatagramRun(memoryview(bytearray().join([*even, data[-1][:size]])), size, ADDRESS)


def shown(parts: list[tuple[bytes | None, DatagramRun]]) -> list[tuple[bytes | None, list[bytes]]]:
    return [(cid, [bytes(each) for each in part.datagrams()]) for cid, part in parts]


@given(st.lists(datagram, min_size=1, max_size=12), st.sampled_from([1, 5, 9, 13, 14, 30]))
def test_a_run_leads_where_its_datagrams_lead_one_by_one(data: list[bytes], size: int) -> None:
    run = run_of(data, size)
    singly = [(each[0] & 0x80, destination_cid(each), each) for each in map(bytes, run.datagrams())]
    expected = [(key[1], [each for *_, each in group]) for key, group in groupby(singly, key=lambda one: one[:2])]
    assert shown(destinations(run)) == expected


@pytest.mark.parametrize("form", [SHORT, LONG])
def test_datagrams_of_one_connection_stay_one_run(form: bytes) -> None:
    run = run_of([form + ONE + bytes([n] * 50) for n in range(100)] + [form + ONE + b"end"], 60)
    ((cid, part),) = destinations(run)
    assert cid == ONE
    assert part is run


def test_a_run_is_split_where_its_form_or_its_connection_changes() -> None:
    cids = [ONE, ONE, OTHER, ONE]
    parts = destinations(run_of([SHORT + cid + bytes(20) for cid in cids] + [LONG + ONE + bytes(20)], 29))
    assert [(cid, len(part)) for cid, part in parts] == [(ONE, 2), (OTHER, 1), (ONE, 1), (ONE, 1)]


def test_a_last_datagram_too_short_for_an_id_is_for_nobody() -> None:
    parts = destinations(run_of([SHORT + ONE + bytes(20)] * 3 + [SHORT + b"123"], 29))
    assert [(cid, len(part)) for cid, part in parts] == [(ONE, 3), (None, 1)]


def test_the_same_bytes_behind_another_header_form_lead_elsewhere() -> None:
    parts = destinations(run_of([SHORT + ONE + bytes(20), b"\xc0" + ONE + bytes(20), SHORT + ONE + bytes(20)], 29))
    assert [(cid, len(part)) for cid, part in parts] == [(ONE, 1), (None, 1), (ONE, 1)]
