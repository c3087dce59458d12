"""The collectives that compute: all_reduce, reduce, reduce_scatter. Orders and bits: `quicoll.numerics.reduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from quicoll.collectives.base import rows_asked, rows_given, rows_text
from quicoll.collectives.operation import Operation, flattened
from quicoll.collectives.shards import Leaves, Shards
from quicoll.engine.calls import Work
from quicoll.engine.given import seal_given
from quicoll.errors import LocalError
from quicoll.local.large import canonical_tree
from quicoll.local.layout import CHUNK, MAX_ITEM, SMALL_BYTES
from quicoll.local.passages import MIN_STEP, Reduced
from quicoll.local.small import SmallCall
from quicoll.numerics.buffers import argument, memory, uninitialised
from quicoll.numerics.bundle import Bundle, Joined, bundle, leaves_like, like_text, results
from quicoll.numerics.canonical_order import leaves_of
from quicoll.numerics.destinations import allocate, destination
from quicoll.numerics.feedback import ErrorFeedback
from quicoll.numerics.natives import READ_TORCH, torch_module
from quicoll.numerics.reduce import (
    LONG_REDUCE_BLOCK,
    REDUCE_BLOCK,
    Precision,
    ReduceOp,
    reduce_few,
    reduce_rows,
    reduce_tree,
)
from quicoll.plan.schedule import (
    ElementFormat,
    Schedule,
    element_format,
    reduction,
    require_algorithm,
    require_gathering,
    require_ring_options,
)

if TYPE_CHECKING:
    from quicoll.collectives.base import GroupView
    from quicoll.engine.calls import Known
    from quicoll.local.layout import SegmentLayout
    from quicoll.local.small import Counts
    from quicoll.numerics.buffers import Source
    from quicoll.numerics.bundle import Results
    from quicoll.numerics.dtypes import Array
    from quicoll.numerics.reduce import After
    from quicoll.plan import Plan

__all__ = ["AllReduce", "Reduce", "ReduceOrder", "ReduceScatter", "Repeat", "all_reduce_again"]

ReduceOrder: TypeAlias = Literal["canonical", "ring"]
_FEW = 8192  # elements of all leaves; of more it is not the calls of numpy that take time
# op, algorithm, precision, exact, wire, reduce_order, and what an operation of another kind than all_reduce has beside.
_Asked: TypeAlias = "tuple[str, str, Precision, bool, str | None, ReduceOrder, tuple[Any, ...]]"
_Sizes: TypeAlias = "Callable[[Bundle, ElementFormat, int, tuple[Any, ...]], dict[str, Any]]"


class _Prepared(NamedTuple):
    """What a call of a reduction came to: see quicoll.collectives.base.

    elements: that travel of a leaf. settled: this rank's plan, where it does not depend on the network. held: leaves of
    each rank. own: of this rank's, as shards, the view, the first and how many. sizes: where all ranks see what each
    gives, the bytes of that; else None. announced: whether they see it in their announcements, and not through the
    memory of their host. ring: whether by the classic ring.
    """

    precision: Precision
    op: ReduceOp
    how: ElementFormat
    elements: int
    schedule: Schedule
    settled: Plan | None
    signature: str
    held: tuple[int, ...]
    own: tuple[int, int, int]
    sizes: tuple[int, ...] | None
    announced: bool
    ring: bool


class Reduction(Operation[Any]):
    """What the three have in common: leaves that are alike, and how they travel.

    rows: elements of the result for each rank, where it is divided. root: the rank that gets it, where one does.
    """

    rows: tuple[int, ...] | None = None
    root: int | None = None
    encoded: Sequence[Array] | None = None
    decoded = True
    leaves: Array | Sequence[Array | Joined] | None = None  # rows, or one by one; None: `like` is the one
    _source: Source | None = None  # of a tensor that came alone
    copied: bytes | None = None  # what this rank gives, where it was taken at once; then there is no `_source`
    _like: Bundle | None = None
    _target: Results | None = None
    encoded_result: Array | None = None  # what comes of the others, where it does not travel as it is

    def __init__(
        self,
        here: GroupView,
        name: str,
        x: Any,
        asked: _Asked,
        sizes: _Sizes,
    ) -> None:
        """sizes: gives the planner's own arguments, which follow from the tensors, how they travel, the world and what
        is asked beside."""
        self.here = here
        self.group_id = here.scope.group_id
        self.name = name
        self.x = x
        key: tuple[Any, ...]
        if isinstance(x, (Leaves, list, tuple)):
            like: Bundle
            if isinstance(x, Leaves):
                self.leaves, like = _leaves(x)
                self.total = x.shards.total
            else:
                like, self.total = bundle(x), len(here.ranks)
            self._like = like
            key = name, like.dtype, (like.shapes, like.many), self.total, asked
        else:
            self._source = source = argument(x)
            self.total = len(here.ranks)
            key = name, source.dtype, source.shape, self.total, asked
        try:
            prepared = here.prepared.kept(key)
        except TypeError:  # something that no option can be; preparing says what is wrong with it
            prepared = None
        if prepared is None:
            prepared = here.prepared.get(key, _prepare, here, name, self.like, self.total, asked, sizes)
        self.prepared: _Prepared = prepared
        if self.leaves is not None and (x.shards.view_id, x.shards.first, x.shards.count) != prepared.own:
            _demand_own(here, x.shards)
        self.signature = prepared.signature
        self.measures = prepared.settled is None and prepared.sizes is None
        self.announced = prepared.announced

    @property
    def like(self) -> Bundle:
        """What each leaf is like. For a tensor that came alone it is made where it is needed, mostly on the engine's
        thread."""
        if self._like is None:
            self._like = Bundle.of(cast("Source", self._source))
        return self._like

    def write_to(self, out: Any, target: Results) -> None:
        """Settle where the result goes."""
        self.given = (self.x, out)
        self._target = target
        self.in_place = target.in_place
        form = self.prepared.how.form
        if form is not None:
            feedback = self.feedback
            self.encoded = (
                [form.encode(self.like.at(leaf)) for leaf in self.given_leaves]
                if feedback is None
                else feedback.encode()
            )
            self.encoded_result = uninitialised(self.prepared.elements, self.prepared.how.dtype, self.here.recycler)
            self.decoded = False

    @property
    def target(self) -> Results:
        """Where the result goes. Memory for a small one, for which there is no `out`, is taken when it comes, on the
        engine's thread."""
        target = self._target
        if target is None:
            like = self._like or self.like
            recycler = self.here.recycler
            target = results(None, like, recycler=recycler) if like.many else allocate(like.first, recycler=recycler)
            self._target = target
        return target

    @property
    def output(self) -> Array:
        """What is reduced into: the result, or what it travels as."""
        return self.target.flat if self.encoded_result is None else self.encoded_result

    @property
    def given_leaves(self) -> Sequence[Array | Joined]:
        """The leaves of this rank, as they were given."""
        if self.copied is not None:
            return [np.frombuffer(self.copied, self.prepared.how.dtype.storage)]
        return [self.like.flat] if self.leaves is None else list(self.leaves)

    @property
    def flats(self) -> Sequence[Array | Joined]:
        """What travels of this rank's leaves."""
        return self.given_leaves if self.encoded is None else self.encoded

    def step_aside(self) -> None:
        self._target = self.target.aside(self.here.recycler)
        self.in_place = False

    def prepare(self, known: Known) -> Work:
        prepared = self.prepared
        plan = prepared.settled
        if plan is None:
            plan = prepared.schedule.plan_taken(self.here.rank, "auto", known.network)
        return Work(plan, prepared.how.dtype, prepared.how.acc, prepared.op, self.flats, self.output)

    def small_call(self, number: int) -> SmallCall | None:
        sizes = self.prepared.sizes
        if sizes is None:
            return None
        nbytes = sizes[self.here.rank]
        return SmallCall(
            number,
            self.called,
            self.payload,
            nbytes,
            self.combine,
            self.passage,
            sizes=sizes,
            reads=self.holds,
        )

    def sizes(self) -> Sequence[int]:
        return self.prepared.sizes or ()

    def payload(self) -> bytes:
        """Return a copy of this rank's leaves, one after the other."""
        if self.copied is not None:
            return self.copied
        if self.encoded is None:
            if self._source is not None:
                return self._source.flat.tobytes()
            leaves = self.like.flat if self.leaves is None else self.leaves
            if isinstance(leaves, np.ndarray):
                return leaves.tobytes()
        return b"".join([memory(flat[:]) for flat in self.flats])

    def combine(self, payloads: Sequence[bytes], counts: Counts) -> None:
        """Reduce small leaves of all ranks."""
        if not self.holds:
            return
        prepared = self.prepared
        storage, size = prepared.how.dtype.storage, prepared.elements
        start, stop = 0, size
        if self.rows is not None:
            start = sum(self.rows[: self.here.rank])
            stop = start + self.rows[self.here.rank]
        if stop - start == size and self.total * size <= _FEW:
            op, how, data = prepared.op, prepared.how, b"".join(payloads)
            out = self.target.flat if self.encoded_result is None else self.encoded_result
            if size == 1 and reduce_few(data, op=op, dtype=how.dtype, acc=how.acc, out=out):
                return
            rows = np.frombuffer(data, storage).reshape(self.total, size)
            if reduce_rows(rows, op=op, dtype=how.dtype, acc=how.acc, out=out):
                return
        leaves: list[Array] = []
        for payload, held in zip(payloads, prepared.held, strict=True):
            values = np.frombuffer(payload, storage)
            if held == 1 and stop - start == size:
                leaves.append(values)
            else:
                leaves += [values[leaf * size + start : leaf * size + stop] for leaf in range(held)]
        self.reduce(leaves, self.output)

    def reduce(self, leaves: Sequence[Array], out: Array, after: After | None = None) -> None:
        """Reduce some elements of all leaves, in their order, and say which are done."""
        how = self.prepared.how
        long = how.acc is how.dtype and self.total <= 2
        reduce_tree(
            canonical_tree(self.total),
            leaves.__getitem__,
            op=self.prepared.op,
            dtype=how.dtype,
            acc=how.acc,
            out=out,
            final=True,
            leaves=self.total,
            block=LONG_REDUCE_BLOCK if long else REDUCE_BLOCK,
            after=after,
        )

    def passage(self, layout: SegmentLayout, counts: Counts) -> Reduced:
        """Return the way of large leaves."""
        return Reduced(
            layout=layout,
            rank=self.here.rank,
            held=self.prepared.held,
            leaves=self.flats,
            storage=self.prepared.how.dtype.storage,
            elements=self.prepared.elements,
            rows=self.rows,
            root=self.root,
            output=self.output,
            combine=self.reduce,
        )

    def bits(self) -> Array:
        form = self.prepared.how.form
        if not self.decoded and form is not None:
            form.decode(self.output, self.like, self.target.flat)
            self.decoded = True
        return self.target.flat

    def result(self) -> Any:
        if not self.holds:
            return None
        if not self.decoded:
            self.bits()
        return self.target.commit()

    def text(self) -> str:
        return f"{self.name} {self.like.brief} {self.prepared.op} {self.prepared.precision}"

    def inputs(self) -> Sequence[tuple[int, Array | Joined]]:
        # The tensors as they were given, whatever they travel as; with their residuals, on which the result depends.
        leaves = self.given_leaves
        if self.feedback is not None:
            leaves = [Joined(self.feedback.sums(i)) for i in range(len(leaves))]
        first = self.here.rank if self.leaves is None else self.x.shards.first
        return [(first + i, leaf) for i, leaf in enumerate(leaves)]


