"""What has ended at the receiving half of a link, and what the sender still has to hear of it.

A sequence ends here once: verified (acknowledged), or rejected with a verdict. A verdict (Refuse, or the last Nack) is
repeated on every connection until the sender has answered it with Cancel; were it lost, the acknowledgement after it
would look like success. So a rejected sequence is left out of the acknowledgements of a Hello.

    open       not ended; may arrive, be interrupted and continue
    verified   in `_received`; said again whenever the sender asks for it
    rejected   in `_received` and in `_rejected`; its verdict is said again whenever the sender asks for it
    settled    rejected, and the sender has said Cancel: like verified from then on

    open -> verified   arrived            rejected -> settled   cancelled
    open -> rejected   rejected           open -> verified      cancelled (the sender gave it up)

Acknowledgements are cumulative and selective (as in RFC 9000 section 13.2 for packets); credit is a total that only
grows, so that a lost word costs nothing but time. Everything is said at most once a turn, by `acknowledge`. What nobody
waits for, application messages and those that say so, waits for something else to be said, as long as it is little:
`news` is about these, `hurry` says that there is more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from quicoll_transport.errors import ProtocolError
from quicoll_transport.link.frames import MAX_OFFERS, MAX_RANGES, Ack, App, Control, Nack, RefuseMessage
from quicoll_transport.link.ranges import Ranges

__all__ = ["MAX_VERDICTS", "Receipts"]

# Above the sender's own bound on offers: after a reconnection it offers again what had been granted.
MAX_VERDICTS = 4 * MAX_OFFERS
_MOST_UNSAID = 64 << 10  # bytes; far below what the sender lets wait
_APP_COST = 64  # of each application message, so that many small ones count too


class Receipts:
    """See the module's head. Words for the peer go to `control`."""

    def __init__(self, *, peer: str, control: Callable[[Control], None], credit_bytes: int) -> None:
        self._peer = peer
        self._most_unsaid = min(_MOST_UNSAID, credit_bytes // 4)
        self._control = control
        self._received = Ranges()
        self._fresh = Ranges()  # ended, and not acknowledged on the present connection
        self._rejected: dict[int, RefuseMessage | Nack] = {}
        self._released = 0
        self._credit_due = False
        self._app_received = 0
        self._app_due = False
        self._unsaid = 0  # bytes of application messages and of credit
        self.hurry = False

    @property
    def news(self) -> bool:
        """Whether there is something to say."""
        return self._app_due or self._credit_due or bool(self._fresh)

    def __contains__(self, sequence: int) -> bool:
        """Whether it has ended here."""
        return sequence in self._received

    # -- what has ended ------------------------------------------------------------------------------------------

    def verified(self, sequence: int, *, most_gaps: int, waits: bool) -> None:
        """It has arrived, or its sender gave it up. Raises ProtocolError where the sequence has too many gaps.

        waits: whether the sender waits for the acknowledgement.
        """
        self._end(sequence, most_gaps)
        self._fresh.add(sequence)
        self.hurry = self.hurry or waits

    def rejected(self, sequence: int, verdict: RefuseMessage | Nack, *, most_gaps: int) -> None:
        """It will not be taken; it is said again until the sender has heard it. Raises ProtocolError, as `verified`."""
        if len(self._rejected) >= MAX_VERDICTS:
            raise ProtocolError("the peer does not take our refusals", peer=self._peer)
        self._rejected[sequence] = verdict
        self._end(sequence, most_gaps)
        self._control(verdict)

    def cancelled(self, sequence: int) -> None:
        """The sender speaks of it as over: a verdict has been heard."""
        self._rejected.pop(sequence, None)

    def again(self, sequence: int) -> None:
        """The sender does not know yet that this one is over."""
        verdict = self._rejected.get(sequence)
        if verdict is not None:
            self._control(verdict)
        else:
            self._fresh.add(sequence)
            self.hurry = True

    def _end(self, sequence: int, most_gaps: int) -> None:
        self._received.add(sequence)
        if len(self._received) > most_gaps + 1:
            raise ProtocolError(f"{len(self._received)} gaps in the sequence of messages", peer=self._peer)

    def release(self, cost: int, *, late: bool = False) -> None:
        """Give so much of the link's credit back. late: the sender need not hear of it at once."""
        if cost:
            self._released += cost
            self._credit_due = True
            self._count(cost)
            self.hurry = self.hurry or not late

    def app(self, message: App) -> bool:
        """Count an application message; whether it is new. Raises ProtocolError for one that skips others."""
        if message.number < self._app_received:
            return False  # sent again after a reconnection
        if message.number != self._app_received:
            raise ProtocolError(
                f"application message {message.number} where {self._app_received} is next", peer=self._peer
            )
        self._app_received += 1
        self._app_due = True
        self._count(len(message.data) + _APP_COST)
        return True

    def _count(self, nbytes: int) -> None:
        self._unsaid += nbytes
        self.hurry = self.hurry or self._unsaid >= self._most_unsaid

    # -- what is said --------------------------------------------------------------------------------------------

    def acknowledge_all(self) -> tuple[int, tuple[tuple[int, int], ...], int]:
        """For Hello: application messages, message ranges, credit released. Ranges beyond MAX_RANGES come in Acks."""
        rejected = sorted(self._rejected)
        ranges: list[tuple[int, int]] = []
        for start, stop in self._received.tuples():
            at = start
            for sequence in rejected[bisect_left(rejected, start) : bisect_left(rejected, stop)]:
                if at < sequence:
                    ranges.append((at, sequence))
                at = sequence + 1
            if at < stop:
                ranges.append((at, stop))
        self._fresh = Ranges(ranges[MAX_RANGES:])
        self._credit_due = self._app_due = False
        self._unsaid, self.hurry = 0, bool(self._fresh)
        return self._app_received, tuple(ranges[:MAX_RANGES]), self._released

    def resume(self) -> None:
        """The peer said Hello: repeat the verdicts that it may not have heard."""
        for sequence in sorted(self._rejected):
            self._control(self._rejected[sequence])

    def acknowledge(self) -> None:
        """Say what there is to say."""
        self._unsaid, self.hurry = 0, False
        while self.news:
            upto = self._received.upto
            ranges = [(max(start, upto), stop) for start, stop in self._fresh.tuples() if stop > upto]
            self._control(Ack(upto, tuple(ranges[:MAX_RANGES]), self._app_received, self._released))
            self._fresh = Ranges(ranges[MAX_RANGES:])
            self._app_due = self._credit_due = False

    def end(self) -> None:
        """The link has ended: nobody is told any more."""
        self._rejected.clear()
