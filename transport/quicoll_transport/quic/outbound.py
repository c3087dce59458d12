"""The streams that go to the peer: which may be opened, in what order they are served, and what holds them up.

Order. First what is urgent: the control stream. Then small ones by age, then bulk by age, the oldest first until it is
through: served in turns, all would end at once and late. Small is what takes less than a run of packets
(`bulk_bytes`); ids are given in the order of age, so the id is the age. Whoever sends sees to it that small ones
without end leave room for bulk.

States of a stream, by what is to be done with it:

    waiting    the peer lets us open no more streams of its kind (RFC 9000 section 4.6); it has no id yet
    ready      it may have something to send: in one of the three queues
    blocked    it has, and the peer's limit does not allow it; until MAX_DATA or MAX_STREAM_DATA does
    resting    all is sent; it waits for acknowledgements, loss makes it ready again
    gone       acknowledged, or reset and that acknowledged

Of the connection's limit a small part is kept for what is urgent, so that bulk which nobody takes does not hold up the
word that it should be taken.

Failure cases: frames about a stream that we do not send on, or have not opened: STREAM_STATE_ERROR (sections 19.5 and
19.10).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from quicoll_transport.quic.control import ControlFrames, Saying
from quicoll_transport.quic.flow import PeerLimit, StreamLimits
from quicoll_transport.quic.frames import (
    STREAM_STATE_ERROR,
    DataBlockedFrame,
    FrameError,
    MaxStreamDataFrame,
    MaxStreamsFrame,
    ResetStreamFrame,
    StopSendingFrame,
    StreamDataBlockedFrame,
    StreamsBlockedFrame,
)
from quicoll_transport.quic.streams import SendStream

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OutboundStreams"]

_RESERVE = 64 * 1024  # of the connection's limit, for what is urgent
_by_id = attrgetter("id")


class OutboundStreams:
    """See the module's head.

    bulk_bytes: from so many bytes on a stream goes out in runs.
    on_gone: hears of each stream of which all is acknowledged, or that was reset.
    """

    def __init__(self, *, is_client: bool, limits: StreamLimits, control: ControlFrames) -> None:
        """limits: the peer's, as its transport parameters told them."""
        self.bulk_bytes = 8192
        self.on_gone: Callable[[SendStream], None] = lambda stream: None
        self._is_client = is_client
        self._limits = limits
        self._control = control
        self._data = PeerLimit(limits.data)
        self._reserve = min(_RESERVE, limits.data // 8)  # less than what a peer waits for with its next limit
        self._opened = (PeerLimit(limits.streams_bidi), PeerLimit(limits.streams_uni))
        self._waiting: tuple[deque[SendStream], deque[SendStream]] = (deque(), deque())
        self._streams: dict[int, SendStream] = {}
        self._answered: dict[int, None] = {}  # our bidirectional streams of which the other half is over
        self._urgent: list[SendStream] = []
        self._small: list[SendStream] = []
        self._bulk: list[SendStream] = []
        self._blocked: dict[int, SendStream] = {}
        control.answers(Saying.DATA_BLOCKED, lambda _: DataBlockedFrame(self._data.limit).encode())
        control.answers(Saying.STREAM_DATA_BLOCKED, self._stream_data_blocked)
        control.answers(Saying.STREAMS_BLOCKED, self._streams_blocked)
        control.answers(Saying.RESET_STREAM, self._reset_stream)

    # -- what the user asks for ----------------------------------------------------------------------------------

    def open(self, key: object = None, *, unidirectional: bool = True, urgent: bool = False) -> SendStream:
        """Begin a stream; it may have to wait for the peer's leave, and has no id until then.

        Args:
            key: The owner's name for it.
            unidirectional: Whether nothing comes back on it.
            urgent: Whether it goes before all that are not.
        """
        stream = SendStream(-1, 0, key=key, urgent=urgent)
        self._waiting[unidirectional].append(stream)
        self._admit(unidirectional)
        return stream

    def respond(self, stream_id: int, *, urgent: bool = False) -> SendStream:
        """Begin the sending half of a bidirectional stream that the peer has opened."""
        stream = self._streams[stream_id] = SendStream(stream_id, self._limits.stream_ours, urgent=urgent)
        return stream

    def write(self, stream: SendStream, data: bytes | memoryview, *, fin: bool = False) -> None:
        """Append bytes to a stream; a memoryview is read in place until they are acknowledged."""
        if stream.reset_code is None:
            stream.write(data, fin=fin)
            if stream.queue is self._small:
                self._unready(stream)  # it may be bulk now
            self._ready(stream)

    def reset(self, stream: SendStream, code: int) -> None:
        """Give a stream up; its memory is not read after this call. One that was given up before stays so."""
        if stream.reset_code is not None:
            return
        if stream.id < 0:
            self._waiting[1 if stream in self._waiting[1] else 0].remove(stream)
            stream.reset(code)
            self.on_gone(stream)
        elif stream.id in self._streams:
            stream.reset(code)
            self._unready(stream)
            self._blocked.pop(stream.id, None)
            self._control.want(Saying.RESET_STREAM, stream.id)
            self.on_gone(stream)

    def finish(self, stream: SendStream) -> None:
        """Take note that the peer has all of a stream, as it has said by other means; its memory is let go of."""
        if stream.id < 0:
            self.reset(stream, 0)
        elif stream.reset_code is None:
            self.on_acked(stream, 0, stream.length, fin=True)

    def release(self) -> None:
        """Let go of all memory."""
        for stream in (*self._streams.values(), *self._waiting[0], *self._waiting[1]):
            stream.release()
        for queue in (self._urgent, self._small, self._bulk):
            for stream in queue:
                stream.queue = None
            queue.clear()
        self._streams.clear()
        self._blocked.clear()
        self._waiting[0].clear()
        self._waiting[1].clear()

    def __len__(self) -> int:
        """Number of streams that are not gone."""
        return len(self._streams) + len(self._waiting[0]) + len(self._waiting[1])

    # -- frames --------------------------------------------------------------------------------------------------

    def on_max_data(self, limit: int) -> None:
        """Take a MAX_DATA frame."""
        if self._data.raise_to(limit):
            blocked, self._blocked = self._blocked, {}
            for stream in blocked.values():
                self._ready(stream)

    def on_max_stream_data(self, frame: MaxStreamDataFrame) -> None:
        """Take a MAX_STREAM_DATA frame. Raises FrameError."""
        stream = self._find(frame.stream_id)
        if stream is not None and frame.limit > stream.limit:
            stream.limit = frame.limit
            self._blocked.pop(stream.id, None)
            self._ready(stream)

    def on_max_streams(self, frame: MaxStreamsFrame) -> None:
        """Take a MAX_STREAMS frame."""
        if self._opened[frame.unidirectional].raise_to(frame.limit):
            self._admit(frame.unidirectional)

    def on_stop_sending(self, frame: StopSendingFrame) -> None:
        """Take a STOP_SENDING frame: the stream is reset with its code (RFC 9000 section 3.5). Raises FrameError."""
        stream = self._find(frame.stream_id)
        if stream is not None:
            self.reset(stream, frame.code)

    # -- what is to be sent --------------------------------------------------------------------------------------

    def small(self) -> Iterator[SendStream]:
        """Iterate over the streams that go into packets with others, in their order; each may be sent from."""
        for queue in (self._urgent, self._small):
            at = 0
            while at < len(queue):
                stream = queue[at]
                yield stream
                if at < len(queue) and queue[at] is stream:
                    at += 1

    @property
    def fresh_bytes(self) -> int:
        """Bytes of all streams that were sent for the first time."""
        return self._data.used

    def has_urgent(self) -> bool:
        return bool(self._urgent)

    def has_small(self) -> bool:
        return bool(self._urgent or self._small)

    def has_any(self) -> bool:
        return bool(self._urgent or self._small or self._bulk)

    def oldest_bulk(self) -> SendStream | None:
        """Return the stream that is to go out as runs next."""
        return self._bulk[0] if self._bulk else None

    def next_piece(self, stream: SendStream, most: int) -> tuple[int, int]:
        """Return the next [start, stop) of a stream that may be sent, `most` bytes at most; empty if none may be."""
        start, stop = stream.take(most)
        fresh = stop - stream.next  # what was sent before is paid for
        if fresh > 0:
            room = self._data.room if stream.urgent else self._data.room - self._reserve
            if fresh > room:
                stop = stream.next + room if room > 0 else stream.next
        return start, stop

    def sent(self, stream: SendStream, start: int, stop: int, *, fin: bool) -> None:
        """Take note that a piece of a stream was sent."""
        self._data.used += stream.sent(start, stop, fin=fin)
        self.look_again(stream)

    def look_again(self, stream: SendStream) -> None:
        """Put a stream where it belongs: it was sent from, or nothing of it could be."""
        if not stream.has_more():
            self._unready(stream)
            return
        start, stop = self.next_piece(stream, self.bulk_bytes)
        if stop <= start and (stream.lost or stream.next < stream.length):
            self._unready(stream)
            self._blocked[stream.id] = stream
            self._say_blocked(stream)
        elif stream.queue is self._bulk and self._bulk[0] is stream and not self._is_bulk(stream):
            self._unready(stream)
            self._ready(stream)

    def on_acked(self, stream: SendStream, start: int, stop: int, *, fin: bool) -> None:
        """Take note that a piece of a stream has arrived."""
        if stream.on_acked(start, stop, fin=fin):
            self._unready(stream)
            self._blocked.pop(stream.id, None)
            if self._streams.pop(stream.id, None) is not None:
                self.on_gone(stream)

    def on_lost(self, stream: SendStream, start: int, stop: int, *, fin: bool) -> None:
        """Take note that a piece of a stream has to go again."""
        stream.on_lost(start, stop, fin=fin)
        if stream.id in self._streams and stream.has_more():
            self._blocked.pop(stream.id, None)
            self._ready(stream)

    def on_reset_acked(self, stream_id: int) -> None:
        """Take note that the peer has the RESET_STREAM frame of a stream."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.reset_code is not None:
            del self._streams[stream_id]

    # -- of the other half of our streams --------------------------------------------------------------------------

    def was_opened(self, stream_id: int) -> bool:
        """Return whether we have opened this stream."""
        return stream_id >> 2 < self._opened[stream_id >> 1 & 1].used

    def was_answered(self, stream_id: int) -> bool:
        """Return whether what the peer sends on our bidirectional stream has ended."""
        return stream_id in self._answered

    def answered(self, stream_id: int) -> None:
        """Take note that it has."""
        self._answered[stream_id] = None

    # -- inside --------------------------------------------------------------------------------------------------

    def _admit(self, unidirectional: bool) -> None:
        """Give ids to streams that wait, as far as the peer lets us."""
        waiting, opened = self._waiting[unidirectional], self._opened[unidirectional]
        limits = self._limits
        while waiting and opened.room > 0:
            stream = waiting.popleft()
            stream.id = opened.used << 2 | unidirectional << 1 | (not self._is_client)
            stream.limit = limits.stream_uni if unidirectional else limits.stream_theirs
            opened.used += 1
            self._streams[stream.id] = stream
            self._ready(stream)
        if waiting and opened.is_news():
            self._control.want(Saying.STREAMS_BLOCKED, int(unidirectional))

    def _find(self, stream_id: int) -> SendStream | None:
        """Return a stream that we send on, by a frame about it; None if it is over."""
        ours = stream_id & 1 == (not self._is_client)
        if (stream_id & 2 and not ours) or (ours and not self.was_opened(stream_id)):
            raise FrameError(STREAM_STATE_ERROR, f"stream {stream_id} is not one that we send on")
        return self._streams.get(stream_id)

    def _is_bulk(self, stream: SendStream) -> bool:
        low, high = stream.lost.first if stream.lost else (0, 0)
        return max(high - low, min(stream.length, stream.limit) - stream.next) >= self.bulk_bytes

    def _ready(self, stream: SendStream) -> None:
        if stream.queue is not None or stream.id < 0 or stream.id in self._blocked or not stream.has_more():
            return
        queue = self._urgent if stream.urgent else self._bulk if self._is_bulk(stream) else self._small
        stream.queue = queue
        if queue and queue[-1].id > stream.id:
            insort(queue, stream, key=_by_id)
        else:
            queue.append(stream)

    def _unready(self, stream: SendStream) -> None:
        queue, stream.queue = stream.queue, None
        if queue is not None:
            del queue[bisect_left(queue, stream.id, key=_by_id)]

    def _say_blocked(self, stream: SendStream) -> None:
        if stream.next >= stream.limit:
            if stream.told != stream.limit:
                stream.told = stream.limit
                self._control.want(Saying.STREAM_DATA_BLOCKED, stream.id)
        elif self._data.is_news():
            self._control.want(Saying.DATA_BLOCKED)

    def _stream_data_blocked(self, stream_id: int) -> bytes | None:
        stream = self._streams.get(stream_id)
        if stream is None or stream_id not in self._blocked:
            return None
        return StreamDataBlockedFrame(stream_id, stream.limit).encode()

    def _streams_blocked(self, unidirectional: int) -> bytes | None:
        if not self._waiting[unidirectional]:
            return None
        return StreamsBlockedFrame(self._opened[unidirectional].limit, bool(unidirectional)).encode()

    def _reset_stream(self, stream_id: int) -> bytes | None:
        stream = self._streams.get(stream_id)
        if stream is None or stream.reset_code is None:
            return None
        return ResetStreamFrame(stream_id, stream.reset_code, stream.next).encode()
