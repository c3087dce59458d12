"""One stream in one direction: what is to be sent and what of it has to go again; what has arrived and where it goes.

Sending (RFC 9000 section 3.1). A SendStream holds views of the caller's memory, in order; bytes are read from there
whenever they are sent, also again, until they are acknowledged. `reset` and `release` let go of all of it at once:
records of packets in flight name the stream and never the memory.

    bytes [0, upto)     acknowledged; the memory has been let go of
    [upto, next)        sent: each is acknowledged (`acked`), lost (`lost`: it goes first), or in flight
    [next, length)      never sent; of these, the peer's limit lets [next, limit) go

Receiving (section 3.2). Bytes of a ReceiveStream go to one of three places:

    held        until its reader takes them, in order (`read`). The start of a message, and the control stream
    a target    straight to its offset in the receiver's memory (`direct`), in whatever order they come
    nowhere     nobody wants them (`discard`); they are counted, and the peer was asked to stop

Invariants: nothing below `upto` is written again, so what was counted as having arrived stays as it is; nothing is
written into a target that is not `alive`; `final` never changes. What is held is bounded by flow control, which counts
from what was taken. Holes are bounded by whoever owns the streams (`holes`).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quicoll_transport.errors import ProtocolError
from quicoll_transport.link.ranges import Ranges
from quicoll_transport.quic.flow import Allowance
from quicoll_transport.quic.frames import FINAL_SIZE_ERROR, FrameError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.uint8]
    """A table of bytes: the pieces of a stream that packets of one size carry, one after the other."""

__all__ = ["ReceiveStream", "SendStream", "StreamTarget"]

_JOINED = 1200  # bytes written one after the other become one piece as long as it fits a packet


class SendStream:
    """See the module's head. limit: what the peer allows on it (RFC 9000 section 4.1)."""

    __slots__ = ("_bases", "_views", "acked", "fin", "fin_acked", "fin_lost", "fin_sent", "id", "key", "length",
                 "limit", "lost", "next", "queue", "reset_code", "told", "upto", "urgent")  # fmt: skip

    def __init__(self, stream_id: int, limit: int, *, key: object = None, urgent: bool = False) -> None:
        """key: the owner's name for it. urgent: it goes before all that are not."""
        self.id, self.limit, self.key, self.urgent = stream_id, limit, key, urgent
        self.length = self.next = self.upto = 0
        self.fin = self.fin_sent = self.fin_lost = self.fin_acked = False
        self.queue: list[SendStream] | None = None  # in which whoever keeps the order of streams has it
        self.lost = Ranges()
        self.acked = Ranges()  # beyond `upto`
        self.reset_code: int | None = None
        self.told = -1  # the limit at which the peer last heard that we are blocked
        self._bases: list[int] = []
        self._views: list[bytes | memoryview] = []

    def write(self, data: bytes | memoryview, *, fin: bool = False) -> None:
        """Append flat bytes; a memoryview is read in place until its bytes are acknowledged."""
        size = len(data)
        if size:
            last = self._views[-1] if self._views else None
            if (
                isinstance(data, bytes)
                and isinstance(last, bytes)
                and self._bases[-1] >= self.next
                and len(last) + size <= _JOINED
            ):
                self._views[-1] = last + data
            else:
                self._bases.append(self.length)
                self._views.append(data)
            self.length += size
        self.fin = self.fin or fin

    @property
    def waiting(self) -> int:
        """Bytes that are neither acknowledged nor in flight for the first time."""
        return self.length - self.upto

    def has_more(self) -> bool:
        """Return whether anything is to be sent, if the peer's limits allow it."""
        if self.reset_code is not None:
            return False
        return self.next < self.length or self.fin_lost or (self.fin and not self.fin_sent) or bool(self.lost)

    def take(self, most: int) -> tuple[int, int]:
        """Return the next [start, stop) to send, `most` bytes at most; nothing is noted."""
        if self.lost:
            start, stop = self.lost.first
        else:
            start, stop = self.next, self.length if self.length < self.limit else self.limit
        if stop - start <= most:
            return start, stop if stop > start else start
        return start, start + most

    def pieces(self, start: int, stop: int) -> list[bytes | memoryview]:
        """Return the bytes [start, stop), one at least, as `take` gave them: as they lie in memory, in order."""
        bases, views = self._bases, self._views
        i = bisect_right(bases, start) - 1
        found = [views[i][start - bases[i] : stop - bases[i]]]
        while (i := i + 1) < len(bases) and bases[i] < stop:
            found.append(views[i][: stop - bases[i]])
        return found

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Return the bytes [start, stop), as `pieces`; they are copied only where they are several."""
        found = self.pieces(start, stop)
        return found[0] if len(found) == 1 else b"".join(found)

    def sent(self, start: int, stop: int, *, fin: bool) -> int:
        """Take note that [start, stop) has been sent; return how many of these bytes were so for the first time."""
        if self.lost:
            self.lost.subtract(start, stop)
        fresh = stop - self.next
        if fresh > 0:
            self.next = stop
        if fin:
            self.fin_sent, self.fin_lost = True, False
        return fresh if fresh > 0 else 0

    def on_acked(self, start: int, stop: int, *, fin: bool) -> bool:
        """Take note that the peer has [start, stop); return whether it has everything now."""
        if self.reset_code is not None:
            return False
        if stop > start:
            if self.lost:
                self.lost.subtract(start, stop)
            if start <= self.upto and not self.acked:
                self.upto = max(self.upto, stop)
            else:
                self.acked.add(start, stop)
                self.upto = self.acked.absorb(self.upto)
            while self._bases and self._bases[0] + len(self._views[0]) <= self.upto:
                del self._bases[0], self._views[0]
        self.fin_acked = self.fin_acked or fin
        return self.fin_acked and self.upto == self.length

    def on_lost(self, start: int, stop: int, *, fin: bool) -> None:
        """Take note that [start, stop) has to go again, as far as the peer does not have it."""
        if self.reset_code is not None:
            return
        start = max(start, self.upto)
        if stop > start:
            self.lost.add(start, stop)
            for low, high in self.acked:
                if low >= stop:
                    break
                self.lost.subtract(low, high)
        self.fin_lost = self.fin_lost or (fin and not self.fin_acked)

    def reset(self, code: int) -> int:
        """Give the stream up and let go of its memory; return its final size (RFC 9000 section 4.5)."""
        self.reset_code = code
        self.release()
        return self.next

    def release(self) -> None:
        """Let go of all memory."""
        self._bases.clear()
        self._views.clear()
        self.lost, self.acked = Ranges(), Ranges()


class StreamTarget(Protocol):
    """Memory that takes the bytes of a stream, from an offset on; an Inflow is one.

    view: the memory. filled: how many of its bytes have arrived without a gap: where the stream begins, and written
    here as it goes on. alive: whether it may be written to.
    """

    view: memoryview
    filled: int
    alive: bool


class ReceiveStream:
    """See the module's head.

    allowance: what the peer may send on it. highest: of all that has arrived. upto: [0, upto) has arrived.
    final: its size, once it is known. discarded: whether nobody wants it.
    """

    __slots__ = ("_arrived", "_base", "_held", "_read", "_target", "_zero", "allowance", "discarded", "final",
                 "highest", "id", "key", "upto")  # fmt: skip

    def __init__(self, stream_id: int, window: int) -> None:
        self.id = stream_id
        self.allowance = Allowance(window)
        self.highest = self.upto = 0
        self.final: int | None = None
        self.discarded = False
        self.key: Any = None  # the reader's
        self._arrived = Ranges()  # beyond `upto`
        self._held = bytearray()  # from `_read` on
        self._read = 0
        self._target: StreamTarget | None = None
        self._base = 0  # of the first byte for the target,
        self._zero = 0  # and where its memory would begin in the stream: before that, if it goes on from the middle

    @property
    def holes(self) -> int:
        """How many gaps there are in what has arrived."""
        return len(self._arrived)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have arrived."""
        return self.upto == self.final

    @property
    def is_direct(self) -> bool:
        """Whether bytes need no reader: they go to a target, or nowhere."""
        return self._target is not None or self.discarded

    @property
    def is_orphaned(self) -> bool:
        """Whether the target does not want its bytes any more; the reader has to say what is to become of them."""
        return self._target is not None and not self._target.alive

    def has_gap(self, start: int, stop: int) -> bool:
        """Return whether any of the bytes [start, stop) has not arrived."""
        return stop > self.upto and not self._arrived.covers(max(start, self.upto), stop)

    @property
    def taken(self) -> int:
        """Bytes that make room for others."""
        return self.upto if self.is_direct else self._read

    def admit(self, stop: int, *, fin: bool) -> int:
        """Check that a frame may end at `stop`; return by how many bytes the stream has grown (RFC 9000 section 4.5).

        Raises:
            FrameError: It is beyond what was allowed, or does not fit the final size.
        """
        grown = max(0, stop - self.highest)
        if grown:
            self.allowance.demand(stop)
            if self.final is not None:
                raise FrameError(FINAL_SIZE_ERROR, f"stream {self.id}: data beyond the end")
            self.highest = stop
        if fin:
            self.finish(stop)
        return grown

    def finish(self, final: int) -> None:
        """Take the final size. Raises FrameError when it cannot be."""
        if self.final not in (None, final) or final < self.highest:
            raise FrameError(FINAL_SIZE_ERROR, f"stream {self.id}: another final size")
        self.final = final

    def place(self, offset: int, data: memoryview | Rows, size: int) -> int:
        """Put bytes that were admitted where they belong; return how many more holes there are now.

        Args:
            offset: Of the first.
            data: Flat bytes, or a table of them.
            size: How many they are.
        Raises:
            ProtocolError: They are more than the target takes.
        """
        stop, low = offset + size, self.upto
        if stop > low and not self.discarded:
            if self._target is None:
                self._hold(offset, data, size)
            else:
                self._put(self._target, offset, data, size)
        holes = len(self._arrived)
        if offset <= low and not holes:
            self.upto = max(low, stop)
        else:
            self._arrived.add(max(offset, low), stop)
            self.upto = self._arrived.absorb(low)
            holes = len(self._arrived) - holes
        if self._target is not None and self._target.alive and self.upto > self._base:
            self._target.filled = self.upto - self._zero
        return holes

    def _hold(self, offset: int, data: memoryview | Rows, size: int) -> None:
        flat = _flat(data)
        begin = max(offset, self.upto)
        end = offset + size - self._read
        if end > len(self._held):
            self._held.extend(bytes(end - len(self._held)))
        self._held[begin - self._read : end] = flat[begin - offset :]

    def _put(self, target: StreamTarget, offset: int, data: memoryview | Rows, size: int) -> None:
        if not target.alive:
            return
        end = offset + size - self._zero
        self._fit(target, end)
        begin = max(offset, self.upto, self._base)
        if begin > offset:
            target.view[begin - self._zero : end] = _flat(data)[begin - offset :]
        elif isinstance(data, memoryview):
            target.view[end - size : end] = data
        else:
            np.frombuffer(target.view[end - size : end], np.uint8).reshape(data.shape)[:] = data

    def _fit(self, target: StreamTarget, end: int) -> None:
        if end > len(target.view):
            raise ProtocolError(f"stream {self.id} is longer than its header says")

    def read(self) -> bytes:
        """Return the bytes that have come in order since the last call; they count as taken."""
        size = self.upto - self._read
        out = bytes(memoryview(self._held)[:size])
        del self._held[:size]
        self._read = self.upto
        return out

    def peek(self, size: int) -> bytes | None:
        """Return the first `size` bytes that are held, or None while they have not all arrived."""
        return bytes(memoryview(self._held)[:size]) if self.upto - self._read >= size else None

    def direct(self, target: StreamTarget, base: int) -> None:
        """Let bytes from offset `base` on go straight to `target`, from its `filled` on; what is held goes there now.

        Raises:
            ProtocolError: It is more than the target takes.
        """
        self._target, self._base, self._zero = target, base, base - target.filled
        self._fit(target, self.highest - self._zero)
        held = memoryview(self._held)[base - self._read :]
        if held and target.alive:
            target.view[target.filled : target.filled + len(held)] = held
        self._held = bytearray()
        target.filled = max(base, self.upto) - self._zero

    def discard(self) -> None:
        """Take what comes, and what is held, as read by nobody."""
        self.discarded = True
        self.release()

    def release(self) -> None:
        """Let go of the target and of what is held."""
        self._target = None
        self._held = bytearray()


def _flat(data: memoryview | Rows) -> memoryview:
    return data if isinstance(data, memoryview) else memoryview(data.tobytes())
