"""The connection after the handshake: planes with each other and with stock aioquic as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from quic_pairs import CLIENT, RESET_KEY, SERVER, PairNet, PlanePeer, StockPeer, transfer

from quicoll_transport.carrier import CLOSE_FORGOTTEN
from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic import frames as f
from quicoll_transport.quic.connection_ids import CONNECTION_ID_LIMIT_ERROR, reset_datagram
from quicoll_transport.quic.packets import seal
from quicoll_transport.quic.terms import SessionConfig
from quicoll_transport.security.credentials import Credentials

if TYPE_CHECKING:
    from quicoll_transport.quic.streams import ReceiveStream

MS = 1_000_000
S = 1000 * MS
BAD: dict[str, Any] = {"loss": 0.05, "jitter_ns": 3 * MS, "duplicate": 0.02, "flip": 0.01}
KINDS = [("plane", "plane"), ("plane", "stock"), ("stock", "plane")]
CredentialsOf = Callable[..., Credentials]
Join = Callable[..., PairNet]


@pytest.fixture
def join(credentials_of: CredentialsOf) -> Join:
    """join(client kind, server kind, config=, window=, **conditions of the path): two peers after their handshake."""
    a, b = credentials_of("a"), credentials_of("b")

    def join(
        client: str = "plane", server: str = "plane", *, config: SessionConfig | None = None, **conditions: Any
    ) -> PairNet:
        dialled = PlanePeer.client(a, config) if client == "plane" else StockPeer.client(a)
        make = PlanePeer.server if server == "plane" else None
        net = PairNet(
            dialled,
            lambda first: make(b, first, config) if make is not None else StockPeer.server(b, first),
            **conditions,
        )
        net.shake_hands()
        return net

    return join


def plane_of(peer: Any) -> Any:
    return peer.plane


# -- stock aioquic as the oracle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("path", [{}, {"loss": 0.01}, BAD], ids=["clean", "lossy", "bad"])
def test_every_byte_arrives_in_both_directions(join: Join, kinds: tuple[str, str], path: dict[str, Any]) -> None:
    net = join(*kinds, **path)
    transfer(net, [0, 1, 1000, 60_000, 150_000])


def test_on_a_bad_path_it_is_no_slower_than_stock_aioquic(join: Join) -> None:
    took = {kind: transfer(join(kind, kind, seed=3, **BAD), [300_000]) for kind in ("plane", "stock")}
    assert took["plane"] < took["stock"]


@pytest.mark.parametrize("path", [{}, BAD], ids=["clean", "bad"])
def test_what_arrives_in_runs_is_taken_as_one_by_one(join: Join, path: dict[str, Any]) -> None:
    seen = []
    for runs in (True, False):
        net = join(seed=5, runs=runs, **path)
        took = transfer(net, [100, 200_000, 200_000])
        planes = [plane_of(peer) for peer in net.sides]
        seen.append((took, net.sent, [plane.recovery.lost_packets for plane in planes]))
    assert seen[0] == seen[1]


def test_a_request_and_its_answer_are_two_datagrams(join: Join) -> None:
    net = join()
    net.run(S)
    sent = list(net.sent)
    for _ in range(10):
        transfer(net, [100], sides=(0,))
        transfer(net, [100], sides=(1,))
    assert [now - before for now, before in zip(net.sent, sent, strict=True)] == [10, 10]


def test_a_lost_end_of_a_message_is_noticed_after_a_few_milliseconds(join: Join) -> None:
    net = join(delay_ns=MS // 10)
    for _ in range(20):
        transfer(net, [100])
    lost: list[bytes] = []
    net.tap = lambda side, data: bool(side or lost) or lost.append(data) is not None  # the next of the client's
    assert transfer(net, [100], sides=(0,)) < 10 * MS
    assert len(lost) == 1


def test_the_same_seed_gives_the_same_traffic(join: Join) -> None:
    sent = []
    for _ in range(2):
        net = join(seed=6, **BAD)
        transfer(net, [100_000, 3000])
        sent.append((net.now, net.sent))
    assert sent[0] == sent[1]


def test_a_path_that_begins_to_lose_large_datagrams_is_noticed(
    credentials_of: CredentialsOf,
) -> None:
    a, b = credentials_of("a"), credentials_of("b")
    net = PairNet(PlanePeer.client(a, largest=8952), lambda first: PlanePeer.server(b, first))
    net.shake_hands()
    sender = plane_of(net.client).sender
    transfer(net, [1_000_000], sides=(0,))
    assert sender.mtu.size > 8000
    net.tap = lambda side, data: len(data) <= 1500
    for _ in range(20):
        net.client.send(bytes(8 * 8900 + 500))
        net.run(10 * MS)
    assert sender.mtu.size <= 1500
    transfer(net, [100_000], sides=(0,))


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_keys_change_as_often_as_they_have_to(join: Join, kinds: tuple[str, str]) -> None:
    net = join(*kinds, config=SessionConfig(key_packets=20), loss=0.02)
    transfer(net, [400_000, 400_000])
    for peer in net.sides:
        if isinstance(peer, PlanePeer):
            assert peer.plane.keys.updates >= 2


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_each_side_hears_why_the_other_has_closed(join: Join, kinds: tuple[str, str]) -> None:
    net = join(*kinds)
    net.run(S)
    for peer, other in ((net.client, net.server), (net.server, net.client)):
        if isinstance(peer, PlanePeer):
            peer.plane.close(0x7101, "you know why")
            net.run(10 * S)
            assert other.closed == (0x7101, "you know why")
            assert not peer.plane.ending.is_open
            assert peer.plane.next_timer() is None
            return


def test_who_has_closed_looks_at_nothing_that_comes(join: Join) -> None:
    net = join()
    client, server = pair(net)
    net.run(S)
    client.plane.close(0x7101, "gone")
    assert len(client.datagrams(net.now)) == 1
    heard = client.plane.heard_ns
    for _ in range(50):
        server.plane.ping()
        for run in server.datagrams(net.now):
            client.plane.receive(DatagramRun(run.memory, run.size, SERVER), net.now + S)
        assert client.datagrams(net.now) == []
    assert client.plane.heard_ns == heard


@pytest.mark.parametrize("kinds", [("plane", "stock"), ("stock", "plane")], ids="-".join)
def test_a_stream_is_given_up_by_either_side(join: Join, kinds: tuple[str, str]) -> None:
    net = join(*kinds)
    ours, stock = (net.client, net.server) if kinds[0] == "plane" else (net.server, net.client)
    assert isinstance(ours, PlanePeer)
    assert isinstance(stock, StockPeer)
    stream = ours.open(bytes(4 << 20))
    theirs = stock.send(bytes(4 << 20))
    net.run(30 * MS)
    ours.plane.outbound.reset(stream, 7)
    stock.quic.reset_stream(theirs, 8)
    net.run(200 * MS)
    assert stock.resets == {stream.id: 7}
    assert ours.resets == {theirs: 8}
    assert len(ours.plane.outbound) == len(ours.plane.inbound) == 0
    again = ours.open(bytes(4 << 20))
    net.until(lambda: again.id in stock.received)
    stock.quic.stop_stream(again.id, 9)
    net.run(200 * MS)
    assert stock.resets[again.id] == 9
    assert len(ours.plane.outbound) == 0


# -- order and back-pressure -------------------------------------------------------------------------------------------


def pair(net: PairNet) -> tuple[PlanePeer, PlanePeer]:
    assert isinstance(net.client, PlanePeer)
    assert isinstance(net.server, PlanePeer)
    return net.client, net.server


def test_messages_are_served_by_age_and_a_small_one_passes_large_ones(join: Join) -> None:
    net = join()
    client, server = pair(net)
    ended: list[int] = []
    keep = server.stream_arrived

    def arrived(stream: ReceiveStream) -> None:
        keep(stream)
        if stream.is_whole:
            ended.append(stream.id)
            if len(ended) == 2:
                progress.append(len(server.received.get(large[1].id, b"")))

    progress: list[int] = []
    server.stream_arrived = arrived
    large = [client.open(bytes(1 << 20)) for _ in range(2)]
    small = client.open(b"small")
    net.until(lambda: len(ended) == 3)
    assert ended == [small.id, large[0].id, large[1].id]
    assert progress[0] < 300_000, "the second had hardly begun when the first was through"


def test_small_ones_without_end_leave_room_for_bulk(join: Join) -> None:
    net = join(delay_ns=10 * MS)
    client, server = pair(net)
    large = client.open(bytes(1 << 20))
    for _ in range(400):
        for _ in range(40):
            client.open(bytes(1200))
        net.run(10 * MS)
        if server.ended.get(large.id):
            return
    pytest.fail("bulk starves")


def test_urgent_words_pass_bulk_that_nobody_takes(join: Join) -> None:
    net = join(config=SessionConfig(window_bytes=1 << 18))
    client, server = pair(net)
    server.reading = False
    bulk = [client.open(bytes(1 << 20)) for _ in range(3)]
    net.run(2 * S)
    assert server.plane.inbound.received <= 1 << 18
    word = client.plane.outbound.open(unidirectional=False, urgent=True)
    server.reading = True
    client.plane.outbound.write(word, b"take it")
    began = net.now
    net.until(lambda: server.received.get(word.id) == b"take it")
    assert net.now - began < 10 * MS
    for stream in [server.plane.inbound._streams[one.id] for one in bulk if one.id in server.plane.inbound._streams]:
        server.plane.inbound.again(stream)
    net.until(lambda: all(server.ended.get(one.id) for one in bulk))


def test_urgent_words_find_the_window_open_while_bulk_fills_it(join: Join) -> None:
    net = join(delay_ns=50 * MS)
    client, server = pair(net)
    client.open(bytes(8 << 20))
    word = client.plane.outbound.open(unidirectional=False, urgent=True)
    for number in range(1, 20):
        net.run(37 * MS)
        client.plane.outbound.write(word, b"x")
        net.run(50 * MS + MS)
        assert len(server.received.get(word.id, b"")) == number, "one delay, whatever else is under way"


def test_more_streams_than_the_peer_allows_wait_and_go_in_their_order(join: Join) -> None:
    net = join()
    client, server = pair(net)
    streams = [client.open(bytes([n % 256])) for n in range(1000)]
    assert sum(stream.id >= 0 for stream in streams) == 128
    withdrawn = streams.pop(500)
    client.plane.outbound.reset(withdrawn, 0)
    net.until(lambda: len(server.received) == 999)
    net.run(S)
    assert [stream.id for stream in streams] == list(range(2, 2 + 4 * 999, 4))
    assert len(client.plane.outbound) == 0


def test_windows_slide_with_what_was_taken(join: Join) -> None:
    net = join(config=SessionConfig(window_bytes=1 << 16), loss=0.02)
    client, server = pair(net)
    server.reading = False
    large = client.open(bytes(1 << 20))
    net.run(5 * S)
    assert server.plane.inbound.received <= 1 << 16
    server.reading = True
    server.plane.inbound.again(server.plane.inbound._streams[large.id])
    net.until(lambda: bool(server.ended.get(large.id)))
    assert len(server.received[large.id]) == 1 << 20


def test_a_reset_lets_go_of_the_callers_memory_though_packets_of_it_are_under_way(join: Join) -> None:
    net = join(delay_ns=50 * MS)
    client, _ = pair(net)
    memory = bytearray(1 << 20)
    stream = client.plane.outbound.open()
    client.plane.outbound.write(stream, memoryview(memory), fin=True)
    net.run(10 * MS)
    assert client.plane.recovery.in_flight > 0
    client.plane.outbound.reset(stream, 0)
    memory.append(1)
    net.run(S)
    assert len(client.plane.outbound) == 0


# -- where the peer is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("address", [(CLIENT[0], 99), ("10.0.0.77", 5)], ids=["port", "host"])
def test_a_client_that_moves_is_followed(join: Join, kinds: tuple[str, str], address: tuple[str, int]) -> None:
    net = join(*kinds)
    sizes = [500_000]
    sent = {side: net.sides[side].send(bytes(sizes[0])) for side in (0, 1)}
    net.run(10 * MS)
    net.addresses[0] = address
    net.until(lambda: all(net.sides[1 - side].ended.get(stream) for side, stream in sent.items()))
    if isinstance(net.server, PlanePeer):
        assert net.server.plane.paths.current.address == address
        assert net.server.plane.paths.current.validated


@pytest.mark.parametrize("together", [True, False])
def test_a_move_counts_from_the_packet_on_that_shows_it(join: Join, together: bool) -> None:
    """An id that comes behind it is for the next path, also where both come in one run."""
    net = join()
    client, server = pair(net)
    net.run(S)
    ids = server.plane.peer_ids
    first = ids.current
    for number in [number for number, (cid, _) in ids._known.items() if cid != first]:
        del ids._known[number]
    spare, sender = client.plane.peer_ids._known[1][0], client.plane.sender
    frame = f.NewConnectionIdFrame(9, 0, b"behind--", bytes(16)).encode()
    words = [b"\x01".ljust(len(frame), b"\0"), frame]
    packets = [bytes(seal(client.plane.keys.send, spare, sender.number + i, text)) for i, text in enumerate(words)]
    elsewhere, size = ("10.0.0.7", 7), len(packets[0])
    for data in [b"".join(packets)] if together else packets:
        server.receive(DatagramRun(memoryview(bytearray(data)), size, elsewhere), net.now)
    assert server.plane.paths.current.address == elsewhere
    assert ids.current == first, "at the time of the move there was no other"
    assert ids.of(99) == b"behind--"


def test_a_client_ignores_who_is_not_its_server(join: Join) -> None:
    net = join()
    client, server = pair(net)
    server.open(b"hello")
    (run,) = server.datagrams(net.now)
    heard = client.plane.heard_ns
    client.plane.receive(DatagramRun(run.memory, run.size, ("10.0.0.66", 6)), net.now + 5)
    assert client.plane.heard_ns == heard


def test_a_peer_that_knows_nothing_of_the_connection_ends_it(join: Join) -> None:
    net = join()
    client, _ = pair(net)
    net.run(S)
    reset = reset_datagram(RESET_KEY, client.plane.peer_ids.current, 100, net.random.randbytes) or b""
    client.receive(DatagramRun(memoryview(bytearray(reset)), len(reset), ("10.0.0.66", 6)), net.now)
    assert client.plane.cause is None
    client.receive(DatagramRun(memoryview(bytearray(reset)), len(reset), SERVER), net.now)
    assert client.plane.cause is not None
    assert client.plane.cause.by_peer
    assert client.plane.cause.code == CLOSE_FORGOTTEN
    assert client.datagrams(net.now) == []


# -- what the peer may not ---------------------------------------------------------------------------------------------


def tell(net: PairNet, payload: bytes, *, side: int = 0) -> PlanePeer:
    """Let one side say something of which it would not think itself; the other one."""
    peer = net.sides[side]
    assert isinstance(peer, PlanePeer)
    sender = peer.plane.sender
    packet = seal(peer.plane.keys.send, peer.plane.peer_ids.current, sender.number, payload.ljust(8, b"\0"))
    sender.number += 1
    other = net.sides[1 - side]
    assert isinstance(other, PlanePeer)
    other.receive(DatagramRun(memoryview(bytearray(packet)), len(packet), net.addresses[side]), net.now)
    return other


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"\x1e", f.PROTOCOL_VIOLATION),
        (f.NewTokenFrame(b"token").encode(), f.PROTOCOL_VIOLATION),
        (b"\x40\x01", f.PROTOCOL_VIOLATION),
        (b"\x2f", f.FRAME_ENCODING_ERROR),
        (f.AckFrame([(0, 1 << 40)], 0).encode(), f.PROTOCOL_VIOLATION),
        (f.StreamFrame(3, 0, b"x").encode(), f.STREAM_STATE_ERROR),
        (f.StreamFrame(1, 0, b"x").encode(), f.STREAM_STATE_ERROR),
        (f.StreamFrame(2 + 4 * 128, 0, b"x").encode(), f.STREAM_LIMIT_ERROR),
        (f.StreamFrame(2, (16 << 20), b"x").encode(), f.FLOW_CONTROL_ERROR),
        (f.StreamFrame(2, 10, b"x", True).encode() + f.StreamFrame(2, 11, b"x").encode(), f.FINAL_SIZE_ERROR),
        (f.StreamFrame(2, 10, b"x").encode() + f.ResetStreamFrame(2, 0, 5).encode(), f.FINAL_SIZE_ERROR),
        (f.ResetStreamFrame(2, 0, 1 << 40).encode(), f.FLOW_CONTROL_ERROR),
        (f.StopSendingFrame(2, 0).encode(), f.STREAM_STATE_ERROR),
        (f.MaxStreamDataFrame(3, 0).encode(), f.STREAM_STATE_ERROR),
        (f.StreamDataBlockedFrame(3, 0).encode(), f.STREAM_STATE_ERROR),
        (f.RetireConnectionIdFrame(99).encode(), f.PROTOCOL_VIOLATION),
        (b"".join(f.NewConnectionIdFrame(n, 0, bytes([n] * 8), bytes(16)).encode() for n in range(20, 30)),
         CONNECTION_ID_LIMIT_ERROR),
        (b"\x06\x00\x40\xff", f.FRAME_ENCODING_ERROR),
        (f.StampFrame(1).encode(), f.FRAME_ENCODING_ERROR),
        (f.FairRateFrame(1, False).encode(), f.FRAME_ENCODING_ERROR),
    ],
)  # fmt: skip
def test_what_breaks_the_rules_of_quic_closes_with_its_code(join: Join, payload: bytes, code: int) -> None:
    net = join()
    server = tell(net, payload)
    assert server.closed is not None
    assert server.closed[0] == code
    assert server.plane.violation == server.closed[1]
    net.run(5 * S)
    assert net.client.closed == server.closed, "and the peer hears it"


def test_holes_are_bounded(join: Join) -> None:
    net = join(config=SessionConfig(window_bytes=1 << 20))
    for at in range(0, 200_000, 200):
        pieces = b"".join(f.StreamFrame(2 + 4 * (at // 40_000), at + n, b"x").encode() for n in range(0, 200, 2))
        server = tell(net, pieces)
        if server.closed is not None:
            break
    else:
        pytest.fail("every hole was kept")
    assert server.closed == (1, "what arrives has too many holes")
    assert server.plane.inbound.holes <= (1 << 12) + 65


def test_what_a_peer_makes_us_say_is_said_once(join: Join) -> None:
    net = join()
    client, server = pair(net)
    net.run(S)
    for number in range(3000):
        tell(net, f.PathChallengeFrame(number.to_bytes(8, "big")).encode() + b"\x01")
    assert len(server.plane.control) <= 4
    out = server.datagrams(net.now)
    assert sum(len(run) for run in out) <= 3
    assert client.plane.ending.is_open


def test_forged_packets_are_counted_up_to_a_limit(join: Join) -> None:
    net = join(config=SessionConfig(forged_packets=100))
    client, server = pair(net)
    client.open(bytes(100_000))
    net.tap = lambda side, data: False
    runs = client.datagrams(net.now)
    spoiled = 0
    while server.plane.cause is None:
        for run in runs:
            memory = bytearray(run.memory)
            for at in range(run.size - 1, len(memory), run.size):
                memory[at] ^= 1 + spoiled % 255
                spoiled += 1
            server.receive(DatagramRun(memoryview(memory), run.size, CLIENT), net.now)
    assert 100 <= spoiled <= 120
    assert server.closed == (0x0F, "too many forged packets")


def test_an_idle_connection_ends_and_one_that_is_pinged_does_not(join: Join) -> None:
    net = join(config=SessionConfig(idle_ns=S))
    client, server = pair(net)
    for _ in range(10):
        client.plane.ping()
        net.run(S // 2)
    assert client.plane.ending.is_open
    net.run(2 * S)
    assert client.closed == server.closed == (0, "idle timeout")


def test_nothing_is_left_when_all_is_said(join: Join) -> None:
    net = join(seed=9, **BAD)
    transfer(net, [1000, 100_000])
    net.run(20 * S)
    for peer in pair(net):
        assert peer.plane.recovery.is_idle
        assert len(peer.plane.outbound) == len(peer.plane.inbound) == len(peer.plane.control) == 0
