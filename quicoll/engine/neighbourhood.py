"""The ranks of a view where all share a host: their calls through shared memory, and who takes them further.

Memory and protocols are in quicoll.local, which never waits. Here is decided who takes calls further, who sleeps, who
is woken and how calls end; the system is asked by `HostWakes` alone (host.py). A call is begun on its caller's thread,
and a small one mostly ends there: in the same moment, where all others have called; within a short look; or when the
last of the others wakes the caller, who sleeps in front, in a thread or in his event loop. Of a large one all ranks
agree in the same way; then the engine carries its payloads through the rings, on its thread.

    begun       the call has its number and waits for a slot, or is in one; it is in `_calls`. Whoever of its group
                publishes last wakes the engine (BACK), which takes it further
    attended    its caller looks, or sleeps, and is woken in the engine's place (FRONT)
    stands      where nobody looks (`HostWakes.crowded`) and a loop is in front, FRONT stands in WAKE between calls. A
                call of which all know that it is small is attended from its begin then: whoever publishes last wakes
                the loop, whether or not anybody awaits the call. So one look, behind the fence after its publication,
                is all that its begin takes. If the loop computes meanwhile, its step's end or a tick takes it further
    adopted     its caller has not seen it end within two ticks of the engine, or it waits for a slot: the engine is
                woken as well, and takes it further
    carried     all have called, and the payloads do not all fit into slots: it is in its row's `larges` as well, in the
                order of the calls, of which the engine carries the first
    over        taken out of `_calls`, once, under the lock, by whoever ends it: with its result by the thread that has
                taken it, or the engine that has carried it; with an error by the engine. Then its future is settled

An exception of a signal handler (Ctrl-C) may come between any two steps of a caller's thread. So what has been taken
stands in `_taken` until it has been settled, and the engine, which no signal interrupts, settles what stands there; and
where the steps themselves were interrupted the view ends, because nobody knows what is half done. The call that was
being made is cancelled by its caller, which ends the view as well.

The order of the calls. Each group whose ranks are all here has a row (rows.py), and all its calls have their numbers
from there, whichever way they go. A call here carries its number in its slot, one over QUIC in its announcement. Where
two ranks call different things that both go through memory, the slots differ. Where one calls what does and another
what does not, that one announces a number which was taken here: the engine sees so within a tick, and the view ends by
a Mismatch. Rows are taken further apart from each other, and large calls of several rows in turn: what one waits for
may be what a peer calls in another.

Late calls. Nobody sees the moment in which another one calls; but who waits for longer than two ticks looks at each
who is there, and tells when all are (`Overseer.near_called`). So a rank that is late by a few ticks is known to those
who have waited for it, to a tick; a call that nobody waits for costs nothing.

Deadlines, cancelling, farewells and the end of the view are the engine's affair, on its thread, as for all operations:
it looks after the calls every TICK_S. Of a process that ends the host tells; it has lost its link then, if a moment
later it still has one. So no call waits longer than its deadline while the engine runs; and while it does not, who
waits hears of it as in all calls (quicoll.engine.runtime).

Locks. `_lock` holds while calls are taken further and while WAKE is written; nobody waits with it, and nothing is
settled under it. To carry large ones needs none: one thread does, with words of their own.

Invariants:
    - nobody is forgotten: who sleeps has told so in WAKE and looked once more behind a fence after it; who raises a
      word looks at WAKE behind a fence after that (quicoll.local.layout). A wake-up that is lost costs a tick
    - a call is settled once: by who has taken it out of `_calls`
    - after `end` nothing of the memory is touched, no timer is left, and `HostWakes` is closed
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Final, Protocol

from quicoll.engine.looking import LOOK_NS, QUESTION_NS, Looks
from quicoll.engine.process_ends import ProcessEnds
from quicoll.engine.rows import CallRow, Large
from quicoll.errors import LocalError
from quicoll.local.layout import BACK, CONSUMED, FRONT, PROCESSOR, PUBLISHED, ROOM, STAGE, WAKE
from quicoll.local.rooms import Rooms, open_rooms
from quicoll.local.small import under_way
from quicoll.observability.flight import ENDED, UnderWay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quicoll.engine.host import MetHost
    from quicoll.engine.rows import NearCall
    from quicoll.local.small import SmallCall
    from quicoll.observability.flight import ViewRecorder

__all__ = ["GROUP", "TICK_S", "Neighbourhood", "Overseer"]

GROUP: Final = 0  # the id of the group of all ranks (quicoll.collectives.subgroups)
TICK_S = 0.02
_AWAIT_S = 1.0  # of a thread that sleeps here; then it waits as for all calls, and the engine goes on for it
_TURN_NS = 1_000_000  # of the engine's thread for large calls, until its other work has its turn


class Overseer(Protocol):
    """What a neighbourhood asks of the communicator, on the engine's thread. asks: it wants to hear of calls that are
    due."""

    @property
    def asks(self) -> bool: ...

    def near_failed(self, call: NearCall | None, error: Exception) -> None:
        """A call has failed, or all have: the view is over."""
        ...

    def near_cancelled(self, call: NearCall) -> None:
        """A call was cancelled, and is out of the neighbourhood's hands."""
        ...

    def near_called(self, call: NearCall, arrived_ns: dict[int, int]) -> None:
        """All ranks have called, and a tick has passed before. arrived_ns: when each call came to be known here."""
        ...

    def near_late(self, call: NearCall, present: Sequence[int]) -> None:
        """A call has not ended by its deadline. present: the ranks of the view that have called as much as this one."""
        ...

    def near_due(self, call: NearCall, present: Sequence[int]) -> None:
        """A call will be late soon. present: the ranks that have called as much as this one."""
        ...

    def near_tick(self) -> None:
        """Time has passed, and calls may have ended."""
        ...


