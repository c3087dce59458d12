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
from types import FrameType

from quicoll.errors import LocalError, Terminated

__all__ = ["StopRequest", "sigterm_asks", "sigterm_tells"]


class StopRequest:
    """Whether a rank was asked to stop, and what has to be woken when it is."""

    def __init__(self) -> None:
        """Nothing is asked yet."""
        self._asked = False
        self._wakes: tuple[Callable[[], object], ...] = ()  # replaced as a whole: a signal may come at any moment

    @property
    def asked(self) -> bool:
        """Whether `ask` was called."""
        return self._asked

    def ask(self) -> None:
        """Ask. From any thread, and from a signal handler; again does nothing more."""
        self._asked = True
        for wake in self._wakes:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits there any more
                wake()

    def on_ask(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], object]) -> Callable[[], None]:
        """Call a function on a loop when it is asked for; soon if it was. It may be called more than once.

        Args:
            loop: The loop, of any thread.
            wake: The function.
        Returns:
            Takes this back; a call that is on its way then comes all the same.
        """

        def ring() -> None:
            loop.call_soon_threadsafe(wake)

        self._wakes = (*self._wakes, ring)
        if self._asked:  # looked at last: it may have come just before the line above
            ring()

        def forget() -> None:
            self._wakes = tuple(each for each in self._wakes if each is not ring)

        return forget

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

    @contextlib.contextmanager
    def interrupting(self, *, after: float = 0.0) -> Iterator[None]:
        """Give up what is awaited in the block when it is asked for.

        Args:
            after: Seconds from then on, or from the beginning of the block if it was asked for before. With 0 the block
                is not even begun in that case.
        Raises:
            LocalError: This is no task.
            Terminated: What was awaited is given up.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        if task is None:
            raise LocalError("called outside of a task: there is nothing that could be interrupted")
        before = task.cancelling()
        inside, interrupted = True, False
        due: asyncio.TimerHandle | None = None

        def interrupt() -> None:
            nonlocal interrupted
            if inside and not interrupted:
                interrupted = True
                task.cancel()

        def asked() -> None:
            nonlocal due
            if not after:
                interrupt()
            elif inside and due is None:
                due = loop.call_later(after, interrupt)

        forget = self.on_ask(loop, asked)
        try:
            if self._asked and not after:
                raise Terminated
            yield
        except asyncio.CancelledError as error:
            if interrupted and task.cancelling() <= before + 1:
                raise Terminated from error
            raise
        finally:
            inside = False
            forget()
            if due is not None:
                due.cancel()
            if interrupted:
                task.uncancel()  # that cancellation was ours, and is over


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
