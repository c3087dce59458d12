"""The ranks of a view where all share a host: their calls through shared memory, and who takes them further.

Memory and protocols are in quicoll.local, which never waits. Here are the threads, the waits and the ends. A small call
is begun on its caller's thread, and mostly ends there: in the same moment, where all others have called; within a short
look; or when the last of the others wakes the caller, who sleeps with an eventfd in his own poll or event loop. A large
one runs on the engine's thread, as an execution of the communicator's (`LargeReduction`).

    begun       the call has its number and waits for a slot, or is in one; it is in `_calls`. Whoever publishes last
                wakes the engine (BACK), which ends it
    attended    its caller looks, or sleeps, and is woken in the engine's place (FRONT)
    adopted     its caller has not seen it end within two ticks of the engine, or it waits for a slot: the engine is
                woken as well, and takes it further
    over        taken out of `_calls`, once, under the lock, by whoever ends it: with its result by the thread that has
                taken it; with an error by the engine. Then its future is settled

The order of the calls. All calls of the group of all ranks have their numbers from here (`number`), whichever way they
go. A small call carries its number in its slot, one over QUIC in its announcement. Where two ranks call different
things that are both small, the slots differ. Where one calls what is small and another what is not, that one announces
a number which was taken here for a small call: the engine sees so within a tick, and the view ends by a Mismatch.

Deadlines, cancelling, farewells and the end of the view are the engine's affair, on its thread, as for all operations:
it looks after the calls every TICK_S. A process that ends is seen by its pidfd; it has lost its link then, if a moment
later it still has one. So no call waits longer than its deadline while the engine runs; and while it does not, who
waits hears of it as in all calls (quicoll.engine.runtime).

Locks. `_lock` holds while the small calls are taken further and while WAKE is written; nobody waits with it, and
nothing is settled under it. Large reductions need none: one thread runs them, with words of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from quicoll.engine.looking import LOOK_NS, QUESTION_NS, Looks, offer, processors
from quicoll.local.large import Reduce, reduce_in_chunks
from quicoll.local.layout import BACK, CONSUMED, FRONT, PUBLISHED, ROOM, STAGE, WAKE
from quicoll.local.small import SmallCall, SmallCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from quicoll.local.memory import SharedMemory
    from quicoll.numerics.bundle import Joined
    from quicoll.numerics.dtypes import Array

__all__ = ["GROUP", "TICK_S", "LargeReduction", "NearCall", "Neighbourhood", "Overseer"]

GROUP: Final = 0  # the id of the group of all ranks, whose calls these are (quicoll.collectives.subgroups)
TICK_S = 0.02
_AWAIT_S = 1.0  # of a thread that sleeps here; then it waits as for all calls, and the engine goes on for it
_TURN_NS = 4_000_000  # of the engine's thread for large reductions, until its other work has its turn
_GONE_S = 0.1  # after a process's end, until its link is ended: what it had said before it ended is taken in by then


class NearCall:
    """A small call under way.

    name: for people, as "all_reduce#3". settle: called once, by any thread. deadline: of time.monotonic, which is the
    clock of a real engine's loop. timeout: in seconds, for the error. step: the open one. ticks: of the engine since
    it was begun. attended: its caller looks for its end, or sleeps until then. ending: waits for why the view is over,
    once it has failed.
    """

    __slots__ = ("_near", "attended", "deadline", "ending", "name", "settle", "small", "step", "ticks", "timeout")

    def __init__(
        self,
        near: Neighbourhood,
        small: SmallCall,
        name: str,
        *,
        timeout: float,
        step: int | None,
    ) -> None:
        self._near = near
        self.small = small
        self.name = name
        self.settle: Settle = _nobody
        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.step = step
        self.ticks = 0
        self.attended = False
        self.ending: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Nobody waits for it any more, which ends the view. On the engine's thread; nothing where it is over."""
        self._near.cancel(self)


Settle: TypeAlias = "Callable[[int | None, BaseException | None, bool], None]"
"""Ends the wait for a call, with its number or with its error, and whether this is a loop that calls: no task of its
is in the middle of something."""


