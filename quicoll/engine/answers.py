"""Futures of what is called on the engine: for a caller on an event loop, and for a thread without one.

An answer is given on the engine's thread, at the end of a turn of its loop, and taken on its caller's: `settle` brings
it there, and who waits goes on in the turn of his loop in which it comes. What is begun elsewhere than on the engine,
by its own caller, has an answer that is settled on any thread (`HeldAnswer`). quicoll.engine.runtime says what ends
each.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import threading
from asyncio import _get_running_loop  # asyncio offers it to event loops, under this name
from collections.abc import Callable, Sequence
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from quicoll.errors import LocalError

__all__ = [
    "NO_LOOP",
    "Begin",
    "CallAnswer",
    "Cancellable",
    "Gathering",
    "HeldAnswer",
    "HeldCall",
    "Home",
    "LoopAnswer",
    "OperationAnswer",
    "Start",
    "ThreadAnswer",
    "attend",
    "loop_here",
    "running_loop",
]

log = logging.getLogger("quicoll")

T = TypeVar("T")

_CANCELLED = (CANCELLED, CANCELLED_AND_NOTIFIED)
_ENDED = (FINISHED, *_CANCELLED)


class Cancellable(Protocol):
    """What has been begun."""

    def cancel(self) -> object: ...


class Gathering(Protocol):
    """What sends for operations that begin together: `gather` before the first, `send_gathered` after the last."""

    def gather(self) -> None: ...
    def send_gathered(self) -> None: ...


Begin: TypeAlias = Callable[[Callable[[T | None, BaseException | None], None]], Cancellable | None]
"""Begins something on the engine's loop. It is given what to call at its end, with the result or with the error."""

Start: TypeAlias = Begin[int]
"""Begins an operation, whose result is its number."""


class CallAnswer(Protocol):
    """The future of a call. begun: what was called, from its first step to its end, for the engine's thread alone.
    held: whether that goes on outside of the engine's loop, and needs none of its links. awaited: whether somebody
    waits for it; asked from any thread."""

    begun: Cancellable | None
    held: bool

    @property
    def awaited(self) -> bool: ...
    def cancel(self) -> bool: ...
    def settle(self, value: Any, error: BaseException | None) -> None: ...


class Home(Protocol):
    """What answers belong to: the runtime that gives them."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    def rouse(self) -> None: ...
    def withdraw(self, answer: CallAnswer, /) -> None: ...
    def let_go(self, answer: CallAnswer, /) -> bool: ...


class HeldCall(Protocol):
    """How what is not begun on the engine's loop is answered. future: its caller's."""

    @property
    def future(self) -> Any: ...
    def settle(self, value: int | None, error: BaseException | None, idle: bool) -> None: ...


class LoopAnswer(asyncio.Future[T]):
    """On the caller's loop. One crossing brings the end there, and who waits goes on in that same turn of the loop.

    A future of asyncio's would call back in the turn after it. Here nobody is in the middle of anything when the end
    comes: it is the loop that calls. A caller that cancels is in the middle of something; so then it is the next turn.

    runtime: which withdraws it. breaks: whether its error breaks the view, so that nobody need ever look at it: the
    next operation raises it. (No `__init__` of its own: that took as long as making the future.)
    """

    runtime: Home
    breaks: bool = False
    begun: Cancellable | None = None
    held: bool = False
    _heard: Sequence[tuple[Callable[[Any], object], contextvars.Context]] = ()

    @property
    def awaited(self) -> bool:
        return bool(self._heard)

    def add_done_callback(
        self, callback: Callable[[Any], object], /, *, context: contextvars.Context | None = None
    ) -> None:
        if self.done():
            super().add_done_callback(callback, context=context)
        else:
            self._heard = *self._heard, (callback, contextvars.copy_context() if context is None else context)
            self.runtime.rouse()

    def remove_done_callback(self, callback: Callable[[Any], object], /) -> int:
        before, self._heard = self._heard, [each for each in self._heard if each[0] != callback]
        return len(before) - len(self._heard) + super().remove_done_callback(callback)

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        heard, self._heard = self._heard, ()
        for callback, context in heard:
            self.get_loop().call_soon(callback, self, context=context)
        self.runtime.withdraw(self)
        return True

    def settle(self, value: Any, error: BaseException | None) -> None:
        try:
            self.get_loop().call_soon_threadsafe(self.settle_now, value, error)
        except RuntimeError:  # the caller's loop has been closed
            return

    def settle_here(self, value: Any, error: BaseException | None) -> None:
        """Settle on the loop's own thread, in the middle of a task perhaps: others hear of it in the next turn."""
        if self.done():
            return
        heard, self._heard = self._heard, ()
        for callback, context in heard:
            super().add_done_callback(callback, context=context)
        self.settle_now(value, error)

    def settle_now(self, value: Any, error: BaseException | None) -> None:
        """Settle where the loop calls: who waits goes on before this returns."""
        if self.done():
            return
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)
            if self.breaks:
                self.exception()  # looked at, so that asyncio does not report it
        heard, self._heard = self._heard, ()
        for callback, context in heard:
            try:
                context.run(callback, self)
            except Exception as raised:  # of one callback, which is no affair of the next
                about = {"message": f"{callback!r} raised", "exception": raised, "future": self}
                self.get_loop().call_exception_handler(about)


class OperationAnswer(LoopAnswer[T]):
    """Of an operation, whose failure breaks the view."""

    breaks = True


