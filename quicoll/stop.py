"""The end of a rank's work because somebody asked for it: SIGTERM, or the program itself (`Job.stop`).

    at work --ask--> asked --entry of a step, or a wait there--> Terminated --> the job is left, exit status 143

A rank that is asked ends the step that is open, as it would have, and enters no other one. So it is at a step boundary
when it leaves, its state is that of a committed step, and the others go on without having lost anything. A wait at the
entry of a step is given up at once, wherever it is. The step that is open has `stop_timeout` seconds: then it is given
up on all ranks, because whoever asks will not wait for ever, and what there is to do before the end, a checkpoint, has
to be done before SIGKILL comes. What computes is not interrupted; what waits for other ranks is, and so is the wait for
a decision, of a coordinator that may be gone for good. The step is in doubt then, and its callbacks do not run here.

Signals belong to the program. Nothing here touches them unless it is asked to: by the setting `handle_sigterm`, or by
`quicoll.train.Worker`, which is a program's main loop and takes SIGTERM only where nobody else did; or by `flight_dir`,
which has what this rank did last written down before SIGTERM does what it does otherwise (`sigterm_tells`). There is
one handler for all jobs of the process, for as long as one of them wants it; the first SIGTERM asks them, and puts the
default action back, so that a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, TracebackType

from quicoll.errors import LocalError, Terminated

__all__ = ["StopRequest", "sigterm_asks", "sigterm_tells"]


class StopRequest:
    """Whether a rank was asked to stop, and what has to be woken when it is.

    Attributes:
        asked: Whether `ask` was called, which alone changes this.
    """

    def __init__(self) -> None:
        """Nothing is asked yet."""
        self.asked = False
        # An ordered set. A signal may come at any moment: to add one, to take one out and to list all is one step each.
        self._wakes: dict[Callable[[], object], None] = {}

    def ask(self) -> None:
        """Ask. From any thread, and from a signal handler; again does nothing more."""
        self.asked = True
        for wake in list(self._wakes):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits there any more
                wake()

    def on_ask(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], object]) -> Callable[[], object]:
        """Call a function on a loop when it is asked for; soon if it was. It may be called more than once.

        Args:
            loop: The loop, of any thread.
            wake: The function.
        Returns:
            Takes this back; a call that is on its way then comes all the same.
        """
        ring = partial(loop.call_soon_threadsafe, wake)
        self._wakes[ring] = None
        if self.asked:  # looked at last: it may have come just before the line above
            ring()
        return partial(self._wakes.pop, ring, None)

    def limit(self, loop: asyncio.AbstractEventLoop, after: float, overdue: Callable[[], None]) -> Callable[[], None]:
        """Call a function on a loop some time after it is asked for, if this is not taken back before.

        Args:
            loop: The loop, of any thread.
            after: Seconds.
            overdue: The function.
        Returns:
            Takes this back; a call that is on its way then comes all the same.
        """
        timers: list[asyncio.TimerHandle] = []
        taken_back = False

        def asked() -> None:
            if not timers and not taken_back:
                timers.append(loop.call_later(after, overdue))

        forget = self.on_ask(loop, asked)

        def unlimit() -> None:
            nonlocal taken_back
            taken_back = True
            forget()
            for timer in timers:
                loop.call_soon_threadsafe(timer.cancel)

        return unlimit

    def interrupting(self, *, after: float = 0.0) -> Interrupting:
        """Give up what is awaited in a block when it is asked for.

        Args:
            after: Seconds from then on, or from the beginning of the block if it was asked for before. With 0 the block
                is not even begun in that case.
        Returns:
            For a `with` statement. It raises LocalError where this is no task, and Terminated where what was awaited is
            given up.
        """
        return Interrupting(self, after)


class Interrupting:
    """The block of `StopRequest.interrupting`; once. (A class, as two of them are entered in each step.)"""

    __slots__ = ("_after", "_before", "_due", "_forget", "_inside", "_interrupted", "_loop", "_request", "_task")

    def __init__(self, request: StopRequest, after: float) -> None:
        """See `StopRequest.interrupting`."""
        self._request = request
        self._after = after
        self._inside, self._interrupted = True, False
        self._due: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise LocalError("called outside of a task: there is nothing that could be interrupted")
        self._task, self._before = task, task.cancelling()
        self._forget = self._request.on_ask(loop, self._asked)
        if self._request.asked and not self._after:
            self._leave()
            raise Terminated

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = self._interrupted and self._task.cancelling() <= self._before + 1
        self._leave()
        if interrupted and isinstance(error, asyncio.CancelledError):
            raise Terminated from error

    def _asked(self) -> None:
        if not self._after:
            self._interrupt()
        elif self._inside and self._due is None:
            self._due = self._loop.call_later(self._after, self._interrupt)

    def _interrupt(self) -> None:
        if self._inside and not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    def _leave(self) -> None:
        self._inside = False
        self._forget()
        if self._due is not None:
            self._due.cancel()
        if self._interrupted:
            self._task.uncancel()  # that cancellation was ours, and is over


_handling: list[StopRequest] = []
_told: list[Callable[[], object]] = []


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    for tell in tuple(_told):
        tell()
    for request in _handling:
        request.ask()
    if not _handling:
        os.kill(os.getpid(), number)  # what would have happened before


@contextlib.contextmanager
def sigterm_tells(tell: Callable[[], object]) -> Iterator[None]:
    """Have a function called when SIGTERM comes, until the block ends, before that does what it does otherwise.

    Nothing is done where the signal cannot be had: outside of the main thread, or where the program handles it.

    Args:
        tell: The function; quick, for a signal handler.
    """
    if _obstacle():
        yield
        return
    _told.append(tell)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        _told.remove(tell)
        _let_go()


def _let_go() -> None:
    """Put the default action back where nobody wants the signal any more."""
    if not _handling and not _told and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def sigterm_asks(request: StopRequest, *, insist: bool) -> Iterator[None]:
    """Let SIGTERM ask, until the block ends.

    Args:
        request: What it asks.
        insist: Whether it is an error that the process's SIGTERM cannot be had. If not, nothing is done then.
    Raises:
        LocalError: It cannot be had: this is not the main thread, or the program handles SIGTERM itself.
    """
    obstacle = _obstacle()
    if obstacle and insist:
        raise LocalError(f"handle_sigterm: {obstacle}; call job.stop() from where the program learns of SIGTERM")
    if obstacle or request in _handling:
        yield
        return
    _handling.append(request)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not request.asked:
        signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        _handling.remove(request)
        _let_go()


def _obstacle() -> str:
    if threading.current_thread() is not threading.main_thread():
        return "only the main thread can handle signals"
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _on_sigterm):
        return "the program handles SIGTERM itself, or ignores it"
    return ""
