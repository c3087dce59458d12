"""The collectives of values that msgpack can carry, for metadata. Nothing that arrives is executed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quicoll.collectives.movements import Movement
from quicoll.errors import LocalError, PeerError
from quicoll.local.passages import Routes
from quicoll.numerics.buffers import memory
from quicoll.numerics.bundle import bundle, results
from quicoll.plan.schedule import depends

if TYPE_CHECKING:
    from quicoll.collectives.base import GroupView
    from quicoll.engine.calls import Known, Work
    from quicoll.local.small import Counts, SmallCall
    from quicoll.numerics.bundle import Joined, Results
    from quicoll.numerics.dtypes import Array
    from quicoll.plan import Plan

__all__ = ["MAX_OBJECT_BYTES", "AllGatherObject", "BroadcastObject"]

MAX_OBJECT_BYTES = 16 << 20  # of one object, encoded


class BroadcastObject(Movement[Any]):
    name = "broadcast_object"
    gathers = shared = True

    def __init__(self, here: GroupView, value: Any = None, *, root: int = 0) -> None:
        super().__init__(here)
        self.root = here.checked("root", root)
        self.gives = here.rank == self.root
        self.like = bundle(_encoded(value) if self.gives else np.empty(0, np.uint8))
        self.counts = (self.like.elements,)
        self.measures = depends("broadcast", self.way("auto"), world=here.world_size, sites=here.sites)
        self.signature = f"broadcast_object root={self.root} chunk_bytes={here.chunk_bytes}"

    def small_call(self, number: int) -> SmallCall | None:
        return self.through_memory(number) if self.here.near else None

    def placed(self, counts: Counts) -> tuple[Routes, Results]:
        size, root = _size(counts[self.root], self.here.ranks[self.root]), self.root
        given = [size if rank == root else 0 for rank in range(self.here.world_size)]
        return Routes(given), results(None, self.like, (size,))

    def prepare(self, known: Known) -> Work:
        size = _size(known.counts[self.root], self.here.ranks[self.root])
        plan = _plan(self, "broadcast", known, root=self.root, elements=size)
        return self.work(plan, self.like, results(None, self.like, (size,)), None if self.gives else [])

    def result(self) -> Any:
        return _decoded(self.bits(), self.here.ranks[self.root])

    def text(self) -> str:
        return f"broadcast_object root={self.root}"

    def inputs(self) -> Sequence[tuple[int, Array | Joined]]:
        return [(self.root, self.like.flat)] if self.gives else ()


class AllGatherObject(Movement[list[Any]]):
    name = "all_gather_object"
    gathers = shared = True

    def __init__(self, here: GroupView, value: Any) -> None:
        super().__init__(here)
        self.like = bundle(_encoded(value))
        self.counts = (self.like.elements,)
        self.lengths: list[int] = []  # of the encoded values, by rank
        self.measures = depends("all_gather", self.way("auto"), world=here.world_size, sites=here.sites)
        self.signature = f"all_gather_object chunk_bytes={here.chunk_bytes}"

    def small_call(self, number: int) -> SmallCall | None:
        return self.through_memory(number) if self.here.near else None

    def placed(self, counts: Counts) -> tuple[Routes, Results]:
        self.lengths = [_size(row, rank) for row, rank in zip(counts, self.here.ranks, strict=True)]
        return Routes(self.lengths), results(None, self.like, (sum(self.lengths),))

    def prepare(self, known: Known) -> Work:
        self.lengths = [_size(row, rank) for row, rank in zip(known.counts, self.here.ranks, strict=True)]
        plan = _plan(self, "all_gather", known, counts=tuple(self.lengths))
        return self.work(plan, self.like, results(None, self.like, (sum(self.lengths),)))

    def result(self) -> list[Any]:
        flat, parts = self.bits(), pairwise([0, *accumulate(self.lengths)])
        return [_decoded(flat[a:b], rank) for (a, b), rank in zip(parts, self.here.ranks, strict=True)]

    def text(self) -> str:
        return "all_gather_object"

    def inputs(self) -> Sequence[tuple[int, Array | Joined]]:
        return [(self.here.rank, self.like.flat)]


def _plan(operation: Movement[Any], collective: str, known: Known, **sizes: Any) -> Plan:
    """The plan of the collective that carries the bytes."""
    schedule = operation.schedule(collective, 1, **sizes)
    return schedule.plan_taken(operation.here.rank, "auto", known.network)


def _size(announced: tuple[int, ...] | None, rank: int) -> int:
    """The size of an object that a rank of the view has announced, bounded before memory is taken for it."""
    size = announced[0] if announced is not None and len(announced) == 1 else -1
    if not 0 <= size <= MAX_OBJECT_BYTES:
        raise PeerError(f"sends an object of {size} bytes; {MAX_OBJECT_BYTES} is the most", rank=rank)
    return size


def _encoded(value: Any) -> np.ndarray[Any, Any]:
    try:
        data = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise LocalError(f"a {type(value).__name__} that msgpack cannot carry: {error}") from error
    if len(data) > MAX_OBJECT_BYTES:
        raise LocalError(f"an object of {len(data)} bytes; {MAX_OBJECT_BYTES} is the most: send a tensor")
    return np.frombuffer(data, np.uint8)


def _decoded(flat: np.ndarray[Any, Any], rank: int) -> Any:
    try:
        return msgspec.msgpack.decode(memory(flat))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"sent a malformed object: {error}", rank=rank) from error
