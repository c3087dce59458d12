"""Failure detector of one link: heartbeats in, alive / suspect / lost out. No clock of its own.

    ALIVE    something was heard within `suspect_after`
    SUSPECT  silent for longer; work goes on, observers are told
    LOST     silent for `lost_after`, or the host says that nobody listens there; final for this link

Three things must not be confused with a dead peer.
- A stalled self. A process that was stopped, or whose loop was held, wakes up with old clocks and full socket
  buffers. It notices that its own timer came late by more than `stall_after` and gives every peer that much more
  time, so that what waits in the buffers is read first.
- A single lost heartbeat. There are at least six heartbeats within `lost_after`.
- One stray ICMP message. "Unreachable" has to come at least UNREACHABLE_COUNT times in UNREACHABLE_SPAN_NS without
  anything heard in between; a forged one alone only costs a little attention.

Any authenticated packet counts as heard. Chandra & Toueg 1996 (JACM 43(2)) is the theory: such a detector is
eventually strong when the deadlines exceed the true delays; it can be wrong, so only the coordinator's view counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Detector", "DetectorConfig", "Verdict"]

UNREACHABLE_COUNT = 3
UNREACHABLE_SPAN_NS = 60_000_000


class Verdict(Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class DetectorConfig:
    """All in nanoseconds.

    suspect_after_ns, lost_after_ns: silence until the verdict changes; the second must be above the first.
    ping_every_ns: a heartbeat is sent when this long has passed since the last one.
    stall_after_ns: an own timer that is late by more than this marks a stalled self.
    """

    suspect_after_ns: int
    lost_after_ns: int
    ping_every_ns: int
    stall_after_ns: int

    @classmethod
    def from_lost_after(cls, lost_after_ns: int) -> DetectorConfig:
        """The usual proportions: suspicion at 45 %, eight heartbeats, a stall is a quarter."""
        return cls(lost_after_ns * 9 // 20, lost_after_ns, max(lost_after_ns // 8, 1_000_000), lost_after_ns // 4)


class Detector:
    def __init__(self, config: DetectorConfig, *, now_ns: int) -> None:
        self._config = config
        self._heard_ns = now_ns
        self._ping_ns = now_ns
        self._due_ns = now_ns + config.ping_every_ns
        self._unreachable = 0
        self._unreachable_since_ns = 0
        self.verdict = Verdict.ALIVE
        self.cause = ""
        self.rtt_ns: int | None = None
        self.stalls = 0

    def heard(self, now_ns: int) -> None:
        self._heard_ns = max(self._heard_ns, now_ns)
        self._unreachable = 0
        if self.verdict is Verdict.SUSPECT:
            self.verdict = Verdict.ALIVE

    def pong(self, sent_ns: int, now_ns: int) -> None:
        """A heartbeat came back: smoothed RTT as in RFC 6298, one sample at a time."""
        sample = max(0, now_ns - sent_ns)
        self.rtt_ns = sample if self.rtt_ns is None else (7 * self.rtt_ns + sample) // 8
        self.heard(now_ns)

    def unreachable(self, now_ns: int) -> None:
        """The host reported that nothing listens at the peer's address (ICMP port or host unreachable)."""
        if self._unreachable == 0:
            self._unreachable_since_ns = now_ns
        self._unreachable += 1
        self._ping_ns = min(self._ping_ns, now_ns + self._config.ping_every_ns // 4)  # ask again soon
        enough = now_ns - self._unreachable_since_ns >= UNREACHABLE_SPAN_NS
        if self._unreachable >= UNREACHABLE_COUNT and enough and self.verdict is not Verdict.LOST:
            self.verdict = Verdict.LOST
            self.cause = "nothing listens at its address any more"

    def handle_timer(self, now_ns: int) -> bool:
        """Advance to `now_ns`; True when a heartbeat is due."""
        if self.verdict is Verdict.LOST:
            return False
        late = now_ns - self._due_ns
        if late > self._config.stall_after_ns:
            self.stalls += 1
            # At least `stall_after` from now on: what we had to do may have been to give the peer up.
            latest = now_ns - self._config.lost_after_ns + self._config.stall_after_ns
            self._heard_ns = min(now_ns, max(self._heard_ns + late, latest))
        silent = now_ns - self._heard_ns
        if silent >= self._config.lost_after_ns:
            self.verdict = Verdict.LOST
            self.cause = f"silent for {silent / 1e9:.2f} s"
            return False
        self.verdict = Verdict.SUSPECT if silent >= self._config.suspect_after_ns else Verdict.ALIVE
        ping = now_ns >= self._ping_ns
        if ping:
            # While suspicious, or while the host says "unreachable", ask more often: the answer decides.
            urgent = self.verdict is Verdict.SUSPECT or self._unreachable
            self._ping_ns = now_ns + max(1, self._config.ping_every_ns // (4 if urgent else 1))
        self._due_ns = self.next_timer()
        return ping

    def next_timer(self) -> int:
        return min(self._ping_ns, self._heard_ns + self._config.lost_after_ns)

    def silent_for(self, now_ns: int) -> float:
        """Seconds since the peer was last heard."""
        return max(0, now_ns - self._heard_ns) / 1e9
