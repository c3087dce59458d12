"""The collectives that move elements as they are, and the barrier. Tensors of every dtype and kind are taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quicoll.collectives.base import rows_asked, rows_given, rows_text
from quicoll.collectives.operation import Operation
from quicoll.engine.calls import Work
from quicoll.errors import LocalError, PeerError
from quicoll.local.passages import Moved, Routes
from quicoll.local.small import SmallCall
from quicoll.numerics.buffers import argument, detached, memory
from quicoll.numerics.bundle import Bundle, Results, bundle, results, shape_text
from quicoll.numerics.destinations import destination
from quicoll.numerics.reduce import ReduceOp
from quicoll.plan.schedule import Schedule, depends, move, require_algorithm

if TYPE_CHECKING:
    from quicoll.collectives.base import GroupView
    from quicoll.engine.calls import Known
    from quicoll.local.layout import SegmentLayout
    from quicoll.local.small import Counts
    from quicoll.numerics.bundle import Joined
    from quicoll.numerics.dtypes import Array
    from quicoll.plan import Plan

__all__ = ["MAX_BYTES", "AllToAll", "Barrier", "Broadcast", "Gather", "Movement", "Scatter"]

# What peers may make us allocate for one result whose size they have a say in.
MAX_BYTES = 1 << 40

T = TypeVar("T")


class Movement(Operation[T]):
    """What all movements have in common. `target`: where the result comes to lie, once its size is known. Those of
    which all ranks may see what each gives have it in `like`, and define `placed`."""

    like: Bundle  # what this rank gives, where it `gives` anything
    target: Results | None = None
    gives = True  # whether this rank has elements for others

    def way(self, algorithm: str) -> str:
        """Return the algorithm that is taken for one that was asked for, as far as the group alone settles it.

        Raises LocalError for "local" where there is no such way.
        """
        if algorithm == "local" and not self.here.near:
            raise LocalError(
                "algorithm 'local' cannot carry this out: the ranks of this group do not share a host's memory"
            )
        return "local" if algorithm == "auto" and self.here.near else algorithm

    def through_memory(self, number: int, sizes: Sequence[int] | None = None) -> SmallCall:
        """Return it as a call through the memory of one host.

        Args:
            number: Its number in the group.
            sizes: Bytes that each rank gives, where all know them.
        """
        return SmallCall(
            number,
            self.called,
            self.payload,
            self.like.nbytes if self.gives else 0,
            self.combine,
            self.passage,
            counts=self.counts,
            sizes=sizes,
            reads=self.holds,
        )

    def payload(self) -> bytes:
        return bytes(memory(self.like.flat[:])) if self.gives else b""

    def combine(self, payloads: Sequence[bytes], counts: Counts) -> None:
        if not self.holds:
            return
        routes, target = self.placed(counts)
        self.target = target
        at, itemsize = 0, self.like.dtype.itemsize
        for giver, (start, stop) in enumerate(routes.to(self.here.rank)):
            if len(payloads[giver]) != routes.given[giver] * itemsize:
                why = f"gives {len(payloads[giver])} bytes where {routes.given[giver] * itemsize} belong"
                raise PeerError(why, rank=self.here.ranks[giver])
            target.flat[at : at + stop - start] = np.frombuffer(payloads[giver], target.flat.dtype)[start:stop]
            at += stop - start

    def passage(self, layout: SegmentLayout, counts: Counts) -> Moved:
        """Return the way of what does not fit into slots."""
        routes, self.target = self.placed(counts)
        return Moved(layout, self.here.rank, routes, self.like.flat, self.target.flat, reads=self.holds)

    def placed(self, counts: Counts) -> tuple[Routes, Results]:
        """Return which elements go where, by what all have announced, and memory for those that come here.

        Raises PeerError for counts that nobody may announce, LocalError where `out` does not fit.
        """
        raise NotImplementedError

    def schedule(self, collective: str, itemsize: int, **sizes: Any) -> Schedule:
        """Return the schedule of a collective. sizes: the planner's own arguments, in elements of `itemsize` bytes."""
        here = self.here
        return move(
            collective, itemsize, world=here.world_size, sizes=sizes, sites=here.sites, chunk_bytes=here.chunk_bytes
        )

    def work(self, plan: Plan, like: Bundle, target: Results, inputs: Sequence[Array | Joined] | None = None) -> Work:
        """Return the work that fills `target`. inputs: what this rank gives, if not all of `like`."""
        self.target = target
        return Work(plan, like.dtype, like.dtype, ReduceOp.BOR, [like.flat] if inputs is None else inputs, target.flat)

    def bits(self) -> Array:
        if self.target is None:
            raise AssertionError(f"{self.name} has not been prepared")
        return self.target.flat

    def committed(self) -> Any:
        """Return the result that came, in the caller's `out` where there is one."""
        if self.target is None:
            raise AssertionError(f"{self.name} has not been prepared")
        return self.target.commit()


