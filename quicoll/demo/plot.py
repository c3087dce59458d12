"""A run of the demo as a picture (SVG): the loss, how fast steps are committed, who was in the view, and the faults.

Three panels share one axis of time, in seconds since the demo began. A fault is a line through all of them. A worker's
bar is dark while it is in a view with all others, light in a smaller one, and not there while it is in none; where a
bar ends and no step is committed the others have noticed, where it begins again the worker has the state.

Each number in it is an event of the run. It needs no library, and its size follows the steps: some tens of kilobytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from quicoll.demo.timeline import FaultMark, Moment

__all__ = ["draw_run"]

_INK, _FAINT, _GRID, _LOSS, _RATE, _FAULT = "#1c1c1c", "#5c5c5c", "#e2e2e2", "#1f5fa8", "#0b6e4f", "#c03a1b"
_FULL, _SMALLER = "#1f5fa8", "#a9c4e4"
_FACE = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
_WIDTH, _LEFT, _RIGHT = 860, 96, 24
_TOP, _LOSS_HEIGHT, _RATE_HEIGHT, _LANE, _GAP = 84, 150, 100, 22, 34
_BIN_S = 0.5
_LABEL_PX = 150
"""What the name of a fault takes: two that are nearer to each other stand in two lines."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values low..high to pixels at..to."""

    low: float
    high: float
    at: float
    to: float

    def __call__(self, value: float) -> float:
        return self.at + (value - self.low) / ((self.high - self.low) or 1.0) * (self.to - self.at)


def draw_run(moments: Iterable[Moment], faults: Sequence[FaultMark], *, nodes: Sequence[str], began: float) -> str:
    """Draw a run.

    Args:
        moments: Its events, in any order; "progress" has the loss of a step.
        faults: What was done to the workers.
        nodes: The workers.
        began: When the demo began; all times are since then.
    Returns:
        The text of an SVG document; the same for the same arguments.
    """
    history = sorted(moments, key=lambda moment: (moment.t, moment.node))
    committed = _first_commits(history)
    first = next((moment.t - began for moment in history if moment.kind == "view_installed"), 0.0)
    end = max([moment.t - began for moment in history], default=1.0)
    time = _Scale(max(0.0, first - _BIN_S), end, _LEFT, _WIDTH - _RIGHT)
    loss_at = _TOP
    rate_at = loss_at + _LOSS_HEIGHT + _GAP
    lanes_at = rate_at + _RATE_HEIGHT + _GAP
    bottom = lanes_at + _LANE * len(nodes)
    height = bottom + 44
    title = f"{len(nodes)} workers, {len(committed)} steps, {len(faults)} faults"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="{_FACE}" font-size="12" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="28" font-size="17" font-weight="bold">{escape(title)}</text>',
        *_time_axis(time, bottom),
        *_losses(history, committed, time, began, loss_at),
        *_rates(committed, time, began, rate_at),
        *_lanes(history, faults, nodes, time, began, end, lanes_at),
        *_marks(faults, time, began, bottom),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _first_commits(history: Sequence[Moment]) -> dict[int, float]:
    """When each step was committed, by the first that said so."""
    found: dict[int, float] = {}
    for moment in history:
        if moment.kind == "step_committed":
            found.setdefault(moment.fields["step"], moment.t)
    return found


def _time_axis(time: _Scale, bottom: float) -> list[str]:
    out = []
    for tick in _ticks(time.low, time.high):
        x = time(tick)
        out.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="{_GRID}"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="{_FAINT}">{tick:g} s</text>')
    text = f'y="{bottom + 38}" fill="{_FAINT}"'
    out.append(f'<text x="{_WIDTH - _RIGHT}" {text} text-anchor="end">since the demo began</text>')
    x = float(_LEFT)
    for colour, said in ((_FULL, "in a view of all workers"), (_SMALLER, "in a view of fewer")):
        out.append(f'<rect x="{x:.0f}" y="{bottom + 28}" width="22" height="11" rx="2" fill="{colour}"/>')
        out.append(f'<text x="{x + 30:.0f}" {text}>{said}</text>')
        x += 220
    return out


