"""The receiving half of a link: posted buffers, messages that came early, and what has arrived so far.

A buffer is posted under a tag; a message with that tag is written there as it arrives and is handed over when its
checksum holds. Eager messages whose buffer is not posted yet wait in memory of ours; larger ones were only offered,
and are granted when their buffer is posted.

A buffer may also be posted without memory of its own (`take`, for channels): it gets the memory in which the message
waits already, or memory of its size when its size is known, within the limit that the caller set.

A message that a dying connection interrupts is paused: what has arrived stays where it is, our Hello says how much,
and the sender continues from there. Whatever happens to a message under way can happen to a paused one.

A sequence ends here once, verified or rejected; `receipts` remembers which, and tells the sender.

Bounds on what a peer can make us hold:
    bytes for unposted messages   credit_bytes; each counts its length and MESSAGE_COST
    offers, failed checksums      _MAX_OFFERS each
    verdicts                      receipts.MAX_VERDICTS
    gaps in the sequence          as many messages as an honest sender may have under way
    interrupted messages          MAX_PARTIALS; those without a posted buffer go on counting as unposted
    one taken message             the limit that its taker set, one per channel; its pages are touched as bytes arrive

Callbacks. `on_done` of a posted buffer is called exactly once, as the last thing that happens to it, unless it is
withdrawn; then never.
"""

from __future__ import annotations

from collections.abc import Callable

from quicoll_transport.errors import ConfigurationError, MessageCorrupted, MessageRefused, ProtocolError, TransportError
from quicoll_transport.link.frames import (
    MAX_OFFERS,
    MAX_PARTIALS,
    MESSAGE_COST,
    TAG_SIZE,
    App,
    Cancel,
    Control,
    Grant,
    Header,
    InlineMessage,
    Nack,
    Offer,
    RefuseMessage,
    channel_of,
    channel_tag,
    checksum,
)
from quicoll_transport.link.outbox import require_flat
from quicoll_transport.link.posted import NOTHING, Discards, Inflow, Posted, UnclaimedMessage, is_of_caller
from quicoll_transport.link.receipts import Receipts

__all__ = ["Inbox"]

# Above the sender's own bound: after a reconnection it offers again what had been granted.
_MAX_OFFERS = 4 * MAX_OFFERS


