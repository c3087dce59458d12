"""Reports of commands: where they go, and what is found out before the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quicoll.cli.report import open_report, working, write_report
from quicoll.errors import LocalError


def test_looking_whether_a_report_can_be_written_leaves_the_one_of_the_run_before(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(path, {"seeds": 3})
    open_report(path)
    assert json.loads(path.read_text()) == {"seeds": 3}
    write_report(path, {"seeds": 4})
    assert json.loads(path.read_text()) == {"seeds": 4}


def test_a_report_that_cannot_be_written_is_found_out_before_the_work(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "report.json"):
        with pytest.raises(LocalError, match="cannot write"):
            open_report(path)
        with pytest.raises(LocalError, match="cannot write"):
            write_report(path, {})


def test_a_report_for_standard_output_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    open_report(Path("-"))
    write_report(Path("-"), {"seeds": 3})
    open_report(None)
    write_report(None, {"seeds": 4})
    assert json.loads(capsys.readouterr().out) == {"seeds": 3}
    assert list(tmp_path.iterdir()) == []


def test_that_something_is_at_work_is_not_said_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with working("asks"):
        print("the answer")  # noqa: T201 - what a command finds
    assert capfd.readouterr() == ("the answer\n", "")


@pytest.mark.slow
def test_what_is_found_goes_to_its_pipe_while_the_terminal_is_told_that_something_is_at_work() -> None:
    program = "from quicoll.cli.report import working\nwith working('asks'):\n    print('the answer')"
    terminal, other = os.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=other, env=environment, check=True
    )
    os.close(other)
    said = os.read(terminal, 4096)
    os.close(terminal)
    assert done.stdout == b"the answer\n"
    assert b"asks" in said