class Broadcast(Movement[Any]):
    name = "broadcast"
    shared = True

    def __init__(self, here: GroupView, x: Any, *, root: int = 0, out: Any = None, algorithm: str = "auto") -> None:
        super().__init__(here)
        self.given = (x, out)
        _demand_model("broadcast", x, "of the same shape and dtype")
        self.like = like = bundle(x)
        self.root = root = here.checked("root", root)
        self.gives = here.rank == root
        self.planned, self.settled, self.signature, self.announced = here.prepared.get(
            ("broadcast", like.dtype, like.shapes, like.many, root, algorithm), self._prepare, algorithm
        )
        self.seen = self.announced or self.way(algorithm) == "local"
        self.measures = self.settled is None and not self.seen
        self.target = results(out, like, recycler=here.recycler)

    def _prepare(self, algorithm: str) -> tuple[Schedule, Plan | None, str, bool]:
        """Return the schedule, this rank's plan where it does not depend on the network, the signature, and whether
        the root's elements travel in its announcement."""
        require_algorithm("broadcast", algorithm)
        algorithm, like = self.way(algorithm), self.like
        schedule = self.schedule("broadcast", like.dtype.itemsize, root=self.root, elements=like.elements)
        announced = algorithm == "auto" and schedule.announced
        algorithm = "announced" if announced else algorithm
        signature = f"broadcast/{algorithm} {schedule.text} {like.text}"
        if announced or algorithm == "local":
            return schedule, None, signature, announced
        settled = schedule.settled(algorithm)
        # Now where it can be: what cannot be planned is refused before anything is sent.
        return schedule, None if settled == "auto" else schedule.plan_of(self.here.rank, settled), signature, False

    def prepare(self, known: Known) -> Work:
        if self.target is None:
            raise AssertionError("a broadcast without a target")
        plan = self.settled or self.planned.plan_taken(self.here.rank, "auto", known.network)
        return self.work(plan, self.like, self.target, None if self.gives else [])

    def small_call(self, number: int) -> SmallCall | None:
        return self.through_memory(number, self.sizes()) if self.seen else None

    def sizes(self) -> Sequence[int]:
        return [self.like.nbytes if rank == self.root else 0 for rank in range(self.here.world_size)]

    def placed(self, counts: Counts) -> tuple[Routes, Results]:
        if self.target is None:
            raise AssertionError("a broadcast without a target")
        given = [self.like.elements if rank == self.root else 0 for rank in range(self.here.world_size)]
        return Routes(given), self.target

    def result(self) -> Any:
        return self.committed()

    def text(self) -> str:
        return f"broadcast {self.like.brief} root={self.root}"

    def inputs(self) -> Sequence[tuple[int, Array | Joined]]:
        return [(self.root, self.like.flat)] if self.gives else ()


