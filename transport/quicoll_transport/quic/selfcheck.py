"""The self-check: whether this aioquic is the one that we examined, proved by handshakes in memory before any work.

Security rests on private parts of it. The canary tests show, at each upgrade, that all of them still mean what we
think; this check shows it at run time for those that matter most.
"""

from __future__ import annotations

import functools
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any

from quicoll_transport.carrier import Authenticated
from quicoll_transport.errors import ConfigurationError
from quicoll_transport.net.runs import apart, joined
from quicoll_transport.quic.gate import Gate
from quicoll_transport.quic.patched import PatchedConnection, ServiceQueue, configuration
from quicoll_transport.quic.session import Session
from quicoll_transport.quic.terms import SessionConfig
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from quicoll_transport.net.addresses import Address

__all__ = ["check_foundation", "handshake_in_memory"]

_SUPPORTED = ((1, 7, 2), (1, 8))
_STREAMS = 12  # an order that is none comes out right once in 12! times


def handshake_in_memory(client: Session, gate: Gate, *, now_ns: int = 10**18) -> tuple[Session, list[Any], list[Any]]:
    """Drive a client session against a gate without any IO; the server's session and both sides' events."""
    addresses: dict[bool, Address] = {True: ("127.0.0.1", 1), False: ("127.0.0.1", 2)}
    server: Session | None = None
    collected: dict[bool, list[Any]] = {True: [], False: []}
    for _ in range(20):
        now_ns += 1_000_000
        for data, _address in apart(client.datagrams_to_send(now_ns)):
            if server is None:
                admitted = gate.admit(data, addresses[True], now_ns)
                if isinstance(admitted, bytes):
                    _hand(client, admitted, addresses[False], now_ns)
                    continue
                server = admitted
            if server is not None:
                _hand(server, data, addresses[True], now_ns)
        if server is not None:
            for data, _address in apart(server.datagrams_to_send(now_ns)):
                _hand(client, data, addresses[False], now_ns)
        for session in (client, server):
            while session is not None and (event := session.next_event()) is not None:
                collected[session.is_client].append(event)
    if server is None:
        raise ConfigurationError("aioquic: a server session could not be made in memory")
    return server, collected[True], collected[False]


def _hand(session: Session, data: bytes, address: Address, now_ns: int) -> None:
    for run in joined([(data, address)]):
        session.receive(run, now_ns)


@functools.cache
def check_foundation() -> None:
    """Prove once per process that this aioquic asks for client certificates and shows us what the client sent.

    Raises ConfigurationError when it does not, or when its version is outside the range that was examined.
    """
    found = installed_version("aioquic")
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not _SUPPORTED[0] <= numbers < _SUPPORTED[1]:
        raise ConfigurationError(f"aioquic {found} has not been examined; >=1.7.2,<1.8 is needed")
    server_id = Identity(job="self-check", role=COORDINATOR, node="server")
    client_id = Identity(job="self-check", role=WORKER, node="client")
    made = ephemeral("self-check", [(COORDINATOR, "server"), (WORKER, "client")])
    config = SessionConfig()
    address: Address = ("127.0.0.1", 2)
    seen: list[Certificate | None] = []
    in_order = True
    try:
        for credentials in (made[client_id], None):
            connection = PatchedConnection(configuration=configuration(credentials, config, is_client=True))
            connection.connect(address, 10**9)
            if credentials is None:
                connection.configuration.cadata = made[server_id].authority_pem
                connection.tls._cadata = made[server_id].authority_pem
            client = Session(connection, is_client=True, cids=[connection.host_cid], config=config)
            gate = Gate(credentials=made[server_id], config=config)
            _server, _, server_events = handshake_in_memory(client, gate)
            seen += [event.certificate for event in server_events if isinstance(event, Authenticated)]
            in_order = in_order and _serves_in_order(connection, now_ns=10**18 + 10**9)
    except (AttributeError, TypeError, AssertionError) as error:
        raise ConfigurationError(f"aioquic {found} is not built as expected: {error}") from error
    if len(seen) != 2 or seen[0] != made[client_id].certificate or seen[1] is not None:
        raise ConfigurationError(f"aioquic {found} does not show the certificate of clients; refusing to run")
    if not in_order:
        raise ConfigurationError(f"aioquic {found} serves streams in an order of its own; no run would repeat itself")


def _serves_in_order(connection: PatchedConnection, *, now_ns: int) -> bool:
    """Return whether streams that one packet served stand in the order of service (patched.ServiceQueue)."""
    streams = [connection.get_next_available_stream_id(is_unidirectional=True) + 4 * i for i in range(_STREAMS)]
    for stream_id in streams:
        connection.send_stream_data(stream_id, b"x")
    connection.datagrams_to_send(now_ns / 1e9)
    queue: object = connection._streams_queue
    return isinstance(queue, ServiceQueue) and [stream.stream_id for stream in queue] == streams
