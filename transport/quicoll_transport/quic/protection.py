"""Parity behind the tail of what is sent, so that what is lost there need not be sent again. The sending side.

What is lost while more is to be sent costs nothing but its bytes: it is sent again meanwhile. What is lost of the last
round trip costs another one. So when bulk comes to its end, parity follows for what was sent lately: `erasure` over the
`segments` of it. Whoever receives it (`repairs`) makes from it what has not come, and says so.

When it is worth it. A tail of K packets is 1.25 round trips long; so a packet costs 1.25 / K round trips, and a loss in
it costs about one. Parity goes where a row for each group costs less than what it saves, by the share of packets that
is lost (`LossShare`): K * K * share > 2 * groups. A further row of a group is worth it while the chance that more are
lost than it has rows is above 1.25 / K; chance is Poisson's, and losses in bursts count as bursts, which are shared by
the groups. So a path that loses little gets one row, the XOR. Never where the round trip is below LEAST_RTT_NS,
nor where nothing was lost yet.

What it costs. At most 3 % and two packets of each group, of 200 segments and fewer; and two short packets that say what
it is about. Parity is congestion-controlled and paced as data are. Processor: see `erasure`; rows are made when they
go, so no turn makes more of them than the pacer lets go. Memory: a copy of what is protected, until its last row has
gone; MOST_PROTECTED bytes at most. Streams may be reset, or let go of, as ever. What is off costs a comparison a run.

States of a set
    going      its copy is here, and not all of its packets have gone
    gone       all have; some are in flight
    settled    none is in flight: all have arrived or are lost. It is forgotten
    hopeless   more is lost than all of its rows can bring back. It is forgotten; what has not gone of it does not go
Bytes of a set that is not settled are not sent again when they are found lost; they are held, for they may have been
repaired. The peer's word that they were comes with the acknowledgement of the parity at the latest: it acknowledges the
bytes, and what was held is dropped. When the set is settled without that word, what is held is lost and goes again,
later than without parity by no more than what the parity took to send; at once when it is hopeless. A probe timeout
waits for nothing.

That packets are lost is told to congestion control as ever, whatever becomes of their bytes (RFC 9265).

Failure cases: the peer's word about a set that is not known is late, and ignored; about bytes that it does not have, it
harms the peer's own stream. Rows that could not go within a quarter of a round trip are dropped, for they would come
too late, and so would what is held for them.
"""

from __future__ import annotations

from collections import deque
from math import exp
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quicoll_transport.link.ranges import Ranges
from quicoll_transport.quic.erasure import MOST_PARITY_ROWS, parity_row
from quicoll_transport.quic.frames import ParityFrame, ProtectedFrame
from quicoll_transport.quic.segments import MOST_GROUPS, MOST_PROTECTED, MOST_SPANS, ParityLayout, ProtectedSpan

if TYPE_CHECKING:
    from quicoll_transport.quic.erasure import Words
    from quicoll_transport.quic.outbound import OutboundStreams
    from quicoll_transport.quic.streams import SendStream

__all__ = ["LEAST_RTT_NS", "LossShare", "TailProtection", "parity_rows"]

LEAST_RTT_NS = 5_000_000
"""Below so long a round trip, nothing is protected."""

_REACH = 1.25  # round trips
_GROUP = 200  # segments
_SHARE, _SPARE = 0.03, 2  # rows of a group, at most
_MEMORY = 1 << 15  # packets after which what was lost counts half
_FEW = 256  # packets, of which the share says too little
_ACTIVE = 8  # sets
_PATIENCE = 4  # in a round trip


class LossShare:
    """How many packets are lost: `share`, of one, and `burst`, one after the other."""

    __slots__ = ("_bursts", "_lost", "_lost_total", "_sent", "_sent_total")

    def __init__(self) -> None:
        self._lost = self._sent = self._bursts = 0
        self._lost_total = self._sent_total = 0

    def on_burst(self, count: int = 1) -> None:
        """Take note that packets were lost, one after the other."""
        self._bursts += count

    def look(self, sent: int, lost: int) -> None:
        """Take what was sent and what was lost of it, both since the beginning."""
        self._sent += sent - self._sent_total
        self._lost = max(self._lost + lost - self._lost_total, 0)
        self._sent_total, self._lost_total = sent, lost
        while self._sent > _MEMORY:
            self._sent, self._lost, self._bursts = self._sent // 2, self._lost // 2, self._bursts // 2

    @property
    def share(self) -> float:
        """One packet more than was lost is counted, for chance; nothing where nothing was lost."""
        return (self._lost + 1) / self._sent if self._lost and self._sent >= _FEW else 0.0

    @property
    def burst(self) -> float:
        return max(self._lost / self._bursts, 1.0) if self._bursts else 1.0


