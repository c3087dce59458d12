"""The command as a person meets it: Ctrl-C, outputs that cannot be written, reports for the next program."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quicoll_transport.security.authority import create_authority, issue

COMMAND = [sys.executable, "-m", "quicoll.cli.main"]

pytestmark = pytest.mark.loopback


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends SIGINT to a group; here it goes to the command alone
    )


def quicoll(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False)


def interrupted(process: subprocess.Popen[str], *, after: str) -> tuple[str, str]:
    """Send SIGINT once a line has come that begins so; what stdout and stderr said from there on."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(after):
            break
    else:
        pytest.fail(process.communicate()[1])
    process.send_signal(signal.SIGINT)
    return process.communicate()


def test_an_interrupted_coordinator_says_so_in_one_line_and_a_terminated_one_has_done_its_work(tmp_path: Path) -> None:
    create_authority(tmp_path, job="alpha")
    issue(tmp_path, role="coordinator", node="coordinator")
    for number, status, said in ((signal.SIGINT, 130, "quicoll: ended by SIGINT\n"), (signal.SIGTERM, 0, "")):
        arguments = ["--job", "alpha", "--certs", tmp_path, "--journal", tmp_path / "j.db", "--world-size", "1"]
        process = start("coordinator", *arguments, "--listen", "127.0.0.1:0")
        assert process.stdout is not None
        assert "listening" in process.stdout.readline()
        process.send_signal(number)
        assert process.communicate() == ("", said)
        assert process.returncode == status


def test_an_interrupted_run_ends_its_children_without_a_traceback_of_ours(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nprint('ready', flush=True)\nsignal.pause()\n"
    )
    process = start("run", "-n", "1", script)
    out, err = interrupted(process, after="[worker-0] ready")
    assert process.returncode == 130
    assert (out, err) == ("", "quicoll: ended by SIGINT\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_cannot_be_written_is_one_line() -> None:
    for arguments in (["env"], ["explain", "barrier"], ["sim", "--seed", "2", "--ranks", "1", "--steps", "1"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.stderr == "quicoll: cannot write the output: No space left on device\n"
        assert done.returncode == 2


@pytest.mark.parametrize("seeds", [["--seed", "2"], ["--seeds", "2:3"]])
def test_a_report_to_stdout_stands_there_alone(seeds: list[str]) -> None:
    done = quicoll("sim", *seeds, "--ranks", "2", "--steps", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seeds"] == 1
    assert done.stderr  # what people read


@pytest.mark.parametrize(
    "arguments", [["sim", "--seed", "2"], ["sim", "--seeds", "0:9"], ["demo"], ["explain", "barrier"]], ids=" ".join
)
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    missing = tmp_path / "missing" / "file"
    done = quicoll(*arguments, "--svg" if arguments[0] == "explain" else "--json", missing)
    assert done.returncode == 2
    assert done.stderr == f"quicoll: cannot write {missing}: No such file or directory\n"
    if arguments[0] != "explain":
        assert done.stdout == ""  # found before the work, not after it


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0"])
def test_a_loss_deadline_that_cannot_be_is_refused_before_anything_is_started(tmp_path: Path, seconds: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    create_authority(tmp_path, job="alpha")
    issue(tmp_path, role="coordinator", node="coordinator")
    coordinator = [
        "coordinator",
        "--job",
        "alpha",
        "--certs",
        tmp_path,
        "--journal",
        tmp_path / "j",
        "--world-size",
        "1",
    ]
    for command in (["run", "--lost-after", seconds, script], [*coordinator, "--lost-after", seconds]):
        done = quicoll(*command)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("quicoll: lost_after must be above 0 and below a million seconds, not ")


def test_settings_stand_in_columns() -> None:
    done = quicoll("env")
    columns = {
        len(line) - len(line.split(None, 1)[1]) for line in done.stdout.splitlines() if not line.startswith("site ")
    }
    assert len(columns) == 1, done.stdout
