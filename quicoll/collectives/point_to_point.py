"""send and recv: one operation of two ranks, seen from both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.checks import whole
from quicoll.collectives.movements import Movement
from quicoll.collectives.subgroups import derived_id
from quicoll.errors import LocalError
from quicoll.numerics.bundle import Bundle, Results, bundle, results
from quicoll.plan.schedule import move

if TYPE_CHECKING:
    from quicoll.collectives.base import GroupView
    from quicoll.engine.calls import Known, Work
    from quicoll.numerics.bundle import Joined
    from quicoll.numerics.dtypes import Array

__all__ = ["PointToPoint", "Receive", "Send", "channel_id", "checked_tag"]

_MAX_TAG = (1 << 62) - 1


def checked_tag(tag: int) -> int:
    """Return a caller's tag. Raises LocalError where it can be none."""
    tag = whole(tag, "a tag")
    if not 0 <= tag <= _MAX_TAG:
        raise LocalError(f"a tag is an integer from 0 to {_MAX_TAG}, not {tag}")
    return tag


def channel_id(here: GroupView, source: int, to: int, tag: int) -> int:
    """Return the id under which what goes from one rank of a group to another with a tag is counted."""
    return derived_id(here.scope.group_id, "send", source, to, *([tag] if tag else []))


class PointToPoint(Movement[Any]):
    """Counted apart from the group's collectives, and from what goes between other ranks or the other way."""

    name = "send"
    # Of two ranks one waits for the other as a matter of course: that is no straggler.
    watched = False

    def __init__(
        self, here: GroupView, like: Bundle, source: int, to: int, target: Results | None, tag: int = 0
    ) -> None:
        super().__init__(here)
        source, to = here.checked("source", source), here.checked("to", to)
        self.tag = tag = checked_tag(tag)
        if source == to:
            raise LocalError(f"rank {source} cannot send to itself")
        self.like, self.source, self.to = like, source, to
        self.holds = target is not None
        sizes = {"source": 0, "to": 1, "elements": like.elements}  # a world of two: the sender is 0
        pair = move("send", like.dtype.itemsize, world=2, sizes=sizes, sites=(0, 0), chunk_bytes=here.chunk_bytes)
        plan = pair.plan_of(int(self.holds), "")
        place = results(None, bundle(np.empty(0, np.uint8))) if target is None else target
        self.ready = self.work(plan, like, place, [] if self.holds else None)
        self.signature = f"{plan.signature} {like.text}{f' tag={tag}' if tag else ''}"
        self.ranks = (here.ranks[source], here.ranks[to])
        self.group_id = channel_id(here, source, to, tag)
        self.channel_name = f"{here.scope.name} send {source} to {to}{f' tag {tag}' if tag else ''}"

    def prepare(self, known: Known) -> Work:
        return self.ready

    def result(self) -> Any:
        return self.committed() if self.holds else None

    def text(self) -> str:
        return f"send {self.like.brief} from {self.source} to {self.to}{f' tag={self.tag}' if self.tag else ''}"

    def inputs(self) -> Sequence[tuple[int, Array | Joined]]:
        return () if self.holds else [(self.source, self.like.flat)]


class Send(PointToPoint):
    def __init__(self, here: GroupView, x: Any, *, to: int, tag: int = 0) -> None:
        super().__init__(here, bundle(x), here.rank, to, None, tag)
        self.given = (x, None)


class Receive(PointToPoint):
    def __init__(self, here: GroupView, like: Any, *, source: int, out: Any = None, tag: int = 0) -> None:
        given = bundle(like)
        super().__init__(here, given, source, here.rank, results(out, given, recycler=here.recycler), tag)
        self.given = (like, out)
