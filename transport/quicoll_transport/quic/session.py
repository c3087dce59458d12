"""One QUIC connection as messages: datagrams and `now_ns` in, datagrams and events out. A Carrier.

First the handshake, then the plane. Above both, one bidirectional stream carries control bytes (number 0, opened by the
client, urgent), and each message is a unidirectional stream: its header, its payload from the caller's memory, the end.

States: handshake under way; open, from `Authenticated` on (a client keeps its handshake until it is confirmed, and has
it repeat what may be lost); ended: by the peer, by time, or by us. Whatever ends it is told once, by one event; what
the peer got wrong is a ProtocolError, and the caller closes.

A message that arrives: its header is held until it is whole, for `header_ns` at most; then the sink says where the
payload belongs, and the rest of the stream goes straight there (`ReceiveStream.direct`). What nobody wants, or wants
any more, is stopped. Before there is a sink messages wait in what QUIC holds of them, within a bound of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.hashes import SHA256

from quicoll_transport.carrier import (
    CLOSE_NORMAL,
    Authenticated,
    CarrierEvent,
    Closed,
    ControlData,
    LastWords,
    MessageSink,
    PathStats,
    PeerMoved,
)
from quicoll_transport.errors import ProtocolError
from quicoll_transport.link.frames import HEADER_SIZE, Header
from quicoll_transport.net.runs import DatagramRun, joined
from quicoll_transport.quic.access_line import AccessLine
from quicoll_transport.quic.arrival_line import ArrivalLine
from quicoll_transport.quic.chance import random_bytes
from quicoll_transport.quic.handshake import Handshake, handshake_configuration, short_packet
from quicoll_transport.quic.mtu import PathMtu
from quicoll_transport.quic.parameters import local_parameters
from quicoll_transport.quic.path_memory import PathMemory, RememberedPath
from quicoll_transport.quic.plane import Plane
from quicoll_transport.quic.terms import DATAGRAM_BYTES, SessionConfig, controller_of, error_name

if TYPE_CHECKING:
    from aioquic.quic.logger import QuicLogger, QuicLoggerTrace

    from quicoll_transport.link.posted import Inflow
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.quic.handshake import Handover
    from quicoll_transport.quic.streams import ReceiveStream, SendStream
    from quicoll_transport.security.credentials import Credentials

__all__ = ["RESET_KEY_BYTES", "Session"]

RESET_KEY_BYTES = 32
_CONTROL_STREAM = 0
_MOST_DATAGRAM = 8952  # what a link with jumbo frames of 9000 bytes carries over IPv6,
_MOST_LOOPBACK = 65000  # and a loopback interface, where IPv4 allows 65507
_EARLY_BYTES = 4 << 20  # message bytes that may overtake the peer's Hello
_UNKNOWN_PTOS = 3 * 3  # round trips in three probe timeouts of an unknown path (RFC 9002 section 6.2.2)
_CONTROL_BYTES = 32 << 20  # control messages that the peer has not acknowledged


class Session:
    """See the module's head. Create with `client`, or through a Gate for the server side."""

    def __init__(
        self,
        handshake: Handshake,
        *,
        cids: Sequence[bytes],
        config: SessionConfig,
        reset_key: bytes,
        qlog: QuicLogger | None = None,
        memory: PathMemory | None = None,
        line: AccessLine | None = None,
        arrivals: ArrivalLine | None = None,
    ) -> None:
        """Begin with a handshake.

        Args:
            handshake: Of either side, not fed with anything yet.
            cids: By which datagrams find it.
            config: Of the connection.
            reset_key: For stateless reset tokens.
            qlog: Gets the trace at the end; None: nobody traces.
            memory: Of the paths to peers; None: of its own, so it ends with the connection.
            line: By which it leaves together with others; None: it leaves alone.
            arrivals: By which its peer's packets come together with those of others; None: they come alone.
        """
        self.is_client = handshake.is_client
        self.cids: list[bytes] = list(cids)
        self.retired_cids: list[bytes] = []
        self.reset_token: bytes | None = None
        self.heard_ns: int | None = None
        self.resets = 0
        self._handshake: Handshake | None = handshake  # until it is confirmed: it holds all of aioquic's state
        self._last: list[tuple[bytes, Address]] = []  # words of a handshake that was closed from here
        self._trace: QuicLoggerTrace | None = handshake.trace
        self._plane: Plane | None = None
        self._config = config
        self._reset_key = reset_key
        self._qlog = qlog
        self._memory = PathMemory() if memory is None else memory
        self._line = AccessLine() if line is None else line
        self._arrivals = ArrivalLine() if arrivals is None else arrivals
        self._most_datagram: int | None = None
        self._events: deque[CarrierEvent] = deque()
        self._told = False  # how it ended
        self._closed_here = False
        self._now_ns = 0
        self._sink: MessageSink | None = None
        self._early: dict[int, ReceiveStream] = {}
        self._headers: dict[int, int] = {}  # streams whose header has begun, and until when it has to be whole
        self._control: SendStream | None = None
        self._control_waiting = bytearray()  # until there is a stream for it
        self._control_taken = 0
        self._waiting: list[tuple[object, bytes, memoryview]] = []  # messages, until the handshake is done
        self._sending: dict[int, list[SendStream]] = {}  # by the identity of their keys

    @classmethod
    def client(
        cls,
        *,
        credentials: Credentials | None,
        config: SessionConfig,
        address: Address,
        now_ns: int,
        qlog: QuicLogger | None = None,
        reset_key: bytes | None = None,
        memory: PathMemory | None = None,
        line: AccessLine | None = None,
        arrivals: ArrivalLine | None = None,
    ) -> Session:
        """Dial an address; the first datagrams are ready at once.

        Args:
            credentials: What is shown; None: nothing (tests).
            config: Of the connection.
            address: Where to.
            now_ns: The time.
            qlog: Gets the trace at the end; None: nobody traces.
            reset_key: For stateless reset tokens; None: of its own, so that nobody can say that we are gone.
            memory: Of the paths to peers; None: of its own, so it ends with the connection.
            line: By which it leaves together with others; None: it leaves alone.
            arrivals: By which its peer's packets come together with those of others; None: they come alone.
        """
        quic = handshake_configuration(credentials, config, is_client=True)
        quic.quic_logger = qlog
        handshake = Handshake(quic, local_parameters(config))
        handshake.connect(address, now_ns)
        key = reset_key or random_bytes(RESET_KEY_BYTES)
        return cls(
            handshake,
            cids=[handshake.cid],
            config=config,
            reset_key=key,
            qlog=qlog,
            memory=memory,
            line=line,
            arrivals=arrivals,
        )

    # -- datagrams and time --------------------------------------------------------------------------------------

    def receive(self, run: DatagramRun, now_ns: int) -> None:
        """Take a run of datagrams; see Carrier."""
        self._now_ns = now_ns
        plane = self._plane
        if plane is not None and not run.memory[0] & 0x80:  # all are of one header form
            plane.receive(run, now_ns)
        else:
            for data in run.datagrams():
                self._receive_one(data, run.address, now_ns)
        self._look()

    def _receive_one(self, data: memoryview, address: Address, now_ns: int) -> None:
        short: bytes | memoryview | None = data
        handshake = self._handshake
        if handshake is not None and (self._plane is None or data[0] & 0x80):
            short = handshake.receive(data, address, now_ns)
            if self._plane is None and handshake.handover is not None:
                self._take_over(handshake.handover, now_ns)
        elif data[0] & 0x80:
            short = short_packet(data)
        if short is not None and self._plane is not None:
            self._plane.receive_one(short, address, now_ns)

    def _take_over(self, handover: Handover, now_ns: int) -> None:
        """The handshake is complete: everything else is the plane's."""
        config = self._config
        plane = self._plane = Plane(
            handover,
            reader=self,
            controller=lambda size: controller_of(
                config.congestion, size, random_bytes, self._remembered(handover), self._line.join()
            ),
            mtu=lambda: self._begin_search(handover),
            arrivals=self._arrivals.join(),
            key_packets=config.key_packets,
            forged_packets=config.forged_packets,
            initial_rtt_ns=config.initial_rtt_ns,
            reset_key=self._reset_key,
            draw=random_bytes,
            now_ns=now_ns,
        )
        plane.outbound.on_gone = self._stream_gone
        if self._most_datagram is not None:
            plane.sender.limit_datagrams(self._most_datagram)
        self._events.append(Authenticated(handover.certificate, handover.chain))
        if self.is_client:
            self._begin_control(plane.outbound.open(unidirectional=False, urgent=True))
        for key, header, payload in self._waiting:
            self.start_message(key, header, payload)
        self._waiting.clear()
        for packet in handover.early:
            plane.receive_one(packet, handover.address, now_ns)

    def _remembered(self, handover: Handover) -> RememberedPath | None:
        """Return what is remembered of the present path to the peer; None: it has shown no certificate."""
        if handover.certificate is None:
            return None
        address = handover.address if self._plane is None else self._plane.paths.current.address
        return self._memory.of(handover.certificate.fingerprint(SHA256()), str(address[0]))

    def _begin_search(self, handover: Handover) -> PathMtu:
        """Return where the search for the size of datagrams begins, and how far it goes."""
        given = self._config.datagram_bytes
        most = given or (_MOST_LOOPBACK if _is_loopback(handover.address) else _MOST_DATAGRAM)
        return PathMtu(base=given or DATAGRAM_BYTES, most=min(most, handover.remote.max_udp_payload_size))

    def _look(self) -> None:
        """See what has become of the connection."""
        plane = self._plane
        if plane is None:
            self._tell_failure()
            return
        self.heard_ns, self.reset_token = plane.heard_ns, plane.peer_ids.token
        own_ids = plane.own_ids
        if own_ids.fresh or own_ids.gone:
            self.cids += own_ids.fresh
            self.retired_cids += own_ids.gone
            own_ids.fresh.clear()
            own_ids.gone.clear()
        if plane.paths.moved:
            plane.paths.moved = False
            self._events.append(PeerMoved())
        if plane.confirmed or not plane.ending.is_open:
            self._handshake = None
        else:
            self._tell_failure()
        if plane.violation is not None and not self._closed_here:
            self._closed_here = self._told = True
            raise ProtocolError(plane.violation)

    def _tell_failure(self) -> None:
        failed = None if self._handshake is None else self._handshake.failed
        if failed is not None and not self._told:
            self._told = True
            self._events.append(failed)

    @property
    def _end_is_news(self) -> bool:
        """Whether the connection has ended by itself and nobody was told; after the last words."""
        plane = self._plane
        if plane is None or plane.ending.is_open or self._told or self._closed_here:
            return False
        return not plane.ending.has_words

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due; see Carrier. Raises ProtocolError when the peer has taken too long over a header."""
        self._now_ns = now_ns
        if self._handshake is not None:
            self._handshake.handle_timer(now_ns)
        if self._plane is not None:
            self._plane.handle_timer(now_ns)
        self._look()
        if self._headers and now_ns >= next(iter(self._headers.values())):
            raise ProtocolError(f"the header of a message took more than {self._config.header_ns / 1e9:g} s")

    def next_timer(self) -> int | None:
        if self._end_is_news:
            return self._now_ns
        due = None if self._handshake is None else self._handshake.next_timer()
        if self._plane is not None and (at := self._plane.next_timer()) is not None:
            due = at if due is None or at < due else due
        if self._headers:  # they begin in the order of time, so the first is the earliest
            at = next(iter(self._headers.values()))
            due = at if due is None or at < due else due
        return due

    def datagrams_to_send(self, now_ns: int) -> list[DatagramRun]:
        self._now_ns = now_ns
        first = [] if self._handshake is None else self._handshake.datagrams_to_send(now_ns)
        if self._plane is None:
            if self._closed_here and first:
                self._last = first
            return joined(first)
        out = self._plane.datagrams(now_ns)
        return joined(first) + out if first else out

    def next_event(self) -> CarrierEvent | None:
        if self._events:
            return self._events.popleft()
        if self._end_is_news and self._plane is not None and (cause := self._plane.cause) is not None:
            self._told = True
            return Closed(cause.code, cause.reason, error_name(cause.code))
        return None

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, or is about to."""
        return self._told or self._closed_here or (self._plane is not None and self._plane.cause is not None)

    @property
    def peer_address(self) -> Address | None:
        if self._plane is not None:
            return self._plane.paths.current.address
        return None if self._handshake is None else self._handshake.peer_address

    @property
    def proved_address(self) -> Address | None:
        if self._plane is None or not self._plane.paths.current.passes:
            return None
        return self._plane.paths.current.address

    @property
    def unanswered_ns(self) -> int | None:
        return None if self._plane is None else self._plane.recovery.unanswered_ns

    @property
    def probe_timeout_ns(self) -> int:
        if self._plane is None:
            return 3 * self._config.initial_rtt_ns
        return self._plane.recovery.rtt.probe_timeout_ns

    @property
    def datagram_bytes(self) -> int:
        """The size of datagrams on the present path, as far as it is known."""
        return DATAGRAM_BYTES if self._plane is None else self._plane.sender.mtu.size

    @property
    def key_updates(self) -> int:
        """How often the keys were changed, by either side."""
        return 0 if self._plane is None else self._plane.keys.updates

    @property
    def forged_packets(self) -> int:
        """Packets that failed their authentication."""
        return 0 if self._plane is None else self._plane.keys.forged

    @property
    def bytes_fed(self) -> int:
        """Bytes of streams that were sent for the first time."""
        return 0 if self._plane is None else self._plane.outbound.fresh_bytes

    def path_stats(self) -> PathStats:
        plane = self._plane
        if plane is None:
            return PathStats(
                rtt_ns=None, rttvar_ns=None, min_rtt_ns=None, cwnd=0, bytes_in_flight=0, lost_packets=0,
                delivery_rate=None,
            )  # fmt: skip
        recovery, rtt = plane.recovery, plane.recovery.rtt
        known = rtt.min_ns is not None
        return PathStats(
            rtt_ns=rtt.smoothed_ns if known else None,
            rttvar_ns=rtt.variance_ns if known else None,
            min_rtt_ns=rtt.min_ns,
            cwnd=recovery.controller.window,
            bytes_in_flight=recovery.in_flight,
            lost_packets=recovery.lost_packets,
            sent_packets=recovery.sent_packets,
            spurious_packets=recovery.spurious_packets,
            parity_bytes=0 if plane.protection is None else plane.protection.parity_bytes,
            repaired_bytes=0 if plane.repairs is None else plane.repairs.repaired_bytes,
            delivery_rate=recovery.delivery_rate,
        )

    @property
    def min_rtt_ns(self) -> int | None:
        return None if self._plane is None else self._plane.recovery.rtt.min_ns

    # -- what the link asks for ----------------------------------------------------------------------------------

    def limit_datagrams(self, most: int) -> None:
        """Send datagrams of `most` bytes at most from now on, see Carrier; never below what QUIC needs."""
        self._most_datagram = most
        if self._plane is not None:
            self._plane.sender.limit_datagrams(most)

    def attach(self, sink: MessageSink) -> None:
        """From now on messages go to `sink`; those that overtook the Hello first."""
        self._sink = sink
        early, self._early = self._early, {}
        for stream in early.values():
            if self._plane is not None:
                self._plane.inbound.again(stream)

    def send_control(self, data: bytes) -> None:
        """Queue words for the control stream. Raises ProtocolError when the peer lets too many of them wait."""
        waiting = len(data)
        if self._control is None or self._plane is None:  # the client opens the stream, once it has a connection
            self._control_waiting += data
            waiting = len(self._control_waiting)
        elif self._plane.ending.is_open:
            self._plane.outbound.write(self._control, data)
            waiting = self._control.waiting
        if waiting > _CONTROL_BYTES:
            raise ProtocolError("the peer does not take our control messages")

    def start_message(self, key: object, header: bytes, payload: memoryview) -> None:
        """Queue a message; it is sent as the path takes it. `key` names it for `reset_message`."""
        if self._plane is None:
            self._waiting.append((key, header, payload))
            return
        outbound = self._plane.outbound
        stream = outbound.open(key)
        self._sending.setdefault(id(key), []).append(stream)
        outbound.write(stream, header)
        outbound.write(stream, payload, fin=True)

    def reset_message(self, key: object) -> None:
        """Stop sending a message at once; unknown keys (already sent) are fine."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] is not key]
        if self._plane is not None:
            for stream in list(self._sending.get(id(key), ())):
                self._plane.outbound.reset(stream, CLOSE_NORMAL)

    def forget_message(self, key: object) -> None:
        """Let go of a message that has arrived, whether its last acknowledgement is here or not; see Carrier."""
        if self._plane is not None:
            for stream in list(self._sending.get(id(key), ())):
                self._plane.outbound.finish(stream)

    def close(self, code: int, reason: str) -> None:
        if self._plane is None:
            if self._handshake is not None:
                self._handshake.close(code, reason)
        elif self._plane.ending.is_open:
            self._plane.close(code, reason)
            self._handshake = None  # it has nothing to repeat any more
        self._closed_here = True

    def last_words(self, now_ns: int) -> LastWords | None:
        """Return what is left of it for three probe timeouts; see Carrier. Nothing of one that ended by silence."""
        plane = self._plane
        if plane is None:
            return LastWords(tuple(self._last), now_ns + _UNKNOWN_PTOS * self._config.initial_rtt_ns)
        if plane.ending.is_silent:
            return None
        words = () if plane.sender.last is None else (plane.sender.last,)
        return LastWords(words, now_ns + 3 * plane.sender.probe_timeout_ns)

    def release(self) -> None:
        """Let go of everything that is the caller's, and hand the qlog trace, if there is one, to its directory."""
        self._sink = None
        if self._plane is not None:
            self._plane.release()
        for table in (self._waiting, self._sending, self._early, self._headers):
            table.clear()
        trace, self._trace = self._trace, None
        if trace is not None and self._qlog is not None:
            self._qlog.end_trace(trace)

    # -- control ---------------------------------------------------------------------------------------------------

    def _begin_control(self, stream: SendStream) -> None:
        self._control = stream
        if self._control_waiting and self._plane is not None:
            self._plane.outbound.write(stream, bytes(self._control_waiting))
            self._control_waiting.clear()

    def _control_arrived(self, stream: ReceiveStream) -> None:
        data = stream.read()
        self._control_taken += len(data)
        if self._control is None and self._plane is not None:
            self._begin_control(self._plane.outbound.respond(_CONTROL_STREAM, urgent=True))
        if data:
            self._events.append(ControlData(data))
        if stream.is_whole:
            raise ProtocolError("the peer ended the control stream")

    def _stream_gone(self, stream: SendStream) -> None:
        """A stream of ours is through, or was given up: by us, or because the peer asked for that."""
        if stream is self._control:
            raise ProtocolError("the peer gave up the control stream")
        streams = self._sending.get(id(stream.key), [])
        if stream in streams:
            streams.remove(stream)
        if not streams:
            self._sending.pop(id(stream.key), None)

    # -- messages that arrive --------------------------------------------------------------------------------------

    def stream_arrived(self, stream: ReceiveStream) -> None:
        """Take what a stream brought; see StreamReader."""
        if stream.id == _CONTROL_STREAM:
            self._control_arrived(stream)
        elif not stream.id & 2:
            raise ProtocolError("the peer opened a second bidirectional stream")
        elif self._sink is not None:
            self._message_arrived(self._sink, stream)
        else:
            self._early[stream.id] = stream
            if self._plane is not None and self._plane.inbound.received - self._control_taken > _EARLY_BYTES:
                raise ProtocolError("the peer sends messages without saying Hello")

    def stream_reset(self, stream: ReceiveStream, code: int) -> None:
        """Take note that a stream was given up; see StreamReader."""
        if stream.id == _CONTROL_STREAM:
            raise ProtocolError("the peer gave up the control stream")
        self.resets += 1
        self._headers.pop(stream.id, None)
        self._early.pop(stream.id, None)
        inflow: Inflow | None = stream.key
        if inflow is not None and self._sink is not None:
            self._sink.message_reset(inflow)

    def _message_arrived(self, sink: MessageSink, stream: ReceiveStream) -> None:
        plane = self._plane
        if plane is None:
            return
        if not stream.is_direct and not self._begin_message(plane, sink, stream):
            return
        inflow: Inflow | None = stream.key
        if stream.is_whole:
            if inflow is not None:
                sink.message_end(inflow)
        elif inflow is not None and not inflow.alive:
            plane.inbound.stop(stream, CLOSE_NORMAL)

    def _begin_message(self, plane: Plane, sink: MessageSink, stream: ReceiveStream) -> bool:
        """Say where the payload goes, if the header is whole; return whether it is."""
        header = stream.peek(HEADER_SIZE)
        if header is None:
            if stream.is_whole:
                raise ProtocolError(f"a message stream ends inside its header ({stream.upto} bytes)")
            self._headers.setdefault(stream.id, self._now_ns + self._config.header_ns)
            return False
        self._headers.pop(stream.id, None)
        inflow = sink.message_begin(Header.decode(header))
        if inflow is None:
            plane.inbound.stop(stream, CLOSE_NORMAL)
        else:
            stream.key = inflow
            stream.direct(inflow, HEADER_SIZE)
        return True


def _is_loopback(address: Address) -> bool:
    host = str(address[0])
    return host == "::1" or host.startswith("127.")
