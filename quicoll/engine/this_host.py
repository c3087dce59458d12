"""The host of this process, as `HostHere` and `HostWakes` have it: memfds, Unix sockets, eventfds, pidfds, its clock.

A meeting blocks, so it is carried out on a thread of its own (quicoll.local.meeting), which has its own copies of the
descriptors that it gives away, and closes them. What it gives is either a `MetHost`'s, or closed.

In front (host.py) at most one is woken, by one eventfd:

    nobody     it is open, and nobody reads it
    a loop     reads it, until `close`, or another one takes its place when it has been closed itself
    a thread   polls it, from `take_front` to `leave_front`

Invariants: the front eventfd is closed once: by `close` where nobody reads it; by the loop that does, on its own
thread, since no other may take a reader away; by the thread that polls it, which `close` wakes. All others are the
engine's, and closed by `close`, on its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from quicoll.engine.host import MetHost
from quicoll.engine.looking import offer, processors
from quicoll.engine.placing import system_processors
from quicoll.local.arena import PeerArena, arena_here
from quicoll.local.layout import MAX_WORLD, SegmentLayout
from quicoll.local.meeting import MeetingFailed, Met, host_here, listen, meet_all
from quicoll.local.memory import Segment, SharedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quicoll.local.meeting import MeetingPlace
    from quicoll.membership.view import View

__all__ = ["ThisHost"]


class ThisHost:
    """The host of this process: `quicoll.engine.host.HostHere`. short: what was raised where there was no memory for a
    room; from then on none is shared, or each view would end by the same."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.short: OSError | None = None

    @classmethod
    def here(cls) -> ThisHost | None:
        """Return it; None where nothing tells it from others."""
        name = host_here()
        return cls(name) if name else None

    def sharers(self, view: View, rank: int) -> tuple[int, ...]:
        """Return the ranks whose addresses are the same as that one's but for the ports."""
        hosts = [member.host for member in view.members]
        found = tuple(each for each, host in enumerate(hosts) if host and host == hosts[rank])
        return found if len(found) <= MAX_WORLD else ()

    def bring(self, world: int, loop: asyncio.AbstractEventLoop) -> _Own:
        if self.short is not None:
            raise self.short
        return _Own(SegmentLayout.of_ranks(world), loop, self._fall_short)

    def _fall_short(self, error: OSError) -> None:
        self.short = error


