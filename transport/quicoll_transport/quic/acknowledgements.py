"""What has arrived of the peer's packets: which are new, when the peer is to be told, and the ACK frame that tells it.

Two sets of packet numbers are kept, because they are let go of at different times (RFC 9000 section 13.2.3):

- `known`, all that have arrived: what is in it, or below `floor`, is a duplicate and is not taken again (section 12.3).
- `open`, what goes into ACK frames: those that have arrived and of which the peer is not known to have heard. A number
  leaves it when an ACK frame that told it is acknowledged (section 13.2.4); the largest number always stays, so that
  every frame tells it.

Invariants: `open` is a part of `known`. Neither has more ranges than its bound; the lowest go first. For `known` that
moves the floor up: what then comes from below is thrown away as if it were a duplicate and has to be sent again. A
packet that was lost leaves a gap for ever, for its number never comes; so most of the ranges go at a time, and there is
`has_place` for runs again.
The bounds are far above what a path can reorder: a burst of 180 packets that arrives shuffled leaves up to 90 gaps.

When an acknowledgement is due (section 13.2.1, 13.2.2)

    at once         for what arrives out of order; for every second full packet at first, and for every eighth of what
                    has come, up to 128 KiB, later: a sender in its slow start needs them close together, a fast one
                    pays for each
    with a packet   that goes anyway, whatever the reason: mostly the answer to what it acknowledges, so that a request
                    and its answer are two datagrams. Less than two full packets not where an ACK went within the last
                    millisecond: a stream of requests and answers is acknowledged as often as anybody has use for it,
                    and to make and take an ACK costs as much as all else in such a packet
    after 1 ms      for two full packets: a sender whose window has shrunk to them waits for it
    after 5 ms      for less. Who sent so little waits for nothing but to know that it arrived, and most such packets
                    are answered by then. It is what MAX_ACK_DELAY_MS names, with a millisecond for the timer to fire;
                    so the peer's probe timeouts, which it is a part of, are short as well. With 1 ms an exchange of
                    small messages 2 ms apart took a quarter more processor time, and 4 MiB over 200 Mbit/s and 50 ms
                    were no faster (docs/transport.md, Wide area)

Whoever only receives sends nothing that would be acknowledged, so its ACK frames would only grow. `wants_answer` says
when such a packet should hold a PING as well (section 13.2.4).
"""

from __future__ import annotations

from quicoll_transport.link.ranges import Ranges
from quicoll_transport.quic.frames import AckFrame
from quicoll_transport.quic.varint import varint_size

__all__ = ["MAX_ACK_DELAY_MS", "Acknowledgements", "ToldNumbers"]

_KNOWN = 1024  # ranges; see the module's head
_OPEN = 512
_SOON_NS = 1_000_000
_APART_NS = 1_000_000  # between two that go along with something else
_LATE_NS = 5_000_000
_FULL_BYTES = 2 * 1200  # of two packets of the least full size, whatever size the largest had that ever came
_MOST_BYTES = 128 * 1024
_SILENT = 16  # packets with nothing but an ACK, until one asks for an answer
_HEAD = 1 + 8 + 8 + 2  # bytes before the ranges: type, largest, delay, and a count below 2^14

MAX_ACK_DELAY_MS = 6
"""The transport parameter (RFC 9000 section 18.2) that goes with the times of this module."""

ToldNumbers = tuple[tuple[int, int], ...]
"""Half-open ranges of packet numbers that one ACK frame told, highest first."""


