"""The same without asyncio: `quicoll run -n 3 examples/blocking.py`."""

import numpy as np

import quicoll.blocking

with quicoll.blocking.join() as job:
    mean = job.group.all_reduce(np.arange(4.0) * job.rank, op="avg")
    first = job.group.broadcast(mean + job.rank, root=0)
    job.group.barrier()
    print(f"rank {job.rank} of {job.world_size}: mean {mean}, rank 0's {first}")
