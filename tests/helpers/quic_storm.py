"""Planes and stock aioquic against each other in bad weather: one seed, one history, every byte compared.

A storm is two peers (`PAIRS`: our plane or stock aioquic on either side), a path in virtual time, and a few waves of
work: messages of all sizes, streams given up and stopped, words on a bidirectional stream, new keys, other addresses,
paths that carry less than before. During a wave datagrams are lost, doubled, spoilt and overtaken; then the wave has to
come to its end, and at the end of the last one the connection is closed. What must hold:

    bytes       each message arrives as it was sent, or as a beginning of it where either side gave it up
    progress    each wave ends within `_PATIENCE` of virtual time, and time never stands still
    in flight   a plane has never more than its congestion window under way, but for probes
    amplified   nobody sends an address that it has not validated more than three times what came from there
    nothing     after each wave nothing is in flight, waits or is held; limits are where the bytes are; after the last
                one nobody reads the memory of any message

All chance comes from the seed, that of the handshake too, so a failure repeats itself, and so do storms in which
datagrams arrive in runs and one by one (`batched`): `digest` is over all datagrams that were sent.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from aioquic.buffer import Buffer
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicProtocolVersion, encode_quic_retry, pull_quic_header
from aioquic.tls import Epoch
from quic_pairs import CLIENT, SERVER, START, PlanePeer, StockPeer, stock_configuration
from quicoll_fuzz.virtual import today
from quicoll_fuzz.world import credentials

from quicoll_transport.net.runs import DatagramRun, joined
from quicoll_transport.quic.cubic import Cubic
from quicoll_transport.quic.handshake import Handshake, handshake_configuration
from quicoll_transport.quic.mtu import PathMtu
from quicoll_transport.quic.newreno import NewReno
from quicoll_transport.quic.parameters import local_parameters
from quicoll_transport.quic.seeded import entropy
from quicoll_transport.quic.terms import CID_LENGTH, SessionConfig

if TYPE_CHECKING:
    from aioquic.quic.configuration import QuicConfiguration

    from quicoll_transport.net.addresses import Address
    from quicoll_transport.quic.streams import ReceiveStream, SendStream

__all__ = ["PAIRS", "Storm", "StormError", "run_storm"]

PAIRS = (("plane", "plane"), ("plane", "stock"), ("stock", "plane"), ("stock", "stock"))
MS = 1_000_000
SECOND = 1000 * MS
_IDLE = 600 * SECOND  # a third of all is lost, and probe timeouts double each time
_PATIENCE = 3000 * SECOND  # of virtual time, for one wave
_STILL = 200  # steps without a datagram at one instant
_HEAD = 16  # bytes of a message that say what becomes of the rest
_WORDS = 0  # the bidirectional stream
_TOKEN = b"a token that any server takes"


def pair_of(seed: int) -> tuple[str, str]:
    """Pairs in turns; stock aioquic with itself, which shows that storms can be weathered, more seldom."""
    return PAIRS[(0, 1, 2, 0, 1, 2, 0, 3)[seed % 8]]


class StormError(AssertionError):
    """What must hold did not."""


class Message(NamedTuple):
    """What a side sends on a stream of its own. fate: what its receiver does with it."""

    memory: bytearray
    copy: bytes
    fate: int  # 0: reads it; 1: has it written to memory; 2: the same, and that goes away; 3: stops it


class _Target:
    """Memory for a message, as an Inflow is."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self.view = memoryview(self.memory)
        self.filled = _HEAD
        self.alive = True