_new = object.__new__


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
        residual: Any = None,
    ) -> None:
        asked = op, algorithm, precision, exact, wire, reduce_order, ()
        super().__init__(here, "all_reduce", x, asked, _all_elements)
        if residual is not None:
            self.feedback = self._feedback(residual, out)
        if self.announced and self.prepared.how.form is None:
            self.given = (x, out)
            if out is not None:
                self.write_late(out)
            return  # without `out` it has memory when the result comes: `target`
        apart_from = None if out is None else flattened(x)
        self.write_to(out, results(out, self.like, apart_from=apart_from, recycler=here.recycler))

    def write_late(self, out: Any) -> None:
        """Settle where a small result goes: into memory of its own, and from there to the caller's `out`."""
        source = self._source
        self._target = results(out, self.like) if source is None else destination(out, source)

    def remember(self, op: Any) -> None:
        """Keep what the next one of its kind can share, where this is small, and of a plain tensor on the host.

        Args:
            op: As the caller has it; there was no other option, but for `out`.
        """
        x, source, sizes = self.x, self._source, self.prepared.sizes
        if source is None or sizes is None or max(sizes) > SMALL_BYTES or source.device is not None:
            return
        if type(x) is (np.ndarray if source.kind == "numpy" else torch_module().Tensor):
            self.here.repeats.get((type(x), x.dtype, x.shape, op), Repeat, self, source)

    def _feedback(self, residual: Any, out: Any) -> ErrorFeedback:
        """Check the residuals of this rank's leaves. Raises LocalError."""
        form, x = self.prepared.how.form, self.x
        if form is None:
            raise LocalError("residual is what a wire format loses: give wire too, or leave residual out")
        if isinstance(residual, Leaves) != isinstance(x, Leaves):
            raise LocalError("residual has to be Leaves of the same shards where x is, and only there")
        if isinstance(x, Leaves) and residual.shards != x.shards:
            raise LocalError(f"residual is of shards {residual.shards.text}, x of {x.shards.text}")
        residuals = residual.values if isinstance(x, Leaves) else (residual,)
        apart = flattened((x, out))
        leaves = [self.like.at(leaf) for leaf in self.given_leaves]
        return ErrorFeedback(residuals, leaves, form, apart_from=apart, recycler=self.here.recycler)

    def text(self) -> str:
        form = self.prepared.how.form
        text = super().text() + (" ring" if self.prepared.ring else "" if form is None else f" wire={form.codec.name}")
        return text if self.feedback is None else f"{text} residual"

    def terms(self) -> str:
        # What a ring gives is fixed by how many ranks it has.
        return f"world={self.here.world_size}" if self.prepared.ring else ""


