"""The coordinator's core: it alone decides who is a member and which step is committed.

It carries no tensors and knows no clock, socket or disk; messages, losses and time come in, actions go out
(actions.py). The parts say what is so; what follows from it is done here, and only here:

    stage.py         which view there is, and how far it is: the one state, with every transition
    joins.py         what a Join is answered with
    formation.py     whether there can be a view, and of which nodes
    proposal.py      the answers to a proposed view
    active_view.py   the steps and votes of the installed view
    diagnosis.py     why a view ended, from the reports of its members
    suspicions.py    which nodes are left out when some cannot reach each other
    evidence.py      which node failed views have in common: it is left out; and how soon views may follow each other
    elimination.py   who is left out next where digests differ again
    lessons.py       what of these two is durable
    weighing.py      what a failure costs, before it is announced
    probes.py        who is left out, and how a node that is left out shows that it reaches the others again
    ending.py        whether the job is done, and what is recorded of nodes that go
    forgetting.py    whether nodes that an operator gives up may count no longer
    releases.py      when a rank that was asked to stop may go
    spares.py        who of those that stand by is kept warm
    scaling.py       how many ranks an operator wants, and who leaves for that

Rules, and why:

- Any change of members and any failed step ends the view; the next has a larger id. So the view id alone says whether
  a message is current, and nothing of an old view can be taken for something of a new one.
- A new view needs a quorum, and a member that holds the last committed step (formation.py).
- A step is committed when every member of the installed view has voted ok for `committed_step + 1` with the same
  digest, and by nothing else; the record comes first, the announcement after it. Everything else aborts.
- A member that is lost, joins anew or breaks a rule ends its view at once: its state may be in doubt. A node that only
  wants to join waits for a step boundary, and a little longer where no step is open (`quiet_ns`), because Begins
  that are on their way would be aborted.
- A node that is behind by a large state steps out of its view between two steps (`Learn`): it is taken out of the base
  of quorums, as if it had left, counts as a holder of no step, and is in no view until it says so (`Learned`), joins
  anew, or the others are too few without it.
- A node that an operator wants gone leaves at a boundary of an installed view, as if it went of its own will. Where
  part of the state is its own, a view comes before that in which it hands it over (scaling.py).
- The first report of a failure ends a view; the announcement may wait for more, so that all members get one cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.errors import LocalError
from quicoll.membership.coordinator import scaling
from quicoll.membership.coordinator.action_queue import ActionQueue
from quicoll.membership.coordinator.actions import (
    CoordinatorAction,
    NodeDismissed,
    NodeJoined,
    NodeLost,
    NodesForgotten,
    ScaleAsked,
    StepCommitted,
)
from quicoll.membership.coordinator.diagnosis import ViewFailure
from quicoll.membership.coordinator.ending import Ending, left_record
from quicoll.membership.coordinator.evidence import NOBODY, Contradiction, Evidence
from quicoll.membership.coordinator.forgetting import Forgetting
from quicoll.membership.coordinator.formation import Formation, Readiness
from quicoll.membership.coordinator.history import (
    Committed,
    History,
    InstalledView,
    Left,
    Noted,
    Proposed,
    Scaled,
    Seeded,
    WentOn,
)
from quicoll.membership.coordinator.joins import Acceptance, Adoption, Refusal, answer_to
from quicoll.membership.coordinator.probes import Probes
from quicoll.membership.coordinator.releases import Releases
from quicoll.membership.coordinator.roster import Roster
from quicoll.membership.coordinator.spares import cold_again, warmed
from quicoll.membership.coordinator.stage import CoordinatorState, Stage
from quicoll.membership.coordinator.weighing import Weighed, weigh
from quicoll.membership.messages import (
    AskToLeave,
    BeginStep,
    Decide,
    Decline,
    Join,
    Learn,
    Learned,
    Leave,
    MemberMessage,
    Reached,
    Report,
    Vote,
    Welcome,
    clip,
    departure,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.membership.coordinator.active_view import ActiveView
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.diagnosis import Diagnosis
    from quicoll.membership.coordinator.history import JournalRecord
    from quicoll.membership.coordinator.proposal import Proposal
    from quicoll.membership.coordinator.roster import Candidate
    from quicoll.membership.view import View

__all__ = ["CoordinatorCore"]


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
        seed = history.seed if history.seed is not None else config.seed
        if seed is None:
            raise LocalError("a new journal needs a seed")
        if config.seed not in (None, seed):
            raise LocalError(f"seed {config.seed} is asked for, but the journal was begun with {history.seed}")
        self._config = config
        self._history = history
        self._seed = seed
        self._stage = Stage(config)
        self._roster = Roster(history.view, retry_min_ns=config.retry_min_ns, retry_max_ns=config.retry_max_ns)
        self._evidence = Evidence(
            shortest_ns=config.retry_min_ns,
            longest_ns=config.retry_max_ns,
            lessons=history.lessons,
            now_ns=now_ns,
        )
        self._formation = Formation(self._roster, self._evidence, config, history=history)
        self._probes = Probes(self._roster)
        self._releases = Releases(self._roster)
        self._ending = Ending(settle_ns=config.settle_ns)
        self._forgetting = Forgetting(config.forget, patience_ns=config.forget_after_ns, now_ns=now_ns)
        self._out = ActionQueue(self._roster)
        self._to_part: dict[str, None] = {}  # nodes that are to hand over what they own before they leave
        self._wake_ns: int | None = None  # when to look again although nothing came in
        if history.seed is None:
            self._record(Seeded(seed))
        self._note_lessons(now_ns)
        self._reconsider(now_ns)

    def __repr__(self) -> str:
        active = self._stage.active
        view, ballot = (active.view.view_id, active.ballot) if active is not None else (None, None)
        return f"<CoordinatorCore {self.state.name} view={view} nodes={len(self._roster)} ballot={ballot}>"

    @property
    def state(self) -> CoordinatorState:
        return self._stage.state

    @property
    def view(self) -> View | None:
        """The installed view, None while there is none."""
        return self._stage.active.view if self._stage.active is not None else None

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

    def saw(self, node: str, address: tuple[str, int]) -> None:
        """Take in where a node's datagrams come from: views that are made from now on tell the others.

        Args:
            node: By the name in its certificate.
            address: (host, port), proved by an answer from there.
        """
        self._roster.saw(node, address)

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

    def scale(self, world_size: int | None, leave: tuple[str, ...] = (), *, now_ns: int) -> str:
        """Take in that an operator wants another number of ranks; see scaling.py.

        Args:
            world_size: Ranks; None: as many as there are.
            leave: Nodes that shall leave.
            now_ns: The time now.
        Returns:
            Why it cannot be, and nothing has changed; "" where it is taken, or was before.
        """
        answer = scaling.judge_request(
            world_size, leave, history=self._history, roster=self._roster, config=self._config
        )
        if isinstance(answer, scaling.ScaleRefusal):
            return answer.reason
        if answer != Scaled(self._history.wanted or 0, self._history.to_leave):
            self._record(answer)
            self._out.note(ScaleAsked(now_ns=now_ns, world_size=answer.world_size, leave=answer.leave))
        self._reconsider(now_ns)
        return ""

    def standing(self, *, now_ns: int) -> scaling.Standing:
        """Return how far what an operator has asked for is."""
        history, view = self._history, self.view
        if view is not None:
            waiting = scaling.missing(view, history, self._roster)
        else:
            waiting = self._stage.why_waits() or self._formation.why_none(history, now_ns=now_ns)
            waiting = f"there is no view: {waiting or 'the next one follows'}"
        return scaling.Standing(
            world_size=history.wanted,
            leave=history.to_leave,
            view_id=view.view_id if view is not None else 0,
            nodes=view.nodes if view is not None else (),
            waiting_for=clip(waiting),
        )

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due at `now_ns`; harmless when nothing is."""
        stage = self._stage
        if stage.proposal is not None:
            self._check_proposal(stage.proposal, now_ns)
        elif stage.active is not None and (failure := stage.active.late(now_ns)) is not None:
            self._votes_late(stage.active, failure, now_ns)
        self._reconsider(now_ns)

    # Outputs

    def next_timer(self) -> int | None:
        """Return when `handle_timer` has to be called at the latest; None when nothing is pending."""
        return min((at for at in (self._stage.deadline_ns, self._wake_ns) if at is not None), default=None)

    def next_action(self) -> CoordinatorAction | None:
        """Return the next action to carry out; None when there is none."""
        return self._out.pop()

    # Messages

    def _dispatch(self, candidate: Candidate, message: MemberMessage, now_ns: int) -> None:
        node, proposal, active = candidate.node, self._stage.proposal, self._stage.active
        if isinstance(message, Leave):
            self._leave(candidate, message, now_ns)
            return
        if isinstance(message, Reached):
            self._probes.answered(node, message.number)
            return
        if isinstance(message, AskToLeave):
            self._releases.ask(node)
            candidate.owns = message.owns
            if candidate.owns and len(self._roster) > 1:
                candidate.parting = True  # in the next view
                self._to_part[node] = None
            return
        if isinstance(message, Learned):
            if candidate.warm:
                least, most = self._config.retry_min_ns, self._config.retry_max_ns
                cold_again(candidate, pause_ns=least, longest_ns=most, now_ns=now_ns)
            candidate.learning = False
            return
        if isinstance(message, Join):
            raise LocalError("a Join makes a candidate, it does not come from one")
        view = self._stage.named(message.view_id)
        if message.view_id > self._history.last_view_id or (view is not None and view.rank_of(node) is None):
            cause = f"{node} spoke of view {message.view_id}, of which it cannot be a member"
            self._out.refuse(node, candidate.incarnation, cause)
            self._node_lost(candidate, cause, now_ns)
        elif view is None:
            pass  # of a view that is over: the sender did not know of its end yet
        elif isinstance(message, Learn):
            if active is not None and view is active.view:
                self._step_out(candidate, active, now_ns)
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
        connected, history, config = len(self._roster), self._history, self._config
        answer = answer_to(node, message, connected=connected, history=history, config=config, now_ns=now_ns)
        if isinstance(answer, Refusal):
            self._out.refuse(node, message.incarnation, answer.reason)
        elif isinstance(answer, Adoption):
            self._out.have_adopt(node, message.incarnation, answer.lost_after_ns)
        else:
            self._admit(answer, now_ns)

    def _admit(self, accepted: Acceptance, now_ns: int) -> None:
        candidate = accepted.candidate
        self._roster.add(candidate)
        self._forgetting.joined(candidate.node)
        self._probes.forget(candidate.node)
        self._releases.forget(candidate.node)
        self._out.note(NodeJoined(now_ns=now_ns, node=candidate.node, incarnation=candidate.incarnation))
        candidate.wait_reason = clip(self._stage.why_waits() or self._formation.why_none(self._history, now_ns=now_ns))
        welcome = Welcome(
            seed=self._seed,
            committed_step=self._history.committed_step,
            vote_timeout_ns=self._config.vote_timeout_ns,
            doubt_committed=accepted.doubt_committed,
            waiting_for=candidate.wait_reason,
            relay=self._config.relay,
        )
        self._out.tell(candidate, welcome)

    def _report(self, node: str, message: Report | Decline, view: View, now_ns: int) -> None:
        if self._stage.active is not None and view is self._stage.active.view:
            self._end_active(self._stage.active)
        if self._stage.diagnosis is not None:
            self._stage.diagnosis.add_report(node, message, connected=self._connected(view), now_ns=now_ns)

    def _step(self, candidate: Candidate, message: BeginStep | Vote, active: ActiveView, now_ns: int) -> None:
        expected = self._history.committed_step + 1
        if isinstance(message, Vote):
            candidate.owns = message.owns
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
        holds = min(message.committed_step, self._history.committed_step)
        candidate.committed_step = max(candidate.committed_step, holds)
        node, active = candidate.node, self._stage.active
        if active is not None and active.entered(node):
            return  # it votes first; the decision takes it out
        if message.parted and active is not None and node in active.view.parting:
            self._let_go([one for one in self._roster if one.node in active.view.parting], now_ns)
        why = f"{node} {departure(message.reason)}"
        if active is not None and active.ballot is None and active.view.rank_of(node) is not None:
            self._remove(candidate, why, now_ns)
            self._change_view(active, clip(why), now_ns)
            self._remove_leavers(now_ns)
        else:
            # The others cannot finish a step that it did not begin; and a proposal cannot be confirmed without it.
            self._node_lost(candidate, clip(why), now_ns)

    def _make_way(self, now_ns: int) -> None:
        """End an open step that a node of the view takes no part in, because it is to hand over what it owns."""
        active = self._stage.active
        if active is None or active.ballot is None:
            return
        for node in list(self._to_part):
            if node not in self._roster or node in active.view.parting:
                del self._to_part[node]
            elif active.view.rank_of(node) is not None and not active.entered(node):
                why = f"{node} hands over what it owns before it leaves"
                self._abort_view(active, ViewFailure(clip(why)), now_ns)
                return

    def _step_out(self, candidate: Candidate, active: ActiveView, now_ns: int) -> None:
        """Go on without a node that learns the state meanwhile."""
        candidate.learning, candidate.committed_step = True, 0
        member = active.view.member(candidate.node)
        if member is not None and member.spare:
            warmed(candidate)
        if candidate.node in self._history.base:
            self._record(Left(candidate.node))
        why = f"{candidate.node} learns the state before it takes part"
        if active.ballot is None:
            self._change_view(active, why, now_ns)
        else:
            self._abort_view(active, ViewFailure(clip(why)), now_ns)

    # Views

    def _reconsider(self, now_ns: int) -> None:
        """Propose a view if there can and should be a new one. Called after every input; idempotent."""
        self._wake_ns = None
        self._make_way(now_ns)
        if self.state is CoordinatorState.FORMING:
            self._reconsider_forming(now_ns)
        elif self._stage.active is not None:
            self._reconsider_installed(self._stage.active, now_ns)
        for candidate in self._releases.may_go():
            self._out.release(candidate)
        self._probe(now_ns)

    def _reconsider_forming(self, now_ns: int) -> None:
        diagnosis = self._stage.diagnosis
        if diagnosis is not None:
            if not diagnosis.complete(self._connected(diagnosis.view), now_ns=now_ns):
                self._wake_ns = diagnosis.deadline_ns
                return
            self._announce_end("", now_ns)
            self._leave_out(diagnosis.excluded(self._connected(diagnosis.view)), now_ns)
            self._stage.diagnosis = None
        if self._history.finished and self._look_at_end(now_ns):
            return
        readiness = self._formation.evaluate(self._history, now_ns=now_ns)
        if readiness.obstacle and self._forgetting.asked:
            readiness = self._try_to_forget(readiness, now_ns)
        if readiness.obstacle:
            self._wake_ns = readiness.retry_ns
            words = self._probes.words(now_ns=now_ns)
            obstacle = f"{readiness.obstacle}; {words}" if words else readiness.obstacle
            self._out.withhold(clip(obstacle), now_ns=now_ns)
            return
        self._forgetting.unneeded()
        self._propose(readiness.chosen, now_ns)

    def _try_to_forget(self, readiness: Readiness, now_ns: int) -> Readiness:
        """Forget the nodes that the operator gives up, where that may be; return how it is then."""
        prospect = self._forgetting.look(self._roster, readiness.chosen, self._history, now_ns=now_ns)
        if prospect.record is not None:
            self._record(prospect.record)
            self._out.note(NodesForgotten(now_ns=now_ns, nodes=prospect.record.nodes))
            return self._formation.evaluate(self._history, now_ns=now_ns)
        wakes = [at for at in (readiness.retry_ns, prospect.wake_ns) if at is not None]
        obstacle = f"{readiness.obstacle}; {self._forgetting.words(prospect.refusal)}"
        return Readiness(readiness.chosen, obstacle, min(wakes, default=None))

    def _look_at_end(self, now_ns: int) -> bool:
        """Tell those who wait that the job is done, where it is; return whether there is no view for that reason."""
        outlook = self._ending.look(self._roster, self._history, now_ns=now_ns)
        for record in outlook.records:
            self._record(record)
        if not outlook.obstacle:
            return False
        self._wake_ns = outlook.wake_ns
        if outlook.event is not None:
            self._out.note(outlook.event)
        self._out.withhold(outlook.obstacle, now_ns=now_ns)
        for candidate in outlook.told:
            self._out.end(candidate, self._history.final_step)
        return True

    def _probe(self, now_ns: int) -> None:
        """Have nodes that are left out try the paths to those that they would work with."""
        if self._stage.active is not None and self._stage.active.ballot is not None:
            return  # as in `_reconsider_installed`
        for candidate, probe in self._probes.due(self._stage.view, now_ns=now_ns):
            self._out.tell(candidate, probe)

    def _reconsider_installed(self, active: ActiveView, now_ns: int) -> None:
        if active.ballot is not None:
            return  # its decision will look again; and votes of a large view must not each count all nodes
        if self._due_to_leave(active.view, now_ns):
            may_ns = max(active.quiet_ns, self._evidence.may_propose_ns())
            if now_ns < may_ns:
                self._wake_ns = may_ns
                return
            self._dismiss(active.view, now_ns)
            if not self._formation.unchanged(active.view, self._history, now_ns=now_ns):
                self._change_view(active, "", now_ns)
            self._remove_leavers(now_ns)
            return
        change = self._formation.due_change(active.view, self._history, quiet_ns=active.quiet_ns, now_ns=now_ns)
        if change.obstacle:
            self._wake_ns = change.retry_ns
        else:
            self._change_view(active, "", now_ns)

    def _due_to_leave(self, view: View, now_ns: int) -> list[Candidate]:
        return scaling.due(view, self._formation, self._roster, self._history, now_ns=now_ns)

    def _dismiss(self, view: View, now_ns: int) -> None:
        """Take those out of the job that are due to leave it; they are told with what follows at this boundary."""
        going = self._due_to_leave(view, now_ns)
        # Whoever has come with this view owns something before it has voted.
        if going and any(candidate.owns for candidate in self._roster if view.rank_of(candidate.node) is not None):
            for candidate in going:
                candidate.parting = True  # in the view that follows; the first that has parted lets all of them go
            return
        self._let_go(going, now_ns)

    def _let_go(self, going: list[Candidate], now_ns: int) -> None:
        """Take nodes out of the job; those that still are here are told with what follows."""
        for candidate in going:
            ranks = self._history.wanted
            if candidate.node in self._history.to_leave:
                candidate.dismissal = f"{candidate.node} leaves the job, which is to have {ranks} ranks"
                self._out.note(NodeDismissed(now_ns=now_ns, node=candidate.node, cause=candidate.dismissal))
            candidate.leaving = True
            self._retire(candidate)
        names = [candidate.node for candidate in going]
        rest = tuple(node for node in self._history.to_leave if node not in names)
        if rest != self._history.to_leave:
            self._record(Scaled(self._history.wanted or 0, rest))

    def _propose(self, chosen: list[Candidate], now_ns: int, boundary: Decide | None = None) -> None:
        """Propose a view of `chosen`; at a step boundary, inside the decision of the step."""
        previous = self.view
        view = self._formation.next_view(chosen, self._history)
        for candidate in chosen:
            candidate.learning = candidate.warm = False
        for candidate in chosen[view.workers :]:
            candidate.shown += 1
        self._record(Proposed(view.view_id))
        self._evidence.proposed(now_ns=now_ns)
        self._stage.propose(view, weights=self._evidence.weights(view.nodes), now_ns=now_ns)
        self._out.announce_proposal(view, previous, boundary, now_ns=now_ns)

    def _check_proposal(self, proposal: Proposal, now_ns: int) -> None:
        """Install the proposal, reject it, or wait on."""
        if proposal.confirmed:
            self._install(proposal.view, now_ns)
        elif proposal.decidable(now_ns):
            self._reject(proposal, now_ns)

    def _install(self, view: View, now_ns: int) -> None:
        self._record(InstalledView(view))
        self._stage.install(view, now_ns=now_ns)
        self._out.announce_installation(view, now_ns=now_ns)

    def _reject(self, proposal: Proposal, now_ns: int) -> None:
        out = proposal.excluded(now_ns=now_ns)
        self._fail(proposal.view, proposal.failure(now_ns=now_ns), now_ns)
        self._leave_out(out, now_ns)

    def _fail(self, view: View, failure: ViewFailure, now_ns: int) -> None:
        """Give up the proposed view."""
        self._stage.give_up()
        weighed = self._weigh(failure, view, now_ns)
        lost, cause = weighed.failure.lost, weighed.failure.cause
        self._out.announce_failed_proposal(view, cause=cause, lost=lost, now_ns=now_ns)
        self._out.withhold_from_all(weighed.left_out)

    def _change_view(self, active: ActiveView, cause: str, now_ns: int, boundary: Decide | None = None) -> None:
        """Replace the installed view by the next, at a boundary; end it where too few nodes are left for one."""
        readiness = self._formation.successor(self._history, now_ns=now_ns)
        if not (obstacle := readiness.obstacle):
            self._propose(readiness.chosen, now_ns, boundary)
            return
        if boundary is not None:
            self._out.tell_all(active.view, boundary)
        self._abort_view(active, ViewFailure(clip(f"{cause}; {obstacle}" if cause else obstacle)), now_ns)

    def _abort_view(self, active: ActiveView, failure: ViewFailure, now_ns: int) -> None:
        """End the installed view and announce it. The step that is open is committed nowhere."""
        self._announce(self._end_active(active), failure, now_ns)

    def _end_active(self, active: ActiveView) -> Diagnosis:
        """End the installed view without announcing it. Nothing of it can be committed any more."""
        weights = self._evidence.weights(active.view.nodes)
        return self._stage.end(active, weights=weights, patient=self._evidence.failing)

    def _announce_end(self, node: str, now_ns: int) -> None:
        """Announce the end of a view, if it is not announced yet; because of `node`, only if it was in the view."""
        diagnosis = self._stage.diagnosis
        if diagnosis is not None and not diagnosis.announced and (not node or diagnosis.view.rank_of(node) is not None):
            self._announce(diagnosis, diagnosis.failure(self._connected(diagnosis.view)), now_ns)

    def _announce(self, diagnosis: Diagnosis, failure: ViewFailure, now_ns: int) -> None:
        diagnosis.announced = True
        weighed = self._weigh(failure, diagnosis.view, now_ns)
        self._out.announce_end(diagnosis.view, diagnosis.ballot, weighed.failure, now_ns=now_ns)
        self._out.withhold_from_all(weighed.left_out)
        self._remove_leavers(now_ns)

    def _weigh(self, failure: ViewFailure, view: View, now_ns: int) -> Weighed:
        """Hold a failure against those who can have caused it, and write down what follows before it is told."""
        weighed = weigh(failure, view, self._evidence, self._formation, self._history, now_ns=now_ns)
        self._note_lessons(now_ns)
        return weighed

    def _note_lessons(self, now_ns: int) -> None:
        lessons = self._evidence.news(now_ns=now_ns)
        if lessons is not None and lessons != self._history.lessons:
            self._record(Noted(lessons))

    def _connected(self, view: View) -> list[str]:
        return [node for node in view.nodes if node in self._roster]

    # Steps

    def _commit(self, active: ActiveView, step: int, digest: bytes, now_ns: int) -> None:
        view = active.view
        self._record(Committed(step, view.view_id, digest))
        self._evidence.committed(view.nodes, now_ns=now_ns)
        self._note_lessons(now_ns)
        active.step_decided(now_ns=now_ns)
        self._roster.committed(view, step)
        self._out.note(StepCommitted(now_ns=now_ns, view_id=view.view_id, step=step, digest=digest))
        decision = Decide(view_id=view.view_id, step=step, commit=True)
        if now_ns >= self._evidence.may_propose_ns():
            self._dismiss(view, now_ns)
        leavers = self._roster.leavers
        waits = not leavers and now_ns < self._evidence.may_propose_ns()
        if waits or self._formation.unchanged(view, self._history, now_ns=now_ns):
            self._out.tell_all(view, decision)
            self._remove_leavers(now_ns)
            return
        for candidate in leavers:
            self._retire(candidate)
        why = " and ".join(f"{candidate.node} {departure('')}" for candidate in leavers)
        self._change_view(active, why, now_ns, decision)
        self._remove_leavers(now_ns)

    def _votes_late(self, active: ActiveView, failure: ViewFailure, now_ns: int) -> None:
        """End the view for votes that did not come; leave the late members out where the others can go on."""
        self._abort_view(active, failure, now_ns)
        if self._formation.can_spare(failure.lost, self._history, now_ns=now_ns):
            self._leave_out(dict.fromkeys(failure.lost, failure.cause), now_ns)

    # Nodes

    def _node_lost(self, candidate: Candidate, cause: str, now_ns: int) -> None:
        """Remove a node, and end any view that it is in."""
        node = candidate.node
        contradiction = NOBODY if candidate.leaving else Contradiction((node,), paths=True)
        self._remove(candidate, cause, now_ns)
        proposal, active = self._stage.proposal, self._stage.active
        if proposal is not None and proposal.view.rank_of(node) is not None:
            if proposal.disputed:
                # what the others reported by now must not be lost
                proposal.decline(node, unreachable=(), reason=cause, now_ns=now_ns)
                self._reject(proposal, now_ns)
            else:
                self._fail(proposal.view, ViewFailure(cause, "failed", "", (node,), contradiction), now_ns)
        elif active is not None and active.view.rank_of(node) is not None:
            self._abort_view(active, ViewFailure(cause, "failed", node, (node,), contradiction), now_ns)
        else:
            self._announce_end(node, now_ns)

    def _remove(self, candidate: Candidate, cause: str, now_ns: int) -> None:
        if candidate.leaving:
            self._retire(candidate)
        self._roster.remove(candidate.node)
        self._releases.forget(candidate.node)
        if self._stage.diagnosis is not None:
            self._stage.diagnosis.node_lost(candidate.node, cause)
        self._out.note(NodeLost(now_ns=now_ns, node=candidate.node, cause=cause, left=candidate.leaving))

    def _retire(self, candidate: Candidate) -> None:
        record = left_record(candidate, self._history)
        if record is not None:
            self._record(record)

    def _remove_leavers(self, now_ns: int) -> None:
        for candidate in self._roster.leavers:
            if candidate.dismissal:
                self._out.dismiss(candidate)
            self._remove(candidate, candidate.dismissal or f"{candidate.node} {departure('')}", now_ns)

    def _leave_out(self, reasons: Mapping[str, str], now_ns: int) -> None:
        """Leave connected nodes out of the next views, each for a while, and tell them."""
        self._out.withhold_from_all(self._probes.leave_out(reasons, now_ns=now_ns))

    def _record(self, record: JournalRecord) -> None:
        self._history = self._history.apply(record)
        self._out.persist(record)
