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
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from quicoll.checks import seconds, whole
from quicoll.deadlines import Deadlines
from quicoll.errors import LocalError, PeerError, QuicollError
from quicoll.membership.coordinator.actions import (
    DropLink,
    MembershipEvent,
    NodeJoined,
    NodeLost,
    Note,
    Persist,
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
from quicoll.membership.coordinator.journal import Journal
from quicoll.membership.messages import decode, encode
from quicoll.observability.events import Observer, Observers
from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import LinkLost, TransportError
from quicoll_transport.faults.compose import Faults
from quicoll_transport.net.addresses import format_address, parse_address
from quicoll_transport.net.udp import DatagramIO, UdpSocket
from quicoll_transport.security.identity import COORDINATOR, WORKER, Credentials, Identity

if TYPE_CHECKING:
    from quicoll.membership.coordinator.journal import RecordStore

__all__ = ["NODE", "CoordinatorService", "serve"]

log = logging.getLogger("quicoll.membership.coordinator.service")

_DROP_AFTER_S = 1.0

NODE = "coordinator"  # its node name in the certificate, unless another is given


class CoordinatorService:
    """One coordinator on the running loop. Made by `open`; `wait_failed` ends with its reason, `aclose` ends it."""

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
    ) -> None:
        self._loop = loop
        self._journal = journal
        self._observers = observers
        self._timer: asyncio.TimerHandle | None = None
        self._links: dict[str, Link] = {}
        self._failed: asyncio.Future[None] = loop.create_future()
        self._closing = False
        self.faults = Faults(random.Random(incarnation))  # noqa: S311 - faults are for tests, not for keys
        self.core = CoordinatorCore(config, journal.load(), now_ns=self._now_ns())
        self.endpoint = Endpoint(
            credentials=credentials,
            config=transport,
            io=io,
            loop=loop,
            incarnation=incarnation,
            authorize=self._authorize,
            on_link=self._on_link,
            faults=self.faults,
            wall_clock=wall_clock,
        )
        observers.emit("listening", address=format_address(self.endpoint.address))
        self._work()

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    @property
    def address(self) -> str:
        return format_address(self.endpoint.address)

    async def wait_failed(self) -> None:
        """Returns never, but raises what made the service unable to go on."""
        await asyncio.shield(self._failed)

    async def aclose(self) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        await self.endpoint.aclose()
        self._failed.cancel()
        self._observers.close()

    def _authorize(self, identity: Identity) -> str | None:
        return None if identity.role == WORKER else f"{identity} is no worker; only workers join"

    def _on_link(self, link: Link) -> None:
        self._links[link.node] = link
        link.listen(self._on_app, self._on_state)

    def _on_app(self, link: Link, data: bytes) -> None:
        try:
            message = decode(data, sender="member", node=link.node)
        except PeerError as error:
            log.warning("%s", error)
            link.close("malformed message")
            return
        self.core.receive(link.node, message, now_ns=self._now_ns(), incarnation=link.remote_incarnation)
        self._work()

    def _on_state(self, link: Link) -> None:
        if link.ended and self._links.get(link.node) is link and not self._closing:
            del self._links[link.node]
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
                    if link is not None and action.incarnation in (0, link.remote_incarnation):
                        # What it was told before has to arrive first, or it would only come back and ask again.
                        self._loop.call_later(_DROP_AFTER_S, link.close, action.reason)
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
    observer: Observer | None = None,
) -> None:
    """Run a coordinator until cancelled.

    listen: "host:port", port 0 for a free one (the event "listening" tells). certs: directory with
    coordinator-<node>.pem. journal: SQLite file, made if missing; a restarted coordinator goes on from it.
    world_size: ranks that the first view waits for. seed: the job's; None takes the journal's or a random one.
    lost_after: seconds of silence after which a member is lost.
    Raises LocalError for settings, certificates or an address that cannot work, JournalError for the journal.
    """
    seed = None if seed is None else whole(seed, "seed")
    config = coordinator_config(whole(world_size, "world_size"), seconds(lost_after, "lost_after"), seed)
    loop = asyncio.get_running_loop()
    observers = Observers(node, lambda: round(loop.time() * 1e9), observer)
    try:
        credentials = Credentials.from_directory(certs, role=COORDINATOR, node=node)
        if credentials.identity.job != job:
            raise LocalError(f"the certificate is for job {credentials.identity.job!r}, not {job!r}")
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
            credentials=credentials,
            io=io,
            journal=store,
            config=config,
            transport=EndpointConfig(lost_after_ns=Deadlines.of(lost_after).lost_ns),
            loop=loop,
            incarnation=time.time_ns(),
            observers=observers,
        )
    except BaseException:
        io.close()
        store.close()
        raise
    try:
        await service.wait_failed()
    finally:
        await service.aclose()
        store.close()


def coordinator_config(world_size: int, lost_after: float, seed: int | None) -> CoordinatorConfig:
    """Return the core's settings with the deadlines that follow from `lost_after`.

    Args:
        world_size: Ranks that the first view waits for.
        lost_after: Seconds of silence after which a member is lost.
        seed: The job's; None takes the journal's.
    """
    at = Deadlines.of(lost_after)
    return CoordinatorConfig(
        world_size=world_size,
        seed=seed,
        propose_timeout_ns=at.propose_ns,
        gather_ns=at.gather_ns,
        settle_ns=at.settle_ns,
        vote_timeout_ns=at.vote_ns,
    )
