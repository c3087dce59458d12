"""Keeps a coordinator's lease on a shared journal: the asyncio shell of `LeaseCore`, for one leadership.

    standing by   `lead` asks for the lease, again and again, and says who has it
    leading       `lead` has returned the journal, which is read; `keep` renews the lease
    over          `keep` has raised why, or the context has ended: the lease is given up, if it is ours still, and the
                  journal is closed. A process that goes on stands by with another object of this class

All calls of the journal are made on one thread, one after another: the leader's appends, and what is asked here. The
loop goes on meanwhile; so links live, and a standby answers, while the database is away. Every call of the journal ends
by itself (RecordStore), so the end waits for one call at most.

Invariants, for a process that leads, loses the lead, stands by, and leads again:

1. Each leadership has a journal, a thread and a `LeaseCore` of its own. The journal gets a token once, when it takes
   the lease, and has no other ever; what it was asked to append, it appends with that one or not at all. So an append
   of an earlier leadership that is still under way (in the thread, in a connection that was given up, in the server)
   never arrives with the token of a later one, and the database refuses it once the lease was taken again: by whom, and
   in which process, makes no difference to it.
2. What a leadership knows it has read after it has taken the lease, under that token. Nothing of what the process knew
   before is used: the journal may have gone on, and the record of an append that has failed may be in it.
3. One after the other: a leadership begins when the journal of the one before is closed, so after its last call.

Failure cases:

an old append goes in late       before anybody takes the lease: it is in the journal, and whoever takes the lease reads
                                 it. After that: it is refused
a taking whose answer is lost    nobody leads for a lease: this process has it by a token that it does not know. It asks
                                 on, and takes it when it has run out
lost while the journal is read   `lead` raises that; nothing was decided
the database is away             who leads gives up after the patience of a call, which is the lease's length. Who
                                 stands by asks on, for ever, and so does who stands by again
the process is stopped, or its   it wakes up deposed, and finds that out by the first thing that it asks: an append, a
machine sleeps                   confirmation, or its renewal. What it says before that is right for ever
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol, TypeVar

from quicoll.errors import JournalError
from quicoll.membership.coordinator.lease import (
    Following,
    HeldBy,
    LeaseCore,
    LeaseRequest,
    LeaseState,
    Taken,
    rest_ns,
)
from quicoll.membership.journal import LeaseLost, RecordStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor


__all__ = ["Leadership", "SharedStore"]

_T = TypeVar("_T")

log = logging.getLogger("quicoll.coordinator")


class SharedStore(RecordStore, Protocol):
    """A journal that several coordinators share; who has its lease may load it and append to it, for one leadership.

    Its calls raise LeaseLost where the lease is another's, or there was no answer for as long as it runs.
    """

    @property
    def path(self) -> str:
        """Where it is, for people."""

    def open(self) -> None:
        """Reach it, so that what is wrong with it is known. `take` does that, too. Raises JournalError."""

    def take(self, holder: str, following: Following) -> Taken | HeldBy:
        """Take the lease if it may be taken (`may_take`). Raises JournalError where there is no answer."""

    def renew(self, following: Following) -> Taken | HeldBy:
        """Let it run for the whole time again, if it is ours. Raises JournalError where there is no answer."""


class Leadership:
    """See the module's head. An asynchronous context: the journal is closed at its end.

    Args:
        store: The journal, which nobody else uses.
        executor: Where it is called, one call at a time; ended with this.
        holder: This coordinator's address, for members.
        lease: Seconds that a lease runs.
        lost_early: How often in a row this coordinator has lost it before it had it for that long.
        following: Gives the nodes of this coordinator, each time that it asks.
        on_standby: Called with the leader's address, "" where it is not known, after every answer while another leads.
    """

    def __init__(
        self,
        store: SharedStore,
        executor: Executor,
        *,
        holder: str,
        lease: float,
        lost_early: int,
        following: Callable[[], Following],
        on_standby: Callable[[str], None],
    ) -> None:
        self._store = store
        self._executor = executor
        self._holder = holder
        self._ask_following = following
        self._following = Following()  # as it was said last
        self._on_standby = on_standby
        self._loop = asyncio.get_running_loop()
        length_ns = round(lease * 1e9)
        rest = rest_ns(lost_early, length_ns=length_ns)
        self._core = LeaseCore(lease_ns=length_ns, now_ns=self._now_ns(), rest_ns=rest)
        self._lost_early = lost_early
        self._told = ""
        self._lost: JournalError | None = None  # why the last request failed

    @property
    def executor(self) -> Executor:
        """Where the journal is called."""
        return self._executor

    @property
    def token(self) -> int:
        """Of the lease that was taken; 0 before."""
        return self._core.token

    def early_losses(self) -> int:
        """Return how often in a row the lease was lost early, where it is lost now."""
        if not self._core.token:
            return self._lost_early
        return self._lost_early + 1 if self._core.is_early(self._now_ns()) else 0

    async def __aenter__(self) -> Leadership:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._call(self._store.close)
        finally:
            self._executor.shutdown(wait=False)

    async def open(self) -> None:
        """Reach the journal, so that what is wrong with it is known.

        Raises:
            JournalError: It cannot be reached or used.
        """
        await self._call(self._store.open)

    async def lead(self) -> RecordStore:
        """Stand by until the lease is ours; return the journal, which is read.

        Raises:
            LeaseLost: The lease was lost again meanwhile.
            JournalError: The journal cannot be read.
        """
        while self._core.state is LeaseState.STANDBY:
            await self._next_request()
            if self._core.state is LeaseState.STANDBY:
                self._tell()
        await self._call(self._store.load)
        return self._store

    async def keep(self) -> None:
        """Renew the lease for as long as that goes.

        Raises:
            LeaseLost: It is lost; why, and since when.
            JournalError: The journal refuses it.
        """
        while self._core.state is LeaseState.LEADING:
            await self._next_request()
        if self._lost is not None:
            raise self._lost
        core, had = self._core, self._following
        why = "" if had.at_work else f"; it led no view, and {had.nodes} nodes were linked to it"
        raise LeaseLost(
            f"this coordinator does not lead any more: {core.cause}{why}", path=self._store.path, leader=core.leader
        )

    async def _next_request(self) -> None:
        """Wait until a request is due, and make it."""
        at = self._core.next_timer()
        await asyncio.sleep(max(0.0, ((at or 0) - self._now_ns()) / 1e9))
        request = self._core.due(self._now_ns())
        if request is None:
            return
        following = self._following = self._ask_following()
        try:
            if request is LeaseRequest.TAKE:
                answer = await self._call(lambda: self._store.take(self._holder, following))
            else:
                answer = await self._call(lambda: self._store.renew(following))
        except JournalError as error:
            self._lost = error
            self._core.failed(error.message, now_ns=self._now_ns())
        else:
            self._lost = None
            self._core.answered(answer, now_ns=self._now_ns())

    def _tell(self) -> None:
        """Say who leads; in the log, when that has changed."""
        core = self._core
        words = core.cause or f"stands by: {core.leader or 'a coordinator that has not renewed its lease'} leads"
        if words != self._told:
            self._told = words
            log.warning("%s", words)
        self._on_standby(core.leader)

    async def _call(self, work: Callable[[], _T]) -> _T:
        """Call the journal on its thread; a caller that is cancelled leaves the call to end by itself."""
        return await self._loop.run_in_executor(self._executor, work)

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)
