"""When an endpoint has to look at each of its links and connections again, and the one timer of the loop for all.

Early is harmless, late is not: whoever is looked at says itself whether anything is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Agenda"]

_Item = TypeVar("_Item")


class Agenda(dict[_Item, int]):
    """Item -> nanoseconds of the loop's clock. `on_due` is called when the earliest has come; it asks `due`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        super().__init__()
        self._loop = loop
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def note(self, item: _Item, at: int | None) -> None:
        """Look at `item` again at `at`; None: there is no need to."""
        if at is None:
            self.pop(item, None)
        else:
            self[item] = at

    def arm(self) -> None:
        """Set the loop's timer to the earliest."""
        at = min(self.values(), default=None)
        if self._timer is not None:
            if self._timer_ns == at:
                return
            self.stop()
        if at is not None:
            self._timer_ns = at
            self._timer = self._loop.call_at(at / 1e9, self._ring)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._on_due()

    def due(self, now_ns: int) -> tuple[int, list[_Item]]:
        """The time that it is for the items, and those whose time has come, in the order in which they were noted."""
        # A loop's clock is a float and may wake us a little before the time; then nothing would ever be due.
        now_ns = max(now_ns, self._timer_ns)
        return now_ns, [item for item, at in self.items() if at <= now_ns]