def _nobody(number: int | None, error: BaseException | None, idle: bool) -> None:
    raise AssertionError("a small call has begun for which nobody waits")


class Overseer(Protocol):
    """What a neighbourhood asks of the communicator, on the engine's thread."""

    def near_failed(self, call: NearCall | None, error: Exception) -> None:
        """A small call has failed, or all have: the view is over."""
        ...

    def near_cancelled(self, call: NearCall) -> None:
        """A small call was cancelled, and is out of the neighbourhood's hands."""
        ...

    def near_late(self, call: NearCall, present: Sequence[int]) -> None:
        """A small call has not ended by its deadline. present: the ranks that have called as much as this one."""
        ...

    def near_tick(self) -> None:
        """Time has passed, and calls may have ended."""
        ...


class Neighbourhood:
    """See the module's head. Made on the engine's thread; `attach` makes it work.

    whole: calls may begin. rank, world: of the view.
    """

    def __init__(
        self,
        memory: SharedMemory,
        memory_for_large: SharedMemory,
        *,
        wakes: tuple[int, int],
        peer_wakes: Mapping[int, tuple[int, int]],
        processes: Mapping[int, int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Take all descriptors over.

        Args:
            memory: The ranks', for small calls.
            memory_for_large: The same memory, for large ones.
            wakes: This rank's eventfds: its callers', its engine's.
            peer_wakes: Those of the others, by rank.
            processes: The pidfds of the others, by rank.
            loop: The engine's.
        """
        self.rank = memory.rank
        self.world = memory.layout.world
        self.whole = True
        self._memory = memory
        self._large_memory = memory_for_large
        self._small = SmallCalls(memory)
        self._front_wake, self._back_wake = wakes
        self._wakes = [(rank, *peer_wakes[rank]) for rank in sorted(peer_wakes)]
        self._processes = dict(processes)
        self._loop = loop
        self._lock = threading.Lock()
        self._numbers = 0
        self._calls: dict[int, NearCall] = {}
        self._broken = False  # a small call has failed, and the engine is to be told, or was
        self._front = False  # somebody sleeps in front
        self._large_waits = False  # the engine is to be woken for large ones
        self._bits = 0  # what stands in WAKE
        self._reader: asyncio.AbstractEventLoop | None = None  # in whose loop the front eventfd is read
        self._polling = False  # a thread sleeps at the front eventfd
        self._larges: deque[LargeReduction] = deque()
        self._stage = 0  # at which the next large reduction begins
        self._turning = False  # the engine's loop will go on with large ones
        self._overseer: Overseer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looks = Looks(time.perf_counter_ns())
        self._crowded = processors() < self.world  # who looks has the processor that another one needs

    # -- on the engine's thread: begin and end -------------------------------------------------------------------

    def attach(self, overseer: Overseer, on_gone: Callable[[int], None]) -> None:
        """Go to work for a view that is installed.

        Args:
            overseer: Hears of failures.
            on_gone: Called with the rank of a process that has ended, when it has had time to say good-bye before.
        """
        self._overseer = overseer
        self._loop.add_reader(self._back_wake, self._on_back)
        for rank, process in self._processes.items():
            self._loop.add_reader(process, self._on_process, rank, on_gone)
        self._timer = self._loop.call_later(TICK_S, self._on_tick)

    def end(self) -> list[NearCall]:
        """Stop for good, and let go of all descriptors. Return the calls that were under way, in their order."""
        with self._lock:
            if not self.whole:
                return []
            self.whole = False
            left = list(self._calls.values())
            self._calls.clear()
            reader, self._reader = self._reader, None
            if self._overseer is not None:
                self._loop.remove_reader(self._back_wake)
                for process in self._processes.values():
                    self._loop.remove_reader(process)
            for process in self._processes.values():
                os.close(process)
            for _, front, back in self._wakes:
                os.close(front)
                os.close(back)
            os.close(self._back_wake)
            if self._polling:
                os.eventfd_write(self._front_wake, 1)  # who sleeps there closes it
            elif reader is None:
                os.close(self._front_wake)
        if reader is not None:
            try:
                reader.call_soon_threadsafe(self._leave_loop, reader)
            except RuntimeError:  # that loop is closed, and reads nothing any more
                os.close(self._front_wake)
        if self._timer is not None:
            self._timer.cancel()
        for large in list(self._larges):
            large.close()
        return left

    def _leave_loop(self, reader: asyncio.AbstractEventLoop) -> None:
        reader.remove_reader(self._front_wake)
        os.close(self._front_wake)

    def _on_process(self, rank: int, on_gone: Callable[[int], None]) -> None:
        self._loop.remove_reader(self._processes[rank])
        self._loop.call_later(_GONE_S, self._gone, rank, on_gone)

    def _gone(self, rank: int, on_gone: Callable[[int], None]) -> None:
        if self.whole:
            on_gone(rank)

    def _on_back(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._back_wake)
        self._go_on()
        self._turn()

    def _on_tick(self) -> None:
        if not self.whole or self._overseer is None:
            return
        self._timer = self._loop.call_later(TICK_S, self._on_tick)
        self._go_on()
        self._turn()  # a wake-up that went astray costs a tick
        now = time.monotonic()
        late: NearCall | None = None
        present: list[int] = []
        with self._lock:
            for call in self._calls.values():
                call.ticks += 1
                if late is None and call.deadline <= now:
                    late, present = call, self._small.present(call.small)
            self._tell_wakes()
        if late is not None:
            self._overseer.near_late(late, present)
        if self.whole:
            self._overseer.near_tick()

    # -- the order of the calls ----------------------------------------------------------------------------------

    @property
    def numbers(self) -> int:
        """How many calls of the group of all ranks have a number."""
        return self._numbers

    def take_number(self) -> int:
        """Take the number of a call that goes over QUIC. Whoever issues holds a lock of his own."""
        number = self._numbers
        self._numbers = number + 1
        return number

    def return_number(self) -> None:
        """Give the last number back: what it was for was refused, and nobody has heard of it."""
        self._numbers -= 1

    @property
    def running(self) -> int:
        """How many small calls are under way."""
        return len(self._calls)

    def under_way(self, number: int) -> SmallCall | None:
        """Return the small call of this number, None where it is over, or there was none."""
        call = self._calls.get(number)
        return None if call is None else call.small

    def called_by(self, rank: int) -> list[int]:
        """Return the numbers of the small calls under way here which a rank has called as well."""
        with self._lock:
            return [number for number, call in self._calls.items() if rank in self._small.present(call.small)]

    # -- small calls: any thread ---------------------------------------------------------------------------------

    def begin(self, call: NearCall) -> bool:
        """Begin a call whose number was taken, and take it as far as it goes.

        Returns:
            Whether it has begun: False where the view is over.
        """
        with self._lock:
            if not self.whole:
                return False
            self._calls[call.small.number] = call
            self._small.add(call.small)
            taken = self._advance()
            if self._calls or self._bits:
                self._tell_wakes()
                taken += self._advance()
        _settle(taken)
        return True

    def look(self, call: NearCall) -> bool:
        """Look for a moment whether all have called; return whether the call has ended.

        With a budget and a rule for who is in whose way, as the engine's loop looks (quicoll.engine.looking).
        """
        call.attended = True
        if self._over(call) or self._crowded:
            return call.small.done
        began = now = time.perf_counter_ns()
        if not self._looks.may(now):
            return False
        with self._lock:
            if self.whole:
                self._tell_wakes()
        while now - began < LOOK_NS:
            offer()
            self._go_on()
            if self._over(call):
                self._looks.found()
                return call.small.done
            before, now = now, time.perf_counter_ns()
            if now - before > QUESTION_NS:
                self._looks.in_vain(LOOK_NS)
                return False
        self._looks.in_vain(now - began)
        return False

    def _over(self, call: NearCall) -> bool:
        return call.small.done or not self.whole

    def _is_whole(self) -> bool:
        return self.whole

    def attend(self, call: NearCall, loop: asyncio.AbstractEventLoop) -> None:
        """See that a caller who awaits a call in a loop, on whose thread this is, is woken when it has ended."""
        if self.look(call):
            return
        with self._lock:
            if not self.whole:
                return
            if self._reader is not loop:
                if self._polling or (self._reader is not None and not self._reader.is_closed()):
                    call.attended = False  # one at a time: the engine goes on for the others
                else:
                    self._reader = loop
                    loop.add_reader(self._front_wake, self._on_front)
            self._front = self._front or call.attended
            self._tell_wakes()
            taken = self._advance()
            self._rest()
        _settle(taken)

    def _rest(self) -> None:
        """Nobody sleeps in a loop where no call is under way. Under the lock."""
        if self._front and not self._calls and not self._polling:
            self._front = False
            self._tell_wakes()

    def _on_front(self) -> None:
        with self._lock:
            if not self.whole:
                return
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._front_wake)
            taken = self._advance()
            self._rest()
        _settle(taken, idle=True)

    def block(self, call: NearCall, timeout: float | None) -> None:
        """Block this thread until a call has ended, or for `timeout` seconds, or for a second."""
        if self.look(call):
            return
        until = time.monotonic() + (_AWAIT_S if timeout is None else min(timeout, _AWAIT_S))
        with self._lock:
            if not self.whole:
                return
            sleeps = not self._polling and (self._reader is None or self._reader.is_closed())
            if sleeps:
                self._reader = None
                self._polling = self._front = True
            else:
                call.attended = False  # one at a time: the engine goes on for the others
            self._tell_wakes()
            taken = self._advance()
        _settle(taken)
        if not sleeps:
            return
        try:
            poll = select.poll()
            poll.register(self._front_wake, select.POLLIN)
            while not self._over(call) and (left := until - time.monotonic()) > 0:
                poll.poll(left * 1000 + 1)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._front_wake)
                self._go_on()
        finally:
            with self._lock:
                self._polling = self._front = False
                call.attended = False  # where the time of this wait was over before the call was
                if not self._is_whole():
                    os.close(self._front_wake)
                else:
                    self._tell_wakes()

    def _go_on(self) -> None:
        with self._lock:
            taken = self._advance() if self._calls and self.whole else []
        if taken:
            _settle(taken)

    def _advance(self) -> list[NearCall]:
        """Take the small calls as far as they go, and wake who waits for that. Under the lock; `_settle` follows."""
        small = self._small
        published, consumed = small.published, small.consumed
        try:
            taken = [self._calls.pop(each.number, None) for each in small.advance()]
            return [call for call in taken if call is not None]  # None: it was cancelled
        except Exception as error:
            if not self._broken:
                self._broken = True
                with contextlib.suppress(RuntimeError):  # the engine's loop is closed: all calls have ended
                    self._loop.call_soon_threadsafe(self._failed, error)
            return []
        finally:
            if small.published != published:
                self._wake(PUBLISHED, published)
            if small.consumed != consumed:
                self._wake(CONSUMED, consumed)

    def _failed(self, error: Exception) -> None:
        if self.whole and self._overseer is not None:
            first = next(iter(self._calls.values()), None)
            self._overseer.near_failed(first, error)

    def _wake(self, word: int, before: int) -> None:
        """A word of ours has grown from `before`: wake who sleeps, if it was the last one that was waited for.

        Whoever is the last of all to raise a word sees, behind his fence, that all others have; of two at the same time
        at least one does. Who sleeps has looked once more behind a fence of his own, so nobody is forgotten.
        """
        memory = self._memory
        memory.fence()
        if word != CONSUMED:
            for rank, _, _ in self._wakes:
                if memory.load(rank, word) <= before:
                    return
        for rank, front, back in self._wakes:
            bits = memory.load(rank, WAKE)
            if word == CONSUMED and not bits & ROOM:
                continue
            if bits & FRONT:
                _ring(front)
            if bits & BACK:
                _ring(back)

    def _tell_wakes(self) -> None:
        """Tell the others who is to be woken. Under the lock; who waits looks once more after it."""
        bits = FRONT if self._front else 0
        if self._large_waits or any(not call.attended or call.ticks > 1 for call in self._calls.values()):
            bits |= BACK
        if self._small.waiting:
            bits |= ROOM | BACK
        if bits != self._bits:
            self._bits = bits
            self._memory.store(WAKE, bits)
        self._memory.fence()

    # -- small calls: the engine's thread ------------------------------------------------------------------------

    def cancel(self, call: NearCall) -> None:
        """See `NearCall.cancel`."""
        if self.take_out(call) and self._overseer is not None:
            self._overseer.near_cancelled(call)
        elif call.ending is not None:
            call.ending.cancel()

    def take_out(self, call: NearCall) -> bool:
        """Take a call out, which is over; return whether it was not before."""
        with self._lock:
            return self._calls.pop(call.small.number, None) is not None

    # -- large reductions: the engine's thread -------------------------------------------------------------------

    def reduce(self, given: Array | Joined, output: Array, combine: Reduce, wake: Callable[[], None]) -> LargeReduction:
        """Begin a large reduction, after those before it.

        Args:
            given: This rank's elements, flat.
            output: Gets the result: as many, of the same type.
            combine: Computes it.
            wake: Called when it has ended, well or not; not before this returns.
        """
        large = LargeReduction(self, partial(reduce_in_chunks, given=given, output=output, reduce=combine), wake)
        self._larges.append(large)
        self._turn_soon()
        return large

    def leave(self, large: LargeReduction) -> None:
        """A large reduction is closed."""
        if large in self._larges:
            self._larges.remove(large)

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turning = False
        self._turn()

    def _turn(self) -> None:
        """Take large reductions as far as they go, for some milliseconds at most."""
        if not self._larges or not self.whole:
            return
        until = time.perf_counter_ns() + _TURN_NS
        memory = self._large_memory
        while self._larges and self.whole:
            large = self._larges[0]
            before = memory.load(self.rank, STAGE)
            if large.needs and not self._reached(large.needs):
                if self._large_waits:
                    return
                with self._lock:
                    self._large_waits = True
                    self._tell_wakes()
                continue  # one more look, now that they know
            if self._large_waits:
                with self._lock:
                    self._large_waits = False
                    self._tell_wakes()
            end = large.go_on(memory, self._stage)
            if memory.load(self.rank, STAGE) != before:
                with self._lock:
                    self._wake(STAGE, before)
            if end is not None:
                self._stage = end
                self.leave(large)
                large.wake()
            elif large.failed:
                large.wake()
                return
            if time.perf_counter_ns() > until:
                self._turn_soon()
                return

    def _reached(self, stage: int) -> bool:
        return all(self._large_memory.load(rank, STAGE) >= stage for rank, _, _ in self._wakes)


def _settle(taken: Sequence[NearCall], *, idle: bool = False) -> None:
    """Settle calls that have been taken; without the lock. idle: as `Settle` has it."""
    for call in taken:
        call.settle(call.small.number, None, idle)


def _ring(wake: int) -> None:
    with contextlib.suppress(BlockingIOError):  # its count is full: it has been woken often enough
        os.eventfd_write(wake, 1)


class LargeReduction:
    """A large reduction under way, as the communicator runs it (quicoll.engine.executor.Execution is the other kind).

    needs: the stage that all have to have reached before it goes on; 0: none. wake: to be called when it has ended.
    """

    def __init__(
        self,
        near: Neighbourhood,
        make: Callable[[SharedMemory, int], Generator[int, None, int]],
        wake: Callable[[], None],
    ) -> None:
        self._near = near
        self._make = make
        self.wake = wake
        self._run: Generator[int, None, int] | None = None
        self._error: Exception | None = None
        self._over = False
        self.needs = 0

    def finished(self) -> bool:
        """Return whether it has ended. Raises what it failed by."""
        if self._error is not None:
            raise self._error
        return self._over

    @property
    def failed(self) -> bool:
        """Whether `finished` would raise."""
        return self._error is not None

    def close(self) -> None:
        """Read no input and write no output from here on."""
        self._near.leave(self)
        if self._run is not None:
            self._run.close()

    def go_on(self, memory: SharedMemory, base: int) -> int | None:
        """Go on to the next stage that has to be waited for. Return the last one's number at the end."""
        if self._run is None:
            self._run = self._make(memory, base)
        try:
            self.needs = next(self._run)
        except StopIteration as stop:
            self._over = True
            return int(stop.value)
        except Exception as error:
            self._error = error
        return None
