"""The lanes of this rank: started once, and in each view agreed on with every other rank.

Two ranks have lanes beside their link in a view if both say so before it is installed, so both know which messages are
noticed (noticed.py). The lanes themselves may come later, or never: nobody waits for a process to start.

    asking       before the view: each rank that has lanes tells every other how many (`LanesHere`), and waits for what
                 they tell. One that was started without any answers so; one whose lanes have all ended says so and
                 waits for nothing
    at work      the view is installed: to each rank that has some, and shares no host's memory with this one, each lane
                 that is open is announced (`LaneAt`): where it is, and what it wants to be shown there
    joining      a lane of both is announced: they join (quicoll.lanes.worker), the lesser name dials
    paired, shut as lane_ways.py has it

Invariants: what follows from `LanesHere` follows on both ranks of a pair from the same two messages. A mark is made for
one view, one lane and one peer, and told to that one alone, over the link that its certificate has proved. Nothing here
has a deadline of its own: a message that does not come before the view is that of a link that ends, which ends the
forming of the view, and one that does not come later is of a lane that is not used.

What a rank says of a view that is not installed here yet is kept: the last message of each kind, node and lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from typing import TYPE_CHECKING, Final

import msgspec

from quicoll.checks import MAX_LANES
from quicoll.engine.lane import LaneListener, OwnLane
from quicoll.engine.lane_ways import LaneWays
from quicoll.engine.messages import LaneAt, LaneMessage, LanesHere, LanesTaken, encode_message
from quicoll.lanes.memory import LEAST
from quicoll.lanes.orders import JoinLane, LaneDeadlines, LaneIncarnation
from quicoll.lanes.worker import MARK_BYTES
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from quicoll.engine.lane_ways import LanePair
    from quicoll.lanes.orders import LaneSettings
    from quicoll.lanes.starting import LaneHost
    from quicoll.membership.view import View
    from quicoll_transport.endpoint import Link
    from quicoll_transport.security.credentials import Credentials

__all__ = ["Lanes"]


class Lanes:
    """See the module's head. Everything on the engine's loop."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        node: str,
        advertised: str,
        emit: Callable[..., None],
    ) -> None:
        """Have no lanes; `start` makes them.

        Args:
            loop: The engine's.
            node: This rank's node.
            advertised: Host that others are told to send to, where that is not the lane's own; "" where it is.
            emit: Called with (kind, **fields) for each event.
        """
        self._loop = loop
        self._node = node
        self._advertised = advertised
        self._emit = emit
        self._lanes: list[OwnLane] = []
        self._largest = 0
        self._numbers = itertools.count(1)
        self._said: dict[int, int] = {}  # by view, how many lanes this rank has said it has
        self._here: dict[str, LanesHere] = {}
        self._at: dict[tuple[str, int], LaneAt] = {}
        self._marks: dict[tuple[str, int], bytes] = {}  # told to others in the view at work
        self._heard: asyncio.Future[None] | None = None
        self._ways = self._ways_of(0)
        self._view: View | None = None
        self._closed = False

    def start(
        self,
        count: int,
        settings: LaneSettings,
        credentials: Credentials,
        host: LaneHost,
        *,
        hosts: Sequence[str],
    ) -> None:
        """Start lanes. Where that is not to be had, an event says why.

        Args:
            count: How many.
            settings: What they are opened with.
            credentials: The rank's.
            host: Where they run.
            hosts: The addresses at which they listen, in turn.
        """
        if settings.largest < LEAST:
            self._emit("lane_lost", lane=0, reason=f"chunk_bytes is below {LEAST}, so no message is for lanes")
            return
        self._largest = settings.largest
        listener = LaneListener(self._opened, self._paired, self._apart, self._ended)
        for index in range(count):
            try:
                at = msgspec.structs.replace(settings, host=hosts[index % len(hosts)])
                lane = OwnLane(index, at, credentials, host=host, loop=self._loop, listener=listener)
            except OSError as error:
                self._emit("lane_lost", lane=index, reason=str(error))
                return
            self._lanes.append(lane)

    def rotate(self, credentials: Credentials) -> None:
        """Have all lanes show another certificate from now on."""
        for lane in self._lanes:
            lane.renew(credentials)

    def start_over(self, incarnation: int) -> None:
        """Have all lanes go on as a later process of this node."""
        for lane in self._lanes:
            lane.order(LaneIncarnation(incarnation))

    def set_deadlines(self, *, lost_after_ns: int, connect_ns: int) -> None:
        """Have all lanes make links with other deadlines."""
        for lane in self._lanes:
            lane.set_deadlines(LaneDeadlines(lost_after_ns, connect_ns))

    def deny(self, fingerprint: str) -> None:
        """Have all lanes shut a certificate out."""
        for lane in self._lanes:
            lane.deny(fingerprint)

    async def aclose(self) -> None:
        """End all lanes."""
        self._closed = True
        self._ways.end()
        await asyncio.gather(*(lane.aclose() for lane in self._lanes))

    # -- before a view -------------------------------------------------------------------------------------------

    async def meet(self, view: View, links: Sequence[Link]) -> bool:
        """Settle with whom there are lanes in a view; `install` gives the ways. Ends when a link does, too.

        Args:
            view: A proposed view.
            links: To all others of it, which are up.
        Returns:
            Whether there was anything to settle, which takes time: links may have ended meanwhile.
        """
        if not self._lanes:
            return False
        alive = not self._closed and any(not lane.why for lane in self._lanes)
        count = self._said.setdefault(view.view_id, len(self._lanes) if alive else 0)  # formed anew, it says the same
        for link in links:
            _tell(link, LanesHere(view.view_id, count, self._largest))
        while count and not any(link.ended for link in links):
            if all(self._here.get(link.node, _NOBODY).view_id == view.view_id for link in links):
                break
            self._heard = self._loop.create_future()
            await self._heard
        return True

    def install(self, view: View, links: Sequence[Link], shared: Collection[str]) -> LaneWays | None:
        """Go to work for a view that is installed.

        Args:
            view: The view.
            links: To all others of it.
            shared: Nodes with which this rank shares the memory of a host.
        Returns:
            The ways that have lanes beside them; None where there are none.
        """
        self._ways.end()
        self._view = view
        self._marks.clear()
        self._at = {key: at for key, at in self._at.items() if at.view_id >= view.view_id}
        ways = self._ways = self._ways_of(view.view_id)
        said = self._said.get(view.view_id, 0)
        self._said = {view_id: count for view_id, count in self._said.items() if view_id >= view.view_id}
        for link in links if said else ():
            here, rank = self._here.get(link.node), view.rank_of(link.node)
            if rank is None or here is None or here.view_id != view.view_id or link.node in shared:
                continue
            count, largest = min(said, here.count), min(self._largest, here.largest)
            if count and largest >= LEAST:
                ways.add(rank, link, lanes=count, largest=largest)
        nodes = [pair.node for pair in ways.pairs.values()]
        for lane in self._lanes:
            lane.gather(view.view_id, nodes)
            if lane.why:
                ways.lane_ended(lane.index, lane.why)
            elif lane.address is not None:
                self._opened(lane)
        return ways if nodes else None

    def _ways_of(self, view_id: int) -> LaneWays:
        return LaneWays(
            view_id,
            self._lanes,
            loop=self._loop,
            next_number=lambda: next(self._numbers),
            on_shut=self._on_shut,
        )

    # -- what others say -----------------------------------------------------------------------------------------

    def receive(self, link: Link, message: LaneMessage) -> None:
        """Take what a rank says."""
        if isinstance(message, LanesHere):
            self._here[link.node] = message
            if message.count and not self._lanes:
                _tell(link, LanesHere(message.view_id))
            if self._heard is not None and not self._heard.done():
                self._heard.set_result(None)
            return
        if isinstance(message, LaneAt):
            if message.view_id >= self._ways.view_id:
                self._at[link.node, message.lane] = message
                self._join(link.node, message.lane)
            return
        pair = self._ways.of(link.node)
        if pair is None or message.view_id != self._ways.view_id:
            return
        if isinstance(message, LanesTaken):
            pair.heard_taken(message)
        else:
            pair.heard_shut(message)

    def link_ended(self, link: Link) -> None:
        """Take note that a link has ended."""
        self._here.pop(link.node, None)
        for index in range(MAX_LANES):
            self._at.pop((link.node, index), None)
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)

    # -- what lanes say ------------------------------------------------------------------------------------------

    def _opened(self, lane: OwnLane) -> None:
        """A lane is open: tell those of the view at work, in which it is new."""
        if lane.address is None or not self._ways.whole:
            return
        host, port = lane.address
        for pair in self._ways.pairs.values():
            if lane.index < pair.lanes and lane.index not in pair.shut:
                mark = self._marks[pair.node, lane.index] = os.urandom(MARK_BYTES)
                _tell(pair.link, LaneAt(self._ways.view_id, lane.index, self._advertised or host, port, mark))
                self._join(pair.node, lane.index)

    def _join(self, node: str, index: int) -> None:
        at, mark, pair, view = (
            self._at.get((node, index)),
            self._marks.get((node, index)),
            self._ways.of(node),
            self._view,
        )
        if at is None or mark is None or pair is None or view is None or at.view_id != self._ways.view_id:
            return
        member = view.member(node)
        if member is not None and index < pair.lanes and index not in pair.shut:
            self._lanes[index].order(
                JoinLane(
                    view_id=view.view_id,
                    node=node,
                    incarnation=member.incarnation,
                    host=at.host,
                    port=at.port,
                    shows=at.mark,
                    expects=mark,
                    dials=self._node < node,
                )
            )

    def _paired(self, lane: OwnLane, view_id: int, node: str) -> None:
        pair = self._ways.of(node)
        if pair is not None and view_id == self._ways.view_id and lane.index not in pair.shut:
            pair.paired[lane.index] = None
            at = "" if lane.address is None else lane.address[0]
            self._emit("lane_used", view=view_id, lane=lane.index, peer=node, address=at)

    def _apart(self, lane: OwnLane, view_id: int, node: str, why: str) -> None:
        pair = self._ways.of(node)
        if pair is not None and view_id == self._ways.view_id:
            pair.shut_here(lane.index, why)

    def _ended(self, lane: OwnLane, why: str) -> None:
        self._emit("lane_lost", lane=lane.index, reason=why)
        self._ways.lane_ended(lane.index, f"the lane of {self._node}: {why}")

    def _on_shut(self, pair: LanePair, index: int, why: str, was_paired: bool) -> None:
        self._emit("lane_shut", view=self._ways.view_id, lane=index, peer=pair.node, used=was_paired, reason=why)


_NOBODY: Final = LanesHere(0)


def _tell(link: Link, message: LaneMessage) -> None:
    with contextlib.suppress(TransportError):  # its link has ended, as who waits for it hears
        link.send_app(encode_message(message))
