"""What ranks send each other beside payloads: small messages, in order, exactly once.

quicoll.engine.calls says what those of a view mean, quicoll.engine.lessons what those of a lesson mean,
quicoll.engine.block_lessons what those of one about blocks mean, whose numbers are `BLOCK_LESSONS` and above,
quicoll.engine.neighbours what ranks of one host say before a view, quicoll.engine.late_stacks what they ask each other
before one is given up, quicoll.engine.lanes and quicoll.engine.lane_ways what they say of their lanes.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from quicoll.checks import MAX_LANES, MAX_MEMBERS
from quicoll.engine.given import SEAL_BYTES
from quicoll.errors import PeerError
from quicoll.plan.schedule import MAX_ANNOUNCED

__all__ = [
    "BLOCK_LESSONS",
    "MAX_ASKED",
    "MAX_NUMBER",
    "MAX_TOLD",
    "MOST_TAKEN",
    "PLACES",
    "Announce",
    "Ask",
    "AskBlocks",
    "AskStack",
    "BlockMessage",
    "Blocks",
    "Compared",
    "EndLesson",
    "Farewell",
    "LaneAt",
    "LaneMessage",
    "LaneShut",
    "LanesHere",
    "LanesTaken",
    "LessonMessage",
    "MeetingOutcome",
    "NearMessage",
    "PeerMessage",
    "StackTold",
    "Whereabouts",
    "decode_message",
    "encode_message",
    "size_in_memory",
]

_Signature = Annotated[str, msgspec.Meta(max_length=4096)]
_Short = Annotated[str, msgspec.Meta(max_length=256)]
_Counts = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
_Measured = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 + 2 * MAX_MEMBERS)]
_COST = 400  # bytes of an Announce with its three numbers, in the list or slot that holds it
_NUMBER_COST = 40  # bytes of a number in a tuple
MAX_NUMBER = (1 << 62) - 1  # of what is announced
MAX_ASKED = 48
"""Chunks that one question is about; they are bits of a number too."""
BLOCK_LESSONS = 1 << 60
"""The first number of lessons about blocks, above those of views."""
PLACES = 48
"""Places of blocks that one answer is about; they are bits of a number too."""
MAX_TOLD = 8192
"""Characters of the stacks of a rank, as others are told."""
MOST_TAKEN = 64
"""Messages that one word says to be taken."""
_Lane = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LANES)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Digests = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16 * MAX_ASKED)]


class Announce(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=1):
    """What a rank called as operation `seq` of `group`. counts: this rank's own sizes, where they may differ.

    measured: of its links, where the group agrees on its network by this operation; see `calls.measurements`. given:
    what this rank gives to the operation, sealed (quicoll.engine.given), where all that ranks give travels like this.
    """

    view_id: int
    group: int
    seq: int
    signature: _Signature
    counts: _Counts = ()
    measured: _Measured = ()
    given: Annotated[bytes, msgspec.Meta(max_length=MAX_ANNOUNCED + SEAL_BYTES)] = b""


class Farewell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=2):
    """A rank will leave once its peers need this view no more without it. done: the answer to it.

    next_step: of a rank whose work has ended, the step that it would begin next, as the coordinator counts. divided:
    whether it has been in a sub-group, or has done something with some of the ranks alone.
    """

    view_id: int
    done: bool = False
    next_step: int | None = None
    divided: bool = False


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=3):
    """Which chunks are not as these? number: of the question. digests: 16 bytes for each chunk from `first` on."""

    lesson: int
    number: int
    first: int
    digests: _Digests


class Compared(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=4):
    """The first `looked` chunks of the question were looked at; a bit of `changed` is set for each that follows."""

    lesson: int
    number: int
    looked: int
    changed: int


class EndLesson(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=5):
    """I ask no more; or I tell no more."""

    lesson: int


class AskBlocks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=6):
    """What has become another since the last question? made_of: a digest of what the places are."""

    lesson: int
    number: int
    made_of: _Digest


class Blocks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=7):
    """These places follow: a bit of `following` is set for each, from `first` on."""

    lesson: int
    number: int
    first: int
    following: int


class Whereabouts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=8):
    """Where this rank can be met by those of its host, before the view begins; see quicoll.local.meeting.

    host: what the ranks of a host have in common; "" where this one cannot be met, and `why` not. name: of its socket.
    secret: for who gets this.
    """

    view_id: int
    host: _Short = ""
    name: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    secret: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    why: _Short = ""


class MeetingOutcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=9):
    """Whether this rank has met all others of a view. Where all have, they share memory; else none does. why: not."""

    view_id: int
    met: bool
    why: _Short = ""


class AskStack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=10):
    """Where are you? An operation of this view will be late for want of your call."""

    view_id: int


class StackTold(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=11):
    """Here are my threads. "": it is not told."""

    view_id: int
    text: Annotated[str, msgspec.Meta(max_length=MAX_TOLD)] = ""


class LanesHere(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=12):
    """How many lanes this rank has in a view to come, and how long a message of theirs is at most."""

    view_id: int
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_LANES)] = 0
    largest: int = 0


class LaneAt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=13):
    """Here a lane of this rank is reached. mark: what the lane of who gets this has to show it."""

    view_id: int
    lane: _Lane
    host: _Short
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    mark: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class LanesTaken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=14):
    """What came by lanes with these turns is where it belongs."""

    view_id: int
    turns: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=MOST_TAKEN)]


class LaneShut(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=15):
    """Nothing more is taken here that comes by this lane, in this view. why: for people."""

    view_id: int
    lane: _Lane
    why: _Short = ""


LaneMessage: TypeAlias = LanesHere | LaneAt | LanesTaken | LaneShut
"""What ranks say of their lanes."""
NearMessage: TypeAlias = Whereabouts | MeetingOutcome
"""What ranks of one host send each other before a view begins."""
LessonMessage: TypeAlias = Ask | Compared | EndLesson
"""What a rank that learns a state and the one that has it send each other beside chunks."""
BlockMessage: TypeAlias = AskBlocks | Blocks | EndLesson
"""What a spare and a rank that owns blocks send each other beside these."""
PeerMessage: TypeAlias = (
    Announce | Farewell | LessonMessage | BlockMessage | NearMessage | AskStack | StackTold | LaneMessage
)
"""What ranks send each other beside payloads."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def encode_message(message: PeerMessage) -> bytes:
    """Return the bytes of a message, for `Link.send_app`."""
    return _encoder.encode(message)


