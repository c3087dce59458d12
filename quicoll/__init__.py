"""quicoll: training processes that agree bit for bit, over networks that fail.

    async with quicoll.join() as job:
        total = await job.group.all_reduce(x, op="sum")
        async with job.step() as step:
            ...

`quicoll.blocking` has the same for synchronous loops, `quicoll.testing` a whole cluster inside one test, `quicoll.sim`
one on a virtual clock whose network breaks.
"""

from importlib import import_module
from types import ModuleType

from quicoll import blocking
from quicoll.config import Config
from quicoll.determinism import DeterminismReport, determinism_report
from quicoll.draws import Generator
from quicoll.errors import (
    AuditError,
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
    "AuditError",
    "CheckpointError",
    "Config",
    "Corrupted",
    "DeterminismReport",
    "Event",
    "Generator",
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
    "determinism_report",
    "join",
]


def __getattr__(name: str) -> ModuleType:
    """What not every program needs is imported when it is first asked for."""
    if name in ("checkpoint", "sim", "testing", "train"):
        return import_module(f"quicoll.{name}")
    raise AttributeError(f"module 'quicoll' has no attribute {name!r}")
