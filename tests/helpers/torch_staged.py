"""Every operation with tensors of another device, on three ranks that are threads: `torch_staged.py FILE`.

In FILE is what came, of that device and of the CPU, and what is said where the device fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_away import put_away

from quicoll.errors import LocalError
from quicoll.torch_backend import group_at
from quicoll.torch_backend.asked import flat, put

WORLD = 3


def results(group: Any, rank: int, make: Callable[[Any], Any], take: Callable[[Any], Any]) -> dict[str, Any]:
    """What each operation gives on this rank."""
    found: dict[str, Any] = {}

    def tell(name: str, *tensors: Any) -> None:
        found[name] = [take(each).float().tolist() for each in tensors]

    def own(size: int = 6, dtype: Any = torch.float32) -> Any:
        return make((torch.arange(size) * (rank + 1) + rank).to(dtype))

    def none(size: int = 6) -> Any:
        return make(torch.zeros(size))

    def options(kind: Any, **given: Any) -> Any:
        made = kind()
        for name, value in given.items():
            setattr(made, name, value)
        return made

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = own(dtype=dtype)
        group.allreduce([x]).wait()
        tell(f"all_reduce {dtype}", x)
    x = own()
    group.allreduce([x], options(dist.AllreduceOptions, reduceOp=dist._make_nccl_premul_sum(0.5))).wait()
    tell("premul", x)
    part = own(12)[2:8]  # a view that does not begin where its memory does
    group.allreduce([part]).wait()
    tell("a view", part)
    x, y = own(), own(4)
    group.allreduce_coalesced([x, y]).wait()
    tell("coalesced", x, y)
    x = own()
    group.broadcast([x], options(dist.BroadcastOptions, rootRank=1)).wait()
    tell("broadcast", x)
    x = own()
    group.reduce([x], options(dist.ReduceOptions, rootRank=2)).wait()
    tell("reduce", x)
    outs = [none() for _ in range(WORLD)]
    group.allgather([outs], [own()]).wait()
    tell("all_gather", *outs)
    out = none(18)
    group.all_gather_single(out, own()).wait()
    tell("all_gather_single", out)
    out = none(2)
    group.reduce_scatter_single(out, own()).wait()
    tell("reduce_scatter_single", out)
    out = none(2)
    group.reduce_scatter([out], [[own(2) for _ in range(WORLD)]]).wait()
    tell("reduce_scatter", out)
    outs = [none() for _ in range(WORLD)] if rank == 0 else []
    group.gather([outs] if rank == 0 else [], [own()], options(dist.GatherOptions, rootRank=0)).wait()
    tell("gather", *outs)
    out = none()
    given = [[own() for _ in range(WORLD)]] if rank == 1 else []
    group.scatter([out], given, options(dist.ScatterOptions, rootRank=1)).wait()
    tell("scatter", out)
    outs = [none(2) for _ in range(WORLD)]
    group.alltoall(outs, [own(2) for _ in range(WORLD)]).wait()
    tell("all_to_all", *outs)
    out = none()
    group.all_to_all_single(out, own(), [], []).wait()
    tell("all_to_all_single", out)
    out = none()
    works = [group.recv([out], (rank - 1) % WORLD), group.send([own()], (rank + 1) % WORLD)]
    for work in works:
        work.wait()
    tell("messages", out)
    mixed = [own(), torch.arange(4.0) + rank]  # one here, one there
    group.allreduce_coalesced(mixed).wait()
    found["mixed"] = [take(mixed[0]).tolist(), mixed[1].tolist()]
    return found


def of_all_ranks(make: Callable[[Any], Any], take: Callable[[Any], Any]) -> list[dict[str, Any]]:
    store = dist.HashStore()

    def one(rank: int) -> dict[str, Any]:
        group = group_at(store, rank, WORLD, timeout=timedelta(seconds=200))
        found = results(group, rank, make, take)
        group.shutdown()
        return found

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(one, range(WORLD)))


def said_of(failing: Callable[[], object]) -> str:
    try:
        failing()
    except LocalError as error:
        return f"{type(error).__name__} {isinstance(error, dist.DistBackendError)} {error}"
    return "nothing"


def main() -> None:
    away = put_away()

    def there(tensor: Any) -> Any:
        return tensor if tensor.device.type == "cpu" else away.there(tensor)  # and nobody waits for the device here

    found = {"away": of_all_ranks(away.made, there), "cpu": of_all_ranks(torch.clone, lambda tensor: tensor)}
    tensor, away.broken = away.made(torch.ones(2)), "the device has an error"
    said = [said_of(lambda: flat(tensor)), said_of(lambda: put(tensor, torch.ones(2)))]
    Path(sys.argv[1]).write_text(json.dumps({**found, "said": said}))


if __name__ == "__main__":
    main()
