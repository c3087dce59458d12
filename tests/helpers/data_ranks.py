"""The samplers of a job's ranks in one process, with steps that a test commits or does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from quicoll.collectives.shards import Shards
from quicoll.numerics.canonical_order import leaves_of

if TYPE_CHECKING:
    from quicoll.data import Position, Sampler

__all__ = ["Attempted", "SampledRanks", "exactly_once", "shards_of"]


class Attempted:
    """A step that a test commits, or does not."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []
        self.on_commit = self.actions.append

    def commit(self) -> None:
        for action in self.actions:
            action()


def shards_of(rank: int, world: int, total: int) -> Shards:
    mine = leaves_of(rank, world, total)
    return Shards(total, mine.start, len(mine), 1)


class SampledRanks:
    """The samplers of a job whose ranks come and go, and what the committed steps have used."""

    def __init__(self, make: Callable[[], Sampler]) -> None:
        self.make = make
        self.samplers: list[Sampler] = [make()]
        self.used: list[tuple[Position, list[int]]] = []

    def world(self, size: int) -> None:
        """Another view: those who are new are handed the state of one that was there."""
        state = self.samplers[0].state()
        while len(self.samplers) < size:
            joined = self.make()
            joined.load_state(state)
            self.samplers.append(joined)
        del self.samplers[size:]

    def restart(self) -> None:
        """All processes end; those that come load the checkpoint."""
        state, size = self.samplers[0].state(), len(self.samplers)
        self.samplers = [self.make()]
        self.samplers[0].load_state(state)
        self.world(size)

    def step(self, *, commits: bool, takes: int = 1) -> None:
        attempts = [Attempted() for _ in self.samplers]
        for _ in range(takes):
            taken: list[int] = []
            positions = []
            for rank, (sampler, attempt) in enumerate(zip(self.samplers, attempts, strict=True)):
                shards = shards_of(rank, len(self.samplers), sampler.shards)
                position = sampler.reserve(attempt, shards)
                positions.append(position)
                taken += [int(index) for part in sampler.portions(position, shards) for index in part.indices]
            assert len(set(positions)) == 1
            if commits:
                self.used.append((positions[0], taken))
        if commits:
            for attempt in attempts:
                attempt.commit()
        assert len({sampler.position for sampler in self.samplers}) == 1


def exactly_once(ranks: SampledRanks, length: int, left_out: int = 0) -> None:
    """Demand that the committed steps have used each sample once in every epoch that is over, none twice in any."""
    by_epoch: dict[int, list[int]] = {}
    for position, samples in ranks.used:
        by_epoch.setdefault(position.epoch, []).extend(samples)
    for epoch, samples in by_epoch.items():
        assert not samples or max(Counter(samples).values()) == 1
        if epoch < ranks.samplers[0].epoch:
            assert len(samples) == length - left_out
            assert set(samples) <= set(range(length))
