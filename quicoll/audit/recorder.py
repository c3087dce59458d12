"""What a job's collectives were given and gave, noted in the order of the calls; `quicoll.audit.log` writes and
compares.

Operations end in any order, and two equal runs must give equal files. So everything goes through one queue in the order
in which it was issued, and what stands at its head is written once it has ended. An operation that failed leaves the
queue without a trace. One that was issued outside of any step may end in the next step: the lines of that step wait for
it, not longer than its deadline. What an attempt at a step had not finished is forgotten when the next attempt begins.

Inputs are digested when the operation is issued, for that is what it was given; the result when it ends, before the
caller has it. A file that cannot be written is an AuditError, kept here until it can be raised where the caller
expects it: by the next operation, or where the step is left, so that no step is committed without its lines.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from quicoll.audit.log import AuditLog, OperationRecord
from quicoll.errors import AuditError
from quicoll.numerics.buffers import memory

if TYPE_CHECKING:
    from quicoll.numerics.bundle import Joined
    from quicoll.numerics.dtypes import Array

__all__ = ["Auditor", "IssuedCall", "PendingEntry"]

log = logging.getLogger("quicoll.audit")

_PIECE = 1 << 18  # elements that are read at a time of a list of tensors, where a copy may have to be made


@dataclass(frozen=True, slots=True, eq=False)
class IssuedCall:
    """A collective as the audit needs it when it is issued.

    group: its name. op, terms, members: what was called, on what terms and by how many ranks, as in
    `quicoll.audit.log.OperationRecord`. inputs: number and elements of each leaf of this rank. result: gives the
    elements of the result once there is one; None: this rank gets none. agreed: whether the result has to be equal on
    all ranks.
    """

    group: str
    op: str
    inputs: Sequence[tuple[int, Array | Joined]]
    result: Callable[[], Array | Joined] | None
    agreed: bool
    terms: str = ""
    members: int = 0


@dataclass(slots=True, eq=False)
class PendingEntry:
    """A place in the queue. write: what to do when its turn comes; None until it has ended. gone: there is nothing to
    write. line, result: of a collective: makes its record of its number and digest, and gives the elements."""

    step: int | None
    write: Callable[[], None] | None = None
    gone: bool = False
    line: Callable[..., OperationRecord] | None = None
    result: Callable[[], Array | Joined] | None = None


class Auditor:
    """The queue of one rank, and the file that it is written to. Threads may share one."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._lock = threading.Lock()  # of the queue, and of the file's order
        self._queue: deque[PendingEntry] = deque()
        self._error: AuditError | None = None

    def begin(self, *, step: int, view: int, rank: int, world: int) -> None:
        """A step begins, or begins again. Raises AuditError if something could not be written."""
        with self._lock:
            for entry in self._queue:
                entry.gone = entry.gone or (entry.step is not None and entry.write is None)
            line = partial(self._log.begin, step=step, view=view, rank=rank, world=world)
            self._queue.append(PendingEntry(step, line))
            self._write()
        self.check()

    def issued(self, call: IssuedCall, *, view: int, step: int | None, rank: int, world: int) -> PendingEntry:
        """Return the place of a collective that is issued now."""
        line = partial(
            OperationRecord,
            view=view,
            step=step,
            rank=rank,
            world=world,
            group=call.group,
            op=call.op,
            inputs=tuple((leaf, _digest(elements)) for leaf, elements in call.inputs),
            agreed=call.agreed,
            terms=call.terms,
            members=call.members,
        )
        entry = PendingEntry(step, line=line, result=call.result)
        with self._lock:
            self._queue.append(entry)
        return entry

    def succeeded(self, entry: PendingEntry, seq: int) -> None:
        """A collective has succeeded. seq: its number in its group."""
        if entry.line is None:
            raise AssertionError("no collective has this place")
        result = "" if entry.result is None else _digest(entry.result())
        with self._lock:
            entry.write = partial(self._log.record, entry.line(seq=seq, result=result))
            self._write()

    def over(self, entry: PendingEntry) -> None:
        """A collective is over; unless it has succeeded before, it failed."""
        with self._lock:
            if entry.write is None:
                entry.gone = True
                self._write()

    def check(self) -> None:
        """Raise AuditError if something could not be written."""
        if self._error is not None:
            raise self._error

    def resumed(self, step: int, source: str) -> None:
        """The state is now the one after `step`, read from `source`. Raises AuditError where it cannot be noted."""
        with self._lock:
            self._log.resumed(step, source)

    def close(self) -> None:
        """Close the file. What is written later is an AuditError of the next `check`.

        The job is over and has nobody left to raise to: that the end could not be signed is logged, and whoever
        verifies the audit is told.
        """
        try:
            self._log.close()
        except AuditError as error:
            log.error("%s: its end is not signed", error)

    def _write(self) -> None:
        """Write what stands at the queue's head and has ended."""
        while self._queue and (self._queue[0].gone or self._queue[0].write is not None):
            entry = self._queue.popleft()
            if entry.gone or entry.write is None or self._error is not None:
                continue
            try:
                entry.write()
            except AuditError as error:
                self._error = error


def _digest(elements: Array | Joined) -> str:
    state = xxhash.xxh3_128()
    for start in range(0, elements.size, _PIECE):
        state.update(memory(elements[start : start + _PIECE]))
    return state.hexdigest()
