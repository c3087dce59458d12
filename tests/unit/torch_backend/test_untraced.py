"""torch.compile leaves the backend's methods alone; tests/helpers/torch_cases_functional.py has it do so."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from quicoll.torch_backend.untraced import untraced  # noqa: E402 - after the check that there is a torch


def test_a_torch_without_the_mark_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Some:
        def double(self, x: int) -> int:
            return x * 2

    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    assert untraced(Some) is Some
    assert Some().double(2) == 4
