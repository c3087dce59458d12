"""Two link cores joined without QUIC: a virtual clock, control bytes and message streams as queues that die at will."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quicoll_transport.link.control_stream import ControlReader
from quicoll_transport.link.core import (
    Inflow,
    LinkConfig,
    LinkCore,
    LinkId,
    LinkState,
    Outgoing,
    Posted,
    ResetMessage,
    SendControl,
    StartMessage,
)
from quicoll_transport.link.detector import DetectorConfig
from quicoll_transport.link.frames import TAG_SIZE, Control, Header, Hello

MS = 1_000_000
DETECTOR = DetectorConfig.from_lost_after(1000 * MS)


def tag(number: int, *, view: int = 0) -> bytes:
    return view.to_bytes(8, "big") + number.to_bytes(TAG_SIZE - 8, "big")


def payload(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


# -- the harness -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stream:
    """A message on its way: header, then payload read from the sender's memory as it goes."""

    message: Outgoing
    header: bytes
    payload: memoryview
    offset: int = 0
    inflow: Inflow | None = None
    begun: bool = False


@dataclass(eq=False)
class Side:
    """One core, what it told its owner, and what is on its way to it."""

    core: LinkCore
    apps: list[bytes] = field(default_factory=list)
    states: list[LinkState] = field(default_factory=list)
    control: deque[bytes] = field(default_factory=deque)
    streams: list[Stream] = field(default_factory=list)
    reader: ControlReader = field(default_factory=ControlReader)
    greeted: bool = False
    said: list[Control] = field(default_factory=list)  # everything that it was told, for assertions


