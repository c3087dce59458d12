"""The groups in which a rank of a DiLoCo job reduces: inside of its home, and with the carriers of its lanes.

The shell of quicoll.train.diloco_sites, where it says what homes and lanes are. Of one view:

    mean        of the parts of a home's workers, in each inner step: all ranks of the home
    begin       of a fragment: each lane that this rank carries is under way, between the carriers of all homes
    whole       the lanes are awaited where the result is applied, by number, and put together inside of the home

In each group its ranks make the same calls in the same order. With homes of one rank there is one lane, in the group of
all ranks, and nothing is put together.

Failures. A rank is lost: the view ends, and with it the groups, and every operation in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quicoll.train.diloco_sites import WorkerHome, lane_cuts

if TYPE_CHECKING:
    import torch

    from quicoll.collectives.group import Group
    from quicoll.collectives.handle import Handle
    from quicoll.numerics.codecs import WireFormat
    from quicoll.plan.schedule import AlgorithmName

__all__ = ["FragmentUnderWay", "SiteLanes"]


class FragmentUnderWay(NamedTuple):
    """A fragment that is averaged. lanes: those that this rank carries, in order. counts: numbers that each rank of its
    home carries."""

    lanes: list[Handle[torch.Tensor]]
    counts: list[int]


class SiteLanes:
    """See the module's head."""

    def __init__(self, group: Group, home: WorkerHome, *, parts: int, algorithm: AlgorithmName) -> None:
        """Make the groups; nothing is sent.

        Args:
            group: All ranks of the view.
            home: Of this rank.
            parts: Of each worker.
            algorithm: As in `Group.all_reduce`.
        """
        self.home = home
        self._parts, self._algorithm = parts, algorithm
        self._inside = group if parts == 1 else group.subgroup(home.ranks, f"diloco home {home.place}")
        everybody = tuple(range(group.world_size))
        self._lanes = {
            lane: group if (ranks := home.carriers(lane)) == everybody else group.subgroup(ranks, f"diloco lane {lane}")
            for lane in home.carries()
        }

    async def mean(self, leaves: Sequence[Sequence[torch.Tensor]], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the means over all parts of some workers of this home.

        Args:
            leaves: Of each part that this rank computes a flat tensor for each of the workers.
            like: Tensors of their shapes.
        Raises:
            PeerError: A rank was lost.
        """
        given = self._inside.shards(self._parts).leaves([[*leaf] for leaf in leaves], like=[*like])
        return await self._inside.all_reduce(given, op="avg", algorithm=self._algorithm)

    def begin(
        self, flats: Sequence[torch.Tensor], like: torch.Tensor, wire: WireFormat | None, block: int
    ) -> FragmentUnderWay:
        """Begin to average a fragment over all workers.

        Args:
            flats: Of each worker of this home, flat.
            like: A tensor of their shape.
            wire: As in `Group.all_reduce`.
            block: So many numbers are encoded together.
        Returns:
            What is under way.
        """
        home = self.home
        cuts, found = lane_cuts(like.numel(), block, home.lanes), []
        for lane, group in self._lanes.items():
            if (cut := cuts[lane]).start < cut.stop:
                pieces = group.shards(home.total).leaves([flat[cut] for flat in flats], like=like[cut])
                found.append(group.all_reduce(pieces, op="avg", algorithm=self._algorithm, wire=wire))
        carried = dict.fromkeys(home.ranks, 0)
        for lane, cut in enumerate(cuts):
            carried[home.carriers(lane)[home.place]] += cut.stop - cut.start
        return FragmentUnderWay(found, list(carried.values()))

    async def whole(self, under_way: FragmentUnderWay) -> torch.Tensor:
        """Return the average of a fragment, which is the same on all ranks.

        Args:
            under_way: What `begin` returned.
        Raises:
            PeerError: A rank was lost.
        """
        import torch

        pieces = [await each for each in under_way.lanes]
        mine = pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0), *pieces])
        return mine if len(self.home.ranks) == 1 else await self._inside.all_gather(mine, counts=under_way.counts)
