"""Ranks of one host find out that they are: before a view is installed, once its links are up.

What is settled here is a part of the view: with its first operation all of its ranks that are of one host by what the
view says, a party, share memory, or none of them does. A view has a party for each host; they know nothing of each
other. Each rank speaks with its own party only:

    alone      nobody else is of this host by what the view says, or this rank may not share memory: nothing is said,
               nothing is waited for
    asking     each rank tells every other where it can be met (`Whereabouts`), and waits for what they tell. One that
               may not share memory answers that it cannot be met
    meeting    all are of one host: they meet there (`Belongings.meet`, host.py), for some seconds at most
    judging    each tells every other whether it has met all, and waits for what they tell (`MeetingOutcome`)
    settled    all have met all: the view is installed with a `Neighbourhood` where the party is the whole view, and
               with `HostWays` where others are elsewhere. Otherwise with neither; an event says why

Invariants: what follows from the messages follows on every rank of a party from the same ones, because each rank tells
all others the same: so all settle alike. Nothing here has a deadline of its own but the meeting: a message that does
not come is that of a link that ends, which ends the forming of the view; so does the next view that is formed. What
comes to nothing is given back to the host, and so is what this rank brought, when the others have it.

What a rank says of a view that is not formed here yet is kept: the last message of each kind and node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, TypeAlias

from quicoll.engine.host_ways import HostWays
from quicoll.engine.messages import MeetingOutcome, Whereabouts, encode_message
from quicoll.engine.neighbourhood import Neighbourhood
from quicoll.local.meeting import MEET_S, SECRET_BYTES, MeetingFailed, MeetingPlace
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quicoll.engine.host import Belongings, HostHere
    from quicoll.engine.messages import NearMessage
    from quicoll.membership.view import View
    from quicoll_transport.endpoint import Link

__all__ = ["Neighbours", "Sharing"]

_MAX_WHY = 200

Sharing: TypeAlias = Neighbourhood | HostWays
"""What ranks of a host have in a view: all of its ranks, or some."""


class Neighbours:
    """See the module's head. Everything on the engine's loop."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        node: str,
        host: HostHere | None,
        emit: Callable[..., None],
        within: float = MEET_S,
    ) -> None:
        """Start without a view.

        Args:
            loop: The engine's.
            node: This rank's node.
            host: The one that this rank is on; None shares no memory.
            emit: Called with (kind, **fields) for each event.
            within: Seconds for a meeting, less than a view may take to be formed.
        """
        self._within = within
        self._loop = loop
        self._node = node
        self._host = host
        self._emit = emit
        self._whereabouts: dict[str, Whereabouts] = {}
        self._verdicts: dict[str, MeetingOutcome] = {}
        self._heard: asyncio.Future[None] | None = None  # of the next message, or end of a link
        self._task: tuple[int, asyncio.Task[None]] | None = None
        self._settled: tuple[int, Sharing] | None = None

    def take(self, view_id: int) -> Sharing | None:
        """Return what was settled for a view that is installed now, which is the caller's from here on."""
        settled, self._settled = self._settled, None
        if settled is None or settled[0] == view_id:
            return None if settled is None else settled[1]
        settled[1].end()
        return None

    def shared(self, view: View) -> tuple[str, ...]:
        """Return the nodes with which this rank is settled to share memory in a view; `take` has not given it yet."""
        rank = view.rank_of(self._node)
        if self._settled is None or self._settled[0] != view.view_id or self._host is None or rank is None:
            return ()
        return tuple(view.members[each].node for each in self._host.sharers(view, rank) if each != rank)

    def stop(self) -> None:
        """Settle nothing any more."""
        if self._task is not None:
            self._task[1].cancel()
            self._task = None
        self._drop()

    def _drop(self) -> None:
        settled, self._settled = self._settled, None
        if settled is not None:
            settled[1].end()

    def receive(self, link: Link, message: NearMessage) -> None:
        """Take what a rank says."""
        if isinstance(message, MeetingOutcome):
            self._verdicts[link.node] = message
        else:
            self._whereabouts[link.node] = message
            if self._host is None and message.host:
                _tell(link, Whereabouts(message.view_id, why="shared memory is off, or not to be had"))
        self._wake()

    def link_ended(self, link: Link) -> None:
        """Take note that a link has ended."""
        self._whereabouts.pop(link.node, None)
        self._verdicts.pop(link.node, None)
        self._wake()

    def _wake(self) -> None:
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)

    async def meet(self, view: View, links: Sequence[Link]) -> bool:
        """Settle whether this rank shares memory with others of a view; `take` gives it. Ends when a link does, too.

        Args:
            view: A proposed view.
            links: To all others of it, which are up.
        Returns:
            Whether there was anything to settle, which takes time: links may have ended meanwhile.
        """
        rank = view.rank_of(self._node)
        party = () if self._host is None or rank is None else self._host.sharers(view, rank)
        if self._host is None or len(party) < 2:
            return False
        if self._task is None or self._task[0] != view.view_id:
            self.stop()
            near = [link for link in links if _rank(view, link) in party]
            self._task = view.view_id, self._loop.create_task(self._meet(self._host, view, party, near))
        await asyncio.shield(self._task[1])  # formed anew, a view is not settled anew: the others were told once
        return True

    async def _meet(self, host: HostHere, view: View, party: Sequence[int], links: Sequence[Link]) -> None:
        """Settle it with a party, of which this rank is one, and to whose others these are the links."""
        own: Belongings | None = None
        near: Sharing | None = None
        why = ""
        try:
            try:
                own = host.bring(len(party), self._loop)
            except OSError as error:
                why = f"{self._node}: {error}"[:_MAX_WHY]
            secrets = {_rank(view, link): os.urandom(SECRET_BYTES) for link in links}
            for link in links:
                if own is None:
                    _tell(link, Whereabouts(view.view_id, why=why))
                else:
                    _tell(link, Whereabouts(view.view_id, host.name, own.name, secrets[_rank(view, link)]))
            if not await self._all_said(view, links, self._whereabouts):
                return
            said = {_rank(view, link): self._whereabouts[link.node] for link in links}
            apart = [each for each in said.values() if each.host != host.name or len(each.secret) != SECRET_BYTES]
            if own is None or apart:
                told = next((each.why for each in apart if each.why), "the ranks are not of one host")
                self._say(view, party, why or told)
                return
            places = {rank: MeetingPlace(message.name, message.secret) for rank, message in said.items()}
            try:
                near = await self._met(own, view, party, places, secrets)
            except (MeetingFailed, OSError, ValueError) as error:
                why = f"{self._node}: {error}"[:_MAX_WHY]
            for link in links:
                _tell(link, MeetingOutcome(view.view_id, near is not None, why))
            if not await self._all_said(view, links, self._verdicts):
                return
            refused = [self._verdicts[link.node].why for link in links if not self._verdicts[link.node].met]
            if near is not None and not refused:
                self._settled, near = (view.view_id, near), None
                self._say(view, party, "")
            else:
                self._say(view, party, why or refused[0])
        finally:
            if near is not None:
                near.end()
            if own is not None:
                own.close()

    def _say(self, view: View, party: Sequence[int], why: str) -> None:
        if len(party) == view.world_size:
            self._emit("shared_memory", view=view.view_id, used=not why, reason=why)
        else:
            self._emit("shared_memory", view=view.view_id, used=not why, reason=why, ranks=list(party))

    async def _all_said(
        self, view: View, links: Sequence[Link], said: Mapping[str, Whereabouts] | Mapping[str, MeetingOutcome]
    ) -> bool:
        """Wait until all have said their part of this view. Return False where a link has ended."""
        while True:
            if any(link.ended for link in links):
                return False
            if all(link.node in said and said[link.node].view_id == view.view_id for link in links):
                return True
            self._heard = self._loop.create_future()
            await self._heard

    async def _met(
        self,
        own: Belongings,
        view: View,
        party: Sequence[int],
        places: Mapping[int, MeetingPlace],
        secrets: Mapping[int, bytes],
    ) -> Sharing:
        """Meet the others of a party, who have numbers on the host by their order. Raises MeetingFailed, OSError and
        ValueError."""
        rank = view.rank_of(self._node)
        if rank is None:
            raise MeetingFailed("not in this view")
        met = await own.meet(
            view_id=view.view_id,
            rank=party.index(rank),
            places={party.index(each): place for each, place in places.items()},
            secrets={party.index(each): secret for each, secret in secrets.items()},
            within=self._within,
        )
        if len(party) == view.world_size:
            return Neighbourhood(met, loop=self._loop)
        return HostWays(met, party, loop=self._loop)


def _tell(link: Link, message: NearMessage) -> None:
    with contextlib.suppress(TransportError):  # its link has ended, as who waits for it hears
        link.send_app(encode_message(message))


def _rank(view: View, link: Link) -> int:
    rank = view.rank_of(link.node)
    if rank is None:
        raise AssertionError(f"{link.node} is not in view {view.view_id}")
    return rank
