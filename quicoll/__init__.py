"""quicoll: training processes that agree bit for bit, over networks that fail.

    async with quicoll.join() as job:
        total = await job.group.all_reduce(x, op="sum")
        async with job.step() as step:
            ...

`quicoll.blocking` has the same for synchronous loops, `quicoll.testing` a whole cluster inside one test.
"""

from quicoll import blocking
from quicoll.config import Config
from quicoll.errors import (
    CheckpointError,
    Corrupted,
    LocalError,
    Mismatch,
    Partitioned,
    PeerError,
    QuicollError,
    StepAborted,
)
from quicoll.group import Group
from quicoll.handle import Handle
from quicoll.job import Job, Step, join
from quicoll.membership.view import Member, View
from quicoll.observe import Event, JsonLines, Observer
from quicoll.reduce import ReduceOp
from quicoll.seed import Seed
from quicoll.shards import Leaves, Shards
from quicoll.stragglers import Straggler

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Config",
    "Corrupted",
    "Event",
    "Group",
    "Handle",
    "Job",
    "JsonLines",
    "Leaves",
    "LocalError",
    "Member",
    "Mismatch",
    "Observer",
    "Partitioned",
    "PeerError",
    "QuicollError",
    "ReduceOp",
    "Seed",
    "Shards",
    "Step",
    "StepAborted",
    "Straggler",
    "View",
    "__version__",
    "blocking",
    "join",
]
