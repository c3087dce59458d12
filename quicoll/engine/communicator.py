"""The ranks of one view, joined by links: collectives run here, on the engine's loop.

    announce    each rank sends what it called (collective, dtype, shape, op, order, ...) to every other
    execute     the plan runs meanwhile; results stand in memory of ours
    agree       all called the same; only then does the caller see a result

Nothing here is a task until something fails. An operation stands in a stage (`Headway`), and whatever it may wait for
lets it go on (`_advance`) in the turn of the loop in which that comes: an announcement, the end of its plan, the
network, its deadline, the end of the view. The last of these ends it (`_end`), once, and its caller hears of that in
the same turn.

So ranks that take different code paths get Mismatch, all of them, naming both sides; a rank that never calls is named
when the deadline passes. quicoll.engine.calls compares; here are the links, the deadlines, and what follows from a
failure.

A communicator breaks once and for all: when a peer is lost, a collective fails or is cancelled, or the coordinator ends
the view. Then every operation in flight ends, and what still arrives for this view is dropped.

    whole     operations run
    broken    something failed here (`error`): every transfer is taken back, and the coordinator has been told
    ended     the coordinator has told every rank the same (`end_error`): why the view is over, and which rank caused it

Callers get `end_error` and not what this rank saw, so that all ranks raise one kind of error with one cause; what was
seen here is its `__cause__`. Invariants: an operation ends by its deadline; `error` and `end_error` never change once
set; no transfer of an operation that uses its caller's memory is under way when the caller goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from quicoll.engine.calls import Call, Calls, Slot, measurements
from quicoll.engine.differences import brief, difference
from quicoll.engine.executor import Execution, TransferFailed
from quicoll.engine.given import SEAL_BYTES
from quicoll.engine.host_ways import SpoiledInMemory
from quicoll.engine.in_flight import Ended, Headway, InFlight, Watch
from quicoll.engine.late_stacks import ahead
from quicoll.engine.link_meter import SeenLink
from quicoll.engine.messages import Announce, Farewell, encode_message
from quicoll.engine.noticed import Carried
from quicoll.errors import Corrupted, LocalError, Mismatch, PeerError, QuicollError, again
from quicoll.local.small import Differing, Spoiled
from quicoll.observability.flight import GIVEN, UnderWay
from quicoll.plan.network import MEMORY_RATE
from quicoll_transport.errors import LinkLost, MessageCorrupted
from quicoll_transport.errors import TransportError as _TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll.engine.calls import Work
    from quicoll.engine.executor import Way
    from quicoll.engine.late_stacks import LateStacks
    from quicoll.engine.neighbourhood import Neighbourhood
    from quicoll.engine.noticed import WaysBeside
    from quicoll.engine.rows import NearCall
    from quicoll.membership.link_figures import LinkCarrier
    from quicoll.membership.view import View
    from quicoll.observability.flight import ViewRecorder
    from quicoll_transport.endpoint import Link

__all__ = ["Communicator", "view_prefix"]

_TAG = struct.Struct("!QQI")  # view, group, seq; four bytes of a message's index follow
_NOTHING_BESIDE = Carried(at_work=False, sent=0, received=0)
_END_S = 5.0  # for the coordinator to say why a broken view is over


def view_prefix(view_id: int) -> bytes:
    """Return what the tags of all messages of a view start with."""
    return view_id.to_bytes(8, "big")


class _Stopped(Exception):
    """The operation is late, or the communicator has broken. Never leaves this module."""


class Communicator:
    """One view's links and operations. See the module's head.

    error: why it broke, None while it works. end_error: what all ranks are given, None until the coordinator has ended
    the view. near: the way between the view's ranks where all share a host: their calls begin and mostly end there
    (neighbourhood.py); what becomes of them when they do not is settled here, as for all operations.
    ways: those with something beside their links (noticed.py).
    """

    def __init__(
        self,
        view: View,
        *,
        node: str,
        loop: asyncio.AbstractEventLoop,
        links: dict[int, Link],
        on_failure: Callable[[QuicollError, tuple[int, ...]], None],
        on_called: Callable[[str, dict[int, int], bool], None] = lambda op, arrived_ns, near: None,
        late_ns: int = -1,
        near: Neighbourhood | None = None,
        ways: Sequence[WaysBeside] = (),
        flight: ViewRecorder | None = None,
        late: LateStacks | None = None,
    ) -> None:
        """Go to work.

        Args:
            view: The view.
            node: This rank's node.
            loop: The loop of the links.
            links: To every other rank of the view.
            on_failure: Called once with (error, ranks) when it breaks from inside. ranks: those whose bits came
                corrupted, or who called something else.
            on_called: Called with (op, arrived_ns, near) for each operation that all have called, and one of them late.
                arrived_ns: when each rank's call came to be known here. near: through memory, and by no link.
            late_ns: How much later than the first a call has to be known here for that; negative: each one counts.
            near: The way between the ranks where all share a host, which ends with this.
            ways: Those that have something beside their links, by which messages of plans go (noticed.py): the memory
                of this host, where not all share it, and lanes. They end with this.
            flight: Is told what is called, and how it ends.
            late: Asks late ranks where they are; None asks nobody.
        """
        rank = view.rank_of(node)
        if rank is None:
            raise ValueError(f"{node} is not in view {view.view_id}")
        self.view = view
        self.rank = rank
        self.world = view.world_size
        self.error: QuicollError | None = None
        self.end_error: QuicollError | None = None
        self._loop = loop
        self._links = links
        self._on_failure = on_failure
        self._on_called = on_called
        self._late_ns = late_ns
        self.near = near
        self.ways = tuple(ways)
        self._ways: dict[int, Way] = dict(links)
        self._in_memory: dict[int, Way] = {}
        for each in ways:
            found = each.to(links)
            self._ways.update(found)
            if each.in_memory:
                self._in_memory.update(found)
        self._flight = flight
        self._late = late
        self._calls = Calls(view, rank)
        self._calls.near = near
        self._running: dict[tuple[int, int], InFlight] = {}  # by group and number
        self._watches: list[Watch] = []
        self._timer: asyncio.TimerHandle | None = None  # for the first deadline of those that ran when it was set
        self._timer_at = 0.0
        self._count = 0  # of those whose caller waits; taking transfers back takes longer
        self._broken: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._corrupt = {rank: link.stats.corrupt for rank, link in links.items()}  # before this view
        self._answered: asyncio.Future[None] | None = None

    @property
    def running(self) -> int:
        """Operations in flight."""
        return self._count + (0 if self.near is None else self.near.running)

    @property
    def by_memory(self) -> tuple[int, ...]:
        """The other ranks that this one hands what it can through the memory of its host."""
        if self.near is not None:
            return tuple(sorted(self._links))
        return tuple(sorted(rank for rank, way in self._in_memory.items() if self._ways[rank] is way))

    def seen_links(self) -> dict[int, SeenLink]:
        """Return how the links to all other ranks are now, and what carries long messages to each."""
        memory = dict.fromkeys(self.by_memory)
        carried = {rank: beside for each in self.ways for rank, beside in each.carried().items()}
        found = {}
        for rank, link in self._links.items():
            beside = carried.get(rank, _NOTHING_BESIDE)
            carrier: LinkCarrier = "memory" if rank in memory else "lanes" if beside.at_work else "link"
            found[rank] = SeenLink(link.snapshot(), carrier, beside.sent, beside.received)
        return found

    # -- what arrives --------------------------------------------------------------------------------------------

    def announced(self, rank: int, announce: Announce) -> None:
        """Take a peer's message of what it called."""
        if self.error is not None:
            return
        try:
            slot = self._calls.announced(rank, announce, round(self._loop.time() * 1e9))
        except PeerError as error:
            self.fail(error)
            return
        if slot is not None:
            self._links[rank].later(self._advance, self._running[slot.group, slot.seq])
        elif self._watches:
            self._look()
        if self.near is not None:
            self._check_numbers()

    def farewell(self, rank: int, message: Farewell) -> None:
        """Take a peer's message that it will leave, or that it needs this rank no longer."""
        self._answer(self._calls.farewell(rank, message))
        if self._answered is not None and not self._answered.done() and not self._calls.unanswered:
            self._answered.set_result(None)

    def divide(self) -> None:
        """Take note that this rank is in a sub-group."""
        self._calls.divide()

    def begun(self, step: int) -> None:
        """Take note that this rank begins a step, as the coordinator counts: peers that leave wait no longer."""
        self._calls.begun(step)
        self._answer(self._calls.answers())

    def _answer(self, answers: list[tuple[int, Farewell]]) -> None:
        for rank, message in answers:
            with contextlib.suppress(_TransportError):
                self._links[rank].send_app(encode_message(message))

    async def part(self, timeout: float, *, next_step: int | None = None) -> None:
        """Wait until no peer needs this view any more without this rank.

        Args:
            timeout: At most as many seconds. Nor does it wait any longer when the communicator breaks.
            next_step: Where this rank's work has ended: the step that would be next, as the coordinator counts. None
                waits only for operations that the peers have called by now.
        """
        if self.error is not None or self._answered is not None:
            return
        self._answered = self._loop.create_future()
        farewell = encode_message(Farewell(self.view.view_id, next_step=next_step, divided=self._calls.divided))
        told: list[int] = []
        for rank, link in self._links.items():
            try:
                link.send_app(farewell)
            except _TransportError:
                continue
            told.append(rank)
        self._calls.leave(told)
        self._answer(self._calls.answers())
        if told:
            await asyncio.wait({self._answered, self._broken}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    # -- operations ----------------------------------------------------------------------------------------------

    def start(
        self,
        call: Call,
        *,
        group: int,
        timeout: float,
        step: int | None,
        ended: Ended,
        number: int | None = None,
    ) -> InFlight | None:
        """Start a collective of this view.

        Its number is taken before this returns: the order in which calls come in defines identity.

        Args:
            call: The collective.
            group: The id of its group.
            timeout: Seconds for the whole of it.
            step: The number of the open step, for errors.
            ended: Called once with the collective's number in the group, or with the error (QuicollError: it failed;
                the communicator is broken, if it was not before). Perhaps before this returns.
            number: Its number, where that was taken before (neighbourhood.py).
        Returns:
            The operation, by which it is cancelled; None where the view was over before.
        """
        now = self._loop.time()
        deadline = now + timeout
        if self.error is not None:
            self._loop.create_task(self._refuse(call, deadline, step, ended))
            return None
        slot = self._calls.open(call, group, number)
        operation = InFlight(call, slot, ended, self._cancel, deadline=deadline, timeout=timeout, step=step)
        self._running[group, slot.seq] = operation
        self._count += 1
        if self._flight is not None:
            given = max(0, len(call.given) - SEAL_BYTES)
            operation.entry = self._flight.called(slot.name, call.signature, step, "quic", now, given)
        operation.late = deadline <= now
        if self._late is not None:
            operation.due -= ahead(timeout)
        if self._timer is None or operation.due < self._timer_at:
            self._arm(operation.due)
        try:
            self._announce(operation, round(now * 1e9))
        except Exception as error:
            self._fail_operation(operation, error)
        else:
            # Else it waits for what others announce, which is the next that it hears of.
            if slot.settled or call.sizes is None or operation.late or self.error is not None:
                self._advance(operation)
        return operation

    async def _refuse(self, call: Call, deadline: float, step: int | None, ended: Ended) -> None:
        """End a call that came when the view was broken."""
        error = self.error
        try:
            error = await self.end_of_view(deadline) or error
        finally:
            if error is not None:
                ended(None, self._again(error, call.name, step))

    def watch(self, groups: Mapping[int, int], *, timeout: float, step: int | None, ended: Ended) -> Watch:
        """Wait for a call of a peer's that this rank has no part of yet.

        Args:
            groups: The ids of the groups that count, and what `ended` gets for each.
            timeout: Seconds. That nobody calls in this time breaks the view, as with an operation.
            step: The number of the open step, for errors.
            ended: Called once with what belongs to the group, or with the error.
        Returns:
            The wait, by which it is cancelled.
        """
        now = self._loop.time()
        watch = Watch(groups, ended, self._cancel_watch, deadline=now + timeout, timeout=timeout, step=step)
        if self.error is not None:
            self._loop.create_task(self._end_watch(watch, self.error))
            return watch
        self._watches.append(watch)
        watch.timer = self._loop.call_at(watch.deadline, self._late_watch, watch)
        self._loop.call_soon(self._look)
        return watch

    def _look(self) -> None:
        """Give each wait what it waits for, in their order; one call is for one of them."""
        given: dict[int, None] = {}
        for watch in list(self._watches):
            group = self._calls.uncalled([each for each in watch.groups if each not in given])
            if group is not None:
                given[group] = None
                self._leave_watch(watch)
                watch.ended(watch.groups[group], None)

    def _leave_watch(self, watch: Watch) -> None:
        if watch.timer is not None:
            watch.timer.cancel()
            watch.timer = None
        self._watches.remove(watch)

    def _cancel_watch(self, watch: Watch) -> None:
        if watch in self._watches:
            self._leave_watch(watch)
            watch.ended(None, asyncio.CancelledError())

    def _late_watch(self, watch: Watch) -> None:
        self._leave_watch(watch)
        self._fail_here(f"no rank has sent what this one receives from any within {watch.timeout:g} s")
        if self.error is not None:
            self._loop.create_task(self._end_watch(watch, self.error))

    async def _end_watch(self, watch: Watch, error: QuicollError) -> None:
        try:
            error = await self.end_of_view() or error
        finally:
            watch.ended(None, self._again(error, "recv", watch.step))

    def _announce(self, operation: InFlight, now_ns: int) -> None:
        """Tell the others what is called. Raises TransferFailed."""
        slot, call = operation.slot, operation.call
        measured = self._measured(slot.ranks) if slot.leads else ()
        announce = Announce(self.view.view_id, slot.group, slot.seq, call.signature, call.counts, measured, call.given)
        data = encode_message(announce)
        for number, rank in enumerate(slot.ranks):
            if rank == self.rank:
                continue
            try:
                self._links[rank].send_app(data)
            except _TransportError as error:
                raise TransferFailed(number, error, sending=True) from error
        self._calls.called(slot, announce, now_ns)
        if self._calls.parting:
            self._answer(self._calls.answers())

    def _advance(self, operation: InFlight) -> None:
        """Something has happened that an operation may wait for: let it go on as far as it can."""
        if operation.stage is Headway.OVER or operation.ending is not None:
            return
        try:
            if operation.late or self.error is not None:
                raise _Stopped
            over = self._gone_on(operation)
        except Exception as error:
            self._fail_operation(operation, error)
            return
        if over:
            self._end(operation, operation.slot.seq, None)

    def _gone_on(self, operation: InFlight) -> bool:
        """Take an operation through its stages, and return whether it is over.

        Raises:
            TransferFailed: A message of it failed.
            Exception: Errors of ours, and whatever the computation raises.
        """
        slot, call, calls = operation.slot, operation.call, self._calls
        if call.sizes is not None and call.combine is not None:
            if not slot.settled:
                return False
            calls.compare(slot)
            if call.watched and max(slot.arrived_ns.values()) - min(slot.arrived_ns.values()) > self._late_ns:
                self._on_called(slot.name, slot.arrived_ns, False)
            call.combine(calls.given(slot, call.sizes), ())
            return True
        if operation.stage is Headway.CALLED:
            if call.gathers or slot.leads or len(slot.ranks) == 1:
                if not slot.settled:
                    return False
                calls.compare(slot)
            if slot.leads:
                calls.agree(slot)
                self._wake_all()
            operation.stage = Headway.AGREED
        if operation.stage is Headway.AGREED:
            if call.measures and not slot.leads and calls.network(slot.group) is None:
                return False
            if call.ask is not None:
                operation.stage = Headway.ASKED
                call.ask(calls.known(slot), partial(self._made, operation))
            else:
                self._execute(operation, call.make(calls.known(slot)))
        if operation.stage is Headway.ASKED:
            return False
        if operation.stage is Headway.RUNNING:
            # A transfer may fail because a peer called something else. So failures count once the calls are compared.
            if not slot.settled:
                return False
            calls.compare(slot)
            operation.stage = Headway.COMPARED
            if call.watched and max(slot.arrived_ns.values()) - min(slot.arrived_ns.values()) > self._late_ns:
                self._on_called(slot.name, slot.arrived_ns, False)
        return operation.execution is not None and operation.execution.finished()

    def _execute(self, operation: InFlight, work: Work) -> None:
        operation.stage = Headway.RUNNING
        operation.algorithm = work.plan.algorithm
        if operation.entry is not None:
            operation.entry[GIVEN] = sum(work.plan.inputs) * work.plan.itemsize
        operation.execution = Execution(
            work,
            ways=self._ways,
            ranks=operation.slot.ranks,
            prefix=self._prefix(operation.slot),
            wake=partial(self._woken, operation),
        )

    def _made(self, operation: InFlight, work: Work | None, error: Exception | None) -> None:
        """The work of an operation has come from where its caller makes it, or none does."""
        if operation.stage is not Headway.ASKED or operation.ending is not None:
            return
        try:
            if operation.late or self.error is not None:
                raise _Stopped
            if work is None:
                raise error or AssertionError("neither work nor an error")
            self._execute(operation, work)
        except Exception as failed:  # whatever it is, the operation ends by it, as in `_advance`
            self._fail_operation(operation, failed)
        else:
            self._loop.call_soon(self._advance, operation)

    def _woken(self, operation: InFlight) -> None:
        """A plan has ended."""
        execution = operation.execution
        if execution is not None and execution.failed:  # others may fail in this turn, and be the cause
            self._loop.call_soon(self._advance, operation)
        else:
            self._advance(operation)

    def _wake_all(self) -> None:
        for operation in self._running.values():
            self._loop.call_soon(self._advance, operation)

    def under_way(self) -> list[UnderWay]:
        """Return what this rank has called and what has not ended, and whose call of it has not come."""
        found = [
            UnderWay(
                each.slot.name,
                each.call.signature,
                each.step,
                each.deadline - each.timeout,
                self._calls.absent(each.slot),
            )
            for each in self._running.values()
        ]
        return found if self.near is None else [*found, *self.near.waited_for()]

    # -- how operations end --------------------------------------------------------------------------------------

    def _end(self, operation: InFlight, seq: int | None, error: BaseException | None) -> None:
        """An operation is over: with its number, or with an error."""
        operation.stage = Headway.OVER
        self._count -= 1
        if self._flight is not None and operation.entry is not None:
            at, heard_ns, fine = self._loop.time(), operation.slot.arrived_ns, error is None
            self._flight.ended(operation.entry, at, finished=fine, algorithm=operation.algorithm, heard_ns=heard_ns)
        if operation.execution is not None:
            operation.close()
        # Last, and with no turn of the loop since `fail`: a late announcement must find the slot or the failure.
        del self._running[operation.slot.group, operation.slot.seq]
        self._calls.finish(operation.slot)
        if self._calls.parting:
            self._answer(self._calls.answers())
        operation.ended(seq, error)

    def _cancel(self, operation: InFlight) -> None:
        if operation.stage is Headway.OVER:
            return
        self._fail_here(f"{operation.slot.name} was cancelled")
        if operation.ending is not None:
            operation.ending.cancel()
        self._end(operation, None, asyncio.CancelledError())

    def _fail_operation(self, operation: InFlight, seen: Exception) -> None:
        """An operation has failed: break the view, unless it is broken, and wait for why that is over."""
        slot, step = operation.slot, operation.step
        ranks: tuple[int, ...] = ()
        consequence = False
        if isinstance(seen, _Stopped):
            if operation.late or self.error is None:
                error: QuicollError = self._calls.late(slot, operation.timeout, step)
            else:
                error = self.error
        elif isinstance(seen, TransferFailed):
            rank = slot.ranks[seen.rank]
            error, consequence = self._translate(seen, rank, slot.name, step), seen.consequence
            if isinstance(error, Corrupted):
                ranks = self._corrupting(rank)
        elif isinstance(seen, Spoiled):
            error = self._again(self._spoiled(seen, "in what it announced"), slot.name, step)
            ranks = (seen.rank,) if seen.bits else ()
        elif isinstance(seen, QuicollError):
            error = self._again(seen, slot.name, step)
            if isinstance(seen, Mismatch):
                ranks = self._calls.differing(slot)
        else:  # of our own code or for lack of memory: nobody may have to wait for it
            self._fail_here(f"{slot.name} failed: {type(seen).__name__}: {seen}")
            self._end(operation, None, seen)
            return
        # What only follows from a failure at a peer is not reported: memory that was withdrawn there, bits that it
        # took for corrupted. Where the calls agree they have no other reason; the peer reports the cause, and the
        # consequence, if it came first, would hide it.
        if not consequence:
            self.fail(error, ranks)
        operation.close()  # before the wait, not after it
        operation.ending = self._loop.create_task(self._end_failed(operation, error))

    async def _end_failed(self, operation: InFlight, error: QuicollError) -> None:
        # What this caller did wrong he hears at once, the others from the coordinator. All else is as the coordinator
        # says: no new view comes before it has ended this one, so waiting for it costs nothing.
        try:
            told = error if isinstance(error, LocalError) else await self.end_of_view(operation.deadline)
        except asyncio.CancelledError as cancelled:  # the engine ends
            if operation.stage is not Headway.OVER:
                self._fail_here(f"{operation.slot.name} was cancelled")
                self._end(operation, None, cancelled)
            raise
        self.fail(error)  # a consequence whose cause nobody has reported
        final = self._again(told or error, operation.slot.name, operation.step, seen=error)
        final.__cause__ = None if told in (None, error) else error
        self._explain(final)
        self._end(operation, None, final)

    # -- calls through the memory of one host --------------------------------------------------------------------

    def near_failed(self, call: NearCall | None, error: Exception) -> None:
        """A call has failed, or all have: the view is over."""
        name = "a call through memory" if call is None else call.name
        if isinstance(error, QuicollError):
            error = self._again(error, name, None if call is None else call.step)
        if isinstance(error, Differing):
            own = error.called[self.rank]
            others = tuple(rank for rank in sorted(error.called) if error.called[rank] != own)
            numbers = {rank: number for rank, (number, _) in error.called.items()}
            if len({*numbers.values()}) > 1:
                parts = [
                    f"rank {rank} called {brief(error.called[rank][1])} as #{numbers[rank]}" for rank in sorted(numbers)
                ]
                text = f"the ranks have not called the same before: {', '.join(parts)}"
            else:
                text = difference({rank: signature for rank, (_, signature) in error.called.items()})
            self.fail(Mismatch(text, rank=others[0], node=self._node(others[0])), others)
        elif isinstance(error, Spoiled):
            self.fail(self._spoiled(error, "in shared memory"), (error.rank,) if error.bits else ())
        elif isinstance(error, QuicollError) and not isinstance(error, LocalError):
            self.fail(error)
        else:  # of this caller, of our own code or for lack of memory: nobody may have to wait for it
            if call is not None and self.near is not None and self.near.take_out(call):
                call.settle(None, error, False)
            if isinstance(error, LocalError):
                self.fail(error)
            else:
                self._fail_here(f"{name} failed: {type(error).__name__}: {error}")

    def near_called(self, call: NearCall, arrived_ns: dict[int, int]) -> None:
        """All ranks have called, and one of them late. arrived_ns: when each one's call came to be known here."""
        self._on_called(call.name, arrived_ns, True)

    def near_cancelled(self, call: NearCall) -> None:
        """A call was cancelled, and is out of the neighbourhood's hands."""
        self._fail_here(f"{call.name} was cancelled")
        call.settle(None, asyncio.CancelledError(), False)

    def near_late(self, call: NearCall, present: Sequence[int]) -> None:
        """A call has not ended by its deadline. present: the ranks that have called as much as this one."""
        self.fail(self._calls.late(self._slot_of(call, present), call.timeout, call.step))

    def _slot_of(self, call: NearCall, present: Sequence[int]) -> Slot:
        """A call through memory as one over QUIC would be."""
        slot = Slot(call.row.group, call.small.number, call.name, ranks=call.row.ranks)
        for rank in present:
            slot.announced[rank] = Announce(self.view.view_id, slot.group, slot.seq, call.small.signature)
        return slot

    def near_tick(self) -> None:
        """Time has passed, and calls may have ended."""
        self._answer(self._calls.answers())
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Look whether peers have called what does not go through memory in the place of what does."""
        try:
            found = self._calls.astray() if self.error is None else None
        except PeerError as error:
            self.fail(error)
            return
        if found is not None:
            _, called = found
            others = tuple(rank for rank in sorted(called) if rank != self.rank)
            self.fail(Mismatch(difference(called), rank=others[0], node=self._node(others[0])), others)

    def _spoiled(self, seen: Spoiled, where: str) -> QuicollError:
        """The error for what a rank gave and is not what it can be. where: it stood."""
        who: dict[str, Any] = {"rank": seen.rank, "view": self.view.view_id}
        ends = f"rank {seen.rank} ({self._node(seen.rank)}) to rank {self.rank} ({self._node(self.rank)})"
        if seen.bits:
            return Corrupted(f"bits from {ends} came spoiled {where}: {seen}", **who)
        return PeerError(f"its words {where} cannot be: {seen}", node=self._node(seen.rank), **who)

    def _end_near(self) -> None:
        """The view is broken: end what goes through memory. Calls under way there end as all ranks are told."""
        for ways in self.ways:
            ways.end()
        if self.near is None or self.error is None:
            return
        for call in self.near.end():
            call.ending = self._loop.create_task(self._end_call(call, self.error))

    async def _end_call(self, call: NearCall, seen: QuicollError) -> None:
        error: BaseException | None = None
        try:
            told = await self.end_of_view(max(call.deadline, self._loop.time()))
            error = self._again(told or seen, call.name, call.step, seen=seen)
            error.__cause__ = None if told in (None, seen) else seen
            self._explain(error)
        except asyncio.CancelledError as cancelled:  # the engine ends, or nobody waits any more
            error = cancelled
            raise
        finally:
            call.settle(None, error, False)

    # -- deadlines -----------------------------------------------------------------------------------------------

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        """Some operation's time may be up. Those that ended meanwhile have left the timer as it was."""
        self._timer = None
        now = self._loop.time() + 1e-9  # a loop counts in nanoseconds: it may be woken just before a sum of floats
        for operation in list(self._running.values()):
            if operation.deadline <= now:
                operation.late = True
                self._advance(operation)
            elif operation.due <= now:
                operation.due = operation.deadline
                self._ask(operation.slot)
        waiting = [operation.due for operation in self._running.values() if not operation.late]
        if waiting and self._timer is None:
            self._arm(min(waiting))

    def _ask(self, slot: Slot) -> None:
        if self._late is not None and self.error is None:
            self._late.ask(self.view, list(self._calls.absent(slot)))

    @property
    def asks(self) -> bool:
        """Whether late ranks are asked where they are."""
        return self._late is not None

    def near_due(self, call: NearCall, present: Sequence[int]) -> None:
        """A call will be late soon. present: the ranks that have called as much as this one."""
        self._ask(self._slot_of(call, present))

    def _explain(self, error: QuicollError) -> None:
        if self._late is not None and not isinstance(error, LocalError):
            self._late.explain(error)

    def _prefix(self, slot: Slot) -> bytes:
        return _TAG.pack(self.view.view_id, slot.group, slot.seq)

    def _measured(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """What the links to `ranks` have measured; see `calls.measurements`.

        The rate is the one at which the peer acknowledged what was kept waiting for it. Congestion window by round trip
        is none: at a job's start it says what a path was not yet asked, later far more than the processors can move.
        What goes through this host's memory is copied twice, and summed twice, at a rate that needs no measuring.
        """
        paths: list[tuple[int | None, int | None]] = []
        for rank in ranks:
            if rank == self.rank:
                paths.append((None, None))
            else:
                path = self._links[rank].snapshot()
                here = any(each.in_memory and rank in each.ranks for each in self.ways)
                rate = MEMORY_RATE if here else path.delivery_rate
                paths.append((path.path_min_rtt_ns or path.rtt_ns, rate))
        return measurements(paths)

    # -- failure -------------------------------------------------------------------------------------------------

    def fail(self, error: QuicollError, ranks: tuple[int, ...] = ()) -> None:
        """Break from inside: every operation ends, and `on_failure` hears of it. Nothing if it is broken already.

        Args:
            error: What failed.
            ranks: Those whose bits came corrupted, or who called something else.
        """
        if self.error is None:
            if self._flight is not None:
                self._flight.broke(error, self.under_way(), seen=True)
            self._break(error)
            self._on_failure(error, ranks)

    def _fail_here(self, why: str) -> None:
        self.fail(PeerError(why, rank=self.rank, node=self._node(self.rank), view=self.view.view_id))

    def end(self, error: QuicollError) -> None:
        """End with the error that all ranks are given for this view. Nothing if it has ended already."""
        if self.end_error is None:
            self.end_error = error
            if self._flight is not None:
                self._flight.broke(error, self.under_way() if self.error is None else (), seen=False)
            self._break(error)
            self._ended.set_result(None)

    def _break(self, error: QuicollError) -> None:
        """Nothing of this view is received any more."""
        if self.error is not None:
            return
        self.error = error
        self._calls.close()
        self._broken.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_all()
        self._end_near()
        for watch in list(self._watches):
            self._leave_watch(watch)
            self._loop.create_task(self._end_watch(watch, error))
        prefix = view_prefix(self.view.view_id)
        for link in self._links.values():
            if not link.ended:
                link.discard(prefix)

    async def end_of_view(self, deadline: float | None = None) -> QuicollError | None:
        """Wait for why a broken communicator is over, as all ranks are told.

        The loss of the coordinator ends the view as well, so this wait is bounded by that, too.

        Args:
            deadline: Of the loop's clock; None: `_END_S` from now, which bounds every wait.
        Returns:
            What all ranks are told; what this rank knows, where that does not come in time; None while it is whole.
        """
        now = self._loop.time()
        until = now + _END_S if deadline is None else min(deadline, now + _END_S)
        await asyncio.wait({self._ended}, timeout=max(until - now, 0.0))
        return self.end_error or self.error

    def _again(
        self, error: QuicollError, name: str, step: int | None, *, seen: QuicollError | None = None
    ) -> QuicollError:
        """`errors.again`, in this view. seen: names the rank where `error` is of its kind and names none: of two ranks
        that called different things, each names the other."""
        rank, node = error.rank, error.node or ("" if error.rank is None else self._node(error.rank))
        if rank is None and not node and seen is not None and type(seen) is type(error):
            rank, node = seen.rank, seen.node
        return again(error, rank=rank, node=node, view=self.view.view_id, step=step, op=name)

    def _translate(self, failure: TransferFailed, rank: int, name: str, step: int | None) -> QuicollError:
        """The single place where the transport's errors become the collectives'."""
        where: dict[str, Any] = {"view": self.view.view_id, "step": step, "op": name}
        why = str(failure.error.args[0])
        if isinstance(failure.error, MessageCorrupted | SpoiledInMemory):
            source, target = (self.rank, rank) if failure.sending else (rank, self.rank)
            ends = f"rank {source} ({self._node(source)}) to rank {target} ({self._node(target)})"
            how = "again and again" if isinstance(failure.error, MessageCorrupted) else "in shared memory"
            return Corrupted(f"bits from {ends} came spoiled {how}: {why}", rank=source, **where)
        lost = (self._node(rank),) if isinstance(failure.error, LinkLost) else ()
        return PeerError(why, rank=rank, node=self._node(rank), lost=lost, **where)

    def _corrupting(self, first: int) -> tuple[int, ...]:
        """Ranks whose bits came corrupted in this view, mended or not: `first`, then the others."""
        others = [rank for rank, link in self._links.items() if link.stats.corrupt > self._corrupt[rank]]
        return (first, *(rank for rank in sorted(others) if rank != first))

    def _node(self, rank: int) -> str:
        return self.view.members[rank].node
