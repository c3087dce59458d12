"""A plan as a picture: ranks side by side as lines of time that goes down, messages as arrows between them (SVG).

The space-time diagram of Lamport 1978, "Time, clocks, and the ordering of events in a distributed system", CACM 21(7),
turned so that time reads like text. An arrow begins when the sender begins with the message and ends when the receiver
is done with it; its width follows the bytes, its colour tells whether it stays on its site. Beyond MAX_ARROWS messages
the rest is only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from quicoll.plan.cost import Flight, Forecast, Network

__all__ = ["MAX_ARROWS", "draw"]

MAX_ARROWS = 2000

_NEAR, _FAR = "#3465a4", "#cc4125"
_MARGIN, _TOP, _BOTTOM = 90, 90, 50


def draw(forecast: Forecast, network: Network, *, title: str, notes: Sequence[str] = ()) -> str:
    """The forecast as an SVG document; the same text for the same arguments."""
    world = network.world
    gap = max(36, min(140, 1400 // world))
    width, height = 2 * _MARGIN + gap * (world - 1), 640
    span = forecast.seconds or 1.0
    shown = forecast.flights[:MAX_ARROWS]
    largest = max((flight.nbytes for flight in shown), default=0) or 1

    def across(rank: int) -> float:
        return _MARGIN + gap * rank

    def down(seconds: float) -> float:
        return _TOP + seconds / span * (height - _TOP - _BOTTOM)

    left_out = len(forecast.flights) - len(shown)
    told = [*notes, f"{left_out} later messages are not drawn"] if left_out else list(notes)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
        *(f'<text x="10" y="{38 + 15 * i}" fill="#555">{escape(note)}</text>' for i, note in enumerate(told)),
    ]
    for k in range(11):
        y = down(span * k / 10)
        out.append(f'<line x1="{_MARGIN - 12}" y1="{y:.1f}" x2="{width - _MARGIN + 12}" y2="{y:.1f}" stroke="#eee"/>')
        out.append(
            f'<text x="{_MARGIN - 18}" y="{y + 4:.1f}" text-anchor="end" fill="#777">{_time(span * k / 10)}</text>'
        )
    for rank in range(world):
        x = across(rank)
        end = down(forecast.done[rank])
        site = f"site {network.sites[rank]}"
        out.append(f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{end:.1f}" stroke="#222" stroke-width="1.5"/>')
        out.append(f'<text x="{x}" y="{_TOP - 8}" text-anchor="middle">{rank}</text>')
        out.append(f'<text x="{x}" y="{height - 24}" text-anchor="middle" fill="#777">{site}</text>')
    out += [_arrow(flight, network, across, down, largest) for flight in shown]
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _arrow(
    flight: Flight,
    network: Network,
    across: Callable[[int], float],
    down: Callable[[float], float],
    largest: int,
) -> str:
    near = network.sites[flight.source] == network.sites[flight.to]
    colour = _NEAR if near else _FAR
    thick = 0.6 + 2.4 * flight.nbytes / largest
    x1, y1, x2, y2 = across(flight.source), down(flight.start), across(flight.to), down(flight.end)
    return (
        f'<g stroke="{colour}" fill="{colour}"><title>{flight.source} to {flight.to}, lane {flight.lane}, '
        f"{flight.nbytes} bytes, {_time(flight.start)} to {_time(flight.end)}</title>"
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke-width="{thick:.2f}" opacity="0.7"/>'
        f'<circle cx="{x2:.1f}" cy="{y2:.1f}" r="{1.2 + thick / 2:.2f}" stroke="none"/></g>'
    )


def _time(seconds: float) -> str:
    """Three digits with the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
