"""The public collectives. Arguments are checked here, on the caller's thread, before anything is sent.

Every method takes numpy arrays and torch CPU tensors alike and returns what it was given. Unless `out` is given the
result is a new tensor; an aborted call leaves inputs and `out` untouched. All ranks of a view must issue the same
collectives in the same order; what they call is compared before any payload is used.

Errors of every collective: LocalError (bad arguments; nothing sent), Mismatch (the ranks called different things),
PeerError (a rank was lost or is late), Corrupted (bytes changed on the way, after all resends), Partitioned (this
rank is cut off). After all but the first the view is dead: leave the step, and begin it again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import xxhash

from quicoll import plan
from quicoll.buffers import Destination, Source, allocate, destination, memory, source
from quicoll.errors import LocalError
from quicoll.executor import Work
from quicoll.mesh import Call
from quicoll.reduce import Precision, ReduceOp, accumulator, held
from quicoll.shards import Leaves, Shards

if TYPE_CHECKING:
    from quicoll.caller import Caller

__all__ = ["Group", "ReduceOrder"]

ReduceOrder: TypeAlias = Literal["canonical", "ring"]

# Plans are immutable and a training loop asks for the same few again and again; a large one takes milliseconds.
_all_reduce_plan = lru_cache(maxsize=64)(plan.all_reduce)

WORLD_GROUP = 0  # the users' collectives
STATE_GROUP = 1  # the library's own, when a view begins


class Group:
    """All ranks of the job's present view. `job.group` gives it; it follows the job from view to view."""

    def __init__(self, caller: Caller, *, group_id: int = WORLD_GROUP) -> None:
        self._caller = caller
        self._id = group_id

    @property
    def rank(self) -> int:
        return self._caller.rank

    @property
    def world_size(self) -> int:
        return self._caller.world_size

    def shards(self, total: int) -> Shards:
        """Which of `total` logical shards this rank holds in the present view: contiguous, by rank, balanced."""
        if total < 1:
            raise LocalError(f"there must be at least one shard, not {total}")
        mine = held(self.rank, self.world_size, total)
        return Shards(total, mine.start, len(mine), self._caller.view.view_id)

    async def all_reduce(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        reduce_order: ReduceOrder = "canonical",
        precision: Precision = "default",
        timeout: float | None = None,
    ) -> Any:
        """Reduce over all leaves and give every rank the result.

        x: a tensor (one leaf per rank) or `Leaves`; shape and dtype equal on all ranks. Result: that shape and dtype.
        op: sum, avg, min, max, product, band, bor, bxor; avg divides by the number of leaves, once, at the end.
        out: a tensor to write the result to, after the operation has succeeded; may be x.
        reduce_order: "canonical" combines the leaves by the fixed tree of `quicoll.reduce`: bits depend on the leaves
        in order and on nothing else, not even the world size. "ring" is the classic ring: bits are fixed by the world
        size as well (Patarasuk & Yuan 2009).
        precision: "default" accumulates float16, bfloat16 and float32 in float32; "float64" in float64. One rounding.
        timeout: seconds for the whole collective; None takes the job's.
        Cost: each rank sends and receives 2 (p - 1) / p * x.nbytes for one leaf per rank.
        """
        view = self._caller.view
        leaves = self._leaves(x)
        sources = [source(value) for value in leaves.values]
        like = sources[0] if sources else source(leaves.like)
        for other in sources[1:]:
            if other.dtype is not like.dtype or other.shape != like.shape:
                raise LocalError(
                    f"leaves differ: {like.dtype} {like.shape} and {other.dtype} {other.shape}; all must be alike"
                )
        parsed = ReduceOp.parse(op)
        acc = accumulator(like.dtype, parsed, precision)
        if reduce_order not in ("canonical", "ring"):
            raise LocalError(f"reduce_order {reduce_order!r} is not known; use 'canonical' or 'ring'")
        if leaves.shards.view_id != view.view_id:
            raise LocalError(
                f"these leaves were made for view {leaves.shards.view_id}, the view is {view.view_id}: "
                "ask group.shards() again in every step"
            )
        target = self._target(out, like, like.shape)
        schedule = _all_reduce_plan(
            algorithm="direct" if reduce_order == "canonical" else "ring",
            rank=self.rank,
            world=self.world_size,
            elements=target.flat.size,
            leaves=leaves.shards.total,
            itemsize=like.dtype.itemsize,
            wide_itemsize=acc.itemsize,
            chunk_bytes=self._caller.config.chunk_bytes,
        )
        work = Work(schedule, like.dtype, acc, parsed, [item.flat for item in sources], target.flat)
        signature = f"{schedule.signature} dtype={like.dtype} shape={_shape(like)} op={parsed} precision={precision}"
        return await self._run(Call("all_reduce", signature, lambda _: work), target, timeout)

    async def broadcast(self, x: Any, *, root: int = 0, out: Any = None, timeout: float | None = None) -> Any:
        """Give every rank root's tensor, over a fixed binomial tree.

        x: on the root the tensor; elsewhere a tensor of the same shape and dtype, whose values are not used.
        Cost: log2(p) rounds; each rank receives x.nbytes once.
        """
        like = source(x)
        if not 0 <= root < self.world_size:
            raise LocalError(f"root {root} is not a rank of a world of {self.world_size}")
        target = self._target(out, like, like.shape)
        schedule = plan.broadcast(
            rank=self.rank,
            world=self.world_size,
            root=root,
            elements=target.flat.size,
            itemsize=like.dtype.itemsize,
            chunk_bytes=self._caller.config.chunk_bytes,
        )
        inputs = [like.flat] if self.rank == root else []
        work = Work(schedule, like.dtype, like.dtype, ReduceOp.BOR, inputs, target.flat)
        signature = f"{schedule.signature} dtype={like.dtype} shape={_shape(like)}"
        return await self._run(Call("broadcast", signature, lambda _: work), target, timeout)

    async def all_gather(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
        """Concatenate all ranks' tensors along the first dimension, by rank; every rank gets the whole.

        x: (n, ...) with equal dtype and trailing shape; n may differ and may be 0. A 0-dim tensor counts as (1,).
        Result: (sum of n, ...). Cost: each rank sends its own tensor to all others; it first learns the others' n,
        which takes one delay more than the payload.
        """
        like = source(x)
        shape = like.shape or (1,)
        rest = shape[1:]
        rows = 1
        for extent in rest:
            rows *= extent
        holder: list[Destination] = []
        if out is not None:
            # All that can be checked before the others' sizes are known: the first dimension is `out`'s own.
            destination(out, like, (*tuple(getattr(out, "shape", ()))[:1], *rest))

        def make(counts: list[tuple[int, ...] | None]) -> Work:
            firsts = [item[0] for item in counts if item]
            target = self._target(out, like, (sum(firsts), *rest))
            holder.append(target)
            schedule = plan.all_gather(
                rank=self.rank,
                world=self.world_size,
                counts=[first * rows for first in firsts],
                itemsize=like.dtype.itemsize,
                chunk_bytes=self._caller.config.chunk_bytes,
            )
            return Work(schedule, like.dtype, like.dtype, ReduceOp.BOR, [like.flat], target.flat)

        signature = f"all_gather dtype={like.dtype} trailing={','.join(map(str, rest)) or '-'}"
        call = Call("all_gather", signature, make, counts=(shape[0],), gathers=True)
        seq = await self._caller.collective(call, group=self._id, timeout=timeout)
        return self._deliver(holder[0], seq)

    async def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank is here. Dissemination barrier, ceil(log2 p) rounds of empty messages."""
        schedule = plan.barrier(rank=self.rank, world=self.world_size)
        nothing = np.empty(0, np.uint8)
        like = source(nothing)
        work = Work(schedule, like.dtype, like.dtype, ReduceOp.BOR, [], nothing)
        await self._caller.collective(
            Call("barrier", schedule.signature, lambda _: work), group=self._id, timeout=timeout
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _leaves(self, x: Any) -> Leaves:
        if isinstance(x, Leaves):
            return x
        return Leaves(Shards(self.world_size, self.rank, 1, self._caller.view.view_id), (x,))

    def _target(self, out: Any, like: Source, shape: tuple[int, ...]) -> Destination:
        """Where the result goes. With `out` the operation writes to a buffer beside it, copied once at the end."""
        return allocate(like, shape) if out is None else destination(out, like, shape)

    async def _run(self, call: Call, target: Destination, timeout: float | None) -> Any:
        return self._deliver(target, await self._caller.collective(call, group=self._id, timeout=timeout))

    def _deliver(self, target: Destination, seq: int) -> Any:
        """Results of these collectives are equal on all ranks: their digest goes into the step's vote."""
        self._caller.record(self._id, seq, xxhash.xxh3_128_digest(memory(target.flat)))
        return target.commit()


def _shape(like: Source) -> str:
    return f"({','.join(map(str, like.shape))})"
