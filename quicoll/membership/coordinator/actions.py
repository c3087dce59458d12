"""Actions that the coordinator's core asks its shell to carry out, and events for observers.

Actions are carried out one by one, in order, and a `Persist` is durable before the next is begun. That one rule makes
every announcement true for ever: it was written before it was sent. A crash between two actions is like a crash
before the first message: the journal knows, and nothing else was sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from quicoll.membership.messages import JobEnded, Outdated, RefuseJoin, Welcome

if TYPE_CHECKING:
    from quicoll.membership.coordinator.history import JournalRecord
    from quicoll.membership.messages import CoordinatorMessage
    from quicoll.membership.view import View

__all__ = [
    "CoordinatorAction",
    "DropLink",
    "JobFinished",
    "MembershipEvent",
    "NodeDismissed",
    "NodeJoined",
    "NodeLost",
    "NodeReleased",
    "NodesForgotten",
    "Note",
    "Persist",
    "ScaleAsked",
    "StepCommitted",
    "StepRejected",
    "TellMember",
    "ViewAborted",
    "ViewInstalled",
    "ViewProposed",
    "ViewWithheld",
    "rests_on_journal",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node asks to take part."""

    now_ns: int
    node: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node is not connected any more: lost, replaced by a new incarnation, or gone of its own will (`left`)."""

    now_ns: int
    node: str
    cause: str
    left: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewProposed:
    now_ns: int
    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewInstalled:
    now_ns: int
    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewAborted:
    """A view is over: an installed one, or a proposal (`installed` tells which)."""

    now_ns: int
    view_id: int
    installed: bool
    cause: str
    lost: tuple[str, ...]
    culprit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    now_ns: int
    view_id: int
    step: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRejected:
    now_ns: int
    view_id: int
    step: int
    cause: str
    lost: tuple[str, ...]
    culprit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewWithheld:
    """There can be no view now, and why; once per reason."""

    now_ns: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """The job is done: these nodes have ended at `step`, as their users count, and nobody of the last view goes on."""

    now_ns: int
    step: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesForgotten:
    """These nodes of the last view count no longer, as an operator has asked."""

    now_ns: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAsked:
    """An operator wants so many ranks, and these nodes to leave for that."""

    now_ns: int
    world_size: int
    leave: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDismissed:
    """A node is told to leave, as an operator has asked."""

    now_ns: int
    node: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReleased:
    """A node that was asked to stop is told that it may go: nobody who is here now needs its state."""

    now_ns: int
    node: str


MembershipEvent: TypeAlias = (
    NodeJoined
    | NodeDismissed
    | NodeReleased
    | ScaleAsked
    | NodeLost
    | NodesForgotten
    | ViewProposed
    | ViewInstalled
    | ViewAborted
    | StepCommitted
    | StepRejected
    | ViewWithheld
    | JobFinished
)


@dataclass(frozen=True, slots=True)
class Persist:
    """Append to the journal; durable before any later action. If that fails, no later action is carried out."""

    record: JournalRecord


@dataclass(frozen=True, slots=True)
class TellMember:
    """Send to this incarnation of the node; nothing to do when its link is gone."""

    node: str
    incarnation: int
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class DropLink:
    """Close the link of this incarnation of the node (0: of any), after all messages before this have been sent."""

    node: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """For observers; nothing depends on it."""

    event: MembershipEvent


CoordinatorAction: TypeAlias = Persist | TellMember | DropLink | Note


def rests_on_journal(action: CoordinatorAction) -> bool:
    """Return whether an action is right only as long as nobody else has appended to the journal.

    Answers to a Join and the end of the job say what the whole journal holds. All else is about views that this
    coordinator has proposed: nobody else can commit a step of one, so what it says of them is right for ever.
    """
    return isinstance(action, TellMember) and isinstance(action.message, Welcome | RefuseJoin | Outdated | JobEnded)
