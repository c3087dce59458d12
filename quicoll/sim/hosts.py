"""Hosts that several simulated ranks share: their memory, how they meet there, and how they wake each other.

What a rank asks of its host (quicoll.engine.host) is answered here on the virtual clock. What asks is the real code:
neighbours, neighbourhood, the steps of a meeting, and both protocols in memory.

    memory      bytes that all see at once: one callback runs at a time, so orders in which stores are seen are for
                tests/unit/local. A process that is killed stores nothing more, also in the middle of a callback
    to meet     each step takes some time by the seed; lines are hung up where their process ends
    to wake     a mark is left after a time by the seed, and stays until it is seen; who is paused sees it afterwards
    ends        all who have met a process hear of its end, after a time by the seed
    nobody sleeps or looks: a callback of the loop takes the place of a thread that is woken

Faults of one process (quicoll.sim.scenario.events.MemoryFault), until they are mended:

    spoil       one of the payloads that it reads of others has another bit
    full        there is no memory for its segment, or for a room or a parcel of it
    kill        it is killed just before one of its steps: a store, or a step of a meeting
    late        wake-ups for it take up to a fifth of a second

Invariants: what befalls a host draws from generators of its own (`hosts/...`), so a world without shared hosts is the
same as without this module. What a process holds is known (`leftovers`): it has to be nothing at its end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.engine.host import MetHost
from quicoll.local.arena import arena_here
from quicoll.local.layout import MAX_WORLD, SLOTS, WITHDRAWN, SegmentLayout
from quicoll.local.meeting import (
    Await,
    Dial,
    Give,
    HangUp,
    Hear,
    Identify,
    MeetingFailed,
    Recognise,
    Say,
    Take,
    meeting_steps,
)
from quicoll.sim.disk.files import Halted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from quicoll.local.meeting import MeetingPlace, MeetingStep
    from quicoll.membership.view import View
    from quicoll.numerics.dtypes import Array
    from quicoll_transport.sim import HostLoop
    from quicoll_transport.sim.timeline import Timeline

__all__ = ["SimHost", "SimHosts", "SimMemory"]

_CHUNK = 16 << 10  # of large reductions: small, so that their rings go round
_ROOMS = 24  # for sub-groups: few, so that they change hands
_PARCEL = 256 << 10  # the payload of a message of which a plan has few
_STEP_NS = (1_000, 300_000)  # that a step of a meeting takes
_WAKE_NS = (2_000, 200_000)
_LATE_NS = 200_000_000
_END_NS = (20_000, 30_000_000)  # from the end of a process until others hear of it: its memory is given back first
_NO_SPACE = 28


class SimHosts:
    """All shared hosts of a world.

    where: the host of each node; nodes that are not in it share none. injected: faults that have come to something, by
    kind.
    """

    def __init__(self, timeline: Timeline, where: Mapping[str, str]) -> None:
        self.timeline = timeline
        self.where = dict(where)
        self.places: dict[bytes, SimPlace] = {}
        self.injected: dict[str, int] = {}
        self.draw = timeline.rng("hosts/times")
        self._chance = timeline.rng("hosts/faults")
        self._named = 0
        self._processes: dict[str, SimProcess] = {}
        self._armed: dict[str, dict[str, int]] = {}  # by node: its faults, and a count

    def begin(self, node: str, loop: HostLoop, on_killed: Callable[[], None]) -> SimHost:
        """Let a process begin on a node; `on_killed` ends it, for a fault."""
        process = self._processes[node] = SimProcess(self, node, loop, on_killed)
        return SimHost(self, process)

    def ended(self, node: str) -> None:
        """The process of a node has ended, however: nothing of it is touched, and others hear of it."""
        process = self._processes.pop(node, None)
        if process is not None:
            process.end()

    def leftovers(self, node: str) -> list[str]:
        """Return what a process holds of its host."""
        process = self._processes.get(node)
        return [] if process is None else [type(each).__name__ for each in process.holds]

    def delay_ns(self, between: tuple[int, int]) -> int:
        """Draw a time; most are short."""
        least, most = between
        return least + int((most - least) * self.draw.random() ** 4)

    def named(self) -> bytes:
        """Return a name for a place that no other has had."""
        self._named += 1
        return b"\0quicoll-%d" % self._named

    # -- faults --------------------------------------------------------------------------------------------------

    def arm(self, node: str, what: str, after: int) -> None:
        """Let a fault befall a node: the use of this number from now on, where it befalls one use."""
        self._armed.setdefault(node, {})[what] = after

    def mend(self, node: str) -> None:
        """Let all be well with a node from now on."""
        self._armed.pop(node, None)

    def suffers(self, node: str, what: str) -> bool:
        """Return whether a fault befalls what a node does now."""
        if what not in self._armed.get(node, ()):
            return False
        self._note(what)
        return True

    def spoils(self, node: str) -> int | None:
        """Return the number of a bit that is another in what a node reads now; None: all is as it was written."""
        return int(self._chance.random() * (1 << 30)) if self._strikes(node, "spoil") else None

    def step(self, process: SimProcess) -> None:
        """A process takes a step. Raises Halted where it is killed there, or was before."""
        if not process.dead and self._strikes(process.node, "kill"):
            process.on_killed()
        if process.dead:
            raise Halted("the process was ended in the middle of what it does on its host")

    def _strikes(self, node: str, what: str) -> bool:
        """A use is made; return whether it is the one that a fault was to befall."""
        armed = self._armed.get(node)
        if armed is None or what not in armed:
            return False
        armed[what] -= 1
        if armed[what]:
            return False
        del armed[what]
        self._note(what)
        return True

    def _note(self, what: str) -> None:
        self.injected[f"memory_{what}"] = self.injected.get(f"memory_{what}", 0) + 1


class SimProcess:
    """A process, as its host knows it. holds: what it has to give back. watched_by: called at its end. short: there
    was no memory for a room of it, so it shares none any more."""

    def __init__(self, hosts: SimHosts, node: str, loop: HostLoop, on_killed: Callable[[], None]) -> None:
        self.node = node
        self.loop = loop
        self.on_killed = on_killed
        self.dead = False
        self.holds: dict[SimPlace | SimWakes, None] = {}
        self.watched_by: dict[SimWakes, Callable[[], None]] = {}
        self.lines: dict[_Line, None] = {}
        self.short = False
        self._hosts = hosts

    def end(self) -> None:
        """Nothing of it runs any more; the host takes back what it had."""
        self.dead = True
        for line in list(self.lines):
            line.hang_up()
        for held in list(self.holds):
            held.vanish()
        for heard in list(self.watched_by.values()):
            self._hosts.timeline.after(self._hosts.delay_ns(_END_NS), heard)


class SimHost:
    """The host of one process: quicoll.engine.host.HostHere."""

    def __init__(self, hosts: SimHosts, process: SimProcess) -> None:
        self.name = f"host {hosts.where.get(process.node, '')}"
        self._hosts = hosts
        self._process = process

    def sharers(self, view: View, rank: int) -> tuple[int, ...]:
        """Return the ranks of one host with that one; real ones see that by addresses."""
        where = [self._hosts.where.get(member.node, "") for member in view.members]
        found = tuple(each for each, host in enumerate(where) if host and host == where[rank])
        return found if len(found) <= MAX_WORLD else ()

    def bring(self, world: int, loop: asyncio.AbstractEventLoop) -> SimPlace:
        if self._process.short or self._hosts.suffers(self._process.node, "full"):
            raise OSError(_NO_SPACE, "No space left on device")
        return SimPlace(self._hosts, self._process, SegmentLayout(world, _CHUNK, _ROOMS, _PARCEL))


class _Segment:
    def __init__(self, process: SimProcess, size: int) -> None:
        self.process = process
        self.array: Array = np.zeros(size, np.uint8)  # what is never touched, as of rooms, takes no memory
        self.data = self.array.data


class SimMemory:
    """Segments of a simulated host: quicoll.local.layout.HostMemory."""

    def __init__(self, hosts: SimHosts, layout: SegmentLayout, rank: int, segments: Mapping[int, _Segment]) -> None:
        self.layout = layout
        self.rank = rank
        self._hosts = hosts
        self._process = segments[rank].process
        self._segments = [segments[each] for each in range(layout.world)]
        self._payloads = {layout.payload(number) for number in range(SLOTS)}
        room = layout.of_group(2)  # whose payloads stand where those of any group do
        self._payloads |= {
            layout.room(number) + room.payload(slot) for number in range(layout.rooms) for slot in range(SLOTS)
        }

    def load(self, rank: int, word: int) -> int:
        return int.from_bytes(self._segments[rank].data[8 * word : 8 * word + 8], "little")

    def store(self, word: int, value: int) -> None:
        self._hosts.step(self._process)
        self._segments[self.rank].data[8 * word : 8 * word + 8] = value.to_bytes(8, "little")

    def fence(self) -> None:
        """All stores are seen at once."""

    def read(self, rank: int, at: int, size: int) -> bytes:
        found = bytearray(self._segments[rank].data[at : at + size])
        if rank != self.rank and at in self._payloads and (bit := self._hosts.spoils(self._process.node)) is not None:
            found[bit // 8 % size] ^= 1 << bit % 8
        return bytes(found)

    def write(self, at: int, data: bytes | memoryview) -> None:
        self._hosts.step(self._process)
        self._segments[self.rank].data[at : at + len(data)] = data

    def view(self, rank: int, at: int, size: int) -> Array:
        found = self._segments[rank].array[at : at + size]
        if rank == self.rank:
            self._hosts.step(self._process)  # it is about to be written
            return found
        return self._seen(found)

    def _seen(self, found: Array) -> Array:
        if found.size and (bit := self._hosts.spoils(self._process.node)) is not None:
            found = found.copy()
            found[bit // 8 % found.size] ^= 1 << bit % 8
        return found

    def place(self, values: Array) -> int:
        arena = arena_here()
        return 0 if arena is None else arena.place(values)

    def withdraw(self, record: int) -> None:
        if not self._process.dead:  # what it was in the middle of is let go of, by whatever collects it
            self.write(record + 8, WITHDRAWN.to_bytes(8, "little"))

    def lent(self, rank: int, place: int, size: int) -> Array | None:
        arena = arena_here()  # which is that of all ranks: they are of one process
        found = None if arena is None else arena.lent(place, size)
        return None if found is None else self._seen(found)

    def make(self, at: int, size: int) -> None:
        if self._hosts.suffers(self._process.node, "full"):
            self._process.short = True
            raise OSError(_NO_SPACE, "No space left on device")


# -- to be woken -----------------------------------------------------------------------------------------------------


class _Mark:
    """Left for a process by who wakes it, and seen once by it, on its loop."""

    def __init__(self, hosts: SimHosts, process: SimProcess) -> None:
        self._hosts = hosts
        self._process = process
        self._left = False
        self._told = False
        self._heard: Callable[[], None] | None = None

    def leave(self) -> None:
        """Leave it, after a time."""
        late = self._hosts.suffers(self._process.node, "late")
        delay = self._hosts.delay_ns((0, _LATE_NS) if late else _WAKE_NS)
        self._hosts.timeline.after(delay, self._leave)

    def _leave(self) -> None:
        self._left = True
        self._tell()

    def listen(self, heard: Callable[[], None] | None) -> None:
        self._heard = heard
        self._tell()

    def _tell(self) -> None:
        if self._left and self._heard is not None and not self._told:
            self._told = True
            self._process.loop.call_soon(self._see)

    def _see(self) -> None:
        self._told = False
        if self._heard is not None:
            self._left = False
            self._heard()


class SimWakes:
    """quicoll.engine.host.HostWakes on the virtual clock."""

    crowded = True  # nobody looks: nothing comes while a callback runs
    thread_in_front = False

    def __init__(
        self, process: SimProcess, own: tuple[_Mark, _Mark], peers: Mapping[int, tuple[_Mark, _Mark, SimProcess]]
    ) -> None:
        self._process = process
        self._front, self._back = own
        self._peers = dict(peers)
        process.holds[self] = None

    def now(self) -> float:
        return self._process.loop.time()

    def now_ns(self) -> int:
        return round(self.now() * 1e9)

    def processor(self) -> int:
        return 0

    def offer(self) -> None:
        """There is one thread."""

    def listen(self, on_back: Callable[[], None], on_ended: Callable[[int], None]) -> None:
        self._back.listen(on_back)
        for rank, (_, _, process) in self._peers.items():

            def hear(rank: int = rank) -> None:
                if self in self._process.holds:
                    self._process.loop.call_soon(self._on_ended, on_ended, rank)

            if process.dead:
                hear()
            else:
                process.watched_by[self] = hear

    def _on_ended(self, on_ended: Callable[[int], None], rank: int) -> None:
        if self in self._process.holds:
            on_ended(rank)

    def ring(self, rank: int, *, front: bool) -> None:
        if not self._process.dead:  # killed between the store of a word and this
            at_front, at_back, _ = self._peers[rank]
            (at_front if front else at_back).leave()

    def wait_in(self, loop: asyncio.AbstractEventLoop, on_front: Callable[[], None]) -> bool:
        if loop is not self._process.loop:
            raise AssertionError("a simulated process has one loop")
        self._front.listen(on_front)
        return True

    def take_front(self) -> bool:
        raise AssertionError("a simulated process has no thread that could sleep")

    def leave_front(self) -> None:
        raise AssertionError("a simulated process has no thread that could sleep")

    def sleep(self, seconds: float) -> None:
        raise AssertionError("a simulated process has no thread that could sleep")

    def close(self) -> None:
        if self._process.dead:  # it unwinds what it was in the middle of, and its host has taken all back
            return
        if self not in self._process.holds:
            raise AssertionError("closed a second time")
        self.vanish()

    def vanish(self) -> None:
        """It is no more."""
        self._process.holds.pop(self, None)
        self._front.listen(None)
        self._back.listen(None)
        for _, _, process in self._peers.values():
            process.watched_by.pop(self, None)


# -- to meet ---------------------------------------------------------------------------------------------------------


class _Change:
    """Awaited by one at a time, on the loop of its process."""

    def __init__(self, loop: HostLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] | None = None

    def tell(self) -> None:
        """Something has changed."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, until: float) -> None:
        """Wait for it. Raises TimeoutError."""
        self._future = self._loop.create_future()
        try:
            async with asyncio.timeout_at(until):
                await self._future
        except TimeoutError:
            raise TimeoutError("not in time") from None