class Rows(Movement[T]):
    """A movement of rows, (n, ...), of which only the dtype and what follows n are equal on all ranks."""

    gathers = True
    algorithm = "auto"

    def small_call(self, number: int) -> SmallCall | None:
        return self.through_memory(number) if self.algorithm == "local" else None

    def placed(self, counts: Counts) -> tuple[Routes, Results]:
        rows = self.rows(counts)
        target = self.room(rows.coming(self.here.rank) if self.holds else 0)
        return rows.times(self.width), target

    def rows(self, counts: Sequence[tuple[int, ...] | None]) -> Routes:
        """Return which rows go where, by what all have announced. Raises PeerError for counts that nobody may."""
        raise NotImplementedError

    def announce(self, x: Any, like: Bundle, rest: tuple[int, ...], head: str, out: Any) -> None:
        """Set the signature, and check `out` as far as it can be before the others' n are known.

        rest: the trailing shape. head: what stands before it in the signature.
        """
        self.given = (x, out)
        self.like, self.rest, self.out = like, rest, out
        self.width = math.prod(rest)
        if out is not None:
            # The first dimension is `out`'s own: it is compared when the result's is known.
            destination(out, like.first, (*tuple(getattr(out, "shape", ()))[:1], *rest), buffered=False)
        trailing = ",".join(map(str, rest)) or "-"
        self.signature = f"{head} dtype={like.dtype} trailing={trailing} chunk_bytes={self.here.chunk_bytes}"

    def room(self, rows: int) -> Results:
        """Return memory for a result of so many rows."""
        # Whether `out` may be written was asked when the call was made; here, on the engine's thread, autograd has a
        # mode of its own.
        alike = Bundle.of(self.like.first)
        return results(detached(self.out), alike, (rows, *self.rest), recycler=self.here.recycler)

    def committed(self) -> Any:
        value = super().committed()
        return value if self.out is None else self.out

    def demand_room(self, rows: int, rank: int) -> None:
        """Raise PeerError where rank `rank` announces more than anybody takes memory for."""
        nbytes = rows * self.width * self.like.dtype.itemsize
        if nbytes > MAX_BYTES:
            raise PeerError(f"announces {nbytes} bytes; {MAX_BYTES} is the most", rank=self.here.ranks[rank])

    def plan(self, algorithm: str, known: Known, **sizes: Any) -> Plan:
        """Return this rank's plan. sizes: the planner's own arguments."""
        schedule = self.schedule(self.name, self.like.dtype.itemsize, **sizes)
        return schedule.plan_taken(self.here.rank, algorithm, known.network)

    def text(self) -> str:
        return f"{self.name} {self.like.dtype} {shape_text(('n', *self.rest))}"

    def inputs(self) -> Sequence[tuple[int, Array | Joined]]:
        return [(self.here.rank, self.like.flat)]


