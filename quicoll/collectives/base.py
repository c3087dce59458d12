"""What operations are made from: a group as one rank sees it in one view; and how rows are divided between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from quicoll.checks import whole
from quicoll.errors import LocalError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quicoll.collectives.subgroups import Scope

__all__ = ["GroupView", "TensorT", "TensorsT", "even_rows", "rows_given", "rows_text"]

_MAX_TEXT = 200  # of counts in an audit

# The result is of the kind that was given. At run time other objects with memory are taken too (numerics.buffers).
TensorT = TypeVar("TensorT", bound="np.ndarray[Any, Any] | torch.Tensor")
TensorsT = TypeVar("TensorsT", bound="np.ndarray[Any, Any] | torch.Tensor | list[Any]")


@dataclass(frozen=True, slots=True, eq=False)
class GroupView:
    """A group as one rank sees it in one view.

    rank: of this rank in the group. ranks: the group's ranks, by their number in it, as ranks of the view. sites: a
    number for the site of each rank. chunk_bytes: as in the job's settings.
    """

    view_id: int
    scope: Scope
    rank: int
    ranks: tuple[int, ...]
    sites: tuple[int, ...]
    chunk_bytes: int

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


def rows_given(counts: Sequence[int] | None, rows: int, world: int) -> tuple[int, ...]:
    """Return the caller's `counts`, checked to be `rows` in all, or `even_rows`. Raises LocalError."""
    if counts is None:
        return even_rows(rows, world)
    try:
        given = tuple(whole(count, "a count") for count in counts)
    except TypeError:
        raise LocalError(f"counts are integers, one for each rank, not {counts!r}") from None
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
