"""Flow control (RFC 9000 section 4): how much a peer may send us, and we it; bytes of streams, of all, and streams.

What we allow (`Allowance`, `StreamAllowance`) slides with what was taken, never with what was sent: a peer that leaves
holes makes us hold one window and no more. It is told again when half a window has been taken, so two limits are never
under way for less. What the peer allows (`PeerLimit`) only grows; an older limit that arrives late changes nothing
(section 4.1).

Streams (section 4.6): a peer may have `initial` streams open at a time. Those that are over are remembered by ranges,
so that a late frame does not open one again; they are opened in order, so there are at most as many gaps as may be
open.
"""

from __future__ import annotations

from dataclasses import dataclass

from quicoll_transport.link.ranges import Ranges
from quicoll_transport.quic.frames import FLOW_CONTROL_ERROR, STREAM_LIMIT_ERROR, FrameError

__all__ = ["Allowance", "PeerLimit", "StreamAllowance", "StreamLimits"]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The limits that a side begins with, as its transport parameters say (RFC 9000 section 18.2).

    data: bytes on all streams together.
    stream_ours: on a bidirectional stream that this side has opened, stream_theirs: that the other one has.
    stream_uni: on a unidirectional stream.
    streams_bidi, streams_uni: how many the other side may open.
    """

    data: int
    stream_ours: int
    stream_theirs: int
    stream_uni: int
    streams_bidi: int
    streams_uni: int


class Allowance:
    """What a peer may send: `limit` bytes in all, at most `window` beyond what was taken."""

    __slots__ = ("limit", "taken", "window")

    def __init__(self, window: int) -> None:
        self.window = self.limit = window
        self.taken = 0

    def demand(self, total: int) -> None:
        """Raise FrameError if a peer that has sent `total` bytes was not allowed to."""
        if total > self.limit:
            raise FrameError(FLOW_CONTROL_ERROR, f"{total} bytes where {self.limit} were allowed")

    def take(self, nbytes: int) -> bool:
        """Take note that bytes were taken; return whether the peer is to be told of the next limit."""
        self.taken += nbytes
        return self.limit - self.taken < self.window // 2

    def raised(self) -> int:
        """Return the limit that the peer is told now, which holds from now on.

        It is raised when it is told and not when that became due, which may be in the middle of a run of packets.
        """
        self.limit = self.taken + self.window
        return self.limit


class PeerLimit:
    """What a peer allows us: `limit` in all, of which `used` is gone."""

    __slots__ = ("limit", "told", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.told = -1  # the limit at which the peer last heard that we are blocked

    @property
    def room(self) -> int:
        return self.limit - self.used

    def raise_to(self, limit: int) -> bool:
        """Take a limit from the peer; return whether it is more than before."""
        if limit <= self.limit:
            return False
        self.limit = limit
        return True

    def is_news(self) -> bool:
        """Return whether the peer does not know yet that this limit blocks us; it is taken to know it afterwards."""
        if self.told == self.limit:
            return False
        self.told = self.limit
        return True


class StreamAllowance:
    """The streams of one kind that a peer may open. limit: how many in all."""

    __slots__ = ("_initial", "_over", "_over_count", "limit")

    def __init__(self, initial: int) -> None:
        self.limit = self._initial = initial
        self._over = Ranges()  # by index
        self._over_count = 0

    def is_over(self, index: int) -> bool:
        """Return whether this stream, the `index`-th of its kind, has ended. Raises FrameError if it may not be."""
        if index >= self.limit:
            raise FrameError(STREAM_LIMIT_ERROR, f"stream {index} where {self.limit} were allowed")
        return index in self._over

    def end(self, index: int) -> bool:
        """Take note that a stream has ended; return whether the peer is to be told of the next limit."""
        self._over.add(index)
        self._over_count += 1
        if self.limit - self._over_count > self._initial // 2:
            return False
        self.limit = self._over_count + self._initial
        return True
