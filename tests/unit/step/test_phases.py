"""The phases of the step protocol: one step at a time, one task at a time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from step_rank import Rank

from quicoll.errors import LocalError
from quicoll.step.protocol import StepPhase


async def test_steps_do_not_nest_and_ready_comes_between_them() -> None:
    rank = Rank()
    async with rank.step():
        with pytest.raises(LocalError, match="do not nest"):
            await rank.one()
        with pytest.raises(LocalError, match="already open"):
            await rank.protocol.ready()
    assert rank.state.version.step == 1


@pytest.mark.parametrize(("method", "phase"), [("wait_view", StepPhase.ENTRY), ("vote", StepPhase.END)])
async def test_one_task_at_a_time_is_at_the_entry_or_the_end(method: str, phase: StepPhase) -> None:
    rank, gate = Rank(), asyncio.Event()
    answer, rank.engine.answers[method] = rank.engine.answers[method], gate
    task = asyncio.ensure_future(rank.one())
    while not rank.engine.asked(method):  # noqa: ASYNC110 - one turn of the loop after the other
        await asyncio.sleep(0)
    assert rank.protocol.phase is phase
    for other in (rank.protocol.ready(), rank.one()):
        with pytest.raises(LocalError, match="another task"):
            await other
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    rank.engine.answers[method] = answer
    assert await rank.one() == 1


async def test_a_step_is_one_attempt() -> None:
    rank = Rank()
    attempt = rank.step()
    assert (attempt.number, attempt.view) == (0, None)
    async with attempt:
        pass
    with pytest.raises(LocalError, match="one attempt"):
        async with attempt:
            pass
    with pytest.raises(LocalError, match="step 1 has been left"):
        attempt.on_commit(lambda: None)


async def test_a_step_that_is_not_open_cannot_be_left() -> None:
    rank = Rank()
    for attempt in (rank.step(), rank.step()):
        with pytest.raises(LocalError, match="not open"):
            await attempt.__aexit__(None, None, None)
        await attempt.__aenter__()
        await attempt.__aexit__(None, None, None)
        with pytest.raises(LocalError, match="not open"):
            await attempt.__aexit__(None, None, None)
    assert len(rank.engine.asked("vote")) == 2


async def test_only_plain_functions_run_at_a_commit() -> None:
    async def later() -> None: ...

    rank = Rank()
    async with rank.step() as step:
        with pytest.raises(LocalError, match="a plain function"):
            step.on_commit(later)
    with pytest.raises(LocalError, match="its work is not done"):
        async with rank.step() as step:
            step.on_commit(lambda: later())