class Repeat:
    """What the same all_reduce of a small tensor, without options but `op`, shares with the one that was made first.

    A training loop makes the same few again and again, and what each costs its caller is mostly the number of steps:
    between two of them other threads have had the processor's caches. So one that comes again is not made from its
    arguments. It takes over what the first came to, and a copy of its tensor's elements, from which all else follows.
    Invariant: it is, in all that can be seen from outside, what `AllReduce` makes of the same tensor. What could be
    otherwise than with the first (no memory on the host, a gradient, elements that are negated lazily) gives none, and
    is made from its arguments, or refused there.
    """

    __slots__ = ("announced", "common", "is_numpy", "unsigned")

    def __init__(self, made: AllReduce, source: Source) -> None:
        """made: of the tensor that `source` views; nothing of its memory is kept."""
        nothing = np.broadcast_to(np.zeros((), source.flat.dtype), source.flat.shape)  # one element of memory
        apart = source._replace(flat=nothing, copied=True)
        self.common = {
            "here": made.here,
            "group_id": made.group_id,
            "name": made.name,
            "total": made.total,
            "prepared": made.prepared,
            "signature": made.signature,
            "measures": made.measures,
            "announced": made.announced,
            "_like": Bundle.of(apart),
            "given": (),
            "copied": b"",
            "sealed": b"",
            "answer": None,
            "_target": None,
        }
        self.announced = made.announced
        self.is_numpy = source.kind == "numpy"
        self.unsigned = None if self.is_numpy else READ_TORCH[source.native][2]


