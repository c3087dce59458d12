"""What a simulated process calls that is outside of it and takes its time, such as a server.

A module of its own, since its loop is compiled where anything is, and what is compiled cannot be a base of what is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

__all__ = ["SimulatedExecutor"]

T = TypeVar("T")


class SimulatedExecutor(Executor):
    """Says itself when it runs, and when the result arrives; for `run_in_executor` alone."""

    def begin(self, loop: Any, function: Callable[[], T]) -> asyncio.Future[T]:
        """Return what becomes of a call, which begins now.

        Args:
            loop: Of the process that calls, a HostLoop.
            function: What is called.
        """
        raise NotImplementedError
