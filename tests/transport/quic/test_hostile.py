"""What a peer, or somebody without keys, can make a plane keep and do; the table is in docs/internals/security.md.

And slices of the fuzzer of planes: QUICOLL_TEST_PLANE_INPUTS=1000000 throws so many inputs.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from typing import Any

import pytest
from quicoll_fuzz.plane import HOME, PlaneFuzz, run_plane_episode
from quicoll_fuzz.world import Finding

from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic import frames as f
from quicoll_transport.quic import receiving
from quicoll_transport.quic.connection_ids import CONNECTION_ID_LIMIT_ERROR
from quicoll_transport.quic.keys import KEY_UPDATE_ERROR, Keys
from quicoll_transport.quic.packets import seal

INPUTS = int(os.environ.get("QUICOLL_TEST_PLANE_INPUTS", "2000"))
MS = 1_000_000


class Hostile(PlaneFuzz):
    """A server's plane, and its client, who says what a test wants."""

    forged_packets = (1 << 52,)

    def __init__(self, *, is_client: bool = False) -> None:
        super().__init__(random.Random(1), {"inputs": 0, "packets": 0}, is_client=is_client)

    def packet(self, payload: bytes) -> bytes:
        self.number += 1
        return seal(self.keys, b"victim00", self.number - 1, payload.ljust(4, b"\0"))

    def say(self, payload: bytes, address: Any = HOME) -> None:
        self.give(self.packet(payload), address)

    def give(self, data: bytes, address: Any = HOME, size: int = 0) -> None:
        self.plane.receive(DatagramRun(memoryview(bytearray(data)), size or len(data), address), self.now)

    def answers(self) -> list[DatagramRun]:
        return self.plane.datagrams(self.now)

    @property
    def code(self) -> int | None:
        return None if self.plane.cause is None else self.plane.cause.code


def test_ids_that_come_and_go_are_bounded() -> None:
    hostile = Hostile()
    plane = hostile.plane
    for number in range(1, 1000):
        hostile.say(f.NewConnectionIdFrame(number, number, number.to_bytes(8, "big"), bytes(16)).encode())
        assert len(plane.peer_ids._known) <= 8
        if hostile.code is not None:
            break
    assert hostile.code == CONNECTION_ID_LIMIT_ERROR
    assert number <= 70
    assert len(plane.peer_ids._owed) <= 65


def test_ids_that_are_retired_are_replaced_and_no_more() -> None:
    hostile = Hostile()
    plane = hostile.plane
    for number in range(1, 3000):
        hostile.say(f.RetireConnectionIdFrame(number).encode())
        assert len(plane.own_ids) == 4
    assert hostile.code is None
    assert len(hostile.answers()) <= 2
    assert len(plane.control) == 0


def test_leave_to_send_costs_nothing() -> None:
    hostile = Hostile()
    for number in range(2000):
        most = (1 << 60) - 2000 + number
        hostile.say(
            f.MaxDataFrame(most).encode()
            + f.MaxStreamsFrame(most, True).encode()
            + f.MaxStreamsFrame(most, False).encode()
            + f.DataBlockedFrame(number).encode()
            + f.StreamsBlockedFrame(number, True).encode()
        )
    assert hostile.code is None
    assert len(hostile.plane.outbound) == len(hostile.plane.inbound) == len(hostile.plane.control) - 1 == 0
    assert sum(len(run) for run in hostile.answers()) <= 2


def test_streams_given_up_before_they_begin_leave_ranges_bounded_by_what_may_be_open() -> None:
    hostile = Hostile()
    for index in range(1, 10_000, 2):
        hostile.say(f.ResetStreamFrame(index << 2 | 2, 0, 0).encode())
        if hostile.code is not None:
            break
        assert len(hostile.plane.inbound._kinds[1]._over) <= 17
    assert hostile.code == f.STREAM_LIMIT_ERROR
    assert len(hostile.plane.inbound) == 0
    other = Hostile()
    other.say(f.StopSendingFrame(3, 0).encode())
    assert other.code == f.STREAM_STATE_ERROR


def test_tiny_ranges_of_acknowledgements_are_bounded_by_what_is_in_flight() -> None:
    hostile = Hostile(is_client=True)
    plane = hostile.plane
    hostile.say(f.MaxStreamsFrame(10_000, True).encode() + f.MaxDataFrame(1 << 30).encode())
    for _ in range(300):
        plane.outbound.write(plane.outbound.open(), b"x", fin=True)
        plane.ping()
        hostile.answers()
    sent = plane.sender.number
    assert sent > 20
    ranges = [(number, number + 1) for number in range(sent - 2, 0, -2)]
    for _ in range(500):
        hostile.say(f.AckFrame(ranges[:300], 0).encode())
        hostile.answers()
        assert len(plane.recovery._runs) <= sent
        assert plane.recovery._late_packets <= sent
    assert hostile.code is None
    assert plane.recovery.in_flight <= max(plane.recovery.controller.window, 1 << 14)


