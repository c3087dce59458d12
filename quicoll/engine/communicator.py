"""The ranks of one view, joined by links: collectives run here, on the engine's loop.

    announce    each rank sends what it called (collective, dtype, shape, op, order, ...) to every other
    execute     the plan runs meanwhile; results stand in memory of ours
    agree       all called the same; only then does the caller see a result

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quicoll.engine.calls import Call, Calls, Slot, measurements
from quicoll.engine.executor import Execution, TransferFailed
from quicoll.engine.messages import Announce, Farewell, encode_message
from quicoll.errors import Corrupted, LocalError, Mismatch, PeerError, QuicollError, again
from quicoll_transport.errors import LinkLost, MessageCorrupted
from quicoll_transport.errors import TransportError as _TransportError

if TYPE_CHECKING:
    from quicoll.membership.view import View
    from quicoll_transport.endpoint import Link

__all__ = ["Communicator", "view_prefix"]

_TAG = struct.Struct("!QQI")  # view, group, seq; four bytes of a message's index follow
_END_S = 5.0  # for the coordinator to say why a broken view is over


def view_prefix(view_id: int) -> bytes:
    """Return what the tags of all messages of a view start with."""
    return view_id.to_bytes(8, "big")


@dataclass(slots=True, eq=False)
class _Running:
    """An operation in flight: one task, which waits for one thing at a time.

    late: its deadline has passed. execution: of its plan, from when that begins.
    """

    slot: Slot
    loop: asyncio.AbstractEventLoop
    late: bool = False
    execution: Execution | None = None
    _woken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Something has happened that the operation may wait for."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def expire(self) -> None:
        self.late = True
        self.wake()

    async def change(self) -> None:
        """Wait until something has happened since the last look, which was in the same turn of the loop."""
        self._woken = self.loop.create_future()
        await self._woken

    def close(self) -> None:
        """Take its transfers back, before anyone reuses the memory."""
        execution, self.execution = self.execution, None  # it knows of us: together we would outlive the operation
        if execution is not None:
            execution.close()


class _Stopped(Exception):
    """The operation is late, or the communicator has broken. Never leaves this module."""


class Communicator:
    """One view's links and operations. See the module's head.

    error: why it broke, None while it works. end_error: what all ranks are given, None until the coordinator has ended
    the view.
    """

    def __init__(
        self,
        view: View,
        *,
        node: str,
        loop: asyncio.AbstractEventLoop,
        links: dict[int, Link],
        on_failure: Callable[[QuicollError, tuple[int, ...]], None],
        on_called: Callable[[str, dict[int, int]], None] = lambda op, arrived_ns: None,
    ) -> None:
        """Go to work.

        Args:
            view: The view.
            node: This rank's node.
            loop: The loop of the links.
            links: To every other rank of the view.
            on_failure: Called once with (error, ranks) when it breaks from inside. ranks: those whose bits came
                corrupted, or who called something else.
            on_called: Called with (op, arrived_ns) for each operation that all have called. arrived_ns: when each
                rank's call came to be known here.
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
        self._calls = Calls(view, rank)
        self._running: dict[tuple[int, int], _Running] = {}  # by group and number
        self._count = 0  # of those whose caller waits; taking transfers back takes longer
        self._broken: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._corrupt = {rank: link.stats.corrupt for rank, link in links.items()}  # before this view
        self._answered: asyncio.Future[None] | None = None

    @property
    def running(self) -> int:
        """Operations in flight."""
        return self._count

    # -- what arrives --------------------------------------------------------------------------------------------

    def announced(self, rank: int, announce: Announce) -> None:
        """Take a peer's message of what it called."""
        if self.error is not None:
            return
        try:
            slot = self._calls.announced(rank, announce, self._now_ns())
        except PeerError as error:
            self.fail(error)
            return
        if slot is not None:
            self._running[slot.group, slot.seq].wake()

    def farewell(self, rank: int, message: Farewell) -> None:
        """Take a peer's message that it will leave, or that it needs this rank no longer."""
        self._answer(self._calls.farewell(rank, message))
        if self._answered is not None and not self._answered.done() and not self._calls.unanswered:
            self._answered.set_result(None)

    def _answer(self, answers: list[tuple[int, Farewell]]) -> None:
        for rank, message in answers:
            with contextlib.suppress(_TransportError):
                self._links[rank].send_app(encode_message(message))

    async def part(self, timeout: float) -> None:
        """Wait until no peer needs this view any more for an operation that this rank has called.

        Args:
            timeout: At most as many seconds. Nor does it wait any longer when the communicator breaks.
        """
        if self.error is not None or self._answered is not None:
            return
        self._answered = self._loop.create_future()
        told: list[int] = []
        for rank, link in self._links.items():
            try:
                link.send_app(encode_message(Farewell(self.view.view_id)))
            except _TransportError:
                continue
            told.append(rank)
        self._calls.leave(told)
        if told:
            await asyncio.wait({self._answered, self._broken}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    # -- operations ----------------------------------------------------------------------------------------------

    async def run(self, call: Call, *, group: int, timeout: float, step: int | None) -> int:
        """Run a collective of this view.

        The number is taken before the first await: the order in which calls come in defines identity.

        Args:
            call: The collective.
            group: The id of its group.
            timeout: Seconds for the whole of it.
            step: The number of the open step, for errors.
        Returns:
            The collective's number in the group.
        Raises:
            QuicollError: It failed. The communicator is broken, if it was not before.
        """
        deadline = self._loop.time() + timeout
        if self.error is not None:
            raise self._again(await self.end_of_view(deadline) or self.error, call.name, step)
        slot = self._calls.open(call, group)
        running = self._running[group, slot.seq] = _Running(slot, self._loop)
        self._count += 1
        try:
            seen = await self._seen(call, running, deadline, timeout, step)
            if seen is None:
                return slot.seq
            error, ranks, consequence = seen
            # What only follows from a failure at a peer is not reported: memory that was withdrawn there, bits that it
            # took for corrupted. Where the calls agree they have no other reason; the peer reports the cause, and the
            # consequence, if it came first, would hide it.
            if not consequence:
                self.fail(error, ranks)
            running.close()  # before the wait, not after it
            # What this caller did wrong he hears at once, the others from the coordinator. All else is as the
            # coordinator says: no new view comes before it has ended this one, so waiting for it costs nothing.
            told = error if isinstance(error, LocalError) else await self.end_of_view(deadline)
            self.fail(error)  # a consequence whose cause nobody has reported
        except asyncio.CancelledError:
            self._fail_here(f"{slot.name} was cancelled")
            raise
        except Exception as broken:  # of our own code or for lack of memory: nobody may have to wait for it
            self._fail_here(f"{slot.name} failed: {type(broken).__name__}: {broken}")
            raise
        finally:
            self._count -= 1
            running.close()
            # Last, and with no await since `fail`: a late announcement must find the slot or the failure.
            del self._running[group, slot.seq]
            self._answer(self._calls.finish(slot))
        raise self._again(told or error, slot.name, step, seen=error) from None if told in (None, error) else error

    async def _seen(
        self, call: Call, running: _Running, deadline: float, timeout: float, step: int | None
    ) -> tuple[QuicollError, tuple[int, ...], bool] | None:
        """Run an operation to its end or its deadline.

        Returns:
            None if it went well; otherwise what this rank saw of its failure, the ranks that caused it, and whether it
            only follows from another rank's failure.
        """
        slot = running.slot
        running.late = deadline <= self._loop.time()
        timer = self._loop.call_at(deadline, running.expire)
        try:
            await self._operate(call, running)
        except _Stopped:
            if running.late or self.error is None:
                return self._calls.late(slot, timeout, step), (), False
            return self.error, (), False
        except TransferFailed as failed:
            rank = slot.ranks[failed.rank]
            error = self._translate(failed, rank, slot.name, step)
            return error, self._corrupting(rank) if isinstance(error, Corrupted) else (), failed.consequence
        except Mismatch as error:
            return self._again(error, slot.name, step), self._calls.differing(slot), False
        except QuicollError as error:
            return self._again(error, slot.name, step), (), False
        finally:
            timer.cancel()
        return None

    def _announcement(self, call: Call, slot: Slot) -> Announce:
        measured = self._measured(slot.ranks) if slot.leads else ()
        return Announce(self.view.view_id, slot.group, slot.seq, call.signature, call.counts, measured)

    async def _operate(self, call: Call, running: _Running) -> None:
        """Announce, execute, compare.

        Raises:
            _Stopped: It has to end, whatever it waits for.
            TransferFailed: A message of it failed.
            Exception: Errors of ours, and whatever the computation raises.
        """
        slot, calls = running.slot, self._calls
        announce = self._announcement(call, slot)
        data = encode_message(announce)
        for number, rank in enumerate(slot.ranks):
            if rank == self.rank:
                continue
            try:
                self._links[rank].send_app(data)
            except _TransportError as error:
                raise TransferFailed(number, error, sending=True) from error
        calls.called(slot, announce, self._now_ns())
        if call.gathers or slot.leads or len(slot.ranks) == 1:
            await self._until(running, lambda: slot.settled)
            calls.compare(slot)
        if slot.leads:
            calls.agree(slot)
            self._wake_all()
        elif call.measures:
            await self._until(running, lambda: calls.network(slot.group) is not None)
        execution = running.execution = Execution(
            call.make(calls.known(slot)),
            links=self._links,
            ranks=slot.ranks,
            prefix=self._prefix(slot),
            wake=running.wake,
        )
        # A transfer may fail because a peer called something else. So failures count once the calls are compared.
        await self._until(running, lambda: slot.settled)
        calls.compare(slot)
        if call.watched:
            self._on_called(slot.name, slot.arrived_ns)
        await self._until(running, execution.finished)

    async def _until(self, running: _Running, reached: Callable[[], bool]) -> None:
        """Wait until an operation has come so far. Raises _Stopped, and what `reached` raises."""
        while True:
            if running.late or self.error is not None:
                raise _Stopped
            if reached():
                return
            await running.change()

    def _wake_all(self) -> None:
        for running in self._running.values():
            running.wake()

    def _prefix(self, slot: Slot) -> bytes:
        return _TAG.pack(self.view.view_id, slot.group, slot.seq)

    def _measured(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """What the links to `ranks` have measured; see `calls.measurements`.

        The rate is the one at which the peer acknowledged what was kept waiting for it. Congestion window by round trip
        is none: at a job's start it says what a path was not yet asked, later far more than the processors can move.
        """
        paths: list[tuple[int | None, int | None]] = []
        for rank in ranks:
            if rank == self.rank:
                paths.append((None, None))
            else:
                path = self._links[rank].snapshot()
                paths.append((path.path_min_rtt_ns or path.rtt_ns, path.delivery_rate))
        return measurements(paths)

    # -- failure -------------------------------------------------------------------------------------------------

    def fail(self, error: QuicollError, ranks: tuple[int, ...] = ()) -> None:
        """Break from inside: every operation ends, and `on_failure` hears of it. Nothing if it is broken already.

        Args:
            error: What failed.
            ranks: Those whose bits came corrupted, or who called something else.
        """
        if self.error is None:
            self._break(error)
            self._on_failure(error, ranks)

    def _fail_here(self, why: str) -> None:
        self.fail(PeerError(why, rank=self.rank, node=self._node(self.rank), view=self.view.view_id))

    def end(self, error: QuicollError) -> None:
        """End with the error that all ranks are given for this view. Nothing if it has ended already."""
        if self.end_error is None:
            self.end_error = error
            self._break(error)
            self._ended.set_result(None)

    def _break(self, error: QuicollError) -> None:
        """Nothing of this view is received any more."""
        if self.error is not None:
            return
        self.error = error
        self._calls.close()
        self._broken.set_result(None)
        self._wake_all()
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
        if isinstance(failure.error, MessageCorrupted):
            source, target = (self.rank, rank) if failure.sending else (rank, self.rank)
            ends = f"rank {source} ({self._node(source)}) to rank {target} ({self._node(target)})"
            return Corrupted(f"bits from {ends} came spoiled again and again: {why}", rank=source, **where)
        lost = (self._node(rank),) if isinstance(failure.error, LinkLost) else ()
        return PeerError(why, rank=rank, node=self._node(rank), lost=lost, **where)

    def _corrupting(self, first: int) -> tuple[int, ...]:
        """Ranks whose bits came corrupted in this view, mended or not: `first`, then the others."""
        others = [rank for rank, link in self._links.items() if link.stats.corrupt > self._corrupt[rank]]
        return (first, *(rank for rank in sorted(others) if rank != first))

    def _node(self, rank: int) -> str:
        return self.view.members[rank].node

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)
