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
from typing import Any

from quicoll.errors import LocalError

__all__ = ["Leaves", "Shards"]


@dataclass(frozen=True, slots=True)
class Leaves:
    """One tensor for each shard that this rank holds, in the order of the shards. Made by `Shards.leaves`.

    values: equal shapes and dtypes. like: gives shape and dtype on a rank that holds no shard.
    """

    shards: Shards
    values: tuple[Any, ...]
    like: Any = None


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
        """Which they are, for people."""
        return (
            f"{self.first} to {self.first + self.count - 1} of {self.total}" if self.count else f"none of {self.total}"
        )

    def leaves(self, values: Sequence[Any], *, like: Any = None) -> Leaves:
        """The tensors of these shards, ready for `all_reduce`. `like` is needed only where there are no shards.

        Raises LocalError when the number of tensors is not the number of shards.
        """
        values = tuple(values)
        if len(values) != self.count:
            raise LocalError(f"{len(values)} leaves for the {self.count} shards of this rank, {self.text}")
        if not values and like is None:
            raise LocalError("this rank holds no shard: pass like=, a tensor of the leaves' shape and dtype")
        return Leaves(self, values, like)