def _losses(history: Sequence[Moment], committed: dict[int, float], time: _Scale, began: float, at: float) -> list[str]:
    """The mean over the ranks that told theirs, of every step that was committed."""
    told: dict[int, list[float]] = defaultdict(list)
    for moment in history:
        if moment.kind == "progress" and "loss" in moment.fields:
            told[int(moment.fields["step"])].append(float(moment.fields["loss"]))
    known = [(committed[step] - began, sum(told[step]) / len(told[step])) for step in sorted(told) if step in committed]
    scale = _Scale(0.0, max((loss for _, loss in known), default=1.0), at + _LOSS_HEIGHT, at)
    return [*_panel("loss", scale, at), _line([(time(t), scale(loss)) for t, loss in known], _LOSS)]


def _rates(committed: dict[int, float], time: _Scale, began: float, at: float) -> list[str]:
    """Steps in each half second."""
    counts = [0] * (int((time.high - time.low) / _BIN_S) + 1)
    for moment in committed.values():
        counts[max(0, min(int((moment - began - time.low) / _BIN_S), len(counts) - 1))] += 1
    scale = _Scale(0.0, max(counts) / _BIN_S or 1.0, at + _RATE_HEIGHT, at)
    wide = time(time.low + _BIN_S) - time(time.low)
    bars = [
        f'<rect x="{time.at + n * wide:.1f}" y="{scale(count / _BIN_S):.1f}" '
        f'width="{max(0.5, min(wide - 0.7, time.to - time.at - n * wide)):.1f}" '
        f'height="{scale(0) - scale(count / _BIN_S):.1f}" fill="{_RATE}"/>'
        for n, count in enumerate(counts)
        if count
    ]
    return [*_panel("steps/s", scale, at), *bars]


def _lanes(
    history: Sequence[Moment],
    faults: Sequence[FaultMark],
    nodes: Sequence[str],
    time: _Scale,
    began: float,
    end: float,
    at: float,
) -> list[str]:
    out = []
    for number, node in enumerate(nodes):
        y = at + number * _LANE
        out.append(f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(node)}</text>')
        for since, until, members in _in_views(history, faults, node, began + end):
            x = time(since - began)
            wide = max(0.5, time(until - began) - x)
            colour = _FULL if members == len(nodes) else _SMALLER
            out.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{wide:.1f}" height="{_LANE - 8}" rx="2" fill="{colour}">'
                f"<title>{escape(node)}: in a view of {members}</title></rect>"
            )
    return out


def _in_views(
    history: Sequence[Moment], faults: Sequence[FaultMark], node: str, end: float
) -> list[tuple[float, float, int]]:
    """(since, until, members) of each stay of a node in a view. A killed process says nothing of its end."""
    changes: list[tuple[float, int]] = [
        (moment.t, len(moment.fields["nodes"]) if moment.kind == "view_installed" else 0)
        for moment in history
        if moment.node == node and moment.kind in ("view_installed", "view_ended")
    ]
    changes += [(fault.t, 0) for fault in faults if fault.node == node and fault.cause == "killed"]
    changes.sort()
    return [(since, until, members) for (since, members), (until, _) in pairwise([*changes, (end, 0)]) if members]


def _marks(faults: Sequence[FaultMark], time: _Scale, began: float, bottom: float) -> list[str]:
    out = []
    before, line = -math.inf, 0
    for fault in faults:
        x = time(fault.t - began)
        line = 1 - line if x - before < _LABEL_PX else 0
        before = x
        y = _TOP - 12 - 16 * line
        side = "end" if x > _WIDTH - _LABEL_PX else "start"
        out.append(f'<path d="M{x:.1f} {y + 4}V{bottom}" stroke="{_FAULT}" stroke-width="1.4" stroke-dasharray="4 3"/>')
        out.append(
            f'<text x="{x + (4 if side == "start" else -4):.1f}" y="{y}" text-anchor="{side}" fill="{_FAULT}">'
            f"{escape(fault.node)}: {escape(fault.cause)}</text>"
        )
    return out


def _panel(name: str, scale: _Scale, at: float) -> list[str]:
    """A panel's name and three numbers of its axis."""
    out = [f'<text x="16" y="{at + 4}" font-weight="bold">{name}</text>']
    for value in (0.0, scale.high / 2, scale.high):
        y = scale(value)
        out.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>')
        out.append(f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end" fill="{_FAINT}">{value:.2g}</text>')
    return out


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def _ticks(begin: float, end: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, ten or fewer."""
    raw = max(end - begin, 1e-3) / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 5, 10) if raw <= each * power * (1 + 1e-9))
    return [n * step for n in range(math.ceil(begin / step), int(end / step * (1 + 1e-9)) + 1)]
