"""Jobs that a program has connected to (`quicoll.connect`) and not left.

    open --aclose--> gone
    open --the same node of the same job connects again, as when a notebook's cell is run twice--> left, with a warning
    open --the process ends--> left, with a warning

Whoever is still open here is held: a variable that is lost, or that a cell has overwritten, leaves no job by chance of
the garbage collector. To leave is always `Job.aclose`, as a rank that does not say that its work has ended: a step that
was left undecided stays in doubt, and the others hear at once who goes and why, not by silence.

Failure cases: the engine is blocked, or the loop that it would be asked from cannot be made: the process ends all the
same, after `EXIT_S`, and the others lose this rank by silence. The child of a fork has no part in the job: it says and
does nothing. SIGKILL, and a signal that Python does not handle, run nothing of this.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Protocol

from quicoll.errors import QuicollError

__all__ = ["EXIT_S", "Leavable", "Unclosed"]

EXIT_S = 2.0
"""Seconds that the end of a process waits for the operations in which the others still need a rank."""

log = logging.getLogger("quicoll")


class Leavable(Protocol):
    """What is left by `aclose`: a job."""

    async def aclose(self, reason: str, *, patience: float | None, finished: bool) -> None: ...


class Unclosed:
    """The jobs of this process that are open, by the job's name and the node's."""

    def __init__(self, at_exit: Callable[[Callable[[], None]], object] = atexit.register) -> None:
        """Hold none yet.

        Args:
            at_exit: Has a function called when the process ends; it is asked once, with the first job.
        """
        self._at_exit = at_exit
        self._open: dict[tuple[str, str], Leavable] = {}
        self._pid = 0

    async def replace(self, name: tuple[str, str]) -> None:
        """Leave the job that was opened by this name before, if it still is; before another one is.

        Args:
            name: The job's and the node's.
        """
        former = self._open.pop(name, None) if self._pid == os.getpid() else None
        if former is None:
            return
        log.warning(
            "%s is still in job %r and connects again: it is left first. `await job.aclose()` leaves a job",
            *reversed(name),
        )
        await former.aclose("connects again", patience=EXIT_S, finished=False)

    def hold(self, name: tuple[str, str], job: Leavable) -> Callable[[], None]:
        """Hold a job until it is left.

        Args:
            name: The job's and the node's.
            job: The job.
        Returns:
            To be called when it is left.
        """
        if self._pid != os.getpid():  # the first, or the first after a fork, whose parent's are none of ours
            self._open.clear()
            if not self._pid:
                self._at_exit(self.leave_all)
            self._pid = os.getpid()
        self._open[name] = job

        def left() -> None:
            if self._open.get(name) is job:
                del self._open[name]

        return left

    def leave_all(self) -> None:
        """Leave what is open, at the end of the process."""
        if self._pid != os.getpid():
            return
        for (job_name, node), job in list(self._open.items()):
            log.warning(
                "the program ends while %s is in job %r: it is left now. `await job.aclose()` at the end leaves it in "
                "order",
                node,
                job_name,
            )
            with contextlib.suppress(QuicollError, RuntimeError, OSError):  # the process ends in any case
                asyncio.run(job.aclose("its program ended", patience=EXIT_S, finished=False))
        self._open.clear()
