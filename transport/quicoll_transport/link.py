"""One peer: the sans-IO core of a link. Messages exactly once, resumed over connections, bounded by credit.

A link joins two endpoints for as long as both live and hear each other. Connections (QUIC sessions) come and go
under it; the link re-sends what was not acknowledged, from the caller's memory. It ends once, and for good:

    state        may become          because
    CONNECTING   UP                  Hello exchanged
                 LOST                not reached by the connect deadline
                 CLOSED              closed here
    UP           DOWN                the connection died
                 LOST                silent for lost_after, unreachable; the peer closed it, restarted or forgot it
                 CLOSED              closed here
    DOWN         UP                  another connection, Hello exchanged with the same link identities
                 LOST, CLOSED        as above
    LOST, CLOSED (none)              a new link between the same nodes has a new identity

Identity: (incarnation, link number) of each side; both only grow. A Hello that names an identity other than the
expected one is either newer (the peer started again or gave this link up: LOST here) or stale (refused).

Sending. Every message has a sequence number. Small ones go at once on the link's credit ("eager"): the bytes that
the receiver is willing to hold for buffers not yet posted. A message above what is left of the credit is offered
first and sent when its buffer is posted ("granted"); so posted receives always progress, whatever waits unposted.

    QUEUED -> OFFERED -> SENDING -> ACKED          eager messages skip OFFERED
    any but ACKED -> CANCELLED (withdrawn) | FAILED (refused, corrupt, link ended)
    SENDING -> SENDING again after a Nack or a new connection (attempt + 1, from the same memory)

Receiving. A buffer is posted under a tag; a message with that tag is written there as it arrives and is handed over
when its checksum holds. Unposted eager messages wait in memory of ours, at most `credit_bytes` in all.

Invariants (tests walk them):
    - a sequence is handed over at most once; what was acknowledged was verified;
    - bytes held for unposted messages never exceed credit_bytes; a peer that sends more breaks the protocol;
    - after LOST or CLOSED nothing is pending: every send and every posted receive has ended, with a cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .detector import Detector, DetectorConfig, Verdict
from .errors import LinkLost, MessageCorrupted, MessageRefused, ProtocolError, TransportError
from .frames import (
    MAX_CONTROL,
    MAX_RANGES,
    TAG_SIZE,
    Ack,
    App,
    Cancel,
    Control,
    Credit,
    Grant,
    Header,
    Hello,
    Nack,
    Offer,
    Ping,
    Pong,
    Refuse,
    checksum,
    encode_control,
)
from .ranges import Ranges

__all__ = [
    "TRANSITIONS",
    "Inflow",
    "LinkConfig",
    "LinkCore",
    "LinkId",
    "LinkState",
    "Outgoing",
    "Posted",
]

_MAX_OFFERS = 65536  # offers that a peer may have waiting; each costs about 100 bytes here
_MAX_PENDING_APP = 4096  # application messages not yet acknowledged by the peer


class LinkState(Enum):
    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"
    LOST = "lost"
    CLOSED = "closed"


_ENDED = (LinkState.LOST, LinkState.CLOSED)
TRANSITIONS: dict[LinkState, tuple[LinkState, ...]] = {
    LinkState.CONNECTING: (LinkState.UP, LinkState.LOST, LinkState.CLOSED),
    LinkState.UP: (LinkState.DOWN, LinkState.LOST, LinkState.CLOSED),
    LinkState.DOWN: (LinkState.UP, LinkState.LOST, LinkState.CLOSED),
    LinkState.LOST: (),
    LinkState.CLOSED: (),
}


@dataclass(frozen=True, slots=True, order=True)
class LinkId:
    """Identity of one side of a link; ordered by time of birth within a node."""

    incarnation: int
    link: int


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Bounds and deadlines of a link.

    detector: heartbeats and silence, see DetectorConfig.
    connect_ns: how long the first connection may take.
    credit_bytes: what this side holds for messages whose buffers are not posted yet. Worst-case memory per link.
    max_resends: checksum failures of one message before both sides raise MessageCorrupted.
    """

    detector: DetectorConfig
    connect_ns: int = 10_000_000_000
    credit_bytes: int = 32 << 20
    max_resends: int = 3


