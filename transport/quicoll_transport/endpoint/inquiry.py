"""How a peer sees this side, asked over one connection that becomes no link: for a check before a job, or beside one.

    handshake --Authenticated, peer verified--> Inquiry --Sighting--> more of them, full-sized datagrams --> closed

Nothing here says Hello, so a process of the same node that has a link to the peer keeps it, and the peer's layer above
hears of nothing. What is learned: that datagrams go both ways, that each side takes the other's certificate, the
address that the peer sees (behind NAT another one than is bound), its date, the round trip, and what the path carries.

Failure cases: no answer until the deadline; the peer closes (mostly because it refuses the certificate, for a reason
that only its log has); the peer's certificate is not one that is trusted here. Each is an error that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from quicoll_transport.carrier import CLOSE_NORMAL, Authenticated, Closed, ControlData
from quicoll_transport.errors import AuthenticationError, DeadlineExceeded, LinkLost, ProtocolError, TransportError
from quicoll_transport.link.control_stream import ControlReader, encode_control
from quicoll_transport.link.frames import INLINE_BYTES, Inquiry, Sighting
from quicoll_transport.net.addresses import canonical, format_address
from quicoll_transport.quic import Session, SessionConfig, check_foundation
from quicoll_transport.quic.terms import DATAGRAM_BYTES
from quicoll_transport.security.verification import verify_peer

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.net.trouble import Trouble
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.security.credentials import Credentials
    from quicoll_transport.security.identity import Identity

__all__ = ["Seen", "inquire"]

_SEARCH_S = 1.5
_PAUSE_S = 0.05
_MOST_INQUIRIES = 32
_ENOUGH = (
    8  # answers to full datagrams; where those are lost, probes of 1200 bytes bring one or two until that is noticed
)
"""The peer answers twice as many. They fill datagrams, and the fastest answer tells the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a peer answered, and what its connection showed.

    Attributes:
        peer: Who it is.
        certificate: The peer's.
        address: Where the inquiry came from, as the peer sees it.
        ahead_ns: How far the peer's clock is ahead of this side's, to within half of `rtt_ns`.
        rtt_ns: From the inquiry to the answer.
        datagram_bytes: UDP payload that the path carries: as much as links begin with, or less where that is lost, or
            more where probes have found more in the time there was.
    """

    peer: Identity
    certificate: Certificate
    address: tuple[str, int]
    ahead_ns: int
    rtt_ns: int
    datagram_bytes: int


async def inquire(
    address: Address,
    *,
    credentials: Credentials,
    io: DatagramIO,
    timeout: float = 5.0,
    search: float = _SEARCH_S,
) -> Seen:
    """Ask an endpoint how it sees this side.

    Args:
        address: Of the endpoint; a canonical one, no name.
        credentials: What is shown, and whom to trust.
        io: A socket, not started. It is closed at the end, in any case.
        timeout: Seconds until the answer.
        search: Seconds for which full-sized datagrams are sent after it, to see whether they arrive.
    Raises:
        DeadlineExceeded: Nothing, or no answer, came in time.
        AuthenticationError: The peer's certificate is not accepted here, or ours is not there.
        LinkLost: The peer's host says that nothing listens, or the peer closed the connection.
        ProtocolError: What answers is no endpoint of ours.
    """
    check_foundation()
    inquiry = _Inquiry(address, credentials, io)
    try:
        io.start(inquiry.on_runs, inquiry.on_unreachable)
        inquiry.turn()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(inquiry.answered)
        except TimeoutError:
            raise inquiry.too_late(timeout) from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(search):
                await asyncio.shield(inquiry.ended)
        return inquiry.result()
    finally:
        inquiry.close()


class _Inquiry:
    def __init__(self, address: Address, credentials: Credentials, io: DatagramIO) -> None:
        self._loop = asyncio.get_running_loop()
        self._address = canonical(address)
        self._credentials = credentials
        self._io = io
        self._reader = ControlReader()
        self._timer: asyncio.TimerHandle | None = None
        self._heard = False
        self._peer: tuple[Identity, Certificate] | None = None
        self._asked_ns = 0
        self._asked = 0
        self._filled = 0  # inquiries of full datagrams that were answered
        self._again: asyncio.TimerHandle | None = None
        self._rtt_ns = 0
        self._ahead_ns = 0
        self.answered: asyncio.Future[Sighting] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()  # by the peer, or because all is known
        self._session = Session.client(
            credentials=credentials, config=SessionConfig(), address=self._address, now_ns=self._now_ns()
        )

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def on_runs(self, runs: list[DatagramRun]) -> None:
        for run in runs:
            if run.address[:2] == self._address[:2]:
                self._heard = True
                self._guard(partial(self._session.receive, run, self._now_ns()))
        self.turn()

    def on_unreachable(self, address: Address, trouble: Trouble) -> None:
        if trouble.limit:
            self._session.limit_datagrams(trouble.limit)
        elif address[:2] == self._address[:2]:
            self._fail(LinkLost(trouble.cause, peer=format_address(self._address)))

    def turn(self) -> None:
        """See what has happened, send what is to be sent, sleep until something is due."""
        self._guard(self._events)
        self._io.send(self._session.datagrams_to_send(self._now_ns()))
        if self._timer is not None:
            self._timer.cancel()
        at = self._session.next_timer()
        self._timer = None if at is None else self._loop.call_at(at / 1e9 + 1e-9, self._on_timer)
        known = self._filled >= _ENOUGH or self._session.datagram_bytes < DATAGRAM_BYTES
        if self.answered.done() and known and not self.ended.done():
            self.ended.set_result(None)

    def _on_timer(self) -> None:
        self._guard(partial(self._session.handle_timer, self._now_ns()))
        self.turn()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (TransportError, AssertionError) as error:  # the second is how aioquic meets some malformed bytes
            self._fail(error if isinstance(error, TransportError) else ProtocolError(f"malformed bytes: {error}"))

    def _events(self) -> None:
        while (event := self._session.next_event()) is not None:
            match event:
                case Authenticated():
                    self._verify(event)
                case ControlData():
                    for message in self._reader.feed(event.data):
                        self._take(message)
                case Closed():
                    self._closed(event)

    def _verify(self, event: Authenticated) -> None:
        identity = verify_peer(
            event.certificate,
            event.chain,
            trust=self._credentials.trust,
            job=self._credentials.identity.job,
            now=datetime.now(UTC),
        )
        if event.certificate is not None:  # `verify_peer` has refused it where there is none
            self._peer = (identity, event.certificate)
        self._ask(b"")

    def _ask(self, filling: bytes) -> None:
        self._asked += 1
        self._asked_ns = self._now_ns()
        self._session.send_control(encode_control(Inquiry(filling)))

    def _ask_more(self) -> None:
        self._again = None
        self._guard(partial(self._ask, bytes(INLINE_BYTES)))
        self.turn()

    def _take(self, message: object) -> None:
        if not isinstance(message, Sighting):
            raise ProtocolError(f"{type(message).__name__} is no answer to an inquiry")
        rtt_ns = max(self._now_ns() - self._asked_ns, 1)
        if not self._rtt_ns or rtt_ns < self._rtt_ns:
            self._rtt_ns = rtt_ns
            self._ahead_ns = message.wall_ns - (round(datetime.now(UTC).timestamp() * 1e9) - rtt_ns // 2)
        if not self.answered.done():
            self.answered.set_result(message)
        else:
            self._filled += 1
        if self._asked < _MOST_INQUIRIES and self._again is None:
            self._again = self._loop.call_later(_PAUSE_S, self._ask_more)

    def _closed(self, event: Closed) -> None:
        where = format_address(self._address)
        if self._peer is not None and not self.answered.done():
            self._fail(AuthenticationError(f"{where} refuses this certificate; its own log says why"))
        else:
            self._fail(LinkLost(event.reason or event.name or "closed by the peer", peer=where))

    def _fail(self, error: TransportError) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)
        elif not self.ended.done():
            self.ended.set_result(None)

    def too_late(self, timeout: float) -> TransportError:
        """Return what to say when the time is over."""
        where = format_address(self._address)
        if self._peer is not None:
            return DeadlineExceeded(f"{where} did not answer the inquiry within {timeout:g} s", seconds=timeout)
        got = "an answer came, but no handshake" if self._heard else "nothing came back"
        return DeadlineExceeded(f"no connection to {where} within {timeout:g} s: {got}", seconds=timeout)

    def result(self) -> Seen:
        """Return what is known now; `answered` has to be done."""
        sighting = self.answered.result()
        if self._peer is None:
            raise ProtocolError("an answer before the handshake")
        return Seen(
            peer=self._peer[0],
            certificate=self._peer[1],
            address=(sighting.host, sighting.port),
            ahead_ns=self._ahead_ns,
            rtt_ns=self._rtt_ns,
            datagram_bytes=self._session.datagram_bytes,
        )

    def close(self) -> None:
        """End the connection and close the socket."""
        for timer in (self._timer, self._again):
            if timer is not None:
                timer.cancel()
        self._session.close(CLOSE_NORMAL, "asked")
        self._io.send(self._session.datagrams_to_send(self._now_ns()))
        self._session.release()
        self._io.close()
        self.ended.cancel()
        if self.answered.done() and not self.answered.cancelled():
            self.answered.exception()  # it was told already, or nobody waits for it
        self.answered.cancel()
