"""Access links of simulated hosts: what all paths of a host share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sim_node import Node, numbers, pass_time

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.sim import AccessLink, Conditions, World

MS = 1_000_000
RATE = 102_800  # 1000 bytes of payload and 28 of headers are 10 milliseconds
WIDE = 1 << 20  # a queue that nothing here fills


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as made:
        made.network.set_conditions(Conditions(latency_ns=MS))
        yield made


@pytest.fixture
def nodes(world: World) -> tuple[Node, Node, Node]:
    return Node(world, "a"), Node(world, "b"), Node(world, "c")


def test_an_uplink_is_shared_by_all_paths_of_its_host_in_the_order_of_sending(
    world: World, nodes: tuple[Node, Node, Node]
) -> None:
    a, b, c = nodes
    world.network.set_access(AccessLink(up=RATE, up_queue=WIDE), ["a"])
    for data in numbers(10, 1000):
        a.send(b, data)
        a.send(c, data)
    pass_time(world)
    assert [at_ns for at_ns, _ in b.got] == [MS + 10 * MS * n for n in range(1, 21, 2)]
    assert [at_ns for at_ns, _ in c.got] == [MS + 10 * MS * n for n in range(2, 21, 2)]
    assert world.network.injected == {}


def test_a_downlink_is_shared_by_all_that_send_to_its_host(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, c = nodes
    world.network.set_access(AccessLink(down=RATE, down_queue=WIDE), ["c"])
    a.send(c, *numbers(10, 1000))
    b.send(c, *numbers(10, 1000))
    c.send(a, *numbers(3, 1000))
    pass_time(world)
    assert [at_ns for at_ns, _ in c.got] == [MS + 10 * MS * n for n in range(1, 21)]
    assert sorted(c.data) == sorted(numbers(10, 1000) * 2)
    assert [at_ns for at_ns, _ in a.got] == [MS] * 3, "its own sending was bound too"


def test_what_passes_an_uplink_and_a_downlink_of_one_rate_waits_in_the_first_alone(
    world: World, nodes: tuple[Node, Node, Node]
) -> None:
    a, b, _ = nodes
    world.network.set_access(AccessLink(up=RATE, down=RATE, up_queue=WIDE, down_queue=2056))
    a.send(b, *numbers(10, 1000))
    pass_time(world)
    assert [at_ns for at_ns, _ in b.got] == [MS + 10 * MS * (n + 1) for n in range(1, 11)]


@pytest.mark.parametrize("which", ["up", "down"])
def test_what_a_queue_cannot_hold_is_lost_whoever_sent_it_and_counted(
    world: World, nodes: tuple[Node, Node, Node], which: str
) -> None:
    a, b, c = nodes
    access = AccessLink(up=RATE, up_queue=10 * 1028) if which == "up" else AccessLink(down=RATE, down_queue=10 * 1028)
    world.network.set_access(access, ["a"])
    for data in numbers(20, 1000):
        for other in (b, c):
            if which == "up":
                a.send(other, data)
            else:
                other.send(a, data)
    pass_time(world)
    arrived = len(a.got) + len(b.got) + len(c.got)
    assert 10 <= arrived <= 11
    assert world.network.injected == {f"{which}link": 40 - arrived}


def test_what_is_lost_on_the_path_has_used_the_uplink_and_not_the_downlink(
    world: World, nodes: tuple[Node, Node, Node]
) -> None:
    a, b, c = nodes
    world.network.set_access(AccessLink(up=RATE, down=2 * RATE, up_queue=WIDE, down_queue=WIDE))
    world.network.set_conditions(Conditions(latency_ns=MS, loss=1.0), ["a"], ["b"])
    a.send(b, *numbers(5, 1000))
    a.send(c, b"x" * 1000)
    pass_time(world)
    assert b.got == []
    assert [at_ns for at_ns, _ in c.got] == [MS + 60 * MS + 5 * MS]


def test_a_path_may_be_slower_than_the_access_links_at_its_ends(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, c = nodes
    world.network.set_access(AccessLink(up=2 * RATE, down=2 * RATE, up_queue=WIDE, down_queue=WIDE))
    world.network.set_conditions(Conditions(latency_ns=0, bytes_per_second=RATE), ["a"], ["b"])
    a.send(b, *numbers(5, 1000))
    a.send(c, b"x" * 1000)
    pass_time(world)
    assert [at_ns for at_ns, _ in b.got] == [5 * MS + 10 * MS * (n + 1) + 5 * MS for n in range(5)]
    # The last of six on the uplink; nothing of the slow path is in its way.
    assert [at_ns for at_ns, _ in c.got] == [30 * MS + MS + 5 * MS]


def test_what_was_held_takes_the_uplink_when_it_is_sent_on(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, b, _ = nodes
    world.network.set_access(AccessLink(up=RATE, up_queue=WIDE))
    world.network.hold(["a"], ["b"])
    a.send(b, *numbers(3, 1000))
    pass_time(world)
    began_ns = world.elapsed_ns
    world.network.repair()
    pass_time(world)
    assert [at_ns - began_ns for at_ns, _ in b.got] == [MS + 10 * MS * n for n in (1, 2, 3)]


def test_a_host_reaches_itself_past_its_access_link(world: World, nodes: tuple[Node, Node, Node]) -> None:
    a, *_ = nodes
    world.network.set_access(AccessLink(up=1, down=1))
    a.send(a, b"self")
    pass_time(world)
    assert a.got == [(0, b"self")]


def test_an_access_link_that_is_taken_away_bounds_nothing_any_more(
    world: World, nodes: tuple[Node, Node, Node]
) -> None:
    a, b, _ = nodes
    world.network.set_access(AccessLink(up=RATE, down=RATE))
    world.network.set_access(AccessLink())
    a.send(b, *numbers(30, 1000))
    pass_time(world)
    assert [at_ns for at_ns, _ in b.got] == [MS] * 30


def test_an_access_link_draws_no_chance() -> None:
    def lost(access: AccessLink | None) -> list[bytes]:
        with World(5) as made:
            a, b = Node(made, "a"), Node(made, "b")
            made.network.set_conditions(Conditions(latency_ns=MS, loss=0.5, jitter_ns=MS))
            if access is not None:
                made.network.set_access(access)
            a.send(b, *numbers(50))
            pass_time(made)
            return list(b.data)

    assert lost(AccessLink(up=RATE, down=RATE, up_queue=WIDE, down_queue=WIDE)) == lost(None)


def test_access_links_that_cannot_be_are_refused(world: World) -> None:
    for wrong in ({"up": 0}, {"down": -1}):
        with pytest.raises(ConfigurationError, match="bytes_per_second"):
            AccessLink(**wrong)
    for what in ("up_queue", "down_queue"):
        with pytest.raises(ConfigurationError, match=what):
            AccessLink(**{what: 1499})
    with pytest.raises(ConfigurationError, match="no host 'x'"):
        world.network.set_access(AccessLink(), ["x"])
