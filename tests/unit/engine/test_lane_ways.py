"""Two ranks with lanes beside their link: every message arrives once and whole, whatever fails and whenever it does.

Links, lanes and their line are here a list of what is under way, from which a seed draws what happens next; but what
one side says to the other keeps its order, as on a link and a line.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from quicoll.engine.lane import LaneListener, OwnLane
from quicoll.engine.lane_ways import LanePair, LaneWays
from quicoll.engine.messages import LaneShut, LanesTaken, decode_message
from quicoll.lanes.memory import LEAST
from quicoll.lanes.orders import (
    LaneApart,
    LaneCancel,
    LaneOpened,
    LaneOver,
    LanePing,
    LaneReceive,
    LaneSend,
    LaneSettings,
    PartLanes,
)
from quicoll.local.parcels import Notice
from quicoll_transport.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.lanes.orders import LaneOrder, LaneReport
    from quicoll_transport.endpoint import Link

VIEW = 7
NODES = ("a", "b")
LARGEST = LEAST + 100
SLOTS = 2
TAG = b"view and group and #"


class Transfer:
    """A message on a link, from one of its ends."""

    def __init__(self, tag: bytes, memory: memoryview, on_done: Callable[[Any], None] | None) -> None:
        self.tag, self.memory, self.on_done = tag, memory, on_done
        self.done = self.aborted = False
        self.error: Exception | None = None

    def abort(self) -> None:
        if not self.done:
            self.done = self.aborted = True

    def go(self) -> None:
        if not self.done:
            self.done = True
            if self.on_done is not None:
                self.on_done(self)


class Ends:
    """One end of the link."""

    min_rtt_ns = None

    def __init__(self, world: World, side: int) -> None:
        self.world, self.side, self.node = world, side, NODES[1 - side]
        self.sent: dict[bytes, Transfer] = {}
        self.posted: dict[bytes, Transfer] = {}

    def send_app(self, data: bytes) -> None:
        self.world.put(("app", self.side), lambda: self.world.hear(1 - self.side, data))

    def send_copy(self, tag: bytes, payload: memoryview) -> None:
        self._send(tag, memoryview(bytes(payload)), None)

    def send(self, tag: bytes, payload: memoryview, on_done: Callable[[Any], None]) -> Transfer:
        return self._send(tag, payload, on_done)

    def _send(self, tag: bytes, payload: memoryview, on_done: Callable[[Any], None] | None) -> Transfer:
        assert tag not in self.sent
        found = self.sent[tag] = Transfer(tag, payload, on_done)
        self.world.put(None, lambda: self.world.match(self.side, tag))
        return found

    def post(self, tag: bytes, buffer: memoryview, on_done: Callable[[Any], None]) -> Transfer:
        assert tag not in self.posted
        found = self.posted[tag] = Transfer(tag, buffer, on_done)
        self.world.put(None, lambda: self.world.match(1 - self.side, tag))
        return found


class Places:
    def __init__(self) -> None:
        self.slots = [bytearray() for _ in range(2 * SLOTS)]
        self.users: dict[int, int] = {}

    def make(self, slot: int) -> None:
        assert not self.slots[slot]
        self.slots[slot] = bytearray(LARGEST)

    def place(self, slot: int, nbytes: int) -> memoryview:
        return memoryview(self.slots[slot])[:nbytes]


class Handle:
    """A lane's process, with its network: what it is told happens when the seed says so."""

    def __init__(self, world: World, side: int, on_report: Any, on_end: Any) -> None:
        self.world, self.side = world, side
        self.memory = Places()
        self.on_report, self.on_end = on_report, on_end
        self.dead = False
        self.parted = False
        self.uses: dict[int, LaneSend | LaneReceive] = {}

    def order(self, order: LaneOrder) -> None:
        if not isinstance(order, LanePing):
            self.world.put(("order", self), lambda: self.obey(order))

    def tell(self, report: LaneReport) -> None:
        self.world.put(("report", self), lambda: None if self.dead else self.on_report(report))

    def obey(self, order: LaneOrder) -> None:
        if self.dead:
            return
        match order:
            case LaneSend() | LaneReceive() if self.parted:
                self.tell(LaneOver(order.number, False))
            case LaneSend() | LaneReceive():
                self.uses[order.number] = order
                self.world.put(None, self.world.carry)
            case LaneCancel():
                if self.uses.pop(order.number, None) is not None:
                    self.tell(LaneOver(order.number, False))
            case PartLanes():
                self.part("")

    def part(self, why: str) -> None:
        self.parted = True
        if why:
            self.tell(LaneApart(VIEW, NODES[1 - self.side], why))
        for number in self.uses:
            self.tell(LaneOver(number, False))
        self.uses.clear()

    def kill(self) -> None:
        self.dead = True

    def end(self) -> None:
        self.dead = True
        self.on_end("killed")

    async def aclose(self) -> None:
        self.dead = True