def test_an_optimistic_acknowledgement_opens_the_window_by_no_more_than_was_sent() -> None:
    """It cannot be told from a real one; what is sent stays within what the peer allows itself (flow control)."""
    hostile = Hostile(is_client=True)
    plane = hostile.plane
    stream = plane.outbound.open()
    plane.outbound.write(stream, memoryview(bytes(10 << 20)), fin=True)
    begin = plane.recovery.controller.window
    for _ in range(200):
        hostile.answers()
        hostile.now += MS
        if plane.sender.number:
            hostile.say(f.AckFrame([(0, plane.sender.number)], 0).encode())
    assert plane.outbound.fresh_bytes <= 1 << 16
    assert plane.recovery.controller.window <= begin + 2 * (1 << 16)
    hostile.say(f.AckFrame([(0, plane.sender.number + 1)], 0).encode())
    assert hostile.code == f.PROTOCOL_VIOLATION


@pytest.mark.parametrize("second", [(5, True), (12, True), (10, False)])
def test_an_end_that_moves_is_refused(second: tuple[int, bool]) -> None:
    hostile = Hostile()
    hostile.say(f.StreamFrame(2, 5, b"x" * 5, True).encode())
    at, fin = second
    hostile.say(f.StreamFrame(2, at, b"x" if at > 5 else b"", fin).encode())
    assert hostile.code == f.FINAL_SIZE_ERROR


@pytest.mark.parametrize(
    "payload",
    [
        f.CryptoFrame(1 << 20, bytes(1000)).encode(),
        b"\x01" * 1000,
        f.PathResponseFrame(bytes(8)).encode() * 100,
        f.PathChallengeFrame(bytes(8)).encode() * 100,
        f.StreamFrame(2, 0, b"").encode() * 200,
        bytes(1300),
    ],
    ids=["crypto", "ping", "response", "challenge", "empty stream", "padding"],
)
def test_floods_of_what_means_nothing_leave_nothing(payload: bytes) -> None:
    hostile = Hostile()
    packets = [hostile.packet(payload) for _ in range(250)]
    for data in packets[:100]:
        hostile.give(data)
    hostile.answers()
    answered = 0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for data in packets[100:]:
            hostile.give(data)
            answered += sum(len(run) for run in hostile.answers())
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert hostile.code is None
    assert grown < 64 * 1024
    assert answered <= 2 * 150


def test_packets_under_keys_of_nobody_cost_no_derivation_and_two_updates_without_an_answer_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostile = Hostile()
    hostile.say(b"\x01")
    hostile.answers()
    derived: list[int] = []
    following = Keys.following

    def counted(self: Keys) -> Keys:
        derived.append(1)
        return following(self)

    monkeypatch.setattr(Keys, "following", counted)
    for number in range(1, 501):
        hostile.give(b"\x40victim00" + number.to_bytes(4, "big") * 12)
    assert derived == []
    assert hostile.plane.keys.forged > 400
    monkeypatch.undo()
    for _ in range(3):
        hostile.keys = hostile.keys.following()
        hostile.say(b"\x01")
    assert hostile.code == KEY_UPDATE_ERROR


def test_packets_sent_on_from_invented_addresses_draw_three_times_their_bytes_at_most() -> None:
    hostile = Hostile()
    plane = hostile.plane
    stream = plane.outbound.open()
    plane.outbound.write(stream, memoryview(bytes(1 << 20)), fin=True)
    got: dict[Any, int] = {}
    sent: dict[Any, int] = {}
    for number in range(400):
        address = (f"10.9.{number % 100}.1", 9)
        data = hostile.packet(b"\x01".ljust(50, b"\0"))
        got[address] = got.get(address, 0) + len(data)
        hostile.give(data, address)
        hostile.now += MS
        for run in hostile.answers():
            sent[run.address] = sent.get(run.address, 0) + len(run.memory)
        assert sum(1 for _ in plane.paths) <= 4
        at = plane.next_timer()
        assert at is not None
        if at <= hostile.now:
            plane.handle_timer(hostile.now)
            hostile.answers()
            later = plane.next_timer()
            assert later is None or later > hostile.now or plane.datagrams(hostile.now)
    for address, size in sent.items():
        assert address == HOME or size <= 3 * got[address]


