"""One lane of this rank, as its engine has it: its process, its slots, and who uses them for what.

    starting    it has not said where it is reached
    open        it has; it carries what it is given
    ended       its process has ended, was never there, or did not answer: why. It is not started again

Invariants:
    - a slot is in one use at a time; it is free again when the lane says that the use is over, however it went
    - what is to be received waits for a slot, in the order in which it came. Each slot that it waits for holds what a
      peer has sent already, and is copied and free as soon as that is here; so it waits for the network alone
    - nothing that is to be sent waits: where no slot is free, its sender has another way
    - a lane that is open is asked for a sign of life SILENT_PARTS times in lost_after, and killed when it has given
      none for as many questions. One that is starting has START_S
    - after the end nobody is called back, but by `on_ended`, once

The questions are counted, not timed: where this process stood still, the answer is read before the next question.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quicoll.engine.lane_rate import LaneRate
from quicoll.lanes.orders import (
    DenyLane,
    LaneApart,
    LaneCancel,
    LaneOpened,
    LaneOver,
    LanePaired,
    LanePing,
    LanePong,
    LaneReceive,
    LaneSend,
    LaneView,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from quicoll.lanes.orders import (
        JoinLane,
        LaneDeadlines,
        LaneIncarnation,
        LaneOrder,
        LaneReport,
        LaneSettings,
        PartLanes,
    )
    from quicoll.lanes.starting import LaneHandle, LaneHost
    from quicoll_transport.security.credentials import Credentials

__all__ = ["LaneListener", "OwnLane"]

START_S: Final = 60.0  # on a machine that is busy with the start of many processes
SILENT_PARTS: Final = 4


@dataclass(slots=True, eq=False)
class LaneListener:
    """Whom a lane tells, each time with itself first.

    opened: it has an address. paired: (view, node). apart: (view, node, why). ended: why.
    """

    opened: Callable[[OwnLane], None]
    paired: Callable[[OwnLane, int, str], None]
    apart: Callable[[OwnLane, int, str, str], None]
    ended: Callable[[OwnLane, str], None]


@dataclass(slots=True, eq=False)
class _Use:
    slot: int  # -1: it waits for one
    nbytes: int
    heard: Callable[[memoryview | None], None] | None  # of what is received
    order: LaneReceive | None = None  # what waits


class OwnLane:
    """See the module's head. address: where others reach it; None while it starts. why: it has ended; "" before.
    rate: at which it sends, and what it has to send."""

    def __init__(
        self,
        index: int,
        settings: LaneSettings,
        credentials: Credentials,
        *,
        host: LaneHost,
        loop: asyncio.AbstractEventLoop,
        listener: LaneListener,
    ) -> None:
        """Start it.

        Args:
            index: Of this rank's lanes.
            settings: What it is opened with.
            credentials: The rank's.
            host: Where it runs.
            loop: The engine's.
            listener: Whom it tells.
        Raises:
            OSError: There is no memory for it.
        """
        self.index = index
        self.address: tuple[str, int] | None = None
        self.why = ""
        self.rate = LaneRate()
        self._listener = listener
        self._loop = loop
        self._slots = settings.slots
        self._out = list(range(settings.slots))  # taken from the end: what was used last is still in the caches
        self._in = list(range(settings.slots, 2 * settings.slots))
        self._made: dict[int, None] = {}  # slots that have memory
        self._uses: dict[int, _Use] = {}
        self._waiting: deque[int] = deque()  # receives without a slot
        self._unanswered = 0
        self._pace = settings.lost_ns / 1e9 / SILENT_PARTS
        self._handle: LaneHandle = host.start(
            settings, credentials, loop=loop, on_report=self._report, on_end=self._ended
        )
        self._timer = loop.call_later(START_S, self._late)

    def _late(self) -> None:
        self._kill(f"it was not there after {START_S:g} s")

    def _ask(self) -> None:
        if self._unanswered >= SILENT_PARTS:
            self._kill("it does not answer")
            return
        self._unanswered += 1
        self._handle.order(LanePing())
        self._timer = self._loop.call_later(self._pace, self._ask)

    def _kill(self, why: str) -> None:
        self._handle.kill()
        self._ended(why)

    def _ended(self, why: str) -> None:
        if not self.why:
            self.why = why or "it has ended"
            self._timer.cancel()
            self._uses.clear()
            self._waiting.clear()
            self._listener.ended(self, self.why)

    def set_deadlines(self, order: LaneDeadlines) -> None:
        """Let it make links with other deadlines, and answer within them."""
        self._pace = order.lost_ns / 1e9 / SILENT_PARTS
        self._give(order)

    def order(self, order: JoinLane | PartLanes | LaneIncarnation) -> None:
        """Give an order that is no use of a slot."""
        self._give(order)

    def _give(self, order: LaneOrder) -> None:
        if not self.why:
            self._handle.order(order)

    def gather(self, view_id: int, nodes: Sequence[str]) -> None:
        """A view begins: what is under way of the one before ends, and nobody hears of it."""
        for use in self._uses.values():
            use.heard = None
        for number in self._waiting:
            del self._uses[number]
        self._waiting.clear()
        self._give(LaneView(view_id, tuple(nodes)))

    def renew(self, credentials: Credentials) -> None:
        """Show another certificate from now on."""
        if not self.why:
            self._handle.renew(credentials)

    def deny(self, fingerprint: str) -> None:
        """Shut a certificate out."""
        self._give(DenyLane(fingerprint))

    def send(self, number: int, view_id: int, node: str, payload: memoryview) -> bool:
        """Send a copy of a payload to the lane of a node; it is named by this number, which none before had.

        Returns:
            Whether there was a slot for it. What becomes of it the receiver's engine says.
        """
        if self.why or not self._out or not self._has_memory(self._out[-1]):
            return False
        slot, nbytes = self._out.pop(), len(payload)
        self._handle.memory.place(slot, nbytes)[:] = payload
        self._uses[number] = _Use(slot, nbytes, None)
        self.rate.begun(nbytes, self._now_ns())
        self._handle.order(LaneSend(number, view_id, node, slot, nbytes))
        return True

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def _has_memory(self, slot: int) -> bool:
        if slot not in self._made:
            try:
                self._handle.memory.make(slot)
            except OSError:
                return False
            self._made[slot] = None
        return True

    def receive(
        self,
        number: int,
        view_id: int,
        node: str,
        *,
        sent: int,
        nbytes: int,
        heard: Callable[[memoryview | None], None],
    ) -> None:
        """Receive what the lane of a node has sent.

        Args:
            number: Of this use, which none before had.
            view_id: The view.
            node: The node.
            sent: Its number there.
            nbytes: How many bytes it has.
            heard: Called with where it stands, to be copied at once; with None where it does not come.
        """
        self._uses[number] = _Use(-1, nbytes, heard, LaneReceive(number, view_id, node, sent, -1, nbytes))
        self._waiting.append(number)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._in and not self.why:
            if not self._has_memory(self._in[-1]):
                if self._slots - len(self._in):
                    return  # what is free next has memory
                self._kill("there is no memory for it")
                return
            use = self._uses[self._waiting.popleft()]
            order, use.order = use.order, None
            if order is not None:
                use.slot = self._in.pop()
                self._handle.order(
                    LaneReceive(order.number, order.view_id, order.node, order.sent, use.slot, order.nbytes)
                )

    def cancel(self, number: int) -> None:
        """Nobody waits for what is received under this number any more."""
        use = self._uses.get(number)
        if use is None:
            return
        use.heard = None
        if use.slot < 0:
            del self._uses[number]
            self._waiting.remove(number)
        else:
            self._give(LaneCancel(number))

    def _report(self, report: LaneReport) -> None:
        if self.why:
            return
        match report:
            case LaneOver():
                self._over(report)
            case LanePong():
                self._unanswered = 0
            case LanePaired():
                self._listener.paired(self, report.view_id, report.node)
            case LaneApart():
                self._listener.apart(self, report.view_id, report.node, report.why)
            case LaneOpened():
                self.address = report.host, report.port
                self._timer.cancel()
                self._ask()
                self._listener.opened(self)

    def _over(self, report: LaneOver) -> None:
        use = self._uses.pop(report.number, None)
        if use is None:
            return
        if use.slot < self._slots:
            self._out.append(use.slot)
            self.rate.ended(use.nbytes, self._now_ns(), well=report.well)
            return
        if use.heard is not None:
            use.heard(self._handle.memory.place(use.slot, use.nbytes) if report.well else None)
        self._in.append(use.slot)
        self._fill()

    async def aclose(self) -> None:
        """End it, and wait for that."""
        if not self.why:
            self.why = "the engine is closed"
            self._timer.cancel()
            self._uses.clear()
            self._waiting.clear()
        await self._handle.aclose()