class Host:
    slots = SLOTS

    def __init__(self, world: World, side: int) -> None:
        self.world, self.side = world, side

    def start(self, settings: Any, credentials: Any, *, loop: Any, on_report: Any, on_end: Any) -> Any:
        handle = Handle(self.world, self.side, on_report, on_end)
        self.world.handles[self.side].append(handle)
        return handle


class World:
    """Two ranks, their link, and the lanes of both."""

    def __init__(self, seed: int, lanes: int) -> None:
        self.random = random.Random(seed)
        self.waiting: list[Callable[[], None]] = []  # in any order
        self.ordered: dict[Any, deque[Callable[[], None]]] = {}
        self.handles: list[list[Handle]] = [[], []]
        self.shut: list[tuple[str, int, str]] = []
        self.links = [Ends(self, side) for side in range(2)]
        self.ways: list[LaneWays] = []
        settings = LaneSettings(
            host="",
            incarnation=1,
            lost_ns=10**9,
            connect_ns=1,
            congestion="",
            parity="",
            largest=LARGEST,
            slots=SLOTS,
            denied=(),
        )
        loop = asyncio.get_running_loop()
        for side in range(2):
            numbers = itertools.count(1)
            own: list[OwnLane] = []
            ways = LaneWays(
                VIEW,
                own,
                loop=loop,
                next_number=partial(next, numbers),
                on_shut=lambda pair, index, why, was: self.shut.append((pair.node, index, why)),
            )
            listener = LaneListener(
                opened=lambda lane: None,
                paired=lambda lane, view_id, node: None,
                apart=partial(self.apart, side),
                ended=partial(self.ended, side),
            )
            for index in range(lanes):
                host = cast("Any", Host(self, side))
                own.append(OwnLane(index, settings, cast("Any", None), host=host, loop=loop, listener=listener))
                self.handles[side][index].on_report(LaneOpened("", 1))
            ways.add(1 - side, cast("Link", self.links[side]), lanes=lanes, largest=LARGEST)
            self.ways.append(ways)
            for index in range(lanes):
                self.pair(side).paired[index] = None
        self.way: list[Any] = [
            ways.to({1 - side: cast("Link", self.links[side])})[1 - side] for side, ways in enumerate(self.ways)
        ]
        self.done: list[Any] = []

    def apart(self, side: int, lane: OwnLane, view_id: int, node: str, why: str) -> None:
        self.pair(side).shut_here(lane.index, why)

    def ended(self, side: int, lane: OwnLane, why: str) -> None:
        self.ways[side].lane_ended(lane.index, why)

    def pair(self, side: int) -> LanePair:
        return self.ways[side].pairs[1 - side]

    def put(self, order: Any, step: Callable[[], None]) -> None:
        if order is None:
            self.waiting.append(step)
        else:
            self.ordered.setdefault(order, deque()).append(step)

    def hear(self, side: int, data: bytes) -> None:
        message = decode_message(data, node=NODES[1 - side])
        pair = self.pair(side)
        if isinstance(message, LanesTaken):
            pair.heard_taken(message)
        else:
            assert isinstance(message, LaneShut)
            pair.heard_shut(message)

    def match(self, sender: int, tag: bytes) -> None:
        sent, posted = self.links[sender].sent.get(tag), self.links[1 - sender].posted.get(tag)
        if sent is None or posted is None or sent.done or posted.done:
            return
        assert len(sent.memory) == len(posted.memory)
        posted.memory[:] = sent.memory
        posted.go()
        sent.go()

    def carry(self) -> None:
        """Something that one lane has sent is there where the other one receives it."""
        for side in range(2):
            for one, other in zip(self.handles[side], self.handles[1 - side], strict=True):
                for receive in [each for each in other.uses.values() if isinstance(each, LaneReceive)]:
                    sent = one.uses.get(receive.sent)
                    if not isinstance(sent, LaneSend) or one.dead or other.dead:
                        continue
                    other.memory.place(receive.slot, receive.nbytes)[:] = one.memory.place(sent.slot, sent.nbytes)
                    del one.uses[sent.number], other.uses[receive.number]
                    one.tell(LaneOver(sent.number, True))
                    other.tell(LaneOver(receive.number, True))
                    return

    async def step(self) -> bool:
        await asyncio.sleep(0)  # what the ranks do at the end of a turn
        ready: list[Any] = [None] * len(self.waiting) + [order for order, steps in self.ordered.items() if steps]
        if not ready:
            return False
        order = self.random.choice(ready)
        if order is None:
            self.waiting.pop(self.random.randrange(len(self.waiting)))()
        else:
            self.ordered[order].popleft()()
        return True

    async def run(self) -> None:
        while await self.step():
            pass

    def check_slots(self) -> None:
        for ways in self.ways:
            for lane in ways.lanes:
                if not lane.why:
                    assert sorted(lane._out) == list(range(SLOTS))
                    assert sorted(lane._in) == list(range(SLOTS, 2 * SLOTS))
                    assert lane.rate.open_bytes == 0
                assert not lane._uses

    async def close(self) -> None:
        for ways in self.ways:
            for lane in ways.lanes:
                await lane.aclose()


