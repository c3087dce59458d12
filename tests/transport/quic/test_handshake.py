"""Handshakes without sockets: ours with ours, and with stock aioquic on either side; a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioquic.quic.connection import QuicConnection

from quicoll_transport.quic.handshake import Handshake, handshake_configuration, local_parameters
from quicoll_transport.quic.keys import KeyPhases
from quicoll_transport.quic.packets import open_packet, seal
from quicoll_transport.quic.terms import SessionConfig, destination_cid
from quicoll_transport.security.credentials import Credentials

MS = 1_000_000
START = 10**18
CLIENT, SERVER = ("127.0.0.1", 1), ("127.0.0.1", 2)
CONFIG = SessionConfig()
CredentialsOf = Callable[..., Credentials]


def ours(credentials: Credentials | None, *, is_client: bool, **options: Any) -> Handshake:
    quic = handshake_configuration(credentials, CONFIG, is_client=is_client)
    made = Handshake(quic, local_parameters(CONFIG), reset_token=lambda cid: cid + cid, **options)
    if is_client:
        made.connect(SERVER, START)
    return made


class AskingConnection(QuicConnection):
    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._request_client_certificate = not self._is_client


def test_two_of_ours_have_keys_that_fit(credentials_of: CredentialsOf) -> None:
    client, server = ours(credentials_of("a"), is_client=True), None
    now = START
    for _ in range(3):
        for data, _ in client.datagrams_to_send(now):
            if server is None:
                server = ours(credentials_of("b"), is_client=False, original_cid=destination_cid(data))
            assert server.receive(data, CLIENT, now + MS) is None
        assert server is not None
        now += MS
        for data, _ in server.datagrams_to_send(now):
            assert client.receive(data, SERVER, now + MS) is None
        now += MS
    a, b = client.handover, server.handover
    assert a is not None
    assert b is not None
    sending = KeyPhases(a.suite, a.send_secret, a.receive_secret, key_packets=9, pto_ns=lambda: MS, confirmed=False)
    receiving = KeyPhases(b.suite, b.send_secret, b.receive_secret, key_packets=9, pto_ns=lambda: MS, confirmed=True)
    packet = seal(sending.send, a.peer_cid, 0, b"hello")
    assert open_packet(receiving, packet, len(b.cid), -1, now) == (0, b"hello")
