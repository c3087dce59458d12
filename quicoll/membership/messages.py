"""Messages between coordinator and members: typed, closed, bounded.

Each message is a tagged msgpack map with exactly the fields of its class; an unknown tag or field, a value out of its
bounds or a message above `MAX_MESSAGE` is refused as a whole. msgspec checks the declared length of an array or string
before it allocates, so a peer cannot make us take memory by claiming a size. No field can hold code: there is no pickle
anywhere below.

The shells carry every message exactly once and in order per link; after a link is lost the member sends `Join` again
on the next one, and nothing of the old link is ever delivered after it. The protocol needs no more than that.

    member -> coordinator    Join Confirm Decline Begin Vote Report Reached Learn Learned
                             AskToLeave Leave AskRelay Measured
    coordinator -> member    Standby Welcome Refuse Adopt Outdated Propose Install Decision Aborted Hold Probe Expect
                             Ended Dismiss MayLeave RelayAnswer

AskRelay and RelayAnswer are said to and by a relay, which the coordinator is or another process (relaying.py).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, overload

import msgspec

from quicoll.errors import LocalError, PeerError
from quicoll.membership.link_figures import MeasuredLinks  # noqa: TC001 - a field's type, which msgspec resolves
from quicoll.membership.view import (
    MAX_INT,
    MAX_MEMBERS,
    MAX_NAME,
    Incarnation,
    Member,
    MemberAddresses,
    NodeName,
    SeedValue,
    StepNumber,
    View,
    ViewId,
    WorldSize,
)

__all__ = [
    "COORDINATOR_NODE",
    "MAX_DIGEST",
    "MAX_GROUPS",
    "MAX_MESSAGE",
    "MAX_TEXT",
    "Aborted",
    "Adopt",
    "AskRelay",
    "AskToLeave",
    "BeginStep",
    "Confirm",
    "CoordinatorMessage",
    "Decide",
    "Decline",
    "Dismiss",
    "Expect",
    "FailureKind",
    "FromRelay",
    "Install",
    "JobEnded",
    "Join",
    "Learn",
    "Learned",
    "Leave",
    "MayLeave",
    "Measured",
    "MemberMessage",
    "Outdated",
    "Probe",
    "Propose",
    "Reached",
    "RefuseJoin",
    "RelayAnswer",
    "Report",
    "Standby",
    "ToRelay",
    "Vote",
    "Welcome",
    "Withhold",
    "clip",
    "decode",
    "departure",
    "encode",
]

MAX_MESSAGE: Final = 2 * 1024 * 1024
"""Bytes of the largest message: a view of 1024 members with four long addresses each is about 1.3 MiB."""
MAX_TEXT: Final = 512
MAX_DIGEST: Final = 64
MAX_GROUPS: Final = 256
"""Sub-groups of one rank whose results a vote can name."""

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Site = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_MaybeNode = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Nodes = Annotated[tuple[NodeName, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
FailureKind: TypeAlias = Literal["failed", "mismatch", "corrupted", "differs"]
"""Why a view ends: a failure of a member or a link; ranks that called different things; ranks or messages with
different bits; ranks that found by comparing digests that they hold, or have heard, different things. Callers get an
error of the corresponding class on every rank, whichever rank saw it first."""

COORDINATOR_NODE = "coordinator"
"""The coordinator's name in its certificate, unless another is given."""

_Losses = Annotated[tuple[tuple[NodeName, _Text], ...], msgspec.Meta(max_length=MAX_MEMBERS)]
_Digest = Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST)]
_GroupId = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
_Groups = Annotated[tuple[tuple[_GroupId, _Digest], ...], msgspec.Meta(max_length=MAX_GROUPS)]
_Duration = Annotated[int, msgspec.Meta(ge=1, le=10**15)]  # nanoseconds, up to the million seconds of a setting
_Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
_RankHint = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Join(_Message, frozen=True, tag="join"):
    """First message of every link: who I am and what I hold.

    world_size: None, or the size that the first view has to have. committed_step: the last step whose result I hold.
    doubt: (view_id, step) that I voted for without hearing the decision. lost_after_ns: my setting, which all members
    and the coordinator share; None says nothing of it. adopts: whether I take the coordinator's where it has another.
    seed: the job's, as I ask for it; None takes any.
    timeout_ns, hold_timeout_ns: my settings of these names, where I insist on them; None takes what the coordinator
    has. owns: as in Vote.
    """

    incarnation: Incarnation
    addresses: MemberAddresses = ()
    world_size: WorldSize | None = None
    rank_hint: _RankHint | None = None
    committed_step: StepNumber = 0
    doubt: tuple[ViewId, StepNumber] | None = None
    site: _Site = ""
    lost_after_ns: _Duration | None = None
    adopts: bool = False
    seed: SeedValue | None = None
    timeout_ns: _Duration | None = None
    hold_timeout_ns: _Duration | None = None
    owns: bool = False


