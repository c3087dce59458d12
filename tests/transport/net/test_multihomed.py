"""Several sockets of one host as one: by which of them a datagram leaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from quicoll_transport.errors import AddressError, ConfigurationError
from quicoll_transport.net import multihomed
from quicoll_transport.net.multihomed import MultihomedIO, bound_io
from quicoll_transport.net.runs import apart, joined
from quicoll_transport.net.udp import UdpSocket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun

PEER, PEER_2, PEER_3, STRANGER = [(f"192.0.2.{number}", 9) for number in range(1, 5)]


class Noted:
    """A socket that notes what it is asked for."""

    def __init__(self, address: Address) -> None:
        self.local_address = address
        self.sent: list[tuple[bytes, Address]] = []
        self.closed = False

    def start(self, on_runs: Any, on_unreachable: Any) -> None:
        self.heard, self.unreachable = on_runs, on_unreachable

    def send(self, runs: Sequence[DatagramRun]) -> None:
        self.sent += apart(runs)

    async def resolve(self, host: str, port: int) -> list[Address]:
        if self.local_address[0] == "10.0.0.1":
            raise AddressError("not of this family")
        return [(host, port)]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def sockets() -> tuple[Noted, Noted]:
    return Noted(("10.0.0.1", 5)), Noted(("10.1.0.1", 6))


@pytest.fixture
def io(sockets: tuple[Noted, Noted]) -> MultihomedIO:
    made = MultihomedIO(sockets)
    made.start(lambda runs: None, lambda address, trouble: None)
    return made


def send(io: MultihomedIO, *addresses: Address) -> None:
    io.send(joined([(bytes([number]), address) for number, address in enumerate(addresses)]))


def test_paths_join_addresses_of_one_number(io: MultihomedIO, sockets: tuple[Noted, Noted]) -> None:
    io.pair([PEER, PEER_2, PEER_3, ("a-name", 9)])
    send(io, PEER_2, PEER, PEER_3, PEER_2)
    assert sockets[0].sent == [(b"\x01", PEER), (b"\x02", PEER_3)]
    assert sockets[1].sent == [(b"\x00", PEER_2), (b"\x03", PEER_2)]


def test_an_answer_leaves_by_the_address_that_was_asked(io: MultihomedIO, sockets: tuple[Noted, Noted]) -> None:
    send(io, STRANGER)
    sockets[1].heard(joined([(b"x", STRANGER)]))
    send(io, STRANGER)
    sockets[0].heard(joined([(b"x", STRANGER)]))
    send(io, STRANGER)
    assert [len(each.sent) for each in sockets] == [2, 1]


def test_who_sends_from_an_address_that_is_not_its_own_changes_no_path(
    io: MultihomedIO, sockets: tuple[Noted, Noted]
) -> None:
    io.pair([PEER, PEER_2])
    sockets[0].heard(joined([(b"x", PEER_2)]))
    send(io, PEER_2)
    assert sockets[0].sent == []
    assert len(sockets[1].sent) == 1


def test_what_strangers_send_takes_bounded_memory(
    io: MultihomedIO, sockets: tuple[Noted, Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multihomed, "_HEARD", 3)
    for number in range(10):
        sockets[1].heard(joined([(b"x", ("198.51.100.1", number))]))
    assert len(io._heard) == 3
    send(io, ("198.51.100.1", 9), ("198.51.100.1", 0))
    assert [address[1] for _, address in sockets[1].sent] == [9]


def test_an_address_of_another_family_is_reached_by_a_socket_of_it() -> None:
    v4, v6 = Noted(("10.0.0.1", 5)), Noted(("2001:db8::1", 5, 0, 0))
    io = MultihomedIO([v4, v6])
    io.start(lambda runs: None, lambda address, trouble: None)
    send(io, ("2001:db8::9", 1, 0, 0), PEER)
    assert len(v4.sent) == len(v6.sent) == 1


async def test_a_name_is_looked_up_by_whoever_can(io: MultihomedIO) -> None:
    assert await io.resolve("name", 7) == [("name", 7)]


def test_closing_closes_all(io: MultihomedIO, sockets: tuple[Noted, Noted]) -> None:
    assert io.local_address == ("10.0.0.1", 5)
    assert io.local_addresses == (("10.0.0.1", 5), ("10.1.0.1", 6))
    io.close()
    assert all(each.closed for each in sockets)
    with pytest.raises(ConfigurationError, match="one address at least"):
        MultihomedIO([])


@pytest.mark.loopback
async def test_an_address_that_cannot_be_bound_leaves_none_bound() -> None:
    loop = asyncio.get_running_loop()
    one = bound_io([("127.0.0.1", 0)], loop=loop)
    assert isinstance(one, UdpSocket)
    port = one.local_address[1]
    one.close()
    with pytest.raises(AddressError, match=r"192\.0\.2\.1"):
        bound_io([("127.0.0.1", port), ("192.0.2.1", 0)], loop=loop)
    both = bound_io([("127.0.0.1", port), ("127.0.0.2", port)], loop=loop)
    both.close()
