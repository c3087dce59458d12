"""What a member says of its links to the other ranks: the figures, their bounds, and which link is worse than another.

A figure is of the last seconds, `window_ns` of what it is said in, or of the moment; one that is not known is None, and
of no packets sent no loss is known. They are for people: nothing is decided by them.

Bounds: a member tells of MOST_LINKS links at most, the worst ones; each takes a few numbers, all of them bounded. How
often it does follows from the number of ranks (`told_every_ns`), so that a coordinator hears fifty of them a second at
most, however many there are.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from quicoll.membership.view import MAX_INT, MAX_MEMBERS

__all__ = ["MOST_LINKS", "LinkCarrier", "LinkFigures", "MeasuredLinks", "badness", "told_every_ns"]

MOST_LINKS: Final = 16
"""All of them in a view of 17 ranks."""
_EVERY_NS: Final = 2_000_000_000
_EVERY_RANK_NS: Final = 20_000_000
_LEAST_PACKETS: Final = 1000

LinkCarrier: TypeAlias = Literal["link", "lanes", "memory"]
"""What carries long messages between two ranks: their link alone, lanes beside it, or the memory of their host."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]


class LinkFigures(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One link as the rank at one end of it sees it.

    peer: the rank at the other end. carrier: of long messages. rtt_ns: the round trip of heartbeats. sent_rate,
    received_rate: bytes of payloads a second, resends too, those by lanes too; not those through memory. sent_packets:
    of the link, that ask for an acknowledgement; lost_packets: of these. resends: messages that were sent again.
    delivery_rate: bytes a second that the path has taken while more was waiting. bytes_in_flight: not acknowledged now.
    doubted: whether the peer is silent for longer than it should be.
    """

    peer: _Rank
    carrier: LinkCarrier = "link"
    doubted: bool = False
    rtt_ns: _Number | None = None
    sent_rate: _Number | None = None
    received_rate: _Number | None = None
    sent_packets: _Number = 0
    lost_packets: _Number = 0
    resends: _Number = 0
    delivery_rate: _Number | None = None
    bytes_in_flight: _Number = 0

    @property
    def loss(self) -> float | None:
        """The share of the packets sent that was lost, 0 to 1; None where none was sent."""
        return min(self.lost_packets / self.sent_packets, 1.0) if self.sent_packets else None


_Links: TypeAlias = Annotated[tuple[LinkFigures, ...], msgspec.Meta(max_length=MOST_LINKS)]


class MeasuredLinks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A member's figures. window_ns: in which they were counted. links: the worst; untold: how many more there are."""

    window_ns: _Number
    links: _Links = ()
    untold: _Number = 0


def badness(figures: LinkFigures) -> tuple[bool, int, int, int]:
    """Return what orders links, the worst one having the largest.

    First whether the peer is doubted, then the loss in whole thousandths, then messages that were sent again, then the
    round trip. A loss counts as one of 1000 packets at least: a link that sends little does not come first for one.
    """
    thousandths = (1000 * figures.lost_packets + _LEAST_PACKETS // 2) // max(figures.sent_packets, _LEAST_PACKETS)
    return figures.doubted, min(thousandths, 1000), figures.resends, figures.rtt_ns or 0


def told_every_ns(world_size: int) -> int:
    """Return how often a member of a view of so many ranks tells of its links."""
    return max(_EVERY_NS, world_size * _EVERY_RANK_NS)
