"""A collective as data: what one rank sends, receives, reduces and copies, and in which order.

A plan is made by a pure function of numbers that all ranks know, so each rank makes its own and they fit together.
An executor needs to know nothing of algorithms; a test, a checker or a picture can run it without a network.

Memory. A span names elements of one of three kinds of buffer: INPUT, one slot for each leaf that this rank holds,
read only; OUTPUT, slot 0; SCRATCH, slots that belong to one lane. Scratch may be wide: of the accumulator's type.

Order. A plan is a list of lanes. Lane k of one rank exchanges messages with lane k of others and with no other
lane, and lanes share no memory that is written. So an executor starts them in order and keeps as many open at a
time as it likes: the first lane that is unfinished anywhere is open everywhere and can finish, hence all do. With
the same number on every rank, messages find their receiver ready, or nearly so. Within a lane:

- all Recv are posted when the lane starts, wherever they are in the lane;
- the other steps run in order, each after the Recv that stand before it and whose span it reads (`Lane.waits`);
- a Send is started when it is reached. Every Recv is awaited at the lane's end, and every Send of scratch, which ends
  with the lane. Other Sends are awaited before the lane after the next is started in this one's place: their memory
  stays, and nothing depends on them, so a lane need not stay open for the time that an acknowledgement takes. In a
  lane without a Recv they are awaited at its end: nothing else holds back a rank that only sends.

`Plan.open_lanes` says how many are open at a time: LANES_PER_WIDTH times what keeps all ranks busy, so that the
path is never idle between chunks; more where the path is long (`network.messages`).

What makes this safe, and what `check.validate` proves of a set of plans: within a lane every element is written at
most once, and read only after the step that writes it; every element of OUTPUT is written exactly once; both ends
of a message agree.

An empty span is a token: it carries no data, but a Send of the span that a Recv fills still waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

__all__ = [
    "LANES_PER_WIDTH",
    "Buf",
    "CopyStep",
    "Lane",
    "Pair",
    "Parameter",
    "Plan",
    "PlanStep",
    "RecvStep",
    "ReduceStep",
    "Scratch",
    "SendStep",
    "Span",
    "Tree",
    "operands",
    "reads",
    "writes",
]


LANES_PER_WIDTH = 4


class Buf(StrEnum):
    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of slot `slot` of `buf`; `wide`: they are of the accumulator's type."""

    buf: Buf
    slot: int
    start: int
    stop: int
    wide: bool = False

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        """Return whether both name an element in common, or are the same token."""
        if self.buf is not other.buf or self.slot != other.slot:
            return False
        if self.start == self.stop or other.start == other.stop:
            return self.start == other.start and self.stop == other.stop
        return self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.buf}{self.slot}[{self.start}:{self.stop}]{'w' if self.wide else ''}"


class Pair(NamedTuple):
    """What two trees give: left op right. A class of its own, since mypyc knows no recursive tuples."""

    left: Tree
    right: Tree


