"""The server side's door: address validation by Retry (RFC 9000 section 8.1.2), then a Session.

What is for a connection that there is not is answered here too, with a stateless reset (section 10.3). Its tokens
follow from the node's private key, so the process that takes the place of one that has died answers for it.

Private name used: aioquic._buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aioquic._buffer import Buffer, BufferReadError
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE
from aioquic.quic.packet import QuicPacketType, QuicProtocolVersion, encode_quic_retry, pull_quic_header
from aioquic.quic.retry import TOKEN_LIFETIME, QuicRetryTokenHandler
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from quicoll_transport.net.addresses import is_loopback
from quicoll_transport.quic.access_line import AccessLine
from quicoll_transport.quic.arrival_line import ArrivalLine
from quicoll_transport.quic.chance import random_bytes
from quicoll_transport.quic.connection_ids import reset_datagram, reset_key, reset_token
from quicoll_transport.quic.handshake import Handshake, handshake_configuration
from quicoll_transport.quic.parameters import local_parameters
from quicoll_transport.quic.path_memory import PathMemory
from quicoll_transport.quic.session import Session
from quicoll_transport.quic.terms import (
    CID_LENGTH,
    SessionConfig,
    destination_cid,
    destinations,
    is_unauthenticated_initial,
)

if TYPE_CHECKING:
    from aioquic.quic.logger import QuicLogger

    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.credentials import Credentials

__all__ = ["Gate"]

_MOST_USED = 65536  # tokens remembered as used; a guard lets far fewer handshakes begin while one is valid


class Gate:
    """The server side's door, a Listener: address validation by Retry (RFC 9000 section 8.1.2), then a Session.

    Nothing is kept for a source before it has shown that it receives at its address. One of loopback has nothing to
    show: a datagram from there is one of this host, and the kernel drops what comes with it from outside.

    reset_key: for the reset tokens of all connections of this endpoint, those that it dials included.
    memory, line, arrivals: of the paths to peers, and of how they leave and how what is for them comes together, for
        the same.
    """

    def __init__(
        self,
        *,
        credentials: Credentials,
        config: SessionConfig,
        retry: bool = True,
        qlog: QuicLogger | None = None,
        port: int = 0,
    ) -> None:
        """Open the door.

        Args:
            credentials: What is shown.
            config: Of the sessions.
            retry: Whether strangers have to show their address first, but for those of this host.
            qlog: Gets the traces; None: nobody traces.
            port: Where the endpoint listens.
        """
        self.memory = PathMemory()
        self.line = AccessLine()
        self.arrivals = ArrivalLine()
        self._config = config
        self._qlog = qlog
        self._used: dict[bytes, int] = {}  # connection ids of tokens that were used, and until when they are valid
        self._port = port
        self.rotate(credentials)
        self._tokens = QuicRetryTokenHandler() if retry else None

    destinations = staticmethod(destinations)
    """Returns a run in parts, each with its connection id; see Listener. (No function around it: it is asked for each
    arrival.)"""

    def is_first(self, data: bytes | memoryview) -> bool:
        """Return whether a datagram begins a connection; see Listener."""
        return is_unauthenticated_initial(data)

    def rotate(self, credentials: Credentials) -> None:
        """Show these from the next session on. Tokens of addresses stay good: they only prove an address."""
        secret = credentials.private_key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        self.reset_key = reset_key(secret, self._port)
        self._quic = handshake_configuration(credentials, self._config, is_client=False)
        self._quic.quic_logger = self._qlog

    def disown(self, data: bytes | memoryview) -> bytes | None:
        """Return a stateless reset; see Listener. Only what looks like a packet with a short header gets one."""
        cid = destination_cid(data) if data[0] & 0xC0 == 0x40 else None
        return None if cid is None else reset_datagram(self.reset_key, cid, len(data), random_bytes)

    def admit(
        self, data: bytes, address: Address, now_ns: int, allow: Callable[[], bool] = lambda: True
    ) -> Session | bytes | None:
        """For a datagram of no known session: a new Session (not yet fed with it), a reply to send, or None.

        allow: asked last, when the source has shown its address (or need not): whether to begin a handshake now. A
        token is good for one handshake: what repeats it later, from the same address, is somebody on the path, who
        would have us sign and answer again and again (RFC 9000 section 8.1.4).
        """
        if len(data) < SMALLEST_MAX_DATAGRAM_SIZE:
            return None
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=CID_LENGTH)
        except (ValueError, BufferReadError):
            return None
        if header.packet_type != QuicPacketType.INITIAL or header.version != QuicProtocolVersion.VERSION_1:
            return None
        original, retried = header.destination_cid, None
        if self._tokens is not None and not is_loopback(address):
            if not header.token:
                source = random_bytes(CID_LENGTH)
                token = self._tokens.create_token(
                    address=address,
                    original_destination_connection_id=header.destination_cid,
                    retry_source_connection_id=source,
                    now=now_ns / 1e9,
                )
                return encode_quic_retry(
                    version=header.version,
                    source_cid=source,
                    destination_cid=header.source_cid,
                    original_destination_cid=header.destination_cid,
                    retry_token=token,
                )
            try:
                original = self._tokens.validate_token(
                    address=address, destination_cid=header.destination_cid, token=header.token, now=now_ns / 1e9
                )
            except (ValueError, BufferReadError):
                return None
            retried = header.destination_cid
            if retried in self._used:
                return None
        if not allow():
            return None
        if retried is not None:
            self._use(retried, now_ns)
        return self._open(header.destination_cid, original, retried)

    def _open(self, cid: bytes, original: bytes, retried: bytes | None) -> Session:
        """Return a session for a stranger who is let in.

        Args:
            cid: By which its first datagrams find it.
            original: Destination of its very first one.
            retried: Source of the Retry that it got; None: it got none.
        """
        handshake = Handshake(
            self._quic,
            local_parameters(self._config),
            reset_token=lambda own: reset_token(self.reset_key, own),
            original_cid=original,
            retry_cid=retried,
        )
        cids = [cid, handshake.cid]
        return Session(
            handshake,
            cids=cids,
            config=self._config,
            reset_key=self.reset_key,
            qlog=self._qlog,
            memory=self.memory,
            line=self.line,
            arrivals=self.arrivals,
        )

    def _use(self, cid: bytes, now_ns: int) -> None:
        """Remember that the token for this connection id was used, for as long as it would be good."""
        while self._used and (next(iter(self._used.values())) < now_ns or len(self._used) >= _MOST_USED):
            del self._used[next(iter(self._used))]
        self._used[cid] = now_ns + int((TOKEN_LIFETIME + 1) * 1e9)
