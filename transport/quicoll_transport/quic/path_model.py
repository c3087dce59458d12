"""What a rate-based controller believes of a path: bandwidth, round trip, noise, how acknowledgements clump.

Each belief is an estimator of its own; `bbr` puts them together and decides. Sans-IO, integers only. Sections are those
of draft-ietf-ccwg-bbr-06.

Bandwidth (5.5.2 to 5.5.6): the largest delivery rate of two cycles of probing, the present one and the one before. A
sample that the application limited counts only where it is above what is known: it says what was asked for. Cycles and
not seconds are the clock, so a path that carries nothing between two operations is remembered as it was.

Shortest round trip (5.5.7, 4.2): the least of the last ten seconds. It is due to be measured anew, in an emptied queue,
where nothing has confirmed it for five. A sample within a 64th of it confirms it (a difference to the draft, which asks
for one as short): the bursts of a pacer alone make a round trip longer than the shortest. The value itself never rises
by that, so two flows cannot lift it bit by bit.

Longest round trip (no section): the most of two cycles of probing. A queue loses what it has no place for when it is
full, and not when it is half of what it has been.

Noise (no section; the draft takes each loss for congestion): the share of bytes that is lost while no queue may be full
(`congestion_signs`), over the last few thousand packets; not of STARTUP, DRAIN and UP, which may lose what they send
too much, before the shortest round trip of a path that others fill is known. It is what the path loses by itself, and
`Bbr` reacts to no loss but beyond it. It is at most `MOST_NOISE`; a path that loses more is taken for congested
whatever its round trips say. Before anything is known it is nothing, and `_PRIOR` packets without loss stand for that:
one lost packet of twenty is no 5 %. `spread` is how far single rounds are from it: where packets are lost in bursts, a
round with three times the usual loss is nothing unusual.

Aggregation (5.5.9): by how much acknowledgements that come together exceed what the bandwidth accounts for. So much
more may be in flight, else a path that hands acknowledgements over in clumps would stand still between them.

Train (no section): the rate at which packets that left within less than a round trip arrived. A sample of the bandwidth
is bytes over a round trip at least, and a connection that begins has not enough under way to fill one: from a window
that was sent in a third of it, it learns a third of what the path has just carried. A train counts from its first
acknowledgement on, over the longer of the times that it took to leave and to arrive, so no acknowledgements that come
together make it faster than it left. It says what the path carried for so long, not that nobody else has a part in it;
`Bbr` follows it only in STARTUP. Fewer than eight datagrams are none: a few small messages, which a connection begins
with, arrive as slowly as the host is busy.
"""

from __future__ import annotations

__all__ = [
    "MOST_NOISE",
    "PARTS",
    "Aggregation",
    "Bandwidth",
    "LongestRoundTrip",
    "Noise",
    "ShortestRoundTrip",
    "Train",
]

_NS = 1_000_000_000
PARTS = 10_000
"""Of these parts is a share."""
MOST_NOISE = PARTS // 10
_PRIOR = 100  # packets
_FEW = 16  # packets, of a round that says too little
_MEMORY = 4096  # packets after which what was seen counts half
_FILTER_NS = 10 * _NS  # MinRTTFilterLen
_DUE_NS = 5 * _NS  # ProbeRTTInterval
_TRAIN_NS = _NS // 1000
_TRAIN_DATAGRAMS = 8
_CLUMP_ROUNDS = 5  # half of BBR.ExtraAckedFilterLen


class Bandwidth:
    """See the module's head. value: bytes a second; 0 before the first sample."""

    __slots__ = ("_before", "_now", "value")

    def __init__(self) -> None:
        self.value = self._before = self._now = 0

    def on_sample(self, rate: int, *, app_limited: bool) -> None:
        """Take the rate of what one acknowledgement brought."""
        if not app_limited or rate >= self.value:
            self._now = max(self._now, rate)
            self.value = max(self.value, rate)

    def cut(self, most: int) -> None:
        """Believe in no more than this, whatever was seen."""
        self._before, self._now = min(self._before, most), min(self._now, most)
        self.value = max(self._before, self._now)

    def begin_with(self, rate: int) -> None:
        """Believe in this, and forget what was seen."""
        self._before, self._now, self.value = 0, rate, rate

    def end_cycle(self) -> None:
        """Begin the next cycle of probing; one that brought no sample goes on."""
        if self._now:
            self._before, self._now = self._now, 0
            self.value = self._before


class ShortestRoundTrip:
    """See the module's head. value_ns: None before the first sample."""

    __slots__ = ("_at_ns", "_recent_at_ns", "_recent_ns", "value_ns")

    def __init__(self) -> None:
        self.value_ns: int | None = None
        self._at_ns = 0
        self._recent_ns: int | None = None  # the least since it was due last
        self._recent_at_ns = 0

    def on_sample(self, rtt_ns: int, now_ns: int) -> bool:
        """Take a round trip; return whether the shortest is due to be measured anew."""
        due = self._recent_ns is not None and now_ns - self._recent_at_ns > _DUE_NS
        if self._recent_ns is None or due or rtt_ns < self._recent_ns:
            self._recent_ns, self._recent_at_ns = rtt_ns, now_ns
        elif rtt_ns <= self._recent_ns + (self._recent_ns >> 6):
            self._recent_at_ns = now_ns
        value_ns = self.value_ns
        if value_ns is None or self._recent_ns <= value_ns or now_ns - self._at_ns > _FILTER_NS:
            self.value_ns, self._at_ns = self._recent_ns, self._recent_at_ns
        elif rtt_ns <= value_ns + (value_ns >> 6):
            self._at_ns = now_ns
        return due


