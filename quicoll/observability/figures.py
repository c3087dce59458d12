"""Figures of a running rank: what is counted, and how it follows from what the rank does.

One table, `FIGURES`, says what there is; OpenTelemetry and Prometheus make their instruments of it
(`quicoll.observability.open_telemetry`, `quicoll.observability.prometheus`). `Figures` is fed by the thread of
`quicoll.observability.streaming`, so a figure is a quarter of a second behind, and no caller pays for it.

Labels are few and bounded: kinds of operations, outcomes, nodes of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from quicoll.observability.events import Event
from quicoll.observability.flight_record import FlightOperation, FlightStep, FlightView

if TYPE_CHECKING:
    from quicoll.observability.flight import Streamed
    from quicoll_transport.events import LinkSnapshot

__all__ = ["FIGURES", "Figures", "Instruments", "RankFigure", "operation_kind"]

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class RankFigure:
    """One figure.

    Attributes:
        name: With dots, as OpenTelemetry has it; Prometheus has underscores, and its endings.
        kind: Whether it is added up, spread over buckets, or as it is now.
        unit: "s", "By", or "" for a number.
        text: What it is.
        labels: What it is told apart by.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    unit: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def buckets(self) -> tuple[float, ...]:
        """Upper bounds of a histogram's buckets, in seconds."""
        return _SECONDS


FIGURES: dict[str, RankFigure] = {
    figure.name: figure
    for figure in (
        RankFigure("quicoll.steps", "counter", "", "Attempts at steps, by what became of them", ("outcome",)),
        RankFigure("quicoll.step.duration", "histogram", "s", "From the beginning of a step to its commit"),
        RankFigure("quicoll.step.number", "gauge", "", "The last step that was committed here"),
        RankFigure("quicoll.operations", "counter", "", "Operations", ("operation", "carrier", "outcome")),
        RankFigure(
            "quicoll.operation.duration", "histogram", "s", "From the call to the end", ("operation", "carrier")
        ),
        RankFigure(
            "quicoll.operation.given", "counter", "By", "Bytes that this rank gave to operations", ("operation",)
        ),
        RankFigure("quicoll.operation.wait", "histogram", "s", "From the call here to the last rank's", ("operation",)),
        RankFigure("quicoll.late", "counter", "s", "Time that operations waited for a late rank", ("peer",)),
        RankFigure("quicoll.view", "gauge", "", "The number of the view"),
        RankFigure("quicoll.members", "gauge", "", "Ranks of the view; 0 while there is none"),
        RankFigure("quicoll.rank", "gauge", "", "The rank of this node in the view"),
        RankFigure("quicoll.views.ended", "counter", "", "Views that ended"),
        RankFigure("quicoll.peers.lost", "counter", "", "Peers that were lost", ("peer",)),
        RankFigure("quicoll.link.round_trip", "gauge", "s", "Round trip to a peer", ("peer",)),
        RankFigure("quicoll.link.sent", "counter", "By", "Payload bytes sent to a peer, resends too", ("peer",)),
        RankFigure(
            "quicoll.link.received", "counter", "By", "Payload bytes received of a peer, resends too", ("peer",)
        ),
        RankFigure("quicoll.link.resends", "counter", "", "Messages that were sent again", ("peer",)),
        RankFigure("quicoll.link.corrupted", "counter", "", "Payloads that failed their checksum", ("peer",)),
        RankFigure("quicoll.dropped", "counter", "", "Operations that were not counted: too many waited"),
    )
}


class Instruments(Protocol):
    """What keeps figures. labels: the values of the figure's labels, in their order."""

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter."""
        ...

    def spread(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        ...

    def put(self, name: str, value: float, *labels: str) -> None:
        """Say how a gauge is now."""
        ...

    def close(self) -> None:
        """Nothing comes any more."""
        ...


def operation_kind(name: str) -> str:
    """Return what an operation is, without its number and group.

    Args:
        name: As in errors, "all_reduce#3@0:1".
    """
    return name.partition("#")[0]


class Figures:
    """A sink (`quicoll.observability.streaming`) that counts."""

    def __init__(self, instruments: Instruments) -> None:
        """Begin at nothing.

        Args:
            instruments: Keep the figures.
        """
        self._keep = instruments
        self._links: dict[tuple[str, int], dict[str, int]] = {}

    def take(self, told: Sequence[Streamed]) -> None:
        """Count what happened."""
        for each in told:
            if isinstance(each, FlightOperation):
                self._operation(each)
            elif isinstance(each, FlightStep):
                self._step(each)
            elif isinstance(each, FlightView):
                self._keep.put("quicoll.view", each.view)
                self._keep.put("quicoll.members", len(each.nodes))
            elif isinstance(each, Event):
                self._event(each)

    def _operation(self, each: FlightOperation) -> None:
        kind = operation_kind(each.name)
        self._keep.add("quicoll.operations", 1, kind, each.carrier, each.outcome or "aborted")
        if each.outcome != "finished":
            return
        self._keep.spread("quicoll.operation.duration", (each.ended - each.called) / 1e9, kind, each.carrier)
        self._keep.add("quicoll.operation.given", each.given, kind)
        if each.settled:
            self._keep.spread("quicoll.operation.wait", max(each.settled - each.called, 0) / 1e9, kind)

    def _step(self, each: FlightStep) -> None:
        self._keep.add("quicoll.steps", 1, each.outcome or "unknown")
        if each.outcome == "committed":
            self._keep.spread("quicoll.step.duration", (each.ended - each.began) / 1e9)
            self._keep.put("quicoll.step.number", each.step)

    def _event(self, event: Event) -> None:
        fields = event.fields
        match event.kind:
            case "view_installed" if "rank" in fields:
                self._keep.put("quicoll.rank", fields["rank"])
            case "view_ended":
                self._keep.add("quicoll.views.ended", 1)
                self._keep.put("quicoll.members", 0)
            case "peer_lost":
                self._keep.add("quicoll.peers.lost", 1, str(fields["peer"]))
            case "straggler":
                self._keep.add("quicoll.late", fields["seconds"], str(fields["peer"]))

    def take_links(self, links: Sequence[LinkSnapshot]) -> None:
        """Count what went over links since the last time."""
        for link in links:
            peer = link.peer.rpartition("/")[2]
            if link.rtt_ns is not None:
                self._keep.put("quicoll.link.round_trip", link.rtt_ns / 1e9, peer)
            now = _counted(link)
            before = self._links.get((link.peer, link.link), {})
            for name, value in now.items():
                self._keep.add(name, max(value - before.get(name, 0), 0), peer)
            self._links[link.peer, link.link] = now
        living = {(link.peer, link.link): None for link in links}
        self._links = {key: counts for key, counts in self._links.items() if key in living}

    def close(self, dropped: int) -> None:
        """The rank has left."""
        if dropped:
            self._keep.add("quicoll.dropped", dropped)
        self._keep.put("quicoll.members", 0)
        self._keep.close()


def _counted(link: LinkSnapshot) -> dict[str, int]:
    return {
        "quicoll.link.sent": link.bytes_sent,
        "quicoll.link.received": link.bytes_received,
        "quicoll.link.resends": link.resends,
        "quicoll.link.corrupted": link.corrupt,
    }
