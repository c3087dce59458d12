"""Proof that a set of plans, one for each rank, fits together: for tests and for pictures.

`validate` holds the plans to what `model` promises an executor. It does not check what a plan computes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quicoll.errors import LocalError
from quicoll.plan.model import Buf, CopyStep, Lane, Plan, PlanStep, RecvStep, ReduceStep, SendStep, Span, reads, writes

__all__ = ["validate"]


def validate(plans: Sequence[Plan]) -> None:
    """Check that the plans of all ranks fit together.

    Checked: equal signatures, lane counts and widths; spans within their buffers; INPUT never written, OUTPUT written
    exactly once, scratch at most once, nothing read before it is written in its own lane; steps of equal lengths and
    right types; both ends of a message in lanes of one number, with equal elements and type; and that every lane comes
    to its end when only one is open at a time.

    Args:
        plans: Those of all ranks, in rank order.
    Raises:
        LocalError: They do not fit; names rank, lane and step of the first fault.
    """
    _check_together(plans)
    for plan in plans:
        _check_memory(plan)
    _check_messages(plans)
    for number in range(len(plans[0].lanes)):
        _check_progress(number, [plan.lanes[number] for plan in plans])


class _Written:
    """Disjoint intervals of one slot, merged where they touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Take [start, stop); return whether it was free. An empty interval is always free."""
        if start == stop:
            return True
        at = bisect_right(self._starts, start)
        if (at and self._stops[at - 1] > start) or (at < len(self._starts) and self._starts[at] < stop):
            return False
        joins_left = at > 0 and self._stops[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == stop
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops[at]
            del self._starts[at], self._stops[at]
        elif joins_left:
            self._stops[at - 1] = stop
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)
        return True

    def covers(self, start: int, stop: int) -> bool:
        if start == stop:
            return True
        at = bisect_right(self._starts, start)
        return at > 0 and self._stops[at - 1] >= stop


def _check_together(plans: Sequence[Plan]) -> None:
    if not plans:
        raise LocalError("there is no plan")
    first = plans[0]
    for rank, plan in enumerate(plans):
        if plan.rank != rank or plan.world != len(plans):
            raise LocalError(f"plan {rank} of {len(plans)} is for rank {plan.rank} of {plan.world}")
        if plan.signature != first.signature:
            raise LocalError(f"rank {rank} plans {plan.signature!r}, rank 0 {first.signature!r}")
        if len(plan.lanes) != len(first.lanes) or plan.width != first.width:
            raise LocalError(
                f"rank {rank} has {len(plan.lanes)} lanes, {plan.width} at a time; "
                f"rank 0 has {len(first.lanes)}, {first.width} at a time"
            )
        if plan.width < 1:
            raise LocalError(f"rank {rank} plans {plan.width} lanes at a time")


def _check_memory(plan: Plan) -> None:
    output = _Written()
    for number, lane in enumerate(plan.lanes):
        written: dict[tuple[Buf, int], _Written] = {}
        for position, step in enumerate(lane.steps):
            where = f"rank {plan.rank}, lane {number}, step {position}"
            _check_types(step, where)
            for span in reads(step):
                _check_bounds(plan, lane, span, where)
                done = written.get((span.buf, span.slot), _Written())
                if span.buf is not Buf.INPUT and not done.covers(span.start, span.stop):
                    raise LocalError(f"{where}: {span} is read before this lane has written it")
            target = writes(step)
            if target is None:
                continue
            _check_bounds(plan, lane, target, where)
            if target.buf is Buf.INPUT:
                raise LocalError(f"{where}: {target} is the caller's and must not be written")
            here = written.setdefault((target.buf, target.slot), _Written())
            fresh = here.add(target.start, target.stop)
            if target.buf is Buf.OUTPUT:
                fresh = output.add(target.start, target.stop)
            if not fresh:
                raise LocalError(f"{where}: {target} is written a second time")
    if not output.covers(0, plan.output):
        raise LocalError(f"rank {plan.rank}: not every element of its output is written")


def _check_types(step: PlanStep, where: str) -> None:
    target = writes(step)
    if target is None or isinstance(step, RecvStep):
        return
    for span in reads(step):
        if span.elements != target.elements:
            raise LocalError(f"{where}: {span} and {target} differ in length")
    if isinstance(step, CopyStep) and step.src.wide != step.dst.wide:
        raise LocalError(f"{where}: a copy from {step.src} to {step.dst} would need a conversion")
    if isinstance(step, ReduceStep) and step.dst.wide is step.finish:
        raise LocalError(
            f"{where}: a reduction is either finished or wide, {step.dst} is {'both' if step.finish else 'neither'}"
        )


def _check_bounds(plan: Plan, lane: Lane, span: Span, where: str) -> None:
    if span.buf is Buf.SCRATCH:
        slots = [slot.elements for slot in lane.scratch]
        wide = span.slot < len(slots) and lane.scratch[span.slot].wide
    else:
        slots = list(plan.inputs) if span.buf is Buf.INPUT else [plan.output]
        wide = False
    if not 0 <= span.slot < len(slots) or not 0 <= span.start <= span.stop <= slots[span.slot]:
        raise LocalError(f"{where}: {span} is out of bounds")
    if span.wide is not wide:
        raise LocalError(f"{where}: {span} is not of its buffer's type")


def _check_messages(plans: Sequence[Plan]) -> None:
    """Each message is sent once and received once, and both ends say the same of it."""
    sent: dict[tuple[int, int, int], tuple[int, int, bool]] = {}
    received: dict[tuple[int, int, int], tuple[int, int, bool]] = {}
    for plan in plans:
        for number, lane in enumerate(plan.lanes):
            for step in lane.steps:
                if not isinstance(step, SendStep | RecvStep):
                    continue
                if not 0 <= step.peer < plan.world or step.peer == plan.rank:
                    raise LocalError(f"rank {plan.rank}, lane {number}: exchanges with rank {step.peer}")
                out = isinstance(step, SendStep)
                span = step.src if isinstance(step, SendStep) else step.dst
                key = (plan.rank, step.peer, step.index) if out else (step.peer, plan.rank, step.index)
                table = sent if out else received
                if key in table:
                    raise LocalError(
                        f"rank {plan.rank}, lane {number}: message {key[2]} from {key[0]} to {key[1]} stands twice"
                    )
                table[key] = (number, span.elements, span.wide)
    for key in sorted({**sent, **received}):
        if sent.get(key) != received.get(key):
            raise LocalError(
                f"message {key[2]} from rank {key[0]} to rank {key[1]}: "
                f"sent as (lane, elements, wide) = {sent.get(key)}, awaited as {received.get(key)}"
            )


def _check_progress(number: int, lanes: Sequence[Lane]) -> None:
    """Run one lane of all ranks, steps only, until nothing moves: each must have come to its end."""
    at = [0] * len(lanes)
    under_way: dict[tuple[int, int, int], None] = {}
    moved = True
    while moved:
        moved = False
        for rank, lane in enumerate(lanes):
            while at[rank] < len(lane.steps):
                awaited = [lane.steps[position] for position in lane.waits[at[rank]]]
                if any(
                    isinstance(recv, RecvStep) and (recv.peer, rank, recv.index) not in under_way for recv in awaited
                ):
                    break
                step = lane.steps[at[rank]]
                if isinstance(step, SendStep):
                    under_way[rank, step.peer, step.index] = None
                at[rank] += 1
                moved = True
    for rank, lane in enumerate(lanes):
        if at[rank] < len(lane.steps):
            raise LocalError(f"rank {rank}, lane {number}, step {at[rank]} waits for ever")
