"""The QUIC adapter without sockets; the first part are canaries that sing when aioquic changes under us."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from aioquic.quic.packet import QuicProtocolVersion, encode_quic_version_negotiation
from cryptography.hazmat.primitives.hashes import SHA256
from datagrams import one

from quicoll_transport.carrier import CLOSE_NORMAL, CLOSE_REFUSED, Authenticated, Closed, ControlData
from quicoll_transport.errors import ConfigurationError, ProtocolError
from quicoll_transport.link.core import Inflow, LinkConfig, LinkCore, LinkId, Posted
from quicoll_transport.link.detector import DetectorConfig
from quicoll_transport.link.frames import HEADER_SIZE, TAG_SIZE, Header, checksum
from quicoll_transport.net.runs import apart
from quicoll_transport.quic import (
    Gate,
    Session,
    SessionConfig,
    check_foundation,
    destination_cid,
    error_name,
    handshake_in_memory,
    is_unauthenticated_initial,
)
from quicoll_transport.quic import handshake as handshakes
from quicoll_transport.quic.access_line import AccessLine
from quicoll_transport.quic.arrival_line import ArrivalLine
from quicoll_transport.quic.bbr import Bbr
from quicoll_transport.quic.frames import MaxStreamsFrame
from quicoll_transport.quic.parameters import local_parameters
from quicoll_transport.security.credentials import Credentials

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

MS = 1_000_000
START = 10**18
CLIENT, SERVER = ("192.0.2.1", 1), ("192.0.2.1", 2)
CredentialsOf = Callable[..., Credentials]


def tag(number: int) -> bytes:
    return number.to_bytes(TAG_SIZE, "big")


def link() -> LinkCore:
    """A core to receive with; it needs no connection of its own for that."""
    config = LinkConfig(DetectorConfig.from_lost_after(1000 * MS), credit_bytes=1 << 20)
    return LinkCore(
        peer="peer",
        local=LinkId(1, 1),
        config=config,
        now_ns=0,
        on_app=lambda data: None,
        on_state=lambda state: None,
    )


class Duo:
    """Two sessions after their handshake; datagrams go only where and when a test lets them."""

    def __init__(self, client: Session, server: Session, *, now_ns: int = START + 100 * MS) -> None:
        self.client = client
        self.server = server
        self.now = now_ns
        self.events: dict[Session, list[Any]] = {client: [], server: []}
        self.drop: Callable[[bytes], bool] = lambda data: False

    def carry(self, source: Session) -> int:
        """Everything that `source` has to send goes to the other side; the number of datagrams."""
        target = self.server if source is self.client else self.client
        datagrams = list(apart(source.datagrams_to_send(self.now)))
        for data, _ in datagrams:
            if not self.drop(data):
                target.receive(one(data, CLIENT if source is self.client else SERVER), self.now)
        while (event := target.next_event()) is not None:
            self.events[target].append(event)
        return len(datagrams)

    def run(self, rounds: int = 2000) -> None:
        """Until nobody has anything to say; the clock goes on in small steps, and jumps to timers where it must."""
        quiet = 0
        for _ in range(rounds):
            self.now += 2 * MS
            quiet = 0 if self.carry(self.client) + self.carry(self.server) else quiet + 1
            for session in (self.client, self.server):
                at = session.next_timer()
                if at is not None and at <= self.now:
                    session.handle_timer(self.now)
            if quiet > 30:
                return

    def control(self, session: Session) -> bytes:
        return b"".join(event.data for event in self.events[session] if isinstance(event, ControlData))


def dial(
    credentials: Credentials | None, *, config: SessionConfig, trust: bytes | None = None, key: Any = None
) -> Session:
    """A client; with another trust, or with the key of another certificate."""
    quic = handshakes.handshake_configuration(credentials, config, is_client=True)
    quic.cadata = trust or quic.cadata
    quic.private_key = key or quic.private_key
    handshake = handshakes.Handshake(quic, local_parameters(config))
    handshake.connect(SERVER, START)
    return Session(handshake, cids=[handshake.cid], config=config, reset_key=bytes(32))


def join(
    client: Credentials | None, server: Credentials, *, config: SessionConfig | None = None, trust: bytes | None = None
) -> tuple[Duo, list[Any], list[Any]]:
    """A handshake in memory: the sessions, and what the client and the server learned by it."""
    config = config or SessionConfig()
    dialled = dial(client, config=config, trust=trust)
    gate = Gate(credentials=server, config=config)
    accepted, client_events, server_events = handshake_in_memory(dialled, gate, now_ns=START)
    return Duo(dialled, accepted), client_events, server_events


@pytest.fixture
def duo(credentials_of: CredentialsOf) -> Duo:
    return join(credentials_of("a"), credentials_of("b"))[0]


# -- canaries --------------------------------------------------------------------------------------------------------


def test_both_sides_see_the_certificate_that_the_other_proved_to_hold(credentials_of: CredentialsOf) -> None:
    a, b = credentials_of("a"), credentials_of("b")
    _, client, server = join(a, b)
    assert client == [Authenticated(b.certificate, ())]
    assert server == [Authenticated(a.certificate, ())]


def test_a_client_without_a_certificate_completes_the_handshake_and_is_shown_as_such(
    credentials_of: CredentialsOf,
) -> None:
    _, _, server = join(None, credentials_of("b"), trust=credentials_of("b").authority_pem)
    assert server == [Authenticated(None, ())]


def test_a_client_of_a_foreign_authority_is_shown_with_its_foreign_certificate(credentials_of: CredentialsOf) -> None:
    foreign = credentials_of("a", authority=1)
    _, _, server = join(foreign, credentials_of("b"), trust=credentials_of("b").authority_pem)
    assert server == [Authenticated(foreign.certificate, ())], "aioquic checks no chain of clients; we must"


def test_a_client_that_does_not_hold_the_key_of_its_certificate_is_not_authenticated(
    credentials_of: CredentialsOf,
) -> None:
    a, thief = credentials_of("a"), credentials_of("d")
    client = dial(a, config=SessionConfig(), key=thief.private_key)
    gate = Gate(credentials=credentials_of("b"), config=SessionConfig())
    _, _, server = handshake_in_memory(client, gate, now_ns=START)
    assert not any(isinstance(event, Authenticated) for event in server)


def test_a_client_refuses_a_server_of_a_foreign_authority_by_itself(credentials_of: CredentialsOf) -> None:
    duo, client, _ = join(credentials_of("a"), credentials_of("b", authority=1))
    duo.run(rounds=50)
    assert not any(isinstance(event, Authenticated) for event in client + duo.events[duo.client])


@pytest.mark.parametrize("found", ["1.6.9", "1.7.1", "1.8.0", "1.8.0rc1", "2.0.0", "1.10.0"])
def test_a_version_that_was_not_examined_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioquic.__version__", found)
    with pytest.raises(ConfigurationError, match=f"aioquic {found} has not been examined"):
        check_foundation.__wrapped__()


@pytest.mark.parametrize("found", ["1.7.2", "1.7.3", "1.7.12"])
def test_a_version_within_the_range_is_put_to_the_test(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioquic.__version__", found)
    check_foundation.__wrapped__()


def test_the_self_check_refuses_a_foundation_that_asks_for_no_client_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install = handshakes._Connection._initialize

    def initialize(self: Any, peer_cid: bytes) -> None:
        install(self, peer_cid)
        self.tls._request_client_certificate = False

    monkeypatch.setattr(handshakes._Connection, "_initialize", initialize)
    with pytest.raises(ConfigurationError, match="does not show the certificate of clients"):
        check_foundation.__wrapped__()


def test_the_self_check_refuses_a_foundation_that_hides_what_the_client_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = property(lambda self: None, lambda self, value: None)
    monkeypatch.setattr(handshakes.tls.Context, "_peer_certificate", hidden, raising=False)
    with pytest.raises(ConfigurationError, match=r"does not show|not built as expected"):
        check_foundation.__wrapped__()


def test_the_self_check_names_a_foundation_that_is_built_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, *arguments: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(handshakes.QuicConnection, "_initialize", fail)
    with pytest.raises(ConfigurationError, match="not built as expected"):
        check_foundation.__wrapped__()


# -- the gate --------------------------------------------------------------------------------------------------------


def initial(credentials: Credentials) -> tuple[Session, bytes]:
    client = Session.client(credentials=credentials, config=SessionConfig(), address=SERVER, now_ns=START)
    (data, _), *_ = apart(client.datagrams_to_send(START))
    return client, data


def test_retry_is_demanded_before_anything_is_kept(credentials_of: CredentialsOf) -> None:
    gate = Gate(credentials=credentials_of("b"), config=SessionConfig())
    client, first = initial(credentials_of("a"))
    retry = gate.admit(first, CLIENT, START)
    assert isinstance(retry, bytes)
    assert len(retry) < len(first), "no amplification"
    client.receive(one(retry, SERVER), START)
    (second, _), *_ = apart(client.datagrams_to_send(START))
    assert gate.admit(second, ("192.0.2.1", 9), START) is None, "the token is for one address"
    assert gate.admit(second, ("192.0.2.9", 1), START) is None
    assert gate.admit(second, CLIENT, START + 60 * 10**9) is None, "and for a short time"
    other = Gate(credentials=credentials_of("b"), config=SessionConfig())
    assert other.admit(second, CLIENT, START) is None, "and of this gate"
    assert isinstance(gate.admit(second, CLIENT, START), Session)


@pytest.mark.parametrize("own", [("127.0.0.1", 1), ("127.8.0.1", 1), ("::1", 1, 0, 0)])
def test_who_is_on_this_host_need_not_show_its_address(own: Address, credentials_of: CredentialsOf) -> None:
    gate = Gate(credentials=credentials_of("b"), config=SessionConfig())
    _, first = initial(credentials_of("a"))
    admitted = gate.admit(first, own, START)
    assert isinstance(admitted, Session)
    admitted.receive(one(first, own), START)
    assert sum(len(data) for data, _ in apart(admitted.datagrams_to_send(START))) <= 3 * len(first)


@pytest.mark.parametrize("other", [("12.7.0.1", 1), ("128.0.0.1", 1), ("::2", 1, 0, 0), ("fe80::1", 1, 0, 2)])
def test_who_is_on_another_host_has_to_show_its_address(other: Address, credentials_of: CredentialsOf) -> None:
    gate = Gate(credentials=credentials_of("b"), config=SessionConfig())
    _, first = initial(credentials_of("a"))
    assert isinstance(gate.admit(first, other, START), bytes)


def test_without_retry_the_first_datagram_makes_a_session(credentials_of: CredentialsOf) -> None:
    gate = Gate(credentials=credentials_of("b"), config=SessionConfig(), retry=False)
    assert isinstance(gate.admit(initial(credentials_of("a"))[1], CLIENT, START), Session)


def test_what_is_no_initial_packet_of_our_version_is_ignored(credentials_of: CredentialsOf) -> None:
    gate = Gate(credentials=credentials_of("b"), config=SessionConfig())
    _, first = initial(credentials_of("a"))
    negotiation = encode_quic_version_negotiation(
        source_cid=bytes(8), destination_cid=bytes(8), supported_versions=[QuicProtocolVersion.VERSION_1]
    )
    newer = first[:1] + b"\x6b\x33\x43\xcf" + first[5:]
    for data in (b"", b"\x00", first[:1199], negotiation, newer, b"\x40" + first[1:], bytes(1200), b"\xff" * 1200):
        assert gate.admit(data, CLIENT, START) is None


def test_random_and_mutated_first_datagrams_never_raise(credentials_of: CredentialsOf) -> None:
    rng = random.Random(5)
    gate = Gate(credentials=credentials_of("b"), config=SessionConfig())
    client, first = initial(credentials_of("a"))
    retry = gate.admit(first, CLIENT, START)
    assert isinstance(retry, bytes)
    client.receive(one(retry, SERVER), START)
    (second, _), *_ = apart(client.datagrams_to_send(START))
    for i in range(2000):
        data = bytearray((first, second)[i % 2])
        for _ in range(rng.choice([1, 1, 2, 10])):
            data[rng.randrange(rng.choice([40, len(data)]))] = rng.randrange(256)
        admitted = gate.admit(bytes(data), CLIENT, START)
        if isinstance(admitted, Session):
            admitted.receive(one(data, CLIENT), START)
            assert not any(isinstance(event, Authenticated) for event in iter(admitted.next_event, None))


@pytest.mark.parametrize(
    ("data", "cid"),
    [
        (b"", None),
        (b"\x40", None),
        (b"\x40" + bytes(8), bytes(8)),
        (b"\x40" + b"12345678rest", b"12345678"),
        (b"\xc0\x00\x00\x00\x01", None),
        (b"\xc0\x00\x00\x00\x01\x04abc", None),
        (b"\xc0\x00\x00\x00\x01\x04abcd", b"abcd"),
        (b"\xc0\x00\x00\x00\x01\x00", b""),
    ],
)
def test_destination_of_a_datagram(data: bytes, cid: bytes | None) -> None:
    assert destination_cid(data) == cid


def test_only_initial_packets_of_version_1_may_come_from_strangers() -> None:
    assert is_unauthenticated_initial(b"\xc3\x00\x00\x00\x01" + bytes(1200))
    for start in (b"", b"\xc3\x00\x00\x00", b"\xd3\x00\x00\x00\x01", b"\x43\x00\x00\x00\x01", b"\xc3\x00\x00\x00\x02"):
        assert not is_unauthenticated_initial(start)


# -- messages --------------------------------------------------------------------------------------------------------


def header(number: int, data: bytes, *, length: int | None = None) -> bytes:
    return Header(tag(number), number, len(data) if length is None else length, checksum(data)).encode()


def through(duo: Duo) -> bool:
    """Whether neither side has a message stream left."""
    planes = [session._plane for session in (duo.client, duo.server)]
    return all(plane is not None and len(plane.outbound) + len(plane.inbound) <= 2 for plane in planes) and not (
        duo.client._sending or duo.server._sending or duo.client._early or duo.server._early
    )


def posted(core: LinkCore, number: int, size: int) -> tuple[Posted, bytearray]:
    memory = bytearray(size)
    return core.post(tag(number), memoryview(memory), lambda item: None), memory


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000, 3_000_000])
@pytest.mark.parametrize("direction", ["client to server", "server to client"])
def test_a_message_is_delivered_into_the_given_memory(duo: Duo, size: int, direction: str) -> None:
    source, target = (duo.client, duo.server) if direction == "client to server" else (duo.server, duo.client)
    data = random.Random(size).randbytes(size)
    core = link()
    item, memory = posted(core, 0, size)
    target.attach(core)
    source.start_message("key", header(0, data), memoryview(data))
    duo.run()
    assert item.done
    assert item.error is None
    assert memory == data
    assert through(duo)


def test_messages_share_the_path_so_that_a_small_one_need_not_wait_for_a_large_one(duo: Duo) -> None:
    core = link()
    order: list[int] = []
    for number, size in ((0, 4_000_000), (1, 1000)):
        core.post(tag(number), memoryview(bytearray(size)), lambda item: order.append(item.tag[-1]))
    duo.server.attach(core)
    for number, size in ((0, 4_000_000), (1, 1000)):
        duo.client.start_message(number, header(number, bytes(size)), memoryview(bytes(size)))
    duo.run()
    assert order == [1, 0]


def test_a_refused_message_is_stopped_and_the_others_go_on(duo: Duo) -> None:
    class Picky:
        """Takes message 1 only."""

        def __init__(self) -> None:
            self.core = link()
            self.item, self.memory = posted(self.core, 1, 50_000)

        def message_begin(self, header: Header) -> Inflow | None:
            return self.core.message_begin(header) if header.sequence == 1 else None

        def message_end(self, inflow: Inflow) -> None:
            self.core.message_end(inflow)

        def message_reset(self, inflow: Inflow) -> None:
            self.core.message_reset(inflow)

    sink, data = Picky(), bytes(50_000)
    duo.server.attach(sink)
    large = bytes(40 << 20)
    duo.client.start_message(0, header(0, large), memoryview(large))
    duo.client.start_message(1, header(1, data), memoryview(data))
    duo.run()
    assert sink.item.done
    assert through(duo), "the sender does not go on with what nobody wants"


def test_a_message_that_is_reset_ends_at_both_sides(duo: Duo) -> None:
    core = link()
    item, _ = posted(core, 0, 8 << 20)
    posted(core, 1, 8 << 20)
    duo.server.attach(core)
    data = bytes(8 << 20)
    duo.client.start_message("first", header(0, data), memoryview(data))
    duo.client.start_message("second", header(1, data), memoryview(data))
    duo.carry(duo.client)
    assert item.inflow is not None
    for key in ("first", "second", "unknown"):
        duo.client.reset_message(key)
    duo.run(rounds=100)
    assert item.inflow is None
    assert not item.done
    assert through(duo)


def raw_message(duo: Duo, data: bytes, *, fin: bool) -> None:
    outbound = duo.client._plane.outbound
    outbound.write(outbound.open(), data, fin=fin)
    duo.run(rounds=20)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(0, b"abc") + b"abcd", "longer than its header"),
        (header(0, b"abc") + b"ab", "ends at 2 of 3"),
        (header(0, b"abc"), "ends at 0 of 3"),
        (header(0, b"abc")[:-1], "inside its header"),
        (b"", "inside its header"),
        (bytes(HEADER_SIZE), "checksum"),
        (header(0, b"", length=1 << 40) + b"a", "exceed the credit"),
    ],
)
def test_a_stream_that_does_not_fit_its_header_breaks_the_protocol(duo: Duo, data: bytes, reason: str) -> None:
    duo.server.attach(link())
    with pytest.raises(ProtocolError, match=reason):
        raw_message(duo, data, fin=True)


def test_messages_that_overtake_the_hello_wait_for_it(duo: Duo) -> None:
    data = random.Random(1).randbytes(200_000)
    duo.client.start_message(0, header(0, data), memoryview(data))
    duo.client.start_message(1, header(1, b""), memoryview(b""))
    duo.run()
    core = link()
    items = [posted(core, 0, len(data)), posted(core, 1, 0)]
    duo.server.attach(core)
    assert all(item.done for item, _ in items)
    assert items[0][1] == data


def test_what_overtakes_the_hello_is_bounded(duo: Duo) -> None:
    data = bytes(6 << 20)
    duo.client.start_message(0, header(0, data), memoryview(data))
    with pytest.raises(ProtocolError, match="without saying Hello"):
        duo.run()
    assert duo.server._plane.inbound.received <= (4 << 20) + 65536


def test_a_message_that_is_reset_before_the_hello_leaves_nothing_behind(duo: Duo) -> None:
    data = bytes(1 << 20)
    duo.client.start_message(0, header(0, data), memoryview(data))
    duo.carry(duo.client)
    assert duo.server._early
    duo.client.reset_message(0)
    duo.run(rounds=100)
    core = link()
    item, _ = posted(core, 0, len(data))
    duo.server.attach(core)
    assert item.inflow is None
    assert through(duo)


# -- control ---------------------------------------------------------------------------------------------------------


def test_control_bytes_go_both_ways_and_the_server_waits_for_the_client_to_open_the_stream(duo: Duo) -> None:
    duo.server.send_control(b"from the server")
    duo.run(rounds=100)
    assert duo.control(duo.client) == b""
    duo.client.send_control(b"from the client")
    duo.run(rounds=100)
    assert duo.control(duo.server) == b"from the client"
    assert duo.control(duo.client) == b"from the server"


def test_control_comes_after_the_proof_of_identity_however_early_it_was_sent(credentials_of: CredentialsOf) -> None:
    client = Session.client(credentials=credentials_of("a"), config=SessionConfig(), address=SERVER, now_ns=START)
    client.send_control(b"impatient")
    gate = Gate(credentials=credentials_of("b"), config=SessionConfig())
    _, _, events = handshake_in_memory(client, gate, now_ns=START)
    assert [type(event) for event in events] == [Authenticated, ControlData]


@pytest.mark.parametrize(
    ("stream", "fin", "reason"), [(0, True, "ended the control stream"), (4, False, "stream 1 where 1 were allowed")]
)
def test_other_uses_of_bidirectional_streams_break_the_protocol(duo: Duo, stream: int, fin: bool, reason: str) -> None:
    outbound = duo.client._plane.outbound
    outbound.on_max_streams(MaxStreamsFrame(2, False))  # whatever the peer has allowed
    chosen = duo.client._control if stream == 0 else outbound.open(unidirectional=False)
    assert chosen.id == stream
    outbound.write(chosen, b"x", fin=fin)
    with pytest.raises(ProtocolError, match=reason):
        duo.run(rounds=20)


def test_a_peer_that_does_not_take_control_messages_is_given_up(duo: Duo) -> None:
    def flood() -> None:
        for _ in range(1000):
            duo.client.send_control(bytes(1 << 20))

    with pytest.raises(ProtocolError, match="does not take our control messages"):
        flood()
    assert duo.client._control.waiting <= (32 << 20) + (1 << 20)


# -- bounds on memory ------------------------------------------------------------------------------------------------


def test_a_large_message_to_a_peer_that_does_not_read_stays_with_its_owner(duo: Duo) -> None:
    """Nothing of the payload is copied: what the session holds of it is what it has under way, sealed."""
    data = memoryview(bytes(64 << 20))
    for key in range(4):
        duo.client.start_message(key, header(key, b"", length=len(data)), data)
    for _ in range(200):
        duo.now += 50 * MS
        runs = duo.client.datagrams_to_send(duo.now)
        assert sum(len(run.memory) for run in runs) <= 1 << 20
        duo.client.handle_timer(duo.now)
        stats = duo.client.path_stats()
        assert stats.bytes_in_flight <= max(stats.cwnd, 64 << 10)
    assert duo.client.path_stats().bytes_in_flight > 0


@pytest.mark.slow
@pytest.mark.parametrize("lossy", [False, True])
def test_messages_far_larger_than_the_windows_pass_and_the_windows_stay_as_they_are(
    credentials_of: CredentialsOf, lossy: bool
) -> None:
    window = 256 << 10
    duo, _, _ = join(credentials_of("a"), credentials_of("b"), config=SessionConfig(window_bytes=window))
    rng = random.Random(2)
    if lossy:
        duo.drop = lambda data: rng.random() < 0.03
    core = link()
    duo.server.attach(core)
    data = random.Random(4).randbytes(3 << 20)
    items = [posted(core, number, len(data)) for number in range(2)]
    for number in range(2):
        duo.client.start_message(number, header(number, data), memoryview(data))
    for _ in range(20_000):
        duo.run(rounds=1)
        inbound = duo.server._plane.inbound
        for stream in inbound._streams.values():
            assert stream.allowance.limit - stream.taken <= window
        assert inbound._data.limit - inbound._data.taken <= window
        assert sum(len(stream._held) for stream in inbound._streams.values()) <= window
        if all(item.done for item, _ in items):
            break
    assert all(memory == data for _, memory in items)


def test_a_peer_that_leaves_a_hole_makes_us_hold_no_more_than_the_window(credentials_of: CredentialsOf) -> None:
    window = 256 << 10
    duo, _, _ = join(credentials_of("a"), credentials_of("b"), config=SessionConfig(window_bytes=window))
    core = link()
    duo.server.attach(core)
    earlier = bytes(4 << 20)  # the allowance must not grow by what was sent before
    item, _ = posted(core, 0, len(earlier))
    duo.client.start_message(0, header(0, earlier), memoryview(earlier))
    duo.run(rounds=20_000)
    assert item.done
    outbound = duo.client._plane.outbound
    streams = [outbound.open() for _ in range(3)]
    for stream in streams:
        outbound.write(stream, bytes(4 << 20))
        stream.next = 1  # the first byte never goes
    duo.run(rounds=3000)
    receivers = duo.server._plane.inbound._streams.values()
    held = sum(len(receiver._held) for receiver in receivers)
    assert 0 < held <= window + 3


# -- closing ---------------------------------------------------------------------------------------------------------


def test_the_other_side_learns_at_once_why_a_session_was_closed(duo: Duo) -> None:
    duo.client.close(CLOSE_REFUSED, "you know why")
    assert duo.carry(duo.client) == 1
    assert Closed(CLOSE_REFUSED, "you know why") in duo.events[duo.server]
    assert duo.server.closed
    duo.run(rounds=500)
    assert [event for event in duo.events[duo.server] if isinstance(event, Closed)] == duo.events[duo.server], "once"
    duo.server.close(CLOSE_NORMAL, "too late")
    duo.server.send_control(b"x")
    assert duo.server.datagrams_to_send(duo.now) == []


def test_garbage_on_an_established_session_is_dropped(duo: Duo) -> None:
    rng = random.Random(8)
    duo.client.send_control(b"x")
    (real, _), *_ = apart(duo.client.datagrams_to_send(duo.now))
    heard = duo.server.heard_ns
    for _ in range(1000):
        data = bytearray(real)
        data[rng.randrange(1, len(data))] ^= 1 << rng.randrange(8)
        duo.server.receive(one(data, CLIENT), duo.now + 5)
        duo.server.receive(one(rng.randbytes(rng.randrange(1, 1500)), CLIENT), duo.now + 5)
    assert duo.server.heard_ns == heard, "what fails authentication is not heard"
    assert duo.server.next_event() is None
    duo.server.receive(one(real, CLIENT), duo.now + 9)
    assert duo.server.heard_ns == duo.now + 9
    duo.server.receive(one(real, CLIENT), duo.now + 99)
    assert duo.server.heard_ns == duo.now + 9, "nor is a replay"


@pytest.mark.parametrize(
    ("code", "name"),
    [(0x7101, "refused"), (0x7103, "link gone"), (0, "no_error"), (0x12A, "TLS alert 42"), (9999, "code 0x270f")],
)
def test_codes_have_names(code: int, name: str) -> None:
    assert error_name(code) == name


def test_a_session_lets_go_of_its_handshake_once_that_is_confirmed(credentials_of: CredentialsOf) -> None:
    """It holds all of aioquic's state; what still comes for it is thrown away, but for a short packet at its end."""
    client = Session.client(credentials=credentials_of("a"), config=SessionConfig(), address=SERVER, now_ns=START)
    server, _, _ = handshake_in_memory(client, Gate(credentials=credentials_of("b"), config=SessionConfig()))
    duo = Duo(client, server)
    client.send_control(b"first")
    duo.run()
    for session in (client, server):
        assert session._handshake is None
        assert session.peer_address is not None
    server.receive(one(bytes.fromhex("e000000001") + bytes(1200), CLIENT), duo.now)
    server.send_control(b"word")
    duo.run()
    assert [event.data for event in duo.events[client] if isinstance(event, ControlData)] == [b"word"]


