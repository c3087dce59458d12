"""Which packets are new, when the peer is told, and what it is told; against a plain set of numbers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic.acknowledgements import MAX_ACK_DELAY_MS, Acknowledgements
from quicoll_transport.quic.frame_reader import read_frames
from quicoll_transport.quic.frames import AckFrame

MS = 1_000_000


def read(frame: bytes) -> AckFrame:
    (found,) = read_frames(frame)
    assert isinstance(found, AckFrame)
    return found


def numbers(frame: bytes) -> set[int]:
    return {number for start, stop in read(frame).ranges for number in range(start, stop)}


def note(acks: Acknowledgements, *these: int, now_ns: int = 0, eliciting: bool = True) -> None:
    for number in these:
        acks.note(number, number + 1, 1200, eliciting=eliciting, now_ns=now_ns)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(arrivals=st.lists(st.integers(0, 200), max_size=120))
def test_what_has_arrived_is_told_and_is_not_new_again(arrivals: list[int]) -> None:
    acks, plain = Acknowledgements(), set[int]()
    for number in arrivals:
        assert acks.is_new(number) == (number not in plain)
        if number not in plain:
            note(acks, number)
            plain.add(number)
        frame, _ = acks.frame(0, 1200)
        assert numbers(frame) == plain
        assert acks.largest == max(plain)


def test_packets_together_are_noted_as_one_by_one() -> None:
    one, many = Acknowledgements(), Acknowledgements()
    for start, stop in ((0, 100), (150, 151), (120, 140), (151, 300)):
        many.note(start, stop, (stop - start) * 1200, eliciting=True, now_ns=start)
        note(one, *range(start, stop), now_ns=start)
        assert one.due_ns == many.due_ns
        assert one.frame(500, 1200) == many.frame(500, 1200)


def test_the_second_full_packet_is_acknowledged_at_once_and_a_single_one_by_the_timer() -> None:
    acks = Acknowledgements()
    note(acks, 0, now_ns=5)
    assert acks.due_ns == 5 + 5 * MS < MAX_ACK_DELAY_MS * MS
    assert not acks.is_due(5, accompanied=False)
    note(acks, 1, now_ns=6)
    assert acks.is_due(6, accompanied=False)


def test_an_acknowledgement_goes_along_with_whatever_goes() -> None:
    acks = Acknowledgements()
    assert not acks.is_due(5, accompanied=True), "there is nothing to tell"
    note(acks, 0, now_ns=5)
    assert acks.is_due(5, accompanied=True)
    acks.frame(5, 1200)
    assert not acks.is_due(10**12, accompanied=True)


def test_acknowledgements_go_along_once_in_a_millisecond_and_none_is_later_than_it_would_be_alone() -> None:
    acks, went = Acknowledgements(), []
    for number in range(10):
        now_ns = number * MS // 4
        acks.note(number, number + 1, 60 if number else 1452, eliciting=True, now_ns=now_ns)
        if acks.is_due(now_ns, accompanied=True):
            went.append(now_ns)
            acks.frame(now_ns, 1200)
    assert went == [0, MS, 2 * MS]
    assert acks.due_ns == 2 * MS + MS // 4 + 5 * MS, "since the first came of which the peer was not told"
    assert acks.is_due(acks.due_ns, accompanied=False)


def test_two_full_packets_go_along_however_soon_after_the_last_one() -> None:
    acks = Acknowledgements()
    acks.note(0, 100, 100 * 8952, eliciting=True, now_ns=0)
    acks.frame(0, 1200)
    acks.note(100, 101, 2399, eliciting=True, now_ns=1)
    assert not acks.is_due(1, accompanied=True)
    acks.note(101, 102, 1, eliciting=True, now_ns=2)
    assert acks.is_due(2, accompanied=True)
    assert not acks.is_due(2, accompanied=False)


def test_what_is_due_goes_however_soon_after_the_last_one() -> None:
    acks = Acknowledgements()
    note(acks, 0, now_ns=5)
    acks.frame(5, 1200)
    note(acks, 1, 2, now_ns=6)
    assert acks.is_due(6, accompanied=True)
    assert acks.is_due(6, accompanied=False)


def test_small_packets_wait_for_company() -> None:
    acks = Acknowledgements()
    for number in range(10):
        acks.note(number, number + 1, 1452 if number == 0 else 60, eliciting=True, now_ns=number)
    assert acks.due_ns == 5 * MS


def test_two_full_packets_are_soon_acknowledged_whatever_came_before() -> None:
    acks = Acknowledgements()
    acks.note(0, 100, 100 * 8952, eliciting=True, now_ns=0)  # now 8952 bytes are a full packet, and an eighth of it all
    acks.frame(0, 1200)
    note(acks, 100, now_ns=7)
    assert acks.due_ns == 7 + 5 * MS
    note(acks, 101, now_ns=8)
    assert acks.due_ns == 7 + MS


def test_what_comes_fast_is_acknowledged_by_bytes() -> None:
    acks, due = Acknowledgements(), 0
    for start in range(0, 10_000, 10):
        acks.note(start, start + 10, 12_000, eliciting=True, now_ns=start)
        if acks.is_due(start, accompanied=False):
            due += 1
            acks.frame(start, 1200)
    assert 12_000_000 // (128 * 1024) <= due < 150


def test_what_is_out_of_order_is_acknowledged_at_once() -> None:
    acks = Acknowledgements()
    note(acks, *range(100))
    acks.frame(0, 1200)
    note(acks, 101, now_ns=7)
    assert acks.due_ns == 7
    acks.frame(7, 1200)
    note(acks, 100, now_ns=8)
    assert acks.due_ns == 8


def test_nothing_is_due_for_packets_that_ask_for_nothing() -> None:
    acks = Acknowledgements()
    note(acks, 0, 5, 3, eliciting=False)
    assert acks.due_ns is None
    note(acks, 6)
    assert numbers(acks.frame(0, 1200)[0]) == {0, 3, 5, 6}


def test_the_delay_is_that_of_the_largest_packet() -> None:
    acks = Acknowledgements(exponent=3)
    note(acks, 0, 2, now_ns=0)
    note(acks, 1, now_ns=5 * MS)
    assert read(acks.frame(8 * MS, 1200)[0]).delay == 8000 >> 3


def test_what_the_peer_knows_is_not_told_again_but_the_largest_number_always_is() -> None:
    acks = Acknowledgements()
    note(acks, 0, 2, 4, 6)
    _, told = acks.frame(0, 1200)
    note(acks, 8, 1)
    acks.acknowledged(told)
    assert numbers(acks.frame(0, 1200)[0]) == {8, 1}
    _, told = acks.frame(0, 1200)
    acks.acknowledged(told)
    assert numbers(acks.frame(0, 1200)[0]) == {8}
    assert not any(acks.is_new(number) for number in (0, 1, 2, 4, 6, 8))


def test_a_frame_fits_its_room_and_leaves_out_the_lowest() -> None:
    acks = Acknowledgements()
    note(acks, *range(0, 400, 2))
    for room in (40, 60, 100, 300):
        frame, told = acks.frame(0, room)
        assert len(frame) <= room
        assert told[0] == (398, 399)
        assert numbers(frame) == {start for start, _ in told}


def test_a_burst_that_arrives_shuffled_is_taken_whole() -> None:
    acks = Acknowledgements()
    shuffled = [(i * 97) % 901 for i in range(901)]
    for number in shuffled:
        assert acks.is_new(number)
        note(acks, number)
    assert acks.floor == 0
    assert numbers(acks.frame(0, 1200)[0]) == set(range(901))


def test_what_is_remembered_is_bounded_and_what_is_forgotten_counts_as_arrived() -> None:
    acks = Acknowledgements()
    note(acks, *range(0, 6000, 2))
    assert acks.floor > 0
    assert not acks.is_new(1)
    assert acks.is_new(5997)
    frame, told = acks.frame(0, 1 << 20)
    assert len(told) <= 512
    assert max(numbers(frame)) == 5998


def test_who_only_receives_asks_for_an_answer_now_and_then() -> None:
    acks = Acknowledgements()
    note(acks, 0, 2)
    asked = [acks.wants_answer(accompanied=False) for _ in range(64)]
    assert asked.count(True) == 4
    asked = [acks.wants_answer(accompanied=number % 4 == 0) for number in range(64)]
    assert not any(asked), "what goes along asks already"
    without_gaps = Acknowledgements()
    note(without_gaps, 0, 1)
    assert not any(without_gaps.wants_answer(accompanied=False) for _ in range(64))


def test_gaps_of_what_was_lost_leave_place_for_runs_however_many_they_were() -> None:
    """The numbers of lost packets never come: after a thousand of them every packet was opened by itself for ever."""
    acks = Acknowledgements()
    without = 0
    for i in range(5000):
        acks.note(10 * i, 10 * i + 9, 9 * 1200, eliciting=True, now_ns=i)
        without += not acks.has_place(256)
        assert len(acks._known) <= 1024
        assert acks.is_new(10 * i - 1) == (i > 0), "what is late by a few is still taken"
    assert without < 5000 * 2 // 5
    assert acks.has_place(256) or len(acks._known) > 768


def test_the_peer_is_told_how_long_a_packet_lay_in_this_host_as_well() -> None:
    acks = Acknowledgements()
    acks.note(0, 1, 1200, eliciting=True, now_ns=50_000_000, arrived_ns=30_000_000)
    assert acks.due_ns == 55_000_000, "it is answered as soon as any other"
    frame, _ = acks.frame(51_000_000, 1000)
    assert read(frame).delay << 3 == 21_000
