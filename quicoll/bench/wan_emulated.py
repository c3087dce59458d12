"""A cell over real sockets: a network namespace for each rank, and an emulator that passes packets between them.

The emulator is a program beside quicoll, with the command line of `wanem`:

    python EMULATOR -n HOSTS -s SEED -t SECONDS -p PREFIX --cc TCP_CONTROL -c COMMAND ... -- PROGRAM ...

It makes the namespaces, runs PROGRAM in each with RANK, MASTER_ADDR, WANEM_ADDR and GLOO_SOCKET_IFNAME set, ends after
SECONDS at the latest, and takes down all that it made, also at SIGTERM. Nothing leaves the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quicoll.bench.wan_ranks import RankPlan
from quicoll.bench.wan_timing import WanSamples
from quicoll.errors import LocalError
from quicoll.rendezvous.scratch import scratch_directory
from quicoll_transport.security.authority import create_authority, issue
from quicoll_transport.security.identity import COORDINATOR, WORKER

if TYPE_CHECKING:
    from quicoll.bench.wan import WanCell, WanLink

__all__ = ["demand_emulator", "emulate_cell", "emulator_commands", "tcp_control"]

_PORT = 7100
_START_S = 180.0
"""Seconds that processes may take to start and to end, beside the cell's own."""
_TAKE_DOWN_S = 30.0
_TCP_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_TUN = Path("/dev/net/tun")
_SAID = 20  # lines of the processes that are told of when they fail


def demand_emulator(emulator: Path, *, gloo: bool) -> None:
    """Refuse, before anything is started, where cells cannot be emulated.

    Args:
        emulator: The program.
        gloo: Whether Gloo is to take part.
    Raises:
        LocalError: What is missing.
    """
    missing = []
    if not emulator.is_file():
        missing.append(f"the emulator: there is no file {emulator}")
    if sys.platform != "linux":
        missing.append("Linux, for its network namespaces")
    elif os.geteuid() != 0:
        missing.append("root, for network namespaces")
    missing += [f"the program {name}" for name in ("gcc", "ip") if shutil.which(name) is None]
    if not _TUN.exists():
        missing.append(f"{_TUN}")
    if gloo and find_spec("torch") is None:
        missing.append("torch, for Gloo: pip install 'quicoll[torch]', or --no-gloo")
    if missing:
        raise LocalError(f"--emulator needs {'; '.join(missing)}. Without --emulator the links are simulated")


def tcp_control(controls: Path = _TCP_CONTROLS) -> str:
    """Return the congestion control for Gloo's TCP: bbr where the kernel has it, else cubic."""
    try:
        return "bbr" if "bbr" in controls.read_text().split() else "cubic"
    except OSError:
        return "cubic"


def emulator_commands(link: WanLink) -> list[str]:
    """Return what the emulator is told to make of a link."""
    rate, queue = round(link.mbit * 1e6), link.queue_bytes(link.mbit)
    commands = [
        f"set up {rate} down {rate} upqueue {queue} downqueue {queue}",
        f"set delay {round(link.rtt_ms * 500)}us loss {link.loss:g} burst {link.burst if link.burst > 1 else 0:g}",
    ]
    if link.back_mbit:
        commands.append(f"set 0 down {round(link.back_mbit * 1e6)} downqueue {link.queue_bytes(link.back_mbit)}")
    return commands


def emulate_cell(cell: WanCell, seed: int, *, emulator: Path, gloo: bool, tcp: str) -> dict[str, WanSamples]:
    """Run a cell once; return its samples by contender.

    Args:
        cell: What is measured.
        seed: Of what the links lose.
        emulator: The program.
        gloo: Whether Gloo takes part, after quicoll and in the same processes.
        tcp: Congestion control of Gloo's TCP.
    Raises:
        LocalError: The emulator or a rank failed, or did not end in time; with what it said.
    """
    seconds = cell.limit_s * (2 if gloo else 1) + _START_S
    with scratch_directory() as directory:
        create_authority(directory, job="bench", days=2)
        issue(directory, role=COORDINATOR, node="coordinator", days=2)
        for rank in range(cell.ranks):
            issue(directory, role=WORKER, node=f"worker-{rank}", days=2)
        told, result, said = directory / "plan.json", directory / "result.json", directory / "said"
        plan = RankPlan(cell, gloo, "bench", str(directory), _PORT, str(result))
        told.write_bytes(msgspec.json.encode(plan))
        command: list[object] = [sys.executable, emulator, "-n", cell.ranks, "-s", seed, "-t", seconds, "--cc", tcp]
        command += ["-p", f"qb{os.getpid() % 1_000_000}x"]
        for line in emulator_commands(cell.link):
            command += ["-c", line]
        command += ["--", sys.executable, "-m", "quicoll.bench.wan_ranks", told]
        with said.open("wb") as output:
            status = _run([str(word) for word in command], output.fileno(), seconds + _TAKE_DOWN_S)
        if status != 0 or not result.exists():
            lines = said.read_text(errors="replace").splitlines()[-_SAID:]
            raise LocalError(f"{cell}: the emulated ranks ended with {status}: {' / '.join(lines)}")
        return msgspec.json.decode(result.read_bytes(), type=dict[str, WanSamples])


def _run(command: Sequence[str], output: int, patience_s: float) -> int:
    """Run the emulator to its end; whatever ends this, the emulator is asked to take its namespaces down."""
    # The ranks run what this process runs, wherever that was imported from.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(  # noqa: S603 - the program that was named
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_TAKE_DOWN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
