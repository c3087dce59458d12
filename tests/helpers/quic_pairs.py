"""Planes and stock aioquic as peers of each other: a network in memory, virtual time, seeded loss and reordering."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from aioquic.quic import events
from aioquic.quic.connection import QuicConnection

from quicoll_transport.net.runs import DatagramRun, joined
from quicoll_transport.quic.arrival_line import ArrivalLine
from quicoll_transport.quic.connection_ids import reset_token
from quicoll_transport.quic.handshake import Handshake, handshake_configuration
from quicoll_transport.quic.mtu import PathMtu
from quicoll_transport.quic.newreno import NewReno
from quicoll_transport.quic.parameters import local_parameters
from quicoll_transport.quic.plane import Plane
from quicoll_transport.quic.terms import SessionConfig, destination_cid

if TYPE_CHECKING:
    from aioquic.quic.configuration import QuicConfiguration

    from quicoll_transport.quic.closing import EndCause
    from quicoll_transport.quic.controller import Controller
    from quicoll_transport.quic.streams import ReceiveStream, SendStream
    from quicoll_transport.security.credentials import Credentials

CLIENT, SERVER = ("10.0.0.1", 1), ("10.0.0.2", 2)
START = 10**18
RESET_KEY = bytes(range(32))


class Peer(Protocol):
    """One side: what the network and the tests ask of it."""

    received: dict[int, bytearray]
    ended: dict[int, bool]
    closed: tuple[int, str] | None

    @property
    def ready(self) -> bool: ...
    def receive(self, run: DatagramRun, now_ns: int) -> None: ...
    def datagrams(self, now_ns: int) -> list[DatagramRun]: ...
    def next_timer(self) -> int | None: ...
    def handle_timer(self, now_ns: int) -> None: ...
    def send(self, data: bytes) -> int: ...


class PlanePeer:
    """A handshake, then a plane; keeps all that streams bring."""

    def __init__(
        self,
        handshake: Handshake,
        config: SessionConfig,
        *,
        seed: int = 0,
        datagram: int = 1452,
        largest: int = 1452,
        controller: Callable[[int], Controller] = NewReno,
    ) -> None:
        self.handshake = handshake
        self.config = config
        self.datagram = datagram
        self.largest = max(datagram, largest)  # up to where the path's MTU is searched for
        self.controller = controller
        self.random = random.Random(seed)
        self.planes: list[Plane] = []
        self.received: dict[int, bytearray] = {}
        self.ended: dict[int, bool] = {}
        self.resets: dict[int, int] = {}
        self.reading = True

    @classmethod
    def client(cls, credentials: Credentials, config: SessionConfig | None = None, **options: Any) -> PlanePeer:
        config = config or SessionConfig()
        handshake = Handshake(handshake_configuration(credentials, config, is_client=True), local_parameters(config))
        handshake.connect(SERVER, START)
        return cls(handshake, config, **options)

    @classmethod
    def server(
        cls, credentials: Credentials, first: bytes, config: SessionConfig | None = None, **options: Any
    ) -> PlanePeer:
        config = config or SessionConfig()
        handshake = Handshake(
            handshake_configuration(credentials, config, is_client=False),
            local_parameters(config),
            reset_token=lambda own: reset_token(RESET_KEY, own),
            original_cid=destination_cid(first),
        )
        return cls(handshake, config, **options)

    @property
    def plane(self) -> Plane:
        return self.planes[0]

    @property
    def ready(self) -> bool:
        return bool(self.planes)

    @property
    def closed(self) -> tuple[int, str] | None:
        cause: EndCause | None = self.plane.cause if self.planes else None
        return None if cause is None else (cause.code, cause.reason)

    def receive(self, run: DatagramRun, now_ns: int) -> None:
        if self.planes and not run.memory[0] & 0x80:
            self.plane.receive(run, now_ns)
        else:
            for data in run.datagrams():
                short: bytes | memoryview | None = data
                if not self.planes or data[0] & 0x80:
                    short = self.handshake.receive(data, run.address, now_ns)
                    self._advance(now_ns)
                if short is not None and self.planes:
                    self.plane.receive_one(short, run.address, now_ns)
        if self.planes and self.plane.confirmed:
            self.handshake.confirm()

    def _advance(self, now_ns: int) -> None:
        handover = self.handshake.handover
        if handover is not None and not self.planes:
            plane = Plane(
                handover,
                reader=self,
                controller=self.controller,
                mtu=self.begin_search,
                arrivals=ArrivalLine().join(),
                key_packets=self.config.key_packets,
                forged_packets=self.config.forged_packets,
                initial_rtt_ns=self.config.initial_rtt_ns,
                reset_key=RESET_KEY,
                draw=self.random.randbytes,
                now_ns=now_ns,
            )
            self.planes.append(plane)
            for packet in handover.early:
                plane.receive_one(packet, handover.address, now_ns)

    def begin_search(self) -> PathMtu:
        return PathMtu(base=self.datagram, most=self.largest)

    def datagrams(self, now_ns: int) -> list[DatagramRun]:
        out = joined(self.handshake.datagrams_to_send(now_ns))
        return out + (self.plane.datagrams(now_ns) if self.planes else [])

    def next_timer(self) -> int | None:
        due = [self.handshake.next_timer(), self.plane.next_timer() if self.planes else None]
        return min((at for at in due if at is not None), default=None)

    def handle_timer(self, now_ns: int) -> None:
        self.handshake.handle_timer(now_ns)
        if self.planes:
            self.plane.handle_timer(now_ns)

    def open(self, data: bytes, *, fin: bool = True, unidirectional: bool = True) -> SendStream:
        stream = self.plane.outbound.open(unidirectional=unidirectional)
        self.plane.outbound.write(stream, memoryview(data), fin=fin)
        return stream

    def send(self, data: bytes) -> int:
        return self.open(data).id

    # StreamReader

    def stream_arrived(self, stream: ReceiveStream) -> None:
        if self.reading:
            self.received.setdefault(stream.id, bytearray()).extend(stream.read())
            self.ended[stream.id] = stream.is_whole

    def stream_reset(self, stream: ReceiveStream, code: int) -> None:
        self.resets[stream.id] = code


class StockPeer:
    """aioquic alone."""

    def __init__(self, quic: QuicConnection) -> None:
        self.quic = quic
        self.received: dict[int, bytearray] = {}
        self.ended: dict[int, bool] = {}
        self.resets: dict[int, int] = {}
        self.closed: tuple[int, str] | None = None
        self.ready = False

    @classmethod
    def client(cls, credentials: Credentials, **options: Any) -> StockPeer:
        self = cls(QuicConnection(configuration=stock_configuration(credentials, is_client=True, **options)))
        self.quic.connect(SERVER, START / 1e9)
        return self

    @classmethod
    def server(cls, credentials: Credentials, first: bytes, **options: Any) -> StockPeer:
        config = stock_configuration(credentials, is_client=False, **options)
        return cls(QuicConnection(configuration=config, original_destination_connection_id=destination_cid(first)))

    def receive(self, run: DatagramRun, now_ns: int) -> None:
        for data in run.datagrams():
            self.quic.receive_datagram(bytes(data), run.address, now_ns / 1e9)
        self._drain()

    def _drain(self) -> None:
        while (event := self.quic.next_event()) is not None:
            match event:
                case events.HandshakeCompleted():
                    self.ready = True
                case events.StreamDataReceived():
                    self.received.setdefault(event.stream_id, bytearray()).extend(event.data)
                    self.ended[event.stream_id] = event.end_stream
                case events.StreamReset():
                    self.resets[event.stream_id] = event.error_code
                case events.ConnectionTerminated():
                    self.closed = (event.error_code, event.reason_phrase)

    def datagrams(self, now_ns: int) -> list[DatagramRun]:
        return joined(self.quic.datagrams_to_send(now_ns / 1e9))

    def next_timer(self) -> int | None:
        at = self.quic.get_timer()
        return None if at is None else int(at * 1e9) + 1000

    def handle_timer(self, now_ns: int) -> None:
        if (at := self.quic.get_timer()) is not None and at * 1e9 <= now_ns:
            self.quic.handle_timer(now_ns / 1e9)
            self._drain()

    def send(self, data: bytes) -> int:
        stream_id: int = self.quic.get_next_available_stream_id(is_unidirectional=True)
        self.quic.send_stream_data(stream_id, data, True)
        return stream_id


def stock_configuration(
    credentials: Credentials, *, is_client: bool, window: int = 16 << 20, datagram: int = 1452
) -> QuicConfiguration:
    config = handshake_configuration(credentials, SessionConfig(), is_client=is_client)
    config.max_data = config.max_stream_data = window
    config.max_datagram_size = datagram
    config.congestion_control_algorithm = "reno"
    return config


class PairNet:
    """Two peers and a path between them; virtual time in nanoseconds. The server is made by the first datagram.

    loss, duplicate, flip: probabilities for each datagram. jitter_ns: up to so much is added to `delay_ns`.
    tap(side, data) -> whether a datagram from this side goes on.
    """

    def __init__(
        self,
        client: Peer,
        make_server: Callable[[bytes], Peer],
        *,
        seed: int = 0,
        loss: float = 0.0,
        delay_ns: int = 2_000_000,
        jitter_ns: int = 0,
        duplicate: float = 0.0,
        flip: float = 0.0,
        runs: bool = True,
    ) -> None:
        self.client = client
        self.servers: list[Peer] = []
        self.now = START
        self.random = random.Random(seed)
        self.loss, self.duplicate, self.flip = loss, duplicate, flip
        self.delay_ns, self.jitter_ns = delay_ns, jitter_ns
        self.tap: Callable[[int, bytes], bool] = lambda side, data: True
        self.sent = [0, 0]
        self.addresses = [CLIENT, SERVER]
        self._make_server = make_server
        self._runs = runs
        self._queue: list[tuple[int, int, int, bytes, Any]] = []
        self._count = 0

    @property
    def server(self) -> Peer:
        return self.servers[0]

    @property
    def sides(self) -> list[Peer]:
        return [self.client, *self.servers]

    def carry(self) -> None:
        """Let everything go that the peers have to send."""
        for side, peer in enumerate(self.sides):
            for run in peer.datagrams(self.now):
                for data in run.datagrams():
                    self._send(side, bytes(data))

    def _send(self, side: int, data: bytes) -> None:
        self.sent[side] += 1
        if not self.tap(side, data):
            return
        rng = self.random
        for _ in range(1 + (rng.random() < self.duplicate)):
            if rng.random() < self.loss:
                continue
            if rng.random() < self.flip:
                i = rng.randrange(len(data))
                data = data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
            self._count += 1
            at = self.now + self.delay_ns + int(rng.random() * self.jitter_ns)
            heapq.heappush(self._queue, (at, self._count, 1 - side, data, self.addresses[side]))

    def due(self) -> int | None:
        due = [self._queue[0][0]] if self._queue else []
        due += [at for peer in self.sides if (at := peer.next_timer()) is not None]
        return min(due, default=None)

    def step(self) -> bool:
        """Go on to the next thing that is due; return whether there was one."""
        self.carry()
        due = self.due()
        if due is None:
            return False
        self.now = max(self.now, due)
        arrived: list[list[tuple[bytes, Any]]] = [[], []]
        while self._queue and self._queue[0][0] <= self.now:
            _, _, side, data, address = heapq.heappop(self._queue)
            arrived[side].append((data, address))
        for side in (0, 1):
            if arrived[side]:
                if side and not self.servers:
                    self.servers.append(self._make_server(arrived[1][0][0]))
                for run in joined(arrived[side]) if self._runs else _one_by_one(arrived[side]):
                    self.sides[side].receive(run, self.now)
        for peer in self.sides:
            if (at := peer.next_timer()) is not None and at <= self.now:
                peer.handle_timer(self.now)
        self.carry()
        return True

    def run(self, ns: int) -> None:
        """Let so much time pass."""
        until = self.now + ns
        self.carry()
        while (due := self.due()) is not None and due <= until:
            self.step()
        self.now = until

    def until(self, condition: Callable[[], bool], *, limit_ns: int = 600 * 10**9) -> int:
        """Go on until something is so; return how long it took. Fails when it takes too long, or never comes."""
        begin = self.now
        while not condition():
            assert self.step(), "nothing will happen any more"
            assert self.now - begin < limit_ns, "it takes too long"
            for peer in self.sides:
                assert peer.closed is None, peer.closed
        return self.now - begin

    def shake_hands(self) -> None:
        self.until(lambda: all(peer.ready for peer in self.sides) and len(self.sides) == 2)


def _one_by_one(arrived: list[tuple[bytes, Any]]) -> Iterator[DatagramRun]:
    for data, address in arrived:
        yield DatagramRun(memoryview(bytearray(data)), len(data), address)


def transfer(net: PairNet, sizes: list[int], *, sides: tuple[int, ...] = (0, 1)) -> int:
    """Send messages of these sizes from each of the sides, check every byte; return the nanoseconds it took."""
    expected: list[dict[int, str]] = [{}, {}]
    begin = net.now
    for side in sides:
        for size in sizes:
            data = net.random.randbytes(size)
            expected[side][net.sides[side].send(data)] = hashlib.sha256(data).hexdigest()
    net.until(
        lambda: all(net.sides[1 - side].ended.get(stream_id, False) for side in sides for stream_id in expected[side])
    )
    took = net.now - begin
    for side in sides:
        received = net.sides[1 - side].received
        for stream_id, digest in expected[side].items():
            assert hashlib.sha256(received[stream_id]).hexdigest() == digest
    return took
