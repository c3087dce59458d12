"""Making from parity what has not come of the peer's streams. The receiving side of `protection`.

The bytes that came lately are kept (`_Recent`), in memory of its own: what has arrived of a message that is whole is
its receiver's, who may have changed it. When a set of parity is described, what it is about has mostly come, and all
that is left to do is to forget. Else rows are kept until a group has as many as it lacks segments; these are made, and
put where they belong as if a STREAM frame had brought them (`InboundStreams.on_stream`): limits, final sizes and
targets are theirs to check, and the checksum of a message is checked as ever. When nothing is missing any more, and
something was made, the peer hears so.

States of a set
    unknown     rows have come, and no description yet; they are kept
    open        described, and something is missing
    over        nothing is missing; or it was pushed out by later ones. What comes of it is ignored

Bounds, for each connection: _MOST_RECENT bytes lately received; _SETS sets that are not over, the oldest is over when
there is another; _MOST_ROWS bytes of rows; a description is within the bounds of `segments`. What it names is not taken
for true: a stream that is over lacks nothing, one that may not be is an error of the peer's as with a STREAM frame.
Processor: a group is made once, of bytes that came in packets of their own and are kept for one set only, by as many
rows as came; so it is bounded by what the peer has sent (MOST_PARITY_ROWS combinations of each byte).

Kept only where the round trip is LEAST_KEPT_NS or more: with less the peer protects nothing.

Failure cases: FrameError for a description or a row that cannot be. Rows of another length than their set has are of no
use. What is made from wrong rows is wrong, and found out by the message's checksum, as wrong bytes in a packet are.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quicoll_transport.quic.control import ControlFrames, Saying
from quicoll_transport.quic.erasure import MOST_PARITY_ROWS, repair_segments
from quicoll_transport.quic.frames import FRAME_ENCODING_ERROR, FrameError, ParityFrame, ProtectedFrame, RepairedFrame
from quicoll_transport.quic.segments import MOST_GROUPS, ParityLayout, ProtectedSpan

if TYPE_CHECKING:
    from quicoll_transport.quic.erasure import Words
    from quicoll_transport.quic.inbound import InboundStreams
    from quicoll_transport.quic.streams import Rows

__all__ = ["LEAST_KEPT_NS", "Repairs"]

LEAST_KEPT_NS = 4_000_000

_MOST_RECENT = 6 << 20
_PIECE_COST, _STREAM_COST = 128, 640  # bytes of memory beside those that came
_MOST_ROWS = 1 << 20
_SETS = 8
_OVER = 64  # sets that are over and remembered as such


class _Kept:
    """Bytes of one stream that came lately, as the pieces in which they came: by their places, and none twice.

    nbytes: of memory. Nothing below `_base` is kept any more.
    """

    __slots__ = ("_base", "_pieces", "_starts", "nbytes")

    def __init__(self) -> None:
        self.nbytes = _STREAM_COST
        self._base = 0
        self._starts: list[int] = []
        self._pieces: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        return not self._pieces

    def _end(self, i: int) -> int:
        return self._starts[i] + len(self._pieces[i])

    def put(self, offset: int, data: memoryview | Rows, size: int) -> None:
        if offset < self._base:
            return
        starts, stop = self._starts, offset + size
        i = bisect_right(starts, offset)
        at = max(offset, self._end(i - 1)) if i else offset
        whole = b"" if at >= stop else data.tobytes()
        while at < stop:  # once, but where some of it came before
            upto = min(stop, starts[i]) if i < len(starts) else stop
            if at < upto:
                starts.insert(i, at)
                self._pieces.insert(i, whole[at - offset : upto - offset])
                self.nbytes += upto - at + _PIECE_COST
                i += 1
            if upto == stop:
                return
            at = self._end(i)
            i += 1

    def find(self, start: int, stop: int) -> bytes | None:
        """Return bytes; None where they are not all here."""
        found = bytearray()
        i = bisect_right(self._starts, start) - 1
        at = start
        while at < stop:
            if not 0 <= i < len(self._starts) or self._starts[i] > at:
                return None
            found += self._pieces[i][at - self._starts[i] : stop - self._starts[i]]
            at = max(at, self._end(i))
            i += 1
        return bytes(found)

    def forget(self, stop: int) -> None:
        """Forget what is below `stop`: pieces that end there or before."""
        gone = 0
        while gone < len(self._pieces) and self._end(gone) <= stop:
            gone += 1
        self._drop(gone, stop)

    def shrink(self, nbytes: int) -> None:
        """Forget the first pieces until so much memory is taken at most."""
        gone, left = 0, self.nbytes
        while left > nbytes and gone < len(self._pieces):
            left -= len(self._pieces[gone]) + _PIECE_COST
            gone += 1
        self._drop(gone, self._end(gone - 1) if gone else 0)

    def _drop(self, gone: int, stop: int) -> None:
        """Let go of the first pieces, and keep nothing below `stop` any more."""
        self.nbytes -= sum(map(len, self._pieces[:gone])) + gone * _PIECE_COST
        del self._starts[:gone], self._pieces[:gone]
        self._base = max(self._base, stop)


class _Recent:
    """What came lately, by stream; the stream that was heard of last is the last one."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._streams: dict[int, _Kept] = {}

    def put(self, stream_id: int, offset: int, data: memoryview | Rows, size: int) -> None:
        kept = self._streams.pop(stream_id, None)
        if kept is None:
            kept = _Kept()
        else:
            self.nbytes -= kept.nbytes
        kept.put(offset, data, size)
        self._streams[stream_id] = kept
        self.nbytes += kept.nbytes
        while self.nbytes > _MOST_RECENT:
            oldest = next(iter(self._streams))
            if self._streams[oldest] is kept:
                kept.shrink(_MOST_RECENT // 2)
                self.nbytes = kept.nbytes
                return
            self.nbytes -= self._streams.pop(oldest).nbytes

    def find(self, stream_id: int, start: int, stop: int) -> bytes | None:
        """Return bytes of a stream; None where they are not all here."""
        kept = self._streams.get(stream_id)
        return None if kept is None else kept.find(start, stop)

    def forget(self, stream_id: int, stop: int) -> None:
        """Forget what is below `stop` of a stream."""
        kept = self._streams.get(stream_id)
        if kept is not None:
            self.nbytes -= kept.nbytes
            kept.forget(stop)
            if kept.is_empty:
                del self._streams[stream_id]
            else:
                self.nbytes += kept.nbytes

    def clear(self) -> None:
        self._streams.clear()
        self.nbytes = 0


class _Gap(NamedTuple):
    """A segment of which something has not come: which one of its group, and its bytes [start, stop)."""

    place: int
    span: ProtectedSpan
    start: int
    stop: int


class _ParitySet:
    """See the module's head.

    layout: None: not described yet. rows: by group and number. gaps: by group, those that have any.
    has_repaired: whether anything was made.
    """

    __slots__ = ("gaps", "has_repaired", "layout", "rows")

    def __init__(self) -> None:
        self.layout: ParityLayout | None = None
        self.rows: dict[int, dict[int, bytes]] = {}
        self.gaps: dict[int, list[_Gap]] = {}
        self.has_repaired = False


class Repairs:
    """See the module's head.

    repaired_bytes: of streams that were made from parity.
    """

    def __init__(self, inbound: InboundStreams, control: ControlFrames) -> None:
        self.repaired_bytes = 0
        self._inbound = inbound
        self._control = control
        self._repaired: dict[int, int] = {}  # sets of which the peer is told, by what they are to `control`
        control.answers(Saying.REPAIRED, lambda about: RepairedFrame(self._repaired[about]).encode())
        self._recent = _Recent()
        self._sets: dict[int, _ParitySet] = {}
        self._over: dict[int, None] = {}
        self._rows_bytes = 0

    @property
    def recent_bytes(self) -> int:
        """Bytes of memory for what came lately."""
        return self._recent.nbytes

    def note(self, stream_id: int, offset: int, data: memoryview | Rows, size: int) -> None:
        """Keep bytes that have just been taken."""
        if size:
            self._recent.put(stream_id, offset, data, size)

    def late(self, stream_id: int) -> None:
        """Look whether what has just come of a stream is what a set lacked, or lets it be repaired.

        Raises as `on_protected`.
        """
        for number, parity in list(self._sets.items()):
            for group, gaps in list(parity.gaps.items()):
                if any(gap.span.stream_id == stream_id and not self._is_gap(gap) for gap in gaps):
                    self._try(parity, group)
            self._look(number, parity)

    @property
    def has_open(self) -> bool:
        """Whether anything that comes may be what a set lacks."""
        return bool(self._sets)

    def on_protected(self, frame: ProtectedFrame) -> None:
        """Take the description of a set.

        Raises:
            FrameError: It cannot be, or names streams that cannot be.
            ProtocolError: The reader of a stream cannot take what was made.
        """
        try:
            layout = ParityLayout([ProtectedSpan(*span) for span in frame.spans], frame.room, frame.groups)
        except ValueError as error:
            raise FrameError(FRAME_ENCODING_ERROR, f"parity of what cannot be: {error}") from None
        parity = self._find(frame.set_id)
        if parity is None or parity.layout is not None:
            return
        parity.layout = layout
        if any(self._inbound.has_gap(span.stream_id, span.start, span.stop) for span in layout.spans):
            for group in range(layout.groups):
                gaps = [_Gap(at, *segment) for at, segment in enumerate(layout.segments(group))]
                parity.gaps[group] = [gap for gap in gaps if self._is_gap(gap)]
                self._try(parity, group)
        self._look(frame.set_id, parity)

    def on_parity(self, frame: ParityFrame) -> None:
        """Take a row; raises as `on_protected`."""
        if frame.group >= MOST_GROUPS or frame.row >= MOST_PARITY_ROWS:
            raise FrameError(FRAME_ENCODING_ERROR, f"row {frame.row} of group {frame.group} of parity")
        parity = self._find(frame.set_id)
        if parity is None:
            return
        rows = parity.rows.setdefault(frame.group, {})
        if frame.row not in rows:
            rows[frame.row] = bytes(frame.data)
            self._rows_bytes += len(frame.data)
            while self._rows_bytes > _MOST_ROWS:
                self._end(next(iter(self._sets)))
        if frame.set_id in self._sets and parity.layout is not None:
            self._try(parity, frame.group)
            self._look(frame.set_id, parity)

    def release(self) -> None:
        """Let go of all memory."""
        self._recent.clear()
        self._sets.clear()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _find(self, number: int) -> _ParitySet | None:
        """Return a set, None if it is over."""
        if number in self._over:
            return None
        parity = self._sets.get(number)
        if parity is None:
            parity = self._sets[number] = _ParitySet()
            if len(self._sets) > _SETS:
                self._end(next(iter(self._sets)))
        return parity

    def _end(self, number: int) -> None:
        parity = self._sets.pop(number)
        self._rows_bytes -= sum(len(row) for rows in parity.rows.values() for row in rows.values())
        self._over[number] = None
        if len(self._over) > _OVER:
            del self._over[next(iter(self._over))]

    def _is_gap(self, gap: _Gap) -> bool:
        return self._inbound.has_gap(gap.span.stream_id, gap.start, gap.stop)

    def _look(self, number: int, parity: _ParitySet) -> None:
        """End a set that lacks nothing any more."""
        layout = parity.layout
        if layout is None or parity.gaps or number not in self._sets:
            return
        self._end(number)
        for span in layout.spans:
            self._recent.forget(span.stream_id, span.stop)
            if parity.has_repaired and span.fin and not self._inbound.has_end(span.stream_id):
                self._inbound.on_stream(span.stream_id, span.stop, memoryview(b""), 0, fin=True)
        if parity.has_repaired:  # a peer that acknowledges nothing has no more than _OVER such frames wait for it
            self._repaired[number % _OVER] = number
            self._control.want(Saying.REPAIRED, number % _OVER)

    def _try(self, parity: _ParitySet, group: int) -> None:
        """Make the segments of a group that have gaps, if there is enough for it."""
        layout, rows = parity.layout, parity.rows.get(group, {})
        gaps = [gap for gap in parity.gaps.get(group, ()) if self._is_gap(gap)]
        if layout is None or not gaps:
            parity.gaps.pop(group, None)
        else:
            parity.gaps[group] = gaps
            if len(gaps) <= len(rows) and self._repair(layout, group, gaps, rows):
                parity.has_repaired = True
                del parity.gaps[group]

    def _repair(self, layout: ParityLayout, group: int, gaps: list[_Gap], rows: dict[int, bytes]) -> bool:
        """Make segments of a group; return whether there was enough for it."""
        table: Words = np.zeros((layout.members(group), layout.words), np.uint64)
        flat = table.view(np.uint8)
        lacking = {gap.place: None for gap in gaps}
        missing = []
        for at, (span, start, stop) in enumerate(layout.segments(group)):
            kept = None if at in lacking else self._recent.find(span.stream_id, start, stop)
            if kept is None:
                missing.append(at)
            else:
                flat[at, : stop - start] = np.frombuffer(kept, np.uint8)
        usable: dict[int, Words] = {}
        for row, data in rows.items():
            if len(data) == layout.size:
                usable[row] = np.frombuffer(data.ljust(8 * layout.words, b"\0"), np.uint64)
        if len(missing) > len(usable):
            return False
        repair_segments(table, missing, usable)
        for gap in gaps:
            made = memoryview(flat[gap.place, : gap.stop - gap.start].tobytes())
            fin = gap.span.fin and gap.stop == gap.span.stop
            self.repaired_bytes += len(made)
            self._recent.put(gap.span.stream_id, gap.start, made, len(made))
            self._inbound.on_stream(gap.span.stream_id, gap.start, made, len(made), fin=fin)
        return True