class Confirm(_Message, frozen=True, tag="confirm"):
    """I act in no other view, and have a link to every member of this one."""

    view_id: ViewId


class Decline(_Message, frozen=True, tag="decline"):
    """I cannot take part in the proposed view; `unreachable` are the members I have no link to."""

    view_id: ViewId
    unreachable: _Nodes = ()
    reason: _Text = ""


class BeginStep(_Message, frozen=True, tag="begin"):
    """I am inside this step."""

    view_id: ViewId
    step: StepNumber


class Vote(_Message, frozen=True, tag="vote"):
    """ok: I can commit the step, and its result has this digest (of my choice of hash; b"" when none is kept).

    groups: (id, digest) of results that only the members of a sub-group have; those of one id have to be equal.
    owns: part of the job's state is mine, and perhaps nowhere else: I am to hand it over before I leave.
    """

    view_id: ViewId
    step: StepNumber
    ok: bool
    digest: _Digest = b""
    reason: _Text = ""
    culprit: _MaybeNode = ""
    groups: _Groups = ()
    owns: bool = False


class Report(_Message, frozen=True, tag="report"):
    """This view cannot go on: members were lost (node, cause), or a collective failed or was cancelled.

    blamed: members whose bits came corrupt, or who called something else, as `kind` says.
    """

    view_id: ViewId
    lost: _Losses = ()
    blamed: _Nodes = ()
    reason: _Text = ""
    culprit: _MaybeNode = ""
    kind: FailureKind = "failed"


class Reached(_Message, frozen=True, tag="reached"):
    """I have a link to each of the nodes that the probe of this number names."""

    number: _Number


class Learn(_Message, frozen=True, tag="learn"):
    """I step out of this view, between two steps, and learn its state from a member while it goes on."""

    view_id: ViewId


class Learned(_Message, frozen=True, tag="learned"):
    """I have learned as much as I could, after Learn: have me in views again."""


class AskToLeave(_Message, frozen=True, tag="ask_to_leave"):
    """I was asked to stop, have no step open, and leave as soon as nobody needs my state. MayLeave answers.

    owns: as in Vote. Then a view comes in which I hand over what is mine (View.parting), and no answer.
    """

    owns: bool = False


class Leave(_Message, frozen=True, tag="leave"):
    """I leave of my own will: at once, or after the decision of the step that I am inside.

    finished: the step at which my work ended as it should, as its user counts; None where it did not. committed_step:
    the last step whose result I hold, as the coordinator counts. parted: in this view, whose parting members have all
    handed over what was theirs.
    """

    reason: _Text = ""
    finished: StepNumber | None = None
    committed_step: StepNumber = 0
    parted: bool = False


class Measured(_Message, frozen=True, tag="measured"):
    """How my links to the other ranks of this view do, for people who look. Said every few seconds; nothing follows."""

    view_id: ViewId
    links: MeasuredLinks


class AskRelay(_Message, frozen=True, tag="ask_relay"):
    """Pass on what I send to this node, when it asks for me too. RelayAnswer answers."""

    peer: NodeName


class RelayAnswer(_Message, frozen=True, tag="relay"):
    """Answer to AskRelay. label: what stands before each datagram; b"" where it is refused, and the reason."""

    peer: NodeName
    label: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    reason: _Text = ""


class Welcome(_Message, frozen=True, tag="welcome"):
    """Answer to Join. doubt_committed: whether the step in doubt was committed, final; None when none was asked.

    waiting_for: why there is no view for the new candidate yet, "" when one follows at once. vote_timeout_ns: how long
    I wait for the last vote of a step. relay: who passes on datagrams between members that cannot reach each other:
    "" for me, "none" for nobody, or the address of a relay.
    """

    seed: SeedValue
    committed_step: StepNumber
    vote_timeout_ns: _Duration = 300 * 10**9
    doubt_committed: bool | None = None
    waiting_for: _Text = ""
    relay: _Text = ""


class Standby(_Message, frozen=True, tag="standby"):
    """Answer to Join, which I keep: another coordinator leads. Comes again until I lead, or this link ends.

    leader: its address, as far as I know; "" where I do not.
    """

    leader: _Text = ""


class RefuseJoin(_Message, frozen=True, tag="refuse"):
    """Answer to Join: no, and asking again the same way will not help."""

    reason: _Text


class Adopt(_Message, frozen=True, tag="adopt"):
    """Answer to a Join that adopts: take this setting, and join again over a link that was made with it."""

    lost_after_ns: _Duration


class Outdated(_Message, frozen=True, tag="outdated"):
    """Answer to Join: this incarnation is not above all that I know of your node; the highest of them is `latest`."""

    latest: Incarnation


class Propose(_Message, frozen=True, tag="propose"):
    """Stop acting in any earlier view, form links to all members, then Confirm or Decline."""

    view: View


class Install(_Message, frozen=True, tag="install"):
    """All members confirmed and the view is in the journal: act in it."""

    view_id: ViewId


