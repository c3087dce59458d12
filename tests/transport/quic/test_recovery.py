"""Loss recovery: the rules of RFC 9002, what it learns from reordering, and that a run is decided on as its packets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recovery_link import DATAGRAM, MS, Line, Transfer

from quicoll_transport.quic.controller import AckSample, Controller, LossSample
from quicoll_transport.quic.cubic import Cubic
from quicoll_transport.quic.newreno import NewReno
from quicoll_transport.quic.recovery import AckOutcome, LossRecovery, PacketRun, Piece

fixed = settings(derandomize=True, deadline=None, max_examples=50)
RTT = 100 * MS
Plain = LossRecovery[str]


@dataclass
class Recorder:
    """A controller that only writes down what it is told."""

    window: int = 1 << 30
    arrears_ns: int = 0
    told: list[object] = field(default_factory=list)

    def rate(self, smoothed_ns: int) -> int | None:
        return None

    def on_sent(self, nbytes: int, in_flight: int, now_ns: int) -> None:
        self.told.append(("sent", nbytes, in_flight, now_ns))

    def on_acked(self, sample: AckSample) -> None:
        self.told.append(sample)

    def on_lost(self, sample: LossSample) -> None:
        self.told.append(sample)

    def on_spurious(self, now_ns: int) -> None:
        self.told.append("spurious")

    def on_persistent_congestion(self, now_ns: int) -> None:
        self.told.append("persistent")

    def on_datagram_size(self, size: int) -> None:
        raise AssertionError

    def of(self, kind: type) -> list[object]:
        return [what for what in self.told if isinstance(what, kind)]


def recovery_of(controller: Controller | None = None, *, ack_delay_ns: int = 0) -> Plain:
    return LossRecovery(controller or Recorder(), rtt_ns=RTT, max_ack_delay_ns=ack_delay_ns)


def send(recovery: Plain, first: int, stop: int, now_ns: int, *, size: int = 1000, probe: bool = False) -> None:
    recovery.on_sent(PacketRun(first, stop, size, 0, now_ns, (), is_mtu_probe=probe))


def numbers(pieces: list[Piece[str]]) -> list[int]:
    return [number for _, start, stop in pieces for number in range(start, stop)]


def test_what_is_acknowledged_is_told_in_pieces_and_leaves_the_flight() -> None:
    recovery = recovery_of()
    send(recovery, 0, 10, 0)
    outcome = recovery.on_ack([(6, 8), (0, 5)], 0, RTT)
    assert [(start, stop) for _, start, stop in outcome.acked] == [(0, 5), (6, 8)]
    assert recovery.in_flight == 3000
    assert numbers(outcome.lost) == []
    assert numbers(recovery.on_ack([(6, 9), (0, 5)], 0, RTT).lost) == [5]
    assert not recovery.is_idle
    assert numbers(recovery.on_ack([(6, 10), (0, 5)], 0, RTT).acked) == [9]
    assert recovery.is_idle
    assert recovery.in_flight == 0


def test_an_acknowledgement_twice_is_no_news() -> None:
    recovery = recovery_of(recorder := Recorder())
    send(recovery, 0, 3, 0)
    recovery.on_ack([(0, 3)], 0, RTT)
    before = len(recorder.told)
    assert recovery.on_ack([(0, 3)], 0, 2 * RTT) == AckOutcome([], [])
    assert len(recorder.told) == before


def test_the_shorter_last_packet_of_a_run_counts_what_it_has() -> None:
    recovery = recovery_of()
    recovery.on_sent(PacketRun(0, 4, 1000, 300, 0, ()))
    assert recovery.in_flight == 3700
    recovery.on_ack([(0, 3)], 0, RTT)
    assert recovery.in_flight == 700


def test_the_largest_datagram_of_a_piece_is_the_short_one_only_where_that_is_alone() -> None:
    run = PacketRun[str](4, 8, 1000, 300, 0, ())
    assert [run.largest(4, 8), run.largest(6, 8), run.largest(6, 7), run.largest(7, 8)] == [1000, 1000, 1000, 700]


def test_three_packets_behind_is_lost() -> None:
    """RFC 9002 section 6.1.1."""
    recovery = recovery_of()
    send(recovery, 0, 4, 0)
    assert numbers(recovery.on_ack([(2, 3)], 0, 10 * MS).lost) == []
    assert numbers(recovery.on_ack([(2, 4)], 0, 10 * MS).lost) == [0]


def test_nine_eighths_of_a_round_trip_is_lost() -> None:
    """RFC 9002 section 6.1.2."""
    recovery = recovery_of()
    send(recovery, 0, 1, 0)
    send(recovery, 1, 2, 0)
    recovery.on_ack([(1, 2)], 0, 80 * MS)
    assert recovery.deadline() == 90 * MS
    assert recovery.on_timeout(90 * MS - 1).lost == []
    outcome = recovery.on_timeout(90 * MS)
    assert (numbers(outcome.lost), outcome.probes) == ([0], 0)
    assert recovery.deadline() is None


def test_packets_sent_after_the_acknowledged_one_are_never_lost() -> None:
    recovery = recovery_of()
    send(recovery, 0, 1, 0)
    send(recovery, 1, 9, 1)
    recovery.on_ack([(0, 1)], 0, 90 * MS)
    assert recovery.on_timeout(10**12).lost == []


def test_probes_back_off_and_repeat_the_oldest_until_something_comes() -> None:
    """RFC 9002 sections 6.2.1 and 6.2.4."""
    recovery = recovery_of(ack_delay_ns=25 * MS)
    period = RTT + 4 * (RTT // 2) + 25 * MS
    assert recovery.deadline() is None
    send(recovery, 0, 1, 0)
    send(recovery, 1, 5, 5)
    assert recovery.deadline() == 5 + period
    outcome = recovery.on_timeout(5 + period)
    assert (outcome.lost, outcome.probes, numbers(outcome.again)) == ([], 2, [0, 1])
    assert recovery.deadline() == 5 + 2 * period
    send(recovery, 5, 7, 5 + period)
    assert recovery.deadline() == 5 + 3 * period
    recovery.on_timeout(5 + 3 * period)
    assert recovery.in_flight == 7000, "a probe timeout says of nothing that it is lost"
    recovery.on_ack([(5, 6)], 0, 5 + 3 * period)
    assert recovery.deadline() is not None
    recovery.on_ack([(0, 7)], 0, 5 + 3 * period + 1)
    send(recovery, 7, 8, 6 * period)
    assert recovery.deadline() == 6 * period + recovery.rtt.probe_timeout_ns


def test_one_loss_in_a_round_trip_is_one_period_and_a_later_one_is_another() -> None:
    recovery = recovery_of(recorder := Recorder())
    send(recovery, 0, 20, 0)
    recovery.on_ack([(1, 10)], 0, RTT)
    recovery.on_ack([(11, 20), (1, 10)], 0, RTT + 1)
    send(recovery, 20, 30, RTT + 2)
    recovery.on_ack([(21, 30), (11, 20), (1, 10)], 0, 2 * RTT)
    losses = recorder.of(LossSample)
    assert [(loss.lost, loss.begins_period) for loss in losses if isinstance(loss, LossSample)] == [
        (1000, True),
        (1000, False),
        (1000, True),
    ]
    samples = [sample for sample in recorder.told if isinstance(sample, AckSample)]
    assert [(sample.acked, sample.fresh) for sample in samples] == [(9000, 0), (9000, 0), (9000, 0)]


def test_a_packet_that_arrives_late_is_told_as_arrived_and_undoes_the_period() -> None:
    recovery = recovery_of(recorder := Recorder())
    send(recovery, 0, 10, 0)
    assert numbers(recovery.on_ack([(2, 10)], 0, RTT).lost) == [0, 1]
    assert numbers(recovery.on_ack([(1, 10)], 0, RTT + 1).acked) == [1]
    assert "spurious" not in recorder.told
    assert numbers(recovery.on_ack([(0, 10)], 0, RTT + 2).acked) == [0]
    assert recorder.told.count("spurious") == 1
    assert recovery.spurious_packets == 2
    send(recovery, 10, 11, RTT + 3)
    recovery.on_ack([(0, 11)], 0, 2 * RTT)
    assert recovery.is_idle


def test_a_period_with_a_real_loss_is_not_undone() -> None:
    recovery = recovery_of(recorder := Recorder())
    send(recovery, 0, 20, 0)
    recovery.on_ack([(2, 10)], 0, RTT)
    recovery.on_ack([(11, 20), (2, 10)], 0, RTT + 1)
    recovery.on_ack([(11, 20), (0, 10)], 0, RTT + 2)
    assert "spurious" not in recorder.told


def test_what_came_late_is_waited_for_the_next_time() -> None:
    recovery = recovery_of()
    send(recovery, 0, 50, 0)
    assert numbers(recovery.on_ack([(1, 40)], 0, RTT).lost) == [0]
    recovery.on_ack([(0, 40)], 0, RTT + 30 * MS)
    send(recovery, 50, 100, 2 * RTT)
    assert numbers(recovery.on_ack([(51, 90), (0, 50)], 0, 3 * RTT).lost) == [], "by 39 numbers it was late before"
    deadline = recovery.deadline()
    assert deadline is not None
    assert 130 * MS <= deadline - 2 * RTT <= 160 * MS, "as late as then, and an eighth of a round trip"


def test_the_patience_ends_when_losses_are_real() -> None:
    recovery = recovery_of()
    send(recovery, 0, 50, 0)
    recovery.on_ack([(1, 40)], 0, RTT)
    recovery.on_ack([(0, 50)], 0, RTT + 30 * MS)
    now, first = 2 * RTT, 50
    waits = []
    for _ in range(200):
        send(recovery, first, first + 50, now)
        at = now + RTT
        lost = numbers(recovery.on_ack([(first + 1, first + 50)], 0, at).lost)
        if not lost:
            deadline = recovery.deadline()
            assert deadline is not None
            lost, at = numbers(recovery.on_timeout(deadline).lost), deadline
        assert lost == [first]
        waits.append(at - now)
        first, now = first + 50, at + RTT
    assert waits[0] > RTT
    assert waits[-1] == RTT
    assert waits == sorted(waits, reverse=True)


def test_what_was_lost_is_forgotten_after_two_probe_timeouts() -> None:
    recovery = recovery_of()
    send(recovery, 0, 10, 0)
    recovery.on_ack([(1, 10)], 0, RTT)
    late = RTT + 2 * recovery.rtt.probe_timeout_ns
    assert recovery.on_ack([(0, 10)], 0, late) == AckOutcome([], [])
    assert recovery.spurious_packets == 0


def establish(recovery: Plain) -> None:
    """A first sample of 100 ms at 100 ms."""
    send(recovery, 0, 1, 0)
    recovery.on_ack([(0, 1)], 0, RTT)


LONG = 3 * (RTT + 4 * (RTT // 2 * 3 // 4))  # the second sample takes a quarter off the variance


def test_a_long_stretch_of_losses_is_persistent_congestion() -> None:
    """RFC 9002 section 7.6.2."""
    recovery = recovery_of(recorder := Recorder())
    establish(recovery)
    send(recovery, 1, 3, RTT + 1)
    send(recovery, 3, 4, RTT + 2 + LONG)
    send(recovery, 4, 8, 2 * RTT + LONG)
    recovery.on_ack([(6, 7), (0, 1)], 0, 3 * RTT + LONG)
    assert recorder.told.count("persistent") == 1
    assert recovery.rtt.min_ns == recovery.rtt.latest_ns


@pytest.mark.parametrize(
    ("case", "ranges"),
    [
        ("one between them has arrived", [(6, 7), (2, 3), (0, 1)]),
        ("not long enough", [(6, 7), (0, 1)]),
        ("probes of the path's MTU", [(6, 7), (0, 1)]),
        ("before the first sample", [(6, 7)]),
    ],
)
def test_what_is_no_persistent_congestion(case: str, ranges: list[tuple[int, int]]) -> None:
    recovery = recovery_of(recorder := Recorder())
    if case == "before the first sample":
        send(recovery, 0, 1, 0)
    else:
        establish(recovery)
    long = LONG - 1 if case == "not long enough" else LONG
    send(recovery, 1, 2, RTT + 1, probe=case == "probes of the path's MTU")
    send(recovery, 2, 3, RTT + 2)
    send(recovery, 3, 4, RTT + 2 + long, probe=case == "probes of the path's MTU")
    send(recovery, 4, 8, 2 * RTT + long)
    outcome = recovery.on_ack(ranges, 0, 3 * RTT + long)
    assert 3 in numbers(outcome.lost)
    assert "persistent" not in recorder.told


def test_a_number_that_was_no_packet_of_ours_to_wait_for_also_ends_a_stretch() -> None:
    """Acknowledgements alone are no packets in flight, yet one that arrived shows that the path was there."""
    recovery = recovery_of(recorder := Recorder())
    establish(recovery)
    send(recovery, 1, 2, RTT + 1)
    send(recovery, 3, 4, RTT + 2 + LONG)
    send(recovery, 4, 8, 2 * RTT + LONG)
    recovery.on_ack([(6, 7), (2, 3), (0, 1)], 0, 3 * RTT + LONG)
    assert "persistent" not in recorder.told


def test_a_lost_probe_of_the_mtu_is_no_congestion() -> None:
    recovery = recovery_of(recorder := Recorder())
    send(recovery, 0, 1, 0, probe=True)
    send(recovery, 1, 5, 0)
    outcome = recovery.on_ack([(1, 5)], 0, RTT)
    assert numbers(outcome.lost) == [0]
    assert outcome.lost[0][0].is_mtu_probe
    assert recorder.of(LossSample) == []
    assert recovery.in_flight == 0


def test_packets_of_the_path_before_are_repaired_and_count_for_nothing() -> None:
    """RFC 9000 section 9.4."""
    recovery = recovery_of(old := Recorder())
    send(recovery, 0, 10, 0)
    before = len(old.told)
    recovery.on_new_path(new := Recorder(), rtt_ns=RTT)
    assert recovery.in_flight == 0
    assert not recovery.is_idle
    send(recovery, 10, 20, 1)
    outcome = recovery.on_ack([(3, 15), (0, 1)], 0, RTT)
    assert numbers(outcome.lost) == [1, 2]
    assert recovery.in_flight == 5000
    assert len(old.told) == before
    assert new.of(LossSample) == []
    (sample,) = [sample for sample in new.told if isinstance(sample, AckSample)]
    assert sample.acked == 5000
    recovery.on_ack([(0, 20)], 0, RTT + 1)
    assert recovery.is_idle
    assert "spurious" not in new.told


def test_what_the_path_before_lost_and_brings_late_counts_for_nothing_either() -> None:
    recovery = recovery_of()
    send(recovery, 0, 1, 0)
    send(recovery, 1, 5, 0)
    assert numbers(recovery.on_ack([(1, 5)], 0, RTT).lost) == [0]
    recovery.on_new_path(new := Recorder(), rtt_ns=RTT)
    assert numbers(recovery.on_ack([(0, 5)], 0, RTT + 50 * MS).acked) == [0]
    assert new.told == []
    assert recovery._patience_ns == 0


def test_the_delivery_rate_is_what_arrived_over_the_time_it_took() -> None:
    recovery = recovery_of(recorder := Recorder())
    send(recovery, 0, 10, 0)
    recovery.on_ack([(0, 10)], 0, RTT)
    send(recovery, 10, 30, RTT)
    recovery.on_ack([(0, 20)], 0, 2 * RTT)
    recovery.on_ack([(0, 30)], 0, 2 * RTT + RTT // 2)
    samples = [sample for sample in recorder.told if isinstance(sample, AckSample)]
    assert [sample.rate for sample in samples] == [100_000, 100_000, 133_333]
    assert [(sample.prior_delivered, sample.delivered) for sample in samples] == [
        (0, 10_000),
        (10_000, 20_000),
        (10_000, 30_000),
    ]
    assert [sample.app_limited for sample in samples] == [True, False, False], "the first flight of a path is limited"
    assert recovery.delivery_rate == 100_000


def test_of_a_path_that_carried_the_end_of_a_handshake_alone_no_rate_is_known() -> None:
    recovery = recovery_of()
    send(recovery, 0, 1, 0)
    recovery.on_ack([(0, 1)], 0, RTT)
    assert recovery.delivery_rate is None
    recovery.on_new_path(Recorder(), rtt_ns=RTT)
    send(recovery, 1, 2, 2 * RTT)
    recovery.on_ack([(1, 2)], 0, 3 * RTT)
    assert recovery.delivery_rate is None


def test_samples_while_there_was_nothing_to_send_are_marked() -> None:
    recovery = recovery_of(recorder := Recorder())
    send(recovery, 0, 2, 0)
    recovery.on_app_limited()
    send(recovery, 2, 4, 1)
    recovery.on_ack([(0, 4)], 0, RTT)
    send(recovery, 4, 6, RTT)
    recovery.on_ack([(0, 6)], 0, 2 * RTT)
    samples = [sample for sample in recorder.told if isinstance(sample, AckSample)]
    assert [sample.app_limited for sample in samples] == [True, False]
    assert recovery.delivery_rate == 20_000


def test_a_heartbeat_on_an_idle_connection_is_limited_however_often_it_comes() -> None:
    recovery = recovery_of(recorder := Recorder())
    for at in range(4):
        send(recovery, at, at + 1, at * 1000 * RTT)
        recovery.on_app_limited()
        recovery.on_ack([(0, at + 1)], 0, at * 1000 * RTT + RTT)
    samples = [sample for sample in recorder.told if isinstance(sample, AckSample)]
    assert [sample.app_limited for sample in samples] == [True] * 4
    assert recovery.delivery_rate is None


def test_after_a_silence_the_first_flight_is_limited_and_the_next_is_not() -> None:
    recovery = recovery_of(recorder := Recorder())
    recovery.on_app_limited()
    send(recovery, 0, 10, 0)
    recovery.on_ack([(0, 5)], 0, RTT)
    send(recovery, 10, 15, RTT)
    recovery.on_ack([(0, 10)], 0, RTT + 1)
    recovery.on_ack([(0, 15)], 0, 2 * RTT)
    samples = [sample for sample in recorder.told if isinstance(sample, AckSample)]
    assert [sample.app_limited for sample in samples] == [True, True, False]


# -- a run is its packets -------------------------------------------------------------------------------------------

Step = tuple[str, int, int, list[tuple[int, int]], list[int], bool]
steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "ack", "ack", "timer", "wait", "limited", "path"]),
        st.integers(0, 400 * MS),
        st.integers(1, 30),
        st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=5),
        st.lists(st.integers(1, 29), max_size=4),
        st.booleans(),
    ),
    min_size=4,
    max_size=40,
)


def acknowledged(drawn: list[tuple[int, int]], top: int) -> list[tuple[int, int]]:
    """Descending ranges below `top` from distances and lengths."""
    held = {number for back, length in drawn for number in range(max(top - back - length, 0), max(top - back, 0))}
    found: list[tuple[int, int]] = []
    for number in sorted(held):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found[::-1]


def observed(recovery: Plain, recorder: Recorder, outcome: object) -> object:
    told = [
        [getattr(what, name) for name in AckSample.__slots__] if isinstance(what, AckSample) else what
        for what in recorder.told
        if not (isinstance(what, tuple) and what[0] == "sent")
    ]
    state = (
        recovery.in_flight,
        recovery.deadline(),
        recovery.is_idle,
        recovery.delivery_rate,
        recovery.rtt.smoothed_ns,
    )
    return told, state, recovery.lost_packets, recovery.spurious_packets, outcome


PERSISTENT: list[Step] = [
    ("send", 0, 1, [(0, 1)], [], False),
    ("ack", 400 * MS, 1, [(0, 1)], [], False),
    ("send", 50, 10, [(0, 1)], [3, 7], False),
    ("wait", 400 * MS, 1, [(0, 1)], [], True),
    ("send", 0, 10, [(0, 1)], [4], False),
    ("ack", 400 * MS, 1, [(0, 1)], [], False),
]


@fixed
@example(plan=PERSISTENT)
@given(plan=steps)
def test_a_run_is_decided_on_as_its_packets_one_by_one(plan: list[Step]) -> None:
    """Three recoveries see the same: whole runs, runs cut at random, packets one by one."""
    recorders = [Recorder() for _ in range(3)]
    recoveries = [recovery_of(recorder, ack_delay_ns=5 * MS) for recorder in recorders]
    now, top = 0, 0
    for kind, wait, count, drawn, cuts, flag in plan:
        now += wait * (4 if flag else 1) if kind == "wait" else wait // 50
        outcomes: list[object] = [None] * 3
        if kind == "send":
            pieces = [[0, count], [0, *sorted({cut for cut in cuts if cut < count}), count], [*range(count + 1)]]
            for recovery, bounds in zip(recoveries, pieces, strict=True):
                for start, stop in itertools.pairwise(bounds):
                    short = 300 if stop == count else 0
                    run = PacketRun[str](top + start, top + stop, 1000, short, now, (), is_mtu_probe=flag and count < 3)
                    recovery.on_sent(run)
            top += count
        elif kind == "ack" and (ranges := acknowledged(drawn, top)):
            for i, recovery in enumerate(recoveries):
                outcome = recovery.on_ack(ranges, 1 * MS, now)
                outcomes[i] = (numbers(outcome.acked), numbers(outcome.lost))
        elif kind == "timer":
            due = recoveries[0].deadline()
            now = max(now, due or 0)
            for i, recovery in enumerate(recoveries):
                timeout = recovery.on_timeout(now)
                outcomes[i] = (numbers(timeout.lost), timeout.probes, numbers(timeout.again))
        elif kind == "limited":
            for recovery in recoveries:
                recovery.on_app_limited()
        elif kind == "path" and flag:
            for recovery, recorder in zip(recoveries, recorders, strict=True):
                recovery.on_new_path(recorder, rtt_ns=RTT)
        whole, cut, single = map(observed, recoveries, recorders, outcomes)
        assert whole == cut == single
        check_invariants(recoveries[1])
    if plan is PERSISTENT:
        assert "persistent" in recorders[0].told


def check_invariants(recovery: Plain) -> None:
    missing = [piece for run in recovery._runs for piece in run.missing]
    late = [(lost.start, lost.stop) for lost in recovery._late]
    assert all(a < b <= c < d for (a, b), (c, d) in itertools.pairwise(late + missing))
    assert recovery._packets == sum(stop - start for start, stop in missing)
    assert recovery._late_packets == sum(stop - start for start, stop in late)
    assert recovery.in_flight == sum(
        run.bytes(start, stop) for run in recovery._runs if run._is_present for start, stop in run.missing
    )
    assert not recovery._runs or recovery._runs[0].missing


# -- whole transfers ------------------------------------------------------------------------------------------------


class Constants(LossRecovery[list[int]]):
    """RFC 9002's three packets and eighth of a round trip; what comes late teaches nothing and undoes nothing."""

    def _mistaken(self, lost: Any, start: int, stop: int, largest: int, now_ns: int) -> None:
        self._late_packets -= stop - start
        self.spurious_packets += stop - start


