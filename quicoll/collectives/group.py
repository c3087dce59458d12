"""The public collectives. Arguments are checked here, on the caller's thread, before anything is sent.

Every operation starts when it is called and gives a `Handle`; awaiting that gives the result. Numpy arrays and torch
CPU tensors are taken alike and results are of the kind that was given. Unless `out` is given the result is a new
tensor; an aborted call leaves inputs and `out` untouched. Inputs must not change until the operation has ended. All
ranks of a group must issue the same collectives of it in the same order; what they call is compared before any payload
is used. (`send` and `recv` concern two ranks and are counted for each pair apart.) Operations of different groups are
independent of each other: quicoll.collectives.subgroups says what that asks of their order.

Errors of every collective: LocalError (bad arguments; raised by the call itself, nothing sent); and from the await
Mismatch (the ranks called different things), PeerError (a rank was lost or is late), Corrupted (bytes changed on the
way, after all resends), Partitioned (this rank is cut off). After all but the first the view is dead, for the ranks
that are in no group with the culprit as well: leave the step, and begin it again. `rank` of an error, and the ranks in
its text, are ranks of the view.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll import plan
from quicoll.checks import whole
from quicoll.collectives.movements import Moving
from quicoll.collectives.reductions import AlgorithmName, ReduceOrder, Reducing
from quicoll.collectives.shards import Shards
from quicoll.collectives.subgroups import MAX_COLOR, MAX_DEPTH, MAX_KEY, WORLD, Scope, divide
from quicoll.engine.communicator import Call, Known
from quicoll.engine.executor import Work
from quicoll.errors import LocalError, PeerError
from quicoll.numerics.bundle import bundle, results
from quicoll.numerics.reduce import ReduceOp, leaves_of

if TYPE_CHECKING:
    from quicoll.collectives.context import Caller
    from quicoll.collectives.handle import Handle

__all__ = ["AlgorithmName", "Group", "ReduceOrder"]


class Group(Reducing, Moving):
    """Ranks that work together. `job.group` has all of the job's present view, and follows it from view to view; a
    sub-group, made by `split`, belongs to the view in which it was made.

    rank, world_size: within the group. ranks: which ranks of the view they are.
    """

    def __init__(self, caller: Caller, scope: Scope = WORLD) -> None:
        super().__init__(caller, scope)

    def __repr__(self) -> str:
        return f"<Group {self.name or 'of all'} rank {self.rank} of {self.world_size}>"

    @property
    def name(self) -> str:
        """ "" for all ranks; of a sub-group the splits that led to it, "number:color", joined by "/". Operations of a
        sub-group are named after it: "all_reduce#3@0:1"."""
        return self._scope.name

    @property
    def stale(self) -> bool:
        """Whether the group belongs to another view than the present one, so that it has to be split anew."""
        return self._scope.view_id not in (None, self._caller.view.view_id)

    def shards(self, total: int) -> Shards:
        """Which of `total` logical shards, 2**31 at most, this rank holds in the present view: contiguous, by rank,
        balanced."""
        total = whole(total, "the number of shards")
        if not 1 <= total <= 1 << 31:
            raise LocalError(f"there must be at least one shard and at most 2**31, not {total}")
        mine = leaves_of(self.rank, self.world_size, total)
        return Shards(total, mine.start, len(mine), self._view.view_id)

    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None) -> Handle[Group | None]:
        """Divide the group: the ranks that give the same color are a sub-group. A collective of all its ranks.

        color: 0 or above; None: in no sub-group, and the result is None. key: orders the ranks of a sub-group; equal
        keys, by their rank in this group (MPI 4.1, 7.4.2). Result: the sub-group of this rank, good for the present
        view alone: split again in the next one (`stale` says when). Sub-groups can be split again.
        Cost: one delay, no payload. Split once in a view and keep the result: each split's names are kept until the
        view ends. A step may use at most 256 sub-groups of a rank.
        """
        try:
            color, key = None if color is None else operator.index(color), operator.index(key)
        except TypeError:
            raise LocalError(f"color and key are integers (color may be None), not {color!r} and {key!r}") from None
        if color is not None and not 0 <= color <= MAX_COLOR:
            raise LocalError(f"a color is an integer from 0 to {MAX_COLOR}, or None; not {color}")
        if abs(key) > MAX_KEY:
            raise LocalError(f"a key is an integer from {-MAX_KEY} to {MAX_KEY}, not {key}")
        if self._scope.depth >= MAX_DEPTH:
            raise LocalError(f"sub-groups nest at most {MAX_DEPTH} deep")
        view_id, number = self._view.view_id, self._caller.next_split(self._scope.group_id)
        here, mine, ranks = self._scope, self.rank, self.ranks
        nothing = bundle(np.empty(0, np.uint8))
        table: list[Any] = []

        def make(known: Known) -> Work:
            for rank, row in enumerate(known.counts):
                if row is None or len(row) != 2 or row[1] > 2 * MAX_KEY or row[0] > MAX_COLOR + 1:
                    raise PeerError("splits without a color and a key", rank=self._view_rank(rank))
            table.append(np.array(known.counts, np.int64))
            # What there is to know has come with the calls: nothing is left to be sent.
            return Work(
                plan.barrier(rank=0, world=1),
                nothing.dtype,
                nothing.dtype,
                ReduceOp.BOR,
                [],
                results(None, nothing).flat,
            )

        def deliver() -> Group | None:
            chosen = [(int(color) - 1 if color else None, int(key)) for color, key in table[0]]
            color = chosen[mine][0]
            if color is None:
                return None
            members = divide(chosen)[color]
            scope = here.sub(
                number, color, tuple(ranks[rank] for rank in members), members.index(mine), view_id=view_id
            )
            if view_id == self._caller.view.view_id:
                self._caller.claim(scope.group_id, scope.name)
            return self._divided(scope)

        # Zero says that there is no color; announcements carry no negative numbers.
        row = (0 if color is None else color + 1, key + MAX_KEY)
        terms = f"color={'none' if color is None else color} key={key}"
        call = Call("split", f"split number={number}", make, counts=row, gathers=True)
        handle = self._start(call, deliver, timeout, op="split", terms=terms, equal=lambda: table[0])
        self._caller.split_issued(self._scope.group_id)
        return handle

    def _divided(self, scope: Scope) -> Group:
        """The sub-group that a split gives: of the kind that was split."""
        return Group(self._caller, scope)