class Neighbourhood:
    """See the module's head. Made on the engine's thread; `attach` makes it work.

    whole: calls may begin. rank, world: of the view. row: of the group of all ranks.
    """

    def __init__(self, met: MetHost, *, loop: asyncio.AbstractEventLoop) -> None:
        """Take what ranks have that have met.

        Args:
            met: It; `end` gives it back.
            loop: The engine's.
        """
        memory = met.memory
        self.rank = memory.rank
        self.world = memory.layout.world
        self.whole = True
        self._memory = memory
        self._large_memory = met.memory_for_large
        self._wakes = met.wakes
        self._orders = self.world > 2  # who is woken before whom makes a difference
        self._rooms = Rooms(memory)
        everyone = range(self.world)
        self.row = CallRow(GROUP, everyone, everyone, self.rank, memory, met.memory_for_large)
        self._rows: dict[int, CallRow] = {GROUP: self.row}
        self._at_work: dict[int, CallRow] = {}  # those of them that have calls under way
        self._loop = loop
        self._lock = threading.Lock()
        self._calls: dict[tuple[int, int], NearCall] = {}  # by group and number
        self._taken: dict[tuple[int, int], NearCall] = {}  # out of `_calls`, and not known to be settled
        self._broken = False  # a call has failed, and the engine is to be told, or was
        self._front = False  # somebody sleeps in front
        self._standing: asyncio.AbstractEventLoop | None = None  # in front, and FRONT stands for it
        self._large_waits = False  # the engine is to be woken for large ones
        self._bits = 0  # what stands in WAKE
        self._processor = 0  # what stands in PROCESSOR
        self._carrying: dict[int, CallRow] = {}  # rows with large calls; the one carried last is the last
        self._turning = False  # the engine's loop will go on with large ones
        self._overseer: Overseer | None = None
        self._flight: ViewRecorder | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ends = ProcessEnds(loop)
        self._looks = Looks(met.wakes.now_ns())

    def now(self) -> float:
        """Return seconds, of the clock of the engine's loop. Any thread may ask."""
        return self._wakes.now()

    # -- on the engine's thread: begin and end -------------------------------------------------------------------

    def attach(self, overseer: Overseer, on_gone: Callable[[int], None], flight: ViewRecorder | None = None) -> None:
        """Go to work for a view that is installed.

        Args:
            overseer: Hears of failures.
            on_gone: Called with the rank of a process that has ended, when it has had time to say good-bye before.
            flight: Is told what is called, and when it ends.
        """
        self._overseer = overseer
        self._flight = flight
        self._wakes.listen(self._on_back, lambda rank: self._ends.note(rank, on_gone))
        self._timer = self._loop.call_later(TICK_S, self._on_tick)

    def end(self) -> list[NearCall]:
        """Stop for good, and let go of all that the host has given. Return the calls under way, in their order."""
        self._settle()
        with self._lock:
            if not self.whole:
                return []
            self.whole = False
            left = list(self._calls.values())
            self._calls.clear()
            self._at_work.clear()
            for row in self._rows.values():
                for large in row.larges:
                    large.close()
            self._wakes.close()
        self._ends.stop()
        if self._timer is not None:
            self._timer.cancel()
        return left

    def _on_back(self) -> None:
        self.go_on()
        self._turn()

    def _on_tick(self) -> None:
        if not self.whole or self._overseer is None:
            return
        self._timer = self._loop.call_later(TICK_S, self._on_tick)
        self.go_on()
        if not self._turning:
            self._turn()  # a wake-up that went astray costs a tick
        now = self.now()
        late: NearCall | None = None
        present: list[int] = []
        due: list[tuple[NearCall, list[int]]] = []
        with self._lock:
            for call in self._calls.values():
                call.ticks += 1
                if call.ticks > 1 and not call.small.done:
                    self._note(call, now)
                if call.due <= now and self._overseer.asks:
                    call.due = call.deadline + 1
                    due.append((call, call.row.present(call.small)))
                if late is None and call.deadline <= now:
                    late, present = call, call.row.present(call.small)
            self._tell_wakes()
        for call, here in due:
            self._overseer.near_due(call, here)
        if late is not None:
            self._overseer.near_late(late, present)
        if self.whole:
            self._overseer.near_tick()

    def _note(self, call: NearCall, now: float) -> None:
        """Note who has called by now. Under the lock."""
        arrived_ns = call.arrived_ns = call.arrived_ns or {}
        for rank in call.row.present(call.small):
            arrived_ns.setdefault(rank, round(now * 1e9))

    def _called(self, call: NearCall) -> None:
        """All have called, whom a tick has seen to be waited for."""
        if self.whole and self._overseer is not None and call.arrived_ns is not None:
            self._overseer.near_called(call, call.arrived_ns)

    # -- the order of the calls ----------------------------------------------------------------------------------

    def row_of(self, group: int, ranks: Sequence[int]) -> CallRow:
        """Return the row of a group. Whoever issues calls holds a lock of his own.

        Args:
            group: The id.
            ranks: Its ranks in the view, by number in the group; this one among them.
        """
        row = self._rows.get(group)
        if row is None:
            number = ranks.index(self.rank)
            row = CallRow(group, ranks, ranks, number, self._memory, self._large_memory, self._rooms)
            self._rows[group] = row
        return row

    def numbers(self, group: int) -> int:
        """Return how many calls of a group have a number here."""
        row = self._rows.get(group)
        return 0 if row is None else row.numbers

    def members(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group that has a row here, by their number in it."""
        return self._rows[group].ranks

    @property
    def running(self) -> int:
        """How many calls are under way here."""
        return len(self._calls)

    def under_way(self, group: int, number: int) -> SmallCall | None:
        """Return the call of this number here, None where it is over, or there was none."""
        call = self._calls.get((group, number))
        return None if call is None else call.small

    def called_by(self, rank: int) -> list[tuple[int, int]]:
        """Return the group and number of the calls under way here which a rank has called as well, or has no part
        in."""
        with self._lock:
            return [
                key
                for key, call in self._calls.items()
                if rank not in call.row.ranks or rank in call.row.present(call.small)
            ]

    def pending(self, rank: int) -> str:
        """Return what a rank has under way here in a group of which this rank has nothing under way; "" for nothing."""
        with self._lock:
            if not self.whole:
                return ""
            for group, at in [(GROUP, 0), *open_rooms(self._memory, rank)]:
                if group not in self._at_work and (text := under_way(self._memory, rank, at)):
                    return text
        return ""

    def waited_for(self) -> list[UnderWay]:
        """Return the calls under way here, and whose call of each is not there. On the engine's thread."""
        with self._lock:
            return [
                UnderWay(
                    call.name,
                    call.small.signature,
                    call.step,
                    call.deadline - call.timeout,
                    dict.fromkeys(call.row.missing(call.small), ""),
                )
                for call in self._calls.values()
                if self.whole and call.small.passage is None
            ]

    # -- calls: any thread ---------------------------------------------------------------------------------------

    def begin(self, call: NearCall) -> bool:
        """Begin a call whose number was taken, and take it as far as it goes.

        Returns:
            Whether it has begun: False where the view is over.
        """
        with self._lock:
            if not self.whole:
                return False
            if self._flight is not None:
                at = call.deadline - call.timeout
                call.entry = self._flight.called(
                    call.name, call.small.signature, call.step, "memory", at, call.small.nbytes
                )
            row = call.row
            if self._orders and (here := self._wakes.processor()) != self._processor:
                self._processor = here
                self._memory.store(PROCESSOR, here)
            self._calls[row.group, call.small.number] = call
            self._at_work[row.group] = row
            row.under_way += 1
            row.small.add(call.small)
            self._advance()
            if self._standing is not None and call.small.is_small:
                call.attended = True
                told = not row.small.waiting
            else:
                told = not self._calls and not self._bits
            if not told:
                self._tell_wakes()
                self._advance()
        self._settle()
        return True

    def look(self, call: NearCall) -> bool:
        """Look for a moment whether all have called; return whether they have.

        With a budget and a rule for who is in whose way, as the engine's loop looks (quicoll.engine.looking).
        """
        call.attended = True
        if self._over(call) or self._wakes.crowded:
            return call.small.done
        wakes = self._wakes
        began = now = wakes.now_ns()
        if not self._looks.may(now):
            return False
        with self._lock:
            if self.whole:
                self._tell_wakes()
        while now - began < LOOK_NS:
            wakes.offer()
            self.go_on()
            if self._over(call):
                self._looks.found()
                return call.small.done
            before, now = now, wakes.now_ns()
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
        if self._standing is loop and call.attended:
            return
        if self.look(call):
            return
        with self._lock:
            if not self.whole:
                return
            if not self._wakes.wait_in(loop, self._on_front):
                call.attended = False  # one at a time: the engine goes on for the others
            elif self._wakes.crowded:
                self._standing = loop
            self._front = self._front or call.attended
            self._tell_wakes()
            self._advance()
            self._rest()
        self._settle()

    def _rest(self) -> None:
        """Nobody sleeps in a loop where no call is under way. Under the lock."""
        if self._calls:
            return
        if self._standing is not None:
            if self._bits != FRONT:
                self._tell_wakes()
        elif self._front and not self._wakes.thread_in_front:
            self._front = False
            self._tell_wakes()

    def _on_front(self) -> None:
        with self._lock:
            if not self.whole:
                return
            self._advance()
            self._rest()
        self._settle(idle=True)

    def block(self, call: NearCall, timeout: float | None) -> None:
        """Block this thread until all have called, or for `timeout` seconds, or for a second.

        A small call has ended then. The end of a large one is told as that of any operation.
        """
        if self.look(call):
            return
        until = self.now() + (_AWAIT_S if timeout is None else min(timeout, _AWAIT_S))
        with self._lock:
            if not self.whole:
                return
            sleeps = self._wakes.take_front()
            if sleeps:
                self._front, self._standing = True, None
            else:
                call.attended = False  # one at a time: the engine goes on for the others
            self._tell_wakes()
            self._advance()
        self._settle()
        if not sleeps:
            return
        try:
            while not self._over(call) and (left := until - self.now()) > 0:
                self._wakes.sleep(left)
                self.go_on()
        finally:
            with self._lock:
                self._front = False
                call.attended = False  # where the time of this wait was over before the call was
                self._wakes.leave_front()
                if self._is_whole():
                    self._tell_wakes()

    def go_on(self) -> None:
        """Take the calls as far as they go now. Any thread may ask for it."""
        with self._lock:
            if self._calls and self.whole:
                self._advance()
        self._settle()

    def _advance(self) -> None:
        """Take the calls as far as they go, and wake who waits for that. Under the lock; `_settle` follows."""
        for row in list(self._at_work.values()):
            while self._advanced(row):
                pass

    def _advanced(self, row: CallRow) -> bool:
        """Look once how far the calls of a row go. Return whether to look again: calls wait for a slot, and some were
        taken."""
        small, group = row.small, row.group
        told, consumed = small.published, small.consumed
        try:
            if not row.publish():
                return False
            if small.published != told:
                self._wake(row, PUBLISHED, told)  # before `take`: the others take theirs meanwhile
                told = small.published
            for each in row.take():
                call = self._calls.get((group, each.number))
                if call is None:  # it was cancelled
                    continue
                if call.arrived_ns is not None:
                    self._note(call, self.now())
                    self._on_engine(self._called, call)
                if each.passage is None:
                    self._taken[group, each.number] = call
                    self._leave(call)
                else:
                    call.attended = False
                    row.larges.append(Large(call, each.passage))
                    self._carrying[group] = row
                    if not self._turning:
                        self._turning = True
                        self._on_engine(self._next_turn)
        except Exception as error:
            self._fail_soon(error, row)
        except BaseException as raised:  # of a signal handler, in the middle of anything
            whole = [call for call in self._calls.values() if call.small.done and call.small.passage is None]
            for call in whole:
                self._taken[call.row.group, call.small.number] = call
                self._leave(call)
            text = f"{type(raised).__name__} of a signal handler came in the middle of it"
            self._fail_soon(LocalError(text, usable=False), row)
            raise
        finally:
            if small.published != told:
                self._wake(row, PUBLISHED, told)
            if small.consumed != consumed:
                self._wake(row, CONSUMED, consumed)
        return small.waiting and small.consumed != consumed and not self._broken

    def _leave(self, call: NearCall) -> bool:
        """Take a call out of those under way; return whether it was one. Under the lock."""
        row = call.row
        if self._calls.pop((row.group, call.small.number), None) is None:
            return False
        row.under_way -= 1
        if not row.under_way:
            self._at_work.pop(row.group, None)
        return True

    def _settle(self, *, idle: bool = False) -> None:
        """Settle what has been taken; without the lock. idle: as `Settle` has it. Of two threads the first one does."""
        while self._taken:
            for key, call in list(self._taken.items()):
                if call.entry is not None:
                    call.entry[ENDED] = self.now()
                call.settle(call.small.number, None, idle)
                self._taken.pop(key, None)

    def _fail_soon(self, error: Exception, row: CallRow) -> None:
        if not self._broken:
            self._broken = True
            self._on_engine(self._failed, error, row)

    def _on_engine(self, what: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the engine's loop is closed: all calls have ended
            self._loop.call_soon_threadsafe(what, *args)

    def _failed(self, error: Exception, row: CallRow) -> None:
        self._settle()
        if self.whole and self._overseer is not None:
            first = next((call for call in self._calls.values() if call.row is row and not call.small.done), None)
            self._overseer.near_failed(first, error)

    def _wake(self, row: CallRow, word: int, before: int) -> None:
        """A word of ours in a row has grown from `before`: wake who sleeps, if it was the last one that was waited for.

        Those whose caller is on another processor first: who is woken on this one mostly has it at once, and the others
        would be woken when it is given up again, while theirs idle.

        Whoever is the last of all to raise a word sees, behind his fence, that all others have; of two at the same time
        at least one does. Who sleeps has looked once more behind a fence of his own, so nobody is forgotten.
        """
        memory, peers = self._memory, row.peers
        memory.fence()
        if word != CONSUMED:
            for rank in row.others:
                if row.load(rank, word) <= before:
                    return
            if self._orders:
                here = self._processor
                peers = sorted(peers, key=lambda rank: memory.load(rank, PROCESSOR) == here)
        for rank in peers:
            bits = memory.load(rank, WAKE)
            if word == CONSUMED and not bits & ROOM:
                continue
            if bits & FRONT and word != STAGE:  # the engine alone waits for stages
                self._wakes.ring(rank, front=True)
            if bits & BACK:
                self._wakes.ring(rank, front=False)

    def _tell_wakes(self) -> None:
        """Tell the others who is to be woken. Under the lock; who waits looks once more after it."""
        bits = FRONT if self._front else 0
        for call in self._calls.values():
            if not call.small.done and (not call.attended or call.ticks > 1):
                bits |= BACK
        if self._large_waits:
            bits |= BACK
        for row in self._at_work.values():
            if row.small.waiting:
                bits |= ROOM | BACK
        if bits != self._bits:
            self._bits = bits
            self._memory.store(WAKE, bits)
        self._memory.fence()

    # -- calls: the engine's thread ------------------------------------------------------------------------------

    def cancel(self, call: NearCall) -> None:
        """See `NearCall.cancel`."""
        if self.take_out(call) and self._overseer is not None:
            self._overseer.near_cancelled(call)
        elif call.ending is not None:
            call.ending.cancel()

    def take_out(self, call: NearCall) -> bool:
        """Take a call out, which is over, and with it the view; return whether it was not before."""
        for large in call.row.larges:  # while its room is still its group's
            if large.call is call:
                large.close()
        with self._lock:
            return self._leave(call)

    # -- large calls: the engine's thread ------------------------------------------------------------------------

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turning = False
        self._turn()

    def _turn(self) -> None:
        """Take large calls as far as they go, for some milliseconds at most; the rows that have any in turn."""
        if not self._carrying or not self.whole:
            return
        until = self._wakes.now_ns() + _TURN_NS
        while self._carrying and self.whole:
            row = next((row for row in list(self._carrying.values()) if row.reached(row.larges[0].needs)), None)
            if row is None:
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
            if not self._carry(row):
                return
            if self._wakes.now_ns() > until:
                self._turn_soon()
                return

    def _carry(self, row: CallRow) -> bool:
        """Take a row's first large call to the next stage that has to be waited for. Return whether it goes on."""
        large, memory = row.larges[0], row.memory
        before = memory.load(row.rank, STAGE)  # of ours, which nobody else writes
        try:
            end = large.go_on(row)
        except Exception as error:
            self._carrying.clear()  # none of them goes on, whatever becomes of the view
            if self._overseer is not None:
                self._overseer.near_failed(large.call, error)
            return False
        if memory.load(row.rank, STAGE) != before:
            with self._lock:
                self._wake(row, STAGE, before)
        with self._lock:
            if end is not None:
                row.end_large(end)
            self._carrying.pop(row.group, None)
            if row.larges:
                self._carrying[row.group] = row
            found = end is not None and self._leave(large.call)
        if found:
            if large.call.entry is not None:
                large.call.entry[ENDED] = self.now()
            large.call.settle(large.call.small.number, None, False)
        return True