class ThreadAnswer(concurrent.futures.Future[T]):
    """For a thread without a loop.

    A future of concurrent.futures makes a condition, which is most of it, and takes that for each question. Here it is
    made where somebody blocks on it, in his thread while the engine works; who wants to hear of the end by a callback
    needs none, and who asks for a state that is there takes no lock.

        pending --settle--> finished        pending --cancel--> cancelled --settle--> cancelled, and `wait` told

    `_gate` is held for each of these, so that one of two threads has it, and for nothing else that could take long. Who
    blocks makes the condition first, and looks at the state then, with the condition; who ends it changes the state
    first, and looks for a condition then. So one of the two sees the other. It is the same with callbacks: one is
    appended, and then the state is looked at; the state is changed, and then the list is emptied. Whoever takes one out
    calls it. (A test holds what is set here to what the class sets.)
    """

    begun: Cancellable | None = None
    held = False
    _waits = 0
    _said = False  # to those who wait for several
    _state = PENDING
    _result: Any = None
    _exception: BaseException | None = None
    _done_callbacks: Sequence[Any] = ()  # none ever comes in

    def __init__(self, runtime: Home) -> None:
        self._gate = threading.Lock()
        self._waiters: list[Any] = []
        self._told: list[Callable[[Any], object]] = []
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        if name != "_condition":
            raise AttributeError(name)
        return self.__dict__.setdefault(name, threading.Condition())  # of two threads the first one's

    @property
    def awaited(self) -> bool:
        return self._waits > 0

    def attend(self, *, ends: bool) -> None:
        with self._gate:
            self._waits += -1 if ends else 1
        if not ends:
            self._runtime.rouse()

    def done(self) -> bool:
        return self._state in _ENDED

    def cancelled(self) -> bool:
        return self._state in _CANCELLED

    def running(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> T:
        if self._state == FINISHED and self._exception is None:
            found: T = self._result
            return found
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state == FINISHED:
            return self._exception
        return super().exception(timeout)

    def cancel(self) -> bool:
        with self._gate:
            if self._state == FINISHED:
                return False
            if self._state == PENDING:
                self._state = CANCELLED
        self.tell()
        self._runtime.withdraw(self)
        return True

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        self._told.append(fn)
        if self._state in _ENDED:
            self.tell()

    def tell(self) -> None:
        """Wake who blocks on an end that is there, and call who is to be told of it; nobody twice."""
        condition = self.__dict__.get("_condition")
        if condition is not None:
            with condition:
                condition.notify_all()
                # Of a cancelled one `wait` and `as_completed` hear when it is settled.
                if not self._said and self._state != CANCELLED:
                    self._said = True
                    for waiter in self._waiters:
                        self._tell_waiter(waiter)
        while self._told:
            try:
                callback = self._told.pop(0)
            except IndexError:  # another thread has taken the last one
                return
            try:
                callback(self)
            except Exception:  # of one callback, which is no affair of the next
                log.exception("what was to be called at the end of an operation raised")

    def settle(self, value: Any, error: BaseException | None) -> None:
        with self._gate:
            if self._state == PENDING:
                self._result, self._exception = value, error
                self._state = FINISHED
            elif self._state == CANCELLED:
                self._state = CANCELLED_AND_NOTIFIED
            else:
                return
        self.tell()

    def _tell_waiter(self, waiter: Any) -> None:
        """As Future's own methods do; a waiter is one of concurrent.futures.wait or as_completed."""
        if self._state == CANCELLED_AND_NOTIFIED:
            waiter.add_cancelled(self)
        elif self._exception is not None:
            waiter.add_exception(self)
        else:
            waiter.add_result(self)


class HeldAnswer:
    """A future of what is not begun on the engine's loop, and how it is settled."""

    __slots__ = ("_runtime", "future")

    def __init__(self, runtime: Home, future: LoopAnswer[int] | ThreadAnswer[int]) -> None:
        self._runtime = runtime
        self.future = future

    def settle(self, value: int | None, error: BaseException | None, idle: bool) -> None:
        """Settle it, once, on any thread. idle: this is the future's own loop that calls, and no task of it runs."""
        try:
            if self._runtime.let_go(self.future):
                self._give(value, error, idle)
        except BaseException:  # of a signal handler; it interrupts the main thread alone, and never the engine's
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and all calls have ended
                self._runtime.loop.call_soon_threadsafe(self._settle_for_another, value, error)
            raise

    def _settle_for_another(self, value: int | None, error: BaseException | None) -> None:
        """On the engine's thread, in the place of one that was interrupted in the middle."""
        self._runtime.let_go(self.future)
        if not self.future.done():
            self._give(value, error, idle=False)
        elif isinstance(self.future, ThreadAnswer):
            self.future.tell()

    def _give(self, value: int | None, error: BaseException | None, idle: bool) -> None:
        future = self.future
        if isinstance(error, asyncio.CancelledError):
            error = LocalError("the engine is closed", usable=False)
        if isinstance(future, ThreadAnswer) or loop_here() is not future.get_loop():
            future.settle(value, error)
        elif idle:
            future.settle_now(value, error)
        else:
            future.settle_here(value, error)


def attend(answer: Any, *, ends: bool = False) -> None:
    """Say that this thread waits for a call, in a way of its own perhaps, so that the engine does not rest meanwhile.

    Args:
        answer: A future of a Home's, for a thread without an event loop; of others it is known.
        ends: The wait is over.
    """
    if isinstance(answer, ThreadAnswer):
        answer.attend(ends=ends)


NO_LOOP: Final = (
    "no event loop is running here: call it from a coroutine on the loop on which the job was joined (from another "
    "thread, asyncio.run_coroutine_threadsafe takes one there); in synchronous code join by quicoll.blocking"
)


def running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise LocalError(NO_LOOP) from None


loop_here: Final[Callable[[], asyncio.AbstractEventLoop | None]] = _get_running_loop
"""Returns the event loop that this thread is inside of; without the error by which the public function says that there
is none, as each call from a thread without a loop asks this."""
