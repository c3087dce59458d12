"""The views of one rank: the one that is formed, the one that was installed last, and those before it.

    formed       its members may be told of the installation before this rank is, and announce what they call: kept for
                 its communicator (early.py)
    installed    its communicator is at work, then broken or ended (communicator.py); it is kept until the next one is
                 installed, for callers who still speak of it
    over         the error is kept that all its ranks are given (decisions.py)

Every message and every ended link of a peer is of one of these views or of none, and every call of a caller names its
view: who does is found here. Invariant: what is of one view never reaches the communicator of another.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from quicoll.engine.communicator import Communicator
from quicoll.engine.decisions import ViewEnds
from quicoll.engine.early import EarlyAnnouncements
from quicoll.engine.failures import error_of_end
from quicoll.engine.host_ways import HostWays
from quicoll.engine.messages import Announce, Farewell, encode_message
from quicoll.engine.neighbourhood import Neighbourhood
from quicoll.errors import PeerError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from quicoll.engine.lane_ways import LaneWays
    from quicoll.engine.late_stacks import LateStacks
    from quicoll.engine.neighbours import Sharing
    from quicoll.errors import QuicollError
    from quicoll.membership.member.actions import Deactivate
    from quicoll.membership.view import View
    from quicoll.observability.flight import FlightRecorder
    from quicoll.observability.stragglers import Stragglers
    from quicoll_transport.endpoint import Link

__all__ = ["Views"]

log = logging.getLogger("quicoll")


def _mark(view: View) -> str:
    """What processes that are in the same view have in common: its number, and the very processes that are in it."""
    members = [(member.node, member.incarnation) for member in view.members]
    return hashlib.blake2b(repr((view.view_id, members)).encode(), digest_size=8).hexdigest()


class Views:
    """See the module's head.

    communicator: of the view that was installed last, None before the first. first: the view that was installed first.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        node: str,
        stragglers: Stragglers,
        emit: Callable[..., None],
        on_failure: Callable[[View, QuicollError, tuple[int, ...]], None],
        on_gone: Callable[[str], None] = lambda node: None,
        flight: FlightRecorder | None = None,
        late: LateStacks | None = None,
    ) -> None:
        """Start without a view.

        Args:
            loop: The loop of the links.
            node: This rank's node.
            stragglers: Told who called what when.
            emit: Called with (kind, **fields) for each event.
            on_failure: Called once with (view, error, ranks) when a view's communicator breaks from inside. ranks: as
                quicoll.engine.communicator.Communicator says them.
            on_gone: Called with a node of the view at work whose process has ended, where the system says so.
            flight: Keeps what was called last; None where nothing does.
            late: Asks late ranks where they are; None asks nobody.
        """
        self.communicator: Communicator | None = None
        self.first: View | None = None
        self._loop = loop
        self._node = node
        self._stragglers = stragglers
        self._emit = emit
        self._on_failure = on_failure
        self._on_gone = on_gone
        self._flight = flight
        self._late = late
        self._early = EarlyAnnouncements()
        self._ends = ViewEnds()
        self._lost: list[str] = []

    @property
    def lost(self) -> tuple[str, ...]:
        """The nodes of the installed view that are lost, in the order of their names."""
        return tuple(sorted(self._lost))

    # -- for callers ---------------------------------------------------------------------------------------------

    def present(self) -> View | None:
        """Return the view that is at work, None while there is none."""
        communicator = self.communicator
        return None if communicator is None or communicator.error is not None else communicator.view

    def installed(self, view_id: int) -> Communicator | None:
        """Return the communicator of a view, at work or not; None where the view is not the one installed last."""
        communicator = self.communicator
        return communicator if communicator is not None and communicator.view.view_id == view_id else None

    def at_work(self, view_id: int) -> Communicator | None:
        """Return the communicator of a view that is at work, None where it is not."""
        communicator = self.installed(view_id)
        return communicator if communicator is not None and communicator.error is None else None

    async def why_over(self, view_id: int) -> QuicollError:
        """Return why a view is not at work any more, as all ranks are told: waits for that if it has just broken."""
        communicator = self.installed(view_id)
        if communicator is not None and communicator.error is not None:
            return await communicator.end_of_view() or communicator.error
        return self.past(view_id)

    def past(self, view_id: int, *, op: str = "", step: int | None = None) -> QuicollError:
        """Return the error for a caller that speaks of a view that is over; see `ViewEnds.past`."""
        return self._ends.past(view_id, op=op, step=step)

    # -- what becomes of views -----------------------------------------------------------------------------------

    def expect(self, view: View) -> None:
        """Keep what members of a view announce that is formed now."""
        self._early.expect(view)

    def install(
        self,
        view: View,
        links: dict[int, Link],
        sharing: Sharing | None = None,
        lanes: LaneWays | None = None,
    ) -> None:
        """Put a communicator to work.

        Args:
            view: The view.
            links: To every other rank of it.
            sharing: What ranks of this host have, which have met.
            lanes: The ways that have lanes beside them.
        """
        near = sharing if isinstance(sharing, Neighbourhood) else None
        ways = sharing if isinstance(sharing, HostWays) else None
        self._lost.clear()
        self.first = self.first or view
        flight = None if self._flight is None else self._flight.in_view(view.view_id, view.nodes, _mark(view))
        self.communicator = communicator = Communicator(
            view,
            node=self._node,
            loop=self._loop,
            links=links,
            on_failure=lambda error, ranks: self._on_failure(view, error, ranks),
            on_called=lambda op, arrived_ns, near: self._called(view, {} if near else links, op, arrived_ns),
            late_ns=self._stragglers.after_ns,
            near=near,
            ways=[each for each in (ways, lanes) if each is not None],
            flight=flight,
            late=self._late,
        )

        def on_gone(rank: int) -> None:
            self._on_gone(view.members[rank].node)

        if near is not None:
            near.attach(communicator, on_gone, flight)
        if ways is not None:
            ways.attach(on_gone)
        self._emit(
            "view_installed",
            view=view.view_id,
            world_size=view.world_size,
            rank=communicator.rank,
            nodes=list(view.nodes),
        )
        for rank, announce in self._early.take(view):
            communicator.announced(rank, announce)

    def end(self, action: Deactivate) -> bool:
        """End a view as the coordinator says. Return whether it was installed here."""
        communicator = self.installed(action.view_id)
        if communicator is None:
            return False
        self._tell_lost(action)
        communicator.end(error_of_end(communicator.view, action))
        if communicator.end_error is not None:
            self._ends.keep(action.view_id, communicator.end_error)
        self._emit("view_ended", view=action.view_id, cause=action.cause, lost=list(action.lost))
        return True

    def _tell_lost(self, action: Deactivate) -> None:
        """Tell of peers whose loss only the coordinator has noticed, or noticed first: one loss, told once.

        A view that ends for nobody's fault is followed by another one without those who left as they should; they are
        no losses.
        """
        known = (self._node, *self._lost)
        self._note_lost(*action.lost)
        if action.culprit:
            for node in action.lost:
                if node not in known:
                    self._emit("peer_lost", peer=node, cause="the coordinator says so")

    def _note_lost(self, *nodes: str) -> None:
        self._lost += [node for node in nodes if node not in self._lost]

    # -- what comes from peers -----------------------------------------------------------------------------------

    def link_ended(self, link: Link) -> Communicator | None:
        """Take note that the link to a peer has ended.

        Returns:
            The communicator that its peer is lost to; None if its node is in no view, or the coordinator has ended it.
        """
        self._early.drop(link.number)
        communicator = self.communicator
        if communicator is None or communicator.view.rank_of(link.node) is None or communicator.end_error is not None:
            return None
        self._note_lost(link.node)
        return communicator

    def receive(self, link: Link, message: Announce | Farewell) -> None:
        """Hand a peer's message to the communicator of its view, or keep it for that.

        Args:
            link: The link that it came on, which ends where its peer sends too much for a view to come.
            message: What came.
        """
        communicator = self.communicator
        if communicator is not None and communicator.view.view_id == message.view_id:
            rank = communicator.view.rank_of(link.node)
            if rank is None:
                return
            if isinstance(message, Announce):
                communicator.announced(rank, message)
            else:
                communicator.farewell(rank, message)
        elif isinstance(message, Farewell):
            if not message.done:  # of a view in which nothing runs here
                link.send_app(encode_message(Farewell(message.view_id, done=True)))
        else:
            try:
                self._early.keep(link.number, link.node, message)
            except PeerError as error:
                log.error("%s", error)
                link.close("too many announcements for a view to come")

    def _called(self, view: View, links: dict[int, Link], op: str, arrived_ns: dict[int, int]) -> None:
        """All ranks of an operation have called it: report the late ones. links: by which the calls were told."""

        def rtt_ns(rank: int) -> int:
            return (links[rank].rtt_ns or 0) if rank in links else 0

        def node(rank: int) -> str:
            return view.members[rank].node

        for late in self._stragglers.called(op, arrived_ns, rtt_ns=rtt_ns, node=node):
            self._emit(
                "straggler", rank=late.rank, peer=node(late.rank), op=op, seconds=late.seconds, view=view.view_id
            )