class SendState(Enum):
    QUEUED = "queued"
    OFFERED = "offered"
    SENDING = "sending"
    ACKED = "acked"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message on its way. `payload` is the caller's memory and must not change before `done`."""

    sequence: int
    tag: bytes
    payload: memoryview
    checksum: int
    on_done: Callable[[Outgoing], None]
    state: SendState = SendState.QUEUED
    attempt: int = 0
    eager: int = 0  # credit that it took, bytes
    error: TransportError | None = None

    @property
    def done(self) -> bool:
        return self.state in (SendState.ACKED, SendState.CANCELLED, SendState.FAILED)

    def header(self) -> bytes:
        eager = self.eager > 0 or not self.payload
        return Header(self.tag, self.sequence, len(self.payload), self.checksum, self.attempt, eager).encode()


@dataclass(slots=True, eq=False)
class Posted:
    """A buffer waiting for its message; `error` None and `done` True mean that it holds verified bytes."""

    tag: bytes
    buffer: memoryview
    on_done: Callable[[Posted], None]
    done: bool = False
    error: TransportError | None = None
    inflow: Inflow | None = None  # the message that is being written into it


@dataclass(slots=True, eq=False)
class Inflow:
    """A message that is arriving: the session writes payload bytes into `view` from `filled` on."""

    header: Header
    view: memoryview
    posted: Posted | None
    filled: int = 0
    alive: bool = True  # False once nobody wants it any more; the session stops its stream


@dataclass(slots=True, eq=False)
class _Held:
    """A verified eager message that nobody has posted a buffer for yet; with `error`, one that will never come."""

    header: Header
    data: memoryview
    error: TransportError | None = None


# What the shell must do, in order.
@dataclass(frozen=True, slots=True)
class SendControl:
    data: bytes


@dataclass(frozen=True, slots=True)
class StartMessage:
    message: Outgoing


@dataclass(frozen=True, slots=True)
class ResetMessage:
    message: Outgoing


Action = SendControl | StartMessage | ResetMessage


