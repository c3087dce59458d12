"""The commands, as a user runs them: real processes, real QUIC on the loopback interface, real faults (C4, C6)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from depth import deep
from networks import has_v6

from quicoll.cli.main import main

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.warm("torch")]

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_IPV6 = ["[::]:0", "[::1]:0"] if has_v6() else []


def quicoll(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quicoll.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def here(*arguments: str | Path) -> int | str | None:
    """The same in this process; the exit status. A process of its own takes longer than most commands."""
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    return ended.value.code


def test_the_demo_recovers_from_both_faults_to_the_bits_of_an_undisturbed_process(tmp_path: Path) -> None:
    report_file = tmp_path / "demo.json"
    done = quicoll("demo", "--workers", "3", "--steps", "36", "--json", report_file, "--plot", tmp_path / "run.svg")
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
    assert done.stdout.endswith(f"drawn to {tmp_path / 'run.svg'}\n")
    picture = (tmp_path / "run.svg").read_text()
    assert "worker-2: killed" in picture
    assert "worker-1: network cut" in picture
    assert "\x1b" not in done.stdout, "plain lines where there is no terminal"


def test_the_example_with_divided_moments_has_the_same_bits_on_any_number_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = EXAMPLES / "sharded_adam.py"
    found = []
    for ranks in (1, 3):
        assert here("run", "-n", ranks, script, "--steps", "12") == 0
        lines = capsys.readouterr().out.splitlines()
        found += [line.partition("step 12, digest ")[2] for line in lines if "step 12, digest" in line]
        parts = [line for line in lines if "this rank had the moments of elements" in line]
        assert len(parts) == len(dict.fromkeys(parts)) == ranks, lines
    assert len(found) == 4
    assert len(set(found)) == 1


def test_the_blocking_example_needs_no_event_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """Its coordinator is on every address."""
    assert here("run", "-n", "2", "--listen", "0.0.0.0:0", EXAMPLES / "blocking.py") == 0
    said = capsys.readouterr().out
    for rank in range(2):
        assert f"rank {rank} of 2: mean [0.  0.5 1.  1.5], rank 0's [0.  0.5 1.  1.5]" in said


@pytest.mark.parametrize("listen", deep(ON_IPV6[:1] or ["127.0.0.1:0"], ["0.0.0.0:0", *ON_IPV6]))
def test_certificates_made_by_hand_let_their_nodes_in_on_ipv6_too(
    listen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job's name is the one in the certificates, unless another is given."""
    certs = tmp_path / "certs"
    assert here("certs", "init", certs, "--job", "alpha") == 0
    assert here("certs", "issue", certs, "--role", "coordinator", "--node", "coordinator") == 0
    for node in ("worker-0", "worker-1"):
        assert here("certs", "issue", certs, "--role", "worker", "--node", node) == 0
    assert here("run", "--certs", certs, "--restarts", "0", "--listen", listen, EXAMPLES / "allreduce.py") == 0
    said = capsys.readouterr().out
    assert "coordinator of job alpha" in said
    for rank in range(2):
        assert f"rank {rank} of 2: [3. 3. 3.]" in said


def test_a_port_that_is_taken_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert here("run", "--listen", address, EXAMPLES / "allreduce.py") == 2
    (line,) = capsys.readouterr().err.splitlines()
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
        (["demo", "--plot", tmp_path / "run.png"], "the picture is an SVG"),
    ]:
        assert here(*arguments) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
