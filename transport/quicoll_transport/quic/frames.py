"""The frames of a 1-RTT packet (RFC 9000 section 19): each a small tuple that encodes itself, and their reader.

`read_frames` is the inverse of `encode`. It looks at nothing but the bytes of one packet: what is wrong in them alone
is a FrameError here; what needs to know the connection is the caller's: which side may send a frame (HANDSHAKE_DONE and
NEW_TOKEN come from servers only), directions and limits of streams, acknowledgements of packets that were never sent.

Bounds. A packet's payload is authenticated, yet its sender may be hostile. Every length is compared with what is left
of the payload before anything is taken for it. Tokens, connection ids, reasons and ranges are copied, the bytes of
streams and of the handshake are not: their memory is that of the payload, good as long as the payload is. Each frame
takes bytes of the payload, so that time and memory are linear in its size.

PADDING yields nothing. A packet is to be acknowledged when it has another frame than ACK, PADDING and CONNECTION_CLOSE
(section 13.2): see `asks_for_acknowledgement`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from quicoll_transport.quic.varint import MAX_VARINT, pull, varint, varint_size

__all__ = [
    "FINAL_SIZE_ERROR",
    "FLOW_CONTROL_ERROR",
    "FRAME_ENCODING_ERROR",
    "PROTOCOL_VIOLATION",
    "STREAM_LIMIT_ERROR",
    "STREAM_STATE_ERROR",
    "AckFrame",
    "CloseFrame",
    "CryptoFrame",
    "DataBlockedFrame",
    "Frame",
    "FrameError",
    "HandshakeDoneFrame",
    "MaxDataFrame",
    "MaxStreamDataFrame",
    "MaxStreamsFrame",
    "NewConnectionIdFrame",
    "NewTokenFrame",
    "PathChallengeFrame",
    "PathResponseFrame",
    "PingFrame",
    "ResetStreamFrame",
    "RetireConnectionIdFrame",
    "StopSendingFrame",
    "StreamDataBlockedFrame",
    "StreamFrame",
    "StreamsBlockedFrame",
    "asks_for_acknowledgement",
    "read_frames",
    "stream_head",
]

# Error codes of RFC 9000 section 20.1 that a wrong frame leads to.
FLOW_CONTROL_ERROR = 0x03
STREAM_LIMIT_ERROR = 0x04
STREAM_STATE_ERROR = 0x05
FINAL_SIZE_ERROR = 0x06
FRAME_ENCODING_ERROR = 0x07
PROTOCOL_VIOLATION = 0x0A

_MOST_STREAMS = 1 << 60  # section 19.11: with more, a stream's id would be no variable-length integer
_MOST_CID = 20
_TOKEN = 16  # of a stateless reset
_ZEROS = bytes(1 << 16)


class FrameError(Exception):
    """A packet of the peer breaks RFC 9000; its connection is to be closed with `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class PingFrame(NamedTuple):
    """Ask for an acknowledgement, no more (section 19.2)."""

    def encode(self) -> bytes:
        return b"\x01"


class AckFrame(NamedTuple):
    """What has arrived (section 19.3).

    ranges: half-open, descending, with at least one number missing between two.
    delay: as on the wire, in units of the sender's 2 ** ack_delay_exponent microseconds.
    ecn: the three counts of section 19.3.2.
    """

    ranges: Sequence[tuple[int, int]]
    delay: int
    ecn: tuple[int, int, int] | None = None

    def encode(self) -> bytes:
        ranges = self.ranges
        low, stop = ranges[0]
        parts = [b"\x02" if self.ecn is None else b"\x03", varint(stop - 1), varint(self.delay)]
        parts += varint(len(ranges) - 1), varint(stop - 1 - low)
        for start, stop in ranges[1:]:
            parts += varint(low - stop - 1), varint(stop - 1 - start)
            low = start
        if self.ecn is not None:
            parts += map(varint, self.ecn)
        return b"".join(parts)


class ResetStreamFrame(NamedTuple):
    """The sending half of a stream ends without its remaining bytes (section 19.4)."""

    stream_id: int
    code: int
    final_size: int

    def encode(self) -> bytes:
        return b"\x04" + varint(self.stream_id) + varint(self.code) + varint(self.final_size)


class StopSendingFrame(NamedTuple):
    """What arrives on a stream is thrown away (section 19.5)."""

    stream_id: int
    code: int

    def encode(self) -> bytes:
        return b"\x05" + varint(self.stream_id) + varint(self.code)


class CryptoFrame(NamedTuple):
    """Bytes of the handshake (section 19.6); after it, session tickets."""

    offset: int
    data: bytes | memoryview

    def encode(self) -> bytes:
        return b"\x06" + varint(self.offset) + varint(len(self.data)) + bytes(self.data)


class NewTokenFrame(NamedTuple):
    """A token for a later Initial packet (section 19.7)."""

    token: bytes

    def encode(self) -> bytes:
        return b"\x07" + varint(len(self.token)) + self.token


class StreamFrame(NamedTuple):
    """Bytes of a stream (section 19.8). Encoded with its length; `stream_head` makes the other forms."""

    stream_id: int
    offset: int
    data: bytes | memoryview
    fin: bool = False

    def encode(self) -> bytes:
        return stream_head(self.stream_id, self.offset, len(self.data), fin=self.fin) + bytes(self.data)


class MaxDataFrame(NamedTuple):
    """Bytes that may be sent on all streams together (section 19.9)."""

    limit: int

    def encode(self) -> bytes:
        return b"\x10" + varint(self.limit)


class MaxStreamDataFrame(NamedTuple):
    """Bytes that may be sent on one stream (section 19.10)."""

    stream_id: int
    limit: int

    def encode(self) -> bytes:
        return b"\x11" + varint(self.stream_id) + varint(self.limit)


class MaxStreamsFrame(NamedTuple):
    """Streams of one kind that the receiver of this may open, counted from the beginning (section 19.11)."""

    limit: int
    unidirectional: bool

    def encode(self) -> bytes:
        return (b"\x13" if self.unidirectional else b"\x12") + varint(self.limit)


class DataBlockedFrame(NamedTuple):
    """The sender of this is held up by the connection's limit (section 19.12)."""

    limit: int

    def encode(self) -> bytes:
        return b"\x14" + varint(self.limit)


class StreamDataBlockedFrame(NamedTuple):
    """The sender of this is held up by a stream's limit (section 19.13)."""

    stream_id: int
    limit: int

    def encode(self) -> bytes:
        return b"\x15" + varint(self.stream_id) + varint(self.limit)


class StreamsBlockedFrame(NamedTuple):
    """The sender of this would open a stream and may not (section 19.14)."""

    limit: int
    unidirectional: bool

    def encode(self) -> bytes:
        return (b"\x17" if self.unidirectional else b"\x16") + varint(self.limit)


class NewConnectionIdFrame(NamedTuple):
    """One more id that packets to the sender of this may carry (section 19.15)."""

    sequence: int
    retire_prior_to: int
    cid: bytes
    reset_token: bytes

    def encode(self) -> bytes:
        numbers = varint(self.sequence) + varint(self.retire_prior_to)
        return b"\x18" + numbers + bytes((len(self.cid),)) + self.cid + self.reset_token


class RetireConnectionIdFrame(NamedTuple):
    """An id will not be used any more (section 19.16)."""

    sequence: int

    def encode(self) -> bytes:
        return b"\x19" + varint(self.sequence)


class PathChallengeFrame(NamedTuple):
    """Ask whether the peer is where this goes to (section 19.17)."""

    data: bytes

    def encode(self) -> bytes:
        return b"\x1a" + self.data


class PathResponseFrame(NamedTuple):
    """The answer to a challenge (section 19.18)."""

    data: bytes

    def encode(self) -> bytes:
        return b"\x1b" + self.data


class CloseFrame(NamedTuple):
    """The connection is over (section 19.19).

    frame_type: of the frame that was wrong, 0 for none known; None: it was not QUIC that ended it but its user.
    """

    code: int
    frame_type: int | None
    reason: bytes

    def encode(self) -> bytes:
        text = varint(len(self.reason)) + self.reason
        if self.frame_type is None:
            return b"\x1d" + varint(self.code) + text
        return b"\x1c" + varint(self.code) + varint(self.frame_type) + text


class HandshakeDoneFrame(NamedTuple):
    """The handshake is confirmed, to a client (section 19.20)."""

    def encode(self) -> bytes:
        return b"\x1e"


Frame: TypeAlias = (
    StreamFrame
    | AckFrame
    | PingFrame
    | ResetStreamFrame
    | StopSendingFrame
    | CryptoFrame
    | NewTokenFrame
    | MaxDataFrame
    | MaxStreamDataFrame
    | MaxStreamsFrame
    | DataBlockedFrame
    | StreamDataBlockedFrame
    | StreamsBlockedFrame
    | NewConnectionIdFrame
    | RetireConnectionIdFrame
    | PathChallengeFrame
    | PathResponseFrame
    | CloseFrame
    | HandshakeDoneFrame
)


_SILENT = (AckFrame, CloseFrame)


def asks_for_acknowledgement(frame: Frame) -> bool:
    """Return whether a packet with this frame is to be acknowledged (RFC 9000 section 13.2)."""
    return type(frame) not in _SILENT


def stream_head(stream_id: int, offset: int, length: int | None, *, fin: bool = False) -> bytes:
    """Return what stands before the bytes of a STREAM frame (RFC 9000 section 19.8).

    Args:
        stream_id: The stream.
        offset: Where in the stream the bytes begin; 0 takes no room.
        length: How many bytes follow; None: all that is left of the packet, and the length is not written.
        fin: Whether they are the last.
    """
    kind = 0x08 | fin | (4 if offset else 0) | (0 if length is None else 2)
    head = bytes((kind,)) + varint(stream_id)
    if offset:
        head += varint(offset)
    return head if length is None else head + varint(length)


def read_frames(payload: bytes | bytearray | memoryview) -> Iterator[Frame]:
    """Yield the frames of a packet in their order; those before a wrong one are yielded first.

    Args:
        payload: What a packet protects; parts of it are what STREAM and CRYPTO frames give.

    Raises:
        FrameError: bytes that are no frame, or a frame that contradicts itself.
    """
    view = memoryview(payload)
    at, end = 0, len(view)
    if not end:
        raise FrameError(PROTOCOL_VIOLATION, "a packet without frames")  # RFC 9000 section 12.4
    while at < end:
        kind = view[at]
        if not kind:
            at = _behind_padding(view, at)
            continue
        try:
            if kind & 0xF8 == 0x08:
                frame, at = _read_stream(view, at + 1, kind)
            else:
                read = _READERS.get(kind)
                if read is None:
                    raise _unknown(view, at)
                frame, at = read(view, at + 1, kind)
        except IndexError:
            raise FrameError(FRAME_ENCODING_ERROR, f"a frame of type {kind:#x} is cut short") from None
        yield frame


def _behind_padding(view: memoryview, at: int) -> int:
    """Return where something else than PADDING begins; a probe of the path's MTU is nearly nothing else."""
    step = 64
    while view[at : at + step] == _ZEROS[:step]:
        at += step
        step = min(2 * step, len(_ZEROS))
    end = len(view)
    for part in (4096, 512, 64):  # not more than a few tries back, whatever step the loop above has come to
        while view[at : at + part] == _ZEROS[:part]:
            at += part
    while at < end and not view[at]:
        at += 1
    return at


def _unknown(view: memoryview, at: int) -> FrameError:
    kind, behind = pull(view, at)
    if behind - at > varint_size(kind):
        return FrameError(PROTOCOL_VIOLATION, f"the frame type {kind:#x} is longer than it must be")  # section 12.4
    return FrameError(FRAME_ENCODING_ERROR, f"unknown frame type {kind:#x}")


def _take(view: memoryview, at: int, size: int) -> tuple[memoryview, int]:
    stop = at + size
    if stop > len(view):
        raise IndexError
    return view[at:stop], stop


def _read_stream(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    stream_id, at = pull(view, at)
    offset = 0
    if kind & 4:
        offset, at = pull(view, at)
    stop = len(view)
    if kind & 2:
        size, at = pull(view, at)
        if size > stop - at:
            raise IndexError
        stop = at + size
    if offset + stop - at > MAX_VARINT:
        raise FrameError(FRAME_ENCODING_ERROR, "a stream reaches beyond 2^62 - 1 bytes")
    return StreamFrame(stream_id, offset, view[at:stop], bool(kind & 1)), stop


def _read_ping(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    return PingFrame(), at


def _read_ack(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    largest, at = pull(view, at)
    delay, at = pull(view, at)
    more, at = pull(view, at)
    length, at = pull(view, at)
    if 2 * more > len(view) - at:  # each further range takes two bytes at least
        raise IndexError
    start = largest - length
    ranges = [(start, largest + 1)]
    for _ in range(more):
        gap, at = pull(view, at)
        length, at = pull(view, at)
        stop = start - gap - 1
        start = stop - 1 - length
        ranges.append((start, stop))
    if start < 0:  # it only falls from range to range
        raise FrameError(FRAME_ENCODING_ERROR, "an acknowledgement of negative packet numbers")  # section 19.3.1
    ecn = None
    if kind == 0x03:
        first, at = pull(view, at)
        second, at = pull(view, at)
        marked, at = pull(view, at)
        ecn = (first, second, marked)
    return AckFrame(ranges, delay, ecn), at


def _read_reset(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    stream_id, at = pull(view, at)
    code, at = pull(view, at)
    final_size, at = pull(view, at)
    return ResetStreamFrame(stream_id, code, final_size), at


def _read_stop(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    stream_id, at = pull(view, at)
    code, at = pull(view, at)
    return StopSendingFrame(stream_id, code), at


def _read_crypto(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    offset, at = pull(view, at)
    size, at = pull(view, at)
    data, at = _take(view, at, size)
    if offset + size > MAX_VARINT:
        raise FrameError(FRAME_ENCODING_ERROR, "a handshake reaches beyond 2^62 - 1 bytes")
    return CryptoFrame(offset, data), at


def _read_new_token(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    size, at = pull(view, at)
    token, at = _take(view, at, size)
    if not size:
        raise FrameError(FRAME_ENCODING_ERROR, "an empty token")  # section 19.7
    return NewTokenFrame(bytes(token)), at


def _read_max_data(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    limit, at = pull(view, at)
    return MaxDataFrame(limit), at


def _read_max_stream_data(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    stream_id, at = pull(view, at)
    limit, at = pull(view, at)
    return MaxStreamDataFrame(stream_id, limit), at


def _pull_streams(view: memoryview, at: int) -> tuple[int, int]:
    limit, at = pull(view, at)
    if limit > _MOST_STREAMS:
        raise FrameError(FRAME_ENCODING_ERROR, "more streams than there are ids")  # sections 19.11 and 19.14
    return limit, at


def _read_max_streams(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    limit, at = _pull_streams(view, at)
    return MaxStreamsFrame(limit, kind == 0x13), at


def _read_data_blocked(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    limit, at = pull(view, at)
    return DataBlockedFrame(limit), at


def _read_stream_data_blocked(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    stream_id, at = pull(view, at)
    limit, at = pull(view, at)
    return StreamDataBlockedFrame(stream_id, limit), at


def _read_streams_blocked(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    limit, at = _pull_streams(view, at)
    return StreamsBlockedFrame(limit, kind == 0x17), at


def _read_new_connection_id(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    sequence, at = pull(view, at)
    before, at = pull(view, at)
    size = view[at]
    cid, at = _take(view, at + 1, size)
    token, at = _take(view, at, _TOKEN)
    if not 1 <= size <= _MOST_CID:
        raise FrameError(FRAME_ENCODING_ERROR, f"a connection id of {size} bytes")  # section 19.15
    if before > sequence:
        raise FrameError(FRAME_ENCODING_ERROR, "a connection id that is retired before it is known")  # the same
    return NewConnectionIdFrame(sequence, before, bytes(cid), bytes(token)), at


def _read_retire_connection_id(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    sequence, at = pull(view, at)
    return RetireConnectionIdFrame(sequence), at


def _read_path_challenge(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    data, at = _take(view, at, 8)
    return PathChallengeFrame(bytes(data)), at


def _read_path_response(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    data, at = _take(view, at, 8)
    return PathResponseFrame(bytes(data)), at


def _read_close(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    code, at = pull(view, at)
    frame_type = None
    if kind == 0x1C:
        frame_type, at = pull(view, at)
    size, at = pull(view, at)
    reason, at = _take(view, at, size)
    return CloseFrame(code, frame_type, bytes(reason)), at


def _read_handshake_done(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    return HandshakeDoneFrame(), at


_READERS: dict[int, Callable[[memoryview, int, int], tuple[Frame, int]]] = {
    0x01: _read_ping,
    0x02: _read_ack,
    0x03: _read_ack,
    0x04: _read_reset,
    0x05: _read_stop,
    0x06: _read_crypto,
    0x07: _read_new_token,
    0x10: _read_max_data,
    0x11: _read_max_stream_data,
    0x12: _read_max_streams,
    0x13: _read_max_streams,
    0x14: _read_data_blocked,
    0x15: _read_stream_data_blocked,
    0x16: _read_streams_blocked,
    0x17: _read_streams_blocked,
    0x18: _read_new_connection_id,
    0x19: _read_retire_connection_id,
    0x1A: _read_path_challenge,
    0x1B: _read_path_response,
    0x1C: _read_close,
    0x1D: _read_close,
    0x1E: _read_handshake_done,
}
