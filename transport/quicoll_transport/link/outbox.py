"""The sending half of a link: what the peer has not acknowledged yet, within the credit that it gave.

    QUEUED -> OFFERED -> SENDING -> ACKED          eager messages skip OFFERED
    any but ACKED -> CANCELLED (withdrawn) | FAILED (refused, corrupt, link ended)
    SENDING -> SENDING again after a Nack (from the first byte) or a new connection (from the first byte that the
               peer's Hello does not have); attempt + 1, from the same memory

Copies. A few bytes for whose end nobody waits are copied, and go as a control message, header and payload in one; or
with a stream of their own where much of the credit is taken, so that little waits on the control stream.

Credit. An eager message takes its payload's bytes and MESSAGE_COST of the credit that the peer's Hello names, and
keeps them until the peer has handed it over, through resends and reconnections alike. Both sides count running
totals (`_eager_sent` here, `released` there), so a lost update does no harm. A message that was cancelled gives its
credit back by way of the peer: only the peer knows whether it had arrived.

Channels. A channel's messages are numbered as they are sent, and taken in that order. One that is withdrawn leaves
its number to a void message, which needs credit or an offer like any other; so the peer keeps no list of gaps.

Callbacks. `on_done` is called exactly once for each message, always as the last thing that happens to it, and may
send, cancel or end the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from quicoll_transport.errors import ConfigurationError, MessageCorrupted, MessageRefused, ProtocolError, TransportError
from quicoll_transport.link.frames import (
    INLINE_BYTES,
    MAX_APP,
    MAX_OFFERS,
    MESSAGE_COST,
    TAG_SIZE,
    Ack,
    App,
    Cancel,
    Control,
    Header,
    Hello,
    InlineMessage,
    Nack,
    Offer,
    RefuseMessage,
    channel_of,
    channel_tag,
    checksum,
)
from quicoll_transport.link.ranges import Ranges

__all__ = ["ForgetMessage", "Outbox", "Outgoing", "ResetMessage", "SendControl", "SendState", "StartMessage"]

_MAX_APP_MESSAGES = 4096  # application messages that the peer has not acknowledged
_MAX_APP_BYTES = 16 << 20
_INLINE_CREDIT = 1 << 20


class SendState(Enum):
    QUEUED = "queued"
    OFFERED = "offered"
    SENDING = "sending"
    ACKED = "acked"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Outgoing:
    """A message on its way. `payload` is the caller's memory and must not change before `done`."""

    __slots__ = ("attempt", "checksum", "copied", "eager", "error", "inline", "offset", "on_done", "payload",
                 "sequence", "state", "tag", "void")  # fmt: skip

    def __init__(
        self,
        sequence: int,
        tag: bytes,
        payload: memoryview,
        checksum: int,
        on_done: Callable[[Outgoing], None],
        *,
        copied: bool = False,
        void: bool = False,
    ) -> None:
        """copied: nobody waits for its end. void: it stands for one of its channel that was withdrawn."""
        self.sequence = sequence
        self.tag = tag
        self.payload = payload
        self.checksum = checksum
        self.on_done = on_done
        self.copied = copied
        self.void = void
        self.state = SendState.QUEUED
        self.attempt = 0
        self.offset = 0  # the peer has so many bytes already
        self.eager = 0  # credit that it took, bytes; 0 for one that is offered first
        self.inline = False  # went as a control message the last time, so the carrier does not know of it
        self.error: TransportError | None = None

    @property
    def done(self) -> bool:
        return self.state in (SendState.ACKED, SendState.CANCELLED, SendState.FAILED)

    def header(self) -> bytes:
        return Header(
            self.tag,
            self.sequence,
            len(self.payload),
            self.checksum,
            self.attempt,
            eager=self.eager > 0,
            offset=self.offset,
            void=self.void,
        ).encode()

    def rest(self) -> memoryview:
        """Return what of the payload follows the header."""
        return self.payload[self.offset :]


# What the shell must do, in order.
class SendControl:
    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


@dataclass(frozen=True, slots=True)
class StartMessage:
    message: Outgoing


@dataclass(frozen=True, slots=True)
class ResetMessage:
    message: Outgoing


@dataclass(frozen=True, slots=True)
class ForgetMessage:
    message: Outgoing


