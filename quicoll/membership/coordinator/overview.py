"""How the job is at one moment, from everything that the coordinator's parts know; nothing is changed by looking.

One node, one state (`MemberState`), whichever part knows of it: the view and its ballot or answers for those that are
in it, the roster for those that are connected, the history and the chronicle for those that are not. In this order:
what is later in it is asked only where nothing before has the node.

A commit that is recorded and not yet in the journal counts here already as the coordinator counts it; when the last one
was, and how fast they come, is of those that are durable (chronicle.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from quicoll.membership.coordinator.stage import CoordinatorState
from quicoll.membership.status import JobStatus, MemberState, MemberStatus, shortened

if TYPE_CHECKING:
    from quicoll.membership.coordinator.chronicle import Chronicle
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.evidence import Evidence
    from quicoll.membership.coordinator.formation import Formation
    from quicoll.membership.coordinator.history import History
    from quicoll.membership.coordinator.measurements import Measurements
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.coordinator.stage import Stage

__all__ = ["Overview"]

_STAGES: Final[Mapping[CoordinatorState, Literal["forming", "proposed", "installed"]]] = {
    CoordinatorState.FORMING: "forming",
    CoordinatorState.PROPOSED: "proposed",
    CoordinatorState.INSTALLED: "installed",
}


class Overview:
    """Reads the parts; see the module's head.

    Args:
        roster: Connected nodes.
        stage: Which view there is.
        evidence: Who is left out for what failed views say.
        formation: How many there may be.
        chronicle: What has happened of late.
        measurements: What members say of their links.
        config: The coordinator's settings.
    """

    def __init__(
        self,
        *,
        roster: Roster,
        stage: Stage,
        evidence: Evidence,
        formation: Formation,
        chronicle: Chronicle,
        measurements: Measurements,
        config: CoordinatorConfig,
    ) -> None:
        self._roster = roster
        self._stage = stage
        self._evidence = evidence
        self._formation = formation
        self._chronicle = chronicle
        self._measurements = measurements
        self._config = config

    def status(self, history: History, *, waiting_for: str, now_ns: int, links: bool) -> JobStatus:
        """Return how the job is; without events, which have no words here.

        Args:
            history: What the journal holds.
            waiting_for: What is missing for what an operator has asked for.
            now_ns: The time now.
            links: Whether what members say of their links is part of it.
        """
        stage, chronicle, config = self._stage, self._chronicle, self._config
        view, active = stage.view, stage.active
        ballot = active.ballot if active is not None else None
        committed = chronicle.committed_ns
        # The chronicle hears of a view when the journal has it, a moment after the stage is another one.
        without = None if stage.state is CoordinatorState.INSTALLED else chronicle.without_ns
        members = self._members(history, now_ns)
        return JobStatus(
            led_ns=now_ns - chronicle.began_ns,
            stage=_STAGES[stage.state],
            view_id=0 if view is None else view.view_id,
            stage_ns=max(0, now_ns - chronicle.stage_ns),
            world_size=config.world_size if view is None else max(1, view.workers),
            min_world_size=config.min_world_size,
            wanted=history.wanted,
            waiting_for=shortened(waiting_for if history.wanted is not None else ""),
            held=shortened(self._held()),
            without_ns=0 if without is None else max(0, now_ns - without),
            committed_step=history.committed_step,
            committed_ns=None if committed is None else max(0, now_ns - committed),
            step_ns=chronicle.step_ns,
            recent=chronicle.recent(now_ns),
            open_step=0 if ballot is None else ballot.step,
            open_ns=0 if active is None or active.opened_ns is None else max(0, now_ns - active.opened_ns),
            voting_ns=None if active is None or active.voting_ns is None else max(0, now_ns - active.voting_ns),
            votes=0 if ballot is None else ballot.view.world_size - len(ballot.silent),
            finished=len(history.finished),
            done=history.ended and stage.state is CoordinatorState.FORMING,
            final_step=history.final_step,
            members=self._with_links(members, now_ns) if links else members,
        )

    def _with_links(self, members: tuple[MemberStatus, ...], now_ns: int) -> tuple[MemberStatus, ...]:
        active = self._stage.active
        if active is None:
            return members
        told = self._measurements.of(active.view, now_ns)
        return tuple(
            msgspec.structs.replace(each, links=told[each.node][0], links_ns=told[each.node][1])
            if each.node in told
            else each
            for each in members
        )

    def _held(self) -> str:
        if self._stage.state is not CoordinatorState.FORMING:
            return ""
        if self._stage.diagnosis is not None and not self._chronicle.held:
            return ""  # the next view follows when its members have said why the last one ended
        return self._chronicle.held

    def _members(self, history: History, now_ns: int) -> tuple[MemberStatus, ...]:
        view = self._stage.view
        full = view is not None and view.workers >= self._formation.limit(history)
        here = [candidate.node for candidate in self._roster]
        absent = [*history.base, *history.finished, *self._chronicle.departed]
        nodes = dict.fromkeys((*(() if view is None else view.nodes), *here, *absent))
        return tuple(self._member(node, history, full, now_ns) for node in nodes)

    def _member(self, node: str, history: History, full: bool, now_ns: int) -> MemberStatus:
        candidate = self._roster.get(node)
        if candidate is None:
            return self._absent(node, history, now_ns)
        view = self._stage.view
        rank = None if view is None else view.rank_of(node)
        out_ns = max(self._roster.retry_ns(node), self._evidence.next_return((node,), now_ns=now_ns) or 0) - now_ns
        state = self._outside_view(candidate, out_ns, full) if rank is None else self._in_view(candidate)
        return MemberStatus(
            node=node,
            state=state,
            rank=rank,
            step=candidate.committed_step,
            for_ns=max(0, now_ns - candidate.joined_ns),
            out_ns=max(0, out_ns) if state == "left out" else 0,
            why=shortened(candidate.dismissal or candidate.wait_reason) if rank is None else "",
        )

    def _in_view(self, candidate: Candidate) -> MemberState:
        node, proposal, active = candidate.node, self._stage.proposal, self._stage.active
        if proposal is not None:
            return proposal.answer_of(node)
        member = None if active is None else active.view.member(node)
        if member is not None and member.spare:
            return "spare"
        ballot = None if active is None else active.ballot
        if ballot is None:
            return "leaving" if candidate.leaving else "at work"
        if ballot.voted(node):
            return "voted"
        return "computing" if ballot.entered(node) else "outside"

    @staticmethod
    def _outside_view(candidate: Candidate, out_ns: int, full: bool) -> MemberState:
        if candidate.told_end:
            return "done"
        if candidate.leaving:
            return "leaving"
        if candidate.warm:
            return "spare"
        if candidate.learning:
            return "learning"
        if out_ns > 0:
            return "left out"
        return "standing by" if full else "joining"

    def _absent(self, node: str, history: History, now_ns: int) -> MemberStatus:
        view = self._stage.view
        rank = None if view is None else view.rank_of(node)
        departure = self._chronicle.departed.get(node)
        for_ns = None if departure is None else max(0, now_ns - departure.at_ns)
        state: MemberState
        if node in history.finished:
            state = "done"
        elif departure is None:
            state = "missing"
        else:
            state = "gone" if departure.left else "lost"
        why = shortened(departure.cause) if departure is not None and state in ("lost", "gone") else ""
        return MemberStatus(node=node, state=state, rank=rank, for_ns=for_ns, why=why)
