"""What the endpoint's core and its shell say to each other: what the core is given, and what it asks to have done.

The core asks for everything through `Actions`, a queue that the shell carries out in order: datagrams to send, names to
look up, events for the observer, lines for the log. The shell does so after every call of the core and before every
callback of the layer above, so effects happen in the order in which they were decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from quicoll_transport.carrier import Authenticated
    from quicoll_transport.events import TransportEvent
    from quicoll_transport.link.core import LinkConfig
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.security.limits import GuardConfig, PaceConfig

__all__ = [
    "Action",
    "Actions",
    "CancelLookUp",
    "EndpointSettings",
    "LookUp",
    "NodeIdentity",
    "Record",
    "ReportError",
    "SendRuns",
    "Tell",
    "Verified",
    "Verify",
]


class NodeIdentity(Protocol):
    """What the core needs of an identity: a hashable value with an order and a name for people."""

    @property
    def role(self) -> str: ...
    @property
    def node(self) -> str: ...
    def __lt__(self, other: Any, /) -> bool: ...


class EndpointSettings(Protocol):
    """The part of EndpointConfig that the core needs; see there."""

    @property
    def handshake_ns(self) -> int: ...
    @property
    def max_handshakes(self) -> int: ...
    @property
    def max_links(self) -> int: ...
    @property
    def guard(self) -> GuardConfig: ...
    @property
    def pace(self) -> PaceConfig: ...
    def link(self) -> LinkConfig: ...


@dataclass(frozen=True, slots=True)
class Verified:
    """Who a peer has proved to be. fingerprint: SHA-256 of its certificate, hexadecimal."""

    identity: NodeIdentity
    fingerprint: str


Verify = Callable[["Authenticated"], Verified]
"""Check certificate, chain, dates and denied certificates of a peer; raises AuthenticationError."""


@dataclass(slots=True, eq=False)
class SendRuns:
    """Send these, in order. Their memory is the carrier's, and good until it is asked again; see `Traffic`."""

    runs: list[DatagramRun]


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look the names of these addresses up; the answer goes to `EndpointCore.looked_up`. peer: its number."""

    peer: int
    addresses: tuple[Address, ...]
    timeout_ns: int


@dataclass(frozen=True, slots=True)
class CancelLookUp:
    """Nobody waits for this peer's look-up any more; there may be none."""

    peer: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Give an event to the observer."""

    event: TransportEvent


@dataclass(frozen=True, slots=True)
class Record:
    """Write a line to the log. level: as logging has them. peer, link: fields of the record. error: with traceback."""

    level: int
    text: str
    arguments: tuple[object, ...]
    peer: str = ""
    link: int = 0
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class ReportError:
    """Something of our own raised where nothing may; the loop's exception handler is to hear of it."""

    text: str
    error: Exception


Action = SendRuns | LookUp | CancelLookUp | Tell | Record | ReportError

_INFO, _WARNING, _ERROR = 20, 30, 40  # logging's numbers; a core does not import it


class Actions:
    """See the module's head.

    queue: what is to be done, the oldest first. now_ns: the time of the present call of the core.
    observed: whether anybody hears events.

    Look at `observed` before an event is built, so that none is built for nobody.
    """

    def __init__(self, *, observed: bool, now_ns: int = 0) -> None:
        self.observed = observed
        self.now_ns = now_ns
        self.queue: deque[Action] = deque()

    def put(self, action: Action) -> None:
        self.queue.append(action)

    def send(self, runs: list[DatagramRun]) -> SendRuns | None:
        """Queue runs of datagrams; return the action, None where there is nothing to send."""
        if not runs:
            return None
        action = SendRuns(runs)
        self.queue.append(action)
        return action

    def tell(self, event: TransportEvent) -> None:
        self.queue.append(Tell(event))

    def info(self, text: str, *arguments: object, peer: str = "", link: int = 0) -> None:
        self.queue.append(Record(_INFO, text, arguments, peer, link))

    def warning(self, text: str, *arguments: object, peer: str = "", link: int = 0) -> None:
        self.queue.append(Record(_WARNING, text, arguments, peer, link))

    def error(self, error: Exception, text: str, *arguments: object, peer: str = "", link: int = 0) -> None:
        self.queue.append(Record(_ERROR, text, arguments, peer, link, error))
