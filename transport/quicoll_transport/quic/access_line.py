"""One rate per host: what its connections may send together, since they leave by one line. Sans-IO, integers.

Each controller knows its own path, and nothing of the others that leave by the same line. A connection that began while
the others had nothing to send has seen the whole line, and claims it for seconds; three that claim as much fill the
line's queue, take turns at losing packets of it, and the one that had found least is slow until all others are done.
(Operations of four ranks, of which each sends to three others, on a path that loses 2 %: one of a host's three claimed
98 Mbit/s of 100, another 24, and they took 1.35 of the ideal.) RFC 8699 couples the controllers of one sender like
this, by a sum of rates that all of them share and that a reaction of one takes its part from.

What is known
    claim       of each connection: the bandwidth that its controller believes in; 0 while it looks for it
    busy        it has sent within a quarter of its round trip, with more than a few packets in flight
    rate        of the line: the most that all connections together have delivered in two round trips of the longest of
                them, by the time of the paths, lately (`peak_rate`). The line had something to carry where somebody was
                not limited by the application
    given       of each connection: what it has taken off the line by giving way while the line was full

What follows
    level       who is busy has its claim, and the level at most. It is such that all of them together have the rate
                less what was given, and the more who claims little leaves, the more the others have (max-min fairness)
    room        of each connection: what it may have in flight, such that all of them together have half more than the
                line holds. They pause for one another, and who finds the others silent sends at the rate of the whole
                line what those have under way already
    full        two at least are busy, and their claims come to nearly the rate. What one loses then that claims nearly
                an equal part at least is likely lost in the line's own queue, of which each has a part; so all of them
                give way a little, and not the one whose packets it were by much. (That one was at three quarters of its
                part for two seconds, and an operation ends with the slowest.) One that claims less has a slower path of
                its own, and gives way by itself

Invariants
    Nothing is bound while one that is busy is in STARTUP: its claim is not known yet; nor who is busy alone, but by
    what it has given itself.
    The level is not below an equal part of what the rate, less what was given, comes to; the rate not below the
    largest claim of who is busy. Nobody's room is below what its level, or an equal part of the rate, has on its path.
    The rate is at most what was delivered: no acknowledgements that come together make it larger, but for those of two
    round trips that wait for more than that.
    The same calls lead to the same answers; connections are in the order in which they became busy.

Failure cases
    A rate that is too low: a connection that looks for more sends a quarter above the level, and what that brings
    raises the rate.
    A rate that is too high: each claim is bound by its own path, as without this.
    A path that is slower than the line: its claim says so, and the others have the rest.
    Connections that do not leave by one line (two networks): the rate is that of both together, which binds less.
    A connection that ends says nothing more: its packets are counted for two round trips, and it is forgotten. Round
    trips below `_LEAST_RTT_NS`, within a site, take no part: there the processors are the line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll_transport.quic.fairness import level_of
from quicoll_transport.quic.peak_rate import PERIOD_NS, PeakRate
from quicoll_transport.quic.sliding_rate import SlidingRate

if TYPE_CHECKING:
    from quicoll_transport.quic.controller import AckSample

__all__ = ["AccessLine", "AccessShare"]

_NS = 1_000_000_000
_LEAST_RTT_NS = 5_000_000
_BUSY = 4  # a round trip's part
_ROUNDS = 2  # in which the rate is measured
_HEARD_ROUNDS = 2  # for which packets of who is silent count
_EVERY_NS = 1_000_000  # level and rooms are made anew
_FULL = 85  # of a hundred
_FEW = 16  # of the rate: who has less than this part of it under way counts for nothing beside others
_ROOM = 150  # of a hundred
_ACK_NS = 6_000_000  # for so long a peer keeps an acknowledgement back


class AccessLine:
    """See the module's head. level: None: nothing is bound."""

    __slots__ = ("_delivered", "_full", "_known", "_made_ns", "_members", "_peak", "_spare", "_trip_ns", "level")

    def __init__(self) -> None:
        self._members: dict[AccessShare, None] = {}  # an ordered set: those that were busy lately
        self._trip_ns = 0  # the longest of theirs
        self._delivered = SlidingRate()
        self._peak = PeakRate()
        # what is made anew
        self._made_ns = -_EVERY_NS
        self.level: int | None = None
        self._full: int | None = None  # the line is full for who claims so much; None: it is not
        self._spare: int | None = None  # the rate that nobody's packets take; None: nobody's room is bound
        self._known = 0  # the rate, or the largest claim

    @property
    def rate(self) -> int:
        """Bytes a second; 0 before it is known."""
        return self._peak.rate

    def join(self) -> AccessShare:
        """Return what one connection tells and asks."""
        return AccessShare(self)

    def enter(self, member: AccessShare) -> None:
        """Take note that a connection is busy."""
        self._members[member] = None
        self._trip_ns = max(self._trip_ns, member.trip_ns)

    def on_delivered(self, trip_ns: int, sample: AckSample) -> None:
        """Take note of what a connection with such a round trip has delivered."""
        if not sample.app_limited:
            self._peak.pass_until(sample.now_ns, trip_ns)
        self._delivered.total += sample.acked
        self._peak.on_measured(self._delivered.measure(sample.path_ns, _ROUNDS * self._trip_ns))

    def look(self, now_ns: int) -> None:
        """Make level and rooms anew, if it is time."""
        if now_ns - self._made_ns < _EVERY_NS:
            return
        self._made_ns = now_ns
        for member in [one for one in self._members if one.heard_ns + PERIOD_NS < now_ns]:
            del self._members[member]
        self._trip_ns = max((member.trip_ns for member in self._members), default=0)
        busy = [member for member in self._members if member.until_ns >= now_ns]
        claims = sorted(member.claim for member in busy)
        self.level, self._full, self._spare = None, None, None
        if not self.rate or 0 in claims:
            return
        self._known = max((self.rate, *claims))
        if len(claims) > 1 and sum(claims) * 100 >= self._known * _FULL:
            self._full = self._known * _FULL // (100 * len(claims))
        self.level = level_of(claims, self._known - sum(member.given for member in busy))
        load = 0
        for member in self._members:
            heard = member.heard_ns + _HEARD_ROUNDS * member.trip_ns >= now_ns
            member.load = member.in_flight * _NS // (member.trip_ns + _ACK_NS) if heard else 0
            load += member.load
        self._spare = self._known * _ROOM // 100 - load

    def room(self, member: AccessShare) -> int | None:
        """Return what a connection may have in flight; None: nothing bounds it."""
        if self._spare is None:
            return None
        others = sum(1 for one in self._members if one is not member and one.load * _FEW > self._known)
        if not others:
            return None
        least = max(self._known // (1 + others), self.level or 0)
        return max(self._spare + member.load, least) * (member.trip_ns + _ACK_NS) // _NS

    def is_full(self, member: AccessShare) -> bool:
        """Return whether the line is full, and a connection has its part of it."""
        return self._full is not None and member.claim >= self._full


class AccessShare:
    """One connection of an AccessLine.

    claim: bytes a second. given: the same; what it has taken off the line. in_flight: bytes. load: what they are of the
    rate. trip_ns: its shortest round trip; 0: it takes no part. heard_ns: when it has sent or was acknowledged last.
    until_ns: from when it is busy no more.
    """

    __slots__ = ("_line", "claim", "given", "heard_ns", "in_flight", "load", "trip_ns", "until_ns")

    def __init__(self, line: AccessLine) -> None:
        self._line = line
        self.claim = self.given = self.in_flight = self.load = self.trip_ns = 0
        self.heard_ns = self.until_ns = -PERIOD_NS

    def on_sent(self, in_flight: int, now_ns: int, *, few: bool) -> None:
        """Take note that it sends; `few`: packets are in flight."""
        self.in_flight = in_flight
        if self.trip_ns and not few:
            self.heard_ns, self.until_ns = now_ns, now_ns + self.trip_ns // _BUSY
            self._line.enter(self)

    def on_acked(self, claim: int, trip_ns: int, sample: AckSample) -> None:
        """Take what is believed of a path, and what has just arrived.

        Args:
            claim: Its bandwidth; 0: it is being looked for.
            trip_ns: Its shortest round trip.
            sample: What an acknowledgement brought.
        """
        self.in_flight = sample.in_flight
        if trip_ns < _LEAST_RTT_NS:
            self.trip_ns = 0
            return
        self.claim, self.trip_ns, self.heard_ns = claim, trip_ns, sample.now_ns
        self._line.enter(self)
        self._line.on_delivered(trip_ns, sample)

    def level(self, now_ns: int) -> int | None:
        """Return the rate that it may have at most; None: nothing bounds it."""
        if not self.trip_ns:
            return None
        self._line.look(now_ns)
        return self._line.level

    def room(self) -> int | None:
        """Return what it may have in flight at most, by the last look; None: nothing bounds it."""
        return self._line.room(self) if self.trip_ns else None

    @property
    def is_full(self) -> bool:
        """Whether the line was full at the last look, and it has a part of it like others."""
        return self.trip_ns > 0 and self._line.is_full(self)

    def give(self, rate: int) -> bool:
        """Take so much off the line, if it was full at the last look; return whether it was."""
        if not self.is_full:
            return False
        self.given += rate
        return True

    def take_back(self, given: int = 0) -> None:
        """Take no more than this off the line from now on."""
        self.given = min(self.given, given)
