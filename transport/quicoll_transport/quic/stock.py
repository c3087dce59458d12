"""Stock aioquic over its own asyncio face: what this transport is measured against. Nothing of it is used by a link.

One stream for each message; the receiver answers with one byte when all of it has come. Nothing is checked but what
QUIC checks, nobody shows a certificate that anybody verifies, and the bytes stay in pieces. So it does less, on a
loopback interface only.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from aioquic import tls
from aioquic.asyncio.client import connect
from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.quic.terms import DATAGRAM_BYTES
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from aioquic.asyncio.protocol import QuicConnectionProtocol
    from aioquic.asyncio.server import QuicServer

    from quicoll_transport.net.addresses import Address

__all__ = ["StockReceiver", "StockSender"]

_PIECE = 1 << 20


def _configuration(datagram_bytes: int, window: int, *, is_client: bool) -> QuicConfiguration:
    made = QuicConfiguration(
        alpn_protocols=["bench"],
        is_client=is_client,
        max_data=window,
        max_stream_data=window,
        max_datagram_size=datagram_bytes or DATAGRAM_BYTES,
        congestion_control_algorithm="cubic",
        cipher_suites=[tls.CipherSuite.AES_128_GCM_SHA256],
        idle_timeout=600.0,
        verify_mode=ssl.CERT_NONE if is_client else None,
    )
    if not is_client:
        identity = Identity("bench", WORKER, "receiver")
        credentials = ephemeral("bench", [(identity.role, identity.node)])[identity]
        made.certificate, made.private_key = credentials.certificate, credentials.private_key
    return made


class StockReceiver:
    """Takes messages on the loopback interface. Make it with `listening`.

    address: where it listens.
    """

    def __init__(self, server: QuicServer, address: Address, arrivals: asyncio.Queue[int]) -> None:
        self._server = server
        self._arrivals = arrivals
        self.address = address

    @classmethod
    async def listening(cls, datagram_bytes: int, *, window: int) -> StockReceiver:
        """Return one on a free port.

        Args:
            datagram_bytes: UDP payload; 0 for 1452.
            window: Of flow control, in bytes.
        """
        arrivals: asyncio.Queue[int] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            size = 0
            while piece := await reader.read(_PIECE):
                size += len(piece)
            writer.write(b"!")
            writer.write_eof()
            arrivals.put_nowait(size)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks[:] = [task for task in tasks if not task.done()]
            tasks.append(asyncio.ensure_future(take(reader, writer)))

        configuration = _configuration(datagram_bytes, window, is_client=False)
        server = await serve("127.0.0.1", 0, configuration=configuration, stream_handler=accept)
        if server._transport is None:
            raise ConfigurationError("aioquic's server has no socket")
        host, port = server._transport.get_extra_info("sockname")[:2]
        return cls(server, (host, port), arrivals)

    async def received(self) -> int:
        """Wait for the end of the next message and return its size."""
        return await self._arrivals.get()

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


class StockSender:
    """Sends messages over one connection. Make it with `connected`."""

    def __init__(self, client: QuicConnectionProtocol, connection: AsyncExitStack) -> None:
        self._client = client
        self._connection = connection

    @classmethod
    async def connected(cls, address: Address, datagram_bytes: int, *, window: int) -> StockSender:
        """Return one that is connected.

        Args:
            address: Where a StockReceiver listens.
            datagram_bytes: UDP payload; 0 for 1452.
            window: Of flow control, in bytes.
        """
        stack = AsyncExitStack()
        configuration = _configuration(datagram_bytes, window, is_client=True)
        client = await stack.enter_async_context(connect(address[0], address[1], configuration=configuration))
        return cls(client, stack)

    async def send(self, data: bytes) -> None:
        """Send a message; return when its receiver has answered.

        Raises:
            ConfigurationError: The answer is another one.
        """
        reader, writer = await self._client.create_stream()
        writer.write(data)
        writer.write_eof()
        if await reader.read() != b"!":
            raise ConfigurationError("aioquic's receiver did not answer")

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.aclose()
