"""What torch is told of tensors on other devices; tests/loopback/test_torch_staged.py moves some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from quicoll import LocalError  # noqa: E402 - after the check that there is a torch
from quicoll.torch_backend.staged import future_of, read_device, write_device  # noqa: E402 - likewise


def on(*devices: str) -> list[Any]:
    return [SimpleNamespace(device=torch.device(each)) for each in devices]


def test_a_future_names_each_device_of_its_tensors_once_and_not_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def future(*, devices: Any = ()) -> None:
        asked.append([str(each) for each in devices])

    monkeypatch.setattr(torch.futures, "Future", future)
    for devices in (["cpu"], [], ["cuda:1", "cpu", "cuda:0", "cuda:1"]):
        future_of(on(*devices))
    assert asked == [[], [], ["cuda:1", "cuda:0"]]


def test_a_device_that_has_no_memory_is_refused_both_ways() -> None:
    tensor = torch.ones(2, device="meta")
    for call in (lambda: read_device(tensor), lambda: write_device(tensor, torch.ones(2))):
        with pytest.raises(LocalError, match=r"a tensor on device meta: the backend quicoll takes tensors of the CPU"):
            call()
