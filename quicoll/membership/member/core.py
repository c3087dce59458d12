"""A member's core: follows the coordinator's decisions, and never acts in two views.

`MEMBER_TRANSITIONS` (states.py) is the whole of what can happen. Each `FormLinks(v)` is followed by exactly one
`Deactivate(v)`, with `Activate(v)` between them if the view was installed, and before any other `FormLinks`. So the
shell has at most one view at a time, and a Confirm, which says "I act in no other view", can only follow the Deactivate
of the old one. What belongs to one view (its answer, its step, its reports) is in local_view.py; what is kept from view
to view (the seed, the steps, the doubt) in job_progress.py; what this process joins with in own_join.py; what it waits
for in waits.py. Here are the link to the coordinator, and what follows from each message and call.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from quicoll.errors import LocalError
from quicoll.membership.member.actions import (
    Activate,
    AdoptLostAfter,
    Decided,
    Dismissal,
    ExpectPeer,
    FormLinks,
    FreeToLeave,
    Held,
    JobOver,
    LedElsewhere,
    MemberAction,
    ProbePaths,
    Reconnect,
    Refused,
    Resumed,
    TellCoordinator,
)
from quicoll.membership.member.job_progress import JobProgress
from quicoll.membership.member.local_view import LocalView, ViewEnd
from quicoll.membership.member.own_join import OwnJoin, broken_protocol
from quicoll.membership.member.states import MemberCause, MemberState, member_transition
from quicoll.membership.member.waits import ANSWER_NS, DECISION_MARGIN_NS, FORM_NS, Awaited, Wait
from quicoll.membership.messages import (
    Aborted,
    Adopt,
    AskToLeave,
    Decide,
    Dismiss,
    Expect,
    Install,
    JobEnded,
    Join,
    Learn,
    Learned,
    Leave,
    MayLeave,
    Outdated,
    Probe,
    Propose,
    Reached,
    RefuseJoin,
    Standby,
    Welcome,
    Withhold,
    clip,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll.membership.messages import Confirm, CoordinatorMessage, Decline, FailureKind, MemberMessage
    from quicoll.membership.view import View

__all__ = ["MemberCore"]


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
        form_timeout_ns: int = FORM_NS,
        answer_timeout_ns: int = ANSWER_NS,
        decision_margin_ns: int = DECISION_MARGIN_NS,
    ) -> None:
        self.node = node
        join = Join(
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
        self._own_join = OwnJoin(node, join)
        self._wait = Wait(form_ns=form_timeout_ns, answer_ns=answer_timeout_ns, margin_ns=decision_margin_ns)
        self._state = MemberState.DETACHED
        self._out: deque[MemberAction] = deque()
        self._progress = JobProgress(committed_step, seed=seed)
        self._welcomed = False
        self._local: LocalView | None = None  # of the proposed or installed view
        self._learning = False  # it has stepped out of a view, and not said since that it is to be in the next one
        self._asks_to_leave = False
        self._leaving = False
        self._parted = 0  # the view in which those who are to leave have handed over what they owned
        self._finished: int | None = None  # with _leaving: the step at which the work here ended as it should
        self._held = ""

    def __repr__(self) -> str:
        view = self._local.view.view_id if self._local is not None else None
        return f"<MemberCore {self.node}#{self.incarnation} {self._state.name} view={view} step={self.open_step}>"

    @property
    def incarnation(self) -> int:
        """Of the process, as it joins now."""
        return self._own_join.incarnation

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
        return self._wait.vote_timeout_ns

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
        self._wait.begin(Awaited.ANSWER, now_ns=now_ns)
        self._tell(self._own_join.message(self._progress))

    def disconnected(self, cause: str, *, now_ns: int) -> None:
        """Take in that the link to the coordinator is gone; nothing of it will be delivered any more."""
        if self._state in (MemberState.DETACHED, MemberState.LEFT):
            return
        cause = f"the coordinator was lost: {cause}"
        self._end_view(ViewEnd(cause, partitioned=True), may_be_committed=True)
        self._learning = False
        self._wait.end()
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
        elif isinstance(message, Standby) and self._state is MemberState.JOINING and not self._welcomed:
            self._stood_by(message.leader, now_ns)
        elif isinstance(message, Welcome) and self._state is MemberState.JOINING and not self._welcomed:
            self._welcome(message)
        elif not self._welcomed:
            pass  # meant for the link before this one: the coordinator sent it before it read our Join
        elif isinstance(message, Propose):
            self._propose(message.view, now_ns)
        elif isinstance(message, Dismiss):
            self._dismissed(message.reason)
        elif isinstance(message, MayLeave) and self._asks_to_leave:
            self._out.append(FreeToLeave())
        elif isinstance(message, Withhold) and self._state is MemberState.JOINING:
            self._hold(message.cause)
        elif isinstance(message, Probe) and self._state is MemberState.JOINING:
            self._out.append(ProbePaths(message.number, message.members, message.own))
        elif isinstance(message, Expect):
            self._out.append(ExpectPeer(message.member, message.own))
        elif isinstance(message, JobEnded) and self._state is MemberState.JOINING:
            self._job_ended(message.step)
        elif isinstance(message, Install) and message.view_id == view_id and self._state is MemberState.FORMING:
            self._install()
        elif isinstance(message, Decide) and message.view_id == view_id and self._state is MemberState.ACTIVE:
            self._decide(message, now_ns)
        elif isinstance(message, Aborted) and message.view_id == view_id:
            self._view_over(ViewEnd(message.cause, message.lost, message.culprit, message.kind))
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
            self._announce()
            self._tell(local.lost(node, cause))
        elif local.confirmed:
            self._answer(local.withdraw(node, cause), now_ns)

    # Inputs: the user's steps

    def begin(self, step: int, *, now_ns: int) -> None:
        """Begin `step`. Raises LocalError when it is not `next_step`."""
        if self._local is None or step != self.next_step:
            raise LocalError(f"step {step} cannot begin; next is {self.next_step}", step=step)
        self._local.begin(step, now_ns=now_ns)
        self._announce_if_due(now_ns)

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
        self._wait.begin(Awaited.DECISION, now_ns=now_ns)
        vote = self._local.cast_vote(step, ok=ok, digest=digest, reason=reason, culprit=culprit, groups=groups)
        self._tell(msgspec.structs.replace(vote, owns=self._progress.owns))

    def failed(
        self, reason: str, *, culprit: str = "", kind: FailureKind = "failed", blamed: Sequence[str] = (), now_ns: int
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
            self._announce()  # what is aborted is a step that the coordinator knows of
            self._tell(self._local.fail(reason, culprit=culprit, kind=kind, blamed=tuple(blamed)))

    def caught_up(self, step: int) -> None:
        """Take in that the state after `step` is here, 0 for that of a checkpoint.

        Raises:
            LocalError: No member can hold it.
        """
        self._progress.caught_up(step)

    def state_lost(self) -> None:
        """Take in that the state that was here is whole no more."""
        self._progress.state_lost()

    def step_out(self) -> None:
        """Leave the active view between two steps, to learn its state. Raises LocalError where no step can begin."""
        if self._local is None or self.next_step is None:
            raise LocalError("a view is left between two steps, while it is at work")
        self._learning = True
        self._tell(Learn(view_id=self._local.view.view_id))

    def owns_state(self) -> None:
        """Take note that part of the job's state may be nowhere but here."""
        self._progress.owns = True

    def parted(self) -> None:
        """Take in that all who are to leave after the active view have handed over what they owned."""
        self._parted = self._local.view.view_id if self._local is not None else 0

    def learned(self) -> None:
        """Ask to be in views again, if this node stepped out of one and is in no other yet."""
        if self._learning and self._state is not MemberState.LEFT:
            self._learning = False
            self._tell(Learned())

    def ask_to_leave(self) -> bool:
        """Tell the coordinator that this node was asked to stop; `FreeToLeave` follows when nobody needs its state.

        Returns:
            Whether it was told. It is not while no link to it is there: then nobody says when to go.
        """
        if not self._welcomed or self._leaving or self._state in (MemberState.DETACHED, MemberState.LEFT):
            return False
        self._asks_to_leave = True
        self._tell(AskToLeave(owns=self._progress.owns))
        return True

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
            self._announce()  # or it would be taken to leave at a boundary, where nobody waits for its vote
            self._tell_leave(reason)
        unanswered = self._state is MemberState.JOINING and not self._welcomed
        if self.open_step is None and self._progress.doubt is None and not unanswered:
            self._end_view(ViewEnd("this node left"))
            self._done()

    # Time and outputs

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due at `now_ns`; harmless when nothing is."""
        self._announce_if_due(now_ns)
        awaited = self._wait.overdue(now_ns=now_ns)
        if awaited is Awaited.LINKS and self._local is not None:
            self._answer(self._local.decline((), f"no links within {self._wait.form_ns / 1e9:g} s"), now_ns)
        elif awaited is not None:
            cause = f"{awaited.value} did not come in time"
            self._out.append(Reconnect(cause))
            self.disconnected(cause, now_ns=now_ns)

    def next_timer(self) -> int | None:
        """Return when `handle_timer` has to be called at the latest; None when nothing is pending."""
        local, deadline_ns = self._local, self._wait.deadline_ns
        if local is None or local.announce_ns is None:
            return deadline_ns
        return local.announce_ns if deadline_ns is None else min(local.announce_ns, deadline_ns)

    def next_action(self) -> MemberAction | None:
        """Return the next action to carry out; None when there is none."""
        return self._out.popleft() if self._out else None

    # The coordinator's messages

    def _welcome(self, message: Welcome) -> None:
        if contradiction := self._progress.contradiction(message):
            self._protocol_broken(contradiction)
            return
        self._welcomed = True
        self._wait.end()
        self._wait.vote_timeout_ns = message.vote_timeout_ns
        doubt = self._progress.welcome(message)
        cause = "settled after the coordinator was lost"
        if doubt is not None and message.doubt_committed:
            self._committed(*doubt, cause)
        elif doubt is not None:
            self._out.append(Decided(*doubt, False, cause))
        if self._asks_to_leave and not self._leaving:
            self._tell(AskToLeave(owns=self._progress.owns))
        if self._leaving:
            self._tell_leave()
            self._done()
        elif message.waiting_for:
            self._hold(message.waiting_for)

    def _stood_by(self, leader: str, now_ns: int) -> None:
        """Wait on: this coordinator keeps the Join, and answers it when it leads. Or go to the one that does."""
        self._wait.begin(Awaited.ANSWER, now_ns=now_ns)
        self._hold(f"this coordinator stands by; {leader or 'it is not known who'} leads")
        self._out.append(LedElsewhere(leader))

    def _adopt(self, lost_after_ns: int) -> None:
        if contradiction := self._own_join.adopt(lost_after_ns):
            self._protocol_broken(contradiction)
            return
        self._wait.adopt(lost_after_ns)
        self._wait.end()
        self._out.append(AdoptLostAfter(lost_after_ns))
        self._move(MemberCause.DONE if self._leaving and self._progress.doubt is None else MemberCause.DISCONNECTED)

    def _outdated(self, latest: int) -> None:
        """Start over above the latest process of this node, or end where this one was admitted before it."""
        follows = self._own_join.outdated(latest, admitted=self._progress.admitted)
        if isinstance(follows, Refused):
            self._refused(follows.reason)
            return
        self._wait.end()
        if self._state is not MemberState.DETACHED:
            self._move(MemberCause.DONE if self._leaving else MemberCause.DISCONNECTED)
        self._out.append(follows)

    def _job_ended(self, step: int) -> None:
        self._finished = step
        self._tell_leave("the job is done")
        self._done()
        self._out.append(JobOver(step))

    def _dismissed(self, reason: str) -> None:
        """Leave the job at a boundary. The coordinator takes no step to be open, or would have decided it before."""
        self._end_view(ViewEnd(reason))
        self._tell_leave(reason)
        self._done()
        self._out.append(Dismissal(reason))

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
            gone = tuple(node for node in local.view.nodes if view.rank_of(node) is None)
            without = f" without {', '.join(gone)}" if gone else ""
            self._view_over(ViewEnd(f"view {view.view_id} is proposed{without}", gone))
            if self._leaving:
                return
        self._move(MemberCause.PROPOSED)
        self._learning = False
        self._local = LocalView(view, self.node)
        self._progress.proposed(view)
        self._wait.begin(Awaited.LINKS, now_ns=now_ns)
        self._out.append(FormLinks(view))

    def _install(self) -> None:
        if self._local is None or not self._local.confirmed:
            self._protocol_broken("Install of a view that was not confirmed")
            return
        self._move(MemberCause.INSTALLED)
        self._wait.end()
        if self._held:
            self._held = ""
            self._out.append(Resumed())
        self._out.append(Activate(self._local.view))

    def _decide(self, message: Decide, now_ns: int) -> None:
        local = self._local
        if local is None or not message.commit:
            self._view_over(ViewEnd(message.cause, message.lost, message.culprit, message.kind))
            return
        if contradiction := local.contradiction(message.step):
            self._protocol_broken(contradiction)
            return
        self._wait.end()
        self._committed(message.view_id, message.step)
        if self._leaving:
            self._view_over(ViewEnd("this node left"))
        elif message.dismissal:
            self._dismissed(message.dismissal)
        elif message.next_view is not None:
            self._propose(message.next_view, now_ns)

    def _view_over(self, end: ViewEnd) -> None:
        """End the view; the link to the coordinator stays."""
        self._announce()  # a step that the coordinator has not heard of is lost all the same
        self._end_view(end)
        self._wait.end()
        self._move(MemberCause.DONE if self._leaving else MemberCause.ENDED)

    def _end_view(self, end: ViewEnd, *, may_be_committed: bool = False) -> None:
        """Drop the view. A step that is still open was committed nowhere; or it is in doubt, if it may have been."""
        local, self._local = self._local, None
        if local is not None:
            if may_be_committed:
                self._progress.doubt = local.step_in_doubt() or self._progress.doubt
            self._out += local.end(end)

    def _committed(self, view_id: int, step: int, cause: str = "") -> None:
        """Take in that the step is committed."""
        if self._local is not None:
            self._local.decided()
        self._progress.commit(step)
        self._out.append(Decided(view_id, step, True, cause))

    def _announce_if_due(self, now_ns: int) -> None:
        begin_ns = None if self._local is None else self._local.announce_ns
        if begin_ns is not None and begin_ns <= now_ns:
            self._announce()

    def _announce(self) -> None:
        """Tell the coordinator that a step is open here, if it has not heard of it."""
        begin = None if self._local is None else self._local.announce()
        if begin is not None:
            self._tell(begin)

    def _forming(self, view_id: int) -> LocalView | None:
        """Return the local view, if `view_id` is being formed."""
        local = self._local if self._state is MemberState.FORMING else None
        return local if local is not None and local.view.view_id == view_id else None

    def _answer(self, message: Confirm | Decline, now_ns: int) -> None:
        """Answer the proposal; what follows from it is waited for."""
        self._wait.begin(Awaited.INSTALLATION, now_ns=now_ns)
        self._tell(message)

    def _hold(self, cause: str) -> None:
        if cause != self._held:
            self._held = cause
            self._out.append(Held(cause))

    def _refused(self, reason: str) -> None:
        self._end_view(ViewEnd(f"refused: {reason}"), may_be_committed=True)
        self._done()
        self._out.append(Refused(reason))

    def _protocol_broken(self, what: str) -> None:
        self._refused(broken_protocol(what))

    def _done(self) -> None:
        self._wait.end()
        self._move(MemberCause.DONE)

    def _tell_leave(self, reason: str = "") -> None:
        holds = self._progress.holds
        parted = self._local is not None and self._local.view.view_id == self._parted
        self._tell(Leave(reason=clip(reason), finished=self._finished, committed_step=holds, parted=parted))

    def _tell(self, message: MemberMessage) -> None:
        self._out.append(TellCoordinator(message))

    def _move(self, cause: MemberCause) -> None:
        self._state = member_transition(self._state, cause)
