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
from typing import TYPE_CHECKING

import numpy as np

from quicoll.buffers import memory as flat_memory
from quicoll.plan import Buf, Copy, Lane, Plan, Recv, Reduce, Send, Span
from quicoll.reduce import ReduceOp, reduce_tree
from quicoll_transport.errors import MessageRefused, TransportError

if TYPE_CHECKING:
    from quicoll.bundle import Joined
    from quicoll.dtypes import Array, DType
    from quicoll_transport.endpoint import Link, Transfer

__all__ = ["TransferFailed", "Work", "execute"]


class TransferFailed(Exception):
    """A message to or from `rank` failed; `error` says how. Never leaves the engine: the mesh turns it into ours."""

    def __init__(self, rank: int, error: TransportError) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.error = error


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

    Raises TransferFailed. When it raises or is cancelled, nothing is written to the output any more.
    """
    plan = work.plan
    lanes = iter(plan.lanes)
    runners = plan.open_lanes
    if runners <= 1:
        await _run_lanes(work, lanes, link, tag)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(runners):
                group.create_task(_run_lanes(work, lanes, link, tag))
    except BaseExceptionGroup as failures:
        # One cause is enough, and which one must not depend on timing more than it has to: the lowest rank's. A refusal
        # is what follows from another rank's failure (quicoll.mesh), so anything else comes before it.
        known = [failure for failure in failures.exceptions if isinstance(failure, TransferFailed)]
        if not known:
            raise failures.exceptions[0] from None
        raise min(known, key=lambda failed: (isinstance(failed.error, MessageRefused), failed.rank)) from None


async def _run_lanes(
    work: Work, lanes: Iterator[Lane], link: Callable[[int], Link], tag: Callable[[int], bytes]
) -> None:
    for lane in lanes:
        await _run_lane(work, lane, link, tag)


async def _run_lane(work: Work, lane: Lane, link: Callable[[int], Link], tag: Callable[[int], bytes]) -> None:
    scratch = [np.empty(slot.elements, (work.acc if slot.wide else work.dtype).storage) for slot in lane.scratch]

    def array(span: Span) -> Array:
        if span.buf is Buf.INPUT:
            return work.inputs[span.slot][span.start : span.stop]
        if span.buf is Buf.OUTPUT:
            return work.output[span.start : span.stop]
        return scratch[span.slot][span.start : span.stop]

    def memory(span: Span) -> memoryview:
        return flat_memory(array(span))

    posted: dict[int, tuple[int, Transfer]] = {}
    sent: list[tuple[int, Transfer]] = []
    try:
        for position, step in enumerate(lane.steps):
            if isinstance(step, Recv):
                posted[position] = step.peer, link(step.peer).post(tag(step.index), memory(step.dst))
        for step, waits in zip(lane.steps, lane.waits, strict=True):
            for position in waits:
                await _arrival(*posted[position])
            if isinstance(step, Send):
                sent.append((step.peer, link(step.peer).send(tag(step.index), memory(step.src))))
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
        for rank, transfer in [*posted.values(), *sent]:
            await _arrival(rank, transfer)
    finally:
        for _, transfer in [*posted.values(), *sent]:
            transfer.abort()


async def _arrival(rank: int, transfer: Transfer) -> None:
    try:
        await transfer.future
    except TransportError as error:
        raise TransferFailed(rank, error) from error