def shuffled(recovery: type[LossRecovery[list[int]]], controller: Controller) -> Transfer:
    """3 MB over 2 ms of delay with 3 ms of jitter and 5 % loss: bursts of a window arrive in any order."""
    forth, back = (Line(seed, loss=0.05, delay_ns=2 * MS, jitter_ns=3 * MS) for seed in (1, 2))
    transfer = Transfer(2000, controller, forth, back, recovery=recovery)
    transfer.run()
    return transfer


@pytest.mark.interpreted
@pytest.mark.parametrize("controller", [NewReno, Cubic])
def test_reordering_is_learnt_on_a_path_that_loses_and_shuffles(controller: type[NewReno | Cubic]) -> None:
    constants, learning = shuffled(Constants, controller(DATAGRAM)), shuffled(LossRecovery, controller(DATAGRAM))
    assert constants.recovery.spurious_packets > constants.recovery.lost_packets // 2, "most were no losses"
    assert learning.recovery.spurious_packets < learning.recovery.lost_packets // 8
    assert learning.now_ns < constants.now_ns // 2
    assert learning.now_ns < 4 * 10**9


def test_shuffling_without_loss_costs_no_window() -> None:
    transfer = Transfer(1500, NewReno(DATAGRAM), Line(1, jitter_ns=3 * MS), Line(2, jitter_ns=3 * MS))
    transfer.run()
    assert transfer.recovery.controller.window > 100 * DATAGRAM
    assert transfer.timeouts <= 1


