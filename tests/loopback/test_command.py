"""The command as a person meets it: Ctrl-C, outputs that cannot be written, reports for the next program."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quicoll import checkpoint, join
from quicoll.cli.main import main
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


def here(*arguments: object) -> int | str | None:
    """The same in this process, where a process of its own shows nothing more; the exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    return ended.value.code


SILENCE_S = 120.0  # of a command that draws four times a second: it hangs


class Terminal:
    """The command at a terminal of its own: its processes are that terminal's foreground group, as under a shell.

    It paints the names of the nodes there.
    """

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = os.openpty()
        # A shell gives a command SIGINT's own action, whatever the tests were started with.
        take = (
            "import fcntl, os, signal, sys, termios; signal.signal(signal.SIGINT, signal.SIG_DFL); "
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        with os.fdopen(theirs, "wb") as end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", take, *COMMAND, *map(str, arguments)],
                stdin=end,
                stdout=end,
                stderr=end,
                start_new_session=True,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )

    def read_until(self, text: str | None, *, times: int = 1) -> str:
        """What is written until a text has come so often; None: until the command has ended."""
        said = b""
        while text is None or said.count(text.encode()) < times:
            if not select.select([self._ours], [], [], SILENCE_S)[0]:
                self.process.send_signal(signal.SIGABRT)  # it shows where it is, which is read next
                text = None
            try:
                part = os.read(self._ours, 4096)
            except OSError:  # how Linux says that the other end is closed
                part = b""
            if not part:
                assert text is None, said.decode()
                break
            said += part
        return said.decode().replace("\r\n", "\n")

    def ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def end(self) -> tuple[int, str]:
        """The exit status, and what was still written; "^C" is the terminal's own."""
        rest = self.read_until(None).replace("^C", "")
        os.close(self._ours)
        return self.process.wait(), rest


def test_an_interrupted_coordinator_says_so_in_one_line_and_a_terminated_one_has_done_its_work(tmp_path: Path) -> None:
    create_authority(tmp_path, job="alpha")
    issue(tmp_path, role="coordinator", node="coordinator")
    arguments = ["coordinator", "--job", "alpha", "--certs", tmp_path, "--journal", tmp_path / "j.db"]
    arguments += ["--world-size", "1", "--listen", "127.0.0.1:0"]
    interrupted, terminated = (signal.SIGINT, 130, "quicoll: ended by SIGINT\n"), (signal.SIGTERM, 0, "")
    # The second takes the seed of the first from the journal.
    for (number, status, said), seed in zip((interrupted, terminated), (["--seed", "7"], []), strict=True):
        process = start(*arguments, *seed)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("coordinator of job alpha, seed 7, listening on 127.0.0.1:")
        process.send_signal(number)
        assert process.communicate() == ("", said)
        assert process.returncode == status
    refused = quicoll(*arguments, "--seed", "8")
    assert refused.stderr == "quicoll: seed 8 is asked for, but the journal was begun with 7\n"
    assert refused.returncode == 2


