"""A plan as a picture: ranks side by side as lines of time that goes down, messages as arrows between them (SVG).

The space-time diagram of Lamport 1978, "Time, clocks, and the ordering of events in a distributed system", CACM 21(7),
turned so that time reads like text. An arrow begins when the sender begins with the message and ends when the receiver
is done with it; its width follows the bytes, its colour tells whether it stays on its site. A bar ends the line of a
rank that is done. Sites are bands behind their ranks.

A tensor of 64 MiB is hundreds of messages, among which nobody sees one. They go by chunks (lanes of the plan), which
take alike ways. So of more than CLEAR_ARROWS messages a picture has those of a few chunks, from the first to the last,
each at the time that it has among all: SUMMARY_ARROWS of them, or one chunk. In full it has all, and beyond MAX_ARROWS
the rest is only counted.

Nothing measures text here: lines are broken by what a wide sans-serif face takes (`_EM`), so that no word leaves the
picture whichever face a viewer has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from quicoll.plan.forecast import Flight, Forecast
    from quicoll.plan.network import NetworkModel

__all__ = ["CLEAR_ARROWS", "MAX_ARROWS", "SUMMARY_ARROWS", "draw"]

MAX_ARROWS = 2000
CLEAR_ARROWS = 150
SUMMARY_ARROWS = 64

# Told apart by every kind of colour vision, and by their lightness in grey.
_NEAR, _FAR = "#1f5fa8", "#e0611b"
_KINDS = ((False, "near", _NEAR, "message within a site"), (True, "far", _FAR, "message between sites"))
_INK, _FAINT, _GRID = "#1c1c1c", "#5c5c5c", "#dcdcdc"
_BANDS = ("#eef3f9", "#f8f1e7")
_FACE = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
_EM = 0.64  # mean width of a character, of the size of the face
_LEFT, _RIGHT, _EDGE = 76, 28, 16
_LEAST_WIDTH = 660


@dataclass(frozen=True, slots=True)
class _Columns:
    """The places of ranks. bands: (site, left, right) of neighbouring ranks on one site."""

    at: tuple[float, ...]
    bands: tuple[tuple[int, float, float], ...]
    width: int


def draw(
    forecast: Forecast, network: NetworkModel, *, title: str, notes: Sequence[str] = (), full: bool = False
) -> str:
    """Draw a forecast as an SVG document.

    Args:
        forecast: What is drawn.
        network: Its sites are the bands.
        title: Above the picture.
        notes: Lines under the title.
        full: Whether all chunks are drawn, and not a few of them where they are many.
    Returns:
        The text of the document; the same for the same arguments.
    """
    columns = _columns(network.sites)
    chosen, told = (forecast.flights, list[str]()) if full else _few_chunks(forecast.flights)
    shown = chosen[:MAX_ARROWS]
    if len(shown) < len(chosen):
        told.append(f"{len(chosen) - len(shown)} later messages are not drawn")
    told = [*notes, *told]
    head, y = _heading(title, told, columns.width)
    legend, y = _legend(shown, network, columns.width, y)
    top = y + (60 if len(columns.bands) > 1 else 40)
    bottom = top + _depth(shown, network.world)
    height = bottom + 44
    span = forecast.seconds or 1.0

    heads = "".join(_head(name, colour, _fineness(len(shown))[2]) for _, name, colour, _ in _KINDS)

    def down(seconds: float) -> float:
        return top + seconds / span * (bottom - top)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns.width}" height="{height}" '
        f'viewBox="0 0 {columns.width} {height}" font-family="{_FACE}" font-size="12" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        f"<defs>{heads}</defs>",
        f'<rect width="{columns.width}" height="{height}" fill="white"/>',
        *head,
        *legend,
        *_background(columns, top, bottom),
        *_axis(forecast.seconds, columns.width, down),
        *_lifelines(forecast, columns, top, down),
        *_arrows(shown, network, columns, down),
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def _few_chunks(flights: Sequence[Flight]) -> tuple[Sequence[Flight], list[str]]:
    """The messages of as many chunks as can be told from each other, and what is to be said of it."""
    lanes = sorted({flight.lane for flight in flights})
    count = max(1, SUMMARY_ARROWS * len(lanes) // max(1, len(flights)))
    if len(flights) <= CLEAR_ARROWS or count >= len(lanes):
        return flights, []
    taken = {lanes[k * (len(lanes) - 1) // max(1, count - 1)]: None for k in range(count)}
    few = [flight for flight in flights if flight.lane in taken]
    what = "1 chunk" if count == 1 else f"{count} chunks, from the first to the last,"
    return few, [f"drawn: {what} of {len(lanes)}; {len(few)} of {len(flights)} messages (--full draws all)"]


def _columns(sites: Sequence[int]) -> _Columns:
    """Ranks as far apart as there is room for, sites a little further."""
    world = len(sites)
    breaks = sum(sites[rank] != sites[rank - 1] for rank in range(1, world))
    gap = max(30, min(max(120, 480 // world), 1300 // (world + breaks // 2)))
    between = gap / 2 if breaks else 0.0
    needed = _LEFT + gap * world + between * breaks + _RIGHT
    x = _LEFT + gap / 2 + max(0.0, (_LEAST_WIDTH - needed) / 2)
    at: list[float] = []
    bands: list[tuple[int, float, float]] = []
    for rank, site in enumerate(sites):
        if rank and site != sites[rank - 1]:
            x += between
        if not rank or site != sites[rank - 1]:
            bands.append((site, x - gap / 2, x + gap / 2))
        else:
            bands[-1] = (site, bands[-1][1], x + gap / 2)
        at.append(x)
        x += gap
    return _Columns(tuple(at), tuple(bands), max(_LEAST_WIDTH, math.ceil(needed)))


def _depth(flights: Sequence[Flight], world: int) -> int:
    """Pixels of the time axis: more where a rank has more arrows to show."""
    ends = [0] * world
    for flight in flights:
        ends[flight.to] += 1
        ends[flight.source] += 1
    return max(420, min(1500, 8 * max(ends, default=0)))


def _heading(title: str, notes: Sequence[str], width: int) -> tuple[list[str], int]:
    """Title and notes, and the y below them."""
    out: list[str] = []
    y = 14
    for text, size, weight, colour in ((title, 17, "bold", _INK), *((note, 12, "normal", _FAINT) for note in notes)):
        for line in _broken(text, int((width - 2 * _EDGE) / (_EM * size)), most=3):
            y += size + 6
            out.append(
                f'<text x="{_EDGE}" y="{y - 4}" font-size="{size}" font-weight="{weight}" fill="{colour}">'
                f"{escape(line)}</text>"
            )
    return out, y


def _legend(flights: Sequence[Flight], network: NetworkModel, width: int, y: int) -> tuple[list[str], int]:
    """Explain colours, widths and bars, in as many rows as they take, and the y below them."""
    several = max(network.sites) > 0
    keys = [
        (f'stroke="{colour}" stroke-width="2" marker-end="url(#{name})"', text if several else "message")
        for far, name, colour, text in _KINDS
        if any((network.sites[flight.source] != network.sites[flight.to]) is far for flight in flights)
    ]
    sizes = sorted({flight.nbytes for flight in flights})
    if sizes and sizes[-1]:
        rule = "thickest" if len(sizes) > 1 else "each"
        keys.append(
            (f'stroke="{_FAINT}" stroke-width="{_thickness(sizes[-1], sizes):.1f}"', f"{rule} {_bytes(sizes[-1])}")
        )
    out: list[str] = []
    x, y = float(_EDGE), y + 22
    for stroke, text in [*keys, ("", "rank is done")]:
        room = 34 + _EM * 12 * len(text) + 18
        if x > _EDGE and x + room > width - _EDGE:
            x, y = float(_EDGE), y + 18
        if stroke:
            out.append(f'<path d="M{x:.0f} {y - 4}h26" {stroke}/>')
        else:
            out.append(f'<path d="M{x + 13:.0f} {y - 12}v10m-7 0h14" fill="none" stroke="{_INK}" stroke-width="1.3"/>')
        out.append(f'<text x="{x + 34:.0f}" y="{y}">{text}</text>')
        x += room
    return out, y


def _background(columns: _Columns, top: int, bottom: int) -> list[str]:
    """Bands of sites, and the numbers of sites and ranks."""
    several = len(columns.bands) > 1
    out = [f'<text x="{_LEFT - 12}" y="{top - 10}" text-anchor="end" fill="{_FAINT}">rank</text>']
    if several:
        out.append(f'<text x="{_LEFT - 12}" y="{top - 28}" text-anchor="end" fill="{_FAINT}">site</text>')
    for site, left, right in columns.bands if several else ():
        out.append(
            f'<rect x="{left:.1f}" y="{top - 42}" width="{right - left:.1f}" height="{bottom - top + 68}" rx="5" '
            f'fill="{_BANDS[site % 2]}"/>'
        )
        out.append(
            f'<text x="{(left + right) / 2:.1f}" y="{top - 28}" text-anchor="middle" fill="{_FAINT}">{site}</text>'
        )
    out += [
        f'<text x="{x:.1f}" y="{y}" text-anchor="middle" font-weight="bold">{rank}</text>'
        for rank, x in enumerate(columns.at)
        for y in (top - 10, bottom + 20)
    ]
    return out


def _axis(seconds: float, width: int, down: Callable[[float], float]) -> list[str]:
    """Lines at round times, as many as can be read."""
    out: list[str] = []
    for time in _ticks(seconds):
        y, text = down(time), _time(time) if time else "0"
        out.append(f'<line x1="{_LEFT - 4}" y1="{y:.1f}" x2="{width - _RIGHT + 12}" y2="{y:.1f}" stroke="{_GRID}"/>')
        out.append(f'<text x="{_LEFT - 12}" y="{y + 4:.1f}" text-anchor="end" fill="{_FAINT}">{text}</text>')
    return out


def _lifelines(forecast: Forecast, columns: _Columns, top: int, down: Callable[[float], float]) -> list[str]:
    out: list[str] = []
    for x, done in zip(columns.at, forecast.done, strict=True):
        end = down(done)
        out.append(
            f'<path d="M{x:.1f} {top}V{end:.1f}M{x - 7:.1f} {end:.1f}h14" fill="none" stroke="{_INK}" '
            'stroke-width="1.3"/>'
        )
    return out


def _arrows(
    flights: Sequence[Flight], network: NetworkModel, columns: _Columns, down: Callable[[float], float]
) -> list[str]:
    """One for each message; those between sites below those within, which are short. The more there are, the finer."""
    sizes = sorted({flight.nbytes for flight in flights})
    fine, opacity, _ = _fineness(len(flights))
    out: list[str] = []
    for far, name, colour, _ in reversed(_KINDS):
        lines: list[str] = []
        for flight in flights:
            if (network.sites[flight.source] != network.sites[flight.to]) is not far:
                continue
            x1, x2 = columns.at[flight.source], columns.at[flight.to]
            y1, y2 = down(flight.start), down(flight.end)
            told = f"{flight.source} to {flight.to}, lane {flight.lane}, {_bytes(flight.nbytes)}"
            lines.append(
                f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                f'stroke-width="{fine * _thickness(flight.nbytes, sizes):.1f}"><title>{told}, {_time(flight.start)} to '
                f"{_time(flight.end)}</title></line>"
            )
        if lines:
            # A group hands its marker down to the lines in it: the property is inherited (SVG 2, 13.7.2).
            out.append(f'<g class="{name}" stroke="{colour}" stroke-opacity="{opacity}" marker-end="url(#{name})">')
            out += [*lines, "</g>"]
    return out


def _thickness(nbytes: int, sizes: Sequence[int]) -> float:
    """Of an arrow, where few are drawn. sizes: of all messages, ascending."""
    return 0.9 + 2.3 * nbytes / sizes[-1] if len(sizes) > 1 else 1.6


def _fineness(arrows: int) -> tuple[float, float, int]:
    """(of 1, how thick; how opaque; how long a head) so that so many arrows can be told from each other."""
    return (1.0, 0.85, 8) if arrows <= CLEAR_ARROWS else (0.6, 0.75, 7) if arrows <= 500 else (0.4, 0.55, 5)


def _head(name: str, colour: str, size: int) -> str:
    """An arrow's head, of one size however thick the line."""
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="{size}" markerHeight="{size}" '
        f'orient="auto" markerUnits="userSpaceOnUse"><path d="M0 0.6L8 4L0 7.4z" fill="{colour}"/></marker>'
    )


def _ticks(seconds: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, five to eleven of them with 0."""
    if seconds <= 0:
        return [0.0]
    raw = seconds / 10
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if raw <= step * (1 + 1e-9))
    return [k * step for k in range(int(seconds / step * (1 + 1e-9)) + 1)]


def _broken(text: str, most_characters: int, *, most: int) -> list[str]:
    """Text in lines, broken after spaces and commas; what is more than `most` lines ends in dots."""
    lines: list[str] = []
    rest = text
    while len(rest) > most_characters:
        window = rest[:most_characters]
        cut = max(window.rfind(" "), window.rfind(",")) + 1 or most_characters
        if len(lines) == most - 1:
            return [*lines, rest[: most_characters - 4].rstrip() + " ..."]
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return [*lines, rest]


def _bytes(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def _time(seconds: float) -> str:
    """Three digits with the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * (1 - 1e-9):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