class PlaneSide(PlanePeer):
    """A plane whose reader does with messages what their heads say."""

    mtu_most = 0

    def begin(self) -> None:
        self.targets: dict[int, _Target] = {}
        self.streams: dict[int, ReceiveStream] = {}
        self.stopped: dict[int, None] = {}
        self.words = bytearray()
        self.answer: SendStream | None = None
        self.is_client = self.handshake.is_client

    def begin_search(self) -> PathMtu:
        return PathMtu(base=self.datagram, most=max(self.datagram, self.mtu_most))

    def stream_arrived(self, stream: ReceiveStream) -> None:
        self.streams[stream.id] = stream
        if not self.reading and not stream.is_direct and stream.final != 0:
            return  # what is empty, or has its place, needs no reader
        if stream.id == _WORDS:
            self.words += stream.read()
            return
        target = self.targets.get(stream.id)
        if target is None and not stream.discarded:
            head = stream.peek(_HEAD)
            if head is not None and stream.id not in self.received and head[0] in (1, 2):
                target = self.targets[stream.id] = _Target(int.from_bytes(head[8:], "big"))
                stream.direct(target, _HEAD)
                target.memory[:_HEAD] = head
            elif head is not None and stream.id not in self.received and head[0] == 3:
                self._stop(stream)
            else:
                self.received.setdefault(stream.id, bytearray()).extend(stream.read())
        if target is not None and target.alive:
            self.received[stream.id] = target.memory[: target.filled]
        elif target is not None:
            self._stop(stream)
        self.ended[stream.id] = stream.is_whole and stream.id not in self.stopped

    def _stop(self, stream: ReceiveStream) -> None:
        self.stopped[stream.id] = None
        self.plane.inbound.stop(stream, 7)

    # what a storm asks for

    def post(self, message: Message) -> int:
        stream = self.open(message.memory)
        self.sending[id(message)] = stream
        return stream.id

    sending: dict[int, SendStream]

    def give_up(self, key: int) -> None:
        self.plane.outbound.reset(self.sending[key], 9)

    def say(self, data: bytes, *, fin: bool = False) -> None:
        if self.answer is None:
            outbound = self.plane.outbound
            client = self.is_client
            self.answer = outbound.open(unidirectional=False, urgent=True) if client else outbound.respond(_WORDS)
        self.plane.outbound.write(self.answer, data, fin=fin)

    def stop_one(self, rng: random.Random) -> None:
        """Want no more of a message that is on its way, or let go of the memory that it is written to."""
        alive = [target for target in self.targets.values() if target.alive and target.filled < len(target.view)]
        if alive:
            rng.choice(alive).alive = False

    def renew_keys(self) -> None:
        self.plane.keys.update()

    def renew_id(self) -> None:
        """Name another id of the peer's from now on, as one does that means to move (RFC 9000 section 9.5)."""
        path = self.plane.paths.current
        self.plane.paths.gone.append(path.ids)
        path.ids = -1 - abs(path.ids)  # of no path that there ever was

    def ping(self) -> None:
        self.plane.ping()

    def read_again(self) -> None:
        self.reading = True
        for stream in list(self.streams.values()):
            self.plane.inbound.again(stream)

    def close(self) -> None:
        self.plane.close(0x77, "the storm is over")


