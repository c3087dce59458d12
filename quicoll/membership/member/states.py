"""The states of a member, and every way from one to another.

DETACHED   no link to the coordinator
JOINING    connected; there is no view for this node yet
FORMING    a view was proposed; links to its members are being formed
ACTIVE     the view is installed; steps are taken in it
LEFT       the end: left of its own will or an operator's, or refused, or the job is done
"""

from __future__ import annotations

import enum

from quicoll.errors import LocalError

__all__ = ["MEMBER_TRANSITIONS", "MemberCause", "MemberState", "member_transition"]


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