class Decide(_Message, frozen=True, tag="decision"):
    """The step is committed on all, or on none; after the latter the view is over too.

    next_view: a proposal that follows at this boundary, so that nobody begins another step in the old view first.
    dismissal: why you leave the job at this boundary, as in Dismiss; "" where you do not.
    """

    view_id: ViewId
    step: StepNumber
    commit: bool
    cause: _Text = ""
    lost: _Nodes = ()
    culprit: _MaybeNode = ""
    kind: FailureKind = "failed"
    next_view: View | None = None
    dismissal: _Text = ""


class Aborted(_Message, frozen=True, tag="aborted"):
    """The view, proposed or installed, is over, and with it any step that is not decided."""

    view_id: ViewId
    cause: _Text = ""
    lost: _Nodes = ()
    culprit: _MaybeNode = ""
    kind: FailureKind = "failed"


class Withhold(_Message, frozen=True, tag="hold"):
    """There is no view for you now, and why; one is proposed as soon as there can be one."""

    cause: _Text


class Probe(_Message, frozen=True, tag="probe"):
    """You are left out of views: try to have a link to each of these, and say so when you have (Reached).

    number: of this probe; a later one takes its place. own: you, as I see you.
    """

    number: _Number
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    own: Member | None = None


class Expect(_Message, frozen=True, tag="expect"):
    """This node tries to have a link to you: one of you is behind NAT, so take your part. own: you.

    It was asked to (Probe), or both of you are to be in the view that is proposed, and its address is another by now.
    """

    member: Member
    own: Member


class JobEnded(_Message, frozen=True, tag="ended"):
    """The job is done: its ranks have ended at `step`, as their users count, and there is nothing to take part in."""

    step: StepNumber


class Dismiss(_Message, frozen=True, tag="dismiss"):
    """Leave the job, which goes on without you: an operator has asked for it. No step is open."""

    reason: _Text


class MayLeave(_Message, frozen=True, tag="may_leave"):
    """Answer to AskToLeave, as soon as you may go: whoever goes on does not need your state."""


MemberMessage: TypeAlias = (
    Join | Confirm | Decline | BeginStep | Vote | Report | Reached | Learn | Learned | AskToLeave | Leave | Measured
)
CoordinatorMessage: TypeAlias = (
    Standby
    | Welcome
    | RefuseJoin
    | Adopt
    | Outdated
    | Propose
    | Install
    | Decide
    | Aborted
    | Withhold
    | Probe
    | Expect
    | JobEnded
    | Dismiss
    | MayLeave
)
ToRelay: TypeAlias = MemberMessage | AskRelay
"""What a coordinator hears that is a relay too."""
FromRelay: TypeAlias = CoordinatorMessage | RelayAnswer

_encoder = msgspec.msgpack.Encoder()
_from_member: msgspec.msgpack.Decoder[ToRelay] = msgspec.msgpack.Decoder(ToRelay)
_from_coordinator: msgspec.msgpack.Decoder[FromRelay] = msgspec.msgpack.Decoder(FromRelay)


def encode(message: ToRelay | FromRelay) -> bytes:
    """Return the bytes of a message. Raises LocalError when the receiver would refuse them.

    msgspec does not check bounds when a value is built, only when it is decoded; decoding what we send costs a few
    microseconds and makes a broken bound our error, here, instead of the peer's.
    """
    try:
        data = _encoder.encode(message)
        if len(data) > MAX_MESSAGE:
            raise LocalError(f"a {type(message).__name__} of {len(data)} bytes is above {MAX_MESSAGE}")
        (_from_member if isinstance(message, ToRelay) else _from_coordinator).decode(data)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise LocalError(f"not a valid {type(message).__name__}: {error}") from error
    return data


@overload
def decode(data: bytes, *, sender: Literal["member"], node: str = "") -> ToRelay: ...
@overload
def decode(data: bytes, *, sender: Literal["coordinator"], node: str = "") -> FromRelay: ...
def decode(data: bytes, *, sender: Literal["member", "coordinator"], node: str = "") -> ToRelay | FromRelay:
    """Return the message in `data`, which came from a `sender` named `node`. Raises PeerError when it is malformed."""
    if len(data) > MAX_MESSAGE:
        raise PeerError(f"a membership message of {len(data)} bytes is above {MAX_MESSAGE}", node=node)
    try:
        return _from_member.decode(data) if sender == "member" else _from_coordinator.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # the text may quote the peer's bytes (an unknown field's name), so it is as bounded as any other text of a peer
        raise PeerError(clip(f"malformed membership message from a {sender}: {error}"), node=node) from error


def departure(reason: str) -> str:
    """Return in words that a node leaves of its own will, which is no failure. reason: as in Leave."""
    if reason == "done":
        return "has finished and left the job"
    return f"left the job: {reason}" if reason else "left the job"


def clip(text: str) -> str:
    """Cut `text` to MAX_TEXT characters; causes are for people, and a long one must not break the message."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
