"""A collective before its algorithm is chosen: all that its ranks know of it, and the plans that follow from that.

The way from a call's arguments to the numbers of a planner is here and nowhere else. Groups run what comes out of it,
and `quicoll explain` prints it: what is explained is what would be run.

How a reduction's elements travel (`ElementFormat`). Leaves and results are of one type, partial results of another, the
accumulator: wider where sums are rounded once (`quicoll.numerics.reduce`), 44 bytes for an exact sum of float32
(`quicoll.numerics.exact`). A wire format puts a type of its own in the place of the tensor's
(`quicoll.numerics.encoding`). Where an accumulator may be many times as large as a leaf, exact or encoded, nodes of so
few leaves that these are fewer bytes travel as their leaves: the planner's `loose`. Where a format has its leaves
gathered (`Codec.gathered`), what travels of an all_reduce is an all_gather of them, and has its algorithms.

What combining costs. The model's rate is that of adding numbers (`quicoll.plan.forecast`); exact sums and blocks of
int8 and int4 take longer, and encoding takes a pass of its own at both ends. The rates here are of one core of an AMD
EPYC and stand for an order of magnitude: a smaller difference between two algorithms means nothing.

Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from quicoll import plan
from quicoll.errors import LocalError
from quicoll.numerics.canonical_order import leaves_of
from quicoll.numerics.dtypes import DType, NumberKind
from quicoll.numerics.encoding import Encoding, encoding_for
from quicoll.numerics.exact import MAX_LEAVES
from quicoll.numerics.reduce import Precision, ReduceOp, accumulator
from quicoll.plan.choice import MAX_WALKED, choose, has_choice
from quicoll.plan.network import messages

if TYPE_CHECKING:
    from quicoll.plan.network import NetworkModel

__all__ = [
    "ANNOUNCED",
    "MAX_ANNOUNCED",
    "AlgorithmName",
    "ElementFormat",
    "Schedule",
    "element_format",
    "move",
    "reduction",
    "require_algorithm",
    "require_gathering",
    "require_ring_options",
]

AlgorithmName: TypeAlias = Literal["auto", "direct", "tree", "hierarchical", "exchange", "local"]

ANNOUNCED = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather")
"""Collectives of which all ranks know what each gives before they hear of each other."""
MAX_ANNOUNCED = 1024
"""Bytes that a rank gives in its announcement: with the rest of it they are one datagram on any path."""

_EXACT_RATE = 5e8  # bytes/s read: 8 ns for a float32
_BLOCKS_RATE = 8e7  # the same of int8: numbers are decoded, added up, and encoded once
_CODING_RATE = 1e9  # bytes/s of the tensor, encoded or decoded

# Plans are immutable and a training loop asks for the same few again and again; a large one takes milliseconds.
_PLANNERS: dict[str, Callable[..., plan.Plan]] = {
    name: lru_cache(maxsize=64)(getattr(plan, name))
    for name in ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "send")
} | {"all_to_all": plan.all_to_all, "barrier": plan.barrier}


@dataclass(frozen=True, slots=True, eq=False)
class ElementFormat:
    """The form in which the elements of a reduction travel.

    Attributes:
        given: The tensors' type.
        dtype: The type of leaves and result on the way.
        acc: The type of partial results.
        loose: A node of at most so many leaves travels as these.
        exact: Whether sums are exact.
        form: How `given` becomes `dtype`; None where they are the same.
    """

    given: DType
    dtype: DType
    acc: DType
    loose: int
    exact: bool
    form: Encoding | None

    def elements(self, sizes: Iterable[int]) -> int:
        """Return how many elements of `dtype` travel for tensors of `sizes` elements of `given`."""
        return sum(sizes) if self.form is None else self.form.elements(sizes)

    @property
    def gathered(self) -> bool:
        """Whether all leaves go to all ranks, each of which reduces them."""
        return self.form is not None and self.form.codec.gathered

    @property
    def combine_rate(self) -> float | None:
        """Bytes read in a second while leaves are combined; None: as the cost model has it."""
        if self.dtype.kind is NumberKind.BLOCKS:
            return _BLOCKS_RATE
        return _EXACT_RATE if self.exact else None

    def coding_seconds(self, elements: int, leaves: int) -> float:
        """Return what it takes a rank to encode `leaves` leaves of `elements` elements and to decode a result."""
        return 0.0 if self.form is None else (leaves + 1) * elements * self.given.itemsize / _CODING_RATE


def element_format(
    dtype: DType, op: ReduceOp, *, leaves: int, precision: Precision = "default", wire: str | None = None
) -> ElementFormat:
    """Decide how the elements of a reduction travel.

    Args:
        dtype: The tensors' type.
        op: What is computed.
        leaves: How many are reduced.
        precision: As in `Group.all_reduce`.
        wire: As in `Group.all_reduce`.
    Returns:
        The types of leaves, result and partial results on the way.
    Raises:
        LocalError: Such tensors cannot be reduced like this.
    """
    acc = accumulator(dtype, op, precision)
    exact = acc.kind is NumberKind.EXACT
    if exact and leaves > MAX_LEAVES:
        raise LocalError(f"an exact sum has at most {MAX_LEAVES} leaves, not {leaves}")
    if wire is not None:
        form = encoding_for(wire, dtype, op, precision)
        if form.codec.gathered:
            return ElementFormat(dtype, form.dtype, form.acc, 1, exact, form)
        return ElementFormat(dtype, form.dtype, form.acc, form.acc.itemsize // form.dtype.itemsize, exact, form)
    return ElementFormat(dtype, dtype, acc, acc.itemsize // dtype.itemsize if exact else 1, exact, None)


def require_algorithm(collective: str, algorithm: str) -> None:
    """Raise LocalError for an algorithm that cannot be asked for by this name."""
    known = ("auto", *(name for name in plan.ALGORITHMS[collective] if name != "ring"), "local")
    if algorithm not in known:
        raise LocalError(f"algorithm {algorithm!r} is not known; use one of {', '.join(known)}")


def require_gathering(algorithm: str, wire: str | None) -> None:
    """Raise LocalError for an algorithm by which leaves that are gathered do not travel."""
    known = ("auto", *plan.ALGORITHMS["all_gather"], "local")
    if algorithm not in known:
        raise LocalError(
            f"wire {wire!r} gives all leaves to all ranks, by one of {', '.join(known)}, not {algorithm!r}"
        )


def require_ring_options(precision: Precision, wire: str | None) -> None:
    """Raise LocalError for options that do not go with the order of a ring."""
    if wire is not None:
        raise LocalError("a ring passes on partial sums, which are not encoded: leave wire or reduce_order out")
    if precision == "exact":
        raise LocalError("an exact sum has no order: leave reduce_order='ring' out")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A collective as all of its ranks know it.

    Attributes:
        collective: Its name.
        world: Number of ranks.
        sizes: The planner's own arguments: elements, root, counts.
        itemsize: Bytes of an element that travels.
        chunk_bytes: The longest message.
        sites: A number for each rank.
        leaves: Of a reduction; 0 where nothing is reduced.
        wide_itemsize: Bytes of an element of the accumulator; 0 likewise.
        loose: As in `ElementFormat`; 0 likewise.
        combine: As `ElementFormat.combine_rate`.
        thrifty: Whether a wire format was asked for; see `quicoll.plan.choice`.
    """

    collective: str
    world: int
    sizes: Mapping[str, Any]
    itemsize: int
    chunk_bytes: int
    sites: tuple[int, ...]
    leaves: int = 0
    wide_itemsize: int = 0
    loose: int = 0
    combine: float | None = None
    thrifty: bool = False
    _last: dict[tuple[int, str], tuple[NetworkModel | None, plan.Plan]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def options(self) -> dict[str, Any]:
        """All arguments of the planner but algorithm, rank and sites, in the order in which a signature has them."""
        given: dict[str, Any] = {"world": self.world, **self.sizes}
        if self.collective == "barrier":
            return given
        if self.leaves:
            given["leaves"] = self.leaves
        given["itemsize"] = self.itemsize
        if self.leaves:
            given["wide_itemsize"] = self.wide_itemsize
        given["chunk_bytes"] = self.chunk_bytes
        if self.loose:
            given["loose"] = self.loose
        return given

    @property
    def text(self) -> str:
        """The options, for a signature."""
        return " ".join(f"{key}={_text(value)}" for key, value in self.options.items())

    @property
    def nbytes(self) -> int:
        """Of what travels: the whole tensor, all ranks' parts of it, or the most that a rank gives in an all_to_all."""
        if self.collective == "all_to_all":
            return max(map(sum, self.sizes["counts"])) * self.itemsize
        elements: int = self.sizes["elements"] if "elements" in self.sizes else sum(self.sizes.get("counts", ()))
        return elements * self.itemsize

    @property
    def announced(self) -> bool:
        """Whether what ranks give travels in the announcements of their calls, where the algorithm is not asked for.

        Each rank then has all of it after one delay, and no message is sent for it: no plan is cheaper where all of it
        is small.
        """
        if self.collective not in ANNOUNCED or self.world > MAX_WALKED:
            return False
        if self.leaves:
            most = self.nbytes * -(-self.leaves // self.world)
        else:  # the root's elements, or the most that a rank gives
            most = max(self.sizes["counts"]) * self.itemsize if "counts" in self.sizes else self.nbytes
        return most <= MAX_ANNOUNCED

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Those that can be asked for; none where there is one way only."""
        return plan.ALGORITHMS.get(self.collective, ())

    def plan_of(self, rank: int, algorithm: str) -> plan.Plan:
        """Make the plan of one rank.

        Args:
            rank: Whose plan.
            algorithm: One of `algorithms`; "" where there are none.
        Returns:
            The plan.
        Raises:
            LocalError: An argument is out of its range.
        """
        options = self.options
        if algorithm:
            options["algorithm"] = algorithm
        if algorithm == "hierarchical":
            options["sites"] = self.sites
        return _PLANNERS[self.collective](rank=rank, **options)

    def plan_taken(self, rank: int, algorithm: str, network: NetworkModel | None) -> plan.Plan:
        """Make the plan of one rank for an algorithm as it is asked for; the last one is kept.

        Args:
            rank: Whose plan.
            algorithm: As in `taken`.
            network: As in `taken`.
        Returns:
            The plan.
        Raises:
            LocalError: An argument is out of its range.
        """
        key = rank, algorithm
        last = self._last.get(key)
        if last is None or last[0] is not network:
            last = self._last[key] = network, self._plan_on(network, rank, algorithm)
        return last[1]

    def _plan_on(self, network: NetworkModel | None, rank: int, algorithm: str) -> plan.Plan:
        """Make the plan of one rank; where the choice is the network's, in messages as the network asks for."""
        settled = self.settled(algorithm)
        if settled != "auto":
            return self.plan_of(rank, settled)
        algorithm = self.taken(algorithm, network)
        if network is None:
            raise AssertionError(f"{algorithm} was taken without a network")
        chunk, lanes = messages(network, self.chunk_bytes)
        fitted = self if chunk == self.chunk_bytes else replace(self, chunk_bytes=chunk)
        return replace(fitted.plan_of(rank, algorithm), lanes_per_width=lanes)

    def plans(self, algorithm: str, network: NetworkModel | None = None) -> list[plan.Plan]:
        """Make the plans of all ranks; raises LocalError as `plan_taken` does, of which it has the arguments."""
        return [self._plan_on(network, rank, algorithm) for rank in range(self.world)]

    def network(self, network: NetworkModel) -> NetworkModel:
        """Return the network with processors that are as fast as they combine these elements."""
        return network if self.combine is None else replace(network, combine=min(network.combine, self.combine))

    def settled(self, algorithm: str) -> str:
        """Return `algorithm`; for "auto" the one that every network leads to, where there is one ("": one way only)."""
        if algorithm == "auto" and not has_choice(self.collective, self.world, self.nbytes, self.sites):
            return self.algorithms[0] if self.algorithms else ""
        return algorithm

    def taken(self, algorithm: str, network: NetworkModel | None) -> str:
        """Return what is run for an algorithm.

        Args:
            algorithm: What was asked for; "auto": the cheapest.
            network: What the ranks have agreed on; may be None where `settled` decides.
        Returns:
            The algorithm's name.
        """
        algorithm = self.settled(algorithm)
        if algorithm != "auto":
            return algorithm
        if network is None:
            raise AssertionError(f"{self.collective} depends on a network that the ranks have not agreed on")
        return self.cheapest(network)

    def cheapest(self, network: NetworkModel) -> str:
        """Return what "auto" takes on a network, which is the same on all ranks; "" where there is one way only."""
        if not self.algorithms:
            return ""
        return choose(
            self.collective,
            self.world,
            self.nbytes,
            self.leaves,
            self.sites,
            self.network(network),
            chunk_bytes=self.chunk_bytes,
            itemsize=self.itemsize,
            wide_itemsize=self.wide_itemsize or self.itemsize,
            loose=self.loose or 1,
            root=self.sizes.get("root", 0),
            thrifty=self.thrifty,
        )


def depends(collective: str, algorithm: str, *, world: int, sites: tuple[int, ...]) -> bool:
    """Return whether the choice of an algorithm depends on the network, for some size."""
    return algorithm == "auto" and has_choice(collective, world, 1, sites)


def reduction(
    collective: str,
    how: ElementFormat,
    *,
    world: int,
    sizes: Mapping[str, Any],
    leaves: int,
    sites: tuple[int, ...],
    chunk_bytes: int,
) -> Schedule:
    """Make the schedule of a reduction.

    Args:
        collective: "all_reduce", "reduce" or "reduce_scatter".
        how: How its elements travel.
        world: Number of ranks.
        sizes: elements, root or counts, in elements of `how.dtype`.
        leaves: How many are reduced.
        sites: A number for each rank.
        chunk_bytes: The longest message.
    Returns:
        The schedule; of an all_gather where leaves are gathered.
    """
    if how.gathered:
        counts = tuple([sizes["elements"] * len(leaves_of(rank, world, leaves)) for rank in range(world)])
        return move(
            "all_gather",
            how.dtype.itemsize,
            world=world,
            sizes={"counts": counts},
            sites=sites,
            chunk_bytes=chunk_bytes,
        )
    return Schedule(
        collective=collective,
        world=world,
        sizes=sizes,
        itemsize=how.dtype.itemsize,
        chunk_bytes=chunk_bytes,
        sites=sites,
        leaves=leaves,
        wide_itemsize=how.acc.itemsize,
        loose=how.loose if how.exact or how.form is not None else 0,
        combine=how.combine_rate,
        thrifty=how.form is not None,
    )


def move(
    collective: str, itemsize: int, *, world: int, sizes: Mapping[str, Any], sites: tuple[int, ...], chunk_bytes: int
) -> Schedule:
    """Make the schedule of a collective that moves elements as they are.

    Args:
        collective: Its name.
        itemsize: Bytes of an element.
        world: Number of ranks.
        sizes: elements, root or counts.
        sites: A number for each rank.
        chunk_bytes: The longest message.
    Returns:
        The schedule.
    """
    return Schedule(
        collective=collective, world=world, sizes=sizes, itemsize=itemsize, chunk_bytes=chunk_bytes, sites=sites
    )


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return f"{len(value)} of {sum(value)}" if len(value) > 64 else ",".join(map(str, value))
