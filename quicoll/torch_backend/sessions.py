"""This process's part in a job, for as long as torch has a process group of it.

A session is made for torch's default group, by `init_process_group`, and joins a job of its own at the store that torch
gives. Sub-groups (`new_group`) are sub-groups in it. Where the default group is another backend's, each group over
quicoll has a session of its own, at the store of that group.

    joining    a thread of its own meets the other ranks, or reads coordinator and certificates from the settings
    at work    operations are issued from any thread of the program
    leaving    destroy_process_group, abort, or the end of the interpreter: nothing more can be issued; its thread goes
               on until the other ranks have what they need of this one
    left       the thread has ended

The view. Torch's ranks are fixed, so a session has one view: the first with all of its ranks, each with torch's number.
Operations run outside of steps. When a rank is lost the view is over, every operation under way or called later raises
on all ranks, and the session is good for nothing but to be left: a new process group has a new session, in which ranks
meet anew. That is what torchrun does when it starts all ranks again.

The end. Whoever leaves says so, and stays in the view until its peers have ended what it took part in, and, where not
all ranks took part in everything (sub-groups, send and recv), until they end their work too: a view that has lost a
rank is over, and with it operations of others that need nothing of the one that left. That ends by the timeout of
operations at the latest. The program does not wait for it: `close` does for as long as it is told, and the thread stays
behind. What it stays for may be far away, and the program may have to do something first without which the others do
not come to their end. The end of the interpreter waits for what is left of that time. Groups that were not destroyed
have a few seconds there, and hardly any where the program ended by an exception: then the others are told that this
rank failed, and nobody stays. The thread is a daemon; the child of a fork has none of this and leaves it alone.
Processes of multiprocessing end without the interpreter's own exit handlers, and so by its.

The first view counts, though it may be over when this rank gets to see it: the others may have had it a moment before,
and have left already, as in a program that makes a group and destroys it. The session is made then, as it was there,
and what is called in it raises. A rank that the others have left before it was in that view has none: PeerError.

Failure cases: a rank does not come: PeerError names rank 0, or at rank 0 whoever does not join, by the timeout of
`init_process_group`, or after a minute where that is shorter: it is one of operations, and a coordinator has to
start. If a rank was started for another number of ranks, the error adds that. With a coordinator from the settings
there may be other members: LocalError if this rank does not get torch's number in a view of all ranks in that time. A
rank that the world does not have: LocalError at once; so is a store that other processes cannot see (HashStore), where
torch makes a group, as a process has one rank of it. Members of `reconfigure`, and of a group that torch knows nothing
of (`group_at`), may be threads of one process.

Silence. A thread of a torch program may hold the interpreter's lock for seconds in one piece, in C: a large library is
loaded, CUDA begins, a large object is pickled, a collector walks a large heap. The engine's thread has no turn then, so
the others hear nothing of this rank, though it is well. Two seconds, the default elsewhere, would end the job, and here
nothing brings a rank back, as steps do. So a rank is lost after `_LOST_AFTER_S` of silence unless a setting says
otherwise. A helper that speaks for the process without the lock (another process, a thread in C) would say that the
process is there, and not that its engine works: a rank that hangs in C would look alive for ever. What the longer
silence costs: a host that is gone, or a network that is cut, is known later. A process that was killed is known in
seconds all the same, because its host says that nobody listens there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import multiprocessing.util
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # public, not in its __all__

from quicoll.config import Config, JoinSettings
from quicoll.engine.answers import loop_here
from quicoll.errors import JobDone, LocalError, PeerError, QuicollError
from quicoll.joining.entry import join
from quicoll.launchers import rank_of
from quicoll.rendezvous.hosts import leave_host, own_host, share_host
from quicoll.rendezvous.meeting import meet_at
from quicoll.rendezvous.stores import GivenStore
from quicoll.torch_backend.failures import add_words, milliseconds
from quicoll_transport.security.credentials import AUTHORITY_FILE

if TYPE_CHECKING:
    from quicoll.collectives.group import ThreadGroup
    from quicoll.job import Job
    from quicoll.rendezvous.stores import Store

__all__ = [
    "JobSession",
    "add_worlds",
    "coordinator_is_named",
    "demand_place",
    "demand_shared",
    "open_session",
    "session_of_default_group",
]

_NAMED = ("argument", "QUICOLL_COORDINATOR", "QUICOLL_CERTS")
_AGAIN_S = 0.05
_EXIT_S = 5.0
_HURRIED_S = 0.5
_NAME = 32
_MEET_S = 60.0  # for ranks to meet, at least
_LOST_AFTER_S = 30.0
_MARGIN_S = 30.0  # for the thread to give an answer, after the time in which it should have

_default: JobSession | None = None
_open: weakref.WeakSet[JobSession] = weakref.WeakSet()
_leaving: dict[int, JobSession] = {}  # by id, those whose threads stay behind


class JobSession:
    """See the module's head. Its methods are called from the program's threads.

    Attributes:
        rank: Of this process.
        name: Of this session, the same on all ranks and of no other session; "" where settings name the coordinator.
    """

    def __init__(
        self, store: Any, *, rank: int, world_size: int, timeout: float, join_timeout: float | None = None
    ) -> None:
        """Join; blocks until the view is at work.

        Args:
            store: torch's, of the group that this session is for.
            rank: Of this process.
            world_size: How many processes come.
            timeout: Seconds for operations.
            join_timeout: Seconds for all of them to come; None takes those for operations, and a minute at least.
        Raises:
            LocalError: There is no such rank.
            QuicollError: As `quicoll.join`.
        """
        if not 0 <= rank < world_size:
            raise LocalError(f"rank {rank} of {world_size} ranks: they are 0 to {world_size - 1}")
        self.rank = rank
        self.name = ""
        self._world_size = world_size
        self._timeout = timeout
        self._meeting = max(timeout, _MEET_S) if join_timeout is None else join_timeout
        self._store = store
        self._pid = os.getpid()
        self._names: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._failed: BaseException | None = None
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._leave: dict[str, Any] = {}
        self._until = 0.0
        self._going: asyncio.Task[None] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="quicoll-torch", daemon=True)
        patience = store.timeout  # torch has given it that of the operations, which may be too short to read it
        store.set_timeout(max(patience, timedelta(seconds=self._meeting)))
        began = time.monotonic()
        self._thread.start()
        try:
            answered = self._ready.wait(self._meeting + _MARGIN_S)
        except BaseException:  # Ctrl-C
            self.close(reason="interrupted", patience=0.0, finished=False)
            raise
        finally:
            store.set_timeout(patience)
        self._raise_failure(time.monotonic() - began)
        if not answered:
            self.close(reason="not joined", patience=0.0, finished=False)
            raise PeerError(f"the ranks have not met within {self._meeting:g} s")
        _open.add(self)
        _heed_the_end()

    def _raise_failure(self, took: float) -> None:
        failed = self._failed
        if failed is None:
            return
        if isinstance(failed, PeerError):
            if not coordinator_is_named():
                add_worlds(failed, self._store, self._world_size)
            if took >= self._meeting:
                add_words(failed, f"Socket Timeout: wait timeout after {milliseconds(self._meeting)}")
        raise failed

    # -- for groups ----------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether groups may be made in it, here and now."""
        return not self._closed and self._pid == os.getpid() and self._job is not None

    @property
    def group(self) -> ThreadGroup:
        """The group of all ranks."""
        return self._live_job().group.for_threads()

    def subgroup(self, ranks: Sequence[int], name: str) -> ThreadGroup:
        """Make the sub-group of these ranks, which all of them make. Names come back; each time it is another group.

        Args:
            ranks: Of torch's default group.
            name: torch's of the group.
        """
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:80] or "group"
        with self._lock:
            key = f"{plain} {','.join(map(str, ranks))}"
            number = self._names[key]
            self._names[key] += 1
        return self.group.subgroup(ranks, f"{plain}.{number}" if number else plain)

    def on_engine_thread(self) -> bool:
        """Return whether this thread is the one that must never wait."""
        job = self._job
        if job is None:
            return False
        loop = loop_here()
        return loop is not None and loop in (job.internals.runtime.loop, self._loop)

    def close(
        self, *, reason: str = "done", patience: float | None = None, finished: bool = True, wait: float | None = None
    ) -> None:
        """Leave the job. Another call does nothing, nor one in the child of a fork.

        Args:
            reason: Why, for the other ranks.
            patience: Seconds for which this rank stays, for what others need of it; None takes the timeout.
            finished: Whether this rank's work has ended as it should.
            wait: Seconds until this returns, where it takes longer; None: when it is done.
        """
        global _default
        with self._lock:
            closed, self._closed = self._closed, True
        if _default is self:
            _default = None
        _open.discard(self)
        if closed or self._pid != os.getpid():
            return
        self._leave = {"reason": reason, "patience": patience, "finished": finished}
        within = self._timeout if patience is None else patience
        needs = within + _MARGIN_S if patience != 0.0 else _EXIT_S
        self._until = time.monotonic() + needs
        _leaving[id(self)] = self
        if not self._tell(lambda: self._stop.set() if self._stop is not None else None):
            _leaving.pop(id(self), None)
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(needs if wait is None else min(wait, needs))

    def stay(self, *, hurried: bool) -> None:
        """Wait for the end of a session that was closed.

        Args:
            hurried: Whether it is to leave now, whatever others need of it.
        """
        if self._pid != os.getpid() or threading.current_thread() is self._thread:
            return
        if not hurried:
            self._thread.join(max(self._until - time.monotonic(), 0.0))
        if self._thread.is_alive() and self._tell(lambda: self._going.cancel() if self._going is not None else None):
            self._thread.join(_EXIT_S)

    def _tell(self, what: Callable[[], object]) -> bool:
        """Have its thread do something. Return whether it can."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # it has ended by itself
            return False
        return True

    # -- its thread ----------------------------------------------------------------------------------------------

    def _live_job(self) -> Job:
        if self._pid != os.getpid():
            raise LocalError("this process is a fork of the one that has the process group; make one here")
        if self._job is None or self._closed:
            raise LocalError("the process group was destroyed", usable=False)
        return self._job

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # raised by whoever waits for this session
            self._failed = error
        finally:
            _leaving.pop(id(self), None)
            self._ready.set()

    async def _live(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        stopped = asyncio.ensure_future(self._stop.wait())
        working = asyncio.ensure_future(self._work(self._stop))
        await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not working.done() and self._job is None:
            working.cancel()
        await working

    async def _work(self, stop: asyncio.Event) -> None:
        async with self._joined() as job:
            if coordinator_is_named():
                await self._complete(job)
            demand_place(job, self.rank, self._world_size, met=not coordinator_is_named())
            self._job = job
            self._ready.set()
            await stop.wait()
            self._going = asyncio.ensure_future(job.aclose(**self._leave))
            with contextlib.suppress(asyncio.CancelledError):  # hurried: it has left all the same
                await self._going

    @asynccontextmanager
    async def _joined(self) -> AsyncIterator[Job]:
        settings: JoinSettings = {
            "world_size": self._world_size,
            "rank_hint": self.rank,
            "timeout": self._timeout,
            "join_timeout": self._meeting,
            "handle_sigterm": False,
        }
        if not os.environ.get("QUICOLL_NODE"):
            settings["node"] = _node(self.rank)
        if coordinator_is_named():
            async with join(**settings) as job:
                yield job
            return
        if Config.named().sources["lost_after"] == "default":
            settings["lost_after"] = _LOST_AFTER_S
        settings["node"] = _node(self.rank)  # certificates are made for it: no two ranks may have one name
        async with meet_at(
            self._opened,
            Config.named(**settings),
            rank=self.rank,
            world_size=self._world_size,
            at_host=self._at_host,
            source="rendezvous at torch's store",
            end_s=0.0,  # a program may go on, and make another group: nothing of it needs the coordinator's end
        ) as meeting, _joining(join(**meeting.settings(settings)), self.rank) as job:  # fmt: skip
            self.name = hashlib.sha256((Path(meeting.certs) / AUTHORITY_FILE).read_bytes()).hexdigest()[:_NAME]
            meeting.close()
            yield job

    def _opened(self) -> Store:
        store = _words_at(self._store)
        store.set(f"world/{self.rank}", str(self._world_size).encode())
        leave_host(store, self.rank)
        return store

    def _at_host(self, store: Store, given_up: Callable[[], bool]) -> str:
        together = share_host(store, self._world_size, self._meeting, given_up)
        environ = os.environ if rank_of(os.environ) is not None else {}
        return own_host(Config.named(), environ, together=together)

    async def _complete(self, job: Job) -> None:
        """Wait for the view of all ranks, where earlier ones had fewer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._meeting
        while job.world_size != self._world_size:
            if loop.time() > deadline:
                break
            await asyncio.sleep(_AGAIN_S)
            await job.ready(timeout=max(deadline - loop.time(), _AGAIN_S))


