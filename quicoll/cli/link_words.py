"""The links between the ranks of a view in words: a row for each, the worst one first, and the same for programs.

A link stands there twice, as the rank at each end sees it: what that one sends, and what is lost of that. Which one is
worse, `quicoll.membership.link_figures.badness` says. A figure that is not known is said to be so, and so is whose
links are not: a rank has told nothing yet in the first seconds of a view, or is of an older version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quicoll.cli.quantity_words import (
    duration_words,
    rate_words,
    round_trip_words,
    share_words,
    size_words,
)
from quicoll.membership.link_figures import badness, told_every_ns
from quicoll.observability.flight_record import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quicoll.membership.link_figures import LinkFigures
    from quicoll.membership.status import JobStatus, MemberStatus

__all__ = ["LESSER_COLUMNS", "LINK_COLUMNS", "LinkRow", "link_facts", "link_rows", "silent_members", "untold_links"]

LINK_COLUMNS = ("From", "To", "Sent", "Received", "Round trip", "Loss", "Resends", "Path takes", "In flight", "")
"""Heads of the columns of `LinkRow.cells`: two names, figures, and a note."""
LESSER_COLUMNS = ("Path takes", "In flight")
"""Those that are left out where there is little room."""
_NOT_KNOWN = "not known"
_CARRIERS = {"memory": "by memory", "lanes": "by lanes", "link": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """A link as it is shown, as the rank at one end sees it.

    Attributes:
        node: Of that rank.
        peer: The node at the other end.
        sent: Bytes a second.
        received: Likewise.
        rtt: The round trip.
        loss: The share of the packets sent that was lost.
        resends: Messages that were sent again.
        path_takes: Bytes a second, as congestion control has found.
        in_flight: Bytes that are not acknowledged.
        note: What else there is to say.
        troubled: Whether the peer is silent for longer than it should be.
    """

    node: str
    peer: str
    sent: str
    received: str
    rtt: str
    loss: str
    resends: str
    path_takes: str
    in_flight: str
    note: str
    troubled: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """What stands in the columns, in the order of LINK_COLUMNS."""
        node = f"! {self.node}" if self.troubled else self.node
        figures = self.sent, self.received, self.rtt, self.loss, self.resends, self.path_takes, self.in_flight
        return node, self.peer, *figures, self.note


def link_rows(status: JobStatus) -> tuple[LinkRow, ...]:
    """Return a row for each link that was told of, the worst one first."""
    return tuple(_row(status, member, peer, figures) for member, peer, figures in _worst_first(status))


def link_facts(status: JobStatus) -> list[dict[str, Any]]:
    """Return the same for programs: bytes, seconds, and shares of 0 to 1; what is not known is None."""
    found = []
    for member, peer, each in _worst_first(status):
        told = member.links
        found.append(
            {
                "node": member.node,
                "rank": member.rank,
                "peer": peer,
                "peer_rank": each.peer,
                "carrier": each.carrier,
                "doubted": each.doubted,
                "rtt_s": None if each.rtt_ns is None else each.rtt_ns / 1e9,
                "sent_rate": each.sent_rate,
                "received_rate": each.received_rate,
                "loss": each.loss,
                "sent_packets": each.sent_packets,
                "lost_packets": each.lost_packets,
                "resends": each.resends,
                "delivery_rate": each.delivery_rate,
                "bytes_in_flight": each.bytes_in_flight,
                "window_s": None if told is None else told.window_ns / 1e9,
                "ago_s": (member.links_ns or 0) / 1e9,
            }
        )
    return found


def untold_links(status: JobStatus) -> int:
    """Return how many links are known to be there that nothing is told of: none of them is among its rank's worst."""
    return sum(member.links.untold for member in status.members if member.links is not None)


def silent_members(status: JobStatus) -> list[str]:
    """Return the ranks of the installed view that have told nothing of their links, where it has others at all."""
    if status.stage != "installed" or status.world_size < 2:
        return []
    return [each.node for each in status.members if each.rank is not None and each.links is None]


def _worst_first(status: JobStatus) -> list[tuple[MemberStatus, str, LinkFigures]]:
    return sorted(_told(status), key=lambda each: badness(each[2]), reverse=True)


def _told(status: JobStatus) -> Iterator[tuple[MemberStatus, str, LinkFigures]]:
    nodes = {each.rank: each.node for each in status.members if each.rank is not None}
    for member in status.members:
        for figures in () if member.links is None else member.links.links:
            yield member, nodes.get(figures.peer, f"rank {figures.peer}"), figures


def _row(status: JobStatus, member: MemberStatus, peer: str, figures: LinkFigures) -> LinkRow:
    ago_ns = member.links_ns or 0
    notes = ["silent"] if figures.doubted else []
    if carrier := _CARRIERS[figures.carrier]:
        notes.append(carrier)
    if ago_ns > 3 * told_every_ns(status.world_size):
        notes.append(f"as of {duration_words(ago_ns)} ago")
    return LinkRow(
        node=printable(member.node),
        peer=printable(peer),
        sent=_NOT_KNOWN if figures.sent_rate is None else rate_words(figures.sent_rate),
        received=_NOT_KNOWN if figures.received_rate is None else rate_words(figures.received_rate),
        rtt=_NOT_KNOWN if figures.rtt_ns is None else round_trip_words(figures.rtt_ns),
        loss=_NOT_KNOWN if figures.loss is None else share_words(figures.loss),
        resends=str(figures.resends),
        path_takes=_NOT_KNOWN if figures.delivery_rate is None else rate_words(figures.delivery_rate),
        in_flight=size_words(figures.bytes_in_flight),
        note="; ".join(notes),
        troubled=figures.doubted,
    )
