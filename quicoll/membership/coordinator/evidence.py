"""What views that ended say of nodes, over many views: who is left out, and when the next view may be proposed.

One view that ended tells little. Where the digests of three ranks differ, the one in the minority computed wrongly, or
was sent something else than the others; where a member reports another, either may be wrong. Over several views it is
who they have in common. So each view that fails is taken down as a `Contradiction`: `strong` are nodes that can have
caused it, each by itself; `weak` are those that can have caused it only together with what they did to a strong one.

    failure                                              strong                       weak
    digests differ, one side is larger                   the others                   the larger side: it sent to them
    digests differ, no side is larger                    all
    reports, declines                                    who is in most of their      the others that they name
                                                         pairs of member and named
    the same, of separate pairs that lost each other                                  both: it may be the path
    no vote, no answer, a broken rule, a lost link       that node
    a "no"                                               who voted, whom it names

A node has two sums of these, 2 for strong and 1 for weak: `recent`, halved every minute, and `total`, halved every
hour, of the time that ended in commits: what stops the job does not make itself forgotten. A node is

    trusted     one failure does not count against it: a bit flips, a process dies. It is left out by a failure that
                brings its `recent` to 6, if no other such part of that failure has a larger `total`. Votes that are
                late are enough at once: the coordinator sees by itself whose they are, and has waited for minutes
    left out    for 1, 2, 4, ... 300 s, while a view can be made without it; and, from the second time on, for 1, 2, 3,
                ... 10 times as long as the failure took, so that it costs the others a tenth of their time at most.
                Where it may be the path, or the process was killed, it is 30 s at most. Where failures go on meanwhile
                it was not the cause, or not alone: its sums are halved, and it comes back once another is left out
    probation   it takes part again. With the next failure of which it is a strong part, one of the strong ones goes at
                once, it for twice as long as before, or for as long where it had come back before its time. Without one
                for a minute, or twice the time that it was out, of the time that ends in commits, it is trusted

Of nodes with equal sums the one goes that was left out less often, so that two that contradict each other take turns;
then the one of the higher rank. If a view cannot be made without the node in question, those that are left out come
back first: with them there may be a quorum without it.

Where digests differ, the sums decide when the first node is left out. Who follows it, should they differ again, is
found by elimination (elimination.py), since the minority may have been lied to: an odd one is back, and its senders
are left out one by one. Who was left out for nothing is trusted at once.

When the next view may be proposed:

    wait        three views that end without a commit between them are each followed by another at once. After the
                next ones it is 1, 2, 4, ... 30 s, unless a node has just been left out for them
    allowance   MAX_VIEWS at once, and one more every VIEW_INTERVAL_NS, whatever ends them and whatever is committed
                in between. It is a bound on work and on the journal, which has two rows for a view

Invariants. Who names others is in each contradiction that it causes, so one node cannot get two others left out: with
the second its own sum is the largest. A node is never left out where that would leave no view. What is known is said
as far as it is known (`Evidence.known`): the members of views that worked narrow it down. What makes a node stay out is
durable (lessons.py); a coordinator that starts again has forgotten failures for which nobody was left out. Memory: two
numbers for each node that was ever part of a failure, of which there are as many as certified names; the members of the
last 16 failures and of 16 views that worked; one elimination.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from quicoll.membership.coordinator.elimination import Elimination
from quicoll.membership.coordinator.lessons import MAX_NOTED, Lessons, NodeLesson

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

__all__ = [
    "LONGEST_LEAVE",
    "MAX_VIEWS",
    "NOBODY",
    "VIEW_INTERVAL_NS",
    "Contradiction",
    "Evidence",
    "Verdict",
    "contradiction_of",
]

_SECOND: Final = 1_000_000_000

MAX_VIEWS: Final = 16
"""Views that may be proposed at once, after a time of rest."""
VIEW_INTERVAL_NS: Final = 2 * _SECOND
"""Time after which one more may be proposed."""

LONGEST_LEAVE: Final = 10
"""A node is left out for so many times the longest wait at most; for longer only where its failures take as long."""

_STRONG, _WEAK = 2, 1
_ENOUGH = 3 * _STRONG  # of `recent`, to leave a trusted node out
_UNIT = 1 << 20  # sums are integers, in parts as fine as this: halved forty times they are 0
_RECENT_NS = 60 * _SECOND
_TOTAL_NS = 3600 * _SECOND
_FREE_FAILURES = 3
_COSTS = 10
_REMEMBERED = 16
_NAMED = 4  # nodes in a sentence


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Who can have caused the end of a view; see the module's head.

    Attributes:
        strong: Each of these alone.
        weak: These only by what they did to a strong one.
        sent: Whether it is of the kind that a wrong transfer explains, so that the weak ones are who sent.
        paths: Whether it is of the kind that a broken path explains, or a process that was killed.
        enough: Whether it is enough to leave a node out.
    """

    strong: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()
    sent: bool = False
    paths: bool = False
    enough: bool = False

    def __bool__(self) -> bool:
        return bool(self.strong or self.weak)

    def __contains__(self, node: object) -> bool:
        return node in self.strong or node in self.weak


