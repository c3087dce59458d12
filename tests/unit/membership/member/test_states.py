"""The states of a member: every transition by the table."""

from __future__ import annotations

import itertools

import pytest

from quicoll.errors import LocalError
from quicoll.membership.member.states import MEMBER_TRANSITIONS, MemberCause, MemberState, member_transition


@pytest.mark.parametrize(("state", "cause"), list(itertools.product(MemberState, MemberCause)))
def test_only_the_table_moves_a_member(state: MemberState, cause: MemberCause) -> None:
    if cause in MEMBER_TRANSITIONS[state]:
        assert member_transition(state, cause) is MEMBER_TRANSITIONS[state][cause]
    else:
        with pytest.raises(LocalError, match=f"{cause.name} cannot happen to a member that is {state.name}"):
            member_transition(state, cause)


def test_every_state_can_be_reached_and_only_left_is_final() -> None:
    assert {after for causes in MEMBER_TRANSITIONS.values() for after in causes.values()} == set(MemberState)
    assert [state for state in MemberState if not MEMBER_TRANSITIONS[state]] == [MemberState.LEFT]
