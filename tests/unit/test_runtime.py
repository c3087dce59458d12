"""Calls cross from the caller's loop to the engine's thread and back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quicoll.errors import LocalError
from quicoll.runtime import InlineRuntime, ThreadRuntime


async def test_work_runs_on_the_thread_and_its_result_and_error_come_back() -> None:
    runtime = ThreadRuntime("test")

    async def name() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise ValueError("there")

    assert await runtime.call(name()) == "quicoll-test"
    with pytest.raises(ValueError, match="there"):
        await runtime.call(fail())
    await runtime.aclose()
    await runtime.aclose()  # closing twice is harmless


async def test_cancelling_the_caller_cancels_the_work() -> None:
    runtime = ThreadRuntime("test")
    started, cancelled = threading.Event(), threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    task = asyncio.ensure_future(runtime.call(forever()))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(cancelled.wait)
    await runtime.aclose()


async def test_closing_ends_what_still_runs_and_later_calls_are_refused() -> None:
    runtime = ThreadRuntime("test")
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(runtime.call(forever()))
    await runtime.call(asyncio.sleep(0))
    await runtime.aclose()
    assert ended.is_set()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(LocalError, match="closed"):
        await runtime.call(asyncio.sleep(0))
    assert not any(thread.name == "quicoll-test" for thread in threading.enumerate())


async def test_a_call_from_the_engine_itself_is_refused_instead_of_waiting_for_ever() -> None:
    runtime = ThreadRuntime("test")

    async def inner() -> None:
        await runtime.call(asyncio.sleep(0))

    with pytest.raises(LocalError, match="own thread"):
        await runtime.call(inner())
    await runtime.aclose()


async def test_the_inline_runtime_uses_the_callers_loop() -> None:
    runtime = InlineRuntime()
    assert runtime.loop is asyncio.get_running_loop()

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert await runtime.call(where()) is runtime.loop
    await runtime.aclose()
