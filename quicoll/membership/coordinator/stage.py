"""Which view there is, and how far it is: the coordinator's one state, with what belongs to each value of it.

    FORMING     no view is installed. Candidates are counted; a view is proposed as soon as there can be one.
                Until then the reports on the view before are kept (diagnosis.py)
    PROPOSED    a view was sent to its members; each forms its links and confirms or declines (proposal.py)
    INSTALLED   all confirmed, the view is in the journal; its members take steps (active_view.py)

`COORDINATOR_TRANSITIONS` has every transition; whoever asks for another one gets a LocalError.

Invariants: there is a proposal while a view is proposed, and no longer; the same for an active view and an installed
one. A diagnosis is of the view that was installed last, and lives from its end to the next proposal.

Nothing is sent, recorded or decided here: the core says what happens, and what follows from it.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from quicoll.errors import LocalError
from quicoll.membership.coordinator.active_view import ActiveView
from quicoll.membership.coordinator.diagnosis import Diagnosis
from quicoll.membership.coordinator.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.view import View

__all__ = ["COORDINATOR_TRANSITIONS", "CoordinatorCause", "CoordinatorState", "Stage", "coordinator_transition"]


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


class Stage:
    """From FORMING on.

    Attributes:
        state: See the module's head.
        proposal: The answers, while a view is proposed.
        active: The steps, while a view is installed.
        diagnosis: From the end of an installed view to the next proposal, or until it has had its consequences.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self.state = CoordinatorState.FORMING
        self.proposal: Proposal | None = None
        self.active: ActiveView | None = None
        self.diagnosis: Diagnosis | None = None

    @property
    def view(self) -> View | None:
        """The view that is proposed or installed, None while there is neither."""
        at_work = self.proposal if self.proposal is not None else self.active
        return at_work.view if at_work is not None else None

    @property
    def deadline_ns(self) -> int | None:
        """When answers or votes are awaited no more; None while none are."""
        if self.proposal is not None:
            return self.proposal.decide_ns
        return self.active.late_ns if self.active is not None else None

    def named(self, view_id: int) -> View | None:
        """Return the view of this id, if it is installed or proposed, or has ended and is still looked into."""
        for each in (self.active, self.proposal, self.diagnosis):
            if each is not None and each.view.view_id == view_id:
                return each.view
        return None

    def why_waits(self) -> str:
        """Return why a node that joins now is in no view yet; "" where no view keeps it out."""
        if self.active is not None:
            return f"view {self.active.view.view_id} is at work; the next one comes at a step boundary"
        if self.proposal is not None:
            return f"view {self.proposal.view.view_id} is being formed"
        return ""

    def propose(self, view: View, *, weights: Mapping[str, int], now_ns: int) -> None:
        """Begin to collect the answers to `view`, in place of the installed one if there is one.

        Args:
            view: The view.
            weights: How much is held against its nodes, for `Proposal`.
            now_ns: The time now.
        """
        cause = CoordinatorCause.ENOUGH if self.active is None else CoordinatorCause.CHANGED
        self.state = coordinator_transition(self.state, cause)
        self.active = None
        self.diagnosis = None
        self.proposal = Proposal(
            view,
            now_ns=now_ns,
            timeout_ns=self._config.propose_timeout_ns,
            gather_ns=self._config.gather_ns,
            weights=weights,
        )

    def install(self, view: View, *, now_ns: int) -> None:
        """Begin the steps of the view that was proposed."""
        self.state = coordinator_transition(self.state, CoordinatorCause.CONFIRMED)
        self.proposal = None
        self.active = ActiveView(view, self._config, now_ns=now_ns)

    def give_up(self) -> None:
        """Give up the view that was proposed."""
        self.state = coordinator_transition(self.state, CoordinatorCause.FAILED)
        self.proposal = None

    def end(self, active: ActiveView, *, weights: Mapping[str, int], patient: bool) -> Diagnosis:
        """End the installed view.

        Args:
            active: The installed view.
            weights: How much is held against its nodes, for `Diagnosis`.
            patient: Whether reports are waited for in any case.
        Returns:
            What collects the reports on it.
        """
        self.state = coordinator_transition(self.state, CoordinatorCause.BROKEN)
        self.active = None
        self.diagnosis = Diagnosis(
            active.view, active.ballot, gather_ns=self._config.gather_ns, weights=weights, patient=patient
        )
        return self.diagnosis