class Gather(Rows[Any]):
    """root: None: all_gather. counts: rows of each rank, where all know them: then nothing is asked first."""

    agreed: tuple[int, ...] | None = None  # these
    planned: Schedule
    settled: Plan | None

    def __init__(
        self,
        here: GroupView,
        x: Any,
        *,
        root: int | None = None,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str = "auto",
    ) -> None:
        super().__init__(here)
        self.name = "all_gather" if root is None else "gather"
        self.root = root if root is None else here.checked("root", root)
        like = argument(x)
        shape = like.shape or (1,)
        self.shared = root is None
        self.holds = root is None or here.rank == self.root
        self.where = "" if root is None else f" root={self.root}"
        out = out if self.holds else None
        if counts is not None:
            self._agree(x, Bundle.of(like), shape, rows_asked(counts), out, algorithm)
            return
        require_algorithm(self.name, algorithm)
        self.algorithm = algorithm = self.way(algorithm)
        self.counts = (shape[0],)
        self.announce(x, Bundle.of(like), shape[1:], f"{self.name}/{algorithm}{self.where}", out)
        self.measures = depends(self.name, algorithm, world=here.world_size, sites=here.sites)

    def _agree(
        self, x: Any, like: Bundle, shape: tuple[int, ...], rows: tuple[int, ...], out: Any, algorithm: str
    ) -> None:
        here = self.here
        if len(rows) != here.world_size or min(rows) < 0 or rows[here.rank] != shape[0]:
            raise LocalError(
                f"counts {rows} are not those of {here.world_size} ranks of which rank {here.rank} has {shape[0]} rows"
            )
        self.gathers, self.agreed = False, rows
        if out is not None:
            destination(out, like.first, (sum(rows), *shape[1:]), buffered=False)
        self.announce(x, like, shape[1:], f"{self.name}{self.where}", out)
        self.planned, self.settled, self.signature, self.algorithm = here.prepared.get(
            (self.name, like.dtype, self.rest, rows, self.root, algorithm), self._prepare, rows, algorithm
        )
        self.announced = self.algorithm == "announced"
        self.measures = self.settled is None and self.algorithm == "auto"
        self.target = self.room(sum(rows) if self.holds else 0)

    def _prepare(self, rows: tuple[int, ...], algorithm: str) -> tuple[Schedule, Plan | None, str, str]:
        """Return the schedule, this rank's plan where it does not depend on the network, the signature, and the way
        that is taken: an algorithm, or "announced"."""
        require_algorithm(self.name, algorithm)
        algorithm = self.way(algorithm)
        root = {} if self.root is None else {"root": self.root}
        counts = tuple([count * self.width for count in rows])
        schedule = self.schedule(self.name, self.like.dtype.itemsize, **root, counts=counts)
        if algorithm == "auto" and schedule.announced:
            algorithm = "announced"
        signature = f"{self.signature} way={algorithm} rows={sum(rows)} {rows_text(rows)}".rstrip()
        if algorithm in ("announced", "local"):
            return schedule, None, signature, algorithm
        settled = schedule.settled(algorithm)
        # Now where it can be: what cannot be planned is refused before anything is sent.
        plan = None if settled == "auto" else schedule.plan_of(self.here.rank, settled)
        return schedule, plan, signature, settled

    def small_call(self, number: int) -> SmallCall | None:
        if self.agreed is None:
            return super().small_call(number)
        if self.algorithm not in ("announced", "local"):
            return None
        return self.through_memory(number, self.sizes())

    def sizes(self) -> Sequence[int]:
        itemsize = self.width * self.like.dtype.itemsize
        return [count * itemsize for count in self.agreed or ()]

    def placed(self, counts: Counts) -> tuple[Routes, Results]:
        if self.agreed is None or self.target is None:
            return super().placed(counts)
        return Routes(self.agreed).times(self.width), self.target

    def rows(self, counts: Sequence[tuple[int, ...] | None]) -> Routes:
        rows = [row[0] if row is not None and len(row) == 1 else -1 for row in counts]
        for rank, count in enumerate(rows):
            if count < 0:
                raise PeerError("does not say how many rows it has", rank=self.here.ranks[rank])
            self.demand_room(count, rank)
        return Routes(rows)

    def prepare(self, known: Known) -> Work:
        if self.agreed is not None and self.target is not None:
            plan = self.settled or self.planned.plan_taken(self.here.rank, "auto", known.network)
            return self.work(plan, self.like, self.target)
        rows = self.rows(known.counts).given
        target = self.room(sum(rows) if self.holds else 0)
        parts = tuple(count * self.width for count in rows)
        root = {} if self.root is None else {"root": self.root}
        return self.work(self.plan(self.algorithm, known, **root, counts=parts), self.like, target)

    def result(self) -> Any:
        return self.committed() if self.holds else None

    def text(self) -> str:
        return super().text() + self.where


class Scatter(Rows[Any]):
    name = "scatter"

    def __init__(
        self,
        here: GroupView,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str = "auto",
    ) -> None:
        super().__init__(here)
        require_algorithm("scatter", algorithm)
        _demand_model("scatter", x, "of the same dtype and trailing shape")
        self.root = root = here.checked("root", root)
        like = argument(x)
        if not like.shape:
            raise LocalError("scatter divides rows; a 0-dim tensor has none")
        self.algorithm = algorithm = self.way(algorithm)
        self.gives = here.rank == root
        if self.gives:
            self.counts = rows_given(counts, like.shape[0], here.world_size)
        self.announce(x, Bundle.of(like), like.shape[1:], f"scatter/{algorithm} root={root}", out)
        self.measures = depends("scatter", algorithm, world=here.world_size, sites=here.sites)

    def rows(self, counts: Sequence[tuple[int, ...] | None]) -> Routes:
        rows, world = counts[self.root] or (), self.here.world_size
        if len(rows) != world:
            raise PeerError(f"divides its rows between {len(rows)} ranks", rank=self.here.ranks[self.root])
        self.demand_room(sum(rows), self.root)
        parts = [rows if rank == self.root else (0,) * world for rank in range(world)]
        return Routes([sum(row) for row in parts], parts)

    def prepare(self, known: Known) -> Work:
        rows = known.counts[self.root] or ()
        target = self.room(self.rows(known.counts).coming(self.here.rank))
        parts = tuple(count * self.width for count in rows)
        plan = self.plan(self.algorithm, known, root=self.root, counts=parts)
        return self.work(plan, self.like, target, None if self.gives else [])

    def result(self) -> Any:
        return self.committed()

    def text(self) -> str:
        return f"{super().text()} root={self.root}"

    def terms(self) -> str:
        return rows_text(self.counts)

    def inputs(self) -> Sequence[tuple[int, Array | Joined]]:
        return [(self.root, self.like.flat)] if self.gives else ()