class Inbox:
    """See the module's head. Words for the peer go to `control`."""

    def __init__(
        self,
        *,
        peer: str,
        credit_bytes: int,
        max_resends: int,
        control: Callable[[Control], None],
        on_app: Callable[[bytes], None],
        payload_fault: Callable[[memoryview], None] | None,
    ) -> None:
        self.messages_received = 0
        self.bytes_received = 0
        self.corrupt = 0
        self.held_bytes = 0
        self.held_peak = 0
        self._peer = peer
        self._credit_bytes = credit_bytes
        self._max_resends = max_resends
        self._control = control
        self._on_app = on_app
        self._payload_fault = payload_fault
        self.receipts = Receipts(peer=peer, control=control, credit_bytes=credit_bytes)
        self._posted: dict[bytes, Posted] = {}
        self._held: dict[bytes, UnclaimedMessage] = {}
        self._inflows: dict[int, Inflow] = {}
        self._offers: dict[bytes, Offer] = {}
        self._offer_tags: dict[int, bytes] = {}
        self._granted: set[int] = set()
        self._failures: dict[int, int] = {}
        self._taken: dict[int, int] = {}  # channel -> counter of its next message
        self._discards = Discards()

    # -- what the caller asks for --------------------------------------------------------------------------------

    def post(
        self, tag: bytes, buffer: memoryview, on_done: Callable[[Posted], None], error: TransportError | None
    ) -> Posted:
        """Post a buffer; with `error`, one that has failed already."""
        if len(tag) != TAG_SIZE:
            raise ConfigurationError(f"a tag has {TAG_SIZE} bytes, not {len(tag)}")
        require_flat(buffer)
        if buffer.readonly:
            raise ConfigurationError("a buffer to receive into must be writable")
        if tag in self._posted:
            raise ConfigurationError(f"a buffer is already posted for tag {tag.hex()}")
        posted = Posted(bytes(tag), buffer, on_done)
        if error is None and tag in self._discards:
            error = MessageRefused(f"messages with tag {tag.hex()} are discarded", peer=self._peer)
        if error is not None:
            self._complete(posted, error)
            return posted
        self._expect(posted)
        return posted

    def take(self, channel: int, limit: int, on_done: Callable[[Posted], None], error: TransportError | None) -> Posted:
        """Post for the next message of a channel, of any size up to `limit`; its `buffer` holds it when it is done."""
        counter = self._taken.get(channel, 0)
        tag = channel_tag(channel, counter)
        if tag in self._posted:
            raise ConfigurationError(f"the next message of channel {channel} is being waited for already")
        posted = Posted(tag, memoryview(bytearray()), on_done, limit=limit)
        if error is not None:
            self._complete(posted, error)
        else:
            self._expect(posted)
        return posted

    def _expect(self, posted: Posted) -> None:
        """Match a buffer with what has arrived or is offered already."""
        held = self._held.pop(posted.tag, None)
        if held is not None:
            self._release(held.header, held=True)
            posted.void = held.header.void
            self._complete(posted, held.error or posted.place(held.header.length, held.data, peer=self._peer))
            return
        self._posted[posted.tag] = posted
        offer = self._offers.get(posted.tag)
        if offer is not None:
            self._drop_offer(offer.sequence)
            self._answer(offer, posted)

    def withdraw(self, posted: Posted) -> None:
        if posted.done:
            return
        posted.done = True
        self._posted.pop(posted.tag, None)
        if posted.inflow is not None:
            self._drop_inflow(posted.inflow, "its buffer was withdrawn")

    def discard(self, prefix: bytes) -> None:
        self._discards.add(prefix)
        for tag in [tag for tag in self._held if is_of_caller(tag) and tag.startswith(prefix)]:
            self._release(self._held.pop(tag).header, held=True)
        for tag in [tag for tag in self._offers if is_of_caller(tag) and tag.startswith(prefix)]:
            sequence = self._offers[tag].sequence
            self._drop_offer(sequence)
            self._reject(sequence, RefuseMessage(sequence, "discarded"))
        for inflow in list(self._inflows.values()):
            tag = inflow.header.tag
            if inflow.posted is None and is_of_caller(tag) and tag.startswith(prefix):
                self._drop_inflow(inflow, "discarded")

    # -- connections ---------------------------------------------------------------------------------------------

    def partial(self) -> tuple[tuple[int, int], ...]:
        """For Hello: interrupted messages, as (sequence, bytes in place)."""
        return tuple((s, self._inflows[s].filled) for s in sorted(self._inflows) if self._inflows[s].paused)

    def disconnected(self) -> None:
        """Pause what was on its way, the fullest first; the rest comes again, and is offered again."""
        self._offers.clear()
        self._offer_tags.clear()
        self._granted.clear()
        arriving, self._inflows = self._inflows, {}
        fullest = sorted((-inflow.filled, sequence) for sequence, inflow in arriving.items() if inflow.filled)
        for _, sequence in fullest[:MAX_PARTIALS]:
            inflow = arriving.pop(sequence)
            paused = Inflow(inflow.header, inflow.view, inflow.posted, inflow.filled)
            paused.paused = True
            inflow.alive = False  # for the session that had it
            inflow.view, inflow.posted = NOTHING, None
            if paused.posted is not None:
                paused.posted.inflow = paused
            if not paused.header.eager:
                self._granted.add(sequence)
            self._inflows[sequence] = paused
        for inflow in arriving.values():
            self._end_inflow(inflow)

    def end(self, error: TransportError) -> None:
        """End with the link: nothing is pending afterwards, and nothing is written any more."""
        self.disconnected()
        for inflow in self._inflows.values():
            self._end_inflow(inflow)
        self._inflows.clear()
        self._granted.clear()
        posted, self._posted = list(self._posted.values()), {}
        self._held.clear()
        self.receipts.end()
        self._failures.clear()
        self.held_bytes = 0
        for waiting in posted:
            if not waiting.done:  # a callback may have withdrawn it
                self._complete(waiting, error)

    # -- what the peer says --------------------------------------------------------------------------------------

    def app(self, message: App) -> None:
        if self.receipts.app(message):
            self._on_app(message.data)

    def offer(self, offer: Offer) -> None:
        sequence, tag = offer.sequence, offer.tag
        posted = self._posted.get(tag)
        other = self._offers.get(tag)
        if sequence in self.receipts:
            self.receipts.again(sequence)
        elif tag in self._discards:
            self._reject(sequence, RefuseMessage(sequence, "discarded"))
        elif self._is_past(tag):
            self._reject(sequence, RefuseMessage(sequence, "its channel is past it"))
        elif posted is not None:
            self._answer(offer, posted)
        elif tag in self._held or (other is not None and other.sequence != sequence):
            self._reject(sequence, RefuseMessage(sequence, f"another message with tag {tag.hex()} waits"))
        elif len(self._offers) >= _MAX_OFFERS:
            raise ProtocolError(f"more than {_MAX_OFFERS} offers wait", peer=self._peer)
        else:
            self._drop_offer(sequence)
            self._offers[tag] = offer
            self._offer_tags[sequence] = tag

    def cancel(self, cancel: Cancel) -> None:
        sequence = cancel.sequence
        self.receipts.cancelled(sequence)
        if sequence in self.receipts:
            self.receipts.again(sequence)  # it had arrived; what takes it releases its credit
            return
        if cancel.eager > self._credit_bytes:
            raise ProtocolError(
                f"a message of {cancel.eager} bytes was never within this link's credit", peer=self._peer
            )
        inflow = self._inflows.pop(sequence, None)
        if inflow is not None:
            self._end_inflow(inflow)
        self._drop_offer(sequence)
        self.receipts.release(cancel.eager)
        self._verified(sequence, waits=True)

    def message_begin(self, header: Header) -> Inflow | None:
        sequence, tag = header.sequence, header.tag
        if sequence in self.receipts:
            self.receipts.again(sequence)
            return None
        paused = self._inflows.get(sequence)
        if paused is not None and not paused.paused:
            raise ProtocolError(f"message {sequence} arrives twice at once", peer=self._peer)
        if not header.eager and sequence not in self._granted:
            raise ProtocolError(f"message {sequence} was neither granted nor eager", peer=self._peer)
        if header.offset:
            return self._continue(header, paused)
        if paused is not None:
            del self._inflows[sequence]
            self._end_inflow(paused)
        if header.void:  # its sender withdrew what came with this tag before
            for other in [inflow for inflow in self._inflows.values() if inflow.header.tag == tag]:
                self._drop_inflow(other, "its sender withdrew it")
        self._drop_offer(sequence)
        posted = self._posted.get(tag)
        refusal = ""
        if tag in self._discards:
            refusal = "discarded"
        elif self._is_past(tag):
            refusal = "its channel is past it"
        elif posted is None and not header.eager:
            refusal = "its buffer was withdrawn"
        elif tag in self._held or (posted is not None and posted.inflow is not None):
            refusal = f"another message with tag {tag.hex()} waits"
        if refusal:
            self._refuse(header, refusal)
            return None
        if posted is not None and (error := posted.place(header.length, peer=self._peer)) is not None:
            del self._posted[tag]
            self._refuse(header, str(error))
            self._complete(posted, error)
            return None
        if posted is not None:
            inflow = Inflow(header, posted.buffer, posted)
            posted.inflow = inflow
        else:
            self._hold(header)
            inflow = Inflow(header, memoryview(bytearray(header.length)), None)
        self._inflows[sequence] = inflow
        return inflow

    def message(self, message: InlineMessage) -> None:
        """Take a message that came with its payload."""
        header = Header.decode(message.header)
        if header.length != len(message.payload) or header.offset or not header.eager:
            raise ProtocolError(f"message {header.sequence} cannot be inline", peer=self._peer)
        inflow = self.message_begin(header)
        if inflow is not None:
            inflow.view[:] = message.payload
            inflow.filled = header.length
            self.message_end(inflow, waits=False)

    def message_end(self, inflow: Inflow, *, waits: bool = True) -> None:
        header = inflow.header
        if not inflow.alive:
            return
        if inflow.filled != header.length:
            raise ProtocolError(
                f"message {header.sequence} ends at {inflow.filled} of {header.length} bytes", peer=self._peer
            )
        if self._payload_fault is not None and header.length:
            self._payload_fault(inflow.view)
        data, target = inflow.view, inflow.posted
        found = checksum(data)
        del self._inflows[header.sequence]
        self._end_inflow(inflow)
        if found != header.checksum:
            self._corrupt(header, found)
            return
        posted = target or self._posted.get(header.tag)
        if posted is None and header.tag in self._held:
            self._refuse(header, f"another message with tag {header.tag.hex()} waits")
            return
        self._verified(header.sequence, waits=waits)
        self.messages_received += 1
        self.bytes_received += header.length
        if posted is None:
            self._hold(header)
            self._held[header.tag] = UnclaimedMessage(header, data)
            return
        self._release(header, late=not waits)
        del self._posted[header.tag]
        posted.void = header.void
        # One that was posted while the message was arriving has its bytes still to get.
        self._complete(posted, None if target is not None else posted.place(header.length, data, peer=self._peer))

    def message_reset(self, inflow: Inflow) -> None:
        if inflow.alive:
            del self._inflows[inflow.header.sequence]
            self._end_inflow(inflow)

    # -- inside --------------------------------------------------------------------------------------------------

    def _continue(self, header: Header, paused: Inflow | None) -> Inflow:
        """A message goes on where the last connection left it."""
        first = None if paused is None else paused.header
        if (
            paused is None
            or first is None
            or (paused.filled, first.length, first.checksum, first.tag, first.eager)
            != (header.offset, header.length, header.checksum, header.tag, header.eager)
        ):
            raise ProtocolError(
                f"message {header.sequence} continues at {header.offset} where it was not interrupted", peer=self._peer
            )
        inflow = Inflow(header, paused.view, paused.posted, paused.filled)
        if inflow.posted is not None:
            inflow.posted.inflow = inflow
        self._inflows[header.sequence] = inflow
        return inflow

    def _corrupt(self, header: Header, found: int) -> None:
        self.corrupt += 1
        failures = self._failures.get(header.sequence, 0) + 1
        nack = Nack(header.sequence, header.attempt, found, failures > self._max_resends)
        if not nack.final:
            if len(self._failures) >= _MAX_OFFERS:
                raise ProtocolError(f"more than {_MAX_OFFERS} messages fail their checksum", peer=self._peer)
            self._failures[header.sequence] = failures
            self._control(nack)
            return
        self._reject(header.sequence, nack)
        error = MessageCorrupted(
            peer=self._peer,
            sequence=header.sequence,
            expected=header.checksum,
            found=found,
            tag=header.tag,
            channel=channel_of(header.tag),
        )
        posted = self._posted.pop(header.tag, None)
        if posted is not None:
            self._release(header)
            self._complete(posted, error)
        elif header.tag in self._held:
            self._release(header)
        else:  # a buffer posted for it later must learn that it will not come; until then it costs its credit
            self._hold(header)
            self._held[header.tag] = UnclaimedMessage(header, memoryview(b""), error)

    def _answer(self, offer: Offer, posted: Posted) -> None:
        """A message is offered for which a buffer is posted."""
        if (error := posted.place(offer.length, peer=self._peer)) is not None:
            del self._posted[posted.tag]
            self._reject(offer.sequence, RefuseMessage(offer.sequence, str(error)))
            self._complete(posted, error)
            return
        self._granted.add(offer.sequence)
        self._control(Grant(offer.sequence))

    def _refuse(self, header: Header, reason: str) -> None:
        self._release(header)
        self._reject(header.sequence, RefuseMessage(header.sequence, reason))

    def _reject(self, sequence: int, verdict: RefuseMessage | Nack) -> None:
        self._forget(sequence)
        self.receipts.rejected(sequence, verdict, most_gaps=self._most_gaps)

    def _drop_inflow(self, inflow: Inflow, reason: str) -> None:
        """Nobody wants this message any more: what still comes of it goes nowhere."""
        del self._inflows[inflow.header.sequence]
        self._end_inflow(inflow)
        self._refuse(inflow.header, reason)

    def _drop_offer(self, sequence: int) -> None:
        tag = self._offer_tags.pop(sequence, None)
        if tag is not None:
            del self._offers[tag]

    def _verified(self, sequence: int, *, waits: bool) -> None:
        self._forget(sequence)
        self.receipts.verified(sequence, most_gaps=self._most_gaps, waits=waits)

    def _forget(self, sequence: int) -> None:
        """It has ended here, one way or another."""
        self._granted.discard(sequence)
        self._failures.pop(sequence, None)

    @property
    def _most_gaps(self) -> int:
        """An honest sender has no more under way than offers, what fits into the credit, and what we granted."""
        return _MAX_OFFERS + self._credit_bytes // MESSAGE_COST + len(self._posted)

    def _hold(self, header: Header) -> None:
        """Count a message that stands in memory of ours."""
        cost = header.length + MESSAGE_COST
        if self.held_bytes + cost > self._credit_bytes:
            raise ProtocolError(f"{header.length} bytes exceed the credit of this link", peer=self._peer)
        self.held_bytes += cost
        self.held_peak = max(self.held_peak, self.held_bytes)

    def _release(self, header: Header, *, held: bool = False, late: bool = False) -> None:
        """Give the credit of an eager message back. held: it stood in memory of ours until now. late: see Receipts."""
        cost = header.length + MESSAGE_COST
        if held:
            self.held_bytes -= cost
        if header.eager:
            self.receipts.release(cost, late=late)

    def _end_inflow(self, inflow: Inflow) -> None:
        """What arrives further is not written anywhere; memory of ours that it used is free."""
        inflow.alive = False
        inflow.view = NOTHING  # a session may keep the object until its stream ends; the memory is its owner's again
        if inflow.posted is not None:
            inflow.posted.inflow = None
            inflow.posted = None
        else:
            self.held_bytes -= inflow.header.length + MESSAGE_COST

    def _is_past(self, tag: bytes) -> bool:
        """Return whether this is a channel's message whose place was taken before, by itself or by a void one."""
        place = channel_of(tag)
        return place is not None and place[1] < self._taken.get(place[0], 0)

    def _complete(self, posted: Posted, error: TransportError | None) -> None:
        posted.done = True
        posted.error = error
        if error is not None and posted.limit is not None:
            posted.buffer = NOTHING
        place = channel_of(posted.tag)
        if place is not None:
            self._taken[place[0]] = place[1] + 1
        posted.on_done(posted)
