"""The simulated network by itself: conditions, states of paths, and what comes back by ICMP."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from datagrams import one
from sim_node import SECOND, Node, numbers, pass_time

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.faults.compose import Drop
from quicoll_transport.sim import Conditions, World
from quicoll_transport.sim.network import PathState

MS = 1_000_000
OPEN, CUT, HELD = PathState.OPEN, PathState.CUT, PathState.HELD


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as made:
        made.network.set_conditions(Conditions(latency_ns=MS))
        yield made


@pytest.fixture
def nodes(world: World) -> tuple[Node, Node, Node]:
    return Node(world, "a"), Node(world, "b"), Node(world, "c")


# -- conditions ------------------------------------------------------------------------------------------------------


def test_a_datagram_takes_the_path_s_latency(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    world.network.set_conditions(Conditions(latency_ns=30 * MS), ["b"], ["a"])
    a.send(b, b"there")
    b.send(a, b"back")
    pass_time(world)
    assert (b.got, a.got) == ([(MS, b"there")], [(30 * MS, b"back")])
    assert (world.network.datagrams, world.network.bytes) == (2, 9)
    assert world.network.injected == {}


def test_a_host_reaches_itself_at_once(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, *_ = nodes
    world.network.set_conditions(Conditions(loss=1.0))
    a.send(a, b"self")
    pass_time(world)
    assert a.got == [(0, b"self")]


def test_jitter_delays_and_keeps_the_order(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    world.network.set_conditions(Conditions(latency_ns=MS, jitter_ns=20 * MS))
    a.send(b, *numbers(50))
    pass_time(world)
    assert b.data == numbers(50)
    arrivals = [at_ns for at_ns, _ in b.got]
    assert MS <= arrivals[0] < arrivals[-1] <= 21 * MS


@pytest.mark.parametrize(
    ("conditions", "kind", "least", "most"),
    [
        (Conditions(loss=0.2), "loss", 150, 250),
        (Conditions(loss=0.2, burst=5.0), "loss", 100, 300),
        (Conditions(duplicate=0.2), "duplicate", 150, 250),
        (Conditions(corrupt=0.2), "corrupt", 150, 250),
    ],
)
def test_each_trouble_comes_about_as_often_as_it_should_and_is_counted(
    world: World, nodes: tuple[Node, Node, Node], conditions: Conditions, kind: str, least: int, most: int
) -> None:
    a, b, _ = nodes
    world.network.set_conditions(conditions)
    sent = [random.Random(n).randbytes(100) for n in range(1000)]
    a.send(b, *sent)
    pass_time(world)
    count = world.network.injected[kind]
    assert list(world.network.injected) == [kind]
    assert least <= count <= most
    assert len(b.got) == 1000 + {"loss": -count, "duplicate": count, "corrupt": 0}[kind]
    assert len([data for data in b.data if data not in sent]) == (count if kind == "corrupt" else 0)


def test_bursts_lose_neighbours(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, c = nodes
    world.network.set_conditions(Conditions(loss=0.2), ["a"], ["b"])
    world.network.set_conditions(Conditions(loss=0.2, burst=8.0), ["a"], ["c"])
    sent = numbers(2000)
    for receiver in (b, c):
        a.send(receiver, *sent)
    pass_time(world)

    def runs(receiver: Node) -> int:
        present = dict.fromkeys(receiver.data)
        lost = [data not in present for data in sent]
        return sum(now and not before for before, now in zip([False, *lost], lost, strict=False))

    assert runs(c) < runs(b) / 3


def test_reordered_ones_come_later(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    world.network.set_conditions(Conditions(latency_ns=MS, reorder=0.1, reorder_ns=7 * MS))
    a.send(b, *numbers(200))
    pass_time(world)
    late = [data for at_ns, data in b.got if at_ns == 8 * MS]
    assert sorted(b.data) == numbers(200)
    assert b.data != numbers(200)
    assert 10 <= len(late) <= 30
    assert len([1 for at_ns, _ in b.got if at_ns == MS]) == 200 - len(late)


def test_a_bottleneck_takes_its_time_and_drops_what_its_queue_cannot_hold(
    world: World, nodes: tuple[Node, Node, Node]
) -> None:
    a, b, _ = nodes
    # 1000 bytes of payload and 28 of headers each: 10 milliseconds.
    world.network.set_conditions(Conditions(latency_ns=0, bytes_per_second=102_800, queue_bytes=10 * 1028))
    a.send(b, *numbers(50, 1000))
    pass_time(world)
    assert 10 <= len(b.got) <= 12
    assert [at_ns for at_ns, _ in b.got] == [10 * MS * (n + 1) for n in range(len(b.got))]
    assert world.network.injected == {"loss": 50 - len(b.got)}


def test_conditions_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="MTU of 1200"):
        Conditions(mtu=1199)
    for wrong in ({"loss": 1.5}, {"latency_ns": -1}, {"bytes_per_second": 0}):
        with pytest.raises(ConfigurationError):
            Conditions(**wrong)


def test_conditions_for_all_are_those_of_later_hosts_too(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    a.send(b, b"1")
    world.network.set_conditions(Conditions(latency_ns=9 * MS))
    assert world.network.default.latency_ns == 9 * MS
    late = Node(world, "late")
    for receiver in (b, late):
        a.send(receiver, b"2")
    pass_time(world)
    assert b.got == [(MS, b"1"), (9 * MS, b"2")]
    assert late.got == [(9 * MS, b"2")]


def test_a_rule_of_its_own_comes_after_the_conditions_and_counts(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    with world.network.add_rule(Drop(1.0), "a", "b") as installed:
        a.send(b, b"1", b"2")
        b.send(a, b"back")
        pass_time(world)
        assert installed.decided == 2
    a.send(b, b"3")
    pass_time(world)
    assert (b.data, a.data) == ([b"3"], [b"back"])


# -- states of a path ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [OPEN, CUT, HELD])
@pytest.mark.parametrize(
    ("action", "expected"), [("partition", CUT), ("hold", HELD), ("repair", OPEN)], ids=["cut", "hold", "repair"]
)
def test_every_action_from_every_state(
    world: World, nodes: tuple[Node, Node, Node], state: PathState, action: str, expected: PathState
) -> None:
    a, b, _ = nodes
    network = world.network
    if state is not OPEN:
        (network.partition if state is CUT else network.hold)(["a"], ["b"])
    a.send(b, b"before")
    pass_time(world)
    getattr(network, action)(["a"], ["b"])
    assert network.state("a", "b") is expected
    a.send(b, b"after")
    pass_time(world)
    network.repair()
    pass_time(world)
    before_arrives = state is OPEN or (state is HELD and action != "partition")
    after_arrives = action != "partition"
    assert b.data == [b"before"] * before_arrives + [b"after"] * after_arrives


def test_a_partition_is_both_ways_and_touches_nobody_else(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, c = nodes
    world.network.partition(["a"], ["b"])
    for sender in nodes:
        for receiver in nodes:
            sender.send(receiver, sender.host.name.encode())
    pass_time(world)
    assert [sorted(node.data) for node in (a, b, c)] == [[b"a", b"c"], [b"b", b"c"], [b"a", b"b", b"c"]]
    assert world.network.injected == {"partition": 2}


def test_a_one_way_partition_leaves_the_way_back(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    world.network.partition(["a"], ["b"], one_way=True)
    a.send(b, b"1")
    b.send(a, b"2")
    pass_time(world)
    assert (a.data, b.data) == ([b"2"], [])
    assert (world.network.state("a", "b"), world.network.state("b", "a")) == (CUT, OPEN)


def test_what_had_left_before_a_cut_arrives(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    a.send(b, b"under way")
    world.network.partition(["a"], ["b"])
    pass_time(world)
    assert b.got == [(MS, b"under way")]


def test_what_was_held_goes_on_in_order_when_the_path_is_repaired(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    world.network.hold(["a"], ["b"])
    a.send(b, *numbers(5))
    pass_time(world)
    assert b.got == []
    world.network.repair(["b"], ["a"])  # either order means both ways
    a.send(b, b"later")
    pass_time(world)
    assert b.got == [(SECOND + MS, data) for data in [*numbers(5), b"later"]]
    assert world.network.injected == {"hold": 5}


def test_repairing_some_leaves_the_others_cut(world: World, nodes: tuple[Node, Node, Node]) -> None:
    world.network.partition(["a"], ["b", "c"])
    world.network.repair(["a"], ["b"])
    states = {(one, other): world.network.state(one, other) for one in "ab" for other in "bc" if one != other}
    assert states == {("a", "b"): OPEN, ("a", "c"): CUT, ("b", "c"): OPEN}
    world.network.repair()
    assert world.network.state("c", "a") is OPEN


@pytest.mark.parametrize("action", ["partition", "hold", "repair"])
def test_a_host_that_does_not_exist_is_named(world: World, nodes: tuple[Node, Node, Node], action: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no host 'x'; there are a, b, c"):
        getattr(world.network, action)(["a"], ["x"])


def test_nothing_depends_on_the_order_in_which_hosts_are_named() -> None:
    def digest(names: list[str]) -> str:
        with World(3) as world:
            made = {name: Node(world, name) for name in "abcd"}
            world.network.set_conditions(Conditions(loss=0.3, jitter_ns=MS))
            world.network.hold(names[:2], names[2:])
            for n in range(50):
                rng = random.Random(n)
                sender, receiver = rng.sample("abcd", 2)
                made[sender].send(made[receiver], bytes([n]))
            world.network.repair(names[2:], names[:2])
            pass_time(world)
            assert sum(len(node.got) for node in made.values()) > 20
            return world.digest + repr([made[name].got for name in "abcd"])

    assert digest(["a", "b", "c", "d"]) == digest(["b", "a", "d", "c"])


# -- what comes back -------------------------------------------------------------------------------------------------


def test_a_datagram_above_the_mtu_is_lost_and_the_sender_learns_the_limit(
    world: World, nodes: tuple[Node, Node, Node]
) -> None:
    a, b, _ = nodes
    world.network.set_conditions(Conditions(mtu=1300), ["a"], ["b"])
    a.send(b, bytes(1300), bytes(1301))
    b.send(a, bytes(1301))
    pass_time(world)
    assert [len(data) for data in b.data] == [1300]
    assert [len(data) for data in a.data] == [1301]
    [(at_ns, address, trouble)] = a.troubles
    assert (at_ns, address, trouble.limit, trouble.refused) == (0, b.socket.local_address, 1300, False)
    assert "1300 bytes" in trouble.cause
    assert world.network.injected == {"too_long": 1}


def test_a_port_on_which_nothing_listens_refuses_after_a_round_trip(
    world: World, nodes: tuple[Node, Node, Node]
) -> None:
    a, b, _ = nodes
    b.host.kill()
    a.send(b, b"anybody?")
    pass_time(world)
    assert [(at_ns, trouble.refused) for at_ns, _, trouble in a.troubles] == [(2 * MS, True)]


def test_a_machine_that_is_off_says_nothing(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    b.host.power_off()
    a.send(b, b"anybody?")
    pass_time(world)
    assert a.troubles == []
    b.host.power_on()
    a.send(b, b"anybody?")
    pass_time(world)
    assert len(a.troubles) == 1


def test_a_refusal_does_not_pass_where_the_way_back_is_cut(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    world.network.partition(["b"], ["a"], one_way=True)
    b.host.kill()
    a.send(b, b"anybody?")
    pass_time(world)
    assert a.troubles == []


def test_a_refusal_to_a_process_that_is_gone_reaches_nobody(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    b.host.kill()
    a.send(b, b"anybody?")
    a.host.kill()
    pass_time(world)
    assert a.troubles == []


def test_an_address_of_no_host_is_unreachable(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, *_ = nodes
    a.socket.send([one(b"?", ("10.9.9.9", 1))])
    pass_time(world)
    assert [(trouble.refused, "unreachable" in trouble.cause) for _, _, trouble in a.troubles] == [(False, True)]


@pytest.mark.parametrize("seed", range(5))
def test_what_becomes_of_datagrams_does_not_depend_on_how_they_were_batched(seed: int) -> None:
    """The trace too is the same: it has datagrams, not runs."""
    rng = random.Random(seed)
    payloads = [rng.randbytes(rng.choice([100, 100, 100, 700, 2000])) for _ in range(300)]
    results: list[Any] = []
    for most in (1, 7, 300):
        with World(seed) as world:
            a, b = Node(world, "a"), Node(world, "b")
            weather = Conditions(jitter_ns=MS, loss=0.1, burst=3, duplicate=0.1, reorder=0.1, corrupt=0.1)
            world.network.set_conditions(weather)
            world.network.add_rule(Drop(0.1), "a", "b")
            for start in range(0, len(payloads), most):
                a.send(b, *payloads[start : start + most])
            pass_time(world)
            troubles = [(when, trouble) for when, _, trouble in a.troubles]
            results.append((b.got, troubles, world.network.injected, world.digest))
    assert results[0][0]
    assert results[0] == results[1] == results[2]
