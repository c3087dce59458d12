"""Ranks settle before a view with whom they have lanes, and then tell each other where these are."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from quicoll.engine.lanes import Lanes
from quicoll.engine.messages import LaneAt, LanesHere, decode_message
from quicoll.lanes.memory import LEAST
from quicoll.lanes.orders import JoinLane, LaneOpened, LanePaired, LaneSettings, LaneView
from quicoll.membership.view import Member, View

if TYPE_CHECKING:
    from quicoll.lanes.orders import LaneOrder

NODES = ("a", "b", "c")


def view(view_id: int) -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=10 + rank) for rank, node in enumerate(NODES))
    return View(view_id=view_id, members=members, seed=0, committed_step=0, committed_view=0)


class Link:
    ended = False

    def __init__(self, world: World, node: str, peer: str) -> None:
        self.world, self.owner, self.node = world, node, peer

    def send_app(self, data: bytes) -> None:
        self.world.said.append((self.owner, self.node, decode_message(data, node=self.owner)))


class Handle:
    def __init__(self, on_report: Any, on_end: Any) -> None:
        self.on_report, self.on_end = on_report, on_end
        self.orders: list[LaneOrder] = []

    def order(self, order: LaneOrder) -> None:
        self.orders.append(order)

    async def aclose(self) -> None:
        """It has ended."""


class World:
    """Ranks, their lanes, and what they say to each other."""

    slots = 1

    def __init__(self, lanes: dict[str, int], *, largest: dict[str, int] | None = None) -> None:
        self.said: list[tuple[str, str, Any]] = []
        self.handles: dict[str, list[Handle]] = {node: [] for node in NODES}
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.links = {node: [Link(self, node, peer) for peer in NODES if peer != node] for node in NODES}
        self.lanes: dict[str, Lanes] = {}
        for node in NODES:
            self.lanes[node] = Lanes(
                loop=asyncio.get_running_loop(),
                node=node,
                advertised="",
                emit=partial(self.emit, node),
            )
            if lanes[node]:
                size = (largest or {}).get(node, LEAST + 10)
                settings = LaneSettings(
                    host="",
                    incarnation=1,
                    lost_ns=10**12,  # none of them answers, and none is missed
                    connect_ns=1,
                    congestion="",
                    parity="",
                    largest=size,
                    slots=1,
                    denied=(),
                )
                self.starting = node
                self.lanes[node].start(lanes[node], settings, cast("Any", None), cast("Any", self), hosts=("",))

    def emit(self, node: str, kind: str, **fields: Any) -> None:
        self.events.append((node, kind, fields))

    def start(self, settings: Any, credentials: Any, *, loop: Any, on_report: Any, on_end: Any) -> Any:
        handle = Handle(on_report, on_end)
        self.handles[self.starting].append(handle)
        return handle

    def deliver(self) -> None:
        while self.said:
            source, target, message = self.said.pop(0)
            self.lanes[target].receive(cast("Any", Link(self, target, source)), message)

    async def settle(self, view_id: int) -> dict[str, dict[str, int]]:
        """Form a view on all ranks and install it. Return for each node how many lanes it has to which others."""
        forming = [
            asyncio.ensure_future(self.lanes[node].meet(view(view_id), cast("Any", self.links[node]))) for node in NODES
        ]
        for _ in range(10):
            await asyncio.sleep(0)
            self.deliver()
        assert all(each.done() for each in forming)
        found: dict[str, dict[str, int]] = {}
        for node in NODES:
            ways = self.lanes[node].install(view(view_id), cast("Any", self.links[node]), ())
            found[node] = {} if ways is None else {pair.node: pair.lanes for pair in ways.pairs.values()}
        return found

    async def close(self) -> None:
        for lanes in self.lanes.values():
            await lanes.aclose()


async def test_two_have_as_many_lanes_as_both_have_and_whoever_has_none_says_so() -> None:
    world = World({"a": 2, "b": 1, "c": 0})
    assert await world.settle(1) == {"a": {"b": 1}, "b": {"a": 1}, "c": {}}
    await world.close()


async def test_messages_for_lanes_are_as_long_as_both_sides_have_room_for() -> None:
    world = World({"a": 1, "b": 1, "c": 1}, largest={"a": LEAST + 50})
    await world.settle(1)
    assert {pair.largest for lanes in world.lanes.values() for pair in lanes._ways.pairs.values()} == {LEAST + 10}
    await world.close()


async def test_where_no_message_is_for_lanes_there_are_none_and_an_event_says_why() -> None:
    world = World({"a": 1, "b": 1, "c": 0}, largest={"b": LEAST - 1})
    assert await world.settle(1) == {"a": {}, "b": {}, "c": {}}
    ((node, kind, fields),) = world.events
    assert (node, kind) == ("b", "lane_lost")
    assert "chunk_bytes" in fields["reason"]
    await world.close()


async def test_a_rank_whose_lanes_have_ended_says_so_in_the_next_view() -> None:
    world = World({"a": 1, "b": 1, "c": 1})
    assert (await world.settle(1))["a"] == {"b": 1, "c": 1}
    world.handles["a"][0].on_end("killed")
    world.said.clear()
    assert await world.settle(2) == {"a": {}, "b": {"c": 1}, "c": {"b": 1}}
    await world.close()


async def test_what_is_said_for_a_view_to_come_leaves_the_present_one_as_it_is() -> None:
    world = World({"a": 1, "b": 1, "c": 0})
    forming = [asyncio.ensure_future(world.lanes[node].meet(view(1), cast("Any", world.links[node]))) for node in NODES]
    for _ in range(5):
        await asyncio.sleep(0)
        world.deliver()
    assert all(each.done() for each in forming)
    world.lanes["b"].receive(cast("Any", Link(world, "b", "c")), LanesHere(2, 1, LEAST))  # c is ahead
    ways = world.lanes["b"].install(view(1), cast("Any", world.links["b"]), ())
    assert ways is not None
    assert [pair.node for pair in ways.pairs.values()] == ["a"]
    await world.close()


async def test_lanes_join_when_both_are_open_with_marks_that_each_was_told_whoever_is_first() -> None:
    world = World({"a": 1, "b": 1, "c": 0})
    world.handles["a"][0].on_report(LaneOpened("10.0.0.1", 71))
    await world.settle(1)
    world.deliver()  # b has nothing to join with yet
    assert [each for each in world.handles["b"][0].orders if isinstance(each, JoinLane)] == []
    world.handles["b"][0].on_report(LaneOpened("10.0.0.2", 72))
    world.deliver()
    (at_a,) = (each for each in world.handles["a"][0].orders if isinstance(each, JoinLane))
    (at_b,) = (each for each in world.handles["b"][0].orders if isinstance(each, JoinLane))
    assert (at_a.host, at_a.port, at_a.incarnation, at_a.dials) == ("10.0.0.2", 72, 11, True)
    assert (at_b.host, at_b.port, at_b.incarnation, at_b.dials) == ("10.0.0.1", 71, 10, False)
    assert (at_a.shows, at_a.expects) == (at_b.expects, at_b.shows)
    assert at_a.shows != at_a.expects
    first = at_a.shows
    world.handles["a"][0].on_report(LanePaired(1, "b"))
    assert world.events == [("a", "lane_used", {"view": 1, "lane": 0, "peer": "b", "address": "10.0.0.1"})]
    await world.settle(2)  # with other marks
    world.deliver()
    *_, again = (each for each in world.handles["a"][0].orders if isinstance(each, JoinLane))
    assert again.shows != first
    assert [each.view_id for each in world.handles["a"][0].orders if isinstance(each, LaneView)] == [1, 2]
    await world.close()


async def test_where_a_lane_is_counts_also_when_it_is_said_before_the_view_is_installed_here() -> None:
    world = World({"a": 1, "b": 1, "c": 0})
    world.handles["b"][0].on_report(LaneOpened("10.0.0.2", 72))
    world.lanes["b"].receive(cast("Any", Link(world, "b", "a")), LaneAt(1, 0, "10.0.0.1", 71, bytes(32)))
    await world.settle(1)
    (order,) = (each for each in world.handles["b"][0].orders if isinstance(each, JoinLane))
    assert (order.port, order.shows) == (71, bytes(32))
    await world.close()


async def test_nodes_whose_memory_is_shared_have_no_lanes() -> None:
    world = World({"a": 1, "b": 1, "c": 1})
    await world.settle(1)
    ways = world.lanes["a"].install(view(1), cast("Any", world.links["a"]), ("b",))
    assert ways is not None
    assert [pair.node for pair in ways.pairs.values()] == ["c"]
    await world.close()
