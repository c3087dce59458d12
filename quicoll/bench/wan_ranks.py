"""A rank of a cell over real sockets: `python -m quicoll.bench.wan_ranks PLAN`, one in each emulated host.

The environment says who it is: RANK, WANEM_ADDR (the host's own address), MASTER_ADDR (that of rank 0's) and, for Gloo,
GLOO_SOCKET_IFNAME. Rank 0 starts the coordinator, as a process of its own beside it, since Gloo's operations block the
loop that calls them. It writes what all have measured to the file that the plan names.

`measure_job` is the same for hosts that are really far apart, in a job that is there already.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import quicoll
from quicoll.bench.contenders import Gloo, Quicoll
from quicoll.bench.wan import WanCell  # noqa: TC001 - msgspec reads it at run time
from quicoll.bench.wan_timing import WanSamples, time_operations
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.job import Job

__all__ = ["RankPlan", "measure_job"]

_JOIN_S = 120.0
_LOST_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What the ranks of an emulated cell are told.

    Attributes:
        cell: What is measured.
        gloo: Whether Gloo takes part, after quicoll.
        job: Name of the job.
        certs: Directory of its certificates.
        port: Of the coordinator.
        result: File for what was measured.
    """

    cell: WanCell
    gloo: bool
    job: str
    certs: str
    port: int
    result: str


async def measure_job(job: Job, cell: WanCell, gloo_at: str | None) -> dict[str, WanSamples]:
    """Measure a cell with all ranks of a job, quicoll and then Gloo; return their samples by contender.

    Args:
        job: This rank's.
        cell: What is measured.
        gloo_at: The address of rank 0's host where Gloo's ranks meet; None leaves Gloo out.
    Raises:
        LocalError: The job has another number of ranks, or torch is not installed.
    """
    if job.world_size != cell.ranks:
        raise LocalError(f"rank {job.rank}: the job has {job.world_size} ranks, and {cell.ranks} are to be measured")
    # First, on links that nothing else is on or was on: what Gloo sent would be in its queues, and a connection that
    # has been idle for seconds is not a new one.
    found = {"quicoll": await time_operations(job, Quicoll(job), cell, time.monotonic)}
    if gloo_at is None:
        return found
    if found["quicoll"].failed:
        return {**found, "gloo": WanSamples((), "not measured, for quicoll failed, by whose barrier its ranks meet")}
    gloo = await Gloo.joined(job, gloo_at, cell.limit_s)
    found["gloo"] = await time_operations(job, gloo, cell, time.monotonic)
    if not found["gloo"].failed:
        await gloo.close()
    return found


async def _measure(plan: RankPlan, rank: int, address: str, master: str) -> dict[str, WanSamples]:
    async with quicoll.join(
        coordinator=f"{master}:{plan.port}",
        job=plan.job,
        node=f"worker-{rank}",
        certs=plan.certs,
        listen=f"{address}:0",
        rank_hint=rank,
        congestion=plan.cell.congestion,
        lost_after=_LOST_AFTER_S,
        timeout=plan.cell.limit_s,
        join_timeout=_JOIN_S,
        local=False,
    ) as job:
        if job.rank != rank:
            raise LocalError(f"host {rank} has rank {job.rank}; the links are by host")
        return await measure_job(job, plan.cell, master if plan.gloo else None)


@contextlib.contextmanager
def _coordinator(plan: RankPlan, address: str) -> Iterator[None]:
    """Run the coordinator for the block; it ends with this process's group at the latest."""
    command: list[Any] = [sys.executable, "-m", "quicoll.cli.main", "coordinator", "--job", plan.job]
    command += ["--listen", f"{address}:{plan.port}", "--world-size", plan.cell.ranks, "--certs", plan.certs]
    command += ["--journal", Path(plan.certs) / "journal.sqlite", "--lost-after", _LOST_AFTER_S]
    process = subprocess.Popen(  # noqa: S603 - our own command
        [str(word) for word in command], stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Run as one rank."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RankPlan)
    rank, address, master = int(os.environ["RANK"]), os.environ["WANEM_ADDR"], os.environ["MASTER_ADDR"]
    with _coordinator(plan, address) if rank == 0 else contextlib.nullcontext():
        found = asyncio.run(_measure(plan, rank, address, master))
    if rank == 0:
        Path(plan.result).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
