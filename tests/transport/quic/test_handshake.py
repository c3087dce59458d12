"""Handshakes without sockets: ours with ours, and with stock aioquic on either side; a virtual clock.

The first part are canaries, which sing when the private parts of aioquic that are used change under us.
"""

from __future__ import annotations

import ast
import heapq
import inspect
import pathlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from aioquic import tls
from aioquic.buffer import Buffer
from aioquic.quic import events
from aioquic.quic.connection import QuicConnection, QuicConnectionState
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.logger import QuicLogger
from aioquic.quic.packet import QuicErrorCode, QuicHeader, QuicPacketType, encode_quic_retry, pull_quic_header

import quicoll_transport.quic.handshake as module
from quicoll_transport.errors import ProtocolError
from quicoll_transport.quic.handshake import (
    Handover,
    Handshake,
    handshake_configuration,
)
from quicoll_transport.quic.keys import KeyPhases
from quicoll_transport.quic.packets import open_packet, seal
from quicoll_transport.quic.parameters import TransportParameters, local_parameters
from quicoll_transport.quic.terms import CID_LENGTH, SessionConfig
from quicoll_transport.security.credentials import Credentials

if TYPE_CHECKING:
    from aioquic.quic.configuration import QuicConfiguration

MS = 1_000_000
START = 10**18
DELAY = 5 * MS
CLIENT, SERVER = ("192.0.2.1", 1), ("192.0.2.1", 2)
CONFIG = SessionConfig(initial_rtt_ns=20 * MS)
CredentialsOf = Callable[..., Credentials]


def token_of(cid: bytes) -> bytes:
    return cid + cid[::-1]


class Ours:
    """A Handshake; `heard` are the short-header packets that it gives back."""

    def __init__(self, quic: QuicConfiguration, **options: Any) -> None:
        self.handshake = Handshake(quic, local_parameters(CONFIG), reset_token=token_of, **options)
        self.heard: list[bytes] = []
        self.next_timer, self.handle_timer = self.handshake.next_timer, self.handshake.handle_timer
        self.datagrams_to_send, self.connect = self.handshake.datagrams_to_send, self.handshake.connect

    def receive(self, data: bytes, address: Any, now_ns: int) -> None:
        short = self.handshake.receive(data, address, now_ns)
        if short is not None:
            self.heard.append(short)

    @property
    def is_done(self) -> bool:
        return self.handshake.handover is not None

    @property
    def failed(self) -> int | None:
        return self.handshake.failed and self.handshake.failed.code


class AskingConnection(QuicConnection):
    """aioquic as it is, but that it asks for a client's certificate as ours does."""

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._request_client_certificate = not self._is_client


class Stock:
    """aioquic alone, with the face of Ours."""

    def __init__(self, quic: QuicConfiguration, *, original_cid: bytes | None = None, retry_cid: bytes | None = None):
        self.quic = AskingConnection(
            configuration=quic, original_destination_connection_id=original_cid, retry_source_connection_id=retry_cid
        )
        self.is_done = False
        self.failed: int | None = None

    def connect(self, address: Any, now_ns: int) -> None:
        self.quic.connect(address, now_ns / 1e9)

    def receive(self, data: bytes, address: Any, now_ns: int) -> None:
        self.quic.receive_datagram(data, address, now_ns / 1e9)
        self._drain()

    def datagrams_to_send(self, now_ns: int) -> list[tuple[bytes, Any]]:
        return self.quic.datagrams_to_send(now_ns / 1e9) if self.quic.get_peer_address() is not None else []

    def next_timer(self) -> int | None:
        at = self.quic.get_timer()
        return None if at is None else int(at * 1e9) + 1000

    def handle_timer(self, now_ns: int) -> None:
        at = self.quic.get_timer()
        if at is not None and at * 1e9 <= now_ns:
            self.quic.handle_timer(now_ns / 1e9)
            self._drain()

    def _drain(self) -> None:
        while (event := self.quic.next_event()) is not None:
            self.is_done = self.is_done or isinstance(event, events.HandshakeCompleted)
            if isinstance(event, events.ConnectionTerminated):
                self.failed = event.error_code


