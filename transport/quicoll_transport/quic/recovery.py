"""Loss recovery (RFC 9002) over runs of packets: what is in flight, what arrived, what is lost, when to ask again.

A `PacketRun` is packets with consecutive numbers that left at one instant. Work is by run where all of it has the same
fate, and by range of numbers where not: never by packet. Nothing here depends on where one run ends and the next
begins: a run is decided on exactly as its packets one by one, down to each call of the controller.

States of a packet, by its number
    in flight   in `missing` of its run
    arrived     in `_known`; nothing else remembers it
    lost        in `_late` for two probe timeouts (RFC 9000 section 13.3): its acknowledgement may only be late
    forgotten   taken for known, and an acknowledgement of it is no news

Invariants
    `in_flight` is the bytes of all `missing` ranges of runs of the present path; `_packets` counts the numbers in all.
    Numbers, and so times of sending, ascend along `_runs` and along `_late`. Whatever is in `_late` is below whatever
    is missing, for what is declared lost is all that is missing below some number.
    The first of `_runs` has something missing. `_known` begins at the first number that is in flight or late, and has
    at most as many ranges as there are such numbers; `_late` holds 65536 of them at most.

Lost (section 6.1) is what was sent before an acknowledged packet and is either `_reordering` numbers behind the largest
acknowledged one, or so old that its acknowledgement ought to have come: 9/8 of a round trip, plus `_patience_ns`.

Reordering (section 6.1.1 allows to adapt, as RFC 8985 does for TCP). With three packets and an eighth of a round trip
alone, a path that reorders costs a congestion window for each mistake: bursts make them likely, as all packets of a run
leave at one instant and any jitter shuffles them. Measured at 5 % loss with 3 ms of jitter on 2 ms of delay: 60 % of
what was declared lost was not, the window stood at two packets, and with so few of them nearly every real loss waited
for a probe timeout. So each packet that arrives after it was declared lost shows how far to look: the distance in
numbers becomes `_reordering`; the excess over a round trip, one round trip at most, becomes `_patience_ns`. Both lose
a quarter after 16 recovery periods with real losses and without a mistake (all at once, as in RFC 8985, makes the same
mistakes again on a path that goes on as it was). A recovery period of which every loss was a mistake is undone
(`Controller.on_spurious`).

Failure cases
    Nothing comes back: a probe timeout (6.2), twice as long each time, until something does.
    Everything is lost for long: persistent congestion (7.6) when of a stretch of lost packets longer than three probe
    timeouts none was acknowledged; probes of the path's MTU say nothing about it.
    Another path (RFC 9000 section 9.4): packets sent before count neither in flight nor for samples nor as congestion,
    but are found lost and repaired as ever.
    A peer that acknowledges what was never sent: the caller's, who knows what was (RFC 9000 section 13.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from quicoll_transport.quic.controller import AckSample, Controller, LossSample
from quicoll_transport.quic.numbers import KnownNumbers, split_ranges
from quicoll_transport.quic.peer_clock import PeerClock
from quicoll_transport.quic.rtt import GRANULARITY_NS, RoundTrips

if TYPE_CHECKING:
    from quicoll_transport.quic.arrival_line import FairRate

__all__ = ["AckOutcome", "LossRecovery", "PacketRun", "TimeoutOutcome"]

Item = TypeVar("Item")

_REORDERING = 3  # kPacketThreshold of RFC 9002 section 6.1.1
_MOST_REORDERING = 1 << 16
_REAL = 16  # recoveries without a mistake until the reordering window shrinks (RFC 8985 section 6.2)
_MOST_LATE = 1 << 16  # lost packets that are remembered
_PERSISTENT = 3  # kPersistentCongestionThreshold of RFC 9002 section 7.6.1
_PROBES = 2  # packets sent by a probe timeout (section 6.2.4)
_LEAST_TRIP_NS = 1_000  # as in rtt.py
_RATES = 8  # samples whose median is `delivery_rate`
_NS = 1_000_000_000


class PacketRun(Generic[Item]):
    """Packets [first, stop) sent together: what each of them carried follows from its place in the run.

    size: bytes of each datagram; short: by how many the last is smaller.
    items: what to do when packets of it have arrived or are lost; recovery only carries them.
    is_mtu_probe: its loss says that it was too large, and nothing of congestion (RFC 9000 section 14.4).
    missing: the numbers that are still in flight, as half-open ranges.
    """

    __slots__ = (
        "_app_limited",
        "_began_ns",
        "_delivered",
        "_delivered_ns",
        "_is_present",
        "first",
        "is_mtu_probe",
        "items",
        "missing",
        "sent_ns",
        "short",
        "size",
        "stop",
    )

    def __init__(
        self,
        first: int,
        stop: int,
        size: int,
        short: int,
        sent_ns: int,
        items: tuple[Item, ...],
        *,
        is_mtu_probe: bool = False,
    ) -> None:
        self.first, self.stop, self.size, self.short = first, stop, size, short
        self.sent_ns, self.items, self.is_mtu_probe = sent_ns, items, is_mtu_probe
        self.missing: list[tuple[int, int]] = [(first, stop)]
        # The connection when it was sent; see controller.
        self._delivered = self._delivered_ns = self._began_ns = 0
        self._app_limited = False
        self._is_present = True  # sent on the present path

    def bytes(self, start: int, stop: int) -> int:
        """Return how many bytes the datagrams of packets [start, stop) have."""
        return (stop - start) * self.size - (self.short if stop == self.stop else 0)

    def largest(self, start: int, stop: int) -> int:
        """Return the bytes of the largest datagram of packets [start, stop), which is what they show of the MTU."""
        return self.size - (self.short if start + 1 == stop == self.stop else 0)


Piece: TypeAlias = tuple[PacketRun[Item], int, int]  # packets [start, stop) of a run


class AckOutcome(NamedTuple, Generic[Item]):
    """What an acknowledgement showed, in the order of numbers. `acked` may hold what was given as lost before."""

    acked: list[tuple[PacketRun[Item], int, int]]
    lost: list[tuple[PacketRun[Item], int, int]]


class TimeoutOutcome(NamedTuple, Generic[Item]):
    """What a timer led to.

    probes: packets to send now, each to be acknowledged, whatever window and pacer say.
    again: what these should carry if there is nothing new: packets that are in flight still, and may yet arrive.
    """

    lost: list[tuple[PacketRun[Item], int, int]]
    probes: int
    again: list[tuple[PacketRun[Item], int, int]]


class _Lost(Generic[Item]):
    """Packets [start, stop) of a run that were declared lost, until that is certain."""

    __slots__ = ("found_ns", "period", "run", "start", "stop")

    def __init__(self, run: PacketRun[Item], start: int, stop: int, found_ns: int, period: int) -> None:
        self.run, self.start, self.stop, self.found_ns, self.period = run, start, stop, found_ns, period


class LossRecovery(Generic[Item]):
    """What is in flight in the 1-RTT space of one connection. Only packets that ask for an acknowledgement are told."""

    def __init__(self, controller: Controller, *, rtt_ns: int, max_ack_delay_ns: int) -> None:
        """Begin a connection's 1-RTT space.

        Args:
            controller: Of the congestion on its path.
            rtt_ns: What a round trip is taken to be until one was measured.
            max_ack_delay_ns: The peer's transport parameter.
        """
        self.controller = controller
        self.rtt = RoundTrips(initial_ns=rtt_ns, max_ack_delay_ns=max_ack_delay_ns)
        self.in_flight = 0
        self.largest_acked = -1
        self.sent_packets = self.lost_packets = self.spurious_packets = 0
        self._max_ack_delay_ns = max_ack_delay_ns
        self._runs: deque[PacketRun[Item]] = deque()
        self._packets = 0
        self._known = KnownNumbers()
        self._late: deque[_Lost[Item]] = deque()
        self._late_packets = 0
        # timers
        self._loss_ns: int | None = None
        self._last_sent_ns = 0
        self._backoff = 0
        # reordering
        self._reordering, self._patience_ns = _REORDERING, 0
        self._true_losses = self._true_period = 0
        # recovery periods
        self._period, self._period_ns, self._period_before_ns, self._period_lost = 0, -1, -1, 0
        self._stretch: tuple[int, int, int] | None = None  # first number, its time of sending, and where it stops
        self._first_sample_ns: int | None = None
        self._shortest_ns: int | None = None  # round trip without waits
        self._peer_clock = PeerClock()
        # delivery rate
        self._delivered = self._delivered_ns = self._began_ns = 0
        self._limited_until = 0  # of `_delivered`: until then, samples are limited by the application
        self._rates: deque[int] = deque(maxlen=_RATES)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._packets

    @property
    def unanswered_ns(self) -> int | None:
        """When the oldest packet was sent that is in flight; None: nothing is."""
        return self._runs[0].sent_ns if self._runs else None

    @property
    def room(self) -> int:
        """Bytes that the window has room for."""
        room = self.controller.window - self.in_flight
        return room if room > 0 else 0

    @property
    def delivery_rate(self) -> int | None:
        """Bytes a second that the path has taken, the median of the last samples; None before the first."""
        return median_low(self._rates) if self._rates else None

    def on_sent(self, run: PacketRun[Item]) -> None:
        """Take packets that leave now; their numbers are above all before."""
        now_ns, nbytes = run.sent_ns, run.bytes(run.first, run.stop)
        if not self.in_flight:
            self._began_ns = self._delivered_ns = now_ns
        run._delivered, run._delivered_ns, run._began_ns = self._delivered, self._delivered_ns, self._began_ns
        run._app_limited = self._limited_until >= self._delivered
        self.controller.on_sent(nbytes, self.in_flight, now_ns)
        self._runs.append(run)
        self.sent_packets += run.stop - run.first
        self._packets += run.stop - run.first
        self.in_flight += nbytes
        self._last_sent_ns = now_ns

    def on_app_limited(self) -> None:
        """There is nothing more to send, though the window has room: what follows says little about the path.

        Until more was acknowledged than is in flight now. So the first flight after a silence, or of a path, is limited
        as well: its bytes are counted over a whole round trip in which little was delivered. (A heartbeat once a second
        would pass for a path of twenty bytes a second, and the end of a handshake for one of three thousand.)
        """
        self._limited_until = self._delivered + self.in_flight

    def on_ack(
        self,
        ranges: Sequence[tuple[int, int]],
        delay_ns: int,
        now_ns: int,
        arrived_ns: int | None = None,
        stamp_ns: int | None = None,
        fair_rate: FairRate | None = None,
    ) -> AckOutcome[Item]:
        """Take an acknowledgement.

        Args:
            ranges: Half-open, descending, as in its frame.
            delay_ns: How long the peer says that it waited.
            now_ns: The time.
            arrived_ns: When it came to this host; None: now.
            stamp_ns: When it was sent, by the peer's clock; None: the peer does not say.
            fair_rate: What the peer lets us send; None: it does not say.
        """
        self._forget(now_ns)
        prior = self.in_flight
        news = self._known.learn_all(ranges)
        acked = self._hit(news) if news else []
        late = self._late_hits(news, ranges[0][1] - 1, now_ns) if news and self._late else []
        self.largest_acked = max(self.largest_acked, ranges[0][1] - 1)
        path_ns = now_ns if arrived_ns is None else arrived_ns
        if stamp_ns is not None:
            path_ns = self._peer_clock.undelayed(stamp_ns, path_ns)
        if acked and acked[-1][2] == ranges[0][1]:
            path_ns -= delay_ns
        rtt_ns = self._measure(acked, ranges[0][1], delay_ns, path_ns, now_ns)
        lost = self._detect(now_ns, prior)
        if acked or late:
            self._backoff = 0
            self._tell_acked(acked, late, prior, rtt_ns, path_ns, now_ns, fair_rate)
        return AckOutcome(late + acked, lost)

    def deadline(self) -> int | None:
        """When `on_timeout` is due; None: nothing is in flight."""
        if self._loss_ns is not None:
            return self._loss_ns
        return self._last_sent_ns + (self.rtt.probe_timeout_ns << self._backoff) if self._packets else None

    def on_timeout(self, now_ns: int) -> TimeoutOutcome[Item]:
        """Take the deadline's passing; nothing happens before it."""
        due = self.deadline()
        if due is None or now_ns < due:
            return TimeoutOutcome([], 0, [])
        if self._loss_ns is not None:
            return TimeoutOutcome(self._detect(now_ns, self.in_flight), 0, [])
        self._backoff += 1
        return TimeoutOutcome([], _PROBES, self._oldest(_PROBES))

    def on_new_path(self, controller: Controller, *, rtt_ns: int) -> None:
        """Begin again on another path; see the module's head."""
        self.controller = controller
        self.rtt = RoundTrips(initial_ns=rtt_ns, max_ack_delay_ns=self._max_ack_delay_ns)
        for run in (*self._runs, *(lost.run for lost in self._late)):
            run._is_present = False
        self.in_flight = self._backoff = 0
        self._reordering, self._patience_ns, self._true_losses = _REORDERING, 0, 0
        self._period += 1  # whatever was lost before no longer counts for it
        self._period_ns, self._period_before_ns, self._period_lost = -1, -1, 0
        self._stretch = self._first_sample_ns = self._shortest_ns = None
        self._peer_clock = PeerClock()
        self._limited_until = self._delivered
        self._rates.clear()

    # -- what has arrived ------------------------------------------------------------------------------------------

    def _hit(self, news: list[tuple[int, int]]) -> list[Piece[Item]]:
        """Take newly acknowledged numbers out of the runs in flight."""
        acked: list[Piece[Item]] = []
        at, end = 0, news[-1][1]
        for run in self._runs:
            if run.first >= end:
                break
            while news[at][1] <= run.first:
                at += 1
            if not run.missing or run.stop <= news[at][0]:
                continue
            if news[at][0] <= run.first and run.stop <= news[at][1]:
                hits, run.missing = run.missing, []
            else:
                hits, run.missing = split_ranges(run.missing, news, at)
            for start, stop in hits:
                acked.append((run, start, stop))
                self._packets -= stop - start
                if run._is_present:
                    self.in_flight -= run.bytes(start, stop)
        self._drop_settled()
        return acked

    def _late_hits(self, news: list[tuple[int, int]], largest: int, now_ns: int) -> list[Piece[Item]]:
        """Take newly acknowledged numbers out of what was declared lost, and learn from them."""
        if news[0][0] >= self._late[-1].stop:
            return []
        hits: list[Piece[Item]] = []
        rest: deque[_Lost[Item]] = deque()
        for lost in self._late:
            found, left = split_ranges([(lost.start, lost.stop)], news, 0)
            for start, stop in found:
                hits.append((lost.run, start, stop))
                self._mistaken(lost, start, stop, max(largest, self.largest_acked), now_ns)
            rest.extend(_Lost(lost.run, start, stop, lost.found_ns, lost.period) for start, stop in left)
        self._late = rest
        return hits

    def _mistaken(self, lost: _Lost[Item], start: int, stop: int, largest: int, now_ns: int) -> None:
        """Learn from packets that were declared lost and have arrived."""
        self._late_packets -= stop - start
        self.spurious_packets += stop - start
        run = lost.run
        if not run._is_present:
            return
        rtt = self.rtt
        excess = now_ns - run.sent_ns - max(rtt.smoothed_ns, rtt.latest_ns)
        self._patience_ns = min(max(self._patience_ns, excess), rtt.smoothed_ns)
        self._reordering = min(max(self._reordering, largest - start + 1), _MOST_REORDERING)
        self._true_losses = 0
        if lost.period == self._period and not run.is_mtu_probe:
            self._period_lost -= run.bytes(start, stop)
            if not self._period_lost:
                self._period_ns, self._period = self._period_before_ns, self._period + 1
                self.controller.on_spurious(now_ns)

    def _measure(
        self, acked: list[Piece[Item]], largest_stop: int, delay_ns: int, path_ns: int, now_ns: int
    ) -> int | None:
        """Take a sample of the round trip if the largest acknowledged packet is new (section 5.1)."""
        if not acked:
            return None
        run, _, stop = acked[-1]
        if stop != largest_stop or not run._is_present:
            return None
        self.rtt.on_sample(now_ns - run.sent_ns, delay_ns)
        if self._first_sample_ns is None:
            self._first_sample_ns = now_ns
        # As section 5.3 has it, which does not believe in long waits; so nobody makes it shorter than such a one.
        usual_ns = max(now_ns - run.sent_ns - min(delay_ns, self._max_ack_delay_ns), _LEAST_TRIP_NS)
        if self._shortest_ns is None or usual_ns < self._shortest_ns:
            self._shortest_ns = usual_ns
        return max(path_ns - run.sent_ns, self._shortest_ns)

    def _tell_acked(
        self,
        acked: list[Piece[Item]],
        late: list[Piece[Item]],
        prior: int,
        rtt_ns: int | None,
        path_ns: int,
        now_ns: int,
        fair_rate: FairRate | None,
    ) -> None:
        total = fresh = 0
        newest: PacketRun[Item] | None = None
        for run, start, stop in (*late, *acked):
            if run._is_present:
                nbytes = run.bytes(start, stop)
                total += nbytes
                fresh += nbytes if run.sent_ns > self._period_ns else 0
                newest = run if newest is None or run.first >= newest.first else newest
        if newest is None:
            return
        self._delivered += total
        self._delivered_ns = max(self._delivered_ns, path_ns, newest.sent_ns + (self._shortest_ns or 0))
        rate = self._rate_since(newest, self._delivered_ns)
        self._began_ns = max(self._began_ns, newest.sent_ns)
        self.controller.on_acked(
            AckSample(
                now_ns=now_ns,
                path_ns=self._delivered_ns,
                acked=total,
                fresh=fresh,
                prior_in_flight=prior,
                in_flight=self.in_flight,
                delivered=self._delivered,
                prior_delivered=newest._delivered,
                rate=rate,
                app_limited=newest._app_limited,
                rtt_ns=rtt_ns,
                smoothed_ns=self.rtt.smoothed_ns,
                min_ns=self.rtt.min_ns or self.rtt.smoothed_ns,
                sent_ns=newest.sent_ns,
                fair_rate=fair_rate,
            )
        )

    def _rate_since(self, run: PacketRun[Item], now_ns: int) -> int | None:
        """Return the delivery rate since a run was sent; None where acknowledgements were too close together."""
        interval = max(run.sent_ns - run._began_ns, now_ns - run._delivered_ns)
        if interval < (self._shortest_ns or 1):
            return None
        rate = (self._delivered - run._delivered) * _NS // interval
        if not run._app_limited:
            self._rates.append(rate)
        return rate

    # -- what is lost ----------------------------------------------------------------------------------------------

    def _detect(self, now_ns: int, prior: int) -> list[Piece[Item]]:
        """Declare lost what is far enough behind, by number or by time (section 6.1)."""
        self._loss_ns = None
        top = self.largest_acked + 1
        rtt = self.rtt
        delay = max(max(rtt.latest_ns, rtt.smoothed_ns) * 9 // 8 + self._patience_ns, GRANULARITY_NS)
        lost: list[Piece[Item]] = []
        for run in self._runs:
            if run.first >= top:
                break
            if not run.missing or run.missing[0][0] >= top:
                continue
            limit = top if run.sent_ns + delay <= now_ns else top - self._reordering
            if run.missing[0][0] < limit:
                old = [(start, min(stop, limit)) for start, stop in run.missing if start < limit]
                run.missing = [(max(start, limit), stop) for start, stop in run.missing if stop > limit]
                lost += [(run, start, stop) for start, stop in old]
            if run.missing and run.missing[0][0] < top:
                self._loss_ns = run.sent_ns + delay  # times ascend along the runs: the first is the earliest
                break
        if lost:
            self._declare(lost, prior, now_ns)
            self._drop_settled()
        return lost

    def _declare(self, lost: list[Piece[Item]], prior: int, now_ns: int) -> None:
        total, sent_ns = 0, -1
        for run, start, stop in lost:
            self.lost_packets += stop - start
            self._packets -= stop - start
            if run._is_present:
                nbytes = run.bytes(start, stop)
                self.in_flight -= nbytes
                if not run.is_mtu_probe:
                    total, sent_ns = total + nbytes, run.sent_ns
        begins = total > 0 and sent_ns > self._period_ns
        if begins:
            self._period += 1
            self._period_ns, self._period_before_ns, self._period_lost = now_ns, self._period_ns, 0
        self._period_lost += total
        for run, start, stop in lost:
            self._late.append(_Lost(run, start, stop, now_ns, self._period))
            self._late_packets += stop - start
        if total:
            self.controller.on_lost(LossSample(now_ns, total, prior, sent_ns, begins))
            if self._is_persistent(lost):
                self._stretch = None
                self._period += 1  # not to be undone: what was lost in it no longer counts for it
                self.rtt.on_persistent_congestion()
                self._shortest_ns = None
                self.controller.on_persistent_congestion(now_ns)

    def _is_persistent(self, lost: list[Piece[Item]]) -> bool:
        """Return whether packets sent over a long time were all lost, with none between them acknowledged (7.6.2)."""
        first_sample_ns = self._first_sample_ns
        if first_sample_ns is None:
            return False
        limit = _PERSISTENT * self.rtt.probe_timeout_ns
        for run, start, stop in lost:
            if run.is_mtu_probe or not run._is_present or run.sent_ns <= first_sample_ns:
                continue
            if self._stretch is None or self._known.overlaps(self._stretch[0], start):
                self._stretch = (start, run.sent_ns, stop)
            else:
                self._stretch = (self._stretch[0], self._stretch[1], stop)
            if run.sent_ns - self._stretch[1] > limit:
                return True
        return False

    def _oldest(self, count: int) -> list[Piece[Item]]:
        """Return the first packets that are in flight, each by itself."""
        found: list[Piece[Item]] = []
        for run in self._runs:
            for start, stop in run.missing:
                numbers = range(start, min(stop, start + count - len(found)))
                found += [(run, number, number + 1) for number in numbers]
            if len(found) >= count:
                break
        return found

    # -- what is forgotten -----------------------------------------------------------------------------------------

    def _drop_settled(self) -> None:
        runs = self._runs
        while runs and not runs[0].missing:
            runs.popleft()

    def _forget(self, now_ns: int) -> None:
        """Take for lost what was declared so long ago, and drop what nobody asks for any more."""
        late = self._late
        old_ns = now_ns - 2 * self.rtt.probe_timeout_ns
        while late and (late[0].found_ns <= old_ns or self._late_packets > _MOST_LATE):
            oldest = late[0]
            surplus = self._late_packets - _MOST_LATE
            if oldest.found_ns > old_ns and surplus < oldest.stop - oldest.start:
                oldest.start += surplus
                self._late_packets -= surplus
                break
            late.popleft()
            self._late_packets -= oldest.stop - oldest.start
            if oldest.period > self._true_period:
                self._true_period = oldest.period
                self._true_losses += 1
                if self._true_losses >= _REAL:
                    self._true_losses = 0
                    self._reordering = max(self._reordering * 3 // 4, _REORDERING)
                    self._patience_ns = self._patience_ns * 3 // 4
        first = self._runs[0].missing[0][0] if self._runs else self.largest_acked + 1
        self._known.forget(min(first, late[0].start) if late else first)
