"""What the logical workers do in each stretch of an attempt at a round, and what all ranks say of it.

The shell of quicoll.train.diloco_quorum, where it says what is decided and by whom:

    start    all ranks hear which workers begin the round anew. Inner steps may have been done before it, ahead of the
             decision on the round before: nothing is sent, and nobody is stopped, until it is there
    open     receives are posted: each other rank sends a byte when it ends the stretch. That is the hint
    look     before each inner step: whether this rank stops here. Where a home has several parts, each rank of it says
             in the reduction of an inner step whether it wants to stop (`late`), and they all stop after the step where
             any does
    close    the byte goes to all others, and what each worker here has done to all ranks, by an all_gather: the
             speaker of a home says it (quicoll.train.diloco_sites)
    settle   at the end of the round, when every rank has ended every stretch: nothing stays under way

With a journal to be replayed the numbers are its own, and nobody sends a hint. Without a quorum all do all, and nothing
is sent but, at the start, which workers begin the round anew.

Every rank makes the same calls, as everywhere in a step. A receive is answered when the slowest rank has ended the
stretch: what bounds that are the reductions at its end, with the setting `timeout`.

Failures. A rank says what cannot be, more inner steps than there are: PeerError, which names it. A rank is lost: the
view ends, and with it every operation that is under way here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import PeerError
from quicoll.train.diloco_journal import RoundEntry
from quicoll.train.diloco_quorum import Counts, StretchEnds, shares_in

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.collectives.handle import Handle
    from quicoll.train.diloco_sites import WorkerHome

__all__ = ["Stretches"]

_BOUNDED_ELSEWHERE_S = 86400.0  # see the module's head


class Stretches:
    """See the module's head. Of one attempt."""

    def __init__(
        self,
        group: Group,
        home: WorkerHome,
        stretches: Sequence[range],
        *,
        number: int,
        quorum: int | None,
        grace: float,
        anew: Sequence[bool],
        replayed: RoundEntry | None,
    ) -> None:
        """Be in the first stretch. Nothing is sent yet.

        Args:
            group: All ranks.
            home: Of this one.
            stretches: The inner steps of each.
            number: Of the round.
            quorum: As in `demand_quorum`.
            grace: Likewise.
            anew: Whether each worker of this home begins the round anew.
            replayed: What is said of this round in a journal that is replayed; None: none is.
        """
        self._group, self._home, self._lengths, self._number = group, home, stretches, number
        self._quorum = quorum if replayed is None else None
        self._grace_ns = round(grace * 1e9)
        self._counting = quorum is not None or replayed is not None
        self._planned: Counts = replayed.done if replayed is not None else ()
        self._before: Counts | None = None
        self._clock = asyncio.get_running_loop().time
        self._under_way: list[Handle[Any]] = []
        self._said: list[Handle[Any]] = []
        self._mine: list[list[int]] = []  # of each closed stretch, what the workers of this home did
        self._table: list[list[int]] = []  # of each that was heard, what all did
        self._open = -1
        self._arrivals: StretchEnds | None = None
        self._limits: list[int] = []
        self._new = np.array(anew if home.speaks else (), np.uint8)
        self._anew: Handle[Any] | None = None  # what all say of that; None: not started
        self._next()

    def start(self, before: Counts | None) -> None:
        """Say which workers begin anew, and listen for the end of the first stretch. Before any other call but `does`.

        Args:
            before: What each worker did in each stretch of the round before; None: there was none.
        """
        self._before = before
        self._anew = self._group.all_gather(self._new, counts=self._home.spoken)
        self._listen()

    def _next(self) -> None:
        self._open += 1
        self._arrivals = None
        if self._open == len(self._lengths):
            return
        stretch = self._lengths[self._open]
        done = self._own(self._planned[self._open]) if self._planned else ()
        self._limits = [stretch.start - 1 + each for each in done or [len(stretch)] * len(self._home.workers)]

    def _listen(self) -> None:
        if self._quorum is not None and self._open < len(self._lengths) and self._lengths[self._open]:
            self._arrivals = StretchEnds(self._quorum, self._grace_ns)
            for rank in self._others():
                self._receive(self._arrivals, rank)

    def _own(self, row: Sequence[int]) -> Sequence[int]:
        return row[self._home.workers.start : self._home.workers.stop]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.world_size) if rank != self._group.rank]

    def _receive(self, arrivals: StretchEnds, rank: int) -> None:
        workers = len(self._home.spoken_by(rank))
        handle = self._group.recv(np.empty(1, np.uint8), source=rank, timeout=_BOUNDED_ELSEWHERE_S)
        handle.add_done_callback(partial(self._heard, arrivals, workers))
        self._under_way.append(handle)

    def _heard(self, arrivals: StretchEnds, workers: int, future: asyncio.Future[int]) -> None:
        if not future.cancelled() and future.exception() is None:
            arrivals.arrived(workers, self._now_ns())

    def _now_ns(self) -> int:
        return round(self._clock() * 1e9)

    @property
    def late(self) -> bool:
        """Whether this rank wants its home to stop where it is."""
        return self._arrivals is not None and self._arrivals.over(self._now_ns())

    def stop(self, done: int) -> None:
        """Let this home's workers do no more of the stretch; on all ranks of the home.

        Args:
            done: The number in the round of the last inner step that they do.
        """
        self._limits = [min(limit, done) for limit in self._limits]

    def does(self, place: int, done: int) -> bool:
        """Return whether a worker of this home does an inner step.

        Args:
            place: Which of them.
            done: The step's number in the round.
        """
        return done <= self._limits[place]

    def close(self) -> None:
        """End the open stretch, and open the next one."""
        if self._arrivals is not None:
            for rank in self._others():
                sent = self._group.send(np.zeros(1, np.uint8), to=rank, timeout=_BOUNDED_ELSEWHERE_S)
                self._under_way.append(sent)
        self._mine.append([limit - self._lengths[self._open].start + 1 for limit in self._limits])
        if self._counting:
            told = self._mine[-1] if self._home.speaks else ()
            self._said.append(self._group.all_gather(np.array(told, np.int64), counts=self._home.spoken))
        self._next()
        self._listen()

    def share(self, place: int, stretch: int) -> float:
        """Return what part a worker of this home has done of what an exchange is of, 0 to 1.

        Args:
            place: Which of them.
            stretch: At whose end the exchange begins; it is closed.
        """
        before = None if self._before is None else [self._own(row)[place : place + 1] for row in self._before]
        (done,), due = shares_in(stretch, self._lengths, before, [row[place : place + 1] for row in self._mine])
        return done / due if due else 1.0

    async def factor(self, stretch: int) -> float:
        """Return by what the mean over all workers is multiplied, so that it is one by weights.

        Args:
            stretch: As in `share`.
        Returns:
            0.0 where no worker has done anything.
        Raises:
            PeerError: A rank was lost, or says what cannot be.
        """
        if not self._counting:
            return 1.0
        await self._hear(stretch)
        done, due = shares_in(stretch, self._lengths, self._before, self._table)
        return len(done) * due / sum(done) if sum(done) else float(not due)

    async def settle(self) -> RoundEntry:
        """End the round: nothing stays under way.

        Returns:
            What the journal says of the round, if it is committed.
        Raises:
            PeerError: A rank was lost, or says what cannot be.
        """
        for handle in self._under_way:
            await handle
        if self._counting:
            await self._hear(len(self._lengths) - 1)
        if self._anew is None:
            raise AssertionError("a round is settled that was not started")
        told = np.asarray(await self._anew)
        cut = any(min(row) < len(stretch) for row, stretch in zip(self._table, self._lengths, strict=False))
        return RoundEntry(
            self._number,
            tuple(int(worker) for worker in np.flatnonzero(told)) if self._number > 1 else (),
            tuple(map(tuple, self._table)) if cut else (),
        )

    async def _hear(self, stretch: int) -> None:
        """Take in what all ranks have said, up to a stretch."""
        while len(self._table) <= stretch:
            number = len(self._table)
            row = [int(each) for each in np.asarray(await self._said[number])]
            for worker, each in enumerate(row):
                if not 0 <= each <= len(self._lengths[number]):
                    raise PeerError(
                        f"says that logical worker {worker} did {each} of the {len(self._lengths[number])} inner steps "
                        f"of a stretch of round {self._number}",
                        rank=next(
                            rank for rank in range(self._group.world_size) if worker in self._home.spoken_by(rank)
                        ),
                        step=self._number,
                    )
            self._table.append(row)
