"""Runs one rank's plan over its links: posts, sends, reduces, in the order and with the waits that the plan states.

Memory: the inputs are read in place and sent from where they lie (but for a chunk that spans several tensors of a
list); results arrive straight in the output; each open lane takes its scratch, nothing else. Lanes are started in order
and the same number is open on every rank, so the first lane unfinished anywhere is open everywhere (quicoll.plan.model
says why that suffices).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quicoll.numerics.buffers import memory as flat_memory
from quicoll.numerics.reduce import ReduceOp, reduce_tree
from quicoll.plan import Buf, Copy, Lane, Plan, Recv, Reduce, Send, Span
from quicoll_transport.errors import MessageCorrupted, MessageRefused, TransportError

if TYPE_CHECKING:
    from quicoll.numerics.bundle import Joined
    from quicoll.numerics.dtypes import Array, DType
    from quicoll_transport.endpoint import Link, Transfer

__all__ = ["TransferFailed", "Work", "execute"]


class _Watch(Protocol):
    """Have an eye on a transfer, so that its failure ends the whole."""

    def __call__(self, rank: int, transfer: Transfer, *, sending: bool) -> Transfer: ...


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


@dataclass(frozen=True, slots=True)
class Work:
    """A plan with its memory. inputs and output: flat arrays in the storage type of `dtype`; inputs may be joined."""

    plan: Plan
    dtype: DType
    acc: DType
    op: ReduceOp
    inputs: Sequence[Array | Joined]
    output: Array


async def execute(work: Work, *, link: Callable[[int], Link], tag: Callable[[int], bytes]) -> None:
    """Run the plan to its end. `link(rank)` is the way to a peer, `tag(index)` names a message of this operation.

    Raises TransferFailed with the first message that fails, whichever a lane is waiting for just then: its cause has to
    be told before anybody's deadline. When it raises or is cancelled, nothing is written to the output any more.
    """
    failures: list[TransferFailed] = []
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def watched(rank: int, transfer: Transfer, *, sending: bool) -> Transfer:
        def done(future: asyncio.Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if isinstance(error, TransportError):
                failures.append(TransferFailed(rank, error, sending=sending))
                if not failed.done():
                    failed.set_result(None)

        transfer.future.add_done_callback(done)
        return transfer

    lanes = iter(work.plan.lanes)
    count = max(work.plan.open_lanes, 1)
    runners = [asyncio.ensure_future(_run_lanes(work, lanes, link, tag, watched)) for _ in range(count)]
    running = runners
    try:
        while running:
            await asyncio.wait([*running, failed], return_when=asyncio.FIRST_COMPLETED)
            if failures:
                # Which one of several must not depend on timing more than it has to: the lowest rank's. What only
                # follows from another rank's failure comes last.
                first = min(failures, key=lambda failure: (failure.consequence, failure.rank))
                raise first from first.error
            for runner in running:
                if runner.done():
                    runner.result()
            running = [runner for runner in running if not runner.done()]
    finally:
        for runner in runners:
            runner.cancel()
        await asyncio.wait(runners)


async def _run_lanes(
    work: Work,
    lanes: Iterator[Lane],
    link: Callable[[int], Link],
    tag: Callable[[int], bytes],
    watched: _Watch,
) -> None:
    for lane in lanes:
        await _run_lane(work, lane, link, tag, watched)


async def _run_lane(
    work: Work, lane: Lane, link: Callable[[int], Link], tag: Callable[[int], bytes], watched: _Watch
) -> None:
    scratch = [np.empty(slot.elements, (work.acc if slot.wide else work.dtype).storage) for slot in lane.scratch]

    def array(span: Span) -> Array:
        if span.buf is Buf.INPUT:
            return work.inputs[span.slot][span.start : span.stop]
        if span.buf is Buf.OUTPUT:
            return work.output[span.start : span.stop]
        return scratch[span.slot][span.start : span.stop]

    def memory(span: Span) -> memoryview:
        return flat_memory(array(span))

    posted: dict[int, Transfer] = {}
    sent: list[Transfer] = []
    try:
        for position, step in enumerate(lane.steps):
            if isinstance(step, Recv):
                transfer = link(step.peer).post(tag(step.index), memory(step.dst))
                posted[position] = watched(step.peer, transfer, sending=False)
        for step, waits in zip(lane.steps, lane.waits, strict=True):
            for position in waits:
                await posted[position].future
            if isinstance(step, Send):
                transfer = link(step.peer).send(tag(step.index), memory(step.src))
                sent.append(watched(step.peer, transfer, sending=True))
            elif isinstance(step, Copy):
                np.copyto(array(step.dst), array(step.src))
            elif isinstance(step, Reduce):
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
