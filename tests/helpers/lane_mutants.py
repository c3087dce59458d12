"""Mutants of lanes: what is broken on purpose, and shows only where lanes fail while messages are on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import quicoll.engine.lane_ways
from quicoll.engine.lane_ways import LanePair
from quicoll.engine.noticed import AwaitedMessage, GivenMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    Patch = pytest.MonkeyPatch

__all__ = ["COSTLY", "spoilt_bits_are_taken"]


def spoilt_bits_are_taken(patch: Patch) -> None:
    """Out of a lane's memory: its own checks were made before that."""
    patch.setattr(quicoll.engine.lane_ways, "xxhash", SimpleNamespace(xxh3_64_intdigest=lambda data: 0))


def what_a_lane_has_lost_is_not_sent_again(patch: Patch) -> None:
    patch.setattr(GivenMessage, "go_direct", lambda self: None)


def what_a_lane_has_lost_is_not_awaited_again(patch: Patch) -> None:
    """What its notice says from the beginning to come over the link is."""
    shut = LanePair._shut

    def deaf(self: LanePair, index: int, why: str, *, heard: bool) -> None:
        with patch.context() as within:
            within.setattr(AwaitedMessage, "come_direct", lambda self: None)
            shut(self, index, why, heard=heard)

    patch.setattr(LanePair, "_shut", deaf)


def a_lane_is_shut_on_one_side_alone(patch: Patch) -> None:
    patch.setattr(LanePair, "heard_shut", lambda self, message: None)


COSTLY: tuple[Callable[[Patch], None], ...] = (
    what_a_lane_has_lost_is_not_sent_again,
    what_a_lane_has_lost_is_not_awaited_again,
    a_lane_is_shut_on_one_side_alone,
)
"""Which cost views and steps, and no bit."""
