"""What becomes of a packet: opened, new, its frames, noted, its path; and a run of them is no different."""

from __future__ import annotations

from typing import Any

import pytest
from lone_plane import AWAY, HOME, MS, OURS, LonePlane, flat

from quicoll_transport.carrier import CLOSE_FORGOTTEN
from quicoll_transport.quic import frames as f
from quicoll_transport.quic.arrival_line import ArrivalLine, FairRate
from quicoll_transport.quic.connection_ids import reset_token
from quicoll_transport.quic.frames import FRAME_ENCODING_ERROR, PROTOCOL_VIOLATION
from quicoll_transport.quic.parameters import TAKES_FAIR_RATES, TAKES_STAMPS

S = 1000 * MS
UNI = 2  # of a client
TOKEN = b"the token of id0"


@pytest.fixture
def server() -> LonePlane:
    lone = LonePlane()
    lone.settle()
    return lone


@pytest.fixture
def client() -> LonePlane:
    lone = LonePlane(is_client=True)
    lone.settle()
    return lone


def stream(offset: int, size: int = 50, *, stream_id: int = UNI, fin: bool = False) -> bytes:
    """A STREAM frame as runs have them: to the end of the packet."""
    return f.stream_head(stream_id, offset, None, fin=fin) + bytes([offset % 251]) * size


def run_of(lone: LonePlane, count: int, *, begin: int = 1 << 14) -> list[bytes]:
    """Packets of one size, each a piece of a stream of the peer's, behind the other."""
    number = 3 if lone.plane.inbound._is_client else UNI
    packets = [lone.packet(stream(begin + i * 50, stream_id=number)) for i in range(count)]
    assert len(set(map(len, packets))) == 1
    return packets


def acknowledged(lone: LonePlane) -> list[tuple[int, int]]:
    """What the plane says has arrived."""
    lone.now += 10 * MS
    frames = lone.heard(f.AckFrame)
    return list(frames[-1].ranges) if frames else []


# -- opened, and new ---------------------------------------------------------------------------------------------------


def test_what_is_forged_changes_nothing_but_a_count(server: LonePlane) -> None:
    """RFC 9001 section 6.6; it is not heard, not acknowledged and moves no path."""
    heard = server.plane.heard_ns
    good = bytearray(server.packet(stream(0)))
    good[-1] ^= 1
    server.now += S
    server.give(bytes(good), AWAY)
    assert server.plane.keys.forged == 1
    assert server.plane.heard_ns == heard
    assert server.received == {}
    assert server.plane.paths.current.address == HOME
    assert len(list(server.plane.paths)) == 1
    server.give(b"\x40someone-" + bytes(50))
    assert server.plane.keys.forged == 1, "that is for nobody here"
    assert acknowledged(server) == []


def test_a_duplicate_is_not_even_heard(server: LonePlane) -> None:
    """RFC 9000 section 12.3; nor does it move the path: somebody may have copied it."""
    packet = server.packet(f.PingFrame(), stream(0))
    server.give(packet)
    heard, told = server.plane.heard_ns, acknowledged(server)
    server.now += S
    server.give(packet, AWAY)
    assert server.plane.heard_ns == heard
    assert server.plane.paths.current.address == HOME
    assert acknowledged(server) == []
    assert told


def test_duplicates_in_a_run_are_taken_once(server: LonePlane) -> None:
    packets = run_of(server, 6, begin=1 << 14)
    acknowledgements = server.plane.sender._acknowledgements
    counted = acknowledgements._heard
    server.give(b"".join([*packets[:3], packets[1], *packets[3:], packets[0]]), size=len(packets[0]))
    assert acknowledgements._heard == counted + sum(map(len, packets))
    assert server.plane.inbound.received == (1 << 14) + 6 * 50
    assert server.plane.heard_ns == server.now
    (only,) = acknowledged(server)
    assert only[1] - only[0] >= 6
    before = server.plane.heard_ns
    server.now += S
    server.give(b"".join(packets), size=len(packets[0]))
    assert server.plane.heard_ns == before


# -- its frames --------------------------------------------------------------------------------------------------------


def test_what_stood_before_the_first_wrong_frame_has_happened_and_the_packet_is_not_acknowledged(
    server: LonePlane,
) -> None:
    """Section 13.1: what was not taken must not be."""
    server.say(f.StreamFrame(UNI, 0, b"before", False), b"\x21", f.StreamFrame(UNI, 6, b"behind", False))
    assert server.received == {UNI: bytearray(b"before")}
    assert server.code == FRAME_ENCODING_ERROR
    largest = server.plane.sender._acknowledgements.largest
    assert largest < server._number - 1
    (said,) = server.hear()
    assert said.kinds == ["Close"]


