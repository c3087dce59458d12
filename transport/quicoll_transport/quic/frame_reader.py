"""Reading the frames of a 1-RTT packet (RFC 9000 section 19): the inverse of their `encode`.

Nothing is looked at but the bytes of one packet: what is wrong in them alone is a FrameError here; what needs to know
the connection is the caller's: which side may send a frame (HANDSHAKE_DONE and NEW_TOKEN come from servers only),
directions and limits of streams, acknowledgements of packets that were never sent.

Bounds. A packet's payload is authenticated, yet its sender may be hostile. Every length is compared with what is left
of the payload before anything is taken for it. Tokens, connection ids, reasons and ranges are copied, the bytes of
streams and of the handshake are not: their memory is that of the payload, good as long as the payload is. Each frame
takes bytes of the payload, so that time and memory are linear in its size. PADDING yields nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quicoll_transport.quic.frames import (
    FRAME_ENCODING_ERROR,
    OWN_FRAMES,
    PROTOCOL_VIOLATION,
    AckFrame,
    CloseFrame,
    CryptoFrame,
    DataBlockedFrame,
    FairRateFrame,
    Frame,
    FrameError,
    HandshakeDoneFrame,
    MaxDataFrame,
    MaxStreamDataFrame,
    MaxStreamsFrame,
    NewConnectionIdFrame,
    NewTokenFrame,
    ParityFrame,
    PathChallengeFrame,
    PathResponseFrame,
    PingFrame,
    ProtectedFrame,
    RepairedFrame,
    ResetStreamFrame,
    RetireConnectionIdFrame,
    StampFrame,
    StopSendingFrame,
    StreamDataBlockedFrame,
    StreamFrame,
    StreamsBlockedFrame,
)
from quicoll_transport.quic.varint import MAX_VARINT, pull, varint_size

__all__ = ["read_frames"]

_MOST_STREAMS = 1 << 60  # section 19.11: with more, a stream's id would be no variable-length integer
_MOST_CID = 20
_TOKEN = 16  # of a stateless reset
_ZEROS = bytes(1 << 16)


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


def _read_numbers(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    """Read a frame that is nothing but numbers."""
    frame, count = _NUMBERS[kind]
    numbers = []
    for _ in range(count):
        number, at = pull(view, at)
        numbers.append(number)
    return frame(*numbers), at


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


def _pull_streams(view: memoryview, at: int) -> tuple[int, int]:
    limit, at = pull(view, at)
    if limit > _MOST_STREAMS:
        raise FrameError(FRAME_ENCODING_ERROR, "more streams than there are ids")  # sections 19.11 and 19.14
    return limit, at


def _read_max_streams(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    limit, at = _pull_streams(view, at)
    return MaxStreamsFrame(limit, kind == 0x13), at


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


def _read_path_challenge(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    data, at = _take(view, at, 8)
    return PathChallengeFrame(bytes(data)), at


def _read_path_response(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    data, at = _take(view, at, 8)
    return PathResponseFrame(bytes(data)), at


def _read_own(view: memoryview, at: int, kind: int) -> tuple[Frame, int]:
    """Read a frame of ours; `at` is behind the first byte of its type."""
    which = view[at]
    first, behind = pull(view, at + 1)
    if which == 0x53:
        return StampFrame(first), behind
    if which == 0x54:
        return FairRateFrame(first >> 1, bool(first & 1)), behind
    set_id = first
    if which == 0x50:
        return _read_protected(view, behind, set_id)
    if which == 0x51:
        group, behind = pull(view, behind)
        row, behind = pull(view, behind)
        return ParityFrame(set_id, group, row, view[behind:]), len(view)
    if which == 0x52:
        return RepairedFrame(set_id), behind
    raise _unknown(view, at - 1)


def _read_protected(view: memoryview, at: int, set_id: int) -> tuple[Frame, int]:
    room, at = pull(view, at)
    groups, at = pull(view, at)
    count, at = pull(view, at)
    if 3 * count > len(view) - at:  # each takes three bytes at least
        raise IndexError
    spans = []
    for _ in range(count):
        stream_id, at = pull(view, at)
        start, at = pull(view, at)
        size, at = pull(view, at)
        if start + (size >> 1) > MAX_VARINT:
            raise FrameError(FRAME_ENCODING_ERROR, "a stream reaches beyond 2^62 - 1 bytes")
        spans.append((stream_id, start, start + (size >> 1), bool(size & 1)))
    return ProtectedFrame(set_id, room, groups, spans), at


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


_NUMBERS: dict[int, tuple[Callable[..., Frame], int]] = {
    0x04: (ResetStreamFrame, 3),
    0x05: (StopSendingFrame, 2),
    0x10: (MaxDataFrame, 1),
    0x11: (MaxStreamDataFrame, 2),
    0x14: (DataBlockedFrame, 1),
    0x15: (StreamDataBlockedFrame, 2),
    0x19: (RetireConnectionIdFrame, 1),
}

_READERS: dict[int, Callable[[memoryview, int, int], tuple[Frame, int]]] = {
    0x01: _read_ping,
    0x02: _read_ack,
    0x03: _read_ack,
    0x04: _read_numbers,
    0x05: _read_numbers,
    0x06: _read_crypto,
    0x07: _read_new_token,
    0x10: _read_numbers,
    0x11: _read_numbers,
    0x12: _read_max_streams,
    0x13: _read_max_streams,
    0x14: _read_numbers,
    0x15: _read_numbers,
    0x16: _read_streams_blocked,
    0x17: _read_streams_blocked,
    0x18: _read_new_connection_id,
    0x19: _read_numbers,
    0x1A: _read_path_challenge,
    0x1B: _read_path_response,
    0x1C: _read_close,
    0x1D: _read_close,
    0x1E: _read_handshake_done,
    OWN_FRAMES: _read_own,
}
