"""The links to the other ranks: made for a proposed view, kept from one view to the next.

Two tasks make links, each at most once at a time. A later one takes the place of an earlier one, which reports nothing:

    form     to every other member of a proposed view. Each link comes up or ends by its own deadline, so this ends, and
             says which nodes it could not reach
    probe    to each node that a probe names, while this node is left out of views: however long it takes, until it is
             stopped. A view that is to be formed stops it: its members' links are the view's
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from quicoll.engine.messages import PeerMessage, decode_message
from quicoll.errors import PeerError
from quicoll_transport.endpoint import LinkState
from quicoll_transport.errors import LinkLost
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quicoll.membership.member.actions import ProbePaths
    from quicoll.membership.view import Member, View
    from quicoll_transport.endpoint import Endpoint, Link

__all__ = ["PeerLinks"]

log = logging.getLogger("quicoll")


class PeerLinks:
    """See the module's head."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        job: str,
        node: str,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Link, PeerMessage], None],
        on_state: Callable[[Link], None],
        on_formed: Callable[[View, tuple[str, ...]], None],
        on_reached: Callable[[int], None],
    ) -> None:
        """Start with the links that the endpoint has.

        Args:
            endpoint: Where links are made.
            job: The job, of which all ranks have certificates.
            node: This rank's node.
            loop: The endpoint's.
            on_message: Called with (link, message) for each message of a peer.
            on_state: Called with a link whose state has changed.
            on_formed: Called with a proposed view and the nodes that could not be reached, when that is known.
            on_reached: Called with the number of a probe when there is a link to each of its nodes.
        """
        self._endpoint = endpoint
        self._job = job
        self._node = node
        self._on_message = on_message
        self._on_state = on_state
        self._loop = loop
        self._on_formed = on_formed
        self._on_reached = on_reached
        self._forming: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None

    def accept(self, link: Link) -> None:
        """Take over a link that a peer has made."""
        link.listen(self._app, self._on_state)

    def of_view(self, view: View) -> dict[int, Link]:
        """Return the links to all other ranks of a view, by rank; those that are not there yet are made."""
        return {member.rank: self._to(member) for member in view.members if member.node != self._node}

    def form(self, view: View) -> None:
        """Get a link to every other member of a proposed view; `on_formed` follows."""
        self.stop_probing()
        if self._forming is not None:
            self._forming.cancel()
        self._forming = self._loop.create_task(self._form(view))

    def probe(self, probe: ProbePaths, *, pace: float) -> None:
        """Get a link to each node of a probe; `on_reached` follows.

        Args:
            probe: The nodes, and the number to report.
            pace: Seconds after which what is not up is dialled again.
        """
        self.stop_probing()
        self._probing = self._loop.create_task(self._probe(probe, pace))

    def stop_probing(self) -> None:
        """Give up the probe that is under way, if there is one."""
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    def stop(self) -> None:
        """Make no more links. Those that are there stay: the endpoint ends them."""
        if self._forming is not None:
            self._forming.cancel()
        self.stop_probing()

    async def _form(self, view: View) -> None:
        unreachable: list[str] = []
        for link in self.of_view(view).values():
            try:
                await link.wait_up()
            except LinkLost as error:
                log.info("%s: cannot reach %s: %s", self._node, link.node, error)
                unreachable.append(link.node)
        self._forming = None
        self._on_formed(view, tuple(unreachable))

    async def _probe(self, probe: ProbePaths, pace: float) -> None:
        await self._reach(probe.members, pace)
        self._probing = None
        self._on_reached(probe.number)

    async def _reach(self, members: Sequence[Member], pace: float) -> None:
        """Have a link to each of these nodes, however long it takes: this side dials, and again after `pace` seconds.

        A handshake that lost a datagram on a bad path tries ever more seldom; a new one finds out sooner that the path
        is good again.
        """
        others = [member for member in members if member.node != self._node]
        while True:
            links = [self._to(member, probing=True) for member in others]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pace):
                    ups = await asyncio.gather(*(link.wait_up() for link in links), return_exceptions=True)
                    if not any(isinstance(up, BaseException) for up in ups):
                        return
                    await asyncio.sleep(pace)  # refused at once; what follows is the end of the turn
            for link in links:
                if link.state is LinkState.CONNECTING:
                    link.close("dialled again")

    def _to(self, member: Member, *, probing: bool = False) -> Link:
        identity = Identity(self._job, WORKER, member.node)
        existing = self._endpoint.links.get(identity)
        if existing is not None and existing.remote_incarnation not in (0, member.incarnation):
            # Which process is the node's is for the coordinator to say: one without its journal may take a lesser one.
            existing.close("the node has started anew")
        # Of two nodes the one with the smaller name dials, so that there is one connection and not two.
        dial = probing or self._node < member.node
        addresses = [(host, port) for host, port in member.addresses] if dial else ()
        link = self._endpoint.link(identity, addresses=addresses, dial=dial)
        link.listen(self._app, self._on_state)
        return link

    def _app(self, link: Link, data: bytes) -> None:
        try:
            message = decode_message(data, node=link.node)
        except PeerError as error:
            log.error("%s", error)
            link.close("malformed announcement")
            return
        self._on_message(link, message)