NOBODY: Final = Contradiction()
"""Nothing failed."""


def contradiction_of(pairs: Iterable[tuple[str, str]], *, paths: bool = False) -> Contradiction:
    """Return who is in most of the pairs, and who else is in any.

    Args:
        pairs: (member, whom it names), in any order; a member that names nobody is paired with itself.
        paths: Whether the pairs lost each other. Then a pair that has no node in common with another is nobody's fault.
    """
    partners: dict[str, dict[str, None]] = {}
    for a, b in pairs:
        partners.setdefault(a, {})[b] = None
        partners.setdefault(b, {})[a] = None
    most = max((len(others) for others in partners.values()), default=0)
    separate = paths and most == 1
    strong = tuple(node for node, others in partners.items() if len(others) == most and not separate)
    return Contradiction(strong, tuple(node for node in partners if node not in strong), paths=paths)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from a failure.

    Attributes:
        left_out: The node that is left out from now on; "" if none is.
        for_ns: For how long.
        why: Why it is left out, and what is known of the cause, for people; "" where no node is.
        returned: Nodes that take part again, since failures went on without them.
    """

    left_out: str = ""
    for_ns: int = 0
    why: str = ""
    returned: tuple[str, ...] = ()


@dataclass(slots=True)
class _Sum:
    """A sum that is halved once in every `half_ns` of the evidence's own time."""

    half_ns: int
    value: int = 0
    since_ns: int = 0

    def at(self, own_ns: int) -> int:
        halvings = max(0, own_ns - self.since_ns) // self.half_ns
        if halvings:
            self.value >>= min(halvings, 64)
            self.since_ns += halvings * self.half_ns
        return self.value

    def add(self, amount: int, own_ns: int) -> None:
        if self.at(own_ns) == 0:
            self.since_ns = own_ns
        self.value += amount * _UNIT


class _Standing:
    """What is held against one node. own_ns: the evidence's own time, now_ns: the coordinator's."""

    def __init__(self) -> None:
        self.recent = _Sum(_RECENT_NS)
        self.total = _Sum(_TOTAL_NS)
        self.count = 0  # times that it was left out, since it was trusted last
        self.until_ns = 0  # left out until then
        self.trusted_own_ns = 0  # on probation until then

    def add(self, amount: int, own_ns: int) -> None:
        self.recent.add(amount, own_ns)
        self.total.add(amount, own_ns)

    def acquit(self, own_ns: int, now_ns: int) -> None:
        """It was left out for nothing."""
        self.count, self.until_ns, self.trusted_own_ns = 0, now_ns, own_ns

    def call_back(self, now_ns: int) -> None:
        """It takes part again before its time. That it was not left out for so long does not make the next time longer:
        two nodes that fail in turn, and come back for each other, would soon be left out for minutes."""
        if self.until_ns > now_ns:
            self.until_ns = now_ns
            self.count -= 1

    def halve(self, own_ns: int) -> None:
        for each in (self.recent, self.total):
            each.value = each.at(own_ns) >> 1

    def suspect(self, own_ns: int) -> bool:
        return self.recent.at(own_ns) >= _ENOUGH * _UNIT

    def on_probation(self, own_ns: int) -> bool:
        return own_ns < self.trusted_own_ns

    def leave_out(self, own_ns: int, now_ns: int, *, shortest_ns: int, longest_ns: int, cost_ns: int) -> int:
        if own_ns >= self.trusted_own_ns:
            self.count = 0
        for_ns = max(min(longest_ns, shortest_ns << min(self.count, 30)), cost_ns * min(self.count, _COSTS))
        self.count += 1
        self.until_ns = now_ns + for_ns
        self.trusted_own_ns = own_ns + for_ns + max(2 * for_ns, _RECENT_NS)  # the others work meanwhile
        return for_ns


