"""The ways from one rank to another, and which of the two dials.

A rank announces one address, which is its own or one that leads to it (`advertise`). Behind NAT without that, others
cannot send to it: its router passes in only what answers something. The coordinator sees where its datagrams come from
(`Member.seen_at`), and tells all ranks with the view. Coordinator and peers are reached from one socket, so where the
router maps a socket to one port whatever the destination (RFC 4787: endpoint-independent), peers find the rank there.

    neither is behind NAT     the lesser name dials what is announced, and the other one opens where that takes long
    one of them is            that one dials first, and the other one opens
    both are                  the lesser name dials first, and the other one opens

Who dials tries each address in turn: what is announced (they may be behind the same router), what the coordinator sees,
the relay. Who opens sends a byte to where the coordinator sees the other one: its own router or firewall takes what
comes from there for an answer from then on. Openers go out at once and again, ever more seldom (`OPENERS_S`). One may
be lost, or come before the other side's router lets anything in; it needs nobody to get it, only to have left. Where
there is no link `DIALS_TOO_S` later, who has opened dials as well.

A firewall that translates nothing, in front of a rank: the coordinator sees what is announced, so nothing tells of it.
It passes what answers something, as a router does. So where neither of two is behind NAT, who is dialled opens as well,
but not at once: from `OPENERS_S[LATE_OPENER]` on, by when most links are UP, and nothing is sent for those. It does not
dial: both are seen where they send from, so the dialler's own firewall has let the answers in since it began.

What a pair that makes a link is in, and what leads on:

    asked       both know where the other one is, by a view or a probe, and begin; they compute the same from it
    one dials   and the other one opens. If the dialler's packets come from where it is seen, they pass: UP
    both dial   each sends to where it sees the other one in each of its rounds. Whichever begins later is let in by
                what the other one's router remembers of that: UP
    UP          by the connection that was answered first (endpoint.core.admission: who dialled it is asked only where
                both were answered)
    firewalls   nobody is behind NAT: one dials, and the other one opens late. The dialler's first packet after that
                is let in: UP
    late        not UP by the link's deadline: lost here. A view fails and says why; a probe goes on, and the
                coordinator has the other side begin again (membership.coordinator.probes.AGAIN_NS)
    moved       a router has given one of the two another port. The coordinator sees it as soon as that one's next
                heartbeat is answered, and tells who is making a link to it: asked, anew. Links that were UP fall silent
                and are lost, their view ends, and the next one has the new address

Why it ends in UP, where the two routers allow for it at all (quicoll.sim.translators says which do; all kinds are held
to it by tests/sim/test_nat.py). Each of the two sends to where it sees the other one: who dials first in each of its
rounds, and the other one as it opens and then in each of its rounds as well. Let X dial Y. Its packets reach Y's router
if that takes for Y what comes there, from whoever it is: unless it maps by destination (symmetric). They pass its
filter if it has none; or if it goes by hosts, and Y has sent to X's host; or if it goes by ports, and Y has sent to the
port that X's packets come from, which is the one where X is seen unless X's router maps by destination. So

    neither router maps by destination    after Y has sent once every attempt of X passes, and the other way round: the
                                          side that begins later gets through
    X's does, Y's does not                X's attempts pass after Y has sent once, unless Y's filter goes by ports; Y's
                                          attempts never do. X dials, be it as the second one
    both do, or the last exception        they need the relay

as long as a router remembers what went out, which is half a minute at least, and is sent anew in each round.

The bound. A round is one attempt for each address, of a quarter of a second each in the first one. From when both have
the other one's address it takes `DIALS_TOO_S` and the second one's first round, 0.7 + 0.75 s with three addresses,
until an attempt begins that is let in; where the one that tries is in the middle of a turn of its own (a probe), what
is left of that: half of lost_after, 1.5 s at least. A handshake later it is UP, without loss and where a round trip is
short against a quarter of a second; a link has 2 s for it at least. Both have the address as soon as a view or a probe
asks for the link; where one of them has moved since, three round trips after that one's next heartbeat (an eighth of
lost_after), or MOVES_NS after its move before; and where the other side of a probe has given up meanwhile, at most
AGAIN_NS later. So from whatever state a probe has its links within AGAIN_NS and one of its turns of the last thing that
changed, and a view in its first attempt.

Between two firewalls that is one wait longer: OPENERS_S[LATE_OPENER], and until the dialler sends again what was not
answered, which QUIC does after a second at the latest. A probe is not enough there, as nobody tells the other side to
open where neither is behind NAT; who was left out so long that a firewall has forgotten the others is back when it is
tried without an answer to the probe (membership.coordinator.probes), once in the longest back-off, and opened for then.

Invariants: an opener goes to an address that the coordinator named for a member of a view or a probe, and nowhere else;
at most len(OPENERS_S) of them each time that a link is asked for, of one byte. A link is made by its deadline or lost,
whatever the routers do.

Failure cases. Two routers that need a relay, as above, and there is none: links are lost by their deadline, and the
error says by which addresses it was tried. A coordinator on the same side of a router as a rank sees the rank's own
address, which says nothing to others: they reach it by the relay. A firewall that lets in no answers: nothing opens it,
and UDP has to be let in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll.membership.view import Member
    from quicoll_transport.net.addresses import Address

__all__ = ["DIALS_TOO_S", "LATE_OPENER", "OPENERS_S", "behind_nat", "dials_first", "opened_address", "own_addresses"]

OPENERS_S = (0.0, 0.1, 0.3, 0.7, 1.5, 3.0)
"""When an opener goes out, in seconds after a link is asked for."""

DIALS_TOO_S = OPENERS_S[3]
"""When who has opened dials as well: as late as the other side's first round takes, with three addresses."""

LATE_OPENER = 2
"""Which of the openers is the first one where neither side is behind NAT: links without a firewall are UP by then."""


def behind_nat(one: Member | None, other: Member) -> bool:
    """Return whether the coordinator sees either of them elsewhere than it has announced. one: None, nothing known."""
    return other.seen_at is not None or (one is not None and one.seen_at is not None)


def dials_first(own: Member, other: Member) -> bool:
    """Return whether `own` dials the other one first, and not the other way round."""
    if (own.seen_at is None) is not (other.seen_at is None):
        return own.seen_at is not None
    return own.node < other.node


def own_addresses(member: Member) -> list[Address]:
    """Return where a member is dialled without help, best first."""
    seen = () if member.seen_at is None else (member.seen_at,)
    return [(host, port) for host, port in (*member.addresses, *seen)]


def opened_address(other: Member) -> Address | None:
    """Return where openers go when the other one dials first; None: it has no address.

    Args:
        other: The one that dials.
    """
    return other.seen_at or (other.addresses[0] if other.addresses else None)