def tag(index: int) -> bytes:
    return TAG + index.to_bytes(4, "big")


async def exchange(world: World, fail: Callable[[], None], at: int) -> int:
    """Send ten messages each way, in steps of the seed, and let something fail after so many. Return the steps."""
    draw = world.random
    messages = [(side, index, LEAST + draw.randrange(-2, 100)) for side in range(2) for index in range(10)]
    targets: list[tuple[bytes, bytearray]] = []
    moving: list[Any] = []
    starts: list[Callable[[], None]] = []
    for side, index, nbytes in messages:
        payload, target = draw.randbytes(nbytes), bytearray(nbytes)
        targets.append((payload, target))

        def send(side: int = side, index: int = index, payload: bytes = payload) -> None:
            moving.append(world.way[side].send(tag(index), memoryview(payload), world.done.append))

        def post(side: int = side, index: int = index, target: bytearray = target) -> None:
            moving.append(world.way[1 - side].post(tag(index), memoryview(target), world.done.append))

        starts += [send, post]
    draw.shuffle(starts)
    steps = 0
    while starts or world.waiting or any(world.ordered.values()):
        if steps == at:
            fail()
        if starts and draw.random() < 0.3:
            starts.pop()()
        else:
            await world.step()
        steps += 1
    if at >= steps:
        fail()
    await world.run()
    assert all(each.done and each.error is None for each in moving)
    assert len(world.done) == len(moving)
    assert all(payload == target for payload, target in targets)
    for side in range(2):  # nothing is left on the link, where it would take credit
        assert all(found.done for found in world.links[side].sent.values())
        assert set(world.links[side].sent) <= set(world.links[1 - side].posted)
        assert not world.pair(side).given
        assert not world.pair(side).coming
    return steps


@pytest.mark.parametrize("lanes", [1, 2])
async def test_messages_arrive_once_and_whole_and_slots_are_free_again(lanes: int) -> None:
    for seed in range(30):
        world = World(seed, lanes)
        await exchange(world, lambda: None, 10**9)
        world.check_slots()
        assert world.shut == []
        await world.close()


