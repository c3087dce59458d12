"""A run says in its temporary directory how it is reached, and only a run at work is found."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quicoll.errors import LocalError
from quicoll.launch.running import RunningJob, announce, find_run
from quicoll.rendezvous import scratch


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def run(pid: int, job: str = "local", **fields: Any) -> RunningJob:
    return RunningJob(pid=pid, job=job, coordinator=f"127.0.0.1:{pid}", certs=Path("/certs"), **fields)


def test_the_one_run_at_work_is_found(base: Path) -> None:
    with scratch.scratch_directory() as directory:
        announce(directory, run(7))
        assert find_run(base=base) == run(7)
    with pytest.raises(LocalError, match="no `quicoll run` of this user"):
        find_run(base=base)


def test_of_several_one_has_to_be_named(base: Path) -> None:
    with scratch.scratch_directory() as one, scratch.scratch_directory() as other:
        began = datetime(2026, 11, 26, 15, 4, 9).astimezone().timestamp()
        announce(one, run(7, script="train.py", started=began))
        announce(other, run(8, job="mine"))
        listed = "name one: --run 8 (job mine), --run 7 (job local, train.py, since 15:04:09)"
        with pytest.raises(LocalError, match=re.escape(listed)):
            find_run(base=base)
        assert find_run("8", base=base) == find_run("mine", base=base) == run(8, job="mine")
        assert find_run("local", base=base).script == "train.py"
        with pytest.raises(LocalError, match="no `quicoll run` with the process or the job '9' is at work here"):
            find_run("9", base=base)


def test_a_name_that_two_runs_have_is_not_enough(base: Path) -> None:
    with scratch.scratch_directory() as one, scratch.scratch_directory() as other:
        announce(one, run(7))
        announce(other, run(8))
        with pytest.raises(LocalError, match=re.escape("name one: --run 7 (job local), --run 8 (job local)")):
            find_run("local", base=base)


def test_a_run_that_has_not_come_so_far_or_says_nonsense_is_none(base: Path) -> None:
    with scratch.scratch_directory(), scratch.scratch_directory() as other:
        (other / "run.json").write_text('{"pid": 1')
        with pytest.raises(LocalError, match="is at work here"):
            find_run(base=base)


def test_what_a_dead_run_left_is_no_run(base: Path) -> None:
    left = base / "quicoll-run-left"
    left.mkdir(mode=0o700)
    (left / "lock").touch()
    announce(left, run(7))
    with pytest.raises(LocalError):
        find_run(base=base)
