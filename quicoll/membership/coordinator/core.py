"""The coordinator's core: it alone decides who is a member and which step is committed.

It carries no tensors and knows no clock, socket or disk; messages, losses and time come in, actions go out
(actions.py). Each input goes to the part that it concerns, and then what is due is looked at. What is so, and what
follows from it, is kept apart. Parts that follow, and act:

    arrivals.py       nodes that come
    losses.py         nodes that are lost
    leaving.py        nodes that go of their own will
    learners.py       nodes that learn the state beside the steps of the others
    steps.py          the steps of an installed view, and what follows from their votes
    reconsidering.py  what is due, whatever came in
    succession.py     how views begin, give way to each other, and end
    departures.py     how a node is taken off the list of those that are here
    ledger.py         how a record is made

Parts that say what is so, and change nothing but themselves:

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
    chronicle.py     what has happened of late, for people
    measurements.py  what members say of their links, for people
    overview.py      how the job is, for people

Invariants: a message counts as one of a view when that is the one installed, proposed, or still looked into, and its
sender is a member; one that names a view of which its sender cannot be a member ends that sender. A message of a view
that is over is no error: the sender did not know of its end yet. A node is heard as the process that has joined, over
the link on which it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.deadlines import earlier
from quicoll.errors import LocalError
from quicoll.membership.coordinator import scaling
from quicoll.membership.coordinator.action_queue import ActionQueue
from quicoll.membership.coordinator.actions import CoordinatorAction, Note, ScaleAsked
from quicoll.membership.coordinator.arrivals import Arrivals
from quicoll.membership.coordinator.chronicle import Chronicle
from quicoll.membership.coordinator.departures import Departures
from quicoll.membership.coordinator.ending import Ending
from quicoll.membership.coordinator.evidence import Evidence
from quicoll.membership.coordinator.forgetting import Forgetting
from quicoll.membership.coordinator.formation import Formation
from quicoll.membership.coordinator.history import History, Scaled, Seeded
from quicoll.membership.coordinator.learners import Learners
from quicoll.membership.coordinator.leaving import Leaving
from quicoll.membership.coordinator.ledger import Ledger
from quicoll.membership.coordinator.losses import Losses
from quicoll.membership.coordinator.measurements import Measurements
from quicoll.membership.coordinator.overview import Overview
from quicoll.membership.coordinator.probes import Probes
from quicoll.membership.coordinator.reconsidering import Reconsidering
from quicoll.membership.coordinator.releases import Releases
from quicoll.membership.coordinator.roster import Roster
from quicoll.membership.coordinator.stage import CoordinatorState, Stage
from quicoll.membership.coordinator.steps import Steps
from quicoll.membership.coordinator.succession import Succession
from quicoll.membership.messages import (
    AskToLeave,
    BeginStep,
    Confirm,
    Decline,
    Join,
    Learn,
    Learned,
    Leave,
    Measured,
    MemberMessage,
    Reached,
    Report,
    Vote,
    clip,
)

if TYPE_CHECKING:
    from quicoll.membership.coordinator.actions import MembershipEvent
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.roster import Candidate
    from quicoll.membership.status import JobStatus
    from quicoll.membership.view import View

__all__ = ["CoordinatorCore"]


class CoordinatorCore:
    """Messages, losses and time in, actions out; see the head of this module.

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
        self._stage = stage = Stage(config)
        self._roster = roster = Roster(history.view, retry_min_ns=config.retry_min_ns, retry_max_ns=config.retry_max_ns)
        evidence = Evidence(
            shortest_ns=config.retry_min_ns,
            longest_ns=config.retry_max_ns,
            lessons=history.lessons,
            now_ns=now_ns,
        )
        self._formation = formation = Formation(roster, evidence, config, history=history)
        self._probes = probes = Probes(roster)
        releases = Releases(roster)
        self._forgetting = forgetting = Forgetting(config.forget, patience_ns=config.forget_after_ns, now_ns=now_ns)
        self._out = out = ActionQueue(roster)
        self._ledger = ledger = Ledger(history, out)
        departures = Departures(ledger=ledger, roster=roster, stage=stage, formation=formation, releases=releases)
        self._succession = succession = Succession(
            ledger=ledger,
            roster=roster,
            stage=stage,
            evidence=evidence,
            formation=formation,
            probes=probes,
            departures=departures,
        )
        self._losses = losses = Losses(stage=stage, departures=departures, succession=succession)
        self._leaving = leaving = Leaving(
            ledger=ledger,
            roster=roster,
            stage=stage,
            releases=releases,
            departures=departures,
            succession=succession,
            losses=losses,
        )
        self._learners = Learners(ledger=ledger, succession=succession, config=config)
        self._arrivals = Arrivals(
            ledger=ledger,
            roster=roster,
            stage=stage,
            formation=formation,
            losses=losses,
            forgetting=forgetting,
            probes=probes,
            releases=releases,
            config=config,
            seed=seed,
        )
        self._chronicle = chronicle = Chronicle(now_ns=now_ns)
        self._measurements = measurements = Measurements()
        self._overview = Overview(
            roster=roster,
            stage=stage,
            evidence=evidence,
            formation=formation,
            chronicle=chronicle,
            measurements=measurements,
            config=config,
        )
        self._steps = Steps(
            ledger=ledger,
            roster=roster,
            evidence=evidence,
            formation=formation,
            departures=departures,
            succession=succession,
        )
        self._due = Reconsidering(
            ledger=ledger,
            roster=roster,
            stage=stage,
            evidence=evidence,
            formation=formation,
            probes=probes,
            releases=releases,
            ending=Ending(settle_ns=config.settle_ns),
            forgetting=forgetting,
            departures=departures,
            succession=succession,
            leaving=leaving,
        )
        if history.seed is None:
            ledger.record(Seeded(seed))
        succession.note_lessons(now_ns)
        self._due.look(now_ns)

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
        return self._ledger.history

    @property
    def to_forget(self) -> tuple[str, ...]:
        """Nodes that an operator gives up, unless that was found to be wrong, or needless."""
        return self._forgetting.wanted

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
        stays = False
        if isinstance(message, Join) and incarnation not in (None, message.incarnation):
            reason = f"{node} joins as incarnation {message.incarnation} over a link of incarnation {incarnation}"
            self._out.refuse(node, incarnation or 0, reason)
        elif isinstance(message, Join):
            self._arrivals.join(node, message, now_ns)
        else:
            candidate = self._roster.get(node)
            if candidate is None or (incarnation is not None and incarnation != candidate.incarnation):
                # After Leave a member says nothing more that matters; anyone else has to learn that it is not in.
                if candidate is None and not isinstance(message, Leave):
                    self._out.drop(node, incarnation or 0, f"{type(message).__name__} before Join")
                return
            if isinstance(message, Measured) and self._take_measured(node, message, now_ns):
                return
            stays = self._dispatch(candidate, message, now_ns)
        self._due.look(now_ns, stays=stays)

    def saw(self, node: str, address: tuple[str, int], *, now_ns: int) -> bool:
        """Take in where a node's datagrams come from: views that are made from now on tell the others.

        Args:
            node: By the name in its certificate.
            address: (host, port), proved by an answer from there.
            now_ns: The time now.
        Returns:
            Whether somebody may have to hear of it at once: there may be actions.
        """
        candidate = self._roster.saw(node, address)
        if candidate is None:
            return False
        self._due.moved(candidate, now_ns)
        return True

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
        self._losses.lost(candidate, clip(f"{node} was lost: {cause}"), now_ns)
        self._due.look(now_ns)

    def scale(self, world_size: int | None, leave: tuple[str, ...] = (), *, now_ns: int) -> str:
        """Take in that an operator wants another number of ranks; see scaling.py.

        Args:
            world_size: Ranks; None: as many as there are.
            leave: Nodes that shall leave.
            now_ns: The time now.
        Returns:
            Why it cannot be, and nothing has changed; "" where it is taken, or was before.
        """
        history = self._ledger.history
        answer = scaling.judge_request(world_size, leave, history=history, roster=self._roster, config=self._config)
        if isinstance(answer, scaling.ScaleRefusal):
            return answer.reason
        if answer != Scaled(history.wanted or 0, history.to_leave):
            self._ledger.record(answer)
            self._out.note(ScaleAsked(now_ns=now_ns, world_size=answer.world_size, leave=answer.leave))
        self._due.look(now_ns)
        return ""

    def standing(self, *, now_ns: int) -> scaling.Standing:
        """Return how far what an operator has asked for is."""
        history, view = self._ledger.history, self.view
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

    def status(self, *, now_ns: int, links: bool = False) -> JobStatus:
        """Return how the job is, for people who look; without events (`events`) and without the coordinator's links.

        Args:
            now_ns: The time now.
            links: Whether what members say of their links is part of it.
        """
        return self._overview.status(
            self._ledger.history, waiting_for=self.standing(now_ns=now_ns).waiting_for, now_ns=now_ns, links=links
        )

    @property
    def events(self) -> tuple[MembershipEvent, ...]:
        """What has happened of late, the newest last: all that was noted but commits, as far as it is remembered."""
        return tuple(self._chronicle.events)

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due at `now_ns`; harmless when nothing is."""
        stage = self._stage
        if stage.proposal is not None:
            self._succession.check(stage.proposal, now_ns)
        elif stage.active is not None and (failure := stage.active.late(now_ns)) is not None:
            self._steps.late(stage.active, failure, now_ns)
        self._due.look(now_ns)

    # Outputs

    def next_timer(self) -> int | None:
        """Return when `handle_timer` has to be called at the latest; None when nothing is pending."""
        return earlier(self._stage.deadline_ns, self._due.wake_ns)

    def next_action(self) -> CoordinatorAction | None:
        """Return the next action to carry out; None when there is none."""
        action = self._out.pop()
        if isinstance(action, Note):
            self._chronicle.take(action.event)  # everything before it is in the journal
        return action

    # Messages

    def _dispatch(self, candidate: Candidate, message: MemberMessage, now_ns: int) -> bool:
        """Give a message of a node that has joined to the part that it concerns.

        Returns:
            Whether the installed view was found to stay as it is.
        """
        match message:
            case Leave():
                self._leaving.leave(candidate, message, now_ns)
            case Reached():
                self._probes.answered(candidate.node, message.number)
            case AskToLeave():
                self._leaving.ask(candidate, message)
            case Learned():
                self._learners.learned(candidate, now_ns)
            case Join():
                raise LocalError("a Join makes a candidate, it does not come from one")
            case _:
                return self._dispatch_in_view(candidate, message, now_ns)
        return False

    def _dispatch_in_view(
        self,
        candidate: Candidate,
        message: Confirm | Decline | Report | BeginStep | Vote | Learn | Measured,
        now_ns: int,
    ) -> bool:
        node, proposal, active = candidate.node, self._stage.proposal, self._stage.active
        view = self._stage.named(message.view_id)
        if message.view_id > self._ledger.history.last_view_id or (view is not None and view.rank_of(node) is None):
            cause = f"{node} spoke of view {message.view_id}, of which it cannot be a member"
            self._out.refuse(node, candidate.incarnation, cause)
            self._losses.lost(candidate, cause, now_ns)
        elif isinstance(message, BeginStep) and (view is None or view is not self._stage.view):
            self._succession.was_open(node, message, now_ns)
        elif view is None or isinstance(message, Measured):
            pass  # of a view that is over: the sender did not know of its end yet
        elif isinstance(message, Learn):
            if active is not None and view is active.view:
                self._learners.step_out(candidate, active, now_ns)
        elif proposal is not None and view is proposal.view:
            proposal.receive(node, message, now_ns=now_ns)
            self._succession.check(proposal, now_ns)
        elif isinstance(message, Report | Decline):
            self._report(node, message, view, now_ns)
        elif isinstance(message, BeginStep | Vote) and active is not None and view is active.view:
            return self._steps.receive(candidate, message, active, now_ns)
        return False

    def _take_measured(self, node: str, message: Measured, now_ns: int) -> bool:
        """Take in what a member of the installed view says of its links, if it is that: nothing follows, and what is
        due need not be looked at, which in a large world takes the most of a message's time."""
        view = self.view
        if view is None or message.view_id != view.view_id or view.rank_of(node) is None:
            return False
        self._measurements.take(view, node, message.links, now_ns)
        return True

    def _report(self, node: str, message: Report | Decline, view: View, now_ns: int) -> None:
        """The first report of a failure ends the view; the announcement may wait for more."""
        if self._stage.active is not None and view is self._stage.active.view:
            self._succession.end(self._stage.active)
        if self._stage.diagnosis is not None:
            connected = self._succession.connected(view)
            self._stage.diagnosis.add_report(node, message, connected=connected, now_ns=now_ns)
