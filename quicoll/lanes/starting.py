"""The engine's side of a lane's process: it is started, gets its orders, and is ended. A simulated one is likewise.

The process and its states: side.py. The memory that the two share has no name.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import msgspec

from quicoll.lanes.memory import SLOTS, LaneMemory
from quicoll.lanes.orders import LaneFailed, OpenLane, RenewLane, decode_report, encode_told
from quicoll.lanes.shown import shown
from quicoll.lanes.side import SideProcess

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from quicoll.lanes.memory import LanePlaces
    from quicoll.lanes.orders import LaneOrder, LaneReport, LaneSettings
    from quicoll_transport.security.credentials import Credentials

__all__ = ["LaneHandle", "LaneHost", "LaneProcesses"]


class LaneHandle(Protocol):
    """A lane's process, as its engine has it. memory: that they share."""

    @property
    def memory(self) -> LanePlaces: ...
    def order(self, order: LaneOrder) -> None:
        """Give an order; nothing happens where it has ended."""
        ...

    def renew(self, credentials: Credentials) -> None:
        """Have it show another certificate."""
        ...

    def kill(self) -> None:
        """End it at once; its engine hears nothing of it any more."""
        ...

    async def aclose(self) -> None:
        """End it, and wait for that, for some seconds at most."""
        ...


class LaneHost(Protocol):
    """Where lanes run. slots: of a lane, for each direction."""

    @property
    def slots(self) -> int: ...

    def start(
        self,
        settings: LaneSettings,
        credentials: Credentials,
        *,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[LaneReport], None],
        on_end: Callable[[str], None],
    ) -> LaneHandle:
        """Start a lane.

        Args:
            settings: Of the lane.
            credentials: Of the rank.
            loop: The engine's, where it is called back.
            on_report: Called with each report.
            on_end: Called once, when it has ended without having been closed: why.
        Raises:
            OSError: There is no memory for it.
        """
        ...


class LaneProcesses:
    """Processes of this system: LaneHost."""

    slots = SLOTS

    def start(
        self,
        settings: LaneSettings,
        credentials: Credentials,
        *,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[LaneReport], None],
        on_end: Callable[[str], None],
    ) -> LaneHandle:
        return _LaneProcess(settings, credentials, loop=loop, on_report=on_report, on_end=on_end)


class _LaneProcess:
    def __init__(
        self,
        settings: LaneSettings,
        credentials: Credentials,
        *,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[LaneReport], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.memory, descriptor = LaneMemory.new(settings.largest, settings.slots)
        self._on_report = on_report
        self._process = SideProcess(
            "quicoll.lanes.process",
            (descriptor,),
            name="quicoll-lane",
            loop=loop,
            on_message=self._report,
            on_end=on_end,
        )
        self.order(OpenLane(parent=os.getpid(), settings=settings, shown=shown(credentials)))

    def _report(self, data: bytes) -> None:
        try:
            report = decode_report(data)
        except msgspec.MsgspecError:
            self._process.fail("it said what no lane says")
            return
        if isinstance(report, LaneFailed):
            self._process.fail(report.why)
        else:
            self._on_report(report)

    def order(self, order: LaneOrder) -> None:
        self._process.send(encode_told(order))

    def renew(self, credentials: Credentials) -> None:
        self.order(RenewLane(shown(credentials)))

    def kill(self) -> None:
        self._process.kill()

    async def aclose(self) -> None:
        await self._process.aclose()
