"""The frames of a 1-RTT packet (RFC 9000 section 19): each a small tuple that encodes itself.

`frame_reader` is the inverse of `encode`.

Five of them are not of RFC 9000 but ours: three about parity (`protection`, `repairs`); a stamp, which says when its
packet was sent (`peer_clock`); and a fair rate, of the line by which its sender receives (`arrival_line`). They may be
sent to whom has said in its transport parameters that it takes them (section 19.21). Their types begin with the byte
OWN_FRAMES:

    protected (type 0x2a50) {        parity (0x2a51) {           repaired (0x2a52) {
      set (i),                         set (i),                    set (i),
      room (i),                        group (i),                }
      groups (i),                      row (i),
      count of spans (i),              bytes (..): what is left of the packet
      spans {                        }
        stream id (i),
        start (i),
        2 * length + fin (i),          stamp (0x2a53) {
      },                                 microseconds (i): of a clock of the sender's
    }                                  }
                                       fair rate (0x2a54) {
                                         2 * rate + full (i): bytes a second
                                       }

A packet is to be acknowledged when it has another frame than ACK, PADDING, CONNECTION_CLOSE (section 13.2), stamps and
fair rates: see `asks_for_acknowledgement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from quicoll_transport.quic.varint import varint

__all__ = [
    "FINAL_SIZE_ERROR",
    "FLOW_CONTROL_ERROR",
    "FRAME_ENCODING_ERROR",
    "OWN_FRAMES",
    "PROTOCOL_VIOLATION",
    "STREAM_LIMIT_ERROR",
    "STREAM_STATE_ERROR",
    "AckFrame",
    "CloseFrame",
    "CryptoFrame",
    "DataBlockedFrame",
    "FairRateFrame",
    "Frame",
    "FrameError",
    "HandshakeDoneFrame",
    "MaxDataFrame",
    "MaxStreamDataFrame",
    "MaxStreamsFrame",
    "NewConnectionIdFrame",
    "NewTokenFrame",
    "ParityFrame",
    "PathChallengeFrame",
    "PathResponseFrame",
    "PingFrame",
    "ProtectedFrame",
    "RepairedFrame",
    "ResetStreamFrame",
    "RetireConnectionIdFrame",
    "StampFrame",
    "StopSendingFrame",
    "StreamDataBlockedFrame",
    "StreamFrame",
    "StreamsBlockedFrame",
    "asks_for_acknowledgement",
    "stream_head",
]

# Error codes of RFC 9000 section 20.1 that a wrong frame leads to.
FLOW_CONTROL_ERROR = 0x03
STREAM_LIMIT_ERROR = 0x04
STREAM_STATE_ERROR = 0x05
FINAL_SIZE_ERROR = 0x06
FRAME_ENCODING_ERROR = 0x07
PROTOCOL_VIOLATION = 0x0A


OWN_FRAMES = 0x6A


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


class ProtectedFrame(NamedTuple):
    """Which bytes a set of parity is about (`segments`). spans: stream id, start, stop, fin."""

    set_id: int
    room: int
    groups: int
    spans: Sequence[tuple[int, int, int, bool]]

    def encode(self) -> bytes:
        parts = [b"\x6a\x50", varint(self.set_id), varint(self.room), varint(self.groups), varint(len(self.spans))]
        for stream_id, start, stop, fin in self.spans:
            parts += varint(stream_id), varint(start), varint(2 * (stop - start) + fin)
        return b"".join(parts)


class ParityFrame(NamedTuple):
    """A row of parity of a group of a set: all that is left of its packet."""

    set_id: int
    group: int
    row: int
    data: bytes | memoryview

    def encode(self) -> bytes:
        return b"\x6a\x51" + varint(self.set_id) + varint(self.group) + varint(self.row) + bytes(self.data)


class RepairedFrame(NamedTuple):
    """All bytes that a set is about are here, and some of them by its parity."""

    set_id: int

    def encode(self) -> bytes:
        return b"\x6a\x52" + varint(self.set_id)


class StampFrame(NamedTuple):
    """When the packet was sent: microseconds of a clock of the sender's; an ACK follows in the same packet."""

    sent_us: int

    def encode(self) -> bytes:
        return b"\x6a\x53" + varint(self.sent_us)


class FairRateFrame(NamedTuple):
    """What the receiver of this may send, in bytes a second, and whether the line there is full; an ACK follows."""

    rate: int
    is_full: bool

    def encode(self) -> bytes:
        return b"\x6a\x54" + varint(2 * self.rate + self.is_full)


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
    | ProtectedFrame
    | ParityFrame
    | RepairedFrame
    | StampFrame
    | FairRateFrame
)


_SILENT = (AckFrame, CloseFrame, StampFrame, FairRateFrame)


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
