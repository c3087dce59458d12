"""Address translators of the simulated network: what each kind maps, lets in, and forgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from sim_node import SECOND, Node, pass_time

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.net.runs import apart, joined
from quicoll_transport.sim import NatKind, World

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun

FULL, RESTRICTED = NatKind.FULL_CONE, NatKind.RESTRICTED_CONE
PORTS, SYMMETRIC = NatKind.PORT_RESTRICTED_CONE, NatKind.SYMMETRIC


class Seeing(Node):
    """A node that keeps where datagrams come from."""

    def __init__(self, world: World, name: str, port: int = 7) -> None:
        self.sources: list[Address] = []
        super().__init__(world, name, port)

    def _runs(self, runs: list[DatagramRun]) -> None:
        runs = list(runs)
        self.sources += [address for _, address in apart(runs)]
        super()._runs(runs)

    def send_to(self, address: Address, data: bytes = b"x") -> None:
        self.socket.send(joined([(data, address)]))


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as made:
        yield made


def behind(world: World, kind: NatKind, **options: int) -> tuple[Seeing, Seeing, Seeing]:
    """A host behind a translator, and two others, of which the first has heard from it."""
    inside, first, second = (Seeing(world, name) for name in ("inside", "first", "second"))
    world.network.add_nat(kind, "inside", **options)
    inside.send(first, b"out")
    pass_time(world)
    return inside, first, second


@pytest.mark.parametrize("kind", list(NatKind))
def test_what_goes_out_comes_from_the_public_address_and_an_answer_comes_in(world: World, kind: NatKind) -> None:
    inside, first, _ = behind(world, kind)
    seen = first.sources[0]
    assert seen[0] == "198.18.0.1" != inside.socket.local_address[0]
    first.send_to(seen, b"answer")
    pass_time(world)
    assert inside.data == [b"answer"]
    assert inside.sources == [first.socket.local_address]


@pytest.mark.parametrize(("kind", "same"), [(FULL, True), (RESTRICTED, True), (PORTS, True), (SYMMETRIC, False)])
def test_a_symmetric_one_alone_shows_each_destination_another_port(world: World, kind: NatKind, same: bool) -> None:
    inside, first, second = behind(world, kind)
    inside.send(second, b"out")
    pass_time(world)
    assert (first.sources == second.sources) is same


@pytest.mark.parametrize(
    ("kind", "stranger", "other_port"),
    [(FULL, True, True), (RESTRICTED, False, True), (PORTS, False, False), (SYMMETRIC, False, False)],
)
def test_each_kind_lets_in_what_its_name_says(world: World, kind: NatKind, stranger: bool, other_port: bool) -> None:
    inside, first, second = behind(world, kind)
    seen = first.sources[0]
    second.send_to(seen, b"stranger")
    another = type(first.socket)(first.host.loop, 8) if first.host.loop is not None else None
    assert another is not None
    another.send(joined([(b"port", seen)]))
    pass_time(world)
    assert inside.data == [b"stranger"] * stranger + [b"port"] * other_port
    assert world.network.injected.get("nat", 0) == (not stranger) + (not other_port)


@pytest.mark.parametrize("kind", [RESTRICTED, PORTS])
def test_who_was_sent_something_first_is_let_in_at_the_port_that_another_sees(world: World, kind: NatKind) -> None:
    inside, first, second = behind(world, kind)
    inside.send(second, b"opener")
    second.send_to(first.sources[0], b"in")
    pass_time(world)
    assert inside.data == [b"in"]


def test_a_mapping_ends_when_nothing_goes_out_by_it_and_the_next_has_another_port(world: World) -> None:
    inside, first, _ = behind(world, FULL, lifetime_ns=10 * SECOND)
    pass_time(world, 8 * SECOND)
    first.send_to(first.sources[0], b"in time, and keeps nothing alive")
    pass_time(world, 2 * SECOND)
    first.send_to(first.sources[0], b"too late")
    pass_time(world)
    assert inside.data == [b"in time, and keeps nothing alive"]
    inside.send(first, b"out")
    pass_time(world)
    assert first.sources[0][0] == first.sources[1][0]
    assert first.sources[0][1] != first.sources[1][1]
    nat = inside.socket.interface.nat
    assert nat is not None
    assert nat.expired == 1


def test_what_goes_out_keeps_its_mapping(world: World) -> None:
    inside, first, _ = behind(world, PORTS, lifetime_ns=10 * SECOND)
    for _ in range(5):
        pass_time(world, 8 * SECOND)
        inside.send(first, b"out")
    pass_time(world)
    assert len(set(first.sources)) == 1


def test_one_that_forgets_gives_other_ports_and_lets_nothing_in(world: World) -> None:
    inside, first, _ = behind(world, FULL)
    nat = inside.host.interface.nat
    assert nat is not None
    nat.forget()
    first.send_to(first.sources[0], b"lost")
    pass_time(world)
    inside.send(first, b"out")
    pass_time(world)
    assert inside.data == []
    assert first.sources[0] != first.sources[1]


def test_hosts_behind_one_reach_each_other_by_their_own_addresses_and_others_do_not(world: World) -> None:
    a, b, outside = (Seeing(world, name) for name in ("a", "b", "outside"))
    world.network.add_nat(FULL, "a", "b")
    a.send(b, b"inside")
    outside.send(b, b"from outside")
    a.send(outside, b"out")
    pass_time(world)
    assert b.data == [b"inside"]
    assert b.sources == [a.socket.local_address]
    a.send_to(outside.sources[0], b"turned back")
    pass_time(world)
    assert a.data == b.data[1:] == []
    assert world.network.injected == {"nat": 2}


def test_a_sender_behind_one_hears_that_nothing_listens_there(world: World) -> None:
    inside, first, _ = behind(world, PORTS)
    address = (first.socket.local_address[0], 99)
    inside.send_to(address)
    pass_time(world)
    assert [(told, trouble.refused) for _, told, trouble in inside.troubles] == [(address, True)]


def test_a_host_is_behind_one_at_most_and_a_mapping_lives_for_a_while(world: World) -> None:
    behind(world, FULL)
    with pytest.raises(ConfigurationError, match="inside: behind a translator already"):
        world.network.add_nat(FULL, "inside")
    with pytest.raises(ConfigurationError, match="there is no host"):
        world.network.add_nat(FULL, "nobody")
    with pytest.raises(ConfigurationError, match="lives for more"):
        world.network.add_nat(FULL, "first", lifetime_ns=0)
