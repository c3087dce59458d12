"""The nodes that are connected to the coordinator, and which of them may be in the next view.

A node that was left out of a view is tried again when it has shown that it reaches the others (probes.py), after a
back-off that doubles with every trial that then failed all the same: a pair that answers and fails in use costs a
bounded share of the time. A node that cannot show it is tried once in the longest back-off; that says nothing new
about the pair, and does not make the next wait longer. So a node whose path was broken for long comes back as soon as
it is good again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quicoll.membership.view import Member, rank_key

if TYPE_CHECKING:
    from quicoll.membership.messages import Join
    from quicoll.membership.view import View

__all__ = ["Backoff", "Candidate", "Roster"]


@dataclass(slots=True)
class Candidate:
    """A connected node.

    Attributes:
        node: Its name.
        join: Its Join.
        committed_step: The last step whose result it holds.
        joined_ns: When it joined.
        leaving: Whether it goes at the next boundary.
        owns: Whether part of the job's state is its own, and perhaps nowhere else.
        parting: Whether it is about to leave, and is to hand that over in a view before (scaling.py).
        learning: Whether it learns the state outside of views, which have it only where they need it.
        warm: Whether it stands by knowing what the state is made of, and has learned of it; then it is `learning` too.
        shown: How often it was in a view as a spare, to be told that.
        show_ns: From when it may be again.
        finished: The step at which its work ended as it should, as it says when it leaves; None where it did not.
        told_end: Whether it was told that the job is done.
        dismissal: Why it is told to leave, "" where it is not; then it is `leaving` too.
        dismissed: Whether it was told so.
        seen_at: Where its datagrams come from, as the coordinator's host sees them; None where that is not known.
        moved_ns: When others were told at once that this is another place than before; None: never.
        wait_reason: Why it waits, as last sent to it, so that it gets each reason once.
    """

    node: str
    join: Join
    committed_step: int
    joined_ns: int = 0
    leaving: bool = False
    owns: bool = False
    parting: bool = False
    learning: bool = False
    warm: bool = False
    shown: int = 0
    show_ns: int = 0
    finished: int | None = None
    told_end: bool = False
    dismissal: str = ""
    dismissed: bool = False
    seen_at: tuple[str, int] | None = None
    moved_ns: int | None = None
    wait_reason: str = ""
    rank_key: tuple[object, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.rank_key = rank_key(self.node, self.join.rank_hint)

    @property
    def incarnation(self) -> int:
        return self.join.incarnation

    @property
    def behind(self) -> tuple[str, int] | None:
        """Where it is seen, if others were not told so: an address translator is between. None: there is none."""
        return None if self.seen_at in self.join.addresses or not self.join.addresses else self.seen_at

    def member(self, rank: int, *, place: int | None = None) -> Member:
        """Return it as a member of a view. place: of a spare; after how many of the ranks it stands."""
        return Member(
            rank=rank,
            node=self.node,
            incarnation=self.incarnation,
            addresses=self.join.addresses,
            seen_at=self.behind,
            site=self.join.site,
            committed_step=self.committed_step,
            spare=place is not None,
            place=place or 0,
        )


@dataclass(slots=True)
class Backoff:
    """When a node that was left out may be tried again, on the coordinator's clock.

    Attributes:
        count: How often it was left out although it reached the others.
        ready_ns: From when, if it reaches them.
        blind_ns: From when, whether or not it does.
        reached: Whether it has said that it does, since it was left out last.
    """

    count: int = 0
    ready_ns: int = 0
    blind_ns: int = 0
    reached: bool = False

    @property
    def retry_ns(self) -> int:
        """From when the node may be tried, as things are."""
        return self.ready_ns if self.reached else self.blind_ns

    def exclude(self, now_ns: int, *, shortest_ns: int, longest_ns: int) -> int:
        """Leave the node out once more; return the time from which it may be tried if it reaches the others.

        The wait doubles from `shortest_ns` to `longest_ns`. A node that was in for longer than the longest wait starts
        anew: what broke then has little to do with what breaks now.
        """
        if self.count and now_ns - self.blind_ns > longest_ns:
            self.count = 0
        if not self.count or self.reached:
            self.count += 1
        # the exponent is bounded before it is used: a count of years must not make an integer of megabytes
        self.ready_ns = now_ns + min(longest_ns, shortest_ns << min(self.count - 1, 30))
        self.blind_ns = now_ns + longest_ns
        self.reached = False
        return self.ready_ns


class Roster:
    """Candidates by node, iterated by rank; remembers the newest incarnation and the back-off of each node.

    What it remembers of nodes that are gone is bounded by the number of names that the job's authority has certified.
    """

    def __init__(self, last: View | None, *, retry_min_ns: int, retry_max_ns: int) -> None:
        self._candidates: dict[str, Candidate] = {}
        self._ranked: list[Candidate] = []  # by rank; another list with each change, as some iterate over it
        self._newest = {member.node: member.incarnation for member in last.members} if last is not None else {}
        self._backoffs: dict[str, Backoff] = {}
        self._seen: dict[str, tuple[str, int]] = {}
        self._retry_min_ns = retry_min_ns
        self._retry_max_ns = retry_max_ns

    def __len__(self) -> int:
        return len(self._candidates)

    def __contains__(self, node: object) -> bool:
        return node in self._candidates

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._ranked)

    def get(self, node: str) -> Candidate | None:
        return self._candidates.get(node)

    @property
    def learners(self) -> list[Candidate]:
        """Those that learn the state outside of views before they take part, by rank; spares only stand by."""
        return [candidate for candidate in self._ranked if candidate.learning and not candidate.warm]

    @property
    def leavers(self) -> list[Candidate]:
        """Those that go at the next boundary, by rank."""
        return [candidate for candidate in self._ranked if candidate.leaving]

    def committed(self, view: View, step: int) -> None:
        """Take in that the members of a view hold the result of a step."""
        for candidate in self._candidates.values():
            if view.rank_of(candidate.node) is not None:
                candidate.committed_step = step

    def newest(self, node: str) -> int:
        """Return the largest incarnation of the node ever seen, -1 if none."""
        return self._newest.get(node, -1)

    def add(self, candidate: Candidate) -> None:
        if candidate.incarnation > self.newest(candidate.node):
            # A new process: whatever was wrong with the old one need not be wrong with this.
            self._backoffs.pop(candidate.node, None)
            self._newest[candidate.node] = candidate.incarnation
        candidate.seen_at = self._seen.get(candidate.node)
        self._candidates[candidate.node] = candidate
        self._rank()

    def saw(self, node: str, address: tuple[str, int]) -> Candidate | None:
        """Take in where a node's datagrams come from; views that are made from now on say so.

        Returns:
            The node, if it is here and was seen elsewhere before; None: what others know of it is still right.
        """
        self._seen[node] = address
        candidate = self._candidates.get(node)
        if candidate is None or candidate.seen_at == address:
            return None
        candidate.seen_at = address
        return candidate

    def remove(self, node: str) -> Candidate | None:
        gone = self._candidates.pop(node, None)
        self._rank()
        return gone

    def _rank(self) -> None:
        self._ranked = sorted(self._candidates.values(), key=lambda candidate: candidate.rank_key)

    def exclude(self, node: str, *, now_ns: int) -> int:
        """Leave the node out for a while; return the nanoseconds until it may be tried if it reaches the others."""
        backoff = self._backoffs.setdefault(node, Backoff())
        return backoff.exclude(now_ns, shortest_ns=self._retry_min_ns, longest_ns=self._retry_max_ns) - now_ns

    def recall(self, node: str, *, now_ns: int) -> None:
        """Let a node that is left out be tried now."""
        backoff = self._backoffs.get(node)
        if backoff is not None:
            backoff.ready_ns, backoff.blind_ns = min(backoff.ready_ns, now_ns), min(backoff.blind_ns, now_ns)

    def reached(self, node: str) -> None:
        """Take in that a node that is left out reaches the others again."""
        if node in self._backoffs:
            self._backoffs[node].reached = True

    def left_out(self, *, now_ns: int) -> list[Candidate]:
        """Return the connected nodes that are left out at present, by rank."""
        if not self._backoffs:
            return []
        out = [self._candidates[node] for node in self._backoffs if node in self._candidates]
        out = [candidate for candidate in out if self.retry_ns(candidate.node) > now_ns and not candidate.leaving]
        return sorted(out, key=lambda candidate: candidate.rank_key)

    def choose(
        self,
        *,
        now_ns: int,
        limit: int,
        preferred: Sequence[Collection[str]],
        without: Collection[str] = (),
    ) -> list[Candidate]:
        """Return who would be in a view proposed now, by rank: at most `limit`, none of `without`.

        Args:
            now_ns: The time now.
            limit: Most nodes.
            preferred: Who goes before others where they are more: those of the first collection, then of the next one.
            without: Nodes that are in none.
        """
        fit = [each for each in self._ranked if not (each.leaving or each.node in without)]
        if self._backoffs:
            fit = [candidate for candidate in fit if self.retry_ns(candidate.node) <= now_ns]
        if len(fit) > limit:
            fit.sort(key=lambda each: [each.node not in part for part in preferred])  # stable: by rank within each part
            fit = sorted(fit[:limit], key=lambda candidate: candidate.rank_key)
        return fit

    def next_retry(self, *, now_ns: int) -> int | None:
        """Return when the next connected node that is left out may be tried again; None if none is."""
        if not self._backoffs:
            return None
        waits = [self.retry_ns(node) for node in self._candidates]
        return min((wait for wait in waits if wait > now_ns), default=None)

    def retry_ns(self, node: str) -> int:
        """Return from when the node may be tried, as things are; 0 where it is not left out."""
        backoff = self._backoffs.get(node)
        return 0 if backoff is None else backoff.retry_ns
