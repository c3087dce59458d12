"""How a connection ends (RFC 9000 section 10): idle, closed by us, closed by the peer, or reset by it.

    OPEN --close--> CLOSING --3 PTO--> OVER       we say so, and again to what still comes, ever more seldom (10.2.1)
    OPEN, CLOSING --CONNECTION_CLOSE--> DRAINING --3 PTO--> OVER                     nothing is said any more (10.2.2)
    OPEN --stateless reset--> DRAINING (10.3.1)
    OPEN --nothing heard for the idle time--> OVER (10.1)

Invariants: there is one cause, the first (`cause`). In CLOSING nothing of the peer is looked at but its
CONNECTION_CLOSE. The last words are repeated for the first packet that comes, the second, the fourth and so on, so two
that close at once do not answer each other for ever.

The idle time begins anew with each packet of the peer, and with the first one after it that asks the peer to answer
(10.1); it is three probe timeouts at least, so that one can be lost.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from quicoll_transport.quic.frames import CloseFrame

__all__ = ["AEAD_LIMIT_REACHED", "ConnectionEnd", "EndCause", "EndStage"]

AEAD_LIMIT_REACHED = 0x0F
_MOST_REASON = 512  # bytes: last words fit a datagram of any path


class EndStage(Enum):
    """States of a connection; see the module's head."""

    OPEN = "open"
    CLOSING = "closing"
    DRAINING = "draining"
    OVER = "over"


class EndCause(NamedTuple):
    """Why a connection has ended.

    code: of the application, or of QUIC (RFC 9000 section 20); `is_application` says whose.
    by_peer: the peer has ended it.
    """

    code: int
    reason: str
    by_peer: bool
    is_application: bool


class ConnectionEnd:
    """See the module's head. stage: the state; is_open: it is the first. cause: None while it is open."""

    def __init__(self, *, idle_ns: int, now_ns: int) -> None:
        """idle_ns: the smaller of both sides' times; 0: never."""
        self.stage = EndStage.OPEN
        self.is_open = True
        self.cause: EndCause | None = None
        self._idle_ns = idle_ns
        self._idle_since_ns = now_ns
        self._asked = False  # something was sent since that asks for an answer
        self._words = b""
        self._due = False  # the last words are to be sent
        self._said = False
        self._packets = 0  # that came while closing
        self._over_ns: int | None = None

    def _enter(self, stage: EndStage) -> None:
        self.stage, self.is_open = stage, False  # none leads back

    @property
    def listens(self) -> bool:
        """Whether datagrams are looked at."""
        return self.is_open or self.stage is EndStage.CLOSING

    def heard(self, now_ns: int) -> None:
        """Take note of an authentic packet."""
        if self.is_open:
            self._idle_since_ns, self._asked = now_ns, False

    def asked(self, now_ns: int) -> None:
        """Take note that a packet was sent that asks for an acknowledgement."""
        if not self._asked:
            self._idle_since_ns, self._asked = now_ns, True

    def close(self, code: int, reason: str, *, is_application: bool) -> None:
        """End the connection from here, unless it has ended."""
        if not self.is_open:
            return
        self._enter(EndStage.CLOSING)
        self._due = True
        self.cause = EndCause(code, reason, by_peer=False, is_application=is_application)
        text = reason.encode()[:_MOST_REASON]
        self._words = CloseFrame(code, None if is_application else 0, text).encode()

    def on_close(self, frame: CloseFrame, now_ns: int, pto_ns: int) -> None:
        """Take the peer's CONNECTION_CLOSE."""
        reason = frame.reason.decode(errors="replace")
        self._drain(EndCause(frame.code, reason, by_peer=True, is_application=frame.frame_type is None), now_ns, pto_ns)

    def on_reset(self, now_ns: int, pto_ns: int) -> None:
        """Take the peer's stateless reset."""
        self._drain(EndCause(0, "the peer knows nothing of this connection", True, False), now_ns, pto_ns)

    def _drain(self, cause: EndCause, now_ns: int, pto_ns: int) -> None:
        if self.stage in (EndStage.OPEN, EndStage.CLOSING):
            self.cause = self.cause or cause
            self._enter(EndStage.DRAINING)
            self._due = False
            self._over_ns = now_ns + 3 * pto_ns

    def on_packet(self) -> None:
        """Take note of a datagram that came while closing."""
        if self.stage is EndStage.CLOSING:
            self._packets += 1
            self._due = self._due or self._packets & (self._packets - 1) == 0

    def last_words(self, now_ns: int, pto_ns: int) -> bytes | None:
        """Return the frame to send now; it counts as sent."""
        if not self._due:
            return None
        self._due, self._said = False, True
        self.begin_end(now_ns, pto_ns)
        return self._words

    def begin_end(self, now_ns: int, pto_ns: int) -> None:
        """Let the time run that a closed connection is kept for; also where nothing may be said."""
        if self._over_ns is None:
            self._over_ns = now_ns + 3 * pto_ns

    @property
    def has_words(self) -> bool:
        """Whether last words wait to be sent."""
        return self._due

    def next_timer(self, pto_ns: int) -> int | None:
        """Return when `on_timer` is due."""
        if self.is_open:
            return self._idle_since_ns + max(self._idle_ns, 3 * pto_ns) if self._idle_ns else None
        return None if self.stage is EndStage.OVER else self._over_ns

    def on_timer(self, now_ns: int, pto_ns: int) -> None:
        """Do what is due."""
        at = self.next_timer(pto_ns)
        if at is None or now_ns < at:
            return
        if self.is_open:
            self.cause = EndCause(0, "idle timeout", by_peer=False, is_application=False)
        self._due = False
        self._enter(EndStage.OVER)