@pytest.mark.parametrize("count", [1, 3], ids=["one by one", "as a run"])
def test_nothing_is_looked_at_behind_an_end(server: LonePlane, count: int) -> None:
    packets = run_of(server, count)
    size = len(packets[0])
    packets.append(server.packet(f.CloseFrame(7, 0, b"").encode().ljust(len(stream(1 << 14)), b"\0")))
    packets += run_of(server, count, begin=(1 << 14) + 50 * count)
    assert {len(packet) for packet in packets} == {size}
    server.give(b"".join(packets), size=size)
    assert server.code == 7
    assert server.plane.inbound.received == (1 << 14) + 50 * count
    server.say(stream(1 << 15))
    assert server.plane.inbound.received == (1 << 14) + 50 * count
    assert server.hear() == []


@pytest.mark.parametrize("frame", [f.HandshakeDoneFrame(), f.NewTokenFrame(b"t")], ids=["done", "token"])
def test_what_only_a_server_may_say_ends_the_connection_of_a_client_that_says_it(
    server: LonePlane, client: LonePlane, frame: Any
) -> None:
    """Sections 19.7 and 19.20."""
    server.say(frame)
    assert server.code == PROTOCOL_VIOLATION
    client.say(frame)
    assert client.code is None


def test_a_client_is_confirmed_when_the_server_says_so_and_a_server_from_the_beginning(client: LonePlane) -> None:
    """RFC 9001 section 4.1.2."""
    assert LonePlane().plane.confirmed
    assert not client.plane.confirmed
    client.say(f.PingFrame())
    assert not client.plane.confirmed
    client.say(f.HandshakeDoneFrame())
    assert client.plane.confirmed


@pytest.mark.parametrize("count", [1, 16])
def test_how_long_packets_lay_in_this_host_is_told_with_their_acknowledgement(server: LonePlane, count: int) -> None:
    packets = run_of(server, count)
    server.give(b"".join(packets), size=len(packets[0]), waited_ns=16 * MS)
    server.now += 8 * MS
    assert server.heard(f.AckFrame)[-1].delay << 3 == 24_000


def test_an_acknowledgement_or_padding_alone_asks_for_none(server: LonePlane) -> None:
    """RFC 9000 section 13.2: only what asks for one is answered, however long one waits."""
    server.plane.ping()
    (said,) = server.hear()
    server.say(f.AckFrame([(0, said.number + 1)], 0))
    server.say(b"\0\0\0\0")
    assert server.pass_time(S) == []
    server.say(f.PingFrame())
    assert [one.kinds for one in server.pass_time(S)] == [["Ack"]]


def test_an_id_is_not_retired_by_a_packet_that_is_for_it(server: LonePlane) -> None:
    """Section 19.16."""
    other = next(cid for cid in server.plane.own_ids._active if cid != OURS[:8])
    server.say(f.RetireConnectionIdFrame(0), cid=other)
    assert server.code is None
    server.say(f.RetireConnectionIdFrame(1), cid=other)
    assert server.code == PROTOCOL_VIOLATION


# -- its path ----------------------------------------------------------------------------------------------------------


def test_the_newest_packet_that_is_no_probe_says_where_the_peer_is(server: LonePlane) -> None:
    """Sections 9.1 and 9.3."""
    late = server.packet(stream(0))
    server.say(f.PathChallengeFrame(b"12345678"), f.NewConnectionIdFrame(1, 0, b"another-", bytes(16)), address=AWAY)
    assert server.plane.paths.current.address == HOME, "that was a probe"
    server.give(late, AWAY)
    assert server.plane.paths.current.address == HOME, "that was older"
    server.say(f.PingFrame(), address=AWAY)
    assert server.plane.paths.current.address == AWAY
    server.say(stream(50), address=HOME)
    assert server.plane.paths.current.address == HOME


def test_a_probe_is_answered_to_where_it_came_from(server: LonePlane) -> None:
    """Section 8.2.2."""
    server.say(f.PathChallengeFrame(b"12345678"), b"\0" * 1100, address=AWAY)
    answers = [said for said in server.hear() if "PathResponse" in said.kinds]
    assert [said.address for said in answers] == [AWAY]
    assert [one.data for one in flat(answers) if isinstance(one, f.PathResponseFrame)] == [b"12345678"]


