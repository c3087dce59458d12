"""The coordinator as a service: an endpoint, the membership core, the journal. It carries no tensors.

The core's actions are carried out in order; a Persist is on disk before the next one. When the journal cannot be
written the service ends at once: what it might have announced was announced to nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quicoll.checks import MAX_MEMBERS, MAX_WHOLE, seconds, whole
from quicoll.deadlines import Deadlines
from quicoll.errors import LocalError, PeerError, QuicollError
from quicoll.membership.coordinator.actions import (
    DropLink,
    JobFinished,
    MembershipEvent,
    NodeDismissed,
    NodeJoined,
    NodeLost,
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
)
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.core import CoordinatorCore
from quicoll.membership.journal import Journal
from quicoll.membership.messages import Join, decode, encode
from quicoll.membership.operators import OPERATOR, Operators
from quicoll.observability.events import Observer, Observers, make_directory
from quicoll.observability.transport import forward_to
from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import LinkLost, TransportError
from quicoll_transport.faults.compose import Faults
from quicoll_transport.net.addresses import format_address, parse_address
from quicoll_transport.net.udp import DatagramIO, UdpSocket
from quicoll_transport.security.access import Access, AccessControl
from quicoll_transport.security.identity import COORDINATOR, WORKER
from quicoll_transport.security.policy import Policy

if TYPE_CHECKING:
    from quicoll.membership.journal import RecordStore
    from quicoll_transport.security.credentials import Credentials

__all__ = ["NODE", "CoordinatorService", "serve"]

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
        journal: RecordStore,
        config: CoordinatorConfig,
        transport: EndpointConfig,
        loop: asyncio.AbstractEventLoop,
        incarnation: int,
        observers: Observers,
        wall_clock: Callable[[], datetime] | None = None,
        denied: Sequence[str] = (),
        read_access: Callable[[], Access] | None = None,
        transport_events: bool = False,
    ) -> None:
        """Open the endpoint; the coordinator is at work from here on.

        Args:
            credentials: The coordinator's own.
            io: The network; it belongs to the service from here on.
            journal: What was decided, and where decisions go. It stays its maker's to close.
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
        Raises:
            LocalError: Settings and journal contradict each other.
        """
        self._loop = loop
        self._journal = journal
        self._observers = observers
        self._read_access = read_access
        self._timer: asyncio.TimerHandle | None = None
        self._links: dict[str, Link] = {}
        self._joined: dict[str, int] = {}  # by node, the number of the link on which it joined
        self._drops: dict[Link, asyncio.TimerHandle] = {}  # links that are closed in a moment, and not listened to
        self._failed: asyncio.Future[None] = loop.create_future()
        self._closing = False
        self.faults = Faults(random.Random(incarnation))  # noqa: S311 - faults are for tests, not for keys
        self.core = CoordinatorCore(config, journal.load(), now_ns=self._now_ns())
        policy = Policy(roles=(WORKER, OPERATOR), denied=denied)  # only workers join; see `_on_link`
        self._operators = Operators(self.scale, lambda: self.core.standing(now_ns=self._now_ns()))
        self.endpoint = Endpoint(
            credentials=credentials,
            config=transport,
            io=io,
            loop=loop,
            incarnation=incarnation,
            authorize=policy,
            on_link=self._on_link,
            faults=self.faults,
            observer=forward_to(observers) if transport_events else None,
            wall_clock=wall_clock,
        )
        self._access = AccessControl(self.endpoint, policy, listed=denied)
        observers.emit("listening", address=format_address(self.endpoint.address), seed=self.core.history.seed)
        self._work()

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

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
    def failed(self) -> bool:
        """Whether it cannot go on; `wait_failed` says why."""
        return self._failed.done()

    def scale(self, world_size: int | None, leave: tuple[str, ...] = ()) -> str:
        """Take an operator's request for another number of ranks; it is in the journal when this returns.

        Args:
            world_size: Ranks; None: as many as there are.
            leave: Nodes that shall leave.
        Returns:
            Why nothing changes; "" where it is taken.
        """
        refusal = self.core.scale(world_size, leave, now_ns=self._now_ns())
        self._work()
        return refusal or ("the journal cannot be written" if self.failed else "")

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
        self.core.receive(link.node, message, now_ns=self._now_ns(), incarnation=link.remote_incarnation)
        self._work()

    def _on_state(self, link: Link) -> None:
        if link.ended and (drop := self._drops.pop(link, None)) is not None:
            drop.cancel()
        if link.ended and self._links.get(link.node) is link and not self._closing:
            del self._links[link.node]
            self._joined.pop(link.node, None)
            self.core.member_lost(
                link.node, link.cause, now_ns=self._now_ns(), incarnation=link.remote_incarnation or None
            )
            self._work()

    def _on_timer(self) -> None:
        self._timer = None
        self.core.handle_timer(self._now_ns())
        self._work()

    def _work(self) -> None:
        """Carry out what the core wants, then sleep until it wants something again."""
        if self._closing or self._failed.done():
            return
        while (action := self.core.next_action()) is not None:
            match action:
                case Persist():
                    try:
                        self._journal.append(action.record)
                    except QuicollError as error:
                        log.critical("%s; nothing more can be decided", error)
                        self._failed.set_exception(error)
                        return
                case TellMember():
                    link = self._links.get(action.node)
                    if link is not None and link.remote_incarnation == action.incarnation:
                        with contextlib.suppress(LinkLost):  # its loss is reported by on_state
                            link.send_app(encode(action.message))
                case DropLink():
                    link = self._links.get(action.node)
                    meant = link is not None and action.incarnation in (0, link.remote_incarnation)
                    if link is not None and meant and link not in self._drops:
                        # What it was told before has to arrive first, or it would only come back and ask again.
                        self._drops[link] = self._loop.call_later(_DROP_AFTER_S, link.close, action.reason)
                case Note():
                    self._note(action.event)
        at = self.core.next_timer()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_at(at / 1e9 + 1e-9, self._on_timer)

    def _note(self, event: MembershipEvent) -> None:
        emit = self._observers.emit
        match event:
            case NodeJoined():
                emit("node_joined", peer=event.node, incarnation=event.incarnation)
            case NodeLost():
                emit("peer_lost", peer=event.node, cause=event.cause, left=event.left)
            case NodeDismissed():
                emit("node_dismissed", peer=event.node, cause=event.cause)
            case ScaleAsked():
                emit("scale_asked", world_size=event.world_size, leave=list(event.leave))
            case ViewProposed():
                emit("view_proposed", view=event.view.view_id, nodes=list(event.view.nodes))
            case ViewInstalled():
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


async def serve(
    *,
    listen: str = "127.0.0.1:4433",
    job: str,
    certs: str | Path,
    journal: str | Path,
    world_size: int,
    node: str = NODE,
    seed: int | None = None,
    lost_after: float = 2.0,
    min_world_size: int = 1,
    max_world_size: int | None = None,
    nodes: Sequence[str] = (),
    vote_timeout: float | None = None,
    observer: Observer | None = None,
    transport_events: bool = False,
    qlog: str | Path | None = None,
    deny: str | Path | None = None,
    ready: Callable[[CoordinatorService], None] | None = None,
) -> None:
    """Run a coordinator until cancelled: then its members hear that it was stopped, and the journal is closed.

    Args:
        listen: "host:port", port 0 for a free one (the event "listening" has it).
        job: The job's name, as in the certificates.
        certs: Directory with coordinator-<node>.pem.
        journal: SQLite file, made if missing; a coordinator that is started again goes on from it.
        world_size: Ranks that the first view waits for.
        node: The coordinator's name in its certificate.
        seed: The job's; None takes the journal's or a random one.
        lost_after: Seconds of silence after which a member is lost. Ranks that do not set it take this one.
        min_world_size: Least ranks of every view.
        max_world_size: Most ranks of every view; further nodes stand by. None: as many as there may be.
        nodes: Who may join: names, or patterns with * and ?. Empty lets in every node with a certificate of the job.
        vote_timeout: Seconds from the first vote for a step to the last. Ranks that set a longer `timeout`, or a
            `hold_timeout` that is not longer, are refused. None takes 300, and refuses nobody.
        observer: Gets every event, on the running loop.
        transport_events: Whether the transport's own events are told as well.
        qlog: Directory for a qlog trace of each connection.
        deny: File of SHA-256 fingerprints of certificates that may not come in.
        ready: Called with the service once it listens; `reload` is there for a signal handler.
    Raises:
        LocalError: Settings, certificates, the deny list or the address cannot work.
        JournalError: The journal cannot be read or written.
    """
    seed = None if seed is None else whole(seed, "seed")
    config = coordinator_config(
        whole(world_size, "world_size"),
        seconds(lost_after, "lost_after"),
        seed,
        min_world_size=whole(min_world_size, "min_world_size"),
        max_world_size=None if max_world_size is None else whole(max_world_size, "max_world_size"),
        nodes=nodes,
        vote_timeout=None if vote_timeout is None else seconds(vote_timeout, "vote_timeout"),
    )
    if qlog is not None:
        make_directory(qlog, "qlog")
    loop = asyncio.get_running_loop()
    observers = Observers(node, lambda: round(loop.time() * 1e9), observer)
    read_access = partial(Access.read, certs, role=COORDINATOR, node=node, deny=deny)
    try:
        access = read_access()
        if access.credentials.identity.job != job:
            raise LocalError(f"the certificate is for job {access.credentials.identity.job!r}, not {job!r}")
        host, port = parse_address(listen)
        io = UdpSocket(host, port, loop=loop)
    except TransportError as error:
        raise LocalError(str(error)) from error
    try:
        store = Journal.open(journal, job=job)
    except BaseException:
        io.close()
        raise
    try:
        if seed is None and store.load().seed is None:
            config = replace(config, seed=int.from_bytes(os.urandom(8), "big") >> 1)
        service = CoordinatorService(
            credentials=access.credentials,
            io=io,
            journal=store,
            config=config,
            transport=EndpointConfig(lost_after_ns=Deadlines.of(lost_after).lost_ns, qlog_directory=qlog),
            loop=loop,
            incarnation=1 + (int.from_bytes(os.urandom(8), "big") >> 1) % MAX_WHOLE,
            observers=observers,
            denied=access.denied,
            read_access=read_access,
            transport_events=transport_events,
        )
    except BaseException:
        io.close()
        store.close()
        raise
    reason = "stopped"
    try:
        if ready is not None:
            ready(service)
        await service.wait_failed()
    except QuicollError:
        reason = "cannot go on"
        raise
    finally:
        await service.aclose(reason)
        store.close()


def coordinator_config(
    world_size: int,
    lost_after: float,
    seed: int | None,
    *,
    min_world_size: int = 1,
    max_world_size: int | None = None,
    nodes: Sequence[str] = (),
    vote_timeout: float | None = None,
) -> CoordinatorConfig:
    """Return the core's settings with the deadlines that follow from `lost_after`.

    Args:
        world_size: Ranks that the first view waits for.
        lost_after: Seconds of silence after which a member is lost.
        seed: The job's; None takes the journal's.
        min_world_size: As in `serve`.
        max_world_size: As in `serve`.
        nodes: As in `serve`.
        vote_timeout: As in `serve`.
    Raises:
        LocalError: They contradict each other.
    """
    at = Deadlines.of(lost_after)
    return CoordinatorConfig(
        world_size=world_size,
        min_world_size=min_world_size,
        max_world_size=MAX_MEMBERS if max_world_size is None else max_world_size,
        nodes=tuple(nodes),
        seed=seed,
        lost_after_ns=at.lost_ns,
        propose_timeout_ns=at.propose_ns,
        gather_ns=at.gather_ns,
        settle_ns=at.settle_ns,
        vote_timeout_ns=at.vote_ns if vote_timeout is None else round(vote_timeout * 1e9),
        insists_on_vote_timeout=vote_timeout is not None,
        retry_min_ns=at.retry_ns,
    )