class AllToAll(Rows[Any]):
    name = "all_to_all"

    def __init__(self, here: GroupView, x: Any, *, counts: Sequence[int] | None = None, out: Any = None) -> None:
        super().__init__(here)
        world, parts = here.world_size, bundle(x)
        if parts.many and (counts is not None or out is not None):
            raise LocalError("a list of parts says how many rows go where: leave counts and out out")
        if parts.many and len(parts.flats) != world:
            raise LocalError(f"{len(parts.flats)} parts for {world} ranks")
        rest = parts.shapes[0][1:]
        if any(not shape or shape[1:] != rest for shape in parts.shapes):
            raise LocalError("all_to_all takes parts with rows, (n, ...), that differ in n alone")
        given = tuple(shape[0] for shape in parts.shapes)
        self.counts = given if parts.many else rows_given(counts, given[0], world)
        self.coming: list[int] = []  # rows for this rank, by the rank that sends them
        self.algorithm = self.way("auto")
        self.announce(x, parts, rest, "all_to_all", out)

    def rows(self, counts: Sequence[tuple[int, ...] | None]) -> Routes:
        table = [row or () for row in counts]
        for rank, row in enumerate(table):
            if len(row) != self.here.world_size:
                raise PeerError(f"divides its rows between {len(row)} ranks", rank=self.here.ranks[rank])
            self.demand_room(sum(row), rank)
        self.coming = [row[self.here.rank] for row in table]
        return Routes([sum(row) for row in table], table)

    def prepare(self, known: Known) -> Work:
        table = self.rows(known.counts).parts or ()
        target = self.room(sum(self.coming))
        counts = tuple(tuple(count * self.width for count in row) for row in table)
        return self.work(self.plan("auto", known, counts=counts), self.like, target)

    def result(self) -> Any:
        value = self.committed()
        if not self.like.many:
            return value
        return [value[start:stop] for start, stop in pairwise([0, *accumulate(self.coming)])]

    def terms(self) -> str:
        return rows_text(self.counts)


class Barrier(Movement[None]):
    name = "barrier"
    holds = False
    announced = True

    def __init__(self, here: GroupView) -> None:
        super().__init__(here)
        self.signature, self.like = here.prepared.get(("barrier",), self._prepare)

    def _prepare(self) -> tuple[str, Bundle]:
        plan = self.schedule("barrier", 1).plan_of(self.here.rank, "")
        return plan.signature, bundle(np.empty(0, np.uint8))

    def small_call(self, number: int) -> SmallCall | None:
        return self.through_memory(number, self.sizes())

    def sizes(self) -> Sequence[int]:
        return (0,) * self.here.world_size

    def payload(self) -> bytes:
        return b""

    def placed(self, counts: Counts) -> tuple[Routes, Results]:
        raise AssertionError("a barrier moves nothing")

    def result(self) -> None:
        return None

    def text(self) -> str:
        return "barrier"


def _demand_model(name: str, x: Any, alike: str) -> None:
    """None is what MPI's bindings and torch take here."""
    if x is None:
        raise LocalError(f"{name} takes a tensor on every rank: elsewhere than on the root one {alike}, not None")
