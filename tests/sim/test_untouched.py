"""What is looked at before and after every collective, however it is called: inputs, and `out` until the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.sim import InvariantBroken, RunFailed, Settings, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.job import Job


def a_tensor() -> Any:
    return np.zeros(5, np.float32)


def two_tensors() -> Any:
    return [np.zeros(5, np.float32), np.zeros(3, np.float32)]


def a_buffer() -> Any:
    return memoryview(bytearray(5))


def change(x: Any) -> None:
    """Of a list, the last one."""
    target = x[-1] if isinstance(x, list) else x
    target[2] = 7


def ended(call: Callable[[Job, Any], Any], make: Callable[[], Any], *, changed: bool) -> RunFailed | None:
    """One collective on two ranks; rank 0 changes its input while it is under way."""

    async def worker(job: Job) -> None:
        x = make()
        handle = call(job, x)
        if changed and job.rank == 0:
            change(x)
        await handle

    return Simulation(worker, settings=Settings(ranks=2, limit=20.0)).run().error


@pytest.mark.parametrize("make", [a_tensor, two_tensors, a_buffer], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "call",
    [
        lambda job, x: job.group.all_reduce(x, op="max"),
        lambda job, x: job.group.all_reduce(x=x, op="max"),
        lambda job, x: job.group.broadcast(root=1, x=x),
    ],
    ids=["by place", "by name", "by name, after another"],
)
def test_an_input_that_changes_under_way_is_seen(call: Callable[[Job, Any], Any], make: Callable[[], Any]) -> None:
    error = ended(call, make, changed=True)
    assert isinstance(error, InvariantBroken)
    assert error.kind == "untouched"
    assert "changed its input" in str(error)
    assert error.node == "worker-0"
    assert ended(call, make, changed=False) is None


def test_a_list_of_counts_that_changes_under_way_is_seen() -> None:
    async def worker(job: Job) -> None:
        counts = [2, 3]
        handle = job.group.reduce_scatter(np.zeros(5, np.float32), counts=counts)
        counts[0] = 1
        await handle

    error = Simulation(worker, settings=Settings(ranks=2, limit=20.0)).run().error
    assert error is not None
    assert error.kind == "untouched"


def test_an_out_is_not_an_input() -> None:
    async def worker(job: Job) -> float:
        out = np.zeros(5, np.float32)
        await job.group.all_reduce(x=np.ones(5, np.float32), out=out)
        return float(out.sum())

    outcome = Simulation(worker, settings=Settings(ranks=2, limit=20.0)).run()
    assert outcome.error is None, outcome.error
    assert outcome.results == (10.0, 10.0)
