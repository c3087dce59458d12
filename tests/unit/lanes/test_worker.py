"""What a lane does with its orders: two of them, over real endpoints on a simulated network."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from quicoll.lanes.orders import (
    JoinLane,
    LaneApart,
    LaneCancel,
    LaneOpened,
    LaneOver,
    LanePaired,
    LanePing,
    LanePong,
    LaneReceive,
    LaneReport,
    LaneSend,
    LaneSettings,
    LaneView,
    OpenLane,
    PartLanes,
    RenewLane,
    Shown,
    decode_order,
    encode_told,
)
from quicoll.lanes.worker import MARK_BYTES, LaneWorker
from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import WORKER, Identity
from quicoll_transport.security.policy import Policy
from quicoll_transport.sim import SimulatedSocket, World

SIZE = 100_000
SLOTS = 2
JOB = "job"


class Places:
    def __init__(self) -> None:
        self.slots = [bytearray(SIZE) for _ in range(2 * SLOTS)]

    def make(self, slot: int) -> None:
        """There is memory for all of it."""

    def place(self, slot: int, nbytes: int) -> memoryview:
        return memoryview(self.slots[slot])[:nbytes]


class Lane:
    """One worker, and what it has reported."""

    def __init__(self, world: World, node: str, credentials: Any) -> None:
        host = world.host(node)
        self.node, self.loop, self.told, self.places = node, host.start(), [], Places()
        self.told: list[LaneReport] = []
        self.worker = LaneWorker(job=JOB, memory=self.places, tell=self.told.append)
        self.world = world
        self.loop.call_soon(self._begin, credentials[Identity(JOB, WORKER, node)])
        world.run(lambda: bool(self.told), limit_ns=10**9)
        (opened,) = self.told
        assert isinstance(opened, LaneOpened)
        self.address = opened.host, opened.port

    def _begin(self, credentials: Any) -> None:
        self.endpoint = Endpoint(
            credentials=credentials,
            config=EndpointConfig(lost_after_ns=10**9, connect_ns=2 * 10**9),
            io=SimulatedSocket(self.loop),
            loop=self.loop,
            incarnation=1,
            authorize=Policy(roles=(WORKER,)),
            on_link=self.worker.on_link,
            wall_clock=lambda: datetime.now(UTC),
        )
        self.worker.use(self.endpoint)

    def obey(self, *orders: Any) -> None:
        for order in orders:
            self.loop.call_soon(self.worker.obey, decode_order(encode_told(order)))

    def of(self, kind: type) -> list[Any]:
        return [report for report in self.told if isinstance(report, kind)]


class Two:
    def __init__(self, world: World) -> None:
        self.world = world
        now = datetime.now(UTC)
        credentials = ephemeral(JOB, [(WORKER, "a"), (WORKER, "b")], now=now)
        self.a, self.b = (Lane(world, node, credentials) for node in ("a", "b"))

    def join(self, *, view_id: int = 5, shown_by_b: bytes = b"b" * MARK_BYTES, only: str = "ab") -> None:
        for lane, other in ((self.a, self.b), (self.b, self.a)):
            if lane.node in only:
                host, port = other.address
                shows = b"a" * MARK_BYTES if lane is self.a else shown_by_b
                expects = b"b" * MARK_BYTES if lane is self.a else b"a" * MARK_BYTES
                lane.obey(
                    LaneView(view_id, (other.node,)),
                    JoinLane(view_id, other.node, 1, host, port, shows, expects, lane is self.a),
                )

    def until(self, holds: Any) -> None:
        self.world.run(holds, limit_ns=20 * 10**9)


@pytest.fixture
def two() -> Iterator[Two]:
    with World(1) as world:
        yield Two(world)


def test_two_that_show_what_they_were_told_carry_messages_both_ways(two: Two) -> None:
    two.join()
    two.until(lambda: two.a.of(LanePaired) and two.b.of(LanePaired))
    two.a.places.slots[0][:] = bytes(range(250)) * 400
    two.a.obey(LaneSend(1, 5, "b", 0, SIZE))
    two.b.obey(LaneReceive(9, 5, "a", 1, SLOTS, SIZE))
    two.b.obey(LaneSend(10, 5, "a", 1, 70_000))
    two.a.obey(LaneReceive(2, 5, "b", 10, SLOTS + 1, 70_000))
    two.until(lambda: len(two.a.of(LaneOver)) == len(two.b.of(LaneOver)) == 2)
    assert two.b.places.slots[SLOTS] == two.a.places.slots[0]
    assert {(over.number, over.well) for over in two.a.of(LaneOver)} == {(1, True), (2, True)}


def test_who_shows_something_else_is_not_paired_with_and_gets_nothing(two: Two) -> None:
    two.join(shown_by_b=b"?" * MARK_BYTES)
    two.a.obey(LaneReceive(2, 5, "b", 10, SLOTS, SIZE), LaneSend(3, 5, "b", 0, SIZE))
    two.until(lambda: bool(two.a.of(LaneApart)) and len(two.a.of(LaneOver)) == 2)
    assert two.a.of(LanePaired) == []
    assert [over.well for over in two.a.of(LaneOver)] == [False, False]
    assert "shown" in two.a.of(LaneApart)[0].why


def test_what_is_shown_before_the_order_to_join_counts_when_that_comes(two: Two) -> None:
    two.join(only="a")
    two.world.run(limit_ns=10**9)
    assert two.b.of(LanePaired) == []
    two.join(only="b")
    two.until(lambda: two.a.of(LanePaired) and two.b.of(LanePaired))


def test_a_mark_of_another_view_pairs_nobody(two: Two) -> None:
    two.join(view_id=5, only="a")
    two.join(view_id=6, only="b")
    two.world.run(limit_ns=3 * 10**9)
    assert two.a.of(LanePaired) == two.b.of(LanePaired) == []
    two.join(view_id=6, only="a")
    two.until(lambda: two.a.of(LanePaired) and two.b.of(LanePaired))
    assert len(two.a.endpoint.links) == 1


def test_other_words_of_a_lane_end_its_link(two: Two) -> None:
    two.join()
    two.until(lambda: two.a.of(LanePaired) and two.b.of(LanePaired))
    (link,) = two.b.endpoint.links.values()
    two.b.loop.call_soon(link.send_app, b"what else")
    two.until(lambda: two.a.of(LaneApart) and two.b.of(LaneApart))


def test_each_use_ends_once_whether_cancelled_parted_or_of_a_view_that_is_over(two: Two) -> None:
    two.join()
    two.until(lambda: two.a.of(LanePaired) and two.b.of(LanePaired))
    two.b.obey(*(LaneReceive(number, 5, "a", 100 + number, SLOTS, SIZE) for number in (1, 2, 3)))
    two.b.obey(LaneCancel(1), LaneCancel(1), PartLanes(5, "a"), LaneCancel(2), LaneReceive(4, 5, "a", 1, SLOTS, SIZE))
    two.b.obey(LaneView(6, ("a",)), LaneSend(5, 5, "a", 0, SIZE), LanePing())
    two.until(lambda: bool(two.b.of(LanePong)))
    assert sorted(over.number for over in two.b.of(LaneOver)) == [1, 2, 3, 4, 5]
    assert not any(over.well for over in two.b.of(LaneOver))


def test_a_link_to_a_node_that_is_not_in_the_view_ends_and_one_to_a_node_that_is_stays(two: Two) -> None:
    two.join()
    two.until(lambda: two.a.of(LanePaired) and two.b.of(LanePaired))
    (link,) = two.a.endpoint.links.values()
    two.a.obey(LaneView(6, ("b",)))
    two.world.run(limit_ns=10**8)
    assert not link.ended
    two.a.obey(LaneView(7, ("c",)))
    two.until(lambda: link.ended)


def test_a_link_that_is_lost_parts_the_two_on_both_sides(two: Two) -> None:
    two.join()
    two.until(lambda: two.a.of(LanePaired) and two.b.of(LanePaired))
    two.a.obey(LaneSend(1, 5, "b", 0, SIZE))
    two.world.network.partition(["a"], ["b"])
    two.until(lambda: two.a.of(LaneApart) and two.b.of(LaneApart))
    assert [(over.number, over.well) for over in two.a.of(LaneOver)] == [(1, False)]


def test_no_order_shows_a_key() -> None:
    opened = OpenLane(1, LaneSettings("h", 1, 1, 1, "cubic", "auto", 1, 1, ()), Shown((b"c",), 0, b"secret"))
    assert "secret" not in repr(opened) + repr(RenewLane(Shown((b"c",), 0, b"secret")))


def test_the_first_order_has_all_that_a_lane_is_opened_with() -> None:
    settings = LaneSettings("10.0.0.1", 3, 10**9, 10**8, "bbr", "off", 1 << 20, 24, ("ab", "cd"))
    opened = OpenLane(1, settings, Shown((b"own", b"chain", b"root"), 1, b"secret"))
    assert decode_order(encode_told(opened)) == opened


def test_nothing_is_sent_to_a_lane_that_has_shown_nothing_yet(two: Two) -> None:
    two.join(only="a")
    two.a.obey(LaneSend(1, 5, "b", 0, SIZE), LanePing())
    two.until(lambda: bool(two.a.of(LanePong)))
    assert [(over.number, over.well) for over in two.a.of(LaneOver)] == [(1, False)]
    assert two.a.of(LaneApart) == []
