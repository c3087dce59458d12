"""A machine that runs the plans of all ranks in memory, and knows nothing but the rules at the head of `plan.model`.

It shares no code with the executor or with `plan.check`: it finds out by itself which step waits for which message, and
does its own arithmetic. Who goes on next is drawn from a seed, step by step; a message arrives as late as the draw
will have it. Memory that nothing was written to holds a pattern that no result can hold by chance.

Two kinds of arithmetic. `Numbers` computes as numpy does, in the types that a reduction uses. `Words` computes with
64-bit words that stand for the formula they came from: a combination mixes both operands so that order and grouping
change the word. Equal words mean equal formulas, hence equal bits for every type and operation at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from quicoll.numerics.dtypes import DType, narrow, widen
from quicoll.numerics.reduce import ReduceOp, accumulator
from quicoll.plan import Buf, CopyStep, Lane, Plan, RecvStep, ReduceStep, SendStep, Span

__all__ = ["Arithmetic", "Message", "Numbers", "Rank", "Words", "in_memory", "joined", "sealed"]

Array = np.ndarray[Any, Any]
Message = tuple[int, int, int]


class Arithmetic(Protocol):
    """What a combination and the last step do; `narrow` and `wide` are the types in memory."""

    narrow: np.dtype[Any]
    wide: np.dtype[Any]

    def widen(self, values: Array) -> Array: ...
    def combine(self, left: Array, right: Array) -> Array: ...
    def finish(self, total: Array, leaves: int) -> Array: ...


class Words:
    """Values are 64-bit words that stand for formulas; wide ones are marked by their type alone."""

    narrow: np.dtype[Any] = np.dtype(np.uint64)
    wide: np.dtype[Any] = np.dtype(np.int64)

    def widen(self, values: Array) -> Array:
        return values.view(np.int64)

    def combine(self, left: Array, right: Array) -> Array:
        return joined(left.view(np.uint64), right.view(np.uint64)).view(np.int64)

    def finish(self, total: Array, leaves: int) -> Array:
        return sealed(total.view(np.uint64), leaves)


def joined(left: Array, right: Array) -> Array:
    """A word for "left op right": neither commutative nor associative (splitmix64's mixing, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        mixed = left * np.uint64(0x9E3779B97F4A7C15) + (right ^ (right >> np.uint64(31))) * np.uint64(
            0xBF58476D1CE4E5B9
        )
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(27))


def sealed(total: Array, leaves: int) -> Array:
    """A word for the finished result over `leaves` leaves."""
    return joined(total, np.full_like(total, 0xF1 + leaves))


_FUNCTIONS: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MAX: np.maximum,
}


class Numbers:
    """Plain numpy in the accumulator of (dtype, op)."""

    def __init__(self, dtype: DType, op: ReduceOp) -> None:
        self._dtype, self._op = dtype, op
        self._acc = accumulator(dtype, op)
        self.narrow, self.wide = dtype.storage, self._acc.storage

    def widen(self, values: Array) -> Array:
        out = np.empty(values.size, self.wide)
        widen(values, self._dtype, self._acc, out)
        return out

    def combine(self, left: Array, right: Array) -> Array:
        return _FUNCTIONS[self._op](left, right)

    def finish(self, total: Array, leaves: int) -> Array:
        if self._op is ReduceOp.AVG:
            total = total / self.wide.type(leaves)
        out = np.empty(total.size, self.narrow)
        narrow(total, self._acc, self._dtype, out)
        return out


@dataclass
class _Open:
    """A lane under way. awaited: positions of the Recv that have not been filled."""

    lane: Lane
    scratch: list[Array]
    awaited: list[int]
    at: int = 0
    needs: list[list[int]] = field(default_factory=list)


