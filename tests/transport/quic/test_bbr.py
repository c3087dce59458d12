"""BBR: entry and exit of each state, what is noise and what congestion, and bounds that hold whatever it is told."""

from __future__ import annotations

import itertools
import random

import pytest
from acknowledged import acknowledged
from driven_bbr import CONTENTS, RATE, RTT, SIZE, Driven, S, cruising
from hypothesis import given, settings
from hypothesis import strategies as st
from recovery_link import MS

from quicoll_transport.quic.arrival_line import FairRate
from quicoll_transport.quic.bbr import Bbr, BbrState
from quicoll_transport.quic.cubic import Cubic
from quicoll_transport.quic.newreno import NewReno
from quicoll_transport.quic.path_memory import KnownPath, PathMemory, RememberedPath

fixed = settings(derandomize=True, deadline=None, max_examples=100)


def test_startup_begins_with_forty_datagrams_and_sends_them_in_an_eighth_of_a_round_trip() -> None:
    driven = Driven()
    assert driven.bbr.window == 40 * SIZE
    assert driven.paced() == 8 * driven.bbr.window * S // RTT


def test_little_that_was_sent_before_makes_the_first_flight_no_slower() -> None:
    driven = Driven()
    driven.round(SIZE * S // RTT, limited=True, flight=0)
    assert driven.paced() >= 8 * 40 * SIZE * S // RTT


def arrives(driven: Driven, left_ns: int, arrived_ns: int, *, packets: int = 200, size: int = SIZE) -> None:
    """A flight that took `left_ns` to leave and `arrived_ns` to arrive, a round trip later."""
    bbr, begin = driven.bbr, driven.now
    for at in range(packets):
        driven.now = begin + RTT + arrived_ns * at // packets
        driven.delivered += size
        sent = begin + left_ns * at // packets
        before = driven.delivered - (at + 1) * size
        sample = acknowledged(
            driven.now,
            size,
            rtt_ns=driven.now - sent,
            in_flight=CONTENTS - SIZE,
            delivered=driven.delivered,
            prior_delivered=before,
            min_ns=RTT,
        )
        bbr.on_acked(sample)
        driven._look()


def test_what_arrives_within_a_part_of_a_round_trip_shows_the_rate_as_long_as_there_is_no_queue() -> None:
    driven = Driven()
    arrives(driven, RTT // 8, RTT // 8, packets=40)
    rate = 40 * SIZE * 8 * S // RTT
    assert driven.bbr.state is BbrState.STARTUP
    assert 0.9 * 2.77 * rate < driven.paced() < 1.1 * 2.77 * rate
    assert driven.bbr.window > 1.8 * rate * RTT // S


def test_acknowledgements_that_come_together_show_no_more_than_was_sent() -> None:
    driven = Driven()
    arrives(driven, RTT // 8, RTT // 100, packets=40)
    assert driven.paced() < 1.1 * 2.77 * 40 * SIZE * 8 * S // RTT


def test_startup_ends_where_packets_arrive_slower_than_they_left_and_make_a_queue() -> None:
    driven = Driven()
    arrives(driven, RTT // 2, RTT)
    assert driven.states[1] is BbrState.DRAIN
    assert 0.95 < driven.bbr.bandwidth.value / (200 * SIZE * S // RTT) < 1.05
    still = Driven()
    arrives(still, RTT, RTT)
    assert still.bbr.state is BbrState.STARTUP


@pytest.mark.parametrize(("packets", "size"), [(6, 100), (7, SIZE), (40, 100)])
def test_the_few_messages_that_a_connection_begins_with_end_no_startup_however_slowly_they_arrive(
    packets: int, size: int
) -> None:
    driven = Driven()
    arrives(driven, RTT // 2, 2 * RTT, packets=packets, size=size)
    assert driven.bbr.state is BbrState.STARTUP
    assert driven.paced() >= 8 * 40 * SIZE * S // RTT


@pytest.mark.parametrize(
    ("rtt", "limited", "soon"), [(RTT, False, True), (RTT * 5 // 4, False, False), (RTT, True, False)]
)
def test_a_rate_that_a_train_has_found_is_looked_at_soon_where_the_path_is_used_without_a_queue(
    rtt: int, limited: bool, soon: bool
) -> None:
    driven = Driven()
    arrives(driven, RTT // 2, RTT)
    for _ in range(14):
        driven.round(rtt=rtt, limited=limited)
    assert (BbrState.UP in driven.states) is soon


def test_startup_goes_on_as_long_as_each_round_brings_a_quarter_more() -> None:
    driven, rate = Driven(), RATE // 100
    for _ in range(20):
        driven.round(rate)
        rate = rate * 5 // 4 + 1
    assert driven.bbr.state is BbrState.STARTUP
    assert driven.bbr.bandwidth.value > RATE // 2
    assert driven.paced() > driven.bbr.bandwidth.value * 5 // 2


def test_startup_ends_after_three_rounds_without_growth_and_the_queue_is_drained() -> None:
    driven = Driven()
    for _ in range(3):
        driven.round()
        assert driven.bbr.state is BbrState.STARTUP
    driven.round(flight=2 * CONTENTS)
    assert driven.bbr.state is BbrState.DRAIN
    assert driven.paced() < RATE * 52 // 100
    driven.round(flight=2 * CONTENTS)
    assert driven.bbr.state is BbrState.DRAIN
    driven.round(flight=CONTENTS)
    assert driven.bbr.state is BbrState.DOWN


def test_rounds_of_an_application_that_asks_for_little_end_no_startup() -> None:
    driven = Driven()
    driven.round()
    for _ in range(20):
        driven.round(RATE // 3, limited=True)
    assert driven.bbr.state is BbrState.STARTUP
    assert driven.bbr.bandwidth.value == RATE, "what was asked for says nothing of the path"


def test_a_queue_shows_that_the_path_was_full_whoever_limits() -> None:
    driven = Driven()
    driven.round()
    for _ in range(3):
        driven.round(rtt=2 * RTT, limited=True, flight=2 * CONTENTS)
    assert driven.bbr.state is BbrState.DRAIN


def test_few_bytes_beside_others_who_fill_the_queue_end_no_startup() -> None:
    driven = Driven()
    driven.round()
    for _ in range(20):
        driven.round(SIZE * S // RTT, rtt=2 * RTT, limited=True, flight=0)
    assert driven.bbr.state is BbrState.STARTUP


def test_startup_ends_by_a_round_that_lost_too_much_and_grew_no_more() -> None:
    driven = Driven()
    driven.round()
    driven.round(rtt=RTT * 3 // 2, lost=CONTENTS // 5, flight=2 * CONTENTS)
    assert driven.bbr.state is BbrState.DRAIN
    for _ in range(80):
        driven.round()
        assert driven.bbr.window <= CONTENTS * 3 // 2, "it does not go beyond what was found safe before it probes"
        if driven.bbr.state is BbrState.UP:
            break
    assert BbrState.UP in driven.states


def test_a_drain_that_others_keep_from_its_end_is_over_after_three_rounds() -> None:
    driven = Driven()
    for _ in range(4):
        driven.round(flight=2 * CONTENTS)
    assert driven.bbr.state is BbrState.DRAIN
    for _ in range(3):
        driven.round(rtt=2 * RTT, flight=2 * CONTENTS)
    assert driven.bbr.state is BbrState.DOWN


def test_the_cycle_is_down_cruise_refill_up_and_down_again() -> None:
    driven = Driven()
    for _ in range(4):
        driven.round(flight=2 * CONTENTS)
    driven.until(BbrState.UP)
    driven.until(BbrState.CRUISE)
    down, cruise, refill, up = BbrState.DOWN, BbrState.CRUISE, BbrState.REFILL, BbrState.UP
    assert driven.states == [BbrState.STARTUP, BbrState.DRAIN, down, cruise, refill, up, down, cruise]


def test_cruising_sends_a_hundredth_below_the_bandwidth() -> None:
    driven = cruising()
    assert driven.bbr.bandwidth.value == RATE
    assert driven.paced() == RATE * 99 // 100
    assert driven.bbr.window > 2 * CONTENTS - 10


def test_who_is_late_makes_up_for_half_of_the_longest_queue() -> None:
    driven = cruising()
    assert driven.bbr.arrears_ns == 0
    driven.bbr.signs.on_round_trip(RTT + 20 * MS, 0)
    assert driven.bbr.arrears_ns == 10 * MS
    assert Cubic(SIZE).arrears_ns == NewReno(SIZE).arrears_ns == 0


def test_it_is_time_to_probe_after_two_to_three_seconds_by_chance() -> None:
    waits = set()
    for seed in range(8):
        driven = Driven(seed)
        driven.until(BbrState.DOWN, rtt=100 * MS)
        begin = driven.now
        driven.until(BbrState.REFILL, rtt=100 * MS)
        waits.add((driven.now - begin) // MS)
    assert min(waits) >= 2000
    assert max(waits) <= 3100
    assert len(waits) > 3


def test_on_a_short_path_it_probes_as_often_as_newreno_would_have_grown() -> None:
    """Draft section 5.3.3.5: after 63 rounds, or as many as the path holds datagrams."""
    for rate, rounds in ((10**8, 63), (10**7, 6)):
        driven = Driven()
        driven.until(BbrState.DOWN, rtt=MS, rate=rate)
        count = 0
        while driven.bbr.state is not BbrState.REFILL:
            driven.round(rate, rtt=MS)
            count += 1
        assert count == rounds


def test_up_sends_a_quarter_more_for_one_round_and_listens_for_one() -> None:
    driven = cruising()
    driven.until(BbrState.REFILL)
    assert driven.paced() == RATE * 99 // 100
    driven.until(BbrState.UP)
    assert driven.paced() == RATE * 125 * 99 // 10000
    driven.round()
    assert (driven.bbr.state, driven.paced()) == (BbrState.UP, RATE * 99 // 100)
    driven.round()
    assert driven.bbr.state is BbrState.DOWN
    assert driven.paced() == RATE * 90 * 99 // 10000


def test_up_goes_on_while_it_brings_more() -> None:
    driven = cruising()
    driven.until(BbrState.UP)
    rate = RATE
    for _ in range(5):
        rate = rate * 5 // 4
        driven.round()
        driven.round(rate)
        assert driven.bbr.state is BbrState.UP
        assert driven.bbr.bandwidth.value == rate
    driven.round(rate)
    driven.round(rate)
    assert driven.bbr.state is BbrState.DOWN


def test_an_up_that_loses_too_much_ends_at_once_and_gives_way_until_the_next() -> None:
    driven = cruising()
    driven.until(BbrState.UP)
    driven.round(rtt=RTT * 5 // 4)
    driven.lose(CONTENTS // 10, flight=CONTENTS * 5 // 4)
    assert driven.bbr.state is BbrState.DOWN
    driven.until(BbrState.CRUISE)
    assert driven.paced() <= RATE * 75 // 100
    assert driven.bbr.window <= CONTENTS * 5 // 4
    driven.round(RATE * 75 // 100, rtt=RTT * 5 // 4)
    assert driven.bbr.state is BbrState.CRUISE
    assert driven.bbr.window <= CONTENTS * 5 // 4 * 85 // 100 + SIZE, "beside others a sixth below what was too much"
    driven.until(BbrState.UP, rate=RATE * 75 // 100)
    assert RATE * 90 // 100 <= driven.paced() <= RATE, "1.25 of what was left"


def test_where_no_queue_is_seen_all_that_is_safe_is_in_flight_while_it_cruises() -> None:
    """There is nobody to leave room for, and a sixth less did not fill the path."""
    driven = cruising()
    driven.until(BbrState.UP)
    driven.round(rtt=RTT * 5 // 4)
    driven.lose(CONTENTS // 10, flight=CONTENTS * 6 // 5)
    for _ in range(3):
        driven.until(BbrState.UP)
        driven.until(BbrState.CRUISE)
        driven.round()
        assert driven.bbr.window >= CONTENTS * 6 // 5


def test_what_is_lost_two_rounds_after_up_is_no_more_of_it_however_short_down_was() -> None:
    driven = cruising()
    driven.until(BbrState.UP)
    driven.until(BbrState.CRUISE)
    driven.round()
    known = driven.bbr.noise.share
    for _ in range(3):
        driven.round(lost=CONTENTS // 50)
    assert driven.states[-2:] == [BbrState.DOWN, BbrState.CRUISE]
    assert driven.bbr.noise.share > known


def test_the_limit_of_what_is_safe_is_raised_by_one_two_four_datagrams_a_round() -> None:
    driven = cruising()
    driven.until(BbrState.UP)
    driven.round(rtt=RTT * 5 // 4)
    driven.lose(CONTENTS // 10, flight=CONTENTS)
    driven.until(BbrState.UP, rate=RATE // 2)
    windows = [driven.bbr.window]
    while driven.bbr.state is BbrState.UP:
        driven.round(RATE, flight=driven.bbr.window)
        windows.append(driven.bbr.window)
    rises = [after - before for before, after in itertools.pairwise(windows[1:-1])]
    assert rises == sorted(rises)
    assert rises[-1] >= 4 * rises[0] > 0
    assert max(windows) > CONTENTS * 115 // 100, "and no further than a flow needs that makes no queue"
    assert max(windows) < CONTENTS * 140 // 100


def test_a_queue_of_its_own_raises_the_limit_no_further() -> None:
    """It took a path that had lost too much by chance to the end of its queue, in a second of looking for more."""
    driven = cruising()
    driven.until(BbrState.UP)
    driven.round(rtt=RTT * 5 // 4)
    driven.lose(CONTENTS // 10, flight=CONTENTS)
    driven.until(BbrState.UP)
    for _ in range(12):
        driven.round(RATE, rtt=RTT * 3 // 2, flight=driven.bbr.window)
        assert driven.bbr.window < CONTENTS * 140 // 100
    assert driven.bbr.state is not BbrState.UP


def test_beside_others_who_fill_a_long_queue_the_limit_is_raised_beyond_what_an_empty_path_holds() -> None:
    driven = cruising()
    driven.until(BbrState.UP)
    driven.round(rtt=RTT * 5 // 4)
    driven.lose(CONTENTS // 10, flight=CONTENTS)
    driven.until(BbrState.UP, rate=RATE // 2, rtt=2 * RTT)
    windows = [driven.bbr.window]
    for _ in range(12):
        driven.round(RATE // 2, rtt=2 * RTT, flight=driven.bbr.window)
        windows.append(driven.bbr.window)
        if driven.bbr.state is not BbrState.UP:
            break
    assert max(windows) > CONTENTS * 140 // 100


def test_loss_without_a_queue_is_noise_and_lowers_nothing() -> None:
    driven = cruising()
    for _ in range(40):
        driven.round(lost=CONTENTS // 50)
        assert driven.bbr.bandwidth.value == RATE
        assert driven.paced() >= RATE * 89 // 100
    assert 150 <= driven.bbr.noise.share <= 200, "2 % were lost, and the path's hundred packets stand for none"
    driven.until(BbrState.CRUISE)
    assert driven.paced() == RATE * 99 // 100


def test_noise_is_bounded_and_loss_beyond_a_fifth_is_congestion_without_any_queue() -> None:
    driven = cruising()
    for _ in range(5):
        driven.round(lost=CONTENTS // 4)
    assert driven.bbr.noise.share <= 1000
    assert driven.paced() < RATE * 90 // 100


def test_loss_with_a_queue_that_others_make_gives_way_once_in_a_cycle() -> None:
    driven = cruising()
    driven.round()
    driven.round()
    driven.round(rtt=RTT * 3 // 2, lost=4 * SIZE)
    assert driven.paced() == RATE * 75 // 100 * 99 // 100
    driven.round(rtt=RTT * 3 // 2, lost=4 * SIZE)
    assert driven.paced() == RATE * 75 // 100 * 99 // 100


def test_what_was_sent_before_it_gave_way_makes_it_give_way_no_further() -> None:
    driven = cruising()
    driven.round()
    driven.round()
    driven.round(rtt=2 * RTT, lost=CONTENTS // 10)
    given = driven.paced()
    assert given < RATE * 80 // 100
    driven.round(rtt=2 * RTT, lost=CONTENTS // 10)
    assert driven.paced() == given
    driven.round(rtt=2 * RTT, lost=CONTENTS // 10)
    assert driven.paced() < given, "that was sent after it"


def gave_way(noise: int) -> Driven:
    """Return one that has just given way, on a path that loses so many packets of each round by itself."""
    driven = cruising()
    for _ in range(45):
        driven.round(lost=noise * SIZE)
    driven.until(BbrState.UP)
    driven.until(BbrState.CRUISE)
    driven.round()
    driven.round()
    driven.round(rtt=2 * RTT, lost=CONTENTS // 5)
    assert driven.paced() < RATE * 80 // 100
    return driven


def rounds_until_refill(driven: Driven) -> int:
    for count in range(100):
        if driven.bbr.state is BbrState.REFILL:
            return count
        driven.round(RATE * 3 // 4)
    raise AssertionError("it never came")


def test_on_a_path_that_leaves_newreno_nothing_it_looks_again_soon_after_giving_way_where_no_queue_is_seen() -> None:
    assert rounds_until_refill(gave_way(4)) in (5, 6), "the first has a queue still, by the round before"
    assert rounds_until_refill(gave_way(0)) > 20


def test_giving_way_again_after_such_a_look_has_it_wait_twice_as_long() -> None:
    driven = gave_way(4)
    before = rounds_until_refill(driven)
    driven.until(BbrState.CRUISE)
    for _ in range(3):
        driven.round()
    driven.round(rtt=2 * RTT, lost=CONTENTS // 5)
    assert before + 3 <= rounds_until_refill(driven) <= before + 5


def up_again(lost: int) -> bool:
    """Return whether UP goes on after one that brought a fifth more, and lost so many packets with a queue."""
    driven = cruising()
    driven.until(BbrState.UP)
    driven.round(RATE * 6 // 5, rtt=RTT * 3 // 2, lost=lost * SIZE)
    driven.round(RATE * 6 // 5, rtt=RTT * 3 // 2)
    return driven.bbr.state is BbrState.UP


def test_up_that_brought_more_is_the_last_where_it_made_a_queue_lose_packets() -> None:
    assert up_again(2)
    assert not up_again(4), "fewer than are too much, but more than noise"


def test_a_path_that_loses_in_bursts_is_not_taken_for_congested_by_one_of_them() -> None:
    driven = cruising()
    for i in range(45):
        driven.round(lost=CONTENTS // 12 if i % 4 == 0 else 0)
    assert driven.bbr.noise.spread > 150
    driven.until(BbrState.CRUISE)
    driven.round()
    driven.round()
    driven.round(rtt=RTT * 3 // 2, lost=CONTENTS // 12)
    assert driven.paced() == RATE * 99 // 100


def test_the_shortest_round_trip_is_measured_anew_where_nothing_confirms_it_for_five_seconds() -> None:
    driven = cruising()
    begin = driven.now
    while driven.bbr.state is not BbrState.PROBE_RTT:
        driven.round(rtt=RTT * 6 // 5, flight=CONTENTS)
        assert driven.now - begin < 6 * S
    assert driven.now - begin > 5 * S
    assert driven.bbr.window <= CONTENTS * 6 // 10
    quiet = driven.now
    driven.round(flight=CONTENTS // 3)
    while driven.bbr.state is BbrState.PROBE_RTT:
        driven.round(RATE // 2, flight=CONTENTS // 3)
    assert 200 * MS < driven.now - quiet <= 200 * MS + 3 * RTT
    assert driven.bbr.state is BbrState.CRUISE
    driven.round()
    driven.round()
    assert driven.bbr.window > CONTENTS, "what is acknowledged brings the window back"


def test_round_trips_as_short_as_ever_need_no_measuring() -> None:
    driven = cruising()
    for _ in range(500):
        driven.round(rtt=RTT + RTT // 70)
    assert BbrState.PROBE_RTT not in driven.states


def test_probe_rtt_that_fell_asleep_ends_at_the_next_packet() -> None:
    driven = cruising()
    while driven.bbr.state is not BbrState.PROBE_RTT:
        driven.round(rtt=RTT * 6 // 5, flight=CONTENTS)
    driven.round(flight=SIZE)
    driven.bbr.on_sent(SIZE, 0, driven.now + 100 * MS)
    assert driven.bbr.state is BbrState.PROBE_RTT, "200 ms are not over"
    driven.bbr.on_sent(SIZE, 0, driven.now + 201 * MS)
    assert driven.bbr.state is BbrState.CRUISE


def test_a_longer_path_is_believed_after_ten_seconds() -> None:
    driven = cruising()
    begin = driven.now
    while driven.bbr.signs.shortest.value_ns == RTT:
        driven.round(rtt=2 * RTT, flight=CONTENTS // 4)
        assert driven.now - begin < 11 * S
    assert driven.now - begin > 9 * S
    assert driven.bbr.signs.shortest.value_ns == 2 * RTT


def test_a_slower_path_is_believed_after_two_cycles() -> None:
    driven = cruising()
    begin = driven.now
    while driven.bbr.bandwidth.value > RATE // 2:
        driven.round(RATE // 2)
        assert driven.now - begin < 8 * S
    assert driven.now - begin > S


def test_what_was_remembered_outlasts_a_long_silence() -> None:
    driven = cruising()
    for _ in range(10):
        driven.now += 60 * S
        driven.round(RATE // 10, limited=True)
    assert driven.bbr.bandwidth.value == RATE


def test_persistent_congestion_forgets_the_path_and_begins_with_four_datagrams() -> None:
    driven = cruising()
    driven.round(lost=CONTENTS // 50)
    driven.bbr.on_persistent_congestion(driven.now)
    assert driven.bbr.state is BbrState.STARTUP
    assert driven.bbr.window == 4 * SIZE
    assert driven.bbr.bandwidth.value == 0
    assert driven.bbr.noise.share > 0
    driven.until(BbrState.CRUISE)
    assert driven.bbr.window > CONTENTS


def test_a_mistake_is_undone_once() -> None:
    driven = cruising()
    driven.until(BbrState.UP)
    driven.round(rtt=RTT * 5 // 4)
    driven.lose(CONTENTS // 10, flight=CONTENTS)
    assert driven.bbr.state is BbrState.DOWN
    driven.bbr.on_spurious(driven.now)
    assert driven.bbr.state is BbrState.UP
    driven.round()
    assert driven.bbr.window > CONTENTS * 3 // 2, "there is no limit of what is safe"
    driven.lose(CONTENTS // 10, flight=CONTENTS, begins=False)
    state, window = driven.bbr.state, driven.bbr.window
    driven.bbr.on_spurious(driven.now)
    assert (driven.bbr.state, driven.bbr.window) == (state, window)


def test_a_mistake_that_ended_startup_has_it_go_on() -> None:
    driven = Driven()
    driven.round()
    driven.round(rtt=RTT * 3 // 2, lost=CONTENTS // 5, flight=2 * CONTENTS)
    assert driven.bbr.state is BbrState.DRAIN
    driven.bbr.on_spurious(driven.now)
    assert driven.bbr.state is BbrState.STARTUP


def test_larger_datagrams_raise_the_smallest_window() -> None:
    bbr = Bbr(SIZE, random.Random(1).randbytes)
    bbr.on_persistent_congestion(0)
    bbr.on_datagram_size(8952)
    assert bbr.window == 4 * 8952


def test_clumps_of_acknowledgements_leave_room_for_what_comes_between_them() -> None:
    """Draft section 5.5.9: once in two round trips, all that they brought."""
    steady, clumped = cruising(), cruising()
    for _ in range(12):
        steady.round()
        steady.round()
        clumped.now += RTT
        clumped.delivered += CONTENTS
        clumped.round(RATE, flight=CONTENTS)
    assert clumped.bbr.window >= steady.bbr.window


@fixed
@given(
    seed=st.integers(0, 9),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["ack", "ack", "ack", "lost", "spurious", "persistent", "size", "sent"]),
            st.integers(0, 10**11),  # bytes a second
            st.integers(1, 2 * 10**9),  # round trip
            st.booleans(),
            st.none() | st.builds(FairRate, st.integers(0, (1 << 61) - 1), st.booleans()),
        ),
        max_size=60,
    ),
)
def test_window_and_rate_are_within_bounds_and_the_same_again_whatever_is_told(
    seed: int, calls: list[tuple[str, int, int, bool, FairRate | None]]
) -> None:
    def run() -> list[tuple[int, int]]:
        driven, size, answers = Driven(seed), SIZE, []
        for kind, rate, rtt, flag, fair_rate in calls:
            before, bbr = driven.bbr.window, driven.bbr
            if kind == "ack":
                driven.round(rate, rtt=rtt, limited=flag, fair_rate=fair_rate)
                acked = max(rate * rtt // S, SIZE)
                assert bbr.window <= max(before + acked, 4 * size), "it grows by no more than what arrives"
            elif kind == "lost":
                driven.lose(rate % 10**7 + 1, begins=flag)
            elif kind == "spurious":
                bbr.on_spurious(driven.now)
            elif kind == "persistent":
                bbr.on_persistent_congestion(driven.now)
            elif kind == "size":
                size = 1200 + rate % 8000
                bbr.on_datagram_size(size)
            else:
                bbr.on_sent(size, 0 if flag else size, driven.now)
            paced = bbr.rate(rtt)
            assert bbr.window >= 4 * size
            assert paced is not None
            assert paced >= 4 * size * S // max(rtt, MS) > 0
            answers.append((bbr.window, paced))
        return answers

    assert run() == run()


@pytest.mark.parametrize("queue", [0, 1])
def test_chance_is_asked_for_once_in_a_cycle(queue: int) -> None:
    """The same seed leads to the same run only if as much is drawn each time."""
    drawn: list[int] = []

    def draw(size: int) -> bytes:
        drawn.append(size)
        return bytes(size)

    driven = Driven()
    driven.bbr = Bbr(SIZE, draw)
    for _ in range(3):
        driven.until(BbrState.UP, rtt=RTT + queue * MS)
        driven.until(BbrState.CRUISE, rtt=RTT + queue * MS)
    assert drawn == [2] * 4


# -- what is remembered -----------------------------------------------------------------------------------------------


def resuming(rate: int, rtt: int = RTT, *, rounds: int = 1) -> tuple[Driven, RememberedPath]:
    """A controller of a path of which this is remembered, after its first round trips, of few bytes."""
    path = PathMemory().of(b"peer", "10.0.0.1")
    path.learn(KnownPath(rate, rtt), 0, is_certain=True)
    driven = Driven()
    driven.bbr = Bbr(SIZE, random.Random(1).randbytes, path)
    for _ in range(rounds):
        driven.round(1000, limited=True, flight=0)
    return driven, path


def test_a_remembered_rate_holds_from_the_first_round_trip_on() -> None:
    driven, _ = resuming(RATE)
    assert driven.bbr.state is BbrState.RESUME
    assert driven.paced() == RATE * 99 // 100
    assert CONTENTS <= driven.bbr.window <= CONTENTS * 5 // 4


def test_before_the_first_round_trip_a_memory_counts_for_nothing() -> None:
    driven, _ = resuming(RATE, rounds=0)
    assert driven.bbr.state is BbrState.STARTUP
    assert driven.bbr.window == Driven().bbr.window


@pytest.mark.parametrize("rtt", [RTT // 2, RTT * 2])
def test_a_first_round_trip_of_half_or_twice_the_remembered_one_drops_the_memory(rtt: int) -> None:
    driven, path = resuming(RATE, rtt)
    assert driven.bbr.state is BbrState.STARTUP
    assert driven.bbr.window < CONTENTS // 4
    assert path.recall(driven.now) is None or path.recall(driven.now) == KnownPath(1000, RTT)


def test_a_memory_that_is_right_is_believed_after_a_flight_and_more_is_looked_for() -> None:
    driven, path = resuming(RATE)
    driven.until(BbrState.UP)
    assert driven.states == [BbrState.STARTUP, BbrState.RESUME, BbrState.UP]
    assert driven.bbr.bandwidth.value == RATE
    assert path.recall(driven.now) == KnownPath(RATE, RTT)


def test_little_traffic_neither_proves_nor_refutes_a_memory() -> None:
    driven, path = resuming(RATE)
    for _ in range(50):
        driven.round(RATE // 10, limited=True, flight=0)
    assert driven.bbr.state is BbrState.RESUME
    assert driven.paced() == RATE * 99 // 100
    assert path.recall(driven.now) == KnownPath(RATE, RTT)


def test_a_memory_of_twice_the_truth_ends_with_what_was_measured_and_drains() -> None:
    driven, path = resuming(2 * RATE)
    for _ in range(3):
        driven.round(rtt=2 * RTT, flight=2 * CONTENTS)
    assert BbrState.DRAIN in driven.states
    assert BbrState.UP not in driven.states
    assert driven.bbr.bandwidth.value == RATE
    assert path.recall(driven.now) == KnownPath(RATE, RTT)


def test_too_much_loss_ends_a_memory_in_the_midst_of_a_round() -> None:
    driven, _ = resuming(2 * RATE)
    driven.lose(CONTENTS // 2, flight=2 * CONTENTS)
    assert driven.bbr.state is BbrState.DRAIN
    assert driven.bbr.bandwidth.value == RATE, "half of it, where nothing was measured yet"


def test_where_the_first_look_for_more_finds_a_fifth_the_memory_was_too_low_and_startup_follows() -> None:
    driven, _ = resuming(RATE // 2)
    driven.until(BbrState.UP, rate=RATE // 2)
    for _ in range(2):
        driven.round(RATE * 5 // 8)
    assert driven.bbr.state is BbrState.STARTUP
    assert driven.paced() > RATE


def test_what_startup_has_seen_so_far_overwrites_no_more_than_less() -> None:
    path = PathMemory().of(b"peer", "10.0.0.1")
    driven = Driven()
    driven.bbr = Bbr(SIZE, random.Random(1).randbytes, path)
    driven.round(1000)
    driven.round(RATE // 4)
    assert path.recall(driven.now) == KnownPath(RATE // 4, RTT)
    path.learn(KnownPath(RATE, RTT), driven.now, is_certain=True)
    driven.round(RATE // 3)
    assert path.recall(driven.now) == KnownPath(RATE, RTT)


def test_persistent_congestion_forgets_what_was_remembered_and_does_not_ask_again() -> None:
    driven, path = resuming(RATE)
    driven.bbr.on_persistent_congestion(driven.now)
    assert path.recall(driven.now) is None
    path.learn(KnownPath(RATE, RTT), driven.now, is_certain=True)
    driven.round(1000, limited=True, flight=0)
    assert driven.bbr.state is BbrState.STARTUP


def test_what_a_standing_queue_lets_through_is_the_bandwidth_and_the_queue_is_let_go() -> None:
    driven = cruising()
    believed = driven.bbr.bandwidth.value
    for _ in range(3):  # of which the first ones answer to what was sent before it cruised
        assert driven.bbr.bandwidth.value == believed
        driven.round(believed * 9 // 10, rtt=RTT * 3 // 2, flight=CONTENTS * 3 // 2)
    assert driven.bbr.bandwidth.value == pytest.approx(believed * 9 // 10, rel=0.01)
    assert driven.bbr.state is BbrState.DOWN
    driven.until(BbrState.CRUISE, rate=believed * 9 // 10)
    assert driven.bbr.bandwidth.value == pytest.approx(believed * 9 // 10, rel=0.01)


def test_a_correction_takes_off_no_more_than_a_sixth_at_a_time() -> None:
    driven = cruising()
    believed = driven.bbr.bandwidth.value
    for _ in range(3):
        driven.round(believed // 2, rtt=RTT * 3 // 2, flight=CONTENTS * 3 // 2)
    assert driven.bbr.bandwidth.value == believed * 85 // 100


@pytest.mark.parametrize(
    ("trips", "part", "limited"),
    [
        ((3, 3, 3, 3), 98, False),  # as much as is believed, but for noise
        ((3, 2, 3, 2), 90, False),  # without a queue once
        ((5, 5, 5, 5), 90, False),  # longer than the path: others'
        ((3, 3, 3, 3), 90, True),  # there was too little to send
    ],
)
def test_without_a_standing_queue_of_its_own_the_bandwidth_is_what_was_seen(
    trips: tuple[int, ...], part: int, limited: bool
) -> None:
    driven = cruising()
    believed = driven.bbr.bandwidth.value
    for halves in trips:
        driven.round(believed * part // 100, rtt=RTT * halves // 2, limited=limited, flight=CONTENTS * 3 // 2)
    assert driven.bbr.bandwidth.value == believed
