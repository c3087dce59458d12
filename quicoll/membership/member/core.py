"""A member's core: follows the coordinator's decisions, and never acts in two views.

    DETACHED   no link to the coordinator
    JOINING    connected; there is no view for this node yet
    FORMING    a view was proposed; links to its members are being formed
    ACTIVE     the view is installed; steps are taken in it
    LEFT       the end: left of its own will, or refused, or the job is done

`MEMBER_TRANSITIONS` is the whole of what can happen. Each `FormLinks(v)` is followed by exactly one `Deactivate(v)`,
with `Activate(v)` between them if the view was installed, and before any other `FormLinks`. So the shell has at most
one view at a time, and a Confirm, which says "I act in no other view", can only follow the Deactivate of the old one.
What belongs to that one view (its answer, its step, its reports) is in local_view.py; what is kept from view to view
(the seed, the steps, the doubt) in job_progress.py. Here are the link to the coordinator, the one deadline, and what
follows from each message and call.

The vote is the point of no return. Before it, this member alone can make sure that the step is not committed: losing
the coordinator aborts the step here. After a vote with ok, only the coordinator knows. So from an ok vote to the
decision the step is in doubt: when the link is lost the view is deactivated, but nothing is said about the step until
the answer to the next Join, from the journal, settles it. This is the blocking of two-phase commit (Bernstein,
Hadzilacos and Goodman 1987, "Concurrency Control and Recovery in Database Systems", section 7.4); it cannot be avoided
with a single decider, and costs time only, never state.

Incarnations order the processes of a node (membership/incarnation.py). Where the coordinator knows a later one, this
process starts over above it if it was never admitted (`StartOver`), and stops with `Refused` if it was: then another
process of its name has joined after it.

The coordinator is trusted to decide, not to be free of faults: a message that its rules exclude (a view id that goes
back, a decision on a step that was not voted) means that it runs on another journal (job_progress.py). The member then
stops with `Refused` rather than guess.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from quicoll.deadlines import Deadlines
from quicoll.errors import LocalError
from quicoll.membership.incarnation import MOST_STARTS, above
from quicoll.membership.member.actions import (
    Activate,
    AdoptLostAfter,
    Decided,
    FormLinks,
    Held,
    JobOver,
    MemberAction,
    ProbePaths,
    Reconnect,
    Refused,
    Resumed,
    StartOver,
    TellCoordinator,
)
from quicoll.membership.member.job_progress import JobProgress
from quicoll.membership.member.local_view import LocalView
from quicoll.membership.messages import (
    Aborted,
    Adopt,
    CoordinatorMessage,
    Decide,
    FailureKind,
    Install,
    JobEnded,
    Join,
    Leave,
    MemberMessage,
    Outdated,
    Probe,
    Propose,
    Reached,
    RefuseJoin,
    Welcome,
    Withhold,
    clip,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll.membership.messages import Confirm, Decline
    from quicoll.membership.view import View

__all__ = ["MEMBER_TRANSITIONS", "MemberCause", "MemberCore", "MemberState", "member_transition"]


class MemberState(enum.Enum):
    DETACHED = "detached"
    JOINING = "joining"
    FORMING = "forming"
    ACTIVE = "active"
    LEFT = "left"


class MemberCause(enum.Enum):
    CONNECTED = "the link to the coordinator is up"
    DISCONNECTED = "the link to the coordinator is lost"
    PROPOSED = "a view is proposed"
    INSTALLED = "the view is installed"
    ENDED = "the view is over"
    DONE = "left or refused, or the job is done"


MEMBER_TRANSITIONS: dict[MemberState, dict[MemberCause, MemberState]] = {
    MemberState.DETACHED: {MemberCause.CONNECTED: MemberState.JOINING, MemberCause.DONE: MemberState.LEFT},
    MemberState.JOINING: {
        MemberCause.PROPOSED: MemberState.FORMING,
        MemberCause.DISCONNECTED: MemberState.DETACHED,
        MemberCause.DONE: MemberState.LEFT,
    },
    MemberState.FORMING: {
        MemberCause.INSTALLED: MemberState.ACTIVE,
        MemberCause.ENDED: MemberState.JOINING,
        MemberCause.DISCONNECTED: MemberState.DETACHED,
        MemberCause.DONE: MemberState.LEFT,
    },
    MemberState.ACTIVE: {
        MemberCause.ENDED: MemberState.JOINING,
        MemberCause.DISCONNECTED: MemberState.DETACHED,
        MemberCause.DONE: MemberState.LEFT,
    },
    MemberState.LEFT: {},
}


def member_transition(state: MemberState, cause: MemberCause) -> MemberState:
    """The next state. Raises LocalError where `MEMBER_TRANSITIONS` has none."""
    try:
        return MEMBER_TRANSITIONS[state][cause]
    except KeyError:
        raise LocalError(f"{cause.name} cannot happen to a member that is {state.name}") from None


_SECOND = 1_000_000_000


class MemberCore:
    """Messages, link changes, the user's steps and time in, actions out; see the head of this module.

    After every input the shell takes actions by `next_action` until there is none, carries them out in order, and arms
    one timer for `next_timer`. Times are nanoseconds of one monotonic clock.

    Args:
        node: The name in this node's certificate.
        incarnation: Of the process, as `quicoll.membership.incarnation.first` gives it; grows where it starts over.
        addresses: For `Join`, as world_size, rank_hint, seed, site, lost_after_ns, adopts and the timeouts are.
        committed_step: The last step whose result this process holds (of a loaded checkpoint).
        form_timeout_ns: For `links_ready` or `links_failed`, after which the view is declined.
        answer_timeout_ns: For the coordinator's answer to a Join and to a Confirm.
        decision_margin_ns: From an ok vote to the decision, beyond the coordinator's `vote_timeout_ns`.
    Raises:
        LocalError: A timeout is not above 0.
    """

    def __init__(
        self,
        node: str,
        incarnation: int,
        *,
        addresses: Sequence[tuple[str, int]] = (),
        world_size: int | None = None,
        rank_hint: int | None = None,
        seed: int | None = None,
        site: str = "",
        committed_step: int = 0,
        lost_after_ns: int | None = None,
        adopts: bool = False,
        timeout_ns: int | None = None,
        hold_timeout_ns: int | None = None,
        form_timeout_ns: int = 15 * _SECOND,
        answer_timeout_ns: int = 30 * _SECOND,
        decision_margin_ns: int = 30 * _SECOND,
    ) -> None:
        if min(form_timeout_ns, answer_timeout_ns, decision_margin_ns) <= 0:
            raise LocalError("form_timeout_ns, answer_timeout_ns and decision_margin_ns have to be above 0")
        self.node = node
        self.incarnation = incarnation
        self._join = Join(
            incarnation=incarnation,
            addresses=tuple(addresses),
            world_size=world_size,
            rank_hint=rank_hint,
            seed=seed,
            site=site,
            lost_after_ns=lost_after_ns,
            adopts=adopts,
            timeout_ns=timeout_ns,
            hold_timeout_ns=hold_timeout_ns,
        )
        self._form_timeout_ns = form_timeout_ns
        self._answer_timeout_ns = answer_timeout_ns
        self._decision_margin_ns = decision_margin_ns
        self._vote_timeout_ns = 0  # the coordinator's, from Welcome on
        self._state = MemberState.DETACHED
        self._out: deque[MemberAction] = deque()
        self._progress = JobProgress(committed_step, seed=seed)
        self._welcomed = False
        self._local: LocalView | None = None  # of the proposed or installed view
        self._leaving = False
        self._finished: int | None = None  # with _leaving: the step at which the work here ended as it should
        self._starts = 0  # how often it has started over
        self._held = ""
        self._deadline_ns: int | None = None

    def __repr__(self) -> str:
        view = self._local.view.view_id if self._local is not None else None
        return f"<MemberCore {self.node}#{self.incarnation} {self._state.name} view={view} step={self.open_step}>"

    @property
    def state(self) -> MemberState:
        return self._state

    @property
    def view(self) -> View | None:
        """The view that is being formed or active."""
        return self._local.view if self._local is not None else None

    @property
    def committed_step(self) -> int:
        """The last step whose result this node holds."""
        return self._progress.holds

    @property
    def next_step(self) -> int | None:
        """The only step that can be begun now; None while none can."""
        free = self._state is MemberState.ACTIVE and self._local is not None and self._local.free
        return self._progress.committed + 1 if free and not self._leaving else None

    @property
    def open_step(self) -> int | None:
        """The step that was begun and is not decided."""
        return self._local.step if self._local is not None else None

    @property
    def vote_timeout_ns(self) -> int:
        """How long the coordinator waits for the last vote of a step; 0 before it was heard."""
        return self._vote_timeout_ns

    @property
    def doubt(self) -> tuple[int, int] | None:
        """(view_id, step) of a vote whose decision is not known because the link was lost."""
        return self._progress.doubt

    # Inputs: the link to the coordinator

    def connected(self, *, now_ns: int) -> None:
        """Take in that there is a link to the coordinator; join by it."""
        if self._state is not MemberState.DETACHED:
            return
        self._move(MemberCause.CONNECTED)
        self._welcomed = False
        self._deadline_ns = now_ns + self._answer_timeout_ns
        progress = self._progress
        self._tell(msgspec.structs.replace(self._join, committed_step=progress.holds, doubt=progress.doubt))

    def disconnected(self, cause: str, *, now_ns: int) -> None:
        """Take in that the link to the coordinator is gone; nothing of it will be delivered any more."""
        if self._state in (MemberState.DETACHED, MemberState.LEFT):
            return
        cause = f"the coordinator was lost: {cause}"
        self._keep_doubt()
        self._end_view(cause, partitioned=True)
        self._deadline_ns = None
        if self._leaving and self._progress.doubt is None:
            self._move(MemberCause.DONE)
            return
        self._move(MemberCause.DISCONNECTED)
        self._hold(cause)

    def outdated(self, latest: int, *, now_ns: int) -> None:
        """Take in that the coordinator has a link to a later process of this node, which ended ours. latest: it."""
        self.disconnected("a later process of this node is there", now_ns=now_ns)
        if self._state is not MemberState.LEFT:
            self._outdated(latest)

    def receive(self, message: CoordinatorMessage, *, now_ns: int) -> None:
        """Take in a message of the coordinator."""
        view_id = self._local.view.view_id if self._local is not None else None
        if self._state in (MemberState.DETACHED, MemberState.LEFT):
            return
        if isinstance(message, RefuseJoin):
            self._refused(message.reason)
        elif isinstance(message, Adopt) and self._state is MemberState.JOINING and not self._welcomed:
            self._adopt(message.lost_after_ns)
        elif isinstance(message, Outdated) and self._state is MemberState.JOINING and not self._welcomed:
            self._outdated(message.latest)
        elif isinstance(message, Welcome) and self._state is MemberState.JOINING and not self._welcomed:
            self._welcome(message)
        elif not self._welcomed:
            # Meant for the link before this one: the coordinator sent it before it read our Join.
            return
        elif isinstance(message, Propose):
            self._propose(message.view, now_ns)
        elif isinstance(message, Withhold) and self._state is MemberState.JOINING:
            self._hold(message.cause)
        elif isinstance(message, Probe) and self._state is MemberState.JOINING:
            self._out.append(ProbePaths(message.number, message.members))
        elif isinstance(message, JobEnded) and self._state is MemberState.JOINING:
            self._job_ended(message.step)
        elif isinstance(message, Install) and message.view_id == view_id and self._state is MemberState.FORMING:
            self._install()
        elif isinstance(message, Decide) and message.view_id == view_id and self._state is MemberState.ACTIVE:
            self._decide(message, now_ns)
        elif isinstance(message, Aborted) and message.view_id == view_id:
            self._view_over(message.cause, message.lost, message.culprit, message.kind)
        else:
            self._protocol_broken(f"{type(message).__name__} while {self._state.name}")

    # Inputs: the links to other members

    def reached(self, number: int) -> None:
        """Take in that there is a link to each member of the probe of this number."""
        if self._state is MemberState.JOINING and self._welcomed and not self._leaving:
            self._tell(Reached(number=number))

    def links_ready(self, view_id: int, *, now_ns: int) -> None:
        """Take in that there is a link to every other member of the proposed view."""
        local = self._forming(view_id)
        if local is not None and not local.answered:
            self._answer(local.confirm(), now_ns)

    def links_failed(self, view_id: int, unreachable: Sequence[str], reason: str, *, now_ns: int) -> None:
        """Decline the view: some members are unreachable; or, where none is named, this node cannot take part."""
        local = self._forming(view_id)
        if local is not None:
            self._answer(local.decline(tuple(unreachable), reason), now_ns)

    def peer_lost(self, node: str, cause: str, *, now_ns: int) -> None:
        """Take in that the link to a member of the view is lost."""
        local = self._local
        if local is None or not local.is_new_loss(node):
            return
        if self._state is MemberState.ACTIVE:
            self._tell(local.lost(node, cause))
        elif local.confirmed:
            self._answer(local.withdraw(node, cause), now_ns)

    # Inputs: the user's steps

    def begin(self, step: int, *, now_ns: int) -> None:
        """Begin `step`. Raises LocalError when it is not `next_step`."""
        if self._local is None or step != self.next_step:
            raise LocalError(f"step {step} cannot begin; next is {self.next_step}", step=step)
        self._tell(self._local.begin(step))

    def vote(
        self,
        step: int,
        *,
        ok: bool,
        digest: bytes = b"",
        reason: str = "",
        culprit: str = "",
        groups: tuple[tuple[int, bytes], ...] = (),
        now_ns: int,
    ) -> None:
        """Vote for the open step; with ok, it can be committed from now on. Raises LocalError when it is not open."""
        if self._local is None or step != self._local.step or self._local.vote is not None:
            raise LocalError(f"there is nothing to vote on step {step}; open is {self.open_step}", step=step)
        self._deadline_ns = now_ns + self._vote_timeout_ns + self._decision_margin_ns
        self._tell(self._local.cast_vote(step, ok=ok, digest=digest, reason=reason, culprit=culprit, groups=groups))

    def failed(
        self,
        reason: str,
        *,
        culprit: str = "",
        kind: FailureKind = "failed",
        blamed: Sequence[str] = (),
        now_ns: int,
    ) -> None:
        """Report that a collective of the active view failed or was cancelled, so that the view cannot go on.

        Args:
            reason: For people.
            culprit: The node that caused it; "" where none is known.
            kind: Kind of failure.
            blamed: Members whose bits came corrupt, or who called something else, as `kind` says.
            now_ns: The time now.
        """
        if self._state is MemberState.ACTIVE and self._local is not None and not self._local.failed:
            self._tell(self._local.fail(reason, culprit=culprit, kind=kind, blamed=tuple(blamed)))

    def caught_up(self, step: int) -> None:
        """Take in that the state after `step` is here. Raises LocalError where no member can hold it."""
        self._progress.caught_up(step)

    def state_lost(self) -> None:
        """Take in that the state that was here is whole no more."""
        self._progress.state_lost()

    def leave(self, reason: str = "", *, finished: int | None = None, now_ns: int) -> None:
        """Leave the job: at once, or after the decision of the step that is open or in doubt.

        Args:
            reason: For the other members.
            finished: The step at which the work here ended as it should, as its user counts; None where it did not.
            now_ns: The time now.
        """
        if self._leaving or self._state is MemberState.LEFT:
            return
        self._leaving, self._finished = True, finished
        if self._welcomed and self._state is not MemberState.DETACHED:
            self._tell_leave(reason)
        unanswered = self._state is MemberState.JOINING and not self._welcomed
        if self.open_step is None and self._progress.doubt is None and not unanswered:
            self._end_view("this node left")
            self._done()

    # Time and outputs

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due at `now_ns`; harmless when nothing is."""
        if self._deadline_ns is None or now_ns < self._deadline_ns:
            return
        self._deadline_ns = None
        if self._state is MemberState.FORMING and self._local is not None and not self._local.answered:
            self._answer(self._local.decline((), f"no links within {self._form_timeout_ns / 1e9:g} s"), now_ns)
            return
        awaited = "the answer to Join" if self._state is MemberState.JOINING else "the installation of the view"
        cause = (
            f"{awaited if self._state is not MemberState.ACTIVE else 'the decision of the step'} did not come in time"
        )
        self._out.append(Reconnect(cause))
        self.disconnected(cause, now_ns=now_ns)

    def next_timer(self) -> int | None:
        """Return when `handle_timer` has to be called at the latest; None when nothing is pending."""
        return self._deadline_ns

    def next_action(self) -> MemberAction | None:
        """Return the next action to carry out; None when there is none."""
        return self._out.popleft() if self._out else None

    # The coordinator's messages

    def _welcome(self, message: Welcome) -> None:
        if contradiction := self._progress.contradiction(message):
            self._protocol_broken(contradiction)
            return
        self._welcomed = True
        self._deadline_ns = None
        self._vote_timeout_ns = message.vote_timeout_ns
        doubt = self._progress.welcome(message)
        cause = "settled after the coordinator was lost"
        if doubt is not None and message.doubt_committed:
            self._committed(*doubt, cause)
        elif doubt is not None:
            self._out.append(Decided(*doubt, False, cause))
        if self._leaving:
            self._tell_leave()
            self._done()
        elif message.waiting_for:
            self._hold(message.waiting_for)

    def _adopt(self, lost_after_ns: int) -> None:
        if not self._join.adopts or lost_after_ns == self._join.lost_after_ns:
            self._protocol_broken(f"a setting that was not asked for: lost_after {lost_after_ns / 1e9:.12g} s")
            return
        self._join = msgspec.structs.replace(self._join, lost_after_ns=lost_after_ns)
        at = Deadlines.of_ns(lost_after_ns)
        self._form_timeout_ns, self._answer_timeout_ns = at.form_ns, at.answer_ns
        self._deadline_ns = None
        self._out.append(AdoptLostAfter(lost_after_ns))
        self._move(MemberCause.DONE if self._leaving and self._progress.doubt is None else MemberCause.DISCONNECTED)

    def _outdated(self, latest: int) -> None:
        """Start over above the latest process of this node, or end where this one was admitted before it."""
        if self._progress.admitted:
            self._refused(f"another process of {self.node} has joined after this one")
            return
        if latest < self.incarnation:
            self._protocol_broken(f"incarnation {latest} is said to be later than {self.incarnation}")
            return
        if self._starts >= MOST_STARTS:
            self._refused(f"{self._starts} other processes of {self.node} came before this one was admitted")
            return
        try:
            incarnation = above(latest, self.incarnation)
        except LocalError as error:
            self._refused(error.message)
            return
        self._starts += 1
        self.incarnation = incarnation
        self._join = msgspec.structs.replace(self._join, incarnation=incarnation)
        self._deadline_ns = None
        if self._state is not MemberState.DETACHED:
            self._move(MemberCause.DONE if self._leaving else MemberCause.DISCONNECTED)
        self._out.append(StartOver(incarnation))

    def _job_ended(self, step: int) -> None:
        self._finished = step
        self._tell_leave("the job is done")
        self._done()
        self._out.append(JobOver(step))

    def _propose(self, view: View, now_ns: int) -> None:
        if contradiction := self._progress.contradiction_of_view(view, node=self.node, incarnation=self.incarnation):
            self._protocol_broken(contradiction)
            return
        local = self._local
        if local is not None:
            # The coordinator took no step to be open, or the decision would have come first, on the same link. The
            # proposal itself says what became of one.
            if local.step is not None and local.vote and view.committed_step >= local.step:
                if view.committed_view != local.view.view_id:
                    self._protocol_broken(f"step {local.step} is committed, and this node was not told by which view")
                    return
                self._committed(local.view.view_id, local.step)
            self._view_over(f"view {view.view_id} is proposed", (), "")
            if self._leaving:
                return
        self._move(MemberCause.PROPOSED)
        self._local = LocalView(view, self.node)
        self._progress.proposed(view)
        self._deadline_ns = now_ns + self._form_timeout_ns
        self._out.append(FormLinks(view))

    def _install(self) -> None:
        if self._local is None or not self._local.confirmed:
            self._protocol_broken("Install of a view that was not confirmed")
            return
        self._move(MemberCause.INSTALLED)
        self._deadline_ns = None
        if self._held:
            self._held = ""
            self._out.append(Resumed())
        self._out.append(Activate(self._local.view))

    def _decide(self, message: Decide, now_ns: int) -> None:
        if message.commit:
            step, vote = (self._local.step, self._local.vote) if self._local is not None else (None, None)
            if message.step != step or not vote:
                self._protocol_broken(f"step {message.step} is committed, but open here is {step} with vote {vote}")
                return
            self._deadline_ns = None
            self._committed(message.view_id, message.step)
            if self._leaving:
                self._view_over("this node left", (), "")
            elif message.next_view is not None:
                self._propose(message.next_view, now_ns)
        else:
            self._view_over(message.cause, message.lost, message.culprit, message.kind)

    def _view_over(self, cause: str, lost: tuple[str, ...], culprit: str, kind: FailureKind = "failed") -> None:
        """End the view; the link to the coordinator stays."""
        self._end_view(cause, lost=lost, culprit=culprit, kind=kind)
        self._deadline_ns = None
        if self._leaving:
            self._done()
        else:
            self._move(MemberCause.ENDED)

    # Helpers

    def _end_view(
        self,
        cause: str,
        *,
        lost: tuple[str, ...] = (),
        culprit: str = "",
        partitioned: bool = False,
        kind: FailureKind = "failed",
    ) -> None:
        """Drop the view. A step that is still open was committed nowhere."""
        local, self._local = self._local, None
        if local is not None:
            self._out += local.end(cause, lost=lost, culprit=culprit, partitioned=partitioned, kind=kind)

    def _keep_doubt(self) -> None:
        """Keep a step that was voted on with ok until the journal answers: it may have been committed."""
        doubt = self._local.step_in_doubt() if self._local is not None else None
        if doubt is not None:
            self._progress.doubt = doubt

    def _committed(self, view_id: int, step: int, cause: str = "") -> None:
        """Take in that the step is committed."""
        if self._local is not None:
            self._local.decided()
        self._progress.commit(step)
        self._out.append(Decided(view_id, step, True, cause))

    def _forming(self, view_id: int) -> LocalView | None:
        """Return the local view, if `view_id` is being formed."""
        local = self._local if self._state is MemberState.FORMING else None
        return local if local is not None and local.view.view_id == view_id else None

    def _answer(self, message: Confirm | Decline, now_ns: int) -> None:
        """Answer the proposal; what follows from it is waited for."""
        self._deadline_ns = now_ns + self._answer_timeout_ns
        self._tell(message)

    def _hold(self, cause: str) -> None:
        if cause != self._held:
            self._held = cause
            self._out.append(Held(cause))

    def _refused(self, reason: str) -> None:
        self._keep_doubt()
        self._end_view(f"refused: {reason}")
        self._done()
        self._out.append(Refused(reason))

    def _protocol_broken(self, what: str) -> None:
        self._refused(f"the coordinator broke the protocol: {what}")

    def _done(self) -> None:
        self._deadline_ns = None
        self._move(MemberCause.DONE)

    def _tell_leave(self, reason: str = "") -> None:
        self._tell(Leave(reason=clip(reason), finished=self._finished, committed_step=self._progress.holds))

    def _tell(self, message: MemberMessage) -> None:
        self._out.append(TellCoordinator(message))

    def _move(self, cause: MemberCause) -> None:
        self._state = member_transition(self._state, cause)
