"""The failure detector on a virtual clock: who is suspected and lost, exactly when, and who is not."""

from __future__ import annotations

import random

import pytest

from quicoll_transport.link.detector import (
    LOST_CEILING_NS,
    LOST_FLOOR_NS,
    LOST_RTOS,
    LOST_START_NS,
    UNREACHABLE_COUNT,
    UNREACHABLE_SPAN_NS,
    Detector,
    DetectorConfig,
    Liveness,
    RttEstimate,
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
        self.verdicts: list[tuple[int, Liveness]] = []

    def note(self) -> None:
        if self.detector.verdict is not (self.verdicts[-1][1] if self.verdicts else Liveness.ALIVE):
            self.verdicts.append((self.now, self.detector.verdict))

    def run(self, until: int) -> None:
        for _ in range(10_000):
            at = self.detector.next_timer()
            if at > until or self.detector.verdict is Liveness.LOST:
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
    assert [verdict for _, verdict in clock.verdicts] == [Liveness.SUSPECT, Liveness.LOST]
    suspected, lost = (at for at, _ in clock.verdicts)
    assert 450 * MS <= suspected <= (450 + 125) * MS, "noticed with the next heartbeat at the latest"
    assert lost == 1000 * MS
    assert clock.detector.cause == "silent for 1.00 s"
    assert clock.detector.silent_for(1000 * MS) == 1.0


def test_one_nanosecond_before_the_deadline_it_is_not_lost() -> None:
    clock = Clock()
    clock.run(until=999 * MS)
    clock.detector.handle_timer(1000 * MS - 1)
    assert clock.detector.verdict is Liveness.SUSPECT
    clock.detector.handle_timer(1000 * MS)
    assert clock.detector.verdict is Liveness.LOST


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
    assert clock.detector.verdict is Liveness.SUSPECT
    clock.heard()
    assert clock.detector.verdict is Liveness.ALIVE
    clock.run(until=5000 * MS)
    assert clock.verdicts[-1] == (1900 * MS, Liveness.LOST)


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
    assert clock.detector.verdict is Liveness.LOST
    assert clock.detector.handle_timer(1100 * MS) is False
    assert clock.detector.verdict is Liveness.LOST


def test_a_stalled_self_gives_the_peer_as_much_more_time() -> None:
    clock = Clock()
    clock.run(until=100 * MS)
    clock.heard()
    due = clock.detector.next_timer()
    clock.now = 5000 * MS  # the process stood still; the peer may have spoken all the while
    clock.detector.handle_timer(clock.now)
    assert clock.detector.verdict is not Liveness.LOST
    assert clock.detector.stalls == 1
    clock.run(until=20_000 * MS)
    assert clock.verdicts[-1] == (100 * MS + (5000 * MS - due) + 1000 * MS, Liveness.LOST)


def test_a_stall_that_hides_the_deadline_itself_still_leaves_time_to_read() -> None:
    clock = Clock()
    clock.run(until=995 * MS)
    assert clock.detector.next_timer() == 1000 * MS, "the deadline is what is due next"
    clock.now = 3000 * MS
    clock.detector.handle_timer(clock.now)
    assert clock.detector.verdict is not Liveness.LOST
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
    assert quick.detector.verdict is Liveness.ALIVE, "many at once are one event"
    few = Clock()
    for at in (0, 10 * UNREACHABLE_SPAN_NS)[: UNREACHABLE_COUNT - 1]:
        few.detector.unreachable(at)
    assert few.detector.verdict is Liveness.ALIVE, "two may be forged"
    both = Clock()
    for i in range(UNREACHABLE_COUNT):
        assert both.detector.verdict is Liveness.ALIVE
        both.detector.unreachable(i * UNREACHABLE_SPAN_NS // (UNREACHABLE_COUNT - 1))
    assert both.detector.verdict is Liveness.LOST
    assert "listens" in both.detector.cause


def test_unreachable_waits_for_as_long_as_a_peer_that_moved_may_take_to_be_heard() -> None:
    clock = Clock()
    for at in range(0, 10 * UNREACHABLE_SPAN_NS, MS):
        clock.detector.unreachable(at, 10 * UNREACHABLE_SPAN_NS)
    assert clock.detector.verdict is Liveness.ALIVE
    clock.detector.unreachable(10 * UNREACHABLE_SPAN_NS, 10 * UNREACHABLE_SPAN_NS)
    assert clock.detector.verdict is Liveness.LOST


def test_hearing_in_between_starts_the_count_of_unreachable_anew() -> None:
    clock = Clock()
    for i in range(20):
        clock.now = i * UNREACHABLE_SPAN_NS
        clock.detector.unreachable(clock.now)
        if i % 2:
            clock.heard()
    assert clock.detector.verdict is Liveness.ALIVE


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
    clock_may_go_back = 300 * MS
    detector.pong(500 * MS, clock_may_go_back)  # a peer that makes numbers up
    assert detector.rtt_ns == 90 * MS * 7 // 8


def test_proportions_leave_room_for_lost_heartbeats() -> None:
    for lost_after in (10 * MS, 500 * MS, 2000 * MS, 60_000 * MS):
        config = DetectorConfig.from_lost_after(lost_after)
        assert config.lost_after_ns == lost_after
        assert config.suspect_after_ns < lost_after
        assert config.ping_every_ns * 6 <= lost_after
        clock = Clock(config=config, start_ns=12345)
        clock.run(until=10 * lost_after)
        assert clock.verdicts[-1] == (12345 + lost_after, Liveness.LOST)
        assert len(clock.pings) >= 6


def test_tiny_deadlines_do_not_spin() -> None:
    clock = Clock(config=DetectorConfig(2, 4, 1, 1))
    clock.run(until=100)
    assert clock.verdicts[-1][1] is Liveness.LOST


# -- deadlines that follow the measured round trips ------------------------------------------------------------------

ADAPTIVE = DetectorConfig.adaptive()


def answered(clock: Clock, rtt_ns: int, *, times: int) -> None:
    """`times` heartbeats, each answered after `rtt_ns`, and nothing else heard."""
    for _ in range(times):
        count = len(clock.pings)
        while len(clock.pings) == count:
            clock.run(until=clock.detector.next_timer())
            assert clock.detector.verdict is not Liveness.LOST
        sent = clock.now
        clock.run(until=sent + rtt_ns)
        clock.detector.pong(sent, clock.now)
        clock.note()


@pytest.mark.parametrize("rtt_ms", [0, 1, 20, 100, 300, 1000, 60_000])
def test_the_derived_deadline_is_four_rto_between_floor_and_ceiling(rtt_ms: int) -> None:
    detector = Detector(ADAPTIVE, now_ns=0)
    estimate = RttEstimate(smooth=16, vary=32)
    for i in range(40):
        detector._due_ns = i * MS + rtt_ms * MS  # no stall of ours, however long the answer takes
        detector.pong(i * MS, i * MS + rtt_ms * MS)
        estimate.sample(rtt_ms * MS)
    assert detector.lost_after_ns == min(max(LOST_RTOS * estimate.rto_ns, LOST_FLOOR_NS), LOST_CEILING_NS)
    assert detector.suspect_after_ns == detector.lost_after_ns * 9 // 20
    assert detector.ping_every_ns == detector.lost_after_ns // 8
    assert detector.stall_after_ns == detector.lost_after_ns // 4


def test_rtt_and_its_variation_follow_rfc_6298() -> None:
    estimate = RttEstimate()
    assert estimate.rto_ns == 0
    estimate.sample(80 * MS)
    assert (estimate.srtt_ns, estimate.rttvar_ns, estimate.rto_ns) == (80 * MS, 40 * MS, 240 * MS)
    estimate.sample(160 * MS)
    assert (estimate.srtt_ns, estimate.rttvar_ns, estimate.rto_ns) == (90 * MS, 50 * MS, 290 * MS)
    for _ in range(200):
        estimate.sample(90 * MS)
    assert estimate.rto_ns == (estimate.srtt_ns or 0) + 1 * MS, "never less than the clock's grain above"


def test_before_the_first_answer_the_derived_deadline_is_the_start_value() -> None:
    clock = Clock(config=ADAPTIVE)
    clock.run(until=100_000 * MS)
    assert clock.verdicts[-1] == (LOST_START_NS, Liveness.LOST)


def test_a_path_that_quic_finds_slow_counts_from_the_next_answer_on() -> None:
    detector = Detector(ADAPTIVE, now_ns=0)
    detector.path(400 * MS, 50 * MS)
    assert detector.lost_after_ns == LOST_START_NS
    detector.pong(0, 10 * MS)
    assert detector.lost_after_ns == LOST_RTOS * (400 + 4 * 50) * MS


def test_the_derived_deadline_does_not_move_while_the_peer_is_silent() -> None:
    clock = Clock(config=ADAPTIVE)
    answered(clock, 200 * MS, times=20)
    promised, heard = clock.detector.lost_after_ns, clock.now
    clock.detector.path(1 * MS, 0)
    clock.run(until=heard + 100_000 * MS)
    assert clock.detector.lost_after_ns == promised
    assert clock.verdicts[-1] == (heard + promised, Liveness.LOST)


def test_a_shorter_deadline_still_has_its_heartbeats() -> None:
    clock = Clock(config=ADAPTIVE)
    clock.run(until=0)
    assert clock.detector.next_timer() == LOST_START_NS // 8
    clock.now = 1 * MS
    clock.detector.pong(0, clock.now)
    assert clock.detector.lost_after_ns == LOST_FLOOR_NS
    assert clock.detector.next_timer() == 1 * MS + LOST_FLOOR_NS // 8
    clock.run(until=100_000 * MS)
    assert clock.verdicts[-1] == (1 * MS + LOST_FLOOR_NS, Liveness.LOST)
    assert len([at for at in clock.pings if at > 1 * MS]) >= 6


def test_a_peer_that_answers_late_on_purpose_wins_no_more_than_the_ceiling() -> None:
    detector = Detector(ADAPTIVE, now_ns=0)
    for i in range(100):
        detector._due_ns = 10**12 + i * MS
        detector.pong(0, 10**12 + i * MS)
    assert detector.lost_after_ns == LOST_CEILING_NS


def test_what_is_read_late_after_a_stall_of_ours_is_no_round_trip() -> None:
    clock = Clock(config=ADAPTIVE)
    answered(clock, 10 * MS, times=50)
    before = clock.detector.lost_after_ns, clock.detector.rtt_ns
    sent = clock.now
    clock.run(until=clock.detector.next_timer())
    clock.now += 8000 * MS  # stopped; on waking the socket is read first, then the timer is late
    clock.detector.pong(sent, clock.now)
    clock.detector.handle_timer(clock.now)
    assert clock.detector.stalls == 1
    clock.detector.pong(sent, clock.now + 1)
    assert (clock.detector.lost_after_ns, clock.detector.rtt_ns) == before
    assert clock.detector.verdict is Liveness.ALIVE


def test_set_deadlines_stay_exact_whatever_is_measured() -> None:
    config = DetectorConfig.from_lost_after(1000 * MS)
    detector = Detector(config, now_ns=0)
    for i in range(50):
        detector.path(900 * MS, 400 * MS)
        detector._due_ns = i * MS + 5000 * MS
        detector.pong(i * MS, i * MS + 5000 * MS)
    assert detector.lost_after_ns == 1000 * MS
    assert detector.suspect_after_ns == 450 * MS
    assert detector.ping_every_ns == 125 * MS


def jittered(seed: int, *, base_ms: int, jitter_ms: int, loss: float, seconds: int) -> Clock:
    """A link whose heartbeats and answers cross a path of this delay each way; what is lost is not sent again."""
    rng = random.Random(seed)
    clock = Clock(config=ADAPTIVE)
    arrivals: list[tuple[int, int]] = []  # when, of the heartbeat sent when
    while clock.now < seconds * 1000 * MS:
        at = min([clock.detector.next_timer(), *(arrival for arrival, _ in arrivals)])
        count = len(clock.pings)
        clock.run(until=at)
        clock.now = max(clock.now, at)
        if len(clock.pings) > count and rng.random() >= loss and rng.random() >= loss:
            delay = 2 * base_ms * MS + rng.randrange(jitter_ms * MS + 1) + rng.randrange(jitter_ms * MS + 1)
            arrivals.append((clock.now + delay, clock.now))
        for arrival, sent in [one for one in arrivals if one[0] <= clock.now]:
            arrivals.remove((arrival, sent))
            clock.detector.pong(sent, clock.now)
            clock.note()
        if clock.detector.verdict is Liveness.LOST:
            break
    return clock


@pytest.mark.parametrize("seed", range(5))
def test_on_a_path_with_loss_and_jitter_nobody_who_answers_is_lost(seed: int) -> None:
    clock = jittered(seed, base_ms=75, jitter_ms=100, loss=0.05, seconds=600)
    assert clock.detector.verdict is not Liveness.LOST
    assert LOST_FLOOR_NS < clock.detector.lost_after_ns < LOST_CEILING_NS


def test_a_tight_set_deadline_would_lose_that_peer() -> None:
    clock = Clock(config=DetectorConfig.from_lost_after(150 * MS))
    clock.run(until=1000 * MS)
    assert clock.detector.verdict is Liveness.LOST, "the round trip alone is longer"


def test_the_deadline_comes_down_again_when_the_path_recovers() -> None:
    clock = Clock(config=ADAPTIVE)
    answered(clock, 400 * MS, times=30)
    slow = clock.detector.lost_after_ns
    answered(clock, 5 * MS, times=200)
    assert slow > 2 * LOST_FLOOR_NS
    assert clock.detector.lost_after_ns == LOST_FLOOR_NS


def test_the_same_trace_gives_the_same_verdicts() -> None:
    runs = [jittered(3, base_ms=75, jitter_ms=100, loss=0.2, seconds=300) for _ in range(2)]
    assert runs[0].verdicts == runs[1].verdicts
    assert runs[0].pings == runs[1].pings