def test_an_acknowledgement_that_may_not_be_sent_is_no_timer_in_the_past() -> None:
    """It was due at once, again and again, to an address from which too little had come."""
    hostile = Hostile()
    plane = hostile.plane
    plane.outbound.write(plane.outbound.open(), memoryview(bytes(1 << 20)), fin=True)
    hostile.say(b"\x01", ("10.9.9.9", 1))
    hostile.answers()
    plane.paths.current.sent = 3 * plane.paths.current.received
    hostile.say(b"", ("10.9.9.9", 1))
    plane.paths.current.sent = 3 * plane.paths.current.received - 30
    plane.sender._acknowledgements.due_ns = hostile.now
    due = plane.next_timer()
    assert due is not None
    assert due > hostile.now


def test_a_connection_that_is_closed_where_nothing_may_be_said_ends_too() -> None:
    hostile = Hostile()
    plane = hostile.plane
    hostile.say(b"\x01", ("10.9.9.9", 1))
    hostile.answers()
    assert plane.paths.current.room < 1200
    plane.close(1, "enough")
    assert hostile.answers() == []
    assert plane.next_timer() is None
    assert not plane.ending.has_words


def test_forged_resets_end_nothing() -> None:
    hostile = Hostile(is_client=True)
    hostile.say(b"\x01")
    rng = random.Random(2)
    for _ in range(500):
        hostile.give(b"\x40" + rng.randbytes(60))
        hostile.give(b"\x40victim00" + rng.randbytes(60))
    assert hostile.code is None
    hostile.give(b"\x40" + rng.randbytes(40) + bytes(16))  # the token of the handshake
    assert hostile.plane.cause is not None
    assert hostile.plane.cause.by_peer


def test_thousands_of_streams_that_are_blocked_are_looked_at_in_turn() -> None:
    """By recursion, as it was, a peer that allows streams and no bytes on them was a RecursionError."""
    hostile = Hostile(is_client=True)
    plane = hostile.plane
    hostile.say(f.MaxStreamsFrame(5000, True).encode())
    for _ in range(3000):
        plane.outbound.write(plane.outbound.open(), memoryview(bytes(20_000)), fin=True)
    for _ in range(300):
        hostile.answers()
        hostile.now += MS
        if plane.sender.number:
            hostile.say(f.AckFrame([(0, plane.sender.number)], 0).encode())
    assert plane.outbound.fresh_bytes > 50_000
    assert hostile.code is None


@pytest.mark.parametrize("every", [2, 3, 5])
def test_the_work_for_a_run_is_linear_whatever_is_forged_in_it(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at a run costs all the packets in it, and a forged first byte may show that one alone is taken."""
    looked: list[int] = []
    real = receiving.open_run

    def counted(phases: Any, slabs: Any, memory: memoryview, size: int, *rest: Any) -> Any:
        looked.append(len(memory) // size)
        return real(phases, slabs, memory, size, *rest)

    monkeypatch.setattr(receiving, "open_run", counted)
    hostile = Hostile()
    packets = []
    for number in range(2000):
        data = hostile.packet(b"\x01".ljust(31, b"\0"))
        packets.append(data if number % every else bytes([data[0] ^ 0x03]) + data[1:])
    hostile.give(b"".join(packets), size=len(packets[0]))
    assert sum(looked) <= 8 * len(packets)
    assert len(looked) <= len(packets) // 4
    assert hostile.plane.sender._acknowledgements.largest >= 1990


def test_hostile_frames_are_taken_or_refused_whatever_they_are() -> None:
    tally: dict[str, int] = {"inputs": 0}
    size = min(INPUTS, 2000)
    for episode in range(INPUTS // size):
        run_plane_episode(1, episode, size, tally)
    assert tally["inputs"] >= INPUTS
    assert tally["violations"] > 0
    assert tally["most control frames"] > 0


def test_the_fuzzer_repeats_itself_and_notices_an_exception_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    tallies: list[dict[str, int]] = [{"inputs": 0}, {"inputs": 0}]
    for tally in tallies:
        run_plane_episode(3, 1, 200, tally)
    assert tallies[0] == tallies[1]
    monkeypatch.setattr(
        "quicoll_transport.quic.outbound.OutboundStreams.on_stop_sending", lambda self, frame: {}[frame.stream_id]
    )
    with pytest.raises(Finding, match=r"KeyError[^$]*quicoll_fuzz\.plane --seed 3 --episode 1"):
        run_plane_episode(3, 1, 2000, {"inputs": 0})
