"""Buffers that wait for messages, and messages on their way into them."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from quicoll_transport.errors import MessageRefused, TransportError
from quicoll_transport.link.frames import CHANNEL_TAG_SIZE, Header

__all__ = ["NOTHING", "Discards", "Inflow", "Posted", "UnclaimedMessage"]

NOTHING = memoryview(b"")
_MAPPED = 1 << 20  # from here on memory is mapped, so that a size which was only named costs no pages
_MAX_DISCARDED = 16384  # prefixes remembered; what comes later for an older one is held, and costs credit


class Posted:
    """A buffer waiting for its message; `error` None and `done` True mean that it holds verified bytes."""

    __slots__ = ("buffer", "done", "error", "inflow", "limit", "on_done", "tag", "void")

    def __init__(
        self, tag: bytes, buffer: memoryview, on_done: Callable[[Posted], None], *, limit: int | None = None
    ) -> None:
        self.tag = tag
        self.buffer = buffer
        self.on_done = on_done
        self.limit = limit  # its memory is made when the message's size is known, up to so many bytes; None: it is here
        self.done = False
        self.error: TransportError | None = None
        self.inflow: Inflow | None = None  # the message that is being written into it
        self.void = False  # the sender withdrew the message whose place this is

    def place(self, length: int, data: memoryview | None = None, *, peer: str) -> TransportError | None:
        """Make it ready for `length` bytes, or hand `data` over to it; the reason when it cannot be."""
        if self.limit is None:
            if length != len(self.buffer):
                return MessageRefused(
                    f"the message has {length} bytes where a buffer of {len(self.buffer)} is posted", peer=peer
                )
            if data is not None:
                self.buffer[:] = data
        elif length > self.limit:
            return MessageRefused(f"the message has {length} bytes, above the limit of {self.limit}", peer=peer)
        elif data is not None:
            self.buffer = data
        elif length != len(self.buffer):
            try:
                self.buffer = _memory(length)
            except (MemoryError, OverflowError, OSError):
                return MessageRefused(f"there is no memory for {length} bytes", peer=peer)
        return None


class Inflow:
    """A message that is arriving: the session writes payload bytes into `view` from `filled` on."""

    __slots__ = ("alive", "filled", "header", "paused", "posted", "view")

    def __init__(self, header: Header, view: memoryview, posted: Posted | None, filled: int = 0) -> None:
        self.header = header
        self.view = view
        self.posted = posted
        self.filled = filled
        self.alive = True  # False once nobody wants it any more; the session stops its stream
        self.paused = False  # its connection died; it continues on the next one, as another object


class UnclaimedMessage:
    """A verified eager message that nobody has posted a buffer for yet; with `error`, one that will never come."""

    __slots__ = ("data", "error", "header")

    def __init__(self, header: Header, data: memoryview, error: TransportError | None = None) -> None:
        self.header = header
        self.data = data
        self.error = error


class Discards:
    """Prefixes of tags whose messages nobody wants; those of channels are never among them."""

    def __init__(self) -> None:
        self._prefixes: dict[bytes, None] = {}
        self._sizes: list[int] = []

    def add(self, prefix: bytes) -> None:
        if prefix in self._prefixes:
            return
        self._prefixes[prefix] = None
        if len(self._prefixes) > _MAX_DISCARDED:
            del self._prefixes[next(iter(self._prefixes))]
        if len(prefix) not in self._sizes:
            self._sizes.append(len(prefix))

    def __contains__(self, tag: bytes) -> bool:
        if is_of_caller(tag):
            for size in self._sizes:
                if tag[:size] in self._prefixes:
                    return True
        return False


def is_of_caller(tag: bytes) -> bool:
    """Return whether a tag was chosen by a caller, and does not name a place in a channel."""
    return len(tag) != CHANNEL_TAG_SIZE


def _memory(length: int) -> memoryview:
    """Zeroed memory; ACCESS_COPY makes a mapping private, so that pages nobody wrote to cost nothing."""
    return memoryview(mmap.mmap(-1, length, access=mmap.ACCESS_COPY) if length >= _MAPPED else bytearray(length))
