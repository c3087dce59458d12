"""Whether there can be a view now, of which nodes, and how long missing ones are waited for.

It looks at the connected nodes (roster.py), at what failed views say of them (evidence.py), and at what is durable
(history.py), and changes none. While no view is installed (`evaluate`) it finds one of

    obstacle    no view can be made of these; look again when a node that was left out may be tried anew
    waiting     a view can be made, but views have failed again and again; the next one waits (evidence.py)
    settling    a view can be made, but nodes of the last one are missing; the rest wait for them, once, for a while
    ready       a view can be made, and is to be proposed

and at a boundary of the installed view (`due_change`, `successor`) whether another one takes its place: where other
nodes would be chosen, after a while without a step, and as soon as views may follow each other again.

Rules, and why:

- A new view needs more than half of the nodes of the last installed one, less those that left of their own will. The
  first needs `world_size` nodes. The journal makes the coordinator the single decider; the quorum keeps a handful of
  nodes at the coordinator's side of a partition from going on alone. (`admission.shortfall`)
- A new view has a member that holds the last committed step, unless no node is left that could: a quorum of new
  processes waits for the one whose state they would take back. So it does where the views that followed the commit
  were made without that one, which was cut off, and made no step (`History.holders`).
- Where no node is left that could, the one that holds the newest state of those that are here is in the view, though it
  was left out or stood by. What it was left out for may be so still: it is asked for its state once, and where it fails
  again while it is here, the others go on from what they have. Where it is lost meanwhile and may hold the last step,
  it is waited for, and asked again. Where the quorum needs all places that are wanted it has one beyond them; the node
  with the highest rank leaves when another step is committed (scaling.py).
- A node that learns the state beside the steps of a view (`Candidate.learning`) is in none, unless the others are too
  few for one.
- Where nodes of the last view are missing although there is a quorum, and nothing was installed a moment ago (after a
  restart of the coordinator, or of everything), the rest get `settle_ns` to arrive: one view instead of several. Once
  a view was formed nobody is waited for, until there are too few nodes for one again: a node that is missing then is
  missing because of what happened to that view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.deadlines import earlier
from quicoll.errors import LocalError
from quicoll.membership.coordinator.admission import name_list, shortfall
from quicoll.membership.coordinator.ending import goes_on
from quicoll.membership.coordinator.spares import to_show
from quicoll.membership.view import View

if TYPE_CHECKING:
    from collections.abc import Collection

    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.evidence import Evidence
    from quicoll.membership.coordinator.history import History
    from quicoll.membership.coordinator.roster import Candidate, Roster

__all__ = ["Formation", "Readiness"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a view can be proposed.

    Attributes:
        chosen: Nodes that would be in it, by rank.
        obstacle: Why there can be no view now; "" when there can.
        retry_ns: When to look again although nothing came in; None where only an input can change it.
    """

    chosen: list[Candidate]
    obstacle: str = ""
    retry_ns: int | None = None


