"""Runs one rank's plan over its links: posts, sends, reduces, in the order and with the waits that the plan states.

Memory: the inputs are read in place and sent from where they lie (but for a chunk that spans several tensors of a
list); results arrive straight in the output; each open lane takes its scratch, nothing else. Lanes are started in order
and the same number is open on every rank, so the first lane unfinished anywhere is open everywhere (quicoll.plan.model
says why that suffices).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.numerics.buffers import memory
from quicoll.numerics.reduce import reduce_tree
from quicoll.plan import Buf, CopyStep, Lane, RecvStep, ReduceStep, SendStep, Span
from quicoll_transport.errors import MessageCorrupted, MessageRefused, TransportError

if TYPE_CHECKING:
    from quicoll.engine.calls import Work
    from quicoll.numerics.dtypes import Array
    from quicoll_transport.endpoint import Link, Transfer

__all__ = ["TransferFailed", "execute", "over"]


class TransferFailed(Exception):
    """A message to or from `rank` failed; `error` says how. Never leaves the engine: the communicator turns it into
    ours.

    sending: whether it was one of ours. consequence: whether the cause is at the peer, who knows of it
    (quicoll.engine.communicator).
    """

    def __init__(self, rank: int, error: TransportError, *, sending: bool) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.error = error
        self.sending = sending

    @property
    def consequence(self) -> bool:
        return isinstance(self.error, MessageRefused) or (self.sending and isinstance(self.error, MessageCorrupted))


async def execute(work: Work, *, links: Mapping[int, Link], ranks: Sequence[int], prefix: bytes) -> None:
    """Run the plan to its end.

    When it raises or is cancelled, its transfers are taken back and nothing is written to the output any more.

    Args:
        work: The plan and its memory.
        links: The ways to the peers, by rank of the view.
        ranks: The ranks of the view that take part, in the order in which the plan numbers them.
        prefix: What the tags of this operation's messages start with; four bytes of the message's index follow.
    Raises:
        TransferFailed: The first message that failed, even while a lane waits for another: its cause has to be
            reported before anybody's deadline.
    """
    await _Execution(work, links, ranks, prefix).run()


async def over(future: asyncio.Future[Any]) -> None:
    """Wait until a task is done, however it ends; what it gave or raised stays in it."""
    done = future.get_loop().create_future()
    wake = partial(_set, done)
    future.add_done_callback(wake)
    try:
        await done
    finally:
        future.remove_done_callback(wake)


def _set(future: asyncio.Future[None], _: object = None) -> None:
    if not future.done():
        future.set_result(None)


class _Execution:
    """One plan under way. Lanes are tasks, so that each waits for its own transfers."""

    def __init__(self, work: Work, links: Mapping[int, Link], ranks: Sequence[int], prefix: bytes) -> None:
        self._work = work
        self._links = links
        self._ranks = ranks
        self._prefix = prefix
        self._lanes = iter(work.plan.lanes)
        self._failures: list[TransferFailed] = []
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._changed: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        count = max(self._work.plan.open_lanes, 1)
        runners = [self._loop.create_task(self._run_lanes()) for _ in range(count)]
        for future in (*runners, self._failed):
            future.add_done_callback(self._wake)
        running = runners
        try:
            while running:
                await self._changed
                self._changed = self._loop.create_future()
                if self._failures:
                    # Which one of several must not depend on timing more than it has to: the lowest rank's. What only
                    # follows from another rank's failure comes last.
                    first = min(self._failures, key=lambda failure: (failure.consequence, failure.rank))
                    raise first from first.error
                for runner in running:
                    if runner.done():
                        runner.result()
                running = [runner for runner in running if not runner.done()]
        finally:
            # Of all: a future of ours that calls us would keep the operation's memory until a garbage collection.
            for future in (*runners, self._failed):
                future.remove_done_callback(self._wake)
            for runner in runners:
                runner.cancel()
            await asyncio.wait(runners)

    def _wake(self, _: object) -> None:
        _set(self._changed)

    def _over(self, rank: int, sending: bool, future: asyncio.Future[None]) -> None:
        """A transfer is done: if it failed, everything ends."""
        error = None if future.cancelled() else future.exception()
        if isinstance(error, TransportError):
            self._failures.append(TransferFailed(rank, error, sending=sending))
            _set(self._failed)

    def _post(self, step: RecvStep, memory: memoryview) -> Transfer:
        link = self._links[self._ranks[step.peer]]
        transfer = link.post(self._prefix + step.index.to_bytes(4, "big"), memory)
        transfer.future.add_done_callback(partial(self._over, step.peer, False))
        return transfer

    def _send(self, step: SendStep, memory: memoryview) -> Transfer:
        link = self._links[self._ranks[step.peer]]
        transfer = link.send(self._prefix + step.index.to_bytes(4, "big"), memory)
        transfer.future.add_done_callback(partial(self._over, step.peer, True))
        return transfer

    async def _run_lanes(self) -> None:
        for lane in self._lanes:
            await self._run_lane(lane)

    async def _run_lane(self, lane: Lane) -> None:
        work = self._work
        scratch = [np.empty(slot.elements, (work.acc if slot.wide else work.dtype).storage) for slot in lane.scratch]

        def array(span: Span) -> Array:
            if span.buf is Buf.INPUT:
                return work.inputs[span.slot][span.start : span.stop]
            if span.buf is Buf.OUTPUT:
                return work.output[span.start : span.stop]
            return scratch[span.slot][span.start : span.stop]

        posted: dict[int, Transfer] = {}
        sent: list[Transfer] = []
        try:
            for position, step in enumerate(lane.steps):
                if isinstance(step, RecvStep):
                    posted[position] = self._post(step, memory(array(step.dst)))
            for step, waits in zip(lane.steps, lane.waits, strict=True):
                for position in waits:
                    await posted[position].future
                if isinstance(step, SendStep):
                    sent.append(self._send(step, memory(array(step.src))))
                elif isinstance(step, CopyStep):
                    np.copyto(array(step.dst), array(step.src))
                elif isinstance(step, ReduceStep):
                    reduce_tree(
                        step.tree,
                        array,
                        op=work.op,
                        dtype=work.dtype,
                        acc=work.acc,
                        out=array(step.dst),
                        final=step.finish,
                        leaves=work.plan.leaves,
                    )
            for transfer in [*posted.values(), *sent]:
                await transfer.future
        finally:
            for transfer in [*posted.values(), *sent]:
                transfer.abort()
