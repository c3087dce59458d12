"""The collective that divides a group. What a division means, and how ids are agreed: subgroups.py."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from quicoll.collectives.movements import Movement
from quicoll.collectives.subgroups import MAX_COLOR, MAX_DEPTH, MAX_KEY, Scope, divide
from quicoll.errors import LocalError, PeerError
from quicoll.numerics.bundle import bundle, results
from quicoll.plan import barrier

if TYPE_CHECKING:
    from quicoll.collectives.base import GroupView
    from quicoll.engine.calls import Known, Work
    from quicoll.numerics.dtypes import Array

__all__ = ["Split"]

G = TypeVar("G")


class Split(Movement[G | None]):
    """number: of the split among those of its group in the view. made: makes the sub-group of what it is."""

    name = "split"
    gathers = shared = divides = True

    def __init__(
        self, here: GroupView, color: int | None, key: int, *, number: int, made: Callable[[Scope], G]
    ) -> None:
        super().__init__(here)
        try:
            color, key = None if color is None else operator.index(color), operator.index(key)
        except TypeError:
            raise LocalError(f"color and key are integers (color may be None), not {color!r} and {key!r}") from None
        if color is not None and not 0 <= color <= MAX_COLOR:
            raise LocalError(f"a color is an integer from 0 to {MAX_COLOR}, or None; not {color}")
        if abs(key) > MAX_KEY:
            raise LocalError(f"a key is an integer from {-MAX_KEY} to {MAX_KEY}, not {key}")
        if here.scope.depth >= MAX_DEPTH:
            raise LocalError(f"sub-groups nest at most {MAX_DEPTH} deep")
        self.color, self.key, self.number, self.made = color, key, number, made
        # Zero says that there is no color; announcements carry no negative numbers.
        self.counts = (0 if color is None else color + 1, key + MAX_KEY)
        self.signature = f"split number={number}"
        self.table = np.empty((0, 2), np.int64)  # the counts of all ranks

    def prepare(self, known: Known) -> Work:
        for rank, row in enumerate(known.counts):
            if row is None or len(row) != 2 or row[1] > 2 * MAX_KEY or row[0] > MAX_COLOR + 1:
                raise PeerError("splits without a color and a key", rank=self.here.ranks[rank])
        self.table = np.array(known.counts, np.int64)
        nothing = bundle(np.empty(0, np.uint8))
        # All there is to know has come with the calls: nothing is left to be sent.
        return self.work(barrier(rank=self.here.rank, world=self.here.world_size), nothing, results(None, nothing), [])

    def bits(self) -> Array:
        return self.table

    def result(self) -> G | None:
        here = self.here
        chosen = [(int(color) - 1 if color else None, int(key)) for color, key in self.table]
        color = chosen[here.rank][0]
        if color is None:
            return None
        members = divide(chosen)[color]
        ranks = tuple(here.ranks[rank] for rank in members)
        return self.made(here.scope.sub(self.number, color, ranks, members.index(here.rank), view_id=here.view_id))

    def text(self) -> str:
        return "split"

    def terms(self) -> str:
        return f"color={'none' if self.color is None else self.color} key={self.key}"
