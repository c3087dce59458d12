"""What comes to a host by all of its connections, and the part of it that each may have. Sans-IO, integers.

Senders of several hosts that meet in front of one receiver know nothing of each other. What one of them has found there
is chance: it looks for more every few seconds, and so one that began beside two others stays at a third, or at a sixth,
of the receiver's line long after those are done. (All_reduce of 16 MiB among four ranks, of which one receives 50
Mbit/s and the others 200: three senders with 8, 16 and 30 Mbit/s of those 50, and the operation took 1.27 of the ideal
in the median, 1.45 at the 90th percentile.) The receiver knows: what it was brought, by how many, and who has just
become silent. So it allots each of them a rate with its acknowledgements, as RCP (SIGCOMM 2006) has routers do. Homa
(SIGCOMM 2018) and NDP (SIGCOMM 2017) have receivers pace each packet; here a sender remains free, and takes its fair
rate for a hint: see `bbr`.

What is known
    claim       of each connection: the rate at which it brings now, over the longest round trip of all
    busy        it has brought something within that time, and more than a sixteenth of the line's rate
    rate        of the line: the most that all together have brought in such a time, lately (`peak_rate`). What comes by
                a line is one packet after the other, so nothing makes this larger than the line is

What follows
    fair rate   of who brings less than an equal part of the rate: that part; of the others what the rate leaves where
                everyone has a quarter more than he brings, and no more than he needs (max-min fairness)
    full        two at least are busy, and bring nearly the rate: so whoever brings more than is allotted to him does it
                at the cost of another

Invariants
    Nothing is allotted where one connection alone was busy of late: its own sender knows the path best.
    A fair rate is never above the rate, nor below an equal part of it.
    The same calls lead to the same answers; connections are in the order in which they became busy.

Failure cases
    A line that has become slower: for two periods more is allotted than it carries. A sender tries a fair rate and
    keeps to what came of it.
    A sender whose own path is slower than its fair rate: it finds that out, and the others are allotted what it leaves.
    A line that was never full: the rate is what came, and less than the line; fair rates lower nobody who has no queue.
    Connections by two lines: the rate is that of both together.
    Round trips below `_LEAST_RTT_NS`, within a site, take no part: there the processors are the line.
"""

from __future__ import annotations

from typing import NamedTuple

from quicoll_transport.quic.fairness import level_of
from quicoll_transport.quic.peak_rate import PERIOD_NS, PeakRate
from quicoll_transport.quic.sliding_rate import SlidingRate

__all__ = ["ArrivalLine", "ArrivalShare", "FairRate"]

_LEAST_RTT_NS = 5_000_000
_LEAST_NS = 20_000_000  # in which a rate is measured
_EVERY_NS = 1_000_000  # fair rates are made anew
_FULL = 85  # of a hundred
_FEW = 16  # of the rate
_MORE = 125  # of a hundred


class FairRate(NamedTuple):
    """What a receiver lets a sender know: bytes a second that it may send, and whether the line there is full."""

    rate: int
    is_full: bool


class ArrivalLine:
    """See the module's head."""

    __slots__ = ("_all", "_equal", "_full", "_level", "_made_ns", "_members", "_peak", "_within_ns")

    def __init__(self) -> None:
        self._members: dict[ArrivalShare, None] = {}  # an ordered set: those that brought something lately
        self._within_ns = _LEAST_NS
        self._all = SlidingRate()
        self._peak = PeakRate()
        # what is made anew
        self._made_ns = -_EVERY_NS
        self._equal = self._level = 0  # 0: nothing is allotted
        self._full = False

    @property
    def rate(self) -> int:
        """Bytes a second; 0 before it is known."""
        return self._peak.rate

    def join(self) -> ArrivalShare:
        """Return what one connection tells and asks."""
        return ArrivalShare(self)

    def on_arrived(self, member: ArrivalShare, nbytes: int, arrived_ns: int) -> None:
        """Take note of what a connection has brought."""
        if member not in self._members:
            self._members[member] = None
            self._within_ns = max(self._within_ns, member.trip_ns)
        self._peak.pass_until(arrived_ns, self._within_ns)
        member.rate.total += nbytes
        member.rate.measure(arrived_ns, self._within_ns)
        self._all.total += nbytes
        self._peak.on_measured(self._all.measure(arrived_ns, self._within_ns))

    def look(self, now_ns: int) -> None:
        """Make fair rates anew, if it is time."""
        if now_ns - self._made_ns < _EVERY_NS:
            return
        self._made_ns = now_ns
        for member in [one for one in self._members if one.heard_ns + PERIOD_NS < now_ns]:
            del self._members[member]
        self._within_ns = max(_LEAST_NS, max((member.trip_ns for member in self._members), default=0))
        claims = []
        for member in self._members:
            member.claim = member.rate.measure(now_ns, self._within_ns)
            if member.heard_ns + self._within_ns >= now_ns and member.claim * _FEW > self.rate:
                claims.append(member.claim)
        self._equal = self._level = 0
        if len(self._members) < 2 or not claims:
            return
        self._equal = self.rate // len(claims)
        claims.sort()
        more = [claim * _MORE // 100 for claim in claims]
        level = level_of(more, self.rate)
        self._level = self.rate - sum(more[:-1]) if level is None else level
        self._full = len(claims) > 1 and sum(claims) * 100 >= self.rate * _FULL

    def fair_rate(self, member: ArrivalShare, now_ns: int) -> FairRate | None:
        """Return what a connection is allotted; None: nothing."""
        self.look(now_ns)
        if not self._equal or member not in self._members:
            return None
        return FairRate(self._equal if member.claim < self._equal else self._level, self._full)


class ArrivalShare:
    """One connection of an ArrivalLine.

    rate: at which it brings something. claim: bytes a second, at the last look. trip_ns: its shortest round trip.
    heard_ns: when it has brought something last.
    """

    __slots__ = ("_line", "claim", "heard_ns", "rate", "trip_ns")

    def __init__(self, line: ArrivalLine) -> None:
        self._line = line
        self.rate = SlidingRate()
        self.claim = self.trip_ns = 0
        self.heard_ns = -PERIOD_NS

    def on_arrived(self, nbytes: int, trip_ns: int | None, arrived_ns: int) -> None:
        """Take note of what has come.

        Args:
            nbytes: Of packets that ask for an acknowledgement.
            trip_ns: The shortest round trip; None: it is not known.
            arrived_ns: When they came to this host.
        """
        if trip_ns is None or trip_ns < _LEAST_RTT_NS:
            return
        self.trip_ns, self.heard_ns = trip_ns, max(arrived_ns, self.heard_ns)
        self._line.on_arrived(self, nbytes, arrived_ns)

    def fair_rate(self, now_ns: int) -> FairRate | None:
        """Return what its sender is to be allotted; None: nothing."""
        return self._line.fair_rate(self, now_ns)
