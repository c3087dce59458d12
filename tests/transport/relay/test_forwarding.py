"""The sockets of a relay and of those who use it, with nothing between them but this test."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from quicoll_transport.errors import AddressError
from quicoll_transport.net.runs import DatagramRun, apart, joined
from quicoll_transport.net.trouble import Trouble
from quicoll_transport.relay.detour import DetourIO
from quicoll_transport.relay.forwarding import ForwardingIO
from quicoll_transport.relay.table import RelayLimits, RelayTable
from quicoll_transport.relay.wire import HEAD_BYTES, MOST_PASSED, head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll_transport.net.addresses import Address

A, B, RELAY, OTHER = ("192.0.2.1", 1), ("192.0.2.2", 2), ("192.0.2.9", 9), ("198.51.100.1", 5)


class Inner:
    """A socket: what was sent stays here; `get` is what arrives."""

    def __init__(self, address: Address) -> None:
        self.local_address = address
        self.sent: list[tuple[bytes, Address]] = []
        self.runs: list[DatagramRun] = []
        self.closed = False

    def start(self, on_runs: Any, on_unreachable: Any) -> None:
        self.on_runs, self.on_unreachable = on_runs, on_unreachable

    def send(self, runs: Sequence[DatagramRun]) -> None:
        self.runs += runs
        self.sent += apart(runs)

    async def resolve(self, host: str, port: int) -> list[Address]:
        raise AddressError(host)

    def close(self) -> None:
        self.closed = True

    def get(self, *datagrams: tuple[bytes, Address]) -> None:
        self.on_runs(joined(datagrams))


class Got:
    """What an endpoint over a socket gets."""

    def __init__(self, io: Any) -> None:
        self.data: list[tuple[bytes, Address]] = []
        self.troubles: list[tuple[Address, Trouble]] = []
        io.start(lambda runs: self.data.extend(apart(runs)), lambda *told: self.troubles.append(told))


def relay() -> tuple[Inner, RelayTable, Got]:
    inner = Inner(RELAY)
    table = RelayTable(RelayLimits(), place_of={"a": A, "b": B}.get, draw=lambda size: len(table).to_bytes(size, "big"))
    return inner, table, Got(ForwardingIO(inner, table, now_ns=lambda: 0))


def test_a_relay_passes_on_what_is_under_a_label_and_gets_the_rest_itself() -> None:
    inner, table, got = relay()
    ab, ba = table.ask("a", "b"), table.ask("b", "a")
    assert ab is not None
    assert ba is not None
    inner.get((b"own1", A), (head(ab) + b"one", A), (head(ab) + b"two", A), (b"own2", B), (head(ab) + b"spoofed", B))
    assert inner.sent == [(head(ba) + b"one", B), (head(ba) + b"two", B)]
    assert got.data == [(b"own1", A), (b"own2", B)]


def test_what_comes_in_one_run_is_told_apart() -> None:
    inner, table, got = relay()
    ab, ba = table.ask("a", "b"), table.ask("b", "a")
    assert ab is not None
    assert ba is not None
    same = [head(ab) + b"12345", b"\x40" + bytes(13), head(ab) + b"67890", b"\xc0" + bytes(5)]
    inner.get(*((data, A) for data in same))
    assert inner.sent == [(head(ba) + b"12345", B), (head(ba) + b"67890", B)]
    assert got.data == [(same[1], A), (same[3], A)]
    assert len(inner.runs) == 1, "and goes on in one"


def test_a_relay_that_nobody_has_asked_touches_nothing() -> None:
    inner, _, got = relay()
    inner.get((head(bytes(8)) + b"x", A))
    assert inner.sent == []
    assert got.data == [(head(bytes(8)) + b"x", A)], "its endpoint knows no such connection"


def detour() -> tuple[Inner, DetourIO, Got, asyncio.AbstractEventLoop]:
    inner, loop = Inner(A), asyncio.get_running_loop()
    io = DetourIO(inner, loop=loop)
    return inner, io, Got(io), loop


async def test_what_is_sent_to_a_way_goes_to_its_relay_and_what_comes_from_there_comes_from_the_way() -> None:
    inner, io, got, _ = detour()
    io.send(joined([(b"before", B)]))
    way = io.open(b"L" * 8, RELAY)
    assert io.open(b"L" * 8, RELAY) == way
    io.send(joined([(b"direct", B), (b"one", way), (b"two", way), (b"t", way)]))
    assert inner.sent[1:] == [(b"direct", B), *((head(b"L" * 8) + data, RELAY) for data in (b"one", b"two", b"t"))]
    assert len(inner.runs) == 3, "a run stays one"
    inner.get((b"own", RELAY), (head(b"L" * 8) + b"back", RELAY), (b"direct", B))
    assert got.data == [(b"own", RELAY), (b"back", way), (b"direct", B)]


async def test_what_comes_under_a_label_from_elsewhere_or_under_no_label_of_ours_is_lost() -> None:
    inner, io, got, _ = detour()
    io.open(b"L" * 8, RELAY)
    io.open(b"M" * 8, OTHER)
    inner.get((head(b"L" * 8) + b"x", OTHER), (head(b"N" * 8) + b"x", RELAY))
    assert got.data == []


async def test_a_way_that_is_shut_leads_nowhere_and_the_next_one_has_another_address() -> None:
    inner, io, got, _ = detour()
    way = io.open(b"L" * 8, RELAY)
    io.shut(way)
    io.shut(way)
    io.send(joined([(b"x", way)]))
    inner.get((head(b"L" * 8) + b"x", RELAY))
    assert inner.sent == []
    assert [data for data, address in got.data if address == way] == []
    assert io.open(b"L" * 8, RELAY) != way


async def test_a_datagram_that_leaves_no_room_for_its_label_is_lost_and_its_endpoint_hears_what_passes() -> None:
    inner, io, got, _ = detour()
    way = io.open(b"L" * 8, RELAY)
    io.send(joined([(bytes(MOST_PASSED + 1), way), (bytes(MOST_PASSED), way)]))
    assert [len(data) for data, _ in inner.sent] == [MOST_PASSED + HEAD_BYTES]
    assert got.troubles == [], "not from within the call"
    await asyncio.sleep(0)
    assert [(address, trouble.limit, trouble.refused) for address, trouble in got.troubles] == [
        (way, MOST_PASSED, False)
    ]


async def test_what_is_wrong_with_a_relay_is_wrong_with_the_ways_through_it_but_says_nothing_of_the_peers() -> None:
    inner, io, got, _ = detour()
    way = io.open(b"L" * 8, RELAY)
    io.open(b"M" * 8, OTHER)
    inner.on_unreachable(RELAY, Trouble())
    assert [(address, trouble.refused) for address, trouble in got.troubles] == [(way, False), (RELAY, True)]
    assert got.troubles[0][1].cause == f"its relay: {Trouble().cause}"
    inner.on_unreachable(RELAY, Trouble("too long", refused=False, limit=1300))
    inner.on_unreachable(RELAY, Trouble("too long", refused=False, limit=1200))
    assert [trouble.limit for address, trouble in got.troubles[2:] if address == way] == [1300 - HEAD_BYTES, 1200]


async def test_both_close_what_they_stand_over_and_ask_it_for_names() -> None:
    inner, io, got, _ = detour()
    relayed, _, other = relay()
    for one, over in (
        (io, inner),
        (
            ForwardingIO(relayed, RelayTable(RelayLimits(), place_of=lambda _: None, draw=bytes), now_ns=lambda: 0),
            relayed,
        ),
    ):
        assert one.local_address == over.local_address
        with pytest.raises(AddressError):
            await one.resolve("name", 1)
        one.close()
        assert over.closed
    inner.get((b"late", B))
    assert got.data == other.data == []
