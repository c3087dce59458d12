"""Failure detector of one link: heartbeats in, alive / suspect / lost out. No clock of its own; integers only.

    ALIVE    something was heard within `suspect_after`
    SUSPECT  silent for longer; work goes on, observers are told
    LOST     silent for `lost_after`, or the host says that nobody listens there; final for this link

Deadlines. Either they are set, and then exact: LOST at `lost_after`, never earlier, and noticed at that very timer. Or
they follow what is measured (`DetectorConfig.adaptive`):

    rto         = max over heartbeats and QUIC of  srtt + max(4 * rttvar, 1 ms)                    RFC 6298 section 2
    lost_after  = min(max(LOST_RTOS * rto, floor), ceiling)
    heartbeats every lost_after / 8, suspect_after = 45 % of lost_after, stall_after = a quarter of it

so that all but the last two of the eight heartbeats have an rto to be answered. They are set anew with each answered
heartbeat and with nothing else. Hence the deadline never moves while the peer is silent: what was promised when it
fell silent is what holds. The floor stands for pauses of a host (scheduling, collection, a held interpreter lock),
which a quiet path does not foretell; the ceiling bounds what a peer that answers late on purpose can win.

The gains are 1/16 for srtt and 1/32 for rttvar. Those of RFC 6298, 1/8 and 1/4, are for a sender with a sample each
round trip, which has to follow a queue that fills. Here a sample is a heartbeat, and the late ones, those that a run of
losses held up, are rare and tell the most: with 1/4, a run is forgotten four heartbeats later and the next one meets a
short deadline. On seeded traces with such runs the slower gains make about half the mistakes, and detect sooner
(docs/internals/detector.md).

Why this one. The known adaptive detectors estimate the arrival of the next of a sequence of regular, one-way
heartbeats: NFD-E (Chen, Toueg & Aguilera 2002, IEEE Trans. Computers 51(5)) adds a constant margin to the mean of the
last arrivals, Bertier, Marin & Sens (DSN 2002) take that margin from Jacobson's estimator, phi accrual (Hayashibara et
al., SRDS 2004) fits a distribution to the intervals. Here every authenticated packet counts as heard, so intervals
are those of the payload: microseconds while a message runs, then suddenly a heartbeat apart. A fit to the former
suspects everybody at the latter. The round trip has no such two faces: it is measured on our clock alone, for
each heartbeat by the time that it carries (no ambiguity of retransmissions, RFC 7323 section 4), it contains how late
both processes' loops are, and as a suspect is asked rather than waited for, the time until an answer is exactly what
the deadline has to exceed. So: Jacobson's margin as in Bertier's, on round trips, with a floor; what it costs and
gains is measured by benchmarks/detector.py (docs/internals/detector.md).

Three things must not be confused with a dead peer.
- A stalled self. A process that was stopped, or whose loop was held, wakes up with old clocks and full socket
  buffers. It notices that its own timer came late by more than `stall_after` and gives every peer that much more
  time, so that what waits in the buffers is read first.
- A single lost heartbeat. There are at least six heartbeats within `lost_after`.
- One stray ICMP message. "Unreachable" has to come at least UNREACHABLE_COUNT times in UNREACHABLE_SPAN_NS without
  anything heard in between; a forged one alone only costs a little attention.
- A peer that has moved (RFC 9000 section 9). What goes to its old address is refused, acknowledgements among it, so
  with a full window it is silent until its probe timeout sends from the new one. Therefore the span is no shorter than
  the time in which it does so, which the path says (`answer_ns`).

Any authenticated packet counts as heard. Chandra & Toueg 1996 (JACM 43(2)) is the theory: such a detector is
eventually strong when the deadlines exceed the true delays; it can be wrong, so only the coordinator's view counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Detector", "DetectorConfig", "Liveness", "RttEstimate"]

UNREACHABLE_COUNT = 3
UNREACHABLE_SPAN_NS = 60_000_000
LOST_RTOS = 4
LOST_FLOOR_NS = 1_000_000_000
LOST_CEILING_NS = 10_000_000_000
LOST_START_NS = 3_000_000_000  # until the first heartbeat is answered
_GRANULARITY_NS = 1_000_000


class Liveness(Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class DetectorConfig:
    """All in nanoseconds.

    suspect_after_ns, lost_after_ns: silence until the verdict changes; the second must be above the first.
    ping_every_ns: a heartbeat is sent when this long has passed since the last one.
    stall_after_ns: an own timer that is late by more than this marks a stalled self.
    floor_ns, ceiling_ns: between which `lost_after` follows the measured round trips, and the others with it; ceiling
        0: it does not, what stands here is exact.
    """

    suspect_after_ns: int
    lost_after_ns: int
    ping_every_ns: int
    stall_after_ns: int
    floor_ns: int = 0
    ceiling_ns: int = 0

    @classmethod
    def from_lost_after(
        cls, lost_after_ns: int | None, *, floor_ns: int = LOST_FLOOR_NS, ceiling_ns: int = LOST_CEILING_NS
    ) -> DetectorConfig:
        """Return the usual proportions: suspicion at 45 %, eight heartbeats, a stall is a quarter. None: `adaptive`."""
        if lost_after_ns is None:
            return cls.adaptive(floor_ns=floor_ns, ceiling_ns=ceiling_ns)
        return cls(*_proportions(lost_after_ns))

    @classmethod
    def adaptive(cls, *, floor_ns: int = LOST_FLOOR_NS, ceiling_ns: int = LOST_CEILING_NS) -> DetectorConfig:
        """Deadlines that follow the measured round trips; until there are any, LOST_START_NS within the bounds."""
        start = min(max(LOST_START_NS, floor_ns), ceiling_ns)
        return cls(*_proportions(start), floor_ns=floor_ns, ceiling_ns=ceiling_ns)

    @property
    def adapts(self) -> bool:
        return self.ceiling_ns > 0


def _proportions(lost_after_ns: int) -> tuple[int, int, int, int]:
    return lost_after_ns * 9 // 20, lost_after_ns, max(lost_after_ns // 8, 1_000_000), lost_after_ns // 4


@dataclass(slots=True)
class RttEstimate:
    """Smoothed round trip and its variation, RFC 6298 section 2, in integers. Gains: 1 / smooth and 1 / vary."""

    srtt_ns: int | None = None
    rttvar_ns: int = 0
    smooth: int = 8
    vary: int = 4

    def sample(self, rtt_ns: int) -> None:
        if self.srtt_ns is None:
            self.srtt_ns = rtt_ns
            self.rttvar_ns = rtt_ns // 2
        else:
            self.rttvar_ns = ((self.vary - 1) * self.rttvar_ns + abs(self.srtt_ns - rtt_ns)) // self.vary
            self.srtt_ns = ((self.smooth - 1) * self.srtt_ns + rtt_ns) // self.smooth

    @property
    def rto_ns(self) -> int:
        """Within this an answer is expected; 0 while nothing was measured."""
        return 0 if self.srtt_ns is None else self.srtt_ns + max(4 * self.rttvar_ns, _GRANULARITY_NS)


class Detector:
    def __init__(self, config: DetectorConfig, *, now_ns: int) -> None:
        self._config = config
        self.suspect_after_ns = config.suspect_after_ns
        self.lost_after_ns = config.lost_after_ns
        self.ping_every_ns = config.ping_every_ns
        self.stall_after_ns = config.stall_after_ns
        self._heard_ns = now_ns
        self._ping_ns = now_ns
        self._due_ns = now_ns + config.ping_every_ns
        self._unreachable = 0
        self._unreachable_since_ns = 0
        self._path_rto_ns = 0
        self._stalled_ns = 0  # when the last stall ended
        self.rtt = RttEstimate()  # for people
        self.margin = RttEstimate(smooth=16, vary=32)  # for the deadlines
        self.verdict = Liveness.ALIVE
        self.cause = ""
        self.stalls = 0

    @property
    def adapts(self) -> bool:
        return self._config.adapts

    @property
    def rtt_ns(self) -> int | None:
        """Smoothed round trip of heartbeats; None before the first answer."""
        return self.rtt.srtt_ns

    def heard(self, now_ns: int) -> None:
        self._heard_ns = max(self._heard_ns, now_ns)
        self._unreachable = 0
        if self.verdict is Liveness.SUSPECT:
            self.verdict = Liveness.ALIVE

    def pong(self, sent_ns: int, now_ns: int) -> None:
        """Note that the heartbeat of `sent_ns` was answered."""
        self.heard(now_ns)
        # After a stall of ours, answers were read late; that says nothing of the peer. They are read before the timer.
        if sent_ns < self._stalled_ns or now_ns - self._due_ns > self.stall_after_ns:
            return
        self.rtt.sample(max(0, now_ns - sent_ns))
        self.margin.sample(max(0, now_ns - sent_ns))
        if self._config.adapts:
            self._adapt(now_ns)

    def path(self, srtt_ns: int, rttvar_ns: int) -> None:
        """QUIC's own estimate for the path; it counts from the next answered heartbeat on."""
        self._path_rto_ns = srtt_ns + max(4 * rttvar_ns, _GRANULARITY_NS)

    def _adapt(self, now_ns: int) -> None:
        wanted = LOST_RTOS * max(self.margin.rto_ns, self._path_rto_ns)
        lost_after = min(max(wanted, self._config.floor_ns), self._config.ceiling_ns)
        self.suspect_after_ns, self.lost_after_ns, self.ping_every_ns, self.stall_after_ns = _proportions(lost_after)
        # With a shorter deadline the next heartbeat is due earlier too, or there would be fewer than promised.
        self._ping_ns = min(self._ping_ns, now_ns + self.ping_every_ns)

    def unreachable(self, now_ns: int, answer_ns: int = 0) -> None:
        """Note that the host reported that nothing listens at the peer's address (ICMP port or host unreachable).

        Args:
            now_ns: The time.
            answer_ns: In which a peer that lives, and whose every acknowledgement is lost, is heard of.
        """
        if self._unreachable == 0:
            self._unreachable_since_ns = now_ns
        self._unreachable += 1
        self._ping_ns = min(self._ping_ns, now_ns + self.ping_every_ns // 4)  # ask again soon
        enough = now_ns - self._unreachable_since_ns >= max(UNREACHABLE_SPAN_NS, answer_ns)
        if self._unreachable >= UNREACHABLE_COUNT and enough and self.verdict is not Liveness.LOST:
            self.verdict = Liveness.LOST
            self.cause = "nothing listens at its address any more"

    def handle_timer(self, now_ns: int) -> bool:
        """Advance to `now_ns`; True when a heartbeat is due."""
        if self.verdict is Liveness.LOST:
            return False
        late = now_ns - self._due_ns
        if late > self.stall_after_ns:
            self.stalls += 1
            self._stalled_ns = now_ns
            # At least `stall_after` from now on: what we had to do may have been to give the peer up.
            latest = now_ns - self.lost_after_ns + self.stall_after_ns
            self._heard_ns = min(now_ns, max(self._heard_ns + late, latest))
        silent = now_ns - self._heard_ns
        if silent >= self.lost_after_ns:
            self.verdict = Liveness.LOST
            self.cause = f"silent for {silent / 1e9:.2f} s"
            return False
        self.verdict = Liveness.SUSPECT if silent >= self.suspect_after_ns else Liveness.ALIVE
        ping = now_ns >= self._ping_ns
        if ping:
            # While suspicious, or while the host says "unreachable", ask more often: the answer decides.
            urgent = self.verdict is Liveness.SUSPECT or self._unreachable
            self._ping_ns = now_ns + max(1, self.ping_every_ns // (4 if urgent else 1))
        self._due_ns = self.next_timer()
        return ping

    def next_timer(self) -> int:
        return min(self._ping_ns, self._heard_ns + self.lost_after_ns)

    def silent_for(self, now_ns: int) -> float:
        """Seconds since the peer was last heard."""
        return max(0, now_ns - self._heard_ns) / 1e9
