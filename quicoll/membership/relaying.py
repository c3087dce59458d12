"""The desk of a relay: who asks for whom on its links, and the socket that passes datagrams on.

The coordinator has one, and so has `quicoll relay` (relay_service.py), a process of its own for jobs that are to spare
their coordinator the traffic. What is passed on and what is not, and why: quicoll_transport.relay.

    a link with a rank's certificate --AskRelay(peer)--> RelayAnswer(label)
    both of a pair have asked        what comes under their labels is passed on
    the link ends                    all that was known of that node is forgotten

A node counts as the process on its present link: one that comes again asks again. Nothing is durable, and nothing here
decides anything for the membership: a relay that is gone costs views, like any broken path.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from quicoll.errors import LocalError
from quicoll.membership.messages import RelayAnswer
from quicoll_transport.relay.forwarding import ForwardingIO
from quicoll_transport.relay.table import RelayLimits, RelayTable

if TYPE_CHECKING:
    import asyncio

    from quicoll.membership.messages import AskRelay
    from quicoll_transport.endpoint import Link
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.udp import DatagramIO

__all__ = ["NO_RELAY", "RELAY", "RelayDesk", "relay_limits"]

RELAY: Final = "relay"
"""The role in the certificate of `quicoll relay`, and the node's name in it."""
NO_RELAY: Final = "none"
"""For the address of a relay: there is none."""


class RelayDesk:
    """See the module's head.

    Attributes:
        io: The relay's socket, for its endpoint.
        table: What is passed on.
    """

    def __init__(self, io: DatagramIO, limits: RelayLimits, *, loop: asyncio.AbstractEventLoop) -> None:
        """Begin with nobody.

        Args:
            io: The socket; not started yet.
            limits: Bounds.
            loop: The endpoint's.
        """
        self._links: dict[str, Link] = {}
        self.table = RelayTable(limits, place_of=self._place_of, draw=os.urandom)
        self.io = ForwardingIO(io, self.table, now_ns=lambda: round(loop.time() * 1e9))

    def ask(self, link: Link, message: AskRelay) -> RelayAnswer:
        """Return the answer to a node that asks for another one.

        Args:
            link: Its own; it has joined, where that is asked of it.
            message: Whom it asks for.
        """
        if self._links.get(link.node) is not link:
            self.table.gone(link.node)  # of an earlier process
            self._links[link.node] = link
        label = self.table.ask(link.node, message.peer)
        if label is None:
            return RelayAnswer(peer=message.peer, reason="it asks for itself, or for too many")
        return RelayAnswer(peer=message.peer, label=label)

    def ended(self, link: Link) -> None:
        """Take in that a link has ended."""
        if self._links.get(link.node) is link:
            del self._links[link.node]
            self.table.gone(link.node)

    def _place_of(self, node: str) -> Address | None:
        link = self._links.get(node)
        return None if link is None else link.proved_address


def relay_limits(rate: float) -> RelayLimits:
    """Return the bounds of a relay.

    Args:
        rate: Megabytes a second of all that it passes on.
    Raises:
        LocalError: It passes on nothing, or more than 1000.
    """
    if not 0.001 <= rate <= 1000:
        raise LocalError(f"a relay passes on 0.001 to 1000 megabytes a second, not {rate!r}")
    total = round(rate * 1e6)
    return RelayLimits(leg_rate=max(1, total // 2), total_rate=total)
