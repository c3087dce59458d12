"""The commands, as a user runs them: real processes, real QUIC on the loopback interface, real faults (C4, C6)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from depth import some
from networks import needs_v6

from quicoll.cli.main import main

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


def quicoll(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quicoll.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def here(*arguments: str | Path) -> int | str | None:
    """The same in this process, for what starts no other; the exit status. A process takes longer than the command."""
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    return ended.value.code


def test_the_demo_recovers_from_both_faults_to_the_bits_of_an_undisturbed_process(tmp_path: Path) -> None:
    report_file = tmp_path / "demo.json"
    done = quicoll("demo", "--workers", "3", "--steps", "36", "--json", report_file)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_file.read_text())
    assert report["bit_identical"]
    assert report["final_digest"] == report["baseline_digest"]
    assert report["accuracy"] == report["baseline_accuracy"] >= 0.95
    assert (report["workers"], report["steps"], report["failures"]) == (3, 36, [])
    killed, cut = report["recoveries"]
    assert (killed["cause"], killed["node"], killed["rank"]) == ("killed", "worker-2", 2)
    assert (cut["cause"], cut["node"]) == ("network cut", "worker-1")
    for recovery in (killed, cut):
        assert recovery["abort_s"] > 0
        assert recovery["resume_s"] > 0
        assert recovery["rejoined_s"] > recovery["abort_s"]
    assert cut["rejoined_s"] > 4.0, "not before its network was back"
    assert report["restarts"]["worker-2"] == 1
    assert report["views"] >= 5
    assert "hold, bit for bit, what one process trained alone" in done.stdout
    assert "\x1b" not in done.stdout, "plain lines where there is no terminal"


def test_the_blocking_example_needs_no_event_loop() -> None:
    done = quicoll("run", "-n", "2", EXAMPLES / "blocking.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: mean [0.  0.5 1.  1.5], rank 0's [0.  0.5 1.  1.5]" in done.stdout


def test_the_training_loop_example_gives_the_same_digest_on_any_number_of_ranks_and_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    """Two ranks, from the beginning: tests/loopback/test_recovery.py."""
    loop = EXAMPLES / "train_loop.py"
    straight = quicoll("run", "-n", "1", loop, "--steps", "102", "--checkpoints", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000100.safetensors"]
    resumed = quicoll("run", "-n", "3", loop, "--steps", "102", "--checkpoints", tmp_path)
    assert "at step 100" in resumed.stdout
    digests = {
        line.rpartition(" ")[2] for done in (straight, resumed) for line in done.stdout.splitlines() if "digest" in line
    }
    assert len(digests) == 1, straight.stdout + resumed.stdout


def test_certificates_made_by_hand_let_their_nodes_in(tmp_path: Path) -> None:
    """The job's name is the one in the certificates, unless another is given. The coordinator is on every address."""
    certs = tmp_path / "certs"
    assert here("certs", "init", certs, "--job", "alpha") == 0
    assert here("certs", "issue", certs, "--role", "coordinator", "--node", "coordinator") == 0
    for node in ("worker-0", "worker-1"):
        assert here("certs", "issue", certs, "--role", "worker", "--node", node) == 0
    done = quicoll("run", "--certs", certs, "--restarts", "0", "--listen", "0.0.0.0:0", EXAMPLES / "allreduce.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "coordinator of job alpha" in done.stdout
    for rank in range(2):
        assert f"rank {rank} of 2: [3. 3. 3.]" in done.stdout


@pytest.mark.parametrize("listen", [pytest.param(each, marks=needs_v6) for each in some(["[::]:0", "[::1]:0"], 2)])
def test_workers_find_a_coordinator_on_ipv6(listen: str) -> None:
    done = quicoll("run", "-n", "2", "--restarts", "0", "--listen", listen, EXAMPLES / "allreduce.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[3. 3. 3.]") == 2


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = quicoll("run", "--listen", address, EXAMPLES / "allreduce.py")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"quicoll: the coordinator could not start on {address}: ")
    assert "in use" in line


def test_mistakes_on_the_command_line_are_one_clear_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in [
        (["run", tmp_path / "absent.py"], "there is no script"),
        (["run", "--certs", tmp_path / "none", EXAMPLES / "allreduce.py"], "none"),
        (["demo", "--workers", "2"], "majority"),
        (["demo", "--steps", "5"], "24 steps or more"),
    ]:
        assert here(*arguments) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
