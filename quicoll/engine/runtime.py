"""Where the engine runs: a loop in a thread of its own, so that a training loop that computes for seconds is not
taken for dead; or the caller's own loop, for simulated time and for tests.

Calls cross here and nowhere else. A coroutine goes in, and a future comes out on the caller's loop (`call`). An
operation, which is no task, is begun by a function that gets whom to tell of its end; a future comes out on the
caller's loop (`begin`) or for a thread without one (`submit`, `wait`). What nobody waits for takes its place among the
calls, and nothing comes out (`post`). What is called while the engine's thread is at work begins together in one turn
of its loop, in the order of the calls, and what that has to send goes together at the end of the same turn, when
callers hear of what has ended in it as well (quicoll.engine.looking says why not before). They hear of it in its
middle where all that arrived has been taken up, and nothing of it is to be sent (`hand_out`): what they call thereupon
begins in the same turn, and goes with its acknowledgement. A caller who waits goes on in the turn of his loop in which
the end of his operation comes. The thread is written to only where it sleeps, or is about to; awake it looks at what is
queued between any two turns.
Where other threads compute it keeps to its share of the time, but while somebody waits (quicoll.engine.share): blocks
in `wait`, awaits a future, or has said so (`attend`).
Cancelling the future cancels what was called, though never before its first step: that is where an operation takes its
place among the others. Every deadline of a call passes on the engine's loop, so what keeps that loop from running would
hold its callers for ever. Each way has an end of its own:

    closed     calls under way when the thread ends, however it ends, and calls that come later: LocalError
    forked     the child of a fork has the objects and not the thread: LocalError, and `aclose` does nothing. It may not
               even stop the loop: pipe and epoll are shared with the parent.
    blocked    an observer that waits for something, a disk that does not answer. While calls are under way the caller's
               loop, or the thread that waits, asks the engine's loop for a sign of life once a second; after `_BLOCKED`
               questions in a row without one, all calls under way end by LocalError, which says where the thread is.
               Questions that come late do not count: then it was the process that stood still, and the engine's thread
               has had no turn either.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from quicoll import forks
from quicoll.engine.answers import (
    Begin,
    CallAnswer,
    Cancellable,
    Gathering,
    HeldAnswer,
    HeldCall,
    LoopAnswer,
    OperationAnswer,
    Start,
    ThreadAnswer,
    attend,
    loop_here,
    running_loop,
)
from quicoll.engine.looking import LookingSelector
from quicoll.engine.share import REST_NS, REST_PART
from quicoll.errors import LocalError
from quicoll_transport.endpoint.loops import with_own_clock

__all__ = ["Runtime", "ThreadRuntime"]

log = logging.getLogger("quicoll")

T = TypeVar("T")

_ASK_S = 1.0
_BLOCKED = 30
_END_S = 10.0  # for the thread to end, and for what still runs in it to be cancelled


class Runtime(Protocol):
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    def call(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]: ...
    def begin(
        self, start: Begin[T], sender: Gathering, loop: asyncio.AbstractEventLoop | None = None
    ) -> asyncio.Future[T]: ...
    def post(self, work: Callable[[], None]) -> None: ...
    def submit(self, start: Start, sender: Gathering) -> concurrent.futures.Future[int]: ...
    def wait(
        self,
        answer: concurrent.futures.Future[Any],
        timeout: float | None,
        attended: Callable[[float | None], None] | None = None,
    ) -> bool: ...
    def hold(self, begun: Cancellable, *, in_loop: bool) -> HeldCall: ...
    def let_go(self, answer: Any) -> bool: ...
    async def aclose(self) -> None: ...


class ThreadRuntime:
    """An event loop in a daemon thread. Starts at once; `aclose` stops it and waits for its end."""

    def __init__(
        self,
        name: str,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
        *,
        ask_s: float = _ASK_S,
        share: float | None = 1.0,
        lost_after: float = 2.0,
    ) -> None:
        """loop_factory: makes the loop, if not one that looks before it sleeps (quicoll.engine.looking). ask_s: between
        two questions for a sign of life; see the module's head. share: of the time, which the thread takes at most
        while others compute and nobody waits for it; None: none is named (quicoll.engine.share). lost_after: silence
        that others take for its end, in seconds."""
        self._selector: LookingSelector | None = None
        if loop_factory is None:
            rest_ns = min(REST_NS, round(lost_after * 1e9 / REST_PART))
            self._selector = LookingSelector(
                called=self._called,
                give=self._give,
                share=share,
                rest_ns=rest_ns,
                awaited=self._is_awaited,
                hurried=self._is_hurried if share is None else self._is_awaited,
                idle=self._is_idle,
            )
            self.loop: asyncio.AbstractEventLoop = with_own_clock(asyncio.SelectorEventLoop(self._selector))
        else:
            self.loop = loop_factory()
        self._pid = forks.pid
        self.ask_s = ask_s
        self._settled: deque[tuple[CallAnswer, Any, BaseException | None]] = (
            deque()
        )  # in this turn of the engine's loop
        self._handed = False  # something was in the middle of it, and nothing was called thereupon
        self._lock = threading.Lock()  # of the five below, so that no call comes between the last look and the end
        self._closed = self._stopping = False
        self._calls: dict[CallAnswer, None] = {}
        self._queue: deque[tuple[CallAnswer | None, _Begin, Gathering | None]] = deque()  # called, and not begun
        self._asked = False  # whether the thread has been asked to begin what is queued, and has not yet looked
        self._watching: asyncio.AbstractEventLoop | None = None  # the caller's loop on which the questions are asked
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=f"quicoll-{name}", daemon=True)
        self._thread.start()
        self._ident = self._thread.ident

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            try:
                self._wind_up()
            finally:
                asyncio.set_event_loop(None)
                self.loop.close()
                self._give()
                self._fail_calls(LocalError("the engine is closed", usable=False))
                self._ended.set_result(None)

    def _wind_up(self) -> None:
        with self._lock:
            self._closed = True
        self.loop.call_soon(self._begin_queued)
        self.loop.run_until_complete(asyncio.sleep(0))  # what was called before is a task from here on
        for answer in list(self._calls):
            if answer.begun is not None:
                answer.begun.cancel()
        leftover = asyncio.all_tasks(self.loop)
        for task in leftover:
            task.cancel()
        if leftover:
            _, stuck = self.loop.run_until_complete(asyncio.wait(leftover, timeout=_END_S))
            for task in stuck:
                log.error("%s does not end", task)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())

    def call(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` on the engine's loop, for a caller on an event loop."""
        try:
            answer: LoopAnswer[T] = LoopAnswer(loop=running_loop())
            answer.runtime = self
            self._cross(answer, partial(self._run_task, work), None)
        except LocalError:
            work.close()
            raise
        self._watch(answer.get_loop())
        return answer

    def begin(
        self, start: Begin[T], sender: Gathering, loop: asyncio.AbstractEventLoop | None = None
    ) -> asyncio.Future[T]:
        """Begin an operation on the engine's loop, for a caller on an event loop. loop: that one, where it is known."""
        if loop is None:
            loop = running_loop()
        answer: OperationAnswer[T] = OperationAnswer(loop=loop)
        answer.runtime = self
        self._cross(answer, start, sender)
        if self._watching is not loop:
            self._watch(loop)
        return answer

    def post(self, work: Callable[[], None]) -> None:
        """Have `work` done on the engine's loop, in its place among the calls; from any thread but the engine's."""
        self._cross(None, lambda _: work(), None)

    def submit(self, start: Start, sender: Gathering) -> concurrent.futures.Future[int]:
        """Begin an operation, for any thread but the engine's. `wait` for what this gives: that has an end."""
        answer: ThreadAnswer[int] = ThreadAnswer(self)
        self._cross(answer, start, sender)
        return answer

    def _cross(self, answer: CallAnswer | None, start: _Begin, sender: Gathering | None) -> None:
        selector = self._selector
        refused = self._refusal() if forks.pid != self._pid or threading.get_ident() == self._ident else ""
        if not refused:
            try:
                with self._lock:
                    if self._closed:
                        refused = "the engine is closed"
                    else:
                        if answer is not None:
                            self._calls[answer] = None
                            if selector is not None:
                                now, placing = selector.clock(), selector.placing
                                placing.called_ns = now
                                if now >= placing.look_ns:
                                    placing.called(now)
                        self._queue.append((answer, start, sender))
                        if not self._asked:
                            self._asked = True
                            if selector is None or selector.asleep:  # awake it looks by itself (`_called`)
                                self.loop.call_soon_threadsafe(self._begin_queued)
            except BaseException:  # of a signal handler: the caller gets no future that it could cancel
                self._asked = False  # perhaps the thread has not heard
                if answer is not None:
                    answer.cancel()
                raise
        if refused:
            raise LocalError(refused)

    def _called(self) -> bool:
        """On the engine's thread, between two turns of its loop: whether something is queued, which then begins."""
        # First, as below. A call may have begun between its place in the queue and its question, which then stood here
        # for nobody; and with it who came next would not have asked, and the thread would have slept.
        self._asked = False
        if not self._queue:
            return False
        self.loop.call_soon(self._begin_queued)
        return True

    def _is_awaited(self) -> bool:
        """On the engine's thread: whether somebody waits for one of the calls under way."""
        with self._lock:
            for answer in self._calls:
                if answer.awaited:
                    return True
        return False

    def _is_hurried(self) -> bool:
        """On the engine's thread: whether somebody waits for a call under way, or not all go through memory alone."""
        with self._lock:
            for answer in self._calls:
                if answer.awaited or not answer.held:
                    return True
            return not self._calls

    def _is_idle(self) -> bool:
        return not self._calls

    def rouse(self) -> None:
        """Somebody begins to wait, which a call of his already says: the thread does not rest now."""
        selector = self._selector
        if selector is not None and selector.resting:
            selector.rouse()

    def hold(self, begun: Cancellable, *, in_loop: bool) -> HeldAnswer:
        """Give a future for what is begun elsewhere, by this caller; the engine's end ends it as every call.

        Args:
            begun: Is cancelled on the engine's loop, where the future is.
            in_loop: Whether the future is for the caller's event loop, or for a thread without one.
        Raises:
            LocalError: The engine is closed, or this thread may not call.
        """
        future: OperationAnswer[int] | ThreadAnswer[int]
        if in_loop:
            future = OperationAnswer(loop=running_loop())
            future.runtime = self
        else:
            future = ThreadAnswer(self)
        refused = self._refusal()
        if not refused:
            future.begun, future.held = begun, True
            with self._lock:
                refused = "the engine is closed" if self._closed else ""
                if not refused:
                    self._calls[future] = None
        if refused:
            raise LocalError(refused)
        if not isinstance(future, ThreadAnswer):
            self._watch(future.get_loop())
        return HeldAnswer(self, future)

    def let_go(self, answer: CallAnswer) -> bool:
        """An answer is there, on any thread. Return whether nobody has given one before."""
        with self._lock:
            if answer not in self._calls:
                return False
            del self._calls[answer]
        answer.begun = None
        return True

    def wait(
        self,
        answer: concurrent.futures.Future[Any],
        timeout: float | None,
        attended: Callable[[float | None], None] | None = None,
    ) -> bool:
        """Block this thread until there is an answer, or `timeout` seconds have passed. Return whether there is one.

        As for calls from a loop, a thread that is blocked ends the wait. Raises LocalError where an event loop runs.
        attended: waits for the answer in a way of its own first, for a while; given the seconds that are left.
        """
        refused = self._refusal()
        if not refused and loop_here() is not None:
            refused = "an event loop is running on this thread: there nothing may block"
        if refused:
            raise LocalError(refused)
        began = now = time.monotonic()
        attend(answer)
        try:
            if attended is not None and not answer.done():
                attended(timeout)
                now = time.monotonic()
            signs = _Signs(self)
            while not answer.done() and (timeout is None or now - began < timeout):
                due = now + self.ask_s
                until = due if timeout is None else min(due, began + timeout)
                with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                    answer.exception(until - now)
                now = time.monotonic()
                if now >= due:
                    signs.ask(on_time=now - due < self.ask_s / 2)
        finally:
            attend(answer, ends=True)
        return answer.done()

    def _refusal(self) -> str:
        if forks.pid != self._pid:
            return "this process is a fork of the one that joined, whose engine it does not have; join in the child"
        if threading.get_ident() == self._ident:
            return "called from the engine's own thread"
        return ""

    def _begin_queued(self) -> None:
        """Begin what has been called up to now, in order; what it has to send goes together, in this turn of the loop.

        The first of some that come together asks for this.
        """
        self._asked = False  # first: what is queued from here on asks again
        senders: dict[Gathering, None] = {}
        while self._queue:
            answer, start, sender = self._queue.popleft()
            if sender is not None and sender not in senders:
                senders[sender] = None
                sender.gather()
            self._begin(answer, start)
        for each in senders:
            each.send_gathered()

    def _begin(self, answer: CallAnswer | None, start: _Begin) -> None:
        if answer is None:
            try:
                start(None)
            except Exception as error:
                self.loop.call_exception_handler({"message": "what was posted raised", "exception": error})
            return
        try:
            answer.begun = start(partial(self._over, answer))
        except Exception as error:  # of our own code: nobody may have to wait for it
            self._over(answer, None, error)

    def _run_task(
        self, work: Coroutine[Any, Any, T], ended: Callable[[Any, BaseException | None], None]
    ) -> Cancellable:
        task = self.loop.create_task(work)

        def over(task: asyncio.Task[T]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            ended(None if error is not None else task.result(), error)

        task.add_done_callback(over)
        return task

    def _over(self, answer: CallAnswer, value: Any, error: BaseException | None) -> None:
        answer.begun = None
        if isinstance(error, asyncio.CancelledError):  # where not by the caller: by the end of the thread
            error = LocalError("the engine is closed", usable=False)
        self._settled.append((answer, value, error))
        if self._selector is None:
            self._give()

    def _give(self) -> bool:
        """Hand out what has been settled in this turn of the loop; return whether there was anything, or has been.

        Until then it counts as under way: if the rest of the turn is blocked, its caller hears of that as all do.
        """
        handed, self._handed = self._handed, False
        if not self._settled:
            return handed
        while self._settled:
            answer, value, error = self._settled.popleft()
            with self._lock:
                if answer not in self._calls:  # it has got its error while the thread was blocked
                    continue
                del self._calls[answer]
            try:
                answer.settle(value, error)
            except Exception as raised:  # of our own code; the loop is about to sleep, and goes on
                self.loop.call_exception_handler({"message": "an answer was not taken", "exception": raised})
        return True

    def hand_out(self) -> None:
        """In the middle of a turn of the engine's loop: hand out what has been settled in it, and begin what is called
        thereupon. What that has to send then goes with what is left to send of this turn.

        Whose answer it is has Python's lock until he sleeps or computes without it; where he is on this processor he
        would have it in any case.
        """
        if self._settled and self._selector is not None:
            self._give()
            self._selector.offer()
            if self._queue:
                self._begin_queued()
            else:
                self._handed = True

    def withdraw(self, answer: CallAnswer) -> None:
        """Nobody waits for an answer any more: what was called is cancelled, after its first step."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nothing of it runs any more
            self.loop.call_soon_threadsafe(self._cancel, answer)

    def _cancel(self, answer: CallAnswer) -> None:
        self._begin_queued()  # a signal may have kept the caller from asking for it
        if answer.begun is not None:
            self.loop.call_soon(answer.begun.cancel)  # a task that was made in this turn takes its first step before

    def _fail_calls(self, error: LocalError) -> None:
        with self._lock:
            calls, self._calls = list(self._calls), {}
        for answer in calls:
            answer.settle(None, error)

    # -- is the thread blocked? ----------------------------------------------------------------------------------

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._watching is not loop:
            self._watching = loop
            signs = _Signs(self)
            loop.call_later(self.ask_s, self._ask, loop, loop.time() + self.ask_s, signs)

    def _ask(self, loop: asyncio.AbstractEventLoop, due: float, signs: _Signs) -> None:
        if self._watching is not loop:
            return
        if not self._calls or self._closed:
            self._watching = None
            return
        signs.ask(on_time=loop.time() - due < self.ask_s / 2)
        loop.call_later(self.ask_s, self._ask, loop, loop.time() + self.ask_s, signs)

    def blocked(self, seconds: float) -> None:
        """The thread has given no sign of life for so long: its calls end."""
        blocked = f"the engine's thread has been blocked for {seconds:g} s{self._whereabouts()}"
        self._fail_calls(LocalError(f"{blocked}; observers must be quick", usable=False))

    def _whereabouts(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001 - there is no public way to another thread's frame
        if frame is None:
            return ""
        code = frame.f_code
        return f", in {code.co_name} ({code.co_filename}:{frame.f_lineno})"

    # -- the end -------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Raises LocalError when the thread does not end, because it is blocked."""
        if forks.pid != self._pid:
            return
        with self._lock:
            stopping, self._stopping = self._stopping, True
            if not stopping and not self._closed:
                self.loop.call_soon_threadsafe(self.loop.stop)
        ended = asyncio.wrap_future(self._ended)
        await asyncio.wait({ended}, timeout=2 * _END_S)
        if not ended.done():
            raise LocalError(f"the engine's thread does not end: it is blocked{self._whereabouts()}", usable=False)
        self._thread.join()


class _Signs:
    """One caller's questions for a sign of life of a runtime's thread, one after the other."""

    def __init__(self, runtime: ThreadRuntime) -> None:
        self._runtime = runtime
        self._asked = self._answered = self._missed = 0

    def ask(self, *, on_time: bool) -> None:
        """A second has passed. on_time: no more than that; otherwise it was the process that stood still."""
        if self._answered == self._asked:
            self._missed = 0
            self._asked += 1
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._runtime.loop.call_soon_threadsafe(self._answer)
        elif on_time:
            self._missed += 1
        if self._missed >= _BLOCKED:
            self._missed = 0
            self._runtime.blocked(_BLOCKED * self._runtime.ask_s)

    def _answer(self) -> None:
        self._answered += 1


_Begin: TypeAlias = Callable[[Any], Any]  # as `Begin`; what is posted is given None
