"""What goes into packets and which go now: order, who may go beyond the window, little to where nobody was seen."""

from __future__ import annotations

from typing import Any

import pytest
from lone_plane import AWAY, HOME, MS, LonePlane, Said, flat

from quicoll_transport.quic import frames as f
from quicoll_transport.quic.frames import PROTOCOL_VIOLATION
from quicoll_transport.quic.newreno import NewReno

UNI = 2  # of a client
S = 1000 * MS


@pytest.fixture
def server() -> LonePlane:
    lone = LonePlane()
    lone.settle()
    return lone


def bulk(lone: LonePlane, size: int, **options: bool) -> Any:
    stream = lone.plane.outbound.open(**options)
    lone.plane.outbound.write(stream, memoryview(bytes(size)), fin=True)
    return stream


def words(lone: LonePlane, size: int = 10) -> Any:
    """An urgent stream, as control words have."""
    stream = lone.plane.outbound.open(urgent=True)
    lone.plane.outbound.write(stream, memoryview(bytes(size)))
    return stream


def ack(lone: LonePlane, *said: Said) -> None:
    for one in said:
        lone.say(f.AckFrame([(one.number, one.number + 1)], 0))


def fill_window(lone: LonePlane) -> list[Said]:
    """Send until nothing more may go."""
    bulk(lone, 1 << 20)
    said = lone.hear()
    for _ in range(8):
        lone.now += MS
        said += lone.hear()
    assert not lone.hear()
    assert lone.plane.recovery.in_flight > lone.plane.recovery.controller.window // 2
    return said


def set_window(lone: LonePlane, window: int) -> None:
    controller = lone.plane.recovery.controller
    assert isinstance(controller, NewReno)
    controller._window = window


def streams_of(said: list[Said]) -> list[int]:
    return [frame.stream_id for frame in flat(said) if isinstance(frame, f.StreamFrame)]


# -- the order ---------------------------------------------------------------------------------------------------------


def test_words_and_control_frames_go_before_small_messages_and_those_before_bulk(server: LonePlane) -> None:
    large, small = bulk(server, 100_000), bulk(server, 100)
    urgent = words(server)
    server.plane.ping()
    said = server.hear()
    assert streams_of(said)[:3] == [urgent.id, small.id, large.id]
    assert said[0].kinds[0] == "Ping"


def test_what_is_small_goes_together_in_one_packet_with_the_acknowledgement(server: LonePlane) -> None:
    server.say(f.PingFrame())
    several = [bulk(server, 100) for _ in range(5)]
    server.plane.ping()
    (said,) = server.hear()
    assert said.kinds == ["Ack", "Ping"] + ["Stream"] * 5
    assert streams_of([said]) == [stream.id for stream in several]
    assert said.size <= 1200


def test_small_messages_that_are_many_do_not_starve_bulk(server: LonePlane) -> None:
    """Where the pacer does not hold them up, a run goes after every 16 of them."""
    set_window(server, 400_000)
    server.plane.recovery.rtt.smoothed_ns = 1000
    bulk(server, 100)
    server.hear()
    server.now += MS
    large = bulk(server, 1 << 20)
    several = [bulk(server, 900).id for _ in range(100)]
    order = streams_of(server.hear())
    assert 16 <= order.index(large.id) < 40
    assert set(order) >= {several[0], large.id}


