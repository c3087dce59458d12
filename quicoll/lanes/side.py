"""A process of this program's own beside the rank's, at the end of a line: it is started, spoken to, and ended.

    starting    what it is told waits on the line, which is there before the process is
    running     it reads that
    ended       the line has ended, or the process, whichever is seen first; what is left of it is killed

Started by a command, not forked: the rank's process has threads. On a thread, since that takes the system some
milliseconds. Nothing is left behind: the process ends with its line or with this process (quicoll.lanes.process), and
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
from collections.abc import Callable, Sequence

from quicoll.lanes.line import ProcessLine

__all__ = ["SideProcess"]

_END_S = 1.0  # for a process to end by itself
_STATUS_S = 0.2  # from the end of its line to that

_BEGIN = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))"
)


class SideProcess:
    """See the module's head. On one loop."""

    def __init__(
        self,
        module: str,
        descriptors: Sequence[int],
        *,
        name: str,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Start it.

        Args:
            module: Its `main` is called with the number of its end of the line, and of each of `descriptors`.
            descriptors: What it gets besides; they are closed here once it has them.
            name: Of the thread that starts it.
            loop: Where this is called back.
            on_message: Called with each message of the process.
            on_end: Called once, when it has ended without having been closed: why.
        Raises:
            OSError: There is no socket for it. The descriptors are closed.
        """
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end
        self._told = False
        self._why = ""  # it is ended from here
        self._process: subprocess.Popen[bytes] | None = None
        self._process_end = -1  # its pidfd
        self._gone: asyncio.Future[None] = loop.create_future()  # and its status taken
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            for each in descriptors:
                os.close(each)
            raise
        self._line = ProcessLine(ours, loop=loop, on_message=self._heard, on_end=self._line_ended)
        starting = threading.Thread(
            target=self._start, args=(module, theirs, tuple(descriptors)), name=name, daemon=True
        )
        starting.start()

    def _start(self, module: str, line: socket.socket, descriptors: tuple[int, ...]) -> None:
        """On a thread of its own."""
        process: subprocess.Popen[bytes] | None = None
        why = ""
        numbers = (line.fileno(), *descriptors)
        command = [sys.executable, "-c", _BEGIN, json.dumps(sys.path), module, *map(str, numbers)]
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter, and no shell
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=numbers
            )
        except OSError as error:
            why = f"it cannot be started: {error}"
        finally:
            line.close()
            for each in descriptors:
                os.close(each)
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
            self.fail(why)
            return
        try:
            self._process_end = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            self._gone.set_result(None)
            self.fail("its end cannot be seen")
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
        self.fail(
            self._why or f"its process has ended ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
        )

    def _heard(self, data: bytes) -> None:
        if not self._told:
            self._on_message(data)

    def _line_ended(self) -> None:
        """In a moment the system says with which status its process has ended; if not, it has hung."""
        self._loop.call_later(_STATUS_S, self.fail, "it reads nothing any more")

    def fail(self, why: str) -> None:
        """It has ended, or is ended for what it does: say why, unless that was said before or it was closed."""
        told, self._told = self._told, True
        self._line.close()
        self._end_process()
        if not told:
            self._on_end(why)

    def _end_process(self) -> None:
        if self._process is not None and not self._gone.done():
            self._process.kill()

    def end(self, why: str) -> None:
        """End it at once, and say why when it is gone: then it touches nothing any more that it had of this process."""
        self._why = why
        if self._process is None:
            self.fail(why)
            return
        self._end_process()
        self._loop.call_later(_END_S, self.fail, why)  # one that the system does not end touches nothing either

    @property
    def pid(self) -> int | None:
        """The number of its process; None before it is started."""
        return None if self._process is None else self._process.pid

    def send(self, data: bytes) -> None:
        """Tell it something; nothing happens where it has ended."""
        self._line.send(data)

    def kill(self) -> None:
        """End it at once; nobody hears anything of it any more."""
        self._told = True
        self._line.close()
        self._end_process()

    async def aclose(self) -> None:
        """End it, and wait for that, for some seconds at most."""
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
