"""The links to the other ranks: made for a proposed view, kept from one view to the next.

Two tasks make links, each at most once at a time. A later one takes the place of an earlier one, which reports nothing:

    form     to every other member of a proposed view. Each link comes up or ends by its own deadline, so this ends, and
             says which nodes it could not reach
    probe    to each node that a probe names, while this node is left out of views: however long it takes, until it is
             stopped. A view that is to be formed stops it: its members' links are the view's

The other side of a probe hears of it (`expect`): it takes its part in making that link, as for a view. What it hears so
of where a node is goes before what the view or the probe said that it had heard until then, also in a task that begins
with these only now, and until the next one of them. Who dials first, and where, what the other side has to send, and
when it dials as well: ways.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.engine.messages import PeerMessage, decode_message
from quicoll.engine.ways import (
    DIALS_TOO_S,
    LATE_OPENER,
    OPENERS_S,
    behind_nat,
    dials_first,
    opened_address,
    own_addresses,
)
from quicoll.errors import PeerError
from quicoll_transport.endpoint import LinkState
from quicoll_transport.errors import LinkLost
from quicoll_transport.net.addresses import is_detour
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quicoll.engine.detours import Detours
    from quicoll.engine.lanes import Lanes
    from quicoll.engine.neighbours import Neighbours
    from quicoll.membership.member.actions import ExpectPeer, ProbePaths
    from quicoll.membership.view import Member, View
    from quicoll_transport.endpoint import Endpoint, Link
    from quicoll_transport.net.addresses import Address

__all__ = ["PeerLinks"]

log = logging.getLogger("quicoll")

_TURN_S = 1.5  # of a probe behind NAT, at least: each of three addresses may say nothing for a quarter of a second


@dataclass(frozen=True, slots=True)
class _Opening:
    """What openers go out for: a link that the other side dials first.

    dials_too: whether this side dials as well after a while (ways.DIALS_TOO_S).
    """

    link: Link
    member: Member
    address: Address
    dials_too: bool


class PeerLinks:
    """See the module's head."""

    def __init__(
        self,
        endpoint: Endpoint,
        detours: Detours,
        *,
        job: str,
        node: str,
        loop: asyncio.AbstractEventLoop,
        pair: Callable[[Sequence[Address]], None],
        neighbours: Neighbours,
        lanes: Lanes,
        on_message: Callable[[Link, PeerMessage], None],
        on_state: Callable[[Link], None],
        on_formed: Callable[[View, tuple[str, ...], str], None],
        on_reached: Callable[[int], None],
    ) -> None:
        """Start with the links that the endpoint has.

        Args:
            endpoint: Where links are made.
            detours: Ways through a relay.
            job: The job, of which all ranks have certificates.
            node: This rank's node.
            loop: The endpoint's.
            pair: Called with the addresses of a member before a link to it is made; see MultihomedIO.
            neighbours: Let ranks of one host meet, when the links of a view are up.
            lanes: Settle then which pairs of ranks have some.
            on_message: Called with (link, message) for each message of a peer.
            on_state: Called with a link whose state has changed.
            on_formed: Called with a proposed view, the nodes that could not be reached, and why, when that is known.
            on_reached: Called with the number of a probe when there is a link to each of its nodes.
        """
        self._endpoint = endpoint
        self._detours = detours
        detours.on_way = self._detour
        detours.on_shut = self._shut
        self._job = job
        self._node = node
        self._on_message = on_message
        self._on_state = on_state
        self._loop = loop
        self._pair = pair
        self._neighbours = neighbours
        self._lanes = lanes
        self._on_formed = on_formed
        self._on_reached = on_reached
        self._forming: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._openers: dict[str, asyncio.TimerHandle] = {}  # the next one, by node
        self._news: dict[str, Member] = {}  # what was heard of nodes since the last view or probe
        self._stopped = False

    def accept(self, link: Link) -> None:
        """Take over a link that a peer has made."""
        link.listen(self._app, self._on_state)

    def of_view(self, view: View) -> dict[int, Link]:
        """Return the links to all other ranks of a view, by rank; those that are not there yet are made."""
        own = view.member(self._node)
        return {member.rank: self._to(member, own) for member in view.members if member.node != self._node}

    def form(self, view: View) -> None:
        """Get a link to every other member of a proposed view; `on_formed` follows."""
        self.stop_probing()
        self._news.clear()
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
        self._news.clear()
        self._probing = self._loop.create_task(self._probe(probe, pace))

    def expect(self, expected: ExpectPeer) -> None:
        """Take this side's part in a link that a node which is left out of views tries to make."""
        if not self._stopped:
            self._news[expected.member.node] = expected.member
            self._to(expected.member, expected.own)

    def stop_probing(self) -> None:
        """Give up the probe that is under way, if there is one."""
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    def stop(self) -> None:
        """Make no more links, nor try other ways. Those that are there stay: the endpoint ends them."""
        self._stopped = True
        if self._forming is not None:
            self._forming.cancel()
        self.stop_probing()
        for opener in self._openers.values():
            opener.cancel()
        self._openers.clear()

    async def _form(self, view: View) -> None:
        unreachable: list[str] = []
        why: list[str] = []
        links = list(self.of_view(view).values())
        for link in links:
            try:
                await link.wait_up()
            except LinkLost as error:
                log.info("%s: cannot reach %s: %s", self._node, link.node, error)
                unreachable.append(link.node)
                why.append(f"{link.node}: {self._tried(link, view, error)}")
        settled = [await each.meet(view, links) for each in (self._neighbours, self._lanes) if not unreachable]
        if any(settled):
            for link in links:
                if link.ended:
                    unreachable.append(link.node)
                    why.append(f"{link.node}: {link.cause}")
        self._forming = None
        self._on_formed(view, tuple(unreachable), f"no link to {'; '.join(why)}" if why else "")

    def _tried(self, link: Link, view: View, error: LinkLost) -> str:
        """Return by which ways a node was tried and how far each got, for people."""
        member, own = view.member(link.node), view.member(self._node)
        if member is None or not behind_nat(own, member):
            return error.cause
        side = "dialled from here" if link.dial else "it dials"
        relay = self._detours.trouble()
        return f"{error.cause} (behind NAT; {side}{f'; {relay}' if relay else ''})"

    async def _probe(self, probe: ProbePaths, pace: float) -> None:
        await self._reach(probe, pace)
        self._probing = None
        self._on_reached(probe.number)

    async def _reach(self, probe: ProbePaths, pace: float) -> None:
        """Have a link to each of these nodes, however long it takes: this side dials, and again after `pace` seconds.

        A handshake that lost a datagram on a bad path tries ever more seldom; a new one finds out sooner that the path
        is good again.
        """
        others = [member for member in probe.members if member.node != self._node]
        if any(behind_nat(probe.own, member) for member in others):
            pace = max(pace, _TURN_S)
        while True:
            links = [self._to(member, probe.own, probing=True) for member in others]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pace):
                    ups = await asyncio.gather(*(link.wait_up() for link in links), return_exceptions=True)
                    if not any(isinstance(up, BaseException) for up in ups):
                        return
                    await asyncio.sleep(pace)  # refused at once; what follows is the end of the turn
            for link in links:
                if link.state is LinkState.CONNECTING:
                    link.close("dialled again")

    def _to(self, member: Member, own: Member | None, *, probing: bool = False) -> Link:
        news = self._news.get(member.node)
        if news is not None and news.incarnation == member.incarnation:
            member = news
        identity = Identity(self._job, WORKER, member.node)
        existing = self._endpoint.links.get(identity)
        if existing is not None and existing.remote_incarnation not in (0, member.incarnation):
            # Which process is the node's is for the coordinator to say: one without its journal may take a lesser one.
            existing.close("the node has started anew")
        dial = probing or (self._node < member.node if own is None else dials_first(own, member))
        addresses = own_addresses(member)
        self._pair(addresses[: len(member.addresses)])
        behind = behind_nat(own, member)
        if behind and (existing is None or existing.state is not LinkState.UP):
            way = self._detours.way(member.node)
            addresses += [] if way is None else [way]
        link = self._endpoint.link(identity, addresses=addresses if dial else (), dial=dial)
        link.listen(self._app, self._on_state)
        if not dial and link.state is LinkState.CONNECTING and (address := opened_address(member)) is not None:
            self._open(_Opening(link, member, address, behind), 0 if behind else LATE_OPENER, 0.0)
        return link

    def _detour(self, node: str, way: Address) -> None:
        """Have the link to a node, if it is still being made, try the way through the relay too."""
        if self._stopped:
            return  # the relay's answer came while the endpoint says good-bye, and makes no links any more
        link = self._endpoint.links.get(Identity(self._job, WORKER, node))
        if link is not None and link.dial and link.state in (LinkState.CONNECTING, LinkState.DOWN):
            others = [address for address in link.addresses if not is_detour(address)]
            self._endpoint.link(link.identity, addresses=[*others, way], dial=True)

    def _shut(self, node: str, way: Address, cause: str) -> None:
        """End the link to a node that goes by a way which is shut."""
        link = self._endpoint.links.get(Identity(self._job, WORKER, node))
        if link is not None and link.proved_address == way:
            link.close(cause)

    def _open(self, opening: _Opening, number: int, before_s: float) -> None:
        """Let the opener of this number follow so long after the one before, in place of any other to this node."""
        if (waiting := self._openers.pop(opening.link.node, None)) is not None:
            waiting.cancel()
        delay = OPENERS_S[number] - before_s
        if delay <= 0:
            self._opener(opening, number)
        else:
            self._openers[opening.link.node] = self._loop.call_later(delay, self._opener, opening, number)

    def _opener(self, opening: _Opening, number: int) -> None:
        """Send an opener for a link that is being made, or dial as well, and see that the next one follows."""
        link, member = opening.link, opening.member
        self._openers.pop(link.node, None)
        if link.state is not LinkState.CONNECTING:
            return
        self._endpoint.knock(opening.address)
        if opening.dials_too and OPENERS_S[number] == DIALS_TOO_S:
            way = self._detours.way(link.node)
            addresses = [*own_addresses(member), *([] if way is None else [way])]
            self._endpoint.link(link.identity, addresses=addresses, dial=True)
        if number + 1 < len(OPENERS_S):
            self._open(opening, number + 1, OPENERS_S[number])

    def _app(self, link: Link, data: bytes) -> None:
        try:
            message = decode_message(data, node=link.node)
        except PeerError as error:
            log.error("%s", error)
            link.close("malformed announcement")
            return
        self._on_message(link, message)
