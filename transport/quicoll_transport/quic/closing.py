"""How a connection ends (RFC 9000 section 10): idle, closed by us, closed by the peer, or reset by it.

    open --close--> ended: the last words are to be sent, once          (10.2)
    open --CONNECTION_CLOSE--> ended: nothing is said any more          (10.2.2)
    open --stateless reset--> ended: likewise                           (10.3.1)
    open --nothing heard for the idle time--> ended: likewise           (10.1)

Invariants: there is one cause, the first (`cause`); nothing leads back. Who has ended looks at nothing that comes. What
is sent to it still for a while is answered by whoever keeps the connection's ids, with `LastWords`: for that neither
keys nor streams are needed (10.2.1), so a connection that has ended costs a few hundred bytes.

The idle time begins anew with each packet of the peer, and with the first one after it that asks the peer to answer
(10.1); it is three probe timeouts at least, so that one can be lost.
"""

from __future__ import annotations

from typing import NamedTuple

from quicoll_transport.carrier import CLOSE_FORGOTTEN
from quicoll_transport.quic.frames import CloseFrame

__all__ = ["AEAD_LIMIT_REACHED", "ConnectionEnd", "EndCause"]

AEAD_LIMIT_REACHED = 0x0F
_MOST_REASON = 512  # bytes: last words fit a datagram of any path


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
    """See the module's head.

    is_open: whether it has not ended. cause: None while it is open. is_silent: it ended by time, so the peer is not
    there, or thinks the same.
    """

    def __init__(self, *, idle_ns: int, now_ns: int) -> None:
        """idle_ns: the smaller of both sides' times; 0: never."""
        self.is_open = True
        self.is_silent = False
        self.cause: EndCause | None = None
        self._idle_ns = idle_ns
        self._idle_since_ns = now_ns
        self._asked = False  # something was sent since that asks for an answer
        self._words = b""  # that are to be sent

    def _end(self, cause: EndCause) -> None:
        self.is_open, self.cause = False, cause

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
        if self.is_open:
            self._end(EndCause(code, reason, by_peer=False, is_application=is_application))
            text = reason.encode()[:_MOST_REASON]
            self._words = CloseFrame(code, None if is_application else 0, text).encode()

    def on_close(self, frame: CloseFrame) -> None:
        """Take the peer's CONNECTION_CLOSE."""
        if self.is_open:
            reason = frame.reason.decode(errors="replace")
            self._end(EndCause(frame.code, reason, by_peer=True, is_application=frame.frame_type is None))

    def on_reset(self) -> None:
        """Take the peer's stateless reset."""
        if self.is_open:
            self._end(EndCause(CLOSE_FORGOTTEN, "the peer knows nothing of this connection", True, False))

    @property
    def has_words(self) -> bool:
        """Whether last words wait to be sent."""
        return bool(self._words)

    def last_words(self) -> bytes:
        """Return the frame to send now, empty if there is none; it counts as sent."""
        words, self._words = self._words, b""
        return words

    def next_timer(self, pto_ns: int) -> int | None:
        """Return when `on_timer` is due."""
        return self._idle_since_ns + max(self._idle_ns, 3 * pto_ns) if self.is_open and self._idle_ns else None

    def on_timer(self, now_ns: int, pto_ns: int) -> None:
        """Do what is due."""
        at = self.next_timer(pto_ns)
        if at is not None and now_ns >= at:
            self.is_silent = True
            self._end(EndCause(0, "idle timeout", by_peer=False, is_application=False))
