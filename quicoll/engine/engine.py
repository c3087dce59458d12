"""The engine of one rank: endpoint, membership and the present communicator, on the engine's loop.

It follows the membership core: forms the links of a proposed view, puts its communicator to work when the view is
installed, ends it when the view is over. Callers ask for a view, a collective, a vote; each call ends by its deadline.

    no communicator           waiting for the coordinator, or for a view
    communicator at work      `wait_view` returns; collectives run
    communicator broken       something failed here; the coordinator was told and will end the view
    communicator ended        the coordinator ended the view; the next one follows

A link that ends breaks the communicator if its node is in the view. The parts that it puts together:

    coordinator_link.py, peer_links.py    the links
    views.py                              the communicator, what peers say to it, and how earlier views ended
    voting.py                             how callers begin steps, vote for them, and hear what became of them
    decisions.py                          what became of steps, for callers who ask late
    waiting.py                            how callers wait, and what they are told
    late_stacks.py                        where a rank is that others wait for
    neighbours.py, lanes.py               what carries long messages beside the links: memory of the host, lanes
    lessons.py                            a state on its way to or from a node outside of the view
    block_lessons.py                      blocks of sharded states on their way to or from a spare
    link_meter.py                         what the coordinator is told of links, for people who look
    certificates.py                       what an operator does with certificates
    common_settings.py                    what this rank takes from the coordinator's settings
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from quicoll.config import lane_hosts
from quicoll.deadlines import Deadlines
from quicoll.engine.block_lessons import BlockTraffic, take_lesson
from quicoll.engine.certificates import Certificates, Certified
from quicoll.engine.common_settings import DECISION_MARGIN_S, CommonSettings
from quicoll.engine.coordinator_link import CoordinatorLink
from quicoll.engine.decisions import StepOutcomes
from quicoll.engine.detours import Detours
from quicoll.engine.failures import failed_node, kind_of
from quicoll.engine.lanes import Lanes
from quicoll.engine.late_stacks import LateStacks
from quicoll.engine.lessons import LessonTraffic
from quicoll.engine.link_meter import LinkMeter, SeenLink
from quicoll.engine.messages import (
    Announce,
    AskStack,
    Farewell,
    LaneAt,
    LanesHere,
    LaneShut,
    LanesTaken,
    MeetingOutcome,
    StackTold,
    Whereabouts,
)
from quicoll.engine.neighbours import Neighbours
from quicoll.engine.peer_links import PeerLinks
from quicoll.engine.places import PeerPlaces
from quicoll.engine.views import Views
from quicoll.engine.voting import Voting
from quicoll.engine.waiting import Waiting, job_closed
from quicoll.errors import Corrupted, PeerError, QuicollError
from quicoll.lanes.memory import LARGEST, lanes_unusable, slots_for
from quicoll.lanes.orders import LaneSettings
from quicoll.local.meeting import MEET_S
from quicoll.membership.member.actions import (
    Activate,
    AdoptLostAfter,
    Deactivate,
    Decided,
    Dismissal,
    ExpectPeer,
    FormLinks,
    FreeToLeave,
    Held,
    JobOver,
    LedElsewhere,
    ProbePaths,
    Reconnect,
    Refused,
    Resumed,
    StartOver,
    TellCoordinator,
)
from quicoll.membership.member.core import MemberCore
from quicoll.membership.messages import COORDINATOR_NODE, RelayAnswer, Welcome, clip, departure
from quicoll.observability.stragglers import Stragglers
from quicoll.observability.transport import forward_to
from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link, LinkState
from quicoll_transport.faults.compose import Faults
from quicoll_transport.net.addresses import format_address, parse_addresses
from quicoll_transport.net.multihomed import MultihomedIO
from quicoll_transport.quic import SessionConfig
from quicoll_transport.relay.detour import DetourIO
from quicoll_transport.security.access import AccessControl
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity
from quicoll_transport.security.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from quicoll.config import Config
    from quicoll.engine.calls import Call
    from quicoll.engine.host import HostHere
    from quicoll.engine.in_flight import Ended, InFlight, Watch
    from quicoll.engine.messages import BlockMessage, LessonMessage, PeerMessage
    from quicoll.engine.neighbourhood import Neighbourhood
    from quicoll.lanes.starting import LaneHost
    from quicoll.membership.messages import FromRelay
    from quicoll.membership.view import View
    from quicoll.observability.events import Observers
    from quicoll_transport.events import LinkSnapshot
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.security.credentials import Credentials

__all__ = ["Engine"]


def announced_addresses(config: Config, bound: Sequence[Address]) -> tuple[tuple[str, int], ...]:
    """Return where other ranks are told to send to: `advertise`, or what is bound."""
    own = [(str(host), int(port)) for host, port, *_ in bound]
    told = own if config.advertise is None else parse_addresses(config.advertise)
    return tuple((host, port or own[min(at, len(own) - 1)][1]) for at, (host, port) in enumerate(told))


def _pair_nothing(addresses: Sequence[Address]) -> None:
    """Take in the addresses of a peer where this rank has one address."""


class Engine:
    """See the module's head. Every method but `start` runs on the engine's loop."""

    def __init__(
        self,
        config: Config,
        *,
        credentials: Credentials,
        io: DatagramIO,
        loop: asyncio.AbstractEventLoop,
        incarnation: int,
        observers: Observers,
        coordinators: Sequence[Sequence[Address]],
        wall_clock: Callable[[], datetime] | None = None,
        denied: Sequence[str] = (),
        host: HostHere | None = None,
        stacks: Callable[[int, Callable[[str], None]], None] | None = None,
        lane_host: LaneHost | None = None,
    ) -> None:
        """host: the one that this rank is on; None uses no memory that ranks share. stacks: gives the stacks of this
        process, of so many characters at most; None asks no rank for its own, and answers none. lane_host: where lanes
        run; None has none."""
        self._settings = CommonSettings(config)
        self.observers = observers
        self.faults = Faults(random.Random(incarnation))  # noqa: S311 - faults are for tests, not for keys
        self.stragglers = Stragglers(after_ns=round(config.straggler_after * 1e9))
        self.steps = StepOutcomes(observers.emit)
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._late: LateStacks | None = None
        if stacks is not None:
            flight = observers.flight
            self._late = LateStacks(
                shows=config.late_stacks,
                stacks=stacks,
                now=loop.time,
                link_to=self._link_to,
                on_told=(lambda node, text: None) if flight is None else flight.stack,
            )
        self._views = Views(
            loop=loop,
            node=config.node,
            stragglers=self.stragglers,
            emit=observers.emit,
            on_failure=self._on_view_broken,
            on_gone=self._on_process_gone,
            flight=observers.flight,
            late=self._late,
        )
        self._neighbours = Neighbours(
            loop=loop,
            node=config.node,
            host=host,
            emit=observers.emit,
            within=max(MEET_S, config.lost_after / 2),
        )
        self._meter: LinkMeter | None = None  # while a view is installed that has other ranks
        self._leaving = False
        self._on_link: Callable[[Link], None] = lambda link: None
        self._on_lesson: Callable[[Link, LessonMessage | BlockMessage], None] = self._take_lesson
        deadlines = Deadlines.of(config.lost_after)
        policy = Policy(roles=(WORKER,), denied=denied)
        roundabout = DetourIO(io, loop=loop)
        self.endpoint = Endpoint(
            credentials=credentials,
            config=EndpointConfig(
                lost_after_ns=deadlines.lost_ns,
                connect_ns=deadlines.connect_ns,
                session=SessionConfig(congestion=config.congestion, parity=config.parity),
                qlog_directory=config.qlog,
            ),
            io=roundabout,
            loop=loop,
            incarnation=incarnation,
            authorize=policy,
            on_link=lambda link: self._peers.accept(link),
            faults=self.faults,
            observer=forward_to(observers) if config.transport_events else None,
            wall_clock=wall_clock,
        )
        bound = io.local_addresses if isinstance(io, MultihomedIO) else (self.endpoint.address,)
        pair = io.pair if isinstance(io, MultihomedIO) else _pair_nothing
        announced = announced_addresses(config, bound)
        self._lanes = Lanes(
            loop=loop,
            node=config.node,
            advertised="" if config.advertise is None or config.lane_addresses else announced[0][0],
            emit=observers.emit,
        )
        self.certificates = Certificates(
            AccessControl(Certified(self.endpoint, self._lanes), policy, listed=denied), observers.emit
        )
        self._places = PeerPlaces(observers.emit)
        self._member = MemberCore(
            config.node,
            incarnation=incarnation,
            addresses=announced,
            world_size=config.world_size,
            rank_hint=config.rank_hint,
            seed=config.seed,
            site=config.site,
            lost_after_ns=deadlines.lost_ns,
            adopts=config.sources["lost_after"] == "default",
            timeout_ns=self._settings.insisted("timeout"),
            hold_timeout_ns=self._settings.insisted("hold_timeout"),
            form_timeout_ns=deadlines.form_ns,
            answer_timeout_ns=deadlines.answer_ns,
            decision_margin_ns=round(DECISION_MARGIN_S * 1e9),
        )
        self._coordinator = CoordinatorLink(
            self.endpoint,
            Identity(config.job, COORDINATOR, COORDINATOR_NODE),
            coordinators,
            pair=pair,
            avoid_ns=deadlines.connect_ns,
            loop=loop,
            on_up=lambda: self._member.connected(now_ns=self._now_ns()),
            on_down=self._on_coordinator_down,
            on_message=self._on_coordinator_message,
            on_place=self._places.note,
            on_change=self._work,
        )
        self._detours = Detours(
            roundabout,
            self.endpoint,
            job=config.job,
            ask_coordinator=self._coordinator.send,
            coordinator_place=lambda: self._coordinator.place,
        )
        self._peers = PeerLinks(
            self.endpoint,
            self._detours,
            job=config.job,
            node=config.node,
            loop=loop,
            on_message=self._on_peer_message,
            on_state=self._on_peer_state,
            pair=pair,
            neighbours=self._neighbours,
            lanes=self._lanes,
            on_formed=self._on_links_formed,
            on_reached=self._on_paths_reached,
        )
        self.lessons = LessonTraffic(loop=loop, link_to=self._link_to)
        self.block_lessons = BlockTraffic(loop=loop, link_to=self._link_to)
        self._waiting = Waiting(
            loop=loop,
            node=config.node,
            default_address=config.sources["coordinator"] == "default",
            absence=self._coordinator.absence,
        )
        self.voting = Voting(
            loop=loop,
            node=config.node,
            views=self._views,
            member=self._member,
            outcomes=self.steps,
            waiting=self._waiting,
            flight=observers.flight,
            give_up=self.give_up,
            on_change=self._work,
        )
        observers.emit(
            "listening",
            address="+".join(format_address(address) for address in bound),
            advertised="+".join(format_address(address) for address in announced),
        )
        if config.lanes and lane_host is None:
            observers.emit("lane_lost", lane=0, reason=lanes_unusable() or "no lane can run here")
        elif lane_host is not None and config.lanes:
            largest = min(config.chunk_bytes, LARGEST)
            settings = LaneSettings(
                host=str(self.endpoint.address[0]),
                incarnation=incarnation,
                lost_ns=deadlines.lost_ns,
                connect_ns=deadlines.connect_ns,
                congestion=config.congestion,
                parity=config.parity,
                largest=largest,
                slots=slots_for(largest, lane_host.slots),
                denied=tuple(denied),
            )
            own = [str(address[0]) for address in bound]
            hosts = own if config.lane_addresses is None else lane_hosts(config.lane_addresses)
            self._lanes.start(config.lanes, settings, credentials, lane_host, hosts=hosts)
        self._coordinator.dial()

    def attend(
        self,
        *,
        on_change: Callable[[], None],
        on_link: Callable[[Link], None],
        on_lesson: Callable[[Link, LessonMessage | BlockMessage], None],
    ) -> None:
        """Have its caller, who is elsewhere, follow what it is doing, and have lessons there.

        Args:
            on_change: Called where a view has come to work or is at work no more.
            on_link: Called where the state of a link to another rank has changed.
            on_lesson: Gets what peers say about lessons; `lessons` and `block_lessons` are not used then.
        """
        self._waiting.on_wake = on_change
        self._on_link = on_link
        self._on_lesson = on_lesson

    def _link_to(self, node: str) -> Link | None:
        return self.endpoint.links.get(Identity(self._settings.config.job, WORKER, node))

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    @property
    def config(self) -> Config:
        """The settings of this rank, with those that it took from the coordinator."""
        return self._settings.config

    # -- what callers ask for ------------------------------------------------------------------------------------

    @property
    def result_memory(self) -> None:
        """None: results may be in any memory of this process."""
        return

    async def wait_view(
        self, timeout: float | None, *, joining: bool = False, after: int = 0
    ) -> View | JobOver | Dismissal | FreeToLeave:
        """Wait for a view at work.

        Args:
            timeout: Seconds; None where the caller ends the wait itself.
            joining: Whether this is the first view of the job. Then it is the first one that was at work here, which
                may be over by now: others may have had it before this rank, and have left it.
            after: A view that is left, and does not count.
        Returns:
            The view; or that the job is done, or this rank was told to leave it, or may, having asked for it. That is
            no error here: the errors for it are SystemExits, which would end the loop that this runs on.
        Raises:
            LocalError: The engine is closed.
            PeerError: The coordinator refuses this rank; or, when joining, no view came in time.
            Partitioned: No view came in time.
        """

        def present() -> View | None:
            view = self._views.first if joining else self._views.present()
            return None if view is None or view.view_id == after else view

        return await self._waiting.view(present, timeout, joining=joining)

    async def what_is_missing(self) -> str:
        """Return what keeps a view from being formed, as far as it is known; "" where nothing is known to."""
        return self._waiting.missing()

    def collective(
        self,
        view_id: int,
        call: Call,
        ended: Ended,
        *,
        group: int,
        timeout: float,
        step: int | None,
        number: int | None = None,
    ) -> InFlight | None:
        """Start a collective in view `view_id`.

        Args:
            view_id: The view that its caller is in.
            call: The collective.
            ended: Called once, with its number in the group or with the error: it failed, or the view is over.
            group: The id of its group.
            timeout: Seconds for the whole of it.
            step: The number of the open step, for errors.
            number: Its number in the group, where that was taken before.
        Returns:
            The operation, by which it is cancelled; None where it was refused.
        """
        communicator = self._views.installed(view_id)
        if communicator is not None and not self._waiting.closed:
            return communicator.start(call, group=group, timeout=timeout, step=step, ended=ended, number=number)
        refused = job_closed() if self._waiting.closed else self._views.past(view_id, op=call.name, step=step)
        ended(None, refused)
        return None

    def near(self, view_id: int) -> Neighbourhood | None:
        """Return the way between the ranks of a view that share a host, where all of them do. Any thread may ask."""
        communicator = self._views.installed(view_id)
        return None if communicator is None else communicator.near

    def by_memory(self, view_id: int) -> tuple[int, ...] | None:
        """Return the other ranks of a view that this one hands what it can through the memory of its host; None where
        the view is not the one installed last."""
        communicator = self._views.installed(view_id)
        return None if communicator is None else communicator.by_memory

    def next_call(
        self, view_id: int, groups: Mapping[int, int], timeout: float, step: int | None, ended: Ended
    ) -> Watch | None:
        """Wait until a peer has called an operation that this rank has not; it calls its part then.

        Args:
            view_id: The view that the caller is in.
            groups: The ids of the groups of such operations, and what `ended` gets for each.
            timeout: Seconds.
            step: The number of the open step, for errors.
            ended: Called once, with what belongs to the group, or with the error.
        Returns:
            The wait, by which it is cancelled; None where it was refused.
        """
        communicator = self._views.installed(view_id)
        if communicator is not None and not self._waiting.closed:
            return communicator.watch(groups, timeout=timeout, step=step, ended=ended)
        ended(None, job_closed() if self._waiting.closed else self._views.past(view_id, step=step))
        return None

    def divide(self, view_id: int) -> None:
        """Take note that this rank is in a sub-group of a view: others that end their work first wait for it."""
        communicator = self._views.installed(view_id)
        if communicator is not None:
            communicator.divide()

    @property
    def view_at_work(self) -> int:
        """The id of the view that is at work, 0 while there is none. From any thread: as of a moment ago."""
        view = self._views.present()
        return 0 if view is None else view.view_id

    async def give_up(self, view_id: int, reason: str) -> None:
        """Break the view because the caller's own code failed inside a step.

        Args:
            view_id: The view of the step.
            reason: What failed, for the other ranks.
        """
        communicator = self._views.at_work(view_id)
        if communicator is not None:
            error = PeerError(f"left its step: {reason}", rank=communicator.rank, node=self.config.node, view=view_id)
            await self.break_view(view_id, error)

    async def break_view(self, view_id: int, error: QuicollError) -> None:
        """Break the view because of what the caller's side found wrong with a peer. Nothing if it is broken already.

        Args:
            view_id: The view.
            error: What was found; the rank that it names is the culprit, or the ones that it has as odd are.
        """
        communicator = self._views.installed(view_id)
        if communicator is not None:
            odd = error.odd if isinstance(error, Corrupted) else ()
            blamed = odd if odd is not None else () if error.rank is None else (error.rank,)
            communicator.fail(error, blamed)

    async def ask_to_leave(self) -> bool:
        """Tell the coordinator that this rank was asked to stop. `wait_view` says when it may go.

        Returns:
            Whether it was told. Where there is no link to it nobody says when to go.
        """
        told = self._member.ask_to_leave()
        self._work()
        return told

    async def step_out(self, view_id: int) -> None:
        """Leave a view between two steps, to learn its state; `step_in` follows. What this rank held counts as lost.

        Args:
            view_id: The view that the caller is in.
        Raises:
            QuicollError: The view is not at work any more.
        """
        self._member.state_lost()
        if self._views.at_work(view_id) is None or self._member.next_step is None:
            raise await self._views.why_over(view_id)
        self._member.step_out()
        self._work()

    def step_in(self) -> None:
        """Be in views again, if this rank has stepped out of one and is in no other."""
        self._member.learned()
        self._work()

    def owns_state(self) -> None:
        """Take note that part of the job's state may be nowhere but here: this rank hands it over before it leaves."""
        self._member.owns_state()

    async def parted(self) -> None:
        """Take note that all who are to leave after the present view have handed over what they owned."""
        self._member.parted()

    def state_received(self, rank: int, step: int, index: int, confirmed_by: Sequence[str]) -> None:
        """Take note that this rank was brought to the state after a step.

        Args:
            rank: The rank that gave the state.
            step: The caller's number of the step.
            index: The coordinator's.
            confirmed_by: Other nodes that hold the same state.
        """
        self._member.caught_up(index)
        self.observers.emit("state_received", from_rank=rank, step=step, confirmed_by=list(confirmed_by))

    def state_torn(self, step: int, cause: str) -> None:
        """Take note that this rank's state is half overwritten, and counts as none.

        Args:
            step: The caller's number of the step that it was the state after.
            cause: Why.
        """
        self._member.state_lost()
        self.observers.emit("state_torn", step=step, cause=cause)

    def worker_links(self) -> dict[str, Link]:
        """The links to other workers of the job that are up, by node."""
        up = [link for link in self.endpoint.links.values() if link.state is LinkState.UP]
        return {link.node: link for link in up if link.identity.role == WORKER}

    async def links(self) -> tuple[LinkSnapshot, ...]:
        """The figures of all links, in the order of the peers' names."""
        return tuple(self.endpoint.links[identity].snapshot() for identity in sorted(self.endpoint.links))

    async def aclose(self, reason: str, *, patience: float = 0.0, finished: int | None = None) -> None:
        """Leave and stop; what the coordinator has to know is delivered if it can be within a second.

        Args:
            reason: Why, for the other ranks.
            patience: Seconds in which the peers may end operations that this rank has been part of
                (quicoll.engine.calls).
            finished: The caller's number of the step at which its work ended as it should; None where it did not.
        """
        if self._leaving:
            return
        self._leaving = True
        communicator = self._views.communicator
        try:
            if communicator is not None and patience > 0 and not communicator.running:
                next_step = None if finished is None else self._member.next_step
                await communicator.part(patience, next_step=next_step)
        finally:  # cancelled while it waits, it leaves all the same
            await self._end(reason, finished)

    async def _end(self, reason: str, finished: int | None) -> None:
        if self.observers.flight is not None:
            self.observers.flight.left(reason if finished is None else "done")
        if self._views.communicator is not None:
            # Before the membership says that this node left, as if another rank had failed.
            self._views.communicator.end(job_closed())
        self._member.leave(clip(reason), finished=finished, now_ns=self._now_ns())
        self._work()
        self._coordinator.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._peers.stop()
        self._neighbours.stop()
        self.lessons.stop()
        self.block_lessons.stop()
        self._waiting.close()
        try:
            await self.endpoint.aclose(reason=f"it {departure(clip(reason))}")
        finally:  # last: the peers hear first that this rank leaves, and do not miss its lanes
            await self._lanes.aclose()
        self.observers.close()

    # -- links ---------------------------------------------------------------------------------------------------

    def _on_coordinator_down(self, link: Link) -> None:
        self._detours.coordinator_gone()
        if link.stats.connections:
            self._emit_lost(link)
        self._peers.stop_probing()
        if link.outdated_by:
            self._member.outdated(link.outdated_by, now_ns=self._now_ns())
        else:
            self._member.disconnected(clip(self._coordinator.silence(link)), now_ns=self._now_ns())

    def _on_coordinator_message(self, message: FromRelay) -> None:
        if isinstance(message, RelayAnswer):
            self._detours.answered(message)
            return
        if isinstance(message, Welcome):
            self._detours.use(message.relay)
        self._member.receive(message, now_ns=self._now_ns())
        self._work()

    def _on_peer_state(self, link: Link) -> None:
        if self._waiting.closed:
            return
        self._places.note(link)
        self._on_link(link)
        if not link.ended:
            return
        self.lessons.link_ended(link)
        self.block_lessons.link_ended(link)
        self._neighbours.link_ended(link)
        self._lanes.link_ended(link)
        communicator = self._views.link_ended(link)
        if communicator is None:
            return
        view, cause = communicator.view, link.cause
        self._emit_lost(link)
        # Before the communicator breaks, which reports the same in other words; and also where it is broken: which
        # rank failed follows from all the pairs that have lost each other.
        self._member.peer_lost(link.node, clip(cause), now_ns=self._now_ns())
        lost = PeerError(
            f"lost: {cause}", rank=view.rank_of(link.node), node=link.node, view=view.view_id, lost=(link.node,)
        )
        communicator.fail(lost)
        self._work()

    def _on_process_gone(self, node: str) -> None:
        """A process of this host has ended without having said so on its link."""
        link = self._link_to(node)
        if link is not None and not link.ended:
            link.close("its process has ended")

    def _on_peer_message(self, link: Link, message: PeerMessage) -> None:
        if isinstance(message, Announce | Farewell):
            self._views.receive(link, message)
        elif isinstance(message, Whereabouts | MeetingOutcome):
            self._neighbours.receive(link, message)
        elif isinstance(message, LanesHere | LaneAt | LanesTaken | LaneShut):
            self._lanes.receive(link, message)
        elif isinstance(message, AskStack | StackTold):
            if self._late is not None:
                communicator = self._views.installed(message.view_id)
                self._late.receive(link, message, None if communicator is None else communicator.view)
        else:
            self._on_lesson(link, message)

    def _take_lesson(self, link: Link, message: LessonMessage | BlockMessage) -> None:
        take_lesson(link, message, self.lessons, self.block_lessons)

    def _emit_lost(self, link: Link) -> None:
        silent = link.error.silent_for if link.error is not None else 0.0
        self.observers.emit("peer_lost", peer=link.node, cause=link.cause, silent_for=round(silent, 3))

    def _on_links_formed(self, view: View, unreachable: tuple[str, ...], why: str) -> None:
        if unreachable:
            self._member.links_failed(view.view_id, unreachable, clip(why), now_ns=self._now_ns())
        else:
            self._member.links_ready(view.view_id, now_ns=self._now_ns())
        self._work()

    def _on_paths_reached(self, number: int) -> None:
        self._member.reached(number)
        self._work()

    # -- membership ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Carry out what the membership core wants, then sleep until it wants something again."""
        while (action := self._member.next_action()) is not None:
            match action:
                case TellCoordinator():
                    self._coordinator.send(action.message)
                case FormLinks():
                    self._views.expect(action.view)
                    self._peers.form(action.view)
                case Activate():
                    self._activate(action.view)
                case Deactivate():
                    self._meter = None
                    if self._views.end(action):
                        self._waiting.wake()
                case Decided():
                    self.steps.decided(action)
                    self._waiting.wake()
                case Refused():
                    self._peers.stop_probing()
                    self._coordinator.stop()
                    self.observers.emit("refused", reason=action.reason)
                    self._waiting.refuse(action.reason)
                case JobOver():
                    self._peers.stop_probing()
                    self._coordinator.stop()
                    self.observers.emit("job_done", step=action.step)
                    self._waiting.end(action)
                case Dismissal():
                    self._peers.stop_probing()
                    self._coordinator.stop()
                    self.observers.emit("dismissed", reason=action.reason)
                    self._waiting.end(action)
                case FreeToLeave():
                    self._waiting.end(action)
                case ProbePaths():
                    self._peers.probe(action, pace=self.config.lost_after / 2)
                case ExpectPeer():
                    self._peers.expect(action)
                case StartOver():
                    self.endpoint.start_over(action.incarnation)
                    self._lanes.start_over(action.incarnation)
                    self._renew_links("starts over as a later process")
                case Held():
                    self._waiting.held(action.cause)
                    self.observers.emit("held", cause=action.cause)
                case Resumed():
                    self._waiting.held("")
                case LedElsewhere():
                    if self._coordinator.led_by(action.leader):
                        self._member.disconnected(f"it stands by, {action.leader} leads", now_ns=self._now_ns())
                case AdoptLostAfter():
                    self._adopt(action.lost_after_ns)
                case Reconnect():
                    self._coordinator.close(action.cause)
        # A timer that is set for an earlier time stays: each step puts the deadline off three times, and to look in
        # vain now and then costs less than to set it each time.
        at = self._member.next_timer()
        if self._meter is not None and (at is None or self._meter.due_ns < at):
            at = self._meter.due_ns
        if at is None or self._waiting.closed or (self._timer is not None and self._timer_ns <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = at
        self._timer = self._loop.call_at(at / 1e9 + 1e-9, self._on_timer)

    def _adopt(self, lost_after_ns: int) -> None:
        """Go on with the coordinator's setting. There is no view now, so no link but the coordinator's is in use."""
        at = Deadlines.of_ns(lost_after_ns)
        self._settings.adopt_lost_after(lost_after_ns)
        self.endpoint.set_deadlines(lost_after_ns=at.lost_ns, connect_ns=at.connect_ns)
        self._lanes.set_deadlines(lost_after_ns=at.lost_ns, connect_ns=at.connect_ns)
        self._renew_links("takes lost_after from the coordinator")

    def _renew_links(self, reason: str) -> None:
        """End all links, which were made with what has changed, and dial the coordinator again."""
        self._detours.coordinator_gone()
        self._coordinator.renew()  # before its link ends, which is no loss
        for link in list(self.endpoint.links.values()):
            link.close(reason)

    def _on_timer(self) -> None:
        self._timer = None
        now_ns = self._now_ns()
        self._member.handle_timer(now_ns=now_ns)
        if self._meter is not None and self._meter.due_ns <= now_ns:
            self._coordinator.send(self._meter.measure(self._seen_links(), now_ns=now_ns))
        self._work()

    def _seen_links(self) -> dict[int, SeenLink]:
        communicator = self._views.communicator
        return {} if communicator is None else communicator.seen_links()

    def _activate(self, view: View) -> None:
        self._settings.heed_vote_timeout(self._member.vote_timeout_ns)
        self._waiting.held("")
        links = self._peers.of_view(view)
        lanes = self._lanes.install(view, list(links.values()), self._neighbours.shared(view))
        self._views.install(view, links, self._neighbours.take(view.view_id), lanes)
        if links:
            rank, now_ns = view.rank_of(self.config.node) or 0, self._now_ns()
            self._meter = LinkMeter(
                view.view_id, rank=rank, world_size=view.world_size, seen=self._seen_links(), now_ns=now_ns
            )
        for rank in sorted(links):
            if links[rank].ended:
                self._on_peer_state(links[rank])
        self._waiting.wake()

    def _on_view_broken(self, view: View, error: QuicollError, ranks: tuple[int, ...]) -> None:
        """The communicator broke from inside: the coordinator has to end the view for everybody."""
        self._member.failed(
            clip(error.message),
            culprit=failed_node(view, error, self.config.node),
            kind=kind_of(error),
            blamed=[view.members[rank].node for rank in ranks],
            now_ns=self._now_ns(),
        )
        self.steps.broke(view.view_id, error.message, self._views.lost)
        self._work()
        self._waiting.wake()
