"""The first forward and backward pass of a process, for nothing, before it joins the job.

A model's first call may take longer than the others: one that torch compiles is traced, a device gets its context and
its kernels, threads are started and modules imported as they are used. Whoever comes in the middle of a job does that
in its first step, and all ranks wait for it: a spare that takes a place, above all, whose state is there in less time.

So it is done where nobody waits: before `quicoll.join`, which has not shown this process to anybody. A worker does not
do it by itself. It is made of a job that has been joined; the view in which a spare is shown waits for it until it has
entered; and while it stands by, its loop has to be free for the place that it is to take. Nor does a worker know
samples that are nobody's: those of a feed are read once, by the rank that computes with them.

`forward` and `backward` change nothing: that is what a task promises, and what is looked at here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll.numerics.seed import Seed
from quicoll.train.packing import packed_state
from quicoll.train.task import Part

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quicoll.train.task import Task

__all__ = ["rehearse"]


def rehearse(task: Task, *, samples: Any = None, indices: NDArray[np.int64] | None = None) -> None:
    """Run a task's forward and backward pass once, so that its first step takes no longer than the others.

    Call it before `quicoll.join`. The loss and the gradients are thrown away; the task is as it was.

        task = quicoll.train.TorchTask(model, optimizer, loss)
        quicoll.train.rehearse(task, samples=torch.zeros(32, 784))
        async with quicoll.join() as job: ...

    Args:
        task: What will be trained.
        samples: What stands for the samples of one part; of the shape that a feed's loader gives.
        indices: What stands for their indices, where the task finds its data by them.
    Raises:
        LocalError: A pass has changed what is trained: the bits of a job would depend on how often it is begun.
        Exception: What the passes raise.
    """
    before = _digest(task)
    task.backward(task.forward(Part(1, 0, Seed(0), indices, samples)))
    if _digest(task) != before:
        raise LocalError(f"forward or backward of {type(task).__name__} changes what is trained: only apply may")


def _digest(task: Task) -> str:
    return packed_state({"parameters": dict(task.parameters())}).digest