@dataclass(frozen=True, slots=True)
class _Failure:
    number: int
    members: tuple[str, ...]
    contradiction: Contradiction


class Evidence:
    """See the module's head.

    Args:
        shortest_ns: Of the first time that a node is left out, and of the first wait.
        longest_ns: Of all waits. A node is left out for up to ten times as long.
        lessons: What the journal has of an earlier coordinator's.
        now_ns: The time now.
    """

    def __init__(self, *, shortest_ns: int, longest_ns: int, lessons: Lessons | None = None, now_ns: int = 0) -> None:
        self._shortest_ns = shortest_ns
        self._longest_ns = longest_ns
        self._standings: dict[str, _Standing] = {}
        self._failures: deque[_Failure] = deque(maxlen=_REMEMBERED)
        self._worked: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=_REMEMBERED)
        self._number = 0  # of failures and views that worked, in their order
        self._streak = 0  # failures since the last commit
        self._own_ns = 0  # time that ended in commits; sums and probation are by it
        self._mark_ns: int | None = None  # of the last failure or commit, from which that time is counted
        self._begun_ns = 0  # of the last proposal or commit, from which the cost of a failure is counted
        self._wait_ns = 0  # the wait after the last of them ends
        self._spent_ns: int | None = None  # the allowance is full again then
        self._elimination: Elimination | None = None  # of the contradictions of digests
        self._news = False  # the journal does not have what `lessons` gives
        self._noted_own_ns: int | None = None  # the first of those that the journal has is trusted again then
        if lessons is not None and lessons != Lessons():
            self._restore(lessons, now_ns)

    @property
    def failing(self) -> bool:
        """Whether the last view failed, and nothing was committed since."""
        return self._streak > 0

    # What happens

    def failed(
        self,
        members: Sequence[str],
        contradiction: Contradiction,
        *,
        can_spare: Callable[[str], bool],
        now_ns: int,
    ) -> Verdict:
        """Take in that a view failed.

        Args:
            members: The view's, by rank.
            contradiction: Who can have caused it.
            can_spare: Whether there can be a view without this node, of those that may be in one now.
            now_ns: The time now.
        Returns:
            Who is left out for it.
        """
        self._mark_ns = now_ns
        self._streak += 1
        self._number += 1
        self._failures.append(_Failure(self._number, tuple(members), contradiction))
        strong = _ENOUGH if contradiction.enough else _STRONG
        for amount, nodes in ((strong, contradiction.strong), (_WEAK, contradiction.weak)):
            for node in nodes:
                self._standings.setdefault(node, _Standing()).add(amount, self._own_ns)
        absent = [node for node in self.left_out(now_ns=now_ns) if node not in members]
        for node in absent:
            self._standings[node].halve(self._own_ns)
        cleared = self._eliminate(members, contradiction, now_ns) if contradiction.sent else ()
        absent = [node for node in absent if node not in cleared]
        verdict = self._judge(members, contradiction, absent, can_spare, now_ns)
        if cleared:
            verdict = replace(verdict, returned=(*cleared, *verdict.returned))
        self._news = self._news or bool(verdict.left_out or verdict.returned)
        over = self._streak - _FREE_FAILURES
        if over > 0 and not verdict.left_out and not verdict.returned:
            self._wait_ns = now_ns + min(self._longest_ns, self._shortest_ns << min(over - 1, 30))
        return verdict

    def committed(self, members: tuple[str, ...], *, now_ns: int) -> None:
        """Take in that a view committed a step. members: the view's."""
        self._own_ns += now_ns - self._mark_ns if self._mark_ns is not None else 0
        self._mark_ns = self._begun_ns = now_ns
        self._streak = 0
        if self._elimination is not None:
            self._elimination.worked(members)
        self._news = self._news or (self._noted_own_ns is not None and self._own_ns >= self._noted_own_ns)
        if self._failures and (not self._worked or self._worked[-1][1] != members):
            self._number += 1
            self._worked.append((self._number, members))

    def proposed(self, *, now_ns: int) -> None:
        """Take in that a view is proposed, which costs a part of the allowance."""
        self._begun_ns = now_ns
        self._spent_ns = max(now_ns, self._spent_ns or now_ns) + VIEW_INTERVAL_NS

    def recall(self, node: str, *, now_ns: int) -> None:
        """Let a node that is left out take part again, for the state that it holds."""
        if node in self.left_out(now_ns=now_ns):
            self._standings[node].call_back(now_ns)
            self._news = True

    # What is durable

    def news(self, *, now_ns: int) -> Lessons | None:
        """Return what the journal has to have from now on; None where it has it already."""
        if not self._news:
            return None
        self._news = False
        noted = [(node, held) for node, held in self._standings.items() if held.on_probation(self._own_ns)]
        noted.sort(key=lambda each: each[1].total.at(self._own_ns), reverse=True)
        noted = noted[:MAX_NOTED]
        self._noted_own_ns = min((held.trusted_own_ns for _, held in noted), default=None)
        nodes = tuple(
            NodeLesson(
                node,
                held.count,
                max(0, held.until_ns - now_ns),
                held.trusted_own_ns - self._own_ns,
                held.total.at(self._own_ns),
            )
            for node, held in noted
        )
        found = self._elimination
        if found is None or not found.begun or max(len(found.candidates), len(found.tried)) > MAX_NOTED or not nodes:
            return Lessons(nodes)
        odd = tuple(node for node in found.odd if node in found.candidates)
        return Lessons(nodes, tuple(found.candidates), tuple(found.fitting), odd, tuple(found.tried))

    def _restore(self, lessons: Lessons, now_ns: int) -> None:
        for each in lessons.nodes:
            held = self._standings[each.node] = _Standing()
            held.total.value = each.total
            held.count = each.count
            held.trusted_own_ns = each.probation_ns
            if each.out_ns:
                held.until_ns = now_ns + max(min(self._shortest_ns, each.out_ns), each.out_ns // 2)
        self._elimination = Elimination.restored(lessons)
        self._news = True  # half of the time is remitted, which has to be known if that happens again

    # What follows

    def left_out(self, *, now_ns: int) -> tuple[str, ...]:
        """Return the nodes that are left out now."""
        if not self._standings:
            return ()
        return tuple(node for node, standing in self._standings.items() if now_ns < standing.until_ns)

    def next_return(self, nodes: Container[str], *, now_ns: int) -> int | None:
        """Return when the next of these nodes that is left out may take part again; None if none is."""
        if not self._standings:
            return None
        times = [standing.until_ns for node, standing in self._standings.items() if node in nodes]
        return min((at for at in times if at > now_ns), default=None)

    def weights(self, nodes: Iterable[str]) -> dict[str, int]:
        """Return how much is held against each node, to choose between two that cannot reach each other."""
        return {node: self._weight(node) for node in nodes}

    def may_propose_ns(self) -> int:
        """Return the time from which the next view may be proposed."""
        allowed_ns = 0 if self._spent_ns is None else self._spent_ns - (MAX_VIEWS - 1) * VIEW_INTERVAL_NS
        return max(allowed_ns, self._wait_ns)

    def why_waits(self) -> str:
        """Return why a view is not proposed before `may_propose_ns`, for people."""
        failed = f"{self._streak} views in a row failed" if self._streak else "views ended again and again"
        common = self._common()
        return f"{failed}; the next one waits" + (f"; part of each failure: {_listed(common)}" if common else "")

    def known(self, node: str) -> str:
        """Return who caused the failures that `node` is part of, as far as it is known; for people."""
        failures = [each for each in self._failures if node in each.contradiction.strong]
        if not failures:
            return node
        worked = [members for number, members in self._worked if number > failures[0].number and node in members]
        with_it = {other for members in worked for other in members}
        suspects = failures[-1].contradiction
        every = [
            other
            for other in (*suspects.strong, *suspects.weak)
            if other != node and all(other in each.contradiction for each in failures)
        ]
        others = [other for other in every if other not in with_it]
        if worked and others:
            return f"{node} or {_listed(others)}, and only when they work together"
        if every and suspects.sent and node not in suspects.weak and len(suspects.strong) <= len(suspects.weak):
            return f"{node}, or who sends to it"
        return f"{node} or {_listed(every)}" if every else node

    # Helpers

    def _judge(
        self,
        members: Sequence[str],
        contradiction: Contradiction,
        absent: Sequence[str],
        can_spare: Callable[[str], bool],
        now_ns: int,
    ) -> Verdict:
        rank = {node: index for index, node in enumerate(members)}

        def order(node: str) -> tuple[int, int, int]:
            standing = self._standings[node]
            return standing.total.at(self._own_ns), -standing.count, rank[node]

        elimination = self._elimination if contradiction.sent else None
        if elimination is not None and elimination.begun:
            choices = elimination.next(contradiction.strong, contradiction.weak, order)
        else:
            choices = [self._worst(members, contradiction, order)]
        worst = choices[0] if choices else ""
        if not worst or (not contradiction.strong and self._equals(worst, contradiction.weak)):
            return Verdict()
        if not absent:
            worst = next((node for node in choices if can_spare(node)), worst)
        if not can_spare(worst):
            for node in absent:
                self._standings[node].call_back(now_ns)
            return Verdict(returned=tuple(absent))
        least = self._standings[worst].recent.at(self._own_ns)
        cleared = tuple(node for node in absent if self._standings[node].recent.at(self._own_ns) < least)
        for node in cleared:
            self._standings[node].call_back(now_ns)
        why = self._why(worst, elimination)
        if elimination is not None:
            elimination.leave_out(worst)
        paths = contradiction.paths
        for_ns = self._standings[worst].leave_out(
            self._own_ns,
            now_ns,
            shortest_ns=self._shortest_ns,
            longest_ns=self._longest_ns if paths else LONGEST_LEAVE * self._longest_ns,
            cost_ns=0 if paths else now_ns - self._begun_ns,
        )
        return Verdict(worst, for_ns, why, cleared)

    def _worst(
        self, members: Sequence[str], contradiction: Contradiction, order: Callable[[str], tuple[int, ...]]
    ) -> str:
        """Return who is to be left out by the sums; "" where that is nobody."""
        tried = any(self._standings[node].on_probation(self._own_ns) for node in contradiction.strong)
        pool = [
            node
            for node in (*contradiction.strong, *contradiction.weak)
            if node in members
            and (self._standings[node].suspect(self._own_ns) or (tried and node in contradiction.strong))
        ]
        return max(pool, key=order, default="")

    def _eliminate(self, members: Sequence[str], contradiction: Contradiction, now_ns: int) -> tuple[str, ...]:
        """Take in that digests differed; return who was left out for nothing and comes back."""
        found = self._elimination
        tried = [] if found is None else [self._standings[node] for node in found.tried if node in self._standings]
        alive = found is not None and (
            self._own_ns < found.last_own_ns + _RECENT_NS or any(each.on_probation(self._own_ns) for each in tried)
        )
        if found is None or not alive:
            found = self._elimination = Elimination()
        found.last_own_ns = self._own_ns
        cleared = found.failed(members, contradiction.strong, contradiction.weak)
        for node in cleared:
            if node in self._standings:
                self._standings[node].acquit(self._own_ns, now_ns)
        return cleared

    def _why(self, node: str, elimination: Elimination | None) -> str:
        if elimination is None or not elimination.begun:
            return f"for what failed again and again: {self.known(node)}"
        if elimination.is_trial(node):
            return f"to see whether it sends wrong bits: {elimination.known()}"
        return f"for what failed again and again: {elimination.known()}"

    def _weight(self, node: str) -> int:
        standing = self._standings.get(node)
        return 0 if standing is None else standing.total.at(self._own_ns)

    def _equals(self, node: str, others: Sequence[str]) -> bool:
        """Whether as much is held against one of the others: then it may be the path, and suspicions.py decides."""
        weight = self._weight(node)
        return any(self._weight(other) >= weight for other in others if other != node)

    def _common(self) -> list[str]:
        """Return the nodes that are part of each failure since the last commit."""
        failures = list(self._failures)[-self._streak :] if self._streak else []
        first = failures[0].contradiction if failures else NOBODY
        nodes = (*first.strong, *first.weak)
        return [node for node in nodes if all(node in each.contradiction for each in failures)]


def _listed(nodes: Sequence[str]) -> str:
    return (
        " or ".join(nodes) if len(nodes) <= _NAMED else f"{' or '.join(nodes[:_NAMED])} or {len(nodes) - _NAMED} more"
    )