class Pair:
    """Sides a and b of one link. Nothing moves but by `step` or `settle`."""

    def __init__(
        self,
        *,
        credit: int = 100_000,
        max_resends: int = 2,
        fault: Callable[[memoryview], None] | None = None,
        chunk: int = 1000,
    ) -> None:
        self.now = 0
        self.chunk = chunk
        self.joined = False
        self.moved = 0  # payload bytes that flowed
        config = LinkConfig(DETECTOR, connect_ns=5000 * MS, credit_bytes=credit, max_resends=max_resends)
        self.a = self._side("b", LinkId(1, 1), config, None)
        self.b = self._side("a", LinkId(2, 7), config, fault)

    def _side(self, peer: str, local: LinkId, config: LinkConfig, fault: Callable[[memoryview], None] | None) -> Side:
        apps: list[bytes] = []
        states: list[LinkState] = []
        core = LinkCore(
            peer=peer,
            local=local,
            config=config,
            now_ns=self.now,
            on_app=apps.append,
            on_state=states.append,
            payload_fault=fault,
        )
        return Side(core, apps, states)

    def other(self, side: Side) -> Side:
        return self.b if side is self.a else self.a

    def join(self) -> Pair:
        """A new connection; the Hellos are on their way."""
        for side in (self.a, self.b):
            self._leave(side)
        for side in (self.a, self.b):
            side.core.connected()
        self.joined = True
        return self

    def up(self) -> Pair:
        self.join()
        self.settle()
        assert self.a.core.state is self.b.core.state is LinkState.UP
        return self

    def _leave(self, side: Side) -> None:
        side.core.disconnected()
        side.control.clear()
        side.streams.clear()
        side.reader = ControlReader()
        side.greeted = False

    def die(self, *, first: Side | None = None) -> None:
        """The connection dies, with everything on its way; with `first`, only that side has noticed so far."""
        self.joined = False
        for side in (self.a, self.b) if first is None else (first,):
            self._leave(side)

    def pull(self, side: Side) -> bool:
        """Carry out one action of a side."""
        action = side.core.poll(self.now)
        if action is None:
            return False
        if not self.joined:
            return True  # written into a dead connection
        to = self.other(side)
        match action:
            case SendControl():
                to.control.append(action.data)
            case StartMessage():
                if not action.message.done:
                    to.streams.append(Stream(action.message, action.message.header(), action.message.rest()))
            case ResetMessage():
                for stream in [stream for stream in to.streams if stream.message is action.message]:
                    to.streams.remove(stream)
                    if stream.inflow is not None:
                        to.core.message_reset(stream.inflow)
        return True

    def hear(self, side: Side) -> bool:
        """One piece of control bytes arrives."""
        if not side.control:
            return False
        for message in side.reader.feed(side.control.popleft()):
            side.said.append(message)
            if isinstance(message, Hello):
                side.core.hello(message, self.now)
                side.greeted = True
            else:
                side.core.control(message, self.now)
        return True

    def flow(self, side: Side, index: int = 0) -> bool:
        """One piece of one message stream arrives; messages wait for the Hello, as in a session."""
        if not side.streams or not side.greeted:
            return False
        stream = side.streams[index % len(side.streams)]
        if not stream.begun:
            stream.begun = True
            stream.inflow = side.core.message_begin(Header.decode(stream.header))
            if stream.inflow is None:
                side.streams.remove(stream)
                return True
        inflow = stream.inflow
        assert inflow is not None
        if not inflow.alive:
            side.streams.remove(stream)
            return True
        piece = stream.payload[stream.offset : stream.offset + self.chunk]
        self.moved += len(piece)
        inflow.view[inflow.filled : inflow.filled + len(piece)] = piece
        inflow.filled += len(piece)
        stream.offset += len(piece)
        if stream.offset == len(stream.payload):
            side.streams.remove(stream)
            side.core.message_end(inflow)
        return True

    def walk(self, moves: str) -> None:
        """Moves by their first letters: "pa" pulls an action of a, "hb" lets b hear, "fb" lets a stream flow to b."""
        for work, side in moves.split():
            {"p": self.pull, "h": self.hear, "f": self.flow}[work](getattr(self, side))

    def settle(self) -> None:
        for _ in range(200_000):
            if any(work(side) for side in (self.a, self.b) for work in (self.pull, self.hear, self.flow)):
                continue
            late = [side.core for side in (self.a, self.b) if self.joined and side.core.news_ns is not None]
            if not late:
                return
            self.now = max(self.now, *(core.news_ns or 0 for core in late))
            for core in late:
                core.handle_timer(self.now)
        raise AssertionError("the two sides never come to rest")

    # what tests do most

    def send(self, number: int, size: int, *, side: Side | None = None, view: int = 0) -> Outgoing:
        core = (side or self.a).core
        return core.send(tag(number, view=view), memoryview(payload(number, size)), lambda message: None)

    def post(self, number: int, size: int, *, side: Side | None = None, view: int = 0) -> Posted:
        core = (side or self.b).core
        return core.post(tag(number, view=view), memoryview(bytearray(size)), lambda posted: None)

    def credit_used(self) -> int:
        return self.a.core._outbox.credit_used


def holds(posted: Posted, number: int) -> bool:
    return posted.done and posted.error is None and bytes(posted.buffer) == payload(number, len(posted.buffer))


def assert_clean(pair: Pair) -> None:
    """Nothing is left of finished work: no credit, no memory, no entry in a table."""
    for side in (pair.a, pair.b):
        out, inn = side.core._outbox, side.core._inbox
        assert out.credit_used == 0
        assert out._offered == 0
        assert not out._outgoing
        assert not out._queue
        assert not out._cancelled
        assert not out._app
        assert out._app_bytes == 0
        assert inn.held_bytes == 0
        assert not inn._inflows
        assert not inn._held
        assert not inn._offers
        assert not inn._offer_tags
        assert not inn._granted
        assert not inn._failures
        assert not inn.receipts._rejected
        assert not inn._posted
        assert len(inn.receipts._received) <= 1
        assert inn.receipts._received.upto == pair.other(side).core._outbox._next


class Flip:
    """Spoils the first `times` payloads that it sees."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, view: memoryview) -> None:
        if self.times > 0:
            self.times -= 1
            view[len(view) // 2] ^= 0x10
