"""Training on top of the public API: the worker loop, and the task that the demo trains.

`loop` is the part to use or to copy; `digits` needs torch and scikit-learn and is imported only by who asks for it.
"""

from __future__ import annotations

from quicoll.train.loop import Bucket, Task, TrainingResult, run

__all__ = ["Bucket", "Task", "TrainingResult", "run"]
