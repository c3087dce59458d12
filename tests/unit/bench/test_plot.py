"""The picture of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quicoll.bench.figures import row_of
from quicoll.bench.plot import demand_matplotlib, draw_figures, draw_wan
from quicoll.bench.wan import LINKS, WanCell, wan_report
from quicoll.errors import LocalError

ROWS = [
    row_of(
        {
            "case": {"name": name, "kind": "all_reduce", "size": size},
            "samples": {
                "quicoll": [{"seconds": 0.002, "cpu": 0.1}, {"seconds": 0.003, "cpu": 0.1}],
                "gloo": [{"seconds": 0.001, "cpu": 0.1}, {"seconds": 0.001, "cpu": 0.1}],
            },
        }
    )
    for name, size in (("barrier", 0), ("all_reduce 64 KiB", 65536))
]

# The first import of matplotlib on a machine starts a process that lists the fonts.
DRAWS = pytest.mark.slow


@DRAWS
def test_a_picture_names_the_contenders_the_cases_and_the_ratios(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws; pip install 'quicoll[plot]'")
    path = tmp_path / "bench.svg"
    draw_figures(path, ROWS, title="quicoll bench latency", subtitle="2 processes")
    svg = path.read_text()
    for text in ("quicoll bench latency", "2 processes", "barrier", "64 KiB", "x 2.5"):
        assert f"<!-- {text} -->" in svg, text


@DRAWS
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws; pip install 'quicoll[plot]'")
    with pytest.raises(LocalError, match=r"cannot write .*bench\.docx"):
        draw_figures(tmp_path / "bench.docx", ROWS, title="", subtitle="")


@DRAWS
def test_a_picture_of_long_links_names_links_and_contenders_and_leaves_out_what_has_no_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws; pip install 'quicoll[plot]'")
    path = tmp_path / "wan.svg"
    cells = [
        wan_report(WanCell(LINKS[link], "all_reduce", 4, 2, control, 3), samples)
        for link, control, samples in (
            ("wan", "bbr", {"quicoll": [[0.5, 0.3, 0.4]], "gloo": [[0.6, 0.5, 0.5]]}),
            ("wan", "cubic", {"quicoll": [[0.5]]}),
            ("badwan", "bbr", {"quicoll": [[0.9, 0.8, 0.7]]}),
        )
    ]
    draw_wan(path, cells, title="quicoll bench wan", subtitle="simulated")
    svg = path.read_text()
    for text in ("quicoll bench wan", "simulated", "badwan", "2 ranks, 4 MiB", "quicoll bbr", "gloo"):
        assert f"<!-- {text} -->" in svg, text
    assert "quicoll cubic" not in svg


def test_without_matplotlib_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LocalError, match=r"pip install 'quicoll\[plot\]'"):
        demand_matplotlib()
