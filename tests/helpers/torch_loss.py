"""One of several processes that meet at a file, of which the last is killed: the others tell what they got.

torch_loss.py DIRECTORY RANK WORLD
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import quicoll
import quicoll.torch_backend


def main() -> None:
    directory, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "quicoll",
        init_method=f"file://{directory}/meeting",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=200),
    )
    pair = dist.new_group([0, 1])
    dist.barrier()
    (directory / f"ready{rank}").touch()
    if rank == world - 1:
        # A barrier ends at each rank when that rank knows all: what it still has to tell others dies with its process.
        waited_until = time.monotonic() + 200
        while len(list(directory.glob("ready*"))) < world and time.monotonic() < waited_until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    told = []
    # The group of two has nobody that was killed: it ends with the view of which it is a part.
    for call in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.barrier(), lambda: dist.barrier(group=pair)):
        try:
            call()
        except dist.DistBackendError as error:
            kind = "PeerError" if isinstance(error, quicoll.PeerError) else type(error).__name__
            told.append([kind, getattr(error, "node", None), list(getattr(error, "lost", ()))])
    (directory / f"told{rank}.json").write_text(json.dumps({"told": told, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()
