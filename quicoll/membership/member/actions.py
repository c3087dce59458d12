"""Actions that a member's core asks its shell to carry out.

Actions are carried out one by one, in order. `Deactivate` is complete when nothing of its view can act any more: no
collective runs, none can begin, no buffer of the caller can change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from quicoll.membership.messages import FailureKind, MemberMessage
    from quicoll.membership.view import Member, View

__all__ = [
    "Activate",
    "AdoptLostAfter",
    "Deactivate",
    "Decided",
    "Dismissal",
    "ExpectPeer",
    "FormLinks",
    "FreeToLeave",
    "Held",
    "JobOver",
    "LedElsewhere",
    "MemberAction",
    "ProbePaths",
    "Reconnect",
    "Refused",
    "Resumed",
    "StartOver",
    "TellCoordinator",
]


@dataclass(frozen=True, slots=True)
class TellCoordinator:
    """Send to the coordinator."""

    message: MemberMessage


@dataclass(frozen=True, slots=True)
class FormLinks:
    """Get a link to every other member, then call `links_ready` or `links_failed`.

    Messages of this view may come before `Activate`: another member may hear of the installation first. Keep them.
    """

    view: View


@dataclass(frozen=True, slots=True)
class Activate:
    """The view is installed: collectives and steps may begin."""

    view: View


@dataclass(frozen=True, slots=True)
class Deactivate:
    """The view is over, active or not. Every operation of it has to have ended before the next action is carried out.

    partitioned: the coordinator cannot be reached, so this node may be on the wrong side of a partition.
    """

    view_id: int
    cause: str
    lost: tuple[str, ...] = ()
    culprit: str = ""
    partitioned: bool = False
    kind: FailureKind = "failed"


@dataclass(frozen=True, slots=True)
class Decided:
    """The step was committed on all members, or on none.

    Comes once for every step that was begun, after the answer of the journal where that is needed; only a step in doubt
    when `Refused` ends everything stays open.
    """

    view_id: int
    step: int
    commit: bool
    cause: str = ""
    lost: tuple[str, ...] = ()
    culprit: str = ""
    kind: FailureKind = "failed"


@dataclass(frozen=True, slots=True)
class Refused:
    """The coordinator refuses this node, or breaks the protocol. Nothing follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """No progress is possible now, and why; until `Resumed`. Comes again when the reason changes."""

    cause: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """A view is about to be activated."""


@dataclass(frozen=True, slots=True)
class Reconnect:
    """An answer that the coordinator owes did not come: close the link and dial again."""

    cause: str


@dataclass(frozen=True, slots=True)
class LedElsewhere:
    """This coordinator stands by, and another leads: dial that one, where it can be reached; else stay.

    leader: its address, "" where it is not known.
    """

    leader: str


@dataclass(frozen=True, slots=True)
class AdoptLostAfter:
    """Take this setting from the coordinator: close all links, which were made with another one, and dial again."""

    lost_after_ns: int


@dataclass(frozen=True, slots=True)
class StartOver:
    """A later process of this node is known, or was, and this one was never admitted: go on as this incarnation.

    Close all links, which were made as the one before, and dial the coordinator again.
    """

    incarnation: int


@dataclass(frozen=True, slots=True)
class ProbePaths:
    """This node is left out of views: have a link to each of these, however long it takes, then call `reached`.

    Takes the place of any probe before; ends with the next `FormLinks`, and with the link to the coordinator. own: this
    node, as the coordinator sees it; None where that was not said.
    """

    number: int
    members: tuple[Member, ...]
    own: Member | None = None


@dataclass(frozen=True, slots=True)
class ExpectPeer:
    """A node that is left out of views tries to have a link to this one: take this side's part in making it.

    own: this node, as the coordinator sees it.
    """

    member: Member
    own: Member


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job is done: the others have ended at `step`, as they count. Nothing follows."""

    step: int


@dataclass(frozen=True, slots=True)
class Dismissal:
    """This node has left the job, which goes on without it: an operator has asked for it. Nothing follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class FreeToLeave:
    """This node, which was asked to stop, may leave: nobody needs its state."""


MemberAction: TypeAlias = (
    TellCoordinator
    | FormLinks
    | Activate
    | Deactivate
    | Decided
    | Refused
    | Held
    | Resumed
    | Reconnect
    | LedElsewhere
    | AdoptLostAfter
    | StartOver
    | ProbePaths
    | ExpectPeer
    | JobOver
    | Dismissal
    | FreeToLeave
)
