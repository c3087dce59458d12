"""Keeps a coordinator's lease on a shared journal: the asyncio shell of `LeaseCore`.

All calls of the journal are made on one thread of their own, one after another: the leader's appends, and what is asked
here. The loop goes on meanwhile; so links live, and a standby answers, while the database is away.

    `lead`   stands by until the lease is ours and the journal is read
    `keep`   renews it, until it is lost

Every call of the journal ends by itself (RecordStore), so the end waits for one call at most.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeVar

from quicoll.errors import JournalError, LocalError
from quicoll.membership.coordinator.lease import Following, HeldBy, LeaseCore, LeaseRequest, LeaseState, Taken
from quicoll.membership.journal import RecordStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor


__all__ = ["Leadership", "SharedStore"]

_T = TypeVar("_T")

log = logging.getLogger("quicoll.coordinator")


class SharedStore(RecordStore, Protocol):
    """A journal that several coordinators share; who has its lease may load it and append to it."""

    @property
    def path(self) -> str:
        """Where it is, for people."""

    def take(self, holder: str, following: Following) -> Taken | HeldBy:
        """Take the lease if it may be taken (`may_take`). Raises JournalError where there is no answer."""

    def renew(self, following: Following) -> Taken | HeldBy:
        """Let it run for the whole time again, if it is ours. Raises JournalError where there is no answer."""


class Leadership:
    """See the module's head. An asynchronous context: the journal is closed at its end.

    Args:
        open_store: Opens the journal.
        holder: This coordinator's address, for members.
        lease: Seconds that a lease runs.
        following: Gives the nodes of this coordinator, each time that it asks.
        on_standby: Called with the leader's address, "" where it is not known, after every answer while another leads.
        executor: Where the journal is called, one call at a time; ended with this. None takes a thread of its own.
    """

    def __init__(
        self,
        open_store: Callable[[], SharedStore],
        *,
        holder: str,
        lease: float,
        following: Callable[[], Following],
        on_standby: Callable[[str], None],
        executor: Executor | None = None,
    ) -> None:
        self._open_store = open_store
        self._opened: SharedStore | None = None
        self._holder = holder
        self._ask_following = following
        self._following = Following()  # as it was said last
        self._on_standby = on_standby
        self._loop = asyncio.get_running_loop()
        self._core = LeaseCore(lease_ns=round(lease * 1e9), now_ns=self._now_ns())
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="quicoll-journal")
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

    async def __aenter__(self) -> Leadership:
        """Raises JournalError where the journal cannot be opened."""
        try:
            self._opened = await self._call(self._open_store)
        except BaseException:
            self._executor.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._call(self._store.close)
        self._executor.shutdown(wait=False)

    @property
    def _store(self) -> SharedStore:
        if self._opened is None:
            raise LocalError("the journal is not open")
        return self._opened

    async def lead(self) -> RecordStore:
        """Stand by until the lease is ours; return the journal, which is read.

        Raises:
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
            JournalError: It is lost; why, and since when.
        """
        while self._core.state is LeaseState.LEADING:
            await self._next_request()
        if self._lost is not None:
            raise self._lost
        had = self._following
        why = "" if had.at_work else f"; it led no view, and {had.nodes} nodes were linked to it"
        raise JournalError(f"this coordinator does not lead any more: {self._core.cause}{why}", path=self._store.path)

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
