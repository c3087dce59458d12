"""quicoll: training processes that agree bit for bit, over networks that fail.

    async with quicoll.join() as job:
        total = await job.group.all_reduce(x, op="sum")
        async with job.step() as step:
            ...

`quicoll.blocking` has the same for synchronous loops, `quicoll.testing` a whole cluster inside one test, `quicoll.sim`
one on a virtual clock whose network breaks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quicoll.errors import (
    AuditError,
    CheckpointError,
    Corrupted,
    Dismissed,
    Diverged,
    JobDone,
    LocalError,
    Mismatch,
    Partitioned,
    PeerError,
    PiecesMissing,
    QuicollError,
    ShardLost,
    StepAborted,
    Terminated,
)

if TYPE_CHECKING:
    from quicoll import blocking
    from quicoll import checkpoint as checkpoint
    from quicoll import data as data
    from quicoll import sim as sim
    from quicoll import testing as testing
    from quicoll import train as train
    from quicoll.audit.environment import DeterminismReport, determinism_report
    from quicoll.collectives.group import Group
    from quicoll.collectives.handle import Handle
    from quicoll.collectives.shards import Leaves, Shards
    from quicoll.config import Config
    from quicoll.job import Job
    from quicoll.joining.entry import connect, join
    from quicoll.local.tensors import empty
    from quicoll.membership.view import Member, View
    from quicoll.numerics.generator import Generator
    from quicoll.numerics.reduce import ReduceOp
    from quicoll.numerics.seed import Seed
    from quicoll.observability.events import Event, JsonLines, Observer
    from quicoll.observability.stragglers import Straggler
    from quicoll.observability.tracking import Tracker
    from quicoll.state.sharded import Sharded
    from quicoll.step.context import Step
    from quicoll.tiers.shared import SharedState
    from quicoll.tiers.tier_set import TierSet
    from quicoll.tiers.tiers import Tiers

__version__ = "0.2.0"

__all__ = [
    "AuditError",
    "CheckpointError",
    "Config",
    "Corrupted",
    "DeterminismReport",
    "Dismissed",
    "Diverged",
    "Event",
    "Generator",
    "Group",
    "Handle",
    "Job",
    "JobDone",
    "JsonLines",
    "Leaves",
    "LocalError",
    "Member",
    "Mismatch",
    "Observer",
    "Partitioned",
    "PeerError",
    "PiecesMissing",
    "QuicollError",
    "ReduceOp",
    "Seed",
    "ShardLost",
    "Sharded",
    "Shards",
    "SharedState",
    "Step",
    "StepAborted",
    "Straggler",
    "Terminated",
    "TierSet",
    "Tiers",
    "Tracker",
    "View",
    "__version__",
    "blocking",
    "connect",
    "determinism_report",
    "empty",
    "join",
]

# Imported when first asked for (PEP 562): QUIC, numpy and cryptography take half a second, and neither a command that
# prints its help nor pytest at its start should wait for them. Type checkers and editors read the imports above.
_MODULES = ("blocking", "checkpoint", "data", "sim", "testing", "train")
_HOMES = {
    "Config": "quicoll.config",
    "DeterminismReport": "quicoll.audit.environment",
    "Event": "quicoll.observability.events",
    "Generator": "quicoll.numerics.generator",
    "Group": "quicoll.collectives.group",
    "Handle": "quicoll.collectives.handle",
    "Job": "quicoll.job",
    "JsonLines": "quicoll.observability.events",
    "Leaves": "quicoll.collectives.shards",
    "Member": "quicoll.membership.view",
    "Observer": "quicoll.observability.events",
    "ReduceOp": "quicoll.numerics.reduce",
    "Seed": "quicoll.numerics.seed",
    "Sharded": "quicoll.state.sharded",
    "Shards": "quicoll.collectives.shards",
    "SharedState": "quicoll.tiers.shared",
    "Step": "quicoll.step.context",
    "Straggler": "quicoll.observability.stragglers",
    "TierSet": "quicoll.tiers.tier_set",
    "Tiers": "quicoll.tiers.tiers",
    "Tracker": "quicoll.observability.tracking",
    "View": "quicoll.membership.view",
    "connect": "quicoll.joining.entry",
    "determinism_report": "quicoll.audit.environment",
    "empty": "quicoll.local.tensors",
    "join": "quicoll.joining.entry",
}

if not TYPE_CHECKING:  # a checker that saw it would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"quicoll.{name}")
        if name in _HOMES:
            found = globals()[name] = getattr(import_module(_HOMES[name]), name)
            return found
        raise AttributeError(f"module 'quicoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
