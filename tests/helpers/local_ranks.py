"""A rank whose operations go through the memory of its host: `quicoll run -n N local_ranks.py WHAT SIZE [EACH]`.

WHAT is what becomes of rank 1 at its tenth call: "killed", "stopped", "forks" or "nothing". Each rank says one line at
its end.
EACH: so many ranks have one address, and the next ones another, so that by the view there are several hosts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np

import quicoll

__all__: list[str] = []


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def heard(event: quicoll.Event) -> None:
    if event.kind == "shared_memory":
        say(f"ranks {event.fields.get('ranks')}: {event.fields['used']}")


async def main(what: str, size: int, each: int) -> None:
    number = int(os.environ["QUICOLL_NODE"].rpartition("-")[2])
    listen = f"127.0.0.{1 + number // each}:0" if each else None
    async with quicoll.join(timeout=30.0, listen=listen, observer=heard if each else None) as job:
        group = job.group
        x = quicoll.empty(size, "float32") if job.rank % 2 else np.empty(size, np.float32)
        x[:] = job.rank + 1
        right = np.float32(job.world_size * (job.world_size + 1) // 2)
        calls = 0
        say(f"shares memory: {job.group._here.near}")
        try:
            while calls < 200:
                if calls == 10 and job.rank == 1 and what != "nothing":
                    if what == "forks":
                        child = os.fork()
                        if child == 0:
                            try:
                                group.all_reduce(x)
                            except quicoll.LocalError:
                                os._exit(7)
                            os._exit(1)
                        _, status = await asyncio.to_thread(os.waitpid, child, 0)
                        assert os.waitstatus_to_exitcode(status) == 7
                    else:
                        os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)
                result = await group.all_reduce(x)
                if not (result == right).all():
                    say(f"WRONG after {calls}: {result}")
                    return
                calls += 1
            say(f"rank {job.rank} is done")
        except quicoll.QuicollError as error:
            say(f"rank {job.rank} got {type(error).__name__} of {error.node} lost {error.lost}")
            os._exit(0)  # the others do not come back


if os.environ.get("QUICOLL_RESTARTS", "0") == "0":  # the one that was killed has nothing to do any more
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
