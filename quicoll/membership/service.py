"""The coordinator as a service: an endpoint, the links of its nodes, and a term while it leads. It carries no tensors.

    standing by   there is no term: a Join is answered with who leads, as far as that is known, and kept
    leading       from `lead` on: the Joins that were kept are the term's first messages
    standing by   again, from `step_down` on: the term is over, all links are closed with a sentence that says who leads
                  now, and who comes back is one that waits here
    ended         by `aclose`

What a leadership is, and what is left of it when it is over (nothing), the head of term.py says. What a service has in
all its states: its address, its endpoint and incarnation, who may come in. Everything else that it knows of nodes goes
with their links, and these end with the term.

Invariants: a node's messages go to the term that has taken its Join, over the link on which that came. Nothing that
comes over a link of an earlier term goes to a later one: all are closed in between, and who says something over a link
that is closed is not listened to. A link that is to be closed in a moment (`DropLink`) is closed with the others.

Failure cases: the journal cannot be written or asked (the term fails, nothing more is told; `wait_failed` says why, and
whoever runs the service ends it, or has it stand by again); a node joins while it steps down (it is answered as by any
that stands by); an operator waits for an answer then (its link ends, and it asks the others).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from datetime import datetime
from typing import TYPE_CHECKING

from quicoll.checks import MAX_MEMBERS
from quicoll.deadlines import Deadlines
from quicoll.errors import LocalError, PeerError
from quicoll.membership.coordinator.actions import CoordinatorAction, DropLink, Note, TellMember
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.lease import Following
from quicoll.membership.messages import MAX_TEXT, AskRelay, Join, Standby, decode, encode
from quicoll.membership.notes import emit_note
from quicoll.membership.operators import OPERATOR, READER, Operators, StandsBy, encode_operation
from quicoll.membership.relaying import NO_RELAY, RelayDesk
from quicoll.membership.reports import report_of
from quicoll.membership.status import fitting
from quicoll.membership.term import Term
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
    from quicoll.membership.coordinator.core import CoordinatorCore
    from quicoll.membership.coordinator.scaling import Standing
    from quicoll.membership.journal import RecordStore
    from quicoll.membership.messages import FromRelay
    from quicoll.observability.events import Observers
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.security.credentials import Credentials

__all__ = ["CoordinatorService", "coordinator_config"]

log = logging.getLogger("quicoll.coordinator")

_DROP_AFTER_S = 1.0


class CoordinatorService:
    """One coordinator on the running loop: `wait_failed` waits for the end of its leadership, `aclose` ends it."""

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
        self._config = config
        self._term: Term | None = None  # while it leads
        self._token = 0  # of the lease by which it leads; 0: alone, or not at all
        self._leader = ""
        self._kept: dict[str, tuple[Link, Join]] = {}  # standing by: who has joined, by node
        self._stayed: dict[str, None] = {}  # those that were here when `following` was asked last
        self._observers = observers
        self._read_access = read_access
        self._links: dict[str, Link] = {}
        self._joined: dict[str, int] = {}  # by node, the number of the link on which it joined
        self._drops: dict[Link, asyncio.TimerHandle] = {}  # links that are closed in a moment, and not listened to
        self._closing = False
        self.faults = Faults(random.Random(incarnation))  # noqa: S311 - faults are for tests, not for keys
        if journal is not None:
            self._term = self._new_term(config, journal, None)
        policy = Policy(roles=(WORKER, OPERATOR, READER), denied=denied)  # only workers join; see `_on_link`
        self.desk = RelayDesk(io, RelayLimits() if relay_limits is None else relay_limits, loop=loop)
        self._operators = Operators(self.scale, self._standing, self._when_durable, self._look, self._now_ns)
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
        seed = None if self._term is None else self._term.core.history.seed
        observers.emit("listening", address=self.address, seed=seed)
        if self._term is not None:
            self._term.work()

    def _new_term(self, config: CoordinatorConfig, journal: RecordStore, executor: Executor | None) -> Term:
        return Term(config, journal, loop=self._loop, executor=executor, carry_out=self._carry_out)

    @property
    def core(self) -> CoordinatorCore:
        """What decides. Raises LocalError while another coordinator leads."""
        return self._leading.core

    @property
    def _leading(self) -> Term:
        if self._term is None:
            raise LocalError("this coordinator stands by: it decides nothing")
        return self._term

    def stand_by(self, leader: str) -> None:
        """Take in who leads, and tell it to all who have joined here. leader: its address, "" where it is not known."""
        self._leader = leader
        self._operators.forget()
        for link, _ in self._kept.values():
            self._send(link, Standby(leader=leader[:MAX_TEXT]))

    def following(self) -> Following:
        """Return which nodes are here, and whether there was a view of them since this was asked last.

        Where it stands by, those count that were here then, too, and were told who leads.
        """
        if self._term is None:
            stayed = sum(node in self._stayed for node in self._kept)
            self._stayed = dict.fromkeys(self._kept)
            return Following(stayed)
        return Following(len(self._joined), at_work=self._term.at_work())

    def lead(
        self, journal: RecordStore, executor: Executor | None, config: CoordinatorConfig, *, token: int = 0
    ) -> None:
        """Decide from here on; those who have joined are waiting.

        Args:
            journal: What was decided, and where decisions go. It stays its maker's to close.
            executor: Where to call it; one thread. None calls it on the loop.
            config: The core's settings.
            token: Of the lease, for who looks at the job.
        Raises:
            LocalError: Settings and journal contradict each other.
        """
        self._term = term = self._new_term(config, journal, executor)
        self._config, self._token = config, token
        self._operators.forget()
        kept, self._kept = self._kept, {}
        for node in sorted(kept):
            link, join = kept[node]
            self._look_at(term, link)
            term.core.receive(node, join, now_ns=term.now_ns(), incarnation=link.remote_incarnation)
        term.work()

    def step_down(self, cause: str, leader: str) -> None:
        """Decide nothing more, and stand by: the term is over, and so are all links.

        Args:
            cause: Why, for people.
            leader: The address of who leads now, "" where it is not known.
        Raises:
            LocalError: It does not lead.
        """
        self._leading.end()
        self._term, self._leader, self._token = None, leader, 0
        self._operators.forget()
        self._observers.emit("stands_by", cause=cause, leader=leader)
        for drop in self._drops.values():
            drop.cancel()
        self._drops.clear()
        where = f"{leader} leads" if leader else "it does not know who does"
        for link in list(self.endpoint.links.values()):  # of operators, too
            link.close(f"this coordinator does not lead any more: {where}")
        for known in (self._links, self._joined, self._kept, self._stayed):
            known.clear()

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return format_address(self.endpoint.address)

    async def wait_failed(self) -> None:
        """Wait for ever, or until it cannot lead any longer.

        Raises:
            LocalError: It does not lead.
            QuicollError: Why it cannot; mostly JournalError.
        """
        await self._leading.wait_failed()

    @property
    def leads(self) -> bool:
        """Whether it decides; else it stands by."""
        return self._term is not None

    @property
    def failed(self) -> bool:
        """Whether it leads and cannot go on; `wait_failed` says why."""
        return self._term is not None and self._term.failed

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
        term = self._leading
        refusal = term.core.scale(world_size, leave, now_ns=term.now_ns())
        term.work()
        return refusal or ("the journal cannot be written" if term.failed else "")

    def _standing(self) -> Standing | None:
        return None if self._term is None else self._term.core.standing(now_ns=self._term.now_ns())

    def _when_durable(self, answer: Callable[[], None]) -> None:
        self._leading.when_durable(answer)

    def _look(self, links: bool = False) -> bytes:
        """Return what somebody who looks is told; see operators.py."""
        if self._term is None:
            return encode_operation(StandsBy(leader=self._leader[:MAX_TEXT]))
        return fitting(report_of(self._term, self._joined_link, token=self._token, links=links))

    def _joined_link(self, node: str) -> Link | None:
        link = self._links.get(node)
        return link if link is not None and self._joined.get(node) == link.number else None

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

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
        if self._term is not None:
            self._term.end()
        for drop in self._drops.values():
            drop.cancel()
        await self.endpoint.aclose(reason=reason)
        if self._term is not None:
            await self._term.settled()  # the journal can be closed then
        self._observers.close()

    def _on_link(self, link: Link) -> None:
        if link.identity.role in (OPERATOR, READER):  # it has no part in the membership, and may have a worker's name
            self._operators.listen(link)
            return
        self._links[link.node] = link
        link.listen(self._on_app, self._on_state)

    def _on_app(self, link: Link, data: bytes) -> None:
        node, term = link.node, self._term
        if link in self._drops or self._links.get(node) is not link:
            return
        try:
            message = decode(data, sender="member", node=node)
        except PeerError as error:
            log.warning("%s", error)
            link.close("malformed message")
            return
        if isinstance(message, Join):
            if self._joined.get(node) == link.number:
                log.warning("%s joined twice over one link", node)
                link.close("joined twice")
                return
            self._joined[node] = link.number
        if isinstance(message, AskRelay):
            if term is not None and not self._config.relay and self._joined.get(node) == link.number:
                self._send(link, self.desk.ask(link, message))
            return
        if term is None:
            if isinstance(message, Join):
                self._kept[node] = (link, message)
                self._send(link, Standby(leader=self._leader[:MAX_TEXT]))
            return
        if isinstance(message, Join):
            self._look_at(term, link)
        term.receive(node, message, incarnation=link.remote_incarnation)

    @staticmethod
    def _look_at(term: Term, link: Link) -> None:
        """Tell the core where a node is: its address translator may have given it another address by now.

        Called when it joins, and whenever its link says that something has changed. A node that waits says nothing, so
        its messages would tell too late.
        """
        address = link.proved_address
        if address is not None and not any(address[2:]):  # a zone means something on this host alone
            term.saw(link.node, (str(address[0]), int(address[1])))

    def _on_state(self, link: Link) -> None:
        if self._term is not None and self._joined.get(link.node) == link.number and not link.ended:
            self._look_at(self._term, link)
        if link.ended:
            self.desk.ended(link)
        if link.ended and (drop := self._drops.pop(link, None)) is not None:
            drop.cancel()
        if link.ended and self._links.get(link.node) is link and not self._closing:
            del self._links[link.node]
            self._joined.pop(link.node, None)
            self._kept.pop(link.node, None)
            if self._term is not None:
                self._term.member_lost(link.node, link.cause, incarnation=link.remote_incarnation or None)

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
                emit_note(action.event, self._observers)

    def _send(self, link: Link, message: FromRelay) -> None:
        try:
            link.send_app(encode(message))
        except LinkLost:  # its loss is reported by on_state
            return


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