@dataclass(slots=True)
class LinkStats:
    """Counters since the link began. Bytes are payload bytes."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    resends: int = 0
    corrupt: int = 0
    connections: int = 0
    held_bytes: int = 0
    held_peak: int = 0


class LinkCore:
    """See the module's head. `on_app` gets the small messages of the layer above, `on_state` every change of state."""

    def __init__(
        self,
        *,
        peer: str,
        local: LinkId,
        config: LinkConfig,
        now_ns: int,
        on_app: Callable[[bytes], None],
        on_state: Callable[[LinkState], None],
        payload_fault: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.peer = peer
        self.local = local
        self.remote: LinkId | None = None
        self.config = config
        self.state = LinkState.CONNECTING
        self.cause = ""
        self.error: LinkLost | None = None
        self.detector = Detector(config.detector, now_ns=now_ns)
        self.stats = LinkStats()
        self._verdict = Verdict.ALIVE
        self._on_app = on_app
        self._on_state = on_state
        self._payload_fault = payload_fault
        self._connect_deadline_ns = now_ns + config.connect_ns
        self._connected = False
        self._actions: deque[Action] = deque()
        # sending
        self._next_sequence = 0
        self._outgoing: dict[int, Outgoing] = {}
        self._queue: deque[Outgoing] = deque()
        self._peer_credit = 0
        self._eager_sent = 0
        self._peer_released = 0
        self._cancelled: dict[int, Cancel] = {}  # told on every connection until the peer acknowledges
        self._app_sent: deque[App] = deque()
        self._app_number = 0
        # receiving
        self._received = Ranges()
        self._posted: dict[bytes, Posted] = {}
        self._held: dict[bytes, _Held] = {}
        self._inflows: dict[int, Inflow] = {}
        self._offers: dict[bytes, int] = {}
        self._granted: dict[int, bytes] = {}
        self._failures: dict[int, int] = {}
        self._released = 0
        self._app_received = 0
        self._ack_due = False
        self._credit_due = False
        self._discarded: list[bytes] = []

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def drained(self) -> bool:
        """Whether the peer has acknowledged everything that was given to this link."""
        return not (self._app_sent or self._outgoing)

    def _become(self, state: LinkState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"link {self.peer}: {self.state.value} cannot become {state.value}")
        self.state = state
        self._on_state(state)

    def next_timer(self) -> int | None:
        if self.ended:
            return None
        if self.state is LinkState.CONNECTING:
            return self._connect_deadline_ns
        return self.detector.next_timer()

    def handle_timer(self, now_ns: int) -> None:
        if self.ended:
            return
        if self.state is LinkState.CONNECTING:
            if now_ns >= self._connect_deadline_ns:
                self.lose(f"not reached within {self.config.connect_ns / 1e9:.1f} s", now_ns=now_ns)
            return
        ping = self.detector.handle_timer(now_ns)
        self._judge(now_ns)
        if ping and self.state is LinkState.UP:
            self._control(Ping(now_ns))

    def heard(self, now_ns: int) -> None:
        """An authenticated packet of the peer arrived."""
        self.detector.heard(now_ns)
        self._judge(now_ns)

    def unreachable(self, now_ns: int) -> None:
        """The host says that nothing listens at the peer's address. While connecting, that is no news."""
        if self.state in (LinkState.UP, LinkState.DOWN):
            self.detector.unreachable(now_ns)
            self._judge(now_ns)

    def _judge(self, now_ns: int) -> None:
        verdict = self.detector.verdict
        if verdict is Verdict.LOST and not self.ended:
            self.lose(self.detector.cause, now_ns=now_ns)
        elif verdict is not self._verdict:
            self._verdict = verdict
            self._on_state(self.state)

    @property
    def suspect(self) -> bool:
        return self._verdict is Verdict.SUSPECT

    def lose(self, cause: str, *, now_ns: int) -> None:
        """End the link as lost; everything pending ends with LinkLost."""
        if not self.ended:
            silent_for = self.detector.silent_for(now_ns)
            self._end(LinkState.LOST, cause, LinkLost(cause, peer=self.peer, silent_for=silent_for))

    def close(self, reason: str) -> None:
        """End the link in order (the shell tells the peer); everything pending ends with LinkLost."""
        if not self.ended:
            self._end(LinkState.CLOSED, reason, LinkLost(f"closed here: {reason}", peer=self.peer))

    def _end(self, state: LinkState, cause: str, error: LinkLost) -> None:
        self.cause = cause
        self.error = error
        # First the pending work, then the news: whoever hears "lost" finds nothing half done.
        outgoing, self._outgoing = list(self._outgoing.values()), {}
        posted, self._posted = list(self._posted.values()), {}
        self._queue.clear()
        self._held.clear()
        self._offers.clear()
        self._granted.clear()
        self._app_sent.clear()
        self._cancelled.clear()
        self.stats.held_bytes = 0
        for inflow in self._inflows.values():
            inflow.alive = False
        self._inflows.clear()
        for message in outgoing:
            if message.state is SendState.SENDING and self._connected:
                self._actions.append(ResetMessage(message))
            self._finish(message, SendState.FAILED, error)
        for waiting in posted:
            self._complete(waiting, error)
        self._become(state)

    # -- connections ---------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """A connection is authenticated: say Hello on it. The link is up when the peer's Hello arrives."""
        self._connected = True
        remote = self.remote or LinkId(0, 0)
        received = self._received.tuples()[:MAX_RANGES]
        self._control(
            Hello(
                self.local.incarnation,
                self.local.link,
                remote.incarnation,
                remote.link,
                self._app_received,
                received,
                self._released,
                self.config.credit_bytes,
            )
        )

    def disconnected(self) -> None:
        """The connection is gone. What was on its way goes again on the next one."""
        self._connected = False
        self._actions.clear()
        for inflow in self._inflows.values():
            self._end_inflow(inflow)
        self._inflows.clear()
        self._offers.clear()
        self._granted.clear()
        if self.state is LinkState.UP:
            self._become(LinkState.DOWN)

    def hello(self, hello: Hello, now_ns: int) -> None:
        """The peer's Hello on the current connection; the endpoint has matched the identities."""
        self.remote = LinkId(hello.incarnation, hello.link)
        self._peer_credit = hello.credit
        self._peer_released = max(self._peer_released, hello.released)
        self.detector.heard(now_ns)
        self.stats.connections += 1
        self._become(LinkState.UP)
        while self._app_sent and self._app_sent[0].number < hello.app:
            self._app_sent.popleft()
        for message in self._app_sent:
            self._control(message)
        arrived = Ranges(hello.received)
        for sequence in sorted(self._outgoing):
            pending = self._outgoing[sequence]
            if sequence in arrived:
                self._acked(pending)
            elif pending.state is SendState.SENDING:
                pending.attempt += 1
                self.stats.resends += 1
                if pending.eager or not pending.payload:
                    self._actions.append(StartMessage(pending))
                else:
                    self._offer(pending)
            elif pending.state is SendState.OFFERED:
                self._offer(pending)
        for sequence in sorted(self._cancelled):
            if sequence in arrived:
                del self._cancelled[sequence]
            else:
                self._control(self._cancelled[sequence])
        self._pump()

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, tag: bytes, payload: memoryview, on_done: Callable[[Outgoing], None]) -> Outgoing:
        """Queue a message; `on_done` is called exactly once. `payload` is flat bytes and stays the caller's."""
        if len(tag) != TAG_SIZE:
            raise ValueError(f"a tag has {TAG_SIZE} bytes, not {len(tag)}")
        message = Outgoing(self._next_sequence, tag, payload, checksum(payload), on_done)
        if self.error is not None:
            self._finish(message, SendState.FAILED, self.error)
            return message
        self._next_sequence += 1
        self._outgoing[message.sequence] = message
        self._queue.append(message)
        self._pump()
        return message

    def cancel(self, message: Outgoing) -> None:
        """Withdraw a message; its memory is free at once. The peer forgets it."""
        if message.done:
            return
        self._outgoing.pop(message.sequence, None)
        if message.state is SendState.QUEUED:
            self._queue.remove(message)
        if message.state is SendState.SENDING and self._connected:
            self._actions.append(ResetMessage(message))
        # A withdrawn sequence would stay a hole in the peer's ranges for ever; so even a queued one is announced,
        # and announced again after a reconnection.
        self._cancelled[message.sequence] = Cancel(message.sequence, message.eager)
        if self.state is LinkState.UP:
            self._control(self._cancelled[message.sequence])
        self._finish(message, SendState.CANCELLED, None)

    def send_app(self, data: bytes) -> None:
        """A small message of the layer above: in order, exactly once, survives reconnections."""
        if self.error is not None:
            raise self.error
        if len(data) > MAX_CONTROL - 64:
            raise MessageRefused(f"application message of {len(data)} bytes is above the limit", peer=self.peer)
        if len(self._app_sent) >= _MAX_PENDING_APP:
            raise MessageRefused(f"{_MAX_PENDING_APP} application messages wait for the peer", peer=self.peer)
        message = App(self._app_number, data)
        self._app_number += 1
        self._app_sent.append(message)
        if self.state is LinkState.UP:
            self._control(message)

    def _pump(self) -> None:
        """Start what may start: eager while the credit lasts, offers for the rest, in order of sequence."""
        if self.state is not LinkState.UP:
            return
        while self._queue:
            message = self._queue.popleft()
            size = len(message.payload)
            if size <= self._peer_credit - (self._eager_sent - self._peer_released):
                message.eager = size
                self._eager_sent += size
                message.state = SendState.SENDING
                self._actions.append(StartMessage(message))
            else:
                self._offer(message)

    def _offer(self, message: Outgoing) -> None:
        message.state = SendState.OFFERED
        self._control(Offer(message.sequence, message.tag, len(message.payload)))

    def _acked(self, message: Outgoing) -> None:
        if message.state is SendState.QUEUED:
            raise ProtocolError(f"message {message.sequence} acknowledged before it was sent", peer=self.peer)
        del self._outgoing[message.sequence]
        self.stats.messages_sent += 1
        self.stats.bytes_sent += len(message.payload)
        self._finish(message, SendState.ACKED, None)

    def _finish(self, message: Outgoing, state: SendState, error: TransportError | None) -> None:
        message.state = state
        message.error = error
        message.payload = memoryview(b"")
        message.on_done(message)

    # -- receiving -----------------------------------------------------------------------------------------------

    def post(self, tag: bytes, buffer: memoryview, on_done: Callable[[Posted], None]) -> Posted:
        """Post a writable flat buffer for the message with this tag; `on_done` is called exactly once."""
        posted = Posted(tag, buffer, on_done)
        if self.error is not None:
            self._complete(posted, self.error)
            return posted
        if tag in self._posted:
            raise ValueError(f"a buffer is already posted for tag {tag.hex()}")
        held = self._held.pop(tag, None)
        if held is not None and held.error is not None:
            self._complete(posted, held.error)
            return posted
        if held is not None:
            self._release(held.header.length, held=True)
            if held.header.length != len(buffer):
                self._complete(posted, self._wrong_size(held.header.length, len(buffer)))
            else:
                buffer[:] = held.data
                self._complete(posted, None)
            return posted
        self._posted[tag] = posted
        sequence = self._offers.pop(tag, None)
        if sequence is not None:
            self._grant(sequence, tag)
        return posted

    def withdraw(self, posted: Posted) -> None:
        """Take a posted buffer back; afterwards nothing is written to it."""
        if posted.done:
            return
        posted.done = True
        self._posted.pop(posted.tag, None)
        if posted.inflow is not None:
            self._drop_inflow(posted.inflow.header.sequence, posted.inflow)

    def discard(self, prefix: bytes) -> None:
        """Forget everything with a tag that starts with `prefix`, now and later; posted buffers must be withdrawn."""
        self._discarded.append(prefix)
        del self._discarded[:-64]
        for tag in [tag for tag in self._held if tag.startswith(prefix)]:
            held = self._held.pop(tag)
            if held.error is None:
                self._release(held.header.length, held=True)
        for tag in [tag for tag in self._offers if tag.startswith(prefix)]:
            self._control(Refuse(self._offers[tag], "discarded"))
            self._received.add(self._offers.pop(tag))
        for sequence, inflow in list(self._inflows.items()):
            if inflow.header.tag.startswith(prefix) and inflow.posted is None:
                self._drop_inflow(sequence, inflow)

    def message_begin(self, header: Header) -> Inflow | None:
        """A message's header arrived. The Inflow to fill, or None when it is not wanted (stop its stream)."""
        sequence = header.sequence
        if self.ended or sequence in self._received:
            self._ack_due = True
            return None
        if sequence in self._inflows:
            raise ProtocolError(f"message {sequence} arrives twice at once", peer=self.peer)
        if self._is_discarded(header.tag):
            if header.eager:
                self._release(header.length)
            self._arrived(sequence)
            return None
        if self._offers.get(header.tag) == sequence:
            del self._offers[header.tag]
        posted = self._posted.get(header.tag)
        if posted is not None and posted.inflow is not None:
            raise ProtocolError(f"two messages with tag {header.tag.hex()} arrive at once", peer=self.peer)
        if not header.eager and sequence not in self._granted:
            raise ProtocolError(f"message {sequence} was neither granted nor eager", peer=self.peer)
        if posted is not None and len(posted.buffer) != header.length:
            del self._posted[header.tag]
            if header.eager:
                self._release(header.length)
            self._arrived(sequence)
            error = self._wrong_size(header.length, len(posted.buffer))
            self._control(Refuse(sequence, str(error)[:200]))
            self._complete(posted, error)
            return None
        if posted is not None:
            view = posted.buffer
        elif header.eager:
            if self.stats.held_bytes + header.length > self.config.credit_bytes:
                raise ProtocolError(f"{header.length} bytes exceed the credit of this link", peer=self.peer)
            view = memoryview(bytearray(header.length))
            self._hold(header.length)
        else:  # granted, but the buffer was withdrawn meanwhile
            self._granted.pop(sequence, None)
            self._arrived(sequence)
            return None
        inflow = Inflow(header, view, posted)
        self._inflows[sequence] = inflow
        if posted is not None:
            posted.inflow = inflow
        return inflow

    def message_end(self, inflow: Inflow) -> None:
        """All bytes of the stream arrived."""
        header = inflow.header
        if not inflow.alive:
            return
        if inflow.filled != header.length:
            raise ProtocolError(
                f"message {header.sequence} ends at {inflow.filled} of {header.length} bytes", peer=self.peer
            )
        if self._payload_fault is not None and header.length:
            self._payload_fault(inflow.view)
        found = checksum(inflow.view)
        del self._inflows[header.sequence]
        if found != header.checksum:
            self._end_inflow(inflow)
            self._corrupt(header, found)
            return
        inflow.alive = False
        self._failures.pop(header.sequence, None)
        self._granted.pop(header.sequence, None)
        self._arrived(header.sequence)
        self.stats.messages_received += 1
        self.stats.bytes_received += header.length
        if inflow.posted is not None:
            if header.eager:
                self._release(header.length)
            self._posted.pop(header.tag, None)
            self._complete(inflow.posted, None)
            return
        posted = self._posted.pop(header.tag, None)
        if posted is None:
            if header.tag in self._held:
                raise ProtocolError(f"two messages with tag {header.tag.hex()} wait", peer=self.peer)
            self._held[header.tag] = _Held(header, inflow.view)
            return
        self._release(header.length, held=True)
        if len(posted.buffer) != header.length:
            self._complete(posted, self._wrong_size(header.length, len(posted.buffer)))
            return
        posted.buffer[:] = inflow.view
        self._complete(posted, None)

    def message_reset(self, inflow: Inflow) -> None:
        """The peer reset the stream (it cancels, or will send again); a Cancel or another attempt follows."""
        if inflow.alive:
            del self._inflows[inflow.header.sequence]
            self._end_inflow(inflow)

    def _corrupt(self, header: Header, found: int) -> None:
        self.stats.corrupt += 1
        failures = self._failures.get(header.sequence, 0) + 1
        final = failures > self.config.max_resends
        self._control(Nack(header.sequence, header.attempt, found, final))
        if not final:
            self._failures[header.sequence] = failures
            return
        self._failures.pop(header.sequence, None)
        self._granted.pop(header.sequence, None)
        self._arrived(header.sequence)
        if header.eager:
            self._release(header.length)
        error = MessageCorrupted(peer=self.peer, sequence=header.sequence, expected=header.checksum, found=found)
        posted = self._posted.pop(header.tag, None)
        if posted is not None:
            self._complete(posted, error)
        else:  # whoever posts a buffer for it later must learn that it will not come
            self._held[header.tag] = _Held(header, memoryview(b""), error)

    def _drop_inflow(self, sequence: int, inflow: Inflow) -> None:
        """Nobody wants this message any more: what still comes of it goes nowhere, and it counts as arrived."""
        del self._inflows[sequence]
        self._end_inflow(inflow)
        self._granted.pop(sequence, None)
        if inflow.header.eager:
            self._release(inflow.header.length)
        self._arrived(sequence)

    def _grant(self, sequence: int, tag: bytes) -> None:
        self._granted[sequence] = tag
        self._control(Grant(sequence))

    def _arrived(self, sequence: int) -> None:
        self._received.add(sequence)
        self._ack_due = True

    def _hold(self, size: int) -> None:
        self.stats.held_bytes += size
        self.stats.held_peak = max(self.stats.held_peak, self.stats.held_bytes)

    def _release(self, size: int, *, held: bool = False) -> None:
        """Give eager credit back; `held`: the bytes stood in memory of ours until now."""
        if held:
            self.stats.held_bytes -= size
        self._released += size
        self._credit_due = True

    def _end_inflow(self, inflow: Inflow) -> None:
        """What arrives further is not written anywhere; memory of ours that it used is free."""
        inflow.alive = False
        if inflow.posted is not None:
            inflow.posted.inflow = None
        else:
            self.stats.held_bytes -= inflow.header.length

    def _is_discarded(self, tag: bytes) -> bool:
        return any(tag.startswith(prefix) for prefix in self._discarded)

    def _wrong_size(self, got: int, wanted: int) -> MessageRefused:
        return MessageRefused(f"the message has {got} bytes where a buffer of {wanted} is posted", peer=self.peer)

    def _complete(self, posted: Posted, error: TransportError | None) -> None:
        posted.done = True
        posted.error = error
        posted.on_done(posted)

    # -- control messages ----------------------------------------------------------------------------------------

    def control(self, message: Control, now_ns: int) -> None:
        """One control message other than Hello. Raises ProtocolError for what the peer may not say."""
        if self.ended:
            return
        match message:
            case Ping():
                self._control(Pong(message.t_ns))
            case Pong():
                self.detector.pong(message.t_ns, now_ns)
            case Ack():
                self._on_ack(message)
            case Credit():
                if message.released > self._eager_sent:
                    raise ProtocolError("the peer releases more credit than was used", peer=self.peer)
                self._peer_released = max(self._peer_released, message.released)
            case App():
                self._on_app_message(message)
            case Offer():
                self._on_offer(message)
            case Grant():
                pending = self._outgoing.get(message.sequence)
                if pending is not None and pending.state is SendState.OFFERED:
                    pending.state = SendState.SENDING
                    self._actions.append(StartMessage(pending))
            case Nack():
                self._on_nack(message)
            case Cancel():
                self._on_cancel(message)
            case Refuse():
                pending = self._outgoing.pop(message.sequence, None)
                if pending is not None:
                    if pending.state is SendState.SENDING:
                        self._actions.append(ResetMessage(pending))
                    self._finish(pending, SendState.FAILED, MessageRefused(message.reason, peer=self.peer))
            case Hello():
                raise ProtocolError("a second Hello on one connection", peer=self.peer)

    def _on_ack(self, ack: Ack) -> None:
        while self._app_sent and self._app_sent[0].number < ack.app:
            self._app_sent.popleft()
        if ack.app > self._app_number or ack.upto > self._next_sequence:
            raise ProtocolError("the peer acknowledges what was never sent", peer=self.peer)
        also = Ranges(ack.also)
        for sequence in [s for s in self._cancelled if s < ack.upto or s in also]:
            del self._cancelled[sequence]
        for sequence in [s for s in self._outgoing if s < ack.upto or s in also]:
            self._acked(self._outgoing[sequence])

    def _on_app_message(self, message: App) -> None:
        if message.number < self._app_received:
            return  # sent again after a reconnection
        if message.number != self._app_received:
            raise ProtocolError(
                f"application message {message.number} where {self._app_received} is next", peer=self.peer
            )
        self._app_received += 1
        self._ack_due = True
        self._on_app(message.data)

    def _on_offer(self, offer: Offer) -> None:
        if offer.sequence in self._received:
            self._ack_due = True
        elif self._is_discarded(offer.tag):
            self._arrived(offer.sequence)
            self._control(Refuse(offer.sequence, "discarded"))
        elif offer.tag in self._posted:
            self._grant(offer.sequence, offer.tag)
        elif len(self._offers) >= _MAX_OFFERS:
            raise ProtocolError(f"more than {_MAX_OFFERS} offers wait", peer=self.peer)
        else:
            self._offers[offer.tag] = offer.sequence

    def _on_nack(self, nack: Nack) -> None:
        message = self._outgoing.get(nack.sequence)
        if message is None or message.state is not SendState.SENDING or nack.attempt != message.attempt:
            return
        if nack.final:
            del self._outgoing[nack.sequence]
            error = MessageCorrupted(
                peer=self.peer, sequence=nack.sequence, expected=message.checksum, found=nack.found
            )
            self._finish(message, SendState.FAILED, error)
            return
        message.attempt += 1
        self.stats.resends += 1
        self._actions.append(StartMessage(message))

    def _on_cancel(self, cancel: Cancel) -> None:
        if cancel.sequence in self._received:
            return  # it had arrived; whoever takes it releases its credit
        inflow = self._inflows.pop(cancel.sequence, None)
        if inflow is not None:
            self._end_inflow(inflow)
        self._granted.pop(cancel.sequence, None)
        self._failures.pop(cancel.sequence, None)
        for tag in [tag for tag, sequence in self._offers.items() if sequence == cancel.sequence]:
            del self._offers[tag]
        if cancel.eager:
            self._release(cancel.eager)
        self._arrived(cancel.sequence)

    # -- output --------------------------------------------------------------------------------------------------

    def _control(self, message: Control) -> None:
        if self._connected:
            self._actions.append(SendControl(encode_control(message)))

    def poll(self) -> Action | None:
        """The next thing for the shell to do, or None. Acknowledgements are gathered until here."""
        if not self._actions and self._connected and self.state is LinkState.UP:
            if self._ack_due:
                self._ack_due = False
                ranges = self._received.tuples()
                upto = self._received.upto
                also = tuple(r for r in ranges if r[0] >= upto)[:MAX_RANGES] if ranges else ()
                self._control(Ack(upto, also, self._app_received))
            if self._credit_due:
                self._credit_due = False
                self._control(Credit(self._released))
        return self._actions.popleft() if self._actions else None
