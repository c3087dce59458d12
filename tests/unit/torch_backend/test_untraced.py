"""torch.compile leaves the backend's methods alone; tests/helpers/torch_cases_functional.py has it do so."""

from __future__ import annotations

from typing import Any

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


def frames_of(call: Any) -> int:
    """How many frames the compiler takes over where this is called."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    torch.compile(call, backend=counter)(torch.ones(2))
    return int(counter.frame_count)


@pytest.mark.slow  # the compiler takes seconds to be imported
def test_a_marked_method_is_run_as_it_is_and_so_is_what_it_calls() -> None:
    def more(x: Any) -> Any:
        return x + 1

    class Plain:
        def call(self, x: Any) -> Any:
            return more(x)

    class Marked:
        def call(self, x: Any) -> Any:
            return more(x)

    untraced(Marked)
    assert [frames_of(Plain().call), frames_of(Marked().call)] == [1, 0]
    assert Marked().call(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.slow  # likewise
def test_a_marked_method_is_not_taken_into_a_function_that_is_compiled() -> None:
    from torch._dynamo.testing import CompileCounter

    class Plain:
        def add(self, x: Any) -> Any:
            return x + 1

    class Marked:
        def add(self, x: Any) -> Any:
            return x + 1

    untraced(Marked)
    for one, operations in ((Plain(), 2), (Marked(), 1)):

        def compiled(x: Any, one: Any = one) -> Any:
            return one.add(x) * 2

        torch._dynamo.reset()
        counter = CompileCounter()
        assert torch.compile(compiled, backend=counter)(torch.ones(2)).tolist() == [4.0, 4.0]
        assert counter.op_count == operations
