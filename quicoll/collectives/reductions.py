"""The collectives that compute: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from quicoll.collectives.base import Issuer, rows_given, rows_text
from quicoll.collectives.shards import Leaves, Shards
from quicoll.engine.communicator import Call
from quicoll.engine.executor import Work
from quicoll.errors import LocalError
from quicoll.numerics.bundle import Bundle, bundle, results
from quicoll.numerics.reduce import Precision, ReduceOp, leaves_of
from quicoll.plan.schedule import (
    AlgorithmName,
    ElementFormat,
    element_format,
    reduction,
    require_algorithm,
    require_ring_options,
)

if TYPE_CHECKING:
    from quicoll.collectives.handle import Handle
    from quicoll.numerics.bundle import Results
    from quicoll.numerics.codecs import WireFormat
    from quicoll.numerics.dtypes import Array

__all__ = ["AlgorithmName", "ReduceOrder", "Reducing"]

ReduceOrder: TypeAlias = Literal["canonical", "ring"]


@dataclass(frozen=True, slots=True)
class _Reduction:
    """The checked arguments of a reduction. like: shape and type of each leaf. total, first: how many leaves there are
    on all ranks, and the number of the first of `leaves`. how: they travel."""

    op: ReduceOp
    precision: Precision
    algorithm: str
    like: Bundle
    leaves: list[Bundle]
    total: int
    first: int
    how: ElementFormat

    @property
    def elements(self) -> int:
        """Of what travels."""
        return self.how.elements(each.flat.size for each in self.like.sources)


class Reducing(Issuer):
    """Reductions. Their order and their bits: `quicoll.numerics.reduce`."""

    def all_reduce(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        reduce_order: ReduceOrder = "canonical",
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        wire: WireFormat | None = None,
        timeout: float | None = None,
    ) -> Handle[Any]:
        """Reduce over all leaves and give every rank the result.

        x: a tensor (one leaf per rank), a list of tensors of one dtype (one operation for all of them), or `Leaves` of
        either; shapes and dtype equal on all ranks. Result: those shapes and dtype, a list for a list. Its bits are
        those of a call for each tensor.
        op: sum, avg, min, max, product, band, bor, bxor; avg divides by the number of leaves, once, at the end.
        out: a tensor (a list of tensors) to write the result to, after the operation has succeeded; may be x.
        reduce_order: "canonical" combines the leaves by the fixed tree of `quicoll.numerics.reduce`: bits depend on the
        leaves in order and on nothing else, not even the world size. "ring" is the classic ring: bits are fixed by the
        world size, and for a list by where its tensors lie in it, as well (Patarasuk & Yuan 2009). algorithm: how the
        canonical order is carried out; the bits are the same. "direct": two delays and the bytes of a ring. "tree": few
        messages for each rank. "hierarchical": across the way between two sites (`site=` of `quicoll.join`) once.
        "exchange": one delay, and (p - 1) times the bytes. "auto" takes the cheapest by the cost model and what the
        links have measured, which the ranks agree on once in a view: the first such call waits one delay more.
        docs/collectives.md has a table. precision: "default" accumulates float16, bfloat16 and float32 in float32;
        "float64" in float64. One rounding. exact: the sum, or avg, is the real number that the leaves add up to,
        rounded once (`quicoll.numerics.exact`): no order of leaves can change it. The same as precision="exact";
        integers, min, max and the bitwise ones are exact anyway, a product of floats and a ring's order are refused. At
        most 2**28 leaves. One leaf for each rank costs no bytes more; partial sums of several are accumulators (44
        bytes for float32), and travel only where they are fewer bytes than their leaves. wire: None, or what the leaves
        and the result travel as (`quicoll.numerics.codecs`, with its errors): "bfloat16", for float32, float64 and
        complex; "int8", one scale for 256 numbers, for float16, bfloat16, float32 and complex64. Each leaf x_i is
        replaced by its decoded self C(x_i), wherever it is, and the result is C(op of the C(x_i)), the same on all
        ranks and, for given leaves, at any world size, algorithm and chunk size. With e the format's bound ("bfloat16":
        2**-8 |x|; "int8": M / 251, M the largest of the block) a sum is off by at most the sum of e(x_i), e of the
        result, and what the accumulator rounds. Partial results of several leaves are not encoded; they travel where
        they are fewer bytes than their leaves. Not with reduce_order="ring". timeout: seconds for the whole collective;
        None takes the job's. Cost of direct: each rank sends and receives 2 (p - 1) / p * x.nbytes for one leaf per
        rank.
        """
        require_algorithm("all_reduce", algorithm)
        if reduce_order not in ("canonical", "ring"):
            raise LocalError(f"reduce_order {reduce_order!r} is not known; use 'canonical' or 'ring'")
        if reduce_order == "ring":
            require_ring_options("exact" if exact else precision, wire)
            if algorithm != "auto":
                raise LocalError(f"reduce_order='ring' is an algorithm of its own; leave algorithm={algorithm!r} out")
        task = self._reduction("all_reduce", x, op, precision, algorithm, exact=exact, wire=wire, order=reduce_order)
        target = results(out, task.like)
        sizes = {"elements": task.elements}
        return self._reduce("all_reduce", task, target, sizes, timeout, equal=True)

    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: str | ReduceOp = "sum",
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
    ) -> Handle[Any]:
        """Reduce over all leaves and give the root the result; the others get None.

        x, op, precision, exact, algorithm ("exchange" is not known here): as for `all_reduce`, and the root's bits are
        those that `all_reduce` would give. out: looked at on the root only.
        Cost of direct: each rank sends x.nbytes at most once; the root receives it twice at most, whatever p.
        """
        root = self._rank("root", root)
        task = self._reduction("reduce", x, op, precision, algorithm, exact=exact)
        sizes = {"root": root, "elements": task.like.elements}
        if self.rank == root:
            return self._reduce("reduce", task, results(out, task.like), sizes, timeout, equal=False)
        nothing = results(None, bundle(_empty_like(task.like)))
        return self._reduce("reduce", task, nothing, sizes, timeout, equal=False, deliver=lambda: None)

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
    ) -> Handle[Any]:
        """Reduce over all leaves and give rank r its rows of the result.

        x: a tensor (n, ...) or `Leaves` of such; shape and dtype equal on all ranks. counts: rows for each rank, n in
        all, equal on all ranks; by default ceil(n / p) each, so that the last ones may get fewer or none. Result:
        (counts[rank], ...). Its bits are those of the rows that `all_reduce` would give.
        op, precision, exact, algorithm ("exchange" is not known here): as for `all_reduce`.
        Cost of direct: each rank sends and receives (p - 1) / p * x.nbytes for one leaf per rank; one delay.
        """
        task = self._reduction("reduce_scatter", x, op, precision, algorithm, exact=exact)
        if task.like.many:
            raise LocalError("reduce_scatter takes a tensor, not a list")
        (shape,) = task.like.shapes
        if not shape:
            raise LocalError("reduce_scatter divides rows; a 0-dim tensor has none")
        rows = rows_given(counts, shape[0], self.world_size)
        width = task.like.elements // shape[0] if shape[0] else 0
        target = results(out, task.like, (rows[self.rank], *shape[1:]))
        sizes = {"counts": tuple(count * width for count in rows)}
        return self._reduce("reduce_scatter", task, target, sizes, timeout, equal=False, rows=rows)

    # -- inside --------------------------------------------------------------------------------------------------

    def _leaves(self, x: Any) -> Leaves:
        if isinstance(x, Leaves):
            return x
        return Leaves(Shards(self.world_size, self.rank, 1, self._view.view_id), (x,))

    def _reduction(
        self,
        name: str,
        x: Any,
        op: str | ReduceOp,
        precision: Precision,
        algorithm: str,
        *,
        exact: bool,
        wire: str | None = None,
        order: ReduceOrder = "canonical",
    ) -> _Reduction:
        if exact and precision not in ("default", "exact"):
            raise LocalError(f"exact=True has an accumulator of its own: leave precision={precision!r} out")
        precision = "exact" if exact else precision
        view, given = self._view, self._leaves(x)
        leaves = [bundle(value) for value in given.values]
        like = leaves[0] if leaves else bundle(given.like)
        for other in leaves[1:]:
            if not other.is_like(like):
                raise LocalError(f"leaves differ: {like.text} and {other.text}; all must be alike")
        parsed = ReduceOp.parse(op)
        how = element_format(like.dtype, parsed, leaves=given.shards.total, precision=precision, wire=wire)
        require_algorithm(name, algorithm)
        if given.shards.view_id != view.view_id:
            raise LocalError(
                f"these leaves were made for view {given.shards.view_id}, the view is {view.view_id}: "
                "ask group.shards() again in every step"
            )
        mine = leaves_of(self.rank, self.world_size, given.shards.total)
        if (given.shards.first, given.shards.count) != (mine.start, len(mine)):
            raise LocalError(
                f"shards {given.shards.text} are not those of this rank in this group: "
                "ask the group that reduces them for its shards()"
            )
        if order == "ring":
            algorithm = "ring"
        return _Reduction(parsed, precision, algorithm, like, leaves, given.shards.total, given.shards.first, how)

    def _reduce(
        self,
        name: str,
        task: _Reduction,
        target: Results,
        sizes: dict[str, Any],
        timeout: float | None,
        *,
        equal: bool,
        rows: Sequence[int] = (),
        deliver: Callable[[], Any] | None = None,
    ) -> Handle[Any]:
        rank, how, form = self.rank, task.how, task.how.form
        schedule = reduction(
            name,
            how,
            world=self.world_size,
            sizes=sizes,
            leaves=task.total,
            sites=self._sites,
            chunk_bytes=self._chunk_bytes,
        )
        algorithm = schedule.settled(task.algorithm)
        output = target.flat if form is None else np.empty(task.elements, how.dtype.storage)
        inputs = [leaf.flat if form is None else form.encode(leaf) for leaf in task.leaves]
        decoded = form is None

        def flat() -> Array:
            """The result once it is there, decoded when it is first asked for."""
            nonlocal decoded
            if form is not None and not decoded:
                form.decode(output, task.like, target.flat)
                decoded = True
            return target.flat

        def hand_over() -> Any:
            flat()
            return target.commit()

        def work(taken: str) -> Work:
            return Work(schedule.plan_of(rank, taken), how.dtype, how.acc, task.op, inputs, output)

        signature = f"{name}/{algorithm} {schedule.text} {task.like.text} op={task.op} precision={task.precision}"
        if form is not None:
            signature += f" wire={form.codec.name}"
        if algorithm == "auto":
            call = Call(name, signature, lambda known: work(schedule.taken(algorithm, known.network)), measures=True)
        else:
            ready = work(algorithm)  # now: what cannot be planned is refused before anything is sent
            call = Call(name, signature, lambda _: ready)
        where = f" root={sizes['root']}" if "root" in sizes else ""
        where += " ring" if algorithm == "ring" else "" if form is None else f" wire={form.codec.name}"
        return self._start(
            call,
            hand_over if deliver is None else deliver,
            timeout,
            op=f"{name} {task.like.brief} {task.op} {task.precision}{where}",
            # What a ring gives is fixed by how many ranks it has.
            terms=f"world={self.world_size}" if task.algorithm == "ring" else rows_text(rows),
            inputs=[(task.first + i, leaf.flat) for i, leaf in enumerate(task.leaves)],
            equal=flat if equal else None,
            own=flat if deliver is None else None,
        )


def _empty_like(like: Bundle) -> Any:
    """A tensor of no elements, of the type of `like`: where a rank has no result."""
    return results(None, Bundle(like.sources[:1], many=False), (0,)).commit()
