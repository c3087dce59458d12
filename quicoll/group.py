"""The public collectives. Arguments are checked here, on the caller's thread, before anything is sent.

Every operation starts when it is called and gives a `Handle`; awaiting that gives the result. Numpy arrays and torch
CPU tensors are taken alike and results are of the kind that was given. Unless `out` is given the result is a new
tensor; an aborted call leaves inputs and `out` untouched. Inputs must not change until the operation has ended. All
ranks of a view must issue the same collectives in the same order; what they call is compared before any payload is
used. (`send` and `recv` concern two ranks and are counted for each pair apart.)

Errors of every collective: LocalError (bad arguments; raised by the call itself, nothing sent); and from the await
Mismatch (the ranks called different things), PeerError (a rank was lost or is late), Corrupted (bytes changed on the
way, after all resends), Partitioned (this rank is cut off). After all but the first the view is dead: leave the step,
and begin it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.errors import LocalError
from quicoll.moving import Moving
from quicoll.reduce import held
from quicoll.reducing import AlgorithmName, ReduceOrder, Reducing
from quicoll.shards import Shards

if TYPE_CHECKING:
    from quicoll.caller import Caller

__all__ = ["STATE_GROUP", "WORLD_GROUP", "AlgorithmName", "Group", "ReduceOrder"]

WORLD_GROUP = 0  # the users' collectives
STATE_GROUP = 1  # the library's own, when a view begins


class Group(Reducing, Moving):
    """All ranks of the job's present view. `job.group` gives it; it follows the job from view to view."""

    def __init__(self, caller: Caller, *, group_id: int = WORLD_GROUP) -> None:
        super().__init__(caller, group_id=group_id, audited="world" if group_id == WORLD_GROUP else None)

    def shards(self, total: int) -> Shards:
        """Which of `total` logical shards this rank holds in the present view: contiguous, by rank, balanced."""
        if total < 1:
            raise LocalError(f"there must be at least one shard, not {total}")
        mine = held(self.rank, self.world_size, total)
        return Shards(total, mine.start, len(mine), self._caller.view.view_id)
