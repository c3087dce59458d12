"""The simulated socket: its buffer, its ports, its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from datagrams import one
from sim_node import Node, numbers, pass_time

from quicoll_transport.errors import AddressError
from quicoll_transport.net.runs import apart
from quicoll_transport.sim import Conditions, SimulatedSocket, World

MS = 1_000_000


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as made:
        made.network.set_conditions(Conditions(latency_ns=MS))
        yield made


@pytest.fixture
def nodes(world: World) -> tuple[Node, Node, Node]:
    return Node(world, "a"), Node(world, "b"), Node(world, "c")


def test_a_paused_process_s_buffer_fills_and_then_loses(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    b.host.pause()
    a.send(b, *numbers(5000, 1000))
    pass_time(world)
    kept = (4 << 20) // 1000
    assert b.got == []
    assert b.socket.lost_backlog == world.network.injected["buffer_full"] == 5000 - kept
    b.host.resume()
    pass_time(world)
    assert b.data == numbers(kept, 1000)
    assert max(b.batches) <= 128
    a.send(b, b"again")
    pass_time(world)
    assert b.data[-1] == b"again"


def test_what_came_before_the_socket_was_started_is_read_then(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    second = SimulatedSocket(b.host.loop, 8)
    a.socket.send([one(b"early", second.local_address)])
    pass_time(world)
    got: list[bytes] = []
    second.start(lambda runs: got.extend(data for data, _ in apart(runs)), lambda address, trouble: None)
    pass_time(world)
    assert got == [b"early"]


def test_a_closed_socket_neither_sends_nor_receives_nor_calls(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    a.send(b, b"1")
    pass_time(world, MS // 2)
    b.socket.close()
    b.socket.close()
    b.send(a, b"2")
    pass_time(world)
    assert (a.data, b.data) == ([], [])
    assert len(a.troubles) == 1


def test_ports_are_given_once(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, *_ = nodes
    loop = a.host.loop
    assert loop is not None
    first, second = SimulatedSocket(loop), SimulatedSocket(loop, 0)
    assert (first.local_address, second.local_address) == ((a.host.ip, 49152), (a.host.ip, 49153))
    with pytest.raises(AddressError, match=r"10\.0\.0\.1:7: the port is in use"):
        SimulatedSocket(loop, 7)
    for wrong in (-1, 65536):
        with pytest.raises(AddressError, match="is no port"):
            SimulatedSocket(loop, wrong)
    first.close()
    assert SimulatedSocket(loop).local_address[1] == 49152