def test_a_client_takes_nothing_that_does_not_come_from_its_server(client: LonePlane) -> None:
    """Section 9: nor a reset."""
    heard = client.plane.heard_ns
    client.now += S
    client.say(f.StreamFrame(3, 0, b"text", False), address=AWAY)
    packets = [client.packet(stream(50 * i, stream_id=3)) for i in range(6)]
    client.give(b"".join(packets[2:]), AWAY, size=len(packets[2]))
    client.give(b"\x40" + bytes(30) + TOKEN, AWAY)
    assert (client.plane.heard_ns, client.received, client.code) == (heard, {}, None)


# -- resets ------------------------------------------------------------------------------------------------------------


def test_a_reset_is_found_alone_and_in_a_run(client: LonePlane) -> None:
    """Section 10.3.1: what cannot be opened may be one, whomever it seems to be for."""
    client.give(b"\x40" + bytes(30) + TOKEN[:-1] + b"?")
    assert client.code is None
    client.give(b"\x40" + bytes(30) + TOKEN)
    assert client.code == CLOSE_FORGOTTEN
    assert client.hear() == []
    other = LonePlane(is_client=True)
    packets = run_of(other, 6)
    packets[2] = packets[2][:-16] + TOKEN  # all but its tag is as it has to be
    other.give(b"".join(packets), size=len(packets[0]))
    assert other.code == CLOSE_FORGOTTEN


def test_what_can_be_opened_is_no_reset_whatever_its_end(server: LonePlane) -> None:
    assert reset_token(bytes(32), OURS[:8]) != TOKEN
    server.say(f.StreamFrame(UNI, 0, TOKEN, False))
    assert server.code is None


# -- runs --------------------------------------------------------------------------------------------------------------


def mixed(lone: LonePlane) -> list[bytes]:
    """Packets of one size: a stream's pieces with a gap, another stream's, other frames, a beginning, an end."""
    texts = [stream((1 << 14) + 50 * i) for i in range(5)]
    texts += [stream((1 << 14) + 300 + 50 * i) for i in range(3)]
    texts += [stream((1 << 14) + 50 * i, stream_id=UNI + 4) for i in range(4)]
    texts += [b"\1", f.MaxDataFrame(1 << 30).encode()]
    texts += [stream((1 << 14) + 250, fin=False), stream((1 << 14) + 200, stream_id=UNI + 4, fin=True)]
    size = max(map(len, texts))
    return [lone.packet(text.ljust(size, b"\0") if len(text) < 20 else text) for text in texts]


def state(lone: LonePlane) -> tuple[object, ...]:
    plane = lone.plane
    streams = {
        number: (one.upto, one.highest, one.final, one.holes, bytes(one._held))
        for number, one in sorted(plane.inbound._streams.items())
    }
    return (
        streams,
        plane.inbound.received,
        plane.inbound.holes,
        plane.heard_ns,
        plane.sender._acknowledgements.largest,
        list(plane.sender._acknowledgements._known),
        plane.sender._acknowledgements.due_ns,
        lone.received,
    )


@pytest.mark.parametrize("order", ["sent", "swapped", "with a forgery", "doubled"])
def test_a_run_decides_as_its_packets_one_by_one(order: str) -> None:
    planes = LonePlane(), LonePlane()
    for lone in planes:
        lone.settle()
        packets = mixed(lone)
        size = max(map(len, packets))
        packets = [packet for packet in packets if len(packet) == size]
        assert len(packets) >= 12
        if order == "swapped":
            packets[2], packets[9] = packets[9], packets[2]
        elif order == "with a forgery":
            packets[3] = packets[3][:-1] + bytes([packets[3][-1] ^ 1])
        elif order == "doubled":
            packets = packets[:6] + packets[4:]
        if lone is planes[0]:
            lone.give(b"".join(packets), size=size)
        else:
            for packet in packets:
                lone.give(packet)
    assert state(planes[0]) == state(planes[1])
    assert [one.frames for one in planes[0].hear()] == [one.frames for one in planes[1].hear()]
    assert planes[0].plane.keys.forged == planes[1].plane.keys.forged == (order == "with a forgery")


def test_a_shorter_last_datagram_of_a_run_is_taken_too(server: LonePlane) -> None:
    packets = run_of(server, 5)
    last = server.packet(stream((1 << 14) + 250, 10))
    server.give(b"".join([*packets, last]), size=len(packets[0]))
    assert server.plane.inbound.received == (1 << 14) + 260