class LongestRoundTrip:
    """See the module's head. value_ns: 0 before the first sample."""

    __slots__ = ("_before_ns", "_now_ns", "value_ns")

    def __init__(self) -> None:
        self.value_ns = self._before_ns = self._now_ns = 0

    def on_sample(self, rtt_ns: int) -> None:
        """Take a round trip."""
        self._now_ns = max(self._now_ns, rtt_ns)
        self.value_ns = max(self.value_ns, rtt_ns)

    def end_cycle(self) -> None:
        """Begin the next cycle of probing; one that brought no sample goes on."""
        if self._now_ns:
            self._before_ns, self._now_ns = self._now_ns, 0
            self.value_ns = self._before_ns


class Noise:
    """See the module's head.

    share, spread: in PARTS; share is at most MOST_NOISE.
    is_known: as many packets were seen as stand for what is not.
    """

    __slots__ = ("_lost", "_total", "is_known", "share", "spread")

    def __init__(self) -> None:
        self.share = self.spread = 0
        self.is_known = False
        self._lost = self._total = 0  # bytes

    def on_round(self, lost: int, arrived: int, datagram: int) -> None:
        """Take what became of the bytes of a round trip without a queue."""
        total = lost + arrived
        if total < _FEW * datagram:
            return
        self._lost += lost
        self._total += total
        self.is_known = self.is_known or self._total >= _PRIOR * datagram
        if self._total > _MEMORY * datagram:
            self._lost //= 2
            self._total //= 2
        self.share = min(self._lost * PARTS // (self._total + _PRIOR * datagram), MOST_NOISE)
        self.spread += (min(abs(lost * PARTS // total - self.share), MOST_NOISE) - self.spread) // 8


class Aggregation:
    """See the module's head. extra: bytes, the most of the last five to ten rounds."""

    __slots__ = ("_acked", "_before", "_began_ns", "_now", "_round", "extra")

    def __init__(self) -> None:
        self.extra = self._before = self._now = self._round = 0
        self._acked, self._began_ns = 0, 0

    def on_acked(self, acked: int, bandwidth: int, most: int, now_ns: int) -> None:
        """Take bytes that were acknowledged; `most` bounds what they can say."""
        expected = bandwidth * max(now_ns - self._began_ns, 0) // _NS
        if self._acked <= expected:
            self._acked, self._began_ns, expected = 0, now_ns, 0
        self._acked += acked
        self._now = max(self._now, min(self._acked - expected, most))
        self.extra = max(self._before, self._now)

    def on_round(self, count: int) -> None:
        """Take note that round `count` has begun."""
        if count - self._round >= _CLUMP_ROUNDS:
            self._round = count
            self._before, self._now = self._now, 0
            self.extra = self._before


class Train:
    """See the module's head. rate: bytes a second, the most that was seen; 0 before there is one."""

    __slots__ = ("_acked_ns", "_arrived_ns", "_behind_ns", "_bytes", "_is_train", "_left_ns", "rate")

    def __init__(self) -> None:
        self.rate = 0
        self._behind_ns: int | None = None  # when what it begins behind was sent; None: that is still to come
        self._acked_ns = self._bytes = 0  # when that was acknowledged; bytes since
        self._left_ns = self._arrived_ns = 0  # how long they took
        self._is_train = False  # they are enough

    def begin(self) -> None:
        """Begin another behind the next acknowledgement."""
        self._behind_ns, self._bytes, self._left_ns, self._arrived_ns = None, 0, 0, 0
        self._is_train = False

    def on_acked(self, acked: int, sent_ns: int, datagram: int, now_ns: int) -> None:
        """Take what one acknowledgement brought; `sent_ns`: when the newest of it was sent."""
        if self._behind_ns is None or (not self._bytes and sent_ns <= self._behind_ns):  # behind a burst as a whole
            self._behind_ns, self._acked_ns = sent_ns, now_ns
            return
        self._bytes += acked
        self._left_ns = max(self._left_ns, sent_ns - self._behind_ns)
        self._arrived_ns = now_ns - self._acked_ns
        took_ns = max(self._left_ns, self._arrived_ns)
        self._is_train = took_ns >= _TRAIN_NS and self._bytes >= _TRAIN_DATAGRAMS * datagram
        if self._is_train:
            self.rate = max(self.rate, self._bytes * _NS // took_ns)

    def is_stretched(self, least_ns: int) -> bool:
        """Return whether it took a quarter longer to arrive than to leave, and `least_ns` at least."""
        return self._is_train and self._arrived_ns >= least_ns and self._arrived_ns * 4 >= self._left_ns * 5