class Acknowledgements:
    """See the module's head.

    largest: the largest number that has arrived; -1 before the first.
    floor: numbers below count as having arrived.
    due_ns: when an ACK has to go; None while nothing waits for one.
    """

    __slots__ = ("_exponent", "_heard", "_known", "_largest_ns", "_open", "_silent", "_since_ns", "_size", "_told_ns",
                 "_unacknowledged", "due_ns", "floor", "largest")  # fmt: skip

    def __init__(self, *, exponent: int = 3) -> None:
        """exponent: our ack_delay_exponent (RFC 9000 section 18.2)."""
        self.largest = -1
        self.floor = 0
        self.due_ns: int | None = None
        self._exponent = exponent
        self._known = Ranges()
        self._open = Ranges()
        self._largest_ns = 0
        self._told_ns: int | None = None  # when the last ACK went
        self._since_ns = 0  # when the oldest packet arrived of which the peer was not told
        self._unacknowledged = 0  # bytes of packets that ask for an acknowledgement, since the last one
        self._heard = 0  # bytes in all
        self._size = 0  # of the largest datagram
        self._silent = 0

    def has_place(self, count: int) -> bool:
        """Return whether so many more packets cannot move the floor."""
        return len(self._known) + count <= _KNOWN

    def is_new(self, number: int) -> bool:
        """Return whether a packet with this number has not arrived yet."""
        return number > self.largest or (number >= self.floor and number not in self._known)

    def note(
        self, start: int, stop: int, nbytes: int, *, eliciting: bool, now_ns: int, arrived_ns: int | None = None
    ) -> None:
        """Take note of the packets [start, stop), all of them new.

        Args:
            start: Number of the first.
            stop: The number after the last.
            nbytes: Bytes of all of them, as datagrams.
            eliciting: Whether any of them asks for an acknowledgement.
            now_ns: The time.
            arrived_ns: When they came to this host, which the peer is told; None: now.
        """
        in_order = start == self.largest + 1
        self._known.add(start, stop)
        self._open.add(start, stop)
        if not in_order:  # in order they only prolong the last range
            self._bound()
        if stop > self.largest + 1:
            self.largest, self._largest_ns = stop - 1, now_ns if arrived_ns is None else arrived_ns
        self._heard += nbytes
        self._size = max(self._size, nbytes // (stop - start))
        if eliciting:
            if self.due_ns is None:
                self._since_ns, self.due_ns = now_ns, now_ns + _LATE_NS
            waiting = self._unacknowledged = self._unacknowledged + nbytes
            if not in_order or waiting >= min(_MOST_BYTES, max(2 * self._size, self._heard >> 3)):
                self.due_ns = min(self.due_ns, now_ns)
            elif waiting >= _FULL_BYTES:
                self.due_ns = min(self.due_ns, self._since_ns + _SOON_NS)

    def _bound(self) -> None:
        if len(self._known) > _KNOWN:
            while len(self._known) > _KNOWN // 4:
                self.floor = self._known.first[1]
                self._known.subtract(0, self.floor)
        if len(self._open) > _OPEN:
            self._open.subtract(0, self._open.first[1])

    def is_due(self, now_ns: int, *, accompanied: bool) -> bool:
        """Return whether an ACK is to go now. accompanied: something else goes anyway, and it may go along."""
        if self.due_ns is None or self.due_ns <= now_ns:
            return self.due_ns is not None
        soon = self._told_ns is not None and now_ns - self._told_ns < _APART_NS
        return accompanied and not (soon and self._unacknowledged < _FULL_BYTES)

    def frame(self, now_ns: int, room: int) -> tuple[bytes, ToldNumbers]:
        """Return an ACK frame of `room` bytes at most, 40 or more, and the numbers that it tells; none is due then.

        If not all ranges fit, the lowest are left out.
        """
        delay = max(0, now_ns - self._largest_ns) // 1000 >> self._exponent
        told: list[tuple[int, int]] = []
        room -= _HEAD
        low = 0
        for start, stop in reversed(self._open):
            room -= varint_size(stop - 1 - start) + (varint_size(low - stop - 1) if told else 0)
            if room < 0:
                break
            told.append((start, stop))
            low = start
        self.due_ns, self._unacknowledged, self._told_ns = None, 0, now_ns
        return AckFrame(told, delay).encode(), tuple(told)

    def wants_answer(self, *, accompanied: bool) -> bool:
        """Return whether a packet with an ACK in it should ask for an acknowledgement itself; called once for each.

        accompanied: it holds something that asks for one anyway.
        """
        self._silent = 0 if accompanied else self._silent + 1
        if self._silent < _SILENT or len(self._open) < 2:
            return False
        self._silent = 0
        return True

    def acknowledged(self, told: ToldNumbers) -> None:
        """Take note that the peer has an ACK frame that told these numbers."""
        for start, stop in told:
            self._open.subtract(start, min(stop, self.largest))
