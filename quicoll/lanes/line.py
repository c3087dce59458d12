"""The socket between two processes of one program: whole messages, in order, each way; it ends with either of the two.

A message goes as packets of the socket: each begins with a byte that says whether more of the message follows.

What the system does not take at once waits here, at most MOST_WAITING packets: a process that reads no more has hung,
and its line ends as if it had ended.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["ProcessLine"]

MOST_WAITING: Final = 10_000
_LONGEST: Final = 128 << 10  # of a packet; the system carries a little more
_LAST, _MORE = b"\0", b"\1"


class ProcessLine:
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
        self._slab = memoryview(bytearray(_LONGEST + 1))
        self._begun: list[bytes] = []  # packets of a message of which the last one has not come
        self.closed = False
        loop.add_reader(end.fileno(), self._readable)

    def send(self, data: bytes) -> None:
        """Send a message; nothing happens where the line has ended."""
        last = max(0, len(data) - 1) // _LONGEST * _LONGEST
        for at in range(0, last, _LONGEST):
            self._send(_MORE + data[at : at + _LONGEST])
        self._send(_LAST + data[last:])

    def _send(self, packet: bytes) -> None:
        if self.closed:
            return
        if not self._waiting and self._sent(packet):
            return
        if not self.closed:
            if not self._waiting:
                self._loop.add_writer(self._end.fileno(), self._writable)
            self._waiting.append(packet)
            if len(self._waiting) > MOST_WAITING:
                self._over()

    def _sent(self, packet: bytes) -> bool:
        try:
            self._end.send(packet)
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
            self._begun.append(bytes(self._slab[1:size]))
            if self._slab[0]:
                continue
            message = self._begun[0] if len(self._begun) == 1 else b"".join(self._begun)
            self._begun.clear()
            self._on_message(message)
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
