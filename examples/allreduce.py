"""Two ranks add their arrays: `quicoll run -n 2 examples/allreduce.py`."""

import asyncio

import numpy as np

import quicoll


async def main() -> None:
    async with quicoll.join() as job:
        total = await job.group.all_reduce(np.full(3, job.rank + 1.0), op="sum")
        print(f"rank {job.rank} of {job.world_size}: {total}")


asyncio.run(main())