def test_a_run_from_elsewhere_moves_the_peer_and_is_counted_there(server: LonePlane) -> None:
    packets = run_of(server, 6)
    server.give(b"".join(packets), AWAY, size=len(packets[0]))
    path = server.plane.paths.current
    assert path.address == AWAY
    assert path.received == sum(map(len, packets))
    assert not path.validated


# -- stamps ----------------------------------------------------------------------------------------------------------


def test_who_takes_stamps_is_told_when_each_acknowledgement_was_sent() -> None:
    lone = LonePlane(ours=TAKES_STAMPS)
    lone.settle()
    began = lone.now
    for wait in (3, 40):
        lone.pass_time(wait * MS)
        lone.say(f.PingFrame(), f.PingFrame())
        frames = flat(lone.pass_time(10 * MS))
        stamps = [at for at, frame in enumerate(frames) if isinstance(frame, f.StampFrame)]
        assert stamps, "one with the acknowledgement"
        for at in stamps:
            assert isinstance(frames[at + 1], f.AckFrame), "it stands before it"
            assert began < 10**18 + frames[at].sent_us * 1000 <= lone.now


def test_who_takes_none_is_sent_none_and_may_send_none(server: LonePlane) -> None:
    server.say(f.PingFrame())
    assert not [frame for frame in flat(server.pass_time(10 * MS)) if isinstance(frame, f.StampFrame)]
    server.say(f.StampFrame(1))
    assert server.code == FRAME_ENCODING_ERROR


def test_a_stamp_is_of_its_own_packet_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packet without one is taken as it came: its acknowledgement may have been sent at any time."""
    lone = LonePlane(ours=TAKES_STAMPS)
    lone.settle()
    told: list[int | None] = []
    sender = lone.plane.sender
    monkeypatch.setattr(sender, "on_ack", lambda frame, now_ns, arrived_ns, stamp_ns, fair_rate: told.append(stamp_ns))
    largest = sender.number
    lone.say(f.StampFrame(7), f.AckFrame([(0, largest)], 0))
    lone.say(f.AckFrame([(0, largest)], 0))
    assert told == [7000, None]


# -- fair rates ------------------------------------------------------------------------------------------------------


class TwoHosts:
    """A plane whose peer asks for fair rates, and another host that brings as much to the same receiver."""

    def __init__(self, ours: int = TAKES_FAIR_RATES) -> None:
        arrivals = ArrivalLine()
        self.lone, self.other = LonePlane(ours=ours, arrivals=arrivals), arrivals.join()
        self.lone.settle()
        self.lone.plane.recovery.rtt.on_sample(50 * MS, 0)
        self.fair_rates: list[f.FairRateFrame] = []

    def bring(self, packets: int, nbytes: int) -> None:
        """Each of them brings so many packets, a millisecond apart."""
        for _ in range(packets):
            self.other.on_arrived(nbytes, 50 * MS, self.lone.now)
            self.lone.say(f.StreamFrame(2, 0, bytes(nbytes)))
            frames = flat(self.lone.pass_time(MS))
            for at, frame in enumerate(frames):
                if isinstance(frame, f.FairRateFrame):
                    assert any(isinstance(later, f.AckFrame) for later in frames[at + 1 :]), "it stands before one"
                    self.fair_rates.append(frame)


def test_who_takes_fair_rates_is_told_his_part_of_the_receivers_line() -> None:
    hosts = TwoHosts()
    hosts.bring(300, 1000)
    assert hosts.fair_rates
    assert hosts.fair_rates[-1].is_full
    assert 900_000 < hosts.fair_rates[-1].rate < 1_200_000, "half of what both bring, with their packets' heads"


def test_who_takes_no_fair_rates_is_sent_none_and_may_send_none() -> None:
    hosts = TwoHosts(ours=TAKES_STAMPS)
    hosts.bring(300, 1000)
    assert not hosts.fair_rates
    hosts.lone.say(f.FairRateFrame(1, is_full=False))
    assert hosts.lone.code == FRAME_ENCODING_ERROR


def test_a_fair_rate_is_of_its_own_packet_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packet without one says nothing of the line at the time at which it was sent."""
    lone = LonePlane(ours=TAKES_FAIR_RATES)
    lone.settle()
    told: list[FairRate | None] = []
    sender = lone.plane.sender
    monkeypatch.setattr(sender, "on_ack", lambda frame, now_ns, arrived_ns, stamp_ns, fair_rate: told.append(fair_rate))
    largest = sender.number
    lone.say(f.FairRateFrame(7000, is_full=True), f.AckFrame([(0, largest)], 0))
    lone.say(f.AckFrame([(0, largest)], 0))
    assert told == [FairRate(7000, is_full=True), None]
