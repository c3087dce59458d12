"""The caller's side of an engine: the view its caller is in, and what its collectives have given in the open step.

A job and its groups share one. It runs on the caller's loop and crosses to the engine's by the runtime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from quicoll.checks import seconds
from quicoll.collectives.handle import Handle
from quicoll.collectives.subgroups import is_derived
from quicoll.errors import LocalError, PeerError, QuicollError
from quicoll.membership.messages import MAX_GROUPS

if TYPE_CHECKING:
    from quicoll.audit.recorder import Auditor, Deed, PendingEntry
    from quicoll.config import Config
    from quicoll.engine.calls import Call
    from quicoll.engine.engine import Engine
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View

__all__ = ["Caller"]

T = TypeVar("T")


class Caller:
    """view: changes only where the job says so. step: the number of the open step, None outside of one. auditor: who
    notes what is called, if anybody does."""

    def __init__(self, config: Config, engine: Engine, runtime: Runtime, view: View) -> None:
        self.config = config
        self.engine = engine
        self.runtime = runtime
        self.view = view
        self.step: int | None = None
        self._ids: dict[int, str] = {}  # of the present view's groups and channels, and what they are the ids of
        self._splits: dict[int, int] = {}  # by group: how often it has been split in the present view
        self.auditor: Auditor | None = None
        self._results: dict[tuple[int, int], bytes] = {}
        self._voted_groups: dict[int, None] = {}  # an ordered set: sub-groups that the open step's vote tells of
        # Of the open step, by order of issue. One leaves when its result is handed over: nothing else keeps results.
        self._issued: dict[int, Handle[Any]] = {}
        self._count = 0

    @property
    def rank(self) -> int:
        rank = self.view.rank_of(self.config.node)
        if rank is None:
            raise AssertionError(f"{self.config.node} is not in its own view")
        return rank

    @property
    def world_size(self) -> int:
        return self.view.world_size

    def enter(self, view: View) -> None:
        """Go on in `view`: groups and ids of another one mean nothing in it."""
        if view.view_id == self.view.view_id:
            return
        self.view = view
        self._ids.clear()
        self._splits.clear()

    def claim(self, derived: int, name: str) -> None:
        """Take an id for what `name` says. Raises LocalError when it is another one's
        (quicoll.collectives.subgroups)."""
        if self._ids.setdefault(derived, name) != name:
            raise LocalError(f"{name!r} and {self._ids[derived]!r} have the same id; split with another color")

    def next_split(self, group: int) -> int:
        """The number of a split that is about to be issued, counted in its group and the present view."""
        return self._splits.get(group, 0)

    def split_issued(self, group: int) -> None:
        """A split is under way. One that was refused has no number: the other ranks have not heard of it."""
        self._splits[group] = self.next_split(group) + 1

    async def on_engine(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the engine's loop."""
        return await self.runtime.call(work)

    def issue(
        self,
        call: Call,
        *,
        view_id: int,
        group: int,
        timeout: float | None,
        deliver: Callable[[], T],
        digest: Callable[[], bytes] | None,
        deed: Deed | None,
    ) -> Handle[T]:
        """Start a collective in view `view_id`. timeout: None takes the job's.

        deliver: hands the result over, when it is awaited. digest: of a result that has to be equal on all ranks. deed:
        for the audit, if there is one. Raises LocalError outside of an event loop, for a bad timeout, and where a step
        would use more sub-groups than a vote can tell of; AuditError when the audit failed.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise LocalError("no event loop is running here; use quicoll.blocking in synchronous code") from None
        within = self.config.timeout if timeout is None else seconds(timeout)
        if digest is not None and self.step is not None and is_derived(group):
            if group not in self._voted_groups and len(self._voted_groups) == MAX_GROUPS:
                raise LocalError(f"a step may use at most {MAX_GROUPS} sub-groups of a rank")
            self._voted_groups[group] = None
        entry, ended = None, None
        if deed is not None and self.auditor is not None:
            self.auditor.check()
            entry, ended = self.auditor.issued(
                deed, view=self.view.view_id, step=self.step, rank=self.rank, world=self.world_size
            )
        work = self.engine.collective(view_id, call, group=group, timeout=within, step=self.step)
        future = asyncio.ensure_future(self.runtime.call(work))
        number, step = self._count, self.step
        self._count += 1

        def hand_over() -> T:
            self._issued.pop(number, None)
            return deliver()

        def record(seq: int) -> None:
            if digest is not None and step == self.step:
                self.record(group, seq, digest())
            if ended is not None:
                ended(seq)

        view, rank = self.view.view_id, self.rank

        def cancelled() -> QuicollError:
            why = "cancelled by another await of its handle"
            return PeerError(why, rank=rank, node=self.config.node, view=view, step=step, op=call.name)

        handle = Handle(future, hand_over, record, cancelled)
        if entry is not None:
            future.add_done_callback(lambda _: self._audit_over(handle, entry))
        if step is not None:
            self._issued[number] = handle
        return handle

    def _audit_over(self, handle: Handle[Any], entry: PendingEntry) -> None:
        """An operation is over, whether or not anybody awaits it."""
        handle.settle()
        if self.auditor is not None:
            self.auditor.over(entry)

    def record(self, group: int, seq: int, result: bytes) -> None:
        """Note the digest of a result that has to be equal on all ranks, for the vote of the open step."""
        if self.step is not None:
            self._results[group, seq] = result

    def open(self, step: int) -> None:
        """A step begins: what was recorded before is not part of it."""
        self.step = step
        self._results.clear()
        self._voted_groups.clear()
        self._issued.clear()

    def close(self) -> None:
        self.step = None
        self._issued.clear()

    def settle(self) -> int:
        """Note the results that nobody has awaited; the number of the step's operations that have not ended."""
        return sum(not handle.settle() for handle in self._issued.values())

    def digests(self, step: int) -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
        """For the vote: 16 bytes over the step's number and all recorded results that all ranks have, in the order of
        (group, number); and as much for each sub-group whose results only its members have, by id."""
        whole = blake2b(step.to_bytes(8, "big"), digest_size=16)
        parts: dict[int, blake2b] = {}
        for group, seq in sorted(self._results):
            state = whole
            if is_derived(group):
                state = parts.setdefault(group, blake2b(step.to_bytes(8, "big"), digest_size=16))
            state.update(group.to_bytes(8, "big") + seq.to_bytes(8, "big") + self._results[group, seq])
        return whole.digest(), tuple((group, state.digest()) for group, state in parts.items())
