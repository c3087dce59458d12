"""What crosses a link: the fixed header of a message, and the small control messages.

A message is one QUIC unidirectional stream: HEADER_SIZE bytes of header, then `length` bytes of payload, then FIN.
Control messages share the one bidirectional stream of a connection: a 4-byte length, then msgpack. A message of
INLINE_BYTES at most for whose end its sender does not wait is one of these (`InlineMessage`): a stream of its own costs
more than its bytes.

Two checksums travel in the header. `checksum` is xxh3-64 over the payload, made where the payload is born and
checked before anyone may read it; the AEAD of QUIC already covers the wire, this one covers the memory, copies and
code on both sides of it. The last eight bytes of the header are xxh3-64 over the others, for the same reason.

Every length that a peer names is compared with a bound of ours before memory is taken for it.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
import xxhash

from quicoll_transport.errors import ProtocolError

__all__ = [
    "CHANNEL_TAG_SIZE",
    "HEADER_SIZE",
    "INLINE_BYTES",
    "LIMIT64",
    "MAX_APP",
    "MAX_CHANNEL",
    "MAX_CONTROL",
    "MAX_LENGTH",
    "MAX_OFFERS",
    "MAX_PARTIALS",
    "MAX_RANGES",
    "MAX_REASON",
    "MAX_SIGHTED",
    "MESSAGE_COST",
    "TAG_SIZE",
    "Ack",
    "App",
    "Cancel",
    "Control",
    "Grant",
    "Header",
    "Hello",
    "InlineMessage",
    "Inquiry",
    "Nack",
    "Offer",
    "Ping",
    "Pong",
    "RefuseMessage",
    "Sighting",
    "channel_of",
    "channel_tag",
    "checksum",
    "is_tag",
]

VERSION = 1
TAG_SIZE = 24
CHANNEL_TAG_SIZE = 16  # so no tag of a caller can be one of a channel, in any table that is keyed by tags
MAX_CHANNEL = (1 << 32) - 1
HEADER_SIZE = 72
MAX_LENGTH = 1 << 48  # one message; far above any tensor, far below what overflows arithmetic elsewhere
MAX_CONTROL = 4 << 20  # one control message, encoded; a view of a thousand members takes more than 1 MiB
MAX_APP = MAX_CONTROL - 64  # one application message
MAX_RANGES = 1024  # receive ranges that one acknowledgement may list
MAX_PARTIALS = 64  # interrupted messages that a Hello lists; any further ones start again from their first byte
MAX_OFFERS = 16384  # offers that a sender lets wait; each costs the receiver about 300 bytes
MAX_REASON = 400  # characters of a refusal; it ends up in errors and logs
MAX_SIGHTED = 64  # characters of an address in a Sighting
INLINE_BYTES = 4096  # of payload
MESSAGE_COST = 256  # credit that an eager message takes beside its payload: what an empty one costs to hold

_HEADER = struct.Struct("!2sBBI24sQQQQ")
_CHANNEL_TAG = struct.Struct("!QQ")
_MAGIC = b"qc"
FLAG_EAGER = 1  # sent on the link's credit; otherwise the receiver granted it
FLAG_CHANNEL = 2  # the first CHANNEL_TAG_SIZE bytes of the tag field are a channel and a counter, the rest is zero
FLAG_VOID = 4  # takes the place of a channel's message that its sender withdrew; always empty


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of `data`, the checksum that a header carries."""
    return xxhash.xxh3_64_intdigest(data)


def channel_tag(channel: int, counter: int) -> bytes:
    """Return the tag of message `counter` of a channel: CHANNEL_TAG_SIZE bytes, which no caller's tag has."""
    return _CHANNEL_TAG.pack(channel, counter)


def channel_of(tag: bytes) -> tuple[int, int] | None:
    """(channel, counter) of a channel's tag; None for a caller's."""
    if len(tag) != CHANNEL_TAG_SIZE:
        return None
    channel, counter = _CHANNEL_TAG.unpack(tag)
    return channel, counter


