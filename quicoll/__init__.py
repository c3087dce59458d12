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
from quicoll.audit.environment import DeterminismReport, determinism_report
from quicoll.collectives.group import Group
from quicoll.collectives.handle import Handle
from quicoll.collectives.shards import Leaves, Shards
from quicoll.config import Config
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
from quicoll.job import Job, join
from quicoll.membership.view import Member, View
from quicoll.numerics.generator import Generator
from quicoll.numerics.reduce import ReduceOp
from quicoll.numerics.seed import Seed
from quicoll.observability.events import Event, JsonLines, Observer
from quicoll.observability.stragglers import Straggler
from quicoll.step import Step

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
