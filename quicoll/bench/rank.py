"""A rank of a benchmark: `python -m quicoll.bench.rank CASES RESULT`; `quicoll bench` starts it, by its supervisor.

CASES is a file with the programme; rank 0 writes what it measured to RESULT, one JSON object a line, one line a case.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import quicoll
from quicoll.bench.cases import Programme
from quicoll.bench.contenders import contenders

if TYPE_CHECKING:
    from quicoll.bench.cases import Case
    from quicoll.bench.contenders import Contender
    from quicoll.job import Job

__all__: list[str] = []

_JOIN_S = 120.0
_MOST_CALLS = 10_000


async def measure(plan: Programme, result: Path) -> None:
    """Carry the plan out as one of its ranks."""
    async with quicoll.join(join_timeout=_JOIN_S) as job:
        made = await contenders(plan, job)
        for case in plan.cases:
            samples: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in made}
            calls = [await _calls(job, contender, case, plan.round_s) for contender in made]
            for _ in range(plan.rounds):
                for contender, often in zip(made, calls, strict=True):
                    samples[contender.name].append(await _round(job, contender, case, often))
            if job.rank == 0:
                line: dict[str, Any] = {"case": msgspec.to_builtins(case), "samples": samples}
                with result.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        for contender in made:
            await contender.close()
        await job.group.barrier()


async def _calls(job: Job, contender: Contender, case: Case, round_s: float) -> int:
    """Return how often a contender does a case in a round, the same on every rank, after it has done it twice."""
    await contender.prepare(case)
    await contender.call(case)  # what the first call makes for all later ones does not count
    began = time.perf_counter()
    await contender.call(case)
    often = max(1, min(_MOST_CALLS, round(round_s / (time.perf_counter() - began))))
    return int(await job.group.broadcast_object(often))


async def _round(job: Job, contender: Contender, case: Case, calls: int) -> dict[str, float]:
    """Return seconds and CPU seconds of one call, the mean over a round's; the slowest rank's seconds count."""
    gc.collect()  # what earlier work left; it would come due in the middle of this one's
    await job.group.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(calls):
        await contender.call(case)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    figures = await job.group.all_gather_object([seconds / calls, cpu / calls])
    return {"seconds": max(each[0] for each in figures), "cpu": sum(each[1] for each in figures)}


def main() -> None:
    """Run as one rank."""
    plan, result = Path(sys.argv[1]), Path(sys.argv[2])
    asyncio.run(measure(msgspec.json.decode(plan.read_bytes(), type=Programme), result))


if __name__ == "__main__":
    main()
