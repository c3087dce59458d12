"""A run in which one rank goes wrong, and what is found afterwards: in the errors of the others, and in the files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "quicoll.cli.main"]

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

PROGRAM = """
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import quicoll
from quicoll import blocking

wrong, place = sys.argv[1], Path(sys.argv[2])
over, pid = place / "over", place / "pid"


def stand_still_in_the_loader():
    while not over.exists():
        time.sleep(0.05)


with blocking.join() as job:
    went_wrong = False
    while job.committed_step < 20:
        try:
            with job.step() as step:
                if job.committed_step == 9 and job.node == "worker-1" and not went_wrong and not pid.exists():
                    went_wrong = True
                    pid.write_text(str(os.getpid()))
                    if wrong == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    elif wrong == "stopped":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    else:
                        stand_still_in_the_loader()
                job.group.all_reduce(np.ones(1, np.float32))
        except quicoll.StepAborted as aborted:
            if job.node == "worker-0" and not over.exists():
                notes = getattr(aborted.__cause__, "__notes__", [])
                (place / "notes").write_text("\\n".join(notes))
                over.write_text("")
                if wrong == "stopped":
                    os.kill(int(pid.read_text()), signal.SIGCONT)
"""


def run(wrong: str, place: Path, *options: str, timeout: float, local: bool = True) -> dict[str, Any]:
    """Run three ranks, of which the second one goes wrong in step 10. Return the first failure of the post-mortem."""
    program = place / "program.py"
    program.write_text(PROGRAM)
    settings = ["env", f"QUICOLL_TIMEOUT={timeout}", f"QUICOLL_LOCAL={'on' if local else 'off'}"]
    command = [*settings, *COMMAND, "run", "-n", "3", "--flight", str(place / "flight"), *options]
    ran = subprocess.run([*command, str(program), wrong, str(place)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = subprocess.run(
        [*COMMAND, "post-mortem", str(place / "flight"), "--json"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert told["unread"] == []
    end: dict[str, Any] = next(end for end in told["ends"] if end["kind"] != "changed")
    assert end["nodes"] == ["worker-0", "worker-1", "worker-2"]
    assert end["culprits"] == ["worker-1"]
    assert end["gave_up"] == ["worker-0", "worker-2"]
    return end


@pytest.mark.parametrize("local", [True, False], ids=["memory", "quic"])
def test_of_a_rank_that_was_killed_the_others_and_the_supervisor_tell(tmp_path: Path, local: bool) -> None:
    end = run("killed", tmp_path, timeout=60.0, local=local)
    assert end["kind"] == "lost"
    last = end["last"]["worker-1"]
    assert not last["written"]
    assert last["ended"] == "SIGKILL"
    assert last["operation"]["name"] == "all_reduce#8", "the one of step 9, which all have called"
    said = subprocess.run(
        [*COMMAND, "post-mortem", str(tmp_path / "flight")], capture_output=True, text=True, check=False
    ).stdout
    assert "view 1 of 3 ranks ended: worker-1 was lost\n" in said
    assert "the supervisor saw the process of worker-1 end with SIGKILL\n" in said
    assert "worker-0 and worker-2 gave up only because of that\n" in said


@pytest.mark.parametrize("local", [True, False], ids=["memory", "quic"])
def test_where_a_late_rank_was_is_in_the_notes_of_the_error_and_in_the_files(tmp_path: Path, local: bool) -> None:
    end = run("late", tmp_path, timeout=8.0, local=local)
    assert end["kind"] == "late"
    assert [(call["name"], call["step"], call["absent"]) for call in end["awaited"]] == [
        ("all_reduce#9", 10, ["worker-1"])
    ]
    for text in ((tmp_path / "notes").read_text(), end["last"]["worker-1"]["stack"]):
        assert "thread MainThread:" in text
        assert " in stand_still_in_the_loader" in text
    assert end["last"]["worker-1"]["step"]["step"] == 10


def test_that_a_stopped_rank_did_not_answer_is_in_the_notes_of_the_error(tmp_path: Path) -> None:
    # It would be lost, by its silence, before it is late: so long a silence is no loss here.
    end = run("stopped", tmp_path, "--lost-after", "120", timeout=8.0)
    assert end["kind"] == "late"
    text = (tmp_path / "notes").read_text()
    assert text.startswith("worker-1 was asked where it is, and did not answer within ")
    (file,) = (tmp_path / "flight").glob("worker-0.*.flight")
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["text"] for line in kept if line["kind"] == "stack"] == [text]
