"""One rate per host: what its connections may send together, since they leave by one line. Sans-IO, integers.

Each controller knows its own path, and nothing of the others that leave by the same line. A connection that began while
the others had nothing to send has seen the whole line, and claims it for seconds; three that claim as much fill the
line's queue, take turns at losing packets of it, and the one that had found least is slow until all others are done.
(Operations of four ranks, of which each sends to three others, on a path that loses 2 %: one of a host's three claimed
98 Mbit/s of 100, another 24, and they took 1.35 of the ideal; with this 1.03.)

What is known
    claim       of each connection: the bandwidth that its controller believes in; 0 while it looks for it
    busy        it has sent within a quarter of its round trip, with more than a few packets in flight
    rate        of the line: the most that the newest delivery rates of all connections, none older than a round trip,
                came to together; of two periods of `_PERIOD_NS`, the present one and the one before. Only time counts
                in which somebody was not limited by the application, so a silence makes it neither larger nor smaller

What follows is one number, the `level`: who is busy has its claim, and the level at most. It is such that all of them
together have the rate, and the more who claims little leaves, the more the others have (max-min fairness).

Invariants
    Nothing is bound while fewer than two are busy, nor while one of them is in STARTUP: its claim is not known yet.
    The level is never below an equal part of the rate, and the rate not below the largest claim of who is busy.
    The same calls lead to the same answers; connections are in the order in which they became busy.

Failure cases
    A rate that is too low: a connection that looks for more sends a quarter above the level, and what that brings
    raises the rate. It is rather too high than too low: what two had one after the other, within a round trip, counts
    as what they had together.
    A rate that is too high: each claim is bound by its own path, as without this.
    A path that is slower than the line: its claim says so, and the others have the rest.
    Connections that do not leave by one line (two networks): the rate is that of both together, which binds less.
    A connection that ends says nothing more, and is forgotten. Round trips below `_LEAST_RTT_NS`, within a site, take
    no part: there the processors are the line.
"""

from __future__ import annotations

__all__ = ["AccessLine", "AccessShare"]

_LEAST_RTT_NS = 5_000_000
_BUSY = 4  # a round trip's part
_PERIOD_NS = 2_500_000_000
_EVERY_NS = 1_000_000  # the level is made anew


class AccessLine:
    """See the module's head. rate: bytes a second; 0 before it is known."""

    __slots__ = ("_before", "_last_ns", "_level", "_made_ns", "_members", "_now", "_passed_ns", "rate")

    def __init__(self) -> None:
        self.rate = self._before = self._now = 0
        self._passed_ns, self._last_ns = 0, 0  # of this period; when somebody was not limited last
        self._members: dict[AccessShare, None] = {}  # an ordered set: those that were busy lately
        self._level: int | None = None
        self._made_ns = -1

    def join(self) -> AccessShare:
        """Return what one connection tells and asks."""
        return AccessShare(self)

    def enter(self, member: AccessShare) -> None:
        """Take note that a connection is busy."""
        self._members[member] = None

    def on_rate(self, trip_ns: int, now_ns: int, *, app_limited: bool) -> None:
        """Take note that a connection with such a round trip has a new rate."""
        if not app_limited:
            self._passed_ns += min(max(now_ns - self._last_ns, 0), trip_ns)
            self._last_ns = now_ns
        if self._passed_ns >= _PERIOD_NS:
            self._passed_ns, self._before, self._now = 0, self._now, 0
        total = sum(member.rate for member in self._members if member.rated_ns + trip_ns >= now_ns)
        self._now = max(self._now, total)
        self.rate = max(self._before, self._now)

    def level(self, now_ns: int) -> int | None:
        """Return what a connection may have at most; None: nothing bounds it."""
        if now_ns - self._made_ns >= _EVERY_NS or self._made_ns < 0:
            self._level, self._made_ns = self._make(now_ns), now_ns
        return self._level

    def _make(self, now_ns: int) -> int | None:
        for member in [one for one in self._members if max(one.rated_ns, one.until_ns) + _PERIOD_NS < now_ns]:
            del self._members[member]
        claims = sorted(member.claim for member in self._members if member.until_ns >= now_ns)
        if len(claims) < 2 or not claims[0] or not self.rate:
            return None
        left, count = max(self.rate, claims[-1]), len(claims)
        for claim in claims:
            if claim * count > left:
                return left // count
            left, count = left - claim, count - 1
        return None


class AccessShare:
    """One connection of an AccessLine.

    claim, rate: bytes a second. rated_ns: when that rate was measured. until_ns: from when it is busy no more.
    """

    __slots__ = ("_line", "_trip_ns", "claim", "rate", "rated_ns", "until_ns")

    def __init__(self, line: AccessLine) -> None:
        self._line = line
        self._trip_ns = 0
        self.claim = self.rate = 0
        self.rated_ns = self.until_ns = -_PERIOD_NS

    def on_sent(self, now_ns: int) -> None:
        """Take note that it sends, with more than a few packets in flight."""
        if self._trip_ns:
            self.until_ns = now_ns + self._trip_ns // _BUSY
            self._line.enter(self)

    def on_acked(self, claim: int, rate: int | None, trip_ns: int, now_ns: int, *, app_limited: bool) -> int | None:
        """Take what is believed of a path, and what it has just delivered.

        Args:
            claim: Its bandwidth; 0: it is being looked for.
            rate: What was delivered in a second; None: nothing is known.
            trip_ns: Its shortest round trip.
            now_ns: The time.
            app_limited: Whether there was too little to send for that.

        Returns:
            What it may have at most; None: nothing bounds it.
        """
        if trip_ns < _LEAST_RTT_NS:
            return None
        self.claim, self._trip_ns = claim, trip_ns
        if rate is not None:
            self.rate, self.rated_ns = rate, now_ns
            self._line.enter(self)
            self._line.on_rate(trip_ns, now_ns, app_limited=app_limited)
        return self._line.level(now_ns)
