"""The failure detector on a virtual clock: who is suspected and lost, exactly when, and who is not."""

from __future__ import annotations

from quicoll_transport.detector import (
    UNREACHABLE_COUNT,
    UNREACHABLE_SPAN_NS,
    Detector,
    DetectorConfig,
    Verdict,
)

MS = 1_000_000
CONFIG = DetectorConfig(
    suspect_after_ns=450 * MS, lost_after_ns=1000 * MS, ping_every_ns=125 * MS, stall_after_ns=250 * MS
)


class Clock:
    """Jumps from timer to timer; notes every heartbeat and every change of verdict with its time."""

    def __init__(self, *, config: DetectorConfig = CONFIG, start_ns: int = 0) -> None:
        self.now = start_ns
        self.detector = Detector(config, now_ns=start_ns)
        self.pings: list[int] = []
        self.verdicts: list[tuple[int, Verdict]] = []

    def note(self) -> None:
        if self.detector.verdict is not (self.verdicts[-1][1] if self.verdicts else Verdict.ALIVE):
            self.verdicts.append((self.now, self.detector.verdict))

    def run(self, until: int) -> None:
        for _ in range(10_000):
            at = self.detector.next_timer()
            if at > until or self.detector.verdict is Verdict.LOST:
                self.now = max(self.now, until)
                return
            self.now = max(self.now, at)
            if self.detector.handle_timer(self.now):
                self.pings.append(self.now)
            self.note()
        raise AssertionError("the timer does not advance")

    def heard(self) -> None:
        self.detector.heard(self.now)
        self.note()


def test_silence_makes_suspect_and_then_lost_exactly_at_the_deadline() -> None:
    clock = Clock()
    clock.run(until=10_000 * MS)
    assert [verdict for _, verdict in clock.verdicts] == [Verdict.SUSPECT, Verdict.LOST]
    suspected, lost = (at for at, _ in clock.verdicts)
    assert 450 * MS <= suspected <= (450 + 125) * MS, "noticed with the next heartbeat at the latest"
    assert lost == 1000 * MS
    assert clock.detector.cause == "silent for 1.00 s"
    assert clock.detector.silent_for(1000 * MS) == 1.0


def test_one_nanosecond_before_the_deadline_it_is_not_lost() -> None:
    clock = Clock()
    clock.run(until=999 * MS)
    clock.detector.handle_timer(1000 * MS - 1)
    assert clock.detector.verdict is Verdict.SUSPECT
    clock.detector.handle_timer(1000 * MS)
    assert clock.detector.verdict is Verdict.LOST


def test_heartbeats_come_regularly_and_more_often_under_suspicion() -> None:
    clock = Clock()
    clock.run(until=400 * MS)
    assert clock.pings == [0, 125 * MS, 250 * MS, 375 * MS]
    clock.run(until=5000 * MS)
    urgent = [b - a for a, b in zip(clock.pings, clock.pings[1:], strict=False) if a >= 500 * MS]
    assert urgent, "asked while suspicious"
    assert max(urgent) <= 125 * MS // 4
    assert len(clock.pings) > 6


def test_hearing_revives_a_suspect() -> None:
    clock = Clock()
    clock.run(until=900 * MS)
    assert clock.detector.verdict is Verdict.SUSPECT
    clock.heard()
    assert clock.detector.verdict is Verdict.ALIVE
    clock.run(until=5000 * MS)
    assert clock.verdicts[-1] == (1900 * MS, Verdict.LOST)


def test_a_peer_that_is_heard_often_enough_is_never_suspected() -> None:
    clock = Clock()
    for _ in range(100):
        clock.run(until=clock.now + 300 * MS)
        clock.heard()
    assert clock.verdicts == []


def test_lost_is_final() -> None:
    clock = Clock()
    clock.run(until=1000 * MS)
    clock.heard()
    clock.detector.pong(990 * MS, 1001 * MS)
    assert clock.detector.verdict is Verdict.LOST
    assert clock.detector.handle_timer(1100 * MS) is False
    assert clock.detector.verdict is Verdict.LOST