class Formation:
    """Chooses the members of the next view; remembers only whether missing nodes are still waited for, and who was
    asked for an old state since the last step was lost.

    The history is an argument everywhere, since it is replaced with every record: one owner, and no second copy.
    """

    def __init__(self, roster: Roster, evidence: Evidence, config: CoordinatorConfig, *, history: History) -> None:
        self._roster = roster
        self._evidence = evidence
        self._config = config
        self._waits_for_absent = history.view is not None
        self._settle_ns: int | None = None  # the end of the grace period, once it has begun
        self._lost_step = 0  # nobody here held that, when it was the last one
        self._asked: dict[str, Candidate] = {}  # for their states since then: as they were here when asked
        self._first = ""  # of these the one that is to be in the next view
        self._beyond = False  # with a place beyond those that are wanted

    def choose(
        self, history: History, *, now_ns: int, without: Collection[str] = (), show: bool = False
    ) -> list[Candidate]:
        """Return who would be in a view proposed now, by rank.

        Args:
            history: What the journal holds.
            now_ns: The time now.
            without: Nodes that are not to be in it.
            show: Whether a spare may be among them, after the last rank; see spares.py.
        """
        chosen = self._choose_workers(history, now_ns=now_ns, without=without)
        if not show or not self._config.warm_spares or not history.committed_step:
            return chosen
        if len(chosen) < self.limit(history) or self.shortfall(chosen, history):
            return chosen
        without = (*self._evidence.left_out(now_ns=now_ns), *without, *(candidate.node for candidate in chosen))
        rest = self._roster.choose(now_ns=now_ns, limit=len(self._roster), preferred=(), without=without)
        rest = [candidate for candidate in rest if candidate.warm or not candidate.learning]
        return [*chosen, *to_show(rest, wanted=self._config.warm_spares, now_ns=now_ns)]

    def _choose_workers(self, history: History, *, now_ns: int, without: Collection[str]) -> list[Candidate]:
        without = (*self._evidence.left_out(now_ns=now_ns), *without)
        learners = self._roster.learners
        if learners:
            rest = self._choose(history, (*without, *(each.node for each in learners)), now_ns=now_ns)
            if rest and not self.shortfall(rest, history):
                return rest
        return self._choose(history, without, now_ns=now_ns)

    def _choose(self, history: History, without: Collection[str], *, now_ns: int) -> list[Candidate]:
        last = history.view.nodes[: history.view.workers] if history.view is not None else ()
        warm = [candidate.node for candidate in self._roster if candidate.warm]
        first = (self._first,) if self._is_asking(history) else ()
        limit = self.limit(history)
        return self._roster.choose(now_ns=now_ns, limit=limit, preferred=(first, last, warm), without=without)

    def limit(self, history: History) -> int:
        """Return how many nodes a view may have: so many as are wanted, and all of the last one that are here.

        Nodes that are at work are never cut off by what is wanted: fewer might be no quorum. They are told to leave
        (scaling.py), and are then of the last view no longer.
        """
        most = self._config.max_world_size
        if history.wanted is None:
            return most
        places = max(history.wanted, sum(node in self._roster for node in history.base))
        beyond = self._beyond and self._is_asking(history) and self._first not in history.base
        return min(most, places + beyond)

    def _is_asking(self, history: History) -> bool:
        """Whether the last step is still lost, and a node is asked for the newest state."""
        return bool(self._first) and self._lost_step == history.committed_step and self._first in self._roster

    def unchanged(self, view: View, history: History, *, now_ns: int) -> bool:
        """Return whether a view proposed now would have the members of `view`, and those who part in it."""
        return _is_of(view, self.choose(history, now_ns=now_ns, show=True))

    def next_return(self, *, now_ns: int) -> int | None:
        """Return when the next connected node that is left out may be tried again; None if none is."""
        roster = self._roster
        return earlier(roster.next_retry(now_ns=now_ns), self._evidence.next_return(roster, now_ns=now_ns))

    def shortfall(self, chosen: list[Candidate], history: History) -> str:
        """Return why these are too few for a view, "" if they are not."""
        return shortfall([candidate.node for candidate in chosen], history=history, config=self._config)

    def obstacle(self, chosen: list[Candidate], history: History) -> str:
        """Return why these cannot be a view while none is installed, "" if they can."""
        return self.shortfall(chosen, history) or self._state_absent(chosen, history)

    def why_none(self, history: History, *, now_ns: int) -> str:
        """Return why there can be no view now, while none is installed, "" if there can."""
        return self.obstacle(self.choose(history, now_ns=now_ns), history)

    def can_spare(self, nodes: Collection[str], history: History, *, now_ns: int) -> bool:
        """Return whether those that are here without `nodes` are enough for a view."""
        rest = [candidate for candidate in self.choose(history, now_ns=now_ns) if candidate.node not in nodes]
        return not self.shortfall(rest, history)

    def evaluate(self, history: History, *, now_ns: int) -> Readiness:
        """Evaluate the nodes while no view is proposed or installed; repeatable, but for the grace period's start and
        for who is asked for its state."""
        chosen = self.choose(history, now_ns=now_ns)
        obstacle = self.obstacle(chosen, history)
        if obstacle:
            self._waits_for_absent = history.view is not None
            self._settle_ns = None
            return Readiness(chosen, obstacle, self.next_return(now_ns=now_ns))
        chosen = self._with_newest(chosen, history, now_ns=now_ns)
        absent = [node for node in history.base if node not in self._roster]
        if absent and self._waits_for_absent:
            self._settle_ns = now_ns + self._config.settle_ns if self._settle_ns is None else self._settle_ns
            if now_ns < self._settle_ns:
                waiting = f"there is a quorum; {name_list(absent)} of the last view may still come"
                return Readiness(chosen, waiting, self._settle_ns)
        if now_ns < self._evidence.may_propose_ns():
            return Readiness(chosen, self._evidence.why_waits(), self._evidence.may_propose_ns())
        return Readiness(chosen)

    def due_change(self, view: View, history: History, *, quiet_ns: int, now_ns: int) -> Readiness:
        """Return whether the installed view has to be replaced, at a boundary at which no step is open.

        Args:
            view: The installed view.
            history: What the journal holds.
            quiet_ns: When the boundary is one on every member.
            now_ns: The time now.
        Returns:
            An obstacle where it is to stay, for now; none where its time is over.
        """
        chosen = self.choose(history, now_ns=now_ns, show=True)
        may_ns = max(quiet_ns, self._evidence.may_propose_ns())
        if _is_of(view, chosen):
            return Readiness(chosen, "its members are those that are here", self.next_return(now_ns=now_ns))
        if now_ns < may_ns:
            return Readiness(chosen, "a step may be about to begin, or the last view was a moment ago", may_ns)
        return Readiness(chosen)

    def successor(self, history: History, *, now_ns: int) -> Readiness:
        """Evaluate the nodes for a view that follows the installed one at once; repeatable."""
        chosen = self.choose(history, now_ns=now_ns, show=True)
        obstacle = self.shortfall(chosen, history)
        if not obstacle and history.ended and not goes_on(self._roster, history):
            obstacle = f"the job is done at step {history.final_step}"  # spares do not begin it anew
        if not obstacle and now_ns < self._evidence.may_propose_ns():
            obstacle = self._evidence.why_waits()
        return Readiness(chosen, obstacle)

    def next_view(self, chosen: list[Candidate], history: History) -> View:
        """Return the next view, for the caller to record and to propose. Missing nodes are waited for no more.

        Args:
            chosen: Its members, by rank.
            history: What the journal holds.
        Raises:
            LocalError: The seed is not recorded.
        """
        if history.seed is None:
            raise LocalError("there is no view before the seed is recorded")
        self._waits_for_absent = False
        count = min(len(chosen), self.limit(history))  # `choose` shows a spare where all places are taken alone
        workers, spares = chosen[:count], chosen[count:]
        members = [candidate.member(rank) for rank, candidate in enumerate(workers)]
        for rank, spare in enumerate(spares, count):
            members.append(spare.member(rank, place=sum(each.rank_key < spare.rank_key for each in workers)))
        committed_step = history.committed_step
        if history.view is None:
            # A new journal: go on from the newest state that a node has loaded.
            committed_step = max(candidate.committed_step for candidate in chosen)
        return View(
            view_id=history.last_view_id + 1,
            members=tuple(members),
            seed=history.seed,
            committed_step=committed_step,
            committed_view=history.committed_view,
            min_world_size=self._config.min_world_size,
            parting=_parting(chosen),
        )

    def _state_absent(self, chosen: list[Candidate], history: History) -> str:
        """Return why these must not go on: none holds the last committed step, and a node that may is elsewhere.

        Nodes count for the quorum by name, so a majority of new processes is one. To begin from what they have would
        take back a step that was committed. Where no node is left that could hold it, there is nothing to wait for,
        nor where all of the last view have left: the job begins anew.
        """
        step = history.committed_step
        if any(candidate.committed_step >= step for candidate in chosen):
            return ""
        here = [candidate.node for candidate in chosen]
        base = history.base
        elsewhere: list[str] = []
        for node in history.holders if base else ():
            known = self._roster.get(node)
            # One that is here and not of the last view is asked for its state (`_with_newest`).
            holds = known is None or (node in base and known.committed_step >= step and not known.leaving)
            if node not in here and holds:
                elsewhere.append(node)
        return f"nobody here holds step {step}; {name_list(elsewhere)} may" if elsewhere else ""

    def _with_newest(self, chosen: list[Candidate], history: History, *, now_ns: int) -> list[Candidate]:
        """Return `chosen`, or who is chosen with the node that holds the newest state, where the last one is lost."""
        step, newest = history.committed_step, max(candidate.committed_step for candidate in chosen)
        if newest >= step:
            return chosen
        if self._lost_step != step:
            self._lost_step, self._asked = step, {}
        here = [candidate for candidate in self._roster if not candidate.leaving and not candidate.told_end]
        more = [each for each in here if each.committed_step > newest and self._asked.get(each.node) is not each]
        if not more:
            return chosen
        self._beyond = False
        first = max(more, key=lambda candidate: candidate.committed_step)  # of equals the lowest rank
        self._first, self._asked[first.node] = first.node, first
        self._roster.recall(self._first, now_ns=now_ns)
        self._evidence.recall(self._first, now_ns=now_ns)
        found = self.choose(history, now_ns=now_ns)
        if self.shortfall(found, history):  # in the place of another one it would cost the quorum
            self._beyond = True
            found = self.choose(history, now_ns=now_ns)
        if self.shortfall(found, history):
            self._first, self._beyond = "", False
            return chosen
        return found


def _parting(chosen: list[Candidate]) -> tuple[str, ...]:
    return tuple([candidate.node for candidate in chosen if candidate.parting])


def _is_of(view: View, chosen: list[Candidate]) -> bool:
    """Whether a view of these would be the same but for its number."""
    if len(chosen) != view.world_size:
        return False
    for candidate, node in zip(chosen, view.nodes, strict=True):
        if candidate.node != node or candidate.parting != (node in view.parting):
            return False
    return True
