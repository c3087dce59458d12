"""The coordinator's core: it alone decides who is a member and which step is committed.

It carries no tensors and knows no clock, socket or disk; messages, losses and time come in, actions go out
(actions.py). It has one state:

    FORMING     no view is installed. Candidates are counted; a view is proposed as soon as there can be one.
    PROPOSED    a view was sent to its members; each forms its links and confirms or declines.
    INSTALLED   all confirmed, the view is in the journal; its members take steps.

`COORDINATOR_TRANSITIONS` has every transition. The parts say what is so; what follows from it is done here, and only
here:

    formation.py     whether there can be a view, and of which nodes
    proposal.py      the answers to a proposed view
    active_view.py   the steps and votes of the installed view
    diagnosis.py     why a view ended, from the reports of its members
    suspicions.py    which nodes are left out when some cannot reach each other
    evidence.py      which node failed views have in common: it is left out; and how soon views may follow each other
    probes.py        how a node that is left out shows that it reaches the others again
    ending.py        whether the job is done

Rules, and why:

- Any change of members and any failed step ends the view; the next has a larger id. So the view id alone says whether
  a message is current, and nothing of an old view can be taken for something of a new one.
- A new view needs a quorum, and a member that holds the last committed step (formation.py).
- A step is committed when every member of the installed view has voted ok for `committed_step + 1` with the same
  digest, and by nothing else; the record comes first, the announcement after it. Everything else aborts.
- A member that is lost, joins anew or breaks a rule ends its view at once: its state may be in doubt. A node that only
  wants to join waits for a step boundary, and a little longer where no step is open (`quiet_ns`), because Begins
  that are on their way would be aborted.
- The first report of a failure ends a view. The announcement waits for more reports, for `gather_ns` at most, where
  members suspect each other (diagnosis.py), so that all members get the same cause.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import TYPE_CHECKING

from quicoll.errors import LocalError
from quicoll.membership.coordinator.action_queue import ActionQueue
from quicoll.membership.coordinator.actions import (
    CoordinatorAction,
    JobFinished,
    NodeJoined,
    NodeLost,
    StepCommitted,
)
from quicoll.membership.coordinator.active_view import ActiveView
from quicoll.membership.coordinator.admission import differs, join_refusal, name_list
from quicoll.membership.coordinator.diagnosis import Diagnosis, ViewFailure
from quicoll.membership.coordinator.ending import Ending, EndingState, goes_on, of_last_view
from quicoll.membership.coordinator.evidence import NOBODY, Contradiction, Evidence
from quicoll.membership.coordinator.formation import Formation
from quicoll.membership.coordinator.history import (
    Committed,
    History,
    InstalledView,
    JournalRecord,
    Left,
    Proposed,
    Seeded,
    WentOn,
)
from quicoll.membership.coordinator.probes import Probes
from quicoll.membership.coordinator.proposal import Proposal
from quicoll.membership.coordinator.roster import Candidate, Roster
from quicoll.membership.messages import (
    BeginStep,
    Decide,
    Decline,
    Join,
    Leave,
    MemberMessage,
    Reached,
    Report,
    Vote,
    Welcome,
    clip,
    departure,
)
from quicoll.membership.view import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.view import View

__all__ = [
    "COORDINATOR_TRANSITIONS",
    "CoordinatorCause",
    "CoordinatorCore",
    "CoordinatorState",
    "coordinator_transition",
]


class CoordinatorState(enum.Enum):
    FORMING = "forming"
    PROPOSED = "proposed"
    INSTALLED = "installed"


class CoordinatorCause(enum.Enum):
    ENOUGH = "there are members for a view"
    CONFIRMED = "every member confirmed"
    FAILED = "a member declined, was silent, or is gone"
    BROKEN = "the view cannot go on"
    CHANGED = "nodes come or go at a boundary"


COORDINATOR_TRANSITIONS: dict[CoordinatorState, dict[CoordinatorCause, CoordinatorState]] = {
    CoordinatorState.FORMING: {CoordinatorCause.ENOUGH: CoordinatorState.PROPOSED},
    CoordinatorState.PROPOSED: {
        CoordinatorCause.CONFIRMED: CoordinatorState.INSTALLED,
        CoordinatorCause.FAILED: CoordinatorState.FORMING,
    },
    CoordinatorState.INSTALLED: {
        CoordinatorCause.BROKEN: CoordinatorState.FORMING,
        CoordinatorCause.CHANGED: CoordinatorState.PROPOSED,
    },
}


def coordinator_transition(state: CoordinatorState, cause: CoordinatorCause) -> CoordinatorState:
    """The next state. Raises LocalError where `COORDINATOR_TRANSITIONS` has none."""
    try:
        return COORDINATOR_TRANSITIONS[state][cause]
    except KeyError:
        raise LocalError(f"{cause.name} cannot happen to a coordinator that is {state.name}") from None


class CoordinatorCore:
    """Messages, losses and time in, actions out; see the head of this module for the rules.

    After every input the shell takes actions by `next_action` until there is none, carries them out in order, and arms
    one timer for `next_timer`. Times are nanoseconds of one monotonic clock.

    Args:
        config: Settings.
        history: What the journal holds.
        now_ns: The time now.
    Raises:
        LocalError: The settings contradict the journal.
    """

    def __init__(self, config: CoordinatorConfig, history: History, *, now_ns: int) -> None:
        if config.seed is None and history.seed is None:
            raise LocalError("a new journal needs a seed")
        if config.seed is not None and history.seed is not None and config.seed != history.seed:
            raise LocalError(f"seed {config.seed} is asked for, but the journal was begun with {history.seed}")
        self._config = config
        self._history = history
        self._state = CoordinatorState.FORMING
        self._roster = Roster(history.view, retry_min_ns=config.retry_min_ns, retry_max_ns=config.retry_max_ns)
        self._evidence = Evidence(shortest_ns=config.retry_min_ns, longest_ns=config.retry_max_ns)
        self._formation = Formation(self._roster, self._evidence, config, history=history)
        self._probes = Probes()
        self._ending = Ending(settle_ns=config.settle_ns)
        self._end_noted = False
        self._out = ActionQueue(self._roster)
        self._proposal: Proposal | None = None
        self._active: ActiveView | None = None  # while a view is installed
        self._diagnosis: Diagnosis | None = None  # from the end of a view to the next proposal
        self._wake_ns: int | None = None  # when to look again although nothing came in
        if history.seed is None and config.seed is not None:
            self._record(Seeded(config.seed))
        self._reconsider(now_ns)

    def __repr__(self) -> str:
        view = self._active.view.view_id if self._active is not None else None
        ballot = self._active.ballot if self._active is not None else None
        return f"<CoordinatorCore {self._state.name} view={view} nodes={len(self._roster)} ballot={ballot}>"

    @property
    def state(self) -> CoordinatorState:
        return self._state

    @property
    def view(self) -> View | None:
        """The installed view, None while there is none."""
        return self._active.view if self._active is not None else None

    @property
    def history(self) -> History:
        """Everything handed out by `Persist` so far, taken as written."""
        return self._history

    # Inputs

    def receive(self, node: str, message: MemberMessage, *, now_ns: int, incarnation: int | None = None) -> None:
        """Take in a message. A Join that names another process than the one at the other end of its link is refused:
        nothing could be told to that process, and every view with it would fail.

        Args:
            node: The sender, by the name in its certificate.
            message: The message.
            now_ns: The time now.
            incarnation: Of the process at the other end of the link; None where a node has one link at most.
        """
        if isinstance(message, Join) and incarnation not in (None, message.incarnation):
            reason = f"{node} joins as incarnation {message.incarnation} over a link of incarnation {incarnation}"
            self._out.refuse(node, incarnation or 0, reason)
        elif isinstance(message, Join):
            self._join(node, message, now_ns)
        else:
            candidate = self._roster.get(node)
            if candidate is None or (incarnation is not None and incarnation != candidate.incarnation):
                # After Leave a member says nothing more that matters; anyone else has to learn that it is not in.
                if candidate is None and not isinstance(message, Leave):
                    self._out.drop(node, incarnation or 0, f"{type(message).__name__} before Join")
                return
            self._dispatch(candidate, message, now_ns)
        self._reconsider(now_ns)

    def member_lost(self, node: str, cause: str, *, now_ns: int, incarnation: int | None = None) -> None:
        """Take in that the link to a node is gone for good.

        Args:
            node: The node.
            cause: Why, for people.
            now_ns: The time now.
            incarnation: Of the process at its other end; ignored when another one is connected by now.
        """
        candidate = self._roster.get(node)
        if candidate is None or (incarnation is not None and incarnation != candidate.incarnation):
            return
        self._node_lost(candidate, clip(f"{node} was lost: {cause}"), now_ns)
        self._reconsider(now_ns)

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due at `now_ns`; harmless when nothing is."""
        if self._proposal is not None:
            self._check_proposal(self._proposal, now_ns)
        elif self._active is not None and (late := self._active.late(now_ns)):
            self._votes_late(self._active, late, now_ns)
        self._reconsider(now_ns)

    # Outputs

    def next_timer(self) -> int | None:
        """Return when `handle_timer` has to be called at the latest; None when nothing is pending."""
        decide_ns = self._proposal.decide_ns if self._proposal is not None else None
        late_ns = self._active.late_ns if self._active is not None else None
        return min((at for at in (decide_ns, late_ns, self._wake_ns) if at is not None), default=None)

    def next_action(self) -> CoordinatorAction | None:
        """Return the next action to carry out; None when there is none."""
        return self._out.pop()

    # Messages

    def _dispatch(self, candidate: Candidate, message: MemberMessage, now_ns: int) -> None:
        node, proposal, active, diagnosis = candidate.node, self._proposal, self._active, self._diagnosis
        if isinstance(message, Leave):
            self._leave(candidate, message, now_ns)
            return
        if isinstance(message, Reached):
            if self._probes.answers(node, message.number):
                self._roster.reached(node)
            return
        if isinstance(message, Join):
            raise LocalError("a Join makes a candidate, it does not come from one")
        views = (
            active.view if active is not None else None,
            proposal.view if proposal is not None else None,
            diagnosis.view if diagnosis is not None else None,
        )
        view = next((view for view in views if view is not None and view.view_id == message.view_id), None)
        if message.view_id > self._history.last_view_id or (view is not None and view.rank_of(node) is None):
            cause = f"{node} spoke of view {message.view_id}, of which it cannot be a member"
            self._out.refuse(node, candidate.incarnation, cause)
            self._node_lost(candidate, cause, now_ns)
        elif view is None:
            pass  # of a view that is over: the sender did not know of its end yet
        elif proposal is not None and view is proposal.view:
            proposal.receive(node, message, now_ns=now_ns)
            self._check_proposal(proposal, now_ns)
        elif isinstance(message, Report | Decline):
            self._report(node, message, view, now_ns)
        elif isinstance(message, BeginStep | Vote) and active is not None and view is active.view:
            self._step(candidate, message, active, now_ns)

    def _join(self, node: str, message: Join, now_ns: int) -> None:
        if message.incarnation < self._roster.newest(node):
            self._out.outdate(node, message.incarnation, self._roster.newest(node))
            return
        old = self._roster.get(node)
        if old is not None:
            how = "started anew" if message.incarnation > old.incarnation else "lost its link and joined again"
            self._node_lost(old, f"{node} {how}", now_ns)
        reason = join_refusal(node, message, history=self._history, config=self._config)
        if not reason and len(self._roster) >= MAX_MEMBERS:
            reason = f"{MAX_MEMBERS} nodes are connected already"
        if reason:
            self._out.refuse(node, message.incarnation, reason)
            return
        if self._config.lost_after_ns is not None and differs(message, config=self._config):
            self._out.have_adopt(node, message.incarnation, self._config.lost_after_ns)
            return
        committed: bool | None = None
        holds = message.committed_step
        if message.doubt is not None:
            # Final: losing the old link has just ended the view in doubt, if it was still there.
            committed = self._history.committed(*message.doubt)
            holds = max(holds, message.doubt[1]) if committed else holds
        candidate = Candidate(node, message, holds, joined_ns=now_ns)
        self._roster.add(candidate)
        self._probes.forget(node)
        self._out.note(NodeJoined(now_ns=now_ns, node=node, incarnation=message.incarnation))
        candidate.wait_reason = self._waiting_for(now_ns)
        welcome = Welcome(
            seed=self._seed,
            committed_step=self._history.committed_step,
            vote_timeout_ns=self._config.vote_timeout_ns,
            doubt_committed=committed,
            waiting_for=candidate.wait_reason,
        )
        self._out.tell(candidate, welcome)

    def _report(self, node: str, message: Report | Decline, view: View, now_ns: int) -> None:
        if self._active is not None and view is self._active.view:
            self._end_active(self._active)
        if self._diagnosis is not None:
            self._diagnosis.add_report(node, message, connected=self._connected(view), now_ns=now_ns)

    def _step(self, candidate: Candidate, message: BeginStep | Vote, active: ActiveView, now_ns: int) -> None:
        expected = self._history.committed_step + 1
        outcome = active.receive(candidate.node, message, expected=expected, now_ns=now_ns)
        if active.entered(candidate.node) and self._history.finished:
            self._record(WentOn(active.view.view_id))  # whoever had finished: the job goes on
        if active.entered(candidate.node):
            candidate.committed_step = max(candidate.committed_step, expected - 1)  # where a step begins from
        if outcome is None:
            return
        if outcome.commit:
            self._commit(active, expected, outcome.digest, now_ns)
        else:
            failure = ViewFailure(outcome.cause, outcome.kind, outcome.culprit, (), outcome.contradiction)
            self._abort_view(active, failure, now_ns)

    def _leave(self, candidate: Candidate, message: Leave, now_ns: int) -> None:
        if candidate.leaving:
            return
        self._announce_end(candidate.node, now_ns)  # while it is still there to get it
        candidate.leaving = True
        candidate.finished = message.finished
        candidate.committed_step = max(
            candidate.committed_step, min(message.committed_step, self._history.committed_step)
        )
        node, active = candidate.node, self._active
        if active is not None and active.entered(node):
            return  # it votes first; the decision takes it out
        why = f"{node} {departure(message.reason)}"
        if active is not None and active.ballot is None and active.view.rank_of(node) is not None:
            self._remove(candidate, why, now_ns)
            self._change_view(active, clip(why), now_ns)
        else:
            # The others cannot finish a step that it did not begin; and a proposal cannot be confirmed without it.
            self._node_lost(candidate, clip(why), now_ns)

    # Views

    def _reconsider(self, now_ns: int) -> None:
        """Propose a view if there can and should be a new one. Called after every input; idempotent."""
        self._wake_ns = None
        if self._state is CoordinatorState.FORMING:
            self._reconsider_forming(now_ns)
        elif self._active is not None:
            self._reconsider_installed(self._active, now_ns)
        self._probe(now_ns)

    def _reconsider_forming(self, now_ns: int) -> None:
        if self._diagnosis is not None:
            if not self._diagnosis.complete(self._connected(self._diagnosis.view), now_ns=now_ns):
                self._wake_ns = self._diagnosis.deadline_ns
                return
            self._announce_end("", now_ns)
            self._exclude(self._diagnosis.excluded(self._connected(self._diagnosis.view)), now_ns)
            self._diagnosis = None
        if self._history.finished and self._look_at_end(now_ns):
            return
        readiness = self._formation.evaluate(self._history, now_ns=now_ns)
        if readiness.obstacle:
            self._wake_ns = readiness.retry_ns
            self._out.withhold(readiness.obstacle, now_ns=now_ns)
            return
        self._propose(readiness.chosen, CoordinatorCause.ENOUGH, now_ns)

    def _look_at_end(self, now_ns: int) -> bool:
        """Tell those who wait that the job is done, where it is; return whether there is no view for that reason."""
        outlook = self._ending.look(self._roster, self._history, now_ns=now_ns)
        if outlook.state is EndingState.ANEW:
            for node in self._history.base:
                self._record(Left(node))  # waited for no more, in a restarted coordinator either
        if outlook.state in (EndingState.GOES_ON, EndingState.ANEW):
            self._end_noted = False
            return False
        self._wake_ns = outlook.wake_ns
        step = self._history.final_step
        if outlook.state is EndingState.DONE and not self._end_noted:
            self._end_noted = True
            self._out.note(JobFinished(now_ns=now_ns, step=step, nodes=self._history.finished))
        self._out.withhold(
            f"the job is done at step {step}, unless nodes that have ended come back for more", now_ns=now_ns
        )
        for candidate in outlook.told:
            self._out.end(candidate, step)
        return True

    def _probe(self, now_ns: int) -> None:
        """Have nodes that are left out try the paths to those that they would work with."""
        if self._active is not None and self._active.ballot is not None:
            return  # as in `_reconsider_installed`
        out = self._roster.left_out(now_ns=now_ns)
        if not out:
            return
        view = self._proposal.view if self._proposal is not None else self.view
        others = [
            candidate
            for candidate in self._roster
            if candidate not in out and (view is None or view.rank_of(candidate.node) is not None)
        ]
        for candidate in out:
            probe = self._probes.ask(candidate, others)
            if probe is not None:
                self._out.tell(candidate, probe)

    def _reconsider_installed(self, active: ActiveView, now_ns: int) -> None:
        if active.ballot is not None:
            return  # its decision will look again; and votes of a large view must not each count all nodes
        chosen = self._choose(now_ns)
        may_ns = max(active.quiet_ns, self._evidence.may_propose_ns())
        if tuple(candidate.node for candidate in chosen) == active.view.nodes:
            self._wake_ns = self._formation.next_return(now_ns=now_ns)
        elif now_ns < may_ns:
            self._wake_ns = may_ns
        else:
            self._change_view(active, "", now_ns)

    def _choose(self, now_ns: int) -> list[Candidate]:
        return self._formation.choose(self._history, now_ns=now_ns)

    def _propose(
        self, chosen: list[Candidate], cause: CoordinatorCause, now_ns: int, boundary: Decide | None = None
    ) -> None:
        """Propose a view of `chosen`; at a step boundary, inside the decision of the step."""
        previous = self.view
        view = self._formation.next_view(chosen, self._history)
        self._record(Proposed(view.view_id))
        self._evidence.proposed(now_ns=now_ns)
        self._state = coordinator_transition(self._state, cause)
        self._active = None
        self._diagnosis = None
        self._proposal = Proposal(
            view,
            now_ns=now_ns,
            timeout_ns=self._config.propose_timeout_ns,
            gather_ns=self._config.gather_ns,
            weights=self._weights(view),
        )
        self._out.announce_proposal(view, previous, boundary, now_ns=now_ns)

    def _check_proposal(self, proposal: Proposal, now_ns: int) -> None:
        """Install the proposal, reject it, or wait on."""
        if proposal.confirmed:
            self._install(proposal.view, now_ns)
        elif proposal.decidable(now_ns):
            self._reject(proposal, now_ns)

    def _install(self, view: View, now_ns: int) -> None:
        self._record(InstalledView(view))
        self._state = coordinator_transition(self._state, CoordinatorCause.CONFIRMED)
        self._proposal = None
        self._active = ActiveView(view, self._config, now_ns=now_ns)
        self._out.announce_installation(view, now_ns=now_ns)

    def _reject(self, proposal: Proposal, now_ns: int) -> None:
        out = proposal.excluded(now_ns=now_ns)
        contradiction = proposal.contradiction(now_ns=now_ns)
        self._fail(
            proposal.view, ViewFailure(clip("; ".join(out.values())), "failed", "", tuple(out), contradiction), now_ns
        )
        self._exclude(out, now_ns)

    def _fail(self, view: View, failure: ViewFailure, now_ns: int) -> None:
        """Give up the proposed view."""
        self._state = coordinator_transition(self._state, CoordinatorCause.FAILED)
        self._proposal = None
        failure, left_out = self._weighed(view, failure, now_ns)
        self._out.announce_failed_proposal(view, cause=failure.cause, lost=failure.lost, now_ns=now_ns)
        self._withhold_from(left_out)

    def _change_view(self, active: ActiveView, cause: str, now_ns: int, boundary: Decide | None = None) -> None:
        """Replace the installed view by the next, at a boundary; end it where too few nodes are left for one."""
        chosen = self._choose(now_ns)
        obstacle = self._formation.shortfall(chosen, self._history)
        if not obstacle and self._history.ended and not goes_on(self._roster, self._history):
            obstacle = f"the job is done at step {self._history.final_step}"  # spares do not begin it anew
        if not obstacle and now_ns < self._evidence.may_propose_ns():
            obstacle = self._evidence.why_waits()
        if not obstacle:
            self._propose(chosen, CoordinatorCause.CHANGED, now_ns, boundary)
            return
        if boundary is not None:
            self._out.tell_all(active.view, boundary)
        self._abort_view(active, ViewFailure(clip(f"{cause}; {obstacle}" if cause else obstacle)), now_ns)

    def _abort_view(self, active: ActiveView, failure: ViewFailure, now_ns: int) -> None:
        """End the installed view and announce it. The step that is open is committed nowhere."""
        self._announce(self._end_active(active), failure, now_ns)

    def _end_active(self, active: ActiveView) -> Diagnosis:
        """End the installed view without announcing it. Nothing of it can be committed any more."""
        self._diagnosis = Diagnosis(
            active.view,
            active.ballot,
            gather_ns=self._config.gather_ns,
            weights=self._weights(active.view),
            patient=self._evidence.failing,
        )
        self._state = coordinator_transition(self._state, CoordinatorCause.BROKEN)
        self._active = None
        return self._diagnosis

    def _announce_end(self, node: str, now_ns: int) -> None:
        """Announce the end of a view, if it is not announced yet; because of `node`, only if it was in the view."""
        diagnosis = self._diagnosis
        if diagnosis is not None and not diagnosis.announced and (not node or diagnosis.view.rank_of(node) is not None):
            self._announce(diagnosis, diagnosis.failure(self._connected(diagnosis.view)), now_ns)

    def _announce(self, diagnosis: Diagnosis, failure: ViewFailure, now_ns: int) -> None:
        diagnosis.announced = True
        failure, left_out = self._weighed(diagnosis.view, failure, now_ns)
        self._out.announce_end(diagnosis.view, diagnosis.ballot, failure, now_ns=now_ns)
        self._withhold_from(left_out)
        self._remove_leavers(now_ns)

    def _weighed(self, view: View, failure: ViewFailure, now_ns: int) -> tuple[ViewFailure, dict[str, str]]:
        """Hold a failure against those who can have caused it.

        Returns:
            The failure, with what follows from it, and who is left out for it and those before, with the reason.
        """
        if not failure.contradiction:
            return failure, {}

        def can_spare(node: str) -> bool:
            rest = [each for each in self._choose(now_ns) if each.node not in (node, *failure.lost)]
            return not self._formation.obstacle(rest, self._history)

        verdict = self._evidence.failed(view.nodes, failure.contradiction, can_spare=can_spare, now_ns=now_ns)
        if not verdict.left_out:
            return failure, {}
        why = f"left out for {verdict.for_ns / 1e9:g} s, for what failed again and again: {verdict.known}"
        lost = tuple(node for node in view.nodes if node in (*failure.lost, verdict.left_out))
        cause = clip(f"{failure.cause}; {verdict.left_out} is {why}")
        return replace(failure, cause=cause, lost=lost), {verdict.left_out: why}

    def _weights(self, view: View) -> dict[str, int]:
        return {node: self._evidence.weight(node) for node in view.nodes}

    def _withhold_from(self, reasons: Mapping[str, str]) -> None:
        """Tell nodes why they are in no view, those that are there."""
        for node, why in reasons.items():
            candidate = self._roster.get(node)
            if candidate is not None:
                self._out.withhold_from(candidate, why)

    def _connected(self, view: View) -> list[str]:
        return [node for node in view.nodes if node in self._roster]

    # Steps

    def _commit(self, active: ActiveView, step: int, digest: bytes, now_ns: int) -> None:
        view = active.view
        self._record(Committed(step, view.view_id, digest))
        self._evidence.committed(view.nodes, now_ns=now_ns)
        active.step_decided(now_ns=now_ns)
        for candidate in self._roster:
            if view.rank_of(candidate.node) is not None:
                candidate.committed_step = step
        self._out.note(StepCommitted(now_ns=now_ns, view_id=view.view_id, step=step, digest=digest))
        decision = Decide(view_id=view.view_id, step=step, commit=True)
        leavers = [candidate for candidate in self._roster if candidate.leaving]
        waits = not leavers and now_ns < self._evidence.may_propose_ns()
        if waits or tuple(candidate.node for candidate in self._choose(now_ns)) == view.nodes:
            self._out.tell_all(view, decision)
            return
        for candidate in leavers:
            self._retire(candidate)
        why = " and ".join(f"{candidate.node} {departure('')}" for candidate in leavers)
        self._change_view(active, why, now_ns, decision)
        self._remove_leavers(now_ns)

    def _votes_late(self, active: ActiveView, late: tuple[str, ...], now_ns: int) -> None:
        """End the view for votes that did not come; leave the late members out where the others can go on."""
        seconds = self._config.vote_timeout_ns / 1e9
        cause = clip(f"no vote on step {self._history.committed_step + 1} within {seconds:g} s from {name_list(late)}")
        culprit = late[0] if len(late) == 1 else ""
        self._abort_view(active, ViewFailure(cause, "failed", culprit, late, Contradiction(late, enough=True)), now_ns)
        rest = [candidate for candidate in self._choose(now_ns) if candidate.node not in late]
        if not self._formation.shortfall(rest, self._history):
            self._exclude(dict.fromkeys(late, cause), now_ns)

    # Nodes

    def _node_lost(self, candidate: Candidate, cause: str, now_ns: int) -> None:
        """Remove a node, and end any view that it is in."""
        node = candidate.node
        contradiction = NOBODY if candidate.leaving else Contradiction((node,), paths=True)
        self._remove(candidate, cause, now_ns)
        proposal = self._proposal
        if proposal is not None and proposal.view.rank_of(node) is not None:
            if proposal.disputed:
                # what the others reported by now must not be lost
                proposal.decline(node, unreachable=(), reason=cause, now_ns=now_ns)
                self._reject(proposal, now_ns)
            else:
                self._fail(proposal.view, ViewFailure(cause, "failed", "", (node,), contradiction), now_ns)
        elif self._active is not None and self._active.view.rank_of(node) is not None:
            self._abort_view(self._active, ViewFailure(cause, "failed", node, (node,), contradiction), now_ns)
        else:
            self._announce_end(node, now_ns)

    def _remove(self, candidate: Candidate, cause: str, now_ns: int) -> None:
        if candidate.leaving:
            self._retire(candidate)
        self._roster.remove(candidate.node)
        if self._diagnosis is not None:
            self._diagnosis.node_lost(candidate.node, cause)
        self._out.note(NodeLost(now_ns=now_ns, node=candidate.node, cause=cause, left=candidate.leaving))

    def _retire(self, candidate: Candidate) -> None:
        """Take the node out of the base of quorums; durable, or a restart would wait for it, or not know of its end."""
        history = self._history
        at_end = of_last_view(candidate, history) and candidate.committed_step >= history.committed_step
        finished = candidate.finished if at_end or candidate.told_end else None
        if finished is not None and candidate.node not in history.finished:
            self._record(Left(candidate.node, finished))
        elif candidate.node in history.base:
            self._record(Left(candidate.node))

    def _remove_leavers(self, now_ns: int) -> None:
        for candidate in self._roster:
            if candidate.leaving:
                self._remove(candidate, f"{candidate.node} {departure('')}", now_ns)

    def _exclude(self, reasons: Mapping[str, str], now_ns: int) -> None:
        """Leave connected nodes out of the next views, each for a while."""
        told = {}
        for node, why in reasons.items():
            if node in self._roster:
                seconds = self._roster.exclude(node, now_ns=now_ns) / 1e9
                self._probes.forget(node)
                told[node] = f"left out for {seconds:g} s, and until it reaches the others: {why}"
        self._withhold_from(told)

    def _waiting_for(self, now_ns: int) -> str:
        """Return what a node that has just joined waits for; "" when it need not."""
        if self._active is not None:
            return f"view {self._active.view.view_id} is at work; the next one comes at a step boundary"
        if self._proposal is not None:
            return f"view {self._proposal.view.view_id} is being formed"
        return clip(self._formation.obstacle(self._choose(now_ns), self._history))

    # Outputs

    @property
    def _seed(self) -> int:
        if self._history.seed is None:
            raise LocalError("the seed is recorded when the core is made")
        return self._history.seed

    def _record(self, record: JournalRecord) -> None:
        self._history = self._history.apply(record)
        self._out.persist(record)
