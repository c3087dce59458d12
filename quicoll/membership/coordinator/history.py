"""The coordinator's durable records, and the state that follows from them.

The journal is a sequence of records; `History` is their fold, and `History.apply` is the only place that says what a
record means. The coordinator applies each record as it hands it out, the journal applies the same records when it
loads them, so a restarted coordinator knows exactly what the old one had promised.

Presumed abort (Mohan, Lindsay and Obermarck 1986, "Transaction management in the R* distributed database management
system", ACM TODS 11(4)): only commits are written. A step without a `Committed` record was not committed, and cannot
be any more once its view is over, because votes live in memory and count in their own view alone. So "no record" is a
final answer for a member in doubt.

Invariants: view ids grow, by proposals as well as by installations, so that no id ever names two memberships; steps
are committed one by one; each is committed by the view installed at that time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from quicoll.errors import LocalError
from quicoll.membership.coordinator.lessons import Lessons
from quicoll.membership.view import View  # noqa: TC001 - a record's fields are read when it is decoded

__all__ = [
    "CommitRange",
    "Committed",
    "Forgotten",
    "History",
    "InstalledView",
    "JournalRecord",
    "Left",
    "Noted",
    "Proposed",
    "Scaled",
    "Seeded",
    "WentOn",
]

CommitRange: TypeAlias = tuple[int, int, int]
"""(view_id, first_step, last_step): the steps which a view committed are consecutive."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """The job's seed; written once, before anything else."""

    seed: int


@dataclass(frozen=True, slots=True)
class Proposed:
    """The view id is used up, whether or not the view is ever installed."""

    view_id: int


@dataclass(frozen=True, slots=True)
class InstalledView:
    """All members confirmed the view; from here on quorums are counted of its nodes."""

    view: View


