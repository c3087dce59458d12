"""Invariants of every run, whatever breaks; checked while it runs and at its end.

    same-bits       the state after a decision has one digest on all ranks that hold it, and so has the state after a
                    step; where the workload knows it, that of a computation without any network. A state that one rank
                    alone held is taken as that rank gives it, and its receiver knows that nobody confirms it; what
                    others confirm is never forged
    one-decision    a step has one decision: the journal takes each number once, in order, and no rank hears of a vote
                    that another rank heard otherwise, nor of a commit that the journal does not hold, nor that a
                    vote is aborted which the journal takes as a commit later
    one-leader      of several coordinators the journal takes records of the one alone that took its lease last
    all-or-none     a step is committed with the votes of all members of its view, and applied by none without a commit:
                    who tries it again, or computes the next one ahead of its decision, has the state from which it
                    tried it before
    durable         a commit that the journal has taken is in it after every restart; a rank's state never goes back
                    while its process lives, and a rank never begins a step of the last view from an older state
                    than another living rank holds. A state that is torn, half overwritten by a newer one, is held no
                    more, nor is one whose rank was asked to stop and let go when nobody else was there to take it; one
                    of a checkpoint is as new as the last decision that led to as many steps
    quorum          a view has more than half of the members of the one before it that have not left
    deadline        a collective ends by its timeout, a step's entry and its vote by theirs, with GRACE_S of the host's
                    own time beyond them (not looked at where the host was paused, slow or leapt meanwhile)
    one-verdict     of a view that ended, operations that blame a node all blame one, on every rank, and for one kind of
                    failure (but for who has run out of time; and of two calls that differ each may be the wrong one)
    together        a collective that went well on a rank was called by all ranks of its group before it ended there
    untouched       inputs of a collective are the same after it, and `out` as well where it failed and was not written
                    in place
    one-set         the set of tiers in force after a step is one on all ranks; it changes by a commit alone
    one-reading     pieces of shared state that are strong, or made strong, are the same on all ranks in one step
    deleted         a deleted piece of shared state does not come back
    converge        eventual pieces are the same on all ranks of the view when nothing breaks any more (all four of
                    them where the workload looks at it: quicoll.sim.tiered_checks)
    one-carrier     in a view all ranks of a host hand each other what they can through its memory, or none does, whole
                    calls where the view is of one host, else long messages (parcels), and nobody elsewhere; and so it
                    is from the beginning of the view to its end
    ways            two ranks that cannot open a way to each other have a link through the relay alone, and two that are
                    behind no translator never have one through it
    memory          what a link holds beyond posted buffers is within its credit; there are no links to strangers
    no-leftover     a process that ended by itself has no task, timer or socket left
    progress        after the last healing every rank commits a step within the run's `recovery` seconds, or is done
    no-surprise     no error reaches an event loop's exception handler; a process ends by an error that blames the
                    world around it, or by none

Nothing here uses what it checks: the journal's records are followed as they are appended, digests are taken with
BLAKE2b over names, types, shapes and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from quicoll.errors import Corrupted, Diverged, Mismatch, PeerError, QuicollError
from quicoll.membership.coordinator.history import Committed, InstalledView, Left, Proposed, Scaled
from quicoll.sim.digests import state_digest
from quicoll.sim.errors import InvariantBroken
from quicoll.sim.hints import Habits
from quicoll.sim.tiered_checks import TieredChecker

if TYPE_CHECKING:
    from quicoll.membership.coordinator.history import History, JournalRecord
    from quicoll.membership.journal import RecordStore
    from quicoll.membership.view import View

__all__ = ["INVARIANTS", "CheckedStore", "Checker", "MemoryUse", "ReferenceDigest", "ReplayedDigest"]


INVARIANTS = (
    "same-bits",
    "one-decision",
    "one-leader",
    "all-or-none",
    "durable",
    "quorum",
    "deadline",
    "one-verdict",
    "together",
    "untouched",
    "one-set",
    "one-reading",
    "deleted",
    "converge",
    "one-carrier",
    "ways",
    "memory",
    "no-leftover",
    "progress",
    "no-surprise",
)

_Call = tuple[int, int, int]  # view, group, number

ReferenceDigest = Callable[[int], bytes]
ReplayedDigest = Callable[[int, Mapping[str, Any]], bytes]
"""Digest of the state after a step, of the step and of the state, which may tell how it came to be."""


class MemoryUse(NamedTuple):
    """What a rank of a view uses of its host's memory. whole: calls go through it. nodes: the other ones that it hands
    what it can through it; none where it uses none."""

    whole: bool
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        what = "calls" if self.whole else "parcels"
        return f"hands {what} to {', '.join(self.nodes)} through memory" if self.nodes else "uses no memory of its host"


class Checker:
    """Follows one run. `broken`: the first invariant that was broken. replay: digest of the state after a step."""

    def __init__(
        self, now_s: Callable[[], float], *, seed: int, world_size: int, replay: ReplayedDigest | None = None
    ) -> None:
        self._now_s = now_s
        self._seed = seed
        self._world_size = world_size
        self._replay = replay
        self.habits = Habits()
        self.tiered = TieredChecker(self.break_, self._working)
        self.broken: InvariantBroken | None = None
        self.commits: dict[int, tuple[int, bytes]] = {}  # what the journal took: by number, the view and the digest
        self.views: dict[int, View] = {}
        self.installed: View | None = None
        self.wanted: int | None = None  # ranks that an operator has asked for
        self._bound: int | None = None  # so many were wanted when the last view was proposed
        self._left: dict[str, None] = {}
        self._votes: dict[tuple[int, int], dict[str, None]] = {}
        self._decisions: dict[tuple[int, int], tuple[bool, str]] = {}
        self._states: dict[tuple[int, int], tuple[bytes, str]] = {}  # by decision and step
        self._spoiled: dict[str, None] = {}  # an ordered set: nodes whose state had a bit flipped, until it is compared
        self._forgers: dict[str, None] = {}  # nodes that have forged their state
        self._believed: dict[tuple[int, int], dict[bytes, None]] = {}  # digests that were taken from one, by version
        self._claimed: dict[tuple[int, int], None] = {}  # versions that were believed of a forger
        self._takers: dict[tuple[int, int], dict[str, None]] = {}  # nodes that were given a state, by its version
        self._apart: dict[str, None] = {}  # forgers that were believed: they themselves hold something else
        self._verdicts: dict[int, tuple[str, str, str]] = {}  # by view: the kind of failure, who is blamed, on whom
        self._calls: dict[_Call, dict[str, None]] = {}  # who has called it
        self._carriers: dict[int, dict[str, MemoryUse]] = {}  # by view and node
        self._counts: dict[tuple[str, int, int], int] = {}  # by node, view and group
        self.held: dict[str, tuple[int, int]] = {}  # by node: decision and step of the state of its living process
        self._reached: dict[int, int] = {}  # by step: the last decision of a state after it
        self._connected: dict[str, dict[str, None]] = {}  # by coordinator: nodes that have joined it and are not lost
        self._taken_along: dict[str, None] = {}  # ranks whose states go with them, for nobody was there to take them

    def break_(self, kind: str, message: str, *, node: str = "") -> None:
        """An invariant is broken. The first one counts; the run ends at once."""
        if self.broken is None:
            self.broken = InvariantBroken(kind, message, seed=self._seed, at=self._now_s(), node=node)

    # -- the journal ---------------------------------------------------------------------------------------------

    def appended_by(self, token: int, last: int, record: JournalRecord) -> None:
        """A journal that several coordinators share has taken a record of the one with this token, not the last one."""
        if token != last:
            what = f"{type(record).__name__.lower()} of a coordinator with token {token}"
            self.break_("one-leader", f"the journal took {what}, after another had taken its lease with token {last}")
        self.appended(record)

    def appended(self, record: JournalRecord) -> None:
        """The journal has taken a record."""
        if isinstance(record, Committed):
            heard = self._decisions.get((record.view_id, record.step))
            if heard is not None and not heard[0]:
                what = f"step {record.step} of view {record.view_id} was committed"
                self.break_("one-decision", f"{what}, after {heard[1]} had heard that it is aborted")
            if record.step in self.commits:
                self.break_("one-decision", f"step {record.step} was committed twice")
            elif self.commits and record.step != max(self.commits) + 1:
                self.break_("one-decision", f"step {record.step} was committed after step {max(self.commits)}")
            if self.installed is None or record.view_id != self.installed.view_id:
                self.break_("one-decision", f"step {record.step} was committed in view {record.view_id}, not the last")
            self.commits[record.step] = record.view_id, record.digest
            self._look_at_votes(record)
        elif isinstance(record, InstalledView):
            self._install(record.view)
        elif isinstance(record, Left):
            self._left[record.node] = None
        elif isinstance(record, Scaled):
            self.wanted = record.world_size
        elif isinstance(record, Proposed):
            self._bound = self.wanted

    def _look_at_votes(self, record: Committed) -> None:
        votes = self._votes.get((record.view_id, record.step), {})
        view = self.views.get(record.view_id)
        if view is not None and view.workers != view.world_size:
            self.break_("all-or-none", f"step {record.step} was committed in a view with a spare")
        missing = [node for node in view.nodes if node not in votes] if view is not None else []
        if missing:
            self.break_("all-or-none", f"step {record.step} was committed without the vote of {', '.join(missing)}")

    def _install(self, view: View) -> None:
        before = self.installed
        nodes = list(view.nodes[: view.workers])
        last = before.nodes[: before.workers] if before is not None else ()
        base = [node for node in last if node not in self._left]
        if base and 2 * len([node for node in nodes if node in base]) <= len(base):
            self.break_("quorum", f"view {view.view_id} of {nodes} after {base}: no majority of it")
        first = self._world_size if self._bound is None else min(self._world_size, self._bound)
        if not base and len(nodes) < first:
            self.break_("quorum", f"view {view.view_id} of {nodes} begins the job, which has {first} ranks")
        members = view.members[: view.workers]
        newest = max(each.committed_step for each in members)
        # Who alone holds the newest state has a place beyond those that are wanted.
        beyond = all(each.node not in base for each in members if each.committed_step == newest)
        if self._bound is not None and len(nodes) > max(len(base), self._bound) + beyond and base:
            self.break_("quorum", f"view {view.view_id} of {nodes} after {base}: {self._bound} ranks were asked for")
        if before is not None and view.view_id <= before.view_id:
            self.break_("one-decision", f"view {view.view_id} was installed after view {before.view_id}")
        self.views[view.view_id] = self.installed = view
        self._left.clear()

    def opened(self, history: History) -> None:
        """A coordinator has started and read its journal: all that was taken has to be in it, at most one more."""
        last = max(self.commits, default=0)
        if history.committed_step < last:
            self.break_("durable", f"the journal ends at step {history.committed_step}; step {last} was committed")
        elif history.committed_step > last + 1:
            self.break_("durable", f"the journal holds step {history.committed_step}; {last} was the last it took")
        view_id = self.installed.view_id if self.installed is not None else 0
        found = history.view.view_id if history.view is not None else 0
        if found < view_id:
            self.break_("durable", f"the journal's last view is {found}; view {view_id} was installed")
        # The record in flight when the process ended may be there or not; nobody was told, so either is right.
        if history.view is not None and found > view_id:
            self._install(history.view)
        if history.committed_step == last + 1 and history.view is not None:
            self.commits[last + 1] = history.view.view_id, b""

    # -- the ranks -----------------------------------------------------------------------------------------------

    def voted(self, node: str, view_id: int, index: int) -> None:
        """A rank is about to vote yes."""
        self._votes.setdefault((view_id, index), {})[node] = None

    def decided(self, node: str, view_id: int, index: int, commit: bool) -> None:
        """A rank has heard the decision on its vote."""
        known = self._decisions.setdefault((view_id, index), (commit, node))
        if known[0] is not commit:
            words = {True: "committed", False: "aborted"}
            self.break_(
                "one-decision",
                f"step {index} of view {view_id} is {words[commit]} on {node}, {words[known[0]]} on {known[1]}",
                node=node,
            )
        if commit and (index not in self.commits or self.commits[index][0] != view_id):
            self.break_(
                "one-decision", f"{node} heard of a commit of {index} that the journal does not hold", node=node
            )

    def state(self, node: str, decision: int, step: int, state: Mapping[str, Any] | None) -> None:
        """A rank holds the state after `step`, of the coordinator's decision `decision` (0: none yet)."""
        self._reached[step] = max(decision, self._reached.get(step, 0))
        before = self.held.get(node)
        if before is not None and self._age((decision, step)) < self._age(before):
            self.break_("durable", f"the state of {node} went back from {before} to {(decision, step)}", node=node)
        self.held[node] = decision, step
        if decision and decision not in self.commits:
            self.break_("all-or-none", f"{node} holds the state of step {decision}, which was not committed", node=node)
        if state is None or node in self._spoiled or node in self._apart:
            return
        digest = state_digest(state)
        known = self._states.setdefault((decision, step), (digest, node))
        if known[0] != digest and digest not in self._believed.get((decision, step), ()):
            self.break_("same-bits", f"after step {step} {node} holds other bits than {known[1]}", node=node)
        if self._replay is not None and self._replay(step, state) != digest:
            self.break_("same-bits", f"after step {step} {node} holds other bits than the reference", node=node)

    def brought(self, node: str, step: int) -> None:
        """A process has the state after `step` from a checkpoint, and no other yet."""
        self.held.setdefault(node, (0, step))

    def _age(self, held: tuple[int, int]) -> tuple[int, int]:
        """By which states are compared: the larger one is the newer. A decision that a forger has claimed says nothing
        of that."""
        decision, step = held
        known = 0 if held in self._claimed else decision
        return known or self._reached.get(step, 0), step

    def joined(self, coordinator: str, node: str) -> None:
        """A node has joined this coordinator."""
        self._connected.setdefault(coordinator, {})[node] = None

    def lost(self, coordinator: str, node: str) -> None:
        """It is connected to it no more."""
        self._connected.setdefault(coordinator, {}).pop(node, None)

    def released(self, coordinator: str, node: str, stopping: Collection[str]) -> None:
        """A rank that was asked to stop may go, says the coordinator. stopping: all ranks that were asked to.

        Where others are there who stay, one of them has to hold the state; else the rank takes it along, and who comes
        while it still is on its way begins without it.
        """
        if all(each in stopping for each in self._connected.get(coordinator, {}) if each != node):
            self._taken_along[node] = None

    def torn(self, node: str) -> None:
        """A rank's state was to be overwritten by a newer one, and that has not come to its end: it holds none."""
        self.held.pop(node, None)

    def forged(self, node: str) -> None:
        """A rank tells, or gives, another state than it has."""
        self._forgers[node] = None

    @property
    def allowed(self) -> tuple[type[QuicollError], ...]:
        """Errors that a forger explains: it may leave it open which of two states is right; and one that was believed
        to be ahead does other steps than those that believed it."""
        return (Diverged, Mismatch) if self._believed else (Diverged,) if self._forgers else ()

    def taken(
        self,
        node: str,
        giver: str,
        decision: int,
        step: int,
        state: Mapping[str, Any] | None,
        *,
        confirmed: bool,
        members: Iterable[str],
    ) -> None:
        """A rank was given a state. What nobody but its giver held has to be believed, whatever it is: from here on
        there is no reference, and the giver holds something else than who believed it."""
        takers = self._takers.setdefault((decision, step), {})
        takers[node] = None
        if confirmed or giver not in self._forgers:
            return
        self._claimed[decision, step] = None
        if state is None:
            return
        digest = state_digest(state)
        known = self._states.get((decision, step))
        right = None if self._replay is None else self._replay(step, state)
        other = known is not None and known[0] != digest
        unknown = known is None and right is None  # since a person has chosen it: it may be forged
        if unknown or other or right not in (None, digest):
            for member in () if unknown else members:
                held = self.held.get(member, (0, 0))
                if step and held >= (decision, step) and member != giver and member not in takers:
                    what = f"took a forged state from {giver}, though {member} held that after step {step}"
                    self.break_("same-bits", f"{node} {what}", node=node)
            believed = self._believed.setdefault((decision, step), {})
            believed[digest] = None
            if right is not None:  # who starts anew holds it, and so does the giver, who may give it later
                believed[right] = None
            self._apart[giver] = None
            self._replay = None

    def chosen(self, step: int) -> None:
        """Of different checkpoints of a step all ranks are to begin from one: which of them was right is not known, so
        there is no reference from here on, and what another one has held after that step says nothing of it."""
        self._states.pop((0, step), None)
        self._replay = None

    def spoiled(self, node: str) -> None:
        """A bit of a rank's state is about to flip: until its state was compared, its bits are not looked at. What it
        computes meanwhile goes into all ranks' results alike, so there is no reference from here on."""
        self._spoiled[node] = None
        self._replay = None

    def compared(self, node: str) -> None:
        """A rank's state was compared with the others', and is as it should be."""
        self._spoiled.pop(node, None)

    def not_committed(self, node: str, step: int, entered: Mapping[str, bytes], left: Mapping[str, bytes]) -> None:
        """A rank tries a step another time: from the state from which it tried it before."""
        changed = sorted(name for name in left if entered.get(name) != left[name])
        if changed and node not in self._spoiled:
            what = f"changed {', '.join(map(repr, changed[:4]))}, though step {step} was not committed"
            self.break_("all-or-none", f"{node} {what}", node=node)

    def began(self, node: str, step: int, view_id: int) -> None:
        """A rank begins a step: no living rank may know more than it starts from, but for one that has claimed more.

        Who was asleep may not have heard yet that its view is over; no step of that is committed any more.
        """
        if node in self._apart or (self.installed is not None and view_id < self.installed.view_id):
            return
        mine = self.held.get(node, (0, 0))
        for member, theirs in self.held.items():  # those that are left out as well: their state would be taken back
            if member in self._taken_along:
                continue
            if self._age(theirs)[0] > self._age(mine)[0]:  # no later decision can be without our vote
                self.break_("durable", f"{node} begins step {step} from {mine}, and {member} holds {theirs}", node=node)

    def failed(self, node: str, error: QuicollError) -> None:
        """An operation of a rank ended in time, by an error."""
        if error.view is None or not error.node or type(error) not in (PeerError, Corrupted, Mismatch):
            return
        kind, culprit = type(error).__name__, error.node if not isinstance(error, Mismatch) else ""
        known = self._verdicts.setdefault(error.view, (kind, culprit, node))
        if known[:2] != (kind, culprit):
            self.break_(
                "one-verdict",
                f"view {error.view} ended by {kind} of {culprit} on {node}, by {known[0]} of {known[1]} on {known[2]}",
                node=node,
            )

    def called(self, node: str, view_id: int, group_id: int) -> _Call:
        """A rank calls a collective of a group: which one it is, by its place among those of the group."""
        at = node, view_id, group_id
        number = self._counts.get(at, 0)
        self._counts[at] = number + 1
        call = view_id, group_id, number
        self._calls.setdefault(call, {})[node] = None
        return call

    def returned(self, node: str, call: _Call, name: str, members: list[str]) -> None:
        """It went well on this rank."""
        absent = [member for member in members if member not in self._calls[call]]
        if absent:
            which = f"{name} (call {call[2]} of its group in view {call[0]})"
            self.break_("together", f"{which} ended on {node} before {', '.join(absent)} called it", node=node)

    def carried(self, node: str, view_id: int, carrier: MemoryUse, beside: tuple[str, ...]) -> None:
        """A rank goes to work in a view. beside: the other nodes of the view that are on its host."""
        known = self._carriers.setdefault(view_id, {})
        known[node] = carrier
        if carrier.nodes and carrier.nodes != beside:
            there = ", ".join(beside) or "nobody"
            self.break_("one-carrier", f"in view {view_id} {node} {carrier}; on its host is {there}", node=node)
        for other in beside:
            theirs = known.get(other, carrier)
            if (theirs.whole, bool(theirs.nodes)) != (carrier.whole, bool(carrier.nodes)):
                self.break_("one-carrier", f"in view {view_id} {node} {carrier}, and {other} {theirs}", node=node)

    def carries(self, node: str, view_id: int, carrier: MemoryUse) -> None:
        """A rank is at work in a view."""
        before = self._carriers.get(view_id, {}).get(node, carrier)
        if before != carrier:
            self.break_("one-carrier", f"in view {view_id} {node} {carrier}; at its beginning it {before}", node=node)

    def ended(self, node: str) -> None:
        """The process is gone, and its state with it."""
        self._spoiled.pop(node, None)
        self._apart.pop(node, None)
        self.held.pop(node, None)
        self._taken_along.pop(node, None)
        self._connected.pop(node, None)
        self.tiered.ended(node)

    def _working(self) -> tuple[str, ...]:
        return () if self.installed is None else self.installed.nodes[: self.installed.workers]


class CheckedStore:
    """A RecordStore that tells the checker of what it has taken."""

    def __init__(self, store: RecordStore, checker: Checker) -> None:
        self._store = store
        self._checker = checker
        checker.opened(store.load())

    def load(self) -> History:
        return self._store.load()

    def append(self, record: JournalRecord) -> None:
        self._store.append(record)
        self._checker.appended(record)

    def confirm(self) -> None:
        self._store.confirm()

    def close(self) -> None:
        self._store.close()
