"""What a coordinator says of its job to somebody who looks: the message, its bounds, and what it means in one word.

It is one picture of one moment, made from what the coordinator knows anyway; nothing is asked of a rank for it, nothing
is decided by it, and nothing of it is kept. Durations, not dates: the clocks of two hosts are not compared.

What it means (`condition_of`), for whoever has to decide whether to get up:

    done      the job is done: its ranks have ended
    at work   a view is installed, and steps come
    idle      a view is installed and no step is open: the ranks do something of their own between two steps
    forming   there is no view, and one is being formed; or the first one waits for nodes that have a minute to come
    held      there is no view, and there can be none as things are; `held` says why
    stalled   a step has been open, a view been formed, or the journal not answered, for longer than is usual

"Usual" goes by the job's own steps: ten times the median of its last ones, half a minute at least, and five minutes
where none is known (the first step compiles, reads and loads).

Bounds: a name is one of membership and a text has 200 characters. There are no more members than a job may have, no
more lost nodes and events than the chronicle keeps, of all links no more than `MAX_STATUS_LINKS`, and in bytes it is
`MAX_STATUS` at most: where that is not enough, links go first, then what is said of members, those that are at work as
they should be, events, and all others; `unlisted` says how many.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from quicoll.membership.link_figures import MeasuredLinks  # noqa: TC001 - a field's type, which msgspec resolves
from quicoll.membership.view import MAX_INT, MAX_MEMBERS, MAX_NAME, NodeName, StepNumber, ViewId, WorldSize

__all__ = [
    "MAX_STATUS",
    "MAX_STATUS_EVENTS",
    "MAX_STATUS_LINKS",
    "MAX_STATUS_NODES",
    "EventStatus",
    "JobCondition",
    "JobStatus",
    "MemberState",
    "MemberStatus",
    "condition_of",
    "fitting",
    "is_late",
    "usual_patience_ns",
]

MAX_STATUS: Final = 256 * 1024
"""Bytes of the largest one: 1024 members take about 120 KiB."""
MAX_STATUS_EVENTS: Final = 32
MAX_STATUS_NODES: Final = MAX_MEMBERS + 64
MAX_STATUS_LINKS: Final = MAX_MEMBERS
"""Links of all members together: each one's worst, the same number of each."""
_MAX_SAID: Final = 200

_SECOND: Final = 1_000_000_000
_LEAST_PATIENCE_NS: Final = 30 * _SECOND
_FIRST_PATIENCE_NS: Final = 300 * _SECOND
_USUAL_STEPS: Final = 10
_LATE_NS: Final = _SECOND
_GATHER_NS: Final = 60 * _SECOND
"""For so long a first view may wait for its nodes: as long as these do (join_timeout), where nobody says otherwise."""
_WAS_HERE: Final = ("lost", "missing", "gone", "done")
"""States of nodes that are not here and have been: they are not on their way to a first view."""

_Said = Annotated[str, msgspec.Meta(max_length=_MAX_SAID)]
_Place = Annotated[str, msgspec.Meta(max_length=MAX_NAME + 6)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]

MemberState: TypeAlias = Literal[
    "at work",
    "outside",
    "computing",
    "voted",
    "asked",
    "confirmed",
    "declined",
    "joining",
    "standing by",
    "spare",
    "learning",
    "left out",
    "leaving",
    "lost",
    "missing",
    "gone",
    "done",
]
"""How a node is.

    at work      in the view, no step is open
    outside      a step is open, and it is not known to be inside
    computing    inside the open step, without a vote
    voted        it waits for the others
    asked        in the proposed view: it has not answered
    confirmed, declined    likewise: it has
    joining      connected, and in no view yet
    standing by  all places are taken
    spare        likewise, and it is kept warm, or is shown to the others for that
    learning     it learns the state beside the steps of the others
    left out     of views, for a while; `why` says for what
    leaving      it goes at the next boundary, as it or an operator wishes
    lost         it was here, and its link ended
    missing      of the last view, and not heard of since this coordinator began
    gone         it left of its own will, or as it was told
    done         its work has ended as it should
"""

JobCondition: TypeAlias = Literal["at work", "idle", "forming", "held", "stalled", "done"]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class MemberStatus(_Part, frozen=True):
    """One node.

    rank: in the view that is installed or proposed. step: the last one whose result it holds. for_ns: since it has
    joined, or was lost; None where that is not known. out_ns: for how long it is left out still. why: for people.
    Of its link to the coordinator, while there is one: rtt_ns, the round trip; silent_ns, since when nothing was heard;
    doubted, whether that is longer than it should be; resends, messages that were sent again; address, where its
    datagrams come from.
    Of its links to the other ranks, where somebody asks for them: links, what it said last, of the view that is
    installed; links_ns, how long ago. None where it has said nothing yet.
    """

    node: NodeName
    state: MemberState
    rank: _Number | None = None
    step: StepNumber = 0
    for_ns: _Number | None = None
    out_ns: _Number = 0
    why: _Said = ""
    rtt_ns: _Number | None = None
    silent_ns: _Number | None = None
    doubted: bool = False
    resends: _Number = 0
    address: _Place = ""
    links: MeasuredLinks | None = None
    links_ns: _Number | None = None


class EventStatus(_Part, frozen=True):
    """Something that has happened. ago_ns: how long ago. kind: as in `quicoll.Event`. said: the event in a sentence."""

    ago_ns: _Number
    kind: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    said: _Said