def test_a_stalled_self_gives_the_peer_as_much_more_time() -> None:
    clock = Clock()
    clock.run(until=100 * MS)
    clock.heard()
    due = clock.detector.next_timer()
    clock.now = 5000 * MS  # the process stood still; the peer may have spoken all the while
    clock.detector.handle_timer(clock.now)
    assert clock.detector.verdict is not Verdict.LOST
    assert clock.detector.stalls == 1
    clock.run(until=20_000 * MS)
    assert clock.verdicts[-1] == (100 * MS + (5000 * MS - due) + 1000 * MS, Verdict.LOST)


def test_a_stall_that_hides_the_deadline_itself_still_leaves_time_to_read() -> None:
    clock = Clock()
    clock.run(until=995 * MS)
    assert clock.detector.next_timer() == 1000 * MS, "the deadline is what is due next"
    clock.now = 3000 * MS
    clock.detector.handle_timer(clock.now)
    assert clock.detector.verdict is not Verdict.LOST
    clock.run(until=10_000 * MS)
    assert clock.verdicts[-1][0] == 3000 * MS + CONFIG.stall_after_ns


def test_a_timer_that_is_a_little_late_is_no_stall() -> None:
    clock = Clock()
    clock.run(until=0)
    clock.detector.handle_timer(clock.detector.next_timer() + CONFIG.stall_after_ns)
    assert clock.detector.stalls == 0


def test_unreachable_needs_both_count_and_span() -> None:
    quick = Clock()
    for _ in range(50):
        quick.detector.unreachable(10 * MS)
    assert quick.detector.verdict is Verdict.ALIVE, "many at once are one event"
    few = Clock()
    for at in (0, 10 * UNREACHABLE_SPAN_NS)[: UNREACHABLE_COUNT - 1]:
        few.detector.unreachable(at)
    assert few.detector.verdict is Verdict.ALIVE, "two may be forged"
    both = Clock()
    for i in range(UNREACHABLE_COUNT):
        assert both.detector.verdict is Verdict.ALIVE
        both.detector.unreachable(i * UNREACHABLE_SPAN_NS // (UNREACHABLE_COUNT - 1))
    assert both.detector.verdict is Verdict.LOST
    assert "listens" in both.detector.cause


def test_hearing_in_between_starts_the_count_of_unreachable_anew() -> None:
    clock = Clock()
    for i in range(20):
        clock.now = i * UNREACHABLE_SPAN_NS
        clock.detector.unreachable(clock.now)
        if i % 2:
            clock.heard()
    assert clock.detector.verdict is Verdict.ALIVE


def test_unreachable_asks_again_at_once() -> None:
    clock = Clock()
    clock.run(until=0)
    assert clock.detector.next_timer() == 125 * MS
    clock.detector.unreachable(1 * MS)
    assert clock.detector.next_timer() == 1 * MS + 125 * MS // 4


def test_round_trip_time_is_smoothed() -> None:
    detector = Detector(CONFIG, now_ns=0)
    assert detector.rtt_ns is None
    detector.pong(0, 80 * MS)
    assert detector.rtt_ns == 80 * MS
    detector.pong(100 * MS, 260 * MS)
    assert detector.rtt_ns == 90 * MS
    detector.pong(500 * MS, 400 * MS)  # a peer that makes numbers up
    assert detector.rtt_ns == 90 * MS * 7 // 8


def test_proportions_leave_room_for_lost_heartbeats() -> None:
    for lost_after in (10 * MS, 500 * MS, 2000 * MS, 60_000 * MS):
        config = DetectorConfig.from_lost_after(lost_after)
        assert config.lost_after_ns == lost_after
        assert config.suspect_after_ns < lost_after
        assert config.ping_every_ns * 6 <= lost_after
        clock = Clock(config=config, start_ns=12345)
        clock.run(until=10 * lost_after)
        assert clock.verdicts[-1] == (12345 + lost_after, Verdict.LOST)
        assert len(clock.pings) >= 6


def test_tiny_deadlines_do_not_spin() -> None:
    clock = Clock(config=DetectorConfig(2, 4, 1, 1))
    clock.run(until=100)
    assert clock.verdicts[-1][1] is Verdict.LOST
