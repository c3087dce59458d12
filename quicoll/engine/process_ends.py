"""Processes of this host that have ended: their links end a moment later, unless they have said good-bye before.

The host tells of an end at once (`HostWakes.listen`). What that process had sent last may be on its way still: that it
leaves, for one, which is no loss. So who wants to know hears GONE_S later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["ProcessEnds"]

_GONE_S: Final = 0.1  # after a process's end, until its link is ended: what it had said before is taken in by then


class ProcessEnds:
    """Those that have not been told of. On one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timers: list[asyncio.TimerHandle] | None = []

    def note(self, rank: int, on_gone: Callable[[int], None]) -> None:
        """A rank's process has ended: `on_gone` is called with the rank when its time is up. Nothing after `stop`."""
        if self._timers is not None:
            self._timers.append(self._loop.call_later(_GONE_S, on_gone, rank))

    def stop(self) -> None:
        """Tell nobody any more."""
        timers, self._timers = self._timers or [], None
        for timer in timers:
            timer.cancel()