def parity_rows(count: int, groups: int, share: float, burst: float) -> int:
    """Return how many rows of parity each group is worth; see the module's head.

    Args:
        count: Segments of all groups.
        groups: That they are dealt out to.
        share: Of packets that are lost.
        burst: How many of them one after the other.
    """
    if count * count * share <= 2 * groups:
        return 0
    members = -(-count // groups)
    most = min(int(members * _SHARE) + _SPARE, MOST_PARITY_ROWS)
    together = max(burst / groups, 1.0)  # of one burst, in one group
    mean = members * share / together
    enough = _REACH / count
    term = exp(-mean)
    above, bursts = 1.0 - term, 0
    while above > enough and bursts * together < most:
        bursts += 1
        term *= mean / bursts
        above -= term
    return max(1, min(most, round(bursts * together)))


class _Sent(NamedTuple):
    """Bytes [start, stop) of a stream that were sent lately."""

    at_ns: int
    stream: SendStream
    start: int
    stop: int


class _Held(NamedTuple):
    """Bytes of a stream that are lost, unless they were repaired."""

    stream: SendStream
    start: int
    stop: int
    fin: bool


class _ProtectedSet:
    """See the module's head.

    waiting: packets that have not gone, None: the description. flying: those that have.
    hope: how many segments more may be lost.
    """

    __slots__ = ("began_ns", "count", "flying", "held", "hope", "layout", "number", "streams", "table", "waiting")

    def __init__(self, number: int, layout: ParityLayout, table: Words, streams: list[SendStream], rows: int,
                 now_ns: int) -> None:  # fmt: skip
        self.number, self.layout, self.table, self.streams = number, layout, table, streams
        self.began_ns = now_ns
        self.waiting: deque[tuple[int, int] | None] = deque([None])
        self.waiting += [(group, row) for row in range(rows) for group in range(layout.groups)]
        self.waiting.append(None)
        self.flying: dict[int, None] = {}
        self.count = 0
        self.held: list[_Held] = []
        self.hope = rows * layout.groups


class TailProtection:
    """See the module's head.

    parity_bytes: of rows that were sent. held_bytes: that were found lost and not sent again at once.
    """

    def __init__(self, outbound: OutboundStreams) -> None:
        self.loss = LossShare()
        self.parity_bytes = self.held_bytes = 0
        self._outbound = outbound
        self._log: deque[_Sent] = deque()
        self._logged = 0  # bytes
        self._fresh = False  # something was sent since the end of the tail was looked at
        self._sets: dict[int, _ProtectedSet] = {}
        self._next = 0

    # -- what is sent ----------------------------------------------------------------------------------------------

    def on_sent(self, stream: SendStream, start: int, stop: int, reach_ns: int, now_ns: int) -> None:
        """Take note of bytes that leave now. reach_ns: a round trip."""
        log = self._log
        log.append(_Sent(now_ns, stream, start, stop))
        self._logged += stop - start
        self._fresh = True
        old = now_ns - int(reach_ns * _REACH)
        while log[0].at_ns < old or (self._logged > MOST_PROTECTED and len(log) > 1):
            gone = log.popleft()
            self._logged -= gone.stop - gone.start

    @property
    def has_tail(self) -> bool:
        """Whether anything was sent since `close` was asked last."""
        return self._fresh

    def close(self, room: int, most: int, now_ns: int) -> None:
        """Nothing more is to be sent at present: protect the tail, if it is worth it.

        Args:
            room: Bytes of a packet of a run for a stream's id and its bytes.
            most: Bytes of a packet for frames.
            now_ns: The time.
        """
        self._fresh = False
        share = self.loss.share
        if not share or len(self._sets) >= _ACTIVE:
            return
        spans, streams = self._tail()
        if not spans:
            return
        count = sum(-(-(span.stop - span.start) // room) for span in spans)
        groups = min(max(-(-count // _GROUP), 1), MOST_GROUPS)
        rows = parity_rows(count, groups, share, self.loss.burst)
        if not rows:
            return
        while True:  # the description is one packet
            description = ProtectedFrame(self._next, room, groups, spans)
            if len(description.encode()) <= most:
                break
            del spans[0], streams[0]
        layout = ParityLayout(spans, room, groups)
        self._sets[self._next] = _ProtectedSet(self._next, layout, _copied(layout, streams), streams, rows, now_ns)
        self._next += 1
        self._log.clear()
        self._logged = 0

    def _tail(self) -> tuple[list[ProtectedSpan], list[SendStream]]:
        """Return what was sent lately and is not acknowledged, the latest of it where there is too much."""
        sent: dict[int, Ranges] = {}
        streams: dict[int, SendStream] = {}
        for piece in self._log:
            stream = piece.stream
            start = max(piece.start, stream.upto)
            if stream.reset_code is None and start < piece.stop:
                if stream.id not in sent:
                    sent[stream.id], streams[stream.id] = Ranges(), stream
                sent[stream.id].add(start, piece.stop)
        spans: list[ProtectedSpan] = []
        owners: list[SendStream] = []
        for stream_id, ranges in sent.items():
            stream = streams[stream_id]
            for start, stop in ranges:
                spans.append(ProtectedSpan(stream_id, start, stop, stream.fin and stop == stream.length))
                owners.append(stream)
        return spans[-MOST_SPANS:], owners[-MOST_SPANS:]

    # -- parity ----------------------------------------------------------------------------------------------------

    def waiting(self, reach_ns: int, now_ns: int) -> int:
        """Return how many packets are to go. reach_ns: a round trip; what has waited for a part of it is dropped."""
        total = 0
        for protected in list(self._sets.values()):
            if protected.waiting and now_ns - protected.began_ns > reach_ns // _PATIENCE:
                protected.waiting.clear()
                protected.table = _NOTHING
            total += len(protected.waiting)
        return total

    def next_packet(self, most: int) -> tuple[bytes, int, int] | None:
        """Return the frame of the next packet, the number of its set and its own in it; None: there is none.

        most: bytes of a packet for frames; what takes more is dropped.
        """
        for protected in list(self._sets.values()):
            while protected.waiting:
                what = protected.waiting.popleft()
                layout = protected.layout
                if what is None:
                    frame = ProtectedFrame(protected.number, layout.room, layout.groups, layout.spans).encode()
                else:
                    group, row = what
                    words = parity_row(protected.table[group :: layout.groups], row)
                    data = words.view(np.uint8)[: layout.size].tobytes()
                    frame = ParityFrame(protected.number, group, row, data).encode()
                if not protected.waiting:
                    protected.table = _NOTHING
                if len(frame) <= most:
                    self.parity_bytes += 0 if what is None else layout.size
                    place = protected.count
                    protected.count += 1
                    protected.flying[place] = None
                    return frame, protected.number, place
        return None

    # -- what became of it -----------------------------------------------------------------------------------------

    def hold(self, stream: SendStream, start: int, stop: int, *, fin: bool) -> bool:
        """Return whether lost bytes wait for what their parity brings, and are not to be sent again now."""
        for protected in self._sets.values():
            layout = protected.layout
            for span in layout.spans:
                if span.stream_id == stream.id and span.start <= start and stop <= span.stop and span.fin >= fin:
                    protected.hope -= max(1, (stop - start) // layout.step(span))
                    if protected.hope < 0:
                        protected.waiting.clear()
                        return False
                    protected.held.append(_Held(stream, start, stop, fin))
                    self.held_bytes += stop - start
                    return True
        return False

    def on_settled(self, set_id: int, place: int) -> None:
        """Take note that a packet of a set has arrived, or is lost."""
        protected = self._sets.get(set_id)
        if protected is not None:
            protected.flying.pop(place, None)

    def on_repaired(self, set_id: int) -> None:
        """Take a RepairedFrame: the peer has all bytes of a set."""
        protected = self._sets.pop(set_id, None)
        if protected is not None:
            for span, stream in zip(protected.layout.spans, protected.streams, strict=True):
                self._outbound.on_acked(stream, span.start, span.stop, fin=span.fin)

    def let_go(self) -> None:
        """Forget what is settled, and let what was held for it be sent again.

        To be called once all that has come was looked at: the peer's word may stand behind its acknowledgement.
        """
        for number, protected in list(self._sets.items()):
            if protected.hope < 0 or not (protected.waiting or protected.flying):
                del self._sets[number]
                for piece in protected.held:
                    self._outbound.on_lost(piece.stream, piece.start, piece.stop, fin=piece.fin)

    @property
    def is_going(self) -> bool:
        """Whether any set is not settled."""
        return bool(self._sets)

    def release(self) -> None:
        """Let go of all memory."""
        self._sets.clear()
        self._log.clear()


_NOTHING: Words = np.zeros((0, 0), np.uint64)


def _copied(layout: ParityLayout, streams: list[SendStream]) -> Words:
    """Return the segments of a layout, a row each."""
    table: Words = np.zeros((layout.count, layout.words), np.uint64)
    rows = table.view(np.uint8)
    first = 0
    for span, stream in zip(layout.spans, streams, strict=True):
        step = layout.step(span)
        data = np.frombuffer(stream.read(span.start, span.stop), np.uint8)
        whole, rest = divmod(len(data), step)
        rows[first : first + whole, :step] = data[: whole * step].reshape(whole, step)
        if rest:
            rows[first + whole, :rest] = data[whole * step :]
        first += whole + (rest > 0)
    return table
