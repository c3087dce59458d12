"""`quicoll relay`: a process that passes datagrams on between ranks that cannot reach each other, and no more.

It has a certificate of the job with the role "relay". The coordinator names it to the ranks (`--relay HOST:PORT`). They
make a link to it when they need one, ask on that link, and send through it. It knows no members: whoever has a worker's
certificate of the job, and is not denied, may ask; and is sent what those alone send that it has asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from quicoll.errors import LocalError, PeerError
from quicoll.membership.messages import AskRelay, decode, encode
from quicoll.membership.relaying import RELAY, RelayDesk, relay_limits
from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.errors import LinkLost, TransportError
from quicoll_transport.net.addresses import format_address, parse_address
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.access import Access
from quicoll_transport.security.identity import WORKER
from quicoll_transport.security.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from pathlib import Path

    from quicoll_transport.endpoint import Link
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.relay.table import RelayLimits
    from quicoll_transport.security.credentials import Credentials

__all__ = ["RelayService", "serve_relay"]

log = logging.getLogger("quicoll.relay")


class RelayService:
    """A relay on the running loop, until `aclose`. endpoint: its own. desk: who asks for whom."""

    def __init__(
        self,
        *,
        credentials: Credentials,
        io: DatagramIO,
        limits: RelayLimits,
        transport: EndpointConfig,
        loop: asyncio.AbstractEventLoop,
        incarnation: int,
        denied: Sequence[str] = (),
        wall_clock: Callable[[], datetime] | None = None,
    ) -> None:
        """Open the endpoint.

        Args:
            credentials: The relay's own.
            io: The socket; it belongs to the service from here on.
            limits: Bounds of what is passed on.
            transport: The endpoint's settings.
            loop: The running loop.
            incarnation: Positive, another one than any earlier process of this relay had.
            denied: Fingerprints of certificates that may not come in.
            wall_clock: The date that certificates are checked against, aware; None takes the system's.
        """
        self.desk = RelayDesk(io, limits, loop=loop)
        self.endpoint = Endpoint(
            credentials=credentials,
            config=transport,
            io=self.desk.io,
            loop=loop,
            incarnation=incarnation,
            authorize=Policy(roles=(WORKER,), denied=denied),
            on_link=lambda link: link.listen(self._on_app, self._on_state),
            wall_clock=wall_clock,
        )

    async def aclose(self) -> None:
        """End it. What was passed on by it is lost from now on."""
        await self.endpoint.aclose(reason="the relay was stopped")

    def _on_app(self, link: Link, data: bytes) -> None:
        try:
            message = decode(data, sender="member", node=link.node)
        except PeerError as error:
            log.warning("%s", error)
            link.close("malformed message")
            return
        if not isinstance(message, AskRelay):
            log.warning("%s takes this relay for a coordinator", link.node)
            link.close("this is a relay")
            return
        with contextlib.suppress(LinkLost):
            link.send_app(encode(self.desk.ask(link, message)))

    def _on_state(self, link: Link) -> None:
        if link.ended:
            self.desk.ended(link)


async def serve_relay(
    *,
    listen: str,
    job: str,
    certs: str | Path,
    rate: float = 100.0,
    deny: str | Path | None = None,
    incarnation: int,
    ready: Callable[[str], None],
) -> None:
    """Run a relay until cancelled.

    Args:
        listen: "host:port".
        job: The job's name, as in the certificates.
        certs: Directory with ca.pem, relay-relay.pem and its key.
        rate: Megabytes a second of all that is passed on; half of it at most from one rank to another.
        deny: File of SHA-256 fingerprints of certificates that may not come in.
        incarnation: As in `RelayService`.
        ready: Called with the address that it listens on.
    Raises:
        LocalError: Settings, certificates or the address cannot work.
    """
    loop = asyncio.get_running_loop()
    try:
        access = Access.read(certs, role=RELAY, node=RELAY, deny=deny)
        if access.credentials.identity.job != job:
            raise LocalError(f"the certificate is for job {access.credentials.identity.job!r}, not {job!r}")
        limits = relay_limits(rate)
        make = partial(UdpSocket, *parse_address(listen), loop=loop)
        service = RelayService(
            credentials=access.credentials,
            io=make(),
            limits=limits,
            transport=EndpointConfig(),
            loop=loop,
            incarnation=incarnation,
            denied=access.denied,
        )
    except TransportError as error:
        raise LocalError(str(error)) from error
    try:
        ready(format_address(service.endpoint.address))
        await loop.create_future()
    finally:
        await service.aclose()
