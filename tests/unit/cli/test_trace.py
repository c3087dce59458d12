"""`quicoll trace --json` as a script sees it: one object on stdout, whatever stderr says, and the exit status."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from quicoll.cli.main import main
from quicoll.observability.events import Event
from quicoll.observability.recording import record_rank


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """The traces of two ranks that did one step each, and have left."""
    directory = tmp_path / "traces"
    for number, node in enumerate(("a", "b")):
        kept: Any = record_rank(job="j", node=node, chance=number, trace_dir=directory)
        kept.recorder.in_view(1, ("a", "b"), "m")
        kept.recorder.began(1, 1)
        kept.recorder(Event(time.monotonic_ns(), node, "step_committed", {"step": 1, "view": 1}))
        kept.recorder.close()
    return directory


def trace(capsys: pytest.CaptureFixture[str], directory: Path, file: Path) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(directory), str(file), "--json"])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_one_object_says_what_was_read_and_where_the_timeline_is(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "timeline.json"
    status, out, err = trace(capsys, traces, file)
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    assert json.loads(out) == {"file": str(file), "read": 2, "unread": {}}
    assert json.loads(file.read_text())["traceEvents"]


def test_a_torn_file_is_read_as_far_as_it_goes_and_the_object_says_which_it_is(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = min(traces.iterdir())
    torn.write_bytes(torn.read_bytes()[:-20])
    (traces / "other.trace").write_text("no trace\n")
    status, out, err = trace(capsys, traces, tmp_path / "timeline.json")
    assert status == 2
    found = json.loads(out)
    assert found["read"] == 2
    assert sorted(found["unread"]) == sorted([torn.name, "other.trace"])
    assert "torn" in found["unread"][torn.name]
    assert err == "".join(f"quicoll: {name}: {why}\n" for name, why in found["unread"].items())


def test_where_no_timeline_is_written_stdout_stays_empty(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    for directory, file, why in (
        (missing, tmp_path / "timeline.json", f"cannot read {missing}: No such file or directory"),
        (traces, missing / "timeline.json", f"cannot write the trace to {missing / 'timeline.json'}: No such file"),
    ):
        status, out, err = trace(capsys, directory, file)
        assert (status, out) == (2, "")
        assert err.startswith(f"quicoll: {why}")