@pytest.mark.parametrize("controller", [NewReno, Cubic])
def test_a_bottleneck_is_filled_and_its_queue_not_fed_on(controller: type[NewReno | Cubic]) -> None:
    """10 MB/s and 20 ms, a queue of one round trip: 3.6 MB take 0.4 s at best."""
    forth = Line(1, delay_ns=10 * MS, rate=10_000_000, queue=200_000)
    transfer = Transfer(2500, controller(DATAGRAM), forth, Line(2, delay_ns=10 * MS))
    elapsed = transfer.run()
    assert elapsed < 800 * MS
    assert forth.dropped < 400


def test_pacing_spares_a_shallow_queue() -> None:
    """A queue of 20 datagrams before 10 MB/s: windows that leave at once overflow it long before the path is full."""

    def elapsed(*, paced: bool) -> int:
        forth = Line(1, delay_ns=20 * MS, rate=10_000_000, queue=20 * DATAGRAM)
        return Transfer(2000, NewReno(DATAGRAM), forth, Line(2, delay_ns=20 * MS), paced=paced).run()

    assert elapsed(paced=True) < elapsed(paced=False) * 2 // 3


def test_a_path_that_is_dark_for_a_while_is_persistent_congestion_and_goes_on() -> None:
    dark = (60 * MS, 3000 * MS)
    transfer = Transfer(2000, Cubic(DATAGRAM), Line(1, rate=10_000_000, dark=dark), Line(2, dark=dark))
    assert transfer.run() < 9_000 * MS
    assert transfer.timeouts >= 4