class Path:
    """A client and the server that its first Initial makes; `tap` says what becomes of a datagram, by its count."""

    def __init__(
        self,
        kinds: tuple[type[Any], type[Any]],
        credentials: tuple[Credentials | None, Credentials],
        *,
        retry: bool = False,
        trust: bytes | None = None,
        tap: Callable[[int, bytes], Iterable[tuple[int, bytes]]] = lambda count, data: [(DELAY, data)],
        logger: QuicLogger | None = None,
    ) -> None:
        quic = replace(handshake_configuration(credentials[0], CONFIG, is_client=True), quic_logger=logger)
        if trust is not None:
            quic.cadata = trust
        self.now = START
        self.client = kinds[0](quic)
        self.server: Any = None
        self.sent: list[tuple[bool, bytes]] = []
        self._kind, self._credentials, self._retry, self._tap, self._logger = (
            kinds[1],
            credentials[1],
            retry,
            tap,
            logger,
        )
        self._queue: list[tuple[int, int, bool, bytes]] = []
        self.client.connect(SERVER, self.now)
        self.flush()

    def flush(self) -> None:
        for from_client, end in ((True, self.client), (False, self.server)):
            for data, _ in end.datagrams_to_send(self.now) if end is not None else ():
                self.send(from_client, data)

    def send(self, from_client: bool, data: bytes) -> None:
        self.sent.append((from_client, data))
        for delay, piece in self._tap(len(self.sent) - 1, data):
            heapq.heappush(self._queue, (self.now + delay, len(self.sent), from_client, piece))

    def step(self) -> bool:
        due = [self._queue[0][0]] if self._queue else []
        due += [at for end in (self.client, self.server) if end is not None and (at := end.next_timer()) is not None]
        if not due:
            return False
        self.now = max(self.now, min(due))
        while self._queue and self._queue[0][0] <= self.now:
            _, _, to_server, data = heapq.heappop(self._queue)
            if not to_server:
                self.client.receive(data, SERVER, self.now)
            elif self.server is not None or self._accept(data):
                self.server.receive(data, CLIENT, self.now)
        for end in (self.client, self.server):
            if end is not None and (at := end.next_timer()) is not None and at <= self.now:
                end.handle_timer(self.now)
        self.flush()
        return True

    def run(self, ms: int = 2000) -> Path:
        """Until both are done, or one has failed, or so much time has passed."""
        until = self.now + ms * MS
        while self.now < until and not (self.client.failed or (self.server and self.server.failed)) and self.step():
            if self.client.is_done and self.server is not None and self.server.is_done:
                break
        return self

    def wait(self, ms: int) -> None:
        until = self.now + ms * MS
        while self.now < until and self.step():
            pass

    def _accept(self, data: bytes) -> bool:
        header = pull_quic_header(Buffer(data=data), host_cid_length=CID_LENGTH)
        if header.packet_type is not QuicPacketType.INITIAL:
            return False
        retry_cid, original = None, header.destination_cid
        if self._retry:
            if not header.token:
                retry = encode_quic_retry(
                    version=header.version or 1,
                    source_cid=b"retried!",
                    destination_cid=header.source_cid,
                    original_destination_cid=original,
                    retry_token=b"token" + original,
                )
                self.send(False, retry)
                return False
            retry_cid, original = header.destination_cid, header.token[5:]
        quic = replace(handshake_configuration(self._credentials, CONFIG, is_client=False), quic_logger=self._logger)
        self.server = self._kind(quic, original_cid=original, retry_cid=retry_cid)
        return True


PAIRS = [(Ours, Ours), (Ours, Stock), (Stock, Ours)]
pairs = pytest.mark.parametrize("kinds", PAIRS, ids=lambda kinds: "-".join(kind.__name__ for kind in kinds).lower())


def handovers(path: Path) -> tuple[Handover, Handover]:
    a, b = path.client.handshake.handover, path.server.handshake.handover
    assert a is not None
    assert b is not None
    return a, b