def test_a_coordinator_prints_each_event_as_an_object_and_nothing_else_on_stdout(tmp_path: Path) -> None:
    create_authority(tmp_path, job="alpha")
    issue(tmp_path, role="coordinator", node="coordinator")
    issue(tmp_path, role="worker", node="a")
    arguments = ["coordinator", "--job", "alpha", "--certs", tmp_path, "--journal", tmp_path / "j.db", "--seed", "7"]
    arguments += ["--world-size", "1", "--listen", "127.0.0.1:0", "--events", tmp_path / "events", "--json"]
    process = start(*arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    printed = [json.loads(process.stdout.readline())]
    assert (printed[0]["kind"], printed[0]["node"], printed[0]["seed"]) == ("listening", "coordinator", 7)
    process.send_signal(signal.SIGHUP)
    assert process.stderr.readline() == "certificates and deny list are read anew\n"

    async def one_step(coordinator: str) -> None:
        async with join(coordinator=coordinator, certs=str(tmp_path), node="a", job="alpha") as job, job.step():
            pass

    asyncio.run(one_step(printed[0]["address"]))
    while printed[-1]["kind"] != "job_done":
        printed.append(json.loads(process.stdout.readline()))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    printed += [json.loads(line) for line in out.splitlines()]
    assert {"node_joined", "view_installed", "step_committed", "job_done"} <= {each["kind"] for each in printed}
    kept = [json.loads(line) for line in (tmp_path / "events" / "coordinator.jsonl").read_text().splitlines()]
    for each in (*printed, *kept):
        del each["time"]  # is of the moment of writing
    assert printed == kept


def test_a_relay_prints_one_object_with_the_address_that_it_listens_on(tmp_path: Path) -> None:
    create_authority(tmp_path, job="alpha")
    issue(tmp_path, role="relay", node="relay")
    process = start("relay", "--job", "alpha", "--certs", tmp_path, "--listen", "127.0.0.1:0", "--json")
    assert process.stdout is not None
    found = json.loads(process.stdout.readline())
    host, _, port = found.pop("address").rpartition(":")
    assert found == {"kind": "listening", "job": "alpha"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    process.send_signal(signal.SIGTERM)
    assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_a_job_is_shown_on_a_terminal_in_place_until_ctrl_c_which_is_no_failure(tmp_path: Path) -> None:
    create_authority(tmp_path, job="alpha")
    for role in ("coordinator", "reader"):
        issue(tmp_path, role=role, node=role)
    coordinator = start(
        *("coordinator", "--job", "alpha", "--certs", tmp_path, "--journal", tmp_path / "j.db"),
        *("--world-size", "2", "--listen", "127.0.0.1:0"),
    )
    assert coordinator.stdout is not None
    address = coordinator.stdout.readline().split()[-1]
    terminal = Terminal("top", "--coordinator", address, "--certs", tmp_path, "--interval", "0.25", "--timeout", "60")
    shown = terminal.read_until(" HELD ", times=3)  # drawn over what was there
    assert "job alpha: for " in shown
    assert "\x1b[1A" in shown
    terminal.ctrl_c()
    status, rest = terminal.end()
    assert status == 0
    assert "Traceback" not in rest
    coordinator.send_signal(signal.SIGTERM)
    coordinator.communicate()
    gone = Terminal("status", "--coordinator", address, "--certs", tmp_path, "--timeout", "0.5")
    status, said = gone.end()
    assert status == 2
    assert "\x1b[?25h" in said  # what was turned while it asked has given the cursor back
    assert "\x1b[2Kquicoll: job alpha: nothing is known of it: the coordinator at 127.0.0.1:" in said


def test_ctrl_c_ends_a_run_with_one_line_and_no_word_of_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, quicoll\n"
        "async def main():\n"
        "    async with quicoll.join():\n"
        "        print('ready')\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    terminal = Terminal("run", "-n", "2", script)
    terminal.read_until(" ready\r\n", times=2)
    terminal.ctrl_c()
    assert terminal.end() == (130, "quicoll: ended by SIGINT\n")


def test_a_second_ctrl_c_ends_a_run_at_once_whose_worker_does_not_heed_the_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('not now'))\n"
        "print('ready')\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    terminal = Terminal("run", "-n", "1", "--grace", "600", script)
    terminal.read_until(" ready\r\n")
    terminal.ctrl_c()
    terminal.read_until(" not now\r\n")
    terminal.ctrl_c()
    assert terminal.end() == (130, "quicoll: ended by SIGINT\n")


TRAINING = """
import asyncio, sys
import numpy as np
import quicoll

class Task:
    def __init__(self):
        self.weights = np.zeros(4, np.float32)
    def architecture(self):
        return {}
    def parameters(self):
        return {"weights": self.weights}
    def forward(self, part):
        return part.shard + part.step
    def backward(self, loss):
        return [np.full(4, loss, np.float32)]
    def apply(self, average):
        self.weights += average[0]
    def state(self):
        return {"weights": self.weights}
    def load_state(self, state):
        self.weights[:] = state["weights"]

async def main():
    async with quicoll.join() as job:
        print("seed", job.view.seed)
        worker = quicoll.train.Worker(
            job, Task(), shards=4, checkpoints=quicoll.train.CheckpointPolicy(sys.argv[1], every=10**6),
            on_step=lambda step: print("step 5") if step == 5 else None,
        )
        await worker.run(steps=10**6)

asyncio.run(main())
"""


def test_a_terminated_run_ends_training_between_steps_and_the_last_committed_one_is_in_the_checkpoint(
    tmp_path: Path,
) -> None:
    script, checkpoints, events = tmp_path / "train.py", tmp_path / "checkpoints", tmp_path / "events"
    script.write_text(TRAINING)
    process = start("run", "-n", "2", "--seed", "7", "--grace", "60", "--events", events, script, checkpoints)
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if line == "[worker-0] step 5\n":
            break
    else:
        pytest.fail("".join(before) + process.communicate()[1])
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert (process.returncode, err) == (143, "quicoll: ended by SIGTERM\n")
    assert "Traceback" not in out
    assert {"[worker-0] seed 7\n", "[worker-1] seed 7\n"} <= set(before)
    told = [json.loads(line) for line in (events / "coordinator.jsonl").read_text().splitlines()]
    lost = [(each["cause"], each["left"]) for each in told if each["kind"] == "peer_lost"]
    assert sorted(lost) == [("worker-0 left the job: terminated", True), ("worker-1 left the job: terminated", True)]
    committed = [each["step"] for each in told if each["kind"] == "step_committed"]
    saved = checkpoint.latest(checkpoints)
    assert saved is not None
    assert saved.step == committed[-1] >= 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_cannot_be_written_is_one_line() -> None:
    for arguments in (["env"], ["explain", "barrier"], ["sim", "--seed", "2", "--ranks", "1", "--steps", "1"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.stderr == "quicoll: cannot write the output: No space left on device\n"
        assert done.returncode == 2


@pytest.mark.parametrize("seeds", [["--seed", "2"], ["--seeds", "2:3"]])
def test_a_report_to_stdout_stands_there_alone(seeds: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert here("sim", *seeds, "--ranks", "2", "--steps", "2", "--json", "-") == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["seeds"] == 1
    assert said.err  # what people read


@pytest.mark.parametrize(
    "arguments", [["sim", "--seed", "2"], ["sim", "--seeds", "0:9"], ["demo"], ["explain", "barrier"]], ids=" ".join
)
def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing" / "file"
    assert here(*arguments, "--plot" if arguments[0] == "explain" else "--json", missing) == 2
    said = capfd.readouterr()
    assert said.err == f"quicoll: cannot write {missing}: No such file or directory\n"
    if arguments[0] != "explain":
        assert said.out == ""  # found before the work, not after it


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0"])
def test_a_loss_deadline_that_cannot_be_is_refused_before_anything_is_started(
    tmp_path: Path, seconds: str, capfd: pytest.CaptureFixture[str]
) -> None:
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
        assert here(*command) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("quicoll: lost_after must be above 0 and below a million seconds, not ")


def test_settings_stand_in_columns(capfd: pytest.CaptureFixture[str]) -> None:
    assert here("env") == 0
    said = capfd.readouterr().out
    columns = {len(line) - len(line.split(None, 1)[1]) for line in said.splitlines() if not line.startswith("site ")}
    assert len(columns) == 1, said
