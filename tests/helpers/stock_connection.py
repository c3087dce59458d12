"""aioquic's connection with its own data path, and what that lacks: client certificates, bounded windows, an order.

Windows slide with what was taken; streams are served in the order in which they came, not in that of memory addresses;
what was lost and forged is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from aioquic import tls
from aioquic._crypto import CryptoError
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.crypto import KeyUnavailableError
from aioquic.quic.packet import QuicProtocolVersion

from quicoll_transport.quic.terms import ALPN, CID_LENGTH, DATAGRAM_BYTES, SessionConfig

if TYPE_CHECKING:
    from aioquic.quic.stream import QuicStream

    from quicoll_transport.security.credentials import Credentials


class ServiceQueue(list["QuicStream"]):
    """The order in which streams are served: who was served goes to the end, in the order in which they were served.

    That is aioquic's own round robin; only that the set which it extends the queue by has no order of its own. Those in
    it were met in the order of the queue before, so that order is theirs.
    """

    __slots__ = ("_before",)

    def __init__(self, streams: Iterable[QuicStream] = (), *, before: Iterable[QuicStream] = ()) -> None:
        super().__init__(streams)
        self._before = tuple(before)

    def extend(self, served: Iterable[QuicStream]) -> None:
        if isinstance(served, set):
            known = [stream for stream in self._before if stream in served]
            if len(known) != len(served):
                raise AssertionError("streams were served that were not in the queue")
            served = known
        self._before = ()  # each queue would hold the one before it, for ever
        super().extend(served)


class StockConnection(QuicConnection):
    """See the module's head; it also counts packets that were lost, and that were forged."""

    def __init__(self, **options: Any) -> None:
        self._served: ServiceQueue = ServiceQueue()
        super().__init__(**options)
        self.lost_packets = 0
        self.forged_packets = 0
        declare_lost = self._loss._on_packets_lost

        def counted(*, packets: Any, **more: Any) -> None:
            self.lost_packets += len(packets)
            declare_lost(packets=packets, **more)

        self._loss._on_packets_lost = counted

    @property
    def _streams_queue(self) -> ServiceQueue:
        return self._served

    @_streams_queue.setter
    def _streams_queue(self, streams: list[QuicStream]) -> None:
        """aioquic makes a new list for each packet, without those that were served, and then extends it by them."""
        self._served = ServiceQueue(streams, before=self._served)

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if not self._is_client:
            self.tls._request_client_certificate = True
        for pair in self._cryptos.values():
            pair.decrypt_packet = self._counting(pair.decrypt_packet)

    def _counting(
        self, decrypt: Callable[[bytes, int, int], tuple[bytes, bytes, int]]
    ) -> Callable[[bytes, int, int], tuple[bytes, bytes, int]]:
        """aioquic drops what fails its authentication and says so to its trace only."""

        def decrypt_packet(
            packet: bytes, encrypted_offset: int, expected_packet_number: int
        ) -> tuple[bytes, bytes, int]:
            try:
                return decrypt(packet, encrypted_offset, expected_packet_number)
            except CryptoError as error:
                self.forged_packets += not isinstance(error, KeyUnavailableError)
                raise

        return decrypt_packet

    def _write_connection_limits(self, builder: Any, space: Any) -> None:
        limit, window = self._local_max_data, self._configuration.max_data
        if limit.used + window // 2 > limit.value:
            streams = self._streams.values()
            gaps = sum(s.receiver.highest_offset - s.receiver.starting_offset() for s in streams)
            limit.value = max(limit.value, limit.used - gaps + window)
        used, limit.used = limit.used, 0  # out of sight of the code that would double the window
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    def _write_stream_limits(self, builder: Any, space: Any, stream: Any) -> None:
        receiver, window = stream.receiver, self._configuration.max_stream_data
        highest = receiver.highest_offset
        if highest + window // 2 > stream.max_stream_data_local > 0 and not receiver.is_finished:
            grown = receiver.starting_offset() + window
            stream.max_stream_data_local = max(stream.max_stream_data_local, grown)
        receiver.highest_offset = 0
        try:
            super()._write_stream_limits(builder, space, stream)
        finally:
            receiver.highest_offset = highest


def stock_configuration(
    credentials: Credentials | None, config: SessionConfig, *, is_client: bool
) -> QuicConfiguration:
    quic = QuicConfiguration(
        alpn_protocols=[ALPN],
        is_client=is_client,
        congestion_control_algorithm=config.congestion,
        connection_id_length=CID_LENGTH,
        idle_timeout=config.idle_ns / 1e9,
        max_data=config.window_bytes,
        max_stream_data=config.window_bytes,
        max_datagram_size=config.datagram_bytes or DATAGRAM_BYTES,
        cipher_suites=[tls.CipherSuite.AES_128_GCM_SHA256, tls.CipherSuite.AES_256_GCM_SHA384],
        initial_rtt=config.initial_rtt_ns / 1e9,
        supported_versions=[QuicProtocolVersion.VERSION_1],
    )
    if credentials is not None:
        quic.certificate = credentials.certificate
        quic.certificate_chain = list(credentials.chain)
        quic.private_key = credentials.private_key
        quic.cadata = credentials.authority_pem
    return quic
