"""The engine's side of a lane's process: it is started, gets its orders, and is ended. A simulated one is likewise.

    starting    its orders wait on the line, which is there before the process is
    running     it reads them
    ended       the line has ended, or the process, whichever is seen first; what is left of it is killed

Started by a command, not forked: the engine's process has threads. On a thread, since that takes the system some
milliseconds. Nothing is left behind: the memory has no name, the process ends with its line or with this process, and
its status is taken when it ends. A child that this process forks has copies of descriptors, and no part in any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Protocol

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from quicoll.lanes.line import LaneLine
from quicoll.lanes.memory import SLOTS, LaneMemory
from quicoll.lanes.orders import LaneFailed, OpenLane, RenewLane, decode_report, encode_told

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.lanes.memory import LanePlaces
    from quicoll.lanes.orders import LaneOrder, LaneReport, LaneSettings
    from quicoll_transport.security.credentials import Credentials

__all__ = ["LaneHandle", "LaneHost", "LaneProcesses", "shown_to_lane"]

_END_S = 1.0  # for a process to end by itself
_STATUS_S = 0.2  # from the end of its line to that

_BEGIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from quicoll.lanes.process import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


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


def shown_to_lane(credentials: Credentials) -> tuple[tuple[bytes, ...], int, bytes]:
    """Return certificates, how many are of the chain, and key, as an order has them. They go over the line alone."""
    certificates = (credentials.certificate, *credentials.chain, *credentials.trust)
    key = credentials.private_key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return tuple(each.public_bytes(Encoding.DER) for each in certificates), len(credentials.chain), key


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
        self._loop = loop
        self._on_report = on_report
        self._on_end = on_end
        self._told = False
        self._process: subprocess.Popen[bytes] | None = None
        self._process_end = -1  # its pidfd
        self._gone: asyncio.Future[None] = loop.create_future()  # and its status taken
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            os.close(descriptor)
            raise
        self._line = LaneLine(ours, loop=loop, on_message=self._report, on_end=self._line_ended)
        certificates, chained, key = shown_to_lane(credentials)
        self.order(
            OpenLane(
                parent=os.getpid(),
                settings=settings,
                certificates=certificates,
                chained=chained,
                key=key,
            )
        )
        threading.Thread(target=self._start, args=(theirs, descriptor), name="quicoll-lane", daemon=True).start()

    def _start(self, line: socket.socket, memory: int) -> None:
        """On a thread of its own."""
        process: subprocess.Popen[bytes] | None = None
        why = ""
        command = [sys.executable, "-c", _BEGIN, json.dumps(sys.path), str(line.fileno()), str(memory)]
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter, and no shell
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(line.fileno(), memory)
            )
        except OSError as error:
            why = f"it cannot be started: {error}"
        finally:
            line.close()
            os.close(memory)
        try:
            self._loop.call_soon_threadsafe(self._started, process, why)
        except RuntimeError:  # the loop is closed
            if process is not None:
                process.kill()
                process.wait()

    def _started(self, process: subprocess.Popen[bytes] | None, why: str) -> None:
        self._process = process
        if process is None:
            self._gone.set_result(None)
            self._over(why)
            return
        try:
            self._process_end = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            self._gone.set_result(None)
            self._over("its end cannot be seen")
            return
        self._loop.add_reader(self._process_end, self._exited)
        if self._told:  # closed, or killed, before it was there
            self._end_process()

    def _exited(self) -> None:
        process = self._process
        if process is None:
            return
        self._loop.remove_reader(self._process_end)
        os.close(self._process_end)
        status = process.wait()
        if not self._gone.done():
            self._gone.set_result(None)
        self._over(f"its process has ended ({f'signal {-status}' if status < 0 else f'exit status {status}'})")

    def _report(self, data: bytes) -> None:
        try:
            report = decode_report(data)
        except msgspec.MsgspecError:
            self._over("it said what no lane says")
            return
        if isinstance(report, LaneFailed):
            self._over(report.why)
        elif not self._told:
            self._on_report(report)

    def _line_ended(self) -> None:
        """In a moment the system says with which status its process has ended; if not, it has hung."""
        self._loop.call_later(_STATUS_S, self._over, "it reads no orders any more")

    def _over(self, why: str) -> None:
        told, self._told = self._told, True
        self._line.close()
        self._end_process()
        if not told:
            self._on_end(why)

    def _end_process(self) -> None:
        if self._process is not None and not self._gone.done():
            self._process.kill()

    def order(self, order: LaneOrder) -> None:
        self._line.send(encode_told(order))

    def renew(self, credentials: Credentials) -> None:
        certificates, chained, key = shown_to_lane(credentials)
        self.order(RenewLane(certificates=certificates, chained=chained, key=key))

    def kill(self) -> None:
        self._told = True
        self._line.close()
        self._end_process()

    async def aclose(self) -> None:
        told, self._told = self._told, True
        self._line.close()  # it ends with its line, and says good-bye
        if told:
            self._end_process()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self._gone)
                return
        self._end_process()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self._gone)