class Outbox:
    """See the module's head. Actions go to `start`, `reset` and `forget`, words for the peer to `control`.

    `start`, `reset` and `forget` are for messages with a stream of their own.
    """

    def __init__(
        self,
        *,
        peer: str,
        control: Callable[[Control], None],
        start: Callable[[Outgoing], None],
        reset: Callable[[Outgoing], None],
        forget: Callable[[Outgoing], None],
    ) -> None:
        self.messages_sent = 0
        self.bytes_sent = 0
        self.resends = 0
        self.bytes_resumed = 0  # bytes that did not travel again
        self._peer = peer
        self._control = control
        self._start_stream = start
        self._reset_stream = reset
        self._forget_stream = forget
        self._open = False  # Hello was exchanged on the present connection
        self._next = 0
        self._outgoing: dict[int, Outgoing] = {}
        self._queue: deque[Outgoing] = deque()
        self._offered = 0
        self._settled = 0  # everything below has arrived there
        self._cancelled: dict[int, Cancel] = {}  # told on every connection until the peer acknowledges
        self._peer_credit = 0
        self._eager_sent = 0
        self._peer_released = 0
        self._channels: dict[int, int] = {}  # channel -> counter of its next message
        self._app: deque[App] = deque()
        self._app_bytes = 0
        self._app_next = 0

    @property
    def drained(self) -> bool:
        return not (self._app or self._outgoing)

    @property
    def credit_used(self) -> int:
        """Bytes of the peer's credit that are taken now."""
        return self._eager_sent - self._peer_released

    # -- what the caller asks for --------------------------------------------------------------------------------

    def message(
        self, tag: bytes, payload: memoryview, on_done: Callable[[Outgoing], None], error: TransportError | None
    ) -> Outgoing:
        """Queue a message; with `error`, one that has failed already."""
        if len(tag) != TAG_SIZE:
            raise ConfigurationError(f"a tag has {TAG_SIZE} bytes, not {len(tag)}")
        require_flat(payload)
        return self._add(Outgoing(self._next, bytes(tag), payload, checksum(payload), on_done), error)

    def copy(self, tag: bytes, payload: bytes, error: TransportError | None) -> None:
        """Queue a message for whose end nobody waits; with `error`, none."""
        if len(tag) != TAG_SIZE or len(payload) > INLINE_BYTES:
            raise ConfigurationError(f"a copy of {len(payload)} bytes, with a tag of {len(tag)}")
        message = Outgoing(self._next, tag, memoryview(payload), checksum(payload), _unheard, copied=True)
        self._add(message, error)

    def channel_message(
        self, channel: int, payload: memoryview, on_done: Callable[[Outgoing], None], error: TransportError | None
    ) -> Outgoing:
        """Queue the next message of a channel; with `error`, one that has failed already."""
        require_flat(payload)
        counter = self._channels.get(channel, 0)
        message = Outgoing(self._next, channel_tag(channel, counter), payload, checksum(payload), on_done)
        if error is None:
            self._channels[channel] = counter + 1
        return self._add(message, error)

    def _add(self, message: Outgoing, error: TransportError | None) -> Outgoing:
        if error is not None:
            self._finish(message, SendState.FAILED, error)
            return message
        self._queue_last(message)
        self.pump()
        return message

    def _queue_last(self, message: Outgoing) -> None:
        self._next += 1
        self._outgoing[message.sequence] = message
        self._queue.append(message)

    def cancel(self, message: Outgoing, *, ended: bool) -> None:
        if message.done:
            return
        self._outgoing.pop(message.sequence, None)
        if message.state is SendState.SENDING:
            self._reset(message)
        if not ended:
            if message.state is SendState.QUEUED:
                self._queue.remove(message)
            # A withdrawn sequence would stay a hole in the peer's ranges for ever; so even a queued one is
            # announced, and announced again after a reconnection.
            told = self._cancelled[message.sequence] = Cancel(message.sequence, message.eager)
            if self._open:
                self._control(told)
            if channel_of(message.tag) is not None and not message.void:
                empty = memoryview(b"")
                self._queue_last(Outgoing(self._next, message.tag, empty, checksum(empty), _unheard, void=True))
        self._finish(message, SendState.CANCELLED, None)
        self.pump()

    def app(self, data: bytes) -> None:
        if len(data) > MAX_APP:
            raise MessageRefused(f"application message of {len(data)} bytes is above {MAX_APP}", peer=self._peer)
        if len(self._app) >= _MAX_APP_MESSAGES or self._app_bytes + len(data) > _MAX_APP_BYTES:
            raise MessageRefused(
                f"{len(self._app)} application messages ({self._app_bytes} bytes) wait for the peer", peer=self._peer
            )
        message = App(self._app_next, data)
        self._app_next += 1
        self._app.append(message)
        self._app_bytes += len(data)
        if self._open:
            self._control(message)

    # -- connections ---------------------------------------------------------------------------------------------

    def disconnected(self) -> None:
        self._open = False

    def resume(self, hello: Hello) -> None:
        """Take the peer's Hello: settle what it has, send the rest again. Raises ProtocolError, changing nothing."""
        arrived = Ranges(hello.received)
        if (
            hello.app > self._app_next
            or hello.released > self._eager_sent
            or (hello.received and hello.received[-1][1] > self._next)
            or any(message.sequence in arrived for message in self._queue)
        ):
            raise ProtocolError("Hello acknowledges what was never sent", peer=self._peer)
        for sequence, filled in hello.partial:
            interrupted = self._outgoing.get(sequence)
            if sequence >= self._next or (
                interrupted is not None
                and (interrupted.state is not SendState.SENDING or filled > len(interrupted.payload))
            ):
                raise ProtocolError("Hello has bytes that were never sent", peer=self._peer)
        partial = dict(hello.partial)
        self._peer_credit = hello.credit
        self._peer_released = max(self._peer_released, hello.released)
        # First what has callbacks; what those add is then said with the rest.
        for sequence in sorted(self._outgoing):
            message = self._outgoing.get(sequence)  # None where a callback has cancelled it
            if message is not None and sequence in arrived:
                self._acked(message)
        self._settle_app(hello.app)
        for app in self._app:
            self._control(app)
        for sequence in sorted(self._outgoing):
            pending = self._outgoing[sequence]
            if pending.state is SendState.SENDING:
                pending.attempt += 1
                self.resends += 1
                pending.offset = partial.get(sequence, 0)
                self.bytes_resumed += pending.offset
                if pending.eager or pending.offset:
                    self._start(pending)
                else:
                    self._offer(pending)
            elif pending.state is SendState.OFFERED:
                self._say_offer(pending)
        for sequence in sorted(self._cancelled):
            if sequence in arrived:
                del self._cancelled[sequence]
            else:
                self._control(self._cancelled[sequence])

    def opened(self) -> None:
        """Hello is exchanged: from now on what is sent goes out at once."""
        self._open = True
        self.pump()

    def end(self, error: TransportError) -> None:
        """End with the link: nothing is pending afterwards."""
        self._open = False
        outgoing, self._outgoing = list(self._outgoing.values()), {}
        self._queue.clear()
        self._cancelled.clear()
        self._app.clear()
        self._app_bytes = 0
        for message in outgoing:
            if not message.done:  # a callback may have cancelled it
                if message.state is SendState.SENDING:
                    self._reset(message)
                self._finish(message, SendState.FAILED, error)

    # -- what the peer says --------------------------------------------------------------------------------------

    def ack(self, ack: Ack) -> None:
        beyond = max(ack.upto, ack.also[-1][1] if ack.also else 0)
        if ack.app > self._app_next or beyond > self._next:
            raise ProtocolError("the peer acknowledges what was never sent", peer=self._peer)
        if ack.released > self._eager_sent:
            raise ProtocolError("the peer releases more credit than was used", peer=self._peer)
        self._peer_released = max(self._peer_released, ack.released)
        self._settle_app(ack.app)
        if ack.upto > self._settled:
            start, self._settled = self._settled, ack.upto
            self._settle(start, ack.upto)
        for start, stop in ack.also:
            self._settle(start, stop)
        self.pump()

    def grant(self, sequence: int) -> None:
        message = self._told(sequence)
        if message is not None and message.state is SendState.OFFERED:
            self._offered -= 1
            message.state = SendState.SENDING
            message.offset = 0
            self._start(message)
            self.pump()

    def nack(self, nack: Nack) -> None:
        message = self._told(nack.sequence)
        if nack.final:
            error = None
            if message is not None:
                error = MessageCorrupted(
                    peer=self._peer,
                    sequence=nack.sequence,
                    expected=message.checksum,
                    found=nack.found,
                    tag=message.tag,
                    channel=channel_of(message.tag),
                )
            self._rejected(nack.sequence, message, error)
        elif message is not None and message.state is SendState.SENDING and nack.attempt == message.attempt:
            message.attempt += 1
            message.offset = 0  # whichever byte was wrong
            self.resends += 1
            self._start(message)

    def refuse(self, refuse: RefuseMessage) -> None:
        message = self._told(refuse.sequence)
        self._rejected(refuse.sequence, message, MessageRefused(refuse.reason, peer=self._peer))

    # -- inside --------------------------------------------------------------------------------------------------

    def _start(self, message: Outgoing) -> None:
        message.inline = (
            message.copied and message.eager > 0 and not message.offset and self.credit_used <= _INLINE_CREDIT
        )
        if message.inline:
            self._control(InlineMessage(message.header(), bytes(message.payload)))
        else:
            self._start_stream(message)

    def _reset(self, message: Outgoing) -> None:
        if not message.inline:
            self._reset_stream(message)

    def _forget(self, message: Outgoing) -> None:
        if not message.inline:
            self._forget_stream(message)

    def pump(self) -> None:
        """Start what may start: eager while the credit lasts, offers for the rest, in order of sequence."""
        while self._open and self._queue and self._offered < MAX_OFFERS:
            message = self._queue.popleft()
            cost = len(message.payload) + MESSAGE_COST
            if cost <= self._peer_credit - self.credit_used:
                message.eager = cost
                self._eager_sent += cost
                message.state = SendState.SENDING
                self._start(message)
            else:
                self._offer(message)

    def _told(self, sequence: int) -> Outgoing | None:
        """Return the message that the peer speaks of; None for one that is over. Raises for one that it cannot know."""
        message = self._outgoing.get(sequence)
        if sequence >= self._next or (message is not None and message.state is SendState.QUEUED):
            raise ProtocolError(f"the peer speaks of message {sequence}, which was not sent", peer=self._peer)
        return message

    def _rejected(self, sequence: int, message: Outgoing | None, error: TransportError | None) -> None:
        # The peer repeats its verdict on every connection until it hears Cancel: a lost one must not pass for success.
        self._control(Cancel(sequence, 0))
        if message is None:
            return
        del self._outgoing[sequence]
        if message.state is SendState.SENDING:
            self._reset(message)
        self._finish(message, SendState.FAILED, error)
        self.pump()

    def _offer(self, message: Outgoing) -> None:
        message.state = SendState.OFFERED
        self._offered += 1
        self._say_offer(message)

    def _say_offer(self, message: Outgoing) -> None:
        self._control(Offer(message.sequence, message.tag, len(message.payload)))

    def _settle_app(self, upto: int) -> None:
        while self._app and self._app[0].number < upto:
            self._app_bytes -= len(self._app.popleft().data)

    def _settle(self, start: int, stop: int) -> None:
        """Messages in [start, stop) have arrived. The peer names the range, so its size must not be our cost."""
        sequences: range | list[int] = range(start, stop)
        if stop - start > len(self._outgoing) + len(self._cancelled):
            sequences = [s for s in (*self._outgoing, *self._cancelled) if start <= s < stop]
        for sequence in sequences:
            self._cancelled.pop(sequence, None)
            message = self._outgoing.get(sequence)
            if message is not None:
                self._acked(message)

    def _acked(self, message: Outgoing) -> None:
        if message.state is SendState.QUEUED:
            raise ProtocolError(f"message {message.sequence} acknowledged before it was sent", peer=self._peer)
        del self._outgoing[message.sequence]
        self.messages_sent += 1
        self.bytes_sent += len(message.payload)
        self._forget(message)
        self._finish(message, SendState.ACKED, None)

    def _finish(self, message: Outgoing, state: SendState, error: TransportError | None) -> None:
        if message.state is SendState.OFFERED:
            self._offered -= 1
        message.state = state
        message.error = error
        message.payload = memoryview(b"")
        message.on_done(message)


def _unheard(message: Outgoing) -> None:
    """The end of a message for which nobody waits."""


def require_flat(buffer: memoryview) -> None:
    """Lengths are counted in bytes everywhere; a view of other items or with gaps would be cut wrongly."""
    if not buffer.c_contiguous or buffer.nbytes != len(buffer):
        raise ConfigurationError("a message's memory must be one contiguous run of bytes (memoryview.cast('B'))")