def size_in_memory(announce: Announce) -> int:
    """Return about how many bytes of memory an announcement takes, at least what it takes."""
    text = 4 * len(announce.signature)  # of any characters
    return _COST + text + _NUMBER_COST * (len(announce.counts) + len(announce.measured)) + len(announce.given)


def decode_message(data: bytes, *, node: str) -> PeerMessage:
    """Read a peer's message.

    Args:
        data: Its bytes.
        node: The peer, for the error.
    Raises:
        PeerError: No rank of ours would send this.
    """
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"malformed announcement: {error}", node=node) from error
    numbers: tuple[int, ...]
    match message:
        case Announce():
            numbers = (message.view_id, message.group, message.seq, *message.counts, *message.measured)
        case Farewell() | Whereabouts() | MeetingOutcome() | AskStack() | StackTold():
            numbers = (message.view_id,)
        case Ask():
            numbers = (message.lesson, message.number, message.first, -(len(message.digests) % 16))
        case Compared():
            numbers = (message.lesson, message.number, message.looked, message.changed)
        case EndLesson():
            numbers = (message.lesson,)
        case AskBlocks():
            numbers = (message.lesson, message.number)
        case Blocks():
            numbers = (message.lesson, message.number, message.first, message.following)
        case LanesHere():
            numbers = (message.view_id, message.largest)
        case LanesTaken():
            numbers = (message.view_id, *message.turns)
        case LaneAt() | LaneShut():
            numbers = (message.view_id,)
    if min(numbers) < 0 or max(numbers) > MAX_NUMBER:
        raise PeerError("announcement out of bounds", node=node)
    return message
