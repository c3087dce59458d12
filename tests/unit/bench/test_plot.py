"""The picture of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quicoll.bench.figures import row_of
from quicoll.bench.plot import demand_matplotlib, draw_figures
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


def test_without_matplotlib_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LocalError, match=r"pip install 'quicoll\[plot\]'"):
        demand_matplotlib()
