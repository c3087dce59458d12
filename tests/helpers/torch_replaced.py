"""One of several processes of torch's, of which the one called 2 is killed; who is called 3 comes in its place.

torch_replaced.py DIRECTORY NAME NAMES...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import quicoll
import quicoll.torch_backend

LIMIT = timedelta(seconds=200)
FIRST = ["0", "1", "2"]


def main() -> None:
    directory, name, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    store = dist.FileStore(str(directory / "meeting"), -1)
    native = hasattr(dist, "_reconfigure")
    given: dict[str, Any] = {"enable_reconfigure": True} if native else {}
    dist.init_process_group(
        "quicoll", store=store, rank=min(int(name), 2), world_size=3, timeout=LIMIT, **given
    )  # fmt: skip
    group: Any = dist.group.WORLD
    store.set(f"handle/{name}", group.get_reconfigure_handle())

    def change(uuid: int, members: list[str]) -> None:
        handles = [store.get(f"handle/{member}").decode() for member in members]
        if native:
            dist._reconfigure(uuid=uuid, handles=handles, timeout=LIMIT).wait()
        else:
            group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=LIMIT)).wait()

    said: dict[str, Any] = {}
    if name in FIRST:
        if native:
            change(1, FIRST)
        assert dist.get_rank() == int(name)
        part: Any = dist.new_group([0, 1])
        dist.barrier()
        (directory / f"ready{name}").touch()
        if name == "2":
            until = time.monotonic() + LIMIT.total_seconds()
            while len(list(directory.glob("ready*"))) < len(FIRST) and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(1))
        except dist.DistBackendError as error:
            said["told"] = ["PeerError" if isinstance(error, quicoll.PeerError) else "", getattr(error, "node", "")]
        try:
            part.get_reconfigure_handle()
        except quicoll.LocalError as error:
            said["part"] = str(error)
    members = ["3", "0", "1"] if "3" in names else ["1", "0"]
    change(2, members)
    x = torch.tensor([float(1 << min(int(name), 2))])
    dist.all_reduce(x)
    said["sum"] = x.item()
    said["place"] = [dist.get_rank(), dist.get_world_size()]
    if "3" not in names:
        x = torch.tensor([float(1 << int(name))])
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        said["part of those left"] = x.item()
    (directory / f"{name}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