class StockSide(StockPeer):
    """Stock aioquic under the same orders."""

    answer: Any = None

    def begin(self, *, is_client: bool) -> None:
        self.is_client = is_client
        self.stopped: dict[int, None] = {}
        self.sending: dict[int, int] = {}
        self._secret: bytes | None = None  # of the keys it sends with, and the first packet under them
        self._first = 0

    @property
    def words(self) -> bytearray:
        return self.received.get(_WORDS, bytearray())

    def post(self, message: Message) -> int:
        stream_id = self.sending[id(message)] = self.send(message.copy)
        return stream_id

    def give_up(self, key: int) -> None:
        self.quic.reset_stream(self.sending[key], 9)

    def say(self, data: bytes, *, fin: bool = False) -> None:
        self.quic.send_stream_data(_WORDS, data, fin)

    def stop_one(self, rng: random.Random) -> None:
        under_way = [n for n, ended in self.ended.items() if not ended and n & 2 and n not in self.resets]
        if under_way:
            stream_id = rng.choice(under_way)
            self.stopped[stream_id] = None
            self.quic.stop_stream(stream_id, 7)

    def renew_keys(self) -> None:
        """Ask for new keys, but not again before a packet under the present ones is acknowledged (RFC 9001 6.1).

        aioquic itself does not look at that. Where it has followed its peer to new keys and is asked before it has
        sent anything under them, it steps once more: the bit in its packets then says the phase that the peer still
        opens, the keys are two steps further, and neither side opens anything of the other ever again.
        """
        space, keys = self.quic._spaces[Epoch.ONE_RTT], self.quic._cryptos[Epoch.ONE_RTT]
        if keys.send.secret == self._secret and space.largest_acked_packet >= self._first:
            self.quic.request_key_update()

    def datagrams(self, now_ns: int) -> list[DatagramRun]:
        first, keys = self.quic._packet_number, self.quic._cryptos[Epoch.ONE_RTT]
        runs = super().datagrams(now_ns)
        if keys.send.secret != self._secret:
            self._first, self._secret = first, keys.send.secret
        return runs

    def renew_id(self) -> None:
        self.quic.change_connection_id()

    def ping(self) -> None:
        self.quic.send_ping(1)

    def read_again(self) -> None: ...

    def close(self) -> None:
        self.quic.close(error_code=0x77, reason_phrase="the storm is over")


