"""What a rank says of its links to the coordinator, every few seconds, for people who look at the job. Sans-IO.

    from the installation of a view   `look` is the first sample of the links' counters
    each time it is `due`             `measure` takes the next one, and makes figures of the difference to the oldest
                                      one that is kept: of the last SAMPLES times, ten seconds in a view of few ranks
    the view is over                  the meter is, too

The ranks of a view begin together and say it in turn, spread over the time between two words of one of them. Counters
begin anew with a new link, those of packets with a new connection: then the count is that since it began.

Bounds: the counters of SAMPLES looks at each link; MOST_LINKS of the worst links are told of, and how many more there
are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from quicoll.membership.link_figures import MOST_LINKS, LinkFigures, MeasuredLinks, badness, told_every_ns
from quicoll.membership.messages import Measured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.membership.link_figures import LinkCarrier
    from quicoll_transport.events import LinkSnapshot

__all__ = ["SAMPLES", "LinkMeter", "SeenLink"]

SAMPLES: Final = 5
"""How many times the time between two words is measured over."""


class SeenLink(NamedTuple):
    """A link at one moment. beside_sent, beside_received: bytes that lanes have carried in this view."""

    snapshot: LinkSnapshot
    carrier: LinkCarrier = "link"
    beside_sent: int = 0
    beside_received: int = 0


class _Counters(NamedTuple):
    """link, connection: what the counts are of."""

    link: int
    connection: int
    sent: int
    received: int
    beside_sent: int
    beside_received: int
    resends: int
    sent_packets: int
    lost_packets: int


class LinkMeter:
    """See the module's head.

    due_ns: when `measure` is to be called next.
    """

    def __init__(self, view_id: int, *, rank: int, world_size: int, seen: Mapping[int, SeenLink], now_ns: int) -> None:
        """Begin.

        Args:
            view_id: The view that was installed.
            rank: Of it, this one.
            world_size: Of it.
            seen: Its links, by the rank at the other end.
            now_ns: The time now.
        """
        self._view_id = view_id
        self._every_ns = told_every_ns(world_size)
        self._samples: deque[tuple[int, dict[int, _Counters]]] = deque(maxlen=SAMPLES)
        self._samples.append((now_ns, _counted(seen)))
        self.due_ns = now_ns + self._every_ns + self._every_ns * rank // world_size

    def measure(self, seen: Mapping[int, SeenLink], *, now_ns: int) -> Measured:
        """Return what is to be said now; the next word is due later.

        Args:
            seen: The links, by the rank at the other end.
            now_ns: The time now.
        """
        self.due_ns = max(self.due_ns + self._every_ns, now_ns + self._every_ns // 2)
        since_ns, before = self._samples[0]
        now = _counted(seen)
        window_ns = max(now_ns - since_ns, 1)
        self._samples.append((now_ns, now))
        links = [_figures(rank, each, now[rank], before.get(rank), window_ns) for rank, each in seen.items()]
        links.sort(key=lambda each: (badness(each), -each.peer), reverse=True)
        told, untold = tuple(links[:MOST_LINKS]), max(0, len(links) - MOST_LINKS)
        return Measured(view_id=self._view_id, links=MeasuredLinks(window_ns=window_ns, links=told, untold=untold))


def _counted(seen: Mapping[int, SeenLink]) -> dict[int, _Counters]:
    found = {}
    for rank, each in seen.items():
        link = each.snapshot
        found[rank] = _Counters(
            link=link.link,
            connection=link.connections,
            sent=link.bytes_sent,
            received=link.bytes_received,
            beside_sent=each.beside_sent,
            beside_received=each.beside_received,
            resends=link.resends,
            sent_packets=link.sent_packets,
            lost_packets=link.lost_packets - link.spurious_packets,
        )
    return found


def _figures(rank: int, seen: SeenLink, now: _Counters, before: _Counters | None, window_ns: int) -> LinkFigures:
    link = seen.snapshot
    beside = before or _NOTHING
    of_link = beside if beside.link == now.link else _NOTHING
    of_path = of_link if of_link.connection == now.connection else _NOTHING

    def rate(nbytes: int) -> int:
        return max(nbytes, 0) * 1_000_000_000 // window_ns

    return LinkFigures(
        peer=rank,
        carrier=seen.carrier,
        doubted=link.suspect,
        rtt_ns=link.rtt_ns,
        sent_rate=rate(now.sent - of_link.sent + now.beside_sent - beside.beside_sent),
        received_rate=rate(now.received - of_link.received + now.beside_received - beside.beside_received),
        sent_packets=max(now.sent_packets - of_path.sent_packets, 0),
        lost_packets=max(now.lost_packets - of_path.lost_packets, 0),
        resends=max(now.resends - of_link.resends, 0),
        delivery_rate=link.delivery_rate,
        bytes_in_flight=link.bytes_in_flight,
    )


_NOTHING: Final = _Counters(0, 0, 0, 0, 0, 0, 0, 0, 0)
