"""Operations that are supplied to torch; tests/helpers/torch_cases_functional.py calls them."""

from __future__ import annotations

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
