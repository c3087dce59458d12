"""The side that dials: which address is tried next, and when again.

One attempt is one session to one address. A round tries all addresses of a link in turn; names are looked up for each
round anew, because a node that comes back may have moved. After a round without success the link waits, twice as long
each time (`LAST_BACKOFF_NS` at most), until its connect deadline or the detector ends it: that is the core's to decide.

Failure cases: a name that is not found or not in time is left out of the round, and its reason is part of the link's
`refusal`; an address that refuses, or says nothing for its share of the handshake's time, gives way to the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quicoll_transport.endpoint.connection import Connection
from quicoll_transport.events import DialStarted
from quicoll_transport.net.addresses import Address, is_numeric
from quicoll_transport.net.resolver import numeric, resolve_all
from quicoll_transport.quic import Session
from quicoll_transport.security.limits import Pace

if TYPE_CHECKING:
    from quicoll_transport.endpoint.link import Link
    from quicoll_transport.endpoint.shell import Endpoint

__all__ = ["Dialler"]

_LAST_BACKOFF_NS = 1_000_000_000


class Dialler:
    """Part of an endpoint. `resolving`: the look-ups under way; whoever ends a link cancels its one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.resolving: dict[Link, asyncio.Task[None]] = {}
        self._endpoint = endpoint

    def dial(self, link: Link, now_ns: int) -> None:
        """Try the next address of this round, or begin another round; names are looked up each time, as a node that
        comes back may have moved."""
        address = link.plan.next()
        if address is not None:
            self._connect(link, address, now_ns)
        elif all(is_numeric(str(address[0])) for address in link.addresses):
            self._begin_round(link, *numeric(link.addresses))
        elif link not in self.resolving:
            link.next_dial_ns = now_ns + 2 * self._endpoint.config.handshake_ns  # the task is quicker and sets it
            task = self.resolving[link] = self._endpoint.loop.create_task(self._resolve(link, list(link.addresses)))
            task.add_done_callback(lambda _: self.resolving.pop(link, None))

    async def _resolve(self, link: Link, addresses: Sequence[Address]) -> None:
        """Look all names up at once; those that do not answer in the time of a handshake are left out."""
        endpoint = self._endpoint
        timeout = endpoint.config.handshake_ns / 1e9
        found, failed = await resolve_all(addresses, endpoint._io.resolve, timeout=timeout)
        if not link.ended and link.connection is None:
            self._begin_round(link, found, failed)
            endpoint._touch(link)

    def _begin_round(self, link: Link, addresses: Sequence[Address], failed: Sequence[str]) -> None:
        link.plan.begin(addresses)
        address = link.plan.next()
        if address is None:
            self._endpoint._detached(link, "; ".join(failed))
        else:
            self._connect(link, address, self._endpoint.now_ns())

    def _connect(self, link: Link, address: Address, now_ns: int) -> None:
        endpoint = self._endpoint
        session = Session.client(
            credentials=endpoint.credentials,
            config=endpoint.config.session_for(address),
            address=address,
            now_ns=now_ns,
            qlog=endpoint._qlog,
        )
        deadline_ns, pace = now_ns + endpoint.config.handshake_ns, Pace(endpoint.config.pace)
        connection = Connection(session, dialled=True, deadline_ns=deadline_ns, pace=pace, link=link)
        connection.answer_ns = now_ns + link.plan.patience_ns(endpoint.config.handshake_ns)
        link.attempts += 1
        link.connection = connection
        if endpoint.observer is not None:
            endpoint._emit(DialStarted(endpoint.now_ns(), str(link.identity), link.number, address, link.attempts))
        endpoint._register(connection)
        endpoint._transmit(connection)

    def postpone(self, link: Link, now_ns: int) -> None:
        """An attempt failed: the next address at once, or, when all were tried, after a pause."""
        link.next_dial_ns = now_ns
        if not link.plan.more:
            link.next_dial_ns += link.backoff_ns
            link.backoff_ns = min(2 * link.backoff_ns, _LAST_BACKOFF_NS)

    def cancel(self, link: Link) -> None:
        """The link has ended."""
        task = self.resolving.get(link)
        if task is not None:
            task.cancel()
