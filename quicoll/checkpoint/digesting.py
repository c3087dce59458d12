"""Digests of memory, made in threads beside a disk's work, so that neither waits for the other.

A piece of a checkpoint is digested as one; what goes on at the same time are several pieces, and the disk. hashlib lets
other threads run meanwhile. Which digests come out does not depend on the threads, and only the caller touches a disk:
so the order of a disk's operations is the caller's alone.

    idle --begin, of much memory--> threads run --the block is left, in whatever way--> no thread runs

Invariant: when the block is left, no thread reads any of the memory that was given to it, and what was not begun by
then never is. So the memory may be changed or used again.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from quicoll.checkpoint.manifest import digest_of

__all__ = ["THREADS", "Digesting"]

THREADS = 4
"""At most so many run for one file, and no more than there are processors: training goes on beside them."""
_SMALL = 256 << 10
"""Up to so many bytes are digested at once: a thread would take longer to come by."""


class Digesting:
    """See the module's head: a block in which digests are made.

    with Digesting() as digesting:
        waiting = [digesting.begin(data) for data in pieces]
        ...
        digests = [each.result() for each in waiting]
    """

    def __init__(self) -> None:
        """Begin without threads."""
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Digesting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def begin(self, data: bytes | memoryview) -> Future[str]:
        """Begin the digest of memory that does not change meanwhile.

        Args:
            data: The memory.
        Returns:
            What will have `digest_of(data)`.
        """
        if len(data) <= _SMALL:
            done: Future[str] = Future()
            done.set_result(digest_of(data))
            return done
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(THREADS, _processors()), thread_name_prefix="quicoll-digest")
        return self._threads.submit(digest_of, data)


def _processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
