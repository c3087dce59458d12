"""Event loops of our own threads and processes, which ask for the time without a function of Python's between.

`loop.time` of asyncio is one that calls `time.monotonic`, and asyncio, the engine and its endpoint call it six times in
a small operation. A program's own loop is left as it is, and so is one with another clock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

__all__ = ["with_own_clock"]

Loop = TypeVar("Loop", bound=asyncio.AbstractEventLoop)


def with_own_clock(loop: Loop) -> Loop:
    """Have a loop of ours ask for the time directly.

    Args:
        loop: Made here for the engine, a lane or the coordinator.
    Returns:
        The loop.
    """
    if getattr(type(loop), "time", None) is asyncio.BaseEventLoop.time:
        ours: Any = loop
        ours.time = time.monotonic
    return loop