def phases_of(handover: Handover) -> KeyPhases:
    return KeyPhases(
        handover.suite,
        handover.send_secret,
        handover.receive_secret,
        key_packets=1 << 22,
        pto_ns=lambda: MS,
        confirmed=not handover.is_client,
    )


def long_headers(data: bytes) -> Iterator[QuicHeader]:
    buffer, at = Buffer(data=data), 0
    while at < len(data) and data[at] & 0x80:
        header = pull_quic_header(buffer, host_cid_length=CID_LENGTH)
        yield header
        at += header.packet_length
        buffer.seek(at)


# -- canaries --------------------------------------------------------------------------------------------------------


def test_the_private_names_are_where_they_were() -> None:
    assert list(inspect.signature(QuicConnection._initialize).parameters) == ["self", "peer_cid"]
    assert "_initialize" not in vars(tls.Context)
    assert {state.name for state in QuicConnectionState} == {
        "FIRSTFLIGHT",
        "CONNECTED",
        "CLOSING",
        "DRAINING",
        "TERMINATED",
    }
    context = tls.Context(is_client=False)
    assert context._request_client_certificate is False
    assert tls.Group.X25519 in context._supported_groups
    assert context._peer_certificate is None
    assert context._peer_certificate_chain == []
    assert module.Buffer is Buffer


def test_there_are_no_more_private_names_than_the_head_says() -> None:
    tree = ast.parse(inspect.getsource(module))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr[0] == "_"]
    assigned = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} - {"_initialize"}
    foreign = {node.attr for node in attributes if node.attr[:2] != "__"} - assigned - defined
    theirs = {"_request_client_certificate", "_supported_groups"}
    assert assigned & set(dir(tls.Context(is_client=False))) == theirs
    assert foreign == {"_initialize", "_state", "_peer_certificate", "_peer_certificate_chain"}
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in imported if "._" in name] == ["aioquic._buffer"]
    for name in foreign | theirs | {"_buffer"}:
        assert name in (module.__doc__ or "")


