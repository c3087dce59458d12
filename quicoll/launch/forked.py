"""Workers without the time that a process takes to import: forks of this process, which has imported it once.

Four workers that each import torch keep two cores busy for ten seconds before the first of them joins. Here it is
imported once, on a thread, when the first of them is to be started; one that is started again is there at once, too.
Not before, while the coordinator starts: who imports holds Python's lock for long, and would not hear of it.

    ForkedProgram:  new --ready--> imported (again: nothing)
    ForkedProcess:  running --the system says that it has ended--> ended, its status taken once, whoever waits

What a fork inherits, and what becomes of it in the child:

- The modules: that is the point. What they hold is of this process at that moment; nothing here may have begun threads
  that a child needs (torch's pool begins with the first operation, so nobody computes here).
- Locks of other threads stay locked for ever. So no other thread may be at work when it forks: the one that imports has
  ended, and a live table is drawn by the loop and not by a thread.
- Open files are closed, their objects never: a number may be another file's by then. Hence gc.freeze, and os._exit.
- The running event loop, handlers of signals, variables, streams: as in a process that has just begun.

The child has a session of its own, so it is ended with all that it has started (`quicoll.launch.child`). Where the
system has no file that tells the end of a process (pidfd_open, Linux), `can_fork` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from asyncio import _set_running_loop  # asyncio offers it to event loops, under this name
from collections.abc import Callable, Mapping
from typing import NoReturn

from quicoll.errors import LocalError

__all__ = ["ForkedProcess", "ForkedProgram", "can_fork"]

_KILLED_BY_INTERRUPT = 128 + signal.SIGINT


def can_fork() -> bool:
    """Return whether processes can be forked here, and their end be awaited."""
    return hasattr(os, "pidfd_open") and hasattr(os, "fork")


class ForkedProcess:
    """A fork of this process.

    Attributes:
        pid: Its number.
        returncode: Its exit status, negative for a signal; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        """Follow a child to its end, on the running loop. Raises LocalError where the system cannot tell of it."""
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        try:
            self._end = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise LocalError(f"cannot follow process {pid} to its end: {error.strerror}") from error
        self._loop.add_reader(self._end, self._has_ended)

    def _has_ended(self) -> None:
        self._loop.remove_reader(self._end)
        os.close(self._end)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set_result(None)

    async def wait(self) -> int:
        """Wait for its end; whoever gives up waiting keeps nobody else from it. Returns its exit status."""
        await asyncio.wait({self._ended})
        assert self.returncode is not None  # noqa: S101 - for the type checker
        return self.returncode


class ForkedProgram:
    """What each worker runs, as a function of this process."""

    def __init__(self, main: Callable[[], object], *, prepare: Callable[[], object]) -> None:
        """Say what is run; nothing is imported yet.

        Args:
            main: The program. What it raises is its end, as a script's: SystemExit has the status.
            prepare: Imports what it needs; called once, on a thread.
        """
        self._main = main
        self._prepare = prepare
        self._ready: asyncio.Future[None] | None = None

    async def ready(self) -> None:
        """Import what the program needs, once.

        Raises:
            Exception: What `prepare` raises.
        """
        if self._ready is None:
            self._ready = asyncio.ensure_future(self._prepared())
        await asyncio.shield(self._ready)

    async def _prepared(self) -> None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[BaseException | None] = loop.create_future()

        def tell(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(lambda: None if over.done() else over.set_result(error))

        def work() -> None:
            try:
                self._prepare()
            except BaseException as error:  # it is raised where it is waited for
                tell(error)
            else:
                tell(None)

        thread = threading.Thread(target=work, name="quicoll-imports", daemon=True)
        thread.start()
        error = await over
        thread.join()  # its last line: it may hold no lock when this process forks
        if error is not None:
            raise error
        gc.collect()
        gc.freeze()  # what is there now is never collected in a child, which would copy the pages that it is on

    def start(self, environment: Mapping[str, str], output: int | None = None) -> ForkedProcess:
        """Start a process; after `ready`.

        Args:
            environment: All of its variables.
            output: Where its standard output and its errors go, an open file; None leaves them where they are.
        Raises:
            LocalError: The system has no process for it.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            raise LocalError(f"cannot fork a process: {error.strerror}") from error
        if not pid:
            self._run(environment, output)
        return ForkedProcess(pid)

    def _run(self, environment: Mapping[str, str], output: int | None) -> NoReturn:
        """Be the program. Never returns: nothing of the process that was forked may go on here."""
        status = 1
        try:
            gc.freeze()
            _begin(environment, output)
            self._main()
            status = 0
        except SystemExit as ended:
            status = 0 if ended.code is None else ended.code if isinstance(ended.code, int) else 1
        except KeyboardInterrupt:
            status = _KILLED_BY_INTERRUPT
        except BaseException:
            with contextlib.suppress(OSError):
                os.write(2, traceback.format_exc().encode())  # whatever has become of the streams
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status & 0xFF)


def _begin(environment: Mapping[str, str], output: int | None) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _set_running_loop(None)
    asyncio.set_event_loop(None)
    os.environ.clear()
    os.environ.update(environment)
    # New ones: what the old ones still hold, and who holds their locks, is the other process's.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
