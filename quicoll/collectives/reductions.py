"""The collectives that compute: all_reduce, reduce, reduce_scatter. Orders and bits: `quicoll.numerics.reduce`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from quicoll.collectives.base import rows_given, rows_text
from quicoll.collectives.operation import Operation, flattened
from quicoll.collectives.shards import Leaves, Shards
from quicoll.engine.calls import Work
from quicoll.errors import LocalError
from quicoll.numerics.bundle import Bundle, bundle, like_text, results
from quicoll.numerics.canonical_order import leaves_of
from quicoll.numerics.reduce import Precision, ReduceOp
from quicoll.plan.schedule import (
    ElementFormat,
    Schedule,
    element_format,
    reduction,
    require_algorithm,
    require_ring_options,
)

if TYPE_CHECKING:
    from quicoll.collectives.base import GroupView
    from quicoll.engine.calls import Known
    from quicoll.numerics.bundle import Joined, Results
    from quicoll.numerics.dtypes import Array, DType
    from quicoll.plan import Plan

__all__ = ["AllReduce", "Reduce", "ReduceOrder", "ReduceScatter"]

ReduceOrder: TypeAlias = Literal["canonical", "ring"]


class Reduction(Operation[Any]):
    """What the three have in common: leaves that are alike, and how they travel."""

    def __init__(
        self,
        here: GroupView,
        name: str,
        x: Any,
        op: str,
        algorithm: str,
        precision: Precision,
        *,
        exact: bool,
        wire: str | None = None,
    ) -> None:
        self.here = here
        self.name = name
        self.leaves, self.like = _leaves(x)
        self.total, self.first = (
            (x.shards.total, x.shards.first) if isinstance(x, Leaves) else (here.world_size, here.rank)
        )
        self.precision, self.op, self.how = _terms(
            name, self.like.dtype, op, algorithm, precision, wire, self.total, exact=exact
        )
        self.wire = wire
        self.x = x
        if isinstance(x, Leaves):
            _demand_own(here, x.shards)

    def plan(self, out: Any, target: Results, algorithm: str, **sizes: Any) -> None:
        """Settle what is run, as far as this rank can alone. sizes: the planner's own arguments."""
        here, how, form = self.here, self.how, self.how.form
        self.given = (self.x, out)
        self.target = target
        self.schedule, self.settled, self.signature = _prepared(
            self.name,
            self.like.dtype,
            self.like.shapes,
            self.like.many,
            self.op,
            self.precision,
            self.wire,
            self.total,
            tuple(sizes.items()),
            here.rank,
            here.sites,
            here.chunk_bytes,
            algorithm,
        )
        self.measures = self.settled is None
        if form is None:
            self.flats: list[Array | Joined] = [leaf.flat for leaf in self.leaves]
            self.output: Array = target.flat
        else:
            self.flats = [form.encode(leaf) for leaf in self.leaves]
            self.output = np.empty(sizes["elements"], how.dtype.storage)
        self.decoded = form is None

    @property
    def in_place(self) -> bool:
        return self.target.in_place

    def step_aside(self) -> None:
        self.target = self.target.aside()
        if self.how.form is None:
            self.output = self.target.flat

    def prepare(self, known: Known) -> Work:
        plan = self.settled
        if plan is None:
            plan = self.schedule.plan_taken(self.here.rank, "auto", known.network)
        return Work(plan, self.how.dtype, self.how.acc, self.op, self.flats, self.output)

    def bits(self) -> Array:
        if not self.decoded and self.how.form is not None:
            self.how.form.decode(self.output, self.like, self.target.flat)
            self.decoded = True
        return self.target.flat

    def result(self) -> Any:
        if not self.holds:
            return None
        if not self.decoded:
            self.bits()
        return self.target.commit()

    def text(self) -> str:
        return f"{self.name} {self.like.brief} {self.op} {self.precision}"

    def inputs(self) -> Sequence[tuple[int, Array | Joined]]:
        # The tensors as they were given, whatever they travel as.
        return [(self.first + i, leaf.flat) for i, leaf in enumerate(self.leaves)]


class AllReduce(Reduction):
    shared = True

    def __init__(
        self,
        here: GroupView,
        x: Any,
        *,
        op: str = "sum",
        out: Any = None,
        reduce_order: ReduceOrder = "canonical",
        algorithm: str = "auto",
        precision: Precision = "default",
        exact: bool = False,
        wire: str | None = None,
    ) -> None:
        self.ring = reduce_order == "ring"
        if self.ring:
            require_algorithm("all_reduce", algorithm)
            require_ring_options("exact" if exact else precision, wire)
            if algorithm != "auto":
                raise LocalError(f"reduce_order='ring' is an algorithm of its own; leave algorithm={algorithm!r} out")
        elif reduce_order != "canonical":
            raise LocalError(f"reduce_order {reduce_order!r} is not known; use 'canonical' or 'ring'")
        super().__init__(here, "all_reduce", x, op, algorithm, precision, exact=exact, wire=wire)
        form, like = self.how.form, self.like
        elements = like.elements if form is None else form.elements(each.flat.size for each in like.sources)
        self.plan(
            out, results(out, like, apart_from=flattened(x)), "ring" if self.ring else algorithm, elements=elements
        )

    def text(self) -> str:
        form = self.how.form
        return super().text() + (" ring" if self.ring else "" if form is None else f" wire={form.codec.name}")

    def terms(self) -> str:
        # What a ring gives is fixed by how many ranks it has.
        return f"world={self.here.world_size}" if self.ring else ""


