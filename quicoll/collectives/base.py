"""What operations are made from: a group as one rank sees it in one view; and how rows are divided between ranks.

Prepared calls. A training loop makes the same few calls again and again. What one came to (its options checked, its
signature, its plan) is kept in the `GroupView` by everything that it follows from (`PreparedCalls`), and the same call
again looks it up. Invariants: what is found under a key is what preparing anew would give, because a key names all that
is not the group's and the view's, and these have a cache of their own each; at most MOST_PREPARED are kept, the oldest
makes room; what cannot be prepared raises, and nothing is kept of it. What depends on the tensors themselves, their
memory and what autograd records of them, is looked at in each call.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from quicoll.checks import whole
from quicoll.errors import LocalError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quicoll.collectives.subgroups import Scope
    from quicoll.numerics.recycled import Recycler

__all__ = [
    "MOST_PREPARED",
    "GroupView",
    "PreparedCalls",
    "TensorT",
    "TensorsT",
    "even_rows",
    "rows_asked",
    "rows_given",
    "rows_text",
]

MOST_PREPARED = 256

_MAX_TEXT = 200  # of counts in an audit

# The result is of the kind that was given. At run time other objects with memory are taken too (numerics.buffers).
TensorT = TypeVar("TensorT", bound="np.ndarray[Any, Any] | torch.Tensor")
TensorsT = TypeVar("TensorsT", bound="np.ndarray[Any, Any] | torch.Tensor | list[Any]")


T = TypeVar("T")


class PreparedCalls:
    """What calls of one group came to in one view; see the module's head. Any thread may use it."""

    __slots__ = ("_known", "_most", "kept")

    kept: Callable[[tuple[Any, ...]], Any | None]
    """Returns what is kept under a key, or None. Raises TypeError for one that cannot be a key."""

    def __init__(self, most: int = MOST_PREPARED) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        self.kept = self._known.get

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: tuple[Any, ...], prepare: Callable[..., T], *given: Any) -> T:
        """Return what is kept under a key, or else what `prepare` gives, which is kept from then on.

        Args:
            key: Everything that the answer follows from. One that cannot be a key is not kept.
            prepare: Makes it; what it raises is raised.
            given: What it is called with.
        """
        try:
            found: T | None = self._known.get(key)
        except TypeError:  # something that no option can be; preparing says what is wrong with it
            return prepare(*given)
        if found is None:
            found = prepare(*given)
            self._known[key] = found
            while len(self._known) > self._most:
                with contextlib.suppress(KeyError):  # another thread has taken the last one out
                    self._known.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class GroupView:
    """A group as one rank sees it in one view.

    rank: of this rank in the group. ranks: the group's ranks, by their number in it, as ranks of the view. sites: a
    number for the site of each rank. chunk_bytes: as in the job's settings. recycler: of large results' memory; None:
    it is new each time. near: whether its ranks, if they are more than one, hand each other what they can through the
    memory of their host. prepared: the group's calls in this view. repeats: of those, small ones that were made as they
    are made most (quicoll.collectives.reductions, `Repeat`).
    """

    view_id: int
    scope: Scope
    rank: int
    ranks: tuple[int, ...]
    sites: tuple[int, ...]
    chunk_bytes: int
    recycler: Recycler | None = None
    near: bool = False
    prepared: PreparedCalls = field(default_factory=PreparedCalls)
    repeats: PreparedCalls = field(default_factory=PreparedCalls)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def checked(self, name: str, rank: int) -> int:
        """Return a rank of the group that the caller named `name`. Raises LocalError where there is no such rank."""
        rank = whole(rank, name)
        if not 0 <= rank < len(self.ranks):
            raise LocalError(f"{name} {rank} is not a rank of a world of {len(self.ranks)}")
        return rank


def even_rows(rows: int, world: int) -> tuple[int, ...]:
    """Divide rows evenly: ceil(rows / world) for each rank while there are any; the last may get fewer, or none."""
    each = -(-rows // world)
    return tuple(max(0, min(each, rows - each * rank)) for rank in range(world))


def rows_asked(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the caller's `counts` as numbers. Raises LocalError."""
    try:
        return tuple(whole(count, "a count") for count in counts)
    except TypeError:
        raise LocalError(f"counts are integers, one for each rank, not {counts!r}") from None


def rows_given(counts: Sequence[int] | None, rows: int, world: int) -> tuple[int, ...]:
    """Return the caller's `counts`, checked to be `rows` in all, or `even_rows`. Raises LocalError."""
    if counts is None:
        return even_rows(rows, world)
    given = rows_asked(counts)
    if len(given) != world or min(given) < 0 or sum(given) != rows:
        raise LocalError(f"counts {given} do not divide {rows} rows between {world} ranks")
    return given


def rows_text(rows: Sequence[int]) -> str:
    """Return for an audit how a call divides rows; of many a digest stands for the rest. "" where it is `even_rows`."""
    if not rows or tuple(rows) == even_rows(sum(rows), len(rows)):
        return ""
    text = ",".join(map(str, rows))
    if len(text) > _MAX_TEXT:
        text = f"{text[:100]}... for {len(rows)} ranks, {xxhash.xxh3_64_hexdigest(text.encode())}"
    return f"counts={text}"
