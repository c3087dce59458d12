"""Operations as torch's profiler shows them: "quicoll:all_reduce", from the call until the last part has come.

They are asynchronous events, as those of torch's own backends: to torch that is an event which ends on another thread
than it has begun on, so that is seen to here. A thread that the profiler does not know cannot end one, except by a
future: torch carries the profiler over with it. Shapes of inputs are not shown, because this way takes none. Where no
profiler runs, an operation asks for that and makes none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from quicoll.torch_backend.names import BACKEND
from quicoll.torch_backend.pool import run_aside

__all__ = ["ProfiledEvent"]


class ProfiledEvent:
    """An operation in a profile."""

    __slots__ = ("_ended", "_thread")

    def __init__(self, name: str) -> None:
        """Begin.

        Args:
            name: Of the operation, as Gloo's events have it.
        """
        profiler: Any = torch.ops.profiler
        self._thread = threading.get_ident()
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        event = profiler._record_function_enter_new(f"{BACKEND}:{name}", None)  # noqa: SLF001 - there is no other way
        profiler._call_end_callbacks_on_jit_fut._RecordFunction(event, self._ended)  # noqa: SLF001 - likewise

    def end(self, then: Callable[[], object]) -> None:
        """End, on another thread than that of the beginning.

        Args:
            then: What to do after that.
        """

        def ends() -> None:
            self._ended.set_result(None)
            then()

        if threading.get_ident() != self._thread:
            ends()
            return
        try:
            run_aside(ends)
        except RuntimeError:  # the interpreter is ending
            ends()
