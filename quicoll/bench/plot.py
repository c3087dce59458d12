"""The picture of a run: time by case, each contender a line with its spread, and how much longer quicoll took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicoll.bench.cases import size_text
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.bench.figures import Row

__all__ = ["demand_matplotlib", "draw_figures", "draw_wan"]

_COLORS = {
    "quicoll": "#0b6e4f",
    "gloo": "#c8553d",
    "aioquic": "#3d5a80",
    "quicoll bbr": "#0b6e4f",
    "quicoll cubic": "#7fb69e",
}

_MARK = "#555555"  # of what stands for every contender


def demand_matplotlib() -> None:
    """Raise LocalError where no picture can be drawn: better before the run than after it."""
    try:
        import matplotlib  # noqa: F401 - is it there?
    except ModuleNotFoundError as error:
        raise LocalError("--plot needs matplotlib: pip install 'quicoll[plot]'") from error


def draw_figures(path: Path, rows: Sequence[Row], *, title: str, subtitle: str) -> None:
    """Write the picture; the file's ending (png, svg, pdf) says in which form.

    Args:
        path: The file.
        rows: Of the run.
        title: Above it.
        subtitle: Below the title: on what it was measured.
    Raises:
        LocalError: The file cannot be written, or its ending is not known.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.4), layout="constrained")
    axes = figure.add_subplot()
    places = list(range(len(rows)))
    for name in rows[0].figures:
        color = _COLORS.get(name, "#555555")
        found = [row.figures[name] for row in rows]
        times = [1e3 * one.median_s for one in found]
        spread = [
            [1e3 * (one.median_s - one.least_s) for one in found],
            [1e3 * (one.most_s - one.median_s) for one in found],
        ]
        axes.errorbar(places, times, yerr=spread, marker="o", capsize=3, linewidth=2, color=color, label=name)
    _label_ratios(axes, rows)
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds (log scale; bars: least to most)")
    axes.set_xticks(places, [row.name if row.size == 0 else size_text(row.size) for row in rows])
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{title}\n", loc="left", fontweight="bold")
    axes.text(0.0, 1.01, subtitle, transform=axes.transAxes, fontsize=9, color="#555555")
    axes.legend(frameon=False)
    _save(figure, path)


def draw_wan(path: Path, cells: Sequence[Mapping[str, Any]], *, title: str, subtitle: str) -> None:
    """Write the picture of operations over long links: a column for each link, size and number of ranks.

    Args:
        path: The file; its ending says in which form.
        cells: As they stand in the report (quicoll.bench.wan.wan_report).
        title: Above it.
        subtitle: Below the title: on what it was measured.
    Raises:
        LocalError: The file cannot be written, or its ending is not known.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullLocator

    labels: list[str] = []
    series: dict[str, dict[int, Mapping[str, float]]] = {}
    for cell in cells:
        label = f"{cell['link']['name']}\n{cell['ranks']} ranks, {cell['mib']} MiB"
        if label not in labels:
            labels.append(label)
        for name, found in cell["over_ideal"].items():
            called = f"quicoll {cell['congestion']}" if name == "quicoll" else name
            if found is not None:
                series.setdefault(called, {})[labels.index(label)] = found
    figure = Figure(figsize=(max(6.0, 2.0 + 1.3 * len(labels)), 5.4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, found) in enumerate(series.items()):
        aside = (number - (len(series) - 1) / 2) * 0.22
        places = [place + aside for place in found]
        medians = [one["median"] for one in found.values()]
        above = [max(0.0, one["p90"] - one["median"]) for one in found.values()]
        color = _COLORS.get(name, "#555555")
        axes.errorbar(places, medians, yerr=[[0.0] * len(above), above], fmt="o", capsize=4, color=color, label=name)
        axes.plot(places, [one["first"] for one in found.values()], "^", fillstyle="none", color=color)
    axes.axhline(1.0, color="#555555", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("times the ideal (log scale)")
    axes.set_xticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.grid(visible=True, which="both", axis="y", alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{title}\n", loc="left", fontweight="bold")
    axes.text(0.0, 1.01, subtitle, transform=axes.transAxes, fontsize=9, color="#555555")
    marks = (
        Line2D([], [], marker="o", color=_MARK, linestyle="", label="median of the later ones"),
        Line2D([], [], marker="_", color=_MARK, linestyle="", label="their 90th percentile"),
        Line2D([], [], marker="^", color=_MARK, linestyle="", fillstyle="none", label="the first operation"),
    )
    drawn, _ = axes.get_legend_handles_labels()
    axes.legend(handles=[*drawn, *marks], frameon=False, fontsize=9)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise LocalError(f"cannot write {path}: {error}") from error


def _label_ratios(axes: Any, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        for ratio in list(row.ratios.values())[:1]:
            at = (place, 1e3 * row.figures["quicoll"].median_s)
            axes.annotate(f"x {ratio:.2g}", at, xytext=(0, 9), textcoords="offset points", ha="center", fontsize=9)