def test_no_other_module_of_the_room_imports_private_parts() -> None:
    found = {}
    for path in sorted(pathlib.Path(inspect.getfile(module)).parent.glob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        private = {node.module for node in nodes if node.module and node.module.startswith("aioquic._")}
        private |= {
            name.name
            for node in nodes
            for name in node.names
            if "aioquic" in (node.module or "") and name.name[0] == "_"
        }
        if private:
            found[path.stem] = private
    assert found == {name: {"aioquic._buffer"} for name in ("gate", "handshake", "parameters")}


def test_aioquic_never_has_a_key_of_its_own_for_what_follows(credentials_of: CredentialsOf) -> None:
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b"))).run()
    for end in (path.client, path.server):
        pair = end.handshake._quic._cryptos[tls.Epoch.ONE_RTT]
        assert not pair.send.is_valid()
        assert not pair.recv.is_valid()
    assert all(data[0] & 0x80 for _, data in path.sent)


# -- what is agreed on -----------------------------------------------------------------------------------------------


@pairs
@pytest.mark.parametrize("retry", [False, True], ids=["", "retry"])
def test_both_are_done(kinds: Any, retry: bool, credentials_of: CredentialsOf) -> None:
    path = Path(kinds, (credentials_of("a"), credentials_of("b")), retry=retry).run()
    assert path.client.is_done
    assert path.server.is_done
    assert len([1 for _, data in path.sent if data[0] & 0xF0 == 0xF0]) == retry
    for end, other, address in ((path.client, "b", SERVER), (path.server, "a", CLIENT)):
        if isinstance(end, Ours):
            handover = end.handshake.handover
            assert handover is not None
            assert handover.certificate == credentials_of(other).certificate
            assert handover.chain == ()
            assert handover.address == address
            assert handover.remote.initial_max_data == (CONFIG.window_bytes if kinds == (Ours, Ours) else 1 << 20)
            assert handover.rtt_ns == 2 * DELAY


@pytest.mark.parametrize("suite", [tls.CipherSuite.AES_128_GCM_SHA256, tls.CipherSuite.AES_256_GCM_SHA384])
def test_the_keys_of_both_sides_fit(suite: tls.CipherSuite, credentials_of: CredentialsOf) -> None:
    class Picky(Ours):
        def __init__(self, quic: QuicConfiguration, **options: Any) -> None:
            super().__init__(replace(quic, cipher_suites=[suite]), **options)

    a, b = handovers(Path((Picky, Ours), (credentials_of("a"), credentials_of("b"))).run())
    assert a.suite == b.suite == int(suite)
    for source, target in ((a, b), (b, a)):
        packet = seal(phases_of(source).send, source.peer_cid, 0, b"hello")
        assert open_packet(phases_of(target), packet, len(target.cid), -1, 0) == (0, b"hello")
    assert (a.cid, a.peer_cid) == (b.peer_cid, b.cid)
    for secret in (a.send_secret, a.receive_secret):
        assert repr(secret) not in repr(a)


@pytest.mark.parametrize("kinds", PAIRS[1:], ids=["server", "client"])
def test_the_keys_fit_those_of_stock_aioquic(kinds: Any, credentials_of: CredentialsOf) -> None:
    path = Path(kinds, (credentials_of("a"), credentials_of("b"))).run()
    ours, stock = (path.client, path.server) if kinds[0] is Ours else (path.server, path.client)
    handover = ours.handshake.handover
    phases = phases_of(handover)
    ping = seal(phases.send, handover.peer_cid, 0, b"\x01" + bytes(20))
    stock.receive(ping, CLIENT if kinds[0] is Ours else SERVER, path.now)
    stock.quic.send_ping(1)
    answers = [data for data, _ in stock.datagrams_to_send(path.now + 100 * MS)]
    short = [ours.handshake.receive(data, SERVER if kinds[0] is Ours else CLIENT, path.now) for data in answers]
    opened = [open_packet(phases, data, CID_LENGTH, -1, 0) for data in [*ours.heard, *short] if data is not None]
    assert any(packet is not None for packet in opened)
    assert phases.forged == 0


def test_each_side_learns_what_the_other_has_told(credentials_of: CredentialsOf) -> None:
    a, b = handovers(Path((Ours, Ours), (credentials_of("a"), credentials_of("b"))).run())
    told = local_parameters(CONFIG)
    assert a.local == told == b.remote, "a client sends no reset token (RFC 9000 section 18.2)"
    assert b.local == replace(told, stateless_reset_token=token_of(b.cid)) == a.remote


def test_a_client_offers_one_key_and_a_server_takes_any(credentials_of: CredentialsOf) -> None:
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b"))).run()
    client, server = (side.handshake._quic.tls for side in (path.client, path.server))
    assert client._supported_groups == [tls.Group.X25519]
    assert not client._ec_private_keys
    assert client._x448_private_key is None
    assert tls.Group.SECP256R1 in server._supported_groups


def test_what_a_peer_does_not_say_has_the_value_of_the_rfc(credentials_of: CredentialsOf) -> None:
    class Silent(Ours):
        def __init__(self, quic: QuicConfiguration, **options: Any) -> None:
            super().__init__(quic, **options)
            parameters = TransportParameters()
            self.handshake._quic.parameters = parameters

    path = Path((Silent, Ours), (credentials_of("a"), credentials_of("b"))).run()
    remote = handovers(path)[1].remote
    assert remote == TransportParameters()
    assert (remote.ack_delay_exponent, remote.max_ack_delay, remote.active_connection_id_limit) == (3, 25, 2)


# -- losses ----------------------------------------------------------------------------------------------------------


@pairs
@pytest.mark.parametrize("lost", range(7))
def test_any_datagram_may_be_lost(kinds: Any, lost: int, credentials_of: CredentialsOf) -> None:
    def tap(count: int, data: bytes) -> list[tuple[int, bytes]]:
        return [] if count == lost else [(DELAY, data)]

    path = Path(kinds, (credentials_of("a"), credentials_of("b")), tap=tap, retry=True).run()
    assert path.client.is_done
    assert path.server.is_done
    assert path.client.failed is path.server.failed is None


@pairs
def test_everything_may_come_twice_and_late(kinds: Any, credentials_of: CredentialsOf) -> None:
    def tap(count: int, data: bytes) -> list[tuple[int, bytes]]:
        return [(DELAY * (1 + count % 3), data), (DELAY * 3, data)]

    path = Path(kinds, (credentials_of("a"), credentials_of("b")), tap=tap).run()
    assert path.client.is_done
    assert path.server.is_done


def test_a_client_repeats_its_end_until_it_is_confirmed(credentials_of: CredentialsOf) -> None:
    path, held = finished_by_hand(credentials_of, hold=3)
    assert not path.server.is_done
    path.run()
    client = path.client.handshake
    assert path.server.is_done
    assert len(held) == 3
    assert not client.is_over
    assert path.server.handshake.is_over
    client.confirm()
    assert client.is_over
    assert client.next_timer() is None
    assert client.datagrams_to_send(path.now + 10**10) == []
    assert path.server.datagrams_to_send(path.now + 10**10) == []


# -- packets beside the handshake ------------------------------------------------------------------------------------


def finished_by_hand(credentials_of: CredentialsOf, *, hold: int = 1000) -> tuple[Path, list[bytes]]:
    """A path whose client is done, and what it says of that, held back: the first `hold` datagrams."""
    held: list[bytes] = []

    def tap(count: int, data: bytes) -> list[tuple[int, bytes]]:
        if made and made[0].client.is_done and made[0].sent[-1][0] and len(held) < hold:
            held.append(data)
            return []
        return [(DELAY, data)]

    made: list[Path] = []
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b")), tap=tap)
    made.append(path)
    while len(held) < min(hold, 1):
        assert path.step()
    return path, held


def test_packets_ahead_of_the_handshake_are_kept_for_the_handover(credentials_of: CredentialsOf) -> None:
    path, held = finished_by_hand(credentials_of)
    handover = path.client.handshake.handover
    keys = phases_of(handover).send
    packets = [seal(keys, handover.peer_cid, i, b"x" * 30) for i in range(3)]
    for packet in packets:
        path.server.receive(packet, CLIENT, path.now)
    assert path.server.heard == []
    for data in held:
        path.server.receive(data, CLIENT, path.now)
    assert handovers(path)[1].early == tuple(packets)
    again = seal(keys, handover.peer_cid, 3, b"x" * 30)
    path.server.receive(again, CLIENT, path.now)
    assert path.server.heard == [again]


def test_a_packet_coalesced_with_the_handshake_is_split_off(credentials_of: CredentialsOf) -> None:
    path, held = finished_by_hand(credentials_of)
    (last,) = held
    handover = path.client.handshake.handover
    packet = seal(phases_of(handover).send, handover.peer_cid, 0, b"x" * 1100)
    end = sum(header.packet_length for header in long_headers(last))
    assert set(last[end:]) == {0}, "aioquic fills a datagram up behind its packets"
    path.server.receive(last[:end] + packet, CLIENT, path.now)
    _, server = handovers(path)
    assert path.server.heard == [packet]
    assert server.early == ()
    assert open_packet(phases_of(server), packet, CID_LENGTH, -1, 0) == (0, b"x" * 1100)


def test_an_initial_counts_though_its_datagram_was_long_enough_by_its_short_packet_only(
    credentials_of: CredentialsOf,
) -> None:
    """RFC 9000 section 14.1. The Initial is made of the client's first one, with its padding as a packet instead."""
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b")))
    first = path.sent[0][1]
    header = pull_quic_header(Buffer(data=first), host_cid_length=CID_LENGTH)
    reader, writer = CryptoPair(), CryptoPair()
    reader.setup_initial(header.destination_cid, is_client=False, version=1)
    writer.setup_initial(header.destination_cid, is_client=True, version=1)
    offset = 1 + 4 + 1 + len(header.destination_cid) + 1 + len(header.source_cid) + 1 + 2
    plain, payload, number = reader.decrypt_packet(first[: header.packet_length], offset, 0)
    payload = payload.rstrip(b"\0")
    rest = (len(payload) + len(plain) - offset + 16) | 0x4000
    short = writer.encrypt_packet(plain[: offset - 2] + rest.to_bytes(2, "big") + plain[offset:], payload, number)
    assert len(short) < 1200
    server = Ours(
        handshake_configuration(credentials_of("b"), CONFIG, is_client=False), original_cid=header.destination_cid
    )
    server.receive(short, CLIENT, path.now)
    assert server.datagrams_to_send(path.now) == []
    server.receive(short + b"\x40" + b"early".ljust(1199 - len(short), b"."), CLIENT, path.now)
    assert server.datagrams_to_send(path.now) != []


def test_early_packets_are_bounded_by_number_and_by_bytes(credentials_of: CredentialsOf) -> None:
    for size, kept in ((30, module._EARLY_PACKETS), (20_000, module._EARLY_BYTES // 20_000)):
        path, held = finished_by_hand(credentials_of)
        for _ in range(100):
            path.server.receive(b"\x40" + bytes(size - 1), CLIENT, path.now)
        for data in held:
            path.server.receive(data, CLIENT, path.now)
        early = handovers(path)[1].early
        assert len(early) == kept
        assert set(map(len, early)) == {size}


def test_a_datagram_of_very_many_packets_is_dropped(credentials_of: CredentialsOf) -> None:
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b"))).run()
    tiny = bytes((0xE0,)) + b"\0\0\0\1" + b"\0\0" + b"\1" + b"x"
    assert module._short_header_at(tiny * 7) == 7 * len(tiny)
    assert module._short_header_at(tiny * 9) is None
    assert path.server.handshake.receive(tiny * 5000, CLIENT, path.now) is None


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xc0\0\0\0\1", b"\xc0\0\0\0\1\xff", bytes(40), b"\xff" * 1200])
def test_what_is_no_packet_is_dropped(data: bytes, credentials_of: CredentialsOf) -> None:
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b")))
    path.step()
    for end, address in ((path.client, SERVER), (path.server, CLIENT)):
        end.receive(data, address, path.now)
    path.run()
    assert path.client.is_done
    assert path.server.is_done


# -- certificates ----------------------------------------------------------------------------------------------------


def test_a_client_without_a_certificate_is_shown_as_such(credentials_of: CredentialsOf) -> None:
    server = credentials_of("b")
    _, b = handovers(Path((Ours, Ours), (None, server), trust=server.authority_pem).run())
    assert b.certificate is None
    assert b.chain == ()


def test_a_client_of_a_foreign_authority_is_shown_with_its_foreign_certificate(credentials_of: CredentialsOf) -> None:
    foreign, server = credentials_of("a", authority=1), credentials_of("b")
    _, b = handovers(Path((Ours, Ours), (foreign, server), trust=server.authority_pem).run())
    assert b.certificate == foreign.certificate, "aioquic checks no chain of clients; we must"


@pytest.mark.parametrize("kinds", PAIRS[:2], ids=["ours", "stock"])
def test_a_client_refuses_a_server_of_a_foreign_authority(kinds: Any, credentials_of: CredentialsOf) -> None:
    path = Path(kinds, (credentials_of("a"), credentials_of("b", authority=1))).run()
    path.wait(2000)
    assert not path.client.is_done
    assert not path.server.is_done
    failed = path.client.handshake.failed
    assert failed is not None
    assert 0x100 <= failed.code < 0x200
    assert "TLS alert" in failed.name
    assert path.server.failed == failed.code, "and says so to the server"


def test_a_client_with_a_key_that_is_not_of_its_certificate_is_told_after_it_was_done(
    credentials_of: CredentialsOf,
) -> None:
    class Thief(Ours):
        def __init__(self, quic: QuicConfiguration, **options: Any) -> None:
            super().__init__(replace(quic, private_key=credentials_of("d").private_key), **options)

    path = Path((Thief, Ours), (credentials_of("a"), credentials_of("b")))
    for _ in range(20):
        path.step()
    client, server = path.client.handshake, path.server.handshake
    assert client.handover is not None
    assert server.handover is None
    assert client.failed is not None
    assert client.failed.code == 0x100 + tls.AlertDescription.decrypt_error
    assert client.is_over
    path.wait(2000)
    assert server.failed is not None


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_handshake_that_nobody_answers_fails(credentials_of: CredentialsOf) -> None:
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b")), tap=lambda count, data: [])
    path.wait(40_000)
    failed = path.client.handshake.failed
    assert failed is not None
    assert failed.reason == "Idle timeout"
    assert path.client.handshake.is_over
    assert path.client.next_timer() is None
    assert len(path.sent) > 5, "it has asked more than once"


def test_a_close_during_the_handshake_reaches_the_peer_at_once(credentials_of: CredentialsOf) -> None:
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b")))
    path.step()
    path.server.handshake.close(0x2, "refused")
    path.flush()  # in an Initial, where a close of the application's says no more than that (RFC 9000 section 10.2.3)
    begun = path.now
    path.run()
    failed = path.client.handshake.failed
    assert failed is not None
    assert failed.code == QuicErrorCode.APPLICATION_ERROR
    assert path.now - begun == DELAY, "not three probe timeouts later"


def test_last_words_are_within_the_limit_of_an_unvalidated_address(credentials_of: CredentialsOf) -> None:
    """RFC 9000 section 8.1: three times what came."""
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b")))
    path.client.datagrams_to_send = lambda now_ns: []  # it falls silent
    for _ in range(10):
        path.step()
    received = sum(len(data) for from_client, data in path.sent if from_client)
    path.server.handshake.close(0x2, "refused")
    path.flush()
    assert sum(len(data) for from_client, data in path.sent if not from_client) <= 3 * received


def test_a_resumed_handshake_is_an_error(credentials_of: CredentialsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b")))
    event = events.HandshakeCompleted(alpn_protocol=None, early_data_accepted=False, session_resumed=True)
    path.step()
    monkeypatch.setattr(path.client.handshake._quic, "next_event", iter([event, None]).__next__)
    with pytest.raises(ProtocolError, match="no ticket was ever issued"):
        path.run()


def test_a_server_issues_no_ticket(credentials_of: CredentialsOf) -> None:
    path = Path((Stock, Ours), (credentials_of("a"), credentials_of("b"))).run()
    assert path.server.handshake._quic.tls.new_session_ticket_cb is None
    assert all(data[0] & 0x80 for from_client, data in path.sent if not from_client)


def test_the_first_round_trip_is_not_guessed_from_what_was_sent_twice(credentials_of: CredentialsOf) -> None:
    slow = 60 * MS  # more than the first probe timeout

    def tap(count: int, data: bytes) -> list[tuple[int, bytes]]:
        return [(slow, data)]

    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b")), tap=tap).run()
    a, b = handovers(path)
    assert a.rtt_ns in (None, 2 * slow)
    assert b.rtt_ns in (None, 2 * slow)


# -- traces ----------------------------------------------------------------------------------------------------------


def test_the_trace_is_handed_on_and_not_ended(credentials_of: CredentialsOf) -> None:
    ended: list[object] = []

    class Logger(QuicLogger):
        def end_trace(self, trace: Any) -> None:
            ended.append(trace)

    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b")), logger=Logger()).run()
    traces = [handover.trace for handover in handovers(path)]
    assert None not in traces
    assert traces == [path.client.handshake.trace, path.server.handshake.trace]
    assert len(traces[0].to_dict()["events"]) > 10
    path.wait(60_000)
    assert path.client.handshake.failed is not None
    assert ended == []


def test_without_a_logger_there_is_no_trace(credentials_of: CredentialsOf) -> None:
    path = Path((Ours, Ours), (credentials_of("a"), credentials_of("b"))).run()
    assert handovers(path)[0].trace is None
