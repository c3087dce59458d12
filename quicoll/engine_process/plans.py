"""Plans, and the networks that ranks agree on, as the two processes tell them: rows of numbers, by msgpack. Both have
the same code, so nothing is checked.

A training loop runs the same few plans again and again, so each is told once and named by a number from then on
(`ValuesTold`, `ValuesHeard`); the two forget the same ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from quicoll.plan import Buf, CopyStep, Lane, Pair, Plan, PlanStep, RecvStep, ReduceStep, Scratch, SendStep, Span, Tree
from quicoll.plan.network import NetworkModel

__all__ = ["ValuesHeard", "ValuesTold", "network_of", "network_row", "plan_of", "plan_row"]

T = TypeVar("T")

_MOST: Final = 64
_BUFFERS: Final = (Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH)
_NUMBERS: Final = {buffer: number for number, buffer in enumerate(_BUFFERS)}

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


class ValuesTold(Generic[T]):
    """Which values the other process knows, for who tells them."""

    def __init__(self, row: Callable[[T], tuple[Any, ...]]) -> None:
        """Begin with none. row: gives a value as it is told."""
        self._row = row
        self._known: OrderedDict[int, tuple[int, T]] = OrderedDict()  # by id, the number; the value keeps its id
        self._count = 0

    def word(self, value: T) -> tuple[int, bytes]:
        """Return the number of a value, and its bytes where it is told now."""
        known = self._known.get(id(value))
        if known is not None:
            self._known.move_to_end(id(value))
            return known[0], b""
        self._count += 1
        self._known[id(value)] = self._count, value
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return self._count, _encoder.encode(self._row(value))


class ValuesHeard(Generic[T]):
    """The same for who hears them."""

    def __init__(self, made: Callable[[Any], T]) -> None:
        """Begin with none. made: gives the value of a row."""
        self._made = made
        self._known: OrderedDict[int, T] = OrderedDict()

    def value(self, number: int, told: bytes) -> T:
        """Return a value.

        Args:
            number: As `ValuesTold.word` has given it.
            told: Likewise.
        """
        if not told:
            self._known.move_to_end(number)
            return self._known[number]
        value = self._known[number] = self._made(_decoder.decode(told))
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return value


def network_row(network: NetworkModel) -> tuple[Any, ...]:
    """Return a network as it is told."""
    return network.latency, network.rate, network.sites, network.message, network.combine


def network_of(row: Any) -> NetworkModel:
    """Return the network that a row tells."""
    latency, rate = (tuple(tuple(line) for line in table) for table in row[:2])
    return NetworkModel(latency, rate, tuple(row[2]), row[3], row[4])


def plan_row(plan: Plan) -> tuple[Any, ...]:
    """Return a plan as it is told."""
    return (
        plan.collective,
        plan.algorithm,
        plan.rank,
        plan.world,
        [
            (list(map(_step_row, lane.steps)), [(each.elements, each.wide) for each in lane.scratch])
            for lane in plan.lanes
        ],
        plan.inputs,
        plan.output,
        plan.leaves,
        plan.itemsize,
        plan.wide_itemsize,
        plan.width,
        plan.parameters,
        plan.lanes_per_width,
    )


def plan_of(row: Any) -> Plan:
    """Return the plan that a row tells."""
    lanes = tuple(
        Lane(tuple(map(_step_of, steps)), tuple(Scratch(elements, wide) for elements, wide in scratch))
        for steps, scratch in row[4]
    )
    parameters = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in row[11])
    return Plan(
        collective=row[0],
        algorithm=row[1],
        rank=row[2],
        world=row[3],
        lanes=lanes,
        inputs=tuple(row[5]),
        output=row[6],
        leaves=row[7],
        itemsize=row[8],
        wide_itemsize=row[9],
        width=row[10],
        parameters=parameters,
        lanes_per_width=row[12],
    )


def _step_row(step: PlanStep) -> tuple[Any, ...]:
    if isinstance(step, SendStep):
        return 0, step.peer, step.index, _span_row(step.src)
    if isinstance(step, RecvStep):
        return 1, step.peer, step.index, _span_row(step.dst)
    if isinstance(step, ReduceStep):
        return 2, _span_row(step.dst), _tree_row(step.tree), step.finish
    return 3, _span_row(step.dst), _span_row(step.src)


def _step_of(row: Any) -> PlanStep:
    match row[0]:
        case 0:
            return SendStep(row[1], row[2], _span_of(row[3]))
        case 1:
            return RecvStep(row[1], row[2], _span_of(row[3]))
        case 2:
            return ReduceStep(_span_of(row[1]), _tree_of(row[2]), row[3])
        case _:
            return CopyStep(_span_of(row[1]), _span_of(row[2]))


def _span_row(span: Span) -> tuple[int, int, int, int, bool]:
    return _NUMBERS[span.buf], span.slot, span.start, span.stop, span.wide


def _span_of(row: Any) -> Span:
    return Span(_BUFFERS[row[0]], row[1], row[2], row[3], row[4])


def _tree_row(tree: Tree) -> tuple[Any, ...]:
    return (_tree_row(tree.left), _tree_row(tree.right)) if isinstance(tree, Pair) else _span_row(tree)


def _tree_of(row: Any) -> Tree:
    return Pair(_tree_of(row[0]), _tree_of(row[1])) if len(row) == 2 else _span_of(row)
