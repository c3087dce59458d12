"""Ranks that call collectives late: by how much, and what that costs.

An operation can end once the last of its ranks has called it. Each rank sees when it hears of the others' calls (their
announcements; its own call counts from when it is made) and decides by that alone: these times are of one clock, its
own, so that clocks of different hosts are never compared. The delay of the network is in them; therefore

    late          later than the (lower) median of the operation's ranks by more than the threshold
    threshold     the larger of `after` (a setting) and two round trips to the rank in question

The median, because one or a few late ranks do not move it. The lower one, so that of two ranks the first sets the
measure. Two round trips, because an announcement that had to be sent once more comes that late though its rank was in
time; where ranks call through the memory of their host nothing is sent, and a link, which a busy machine may have found
slow, says nothing of them. The threshold does not adapt to the past: a rank that is late every time is late.

Time is counted once. Several operations in flight wait for the same rank at the same time (a late rank that calls
thirty at once makes all thirty late): what counts for an operation is the time after everything that has been counted
for that rank. So `total_s` is time that passed on the clock of the observer, the sum over a rank's reports; and no
report says less than the threshold.

Ranks see different things, and each reports what it sees: a rank that is late finds itself late, all others find it
later by the delay of their links. A rank that does not come at all is not reported here: PeerError names it.

Everything here is pure; times are nanoseconds of the observer's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

__all__ = ["Late", "Straggler", "Stragglers"]


@dataclass(frozen=True, slots=True)
class Late:
    """One late call.

    Attributes:
        rank: Of the view.
        op: The operation.
        seconds: For which the operation waited and which were not counted yet.
    """

    rank: int
    op: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Straggler:
    """All that this rank has seen of one late rank.

    Attributes:
        rank: Its number in the last view in which it was late.
        node: Its name.
        times: How often.
        worst_s: The longest of them, in seconds.
        worst_op: The operation of that.
        total_s: Seconds that operations here waited for it.
    """

    rank: int
    node: str
    times: int
    worst_s: float
    worst_op: str
    total_s: float


class Stragglers:
    """Late calls that one rank has seen; outlives views. after_ns: from when on a call is late."""

    def __init__(self, *, after_ns: int) -> None:
        self.after_ns = after_ns
        self._counted_ns: dict[str, int] = {}  # by node, up to when its lateness has been counted
        self.table: tuple[Straggler, ...] = ()
        """By total_s, the most first, then by node. A new tuple whenever it changes: any thread may read it."""

    def called(
        self,
        op: str,
        arrived_ns: Mapping[int, int],
        *,
        rtt_ns: Callable[[int], int],
        node: Callable[[int], str],
    ) -> tuple[Late, ...]:
        """Note that all ranks of an operation have called it.

        Args:
            op: The operation.
            arrived_ns: By rank, when its call became known here.
            rtt_ns: (rank) -> the round trip to it; 0 for oneself, where it is not known and where no link told of the
                call. Asked only of ranks that may be late.
            node: (rank) -> its name.
        Returns:
            The late ones, by rank.
        """
        times = sorted(arrived_ns.values())
        if len(times) < 2 or times[-1] - times[0] <= self.after_ns:
            return ()
        median = times[(len(times) - 1) // 2]
        found: list[Late] = []
        for rank in sorted(arrived_ns):
            at = arrived_ns[rank]
            if at - median <= self.after_ns:
                continue
            name = node(rank)
            fresh_ns = at - max(median, self._counted_ns.get(name, median))
            if fresh_ns <= max(self.after_ns, 2 * rtt_ns(rank)):
                continue
            self._counted_ns[name] = at
            found.append(Late(rank, op, fresh_ns / 1e9))
            self._add(name, found[-1])
        return tuple(found)

    def _add(self, node: str, late: Late) -> None:
        rows = {row.node: row for row in self.table}
        old = rows.get(node, Straggler(late.rank, node, 0, 0.0, "", 0.0))
        row = replace(old, rank=late.rank, times=old.times + 1, total_s=old.total_s + late.seconds)
        if late.seconds > old.worst_s:
            row = replace(row, worst_s=late.seconds, worst_op=late.op)
        rows[node] = row
        self.table = tuple(sorted(rows.values(), key=lambda row: (-row.total_s, row.node)))
