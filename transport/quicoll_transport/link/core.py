"""One peer: the sans-IO core of a link. Messages exactly once, resumed over connections, bounded by credit.

A link joins two endpoints for as long as both live and hear each other. Connections (QUIC sessions) come and go
under it; the link re-sends what has not arrived, from the caller's memory. It ends once, and for good:

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

Messages have a sequence number. Small ones go at once on the link's credit ("eager"): the bytes that the receiver is
willing to hold for buffers not yet posted. A message above what is left of the credit is offered first and sent when
its buffer is posted ("granted"); so posted receives always progress, whatever waits unposted. The two halves have
their own modules, outbox and inbox; this one owns the state, the connections and the order of things.

A message that a dying connection interrupts continues on the next one behind the bytes that the receiver's Hello names;
the checksum is over the whole payload, and when it fails the whole goes again.

A message has a tag, which names the buffer that it is for, or it belongs to a channel: numbered by its sender, taken in
that order by the receiver, who posts no memory. Both kinds are the same messages, with the same credit and offers.

Acknowledgements are said at once where a sender waits for them. Others go along with what is said anyway, or after
_LATE_NS: of two ranks that answer each other, neither says anything twice. Nor do they go along more often than once in
_APART_NS, for the sake of ranks that answer each other in less: nobody waits for them, and what they free is little
(see Receipts), while to say and to hear one costs as much as a small message does.

Invariants (tests walk them):
    - a sequence is handed over at most once; what was acknowledged was verified;
    - bytes held for unposted messages never exceed credit_bytes; a peer that sends more breaks the protocol;
    - after LOST or CLOSED nothing is pending: every send and every posted receive has ended, with a cause;
    - a failure is told at both ends, also when the connection dies before the news arrives.

Reentrancy. Callbacks (on_done, on_app, on_state) are made when the core's own state is settled; they may call every
method of the core, also those that end the link. They must not raise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from quicoll_transport.errors import ConfigurationError, LinkLost, ProtocolError
from quicoll_transport.link.control_stream import encode_control
from quicoll_transport.link.detector import Detector, DetectorConfig, Liveness
from quicoll_transport.link.frames import (
    MAX_CHANNEL,
    Ack,
    App,
    Cancel,
    Control,
    Grant,
    Header,
    Hello,
    InlineMessage,
    Inquiry,
    Nack,
    Offer,
    Ping,
    Pong,
    RefuseMessage,
    Sighting,
)
from quicoll_transport.link.inbox import Inbox
from quicoll_transport.link.outbox import (
    ForgetMessage,
    Outbox,
    Outgoing,
    ResetMessage,
    SendControl,
    SendState,
    StartMessage,
)
from quicoll_transport.link.posted import Inflow, Posted

__all__ = [
    "LINK_TRANSITIONS",
    "ForgetMessage",
    "Inflow",
    "LinkConfig",
    "LinkCore",
    "LinkId",
    "LinkState",
    "LinkStats",
    "Outgoing",
    "Posted",
    "ResetMessage",
    "SendControl",
    "SendState",
    "StartMessage",
]


_LATE_NS = 5_000_000
_APART_NS = 1_000_000


class LinkState(Enum):
    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"
    LOST = "lost"
    CLOSED = "closed"


LINK_TRANSITIONS: dict[LinkState, tuple[LinkState, ...]] = {
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


LinkAction = SendControl | StartMessage | ResetMessage | ForgetMessage


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counters since the link began. Bytes and messages are of payloads.

    resends, corrupt: messages sent again; payloads that failed their checksum here. bytes_resumed: that did not travel
        again when a message went on over another connection.
    connections: that have carried the link so far.
    credit_held, credit_peak: bytes of our own credit taken by messages that no buffer is posted for, now and at most;
        MESSAGE_COST for each message is in it.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    resends: int = 0
    corrupt: int = 0
    connections: int = 0
    bytes_resumed: int = 0
    credit_held: int = 0
    credit_peak: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {one.name: getattr(self, one.name) for one in fields(LinkStats)}


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
        self.outdated_by = 0  # the incarnation of a later process of this node that the peer has a link to, as it said
        self.ended = False  # whether the link is over: from the moment that decides it, even while callbacks still run
        self.refusal = ""  # why the last attempt to connect failed, as far as the shell knows
        self.detector = Detector(config.detector, now_ns=now_ns)
        self._verdict = Liveness.ALIVE
        self._on_state = on_state
        self._connect_deadline_ns = now_ns + config.connect_ns
        self._connected = False
        self._connections = 0
        self._actions: deque[LinkAction] = deque()
        self._speaks = False  # whether something goes out in this turn
        self._said_ns: int | None = None  # when acknowledgements were said last on the present connection
        self.news_ns: int | None = None  # when acknowledgements have to go that nobody waits for, if there are any
        self._outbox = Outbox(
            peer=peer, control=self._control, start=self._start, reset=self._reset, forget=self._forget
        )
        self._inbox = Inbox(
            peer=peer,
            credit_bytes=config.credit_bytes,
            max_resends=config.max_resends,
            control=self._control,
            on_app=on_app,
            payload_fault=payload_fault,
        )

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def drained(self) -> bool:
        """Whether the peer has acknowledged everything that was given to this link."""
        return self._outbox.drained

    @property
    def credit_used(self) -> int:
        """Bytes of the peer's credit that messages of ours take now."""
        return self._outbox.credit_used

    @property
    def stats(self) -> LinkStats:
        sent, received = self._outbox, self._inbox
        return LinkStats(
            bytes_sent=sent.bytes_sent,
            bytes_received=received.bytes_received,
            messages_sent=sent.messages_sent,
            messages_received=received.messages_received,
            resends=sent.resends,
            corrupt=received.corrupt,
            connections=self._connections,
            bytes_resumed=sent.bytes_resumed,
            credit_held=received.held_bytes,
            credit_peak=received.held_peak,
        )

    def _become(self, state: LinkState) -> None:
        if state not in LINK_TRANSITIONS[self.state]:
            raise AssertionError(f"link {self.peer}: {self.state.value} cannot become {state.value}")
        self.state = state
        self._on_state(state)

    def next_timer(self) -> int | None:
        if self.ended:
            return None
        if self.state is LinkState.CONNECTING:
            return self._connect_deadline_ns
        at = self.detector.next_timer()
        return at if self.news_ns is None else min(at, self.news_ns)

    def handle_timer(self, now_ns: int) -> None:
        if self.ended:
            return
        if self.state is LinkState.CONNECTING:
            if now_ns >= self._connect_deadline_ns:
                why = f" ({self.refusal})" if self.refusal else ""
                self.lose(f"not reached within {self.config.connect_ns / 1e9:.1f} s{why}", now_ns=now_ns)
            return
        if self.news_ns is not None and now_ns >= self.news_ns:
            self._inbox.receipts.hurry = True
        if now_ns < self.detector.next_timer():
            return
        ping = self.detector.handle_timer(now_ns)
        self._judge(now_ns)
        if ping and self.state is LinkState.UP:
            self._control(Ping(now_ns))

    def heard(self, now_ns: int) -> None:
        """Note that something authenticated of the peer arrived."""
        self.detector.heard(now_ns)
        self._judge(now_ns)

    def unreachable(self, now_ns: int, answer_ns: int = 0) -> None:
        """Note that the host says that nothing listens at the peer's address. While connecting, that is no news.

        Args:
            now_ns: The time.
            answer_ns: In which a peer that lives is heard of, by what is known of the path.
        """
        if self.state in (LinkState.UP, LinkState.DOWN):
            self.detector.unreachable(now_ns, answer_ns)
            self._judge(now_ns)

    def _judge(self, now_ns: int) -> None:
        verdict = self.detector.verdict
        if self.ended:
            return
        if verdict is Liveness.LOST:
            self.lose(self.detector.cause, now_ns=now_ns)
        elif verdict is not self._verdict:
            self._verdict = verdict
            self._on_state(self.state)

    @property
    def suspect(self) -> bool:
        return self._verdict is Liveness.SUSPECT

    def lose(self, cause: str, *, now_ns: int) -> None:
        """End the link as lost; everything pending ends with LinkLost."""
        if not self.ended:
            silent_for = self.detector.silent_for(now_ns)
            self._end(LinkState.LOST, cause, LinkLost(cause, peer=self.peer, silent_for=silent_for))

    def close(self, reason: str) -> None:
        """End the link in order (the endpoint says so to the peer); everything pending ends with LinkLost."""
        if not self.ended:
            self._end(LinkState.CLOSED, reason, LinkLost(f"closed here: {reason}", peer=self.peer))

    def _end(self, state: LinkState, cause: str, error: LinkLost) -> None:
        self.cause = cause
        self.error, self.ended = error, True
        self.news_ns = None
        # First the pending work, then the news: who hears "lost" finds nothing half done.
        self._outbox.end(error)
        self._inbox.end(error)
        self._become(state)

    # -- connections ---------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """Say Hello on a connection that is authenticated. The link is up when the peer's Hello arrives."""
        self._connected = True
        remote = self.remote or LinkId(0, 0)
        app, received, released = self._inbox.receipts.acknowledge_all()
        self._control(
            Hello(
                self.local.incarnation,
                self.local.link,
                remote.incarnation,
                remote.link,
                app,
                received,
                released,
                self.config.credit_bytes,
                self._inbox.partial(),
            )
        )

    def disconnected(self) -> None:
        """Note that the connection is gone. What was on its way goes again on the next one."""
        self._connected = False
        self.news_ns, self._said_ns, self._speaks = None, None, False
        self._actions.clear()
        self._outbox.disconnected()
        self._inbox.disconnected()
        if self.state is LinkState.UP and not self.ended:
            self._become(LinkState.DOWN)

    def hello(self, hello: Hello, now_ns: int) -> None:
        """Take the peer's Hello on the current connection; the endpoint has matched the identities.

        Raises ProtocolError, having changed nothing, when it cannot be true.
        """
        if self.ended:
            return
        self._outbox.resume(hello)
        if self.error is not None:  # a callback has ended the link
            return
        self._inbox.receipts.resume()
        self.remote = LinkId(hello.incarnation, hello.link)
        self._connections += 1
        if self.state is LinkState.CONNECTING:  # what was silent before is no stall of ours
            self.detector = Detector(self.config.detector, now_ns=now_ns)
        self.detector.heard(now_ns)
        self._verdict = self.detector.verdict
        self._outbox.opened()
        self._become(LinkState.UP)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tag: bytes, payload: memoryview, on_done: Callable[[Outgoing], None]) -> Outgoing:
        """Queue a message; `on_done` is called exactly once. `payload` is flat bytes and stays the caller's.

        Raises ConfigurationError for a tag of another size than TAG_SIZE, or memory that is not flat bytes. A tag
        names one message for the life of the link; a second one with the same tag is refused by the peer.
        """
        return self._outbox.message(tag, payload, on_done, self.error)

    def channel_send(self, channel: int, payload: memoryview, on_done: Callable[[Outgoing], None]) -> Outgoing:
        """Queue the next message of a channel, like `send`; the peer takes them in the order of these calls."""
        self.check_channel(channel)
        return self._outbox.channel_message(channel, payload, on_done, self.error)

    def channel_take(self, channel: int, limit: int, on_done: Callable[[Posted], None]) -> Posted:
        """Wait for the next message of a channel; one wait per channel at a time, and one that ends is the next's.

        `on_done` is called exactly once; then `buffer` holds the message, or `void` says that its sender withdrew it.
        More than `limit` bytes are refused, with MessageRefused at both ends.
        """
        self.check_channel(channel)
        return self._inbox.take(channel, limit, on_done, self.error)

    def check_channel(self, channel: int) -> None:
        """Raises ConfigurationError for what is no channel's number."""
        if not 0 <= channel <= MAX_CHANNEL:
            raise ConfigurationError(f"a channel is a number from 0 to {MAX_CHANNEL}, not {channel}")

    def cancel(self, message: Outgoing) -> None:
        """Withdraw a message; it is not read any more once the actions that follow are carried out."""
        self._outbox.cancel(message, ended=self.ended)

    def send_app(self, data: bytes) -> None:
        """Queue a small message of the layer above: in order, exactly once, survives reconnections.

        Raises LinkLost when the link has ended, MessageRefused when it is too large or too many wait for the peer.
        """
        if self.error is not None:
            raise self.error
        self._outbox.app(data)

    def post(self, tag: bytes, buffer: memoryview, on_done: Callable[[Posted], None]) -> Posted:
        """Post a writable flat buffer for the message with this tag; `on_done` is called exactly once."""
        return self._inbox.post(tag, buffer, on_done, self.error)

    def withdraw(self, posted: Posted) -> None:
        """Take a posted buffer back, without `on_done`; afterwards nothing is written to it.

        Its message, if it was on its way into the buffer, is refused; one that was not yet can still be posted for.
        """
        self._inbox.withdraw(posted)

    def discard(self, prefix: bytes) -> None:
        """Forget all messages with a tag that starts with `prefix`, now and later.

        Those that have arrived are dropped (their senders know that they arrived), the others are refused. Buffers
        posted before must be withdrawn; posting one later fails with MessageRefused.
        """
        if not self.ended:
            self._inbox.discard(prefix)

    def send_copy(self, tag: bytes, payload: bytes) -> None:
        """Queue a message, like `send`, for whose end nobody waits: whatever becomes of it, the peer knows."""
        self._outbox.copy(tag, payload, self.error)

    def message_begin(self, header: Header) -> Inflow | None:
        """Take a message's header; return the Inflow to fill, or None when it is not wanted (stop its stream)."""
        return None if self.ended else self._inbox.message_begin(header)

    def message_end(self, inflow: Inflow) -> None:
        """Note that all bytes of the message arrived."""
        self._inbox.message_end(inflow)

    def message_reset(self, inflow: Inflow) -> None:
        """Note that the peer gave the message up; a Cancel or another attempt follows."""
        self._inbox.message_reset(inflow)

    # -- control messages ----------------------------------------------------------------------------------------

    def control(self, message: Control, now_ns: int) -> None:
        """Take one control message other than Hello. Raises ProtocolError for what the peer may not say."""
        if self.ended:
            return
        match message:
            case InlineMessage():
                self._inbox.message(message)
            case Ping():
                self._control(Pong(message.t_ns))
            case Pong():
                self.detector.pong(message.t_ns, now_ns)
                self._judge(now_ns)
            case Ack():
                self._outbox.ack(message)
            case App():
                self._inbox.app(message)
            case Offer():
                self._inbox.offer(message)
            case Grant():
                self._outbox.grant(message.sequence)
            case Nack():
                self._outbox.nack(message)
            case Cancel():
                self._inbox.cancel(message)
            case RefuseMessage():
                self._outbox.refuse(message)
            case Hello():
                raise ProtocolError("a second Hello on one connection", peer=self.peer)
            case Inquiry() | Sighting():
                raise ProtocolError(f"{type(message).__name__} on the connection of a link", peer=self.peer)
        if self.news_ns is None and self._inbox.receipts.news and not self.ended:
            self.news_ns = now_ns + _LATE_NS

    # -- output --------------------------------------------------------------------------------------------------

    def poll(self, now_ns: int) -> LinkAction | None:
        """Return the next thing to do, or None at the end of a turn. Acknowledgements are gathered until here."""
        receipts = self._inbox.receipts
        if not self._actions and self.state is LinkState.UP and receipts.news:
            along = self._speaks and (self._said_ns is None or now_ns - self._said_ns >= _APART_NS)
            if along or receipts.hurry:
                receipts.acknowledge()
                self.news_ns, self._said_ns = None, now_ns
        self._speaks = bool(self._actions)
        return self._actions.popleft() if self._actions else None

    def _control(self, message: Control) -> None:
        if self._connected and not self.ended:
            self._actions.append(SendControl(encode_control(message)))

    def _start(self, message: Outgoing) -> None:
        self._actions.append(StartMessage(message))

    def _reset(self, message: Outgoing) -> None:
        if self._connected:
            self._actions.append(ResetMessage(message))

    def _forget(self, message: Outgoing) -> None:
        if self._connected:
            self._actions.append(ForgetMessage(message))
