"""BBR: a rate-based controller, after version 3 (draft-ietf-ccwg-bbr-06, whose sections are cited). Sans-IO, integers.

It sends at the bandwidth that it has seen the path deliver, and has little more in flight than the path holds without a
queue. A loss says little to it unless there is a queue as well. What it believes of the path is in `path_model`.

States (5.1); rate and window are in hundredths of the bandwidth and of the path's contents (bandwidth x shortest trip)

    STARTUP     277, 200  finds the bandwidth: until it has stopped growing, see `_check_full` (5.3.1), or
                          packets arrive slower than they left; see below
    DRAIN        50, 200  the queue that this made goes: until no more is in flight than the path holds, or three rounds
                          have passed (5.3.2)
    DOWN         90, 200  room for others: a round, and until no more is in flight than the path holds, three at most
                          (5.3.3.1)
    CRUISE      100, 200  until it is time to look for more: 2 to 3 s, by chance so that flows do not do it together, or
                          as many rounds as NewReno would need for it, at most 63 (5.3.3.5); 4 rounds after a STARTUP
                          that a train has ended, where no queue is seen: then the train was too slow
    REFILL      100, 200  a round at the full rate, so that what UP measures is UP's (5.3.3.3)
    UP          125, 225  is there more? A round at that rate, then one at 100 in which the answer comes: so the queue
                          is a quarter of the path's contents. Again where that brought a tenth more, or where `most`
                          was the limit and is being raised, and no more than noise was lost; else, or at once where
                          too much is lost, DOWN (5.3.3.4; the draft goes on for three rounds)
    RESUME      100, 100  instead of STARTUP where a bandwidth is remembered (`path_memory`) and the first round trip is
                          as long as then, or at least not half or twice that. Until as much was delivered as the path
                          is said to hold, in two rounds, and a round was over in which it had enough to do: with three
                          quarters of the rate delivered, and without too much loss, the memory was right, and UP
                          follows, or DOWN where there is a queue; else what was measured counts, and DRAIN follows.
                          If that first UP brings a fifth more and no queue, the memory was too low: STARTUP from
                          there. And from DOWN, CRUISE, REFILL or UP where the receiver allots clearly more than is
                          sent; then DOWN follows where the fair rate was right: see `fair_rate_trial`
    PROBE_RTT   100,  50  half of the path's contents for 200 ms and a round, from any state, where the shortest round
                          trip was not seen for five seconds (5.3.4)

STARTUP. A window that doubles in each round trip from the fourteen kilobytes of RFC 9002 needs seven of them where a
path holds a megabyte, and an operation may have no more than that to send. So it begins with 40 datagrams, which leave
within an eighth of the first round trip, not as one burst; and the rate at which they arrived (`Train`) counts as well
as what was delivered in a round trip, as long as no queue is seen: 57 KB show 4.6 MB/s over 100 ms in one round trip.
Where packets of half a round trip took a quarter longer to arrive than to leave, and there is a queue, the path is
full: nothing has to be lost, or to stand still for three rounds, to show it. (The draft ends it by those two, 5.3.1.2
and 5.3.1.3; RFC 9406 ends slow start by round trips alone.) The rate does not fall below that of the first flight
(5.6.2), for what was sent before are mostly a few small messages, which say nothing.

The rate is one in a hundred below that (5.6.2, so that a queue goes rather than comes). What the path loses is not made
up for: the bandwidth is the largest that was seen, in a round trip in which next to nothing was lost. (With as much
more as is lost a queue grew while it cruised, and a burst of losses on top of it looked like others: it gave way, again
and again, and had 63 % of a path that loses 2 % in bursts of eight.)

Others' hosts. Connections of several hosts that send to one know nothing of each other; their receiver does, and allots
each of them a part of its line (`arrival_line`). Who has more than that where the line is full, and a queue, goes DOWN
with what is allotted. Whether the path carries more is RESUME's to find out.

A sender that is late sends at once what it missed, as far as that takes half of the longest queue that was seen to
pass. A queue that was longer has dropped what was too much, so of a path with a queue of a quarter of its contents that
is an eighth. (Where both hosts have other work for 20 ms at a time, for 2 of 3: 0.68 of a path of 500 Mbit/s and 10 ms
in place of 0.38 with a queue of its contents, and 0.26 in place of 0.19 with a quarter of it. With all of the longest
queue 0.58, with ten milliseconds in each case 0.59 and 0.15. No section.)

A queue that stands. Acknowledgements that wait behind data of the other direction come together, and a sample of their
rate is above the path's; the largest counts, so with data both ways the bandwidth is believed a tenth too high. Then a
queue grows while it cruises, until that loses packets, and what follows costs a quarter of the rate. But a path that
had a queue of our own for a whole round has passed on what it can: that much is the bandwidth, where it is clearly less
than what is believed, and DOWN follows until the queue is gone. (16 MiB both ways at 500 Mbit/s and 10 ms took 1.26 of
the ideal in the median, and 1.08 with it. No section. Where queues of others counted too, CUBIC and NewReno took 83 to
87 % of a path whose queue holds four times its contents.)

When a loss is congestion, `congestion_signs` says: more than noise was lost, or too much. What follows; the limits that
are named here, and what becomes of them, are those of `limits`:

    too much in UP, or in the       `most`, a limit of what is in flight, is what was, or 0.7 of what the path holds
    round after it                  (5.5.10.2). UP ends, and it gives way
    too much in STARTUP             the bandwidth counts as found, once a round grew less than a quarter (5.3.1.3), and
                                    `most` is 1.25 of what the path holds, or what the round delivered
    too much in DOWN and CRUISE     it gives way, but for the first two rounds, and for two after it has: what they lose
                                    was sent before (RFC 9002 section 7.3.2 has recovery periods for that)
    more than noise in DOWN and     others fill the queue, in which it may have little: it gives way once in a cycle
    CRUISE
    more than noise in UP           this UP is the last, whatever it brought: who goes on takes it from those who give
                                    way to losses. (Three in a row took 0.7 of a path to 0.97 beside NewReno, which had
                                    halved its window each time.)

Why two flows become alike: what 1.25 of its rate brings a flow is the more the smaller its share is, and UP goes on at
a tenth more, which one with more than about half of a full path does not get. Giving way takes as much of each in
proportion.

Invariants
    The window is never below four datagrams, nor above what `_target` says but by what it was before; the rate is never
    below what sends four datagrams in a round trip (of a millisecond at least). Both are therefore above nothing.
    The same calls with the same chance lead to the same answers.
    It has not given way in STARTUP, DRAIN, REFILL and UP; in STARTUP and RESUME mates bind nothing.
    A window that was cut by PROBE_RTT or by persistent congestion comes back by what is acknowledged, no faster.

Failure cases
    The application sends nothing, or little: its samples count only where they are above the bandwidth; no round of it
    ends STARTUP or UP, unless there was a queue and half of the window was in use: then the path was full all the same.
    (A queue alone may be others': a barrier beside their flow would end STARTUP at a few kilobytes a second.) Both wait
    for it, so many short operations are one long one. PROBE_RTT that fell asleep ends at the next packet (5.4.1).
    A recovery period that was a mistake: limits, STARTUP and UP are what they were when it began (5.5.11).
    Persistent congestion: nothing that is believed of the path holds any more, save its noise. STARTUP from four
    datagrams.
    A smaller bandwidth: what was delivered before is forgotten within two cycles of probing, about five seconds; until
    then a queue of one round trip stands, or what it gives follows the losses.
    A memory that is wrong: twice the truth puts at most another content of the path into the queue, for two rounds, and
    half of it is left by UP and STARTUP.
    A receiver that allots too much, or too little: what the path carries counts, and `fair_rate_trial` says for how
    long a wrong fair rate may be followed.
    Another path: a new controller, by recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from quicoll_transport.quic.arrival_line import FairRate
from quicoll_transport.quic.congestion_signs import CongestionSigns
from quicoll_transport.quic.fair_rate_trial import FairRateTrial
from quicoll_transport.quic.limits import Limits, LimitsBefore
from quicoll_transport.quic.path_memory import KnownPath, RememberedPath
from quicoll_transport.quic.path_model import PARTS, Aggregation, Bandwidth, Noise, Train

if TYPE_CHECKING:
    from quicoll_transport.quic.access_line import AccessShare
    from quicoll_transport.quic.controller import AckSample, LossSample

__all__ = ["Bbr", "BbrState"]

_NS = 1_000_000_000
_MS = 1_000_000
_LEAST_DATAGRAMS = 4  # MinPipeCwnd
_START_DATAGRAMS = 40  # 57 KiB of the usual size
_START_GAIN = 800  # of a hundred: the first of them leave within an eighth of a round trip
_MARGIN = 99  # of a hundred: PacingMarginPercent
_BURST_NS = _MS  # of the pacer; three of them are under way beside the path's contents (5.5.8)
_BURSTS = 3
_KEPT = 70  # of a hundred: Beta
_SAFE = 125  # of a hundred: what STARTUP takes for safe to be in flight where it has lost too much
_AMPLE = 120  # of a hundred
_CLEARLY = 97  # of a hundred: of what is believed
_LEAST_CORRECTED = 85  # of a hundred, at a time
_OWN_ROUNDS = 2  # after UP, DRAIN or giving way, in which what is lost may be that of before
_FULL_GROWTH = 125  # of a hundred: a round that brings less has not grown (5.3.1.2)
_FULL_ROUNDS = 3
_GROWTH = 110  # of a hundred: with so much more UP goes on
_WAIT_NS = 2 * _NS  # from one UP to the next, and up to
_WAIT_SPREAD_NS = _NS  # so much more
_MOST_WAIT_ROUNDS = 63
_ROUGH_ROUNDS = 4  # after a train has found the bandwidth
_LOSSY = 37  # 1.22 packets by five, squared
_DRAIN_ROUNDS = 3
_PROBE_RTT_NS = 200 * _MS
_RESUME_ROUNDS = 2
_RIGHT = 75  # of a hundred: what has to be delivered of a remembered rate
_LOW = 120  # of a hundred: where the first UP brings more, the memory was too low


class BbrState(Enum):
    """See the module's head."""

    STARTUP = "startup"
    DRAIN = "drain"
    DOWN = "down"
    CRUISE = "cruise"
    REFILL = "refill"
    UP = "up"
    PROBE_RTT = "probe rtt"
    RESUME = "resume"


