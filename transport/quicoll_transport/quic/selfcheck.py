"""The self-check: whether this aioquic is the one that we examined, proved by handshakes in memory before any work.

Security rests on private parts of it. The canary tests show, at each upgrade, that all of them still mean what we
think; this check shows it at run time for those that matter most.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import aioquic

from quicoll_transport.carrier import Authenticated
from quicoll_transport.errors import ConfigurationError
from quicoll_transport.net.runs import apart, joined
from quicoll_transport.quic.gate import Gate
from quicoll_transport.quic.handshake import Handshake, handshake_configuration
from quicoll_transport.quic.parameters import local_parameters
from quicoll_transport.quic.session import RESET_KEY_BYTES, Session
from quicoll_transport.quic.terms import SessionConfig
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from quicoll_transport.net.addresses import Address

__all__ = ["check_foundation", "handshake_in_memory"]

_SUPPORTED = ((1, 7, 2), (1, 8))


def handshake_in_memory(client: Session, gate: Gate, *, now_ns: int = 10**18) -> tuple[Session, list[Any], list[Any]]:
    """Drive a client session against a gate without any IO; the server's session and both sides' events."""
    addresses: dict[bool, Address] = {True: ("192.0.2.1", 1), False: ("192.0.2.1", 2)}  # of another host: with a Retry
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
    found = aioquic.__version__  # of what was imported; to read what pip has noted takes a quarter of the check
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not _SUPPORTED[0] <= numbers < _SUPPORTED[1]:
        raise ConfigurationError(f"aioquic {found} has not been examined; >=1.7.2,<1.8 is needed")
    server_id = Identity(job="self-check", role=COORDINATOR, node="server")
    client_id = Identity(job="self-check", role=WORKER, node="client")
    made = ephemeral("self-check", [(COORDINATOR, "server"), (WORKER, "client")])
    config = SessionConfig()
    address: Address = ("192.0.2.1", 2)
    seen: list[Certificate | None] = []
    try:
        for credentials in (made[client_id], None):
            quic = handshake_configuration(credentials, config, is_client=True)
            quic.cadata = made[server_id].authority_pem
            handshake = Handshake(quic, local_parameters(config))
            handshake.connect(address, 10**9)
            client = Session(handshake, cids=[handshake.cid], config=config, reset_key=bytes(RESET_KEY_BYTES))
            gate = Gate(credentials=made[server_id], config=config)
            _server, _, server_events = handshake_in_memory(client, gate)
            seen += [event.certificate for event in server_events if isinstance(event, Authenticated)]
    except (AttributeError, TypeError, AssertionError) as error:
        raise ConfigurationError(f"aioquic {found} is not built as expected: {error}") from error
    if len(seen) != 2 or seen[0] != made[client_id].certificate or seen[1] is not None:
        raise ConfigurationError(f"aioquic {found} does not show the certificate of clients; refusing to run")
