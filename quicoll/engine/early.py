"""Announcements for a view that is not at work here yet.

The coordinator installs a view once all members have confirmed it, and tells them one after the other. So a peer may be
at work in a view that this rank has confirmed, and is not told of yet; it announces what it calls, once, and that has
to be kept. Nothing else has: there is no view before this rank has confirmed it.

Invariants: what is kept is of the view that is being formed here, from members of it, and of links that live; of each
link at most MAX_EARLY_BYTES of memory. A peer that sends more is told so by the end of its link, since an announcement
that was dropped without a word would be waited for until the deadline of its operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quicoll.engine.messages import size_in_memory
from quicoll.errors import PeerError

if TYPE_CHECKING:
    from quicoll.engine.messages import Announce
    from quicoll.membership.view import View

__all__ = ["MAX_EARLY_BYTES", "EarlyAnnouncements"]

MAX_EARLY_BYTES = 4 << 20
"""Memory of one peer's announcements: some ten thousand operations that it is ahead of this rank."""


@dataclass(slots=True)
class _Kept:
    node: str
    announcements: list[Announce] = field(default_factory=list)
    size: int = 0


class EarlyAnnouncements:
    """See the module's head."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._kept: dict[int, _Kept] = {}  # by the number of the link

    @property
    def size(self) -> int:
        """Bytes of memory that all of it takes."""
        return sum(kept.size for kept in self._kept.values())

    def expect(self, view: View) -> None:
        """Take announcements for a view from now on, and forget those for any other."""
        self._view = view
        self._kept.clear()

    def keep(self, link: int, node: str, announce: Announce) -> None:
        """Keep an announcement, if it is for the view that is expected and from a member of it.

        Args:
            link: The number of the link that it came on.
            node: The node at its other end.
            announce: What came.
        Raises:
            PeerError: There is too much from this peer.
        """
        view = self._view
        if view is None or announce.view_id != view.view_id or view.rank_of(node) is None:
            return
        size = size_in_memory(announce)
        kept = self._kept.setdefault(link, _Kept(node))
        if kept.size + size > MAX_EARLY_BYTES:
            raise PeerError(f"announced more than {MAX_EARLY_BYTES} bytes ahead", node=node, view=view.view_id)
        kept.announcements.append(announce)
        kept.size += size

    def drop(self, link: int) -> None:
        """Forget what came on a link: it is over."""
        self._kept.pop(link, None)

    def take(self, view: View) -> list[tuple[int, Announce]]:
        """Return what was kept for a view that goes to work, with the rank that each came from, and expect none."""
        kept, self._kept = self._kept, {}
        expected, self._view = self._view, None
        if expected is None or expected.view_id != view.view_id:
            return []
        return [
            (rank, announce)
            for each in kept.values()
            if (rank := view.rank_of(each.node)) is not None
            for announce in each.announcements
        ]
