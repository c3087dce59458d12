"""The caller's side of an engine: the view its callers are in, and the operations they have issued.

A job and its groups share one. Operations are issued here (`issue`), from the job's event loop or from any other
thread, and cross to the engine's loop by the runtime. Either gets a `Pending`; `quicoll.collectives.handle` has the
ways to wait for one. The order in which operations are issued is their identity on all ranks. So one lock holds from
the first check of an operation to its place in the engine's queue: threads that issue at the same time are served one
after the other. In which order is for the program to settle, the same on every rank.

Results are digested for the vote and the audit, and handed over, on a caller's thread and never on the engine's.

Residuals (quicoll.numerics.feedback) are state that an operation writes, so they follow the rules of state:

    issued outside a step   written when the result is taken
    issued in a step        written when the step is committed, among the callbacks of `Step.on_commit`, at the place of
                            the call. A step is committed only where all its operations have succeeded, so none that
                            has failed is written. An aborted step writes none
    not taken, failed       not written

From the call until then nothing else may write a residual, or use it as one, or write the memory of an operation under
way as one: `_separate` refuses it, by what the program has awaited.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

import xxhash

from quicoll import forks
from quicoll.checks import MAX_SECONDS, seconds
from quicoll.collectives.operation import flattened
from quicoll.collectives.subgroups import is_derived
from quicoll.engine.answers import NO_LOOP, ThreadAnswer, loop_here
from quicoll.engine.rows import NearCall
from quicoll.errors import LocalError, PeerError, QuicollError
from quicoll.membership.messages import MAX_GROUPS
from quicoll.numerics.buffers import memory, reach
from quicoll.numerics.overlap import meet
from quicoll.numerics.recycled import Recycler

if TYPE_CHECKING:
    from quicoll.audit.recorder import Auditor, PendingEntry
    from quicoll.collectives.base import GroupView
    from quicoll.collectives.operation import Operation
    from quicoll.config import Config
    from quicoll.engine.answers import Cancellable, Start
    from quicoll.engine.face import EngineFace
    from quicoll.engine.in_flight import Ended
    from quicoll.engine.neighbourhood import Neighbourhood
    from quicoll.engine.rows import CallRow, Settle
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.numerics.dtypes import Array
    from quicoll.numerics.feedback import ErrorFeedback

    Numbered: TypeAlias = asyncio.Future[int] | concurrent.futures.Future[int]

__all__ = ["CallContext", "Pending"]

T = TypeVar("T")
_NOTHING: Any = object()


class Pending(Generic[T]):
    """An operation that has been issued. Its methods may be called from every thread but the engine's.

    future: of the operation's number in its group. Once that is there the result can be taken. released: done when
    the engine reads and writes no more of the caller's memory, which after a cancellation is a moment after `future`;
    None where it does neither while the operation is under way. near: of a call through the memory of one host, as long
    as that may be small, and this may take it further.
    """

    future: Numbered
    released: concurrent.futures.Future[None] | None = None
    near: tuple[Neighbourhood, NearCall] | None = None
    _recorded = False
    _result: T = _NOTHING

    def __init__(
        self, context: CallContext, operation: Operation[T], number: int, step: int | None, entry: PendingEntry | None
    ) -> None:
        self._context = context
        self._number = number
        self._step = step
        self.entry = entry
        self.operation = operation

    def read_until_released(self) -> None:
        """The engine reads, or writes, the caller's memory. Before the operation begins.

        What is sent has a checksum that is made when it is sent. So peers would take what a caller writes, who has
        cancelled, for what he gave, until the engine has heard of it: his wait ends after that.
        """
        if self.released is None:
            self.released = concurrent.futures.Future()

    def block(self, timeout: float | None) -> bool:
        """Block this thread until the operation has ended, or `timeout` seconds have passed. Return whether it has.

        Raises LocalError where nothing may block, and for an operation that was issued on an event loop.
        """
        if not isinstance(self.future, concurrent.futures.Future):
            raise LocalError("this operation was issued on an event loop: await it there")
        self._context.demand_own_process()
        if self.near is None:
            return self.future.done() or self._context.runtime.wait(self.future, timeout)
        near, call = self.near
        return self.future.done() or self._context.runtime.wait(self.future, timeout, partial(near.block, call))

    def attend(self) -> None:
        """Before this operation is awaited, on its event loop: see that its end wakes that loop."""
        if self.near is not None and not self.future.done():
            near, call = self.near
            near.attend(call, asyncio.get_running_loop())

    def attend_thread(self, *, ends: bool = False) -> None:
        """A thread waits for it from here on, in a way of its own, or no longer (`ends`)."""
        future = self.future
        if isinstance(future, ThreadAnswer):
            future.attend(ends=ends)

    def settle(self) -> bool:
        """Note the digests of a result that is there. Return whether the operation has ended."""
        future = self.future
        if not future.done():
            if self.near is None:
                return False
            self.near[0].go_on()  # all have called perhaps, while this thread computed
            if not future.done():
                return False
        if self._recorded:
            return True
        with self._context.lock:
            if not self._recorded:
                self._recorded = True
                if self._step is not None or self.entry is not None:  # else nobody is to know
                    fine = not future.cancelled() and future.exception() is None
                    self._context.ended(self.operation, self._step, self.entry, future.result() if fine else None)
        return True

    def take(self) -> T:
        """Return the result, the same each time. The operation has succeeded."""
        if self._result is _NOTHING:
            with self._context.lock:
                if self._result is _NOTHING:
                    self.settle()
                    self._context.forget(self._number)
                    result = self.operation.result()
                    if self._step is None and self.operation.feedback is not None:
                        self.operation.feedback.commit()
                    self._result = result
        return self._result

    def take_or_raise(self) -> T:
        """Return the result of what has ended, the same each time, or raise its error."""
        future = self.future
        if future.cancelled():
            raise self.cancelled()
        future.result()
        return self.take()

    @property
    def outcome(self) -> str:
        """ "taken" once somebody has the result, "failed", or "open"."""
        if self._result is not _NOTHING:
            return "taken"
        future = self.future
        return "failed" if future.done() and (future.cancelled() or future.exception() is not None) else "open"

    def cancelled(self) -> QuicollError:
        """Return the error for those who wait for what another one has cancelled."""
        operation, here = self.operation, self.operation.here
        return PeerError(
            "cancelled by another await of its handle",
            rank=here.ranks[here.rank],
            node=self._context.config.node,
            view=here.view_id,
            step=self._step,
            op=operation.name,
        )


class CallContext:
    """view: changes only where the job says so. step: the number of the open step, None outside of one. undecided: the
    number of one that was left and is not decided, None without one: nothing may be called then. auditor: notes what is
    called, where the job is audited. lock: held while anything of this changes. recycler: lends results their
    memory."""

    def __init__(
        self,
        config: Config,
        engine: EngineFace,
        runtime: Runtime,
        view: View,
        memory: Callable[[int], Array] | None = None,
    ) -> None:
        """memory: gives that of large results; None: malloc does."""
        self.config = config
        self.engine = engine
        self.runtime = runtime
        self.view = view
        self.step: int | None = None
        self.undecided: int | None = None
        self.auditor: Auditor | None = None
        self.lock = threading.RLock()
        self.recycler = Recycler() if memory is None else Recycler(allocate=memory)
        self._pid = forks.pid
        self._ids: dict[int, str] = {}  # of the present view's groups and channels, and what they are the ids of
        self._splits: dict[int, int] = {}  # by group: how often it has been split in the present view
        self._results: dict[tuple[int, int], bytes] = {}
        self._voted_groups: dict[int, None] = {}  # an ordered set: sub-groups that the open step's vote tells of
        # Of the open step, by order of issue. One leaves when its result is taken: nothing else keeps results.
        self._issued: dict[int, Pending[Any]] = {}
        # Whose tensors are in use, by order of issue: until the result is taken, or nobody holds the operation.
        self._in_use: dict[int, _User] = {}
        # Those of them that write the caller's memory while they are under way, or at their end residuals.
        self._writers: dict[int, _User] = {}
        self._fed_back: list[ErrorFeedback] = []  # residuals that are written when the open step is committed
        self._at_commit: Callable[[Callable[[], None]], object] | None = None
        self._gone = _forgetting(self._in_use, self._writers)
        self._unsettled: deque[Pending[Any]] = deque()  # audited ones of threads, which no event loop settles
        self._count = 0

    @property
    def rank(self) -> int:
        rank = self.view.rank_of(self.config.node)
        if rank is None:
            raise AssertionError(f"{self.config.node} is not in its own view")
        return rank

    @property
    def is_spare(self) -> bool:
        return self.rank >= self.view.workers

    @property
    def world_size(self) -> int:
        return self.view.world_size

    def enter(self, view: View) -> None:
        """Go on in `view`: groups and ids of another one mean nothing in it."""
        with self.lock:
            if view.view_id == self.view.view_id:
                return
            self.view = view
            self._ids.clear()
            self._splits.clear()

    def claim(self, derived: int, name: str) -> None:
        """Take an id for `name`. Raises LocalError when it belongs to another one (quicoll.collectives.subgroups)."""
        if self._ids.setdefault(derived, name) != name:
            raise LocalError(f"{name!r} and {self._ids[derived]!r} have the same id; split with another color")

    def divided(self, view_id: int) -> None:
        """A sub-group was made of which no other rank has heard; a split says so by itself."""
        with contextlib.suppress(RuntimeError):  # the engine's loop has ended: the sub-group's first call says so
            self.runtime.loop.call_soon_threadsafe(self.engine.divide, view_id)

    def next_split(self, group: int) -> int:
        """Return the number of a split that is about to be issued, counted in its group and the present view."""
        return self._splits.get(group, 0)

    def split_issued(self, group: int) -> None:
        """A split is under way. One that was refused has no number: the other ranks have not heard of it."""
        self._splits[group] = self.next_split(group) + 1

    async def on_engine(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the engine's loop."""
        return await self.runtime.call(work)

    # -- issuing -------------------------------------------------------------------------------------------------

    def demand_own_process(self) -> None:
        """Raise LocalError in the child of a fork, where the lock may be held by a thread that is not there."""
        if forks.pid != self._pid:
            raise LocalError(
                "this process is a fork of the one that joined, whose engine it does not have; join in the child"
            )

    def issue(self, operation: Operation[T], timeout: float | None, *, threaded: bool = False) -> Pending[T]:
        """Start an operation.

        Args:
            operation: What is issued; once.
            timeout: Seconds for the whole of it; None takes the job's.
            threaded: By any thread but the engine's, with no need of an event loop. Else by a coroutine, on whose loop
                its future lives.
        Raises:
            LocalError: No event loop is running where one has to, the timeout is none, the operation cannot be
                announced, or a step would use more sub-groups than a vote tells of.
            AuditError: The audit has failed.
        """
        loop = None if threaded else loop_here()
        if loop is None and not threaded:
            raise LocalError(NO_LOOP)
        if forks.pid != self._pid:
            self.demand_own_process()
        if self.undecided is not None:
            self._demand_decided()
        if timeout is None:
            within = self.config.timeout
        else:
            within = timeout if type(timeout) is float and 0 < timeout < MAX_SECONDS else seconds(timeout)
        here, group = operation.here, operation.group_id
        if operation.counts:
            operation.demand_counts()
        with self.lock:
            feedback = operation.feedback
            if self._writers or self._fed_back or operation.in_place or feedback is not None:
                self._separate(operation)
            step, auditor = self.step, self.auditor
            if step is not None and operation.shared and is_derived(group):
                if group not in self._voted_groups and len(self._voted_groups) == MAX_GROUPS:
                    raise LocalError(f"a step may use at most {MAX_GROUPS} sub-groups of a rank")
                self._voted_groups[group] = None
            entry = None
            # The library's own operations, when a view begins, are not for the user to compare.
            if auditor is not None and here.scope.watched:
                while self._unsettled and self._unsettled[0].settle():
                    self._unsettled.popleft()
                auditor.check()
                entry = auditor.issued(
                    operation.issued(), view=self.view.view_id, step=step, rank=self.rank, world=self.world_size
                )
            number = self._count
            self._count += 1
            pending = Pending(self, operation, number, step, entry)
            in_place = operation.in_place
            near = self.near(here.view_id) if here.near and group == here.scope.group_id else None
            row = None if near is None else near.row_of(group, here.ranks)
            try:
                numbered = None if row is None else row.take_number()
                if in_place:
                    pending.read_until_released()
                if (
                    near is None
                    or row is None
                    or not self._begin_near(near, row, pending, within, in_loop=not threaded)
                ):
                    if operation.announced and not operation.sealed:
                        operation.seal()
                    if operation.given and not operation.sealed:
                        pending.read_until_released()
                    start: Start = partial(_start, self.engine, operation, group, within, step, numbered)
                    if pending.released is not None:
                        start = partial(_releasing, start, pending.released)
                    sender, runtime = self.engine.endpoint, self.runtime
                    future: Numbered = (
                        runtime.submit(start, sender) if loop is None else runtime.begin(start, sender, loop)
                    )
                    pending.future = operation.answer = future
            except BaseException as error:
                if row is not None and isinstance(error, Exception):  # it was not begun: nobody has heard of it
                    row.return_number()
                if entry is not None and auditor is not None:
                    auditor.over(entry)
                raise
            given = operation.given
            # What is sealed was copied: but for an `out` its tensors are the caller's again.
            if not operation.sealed or feedback is not None or (given and given[-1] is not None):
                user = self._in_use[number] = _User(operation, self._gone)
                user.number = number
                if in_place or feedback is not None:
                    self._writers[number] = user
            if step is not None:
                self._issued[number] = pending
                if feedback is not None and self._at_commit is not None:
                    self._at_commit(feedback.commit)
                    self._fed_back.append(feedback)
            if entry is not None:  # whether or not anybody awaits it
                if threaded:
                    self._unsettled.append(pending)
                else:
                    cast("asyncio.Future[int]", pending.future).add_done_callback(lambda _: pending.settle())
        return pending

    def near(self, view_id: int) -> Neighbourhood | None:
        """Return the way between the ranks of a view that share a host, where all of them do."""
        return self.engine.near(view_id)

    def _begin_near(
        self, near: Neighbourhood, row: CallRow, pending: Pending[Any], timeout: float, *, in_loop: bool
    ) -> bool:
        """Begin an operation on this thread, if it goes through the memory of one host. Return whether it has begun."""
        operation = pending.operation
        small = operation.small_call(row.numbers - 1)
        if small is None or not near.whole:
            return False
        if not small.is_small and operation.given:  # else it was copied
            pending.read_until_released()
        released = pending.released
        where = operation.here.scope.name
        name = f"{operation.name}#{small.number}@{where}" if where else f"{operation.name}#{small.number}"
        call = NearCall(near, row, small, name, timeout=timeout, step=self.step)
        held = self.runtime.hold(call, in_loop=in_loop)
        call.settle = held.settle if released is None else partial(_settled, held.settle, released)
        pending.future = operation.answer = held.future
        try:
            begun = near.begin(call)
        except BaseException:  # of a signal handler: the caller gets no handle that it could cancel
            held.future.cancel()
            raise
        if begun:
            if small.fits:  # a large one is the engine's: nobody looks for its end
                pending.near = near, call
            return True
        self.runtime.let_go(held.future)
        return False

    def watch(self, here: GroupView, channels: Mapping[int, int], timeout: float | None) -> asyncio.Future[int]:
        """Wait on an event loop until a peer calls what this rank has not called.

        Args:
            here: The group.
            channels: What may be called, by its id, and what the future gives for it.
            timeout: Seconds; None takes the job's.
        """
        self.demand_own_process()
        return self.runtime.begin(self._watching(here, channels, timeout), self.engine.endpoint)

    def watch_from_thread(self, here: GroupView, channels: Mapping[int, int], timeout: float | None) -> int:
        """As `watch`, from any thread but the engine's, which is blocked until there is an answer."""
        self.demand_own_process()
        answer = self.runtime.submit(self._watching(here, channels, timeout), self.engine.endpoint)
        try:
            self.runtime.wait(answer, None)
        except BaseException:
            answer.cancel()
            raise
        return answer.result()

    def _demand_decided(self) -> None:
        if self.undecided is not None:
            raise LocalError(
                f"step {self.undecided} is not decided: call `await step.ready()` in the next step, or "
                "`await job.ready()`, before an operation"
            )

    def _watching(self, here: GroupView, channels: Mapping[int, int], timeout: float | None) -> Start:
        self._demand_decided()
        within = self.config.timeout if timeout is None else seconds(timeout)
        return partial(self.engine.next_call, here.view_id, channels, within, self.step)

    # -- whose memory is whose -----------------------------------------------------------------------------------

    def _separate(self, operation: Operation[Any]) -> None:
        """Keep apart what is written while it is under way, the `out` of one operation and residuals, from the tensors
        of all others.

        It is settled by what the program has awaited and not by what has ended meanwhile, so it is the same on every
        rank. Raises LocalError for a tensor that an earlier operation writes, and for a residual that one is given.
        """
        using = [(number, other) for number, user in list(self._in_use.items()) if (other := user()) is not None]
        others = [(number, other) for number, other in using if not other.failed]
        writes = [other for number, other in others if number in self._writers]
        residuals = [] if operation.feedback is None else operation.feedback.reaches()
        if self._fed_back:
            written = [*residuals, *(reach(value) for value in flattened(operation.given[-1:]))]
            if any(meet(written, feedback.reaches()) for feedback in self._fed_back):
                raise LocalError(
                    f"{operation.name} would write to a residual of step {self.step}, which is written when that is "
                    "committed: use a residual once in a step"
                )
        if not (writes or operation.in_place or residuals):
            return
        mine = operation.reaches()
        for other in writes:
            if meet(mine, other.written()):
                raise LocalError(
                    f"{operation.name} is given memory that an {other.name} under way writes its result to: "
                    "await that one first, or give it another out"
                    if other.feedback is None
                    else f"{operation.name} is given memory that an {other.name} under way writes, its out or its "
                    "residual: await that one first"
                )
        if any(meet(residuals, other.reaches()) for _, other in others):
            raise LocalError("residual shares memory with what an operation under way was given: await that one first")
        if operation.in_place:
            out = [reach(operation.given[-1])]
            if any(meet(out, other.reaches()) for _, other in others):
                operation.step_aside()

    # -- what has ended ------------------------------------------------------------------------------------------

    def ended(self, operation: Operation[Any], step: int | None, entry: PendingEntry | None, seq: int | None) -> None:
        """Note the end of an operation. seq: its number in its group; None: it failed."""
        if seq is not None:
            if operation.shared and step is not None and step == self.step:
                self.record(operation.group_id, seq, xxhash.xxh3_128_digest(memory(operation.bits())))
            if entry is not None and self.auditor is not None:
                self.auditor.succeeded(entry, seq)
        elif entry is not None and self.auditor is not None:
            self.auditor.over(entry)

    def forget(self, number: int) -> None:
        """Drop an operation: its result has been taken."""
        self._issued.pop(number, None)
        self._in_use.pop(number, None)
        self._writers.pop(number, None)

    def record(self, group: int, seq: int, result: bytes) -> None:
        """Note the digest of a result that has to be equal on all ranks, for the vote of the open step."""
        if self.step is not None:
            self._results[group, seq] = result

    def open(self, step: int, at_commit: Callable[[Callable[[], None]], object] | None = None) -> None:
        """A step begins: what was recorded before is not part of it.

        Args:
            step: Its number.
            at_commit: Takes what is to run if it is committed, and only then; None: residuals are not written in it.
        """
        with self.lock:
            self.step = step
            self._at_commit = at_commit
            if self._fed_back:
                self._release()
            self._results.clear()
            self._voted_groups.clear()
            self._issued.clear()

    def close(self) -> None:
        """The step is left: what is issued from here on is not part of it."""
        with self.lock:
            self.step = None
            self._at_commit = None
            if self._fed_back:
                self._release()
            self._issued.clear()

    def _release(self) -> None:
        """The step is left: a handle that somebody still holds keeps nobody from its residual."""
        for feedback in self._fed_back:
            feedback.release()
        self._fed_back.clear()

    def settle(self) -> tuple[str, ...]:
        """Note the results that nobody has taken. Return the names of the step's operations that have not ended."""
        with self.lock:
            if not self._issued:
                return ()
            return tuple([each.operation.name for each in self._issued.values() if not each.settle()])

    def digests(self, step: int) -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
        """Return what is voted with: 16 bytes over the step's number and all recorded results that all ranks have, in
        the order of (group, number); and as much for each sub-group whose results only its members have, by id."""
        whole = blake2b(step.to_bytes(8, "big"), digest_size=16)
        parts: dict[int, blake2b] = {}
        for group, seq in sorted(self._results):
            state = whole
            if is_derived(group):
                state = parts.setdefault(group, blake2b(step.to_bytes(8, "big"), digest_size=16))
            state.update(group.to_bytes(8, "big") + seq.to_bytes(8, "big") + self._results[group, seq])
        return whole.digest(), tuple([(group, state.digest()) for group, state in parts.items()]) if parts else ()

    def close_down(self) -> None:
        """The job is over. Write what has ended, close the audit's file, if there is one, and let go of memory."""
        self.recycler.close()
        with self.lock:
            for pending in self._unsettled:
                pending.settle()
            self._unsettled.clear()
            if self.auditor is not None:
                self.auditor.close()


