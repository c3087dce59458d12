"""Two cores of endpoints and a list of datagrams between them, on a virtual clock: no sockets, no event loop."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from datagrams import one

from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.endpoint.core.endpoint import EndpointCore
from quicoll_transport.endpoint.core.terms import (
    CancelLookUp,
    LookUp,
    Record,
    ReportError,
    SendRuns,
    Tell,
    Verified,
)
from quicoll_transport.errors import AuthenticationError
from quicoll_transport.link.core import LinkState
from quicoll_transport.net.runs import apart
from quicoll_transport.quic import Gate, Session, SessionConfig
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.verification import verify_peer

if TYPE_CHECKING:
    from quicoll_transport.carrier import Authenticated
    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.net.addresses import Address

__all__ = ["CONFIG", "LATENCY", "MS", "CredentialsOf", "Node", "Pair", "S"]

MS = 1_000_000
S = 1_000 * MS
LATENCY = 5 * MS
CredentialsOf = Callable[..., Credentials]
E = TypeVar("E")


class Node:
    """A core, and everything that it asked for."""

    def __init__(
        self, pair: Pair, credentials: Credentials, address: Address, config: EndpointConfig, *, incarnation: int = 1
    ) -> None:
        self.pair = pair
        self.address = address
        self.credentials = credentials
        self.identity = credentials.identity
        self.denied: set[str] = set()
        self.refuses: str | None = None
        self.takes_over = True
        self.words: list[bytes] = []
        self.states: list[LinkState] = []
        self.ended: list[Peer] = []
        self.events: list[Any] = []
        self.look_ups: list[LookUp] = []
        self.cancelled: list[int] = []
        self.log: list[str] = []
        self.gate = Gate(credentials=credentials, config=config.session, port=address[1])
        self.core = EndpointCore(
            wall_ns=lambda: 0,
            identity=self.identity,
            incarnation=incarnation,
            settings=config,
            listener=self.gate,
            dial=lambda to, now_ns: Session.client(
                credentials=credentials,
                config=config.session,
                address=to,
                now_ns=now_ns,
                reset_key=self.gate.reset_key,
            ),
            verify=self._verify,
            authorize=lambda identity: self.refuses,
            on_peer=self._on_peer,
            on_end=self.ended.append,
            scope_of=int,
            observed=True,
        )

    def _verify(self, event: Authenticated) -> Verified:
        identity = verify_peer(
            event.certificate, event.chain, trust=self.credentials.trust, job=self.identity.job, now=self.pair.date()
        )
        if identity.node in self.denied:
            raise AuthenticationError("denied", peer=str(identity))
        return Verified(identity, f"of {identity.node}")

    def _on_peer(self, peer: Peer) -> bool:
        self.listen(peer)
        return self.takes_over

    def listen(self, peer: Peer) -> Peer:
        peer.on_app, peer.on_state = self.words.append, self.states.append
        return peer

    def dial(self, other: Node, *addresses: Address) -> Peer:
        peer = self.core.peer(other.identity, addresses=addresses or [other.address], dial=True, now_ns=self.pair.now)
        self.listen(peer)
        self.act()
        return peer

    def peer(self, other: Node) -> Peer:
        return self.core.peers[other.identity]

    def act(self) -> None:
        """What a shell does after each call of the core."""
        self._perform()
        while self.core.waiting:
            self.core.serve(self.pair.now)
            self._perform()

    def _perform(self) -> None:
        while self.core.actions:
            match action := self.core.actions.popleft():
                case SendRuns():
                    for data, address in apart(action.runs):
                        self.pair.send(self.address, address, data)
                case LookUp():
                    self.look_ups.append(action)
                case CancelLookUp():
                    self.cancelled.append(action.peer)
                case Tell():
                    self.events.append(action.event)
                case Record():
                    self.log.append(action.text % action.arguments)
                case ReportError():
                    raise AssertionError(action.text) from action.error

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


class Pair:
    """Two nodes, LATENCY apart. lost(source, data): whether a datagram is lost. date: for certificates.

    second: another address of each node, by its first one. Between two second addresses there is a path of its own.
    taken(source, target, data): whether a test does with a datagram what it wants; else it is sent.
    """

    def __init__(
        self,
        credentials_of: CredentialsOf,
        config: EndpointConfig,
        *,
        date: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.now = 10**12
        self.date = date
        self.lost: Callable[[Address, bytes], bool] = lambda source, data: False
        self.taken: Callable[[Address, Address, bytes], bool] = lambda source, target, data: False
        self.under_way: list[tuple[int, int, Address, Address, bytes]] = []
        self._sent = 0
        self.second: dict[Address, Address] = {
            ("192.0.2.1", 1): ("198.51.100.1", 1),
            ("192.0.2.2", 2): ("198.51.100.2", 2),
        }
        self.a = Node(self, credentials_of("a"), ("192.0.2.1", 1), config)
        self.b = Node(self, credentials_of("b"), ("192.0.2.2", 2), config)

    def send(self, source: Address, target: Address, data: bytes) -> None:
        if self.taken(source, target, data):
            return
        self._sent += 1
        if target in self.second.values():
            source = self.second[source]
        if not self.lost(source, data):
            heapq.heappush(self.under_way, (self.now + LATENCY, self._sent, source, target, data))

    def step(self) -> bool:
        """Advance to what happens next; False where nothing is pending."""
        nodes = (self.a, self.b)
        timers = [at for node in nodes if (at := node.core.next_timer()) is not None]
        arrivals = [self.under_way[0][0]] if self.under_way else []
        if not timers and not arrivals:
            return False
        self.now = max(self.now, min(timers + arrivals))
        while self.under_way and self.under_way[0][0] <= self.now:
            _, _, source, target, data = heapq.heappop(self.under_way)
            for node in nodes:
                if target in (node.address, self.second[node.address]):
                    node.core.receive([one(data, source)], self.now)
                    node.act()
        for node in nodes:
            at = node.core.next_timer()
            if at is not None and at <= self.now:
                node.core.handle_timer(self.now)
                node.act()
        return True

    def until(self, condition: Callable[[], bool], *, within: int = 60 * S) -> None:
        end = self.now + within
        for _ in range(100_000):
            if condition():
                return
            assert self.step(), "nothing is pending"
            assert self.now <= end, f"not so within {within / S:g} s"
        raise AssertionError("time stands still")

    def up(self) -> tuple[Peer, Peer]:
        """A link that a dialled."""
        ours = self.a.dial(self.b)
        self.until(lambda: ours.link.state is LinkState.UP and self.a.identity in self.b.core.peers)
        theirs = self.b.peer(self.a)
        self.until(lambda: theirs.link.state is LinkState.UP)
        return ours, theirs


CONFIG = EndpointConfig(lost_after_ns=2 * S, connect_ns=20 * S, session=SessionConfig(datagram_bytes=1452))
