"""How an epoch is divided: into steps, a step into logical shards. Pure; the same on every rank, whatever its number.

    epoch     `length` samples in an order of its own (quicoll.data.order)
    step k    the places [k * batch, (k + 1) * batch) of that order, cut at the end of the epoch
    shard s   of m places of a step: [s * m // shards, (s + 1) * m // shards), so all equal in a whole batch

World sizes do not occur here: a rank takes the shards that the view gives it, so which samples a step uses, and which
of them make one leaf of the reduction, depends on (seed, epoch, step) alone.

The last step of an epoch. Without `drop_last` (the default) it has the samples that are left: fewer than a batch, and
with fewer samples than shards some portions are empty. Every sample is in exactly one step of every epoch. With
`drop_last` there is no such step: the `length % batch` samples that come last in the epoch's order are in none of it,
others in each epoch, and no sample is in two.

The mean over the shards is to be the mean over the samples, also in that last step: a portion has a weight,
(its samples) * shards / (the step's samples), by which its leaf is multiplied before `all_reduce(op="avg")`. It is
exactly 1 in every whole batch, because `batch` is a multiple of `shards`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quicoll.data.order import MAX_SAMPLES
from quicoll.errors import LocalError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quicoll.data.order import EpochOrder

__all__ = ["Division", "Portion", "Position"]


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a job stands in its data: the next step to be taken.

    Attributes:
        epoch: From 0.
        step: Within the epoch, from 0.
    """

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Portion:
    """The samples of one logical shard in one step.

    Attributes:
        shard: The shard.
        indices: Of the samples in the data set, int64; empty at times in the last step of an epoch.
        weight: By which the shard's leaf is multiplied; 1.0 but in the last step of an epoch.
        samples: The samples themselves, as a loader made them; None without one, and where there are none.
    """

    shard: int
    indices: NDArray[np.int64]
    weight: float
    samples: Any = None


@dataclass(frozen=True, slots=True)
class Division:
    """See the module's head.

    Attributes:
        length: Samples of the data set.
        batch: Samples of a step, on all ranks together.
        shards: Logical shards of a step.
        drop_last: Whether a last step with fewer samples is left out.
    """

    length: int
    batch: int
    shards: int
    drop_last: bool

    def __post_init__(self) -> None:
        """Refuse what cannot be divided so. Raises LocalError."""
        if not 1 <= self.length <= MAX_SAMPLES:
            raise LocalError(f"there must be at least one sample and at most 2**60, not {self.length}")
        if not 1 <= self.shards <= 1 << 31:
            raise LocalError(f"there must be at least one shard and at most 2**31, not {self.shards}")
        if self.batch < 1 or self.batch % self.shards:
            raise LocalError(
                f"the batch size, of all ranks, must be a multiple of the {self.shards} shards, not {self.batch}"
            )
        if self.drop_last and self.length < self.batch:
            raise LocalError(f"with drop_last, {self.length} samples make no batch of {self.batch}")

    @property
    def steps(self) -> int:
        """The number of steps in an epoch, 1 or more."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def after(self, position: Position) -> Position:
        """Return the position one step further."""
        last = position.step + 1 == self.steps
        return Position(position.epoch + 1, 0) if last else Position(position.epoch, position.step + 1)

    def samples(self, step: int) -> int:
        """Return the number of samples in a step of an epoch."""
        return min(self.batch, self.length - step * self.batch)

    def portions(self, order: EpochOrder, step: int, first: int, count: int) -> tuple[Portion, ...]:
        """Return what the shards [first, first + count) have in a step.

        Args:
            order: Of the epoch.
            step: Of the epoch.
            first: The first shard.
            count: How many, with `first` at most `shards`.
        """
        samples = self.samples(step)
        cuts = [shard * samples // self.shards for shard in range(first, first + count + 1)]
        place = step * self.batch + cuts[0]
        indices = order.samples(place, place + cuts[-1] - cuts[0])
        return tuple(
            Portion(first + number, indices[start - cuts[0] : stop - cuts[0]], (stop - start) * self.shards / samples)
            for number, (start, stop) in enumerate(pairwise(cuts))
        )