# -- what is remembered of paths --------------------------------------------------------------------------------------


def test_what_comes_to_one_endpoint_by_all_connections_is_taken_together(credentials_of: CredentialsOf) -> None:
    config = SessionConfig(congestion="bbr")
    gate = Gate(credentials=credentials_of("b"), config=config)
    for name in "ac":
        arrivals = ArrivalLine()
        client = Session.client(
            credentials=credentials_of(name), config=config, address=SERVER, now_ns=START, arrivals=arrivals
        )
        server, _, _ = handshake_in_memory(client, gate, now_ns=START)
        for session, own in ((client, arrivals), (server, gate.arrivals)):
            assert session._plane is not None
            share = session._plane.sender._arrivals
            assert share is not None
            assert share._line is own


def test_who_does_not_ask_for_fair_rates_is_not_counted(credentials_of: CredentialsOf) -> None:
    """CUBIC has no use for them."""
    config = SessionConfig()
    client = dial(credentials_of("a"), config=config)
    server, _, _ = handshake_in_memory(client, Gate(credentials=credentials_of("b"), config=config), now_ns=START)
    for session in (client, server):
        assert session._plane is not None
        assert session._plane.sender._arrivals is None


def test_connections_of_one_endpoint_leave_by_one_line(credentials_of: CredentialsOf) -> None:
    """Those that came through its gate, and those that it has dialled."""
    config = SessionConfig(congestion="bbr")
    gate = Gate(credentials=credentials_of("b"), config=config)
    lines = []
    for name in "ac":
        line = AccessLine()
        client = Session.client(
            credentials=credentials_of(name), config=config, address=SERVER, now_ns=START, line=line
        )
        server, _, _ = handshake_in_memory(client, gate, now_ns=START)
        for session, own in ((client, line), (server, gate.line)):
            assert session._plane is not None
            controller = session._plane.recovery.controller
            assert isinstance(controller, Bbr)
            assert controller._limits._share is not None
            assert controller._limits._share._line is own
            lines.append(own)
    assert lines[1] is lines[3]


def test_what_one_connection_has_found_of_a_path_the_next_through_the_same_gate_begins_with(
    credentials_of: CredentialsOf,
) -> None:
    config = SessionConfig(congestion="bbr")
    gate = Gate(credentials=credentials_of("b"), config=config)

    def connect(name: str) -> Duo:
        client = dial(credentials_of(name), config=config)
        server, _, _ = handshake_in_memory(client, gate, now_ns=START)
        duo = Duo(client, server)
        client.send_control(b"x" * 1000)
        duo.run()
        return duo

    first = connect("a")
    begin = first.server.path_stats().cwnd
    first.server.send_control(bytes(4 << 20))
    first.run()
    found = first.server.path_stats().cwnd
    assert found > 4 * begin
    fingerprint = credentials_of("a").certificate.fingerprint(SHA256())
    assert gate.memory.of(fingerprint, CLIENT[0]).recall(first.now) is not None

    def after_a_word(name: str) -> int:
        duo = connect(name)
        duo.server.send_control(b"y")
        duo.run()
        return duo.server.path_stats().cwnd

    assert after_a_word("a") > 2 * begin
    assert after_a_word("d") < 2 * begin, "of another peer nothing is known"
