"""Samples that a loader reads ahead, as torch's DataLoader does in its worker processes: none is lost or used twice.

    feed = quicoll.data.Feed(
        sampler, lambda lists: DataLoader(dataset, batch_sampler=lists, num_workers=2, persistent_workers=True)
    )
    async with job.step() as step:
        for part in feed.take(step, job.group.shards(sampler.shards)):
            part.samples                                   # what the loader made of part.indices

A loader reads ahead of the commits: it is given lists of indices, one for each shard of this rank that has samples,
step after step and epoch after epoch, on the guess that all steps will be committed in the present view. What a step
uses is not the loader's to say but the sampler's. So everything that is read ahead is a guess that is kept or thrown
away, and the position (quicoll.data.sampler) moves at commits alone.

States. `coming`: which step of the data, in which shards, the loader's next batch belongs to; None: nothing is being
read. `held`: what has been read for steps that are not committed, by the same.

    wanted is held              an attempt is repeated, with the same shards: the same samples again, out of memory
    wanted is coming            the guess was right: the loader's next batches, one for each shard that has samples
    neither                     the view has changed, or a state was handed over: the loader is begun anew, at what is
                                wanted. What it had read ahead is asked for again, by whichever rank has it now

`held` is bounded by what is asked for ahead of the commits: what is of steps that are committed is let go when the
next is asked for.

Invariants: samples are paired with their indices by their order in the loader alone, so a loader keeps that order
(torch's `in_order=True`, its default), and takes the very lists that it was given (`batch_sampler=lists`); both are
looked at. A loader that failed is begun anew at the next `take`: after an error nobody knows where it stands.

What is asked for again is read again. Where a data set makes random changes (augmentation), the numbers should come
from the sample's index and the epoch, or an attempt that is repeated computes something else than the first, which is
no harm to exactness, but to replaying a run.

Nothing here waits but the loader; a loader with a timeout of its own raises where it hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.collectives.shards import Shards
    from quicoll.data.portions import Portion, Position
    from quicoll.data.sampler import OpenStep, Sampler

__all__ = ["Feed", "Lists"]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A step of the data, in the order of a seed, for the shards of one rank: of each run the first, and how many."""

    seed: int
    position: Position
    runs: tuple[tuple[int, int], ...]


class Lists:
    """The lists of indices that a loader is to read, from where its feed stands: torch's `batch_sampler`.

    Each iteration begins anew at the step that is wanted next, and has no end: epochs follow each other.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._from: tuple[Position, Sequence[Shards]] | None = None

    def begin(self, position: Position, shards: Sequence[Shards]) -> None:
        """Say where the next iteration begins. The feed does."""
        self._from = position, shards

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over lists of indices, none of them empty.

        Raises:
            LocalError: No feed has been asked yet.
        """
        if self._from is None:
            raise LocalError("a feed's loader is read by the feed: call feed.take(step, shards)")
        return self._lists(*self._from)

    def _lists(self, position: Position, shards: Sequence[Shards]) -> Iterator[list[int]]:
        while any(map(len, shards)):  # a rank without shards has nothing to read
            for run in shards:
                for portion in self._sampler.portions(position, run):
                    if portion.indices.size:
                        yield portion.indices.tolist()
            position = self._sampler.after(position)


class Feed:
    """See the module's head. Not thread-safe: use it where the job is used.

    Attributes:
        sampler: Which samples a step uses; its state is the feed's.
        loader: What was made of the lists.
    """

    def __init__(self, sampler: Sampler, loader: Callable[[Lists], Iterable[Any]]) -> None:
        """Make a feed. Nothing is read yet.

        Args:
            sampler: Which samples a step uses.
            loader: Makes the loader from lists of indices: something that can be iterated over more than once, and
                gives one batch for each list, in their order.
        Raises:
            LocalError: A loader of torch's that takes other lists, or gives batches in another order.
        """
        self.sampler = sampler
        self._lists = Lists(sampler)
        self.loader = loader(self._lists)
        if getattr(self.loader, "batch_sampler", self._lists) is not self._lists:
            raise LocalError("the feed's loader takes other lists than the feed's: pass batch_sampler=lists")
        if not getattr(self.loader, "in_order", True):
            raise LocalError("the feed's loader gives batches in any order: leave in_order=True")
        if isinstance(self.loader, Iterator):
            raise LocalError("the feed's loader can be iterated over only once: give a DataLoader, or one like it")
        self._batches: Iterator[Any] | None = None
        self._coming: _Wanted | None = None
        self._held: dict[_Wanted, tuple[Portion, ...]] = {}

    def take(self, step: OpenStep, shards: Shards) -> tuple[Portion, ...]:
        """Take this rank's samples of the next step of the data. Counts if, and only if, the step is committed.

        Args:
            step: The open step.
            shards: `job.group.shards(sampler.shards)`, asked for in this step.
        Returns:
            One portion for each of this rank's shards, in their order, with the samples that the loader made.
        Raises:
            LocalError: As `Sampler.take`; or the loader has ended, where its lists have no end.
            Exception: What the loader raises.
        """
        return self.portions(self.sampler.reserve(step, shards), shards)

    def portions(self, position: Position, shards: Shards, *more: Shards) -> tuple[Portion, ...]:
        """Return what some shards have in a step of the data, with their samples. Nothing moves.

        Args:
            position: The step, not one before that which the sampler stands at.
            shards: The shards.
            more: Further runs of them, where what this rank computes is several.
        Returns:
            One portion for each shard, in their order, with the samples that the loader made.
        Raises:
            LocalError: As `Sampler.portions`; or the loader has ended, where its lists have no end.
            Exception: What the loader raises.
        """
        runs = (shards, *more)
        wanted = _Wanted(int(self.sampler.seed), position, tuple((run.first, run.count) for run in runs))
        now = self.sampler.position
        self._held = {
            key: parts for key, parts in self._held.items() if key.seed == wanted.seed and key.position >= now
        }
        if wanted not in self._held:
            self._held[wanted] = self._read(wanted, runs)
        return self._held[wanted]

    def close(self) -> None:
        """Let the loader's processes go, and what has been read. Another `take` begins anew."""
        self._batches = self._coming = None
        self._held = {}

    def _read(self, wanted: _Wanted, shards: Sequence[Shards]) -> tuple[Portion, ...]:
        parts = self.sampler.portions(wanted.position, *shards)
        begun = self._batches is not None and wanted == self._coming
        if not begun and not any(part.indices.size for part in parts):
            return parts  # nothing to read, and nothing known of what follows
        if self._batches is None or not begun:
            self._batches = None  # first: a loader's old processes end before its new ones begin
            self._lists.begin(wanted.position, shards)
            self._batches = iter(self.loader)
        self._coming = None  # should the loader fail, nobody knows where it stands
        filled = tuple(self._filled(part, self._batches) for part in parts)
        self._coming = replace(wanted, position=self.sampler.after(wanted.position))
        return filled

    def _filled(self, part: Portion, batches: Iterator[Any]) -> Portion:
        if not part.indices.size:
            return part
        try:
            return replace(part, samples=next(batches))
        except StopIteration:
            raise LocalError("the feed's loader has ended, though its lists have no end") from None
