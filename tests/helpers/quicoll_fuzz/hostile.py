"""A peer without scruples: a raw QUIC session that may hold a certificate of the job, and says whatever it likes.

What it says is generated from the protocol's own grammar, with values at the edges and now and then a live one, so
that much of it is taken seriously; or it is right first and spoilt afterwards. Some of its words are honest, since a
peer that is cut off at its first word sees little of the endpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from stock_session import StockGate, StockSession

from quicoll_transport.carrier import Authenticated, Closed, ControlData
from quicoll_transport.link import frames
from quicoll_transport.link.control_stream import ControlReader, encode_control
from quicoll_transport.link.frames import MAX_CONTROL, TAG_SIZE, Header, Hello, channel_tag, checksum
from quicoll_transport.net.runs import DatagramRun, apart, joined
from quicoll_transport.quic import SessionConfig, destination_cid, is_unauthenticated_initial

from .mutate import mutate_bytes, mutate_frames

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.credentials import Credentials

    from .virtual import Net

__all__ = ["TAGS", "Hostile", "HostileServer", "Tally"]

TAGS = [bytes([n]) * TAG_SIZE for n in range(1, 9)]  # few, so that both sides mean the same ones
_CHANNELS = (0, 1, 2, (1 << 32) - 1, 1 << 32, (1 << 64) - 1)
_LENGTHS = (0, 1, 100, 1000, 5000, 65536, 1 << 20, 1 << 25, 1 << 32, 1 << 48, (1 << 48) + 1, 1 << 60, (1 << 64) - 1)
_NUMBERS = (0, 1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 48) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


@dataclass(slots=True)
class Tally:
    """What was thrown at the endpoints."""

    datagrams: int = 0  # spoilt, copied or misplaced datagrams, and ones with spoilt frames inside
    controls: int = 0  # control messages that no honest peer would have sent
    headers: int = 0  # message streams of the same kind
    honest: int = 0  # honest messages that arrived right meanwhile
    connections: int = 0  # that the hostile peer made,
    served: int = 0  # and that were made to it
    foreign: dict[str, int] = field(default_factory=dict)  # exceptions of the QUIC library, by place

    @property
    def inputs(self) -> int:
        return self.datagrams + self.controls + self.headers


class Hostile:
    """One raw client session; HostileServer is the same at the other side.

    lies: what it spoils: "handshake" or "frames" (the plaintext of packets before or after its Hello), "controls",
        "headers"; anything else: nothing.
    """

    def __init__(
        self,
        *,
        net: Net,
        address: Address,
        target: Address,
        credentials: Credentials | None,
        trust: bytes,
        tally: Tally,
        rng: random.Random,
        lies: str,
        identity: tuple[int, int],
        config: SessionConfig | None = None,
    ) -> None:
        self.net = net
        self.address = address
        self.target = target
        self.rng = rng
        self.tally = tally
        self.lies = lies
        self.incarnation, self.link = identity
        self.remote: Hello | None = None
        self.alive = True
        self.proved = False  # whether the handshake is complete
        self.greeted = False
        self.spoil: Callable[[bytes], list[bytes]] | None = None  # what becomes of each of its datagrams
        self._plain: list[bytes] = []
        self._reader = ControlReader()
        self._next_app = 0
        self._next_sequence = 0
        self._config = config or SessionConfig(datagram_bytes=1400)
        net.hosts[address] = self._receive
        self._open_up(credentials, trust)

    def _open_up(self, credentials: Credentials | None, trust: bytes) -> None:
        self.tally.connections += 1
        self.session = StockSession.client(
            credentials=credentials, config=self._config, address=self.target, now_ns=self._now()
        )
        self.quic: Any = self.session._quic
        if credentials is None:  # without a certificate, but willing to trust the server
            self.quic.configuration.cadata = trust
            self.quic.tls._cadata = trust
        self.pump()

    def _now(self) -> int:
        return round(self.net.loop.time() * 1e9)

    # -- the session ---------------------------------------------------------------------------------------------

    def _receive(self, runs: list[DatagramRun]) -> None:
        for run in runs:
            for each in range(len(run)):
                self._do(self.session.receive, run.part(each, each + 1), self._now())
        self.pump()

    def _do(self, work: Callable[..., object], *arguments: object) -> None:
        """What it does to itself by spoiling its own packets is no concern of ours."""
        try:
            work(*arguments)
        except Exception:
            self.alive = False

    def pump(self) -> None:
        """Answer events, and send what there is to send."""
        while (event := self.session.next_event()) is not None:
            match event:
                case Authenticated():
                    self._do(self._greet)
                case ControlData():
                    self._do(self._listen, event.data)
                case Closed():
                    self.alive = False
        for pair in [*self.quic._cryptos.values(), *self.quic._cryptos_initial.values()]:
            if "encrypt_packet" not in vars(pair):
                pair.encrypt_packet = self._spoiling(pair.encrypt_packet)
        out: list[DatagramRun] = []
        self._do(lambda: out.extend(self.session.datagrams_to_send(self._now())))
        for data, _ in apart(out):
            self._send_out(data)

    def _send_out(self, data: bytes) -> None:
        for spoilt in [data] if self.spoil is None else self.spoil(data):
            self.net.inject(spoilt, self.address, self.target)

    def _spoiling(self, encrypt: Callable[[bytes, bytes, int], bytes]) -> Callable[[bytes, bytes, int], bytes]:
        def encrypt_packet(header: bytes, payload: bytes, number: int) -> bytes:
            spoils = self.lies == "handshake" or (self.lies == "frames" and self.greeted)
            if spoils and self.rng.random() < 0.3:
                self._plain = [*self._plain[-15:], payload]
                payload = mutate_frames(payload, self.rng, self._plain)
                self.tally.datagrams += 1
            return encrypt(header, payload, number)

        return encrypt_packet

    def timer(self) -> None:
        """Let it do what is due by now."""
        at = self.session.next_timer()
        if at is not None and at <= self._now():
            self._do(self.session.handle_timer, self._now())
        self.pump()

    def leave(self) -> None:
        """Go away without a word."""
        self.alive = False
        self.net.hosts.pop(self.address, None)

    # -- words ---------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        self.proved = True
        self.session.send_control(b"")  # the client opens the control stream

    def _listen(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if isinstance(message, Hello) and self.remote is None:
                self.remote = message

    def hello(self) -> None:
        """Say Hello: mostly one that is true for a link that is new."""
        rng = self.rng
        theirs = (self.remote.incarnation, self.remote.link) if self.remote is not None else (0, 0)
        words: list[Any] = [1, self.incarnation, self.link, *theirs, 0, [], 0, 1 << 20, []]
        if self.lies == "controls" and rng.random() < 0.25:
            self.tally.controls += 1
            at = rng.randrange(1, len(words))
            words[at] = self._junk() if rng.random() < 0.5 else self._ranges() if at in (6, 9) else rng.choice(_NUMBERS)
        self._say(words)
        self.greeted = True

    def _say(self, words: object) -> None:
        body = msgspec.msgpack.encode(words)
        self._do(self.session.send_control, len(body).to_bytes(4, "big") + body)

    def _number(self) -> int:
        rng = self.rng
        if rng.random() < 0.08:
            return rng.choice(_NUMBERS)
        return rng.choice((0, 0, 1, rng.randrange(8), rng.randrange(64), self._next_sequence))

    def _junk(self) -> Any:
        rng = self.rng
        deep: Any = []
        for _ in range(rng.choice((1, 3, 50, 400))):
            deep = [deep]
        return rng.choice((None, -1, True, 1.5, "", "x" * 500, b"", rng.randbytes(24), [], {}, {"t": 1}, deep, [[1]]))

    def _ranges(self) -> list[list[int]]:
        rng = self.rng
        count = rng.choice((0, 1, 1, 2, 3, 64, 65, 1024, 1025))
        if rng.random() < 0.6:
            points = sorted(rng.randrange(1 << rng.choice((3, 6, 16, 63))) for _ in range(2 * count))
            return [list(points[i : i + 2]) for i in range(0, 2 * count, 2)]
        return [[self._number(), self._number()] for _ in range(count)]

    def _tag(self) -> bytes:
        rng = self.rng
        if rng.random() < 0.3:
            channel = rng.choice(_CHANNELS) if rng.random() < 0.1 else rng.randrange(3)
            return channel_tag(channel, rng.choice((0, 1, 2, self._next_sequence, (1 << 64) - 1)))
        if rng.random() < 0.05:
            return rng.choice((b"", rng.randbytes(15), bytes(16), bytes(25)))
        return rng.choice((*TAGS, rng.randbytes(TAG_SIZE)))

    def _words(self) -> list[Any]:
        """A control message of the grammar, as the list that msgpack carries."""
        rng, number = self.rng, self._number
        kind = rng.choices(range(1, 13), (1, 9, 9, 9, 5, 30, 9, 9, 30, 20, 40, 0.5))[0]  # 1 and 12 are always fatal
        match kind:
            case 1:
                words = [1, *(number() for _ in range(4)), number(), self._ranges(), number(), number(), self._ranges()]
            case 4:
                words = [4, number(), self._ranges(), number()]
            case 6:
                words = [6, number(), self._tag(), rng.choice(_LENGTHS if rng.random() < 0.1 else _LENGTHS[:10])]
            case 8:
                words = [8, number(), rng.randrange(5), number(), rng.random() < 0.5]
            case 9:
                words = [9, number(), rng.choice((0, 256, 1256, number()))]
            case 10:
                words = [10, number(), "r" * rng.choice((0, 5, 5, 5, 400, 400, 400, 401))]
            case 11:
                word = number() if rng.random() < 0.05 else self._next_app
                self._next_app += word == self._next_app
                words = [11, word, rng.randbytes(rng.choice((0, 10, 3000)))]
            case _:
                words = [kind, number()]
        return words

    def lie(self) -> None:
        """One control message that an honest peer would not send."""
        rng = self.rng
        self.tally.controls += 1
        words = self._words()
        form = rng.random()
        if form < 0.9:  # the grammar, with whatever values
            self._say(words)
        elif form < 0.93:  # a value of another type, or a field too many or too few
            if rng.random() < 0.5:
                words[rng.randrange(len(words))] = self._junk()
            else:
                words = words[: rng.randrange(len(words))] if rng.random() < 0.5 else [*words, self._junk()]
            self._say(words)
        elif form < 0.95:  # a length that is not that of what follows
            size = rng.choice((0, 1, MAX_CONTROL, MAX_CONTROL + 1, 1 << 31, (1 << 32) - 1))
            self._do(self.session.send_control, size.to_bytes(4, "big") + rng.randbytes(rng.randrange(60)))
        else:  # right bytes, spoilt
            body = msgspec.msgpack.encode(words)
            whole = len(body).to_bytes(4, "big") + body
            if rng.random() < 0.7:
                spoilt = mutate_bytes(body, rng)
                whole = len(spoilt).to_bytes(4, "big") + spoilt
            else:
                whole = mutate_bytes(whole, rng)
            self._do(self.session.send_control, whole)

    def stream(self) -> None:
        """One message stream that an honest peer would not send, or one at the edge of what it may."""
        rng = self.rng
        self.tally.headers += 1
        size = rng.choice((0, 1, 100, 1000, 5000, 20_000))
        payload = rng.randbytes(size)
        length = size if rng.random() < 0.9 else rng.choice(_LENGTHS)
        sequence = self._next_sequence if rng.random() < 0.9 else self._number()
        self._next_sequence += sequence == self._next_sequence
        tag = self._tag()
        header = frames._HEADER.pack(
            b"qc" if rng.random() < 0.995 else rng.randbytes(2),
            1 if rng.random() < 0.995 else rng.randrange(256),
            (frames.FLAG_CHANNEL if len(tag) == 16 else 0)
            | (
                frames.FLAG_EAGER if rng.random() < 0.92 else rng.choice((0, frames.FLAG_EAGER | 4, rng.randrange(256)))
            ),
            rng.choice((0, 0, 1, (1 << 32) - 1)),
            tag[:TAG_SIZE],
            sequence,
            length,
            checksum(payload) if rng.random() < 0.7 else rng.choice(_NUMBERS),
            0 if rng.random() < 0.97 else rng.choice(_LENGTHS),
        )
        header += checksum(header).to_bytes(8, "big")
        if rng.random() < 0.04:
            header = mutate_bytes(header, rng)
        self._do(self._open, header, payload)

    def _open(self, header: bytes, payload: bytes) -> None:
        rng, quic = self.rng, self.quic
        kind = rng.random()
        stream_id = quic.get_next_available_stream_id(is_unidirectional=kind > 0.004)
        cut = rng.randrange(len(header) + len(payload) + 1) if rng.random() < 0.05 else None
        quic.send_stream_data(stream_id, (header + payload)[:cut], end_stream=rng.random() < 0.97)
        if kind > 0.97:
            quic.reset_stream(stream_id, rng.choice((0, 0x7100, (1 << 62) - 1)))
        elif kind > 0.965 and quic._streams.get(0) is not None:
            quic.send_stream_data(0, b"", end_stream=True)

    def truth(self) -> None:
        """An honest word or message."""
        rng = self.rng
        if rng.random() < 0.5:
            self._do(self.session.send_control, encode_control(frames.App(self._next_app, b"word")))
            self._next_app += 1
        else:
            payload = rng.randbytes(100)
            header = Header(rng.choice(TAGS), self._next_sequence, 100, checksum(payload))
            self._next_sequence += 1
            self._do(self._send, header.encode() + payload)

    def _send(self, data: bytes) -> None:
        stream_id = self.quic.get_next_available_stream_id(is_unidirectional=True)
        self.quic.send_stream_data(stream_id, data, end_stream=True)


class HostileServer(Hostile):
    """What answers where a peer is dialled: one raw session at a time, the one that was dialled last.

    retry: whether it demands a token first, which is one datagram more to spoil.
    """

    def __init__(self, *, retry: bool, **options: Any) -> None:
        self._retry = retry
        super().__init__(**options)

    def _open_up(self, credentials: Credentials | None, trust: bytes) -> None:
        assert credentials is not None, "the QUIC library has no servers without a certificate"
        self._gate = StockGate(credentials=credentials, config=self._config, retry=self._retry)
        self._cids: set[bytes] = set()
        self.alive = False

    def _receive(self, runs: list[DatagramRun]) -> None:
        for data, source in apart(runs):
            if is_unauthenticated_initial(data) and destination_cid(data) not in self._cids:
                admitted = self._gate.admit(data, source, self._now())
                if isinstance(admitted, bytes):
                    self._send_out(admitted)
                if not isinstance(admitted, StockSession):
                    continue
                self._begin(admitted)
            if self.alive:
                for run in joined([(data, source)]):
                    self._do(self.session.receive, run, self._now())
                self._cids.update(self.session.cids)
        if self.alive:
            self.pump()

    def _begin(self, session: StockSession) -> None:
        self.tally.served += 1
        self.session, self.quic = session, session._quic
        self._cids = set(session.cids)
        self.alive, self.proved, self.greeted, self.remote = True, False, False, None
        self._reader = ControlReader()
        if self.rng.random() < 0.5:  # of another link than before; otherwise it resumes
            self.link += 1

    def _greet(self) -> None:
        self.proved = True

    def hello(self) -> None:
        if self.remote is None or self.remote.peer_link != self.link:  # for the dialler this is the first of a link
            self._next_app = self._next_sequence = 0
        super().hello()
