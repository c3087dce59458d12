"""The process of a lane: an endpoint of its own, a worker, and the line to its engine.

Run by quicoll.lanes.starting with two descriptors: the line, and the memory. It ends with its line, which is closed by
the engine or by its end, however that comes; and with the engine's process, where a child of that one still holds the
line's other end. It goes no way of its own: what a terminal or a launcher sends to all processes of a group (SIGINT,
SIGTERM, SIGHUP) is the program's affair, which tells its engine.

It imports the transport and no more, so that it starts quickly.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

from quicoll.lanes.line import ProcessLine
from quicoll.lanes.memory import LaneMemory
from quicoll.lanes.orders import LaneFailed, LaneReport, OpenLane, RenewLane, decode_order, encode_told
from quicoll.lanes.shown import credentials_shown
from quicoll.lanes.worker import LaneWorker
from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.endpoint.loops import with_own_clock
from quicoll_transport.errors import TransportError
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.identity import WORKER
from quicoll_transport.security.policy import Policy

__all__ = ["main"]

_GOODBYE_S = 0.2  # to say good-bye to the other lanes; they would find out by its silence


class _Lane:
    def __init__(self, line: socket.socket, memory: int, loop: asyncio.AbstractEventLoop) -> None:
        self._memory = memory
        self._loop = loop
        self._endpoint: Endpoint | None = None
        self._worker: LaneWorker | None = None
        self.over = loop.create_future()
        self._line = ProcessLine(line, loop=loop, on_message=self._obey, on_end=self.end)

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _tell(self, report: LaneReport) -> None:
        self._line.send(encode_told(report))

    def _obey(self, data: bytes) -> None:
        order = decode_order(data)
        try:
            if isinstance(order, OpenLane):
                self._open(order)
            elif self._worker is None or self._endpoint is None:
                pass  # it could not be opened
            elif isinstance(order, RenewLane):
                self._endpoint.rotate(credentials_shown(order.shown))
            else:
                self._worker.obey(order)
        except (TransportError, OSError) as error:
            self._tell(LaneFailed(str(error)[:500]))

    def _open(self, order: OpenLane) -> None:
        if order.parent != os.getppid():
            self.end()
            return
        self._loop.add_reader(os.pidfd_open(order.parent), self.end)
        credentials, settings = credentials_shown(order.shown), order.settings
        worker = LaneWorker(
            job=credentials.identity.job,
            memory=LaneMemory(self._memory, settings.largest, settings.slots),
            tell=self._tell,
        )
        self._endpoint = Endpoint(
            credentials=credentials,
            config=EndpointConfig(
                lost_after_ns=settings.lost_ns,
                connect_ns=settings.connect_ns,
                session=SessionConfig(congestion=settings.congestion, parity=settings.parity),
            ),
            io=UdpSocket(settings.host, 0, loop=self._loop),
            loop=self._loop,
            incarnation=settings.incarnation,
            authorize=Policy(roles=(WORKER,), denied=settings.denied),
            on_link=worker.on_link,
        )
        worker.use(self._endpoint)
        self._worker = worker

    async def close(self) -> None:
        if self._endpoint is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._endpoint.aclose(timeout=0.0, reason="its rank has ended"), _GOODBYE_S)


async def _run(line: int, memory: int) -> None:
    lane = _Lane(socket.socket(fileno=line), memory, with_own_clock(asyncio.get_running_loop()))
    await lane.over
    await lane.close()


def main(line: int, memory: int) -> None:
    """Be a lane, until the line ends.

    Args:
        line: Descriptor of its end of the line.
        memory: Descriptor of the memory.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    asyncio.run(_run(line, memory))
    sys.stdout.flush()
