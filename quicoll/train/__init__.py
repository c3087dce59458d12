"""Training on top of the public API: a worker loop with checkpoints, to use or to copy."""

from __future__ import annotations

from quicoll.train.checkpointer import Checkpointer
from quicoll.train.loop import Bucket, Task, TrainingResult, final_result, run

__all__ = ["Bucket", "Checkpointer", "Task", "TrainingResult", "final_result", "run"]
