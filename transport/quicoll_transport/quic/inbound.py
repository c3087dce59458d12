"""The streams that come from the peer: which there may be, what they may hold, and who reads them.

A stream begins with its first frame and is over when all of it was taken, or with RESET_STREAM (RFC 9000 section 3.2).
Who reads it hears of it in the call that brings the bytes (`StreamReader`), so that a header which is complete can say
where the rest of the same run belongs, and that goes there without a stop in between.

Bounds, all before memory is taken: streams by StreamAllowance, bytes by the limits of a stream and of the connection,
which slide with what was taken; gaps between what has arrived by one number for all streams (`_holes`), because each
costs more than the byte that may be behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quicoll_transport.quic.control import ControlFrames, Saying
from quicoll_transport.quic.flow import Allowance, StreamAllowance, StreamLimits
from quicoll_transport.quic.frames import (
    STREAM_STATE_ERROR,
    FrameError,
    MaxDataFrame,
    MaxStreamDataFrame,
    MaxStreamsFrame,
    ResetStreamFrame,
    StopSendingFrame,
)
from quicoll_transport.quic.streams import ReceiveStream

if TYPE_CHECKING:
    from quicoll_transport.quic.outbound import OutboundStreams
    from quicoll_transport.quic.streams import Rows

__all__ = ["InboundStreams", "StreamReader"]

_INTERNAL_ERROR = 0x01
_HOLES = 64  # and one for each so many bytes of the window:
_BYTES_PER_HOLE = 256
_BEGINNING = 256  # bytes of a stream that hold whatever header it has


class StreamReader(Protocol):
    """Who takes what streams bring."""

    def stream_arrived(self, stream: ReceiveStream) -> None:
        """Take note of more bytes that have come in order on a stream that has no target, or of the end of any."""
        ...

    def stream_reset(self, stream: ReceiveStream, code: int) -> None:
        """Take note that the peer gave a stream up before all of it was taken."""
        ...


class InboundStreams:
    """See the module's head.

    received: bytes of all streams together, those in gaps and of resets too.
    holes: gaps in what has arrived, of all streams.
    """

    def __init__(
        self,
        *,
        is_client: bool,
        limits: StreamLimits,
        outbound: OutboundStreams,
        control: ControlFrames,
        reader: StreamReader,
    ) -> None:
        """limits: ours, as our transport parameters told them."""
        self.received = 0
        self._is_client = is_client
        self._limits = limits
        self._outbound = outbound
        self._control = control
        self._reader: StreamReader | None = reader
        self._streams: dict[int, ReceiveStream] = {}
        self._data = Allowance(limits.data)
        self._kinds = (StreamAllowance(limits.streams_bidi), StreamAllowance(limits.streams_uni))
        self.holes = 0
        self._most_holes = _HOLES + limits.data // _BYTES_PER_HOLE
        self._stops: dict[int, int] = {}
        control.answers(Saying.MAX_DATA, lambda _: MaxDataFrame(self._data.raised()).encode())
        control.answers(Saying.MAX_STREAM_DATA, self._max_stream_data)
        control.answers(Saying.MAX_STREAMS, lambda uni: MaxStreamsFrame(self._kinds[uni].limit, bool(uni)).encode())
        control.answers(Saying.STOP_SENDING, self._stop_sending)

    # -- frames --------------------------------------------------------------------------------------------------

    def on_stream(self, stream_id: int, offset: int, data: memoryview | Rows, size: int, *, fin: bool) -> None:
        """Take the bytes of a STREAM frame, or of a table of them that follow each other.

        Raises:
            FrameError: They may not be.
            ProtocolError: The reader cannot take them.
        """
        stream = self._find(stream_id)
        if stream is None:
            return
        self._grow(stream.admit(offset + size, fin=fin))
        before, low = stream.taken, stream.upto
        if (more := stream.place(offset, data, size)) != 0:
            self._count_holes(more)
        if (stream.upto > low and not stream.is_direct) or stream.is_whole or stream.is_orphaned:
            self._tell(stream)
        self._settle(stream, before)

    def on_rows(self, stream_id: int, offset: int, rows: Rows, *, fin: bool) -> None:
        """Take a table of bytes, each row behind the one before.

        The first row may hold a header that says where the rest goes. Where that is not known its beginning is taken by
        itself, and then the rest of it: what goes straight to its place need not be held.
        """
        stream = self._streams.get(stream_id)
        count, step = rows.shape
        if count > 1 and (stream is None or not stream.is_direct):
            first, at = memoryview(rows[0].tobytes()), 0
            for end in (_BEGINNING, step) if step > 2 * _BEGINNING else (step,):
                self.on_stream(stream_id, offset + at, first[at:end], end - at, fin=False)
                at = end
            offset, rows, count = offset + step, rows[1:], count - 1
        self.on_stream(stream_id, offset, rows, count * step, fin=fin)

    def on_reset(self, frame: ResetStreamFrame) -> None:
        """Take a RESET_STREAM frame. Raises FrameError."""
        stream = self._find(frame.stream_id)
        if stream is None:
            return
        grown = frame.final_size - stream.highest
        stream.finish(frame.final_size)
        stream.allowance.demand(frame.final_size)
        self._grow(grown)
        if self._data.take(frame.final_size - stream.taken):
            self._control.want(Saying.MAX_DATA)
        self._end(stream)
        if self._reader is not None:
            self._reader.stream_reset(stream, frame.code)
        stream.release()

    def on_blocked(self, stream_id: int) -> None:
        """Take a STREAM_DATA_BLOCKED frame: it only may not be about what cannot be. Raises FrameError."""
        self._find(stream_id)

    # -- what is known of a stream ---------------------------------------------------------------------------------

    def has_gap(self, stream_id: int, start: int, stop: int) -> bool:
        """Return whether bytes of a stream have not arrived, and are wanted. Raises FrameError if it may not be."""
        stream = self._streams.get(stream_id)
        return not self._is_over(stream_id) if stream is None else stream.has_gap(start, stop)

    def has_end(self, stream_id: int) -> bool:
        """Return whether the final size of a stream is known. Raises FrameError if it may not be."""
        stream = self._streams.get(stream_id)
        return self._is_over(stream_id) if stream is None else stream.final is not None

    # -- what the reader asks for --------------------------------------------------------------------------------

    def again(self, stream: ReceiveStream) -> None:
        """Tell the reader of a stream as if its bytes had just come: it can take them now."""
        if self._streams.get(stream.id) is stream:
            before = stream.taken
            self._tell(stream)
            self._settle(stream, before)

    def stop(self, stream: ReceiveStream, code: int) -> None:
        """Take nothing more of a stream, and ask the peer not to go on (RFC 9000 section 3.5)."""
        if not stream.discarded:
            stream.discard()
            if stream.final is None and stream.id in self._streams:
                self._stops[stream.id] = code
                self._control.want(Saying.STOP_SENDING, stream.id)

    def release(self) -> None:
        """Let go of all memory."""
        for stream in self._streams.values():
            stream.release()
        self._reader = None

    @property
    def taken(self) -> int:
        """Bytes of all streams together that make room for others."""
        return self._data.taken

    def __len__(self) -> int:
        return len(self._streams)

    # -- inside --------------------------------------------------------------------------------------------------

    def _find(self, stream_id: int) -> ReceiveStream | None:
        """Return a stream that the peer may send on, a new one if it begins with this; None if it is over."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            return stream
        limits = self._limits
        if stream_id & 1 == (not self._is_client):  # we opened it
            if stream_id & 2 or not self._outbound.was_opened(stream_id):
                raise FrameError(STREAM_STATE_ERROR, f"stream {stream_id} is not one to receive on")
            if self._is_over(stream_id):
                return None
            window = limits.stream_ours
        else:
            if self._is_over(stream_id):
                return None
            window = limits.stream_uni if stream_id & 2 else limits.stream_theirs
        stream = self._streams[stream_id] = ReceiveStream(stream_id, window)
        return stream

    def _is_over(self, stream_id: int) -> bool:
        if stream_id & 1 == (not self._is_client):
            return self._outbound.was_answered(stream_id)
        return self._kinds[stream_id >> 1 & 1].is_over(stream_id >> 2)

    def _grow(self, grown: int) -> None:
        if grown > 0:
            self._data.demand(self.received + grown)
            self.received += grown

    def _count_holes(self, more: int) -> None:
        self.holes += more
        if self.holes > self._most_holes:
            raise FrameError(_INTERNAL_ERROR, "what arrives has too many holes")

    def _tell(self, stream: ReceiveStream) -> None:
        if self._reader is not None:
            self._reader.stream_arrived(stream)

    def _settle(self, stream: ReceiveStream, before: int) -> None:
        """What was taken makes room; a stream of which all was taken is over."""
        taken = stream.taken - before
        if taken:
            if self._data.take(taken):
                self._control.want(Saying.MAX_DATA)
            if stream.allowance.take(taken) and stream.final is None:
                self._control.want(Saying.MAX_STREAM_DATA, stream.id)
        if stream.is_whole and stream.taken == stream.final:
            self._end(stream)
            stream.release()

    def _end(self, stream: ReceiveStream) -> None:
        stream_id = stream.id
        del self._streams[stream_id]
        self._count_holes(-stream.holes)
        self._stops.pop(stream_id, None)
        if stream_id & 1 == (not self._is_client):
            self._outbound.answered(stream_id)
        elif self._kinds[stream_id >> 1 & 1].end(stream_id >> 2):
            self._control.want(Saying.MAX_STREAMS, stream_id >> 1 & 1)

    def _max_stream_data(self, stream_id: int) -> bytes | None:
        stream = self._streams.get(stream_id)
        if stream is None or stream.final is not None:
            return None
        return MaxStreamDataFrame(stream_id, stream.allowance.raised()).encode()

    def _stop_sending(self, stream_id: int) -> bytes | None:
        stream, code = self._streams.get(stream_id), self._stops.get(stream_id)
        if stream is None or code is None or stream.final is not None:
            return None
        return StopSendingFrame(stream_id, code).encode()