def all_reduce_again(here: GroupView, x: Any, shape: Any, op: Any, out: Any = None) -> AllReduce | None:
    """Return an all_reduce with no option but `op` that was made before, of another tensor; see `Repeat`.

    Args:
        here: The group.
        x: What the caller gives.
        shape: Its shape; (n,) where its n elements count as one dimension.
        op: As the caller has it.
        out: Likewise.
    Returns:
        The operation, not issued; None where it has to be made of its arguments.
    Raises:
        LocalError: `out` does not fit.
    """
    try:
        repeat: Repeat | None = here.repeats.kept((type(x), x.dtype, shape, op))
    except (AttributeError, TypeError):  # no tensor, or something that no option can be
        return None
    if repeat is None:
        return None
    if repeat.is_numpy:
        given = x.tobytes()
    else:
        unsigned = repeat.unsigned
        try:  # as quicoll.numerics.buffers reads it; what is refused there has to be looked at
            given = (x if unsigned is None else x.view(unsigned)).numpy().tobytes()
        except (RuntimeError, TypeError):
            return None
    operation = _new(AllReduce)  # as AllReduce() without what that asks
    operation.__dict__ = repeat.common.copy()
    operation.given = (x, out)
    operation.copied = given
    if out is not None:
        operation.write_late(out)
    if repeat.announced:
        operation.sealed = seal_given(given)
    return operation


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
        self.root = root = here.checked("root", root)
        super().__init__(
            here, "reduce", x, (op, algorithm, precision, exact, None, "canonical", (root,)), _rooted_elements
        )
        self.holds = here.rank == self.root
        if self.holds:
            self.write_to(out, results(out, self.like, apart_from=flattened(x), recycler=here.recycler))
        else:
            self.write_to(None, nothing_like(self.like))

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
        rows = None if counts is None else rows_asked(counts)
        super().__init__(
            here, "reduce_scatter", x, (op, algorithm, precision, exact, None, "canonical", (rows,)), _divided_elements
        )
        like = self.like
        (shape,) = like.shapes
        self.counted = rows_given(rows, shape[0], here.world_size)
        width = like.elements // shape[0] if shape[0] else 0
        self.rows = tuple([count * width for count in self.counted])
        mine = (self.counted[here.rank], *shape[1:])
        self.write_to(out, results(out, like, mine, apart_from=flattened(x), recycler=here.recycler))

    def terms(self) -> str:
        return rows_text(self.counted)


