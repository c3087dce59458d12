"""Ranks that a torch program starts itself, by mp.spawn: `torch_spawned.py DIRECTORY`.

They make a process group at each place that torch knows for ranks to meet, one after the other. In the last one a rank
holds the interpreter's lock for three seconds in C, as a large library does that is loaded. Each rank leaves what it
got in DIRECTORY/rank<n>.json.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from ports import named_port

WORLD = 2
HOLD_US = 3_000_000


def ways(rank: int, ports: list[int], directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `init_process_group` is given."""
    place = {"rank": rank, "world_size": WORLD}
    yield "tcp", {"init_method": f"tcp://127.0.0.1:{ports[0]}", **place}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[1]))
    yield "env and arguments", place
    os.environ.update(MASTER_PORT=str(ports[2]), RANK=str(rank), WORLD_SIZE=str(WORLD))
    yield "env", {}
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        del os.environ[name]
    yield "file", {"init_method": f"file://{directory}/meeting", **place}
    served: Any = dist.TCPStore("127.0.0.1", ports[3], WORLD, rank == 0, timeout=timedelta(seconds=200))
    yield "a TCPStore", {"store": served, **place}
    yield "the same again", {"store": served, **place}
    yield "a FileStore", {"store": dist.FileStore(f"{directory}/store", WORLD), **place}
    yield "a prefix", {"store": dist.PrefixStore("some", dist.FileStore(f"{directory}/prefixed", WORLD)), **place}


def work(rank: int, ports: list[int], directory: Path) -> None:
    importlib.import_module("quicoll.torch_backend")  # where it is not installed
    found = {}
    for way, given in ways(rank, ports, directory):
        dist.init_process_group("quicoll", timeout=timedelta(seconds=200), **given)
        dist.new_group([0, 1], use_local_synchronization=True)
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        if way == "a prefix":
            if rank == 1:
                ctypes.PyDLL(None).usleep(HOLD_US)  # a PyDLL's functions are called with the lock
            dist.all_reduce(x)
        found[way] = x.item()
        dist.destroy_process_group()
    (directory / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    named = [named_port(socket.SOCK_STREAM) for _ in range(4)]
    torch.multiprocessing.spawn(work, (named, Path(sys.argv[1])), nprocs=WORLD)
