"""The public collectives: signatures and what they mean. The operations themselves are in the modules beside this one.

Every operation starts when it is called and gives a `Handle`; awaiting that gives the result. Results are of the kind
that was given, numpy or torch. Unless `out` is given the result is a new tensor; an aborted call leaves inputs and
`out` untouched. Inputs must not change until the operation has ended.

All ranks of a group must call the same collectives of it in the same order; what they call is compared before any
payload is used. (`send` and `recv` concern two ranks and are counted for each pair apart.) Operations of different
groups are independent of each other: quicoll.collectives.subgroups says what that asks of their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quicoll.checks import MAX_NAME, whole
from quicoll.collectives.base import GroupView, TensorsT, TensorT
from quicoll.collectives.gathered import GatheredAllReduce
from quicoll.collectives.handle import Handle
from quicoll.collectives.movements import AllToAll, Barrier, Broadcast, Gather, Scatter
from quicoll.collectives.objects import AllGatherObject, BroadcastObject
from quicoll.collectives.point_to_point import PointToPoint, Receive, Send, channel_id, checked_tag
from quicoll.collectives.reductions import AllReduce, Reduce, ReduceOrder, ReduceScatter, all_reduce_again
from quicoll.collectives.shards import Leaves, Shards
from quicoll.collectives.split import Split
from quicoll.collectives.subgroups import MAX_DEPTH, WORLD, Scope, is_derived
from quicoll.engine.calls import site_numbers
from quicoll.errors import LocalError
from quicoll.numerics.canonical_order import leaves_of
from quicoll.numerics.codecs import codec_of

if TYPE_CHECKING:
    import asyncio

    from quicoll.collectives.context import CallContext, Pending
    from quicoll.collectives.operation import Operation
    from quicoll.membership.view import View
    from quicoll.numerics.codecs import WireFormat
    from quicoll.numerics.reduce import Precision, ReduceOp
    from quicoll.plan.schedule import AlgorithmName

__all__ = ["Group", "ThreadGroup"]

T = TypeVar("T")


class Group:
    """Ranks that work together. `job.group` has all of the job's present view, and follows it from view to view; a
    sub-group, made by `split`, belongs to the view in which it was made.

    Every collective raises LocalError by the call itself where its arguments cannot be; then nothing was sent. The
    await of its handle raises Mismatch (the ranks called different operations), PeerError (a rank was lost or is late),
    Corrupted (bytes changed on the way, after all resends) or Partitioned (this rank is cut off). After these the view
    is dead, also for ranks that are in no group with the failed one: leave the step, and begin it again. Ranks in
    errors are ranks of the view.
    """

    def __init__(self, context: CallContext, scope: Scope = WORLD) -> None:
        self._context = context
        self._scope = scope
        self._seen: tuple[View, GroupView] | None = None  # the view that `_here` has last been asked in, and its answer

    def __repr__(self) -> str:
        return f"<Group {self.name or 'of all'} rank {self.rank} of {self.world_size}>"

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""
        return self._context.rank if self._scope.ranks is None else self._scope.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self._context.world_size if self._scope.ranks is None else len(self._scope.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks, by their number in it, as ranks of the view: rank k of the group is `ranks[k]` there."""
        return tuple(range(self._context.world_size)) if self._scope.ranks is None else self._scope.ranks

    @property
    def name(self) -> str:
        """The splits that led to a sub-group, "number:color", joined by "/"; "" for the group of all ranks. Operations
        of a sub-group are named after it: "all_reduce#3@0:1"."""
        return self._scope.name

    @property
    def stale(self) -> bool:
        """True once the present view is another one than that of the group, which then has to be split anew."""
        return self._scope.view_id not in (None, self._context.view.view_id)

    def shards(self, total: int) -> Shards:
        """Divide `total` logical shards between the ranks of the present view: contiguous, by rank, balanced.

        Args:
            total: How many shards there are on all ranks, from 1 to 2**31.
        Returns:
            The shards of this rank.
        Raises:
            LocalError: There cannot be so many, or the group belongs to another view.
        """
        total = whole(total, "the number of shards")
        if not 1 <= total <= 1 << 31:
            raise LocalError(f"there must be at least one shard and at most 2**31, not {total}")
        here = self._here
        mine = leaves_of(here.rank, here.world_size, total)
        return Shards(total, mine.start, len(mine), here.view_id)

    # -- collectives that compute --------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: TensorsT | Leaves[TensorsT],
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        reduce_order: ReduceOrder = "canonical",
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        wire: WireFormat | None = None,
        residual: TensorsT | Leaves[TensorsT] | None = None,
        timeout: float | None = None,
    ) -> Handle[TensorsT]:
        """Reduce tensors across the group; every rank gets the result.

        The result's bits depend on the leaves in their order and on nothing else: not on timing, algorithm, chunk size
        or world size (`quicoll.numerics.canonical_order` has the tree by which they are combined). Cost of "direct":
        each rank sends and receives 2 (p - 1) / p * x.nbytes for one leaf per rank.

        Args:
            x: A tensor (one leaf per rank), a list of tensors of one dtype (one operation for all of them, with the
                bits of a call for each), or `Leaves` of either. Equal shapes and dtype on all ranks. A numpy scalar is
                a 0-dim array. No gradient goes through an operation: in all of them, a tensor that requires grad is
                refused, as x and as out, unless the call is made under torch.no_grad().
            op: "sum", "avg", "min", "max", "product", "band", "bor" or "bxor". "avg" divides by the number of leaves,
                once, at the end.
            out: A tensor, or a list of tensors for a list, that the result is written to once the operation has
                succeeded. May be x. One contiguous tensor of 1 MiB or more that shares no memory with x is written as
                the result comes: leave it alone until the handle was awaited, and count on nothing in it after a
                failure.
            reduce_order: "canonical", as said; or "ring", the classic ring (Patarasuk & Yuan 2009), whose bits depend
                on the world size too, and for a list on where its tensors lie in it.
            algorithm: How the canonical order is carried out; the bits are the same. "direct": two delays and the
                bytes of a ring. "tree": few messages for each rank. "hierarchical": crosses the way between two sites
                (`site=` of `quicoll.join`) once. "exchange": one delay, and p - 1 times the bytes. "local": through
                the memory of the ranks' host. "auto": that where all ranks share one; else the cheapest by the cost
                model and what the links have measured, which the ranks agree on once in a view; the first such call
                waits one delay more. docs/collectives.md has a table.
            precision: "default" accumulates float16, bfloat16 and float32 in float32; "float64" in float64. Rounded
                once. "exact": see `exact`.
            exact: Give the sum or average of the leaves as real numbers, rounded once (`quicoll.numerics.exact`). The
                same as precision="exact". At most 2**28 leaves; not for a product of floats or reduce_order="ring".
            wire: None, or what leaves and result travel as: "bfloat16" (for float32, float64 and complex), "int8" (one
                scale for 256 numbers) or "int4" (one for 64; both for float16, bfloat16, float32 and complex64), or
                "topk:1/n" or "topk-2bit:1/n", n from 2 to 4096, of which more below. Each leaf x is replaced by
                its decoded self C(x) on every rank, its own too, and the result is C(op of the C(x)): the same bits on
                all ranks. So there are two roundings to the wire format, of each leaf and of the result; what lies
                between is the accumulator's. Of float64 tensors, and with precision="float64", leaves are rounded to
                bfloat16, summed in float64, and the sum is rounded to bfloat16: a float64 result has 8 bits of
                precision. `quicoll.numerics.codecs` has the bounds of the error. Not for reduce_order="ring".
                "topk:1/64": of each 4096 numbers of a leaf the 64 of the largest magnitude, as bfloat16; the others
                count as zeros. "topk-2bit:1/16": the 256 largest, each a sign and one of two
                sizes. The result is not encoded again: all leaves go to all ranks, by "direct", "hierarchical"
                or "local". For sums and averages of float32, float64, bfloat16 and complex numbers, with a residual.
            residual: With `wire`, what was lost of this leaf so far, to be sent along (`quicoll.numerics.feedback`):
                x + residual is encoded, and residual becomes what that loses, or 0 where it is not finite. As x is: a
                tensor, a list, or `Leaves` of the same shards; of x's shapes and dtype, in memory apart from x, from
                out, and from all that an operation under way is given. Begin with zeros. It is written when the result
                is awaited; inside a step when that is committed, as by a callback of `Step.on_commit` that was
                registered by this call, so an aborted step leaves it as it was. Then it is used once in a step.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for a result of x's shape and dtype, a list for a list.
        Raises:
            LocalError: x or an option is invalid. Raised by the call; nothing was sent.
        """
        shape = getattr(x, "shape", None)
        plain = (
            shape is not None  # no list, no leaves
            and wire is None
            and residual is None
            and algorithm == "auto"
            and not exact
            and precision == "default"
            and reduce_order == "canonical"
        )
        seen = self._seen
        here = self._here if seen is None or seen[0] is not self._context.view else seen[1]
        if plain:
            again = all_reduce_again(here, x, shape, op, out)
            if again is not None:
                return self._start(again, timeout)
        made = GatheredAllReduce if wire is not None and codec_of(wire).gathered else AllReduce
        operation = made(
            here,
            x,
            op=op,
            out=out,
            reduce_order=reduce_order,
            algorithm=algorithm,
            precision=precision,
            exact=exact,
            wire=wire,
            residual=residual,
        )
        if plain:
            operation.remember(op)
        return self._start(operation, timeout)

    def reduce(
        self,
        x: TensorsT | Leaves[TensorsT],
        *,
        root: int = 0,
        op: str | ReduceOp = "sum",
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
    ) -> Handle[TensorsT | None]:
        """Reduce tensors across the group; the root gets the result, with the bits that `all_reduce` would give.

        Cost of "direct": each rank sends x.nbytes at most once; the root receives it twice at most, whatever p.

        Args:
            x: A tensor, a list of tensors of one dtype, or `Leaves` of either. Equal shapes and dtype on all ranks.
            root: The rank that gets the result.
            op: As for `all_reduce`.
            out: What the result is written to, as for `all_reduce`; looked at on the root only.
            algorithm: As for `all_reduce`, but for "exchange".
            precision: As for `all_reduce`.
            exact: As for `all_reduce`.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for a result of x's shape and dtype on the root, None elsewhere.
        Raises:
            LocalError: x or an option is invalid. Raised by the call; nothing was sent.
        """
        operation = Reduce(
            self._here, x, root=root, op=op, out=out, algorithm=algorithm, precision=precision, exact=exact
        )
        return self._start(operation, timeout)

    def reduce_scatter(
        self,
        x: TensorT | Leaves[TensorT],
        *,
        op: str | ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
    ) -> Handle[TensorT]:
        """Reduce tensors across the group; rank r gets its rows of the result, with `all_reduce`'s bits.

        Cost of "direct": each rank sends and receives (p - 1) / p * x.nbytes for one leaf per rank; one delay.

        Args:
            x: A tensor (n, ...) or `Leaves` of such. Equal shape and dtype on all ranks.
            op: As for `all_reduce`.
            counts: Rows for each rank, n in all, equal on all ranks; by default ceil(n / p) each, so that the last
                ones may get fewer or none.
            out: A tensor that the result is written to, as for `all_reduce`.
            algorithm: As for `all_reduce`, but for "exchange".
            precision: As for `all_reduce`.
            exact: As for `all_reduce`.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for a tensor (counts[rank], ...).
        Raises:
            LocalError: x or an option is invalid. Raised by the call; nothing was sent.
        """
        operation = ReduceScatter(
            self._here, x, op=op, counts=counts, out=out, algorithm=algorithm, precision=precision, exact=exact
        )
        return self._start(operation, timeout)

    # -- collectives that move -----------------------------------------------------------------------------------

    def broadcast(
        self,
        x: TensorsT,
        *,
        root: int = 0,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Handle[TensorsT]:
        """Give every rank root's tensor.

        Cost: log2(p) rounds; each rank receives x.nbytes once.

        Args:
            x: On the root the tensor, or a list of tensors of one dtype, which travel as one. Elsewhere the same
                shapes and dtype, whose values are not used.
            root: The rank whose tensor it is.
            out: A tensor, or a list of tensors for a list, that the result is written to.
            algorithm: "tree": a binomial tree over the ranks. "hierarchical": to each remote site (`site=` of
                `quicoll.join`) once and from there to its ranks, over trees. "auto": the cheaper one, as for
                `all_reduce`; "tree" where there is one site.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for a result of x's shape and dtype, a list for a list.
        Raises:
            LocalError: x or an option is invalid. Raised by the call; nothing was sent.
        """
        return self._start(Broadcast(self._here, x, root=root, out=out, algorithm=algorithm), timeout)

    def all_gather(
        self,
        x: TensorT,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Handle[TensorT]:
        """Concatenate all ranks' tensors along the first dimension, by rank; every rank gets the whole.

        Cost: each rank sends its own tensor to all others. Without `counts` it first learns the others' n, which takes
        one delay more.

        Args:
            x: A tensor (n, ...), of equal dtype and trailing shape on all ranks; n may differ and may be 0. A 0-dim
                tensor counts as (1,).
            counts: The n of each rank, by rank, where all ranks know them; the same on all. None: they are asked.
            out: A tensor that the result is written to.
            algorithm: "direct": as said. "hierarchical": each tensor goes to each remote site (`site=` of
                `quicoll.join`) once and from there to its ranks. "auto": the cheaper one, as for `all_reduce`, by the
                n of all ranks.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for a tensor (sum of n, ...).
        Raises:
            LocalError: x or an option is invalid. Raised by the call; nothing was sent.
        """
        return self._start(Gather(self._here, x, counts=counts, out=out, algorithm=algorithm), timeout)

    def gather(
        self,
        x: TensorT,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Handle[TensorT | None]:
        """Concatenate all ranks' tensors along the first dimension, by rank, on the root.

        Cost: each rank sends its own tensor to the root; without `counts` one delay after the ranks have learned each
        other's n.

        Args:
            x: As for `all_gather`.
            root: The rank that gets the result.
            counts: As for `all_gather`.
            out: What the result is written to; looked at on the root only.
            algorithm: "direct": as said. "hierarchical": small parts of a remote site are put together there and come
                as one message. "auto": as for `all_gather`.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for a tensor (sum of n, ...) on the root, None elsewhere.
        Raises:
            LocalError: x or an option is invalid. Raised by the call; nothing was sent.
        """
        here = self._here
        root = here.checked("root", root)  # here, because None would make an all_gather of it
        return self._start(Gather(here, x, root=root, counts=counts, out=out, algorithm=algorithm), timeout)

    def scatter(
        self,
        x: TensorT,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Handle[TensorT]:
        """Give rank r its rows of the root's tensor.

        Cost: the root sends each part once, one delay after the ranks have learned the counts.

        Args:
            x: On the root a tensor (n, ...). Elsewhere one of the same dtype and trailing shape, whose values and rows
                are not used.
            root: The rank whose rows they are.
            counts: Rows for each rank, n in all, looked at on the root only; by default ceil(n / p) each, so that the
                last ones may get fewer or none.
            out: A tensor that the result is written to.
            algorithm: "direct": as said. "hierarchical": small parts for a remote site go there as one message.
                "auto": as for `all_gather`.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for a tensor (counts[rank], ...).
        Raises:
            LocalError: x or an option is invalid. Raised by the call; nothing was sent.
        """
        return self._start(Scatter(self._here, x, root=root, counts=counts, out=out, algorithm=algorithm), timeout)

    def all_to_all(
        self, x: TensorsT, *, counts: Sequence[int] | None = None, out: Any = None, timeout: float | None = None
    ) -> Handle[TensorsT]:
        """Send part r of this rank's rows to rank r, and get a part of every rank's, by rank.

        Cost: each rank sends and receives its rows once, in p - 1 rounds of pairs, one delay after the ranks have
        learned each other's counts.

        Args:
            x: A tensor (n, ...), or a list of one such tensor for each rank. Rows may differ from pair to pair and be
                none; dtype and trailing shape are equal on all ranks.
            counts: For a tensor, how many of its rows go to each rank; by default ceil(n / p), so that the last ones
                may get fewer or none.
            out: For a tensor, what the result is written to.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for the rows that came: for a tensor in one, for a list a list by rank.
        Raises:
            LocalError: x or an option is invalid. Raised by the call; nothing was sent.
        """
        return self._start(AllToAll(self._here, x, counts=counts, out=out), timeout)

    def send(self, x: TensorsT, *, to: int, tag: int = 0, timeout: float | None = None) -> Handle[None]:
        """Send a tensor to a rank, which has to call `recv` for it.

        The k-th send from one rank to another with a tag meets the k-th recv with it; other ranks are not concerned.
        Cost: x.nbytes, one delay.

        Args:
            x: A tensor, or a list of tensors of one dtype.
            to: The rank that receives it.
            tag: 0 to 2**62 - 1. Each is a row of its own: what has one tag does not wait for what has another.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it until all of x has arrived.
        Raises:
            LocalError: x, `to` or the tag is invalid. Raised by the call; nothing was sent.
        """
        return self._meet(Send(self._here, x, to=to, tag=tag), timeout)

    def recv(
        self, like: TensorsT, *, source: int, out: Any = None, tag: int = 0, timeout: float | None = None
    ) -> Handle[TensorsT]:
        """Receive what a rank sends with `send`.

        Args:
            like: A tensor, or a list of tensors, of the shapes and dtype that are sent; its values are not used. Other
                shapes than those sent are a Mismatch on both ranks.
            source: The rank that sends it.
            out: A tensor, or a list of tensors for a list, that the result is written to.
            tag: As `send` has it.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for a result of like's shape and dtype, a list for a list.
        Raises:
            LocalError: like or an option is invalid. Raised by the call; nothing was sent.
        """
        return self._meet(Receive(self._here, like, source=source, out=out, tag=tag), timeout)

    def next_sender(self, *, tag: int = 0, timeout: float | None = None) -> asyncio.Future[int]:
        """Wait until a rank sends to this one with a tag, and nobody receives it; `recv` from that rank follows.

        Of several the one whose call came first is given, which no seed and no order of ranks decides: what a program
        makes of it differs from run to run. Ask again only after the `recv`. Cost: nothing is sent.

        Args:
            tag: As `send` has it.
            timeout: Seconds to wait; None takes the job's. As with an operation, the view ends where nobody sends.
        Returns:
            A future of the rank, of this group.
        Raises:
            LocalError: The tag is invalid, or the group belongs to another view. Raised by the call.
        """
        return self._context.watch(self._here, self._channels(tag), timeout)

    def broadcast_object(self, value: Any = None, *, root: int = 0, timeout: float | None = None) -> Handle[Any]:
        """Give every rank what msgpack makes of root's value. For metadata; nothing that arrives is executed.

        Cost: as `broadcast`, one delay later.

        Args:
            value: None, a number, str, bytes, or a list or dict of these; at most 16 MiB encoded. Looked at on the root
                only. Tuples arrive as lists.
            root: The rank whose value it is.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for the value.
        Raises:
            LocalError: msgpack cannot carry the value, or it is too large. Raised by the call; nothing was sent.
        """
        return self._start(BroadcastObject(self._here, value, root=root), timeout)

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> Handle[list[Any]]:
        """Give every rank the list of all ranks' values.

        Args:
            value: As for `broadcast_object`.
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for the values, by rank.
        Raises:
            LocalError: msgpack cannot carry the value, or it is too large. Raised by the call; nothing was sent.
        """
        return self._start(AllGatherObject(self._here, value), timeout)

    def barrier(self, *, timeout: float | None = None) -> Handle[None]:
        """Wait until every rank is here.

        Cost: one delay, no payload: each rank tells all others that it has called.

        Args:
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it.
        Raises:
            LocalError: The group belongs to another view. Raised by the call; nothing was sent.
        """
        return self._start(Barrier(self._here), timeout)

    # -- sub-groups ----------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None) -> Handle[Group | None]:
        """Divide the group: the ranks that give the same color are a sub-group. A collective of all its ranks.

        A sub-group is good for the present view alone: split again in the next one (`stale` says when). It can be split
        again. Cost: one delay, no payload. Split once in a view and keep the result: each split's names are kept until
        the view ends. A step may use at most 256 sub-groups of a rank.

        Args:
            color: 0 or above; None: in no sub-group.
            key: Orders the ranks of a sub-group; equal keys, by their rank in this group (MPI 4.1, 7.4.2).
            timeout: Seconds for the whole operation; None takes the job's.
        Returns:
            A handle; await it for the sub-group of this rank, None without a color.
        Raises:
            LocalError: color or key is invalid. Raised by the call; nothing was sent.
        """
        return self._split(color, key, timeout, self._divided)

    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        """Make the sub-group of ranks that its members name alike. They alone call this; nothing is sent.

        It is as good as one of `split`, and like it for the present view alone. Where members name different ranks, the
        first operation of the sub-group meets its deadline.

        Args:
            ranks: Of this group, this rank among them; their order is that of the sub-group.
            name: Tells it from other sub-groups of the same ranks: 1 to 128 printable characters, none of them / or :.
        Returns:
            The sub-group.
        Raises:
            LocalError: The ranks or the name cannot be, or the group belongs to another view.
        """
        return self._divided(self._named(ranks, name))

    def for_threads(self) -> ThreadGroup:
        """Return this group for callers without an event loop; `quicoll.blocking.Group` is their way to use it."""
        return ThreadGroup(self._context, self._scope)

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _here(self) -> GroupView:
        """The group in the present view. Raises LocalError when it belongs to another one."""
        view = self._context.view
        if self._seen is not None and self._seen[0] is view:
            return self._seen[1]
        scope = self._scope
        if scope.view_id is not None and scope.view_id != view.view_id:
            raise LocalError(
                f"group {scope.name} was made in view {scope.view_id}, the view is {view.view_id}: its ranks are not "
                "those of now; split again in every view"
            )
        sites = site_numbers(view, scope.ranks)
        context = self._context
        near = (
            (scope.group_id == WORLD.group_id or is_derived(scope.group_id))
            and len(self.ranks) > 1
            and context.rank in self.ranks
            and context.near(view.view_id) is not None
        )
        here = GroupView(
            view.view_id, scope, self.rank, self.ranks, sites, context.config.chunk_bytes, context.recycler, near
        )
        self._seen = (view, here)
        return here

    def _start(self, operation: Operation[T], timeout: float | None) -> Handle[T]:
        return Handle(self._context.issue(operation, timeout))

    def _meet(self, operation: PointToPoint, timeout: float | None) -> Handle[Any]:
        self._context.claim(operation.group_id, operation.channel_name)
        return self._start(operation, timeout)

    def _split(
        self, color: int | None, key: int, timeout: float | None, made: Callable[[Scope], T]
    ) -> Handle[T | None]:
        """made: makes the sub-group, of the kind that is wanted."""
        context, here = self._context, self._here

        def claimed(scope: Scope) -> T:
            if scope.view_id == context.view.view_id:
                context.claim(scope.group_id, scope.name)
            return made(scope)

        with context.lock:  # the number belongs to the place among the group's operations
            number = context.next_split(here.scope.group_id)
            handle = self._start(Split(here, color, key, number=number, made=claimed), timeout)
            context.split_issued(here.scope.group_id)
        return handle

    def _named(self, ranks: Sequence[int], name: str) -> Scope:
        context, here = self._context, self._here
        members = [here.checked("a rank of a sub-group", rank) for rank in ranks]
        if here.rank not in members or len({*members}) != len(members):
            raise LocalError(f"a sub-group has ranks that differ, and this one ({here.rank}) among them: {members}")
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or "/" in name or ":" in name:
            raise LocalError(f"a sub-group has a name of 1 to {MAX_NAME} characters, none of them / or :, not {name!r}")
        if len(here.scope.name) > MAX_NAME * MAX_DEPTH:
            raise LocalError(f"sub-groups nest at most {MAX_DEPTH} deep")
        seen = tuple(here.ranks[rank] for rank in members)
        scope = here.scope.named(name, seen, members.index(here.rank), view_id=here.view_id)
        with context.lock:
            context.claim(scope.group_id, scope.name)
        context.divided(here.view_id)
        return scope

    def _channels(self, tag: int) -> dict[int, int]:
        """The other ranks, by the ids of what they send to this one with a tag."""
        here, tag = self._here, checked_tag(tag)
        return {channel_id(here, rank, here.rank, tag): rank for rank in range(here.world_size) if rank != here.rank}

    def _divided(self, scope: Scope) -> Group:
        """The sub-group that a split gives: of the kind that was split."""
        return Group(self._context, scope)


class ThreadGroup(Group):
    """The same group, for threads without an event loop. Its handles are not for awaiting: quicoll.blocking waits."""

    def split_into(
        self, made: Callable[[ThreadGroup], T], color: int | None, key: int, *, timeout: float | None
    ) -> Handle[T | None]:
        """Split, as `split` does, and give what `made` makes of the sub-group."""
        return self._split(color, key, timeout, lambda scope: made(ThreadGroup(self._context, scope)))

    def wait_for_sender(self, *, tag: int = 0, timeout: float | None = None) -> int:
        """As `next_sender`, and block this thread until there is an answer."""
        return self._context.watch_from_thread(self._here, self._channels(tag), timeout)

    def subgroup(self, ranks: Sequence[int], name: str) -> ThreadGroup:
        """See `Group.subgroup`."""
        return self._divided(self._named(ranks, name))

    def all_reduce_again(self, x: Any, elements: int, *, op: str, timeout: float) -> Pending[Any] | None:
        """As `all_reduce` of a tensor's elements, in order and of one dimension, where that call was made before.

        Args:
            x: Of any shape and strides.
            elements: How many it has.
            op: As for `all_reduce`.
            timeout: Seconds.
        Returns:
            The operation under way; None where it has to be called by `all_reduce`, and nothing was done.
        """
        seen = self._seen
        here = self._here if seen is None or seen[0] is not self._context.view else seen[1]
        again = all_reduce_again(here, x, (elements,), op)
        return None if again is None else self._context.issue(again, timeout, threaded=True)

    def _start(self, operation: Operation[T], timeout: float | None) -> Handle[T]:
        return Handle(self._context.issue(operation, timeout, threaded=True))

    def _divided(self, scope: Scope) -> ThreadGroup:
        return ThreadGroup(self._context, scope)
