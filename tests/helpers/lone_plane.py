"""One plane whose peer is the test: what it says is sealed here, what it hears is opened, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic.arrival_line import ArrivalLine
from quicoll_transport.quic.frame_reader import read_frames
from quicoll_transport.quic.handshake import Handover
from quicoll_transport.quic.keys import AES_128_GCM_SHA256, KeyPhases, Keys
from quicoll_transport.quic.mtu import PathMtu
from quicoll_transport.quic.newreno import NewReno
from quicoll_transport.quic.packets import open_packet, seal
from quicoll_transport.quic.parameters import TransportParameters
from quicoll_transport.quic.plane import Plane

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.quic.streams import ReceiveStream

__all__ = ["AWAY", "HOME", "MS", "OURS", "THEIRS", "LonePlane", "Said"]

MS = 1_000_000
HOME: Address = ("10.1.0.1", 1)
AWAY: Address = ("10.2.0.2", 2)
OURS, THEIRS = b"the-plane", b"the-peer"  # connection ids
WINDOW = 1 << 20


class Said(NamedTuple):
    """A datagram of the plane's, opened."""

    address: Address
    size: int
    number: int
    frames: list[Any]

    @property
    def kinds(self) -> list[str]:
        return [type(frame).__name__.removesuffix("Frame") for frame in self.frames]


class LonePlane:
    """See the module's head. It reads all streams but those in `unread`; resets: streams that were given up."""

    def __init__(
        self,
        *,
        is_client: bool = False,
        size: int = 1200,
        most: int = 1200,
        ours: int = 0,
        trace: Any = None,
        arrivals: ArrivalLine | None = None,
    ) -> None:
        parameters = TransportParameters(
            max_idle_timeout=30_000,
            initial_max_data=WINDOW,
            initial_max_stream_data_bidi_local=WINDOW,
            initial_max_stream_data_bidi_remote=WINDOW,
            initial_max_stream_data_uni=WINDOW,
            initial_max_streams_bidi=1,
            initial_max_streams_uni=128,
            active_connection_id_limit=2,
            stateless_reset_token=b"the token of id0",
            ours=ours,
        )
        self.now = 10**18
        self.received: dict[int, bytearray] = {}
        self.resets: dict[int, int] = {}
        self.unread: set[int] = set()
        self._keys = Keys(AES_128_GCM_SHA256, b"p" * 32)
        self._opener = KeyPhases(
            AES_128_GCM_SHA256,
            b"p" * 32,
            b"s" * 32,
            key_packets=1 << 22,
            pto_ns=lambda: 100 * MS,
            confirmed=True,
        )
        self._number = 0
        self._largest = -1
        handover = Handover(
            is_client=is_client,
            suite=AES_128_GCM_SHA256,
            send_secret=b"s" * 32,
            receive_secret=b"p" * 32,
            cid=OURS[:8],
            peer_cid=THEIRS,
            local=parameters,
            remote=parameters,
            address=HOME,
            rtt_ns=10 * MS,
            certificate=None,
            chain=(),
            early=(),
            trace=trace,
        )
        self.plane = Plane(
            handover,
            reader=self,
            controller=NewReno,
            mtu=lambda: PathMtu(base=size, most=most),
            arrivals=(ArrivalLine() if arrivals is None else arrivals).join(),
            key_packets=1 << 22,
            forged_packets=1 << 52,
            initial_rtt_ns=10 * MS,
            reset_key=bytes(32),
            draw=random.Random(1).randbytes,
            now_ns=self.now,
        )

    # -- reads -----------------------------------------------------------------------------------------------------

    def stream_arrived(self, stream: ReceiveStream) -> None:
        if stream.id not in self.unread:
            self.received.setdefault(stream.id, bytearray()).extend(stream.read())

    def stream_reset(self, stream: ReceiveStream, code: int) -> None:
        self.resets[stream.id] = code

    # -- the peer --------------------------------------------------------------------------------------------------

    def packet(self, *frames: Any, number: int | None = None, cid: bytes = OURS[:8]) -> bytes:
        """Return a packet of frames, or of bytes; the next one unless it has a number."""
        payload = b"".join(one if isinstance(one, bytes) else one.encode() for one in frames)
        if number is None:
            number = self._number
        self._number = max(self._number, number + 1)
        return seal(self._keys, cid, number, payload.ljust(4, b"\0"))

    def say(self, *frames: Any, number: int | None = None, address: Address = HOME, cid: bytes = OURS[:8]) -> None:
        """Let the plane have a packet of these frames."""
        self.give(self.packet(*frames, number=number, cid=cid), address)

    def give(self, data: bytes, address: Address = HOME, size: int = 0, *, waited_ns: int = 0) -> None:
        """Let the plane have a datagram, or a run of those of `size` bytes, which lay in its host for so long."""
        self.plane.receive(DatagramRun(memoryview(bytearray(data)), size or len(data), address, waited_ns), self.now)

    def hear(self) -> list[Said]:
        """Return what the plane sends now."""
        said = []
        for run in self.plane.datagrams(self.now):
            for data in run.datagrams():
                opened = open_packet(self._opener, data, len(THEIRS), self._largest, self.now)
                assert opened is not None
                number, payload = opened
                self._largest = max(self._largest, number)
                said.append(Said(run.address, len(data), number, list(read_frames(payload))))
        return said

    def heard(self, kind: type) -> list[Any]:
        """Return the frames of one kind of what the plane sends now."""
        return [frame for said in self.hear() for frame in said.frames if isinstance(frame, kind)]

    def settle(self) -> None:
        """Take and acknowledge what a plane says by itself at its beginning."""
        from quicoll_transport.quic.frames import AckFrame

        for _ in range(3):
            said = self.hear()
            if not said:
                break
            self.now += 10 * MS
            self.say(AckFrame([(0, max(one.number for one in said) + 1)], 0))
        self.hear()

    def pass_time(self, ns: int) -> list[Said]:
        """Let time pass, with all timers on the way; return what is sent."""
        end, said = self.now + ns, []
        for _ in range(1000):
            at = self.plane.next_timer()
            if at is None or at > end:
                self.now = end
                return said
            self.now = max(self.now, at)
            self.plane.handle_timer(self.now)
            said += self.hear()
        raise AssertionError("time stands still")

    @property
    def code(self) -> int | None:
        """With what the connection has ended."""
        return None if self.plane.cause is None else self.plane.cause.code


def flat(said: Iterable[Said]) -> list[Any]:
    """Return the frames of several datagrams, in order."""
    return [frame for one in said for frame in one.frames]
