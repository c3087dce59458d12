"""Ways to other ranks through the job's relay, for where there is no other.

Which relay it is the coordinator says when it welcomes this rank: itself, a process of its own, or none.

    unasked    `way` is called for a node: the relay is asked for it
    asked      its answer is awaited; nothing waits for it but the link that is being made, which has its own deadline
    open       there is a label, and so an address (quicoll_transport.relay): `on_way` is called, once
    shut       the link to the relay has ended, and its labels with it; the next call of `way` asks anew. `on_shut` is
               called where nobody else tells what became of what went this way: a relay of its own is gone

Both of a pair ask, each when it begins to make their link, or the relay passes nothing on between them. Where the relay
is a process of its own, the link to it is made with the first question. What keeps the relay from answering, or made it
refuse, is told by `trouble`, for errors that say why a rank is not reached.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from quicoll.errors import PeerError
from quicoll.membership.messages import AskRelay, RelayAnswer, decode, encode
from quicoll.membership.relaying import NO_RELAY, RELAY
from quicoll_transport.errors import AddressError, LinkLost
from quicoll_transport.net.addresses import parse_address
from quicoll_transport.security.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll_transport.endpoint import Endpoint, Link
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.relay.detour import DetourIO

__all__ = ["Detours"]

log = logging.getLogger("quicoll")


class Detours:
    """See the module's head."""

    def __init__(
        self,
        io: DetourIO,
        endpoint: Endpoint,
        *,
        job: str,
        ask_coordinator: Callable[[AskRelay], None],
        coordinator_place: Callable[[], Address | None],
    ) -> None:
        """Begin without a relay.

        Args:
            io: The endpoint's socket.
            endpoint: Where links are made.
            job: The job, of which the relay has a certificate.
            ask_coordinator: Sends it a message.
            coordinator_place: Where it is reached at present; None: there is no link to it.
        """
        self._io = io
        self._endpoint = endpoint
        self._job = job
        self._ask_coordinator = ask_coordinator
        self._coordinator_place = coordinator_place
        self._relay = NO_RELAY
        self._link: Link | None = None  # to a relay that is a process of its own
        self._ways: dict[str, Address | None] = {}  # by node; None: asked for
        self._trouble = ""
        self.on_way: Callable[[str, Address], None] = lambda node, way: None
        self.on_shut: Callable[[str, Address, str], None] = lambda node, way, cause: None

    def use(self, relay: str) -> None:
        """Take in which relay the job has. relay: as in Welcome."""
        if relay != self._relay or not relay:
            self.forget()
            self._relay = relay

    def coordinator_gone(self) -> None:
        """Take in that the link to the coordinator has ended, and what it has passed on with it."""
        if not self._relay:
            self.forget()

    def way(self, node: str) -> Address | None:
        """Return the way to a node; None where there is none, or none yet: then `on_way` follows if there can be one.

        Args:
            node: Another rank, which asks for this one too.
        """
        if self._relay == NO_RELAY:
            return None
        if node not in self._ways and self._ask(AskRelay(peer=node)):
            self._ways[node] = None
        return self._ways.get(node)

    def trouble(self) -> str:
        """Return what is wrong with the relay, for people; "" where nothing is known to be."""
        if self._relay == NO_RELAY:
            return "the job has no relay (--relay)"
        return self._trouble

    def answered(self, message: RelayAnswer) -> None:
        """Take the coordinator's answer."""
        if not self._relay:
            self._take(message, self._coordinator_place())

    def forget(self) -> None:
        """Shut all ways: what the labels stand for is gone, or may be."""
        for way in self._ways.values():
            if way is not None:
                self._io.shut(way)
        self._ways.clear()

    def _ask(self, message: AskRelay) -> bool:
        if not self._relay:
            self._ask_coordinator(message)
            return True
        if self._link is None:
            try:
                host, port = parse_address(self._relay)
            except AddressError as error:
                self._trouble = f"the relay's address: {error}"
                return False
            identity = Identity(self._job, RELAY, RELAY)
            self._link = self._endpoint.link(identity, addresses=[(host, port)], dial=True)
            self._link.listen(self._on_app, self._on_state)
        with contextlib.suppress(LinkLost):
            self._link.send_app(encode(message))
            return True
        return False

    def _take(self, message: RelayAnswer, relay: Address | None) -> None:
        if message.peer not in self._ways or self._ways[message.peer] is not None:
            return  # of before it was forgotten
        if not message.label or relay is None:
            self._trouble = f"the relay refuses: {message.reason}" if message.reason else "the relay has just moved"
            del self._ways[message.peer]
            return
        self._trouble = ""
        way = self._ways[message.peer] = self._io.open(message.label, relay)
        self.on_way(message.peer, way)

    def _on_app(self, link: Link, data: bytes) -> None:
        try:
            message = decode(data, sender="coordinator", node=link.node)
        except PeerError as error:
            log.error("%s", error)
            link.close("malformed message")
            return
        if isinstance(message, RelayAnswer) and link is self._link:
            self._take(message, link.proved_address)

    def _on_state(self, link: Link) -> None:
        if link.ended and link is self._link:
            self._link = None
            self._trouble = f"the relay at {self._relay} cannot be reached: {link.cause}"
            ways = dict(self._ways)
            self.forget()
            for node, way in ways.items():
                if way is not None:
                    self.on_shut(node, way, self._trouble)
