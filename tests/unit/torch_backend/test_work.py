"""The handle that torch waits for: what the engine hears of who waits."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from quicoll import LocalError, PeerError  # noqa: E402 - after the check that there is a torch
from quicoll.torch_backend.work import OperationWork, WorkHome  # noqa: E402 - likewise


class Endless:
    """A part that does not end."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.future: Future[int] = Future()

    def attend_thread(self, *, ends: bool = False) -> None:
        self.told.append("ends" if ends else "waits")

    def take_or_raise(self) -> Any:
        pytest.fail("it has not ended")


def test_a_wait_is_told_for_as_long_as_it_lasts_and_a_future_is_one_without_an_end() -> None:
    part = Endless()
    work = OperationWork(WorkHome(lambda: False), "x", [part], [torch.ones(1)], None, 60.0)
    assert part.told == []
    with pytest.raises(LocalError, match="Timed out waiting 1ms"):
        work.wait(timedelta(milliseconds=1))
    assert part.told == ["waits", "ends"]
    assert not work.is_completed()
    assert part.told == ["waits", "ends"]
    work.get_future()
    work.get_future()
    assert part.told == ["waits", "ends", "waits"]


class Given:
    """A part that ends when the test says so."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def attend_thread(self, *, ends: bool = False) -> None: ...

    def take_or_raise(self) -> Any:
        return self.future.result()


def test_all_threads_that_wait_go_on_when_the_last_part_has_ended() -> None:
    parts, tensors = [Given(), Given()], [torch.zeros(2), torch.zeros(())]
    work = OperationWork(WorkHome(lambda: False), "x", parts, tensors, None, 60.0)
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(work.wait) for _ in range(3)]
        with pytest.raises(LocalError, match="Timed out waiting 1ms"):  # one of them, which waits no longer
            work.wait(timedelta(milliseconds=1))
        while len(work._waiting) < 3:
            pass
        parts[0].future.set_result(torch.ones(2))
        assert not any(each.done() for each in waits)
        parts[1].future.set_result(torch.ones(1))
        assert [each.result(60.0) for each in waits] == [True] * 3
    assert work._waiting == ()
    assert [each.tolist() for each in tensors] == [[1.0, 1.0], 1.0]


def test_an_error_reaches_all_who_wait_and_no_result_is_written() -> None:
    part, tensor = Given(), torch.zeros(2)
    told: list[Any] = []
    work = OperationWork(WorkHome(lambda: False, told.append), "x", [part], [tensor], None, 60.0)
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(work.wait) for _ in range(2)]
        part.future.set_exception(PeerError("lost", rank=1))
        for each in waits:
            with pytest.raises(PeerError, match="lost"):
                each.result(60.0)
    assert told == [part.future]
    assert tensor.tolist() == [0.0, 0.0]
    with pytest.raises(PeerError, match="lost"):
        work.wait()