Tree: TypeAlias = Span | Pair


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send `src` to rank `peer` as message `index` of this pair of ranks, in this direction, in this plan."""

    peer: int
    index: int
    src: Span


@dataclass(frozen=True, slots=True)
class RecvStep:
    """Receive message `index` from rank `peer` into `dst`."""

    peer: int
    index: int
    dst: Span


@dataclass(frozen=True, slots=True)
class ReduceStep:
    """Combine the spans of `tree`, all as long as `dst`; `finish`: divide, round and write the tensor's own type."""

    dst: Span
    tree: Tree
    finish: bool


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Copy `src` to `dst`, of the same length and type."""

    dst: Span
    src: Span


PlanStep: TypeAlias = SendStep | RecvStep | ReduceStep | CopyStep


@dataclass(frozen=True, slots=True)
class Scratch:
    """One slot of a lane's scratch; `wide`: of the accumulator's type."""

    elements: int
    wide: bool


@dataclass(frozen=True, slots=True)
class Lane:
    """Steps of one chunk. `waits`: for each step the positions of the Recv that it waits for, ascending."""

    steps: tuple[PlanStep, ...]
    scratch: tuple[Scratch, ...] = ()
    waits: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "waits", _waits(self.steps))


Parameter: TypeAlias = tuple[str, int | tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One rank's part of a collective.

    inputs: elements of each INPUT slot. output: elements of OUTPUT. leaves: how many are reduced (for finish), 0
    where nothing is. itemsize, wide_itemsize: bytes of an element of the tensor's own and of the accumulator's
    type. width: how many lanes have to be open at a time so that no rank is idle; the same on every rank.
    lanes_per_width: how many times as many are; likewise.
    parameters: the numbers that every rank must agree on, in order; equal on all ranks exactly if their plans fit.
    """

    collective: str
    algorithm: str
    rank: int
    world: int
    lanes: tuple[Lane, ...]
    inputs: tuple[int, ...]
    output: int
    leaves: int
    itemsize: int
    wide_itemsize: int
    width: int
    parameters: tuple[Parameter, ...]
    lanes_per_width: int = LANES_PER_WIDTH

    @property
    def signature(self) -> str:
        """One line that is equal on all ranks: what they compare before any payload is used."""
        values = " ".join(f"{name}={_text(value)}" for name, value in self.parameters)
        return f"{self.collective}/{self.algorithm} world={self.world} {values}".rstrip()

    @property
    def open_lanes(self) -> int:
        """The number of lanes that an executor opens at a time; the same on every rank."""
        return min(len(self.lanes), self.width * self.lanes_per_width)

    def nbytes(self, span: Span | Scratch) -> int:
        return span.elements * (self.wide_itemsize if span.wide else self.itemsize)

    def scratch_bytes(self, lane: Lane) -> int:
        """Return the bytes of scratch that a lane takes while it is open."""
        return sum(self.nbytes(slot) for slot in lane.scratch)

    @property
    def bytes_sent(self) -> int:
        return sum(self.nbytes(step.src) for lane in self.lanes for step in lane.steps if isinstance(step, SendStep))

    @property
    def bytes_received(self) -> int:
        return sum(self.nbytes(step.dst) for lane in self.lanes for step in lane.steps if isinstance(step, RecvStep))

    def describe(self) -> str:
        """The plan for a reader: the signature, the totals, then every lane's steps in order."""
        lines = [
            self.signature,
            f"rank {self.rank}: {len(self.lanes)} lanes, {self.width} at a time keep all ranks busy; "
            f"sends {self.bytes_sent} bytes, receives {self.bytes_received}",
        ]
        for number, lane in enumerate(self.lanes):
            lines.append(f"lane {number}: {self.scratch_bytes(lane)} bytes of scratch")
            lines += [f"  {_line(step)}" for step in lane.steps]
        return "\n".join(lines)


def operands(tree: Tree) -> Iterator[Span]:
    """The spans of a tree, left to right."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, Pair):
            pending += [node.right, node.left]
        else:
            yield node


def reads(step: PlanStep) -> tuple[Span, ...]:
    """The spans that a step reads here, in order."""
    if isinstance(step, SendStep | CopyStep):
        return (step.src,)
    return tuple(operands(step.tree)) if isinstance(step, ReduceStep) else ()


def writes(step: PlanStep) -> Span | None:
    """The span that a step writes here."""
    return None if isinstance(step, SendStep) else step.dst


def _waits(steps: tuple[PlanStep, ...]) -> tuple[tuple[int, ...], ...]:
    received: dict[
        tuple[Buf, int], list[tuple[int, Span]]
    ] = {}  # by slot: an owner's tree has as many as it has leaves
    waits: list[tuple[int, ...]] = []
    for position, step in enumerate(steps):
        before = {
            at: None
            for span in reads(step)
            for at, dst in received.get((span.buf, span.slot), ())
            if span.overlaps(dst)
        }
        waits.append(tuple(sorted(before)))
        if isinstance(step, RecvStep):
            received.setdefault((step.dst.buf, step.dst.slot), []).append((position, step.dst))
    return tuple(waits)


def _text(value: int | tuple[int, ...]) -> str:
    return str(value) if isinstance(value, int) else ",".join(map(str, value))


def _line(step: PlanStep) -> str:
    if isinstance(step, SendStep):
        return f"send    {step.src} to {step.peer} as #{step.index}"
    if isinstance(step, RecvStep):
        return f"receive {step.dst} from {step.peer} as #{step.index}"
    if isinstance(step, CopyStep):
        return f"copy    {step.src} to {step.dst}"
    return f"{'finish ' if step.finish else 'reduce '} {_formula(step.tree)} to {step.dst}"


def _formula(tree: Tree) -> str:
    return f"({_formula(tree.left)} {_formula(tree.right)})" if isinstance(tree, Pair) else str(tree)
