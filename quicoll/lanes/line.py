"""The socket between an engine and its lane: whole messages, in order, each way; it ends with either of the two.

What the system does not take at once waits here, at most MOST_WAITING messages: a lane that reads no more has hung, and
its line ends as if it had ended.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["LaneLine"]

MOST_WAITING: Final = 10_000
_LONGEST: Final = 192 << 10  # a Gather of 1024 nodes; the system carries a little more


class LaneLine:
    """One end. On one loop."""

    def __init__(
        self,
        end: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """Listen.

        Args:
            end: A SOCK_SEQPACKET socket, which belongs to the line from here on.
            loop: Where it is read.
            on_message: Called with each message.
            on_end: Called once, where the other end is gone, or reads no more; not after `close`.
        """
        end.setblocking(False)
        self._end = end
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end
        self._waiting: deque[bytes] = deque()
        self._slab = memoryview(bytearray(_LONGEST))
        self.closed = False
        loop.add_reader(end.fileno(), self._readable)

    def send(self, data: bytes) -> None:
        """Send a message; nothing happens where the line has ended."""
        if self.closed:
            return
        if not self._waiting and self._sent(data):
            return
        if not self.closed:
            if not self._waiting:
                self._loop.add_writer(self._end.fileno(), self._writable)
            self._waiting.append(data)
            if len(self._waiting) > MOST_WAITING:
                self._over()

    def _sent(self, data: bytes) -> bool:
        try:
            self._end.send(data)
        except BlockingIOError:
            return False
        except OSError:
            self._loop.call_soon(self._over)  # not in the middle of what its caller does
        return True

    def _writable(self) -> None:
        while self._waiting and self._sent(self._waiting[0]):
            self._waiting.popleft()
        if not self._waiting and not self.closed:
            self._loop.remove_writer(self._end.fileno())

    def _readable(self) -> None:
        for _ in range(64):
            try:
                size = self._end.recv_into(self._slab)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not size:
                self._over()
                return
            self._on_message(bytes(self._slab[:size]))
            if self.closed:
                return

    def _over(self) -> None:
        if not self.closed:
            self.close()
            self._on_end()

    def close(self) -> None:
        """Send and hear nothing more."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._end.fileno())
                self._loop.remove_writer(self._end.fileno())
            self._end.close()
