"""Logical shards: the fixed leaves of a reduction, spread over however many ranks there are.

A job that computes gradients for 8 logical shards gets the same bits on 1, 2, 3, 5 or 8 ranks, because the shards,
and not the ranks, are what is reduced. A rank asks which shards it holds in the present view, computes one leaf for
each, and passes them together:

    shards = job.group.shards(8)                          # e.g. Shards(total=8, first=3, count=2): 3 and 4
    leaves = [gradient(batch[s]) for s in shards]
    g = await job.group.all_reduce(shards.leaves(leaves), op="avg")     # the mean over all 8

Passing a plain tensor is the common case of one leaf per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from quicoll.collectives.base import TensorsT
from quicoll.errors import LocalError

__all__ = ["Leaves", "Shards"]


@dataclass(frozen=True, slots=True)
class Leaves(Generic[TensorsT]):
    """The leaves of a reduction that this rank holds: one tensor, or list of tensors, for each of its shards, in the
    order of the shards. Made by `Shards.leaves`."""

    shards: Shards
    values: tuple[TensorsT, ...]
    like: TensorsT | None = None


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards [first, first + count) of `total`, which this rank holds in view `view_id`. Iterates over them."""

    total: int
    first: int
    count: int
    view_id: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.count))

    def __len__(self) -> int:
        return self.count

    def __contains__(self, shard: object) -> bool:
        return shard in range(self.first, self.first + self.count)

    @property
    def text(self) -> str:
        """The numbers of the shards, for people."""
        return (
            f"{self.first} to {self.first + self.count - 1} of {self.total}" if self.count else f"none of {self.total}"
        )

    def leaves(self, values: Sequence[TensorsT], *, like: TensorsT | None = None) -> Leaves[TensorsT]:
        """Put the tensors of these shards together for `all_reduce`, `reduce` or `reduce_scatter`.

        Args:
            values: A tensor, or a list of tensors, for each shard, in their order; of equal shapes and dtypes.
            like: One of the same shapes and dtypes, whose values are not used. Needed only where there are no shards.
        Returns:
            The leaves, for a reduction in the view in which the shards were asked for.
        Raises:
            LocalError: The number of values is not that of the shards, or there are none and no `like`.
        """
        given = tuple(values)
        if len(given) != self.count:
            raise LocalError(f"{len(given)} leaves for the {self.count} shards of this rank, {self.text}")
        if not given and like is None:
            raise LocalError("this rank holds no shard: pass like=, a tensor of the leaves' shape and dtype")
        return Leaves(self, given, like)
