"""Ranks of one host find out that they are: before a view is installed, once its links are up.

What is settled here is a part of the view: with its first operation all of its ranks share memory, or none does.

    alone      the ranks are not all of one host by what the view says, this one may not share memory, or is by itself:
               nothing is said, nothing is waited for
    asking     each rank tells every other where it can be met (`Whereabouts`), and waits for what they tell. One that
               may not share memory answers that it cannot be met
    meeting    all are of one host: they meet there (`Belongings.meet`, host.py), for some seconds at most
    judging    each tells every other whether it has met all, and waits for what they tell (`MeetingOutcome`)
    settled    all have met all: the view is installed with a `Neighbourhood`. Otherwise without; an event says why

Invariants: what follows from the messages follows on every rank from the same ones, because each rank tells all others
the same: so all ranks settle alike. Nothing here has a deadline of its own but the meeting: a message that does not
come is that of a link that ends, which ends the forming of the view; so does the next view that is formed. What comes
to nothing is given back to the host, and so is what this rank brought, when the others have it.

What a rank says of a view that is not formed here yet is kept: the last message of each kind and node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

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

__all__ = ["Neighbours"]

_MAX_WHY = 200


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
        self._settled: tuple[int, Neighbourhood] | None = None

    def take(self, view_id: int) -> Neighbourhood | None:
        """Return what was settled for a view that is installed now, which is the caller's from here on."""
        settled, self._settled = self._settled, None
        if settled is None or settled[0] == view_id:
            return None if settled is None else settled[1]
        settled[1].end()
        return None

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
        """Settle whether the ranks of a view share memory; `take` gives it. Ends when a link does, too.

        Args:
            view: A proposed view.
            links: To all others of it, which are up.
        Returns:
            Whether there was anything to settle, which takes time: links may have ended meanwhile.
        """
        if self._host is None or not self._host.may_hold(view):
            return False
        if self._task is None or self._task[0] != view.view_id:
            self.stop()
            self._task = view.view_id, self._loop.create_task(self._meet(self._host, view, links))
        await asyncio.shield(self._task[1])  # formed anew, a view is not settled anew: the others were told once
        return True

    async def _meet(self, host: HostHere, view: View, links: Sequence[Link]) -> None:
        own: Belongings | None = None
        near: Neighbourhood | None = None
        why = ""
        try:
            try:
                own = host.bring(view.world_size, self._loop)
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
                self._say(view, why or next((each.why for each in apart if each.why), "the ranks are not of one host"))
                return
            places = {rank: MeetingPlace(message.name, message.secret) for rank, message in said.items()}
            try:
                near = await self._met(own, view, places, secrets)
            except (MeetingFailed, OSError, ValueError) as error:
                why = f"{self._node}: {error}"[:_MAX_WHY]
            for link in links:
                _tell(link, MeetingOutcome(view.view_id, near is not None, why))
            if not await self._all_said(view, links, self._verdicts):
                return
            refused = [self._verdicts[link.node].why for link in links if not self._verdicts[link.node].met]
            if near is not None and not refused:
                self._settled, near = (view.view_id, near), None
                self._emit("shared_memory", view=view.view_id, used=True, reason="")
            else:
                self._say(view, why or refused[0])
        finally:
            if near is not None:
                near.end()
            if own is not None:
                own.close()

    def _say(self, view: View, why: str) -> None:
        self._emit("shared_memory", view=view.view_id, used=False, reason=why)

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
        self, own: Belongings, view: View, places: Mapping[int, MeetingPlace], secrets: Mapping[int, bytes]
    ) -> Neighbourhood:
        """Meet the others. Raises MeetingFailed, OSError and ValueError."""
        rank = view.rank_of(self._node)
        if rank is None:
            raise MeetingFailed("not in this view")
        met = await own.meet(view_id=view.view_id, rank=rank, places=places, secrets=secrets, within=self._within)
        return Neighbourhood(met, loop=self._loop)


def _tell(link: Link, message: NearMessage) -> None:
    with contextlib.suppress(TransportError):  # its link has ended, as who waits for it hears
        link.send_app(encode_message(message))


def _rank(view: View, link: Link) -> int:
    rank = view.rank_of(link.node)
    if rank is None:
        raise AssertionError(f"{link.node} is not in view {view.view_id}")
    return rank
