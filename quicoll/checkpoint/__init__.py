"""Checkpoints that are either complete or not there; by one process, or by all ranks of a job together."""

from quicoll.checkpoint.parts import Contents, Local, Shard
from quicoll.checkpoint.store import (
    Checkpoint,
    Stored,
    digest,
    latest,
    load,
    of_step,
    save,
    snapshot,
    stored,
)

__all__ = [
    "Checkpoint",
    "Contents",
    "Local",
    "Shard",
    "Stored",
    "digest",
    "latest",
    "load",
    "of_step",
    "save",
    "snapshot",
    "stored",
]