@dataclass(frozen=True, slots=True)
class Committed:
    """Every member of the view voted for the step with this digest."""

    step: int
    view_id: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """A node of the last installed view, or one that may hold the last committed step, went of its own will.

    It no longer counts in the base of quorums, and nobody waits for what it holds.

    finished: the step at which its work ended as it should, as its user counts; None where it did not. A node outside
    of the view that was told the end of the job has finished too.
    """

    node: str
    finished: int | None = None


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Nodes of the last installed view that an operator gives up: they count in the base of quorums no longer.

    What they hold is not waited for. One that comes back all the same joins as a node that was never here.
    """

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WentOn:
    """A step was begun in the installed view after some had finished: the job goes on without them."""

    view_id: int


@dataclass(frozen=True, slots=True)
class Noted:
    """What failed views have taught of nodes, in place of what was noted before."""

    lessons: Lessons


@dataclass(frozen=True, slots=True)
class Scaled:
    """An operator wants so many ranks, and these nodes to leave, in place of what was wanted before."""

    world_size: int
    leave: tuple[str, ...] = ()


JournalRecord: TypeAlias = Seeded | Proposed | InstalledView | Committed | Left | Forgotten | WentOn | Noted | Scaled


@dataclass(frozen=True, slots=True)
class History:
    """The fold of all records.

    seed: None before the first start. last_view_id: the largest id ever proposed. view: the last installed one. left:
    its nodes that left or were forgotten. holders: nodes that may hold what the last commit led to, those of `base`
    first: of the view that made it, and of each one after that. commits: by view, ascending; small, as one entry stands
    for all steps of a view. committed_step, committed_view: of the last commit; before any, the step from which the
    first view went on, and 0. committed_digest: of the last commit. finished: nodes whose work ended as it should at
    `committed_step`, with nothing begun after it; final_step: that step, as their users count; crowd: how many nodes
    were left of the view when the first of them ended. lessons: what was noted last. wanted: ranks that an operator has
    asked for, None where nobody has; to_leave: nodes that are still to leave for that.
    """

    seed: int | None = None
    last_view_id: int = 0
    view: View | None = None
    left: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    commits: tuple[CommitRange, ...] = ()
    committed_step: int = 0
    committed_view: int = 0
    committed_digest: bytes = b""
    finished: tuple[str, ...] = ()
    final_step: int = 0
    crowd: int = 0
    lessons: Lessons = field(default_factory=Lessons)
    wanted: int | None = None
    to_leave: tuple[str, ...] = ()

    def apply(self, record: JournalRecord) -> History:
        """Return the history after `record`. Raises LocalError when the record contradicts what is there."""
        if isinstance(record, Seeded):
            if self.seed is not None:
                raise LocalError(f"the seed is {self.seed} already")
            return replace(self, seed=record.seed)
        if isinstance(record, Proposed):
            if record.view_id <= self.last_view_id:
                raise LocalError(f"view {record.view_id} is proposed after view {self.last_view_id}")
            return replace(self, last_view_id=record.view_id)
        if isinstance(record, InstalledView):
            return self._install(record.view)
        if isinstance(record, Committed):
            return self._commit(record)
        if isinstance(record, WentOn):
            return self._go_on(record)
        if isinstance(record, Forgotten):
            return self._forget(record)
        if isinstance(record, Noted):
            return replace(self, lessons=record.lessons)
        if isinstance(record, Scaled):
            return replace(self, wanted=record.world_size, to_leave=record.leave)
        return self._leave(record)

    @property
    def base(self) -> tuple[str, ...]:
        """Nodes of which a new view needs more than half, by rank; empty before the first view. Spares are none."""
        if self.view is None:
            return ()
        workers = self.view.nodes[: self.view.workers]
        return tuple([node for node in workers if node not in self.left]) if self.left else workers

    @property
    def ended(self) -> bool:
        """Whether the job is done, unless a member of the last view goes on: at least half of it has finished."""
        return bool(self.finished) and 2 * len(self.finished) >= self.crowd

    def committed(self, view_id: int, step: int) -> bool:
        """Return whether `view_id` committed `step`; final for every view but the one installed now."""
        return any(view == view_id and first <= step <= last for view, first, last in self.commits)

    @classmethod
    def of(cls, records: Iterable[JournalRecord]) -> History:
        """Return the history of all these records, in their order."""
        history = cls()
        for record in records:
            history = history.apply(record)
        return history

    def _install(self, view: View) -> History:
        if view.view_id != self.last_view_id:
            raise LocalError(f"view {view.view_id} is installed, but the last one proposed is {self.last_view_id}")
        if self.view is not None and view.view_id <= self.view.view_id:
            raise LocalError(f"view {view.view_id} is installed twice")
        # The first view of a new journal may go on from a checkpoint; every later one from the last commit.
        if self.view is not None and view.committed_step != self.committed_step:
            raise LocalError(f"view {view.view_id} goes on from step {view.committed_step}, not {self.committed_step}")
        # Where nobody of the last view is left the job begins anew; else a node that is back has not finished.
        finished = tuple(node for node in self.finished if node not in view.nodes) if self.base else ()
        final_step, crowd = (self.final_step, self.crowd) if finished else (0, 0)
        before = self.holders if self.base else ()
        return replace(
            self,
            view=view,
            left=(),
            holders=tuple(dict.fromkeys((*view.nodes[: view.workers], *before))),
            committed_step=view.committed_step,
            finished=finished,
            final_step=final_step,
            crowd=crowd,
        )

    def _leave(self, record: Left) -> History:
        base, finishes = self.base, record.finished is not None
        # Not every journal keeps which came first, a commit of a view or that a node beside it left.
        known = record.node in self.holders or (self.view is not None and self.committed_view == self.view.view_id)
        if not known and not (finishes and self.view is not None):
            raise LocalError(f"{record.node} leaves, but the last view has no such node")
        if finishes and record.node in self.finished:
            raise LocalError(f"{record.node} has finished already")
        left = (*self.left, record.node) if record.node in base else self.left
        holders = tuple(node for node in self.holders if node != record.node)
        if record.finished is None:
            return replace(self, left=left, holders=holders)
        return replace(
            self,
            left=left,
            holders=holders,
            finished=(*self.finished, record.node),
            final_step=max(record.finished, self.final_step),
            crowd=self.crowd or len(base),
        )

    def _forget(self, record: Forgotten) -> History:
        strange = [node for node in record.nodes if node not in self.base]
        if strange or not record.nodes:
            raise LocalError(f"{strange[0] if strange else 'nobody'} is forgotten, but the last view has no such node")
        holders = tuple(node for node in self.holders if node not in record.nodes)
        return replace(self, left=(*self.left, *record.nodes), holders=holders)

    def _go_on(self, record: WentOn) -> History:
        if self.view is None or record.view_id != self.view.view_id:
            raise LocalError(f"a step is begun in view {record.view_id}, which is not installed")
        return replace(self, finished=(), final_step=0, crowd=0)

    def _commit(self, record: Committed) -> History:
        if self.view is None or record.view_id != self.view.view_id:
            raise LocalError(f"step {record.step} is committed by view {record.view_id}, which is not installed")
        if record.step != self.committed_step + 1:
            raise LocalError(f"step {record.step} is committed after step {self.committed_step}")
        commits = self.commits
        if commits and commits[-1][0] == record.view_id:
            commits = (*commits[:-1], (record.view_id, commits[-1][1], record.step))
        else:
            commits = (*commits, (record.view_id, record.step, record.step))
        # There is one with each step, and `replace` looks at each field's definition.
        return History(
            seed=self.seed,
            last_view_id=self.last_view_id,
            view=self.view,
            left=self.left,
            holders=self.base,
            commits=commits,
            committed_step=record.step,
            committed_view=record.view_id,
            committed_digest=record.digest,
            lessons=self.lessons,
            wanted=self.wanted,
            to_leave=self.to_leave,
        )