def nothing_like(like: Bundle) -> Results:
    """Return memory for no elements, of the type of `like`: where a rank has no result."""
    return results(None, Bundle.of(like.first), (0,))


def _leaves(x: Leaves[Any]) -> tuple[Array | Sequence[Array | Joined], Bundle]:
    """The leaves of this rank, and what all of them are like. Raises LocalError where they differ."""
    plain = leaves_like(x.values) if x.values else None
    if plain is not None:
        return plain
    leaves = [bundle(value) for value in x.values]
    like = leaves[0] if leaves else bundle(x.like)
    for other in leaves[1:]:
        if not other.is_like(like):
            raise LocalError(f"leaves differ: {like.text} and {other.text}; all must be alike")
    return [leaf.flat for leaf in leaves], like


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


def _all_elements(like: Bundle, how: ElementFormat, world: int, more: tuple[Any, ...]) -> dict[str, Any]:
    if how.form is None:
        return {"elements": like.elements}
    return {"elements": how.elements(each.size for each in like.flats)}


def _rooted_elements(like: Bundle, how: ElementFormat, world: int, more: tuple[Any, ...]) -> dict[str, Any]:
    (root,) = more
    return {"root": root, "elements": like.elements}


def _divided_elements(like: Bundle, how: ElementFormat, world: int, more: tuple[Any, ...]) -> dict[str, Any]:
    """Each rank's elements of a reduce_scatter. Raises LocalError for what has no rows, or not these."""
    if like.many:
        raise LocalError("reduce_scatter takes a tensor, not a list")
    (shape,) = like.shapes
    if not shape:
        raise LocalError("reduce_scatter divides rows; a 0-dim tensor has none")
    (counts,) = more
    width = like.elements // shape[0] if shape[0] else 0
    return {"counts": tuple(count * width for count in rows_given(counts, shape[0], world))}


