"""Mutants of lanes: what is broken on purpose, and shows only where lanes fail while messages are on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import quicoll.engine.lane_ways
from quicoll.engine.lane_ways import LanePair, _Coming
from quicoll.engine.noticed import AwaitedMessage, GivenMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from quicoll.engine.messages import LanesTaken
    from quicoll.local.parcels import Notice

    Patch = pytest.MonkeyPatch

__all__ = ["OF_BITS", "OF_VIEWS"]


def spoilt_bits_are_taken(patch: Patch) -> None:
    """Out of a lane's memory: its own checks were made before that."""
    patch.setattr(quicoll.engine.lane_ways, "xxhash", SimpleNamespace(xxh3_64_intdigest=lambda data: 0))


def what_is_given_up_is_written_all_the_same(patch: Patch) -> None:
    """Into memory that is its owner's again."""

    def abort(self: _Coming) -> None:
        self.done = self.aborted = True

    patch.setattr(_Coming, "abort", abort)


def what_a_lane_has_lost_is_not_sent_again(patch: Patch) -> None:
    patch.setattr(GivenMessage, "go_direct", lambda self: None)


def what_a_lane_has_lost_is_not_awaited_again(patch: Patch) -> None:
    """But where its notice says from the beginning that it comes over the link."""
    shut = LanePair._shut

    def deaf(self: LanePair, index: int, why: str, *, heard: bool) -> None:
        with_patch = AwaitedMessage.come_direct
        AwaitedMessage.come_direct = lambda self: None  # type: ignore[method-assign]
        try:
            shut(self, index, why, heard=heard)
        finally:
            AwaitedMessage.come_direct = with_patch  # type: ignore[method-assign]

    patch.setattr(LanePair, "_shut", deaf)


def what_was_taken_is_not_said_before_a_lane_is_shut(patch: Patch) -> None:
    shut = LanePair._shut

    def forgetful(self: LanePair, index: int, why: str, *, heard: bool) -> None:
        self.taken.clear()
        shut(self, index, why, heard=heard)

    patch.setattr(LanePair, "_shut", forgetful)


def what_was_taken_is_sent_again(patch: Patch) -> None:
    """All that was given to the lane, whatever its receiver has said."""
    heard = LanePair.heard_taken

    def keeping(self: LanePair, message: LanesTaken) -> None:
        kept = {turn: self.given[turn] for turn in message.turns if turn in self.given}
        heard(self, message)
        self.given.update(kept)

    patch.setattr(LanePair, "heard_taken", keeping)


def a_lane_is_shut_on_one_side_alone(patch: Patch) -> None:
    patch.setattr(LanePair, "heard_shut", lambda self, message: None)


def a_notice_of_a_shut_lane_is_waited_for(patch: Patch) -> None:
    take = LanePair.take

    def patient(self: LanePair, notice: Notice, awaited: AwaitedMessage) -> None:
        if notice.place not in self.shut:
            take(self, notice, awaited)

    patch.setattr(LanePair, "take", patient)


OF_BITS: tuple[Callable[[Patch], None], ...] = (spoilt_bits_are_taken, what_is_given_up_is_written_all_the_same)
OF_VIEWS: tuple[Callable[[Patch], None], ...] = (
    what_a_lane_has_lost_is_not_sent_again,
    what_a_lane_has_lost_is_not_awaited_again,
    what_was_taken_is_not_said_before_a_lane_is_shut,
    what_was_taken_is_sent_again,
    a_lane_is_shut_on_one_side_alone,
    a_notice_of_a_shut_lane_is_waited_for,
)
