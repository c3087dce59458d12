"""Training on top of the public API: a worker with data, checkpoints and figures, to use or to copy."""

from __future__ import annotations

from quicoll.train.architecture import Architecture
from quicoll.train.bucket import Bucket
from quicoll.train.checkpointer import Checkpointer
from quicoll.train.diloco import DiLoCo
from quicoll.train.divided import Divide, DivisibleTask
from quicoll.train.figures import WorkerFigures
from quicoll.train.outcome import TrainingResult, final_result
from quicoll.train.rehearsal import rehearse
from quicoll.train.saver import CheckpointPolicy
from quicoll.train.task import Part, Task
from quicoll.train.torch_task import TorchTask
from quicoll.train.worker import Worker

__all__ = [
    "Architecture",
    "Bucket",
    "CheckpointPolicy",
    "Checkpointer",
    "DiLoCo",
    "Divide",
    "DivisibleTask",
    "Part",
    "Task",
    "TorchTask",
    "TrainingResult",
    "Worker",
    "WorkerFigures",
    "final_result",
    "rehearse",
]