class Rank:
    """One rank's buffers and how far its lanes have come. `window` lanes are open at a time."""

    def __init__(self, plan: Plan, inputs: Sequence[Array], arithmetic: Arithmetic, window: int) -> None:
        assert [values.size for values in inputs] == list(plan.inputs)
        self.plan, self.inputs, self.arithmetic, self.window = plan, inputs, arithmetic, window
        self.output = self._poisoned(plan.output, wide=False)
        self.next_lane = 0
        self.open: dict[int, _Open] = {}

    @property
    def ended(self) -> bool:
        return not self.open and self.next_lane == len(self.plan.lanes)

    def _type(self, wide: bool) -> np.dtype[Any]:
        return self.arithmetic.wide if wide else self.arithmetic.narrow

    def _poisoned(self, elements: int, *, wide: bool) -> Array:
        kind = self._type(wide)
        return np.full(elements * kind.itemsize, 0xA5, np.uint8).view(kind)

    def start_lanes(self) -> None:
        while self.next_lane < len(self.plan.lanes) and len(self.open) < self.window:
            lane = self.plan.lanes[self.next_lane]
            scratch = [self._poisoned(slot.elements, wide=slot.wide) for slot in lane.scratch]
            awaited = [position for position, step in enumerate(lane.steps) if isinstance(step, RecvStep)]
            self.open[self.next_lane] = _Open(lane, scratch, awaited, needs=_needs(lane))
            self.next_lane += 1

    def _view(self, state: _Open, span: Span) -> Array:
        if span.buf is Buf.SCRATCH:
            whole = state.scratch[span.slot]
        else:
            whole = self.inputs[span.slot] if span.buf is Buf.INPUT else self.output
        piece = whole[span.start : span.stop]
        assert piece.size == span.elements
        assert piece.dtype == self._type(span.wide)
        return piece

    def deliver(self, messages: dict[Message, bytes], wanted: Callable[[], bool]) -> bool:
        """Put what has come for an open lane into place; `wanted` draws whether a message is there already."""
        moved = False
        for state in self.open.values():
            for position in list(state.awaited):
                recv = state.lane.steps[position]
                assert isinstance(recv, RecvStep)
                key = (recv.peer, self.plan.rank, recv.index)
                if key in messages and wanted():
                    place = self._view(state, recv.dst)
                    payload = np.frombuffer(messages.pop(key), place.dtype)
                    assert payload.size == place.size
                    place[:] = payload
                    state.awaited.remove(position)
                    moved = True
        return moved

    def advance(self, number: int, messages: dict[Message, bytes]) -> bool:
        """One step of one lane, if it may be taken."""
        state = self.open[number]
        if state.at == len(state.lane.steps):
            if state.awaited:
                return False
            del self.open[number]
            return True
        if any(position in state.awaited for position in state.needs[state.at]):
            return False
        step = state.lane.steps[state.at]
        if isinstance(step, SendStep):
            key = (self.plan.rank, step.peer, step.index)
            assert key not in messages
            messages[key] = self._view(state, step.src).tobytes()
        elif isinstance(step, CopyStep):
            self._view(state, step.dst)[:] = self._view(state, step.src)
        elif isinstance(step, ReduceStep):
            total = self._value(state, step.tree)
            value = self.arithmetic.finish(total, self.plan.leaves) if step.finish else total
            place = self._view(state, step.dst)
            assert place.dtype == value.dtype
            place[:] = value
        state.at += 1
        return True

    def _value(self, state: _Open, tree: Any) -> Array:
        if isinstance(tree, tuple):
            return self.arithmetic.combine(self._value(state, tree[0]), self._value(state, tree[1]))
        values = self._view(state, tree)
        return values if tree.wide else self.arithmetic.widen(values)


def _needs(lane: Lane) -> list[list[int]]:
    """For each step the earlier Recv into what it reads, from the rule as it is stated."""
    filled: dict[tuple[Buf, int], list[int]] = {}
    needs: list[list[int]] = []
    for position, step in enumerate(lane.steps):
        needs.append(
            [
                earlier
                for span in _read(step)
                for earlier in filled.get((span.buf, span.slot), [])
                if _meet(lane.steps[earlier].dst, span)
            ]
        )
        if isinstance(step, RecvStep):
            filled.setdefault((step.dst.buf, step.dst.slot), []).append(position)
    return needs


def _read(step: Any) -> list[Span]:
    if isinstance(step, SendStep | CopyStep):
        return [step.src]
    return _leaves(step.tree) if isinstance(step, ReduceStep) else []


def _leaves(tree: Any) -> list[Span]:
    return _leaves(tree[0]) + _leaves(tree[1]) if isinstance(tree, tuple) else [tree]


def _meet(one: Span, other: Span) -> bool:
    """A token is met by itself; elements by elements."""
    if one.elements and other.elements:
        return max(one.start, other.start) < min(one.stop, other.stop)
    return (one.start, one.stop) == (other.start, other.stop)


def in_memory(
    plans: Sequence[Plan],
    inputs: Sequence[Sequence[Array]],
    arithmetic: Arithmetic,
    *,
    window: int = 4,
    seed: int = 0,
) -> list[Array]:
    """The outputs of all ranks, once every lane has ended and no message is left."""
    rng = random.Random(seed)
    ranks = [Rank(plan, own, arithmetic, window) for plan, own in zip(plans, inputs, strict=True)]
    messages: dict[Message, bytes] = {}
    stuck = 0
    while stuck < 2:
        # Twice without a move: the second time with everything that has been sent delivered.
        moved, late = False, stuck == 0
        for rank in rng.sample(ranks, len(ranks)):
            rank.start_lanes()
            moved |= rank.deliver(messages, lambda late=late: not late or rng.random() < 0.7)
            for number in rng.sample(list(rank.open), len(rank.open)):
                while rank.advance(number, messages):
                    moved = True
                    if number not in rank.open or rng.random() < 0.3:
                        break
        stuck = 0 if moved else stuck + 1
    for rank in ranks:
        assert rank.ended, f"rank {rank.plan.rank} waits for ever in {sorted(rank.open)}"
    assert not messages
    return [rank.output for rank in ranks]