class _User(weakref.ref["Operation[Any]"]):
    """An operation whose tensors are in use, as long as somebody holds it. number: by order of issue."""

    __slots__ = ("number",)

    number: int


def _forgetting(*users: dict[int, _User]) -> Callable[[_User], None]:
    """Return what takes an operation out that nobody holds any more; it may be called in the middle of anything."""

    def gone(user: _User) -> None:
        for each in users:
            each.pop(user.number, None)

    return gone


def _settled(
    settle: Settle,
    released: concurrent.futures.Future[None],
    number: int | None,
    error: BaseException | None,
    idle: bool,
) -> None:
    """Settle a call through memory, which is over, and say so. Two threads may: the first one settles it."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        released.set_result(None)
    settle(number, error, idle)


def _start(
    engine: EngineFace,
    operation: Operation[Any],
    group: int,
    timeout: float,
    step: int | None,
    number: int | None,
    ended: Ended,
) -> Cancellable | None:
    """Start an operation, on the engine's loop."""
    view_id, call = operation.here.view_id, operation.call()
    return engine.collective(view_id, call, ended, group=group, timeout=timeout, step=step, number=number)


def _releasing(start: Start, released: concurrent.futures.Future[None], ended: Ended) -> Cancellable | None:
    """Start an operation, and say when it is over."""

    def over(number: int | None, error: BaseException | None) -> None:
        released.set_result(None)
        ended(number, error)

    return start(over)
