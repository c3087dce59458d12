"""Ways that have lanes beside their links: which lane a message takes, and what becomes of it if that fails.

A message of LEAST to as many bytes as a slot has, of a pair of ranks that both have lanes, is noticed (noticed.py). Of
the lane of one number, between two ranks, each of the two knows by itself

    unpaired     nothing is given to it yet: both lanes have to have shown each other what they were told
    paired       messages may be given to it: each to the lane that has carried it first, by lane_rate.py
    shut         something is wrong with it here, or the peer has said so (`LaneShut`, once from each side)

and of each message, at its sender

    given        to one lane, and its notice sent; its memory stays as it is
    over         the receiver has said that it has it (`LanesTaken`), and its lane's slot is a matter of its own
    direct       its lane is shut on both sides, and the receiver has not said so: it goes over the link

and at its receiver

    told         its notice is here, and its lane is to receive it; waits for a slot of that, perhaps
    copied       it stands in the slot: copied to where it belongs, and compared with the checksum that its sender's
                 engine made of the source. Where they differ the lane is shut, and the message comes anew
    direct       its lane is shut here: it comes over the link

Why a message arrives once, whatever fails: both kinds of word go over the link in their order. What a receiver has
taken it says before its `LaneShut`, and takes nothing of that lane after it. So from the moment that the sender has
that word both know the same messages to be missing, and exactly those go over the link. Nobody is blamed for it: a lane
that fails costs the time that it takes to find out, which the links of lanes and their engines bound (lane.py), and an
event on both ranks says what happened.

Invariants:
    - a lane that is shut for a pair is not used between the two in this view any more
    - nothing is awaited of a lane that nobody has given it to: a notice tells of what is on its way
    - after `end` nothing is copied, and nobody is called back
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from quicoll.engine.lane_rate import soonest
from quicoll.engine.messages import MOST_TAKEN, LaneShut, LanesTaken, encode_message
from quicoll.engine.noticed import Carried, NoticedWay
from quicoll.lanes.memory import LEAST
from quicoll.lanes.orders import PartLanes
from quicoll.local.parcels import Notice
from quicoll_transport.errors import ProtocolError, TransportError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from quicoll.engine.executor import Way
    from quicoll.engine.lane import OwnLane
    from quicoll.engine.noticed import AwaitedMessage, GivenMessage
    from quicoll_transport.endpoint import Link

__all__ = ["LanePair", "LaneWays"]

_MAX_WHY: Final = 200


@dataclass(slots=True, eq=False)
class _Coming:
    """What a lane is to receive: quicoll.engine.executor.Moving, for who waits for it."""

    peer: LanePair
    lane: OwnLane
    number: int
    awaited: AwaitedMessage
    checksum: int
    done: bool = False
    aborted: bool = False
    error: TransportError | None = None

    def abort(self) -> None:
        if not self.done:
            self.done = self.aborted = True
            self.peer.coming.pop(self.number, None)
            self.lane.cancel(self.number)


@dataclass(slots=True, eq=False)
class LanePair:
    """This rank and another one: quicoll.engine.noticed.Beside.

    rank, node: the other one. lanes: how many both have. largest: bytes of a message that lanes carry at most.
    bytes_sent, bytes_received: that lanes have carried.
    """

    ways: LaneWays
    rank: int
    node: str
    link: Link
    lanes: int
    largest: int
    paired: dict[int, None] = field(default_factory=dict)
    shut: dict[int, bool] = field(default_factory=dict)  # by lane: whether the peer has said so as well
    given: dict[int, tuple[int, GivenMessage]] = field(default_factory=dict)  # by turn: the lane
    coming: dict[int, _Coming] = field(default_factory=dict)  # by the number of its use
    taken: list[int] = field(default_factory=list)  # turns that the peer has not been told of
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def whole(self) -> bool:
        return self.ways.whole

    def carries(self, nbytes: int) -> bool:
        return LEAST <= nbytes <= self.largest

    def give(self, given: GivenMessage) -> Notice | None:
        payload = given.payload
        lanes = [self.ways.lanes[index] for index in sorted(self.paired)]
        for place in soonest([lane.rate for lane in lanes], len(payload), self.ways.now_ns()):
            lane = lanes[place]
            turn = self.ways.next_number()
            if lane.send(turn, self.ways.view_id, self.node, payload):
                self.given[turn] = lane.index, given
                return Notice(lane.index, turn, len(payload), xxhash.xxh3_64_intdigest(payload))
        return None

    def take(self, notice: Notice, awaited: AwaitedMessage) -> None:
        index, turn, nbytes, checksum = notice
        if index >= self.lanes or nbytes != len(awaited.buffer) or turn > _MOST_TURN:
            what = f"{nbytes} bytes by lane {index}, for {len(awaited.buffer)}"
            awaited.finish(ProtocolError(f"tells of what cannot be: {what}", peer=self.node))
            return
        if index in self.shut:
            awaited.come_direct()
            return
        number = self.ways.next_number()
        lane = self.ways.lanes[index]
        coming = self.coming[number] = _Coming(self, lane, number, awaited, checksum)
        awaited.under_way = coming
        lane.receive(
            number,
            self.ways.view_id,
            self.node,
            sent=turn,
            nbytes=nbytes,
            heard=partial(self._came, number, turn),
        )

    def _came(self, number: int, turn: int, found: memoryview | None) -> None:
        coming = self.coming.get(number)
        if coming is None:
            return
        index, awaited = coming.lane.index, coming.awaited
        if found is None:
            self.shut_here(index, "it has not received what was sent")
            return
        np.copyto(np.frombuffer(awaited.buffer, np.uint8), np.frombuffer(found, np.uint8))
        if xxhash.xxh3_64_intdigest(awaited.buffer) != coming.checksum:
            self.shut_here(index, "bits came spoiled out of its memory")
            return
        del self.coming[number]
        coming.done = True
        self.bytes_received += len(awaited.buffer)
        self.taken.append(turn)
        self.ways.tell_soon()
        awaited.finish(None)

    def tell(self) -> None:
        """Say what was taken."""
        while self.taken:
            turns, self.taken = self.taken[:MOST_TAKEN], self.taken[MOST_TAKEN:]
            self._say(LanesTaken(self.ways.view_id, tuple(turns)))

    def _say(self, message: LanesTaken | LaneShut) -> None:
        with contextlib.suppress(TransportError):  # the link has ended, and with it the view
            self.link.send_app(encode_message(message))

    def heard_taken(self, message: LanesTaken) -> None:
        """The peer has taken something. What it names beyond what was given to it is nothing."""
        for turn in message.turns:
            _, given = self.given.pop(turn, (0, None))
            if given is not None:
                self.bytes_sent += len(given.payload)
                given.finish(None)

    def shut_here(self, index: int, why: str) -> None:
        """Something is wrong with a lane here; nothing happens where that is known."""
        if index < self.lanes and index not in self.shut:
            self._shut(index, why, heard=False)

    def heard_shut(self, message: LaneShut) -> None:
        """The peer takes nothing more of a lane: what it has not taken by now goes over the link."""
        index = message.lane
        if index >= self.lanes or self.shut.get(index):
            return
        if index not in self.shut:
            self._shut(index, f"the other side: {message.why}", heard=True)
        self.shut[index] = True
        missing = [turn for turn, (lane, _) in self.given.items() if lane == index]
        for turn in missing:
            self.given.pop(turn)[1].go_direct()

    def _shut(self, index: int, why: str, *, heard: bool) -> None:
        self.shut[index] = heard
        was = self.paired.pop(index, 0) is None
        lane = self.ways.lanes[index]
        lane.order(PartLanes(self.ways.view_id, self.node))
        self.tell()
        self._say(LaneShut(self.ways.view_id, index, "" if heard else why[:_MAX_WHY]))
        missing = [coming for coming in self.coming.values() if coming.lane is lane]
        for coming in missing:
            coming.abort()
            coming.awaited.come_direct()
        self.ways.on_shut(self, index, why, was)


_MOST_TURN: Final = (1 << 63) - 1  # what fits in a message to a lane


class LaneWays:
    """Those of one view: quicoll.engine.noticed.WaysBeside. On the engine's loop."""

    in_memory = False

    def __init__(
        self,
        view_id: int,
        lanes: Sequence[OwnLane],
        *,
        loop: asyncio.AbstractEventLoop,
        next_number: Callable[[], int],
        on_shut: Callable[[LanePair, int, str, bool], None],
    ) -> None:
        """Begin without a pair.

        Args:
            view_id: The view.
            lanes: Of this rank, by their numbers.
            loop: The engine's.
            next_number: Gives a number that none before had.
            on_shut: Called with (pair, lane, why, whether it was paired) for each lane that is shut.
        """
        self.view_id = view_id
        self.lanes = lanes
        self.next_number = next_number
        self.on_shut = on_shut
        self.whole = True
        self.pairs: dict[int, LanePair] = {}
        self._loop = loop
        self._telling = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.pairs)

    def now_ns(self) -> int:
        """Return the loop's time."""
        return round(self._loop.time() * 1e9)

    def add(self, rank: int, link: Link, *, lanes: int, largest: int) -> None:
        """Let there be lanes to a rank.

        Args:
            rank: Of the view.
            link: To it.
            lanes: How many both have, at least one.
            largest: Bytes of a message at most, the same on both.
        """
        self.pairs[rank] = LanePair(self, rank, link.node, link, lanes, largest)

    def of(self, node: str) -> LanePair | None:
        """Return the pair with a node, while the view is whole."""
        if not self.whole:
            return None
        return next((pair for pair in self.pairs.values() if pair.node == node), None)

    def to(self, links: Mapping[int, Link]) -> dict[int, Way]:
        return {rank: NoticedWay(links[rank], pair) for rank, pair in self.pairs.items() if rank in links}

    def carried(self) -> dict[int, Carried]:
        return {
            rank: Carried(bool(pair.paired), pair.bytes_sent, pair.bytes_received) for rank, pair in self.pairs.items()
        }

    def tell_soon(self) -> None:
        """Say what was taken, when this turn of the loop is over: several at once."""
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        if self.whole:
            for pair in self.pairs.values():
                pair.tell()

    def lane_ended(self, index: int, why: str) -> None:
        """A lane of this rank is no more."""
        if self.whole:
            for pair in self.pairs.values():
                pair.shut_here(index, why)

    def end(self) -> None:
        if self.whole:
            self.whole = False
            for pair in self.pairs.values():
                pair.given.clear()
                for index in range(pair.lanes):
                    if index not in pair.shut:
                        self.lanes[index].order(PartLanes(self.view_id, pair.node))
                for coming in list(pair.coming.values()):
                    coming.abort()
