"""The coordinator as a service: an endpoint, the membership core, the journal. It carries no tensors.

    standing by   there is no core yet: a Join is answered with who leads, as far as that is known, and kept
    leading       from `lead` on: the Joins that were kept are the core's first messages
    ended         by `aclose`, or because the journal cannot be written

The core's actions are carried out in order; a Persist is on disk before the next one, and what is right only as long as
nobody else has appended to the journal is told when the journal has said so. When it cannot be written or asked, the
service ends at once: what it might have announced was announced to nobody. Where the journal is called on a thread of
its own, messages and time go on coming in meanwhile; what follows from them waits its turn. To members that is a
coordinator far away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from quicoll.checks import MAX_MEMBERS
from quicoll.deadlines import Deadlines
from quicoll.errors import LocalError, PeerError, QuicollError
from quicoll.membership.coordinator.actions import (
    CoordinatorAction,
    DropLink,
    JobFinished,
    MembershipEvent,
    NodeDismissed,
    NodeJoined,
    NodeLost,
    NodesForgotten,
    Note,
    Persist,
    ScaleAsked,
    StepCommitted,
    StepRejected,
    TellMember,
    ViewAborted,
    ViewInstalled,
    ViewProposed,
    ViewWithheld,
    rests_on_journal,
)
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.core import CoordinatorCore
from quicoll.membership.coordinator.lease import Following
from quicoll.membership.messages import MAX_TEXT, AskRelay, Join, Standby, decode, encode
from quicoll.membership.operators import OPERATOR, Operators
from quicoll.membership.relaying import NO_RELAY, RelayDesk
from quicoll.observability.transport import forward_to
from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import LinkLost, TransportError
from quicoll_transport.faults.compose import Faults
from quicoll_transport.net.addresses import format_address, parse_address
from quicoll_transport.relay.table import RelayLimits
from quicoll_transport.security.access import Access, AccessControl
from quicoll_transport.security.identity import WORKER
from quicoll_transport.security.policy import Policy

if TYPE_CHECKING:
    from quicoll.membership.coordinator.scaling import Standing
    from quicoll.membership.journal import RecordStore
    from quicoll.membership.messages import FromRelay
    from quicoll.observability.events import Observers
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.security.credentials import Credentials

__all__ = ["NODE", "CoordinatorService", "coordinator_config"]

log = logging.getLogger("quicoll.coordinator")

_DROP_AFTER_S = 1.0

NODE = "coordinator"  # its node name in the certificate, unless another is given


class CoordinatorService:
    """One coordinator on the running loop: `wait_failed` waits for its end by an error, `aclose` ends it."""

    def __init__(
        self,
        *,
        credentials: Credentials,
        io: DatagramIO,
        journal: RecordStore | None,
        config: CoordinatorConfig,
        transport: EndpointConfig,
        loop: asyncio.AbstractEventLoop,
        incarnation: int,
        observers: Observers,
        wall_clock: Callable[[], datetime] | None = None,
        denied: Sequence[str] = (),
        read_access: Callable[[], Access] | None = None,
        transport_events: bool = False,
        relay_limits: RelayLimits | None = None,
    ) -> None:
        """Open the endpoint; the coordinator is at work from here on, or stands by.

        Args:
            credentials: The coordinator's own.
            io: The network; it belongs to the service from here on.
            journal: What was decided, and where decisions go. It stays its maker's to close. None where it is another
                coordinator's: this one stands by until `lead`.
            config: The core's settings.
            transport: The endpoint's settings.
            loop: The running loop.
            incarnation: Positive, another one than any earlier process of this coordinator had: members dial it, and
                one that does not know their link ends it, so there is no order. It also seeds the chance of `faults`.
            observers: Get every event.
            wall_clock: The date that certificates are checked against, aware; None takes the system's.
            denied: Fingerprints of certificates that may not come in.
            read_access: Reads credentials and deny list anew, for `reload`; None where they are no files.
            transport_events: Whether the transport's own events are told as well.
            relay_limits: Bounds of what is passed on between members, where this coordinator is their relay; None
                takes the defaults.
        Raises:
            LocalError: Settings and journal contradict each other.
        """
        self._loop = loop
        self._journal = journal
        self._executor: Executor | None = None  # where the journal is called; None calls it here
        self._writing: asyncio.Future[None] | None = None  # the call under way there
        self._config = config
        self._core: CoordinatorCore | None = None
        self._leader = ""
        self._kept: dict[str, tuple[Link, Join]] = {}  # standing by: who has joined, by node
        self._stayed: dict[str, None] = {}  # those that were here when `following` was asked last
        self._led_view = False  # since `following` was asked last
        self._observers = observers
        self._read_access = read_access
        self._timer: asyncio.TimerHandle | None = None
        self._links: dict[str, Link] = {}
        self._joined: dict[str, int] = {}  # by node, the number of the link on which it joined
        self._answers: list[Callable[[], None]] = []  # to operators, until what they say is in the journal
        self._drops: dict[Link, asyncio.TimerHandle] = {}  # links that are closed in a moment, and not listened to
        self._failed: asyncio.Future[None] = loop.create_future()
        self._closing = False
        self.faults = Faults(random.Random(incarnation))  # noqa: S311 - faults are for tests, not for keys
        if journal is not None:
            self._core = CoordinatorCore(config, journal.load(), now_ns=self._now_ns())
        policy = Policy(roles=(WORKER, OPERATOR), denied=denied)  # only workers join; see `_on_link`
        self.desk = RelayDesk(io, RelayLimits() if relay_limits is None else relay_limits, loop=loop)
        self._operators = Operators(self.scale, self._standing, self._when_durable)
        self.endpoint = Endpoint(
            credentials=credentials,
            config=transport,
            io=self.desk.io,
            loop=loop,
            incarnation=incarnation,
            authorize=policy,
            on_link=self._on_link,
            faults=self.faults,
            observer=forward_to(observers) if transport_events else None,
            wall_clock=wall_clock,
        )
        self._access = AccessControl(self.endpoint, policy, listed=denied)
        observers.emit("listening", address=self.address, seed=None if self._core is None else self._core.history.seed)
        self._work()

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    @property
    def core(self) -> CoordinatorCore:
        """What decides. Raises LocalError while another coordinator leads."""
        if self._core is None:
            raise LocalError("this coordinator stands by: it decides nothing")
        return self._core

    def stand_by(self, leader: str) -> None:
        """Take in who leads, and tell it to all who have joined here. leader: its address, "" where it is not known."""
        self._leader = leader
        for link, _ in self._kept.values():
            self._send(link, Standby(leader=leader[:MAX_TEXT]))

    def following(self) -> Following:
        """Return which nodes are here, and whether there was a view of them since this was asked last.

        Where it stands by, those count that were here then, too, and were told who leads.
        """
        if self._core is None:
            stayed = sum(node in self._stayed for node in self._kept)
            self._stayed = dict.fromkeys(self._kept)
            return Following(stayed)
        led, self._led_view = self._led_view or self._core.view is not None, False
        return Following(len(self._joined), at_work=led)

    def lead(self, journal: RecordStore, executor: Executor | None, config: CoordinatorConfig) -> None:
        """Decide from here on; those who have joined are waiting.

        Args:
            journal: What was decided, and where decisions go. It stays its maker's to close.
            executor: Where to call it; one thread. None calls it on the loop.
            config: The core's settings.
        Raises:
            LocalError: Settings and journal contradict each other.
        """
        self._core = CoordinatorCore(config, journal.load(), now_ns=self._now_ns())
        self._journal, self._executor, self._config = journal, executor, config
        kept, self._kept = self._kept, {}
        for node in sorted(kept):
            link, join = kept[node]
            self._look_at(self._core, link)
            self._core.receive(node, join, now_ns=self._now_ns(), incarnation=link.remote_incarnation)
        self._work()

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return format_address(self.endpoint.address)

    async def wait_failed(self) -> None:
        """Wait for ever, or until the service cannot go on.

        Raises:
            QuicollError: Why it cannot; mostly JournalError.
        """
        await asyncio.shield(self._failed)

    @property
    def leads(self) -> bool:
        """Whether it decides; else it stands by."""
        return self._core is not None

    @property
    def failed(self) -> bool:
        """Whether it cannot go on; `wait_failed` says why."""
        return self._failed.done()

    def scale(self, world_size: int | None, leave: tuple[str, ...] = ()) -> str:
        """Take an operator's request for another number of ranks.

        Where the journal is called on this thread it is there when this returns, else later (`Operators`).

        Args:
            world_size: Ranks; None: as many as there are.
            leave: Nodes that shall leave.
        Returns:
            Why nothing changes; "" where it is taken.
        Raises:
            LocalError: Another coordinator leads.
        """
        refusal = self.core.scale(world_size, leave, now_ns=self._now_ns())
        self._work()
        return refusal or ("the journal cannot be written" if self.failed else "")

    def _standing(self) -> Standing | None:
        return None if self._core is None else self._core.standing(now_ns=self._now_ns())

    def _when_durable(self, answer: Callable[[], None]) -> None:
        """Call `answer` when all that is decided by now is in the journal, and that is still ours. Else never."""
        self._answers.append(answer)
        self._work()

    def reload(self) -> None:
        """Read certificates and deny list anew, and use them: for new handshakes, and for links of who is denied now.

        Raises:
            LocalError: The files cannot be used, or are another identity's. The service goes on with what it has.
        """
        if self._read_access is None:
            raise LocalError("the coordinator's certificates are not files that could be read anew")
        try:
            access = self._read_access()
            denied = self._access.renew(access)
        except TransportError as error:
            raise LocalError(str(error)) from error
        self._observers.emit("certificates_rotated", fingerprint=access.credentials.fingerprint)
        for fingerprint in denied:
            self._observers.emit("certificate_denied", fingerprint=fingerprint)

    async def aclose(self, reason: str = "stopped") -> None:
        """End it; members see their links end.

        Args:
            reason: Why; they hear it.
        """
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for drop in self._drops.values():
            drop.cancel()
        await self.endpoint.aclose(reason=reason)
        if self._writing is not None:
            await asyncio.wait({self._writing})  # it ends by itself; the journal can be closed then
        self._failed.cancel()
        self._observers.close()

    def _on_link(self, link: Link) -> None:
        if link.identity.role == OPERATOR:  # it has no part in the membership, and may have a worker's name
            self._operators.listen(link)
            return
        self._links[link.node] = link
        link.listen(self._on_app, self._on_state)

    def _on_app(self, link: Link, data: bytes) -> None:
        if link in self._drops:
            return
        try:
            message = decode(data, sender="member", node=link.node)
        except PeerError as error:
            log.warning("%s", error)
            link.close("malformed message")
            return
        if isinstance(message, Join):
            if self._joined.get(link.node) == link.number:
                log.warning("%s joined twice over one link", link.node)
                link.close("joined twice")
                return
            self._joined[link.node] = link.number
        if isinstance(message, AskRelay):
            if self._core is not None and not self._config.relay and self._joined.get(link.node) == link.number:
                self._send(link, self.desk.ask(link, message))
            return
        if self._core is None:
            if isinstance(message, Join):
                self._kept[link.node] = (link, message)
                self._send(link, Standby(leader=self._leader[:MAX_TEXT]))
            return
        self._look_at(self._core, link)
        self._core.receive(link.node, message, now_ns=self._now_ns(), incarnation=link.remote_incarnation)
        self._work()

    @staticmethod
    def _look_at(core: CoordinatorCore, link: Link) -> None:
        """Tell the core where a node is: its address translator may have given it another address by now."""
        address = link.proved_address
        if address is not None and not any(address[2:]):  # a zone means something on this host alone
            core.saw(link.node, (str(address[0]), int(address[1])))

    def _on_state(self, link: Link) -> None:
        if link.ended:
            self.desk.ended(link)
        if link.ended and (drop := self._drops.pop(link, None)) is not None:
            drop.cancel()
        if link.ended and self._links.get(link.node) is link and not self._closing:
            del self._links[link.node]
            self._joined.pop(link.node, None)
            self._kept.pop(link.node, None)
            if self._core is not None:
                self._core.member_lost(
                    link.node, link.cause, now_ns=self._now_ns(), incarnation=link.remote_incarnation or None
                )
                self._work()

    def _on_timer(self) -> None:
        self._timer = None
        self.core.handle_timer(self._now_ns())
        self._work()

    def _work(self) -> None:
        """Carry out what the core wants, then sleep until it wants something again."""
        core = self._core
        if self._closing or self._failed.done() or core is None:
            return
        while self._writing is None and (work := self._next_work(core)) is not None:
            call, then = work
            if call is None:
                then()
            elif self._executor is None:
                try:
                    call()
                except QuicollError as error:
                    self._fail(error)
                    return
                then()
            else:
                self._writing = self._loop.run_in_executor(self._executor, call)
                self._writing.add_done_callback(partial(self._written, then))
        at = core.next_timer()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_at(at / 1e9 + 1e-9, self._on_timer)

    def _next_work(self, core: CoordinatorCore) -> tuple[Callable[[], None] | None, Callable[[], None]] | None:
        """Return what to ask of the journal, if anything, and what to do then; None where there is nothing to do."""
        action = core.next_action()
        if action is not None:
            return self._journal_call(action), partial(self._carry_out, action)
        if not self._answers:
            return None
        answers, self._answers = self._answers, []
        return None if self._journal is None else self._journal.confirm, partial(_call_all, answers)

    def _journal_call(self, action: CoordinatorAction) -> Callable[[], None] | None:
        """Return what has to be asked of the journal before the action is carried out; None where nothing has."""
        journal = self._journal
        if journal is None:
            return None
        if isinstance(action, Persist):
            return partial(journal.append, action.record)
        return journal.confirm if rests_on_journal(action) else None

    def _written(self, then: Callable[[], None], call: asyncio.Future[None]) -> None:
        """Go on after a call of the journal on its thread."""
        self._writing = None
        error = call.exception()
        if error is not None:
            self._fail(error)
        elif not self._closing:
            then()
            self._work()

    def _fail(self, error: BaseException) -> None:
        log.critical("%s; nothing more can be decided", error)
        if not self._failed.done():
            self._failed.set_exception(error)

    def _carry_out(self, action: CoordinatorAction) -> None:
        """Do what the action says outside of the journal."""
        match action:
            case TellMember():
                link = self._links.get(action.node)
                if link is not None and link.remote_incarnation == action.incarnation:
                    self._send(link, action.message)
            case DropLink():
                link = self._links.get(action.node)
                meant = link is not None and action.incarnation in (0, link.remote_incarnation)
                if link is not None and meant and link not in self._drops:
                    # What it was told before has to arrive first, or it would only come back and ask again.
                    self._drops[link] = self._loop.call_later(_DROP_AFTER_S, link.close, action.reason)
            case Note():
                self._note(action.event)

    def _send(self, link: Link, message: FromRelay) -> None:
        with contextlib.suppress(LinkLost):  # its loss is reported by on_state
            link.send_app(encode(message))

    def _note(self, event: MembershipEvent) -> None:
        emit = self._observers.emit
        match event:
            case NodeJoined():
                emit("node_joined", peer=event.node, incarnation=event.incarnation)
            case NodeLost():
                emit("peer_lost", peer=event.node, cause=event.cause, left=event.left)
            case NodesForgotten():
                emit("nodes_forgotten", nodes=list(event.nodes))
            case NodeDismissed():
                emit("node_dismissed", peer=event.node, cause=event.cause)
            case ScaleAsked():
                emit("scale_asked", world_size=event.world_size, leave=list(event.leave))
            case ViewProposed():
                emit("view_proposed", view=event.view.view_id, nodes=list(event.view.nodes))
            case ViewInstalled():
                self._led_view = True
                emit(
                    "view_installed",
                    view=event.view.view_id,
                    world_size=event.view.world_size,
                    nodes=list(event.view.nodes),
                )
            case ViewAborted():
                emit("view_ended", view=event.view_id, cause=event.cause, lost=list(event.lost))
            case StepCommitted():
                emit("step_committed", step=event.step, view=event.view_id)
            case StepRejected():
                emit("step_aborted", step=event.step, view=event.view_id, cause=event.cause, lost=list(event.lost))
            case ViewWithheld():
                emit("held", cause=event.cause)
            case JobFinished():
                emit("job_done", step=event.step, nodes=list(event.nodes))


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def coordinator_config(
    world_size: int,
    lost_after: float,
    seed: int | None,
    *,
    min_world_size: int = 1,
    max_world_size: int | None = None,
    warm_spares: int = 0,
    nodes: Sequence[str] = (),
    forget: Sequence[str] = (),
    vote_timeout: float | None = None,
    relay: str = "",
) -> CoordinatorConfig:
    """Return the core's settings with the deadlines that follow from `lost_after`.

    Args:
        world_size: Ranks that the first view waits for.
        lost_after: Seconds of silence after which a member is lost.
        seed: The job's; None takes the journal's.
        min_world_size: As in `serve`.
        max_world_size: As in `serve`.
        warm_spares: As in `serve`.
        nodes: As in `serve`.
        forget: As in `serve`.
        vote_timeout: As in `serve`.
        relay: As in `serve`.
    Raises:
        LocalError: They contradict each other, or the relay's address is none.
    """
    try:
        if relay not in ("", NO_RELAY):
            parse_address(relay)
    except TransportError as error:
        raise LocalError(f"the relay's address: {error}") from error
    at = Deadlines.of(lost_after)
    return CoordinatorConfig(
        world_size=world_size,
        min_world_size=min_world_size,
        max_world_size=MAX_MEMBERS if max_world_size is None else max_world_size,
        warm_spares=warm_spares,
        nodes=tuple(nodes),
        forget=tuple(forget),
        forget_after_ns=at.rejoin_ns,
        seed=seed,
        lost_after_ns=at.lost_ns,
        propose_timeout_ns=at.propose_ns,
        gather_ns=at.gather_ns,
        settle_ns=at.settle_ns,
        vote_timeout_ns=at.vote_ns if vote_timeout is None else round(vote_timeout * 1e9),
        insists_on_vote_timeout=vote_timeout is not None,
        retry_min_ns=at.retry_ns,
        relay=relay,
    )