class Reduce(Reduction):
    def __init__(
        self,
        here: GroupView,
        x: Any,
        *,
        root: int = 0,
        op: str = "sum",
        out: Any = None,
        algorithm: str = "auto",
        precision: Precision = "default",
        exact: bool = False,
    ) -> None:
        self.root = here.checked("root", root)
        super().__init__(here, "reduce", x, op, algorithm, precision, exact=exact)
        self.holds = here.rank == self.root
        out = out if self.holds else None
        target = results(out, self.like, apart_from=flattened(x)) if self.holds else nothing_like(self.like)
        self.plan(out, target, algorithm, root=self.root, elements=self.like.elements)

    def text(self) -> str:
        return f"{super().text()} root={self.root}"


class ReduceScatter(Reduction):
    def __init__(
        self,
        here: GroupView,
        x: Any,
        *,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str = "auto",
        precision: Precision = "default",
        exact: bool = False,
    ) -> None:
        super().__init__(here, "reduce_scatter", x, op, algorithm, precision, exact=exact)
        like = self.like
        if like.many:
            raise LocalError("reduce_scatter takes a tensor, not a list")
        (shape,) = like.shapes
        if not shape:
            raise LocalError("reduce_scatter divides rows; a 0-dim tensor has none")
        self.rows = rows_given(counts, shape[0], here.world_size)
        width = like.elements // shape[0] if shape[0] else 0
        target = results(out, like, (self.rows[here.rank], *shape[1:]), apart_from=flattened(x))
        self.plan(out, target, algorithm, counts=tuple(count * width for count in self.rows))

    def terms(self) -> str:
        return rows_text(self.rows)


def nothing_like(like: Bundle) -> Results:
    """Return memory for no elements, of the type of `like`: where a rank has no result."""
    return results(None, Bundle(like.sources[:1], many=False), (0,))


def _leaves(x: Any) -> tuple[list[Bundle], Bundle]:
    """The leaves of this rank, and what all of them are like. Raises LocalError where they differ."""
    if not isinstance(x, Leaves):
        like = bundle(x)
        return [like], like
    leaves = [bundle(value) for value in x.values]
    like = leaves[0] if leaves else bundle(x.like)
    for other in leaves[1:]:
        if not other.is_like(like):
            raise LocalError(f"leaves differ: {like.text} and {other.text}; all must be alike")
    return leaves, like


def _demand_own(here: GroupView, shards: Shards) -> None:
    """Raise LocalError for leaves of other shards than this rank holds in this view."""
    if shards.view_id != here.view_id:
        raise LocalError(
            f"these leaves were made for view {shards.view_id}, the view is {here.view_id}: "
            "ask group.shards() again in every step"
        )
    mine = leaves_of(here.rank, here.world_size, shards.total)
    if (shards.first, shards.count) != (mine.start, len(mine)):
        raise LocalError(
            f"shards {shards.text} are not those of this rank in this group: "
            "ask the group that reduces them for its shards()"
        )


def _terms(
    name: str,
    dtype: DType,
    op: str,
    algorithm: str,
    precision: Precision,
    wire: str | None,
    leaves: int,
    *,
    exact: bool,
) -> tuple[Precision, ReduceOp, ElementFormat]:
    """Return the precision, the operation and how elements travel. Raises LocalError for what cannot be asked for."""
    try:
        return _checked_terms(name, dtype, op, algorithm, precision, wire, leaves, exact)
    except TypeError:  # something that cannot be a key; what is wrong with it is said here
        return _check_terms(name, dtype, op, algorithm, precision, wire, leaves, exact)


def _check_terms(
    name: str, dtype: DType, op: str, algorithm: str, precision: Precision, wire: str | None, leaves: int, exact: bool
) -> tuple[Precision, ReduceOp, ElementFormat]:
    require_algorithm(name, algorithm)
    if exact and precision not in ("default", "exact"):
        raise LocalError(f"exact=True has an accumulator of its own: leave precision={precision!r} out")
    precision = "exact" if exact else precision
    parsed = ReduceOp.parse(op)
    return precision, parsed, element_format(dtype, parsed, leaves=leaves, precision=precision, wire=wire)


# A training loop asks for the same few again and again: what was checked and planned once is looked up. Both are
# functions of their arguments alone, so what they keep is as good in every view.
_checked_terms = lru_cache(maxsize=256)(_check_terms)


@lru_cache(maxsize=256)
def _prepared(
    name: str,
    dtype: DType,
    shapes: tuple[tuple[int, ...], ...],
    many: bool,
    op: ReduceOp,
    precision: Precision,
    wire: str | None,
    leaves: int,
    sizes: tuple[tuple[str, Any], ...],
    rank: int,
    sites: tuple[int, ...],
    chunk_bytes: int,
    algorithm: str,
) -> tuple[Schedule, Plan | None, str]:
    """Return the schedule, this rank's plan where it does not depend on the network, and the signature.

    Raises LocalError for what cannot be planned: before anything is sent.
    """
    how = element_format(dtype, op, leaves=leaves, precision=precision, wire=wire)
    schedule = reduction(
        name, how, world=len(sites), sizes=dict(sizes), leaves=leaves, sites=sites, chunk_bytes=chunk_bytes
    )
    algorithm = schedule.settled(algorithm)
    plan = None if algorithm == "auto" else schedule.plan_of(rank, algorithm)
    text = f"{name}/{algorithm} {schedule.text} {like_text(dtype, shapes, many=many)} op={op} precision={precision}"
    return schedule, plan, text if how.form is None else f"{text} wire={how.form.codec.name}"