@asynccontextmanager
async def _joining(joined: AbstractAsyncContextManager[Job], rank: int) -> AsyncIterator[Job]:
    """Join. That the job is done is no good end here, where all ranks begin together."""
    async with AsyncExitStack() as stack:
        try:
            job = await stack.enter_async_context(joined)
        except JobDone:
            raise PeerError(f"the other ranks have ended their work before rank {rank} was in their view") from None
        yield job


def demand_place(job: Job, rank: int, world_size: int, *, met: bool) -> None:
    """Refuse a job whose view is not torch's world.

    Args:
        job: In its first view with this rank, or in the last one that was waited for.
        rank: torch's of this process.
        world_size: torch's.
        met: Whether the ranks have met at torch's store; then nodes are named by their ranks.
    Raises:
        PeerError: Ranks that have met lack one, which has left before this one was in the view; it is named.
        LocalError: The coordinator of the settings has other ranks.
    """
    if (job.rank, job.world_size) == (rank, world_size):
        return
    gone = [other for other in range(world_size) if met and job.view.rank_of(_node(other)) is None]
    if gone:
        raise PeerError(
            f"left before rank {rank} was in the view of all {world_size} ranks",
            rank=gone[0],
            node=_node(gone[0]),
            lost=tuple(sorted(_node(each) for each in gone)),
        )
    raise LocalError(
        f"rank {rank} of {world_size} is rank {job.rank} of {job.world_size} in the job of the coordinator that the "
        "settings name; start a coordinator for this launch alone"
    )


