"""The handle that torch waits for: what the engine hears of who waits."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from quicoll import LocalError  # noqa: E402 - after the check that there is a torch
from quicoll.torch_backend.work import OperationWork  # noqa: E402 - likewise


class Endless:
    """A part that does not end."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def add_done_callback(self, callback: Callable[[Any], object]) -> None: ...

    def attend(self, *, ends: bool = False) -> None:
        self.told.append("ends" if ends else "waits")

    def take(self) -> Any:
        pytest.fail("it has not ended")


def test_a_wait_is_told_for_as_long_as_it_lasts_and_a_future_is_one_without_an_end() -> None:
    part = Endless()
    work = OperationWork("x", [part], [torch.ones(1)], lambda _: None, within=60.0, engine_thread=lambda: False)
    assert part.told == []
    with pytest.raises(LocalError, match="Timed out waiting 1ms"):
        work.wait(timedelta(milliseconds=1))
    assert part.told == ["waits", "ends"]
    assert not work.is_completed()
    assert part.told == ["waits", "ends"]
    work.get_future()
    work.get_future()
    assert part.told == ["waits", "ends", "waits"]
