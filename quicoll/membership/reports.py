"""What a coordinator's process adds to its core's picture of the job: links, words, and how its journal does.

The core knows who is in which view; the process knows how the link to each node is (its round trip, since when nothing
came over it), how long the journal's call has been under way, and how events read. Everything here reads, at one
moment, on the loop of the service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from quicoll.membership.notes import emit_note
from quicoll.membership.status import EventStatus, JobStatus, MemberStatus, shortened
from quicoll.observability.sentences import sentence
from quicoll_transport.net.addresses import format_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quicoll.membership.coordinator.actions import MembershipEvent
    from quicoll.membership.term import Term
    from quicoll_transport.endpoint import Link

__all__ = ["report_of"]


def report_of(term: Term, link_of: Callable[[str], Link | None], *, token: int, links: bool) -> JobStatus:
    """Return how the job is, as far as the coordinator that leads it knows.

    Args:
        term: Its leadership.
        link_of: The link to a node that has joined over it; None where there is none.
        token: Of its lease; 0 where it leads alone.
        links: Whether what members say of their links is part of it.
    """
    now_ns = term.now_ns()
    status = term.core.status(now_ns=now_ns, links=links)
    return msgspec.structs.replace(
        status,
        token=token,
        journal_ns=term.journal_ns,
        members=tuple(_with_link(each, link_of(each.node)) for each in status.members),
        events=_told(term.core.events, now_ns),
    )


def _with_link(member: MemberStatus, link: Link | None) -> MemberStatus:
    if link is None or link.ended or member.state in ("lost", "missing", "gone"):
        return member
    address = link.proved_address
    return msgspec.structs.replace(
        member,
        rtt_ns=link.rtt_ns,
        silent_ns=round(link.silent_for * 1e9),
        doubted=link.suspect,
        resends=link.stats.resends,
        address="" if address is None else format_address((str(address[0]), int(address[1]))),
    )


def _told(events: Sequence[MembershipEvent], now_ns: int) -> tuple[EventStatus, ...]:
    words = _Words()
    found = []
    for event in reversed(events):
        emit_note(event, words)
        ago_ns = max(0, now_ns - event.now_ns)
        found.append(EventStatus(ago_ns=ago_ns, kind=words.kind, said=shortened(words.said)))
    return tuple(found)


class _Words:
    """Takes the event that is emitted, in words."""

    kind = ""
    said = ""

    def emit(self, kind: str, **fields: Any) -> None:
        if "cause" in fields and "peer" in fields:  # whom it is about stands before it
            fields["cause"] = fields["cause"].removeprefix(f"{fields['peer']} was lost: ")
        self.kind, self.said = kind, sentence(kind, fields)
