"""A carrier, and what the endpoint knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quicoll_transport.carrier import CLOSE_PROTOCOL, CLOSE_REFUSED
from quicoll_transport.link.control_stream import ControlReader

if TYPE_CHECKING:
    from quicoll_transport.carrier import Carrier
    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.endpoint.core.terms import NodeIdentity, SendRuns
    from quicoll_transport.security.limits import Pace

__all__ = ["Connection"]

_WORD_NS = 30_000_000_000  # for a control message to arrive, from its first byte on,
_WORD_BYTE_NS = 61_035  # and more for each byte: 16 KiB a second


@dataclass(slots=True, eq=False)
class Connection:
    """See the module's head. It is of no link until its peer is authenticated and has said Hello."""

    carrier: Carrier
    dialled: bool
    deadline_ns: int  # until which authentication and Hello must be through
    pace: Pace
    peer: Peer | None = None
    identity: NodeIdentity | None = None
    fingerprint: str = ""  # of the peer's certificate, once it is verified
    reader: ControlReader = field(default_factory=ControlReader)
    word_since_ns: int | None = None  # when the control message began that has not ended
    word_ns: int | None = None  # until when it must be there
    resets: int = 0  # of the carrier, as far as they were counted
    sending: SendRuns | None = None  # what the carrier gave last; it may have been sent
    unproved: int = 0  # bytes received before the peer was authenticated
    greeted: bool = False
    answered: int = 0  # inquiries; it will be of no link after one
    answer_ns: int | None = None  # until which a dialled peer must have sent anything at all; None once it has
    # Of the table, which alone writes these (table.py):
    listed: bool = False  # whether it is in the table
    carries: bool = False  # whether it is the present connection of its peer's link
    succeeds: bool = False  # whether it is to take that one's place (failover.py)
    cids: list[bytes] = field(default_factory=list)  # under which it is found
    reset_token: bytes | None = None  # by which its end is

    def listened(self, now_ns: int, *, began: bool) -> None:
        """Note that bytes of the control stream came.

        Args:
            now_ns: The time.
            began: Whether what waits now, if anything, is another message than before.
        """
        waiting = self.reader.waiting
        if waiting == 0:
            self.word_since_ns = self.word_ns = None
            return
        if began or self.word_since_ns is None:
            self.word_since_ns = now_ns
        self.word_ns = self.word_since_ns + _WORD_NS + waiting * _WORD_BYTE_NS

    def next_timer(self) -> int | None:
        """Return when to look at this connection again."""
        at = self.carrier.next_timer()
        if self.word_ns is not None:
            at = self.word_ns if at is None else min(at, self.word_ns)
        if self.greeted:
            return at
        deadline = self.deadline_ns if self.answer_ns is None else min(self.deadline_ns, self.answer_ns)
        return deadline if at is None else min(at, deadline)

    def overdue(self, now_ns: int) -> tuple[int, str] | None:
        """Return why this connection is to be closed now, as a code and words; None: there is no reason to."""
        if self.word_ns is not None and now_ns >= self.word_ns:
            return CLOSE_PROTOCOL, "a control message takes too long"
        if not self.greeted and now_ns >= self.deadline_ns:
            return CLOSE_REFUSED, "handshake too slow"
        if not self.greeted and self.answer_ns is not None and now_ns >= self.answer_ns:
            return CLOSE_REFUSED, "no answer"
        return None

    @property
    def peer_name(self) -> str:
        """Who this is as far as known, for people; "" for a stranger."""
        known = self.identity or (None if self.peer is None else self.peer.identity)
        return "" if known is None else str(known)

    @property
    def link_number(self) -> int:
        """Of the link that this is a connection of; 0 for none."""
        return 0 if self.peer is None else self.peer.number
