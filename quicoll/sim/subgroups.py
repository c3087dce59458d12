"""Sub-groups in the built-in workload, in the runs of some seeds: splits, and operations that overlap.

Every rank is in four groups besides that of all, and works in all of them at once:

    parity      ranks 0, 2, 4, ... and ranks 1, 3, 5, ...
    halves      the lower and the upper half; each meets both of the former
    backwards   all ranks, numbered from the last to the first
    nested      each group of parity, split again by every other of its ranks

In every group a number of logical shards is reduced to its mean, and every member says who it is. Calls within one
group have the same order on all its members, as they must; which group comes first differs from rank to rank.

What comes of it is part of the state, and a function of the number of the step alone: that is the point. Groups of one
kind differ in members, in size, and in what they send: the leaves of color c are 2^c times those of color 0. That
scales every sum and every rounding exactly (IEEE 754; nothing is near overflow or underflow here), so the result
divided by 2^c has the same bits in every group, and those of `after`, which adds in plain numpy. Where a group takes
another's message for its own, or a result hangs on who is in the group, a rank has another state.

A group ends with its view. Some runs split in every such step, some split once in a view and keep what they have.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.sim.operations import tree

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.job import Job
    from quicoll.plan.schedule import AlgorithmName

__all__ = ["Grouping", "Subgroups", "after", "beginning", "grouping"]

SHARE = 0.3  # of the seeds
GROUPINGS = {"parity": 5, "halves": 3, "backwards": 7, "nested": 6}
"""Logical shards that each kind of group reduces."""
GROUP_ELEMENTS = 131


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """every: steps whose numbers are multiples of it work in groups. keeps: a group is used until its view ends."""

    every: int
    keeps: bool


def grouping(seed: int) -> Grouping | None:
    """Return how the run of this seed uses groups; None: not. Drawn apart from all else that the seed decides."""
    draw = random.Random(f"quicoll.sim/groups/{seed}").random  # noqa: S311 - a simulation has no secrets
    if draw() >= SHARE:
        return None
    return Grouping(every=1 + int(3 * draw()), keeps=draw() < 0.5)


def beginning() -> Any:
    """The part of the state that groups change: a row for each kind."""
    return np.zeros((len(GROUPINGS), GROUP_ELEMENTS), np.float32)


def after(rows: Any, step: int) -> Any:
    """The same after a step that worked in groups, by the definition of the canonical order and nothing else."""
    kinds = enumerate(GROUPINGS.values())
    means = [tree([_leaf(rows, kind, step, shard) for shard in range(n)]) / np.float32(n) for kind, n in kinds]
    return (rows + np.stack(means)).astype(np.float32)


class Subgroups:
    """One rank's groups."""

    def __init__(self, job: Job, keeps: bool, algorithm: AlgorithmName) -> None:
        self._job = job
        self._keeps = keeps
        self._algorithm = algorithm
        self._view_id = 0
        self._groups: list[tuple[Group, int, list[int]]] = []  # with the color, and the ranks that should be in it

    async def work(self, rows: Any, step: int) -> Any:
        """The rows after this step. Raises quicoll's errors, and AssertionError where a group has other members."""
        if not self._keeps or self._view_id != self._job.view.view_id:
            await self._split()
        under_way: dict[int, Any] = {}
        for turn in range(len(GROUPINGS)):
            kind = (turn + self._job.rank) % len(GROUPINGS)
            group, color, _ = self._groups[kind]
            shards = group.shards(list(GROUPINGS.values())[kind])
            leaves = [np.ldexp(_leaf(rows, kind, step, shard), color) for shard in shards]
            under_way[kind] = (
                group.all_reduce(shards.leaves(leaves, like=rows[kind]), op="avg", algorithm=self._algorithm),
                group.all_gather(np.array([[kind, color, self._job.rank]])),
            )
        means = []
        for kind, (group, color, ranks) in enumerate(self._groups):
            mean, members = under_way[kind]
            means.append(np.ldexp(await mean, -color))
            said = (await members).tolist()
            if said != [[kind, color, rank] for rank in ranks] or list(group.ranks) != ranks:
                raise AssertionError(f"{group!r} has ranks {group.ranks}, who say {said}; it should have {ranks}")
        return (rows + np.stack(means)).astype(np.float32)

    async def _split(self) -> None:
        everyone, rank, world = self._job.group, self._job.rank, self._job.world_size
        view_id = self._job.view.view_id
        half = int(2 * rank >= world)
        splits = everyone.split(rank % 2), everyone.split(half), everyone.split(0, -rank)
        parity, halves, backwards = [_there(await split) for split in splits]
        inner = rank // 2 % 2
        nested = _there(await parity.split(inner))
        ranks = list(range(world))
        self._groups = [
            (parity, rank % 2, ranks[rank % 2 :: 2]),
            (halves, half, ranks[-(-world // 2) :] if half else ranks[: -(-world // 2)]),
            (backwards, 0, ranks[::-1]),
            (nested, rank % 4, ranks[rank % 4 :: 4]),
        ]
        self._view_id = view_id


def _there(group: Group | None) -> Group:
    if group is None:
        raise AssertionError("who gives a color is in a group")
    return group


def _leaf(rows: Any, kind: int, step: int, shard: int) -> Any:
    """float32 values whose sum depends on the order of adding."""
    number = np.uint64(step * 97 + shard * 11 + kind * 1009)
    bits = (np.arange(GROUP_ELEMENTS, dtype=np.uint64) * np.uint64(2654435761) + number) % np.uint64(100003)
    return (bits.astype(np.float32) / np.float32(317.0) - rows[kind] * np.float32(0.125)).astype(np.float32)