class Header(msgspec.Struct, frozen=True):
    """The fixed header of a message.

    tag: 24 bytes that say which posted buffer it is for, opaque to the transport; or a channel's, see channel_tag.
    sequence: number of the message on its link, from 0; a resend carries the same one.
    attempt: 0 for the first sending, counts resends after a checksum failure or a reconnection.
    length, checksum: of the whole payload, in bytes, xxh3-64.
    offset: where in the payload the stream begins: the bytes before it were in place when a connection died.
    """

    tag: bytes
    sequence: int
    length: int
    checksum: int
    attempt: int = 0
    eager: bool = True
    offset: int = 0
    void: bool = False

    def encode(self) -> bytes:
        channel = len(self.tag) == CHANNEL_TAG_SIZE
        body = _HEADER.pack(
            _MAGIC,
            VERSION,
            FLAG_EAGER * self.eager | FLAG_CHANNEL * channel | FLAG_VOID * self.void,
            self.attempt,
            self.tag,
            self.sequence,
            self.length,
            self.checksum,
            self.offset,
        )
        return body + checksum(body).to_bytes(8, "big")

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Header:
        """Parse exactly HEADER_SIZE bytes; raises ProtocolError for anything that we would not have sent."""
        if len(data) != HEADER_SIZE:
            raise ProtocolError(f"message header of {len(data)} bytes, expected {HEADER_SIZE}")
        body = bytes(data[:-8])
        if int.from_bytes(data[-8:], "big") != checksum(body):
            raise ProtocolError("message header fails its checksum")
        magic, version, flags, attempt, tag, sequence, length, digest, offset = _HEADER.unpack(body)
        if magic != _MAGIC or version != VERSION:
            raise ProtocolError(f"message header of another protocol or version ({magic!r}, {version})")
        if flags & ~(FLAG_EAGER | FLAG_CHANNEL | FLAG_VOID):
            raise ProtocolError(f"message header with unknown flags {flags:#x}")
        if sequence >= LIMIT64:
            raise ProtocolError(f"message number {sequence} is out of range")
        if length > MAX_LENGTH:
            raise ProtocolError(f"message of {length} bytes is above the limit of {MAX_LENGTH}")
        if offset > length:
            raise ProtocolError(f"message of {length} bytes begins at {offset}")
        if flags & FLAG_CHANNEL:
            tag, padding = tag[:CHANNEL_TAG_SIZE], tag[CHANNEL_TAG_SIZE:]
            if any(padding) or not is_tag(tag):
                raise ProtocolError("message header with a malformed channel")
        if flags & FLAG_VOID and (length or not flags & FLAG_CHANNEL):
            raise ProtocolError("message header of a void message that is not empty, or of no channel")
        return cls(tag, sequence, length, digest, attempt, bool(flags & FLAG_EAGER), offset, bool(flags & FLAG_VOID))


def is_tag(tag: bytes) -> bool:
    channel = channel_of(tag)
    return len(tag) == TAG_SIZE if channel is None else channel[0] <= MAX_CHANNEL


LIMIT64 = 1 << 63
# A sequence below 2^63 leaves room for the end of its range, and for sums, in what msgpack can carry. A digest has all
# 64 bits; msgpack has no more. The decoder looks at these bounds itself, which costs next to nothing.
_Number = Annotated[int, msgspec.Meta(ge=0, le=LIMIT64 - 1)]
_Digest = Annotated[int, msgspec.Meta(ge=0)]


class _Control(msgspec.Struct, frozen=True, tag_field="t", array_like=True, forbid_unknown_fields=True):
    pass


class Hello(_Control, tag=1, frozen=True):
    """First on every connection, from both sides: who speaks and what has arrived so far, so that the link resumes.

    incarnation, link: this side's link identity; both only grow, the pair orders all links of a node.
    peer_incarnation, peer_link: the identity that this side believes the other has; 0, 0 for a first meeting.
    app: application messages received so far (all below). received: message sequences received so far, as
    half-open ranges. released: bytes of eager payload released in all. credit: eager bytes this side will hold.
    partial: (sequence, bytes in place from the first on) of interrupted messages, which continue from there.
    """

    incarnation: _Number
    link: _Number
    peer_incarnation: _Number
    peer_link: _Number
    app: _Number
    received: tuple[tuple[int, int], ...]
    released: _Number
    credit: _Number
    partial: tuple[tuple[int, int], ...] = ()


class Ping(_Control, tag=2, frozen=True):
    """A heartbeat; t_ns is the sender's clock, given back in the Pong."""

    t_ns: _Number


class Pong(_Control, tag=3, frozen=True):
    t_ns: _Number


class Ack(_Control, tag=4, frozen=True):
    """Messages below `upto` and in `also` have arrived and passed their checksum; application messages below `app`.

    released: eager bytes released since the link began (a running total, so that one lost update does no harm).
    """

    upto: _Number
    also: tuple[tuple[int, int], ...]
    app: _Number
    released: _Number


class Offer(_Control, tag=6, frozen=True):
    """A message that exceeds the credit waits for its buffer to be posted."""

    sequence: _Number
    tag: bytes
    length: _Number


class Grant(_Control, tag=7, frozen=True):
    """The offered message may come: its buffer is posted."""

    sequence: _Number


class Nack(_Control, tag=8, frozen=True):
    """The payload failed its checksum. `final`: the receiver gives up and both sides raise."""

    sequence: _Number
    attempt: _Number
    found: _Digest
    final: bool


class Cancel(_Control, tag=9, frozen=True):
    """The sender withdraws a message; `eager` bytes of credit that it had taken are free again."""

    sequence: _Number
    eager: _Number


class RefuseMessage(_Control, tag=10, frozen=True):
    """The receiver will never take this message."""

    sequence: _Number
    reason: str


class App(_Control, tag=11, frozen=True):
    """A small message of the layer above: reliable, in order, exactly once per link."""

    number: _Number
    data: bytes


class InlineMessage(_Control, tag=12, frozen=True):
    """A message with its payload, in place of a stream of its own. Its acknowledgement may come late."""

    header: bytes
    payload: bytes


class Inquiry(_Control, tag=13, frozen=True):
    """In place of Hello, from a side that wants no link: how does the other one see it? Answered by a Sighting.

    filling: of no meaning; it makes datagrams as long as the path is to carry.
    """

    filling: bytes


class Sighting(_Control, tag=14, frozen=True):
    """The answer to an Inquiry.

    host, port: where the inquiry came from, as this side sees it. wall_ns: this side's date, since 1970.
    """

    host: str
    port: _Number
    wall_ns: _Number


Control = (
    Hello | Ping | Pong | Ack | Offer | Grant | Nack | Cancel | RefuseMessage | App | InlineMessage | Inquiry | Sighting
)
