"""What an engine and its lane tell each other: orders go to the lane, reports come back, each in order and once.

The two are of one program and trust each other; sizes are bounded all the same by what a message of their socket can
carry. Payloads are in shared memory (quicoll.lanes.memory), and only their places are named here.

A use is a place with what is done to it, under a number that none before had. The lane answers each `LaneSend`, each
`LaneReceive` with one `LaneOver`, also where it cannot be done or was cancelled, and touches that place no more then.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "DenyLane",
    "JoinLane",
    "LaneApart",
    "LaneCancel",
    "LaneDeadlines",
    "LaneFailed",
    "LaneIncarnation",
    "LaneOpened",
    "LaneOrder",
    "LaneOver",
    "LanePaired",
    "LanePing",
    "LanePong",
    "LaneReceive",
    "LaneReport",
    "LaneSend",
    "LaneSettings",
    "LaneView",
    "OpenLane",
    "PartLanes",
    "RenewLane",
    "Shown",
    "decode_order",
    "decode_report",
    "encode_told",
]


class LaneSettings(msgspec.Struct, frozen=True, array_like=True):
    """What a lane is opened with, beside the credentials. host: at which it listens. largest: bytes of a slot; slots:
    for each direction. denied: fingerprints of certificates that it shuts out."""

    host: str
    incarnation: int
    lost_ns: int
    connect_ns: int
    congestion: str
    parity: str
    largest: int
    slots: int
    denied: tuple[str, ...]


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """certificates: own, chain, then how many of them are the chain's is `chained`, then who is trusted; DER. key:
    PKCS#8, DER."""

    certificates: tuple[bytes, ...]
    chained: int
    key: bytes

    def __repr__(self) -> str:
        return f"<Shown {len(self.certificates)} certificates>"  # never the key


class OpenLane(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=1):
    """The first order of all: open an endpoint. parent: the engine's process. shown: the rank's credentials."""

    parent: int
    settings: LaneSettings
    shown: Shown


class RenewLane(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=2):
    """Show another certificate from now on."""

    shown: Shown


class DenyLane(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=3):
    """Shut a certificate out."""

    fingerprint: str


class LaneView(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=4):
    """A view begins: all of the one before is over, and so are links to nodes that are not among these."""

    view_id: int
    nodes: tuple[str, ...]


class JoinLane(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=5):
    """Join with the lane of a node, in the view that was gathered for last. shows: what to show it; expects: what it
    has to show. Both were told over the engines' link."""

    view_id: int
    node: str
    incarnation: int
    host: str
    port: int
    shows: bytes
    expects: bytes
    dials: bool


class PartLanes(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=6):
    """Nothing more goes to or comes from a node in this view."""

    view_id: int
    node: str


class LaneSend(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=7):
    """Send what stands in an outgoing slot; `number` names it to the receiver too."""

    number: int
    view_id: int
    node: str
    slot: int
    nbytes: int


class LaneReceive(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=8):
    """Receive into an incoming slot what the peer has sent under its number `sent`."""

    number: int
    view_id: int
    node: str
    sent: int
    slot: int
    nbytes: int


class LaneCancel(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=9):
    """Nobody waits for this use any more."""

    number: int


class LaneIncarnation(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=11):
    """The node goes on as a later process: so do its lanes."""

    incarnation: int


class LaneDeadlines(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=12):
    """Make links with other deadlines."""

    lost_ns: int
    connect_ns: int


class LanePing(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=10):
    """Are you there?"""


class LaneOpened(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=20):
    """Here others reach this lane."""

    host: str
    port: int


class LaneFailed(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=21):
    """There is no lane: why. The last report of all."""

    why: str


class LanePaired(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=22):
    """The lane of this node has shown what it had to."""

    view_id: int
    node: str


class LaneApart(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=23):
    """Nothing goes to or comes from this node in this view any more: why."""

    view_id: int
    node: str
    why: str


class LaneOver(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=24):
    """A use is over. well: it was sent, or received, and its checksum held."""

    number: int
    well: bool


class LanePong(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag=25):
    """The answer to a Ping."""


LaneOrder: TypeAlias = (
    OpenLane
    | RenewLane
    | DenyLane
    | LaneIncarnation
    | LaneDeadlines
    | LaneView
    | JoinLane
    | PartLanes
    | LaneSend
    | LaneReceive
    | LaneCancel
    | LanePing
)
"""What an engine tells its lane."""
LaneReport: TypeAlias = LaneOpened | LaneFailed | LanePaired | LaneApart | LaneOver | LanePong
"""What a lane tells its engine."""

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[LaneOrder] = msgspec.msgpack.Decoder(LaneOrder)
_reports: msgspec.msgpack.Decoder[LaneReport] = msgspec.msgpack.Decoder(LaneReport)


def encode_told(message: LaneOrder | LaneReport) -> bytes:
    """Return its bytes."""
    return _encoder.encode(message)


def decode_order(data: bytes) -> LaneOrder:
    """Return an order. Raises msgspec.MsgspecError where it is none."""
    return _orders.decode(data)


def decode_report(data: bytes) -> LaneReport:
    """Return a report. Raises msgspec.MsgspecError where it is none."""
    return _reports.decode(data)