def _node(rank: int) -> str:
    """What a process is called where ranks meet at torch's store."""
    return f"worker-{rank}"


def demand_shared(store: Any, world_size: int) -> None:
    """Refuse a store of torch's at which several processes cannot meet; nothing where they meet elsewhere.

    Args:
        store: Possibly below prefixes.
        world_size: How many processes come.
    Raises:
        LocalError: It is in this process's memory.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, HashStore) and world_size > 1 and not coordinator_is_named():
        raise LocalError(
            f"a HashStore is in the memory of this process, so {world_size} ranks cannot meet there; give them a "
            'TCPStore or a FileStore, or init_method="tcp://...", "file://..." or "env://"'
        )


def add_worlds(error: PeerError, store: Any, world_size: int) -> None:
    """Add to the error of ranks that have not met who was started for another number of ranks, if anybody was.

    Args:
        error: Of this rank.
        store: torch's.
        world_size: What this process was started for.
    """
    words = _words_at(store)
    with contextlib.suppress(QuicollError):  # the store is gone: then that is what the error says
        for other in range(world_size):
            word = words.get(f"world/{other}")
            if word is not None and word != str(world_size).encode():
                said = f"rank {other} was started as one of {_number(word)} ranks, this one as one of {world_size}"
                error.args = (f"{error.args[0]}; {said}", *error.args[1:])
                return


def _number(word: bytes) -> str:
    return word.decode() if word.isdigit() and len(word) < 10 else "an unknown number of"


def _words_at(store: Any) -> GivenStore:
    return GivenStore(store, "torch's store", "quicoll/")


def coordinator_is_named() -> bool:
    """Return whether the settings name a coordinator, or certificates: then ranks do not meet at torch's store."""
    named = Config.named()
    return any(named.sources[name] in _NAMED for name in ("coordinator", "certs"))


