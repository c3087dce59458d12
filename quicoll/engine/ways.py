"""The ways from one rank to another, and which of the two dials.

A rank announces one address, which is its own or one that leads to it (`advertise`). Behind NAT without that, others
cannot send to it: its router passes in only what answers something. The coordinator sees where its datagrams come from
(`Member.seen_at`), and tells all ranks with the view. Coordinator and peers are reached from one socket, so where the
router maps a socket to one port whatever the destination (RFC 4787: endpoint-independent), peers find the rank there.

    neither is behind NAT     the lesser name dials what is announced
    one of them is            that one dials; nothing has to be opened for an answer
    both are                  the lesser name dials, at each address in turn: what is announced (they may be behind the
                              same router), what the coordinator sees, the relay. The other one opens: it sends a byte
                              to where the coordinator sees the one that dials, and its router takes what comes from
                              there for an answer from then on

Both sides begin when they hear of the view, and compute the same from it. Openers go out at once and again, ever more
seldom, for as long as the link is being made: `OPENERS_S`. One may be lost, or come before the other side's router lets
anything in; it needs nobody to get it, only to have left.

Invariants: an opener goes to an address that the coordinator named for a member of a view or a probe, and nowhere else;
at most len(OPENERS_S) of them for each link that is made, of one byte. A link is made by its deadline or lost, whatever
the routers do.

Failure cases. A router that maps by destination (symmetric) gives another port to peers than the coordinator sees: an
opener goes out from the wrong port, and what is dialled is let in by nobody; the relay is left. A router that loses its
mappings takes the links with it: they are lost by silence, the view ends, and the next one has what the coordinator
sees by then. A coordinator on the same side of a router as a rank sees the rank's own address, which says nothing to
others: they reach it by the relay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll.membership.view import Member
    from quicoll_transport.net.addresses import Address

__all__ = ["OPENERS_S", "behind_nat", "dials", "opened_address", "own_addresses"]

OPENERS_S = (0.0, 0.1, 0.3, 0.7, 1.5, 3.0)
"""When an opener goes out, in seconds after a link is asked for."""


def behind_nat(one: Member | None, other: Member) -> bool:
    """Return whether the coordinator sees either of them elsewhere than it has announced. one: None, nothing known."""
    return other.seen_at is not None or (one is not None and one.seen_at is not None)


def dials(own: Member, other: Member) -> bool:
    """Return whether `own` dials the other one, and not the other way round."""
    if (own.seen_at is None) is not (other.seen_at is None):
        return own.seen_at is not None
    return own.node < other.node


def own_addresses(member: Member) -> list[Address]:
    """Return where a member is dialled without help, best first."""
    seen = () if member.seen_at is None else (member.seen_at,)
    return [(host, port) for host, port in (*member.addresses, *seen)]


def opened_address(own: Member | None, other: Member) -> Address | None:
    """Return where openers go before the other one dials; None: nothing has to be opened.

    Args:
        own: This rank, as the coordinator sees it; None where it is not known to be behind NAT.
        other: The one that dials.
    """
    if own is None or own.seen_at is None:
        return None
    return other.seen_at or (other.addresses[0] if other.addresses else None)
