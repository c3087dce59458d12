"""The first thing in which two runs differ, from their audits (`quicoll.audit.log`), and what could not be compared.

The promise is the same bits in every run, so the audits of two runs that were given the same differ in no line that
counts; if they do differ, the first difference says where to look:

    calls        the ranks asked for different collectives, in another order, or with other arguments (counts,
                 colors): the programs differ
    inputs       the same call, but a leaf has other bits: what the named rank computed since the call before differs
    result       all that went into a collective is equal, and the result is not: a fault of quicoll, of memory, of a
                 processor; or of a caller that changed an input while the collective ran
    unexplained  the result is another, but what some rank put in is not there to be compared
    missing      one run has no record of a place or a call that the other has

First: an operation is looked at when all that its ranks recorded before it has been. So nothing is named that is only a
consequence of something else. Ranks may have issued operations of several groups in different orders; where that makes
a circle, the rank that has called the fewest comes first. Within an operation calls come before inputs, inputs before
results.

Nothing is guessed: "result" is reported only where the record of every rank that took part is there in both runs;
else it is "unexplained". What a damaged file may have lost is not "missing".

Two runs need not have as many ranks. Between other world sizes is compared what these have in common: operations of all
ranks, called in the same order; leaves, if both runs have the same numbers of them (logical shards, or what a root
gives); and then results that all ranks have, unless the terms of the call are of its world size. All else is put
apart: a rank's own part of the work, results that belong to a rank, sub-groups, send and recv. It is counted, and two
runs of which something is apart are never called equal, but "no difference".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from quicoll.audit.log import Attempt, OperationRecord, Run, RunPosition

__all__ = ["Comparison", "Difference", "diff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing in which two runs differ.

    Attributes:
        kind: See the head of the module.
        place: The step.
        index: The call's number in this place, from 0, in A if it has it; None where all of it is missing.
        op: What was called.
        rank: In each run the rank that it is about; None where no single one is.
        leaf: Of inputs.
        a: What A has.
        b: What B has.
    """

    kind: Literal["calls", "inputs", "result", "unexplained", "missing"]
    place: RunPosition
    index: int | None = None
    op: str = ""
    rank: tuple[int | None, int | None] = (None, None)
    leaf: int | None = None
    a: str
    b: str

    def __str__(self) -> str:
        where = str(self.place) + ("" if self.index is None else f", call {self.index}")
        a, b = self.rank
        ranks = (
            "" if a is None and b is None
            else f", rank {a}" if a == b or b is None
            else f", rank {b}" if a is None
            else f", rank {a} of A, {b} of B"
        )  # fmt: skip
        what = {
            "calls": "the calls differ",
            "inputs": f"only one run has leaf {self.leaf}" if _NOTHING in (self.a, self.b)
            else f"leaf {self.leaf} has other bits",
            "result": "equal inputs gave another result",
            "unexplained": "another result, but not all inputs are there to be compared",
            "missing": "only one run has a record of it",
        }[self.kind]  # fmt: skip
        lines = [f"{where}{ranks}: {what}"]
        if self.op:
            lines.append(f"  {self.op}")
        return "\n".join([*lines, f"  A: {self.a}", f"  B: {self.b}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing two runs.

    Attributes:
        difference: The first; None if there is none in what could be compared.
        operations: How many with inputs or results were looked at, up to the difference.
        apart: Of how many of them something was not compared because it means nothing at another world size.
        gaps: What is missing, in words.
        partial: Whether single files were compared, and other ranks had a part.
    """

    difference: Difference | None
    operations: int
    apart: int
    gaps: tuple[str, ...]
    partial: bool

    @property
    def verdict(self) -> Literal["different", "incomplete", "no difference", "equal"]:
        """The outcome in two words or one.

        "equal": all that both runs did was compared. "no difference": what two world sizes have in common was compared,
        or what the given ranks did. "incomplete": no difference, but something to compare is missing or damaged.
        """
        if self.difference is not None:
            return "different"
        if self.gaps:
            return "incomplete"
        return "no difference" if self.apart or self.partial else "equal"


@dataclass(slots=True)
class _Count:
    """Operations with inputs or results; of how many of them something was put apart."""

    operations: int = 0
    apart: int = 0

    def add(self, *, apart: bool) -> None:
        self.operations += 1
        self.apart += apart


def diff(a: Run, b: Run) -> Comparison:
    """Compare two runs: by place, then in the order in which operations can have influenced each other.

    Args:
        a: The first run.
        b: The second run.
    Returns:
        The first difference, if any, and how much was compared.
    """
    count = _Count()
    gaps = [f"{name}: {gap}" for name, run in (("A", a), ("B", b)) for gap in run.gaps]
    difference = None
    for place in sorted({*a.places, *b.places}):
        one, other = a.places.get(place), b.places.get(place)
        if one is None or other is None:
            difference = _alone(place, one, other, damaged=(a if one is None else b).damaged)
        elif one.world != other.world:
            difference = _other_world(place, one, other, count)
        elif one.ranks.keys().isdisjoint(other.ranks):
            gaps.append(f"{place}: A has rank {_names(one)}, B has rank {_names(other)}, and none is in both")
        else:
            difference = _same_world(place, one, other, count)
        if difference is not None:
            break
    if difference is None and count.apart == count.operations > 0:
        gaps.append("nothing that was recorded means the same at both world sizes: the runs have no leaves in common")
    return Comparison(
        difference=difference,
        operations=count.operations,
        apart=count.apart,
        gaps=tuple(gaps),
        partial=any(run.alone and attempt.missing for run in (a, b) for attempt in run.places.values()),
    )


def _names(attempt: Attempt) -> str:
    return ", ".join(map(str, attempt.ranks))


def _alone(place: RunPosition, one: Attempt | None, other: Attempt | None, *, damaged: bool) -> Difference | None:
    """Only one run has been here. damaged: whether the other has is unknown."""
    if damaged or not any(records for each in (one, other) if each is not None for records in each.ranks.values()):
        return None
    have = [f"{len(each.ranks)} ranks" if each is not None else _NOTHING for each in (one, other)]
    return Difference(kind="missing", place=place, a=have[0], b=have[1])


# ---------------------------------------------------------------------------------------------------------------------
# Operations, put together from the records of their ranks

_NOTHING = "nothing"
_Calls = dict[int, int]  # of one operation: by rank the place of its record among those of the rank


def _operations(attempt: Attempt) -> list[_Calls]:
    """All operations, each after those that any of its ranks recorded before it."""
    ranks = attempt.ranks
    of: dict[tuple[int, int], _Calls] = {}
    found: dict[tuple[int, str, str, int], _Calls] = {}
    for rank, records in ranks.items():
        for index, record in enumerate(records):
            calls = found.setdefault((record.view, record.group, record.between, record.seq), {})
            calls[rank] = index
            of[rank, index] = calls
    heads = dict.fromkeys(ranks, 0)
    order: list[_Calls] = []
    while waiting := sorted((head, rank) for rank, head in heads.items() if head < len(ranks[rank])):
        ready = (of[rank, head] for head, rank in waiting)
        head, rank = waiting[0]
        calls = next((each for each in ready if all(heads[r] == i for r, i in each.items())), of[rank, head])
        order.append(calls)
        for member, index in calls.items():
            del of[member, index]
        for member in calls:
            while heads[member] < len(ranks[member]) and (member, heads[member]) not in of:
                heads[member] += 1
    return order


def _record(attempt: Attempt, rank: int, index: int) -> OperationRecord | None:
    records = attempt.ranks[rank]
    return records[index] if index < len(records) else None


def _call(record: OperationRecord | None) -> str:
    if record is None:
        return _NOTHING
    terms = f" {record.terms}" if record.terms else ""
    return f"{record.op}{terms} in group {record.group}"


# ---------------------------------------------------------------------------------------------------------------------
# As many ranks in both runs: rank by rank


def _same_world(place: RunPosition, a: Attempt, b: Attempt, count: _Count) -> Difference | None:
    both = [rank for rank in a.ranks if rank in b.ranks]
    in_b = {call: calls for calls in _operations(b) for call in calls.items()}
    for calls in _operations(a):
        met = [in_b[call] for call in calls.items() if call in in_b]
        # All that took part in one of the runs: a sub-group of one name may have had other members.
        concerned = sorted({call for each in (calls, *met) for call in each.items() if call[0] in both})
        known: list[tuple[int, OperationRecord, OperationRecord]] = []
        for rank, index in concerned:
            found = _other_call(place, rank, index, a, b)
            if found is not None:
                return found
            one, other = _both(a, b, rank, index)
            if one is not None and other is not None:
                known.append((index, one, other))
        for index, one, other in known:
            leaves = [_leaves([record]) for record in (one, other)]
            for leaf in sorted({*leaves[0], *leaves[1]}):
                left, right = (each.get(leaf, (one.rank, _NOTHING)) for each in leaves)
                if left != right:
                    return _other_leaf(place, index, one.op, leaf, left, right)
        whole = all(each == calls for each in met) and all(len(calls) == len(known) == one.size for _, one, _ in known)
        for index, one, other in known:
            if one.result != other.result:
                return Difference(
                    kind="result" if whole else "unexplained", place=place, index=index, op=one.op,
                    rank=(one.rank, one.rank), a=one.result, b=other.result,
                )  # fmt: skip
        if _tells([one for _, one, _ in known]):
            count.add(apart=False)
    for rank in both:
        found = _other_call(place, rank, len(a.ranks[rank]), a, b)
        if found is not None:
            return found
    return None


def _both(a: Attempt, b: Attempt, rank: int, index: int) -> tuple[OperationRecord | None, OperationRecord | None]:
    return _record(a, rank, index), _record(b, rank, index)


def _other_call(place: RunPosition, rank: int, index: int, a: Attempt, b: Attempt) -> Difference | None:
    one, other = _both(a, b, rank, index)
    if one is None or other is None:
        if one is other or rank in (a if one is None else b).cut:
            return None
        kind: Literal["calls", "missing"] = "missing"
    elif (one.group, one.op, one.terms) == (other.group, other.op, other.terms):
        return None
    else:
        kind = "calls"
    return Difference(kind=kind, place=place, index=index, rank=(rank, rank), a=_call(one), b=_call(other))


def _other_leaf(
    place: RunPosition, index: int, op: str, leaf: int, one: tuple[int, str], other: tuple[int, str]
) -> Difference:
    return Difference(
        kind="inputs", place=place, index=index, op=op, rank=(one[0], other[0]), leaf=leaf, a=one[1], b=other[1]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Another world size: what the two have in common


def _other_world(place: RunPosition, a: Attempt, b: Attempt, count: _Count) -> Difference | None:
    of_a, of_b = _of_all(a), _of_all(b)
    for _ in range(max(len(_operations(a)) - len(of_a), len(_operations(b)) - len(of_b))):
        count.add(apart=True)
    for key in [*of_a, *(key for key in of_b if key not in of_a)]:
        one, other = of_a.get(key), of_b.get(key)
        if one is not None and other is not None:
            found = _in_common(place, a, one, b, other, count)
            if found is not None:
                return found
            continue
        lacking = a if one is None else b
        if key[0] != _WORLD or len(lacking.cut) == len(lacking.ranks):
            count.add(apart=True)
            continue
        rank, index = min((one or other or {}).items())
        return Difference(
            kind="missing", place=place, index=index, rank=(None, rank) if one is None else (rank, None),
            a=_call(None if one is None else _records(a, one)[0]),
            b=_call(None if other is None else _records(b, other)[0]),
        )  # fmt: skip
    return None


_WORLD = "world"


def _of_all(attempt: Attempt) -> dict[tuple[str, int], _Calls]:
    """The operations of all ranks, by group and number in it."""
    found: dict[tuple[str, int], _Calls] = {}
    numbers: dict[str, int] = {}
    for calls in _operations(attempt):
        record = _records(attempt, calls)[0]
        if record.size == record.world and not record.between:
            number = numbers[record.group] = numbers.get(record.group, -1) + 1
            found[record.group, number] = calls
    return found


def _records(attempt: Attempt, calls: _Calls) -> list[OperationRecord]:
    return [attempt.ranks[rank][index] for rank, index in sorted(calls.items())]


def _in_common(
    place: RunPosition, a: Attempt, calls_a: _Calls, b: Attempt, calls_b: _Calls, count: _Count
) -> Difference | None:
    of_a, of_b = _records(a, calls_a), _records(b, calls_b)
    one, other = of_a[0], of_b[0]
    index = calls_a[one.rank]
    if one.op != other.op:
        return Difference(
            kind="calls", place=place, index=index, rank=(one.rank, other.rank), a=_call(one), b=_call(other)
        )
    if not _tells([*of_a, *of_b]):
        return None
    leaves_a, leaves_b = _leaves(of_a), _leaves(of_b)
    if len(of_a) != one.size or len(of_b) != other.size or leaves_a.keys() != leaves_b.keys():
        count.add(apart=True)
        return None
    for leaf in sorted(leaves_a):
        if leaves_a[leaf][1] != leaves_b[leaf][1]:
            index = calls_a[leaves_a[leaf][0]]
            return _other_leaf(place, index, one.op, leaf, leaves_a[leaf], leaves_b[leaf])
    if not all(record.agreed and not record.terms for record in (*of_a, *of_b)):
        count.add(apart=any(record.result for record in (*of_a, *of_b)))
        return None
    for left, right in _with_the_first(of_a, of_b):
        if left.result != right.result:
            return Difference(
                kind="result", place=place, index=calls_a[left.rank], op=one.op, rank=(left.rank, right.rank),
                a=left.result, b=right.result,
            )  # fmt: skip
    count.add(apart=False)
    return None


def _tells(records: Sequence[OperationRecord]) -> bool:
    """Return whether there is anything to compare; a barrier has nothing."""
    return any(record.inputs or record.result for record in records)


def _leaves(records: Sequence[OperationRecord]) -> dict[int, tuple[int, str]]:
    """By number: the rank that passed a leaf, and its digest."""
    return {leaf: (record.rank, digest) for record in records for leaf, digest in record.inputs}


def _with_the_first(
    a: Sequence[OperationRecord], b: Sequence[OperationRecord]
) -> Iterator[tuple[OperationRecord, OperationRecord]]:
    """Each with the other run's first, so that one rank that has another than its own run's others is found as well."""
    yield from ((record, b[0]) for record in a)
    yield from ((a[0], record) for record in b)
