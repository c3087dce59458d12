"""Operations that are supplied to torch; tests/helpers/torch_cases_functional.py calls them."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest

torch = pytest.importorskip("torch")

from quicoll.torch_backend import supplied  # noqa: E402 - after the check that there is a torch


def kernels() -> list[str]:
    names = ("batch_p2p_ops", "all_gather_into_tensor_out")
    return [torch._C._dispatch_dump(f"_c10d_functional::{name}") for name in names]


def test_they_are_registered_once() -> None:
    supplied.supply_operations()
    before = kernels()
    assert all("\nCPU: registered at " in each for each in before)
    supplied.supply_operations()
    assert kernels() == before


def test_a_torch_that_gives_no_kernel_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    supplied.supply_operations()
    before = kernels()

    def refuse(*given: Any) -> NoReturn:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(torch.library, "get_kernel", refuse)
    monkeypatch.setattr(supplied, "_libraries", [])
    supplied.supply_operations()
    assert kernels() == before


def test_a_thread_that_comes_while_another_supplies_them_goes_on_when_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supplied.supply_operations()
    begun, go = threading.Event(), threading.Event()
    asked: list[Any] = []

    def slow(*given: Any) -> NoReturn:
        asked.append(given)
        begun.set()
        assert go.wait(60)
        raise RuntimeError("no such operation")

    monkeypatch.setattr(torch.library, "get_kernel", slow)
    monkeypatch.setattr(supplied, "_libraries", [])
    threads = [threading.Thread(target=supplied.supply_operations) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.2)  # without the lock it would return now, to a program that has no operation yet
    waited = threads[1].is_alive()
    go.set()
    for each in threads:
        each.join(60)
    assert waited
    assert len(asked) == 2  # one for each operation: the second thread has not asked again