def samples_of(recorder: Recorder) -> list[AckSample]:
    return [what for what in recorder.told if isinstance(what, AckSample)]


def test_how_long_an_acknowledgement_has_waited_at_either_host_is_not_the_paths() -> None:
    recovery = recovery_of(recorder := Recorder(), ack_delay_ns=5 * MS)
    send(recovery, 0, 10, 0)
    recovery.on_ack([(0, 10)], 0, RTT)
    send(recovery, 10, 20, RTT)
    recovery.on_ack([(0, 20)], 30 * MS, 2 * RTT + 50 * MS, 2 * RTT + 30 * MS)  # read 20 ms after it came
    quick, late = samples_of(recorder)
    assert (quick.rtt_ns, late.rtt_ns) == (RTT, RTT)
    assert (quick.path_ns, late.path_ns) == (RTT, 2 * RTT)
    assert late.rate == quick.rate == 10_000 * 10**9 // RTT
    assert late.now_ns == 2 * RTT + 50 * MS
    assert recovery.rtt.latest_ns == RTT + 50 * MS, "a probe timeout has to be long enough for such a peer"


def test_what_an_acknowledgement_waits_for_on_its_way_back_is_not_the_paths() -> None:
    """40 ms in a queue of the other direction, told of by stamps of a clock that is an hour ahead."""
    hour = 3600 * 10**9
    recovery = recovery_of(recorder := Recorder(), ack_delay_ns=5 * MS)
    send(recovery, 0, 10, 0)
    recovery.on_ack([(0, 10)], 0, RTT, RTT, hour + RTT // 2)
    send(recovery, 10, 20, RTT)
    recovery.on_ack([(0, 20)], 3 * MS, 2 * RTT + 43 * MS, 2 * RTT + 43 * MS, hour + 3 * RTT // 2 + 3 * MS)
    quick, late = samples_of(recorder)
    assert (quick.rtt_ns, late.rtt_ns) == (RTT, RTT)
    assert (quick.path_ns, late.path_ns) == (RTT, 2 * RTT)
    assert late.rate == quick.rate == 10_000 * 10**9 // RTT
    assert recovery.rtt.latest_ns == RTT + 43 * MS, "what was lost is known no sooner"


@pytest.mark.parametrize("stamp", [0, (1 << 62) * 1000])
def test_a_peer_that_stamps_what_is_not_so_makes_no_round_trip_shorter_than_the_shortest(stamp: int) -> None:
    recovery = recovery_of(recorder := Recorder(), ack_delay_ns=5 * MS)
    send(recovery, 0, 1, 0)
    recovery.on_ack([(0, 1)], 0, RTT, RTT, 10**9)
    send(recovery, 1, 11, RTT)
    recovery.on_ack([(0, 11)], 0, 2 * RTT, 2 * RTT, stamp)
    lie = samples_of(recorder)[-1]
    assert lie.rtt_ns == RTT
    assert lie.path_ns == 2 * RTT


def test_another_path_has_another_way_back() -> None:
    recovery = recovery_of(recorder := Recorder(), ack_delay_ns=5 * MS)
    send(recovery, 0, 1, 0)
    recovery.on_ack([(0, 1)], 0, RTT, RTT, 0)
    recovery.on_new_path(Recorder(), rtt_ns=2 * RTT)
    recovery.controller = recorder
    send(recovery, 1, 2, RTT)
    recovery.on_ack([(0, 2)], 0, 3 * RTT, 3 * RTT, RTT)
    assert samples_of(recorder)[-1].path_ns == 3 * RTT


def test_a_peer_that_names_waits_which_were_none_makes_no_round_trip_shorter_than_the_shortest() -> None:
    recovery = recovery_of(recorder := Recorder(), ack_delay_ns=5 * MS)
    send(recovery, 0, 1, 0)
    recovery.on_ack([(0, 1)], 0, RTT)
    send(recovery, 1, 11, RTT)
    recovery.on_ack([(0, 11)], 10**12, 2 * RTT)
    lie = samples_of(recorder)[-1]
    assert lie.rtt_ns == RTT - 5 * MS, "but for what RFC 9002 section 5.3 believes anybody"
    assert lie.path_ns == 2 * RTT - 5 * MS


def test_the_wait_of_the_largest_number_says_nothing_of_others_that_are_new() -> None:
    recovery = recovery_of(recorder := Recorder(), ack_delay_ns=5 * MS)
    send(recovery, 0, 10, 0)
    recovery.on_ack([(9, 10)], 0, RTT)
    recovery.on_ack([(7, 10)], 20 * MS, RTT + 20 * MS)
    assert samples_of(recorder)[-1].path_ns == RTT + 20 * MS
