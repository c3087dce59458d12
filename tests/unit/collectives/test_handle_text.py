"""What a handle says of itself where somebody takes it for the result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from quicoll.collectives.context import Pending
from quicoll.collectives.handle import BlockingHandle, Handle


class _Context:
    """Of one operation that is in no step."""

    def __init__(self) -> None:
        import threading

        self.lock = threading.RLock()

    def ended(self, *_: object) -> None:
        """Nothing is noted."""

    def forget(self, number: int) -> None:
        """Nothing is kept."""


def pending(future: Any) -> Pending[int]:
    operation = SimpleNamespace(name="all_reduce", result=lambda: 7, feedback=None)
    made: Pending[int] = Pending(cast("Any", _Context()), cast("Any", operation), 0, None, None)
    made.future = future
    return made


async def test_a_handle_says_which_operation_it_is_of_and_whether_it_was_awaited() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    handle = Handle(pending(future))
    assert repr(handle) == "<Handle all_reduce: not awaited>"
    future.set_result(0)
    assert repr(handle) == "<Handle all_reduce#0: not awaited>"
    assert await handle == 7
    assert repr(handle) == "<Handle all_reduce#0: awaited>"
    failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    failed.set_exception(ValueError("x"))
    assert repr(Handle(pending(failed))) == "<Handle all_reduce: failed>"


@pytest.mark.parametrize(
    "use",
    [
        lambda handle: handle + 1,
        lambda handle: 1 + handle,
        lambda handle: handle / 2,
        lambda handle: np.ones(3) * handle,
        lambda handle: np.asarray(handle),
        lambda handle: handle[0],
        lambda handle: list(handle),
        lambda handle: handle < 1,
        operator.neg,
        float,
    ],
)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Handle, "<Handle all_reduce: not awaited> is not the result of the operation: write `await`"),
        (
            BlockingHandle,
            "<BlockingHandle all_reduce: not waited for> is not the result of the operation: call its w",
        ),
    ],
)
def test_a_handle_that_is_used_as_the_result_says_what_to_do(
    use: Callable[[Any], object], kind: type, said: str
) -> None:
    with pytest.raises(TypeError) as refused:
        use(kind(pending(concurrent.futures.Future())))
    assert str(refused.value).startswith(said)


def test_a_handle_is_still_true_and_equal_to_itself() -> None:
    handle = Handle(pending(concurrent.futures.Future()))
    assert handle
    assert handle == handle
    assert {handle: 1}[handle] == 1
