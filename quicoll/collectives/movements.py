"""The collectives that move elements as they are, and objects, and the barrier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quicoll.collectives.base import MAX_BYTES, Issuer, rows_given, rows_text
from quicoll.collectives.subgroups import derived_id
from quicoll.engine.communicator import Call, Known
from quicoll.engine.executor import Work
from quicoll.errors import LocalError, PeerError
from quicoll.numerics.buffers import destination, memory, source
from quicoll.numerics.bundle import Bundle, Joined, Results, bundle, results, shape_text
from quicoll.numerics.reduce import ReduceOp
from quicoll.plan.schedule import Schedule, depends, move, require_algorithm

if TYPE_CHECKING:
    from quicoll import plan
    from quicoll.collectives.handle import Handle
    from quicoll.plan.cost import NetworkModel
    from quicoll.plan.schedule import AlgorithmName

__all__ = ["MAX_OBJECT_BYTES", "Moving"]

MAX_OBJECT_BYTES = 16 << 20  # of one object, encoded


class Moving(Issuer):
    """Moves. Bits are copied; tensors of every dtype and kind are taken."""

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Handle[Any]:
        """Give every rank root's tensor.

        x: on the root the tensor, or a list of tensors of one dtype, which travel as one; elsewhere the same shapes and
        dtype, whose values are not used.
        algorithm: "tree", a binomial tree over the ranks; "hierarchical", to each remote site (`site=` of
        `quicoll.join`) once and from there to its ranks, over trees; "auto" takes the cheaper one as `all_reduce` does,
        and "tree" where there is one site. The bits are the same.
        Cost: log2(p) rounds; each rank receives x.nbytes once.
        """
        require_algorithm("broadcast", algorithm)
        _demand_model("broadcast", x, "of the same shape and dtype")
        like = bundle(x)
        root = self._rank("root", root)
        target = results(out, like)
        schedule = self._schedule("broadcast", like.dtype.itemsize, root=root, elements=like.elements)
        inputs, rank = [like.flat] if self.rank == root else [], self.rank
        signature = f"broadcast/{algorithm} {schedule.text} {like.text}"

        def work(taken: str) -> Work:
            return _moved(schedule.plan_of(rank, taken), like, inputs, target)

        if schedule.settled(algorithm) == "auto":
            call = Call(
                "broadcast", signature, lambda known: work(schedule.taken(algorithm, known.network)), measures=True
            )
        else:
            ready = work(schedule.settled(algorithm))  # now: what cannot be planned is refused before anything is sent
            call = Call("broadcast", signature, lambda _: ready)
        return self._start(
            call,
            target.commit,
            timeout,
            op=f"broadcast {like.brief} root={root}",
            inputs=[(root, like.flat)] if self.rank == root else (),
            equal=lambda: target.flat,
        )

    def all_gather(
        self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto", timeout: float | None = None
    ) -> Handle[Any]:
        """Concatenate all ranks' tensors along the first dimension, by rank; every rank gets the whole.

        x: (n, ...) with equal dtype and trailing shape; n may differ and may be 0. A 0-dim tensor counts as (1,).
        Result: (sum of n, ...). Cost: each rank sends its own tensor to all others; it first learns the others' n,
        which takes one delay more than the payload.
        algorithm: "direct", as said; "hierarchical", each tensor goes to each remote site (`site=` of `quicoll.join`)
        once and from there to its ranks; "auto" takes the cheaper one as `all_reduce` does, by the n of all ranks.
        """
        return self._gathered("all_gather", x, None, out, algorithm, timeout)

    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Handle[Any]:
        """Concatenate all ranks' tensors along the first dimension, by rank, on the root; the others get None.

        x: as for `all_gather`. out: looked at on the root only. Cost: each rank sends its own tensor to the root, one
        delay after the ranks have learned each other's n. algorithm: "direct", as said; "hierarchical": small parts of
        a remote site are put together there and come as one message; "auto": as for `all_gather`.
        """
        root = self._rank("root", root)
        return self._gathered("gather", x, root, out if self.rank == root else None, algorithm, timeout)

    def scatter(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Handle[Any]:
        """Give rank r its rows of the root's tensor.

        x: on the root (n, ...); elsewhere a tensor of the same dtype and trailing shape, whose values and rows are not
        used. counts: rows for each rank, n in all, looked at on the root only; by default ceil(n / p) each, so that the
        last ones may get fewer or none. Result: (counts[rank], ...).
        Cost: the root sends each part once, one delay after the ranks have learned the counts. algorithm: "direct", as
        said; "hierarchical": small parts for a remote site go there as one message; "auto": as for `all_gather`.
        """
        require_algorithm("scatter", algorithm)
        _demand_model("scatter", x, "of the same dtype and trailing shape")
        root = self._rank("root", root)
        like = source(x)
        if not like.shape:
            raise LocalError("scatter divides rows; a 0-dim tensor has none")
        rest = like.shape[1:]
        width = math.prod(rest)
        mine = rows_given(counts, like.shape[0], self.world_size) if self.rank == root else ()
        if out is not None:
            destination(out, like, (*_first_of(out), *rest))
        holder: list[Results] = []

        def make(known: Known) -> Work:
            rows = known.counts[root] or ()
            if len(rows) != self.world_size:
                raise PeerError(f"divides its rows between {len(rows)} ranks", rank=self._view_rank(root))
            _demand_room(sum(rows) * width * like.dtype.itemsize, self._view_rank(root))
            target = results(out, Bundle((like,), many=False), (rows[self.rank], *rest))
            holder.append(target)
            parts = tuple(count * width for count in rows)
            schedule = self._plan("scatter", like.dtype.itemsize, algorithm, known.network, root=root, counts=parts)
            inputs = [like.flat] if self.rank == root else []
            return Work(schedule, like.dtype, like.dtype, ReduceOp.BOR, inputs, target.flat)

        how = f"dtype={like.dtype} trailing={_trailing(rest)} chunk_bytes={self._chunk_bytes}"
        signature = f"scatter/{algorithm} root={root} {how}"
        call = Call("scatter", signature, make, counts=mine, gathers=True, measures=self._depends("scatter", algorithm))
        return self._start(
            call,
            lambda: holder[0].commit(),
            timeout,
            op=f"scatter {like.dtype} {shape_text(('n', *rest))} root={root}",
            terms=rows_text(mine),
            inputs=[(root, like.flat)] if self.rank == root else (),
            own=lambda: holder[0].flat,
        )

    def all_to_all(
        self, x: Any, *, counts: Sequence[int] | None = None, out: Any = None, timeout: float | None = None
    ) -> Handle[Any]:
        """Send part r of this rank's rows to rank r, and get a part of every rank's, by rank.

        x: a tensor (n, ...) of which counts[r] rows go to rank r (by default ceil(n / p) each, so that the last ones
        may get fewer or none), or a list of one tensor for each rank. Rows may differ from pair to pair and be none;
        dtype and trailing shape are equal on all ranks.
        Result: for a tensor the rows that came, in one; for a list, a list of what came from each rank. out: for a
        tensor only.
        Cost: each rank sends and receives its rows once, in p - 1 rounds of pairs, one delay after the ranks have
        learned each other's counts.
        """
        world = self.world_size
        parts = bundle(x)
        if parts.many and (counts is not None or out is not None):
            raise LocalError("a list of parts says how many rows go where: leave counts and out out")
        if parts.many and len(parts.sources) != world:
            raise LocalError(f"{len(parts.sources)} parts for {world} ranks")
        rest = parts.shapes[0][1:]
        if any(not shape or shape[1:] != rest for shape in parts.shapes):
            raise LocalError("all_to_all takes parts with rows, (n, ...), that differ in n alone")
        given = tuple(shape[0] for shape in parts.shapes)
        mine = given if parts.many else rows_given(counts, given[0], world)
        width = math.prod(rest)
        first = parts.sources[0]
        if out is not None:
            destination(out, first, (*_first_of(out), *rest))
        holder: list[tuple[Results, list[int]]] = []

        def make(known: Known) -> Work:
            table = [row or () for row in known.counts]
            for rank, row in enumerate(table):
                if len(row) != world:
                    raise PeerError(f"divides its rows between {len(row)} ranks", rank=self._view_rank(rank))
                _demand_room(sum(row) * width * parts.dtype.itemsize, self._view_rank(rank))
            coming = [row[self.rank] for row in table]
            target = results(out, Bundle((first,), many=False), (sum(coming), *rest))
            holder.append((target, coming))
            elements = tuple(tuple(count * width for count in row) for row in table)
            schedule = self._plan("all_to_all", parts.dtype.itemsize, counts=elements)
            return _moved(schedule, parts, [parts.flat], target)

        def deliver() -> Any:
            target, coming = holder[0]
            value = target.commit()
            ends = [0, *accumulate(coming)]
            return [value[a:b] for a, b in pairwise(ends)] if parts.many else value

        signature = f"all_to_all dtype={parts.dtype} trailing={_trailing(rest)} chunk_bytes={self._chunk_bytes}"
        return self._start(
            Call("all_to_all", signature, make, counts=mine, gathers=True),
            deliver,
            timeout,
            op=f"all_to_all {parts.dtype} {shape_text(('n', *rest))}",
            terms=rows_text(mine),
            inputs=[(self.rank, parts.flat)],
            own=lambda: holder[0][0].flat,
        )

    def send(self, x: Any, *, to: int, timeout: float | None = None) -> Handle[None]:
        """Send a tensor, or a list of tensors of one dtype, to rank `to`, which has to call `recv` for it.

        The k-th send from one rank to another meets the k-th recv; other ranks are not concerned. Ends when all of it
        has arrived there. Cost: x.nbytes, one delay.
        """
        like = bundle(x)
        return self._sent(like, self.rank, to, None, timeout)

    def recv(self, like: Any, *, source: int, out: Any = None, timeout: float | None = None) -> Handle[Any]:
        """Receive from rank `source` what it sends with `send`.

        like: a tensor (or list) of the shapes and dtype that are sent, whose values are not used; other shapes than
        those sent are a Mismatch at both.
        """
        given = bundle(like)
        return self._sent(given, source, self.rank, results(out, given), timeout)

    def broadcast_object(self, value: Any = None, *, root: int = 0, timeout: float | None = None) -> Handle[Any]:
        """Give every rank what msgpack makes of root's `value`: None, numbers, str, bytes, lists and dicts of them.

        For metadata: at most MAX_OBJECT_BYTES, encoded with msgspec; nothing that arrives is executed. `value` counts
        on the root only. Tuples arrive as lists. Cost: as `broadcast`, one delay later.
        """
        root = self._rank("root", root)
        data = _encoded(value) if self.rank == root else np.empty(0, np.uint8)
        holder: list[Any] = []

        def make(known: Known) -> Work:
            sizes = known.counts[root] or (-1,)
            if len(sizes) != 1 or not 0 <= sizes[0] <= MAX_OBJECT_BYTES:
                named = f"sends an object of {sizes} bytes; {MAX_OBJECT_BYTES} is the most"
                raise PeerError(named, rank=self._view_rank(root))
            like = bundle(data)
            target = results(None, like, (sizes[0],))
            holder.append(target.flat)
            schedule = self._plan("broadcast", 1, "auto", known.network, root=root, elements=sizes[0])
            return _moved(schedule, like, [like.flat] if self.rank == root else [], target)

        signature = f"broadcast_object root={root} chunk_bytes={self._chunk_bytes}"
        measures = self._depends("broadcast", "auto")
        call = Call("broadcast_object", signature, make, counts=(data.size,), gathers=True, measures=measures)
        return self._start(
            call,
            lambda: _decoded(holder[0], self._view_rank(root)),
            timeout,
            op=f"broadcast_object root={root}",
            inputs=[(root, data)] if self.rank == root else (),
            equal=lambda: holder[0],
        )

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> Handle[list[Any]]:
        """Give every rank the list of all ranks' values, by rank. What a value may be: see `broadcast_object`."""
        data = _encoded(value)
        holder: list[tuple[Any, list[int]]] = []

        def make(known: Known) -> Work:
            sizes = [row[0] if row is not None and len(row) == 1 else -1 for row in known.counts]
            for rank, size in enumerate(sizes):
                if not 0 <= size <= MAX_OBJECT_BYTES:
                    named = f"sends an object of {size} bytes; {MAX_OBJECT_BYTES} is the most"
                    raise PeerError(named, rank=self._view_rank(rank))
            like = bundle(data)
            target = results(None, like, (sum(sizes),))
            holder.append((target.flat, sizes))
            schedule = self._plan("all_gather", 1, "auto", known.network, counts=tuple(sizes))
            return _moved(schedule, like, [like.flat], target)

        def deliver() -> list[Any]:
            flat, sizes = holder[0]
            ends = [0, *accumulate(sizes)]
            return [_decoded(flat[a:b], self._view_rank(rank)) for rank, (a, b) in enumerate(pairwise(ends))]

        signature = f"all_gather_object chunk_bytes={self._chunk_bytes}"
        measures = self._depends("all_gather", "auto")
        call = Call("all_gather_object", signature, make, counts=(data.size,), gathers=True, measures=measures)
        return self._start(
            call,
            deliver,
            timeout,
            op="all_gather_object",
            inputs=[(self.rank, data)],
            equal=lambda: holder[0][0],
        )

    def barrier(self, *, timeout: float | None = None) -> Handle[None]:
        """Wait until every rank is here. Dissemination barrier, ceil(log2 p) rounds of empty messages."""
        schedule = self._plan("barrier", 1)
        nothing = bundle(np.empty(0, np.uint8))
        work = _moved(schedule, nothing, [], results(None, nothing))
        return self._start(Call("barrier", schedule.signature, lambda _: work), lambda: None, timeout, op="barrier")

    # -- inside --------------------------------------------------------------------------------------------------

    def _schedule(self, name: str, itemsize: int, **sizes: Any) -> Schedule:
        """sizes: the planner's own arguments, in elements of `itemsize` bytes."""
        return move(
            name,
            itemsize,
            world=self.world_size,
            sizes=sizes,
            sites=self._sites,
            chunk_bytes=self._chunk_bytes,
        )

    def _plan(
        self, name: str, itemsize: int, algorithm: str = "auto", network: NetworkModel | None = None, /, **sizes: Any
    ) -> plan.Plan:
        """This rank's plan. network: the agreed one, where it depends on that."""
        schedule = self._schedule(name, itemsize, **sizes)
        return schedule.plan_of(self.rank, schedule.taken(algorithm, network))

    def _depends(self, name: str, algorithm: str) -> bool:
        return depends(name, algorithm, world=self.world_size, sites=self._sites)

    def _gathered(
        self, name: str, x: Any, root: int | None, out: Any, algorithm: str, timeout: float | None
    ) -> Handle[Any]:
        require_algorithm(name, algorithm)
        like = source(x)
        shape = like.shape or (1,)
        rest = shape[1:]
        width = math.prod(rest)
        holder: list[Results] = []
        receives = root is None or root == self.rank
        if out is not None:
            # All that can be checked before the others' sizes are known: the first dimension is `out`'s own.
            destination(out, like, (*_first_of(out), *rest))

        def make(known: Known) -> Work:
            rows = [row[0] if row is not None and len(row) == 1 else -1 for row in known.counts]
            for rank, count in enumerate(rows):
                if count < 0:
                    raise PeerError("does not say how many rows it has", rank=self._view_rank(rank))
                _demand_room(count * width * like.dtype.itemsize, self._view_rank(rank))
            whole = Bundle((like,), many=False)
            target = results(out, whole, (sum(rows), *rest)) if receives else results(None, whole, (0, *rest))
            holder.append(target)
            parts = tuple(count * width for count in rows)
            sizes = {"counts": parts} if root is None else {"root": root, "counts": parts}
            schedule = self._plan(name, like.dtype.itemsize, algorithm, known.network, **sizes)
            return Work(schedule, like.dtype, like.dtype, ReduceOp.BOR, [like.flat], target.flat)

        where = "" if root is None else f" root={root}"
        how = f"dtype={like.dtype} trailing={_trailing(rest)} chunk_bytes={self._chunk_bytes}"
        signature = f"{name}/{algorithm}{where} {how}"
        measures = self._depends(name, algorithm)
        call = Call(name, signature, make, counts=(shape[0],), gathers=True, measures=measures)
        deliver = (lambda: holder[0].commit()) if receives else (lambda: None)
        return self._start(
            call,
            deliver,
            timeout,
            op=f"{name} {like.dtype} {shape_text(('n', *rest))}{where}",
            inputs=[(self.rank, like.flat)],
            equal=(lambda: holder[0].flat) if root is None else None,
            own=(lambda: holder[0].flat) if receives else None,
        )

    def _sent(self, like: Bundle, sender: int, to: int, target: Results | None, timeout: float | None) -> Handle[Any]:
        sender, to = self._rank("source", sender), self._rank("to", to)
        if sender == to:
            raise LocalError(f"rank {sender} cannot send to itself")
        sizes = {"source": 0, "to": 1, "elements": like.elements}  # a world of two: the sender is 0
        pair = move("send", like.dtype.itemsize, world=2, sizes=sizes, sites=(0, 0), chunk_bytes=self._chunk_bytes)
        schedule = pair.plan_of(int(target is not None), "")
        place = results(None, bundle(np.empty(0, np.uint8))) if target is None else target
        work = _moved(schedule, like, [like.flat] if target is None else [], place)
        ranks = (self._view_rank(sender), self._view_rank(to))
        # Between two ranks one of them waits for the other as a matter of course: that is no straggler.
        call = Call("send", f"{schedule.signature} {like.text}", lambda _: work, ranks=ranks, watched=False)
        deliver = (lambda: None) if target is None else target.commit
        # Counted apart from the group's collectives, and from what goes between other ranks or the other way.
        channel = derived_id(self._scope.group_id, "send", sender, to)
        self._caller.claim(channel, f"{self._scope.name} send {sender} to {to}")
        return self._start(
            call,
            deliver,
            timeout,
            op=f"send {like.brief} from {sender} to {to}",
            inputs=[(sender, like.flat)] if target is None else (),
            own=None if target is None else lambda: target.flat,
            group=channel,
        )


def _moved(schedule: plan.Plan, like: Bundle, inputs: Sequence[np.ndarray[Any, Any] | Joined], target: Results) -> Work:
    return Work(schedule, like.dtype, like.dtype, ReduceOp.BOR, inputs, target.flat)


def _first_of(out: Any) -> tuple[int, ...]:
    return tuple(getattr(out, "shape", ()))[:1]


def _trailing(rest: tuple[int, ...]) -> str:
    return ",".join(map(str, rest)) or "-"


def _demand_model(name: str, x: Any, alike: str) -> None:
    """None is what MPI's bindings and torch take here."""
    if x is None:
        raise LocalError(f"{name} takes a tensor on every rank: elsewhere than on the root one {alike}, not None")


def _demand_room(nbytes: int, rank: int) -> None:
    """What a peer names is bounded before memory is taken for it."""
    if nbytes > MAX_BYTES:
        raise PeerError(f"announces {nbytes} bytes; {MAX_BYTES} is the most", rank=rank)


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
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PeerError(f"sent a malformed object: {error}", rank=rank) from error
