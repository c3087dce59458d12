"""When an endpoint has to look at each of its peers and connections again.

Early is harmless, late is not: each says itself whether anything is due.
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Agenda"]

_Item = TypeVar("_Item")


class Agenda(dict[_Item, int]):
    """Item -> nanoseconds."""

    def note(self, item: _Item, at: int | None) -> None:
        """Look at `item` again at `at`; None: there is no need to."""
        if at is None:
            self.pop(item, None)
        else:
            self[item] = at

    def due(self, now_ns: int) -> list[_Item]:
        """Return those whose time has come, in the order in which they were noted."""
        return [item for item, at in self.items() if at <= now_ns]