def _prepare(here: GroupView, name: str, like: Bundle, leaves: int, asked: _Asked, sizes: _Sizes) -> _Prepared:
    """Check and plan a call. Raises LocalError for what cannot be asked for, or not be planned."""
    op, algorithm, precision, exact, wire, reduce_order, more = asked
    require_algorithm(name, algorithm)
    if reduce_order == "ring":
        require_ring_options("exact" if exact else precision, wire)
        if algorithm != "auto":
            raise LocalError(f"reduce_order='ring' is an algorithm of its own; leave algorithm={algorithm!r} out")
        algorithm = "ring"
    elif reduce_order != "canonical":
        raise LocalError(f"reduce_order {reduce_order!r} is not known; use 'canonical' or 'ring'")
    if exact and precision not in ("default", "exact"):
        raise LocalError(f"exact=True has an accumulator of its own: leave precision={precision!r} out")
    precision = "exact" if exact else precision
    parsed = ReduceOp.parse(op)
    how = element_format(like.dtype, parsed, leaves=leaves, precision=precision, wire=wire)
    if how.gathered:
        require_gathering(algorithm, wire)
    given = sizes(like, how, here.world_size, more)
    schedule = reduction(
        name, how, world=here.world_size, sizes=given, leaves=leaves, sites=here.sites, chunk_bytes=here.chunk_bytes
    )
    held = tuple([len(leaves_of(rank, here.world_size, leaves)) for rank in range(here.world_size)])
    seen: tuple[int, ...] | None = None
    if algorithm == "local" or (algorithm == "auto" and here.near):
        refused, seen = _near(here, schedule, held, given["elements"] * how.dtype.itemsize if how.gathered else None)
        if algorithm == "local" and refused:
            raise LocalError(f"algorithm 'local' cannot carry this out: {refused}")
        algorithm = algorithm if refused else "local"
    if algorithm == "auto" and schedule.announced and not how.gathered:
        algorithm, seen = "announced", tuple([many * schedule.nbytes for many in held])
    plan: Plan | None = None
    if seen is None:
        algorithm = schedule.settled(algorithm)
        plan = None if algorithm == "auto" else schedule.plan_of(here.rank, algorithm)
    shapes = like_text(like.dtype, like.shapes, many=like.many)
    text = f"{name}/{algorithm} {schedule.text} {shapes} op={parsed} precision={precision}"
    return _Prepared(
        precision,
        parsed,
        how,
        given.get("elements", like.elements),
        schedule,
        plan,
        text if how.form is None else f"{text} wire={how.form.codec.name}",
        held,
        (here.view_id, sum(held[: here.rank]), held[here.rank]),
        seen,
        algorithm == "announced",
        reduce_order == "ring",
    )


def _near(
    here: GroupView, schedule: Schedule, held: tuple[int, ...], gathered: int | None
) -> tuple[str, tuple[int, ...] | None]:
    """Return why a reduction cannot go through the memory of one host, "" where it can; and, where it can, the bytes
    that each rank gives. All ranks come to the same. gathered: bytes of a leaf, where leaves are moved as they are."""
    if not here.near:
        return "the ranks of this group do not share a host's memory", None
    if gathered is not None:
        return "", tuple([many * gathered for many in held])
    sizes = tuple([many * schedule.nbytes for many in held])
    if max(sizes) > SMALL_BYTES:
        if schedule.itemsize > MAX_ITEM:
            return f"its elements have more than {MAX_ITEM} bytes", None
        if CHUNK // (schedule.itemsize * len(held) * max(held)) < MIN_STEP:
            return f"it has {max(held)} leaves on a rank", None
    return "", sizes