def open_session(
    store: Any, *, rank: int, world_size: int, timeout: float, default: bool, join_timeout: float | None = None
) -> JobSession:
    """Make a session.

    Args:
        store: As for JobSession.
        rank: As for JobSession.
        world_size: As for JobSession.
        timeout: As for JobSession.
        join_timeout: As for JobSession.
        default: Whether it is that of torch's default group.
    Raises:
        QuicollError: As JobSession.
    """
    global _default
    session = JobSession(store, rank=rank, world_size=world_size, timeout=timeout, join_timeout=join_timeout)
    if default:
        _default = session
    return session


def session_of_default_group() -> JobSession | None:
    """Return the session of torch's default group, None where that is another backend's."""
    return _default if _default is not None and _default.alive else None


@atexit.register
def _leave_all() -> None:
    """The process ends: groups that were not destroyed leave, and those that were may have something to stay for."""
    failed = getattr(sys, "last_value", None) is not None
    for session in list(_open):
        with contextlib.suppress(QuicollError):
            session.close(
                reason="its program ended by an exception" if failed else "its program ended",
                patience=_HURRIED_S if failed else _EXIT_S,
                finished=not failed,
            )
    for session in list(_leaving.values()):
        session.stay(hurried=failed)


_heeding = 0  # the process that has said so


def _heed_the_end() -> None:
    """Have a process of multiprocessing leave its groups at its end."""
    global _heeding
    if _heeding != os.getpid():
        _heeding = os.getpid()
        multiprocessing.util.Finalize(None, _leave_all, exitpriority=0)