class JobStatus(_Part, frozen=True, tag="status"):
    """How the job is.

    Of the coordinator: led_ns, for how long it has led; token, of its lease, 0 where it leads alone; journal_ns, for
    how long its journal has not answered, 0 where nothing is asked of it.

    Of the view: stage, as the coordinator has it; view_id, of the one installed or proposed, 0 without one; stage_ns,
    for how long that has been so; world_size, ranks of it, or those that the first view waits for; wanted, ranks that
    an operator has asked for; waiting_for, what is missing for that; held, why there can be no view, "" where there is
    or may be one; without_ns, for how long there was none.

    Of the steps: committed_step; committed_ns, since its commit, None where this coordinator has seen none; step_ns,
    the median time from one commit to the next; recent, of commits and of the time in which they were; open_step, 0 at
    a boundary; open_ns, since it is known to be open; voting_ns, since its first vote, None before; votes.

    finished: nodes whose work has ended; done: whether the job has, at final_step. members: nodes that are here, that
    are missed, and that were lost, ranks first; unlisted: how many more there are. events: the newest first.
    """

    led_ns: _Number
    stage: Literal["forming", "proposed", "installed"]
    world_size: WorldSize
    token: _Number = 0
    journal_ns: _Number = 0
    view_id: ViewId = 0
    stage_ns: _Number = 0
    min_world_size: WorldSize = 1
    wanted: WorldSize | None = None
    waiting_for: _Said = ""
    held: _Said = ""
    without_ns: _Number = 0
    committed_step: StepNumber = 0
    committed_ns: _Number | None = None
    step_ns: _Number = 0
    recent: tuple[_Number, _Number] = (0, 0)
    open_step: StepNumber = 0
    open_ns: _Number = 0
    voting_ns: _Number | None = None
    votes: _Number = 0
    finished: _Number = 0
    done: bool = False
    final_step: StepNumber = 0
    members: Annotated[tuple[MemberStatus, ...], msgspec.Meta(max_length=MAX_STATUS_NODES)] = ()
    unlisted: _Number = 0
    events: Annotated[tuple[EventStatus, ...], msgspec.Meta(max_length=MAX_STATUS_EVENTS)] = ()


def shortened(text: str) -> str:
    """Cut a text to what a status may say of one thing."""
    return text if len(text) <= _MAX_SAID else text[: _MAX_SAID - 3] + "..."


def usual_patience_ns(status: JobStatus) -> int:
    """Return how long a step of this job may be open until that is unusual."""
    if not status.step_ns:
        return _FIRST_PATIENCE_NS
    return max(_LEAST_PATIENCE_NS, _USUAL_STEPS * status.step_ns)


def condition_of(status: JobStatus, *, patience_ns: int | None = None) -> JobCondition:
    """Return how the job is, in one word; see the module's head.

    Args:
        status: What the coordinator says.
        patience_ns: What counts as stalled; None goes by the job's own steps.
    """
    patience = usual_patience_ns(status) if patience_ns is None else patience_ns
    if status.done:
        return "done"
    if status.journal_ns > patience:
        return "stalled"
    if status.stage == "installed":
        if not status.open_step:
            return "idle" if _rests(status) else "at work"
        return "stalled" if status.open_ns > patience else "at work"
    if status.held:
        return "forming" if _gathers(status) else "held"
    return "stalled" if status.without_ns > patience else "forming"


def is_late(status: JobStatus, member: MemberStatus) -> bool:
    """Return whether others wait for this member: it has no vote, or has not begun, for longer than they differ.

    Args:
        status: What the coordinator says.
        member: One of its members.
    """
    differ_ns = max(_LATE_NS, 2 * status.step_ns)
    if status.voting_ns is not None:
        return member.state in ("outside", "computing") and status.voting_ns > differ_ns
    return member.state == "outside" and status.open_ns > differ_ns


def fitting(status: JobStatus, *, most: int = MAX_STATUS) -> bytes:
    """Return the bytes of a status, with less in it where they would be more than `most`.

    Args:
        status: What the coordinator says.
        most: Bytes.
    """
    data = _encoder.encode(status)
    for less in ({"links": None, "links_ns": None}, {"why": "", "address": ""}):
        if len(data) <= most:
            return data
        members = tuple(msgspec.structs.replace(each, **less) for each in status.members)
        status = msgspec.structs.replace(status, members=members)
        data = _encoder.encode(status)
    while len(data := _encoder.encode(status)) > most and (status.members or status.events):
        usual = [at for at, each in enumerate(status.members) if each.state in ("at work", "voted")]
        if not usual and status.events:
            status = msgspec.structs.replace(status, events=())
            continue
        # The last of those that are as they should be, a quarter of them at a time; where none is left, of all.
        dropped = usual or list(range(len(status.members)))
        gone = frozenset(dropped[-max(1, len(dropped) // 4) :])
        kept = tuple(each for at, each in enumerate(status.members) if at not in gone)
        status = msgspec.structs.replace(status, members=kept, unlisted=status.unlisted + len(gone))
    return data


def _gathers(status: JobStatus) -> bool:
    """Whether the nodes of a first view are still on their way: none was ever lost, and they have had little time."""
    return status.without_ns <= _GATHER_NS and not any(each.state in _WAS_HERE for each in status.members)


def _rests(status: JobStatus) -> bool:
    """Whether no step has come for so long that the ranks are not between two of them."""
    since = status.stage_ns if status.committed_ns is None else min(status.stage_ns, status.committed_ns)
    return since > max(_LATE_NS, 2 * status.step_ns)


_encoder = msgspec.msgpack.Encoder()