class _Own:
    """What this rank brings: its socket, its segment, its eventfds."""

    def __init__(
        self, layout: SegmentLayout, loop: asyncio.AbstractEventLoop, on_short: Callable[[OSError], None]
    ) -> None:
        """Make it; `on_short` is called where there is no memory for a room later. Raises OSError, and leaves nothing
        behind."""
        self._layout = layout
        self._loop = loop
        with contextlib.ExitStack() as made:
            self._server, self.name = listen()
            made.callback(self._server.close)
            self._segment, self._descriptor = Segment.make(layout, on_short)
            made.callback(os.close, self._descriptor)
            self._wakes: tuple[int, ...] = ()
            made.callback(lambda: _close(self._wakes))
            for _ in range(2):
                self._wakes = (*self._wakes, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            self._made = made.pop_all()

    def close(self) -> None:
        self._made.close()

    async def meet(
        self,
        *,
        view_id: int,
        rank: int,
        places: Mapping[int, MeetingPlace],
        secrets: Mapping[int, bytes],
        within: float,
    ) -> MetHost:
        """Meet on a thread, and map what the others give."""
        future: asyncio.Future[dict[int, Met]] = self._loop.create_future()
        arena = arena_here()
        brought = [self._descriptor, *self._wakes, *([] if arena is None else [arena.descriptor])]
        server, given = self._server.dup(), [os.dup(each) for each in brought]  # the thread's

        def run() -> None:
            found: dict[int, Met] = {}
            error: Exception | None = None
            try:
                found = meet_all(
                    server,
                    view_id=view_id,
                    rank=rank,
                    places=places,
                    secrets=secrets,
                    descriptors=given,
                    within=within,
                )
            except Exception as raised:
                error = raised
            server.close()
            _close(given)
            try:
                self._loop.call_soon_threadsafe(settle, found, error)
            except RuntimeError:  # the loop is closed
                settle(found, MeetingFailed("the engine is closed"))

        def settle(found: dict[int, Met], error: Exception | None) -> None:
            if error is None and not future.done():
                future.set_result(found)
                return
            for each in found.values():  # nobody waits any more
                each.close()
            if error is not None and not future.done():
                future.set_exception(error if isinstance(error, MeetingFailed) else MeetingFailed(repr(error)))

        threading.Thread(target=run, name="quicoll-meeting", daemon=True).start()
        met = await future
        try:
            peers = {each: Segment.received(met[each].segment, self._layout) for each in met}
            arenas = {each: PeerArena(fd) for each in met if (fd := met[each].arena) is not None}
        except BaseException:
            for each in met.values():
                each.close()
            raise
        for each in met.values():
            _close([each.segment] if each.arena is None else [each.segment, each.arena])
        (front, back), self._wakes = self._wakes, ()
        memory, for_large = (SharedMemory(self._layout, rank, self._segment, peers, arena, arenas) for _ in range(2))
        wakes = _Wakes(
            (front, back),
            {each: met[each].wakes for each in met},
            {each: met[each].process for each in met},
            self._loop,
        )
        return MetHost(memory, for_large, wakes)


class _Wakes:
    """`quicoll.engine.host.HostWakes` by eventfds and pidfds. See the module's head."""

    def __init__(
        self,
        own: tuple[int, int],
        peers: Mapping[int, tuple[int, int]],
        processes: Mapping[int, int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Take all descriptors over.

        Args:
            own: This rank's eventfds: in front, at the back.
            peers: Those of the others, by rank.
            processes: The pidfds of the others, by rank.
            loop: The engine's.
        """
        self.crowded = processors() < len(peers) + 1
        self.thread_in_front = False
        system = system_processors()
        self.processor: Callable[[], int] = _anywhere if system is None else system.here
        self._front, self._back = own
        self._peers = dict(peers)
        self._processes = dict(processes)
        self._loop = loop
        self._listens = False
        self._closed = False
        self._reader: asyncio.AbstractEventLoop | None = None  # in whose loop the front eventfd is read

    def now(self) -> float:
        return time.monotonic()  # as loops of the system have it

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def offer(self) -> None:
        offer()

    def listen(self, on_back: Callable[[], None], on_ended: Callable[[int], None]) -> None:
        self._listens = True
        self._loop.add_reader(self._back, self._read, self._back, on_back)
        for rank, process in self._processes.items():
            self._loop.add_reader(process, self._on_process, rank, on_ended)

    def _on_process(self, rank: int, on_ended: Callable[[int], None]) -> None:
        self._loop.remove_reader(self._processes[rank])
        on_ended(rank)

    def _read(self, wake: int, then: Callable[[], None]) -> None:
        _drain(wake)
        then()

    def ring(self, rank: int, *, front: bool) -> None:
        try:
            os.eventfd_write(self._peers[rank][0 if front else 1], 1)
        except BlockingIOError:  # its count is full: it has been woken often enough
            pass

    def wait_in(self, loop: asyncio.AbstractEventLoop, on_front: Callable[[], None]) -> bool:
        if self._reader is loop:
            return True
        if self.thread_in_front or (self._reader is not None and not self._reader.is_closed()):
            return False
        self._reader = loop
        loop.add_reader(self._front, self._read, self._front, on_front)
        return True

    def take_front(self) -> bool:
        if self.thread_in_front or (self._reader is not None and not self._reader.is_closed()):
            return False
        self._reader = None
        self.thread_in_front = True
        return True

    def leave_front(self) -> None:
        self.thread_in_front = False
        if self._closed:
            os.close(self._front)

    def sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._front, select.POLLIN)
        poll.poll(seconds * 1000 + 1)
        _drain(self._front)

    def close(self) -> None:
        self._closed = True
        if self._listens:
            self._loop.remove_reader(self._back)
            for process in self._processes.values():
                self._loop.remove_reader(process)
        _close([*self._processes.values(), *(wake for peer in self._peers.values() for wake in peer), self._back])
        reader, self._reader = self._reader, None
        if self.thread_in_front:
            os.eventfd_write(self._front, 1)  # who sleeps there closes it
        elif reader is None:
            os.close(self._front)
        else:
            try:
                reader.call_soon_threadsafe(self._leave_loop, reader)
            except RuntimeError:  # that loop is closed, and reads nothing any more
                os.close(self._front)

    def _leave_loop(self, reader: asyncio.AbstractEventLoop) -> None:
        reader.remove_reader(self._front)
        os.close(self._front)


def _anywhere() -> int:
    return 0


def _drain(wake: int) -> None:
    try:
        os.eventfd_read(wake)
    except BlockingIOError:
        pass


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)
