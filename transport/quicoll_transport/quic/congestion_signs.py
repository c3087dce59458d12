"""What a round trip shows of congestion: whether there is a queue, and whose losses those are. Sans-IO, integers.

When a loss is congestion. A *queue* is a round trip of this round or the last that was longer than the shortest by an
eighth and a millisecond. It *may be full* where it is at least half of the longest that was seen: a queue drops what it
has no place for, and one that has held twice as much without harm has place. All that is lost without a queue that may
be full is *noise*, what the path loses by itself. Of what is lost besides, a round has lost

    too much            more than eight packets, and a share beyond the noise by 2 % (LossThresh of
                        draft-ietf-ccwg-bbr-06) or five times its spread, with a queue that may be full. A fifth is too
                        much whatever its round trips say: policers and the shortest queues give no other sign
    more than noise     more than two packets and twice the noise and five times its spread, with a queue that may be
                        full: others fill it, in which it may have little. Nothing is said of it before the noise is
                        known: who begins with 1 % of loss would take that for others

A burst of twenty packets, lost beside a queue of a few milliseconds that UP had made of a path whose queue holds fifty,
was too much without that "may be full": 0.55 of the rate for the next seconds, and twice the time of an operation.
Bursts of eight in the mean have rounds with more than three times their spread in one of 25, so one in six looks for
more ended like that. A queue that is full loses a fifth of what UP sends.

(The draft takes 2 % for congestion while it probes, and any loss at all while it does not: on a path that loses 1 % at
random its rate sinks by as much each round until it probes again.)

A queue *stands*, and is likely our own, where it was there for a whole round and did not double the shortest round
trip: a window of twice what the path holds cannot make it much longer, and others' mostly are.

Invariants
    `longest` is not below the longest round trip of this round and the last, but for those before the present cycle.
    Noise outlives what else is believed of a path.
"""

from __future__ import annotations

from quicoll_transport.quic.path_model import PARTS, LongestRoundTrip, Noise, ShortestRoundTrip

__all__ = ["CongestionSigns"]

_MS = 1_000_000
_EXCESS = PARTS // 50  # LossThresh
_SPREADS = 5
_EXCESS_DATAGRAMS = 8
_MOST_LOSS = PARTS // 5
_PRESSED_DATAGRAMS = 2


class CongestionSigns:
    """See the module's head.

    shortest, longest, noise: of the path.
    acked, lost: bytes of this round. flight, peak: the most that was in flight, before a loss and at all.
    """

    __slots__ = (
        "_least_ns",
        "_longest_before_ns",
        "_longest_ns",
        "acked",
        "flight",
        "longest",
        "lost",
        "noise",
        "peak",
        "shortest",
    )

    def __init__(self, noise: Noise) -> None:
        """Begin a path, of which no more is known than what it loses by itself."""
        self.shortest, self.longest, self.noise = ShortestRoundTrip(), LongestRoundTrip(), noise
        self.acked = self.lost = self.flight = self.peak = 0
        self._longest_ns = self._longest_before_ns = 0  # round trip, and of the round before
        self._least_ns: int | None = None  # round trip of this round

    def on_round_trip(self, rtt_ns: int, now_ns: int) -> bool:
        """Take a round trip; return whether the shortest is due to be measured anew."""
        self.longest.on_sample(rtt_ns)
        self._longest_ns = max(self._longest_ns, rtt_ns)
        if self._least_ns is None or rtt_ns < self._least_ns:
            self._least_ns = rtt_ns
        return self.shortest.on_sample(rtt_ns, now_ns)

    def on_acked(self, acked: int, prior_in_flight: int) -> None:
        """Take bytes that have arrived, and what was in flight before."""
        self.acked += acked
        self.peak = max(self.peak, prior_in_flight)

    def on_lost(self, lost: int, prior_in_flight: int) -> None:
        """Take bytes that were lost, and what was in flight before."""
        self.lost += lost
        self.flight = max(self.flight, prior_in_flight)

    def end_round(self, rtt_ns: int | None) -> None:
        """Begin the next round, with a round trip if there is one."""
        self._longest_before_ns, self._longest_ns = self._longest_ns, rtt_ns or 0
        self._least_ns = rtt_ns
        self.acked = self.lost = self.flight = self.peak = 0

    def learn_noise(self, datagram: int) -> None:
        """Take what this round has lost for noise, unless a queue may have been full."""
        if not self._may_be_full():
            self.noise.on_round(self.lost, self.acked, datagram)

    def has_queue(self) -> bool:
        """Return whether round trips of this round or the last were longer than without a queue."""
        shortest = self.shortest.value_ns
        return shortest is not None and max(self._longest_ns, self._longest_before_ns) > shortest * 9 // 8 + _MS

    def has_standing_queue(self) -> bool:
        """Return whether there was a queue throughout this round that is likely our own."""
        shortest, least = self.shortest.value_ns, self._least_ns
        return shortest is not None and least is not None and shortest * 9 // 8 + _MS < least < shortest * 2

    @property
    def longest_queue_ns(self) -> int:
        """How long the longest round trip was, beyond the shortest."""
        shortest = self.shortest.value_ns
        return 0 if shortest is None else max(self.longest.value_ns - shortest, 0)

    def _may_be_full(self) -> bool:
        half = (self.longest.value_ns + (self.shortest.value_ns or 0)) // 2
        return self.has_queue() and max(self._longest_ns, self._longest_before_ns) >= half

    def is_too_much(self, total: int, datagram: int) -> bool:
        """Return whether this round has lost too much; `total`: bytes that it had at least."""
        if self.lost <= _EXCESS_DATAGRAMS * datagram:
            return False
        share = self.lost * PARTS // max(total, self.acked + self.lost)
        usual = self.noise.share + max(_EXCESS, _SPREADS * self.noise.spread)
        return share > _MOST_LOSS or (share > usual and self._may_be_full())

    def is_more_than_noise(self, datagram: int) -> bool:
        """Return whether this round has lost more than noise."""
        usual = (2 * self.noise.share + _SPREADS * self.noise.spread) * (self.acked + self.lost) // PARTS
        is_more = self.lost > usual + _PRESSED_DATAGRAMS * datagram
        return is_more and self.noise.is_known and self._may_be_full()