_GAINS = {
    BbrState.STARTUP: (277, 200),
    BbrState.DRAIN: (50, 200),
    BbrState.DOWN: (90, 200),
    BbrState.CRUISE: (100, 200),
    BbrState.REFILL: (100, 200),
    BbrState.UP: (125, 225),
    BbrState.PROBE_RTT: (100, 50),
    BbrState.RESUME: (100, 100),
}

_QUIET = (BbrState.DOWN, BbrState.CRUISE, BbrState.REFILL, BbrState.RESUME, BbrState.PROBE_RTT)  # what is lost is noise

_HEEDING = (BbrState.DOWN, BbrState.CRUISE, BbrState.REFILL, BbrState.UP)  # a fair rate

_SEEKING = (BbrState.STARTUP, BbrState.RESUME)  # the rate: mates bound nothing


class Bbr:
    """A Controller; see the module's head."""

    def __init__(
        self,
        datagram: int,
        draw: Callable[[int], bytes],
        remembered: RememberedPath | None = None,
        share: AccessShare | None = None,
    ) -> None:
        """Begin a path.

        Args:
            datagram: Bytes of a full datagram.
            draw: Returns so many bytes of chance.
            remembered: What is known of the path, and remembers what this finds out; None: nothing and nobody.
            share: Of the line by which the host's connections leave together; None: it has it alone.
        """
        self._remembered = remembered
        self._has_asked = remembered is None  # what is remembered
        self._datagram = datagram
        self._draw = draw
        self._window = self._start
        self.noise = Noise()
        self._limits = Limits(share)
        self._forget()

    def _forget(self) -> None:
        """Believe nothing of the path but its noise, and begin with STARTUP."""
        self.state = BbrState.STARTUP
        self._pace_gain, self._window_gain = _GAINS[BbrState.STARTUP]
        self.bandwidth = Bandwidth()
        self.signs = CongestionSigns(self.noise)
        self._clumps = Aggregation()
        self._train = Train()
        self._before: tuple[BbrState, LimitsBefore] | None = None  # what a recovery period may overwrite
        self._limits.forget()
        # this round
        self._round_began_ns = 0  # by the path's time
        self._round, self._round_end = 0, 0  # how many there were; bytes delivered at which this one is over
        # this state
        self._since_round = 0
        self._full, self._full_rounds = 0, 0  # bandwidth when it last grew, and rounds since
        self._is_full = False  # STARTUP has found the bandwidth
        self._is_rough = False  # by a train alone, and UP has not looked since
        self._is_probe = False  # what is lost is UP's
        self._overfills = False  # UP has lost more than noise
        self._is_alone = True  # there was no queue of others when UP began
        self._wait_ns, self._waiting_since_ns, self._waiting_since_round = 0, 0, 0
        self._tested, self._measured = 0, 0  # RESUME: bytes delivered at which it began, and the best rate since
        self._is_resumed = False  # UP is the first after RESUME
        self._trial = FairRateTrial()  # of what RESUME tries, if it is no memory
        self._quiet_until_ns: int | None = None  # PROBE_RTT: since no more is in flight than it allows, and until then

    # -- what it says ------------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """See Controller."""
        return self._window

    def rate(self, smoothed_ns: int) -> int | None:
        """See Controller; never None."""
        trip_ns = max(smoothed_ns, _MS)
        least = self._least * _NS // trip_ns
        paced = max(self._paced(self._bounded), least)
        if self.state is not BbrState.STARTUP:
            return paced
        # 5.2.1, and not below it as long as little was sent (5.6.2)
        start = min(self._window, self._start) * _START_GAIN * _NS // (100 * trip_ns)
        return max(paced, start, self._paced(self._train.rate) if self._follows_train else 0)

    @property
    def arrears_ns(self) -> int:
        """See Controller; half of what the path's queue was seen to hold."""
        return self.signs.longest_queue_ns // 2

    def _paced(self, bandwidth: int) -> int:
        return bandwidth * self._pace_gain * _MARGIN // 10_000

    @property
    def _start(self) -> int:
        """The window to begin with."""
        return _START_DATAGRAMS * self._datagram

    @property
    def _follows_train(self) -> bool:
        return self.state is BbrState.STARTUP and not self.signs.has_queue()

    @property
    def _least(self) -> int:
        return _LEAST_DATAGRAMS * self._datagram

    @property
    def _bounded(self) -> int:
        """The bandwidth as it may be used."""
        return self._limits.bounded(self.bandwidth.value)

    @property
    def _claim(self) -> int:
        """The bandwidth as its own path lets it be used."""
        return self._limits.claim(self.bandwidth.value)

    def _contents(self, bandwidth: int) -> int:
        """Return what the path holds without a queue."""
        return bandwidth * (self.signs.shortest.value_ns or 0) // _NS

    def _target(self) -> int:
        """Return what may be in flight (5.6.4.2, 5.6.4.7)."""
        bandwidth = self._bounded
        if not bandwidth or self.signs.shortest.value_ns is None:
            return self._start
        target = self._contents(bandwidth) * self._window_gain // 100
        if self.state is not BbrState.PROBE_RTT:
            target += self._clumps.extra + _BURSTS * (bandwidth * _BURST_NS // _NS)
        if self.state is BbrState.UP:
            target += 2 * self._datagram
        is_modest = self.state is BbrState.PROBE_RTT or (self._is_steady and self.signs.has_queue())
        return max(self._limits.window(target, modest=is_modest), self._least)

    # -- what it is told ---------------------------------------------------------------------------------------------

    def on_sent(self, nbytes: int, in_flight: int, now_ns: int) -> None:
        """See Controller."""
        self._limits.on_sent(in_flight, now_ns, few=in_flight <= self._least)
        until_ns = self._quiet_until_ns
        if not in_flight and until_ns is not None and now_ns >= until_ns:
            self._leave_probe_rtt(now_ns)

    def on_acked(self, sample: AckSample) -> None:
        """See Controller."""
        now_ns = sample.now_ns
        due = False
        if sample.rtt_ns is not None:
            due = self.signs.on_round_trip(sample.rtt_ns, now_ns)
            if not self._has_asked:
                self._ask(sample.rtt_ns, sample)
        if sample.rate is None:
            pass
        elif self.state is BbrState.RESUME:
            if self._is_busy(sample):
                self._measured = max(self._measured, sample.rate)
        else:
            self.bandwidth.on_sample(sample.rate, app_limited=sample.app_limited)
        if self.state is BbrState.STARTUP:
            self._train.on_acked(sample.acked, sample.sent_ns, self._datagram, sample.path_ns)
        self.signs.on_acked(sample.acked, sample.prior_in_flight)
        self._clumps.on_acked(sample.acked, self._bounded, self._window, now_ns)
        if self.state is BbrState.UP:
            self._raise_most(sample)
        if self.state is BbrState.STARTUP:
            self._look_whether_full()
        if sample.prior_delivered >= self._round_end:
            self._end_round(sample)
        self._advance(sample)
        if sample.fair_rate is not None:
            self._heed(sample.fair_rate, sample)
        if (trip_ns := self.signs.shortest.value_ns) is not None:
            claim = 0 if self.state is BbrState.STARTUP else self._claim
            self._limits.share(claim, trip_ns, sample, bound=self.state not in _SEEKING)
        if due and self.state is not BbrState.PROBE_RTT and sample.in_flight:
            self._go(BbrState.PROBE_RTT)
            self._quiet_until_ns = None
        self._resize(sample)

    def on_lost(self, sample: LossSample) -> None:
        """See Controller."""
        if sample.begins_period:
            self._before = self.state, self._limits.before()
        self.signs.on_lost(sample.lost, sample.prior_in_flight)
        too_much = self._is_too_much(sample.prior_in_flight)
        if too_much and self.state is BbrState.RESUME and self._trial.blames(self._round):
            self._end_resume(sample.now_ns, is_right=False)
        if too_much and self._is_probe:
            self._is_probe = False
            kept = self._contents(self._bounded) * _KEPT // 100
            self._limits.lose(max(sample.prior_in_flight, kept, self._least))
            if self.state is BbrState.UP:
                self._go_down(sample.now_ns)
            if self._is_steady:
                self._limits.give_way(self.bandwidth.value, self._round)

    def on_spurious(self, now_ns: int) -> None:
        """See Controller."""
        if self._before is None:
            return
        (state, limits), self._before = self._before, None
        self.signs.lost = 0
        self._limits.restore(limits)
        if state is BbrState.STARTUP and self.state is not BbrState.PROBE_RTT:
            self._is_full, self._full_rounds = False, 0
            self._limits.end_giving()
            self._go(BbrState.STARTUP)
        elif state is BbrState.UP and self.state in (BbrState.DOWN, BbrState.CRUISE):
            self._go_up(now_ns)

    def on_persistent_congestion(self, now_ns: int) -> None:
        """See Controller."""
        round_end = self._round_end
        self._forget()
        self._has_asked = True
        if self._remembered is not None:
            self._remembered.forget()
        self._round_end = round_end
        self._window = self._least

    def on_datagram_size(self, size: int) -> None:
        """See Controller."""
        self._datagram = size
        self._window = max(self._window, self._least)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _is_too_much(self, total: int) -> bool:
        """Return whether what was lost in this round is congestion's; `total`: bytes that the round had at least."""
        return self.signs.is_too_much(total, self._datagram)

    @property
    def _is_steady(self) -> bool:
        return self.state is BbrState.DOWN or self.state is BbrState.CRUISE

    def _is_busy(self, sample: AckSample) -> bool:
        """Return whether the path had as much as it could take.

        The application did not limit it; or it has a queue, and that is our own: half of the window was in use. (A few
        bytes beside a flow of others that fills the queue say nothing.)
        """
        return not sample.app_limited or (self.signs.peak * 2 >= self._window and self.signs.has_queue())

    def _is_others(self, *, too_much: bool) -> bool:
        """Return whether what a round has lost asks to give way to others."""
        since = max(self._waiting_since_round, self._limits.gave_way_round)
        if not self._is_steady or self._round - since < _OWN_ROUNDS:
            return False
        if too_much or self._limits.has_given_way:
            return too_much
        return self.signs.is_more_than_noise(self._datagram)

    def _end_round(self, sample: AckSample) -> None:
        """Take stock of a round trip (5.5.1)."""
        too_much = self._is_too_much(self.signs.flight)
        if self.state is BbrState.UP and self.signs.is_more_than_noise(self._datagram):
            self._overfills = True
        if self.state in _QUIET and not self._is_probe:
            self.signs.learn_noise(self._datagram)
        if self.state is BbrState.STARTUP:
            self._check_full(sample, too_much=too_much)
            self._tell(sample.now_ns)
        elif self._is_others(too_much=too_much):
            self._limits.give_way(self.bandwidth.value, self._round)
        elif self.state is BbrState.CRUISE and not sample.app_limited and self.signs.has_standing_queue():
            self._correct(sample.path_ns)
        self._limits.on_round(queue=self.signs.has_queue(), limited=sample.app_limited)
        self._round_began_ns = sample.path_ns
        self._round += 1
        self._round_end = sample.delivered
        self._clumps.on_round(self._round)
        self._train.begin()
        self.signs.end_round(sample.rtt_ns)
        rounds = self._round - self._since_round
        if self._is_steady and self._round - self._waiting_since_round >= 2:
            self._is_probe = False
        elif self.state is BbrState.REFILL:
            self._go_up(sample.now_ns)
        elif self.state is BbrState.RESUME:
            self._check_resume(sample, too_much=too_much)
        elif self.state is BbrState.UP:
            raised = self._limits.end_up_round()
            if rounds >= 2 and self._is_busy(sample):
                self._check_up(sample.now_ns, raised=raised)
            elif not raised:
                self._pace_gain = 100

    def _correct(self, path_ns: int) -> None:
        """Believe in what a round has delivered that had a queue throughout, where that is clearly less."""
        took_ns = path_ns - self._round_began_ns
        if self._round - self._since_round < _OWN_ROUNDS or took_ns < (self.signs.shortest.value_ns or 1):
            return  # what has arrived was sent at another rate, or too close together
        passed = self.signs.acked * _NS // took_ns
        if passed * 100 < self._bounded * _CLEARLY:
            self.bandwidth.cut(max(passed, self._bounded * _LEAST_CORRECTED // 100, 1))
            self._go(BbrState.DOWN)

    def _check_full(self, sample: AckSample, *, too_much: bool) -> None:
        """End STARTUP where the bandwidth grows no more: for three rounds, or one that has lost too much."""
        if self.bandwidth.value * 100 >= self._full * _FULL_GROWTH and self.bandwidth.value:
            self._full, self._full_rounds = self.bandwidth.value, 0
        elif self._is_busy(sample):
            self._full_rounds += 1
            if too_much:
                safe = self._contents(self.bandwidth.value) * _SAFE // 100
                self._limits.most = max(safe, self.signs.acked, self._least)
            if too_much or self._full_rounds >= _FULL_ROUNDS:
                self._is_full = True
                self._go(BbrState.DRAIN)

    def _look_whether_full(self) -> None:
        """End STARTUP where packets of half a round trip arrive slower than they left, and make a queue.

        The fastest train is the bandwidth, not this one: where the way back has a queue of its own, which grows, that
        has stretched it as well. (A fifth of the path was found so, where both sides began at once.)
        """
        shortest = self.signs.shortest.value_ns
        if shortest is not None and self.signs.has_queue() and self._train.is_stretched(shortest // 2):
            self.bandwidth.on_sample(self._train.rate, app_limited=False)
            self._is_full = self._is_rough = True
            self._go(BbrState.DRAIN)

    def _check_up(self, now_ns: int, *, raised: bool) -> None:
        """End UP where it brings nothing more; called when a round of its own packets was acknowledged."""
        bandwidth = self.bandwidth.value
        resumed, self._is_resumed = self._is_resumed, False
        if resumed and bandwidth * 100 >= self._full * _LOW and not self.signs.has_queue():
            self._is_full, self._full, self._full_rounds, self._is_probe = False, bandwidth, 0, False
            self._go(BbrState.STARTUP)
        elif not self._overfills and (bandwidth * 100 >= self._full * _GROWTH or raised):
            self._full = bandwidth
            self._go(BbrState.UP)
        else:
            self._go_down(now_ns)

    # -- what is remembered ------------------------------------------------------------------------------------------

    def _ask(self, rtt_ns: int, sample: AckSample) -> None:
        """Begin with what is remembered, if the first round trip is like it."""
        self._has_asked = True
        remembered = self._remembered
        known = None if remembered is None else remembered.recall(sample.now_ns)
        if remembered is None or known is None:
            return
        if not known.rtt_ns < 2 * rtt_ns < 4 * known.rtt_ns:
            remembered.forget()
        elif self.state is BbrState.STARTUP and known.rate > self.bandwidth.value:
            self.bandwidth.begin_with(known.rate)
            self._tested, self._measured = sample.delivered, 0
            self._go(BbrState.RESUME)

    def _check_resume(self, sample: AckSample, *, too_much: bool) -> None:
        """End RESUME where a whole flight has shown what the path takes."""
        enough = sample.delivered - self._tested >= self._contents(self.bandwidth.value)
        if too_much and self._trial.blames(self._round):
            self._end_resume(sample.now_ns, is_right=False)
        elif enough and self._measured and self._round - self._since_round >= _RESUME_ROUNDS:
            right = self._measured * 100 >= self.bandwidth.value * _RIGHT
            self._end_resume(sample.now_ns, is_right=right)

    def _end_resume(self, now_ns: int, *, is_right: bool) -> None:
        self._is_full = True
        allotted = self._trial.is_on
        if allotted:
            self._trial.end(self.bandwidth.value, self._round, is_right=is_right)
        if not is_right:
            self.bandwidth.begin_with(self._measured or max(self.bandwidth.value // 2, 1))
            self._go(BbrState.DRAIN)
        elif allotted:
            self._go_down(now_ns)
        elif self.signs.has_queue():
            self.bandwidth.begin_with(min(self.bandwidth.value, self._measured))
            self._go_down(now_ns)
        else:
            self._go_up(now_ns)
            self._is_resumed = True
        self._tell(now_ns)

    # -- what the receiver allots ------------------------------------------------------------------------------------

    def _heed(self, fair_rate: FairRate, sample: AckSample) -> None:
        """Take the part of the receiver's line that is allotted, and no more where that is another's."""
        rate, queue = self._bounded, self.signs.has_queue()
        if self.state not in _HEEDING or not rate:
            return
        lowered = self._trial.lowered(fair_rate, rate, queue=queue)
        if lowered is not None:
            self.bandwidth.cut(lowered)
            self._limits.end_giving()
            if self.state is BbrState.UP:
                self._go_down(sample.now_ns)
            else:
                self._go(BbrState.DOWN)
        elif not sample.app_limited:
            mine = FairRate(self._limits.at_most(fair_rate.rate), fair_rate.is_full)
            believed = rate if self._limits.slow is None else self.bandwidth.value
            tried = self._trial.worth(mine, rate, believed, queue=queue, count=self._round)
            if tried is not None:
                self._trial.begin(self._round)
                self._limits.lift()
                self.bandwidth.begin_with(tried)
                self._tested, self._measured, self._is_probe = sample.delivered, 0, False
                self._go(BbrState.RESUME)

    def _tell(self, now_ns: int) -> None:
        """Let what was found out be remembered."""
        if self._remembered is not None and self.signs.shortest.value_ns is not None:
            path = KnownPath(self._claim, self.signs.shortest.value_ns)
            self._remembered.learn(path, now_ns, is_certain=self._is_full)

    def _raise_most(self, sample: AckSample) -> None:
        """Allow for more in flight where that was the limit: by 1, 2, 4 ... datagrams a round (5.3.3.6).

        Once a fifth of a queue fits as well it is no limit to a flow that makes none: raising it would only make one.
        But where there was a queue before UP began it is others', and what fills the path without one is too little. (A
        flow that had come to five packets beside CUBIC stayed there for ever. With the queue that UP itself makes taken
        for others', it went on until that was full: a second, and a quarter of the rate after it.)
        """
        most = self._limits.most
        if most is None or self._window < most or not sample.fills(self._window, slow_start=False):
            return
        if self._is_alone and most * 100 >= self._contents(self.bandwidth.value) * _AMPLE:
            return
        self._limits.raise_most(sample, self._datagram)

    # -- states ------------------------------------------------------------------------------------------------------

    def _go(self, state: BbrState) -> None:
        self.state = state
        self._pace_gain, self._window_gain = _GAINS[state]
        self._since_round = self._round
        if state in _SEEKING:
            self._limits.unbind()

    def _go_down(self, now_ns: int) -> None:
        """Begin a cycle of probing."""
        self.bandwidth.end_cycle()
        self.signs.longest.end_cycle()
        self._tell(now_ns)
        self._wait_ns = _WAIT_NS + _WAIT_SPREAD_NS * int.from_bytes(self._draw(2), "big") // 65536
        self._waiting_since_ns, self._waiting_since_round = now_ns, self._round
        self._go(BbrState.DOWN)

    def _go_up(self, now_ns: int) -> None:
        self._full = self.bandwidth.value
        self._is_probe, self._overfills, self._is_rough = True, False, False
        self._is_alone = not self.signs.has_queue()
        self._limits.begin_up()
        self._go(BbrState.UP)

    def _advance(self, sample: AckSample) -> None:
        """Leave a state whose end has come."""
        now_ns, state = sample.now_ns, self.state
        rounds = self._round - self._since_round
        if state is BbrState.PROBE_RTT:
            self._wait_for_quiet(sample)
        elif state is BbrState.DRAIN:
            if rounds >= _DRAIN_ROUNDS or self._is_drained(sample):
                self._go_down(now_ns)
        elif state is BbrState.DOWN or state is BbrState.CRUISE:
            if self._is_time_to_probe(sample):
                self._limits.end_cycle(self.bandwidth)
                self._go(BbrState.REFILL)
                self._round_end = sample.delivered
            elif state is BbrState.DOWN and rounds >= 1 and (rounds >= _DRAIN_ROUNDS or self._is_drained(sample)):
                self._go(BbrState.CRUISE)

    def _is_drained(self, sample: AckSample) -> bool:
        """Return whether no more is in flight than the path holds without a queue."""
        return sample.in_flight <= self._contents(self._bounded)

    def _is_time_to_probe(self, sample: AckSample) -> bool:
        waited = self._round - self._waiting_since_round
        if self._is_rough and waited >= _ROUGH_ROUNDS and not sample.app_limited and not self.signs.has_queue():
            return True
        if self._is_lossy() and self._limits.may_look_again():
            return True
        rounds = min(self._contents(self._bounded) // self._datagram, _MOST_WAIT_ROUNDS)
        if sample.now_ns - self._waiting_since_ns < self._wait_ns and waited < max(rounds, 2):
            return False
        self._limits.end_wait()
        return True

    def _is_lossy(self) -> bool:
        """Return whether the path by itself loses so much that NewReno has less than a fifth of it.

        It has 1.22 / sqrt(p) packets in flight where p of them are lost.
        """
        packets = self._contents(self.bandwidth.value) // self._datagram
        return self.noise.is_known and packets * packets * self.noise.share > _LOSSY * PARTS

    def _wait_for_quiet(self, sample: AckSample) -> None:
        """Stay in PROBE_RTT for 200 ms and a round after no more than it allows is in flight."""
        if self._quiet_until_ns is None:
            if sample.in_flight <= self._target():
                self._quiet_until_ns = sample.now_ns + _PROBE_RTT_NS
                self._since_round = self._round
        elif sample.now_ns >= self._quiet_until_ns and self._round > self._since_round:
            self._leave_probe_rtt(sample.now_ns)

    def _leave_probe_rtt(self, now_ns: int) -> None:
        """Go back to what was being done: STARTUP, or cruising (5.3.4.4)."""
        self._quiet_until_ns = None
        if self._is_full:
            self._go_down(now_ns)
            self._go(BbrState.CRUISE)
        else:
            self._go(BbrState.STARTUP)

    def _resize(self, sample: AckSample) -> None:
        """Set the window (5.6.4.6): it grows by what arrives."""
        target = self._target()
        if self.state is BbrState.RESUME:
            self._window = target
        elif self._is_full:
            self._window = min(self._window + sample.acked, target)
        elif self._window < target or sample.delivered < self._start:
            self._window += sample.acked
            if self._follows_train:
                self._window = max(self._window, self._contents(self._train.rate) * self._window_gain // 100)
        if self.state is BbrState.PROBE_RTT:
            self._window = min(self._window, target)
        self._window = max(self._window, self._least)