def test_a_run_is_one_size_and_ends_with_its_stream(server: LonePlane) -> None:
    large = bulk(server, 9_900)
    said = server.hear()
    assert {one.size for one in said[:-1]} == {1200}
    assert said[-1].size <= 1200
    assert [one.number for one in said] == list(range(said[0].number, said[0].number + len(said)))
    frames = [frame for frame in flat(said) if isinstance(frame, f.StreamFrame)]
    assert sum(len(frame.data) for frame in frames) == 9_900
    assert [frame.fin for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert large.fin


# -- beyond the window -------------------------------------------------------------------------------------------------


def test_an_acknowledgement_goes_whatever_the_window(server: LonePlane) -> None:
    """RFC 9002 section 7: it is not congestion-controlled, and does not count as in flight."""
    fill_window(server)
    set_window(server, 0)
    before = server.plane.recovery.in_flight
    server.say(f.PingFrame())
    server.now += 10 * MS
    (said,) = server.hear()
    assert said.kinds == ["Ack"]
    assert server.plane.recovery.in_flight == before


def test_words_go_where_the_window_is_full_of_bulk(server: LonePlane) -> None:
    fill_window(server)
    assert server.hear() == []
    urgent = words(server)
    bulk(server, 100)
    (said,) = server.hear()
    assert streams_of([said]) == [urgent.id]
    assert server.plane.recovery.in_flight <= server.plane.recovery.controller.window


def test_a_probe_timeout_sends_two_packets_though_the_window_is_full(server: LonePlane) -> None:
    """RFC 9002 section 6.2.4."""
    fill_window(server)
    at = server.plane.recovery.deadline()
    assert at is not None
    set_window(server, 0)
    server.now = at
    server.plane.handle_timer(server.now)
    said = server.hear()
    assert len(said) == 2
    assert all(one.size <= 1200 for one in said)
    assert all(set(one.kinds) & {"Stream", "Ping"} for one in said)
    assert server.hear() == []


def test_bulk_is_paced_and_words_are_not(server: LonePlane) -> None:
    set_window(server, 1 << 24)
    server.plane.recovery.rtt.smoothed_ns = S
    bulk(server, 1 << 19)
    first = sum(one.size for one in server.hear() + server.pass_time(5 * MS))
    assert 0 < first < 1 << 19
    assert server.hear() == []
    urgent = words(server)
    assert streams_of(server.hear()) == [urgent.id]
    due = server.plane.next_timer()
    assert due is not None
    assert server.now < due < server.now + S
    several = [bulk(server, 900).id for _ in range(100)]
    assert len(set(several) & set(streams_of(server.hear()))) < 60, "nor are small messages spared"


# -- what came back ----------------------------------------------------------------------------------------------------


def test_an_acknowledgement_of_what_was_never_sent_ends_the_connection(server: LonePlane) -> None:
    """RFC 9000 section 13.1."""
    server.say(f.AckFrame([(0, server.plane.sender.number)], 0))
    assert server.code is None
    server.say(f.AckFrame([(0, server.plane.sender.number + 1)], 0))
    assert server.code == PROTOCOL_VIOLATION


def test_what_was_lost_is_sent_again_in_other_packets_and_a_ping_is_not(server: LonePlane) -> None:
    """Section 13.3."""
    stream = bulk(server, 100)
    server.say(f.PathChallengeFrame(b"12345678"))
    server.plane.ping()
    lost = server.hear()
    later = []
    for _ in range(4):
        bulk(server, 10)
        later += server.hear()
    server.now += 10 * MS
    ack(server, *later)
    again = server.hear() + server.pass_time(20 * MS)
    assert min(one.number for one in again) > max(one.number for one in later)
    assert stream.id in streams_of(again)
    assert not [frame for frame in flat(again) if isinstance(frame, f.PingFrame | f.PathResponseFrame)]
    assert lost


def test_what_was_raised_meanwhile_goes_as_its_latest_value(server: LonePlane) -> None:
    server.say(f.stream_head(UNI, 0, None, fin=False) + bytes(1000))
    for i in range(1, 700):
        server.say(f.stream_head(UNI, 1000 * i, None, fin=False) + bytes(1000))
    (first,) = server.heard(f.MaxDataFrame)
    for i in range(700, 1100):
        server.say(f.stream_head(UNI, 1000 * i, None, fin=False) + bytes(1000))
    later = server.heard(f.MaxDataFrame)
    assert len(later) <= 1
    assert all(frame.limit > first.limit for frame in later)


def test_a_stream_that_is_given_up_is_not_sent_again(server: LonePlane) -> None:
    stream = bulk(server, 5000)
    server.hear()
    server.plane.outbound.reset(stream, 7)
    said = server.hear() + server.pass_time(5 * S)
    assert stream.id not in streams_of(said)
    (reset, *others) = [frame for frame in flat(said) if isinstance(frame, f.ResetStreamFrame)]
    assert (reset.stream_id, reset.code, reset.final_size) == (stream.id, 7, 5000)
    assert set(others) <= {reset}


def test_ids_and_their_retirements_are_told_until_the_peer_has_them(server: LonePlane) -> None:
    """Sections 19.15 and 19.16."""
    server.say(f.NewConnectionIdFrame(1, 1, b"another-", bytes(16)), f.RetireConnectionIdFrame(1), cid=b"the-plan")
    said = server.hear()
    told = [frame for frame in flat(said) if isinstance(frame, f.NewConnectionIdFrame | f.RetireConnectionIdFrame)]
    assert {type(frame) for frame in told} == {f.NewConnectionIdFrame, f.RetireConnectionIdFrame}
    again = [frame for frame in flat(server.pass_time(2 * S)) if type(frame) in {type(one) for one in told}]
    assert set(again) == set(told)
    ack(server, *[Said(HOME, 0, number, []) for number in range(server.plane.sender.number)])
    assert not [frame for frame in flat(server.pass_time(5 * S)) if type(frame) in {type(one) for one in told}]
    assert not server.plane.peer_ids._owed


# -- where nobody was seen ---------------------------------------------------------------------------------------------


def test_no_more_than_three_times_what_came_goes_to_an_address_until_it_has_answered(server: LonePlane) -> None:
    """Section 8.1."""
    bulk(server, 1 << 20)
    server.say(f.PingFrame(), b"\0" * 500, address=AWAY)
    came = 500 + 30
    said = server.hear() + server.pass_time(2 * S)
    sent = sum(one.size for one in said if one.address == AWAY)
    assert 1000 < sent <= 3 * came
    server.say(f.PingFrame(), b"\0" * 500, address=AWAY)
    more = sum(one.size for one in server.hear() + server.pass_time(10 * MS) if one.address == AWAY)
    assert 0 < more <= 3 * 2 * came - sent


def test_challenges_fill_1200_bytes_and_go_alone_to_the_path_that_they_are_about(server: LonePlane) -> None:
    """Section 8.2.1; on a move both paths are asked (9.3.3)."""
    server.say(f.PingFrame(), b"\0" * 1100, address=AWAY)
    asked = [one for one in server.hear() if "PathChallenge" in one.kinds]
    assert sorted(one.address for one in asked) == [HOME, AWAY]
    assert [one.size for one in asked] == [1200, 1200]
    assert all(set(one.kinds) <= {"PathChallenge", "Padding"} for one in asked)
    data = {frame.data for frame in flat(asked) if isinstance(frame, f.PathChallengeFrame)}
    assert len(data) == 2


def test_an_answer_from_the_path_in_use_says_that_we_are_there(server: LonePlane) -> None:
    """Section 9.3.3: an answer alone is a probe, and would not bring the peer back from where somebody else sends."""
    server.say(f.PathChallengeFrame(b"12345678"), b"\0" * 1100)
    (said,) = server.hear()
    assert "PathResponse" in said.kinds
    assert "Ping" in said.kinds
    assert said.size == 1200
    server.say(f.PathChallengeFrame(b"12345678"), b"\0" * 1100, address=AWAY)
    (said,) = [one for one in server.hear() if "PathResponse" in one.kinds]
    assert (said.address, "Ping" in said.kinds) == (AWAY, False)


def test_nothing_is_tried_that_is_larger_where_the_path_does_not_pass_1200_bytes() -> None:
    lone = LonePlane(most=4000)
    lone.settle()
    bulk(lone, 1 << 20)
    assert max(one.size for one in lone.hear()) > 1200
    other = LonePlane(most=4000)
    other.settle()
    other.say(f.PingFrame(), address=AWAY)
    bulk(other, 1 << 20)
    said = other.hear()
    assert max(one.size for one in said) <= 1200
    (asked,) = [one for one in said if one.address == AWAY and "PathChallenge" in one.kinds]
    assert asked.size < 1200
    challenge = next(frame.data for frame in asked.frames if isinstance(frame, f.PathChallengeFrame))
    other.say(f.PathResponseFrame(challenge), address=AWAY)
    said = other.hear()
    assert max(one.size for one in said) == 1200
    (asked,) = [one for one in said if "PathChallenge" in one.kinds and one.address == AWAY]
    challenge = next(frame.data for frame in asked.frames if isinstance(frame, f.PathChallengeFrame))
    other.say(f.PathResponseFrame(challenge), address=AWAY)
    other.now += 20 * MS
    assert max(one.size for one in other.hear()) > 1200


# -- the end -----------------------------------------------------------------------------------------------------------


def test_last_words_are_said_once_and_nothing_else_goes_with_them(server: LonePlane) -> None:
    """Section 10.2; who repeats them has them from `last`."""
    bulk(server, 100_000)
    server.plane.ping()
    server.plane.close(0x7101, "over")
    (said,) = server.hear()
    assert said.frames == [f.CloseFrame(0x7101, None, b"over")]
    assert server.plane.sender.last is not None
    packet, address = server.plane.sender.last
    assert (len(packet), address) == (said.size, HOME)
    assert server.hear() == []
    assert server.plane.next_timer() is None


def test_last_words_do_not_go_to_where_little_may_go(server: LonePlane) -> None:
    server.say(f.PingFrame(), address=AWAY)
    server.hear()
    server.plane.close(0x7101, "over")
    assert server.hear() == []
    assert server.plane.sender.last is None