def spoil(world: World) -> None:
    for handle in (each for side in world.handles for each in side):
        for slot in handle.memory.slots[SLOTS:]:
            if slot:
                slot[0] ^= 1


FAILURES: dict[str, Callable[[World], None]] = {
    "killed": lambda world: world.handles[0][0].end(),
    "both killed": lambda world: [side[0].end() for side in world.handles] and None,
    "apart, as one sees it": lambda world: world.handles[1][0].part("cut off"),
    "apart, as both see it": lambda world: [side[0].part("cut off") for side in world.handles] and None,
    "spoiled": spoil,
}


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("what", FAILURES)
async def test_a_lane_may_fail_at_any_moment(what: str, lanes: int) -> None:
    shut = 0
    for seed in range(60):
        world = World(seed, lanes)
        await exchange(world, partial(FAILURES[what], world), 4 * seed)
        world.check_slots()
        nodes = {node for node, _, _ in world.shut}
        assert nodes in (set(), set(NODES))  # each side shuts it, or none does
        shut += bool(nodes)
        await world.close()
    assert shut >= (5 if what == "spoiled" else 40)


async def test_what_is_short_or_too_long_for_a_slot_goes_over_the_link() -> None:
    world = World(0, 1)
    for index, nbytes in enumerate((LEAST - 1, LARGEST + 1)):
        world.way[0].send(tag(index), memoryview(bytes(nbytes)), world.done.append)
        assert len(world.links[0].sent[tag(index)].memory) == nbytes
    await world.close()


async def test_of_two_lanes_that_with_fewer_open_bytes_is_taken() -> None:
    world = World(0, 2)
    for index in range(4):
        world.way[0].send(tag(index), memoryview(bytes(LEAST + index)), world.done.append)
    notices = [Notice.read(bytes(world.links[0].sent[tag(index)].memory)) for index in range(4)]
    assert [notice.place for notice in notices] == [0, 1, 0, 1]
    await world.close()


@pytest.mark.parametrize(
    "notice", [Notice(1, 1, LEAST, 0), Notice(0, 1, LEAST + 1, 0), Notice(0, (1 << 64) - 1, LEAST, 0)]
)
async def test_a_notice_that_cannot_be_is_the_fault_of_who_sent_it(notice: Notice) -> None:
    world = World(0, 1)
    posted = world.way[0].post(tag(1), memoryview(bytearray(LEAST)), world.done.append)
    world.links[1].send_copy(tag(1), memoryview(notice.packed()))
    await world.run()
    assert isinstance(posted.error, ProtocolError)
    assert world.shut == []
    await world.close()


async def test_what_a_peer_says_to_have_taken_that_was_not_given_to_it_ends_nothing() -> None:
    world = World(0, 1)
    sending = world.way[0].send(tag(1), memoryview(bytes(LEAST)), world.done.append)
    world.pair(0).heard_taken(LanesTaken(VIEW, (5, 6)))
    assert not sending.done
    await world.close()


async def test_after_the_end_of_the_view_nobody_is_called_back_and_slots_are_free_for_the_next_one() -> None:
    world = World(3, 1)
    for index in range(3):
        world.way[0].send(tag(index), memoryview(bytes(LEAST)), world.done.append)
        world.way[1].post(tag(index), memoryview(bytearray(LEAST)), world.done.append)
    for _ in range(6):
        await world.step()
    for ways in world.ways:
        ways.end()
    before = len(world.done)
    for link in world.links:
        link.sent.clear()
    await world.run()
    assert len(world.done) == before
    world.check_slots()
    await world.close()


async def test_a_lane_that_gives_no_sign_of_life_is_killed() -> None:
    world = World(0, 1)
    lane = world.ways[0].lanes[0]
    for _ in range(3):  # it was asked when it was opened, too
        lane._ask()
        lane._timer.cancel()
    assert not lane.why
    lane._ask()
    assert lane.why == "it does not answer"
    assert world.handles[0][0].dead
    assert world.shut == [("b", 0, "it does not answer")]
    await world.close()
