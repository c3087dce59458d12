"""Threads for what may block: the callbacks of futures, results that nobody waits for.

Callbacks may start operations and wait for them (torch's PowerSGD hook does), so they never run on the engine's thread,
and never on a fixed number of threads: with as many callbacks as there are threads, each waiting for a later one, none
would ever end. Every call has a thread of its own at once: one that is idle, or a new one. Threads end after half a
minute without work. The child of a fork has none of its parent's threads, and gets a pool of its own.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from quicoll import forks

__all__ = ["run_aside"]

log = logging.getLogger("quicoll")

_IDLE_S = 30.0


class _Pool:
    def __init__(self) -> None:
        self.pid = forks.pid
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait for a call, less the calls that are on their way to them

    def run(self, call: Callable[[], object]) -> None:
        with self._lock:
            fresh = self._idle == 0
            if not fresh:
                self._idle -= 1
        self._calls.put(call)
        if fresh:
            threading.Thread(target=self._work, name="quicoll-callbacks", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        return
                continue  # a call is on its way
            try:
                call()
            except Exception:  # of a program's callback: the thread serves others too
                log.exception("a callback of an operation failed")
            del call  # what it holds is not kept until the next one
            with self._lock:
                self._idle += 1


_pool: _Pool | None = None


def run_aside(call: Callable[[], object]) -> None:
    """Run a call on a thread of its own.

    Args:
        call: What to run; what it raises is logged.
    Raises:
        RuntimeError: The interpreter is ending, and no thread can be started.
    """
    global _pool
    if _pool is None or _pool.pid != forks.pid:
        _pool = _Pool()
    _pool.run(call)
