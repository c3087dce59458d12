"""What the members of the installed view say of their links, for people who look: nothing is decided by it.

Invariants: memory is bounded whatever they say: the last word of each member of one view, MOST_LINKS links in it. What
cannot be (a rank that the view does not have, the sender's own, one twice) is left out, and the rest counts. A member's
word takes no place of another's: of a view of many ranks each has the same share of a status, its worst links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quicoll.membership.link_figures import badness
from quicoll.membership.status import MAX_STATUS_LINKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.membership.link_figures import MeasuredLinks
    from quicoll.membership.view import View

__all__ = ["Measurements"]


class Measurements:
    """See the module's head."""

    def __init__(self) -> None:
        self._view_id = 0
        self._told: dict[str, tuple[int, MeasuredLinks]] = {}  # by node: when, and what

    def take(self, view: View, node: str, measured: MeasuredLinks, now_ns: int) -> None:
        """Take in what a member says.

        Args:
            view: The installed one.
            node: One of its members.
            measured: What it says.
            now_ns: The time now.
        """
        if view.view_id != self._view_id:
            self._view_id = view.view_id
            self._told.clear()
        rank = view.rank_of(node)
        links = {each.peer: each for each in measured.links if each.peer < view.world_size and each.peer != rank}
        worst_first = tuple(sorted(links.values(), key=badness, reverse=True))
        untold = min(measured.untold, view.world_size - 1 - len(links))
        self._told[node] = now_ns, msgspec.structs.replace(measured, links=worst_first, untold=untold)

    def of(self, view: View, now_ns: int) -> Mapping[str, tuple[MeasuredLinks, int]]:
        """Return what the members of a view have said last, and how long ago; of each its share of a status.

        Args:
            view: The installed one.
            now_ns: The time now.
        """
        if view.view_id != self._view_id:
            return {}
        share = max(1, MAX_STATUS_LINKS // view.world_size)
        return {node: (_cut(told, share), max(0, now_ns - at_ns)) for node, (at_ns, told) in self._told.items()}


def _cut(told: MeasuredLinks, most: int) -> MeasuredLinks:
    more = len(told.links) - most
    if more <= 0:
        return told
    return msgspec.structs.replace(told, links=told.links[:most], untold=told.untold + more)