class _Line:
    """One end of a line. said: what waits to be heard here. change: told when that is something, or all there is."""

    def __init__(self, process: SimProcess, change: _Change) -> None:
        self.process = process
        self.other: _Line = self
        self.said: deque[Any] = deque()
        self.closed = False
        self.change = change
        process.lines[self] = None

    def hang_up(self) -> None:
        self.closed = True
        self.process.lines.pop(self, None)
        self.other.change.tell()


class SimPlace:
    """What a rank brings to a meeting: quicoll.engine.host.Belongings."""

    def __init__(self, hosts: SimHosts, process: SimProcess, layout: SegmentLayout) -> None:
        self.name = hosts.named()
        self.process = process
        self._hosts = hosts
        self._layout = layout
        self._segment = _Segment(process, layout.size)
        self._marks = _Mark(hosts, process), _Mark(hosts, process)
        self._dialled: deque[_Line] = deque()
        self._change = _Change(process.loop)
        hosts.places[self.name] = self
        process.holds[self] = None

    def close(self) -> None:
        self.vanish()

    def vanish(self) -> None:
        """It is no more."""
        self.process.holds.pop(self, None)
        self._hosts.places.pop(self.name, None)
        for line in self._dialled:
            line.hang_up()

    async def meet(
        self,
        *,
        view_id: int,
        rank: int,
        places: Mapping[int, MeetingPlace],
        secrets: Mapping[int, bytes],
        within: float,
    ) -> MetHost:
        """Take the steps of a meeting, one after the other."""
        lines: list[_Line] = []
        steps = meeting_steps(view_id=view_id, rank=rank, places=places, secrets=secrets)
        try:
            met = await self._take_steps(steps, lines, self.process.loop.time() + within)
        finally:
            for line in lines:
                line.hang_up()
        segments = {peer: segment for peer, (segment, *_) in met.items()} | {rank: self._segment}
        if any(len(segment.data) != self._layout.size for segment in segments.values()):
            raise MeetingFailed("a segment of another size")
        memory = SimMemory(self._hosts, self._layout, rank, segments)
        peers = {peer: (front, back, process) for peer, (_, front, back, process) in met.items()}
        return MetHost(memory, memory, SimWakes(self.process, self._marks, peers))

    async def _take_steps(
        self, steps: Generator[MeetingStep, Any, dict[int, tuple[Any, ...]]], lines: list[_Line], until: float
    ) -> dict[int, tuple[Any, ...]]:
        step = next(steps)  # a rank is never alone in a meeting
        while True:
            try:
                answer, error = await self._answer(step, lines, until), None
            except OSError as raised:
                answer, error = None, raised
            try:
                step = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as stop:
                found: dict[int, tuple[Any, ...]] = stop.value
                return found

    async def _answer(self, step: MeetingStep, lines: list[_Line], until: float) -> Any:
        """Do what is asked, in its time. Raises OSError."""
        await asyncio.sleep(self._hosts.delay_ns(_STEP_NS) / 1e9)
        self._hosts.step(self.process)
        if self.process.loop.time() >= until:
            raise TimeoutError("not in time")
        match step:
            case Dial():
                return self._dial(step.name, lines)
            case Await():
                return await self._awaited(lines, until)
            case Recognise():
                return True
            case Say():
                self._send(step.line, step.data)
            case Give():
                self._send(step.line, (self._segment, *self._marks))
            case Hear():
                return step.line.said.popleft() if step.line.said else b""
            case Take():
                return step.line.said.popleft() if step.line.said else ()
            case Identify():
                return step.line.other.process
            case HangUp():
                lines.remove(step.line)
                step.line.hang_up()
        return None

    def _dial(self, name: bytes, lines: list[_Line]) -> _Line:
        place = self._hosts.places.get(name)
        if place is None:
            raise ConnectionRefusedError("nobody is there")
        here = _Line(self.process, self._change)
        place.admit(here)
        lines.append(here)
        return here

    def admit(self, dialling: _Line) -> None:
        """Somebody dials; take the other end of its line."""
        line = _Line(self.process, self._change)
        line.other, dialling.other = dialling, line
        self._dialled.append(line)

    def _send(self, line: _Line, what: Any) -> None:
        if line.other.closed:
            raise BrokenPipeError("it has hung up")
        line.other.said.append(what)
        line.other.change.tell()

    async def _awaited(self, lines: list[_Line], until: float) -> _Line:
        while True:
            for line in (*lines, *self._dialled):
                if line.said or line.other.closed:
                    if line in self._dialled:
                        self._dialled.remove(line)
                        lines.append(line)
                    return line
            await self._change.wait(until)
