"""Three ranks, forked by multiprocessing, of which one is through before the others: `torch_parting.py DIRECTORY`.

Rank 0 destroys its group and goes on to do what the others wait for; then its process ends, and they use the group once
more. Each rank leaves what it got in DIRECTORY/rank<n>.json.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.util
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

WORLD = 3
LIMIT_S = 100.0


def swap(rank: int, other: int) -> float:
    """What two ranks tell each other."""
    x = torch.empty(1)
    works = [dist.irecv(x, other), dist.isend(torch.tensor([float(rank)]), other)]
    for work in works:
        if work is not None:
            work.wait()
    return x.item()


def await_file(path: Path) -> bool:
    until = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def work(rank: int, directory: Path) -> None:
    importlib.import_module("quicoll.torch_backend")  # where it is not installed
    dist.init_process_group(
        "quicoll", init_method=f"file://{directory}/meeting", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=2 * LIMIT_S),
    )  # fmt: skip
    found = [swap(rank, other) for other in range(WORLD) if other != rank] if rank == 0 else [swap(rank, 0)]
    if rank == 0:
        dist.destroy_process_group()
        (directory / "destroyed").touch()
        # Runs before the group's own, which has the same place among those that a process of multiprocessing ends with.
        multiprocessing.util.Finalize(None, (directory / "ending").touch, exitpriority=10)
    else:
        assert await_file(directory / "destroyed")
        assert await_file(directory / "ending")
        found += [swap(rank, 3 - rank) for _ in range(20)]
        dist.destroy_process_group()
    (directory / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(rank, Path(sys.argv[1]))) for rank in range(WORLD)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))
