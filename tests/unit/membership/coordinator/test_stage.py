"""Which view there is: every transition by the table, and what is there in each state."""

from __future__ import annotations

import itertools

import pytest

from quicoll.errors import LocalError
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.stage import (
    COORDINATOR_TRANSITIONS,
    CoordinatorCause,
    CoordinatorState,
    Stage,
    coordinator_transition,
)
from quicoll.membership.messages import BeginStep, Vote
from quicoll.membership.view import Member, View


@pytest.mark.parametrize(("state", "cause"), list(itertools.product(CoordinatorState, CoordinatorCause)))
def test_only_the_table_moves_the_coordinator(state: CoordinatorState, cause: CoordinatorCause) -> None:
    if cause in COORDINATOR_TRANSITIONS[state]:
        assert coordinator_transition(state, cause) is COORDINATOR_TRANSITIONS[state][cause]
    else:
        with pytest.raises(LocalError, match=f"{cause.name} cannot happen to a coordinator that is {state.name}"):
            coordinator_transition(state, cause)


def test_every_state_can_be_reached_and_left() -> None:
    assert set(COORDINATOR_TRANSITIONS) == set(CoordinatorState)
    assert {after for causes in COORDINATOR_TRANSITIONS.values() for after in causes.values()} == set(CoordinatorState)
    assert all(COORDINATOR_TRANSITIONS.values())


def view(view_id: int) -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate("ab"))
    return View(view_id=view_id, members=members, seed=7, committed_step=4, committed_view=0)


def proposed(view_id: int = 1, *, now_ns: int = 0) -> Stage:
    stage = Stage(CoordinatorConfig(world_size=2, propose_timeout_ns=1000, gather_ns=10, vote_timeout_ns=100))
    stage.propose(view(view_id), weights={}, now_ns=now_ns)
    return stage


def parts(stage: Stage) -> tuple[bool, bool, bool]:
    return stage.proposal is not None, stage.active is not None, stage.diagnosis is not None


def ended() -> Stage:
    stage = proposed()
    stage.install(view(1), now_ns=5)
    assert stage.active is not None
    stage.end(stage.active, weights={}, patient=False)
    return stage


def test_each_state_has_its_own_part_and_no_other() -> None:
    stage = proposed()
    assert (stage.state, parts(stage)) == (CoordinatorState.PROPOSED, (True, False, False))
    stage.install(view(1), now_ns=5)
    assert (stage.state, parts(stage)) == (CoordinatorState.INSTALLED, (False, True, False))
    stage.propose(view(2), weights={}, now_ns=6)
    assert (stage.state, parts(stage)) == (CoordinatorState.PROPOSED, (True, False, False))
    stage.give_up()
    assert (stage.state, parts(stage)) == (CoordinatorState.FORMING, (False, False, False))


def test_the_reports_on_a_view_that_ended_are_kept_until_the_next_proposal() -> None:
    stage = ended()
    assert (stage.state, parts(stage)) == (CoordinatorState.FORMING, (False, False, True))
    assert stage.named(1) == view(1)
    assert stage.view is None
    stage.propose(view(2), weights={}, now_ns=6)
    assert parts(stage) == (True, False, False)
    assert stage.named(1) is None
    assert stage.named(2) is stage.view


def test_a_second_proposal_cannot_take_the_place_of_one_that_is_open() -> None:
    stage = proposed()
    with pytest.raises(LocalError, match="ENOUGH cannot happen"):
        stage.propose(view(2), weights={}, now_ns=1)
    assert stage.view == view(1)


def test_a_view_that_was_not_proposed_is_neither_installed_nor_given_up() -> None:
    stage = ended()
    with pytest.raises(LocalError, match="CONFIRMED cannot happen"):
        stage.install(view(1), now_ns=1)
    with pytest.raises(LocalError, match="FAILED cannot happen"):
        stage.give_up()
    assert parts(stage) == (False, False, True)


def test_the_deadline_is_that_of_the_answers_and_then_of_the_votes() -> None:
    stage = proposed(now_ns=3)
    assert stage.deadline_ns == 1003
    stage.install(view(1), now_ns=5)
    assert stage.deadline_ns is None
    assert stage.active is not None
    stage.active.receive("a", BeginStep(view_id=1, step=5), expected=5, now_ns=6)
    stage.active.receive("a", Vote(view_id=1, step=5, ok=True), expected=5, now_ns=7)
    assert stage.deadline_ns == 107
    assert ended().deadline_ns is None


def test_a_node_that_joins_hears_which_view_it_waits_for() -> None:
    stage = proposed()
    assert stage.why_waits() == "view 1 is being formed"
    stage.install(view(1), now_ns=5)
    assert stage.why_waits().startswith("view 1 is at work")
    assert ended().why_waits() == ""