class Storm:
    """See the module's head.

    digest: of what was sent, when, and to where. parity_bytes, repaired_bytes: the most of any plane.
    """

    def __init__(self, seed: int, *, pair: tuple[str, str] | None = None, batched: bool = True) -> None:
        rng = self.rng = random.Random(f"storm {seed}")
        self.path_rng = random.Random(f"path {seed}")
        self.seed, self.batched = seed, batched
        self.pair = pair or pair_of(seed)
        self.now = START
        self.log = hashlib.sha256()
        self.datagrams = self.parity_bytes = self.repaired_bytes = 0
        # the path
        self.delay_ns = rng.choice((0, 1, 5, 50, 200)) * MS
        self.tick_ns = rng.choice((1, MS, 4 * MS))
        self.jitter_ns = rng.choice((0, 0, 1, 10)) * max(self.delay_ns, MS) // 2
        self.loss = rng.choice((0.0, 0.0, 0.01, 0.05, 0.2))
        self.duplicate = rng.choice((0.0, 0.05, 0.3))
        self.flip = rng.choice((0.0, 0.02, 0.1))
        self.carries = 65535  # bytes of the largest datagram that passes
        self.retry = rng.random() < 0.3
        # the peers
        self.window = rng.choice((16 << 10, 64 << 10, 1 << 20, 16 << 20))
        self.key_packets = rng.choice((8, 50, 1 << 22))
        self.congestion = "bbr" if seed & 1 else "cubic"  # what a session says of itself: with bbr it sends parity
        self.datagram = rng.choice((1200, 1452, 4000)) if self.pair == PAIRS[0] else rng.choice((1200, 1452))
        self.addresses: list[Address] = [CLIENT, SERVER]
        self.sides: list[Any] = [self._client()]
        self._queue: list[tuple[int, int, int, bytes, Address]] = []
        self._count = 0
        self._gone: dict[Address, None] = {}
        self._still = 0
        self._word_ns = START
        self._given = {}  # type: dict[Address, list[int]]
        self.posted: list[dict[int, Message]] = [{}, {}]
        self._all: list[list[Message]] = [[], []]
        self.given_up: list[dict[int, None]] = [{}, {}]
        self.moves = [0, 0]  # by a NAT, and by the client's will
        self.said: list[bytearray] = [bytearray(), bytearray()]

    # -- peers ---------------------------------------------------------------------------------------------------

    def _config(self) -> SessionConfig:
        return SessionConfig(
            window_bytes=self.window,
            key_packets=self.key_packets,
            initial_rtt_ns=50 * MS,
            idle_ns=_IDLE,
            congestion=self.congestion,
        )

    def _stock(self, node: str, *, is_client: bool) -> QuicConfiguration:
        quic = stock_configuration(credentials(node), is_client=is_client, window=self.window, datagram=self.datagram)
        quic.idle_timeout = _IDLE / 1e9
        return quic

    def _plane(self, handshake: Handshake, seed: int) -> PlaneSide:
        controller = self.rng.choice((NewReno, Cubic))
        peer = PlaneSide(handshake, self._config(), seed=seed, datagram=self.datagram, controller=controller)
        peer.mtu_most = self.rng.choice((0, 1452, 9000, 65000))
        peer.sending = {}
        peer.begin()
        return peer

    def _client(self) -> Any:
        kind, shown = self.pair[0], credentials("a")
        if kind == "plane":
            config = self._config()
            handshake = Handshake(handshake_configuration(shown, config, is_client=True), local_parameters(config))
            handshake.connect(SERVER, START)
            return self._plane(handshake, 1)
        client = StockSide(QuicConnection(configuration=self._stock("a", is_client=True)))
        client.quic.connect(SERVER, START / 1e9)
        client.begin(is_client=True)
        return client

    def _server(self, first: bytes, retried: bytes | None, original: bytes) -> Any:
        kind, shown = self.pair[1], credentials("b")
        if kind == "plane":
            config = self._config()
            handshake = Handshake(
                handshake_configuration(shown, config, is_client=False),
                local_parameters(config),
                original_cid=original,
                retry_cid=retried,
            )
            return self._plane(handshake, 2)
        quic = QuicConnection(
            configuration=self._stock("b", is_client=False),
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
        )
        server = StockSide(quic)
        server.begin(is_client=False)
        return server

    def _admit(self, first: bytes) -> None:
        """Make the server, or ask for the first datagram again."""
        header = pull_quic_header(Buffer(data=first), host_cid_length=CID_LENGTH)
        if not self.retry:
            self.sides.append(self._server(first, None, header.destination_cid))
        elif header.token:
            self.sides.append(self._server(first, header.destination_cid, header.token[len(_TOKEN) :]))
        else:
            reply = encode_quic_retry(
                version=QuicProtocolVersion.VERSION_1,
                source_cid=b"retried!",
                destination_cid=header.source_cid,
                original_destination_cid=header.destination_cid,
                retry_token=_TOKEN + header.destination_cid,
            )
            self._carry(1, reply, CLIENT)

    @property
    def ready(self) -> bool:
        return len(self.sides) == 2 and all(side.ready for side in self.sides)

    @property
    def planes(self) -> list[PlaneSide]:
        return [side for side in self.sides if isinstance(side, PlaneSide) and side.ready]

    # -- the path ------------------------------------------------------------------------------------------------

    def _send(self, side: int) -> None:
        peer = self.sides[side]
        recovery = peer.plane.recovery if isinstance(peer, PlaneSide) and peer.ready else None
        before = recovery.in_flight if recovery is not None else 0
        for run in peer.datagrams(self.now):
            if len(run.memory) == 0 or (len(run) > 1 and len(run.memory) <= (len(run) - 1) * run.size):
                raise StormError("a run of no datagrams")
            for data in run.datagrams():
                self._still = 0
                self._carry(side, bytes(data), run.address)
        if recovery is not None and recovery.in_flight > max(before, recovery.controller.window) + 6 * 1200:
            raise StormError(f"{recovery.in_flight} bytes in flight of {recovery.controller.window}")

    def _carry(self, side: int, data: bytes, to: Address) -> None:
        self.datagrams += 1
        self.log.update(b"%d %d %d %r " % (self.now - START, side, len(data), to) + data)
        if side and to != CLIENT:
            self._amplified(to, len(data))
        if len(data) > self.carries or (side and to in self._gone):
            return
        rng = self.path_rng
        for _ in range(1 + (rng.random() < self.duplicate)):
            if rng.random() < self.loss:
                continue
            spoilt = data
            if rng.random() < self.flip and not data[0] & 0x80:
                at = rng.randrange(len(data))
                spoilt = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            self._count += 1
            due = self.now + self.delay_ns + int(rng.random() * self.jitter_ns)
            due = -(-due // self.tick_ns) * self.tick_ns
            heapq.heappush(
                self._queue, (due, self._count, 1 - side, spoilt, self.addresses[side] if not side else SERVER)
            )

    def _amplified(self, to: Address, size: int) -> None:
        """An address that was not there in the handshake; it is validated when the plane says so."""
        server = self.sides[1]
        if not isinstance(server, PlaneSide):
            return
        received, sent = self._given.setdefault(to, [0, 0])
        if any(path.address == to and path.validated for path in server.plane.paths):
            return
        self._given[to][1] = sent + size
        if sent + size > 3 * received:
            raise StormError(f"{sent + size} bytes to {to}, from where {received} came")

    def _keep_alive(self) -> None:
        """The client's word, as a link's heartbeat is: a silent one whose address has changed is never found."""
        if self.ready and 0 < self._word_ns <= self.now:
            self._word_ns = self.now + 2 * SECOND
            self.sides[0].ping()

    def _deliver(self) -> None:
        arrived: list[list[tuple[bytes, Address]]] = [[], []]
        while self._queue and self._queue[0][0] <= self.now:
            _, _, side, data, address = heapq.heappop(self._queue)
            arrived[side].append((data, address))
        for side in (0, 1):
            if arrived[side]:
                self._still = 0
                if side and len(self.sides) < 2:
                    self._admit(arrived[1][0][0])
                if side < len(self.sides):
                    self._feed(side, arrived[side])

    def _feed(self, side: int, arrived: list[tuple[bytes, Address]]) -> None:
        peer = self.sides[side]
        if side:
            for data, address in arrived:
                if address != CLIENT:
                    self._given.setdefault(address, [0, 0])[0] += len(data)
        if self.batched:
            # As the endpoint does: all datagrams of a run are of one header form.
            forms: list[list[tuple[bytes, Address]]] = []
            for one in arrived:
                if not forms or (forms[-1][-1][0][0] ^ one[0][0]) & 0x80:
                    forms.append([])
                forms[-1].append(one)
            runs = [run for form in forms for run in joined(form)]
        else:
            runs = [DatagramRun(memoryview(bytearray(data)), len(data), address) for data, address in arrived]
        for run in runs:
            peer.receive(run, self.now)

    # -- time ----------------------------------------------------------------------------------------------------

    def due(self) -> int | None:
        due = [self._queue[0][0]] if self._queue else []
        due += [at for side in self.sides if (at := side.next_timer()) is not None]
        due += [self._word_ns] if self.ready and self._word_ns else []
        return min(due, default=None)

    def step(self) -> bool:
        """Go on to the next thing that is due; return whether there was one."""
        for side in range(len(self.sides)):
            self._send(side)
        due = self.due()
        if due is None:
            return False
        self._still = self._still + 1 if due <= self.now else 0
        if self._still > _STILL:
            raise StormError("time stands still")
        self.now = max(self.now, due)
        self._deliver()
        for peer in self.sides:
            if (at := peer.next_timer()) is not None and at <= self.now:
                peer.handle_timer(self.now)
        self._keep_alive()
        return True

    def run(self, ns: int) -> None:
        """Let so much time pass."""
        until = self.now + ns
        while True:
            for side in range(len(self.sides)):
                self._send(side)
            due = self.due()
            if due is None or due > until:
                break
            self.step()
            self._alive()
        self.now = until

    def until(self, condition: Callable[[], bool], what: Callable[[], object]) -> None:
        end = self.now + _PATIENCE
        while not condition():
            if not self.step():
                raise StormError(f"nothing will happen any more, {what()}")
            self._alive()
            if self.now > end:
                raise StormError(f"it takes too long, {what()}")

    def _alive(self) -> None:
        for number, side in enumerate(self.sides):
            if side.closed is not None:
                raise StormError(f"side {number} has ended: {side.closed}")

    # -- work ----------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Go through all of it. Raises StormError."""
        self.until(lambda: self.ready, lambda: "the handshake")
        self.until(self._confirmed, lambda: "its confirmation")
        for wave in range(self.rng.choice((1, 2, 3))):
            self._wave(last=False)
            self._check_nothing_left(f"after wave {wave}")
        self._end()

    def _confirmed(self) -> bool:
        return all(side.plane.confirmed for side in self.planes)

    def _wave(self, *, last: bool) -> None:
        rng = self.rng
        weather = self.loss, self.duplicate, self.flip
        many, large = (150, 400_000) if self.pair == PAIRS[0] else (30, 60_000)  # stock aioquic takes its time
        actions: list[Callable[[], None]] = []
        for side in (0, 1):
            sizes = [rng.choice((0, 1, 16, 17, 300, 1100, 1500, 3000)) for _ in range(rng.choice((0, 3, 10, 40, many)))]
            sizes += [rng.randrange(20_000, large) for _ in range(rng.choice((0, 1, 2)))]
            actions += [self._poster(side, size) for size in sizes]
            actions += [self._giver_up(side) for _ in range(rng.choice((0, 2, 8)))]
            actions += [self._stopper(side) for _ in range(rng.choice((0, 3)))]
            actions += [self._speaker(side) for _ in range(rng.choice((0, 3, 20)))]
        rng.shuffle(actions)
        once = [self._hole, self._icmp, self._pauser(0), self._pauser(1)]
        # Stock aioquic opens nothing under the old keys once it has asked for new ones. So if the client has moved at
        # that time, it hears nothing of the new address, and the client nothing of the new keys. When it may ask at
        # all: StockSide.renew_keys.
        if rng.random() < 0.5 or "stock" not in self.pair:
            once += [self._mover(host=host, meant=meant) for host in (False, True) for meant in (False, True)]
        else:
            once += [self._renewer(0), self._renewer(1)]
        if "stock" not in self.pair:
            once += [self._renewer(0), self._renewer(1)]
        for action in rng.sample(once, rng.choice((0, 1, 3))):
            actions.insert(rng.randrange(len(actions) + 1), action)
        pace = rng.choice((0, MS // 10, 2 * MS, 20 * MS))
        for action in actions:
            action()
            self.run(int(rng.random() * pace))
        for side in self.sides:
            side.read_again()
        if rng.random() < 0.7:
            self.loss = self.duplicate = self.flip = 0.0  # else it is to end all the same
        self.until(self._is_quiet, self._unfinished)
        self.loss, self.duplicate, self.flip = weather

    def _poster(self, side: int, size: int) -> Callable[[], None]:
        fate = self.rng.choice((0, 0, 0, 1, 1, 1, 2, 3)) if size >= _HEAD else 0

        def post() -> None:
            head = bytes((fate,)) + self.rng.randbytes(7) + size.to_bytes(8, "big")
            data = (head + self.rng.randbytes(max(0, size - _HEAD)))[:size]
            message = Message(bytearray(data), data, fate)
            self._all[side].append(message)
            self.sides[side].post(message)

        return post

    def _giver_up(self, side: int) -> Callable[[], None]:
        def give_up() -> None:
            if self._all[side]:
                message = self.rng.choice(self._all[side])
                self.given_up[side][id(message)] = None
                self.sides[side].give_up(id(message))

        return give_up

    def _stopper(self, side: int) -> Callable[[], None]:
        return lambda: self.sides[side].stop_one(self.rng)

    def _speaker(self, side: int) -> Callable[[], None]:
        def speak() -> None:
            if side and not self._server_may_speak():
                return
            data = self.rng.randbytes(self.rng.choice((1, 50, 3000)))
            self.said[side] += data
            self.sides[side].say(data)

        return speak

    def _server_may_speak(self) -> bool:
        server = self.sides[1]
        return bool(server.words)

    def _renewer(self, side: int) -> Callable[[], None]:
        return lambda: self.sides[side].renew_keys()

    def _pauser(self, side: int) -> Callable[[], None]:
        def pause() -> None:
            self.sides[side].reading = False

        return pause

    def _mover(self, *, host: bool, meant: bool) -> Callable[[], None]:
        """The client gets another address. meant: by its own will; else a NAT has done it."""

        def move() -> None:
            self.moves[meant] += 1
            if meant:
                self.sides[0].renew_id()
            old = self.addresses[0]
            self.addresses[0] = (
                f"10.0.{self.rng.randrange(256)}.7" if host else old[0],
                self.rng.randrange(1000, 60000),
            )
            if self.rng.random() < 0.7 and self.addresses[0] != old:
                self._gone[old] = None
            self._gone.pop(self.addresses[0], None)
            self.sides[0].ping()

        return move

    def _hole(self) -> None:
        """The path carries less from now on."""
        self.carries = max(self.rng.choice((1200, 1452, 5000)), 1200 if self._searching() else self.datagram)

    def _searching(self) -> bool:
        return all(isinstance(side, PlaneSide) for side in self.sides)

    def _icmp(self) -> None:
        for side in self.planes:
            side.plane.sender.limit_datagrams(self.rng.choice((1200, 1400, 3000)))

    # -- what must hold ------------------------------------------------------------------------------------------

    def _is_quiet(self) -> bool:
        for side in self.planes:
            plane = side.plane
            if not plane.recovery.is_idle or plane.control or len(plane.inbound) > (_WORDS in side.streams):
                return False
            if len(plane.outbound) > (side.answer is not None):
                return False
            if side.answer is not None and side.answer.upto < side.answer.length:
                return False
        return all(not self._missing(side) for side in (0, 1))

    def _missing(self, side: int) -> list[int]:
        """Messages of a side that should have arrived and have not."""
        sender, receiver = self.sides[side], self.sides[1 - side]
        if bytes(receiver.words) != self.said[side]:
            return [_WORDS]
        missing = []
        for message in self._all[side]:
            stream_id = self._id(sender, message)
            gave_up = id(message) in self.given_up[side] or stream_id in receiver.stopped or message.fate >= 2
            if not gave_up and not receiver.ended.get(stream_id, False):
                missing.append(stream_id)
        return missing

    def _id(self, sender: Any, message: Message) -> int:
        stream = sender.sending[id(message)]
        return stream if isinstance(stream, int) else stream.id

    def _unfinished(self) -> str:
        left = [
            (
                len(side.plane.outbound),
                len(side.plane.inbound),
                len(side.plane.control),
                side.plane.recovery.in_flight,
                side.plane.sender.mtu.size,
            )
            for side in self.planes
        ]
        return f"{[self._missing(0), self._missing(1)]}, (outbound, inbound, control, in flight, mtu): {left}"

    def _check_nothing_left(self, when: str) -> None:
        for side in (0, 1):
            sender, receiver = self.sides[side], self.sides[1 - side]
            for message in self._all[side]:
                got = bytes(receiver.received.get(self._id(sender, message), b""))
                whole = receiver.ended.get(self._id(sender, message), False)
                if got != message.copy[: len(got)] or (whole and len(got) != len(message.copy)):
                    name = f"message {self._id(sender, message)} of side {side}, fate {message.fate},"
                    raise StormError(f"{when}: {name} was altered: {len(got)} of {len(message.copy)} bytes, {whole=}")
        for side in self.planes:
            plane, name = side.plane, f"{when}: side {self.sides.index(side)}"
            inbound, recovery = plane.inbound, plane.recovery
            if recovery.in_flight:
                raise StormError(f"{name}: {recovery.in_flight} bytes of nothing in flight")
            protection, repairs = plane.protection, plane.repairs
            if protection is not None and any(parity.flying or parity.held for parity in protection._sets.values()):
                raise StormError(f"{name}: parity of nothing")
            self.parity_bytes = max(self.parity_bytes, protection.parity_bytes if protection is not None else 0)
            self.repaired_bytes = max(self.repaired_bytes, repairs.repaired_bytes if repairs is not None else 0)
            if inbound.holes:
                raise StormError(f"{name}: {inbound.holes} holes in nothing")
            if inbound.received != inbound.taken:
                raise StormError(f"{name}: {inbound.received} bytes have come, {inbound.taken} make room again")
        if len(self.planes) == 2:
            for one, other in (self.planes, self.planes[::-1]):
                if one.plane.outbound.fresh_bytes != other.plane.inbound.received:
                    sent, got = one.plane.outbound.fresh_bytes, other.plane.inbound.received
                    raise StormError(f"{when}: {sent} bytes were sent, {got} were counted")
        for side in (0, 1):
            if isinstance(self.sides[side], PlaneSide):
                for message in self._all[side]:
                    try:
                        message.memory.append(0)
                        message.memory.pop()
                    except BufferError:
                        number = self._id(self.sides[side], message)
                        raise StormError(f"{when}: the memory of message {number} of side {side} is held") from None
        # What is through is compared, and need not be again.
        for side in (0, 1):
            self._all[side].clear()
            self.given_up[side].clear()

    def _end(self) -> None:
        """One side closes; both come to their end."""
        closer, self._word_ns = self.rng.randrange(2), 0
        self.sides[closer].close()
        end = self.now + 2 * _IDLE
        while any(side.plane.ending.is_open or side.plane.ending.has_words for side in self.planes):
            if not self.step() or self.now > end:
                raise StormError("a connection that was closed does not end")
        for number, side in enumerate(self.sides):
            # The last words may be lost, and who says them again is not here (endpoint/core/closed.py).
            silent = (self.loss or self.flip) and side.closed == (0, "idle timeout")
            if isinstance(side, PlaneSide) and not silent and side.closed != (0x77, "the storm is over"):
                raise StormError(f"side {number} has ended otherwise: {side.closed}")
        for side in self.planes:
            side.plane.release()

    @property
    def digest(self) -> str:
        return self.log.hexdigest()


def run_storm(seed: int, *, pair: tuple[str, str] | None = None, batched: bool = True) -> Storm:
    """Go through the storm of one seed; return it. Raises StormError, which names the seed."""
    credentials("a")
    with entropy(random.Random(f"chance {seed}").randbytes, wall_clock=today):
        storm = Storm(seed, pair=pair, batched=batched)
        try:
            storm.go()
        except Exception as error:  # whatever it is, whoever reads it needs the seed
            again = f"PYTHONPATH=tests/helpers python -m quic_storm --first {seed} --seeds 1"
            raise StormError(
                f"seed {seed}, {storm.pair}: {type(error).__name__}: {error}\n    again: {again}"
            ) from error
    return storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="quic_storm", description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--single", action="store_true", help="compare with datagrams that arrive one by one")
    parser.add_argument("--pair", type=int, help="this one of PAIRS, instead of all in turns")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.first, options.first + options.seeds):
        began = time.process_time()
        try:
            pair = PAIRS[0] if options.single else PAIRS[options.pair] if options.pair is not None else None
            storm = run_storm(seed, pair=pair)
            if options.single and run_storm(seed, pair=pair, batched=False).digest != storm.digest:
                raise StormError(f"seed {seed}: runs and single datagrams differ")
        except StormError as error:
            alone = PAIRS[3] in (pair, pair_of(seed))  # stock aioquic with itself: no fault of ours
            failed += not alone
            say(f"{'aioquic: ' * alone}FAILED {error}")
            if options.verbose:
                traceback.print_exc()
        else:
            if options.verbose:
                took = time.process_time() - began
                virtual = (storm.now - START) / 1e9
                say(f"{seed} {storm.pair} {storm.datagrams} datagrams, {virtual:.1f} s, {took:.2f} s CPU")
    say(f"{options.seeds} storms from {options.first} on, {failed} failed")
    return 1 if failed else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
