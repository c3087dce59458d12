"""What bounds a rate-based controller beside what it believes of the path: losses, and its mates. Sans-IO, integers.

`bbr` says when; here is what follows from it, and what it was. Sections are those of draft-ietf-ccwg-bbr-06.

    most    bytes that may be in flight, since more of them has lost too much (5.5.10.2). Raised in UP by 1, 2, 4 ...
            datagrams a round (5.3.3.6), and kept 15 % away from in CRUISE and DOWN where there is a queue; 5.6.4.7
            always does. That leaves room for others, and without a queue there is nobody. (It may be chance that too
            much was lost, and 15 % less did not fill a path whose acknowledgements come in clumps: an UP that a burst
            had hit cost a fifth of the rate from then on)
    slow    a rate: three quarters of what it was when it gave way, again if it gives way again, until REFILL, which
            then believes in no more than that. (The draft's bounds of 5.5.10.3 do not go below what was delivered, and
            are lifted without having taught anything: with them a flow beside CUBIC, on a queue of a quarter of the
            path, kept 86 %.) Where the host's line is full it takes that quarter off the line instead, and `slow` is
            none; nor is there a `most`, for room is: `access_line`
    level   a rate, and room, bytes in flight: its part of the line by which its host's connections leave; none in
            STARTUP and RESUME, which look for the rate

Looking again. On a path that loses packets by itself, so many that NewReno would have less than a fifth of it, who gave
way and saw no queue for four rounds may look again at once: nobody else was there, and noise was taken for congestion.
After 8, 16 ... rounds where such a look ended with giving way again; after four again once a cycle did without. (Of a
path that loses 1 % in bursts of eight it had three quarters for seconds, without a queue.)

Invariants
    None of the limits is below what the path can do with nothing else in its way: `bbr` keeps its least window.
    `restore` makes limits looser, never tighter. Forgetting leaves no limit, and nothing that was given to the line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll_transport.quic.access_line import AccessShare
    from quicoll_transport.quic.controller import AckSample
    from quicoll_transport.quic.path_model import Bandwidth

__all__ = ["Limits", "LimitsBefore"]

_HEADROOM = 85  # of a hundred
_YIELD = 75  # of a hundred
_CALM_ROUNDS = 4  # after giving way, without a queue; and up to
_MOST_CALM_ROUNDS = 64
_MOST_RISE = 4096  # datagrams a round


@dataclass(frozen=True, slots=True)
class LimitsBefore:
    """What a recovery period may overwrite."""

    most: int | None
    slow: int | None
    given: int


class Limits:
    """See the module's head. None: there is no such limit."""

    __slots__ = (
        "_calm_rounds",
        "_credit",
        "_is_hasty",
        "_level",
        "_patience",
        "_raised",
        "_rise",
        "_room",
        "_share",
        "gave_way_round",
        "most",
        "slow",
    )

    def __init__(self, share: AccessShare | None) -> None:
        """Begin without any; `share`: of the line by which the host's connections leave together, if they do."""
        self._share = share
        self.forget()

    def forget(self) -> None:
        """Have none."""
        self.most: int | None = None
        self.slow: int | None = None
        self._level: int | None = None
        self._room: int | None = None
        self._rise, self._credit = 1, 0  # datagrams by which `most` is raised in a round
        self._raised = False  # in this round
        self.gave_way_round = 0
        self._calm_rounds, self._patience = 0, _CALM_ROUNDS  # without a queue, and how many of them are awaited
        self._is_hasty = False  # this cycle began because there was none
        if self._share is not None:
            self._share.take_back()

    # -- what follows ------------------------------------------------------------------------------------------------

    @property
    def has_given_way(self) -> bool:
        """Whether it is slower than the path, for others."""
        return self.slow is not None or (self._share is not None and self._share.given > 0)

    def claim(self, bandwidth: int) -> int:
        """Return the bandwidth as its own path lets it be used."""
        return bandwidth if self.slow is None else min(bandwidth, self.slow)

    def bounded(self, bandwidth: int) -> int:
        """Return the bandwidth as it may be used."""
        claim = self.claim(bandwidth)
        return claim if self._level is None else min(claim, self._level)

    def at_most(self, rate: int) -> int:
        """Return a rate, or what mates leave of it."""
        return rate if self._level is None else min(rate, self._level)

    def window(self, target: int, *, modest: bool) -> int:
        """Return how much of that may be in flight; `modest`: others are to have room."""
        if self.most is not None:
            target = min(target, self.most * _HEADROOM // 100 if modest else self.most)
        return target if self._room is None else min(target, self._room)

    # -- giving way --------------------------------------------------------------------------------------------------

    def lose(self, most: int) -> None:
        """Have no more in flight than that, which was safe; on a full line room is what bounds it."""
        if self._share is None or not self._share.is_full:
            self.most = most

    def give_way(self, bandwidth: int, count: int) -> None:
        """Take a quarter less, in round `count`, of what is used of such a bandwidth."""
        if self._is_hasty:
            self._patience, self._is_hasty = min(2 * self._patience, _MOST_CALM_ROUNDS), False
        self._calm_rounds = 0
        self.gave_way_round = count
        used = self.bounded(bandwidth)
        kept = used * _YIELD // 100
        if self._share is None or not self._share.give(used - kept):
            self.slow = max(kept, 1)

    def on_round(self, *, queue: bool, limited: bool) -> None:
        """Take note of a round: whether it had a queue, and whether the application had limited it."""
        self._calm_rounds = 0 if queue else self._calm_rounds + (not limited)

    def may_look_again(self) -> bool:
        """Return whether it gave way and saw no queue for long enough; then the cycle ends early."""
        if self.has_given_way and self._calm_rounds >= self._patience:
            self._is_hasty = True
            return True
        return False

    def end_cycle(self, bandwidth: Bandwidth) -> None:
        """Look for more again, from where giving way has led."""
        if self.slow is not None:
            bandwidth.cut(self.slow)
        self.end_giving()

    def end_wait(self) -> None:
        """Take note that a cycle has ended by its time: where nobody gave way in it, patience begins anew."""
        if not self.has_given_way:
            self._patience, self._is_hasty = _CALM_ROUNDS, False

    def end_giving(self) -> None:
        """Be as fast as the path again."""
        self.slow = None
        if self._share is not None:
            self._share.take_back()

    def lift(self) -> None:
        """Be bound by no loss of before: it was that of a queue in which others had the most."""
        self.most = None
        self.end_giving()

    # -- UP ----------------------------------------------------------------------------------------------------------

    def begin_up(self) -> None:
        """Raise `most` slowly at first."""
        self._rise, self._credit = 1, 0
        self.end_giving()

    def raise_most(self, sample: AckSample, datagram: int) -> None:
        """Allow for more in flight."""
        if (most := self.most) is None:
            return
        self._raised = True
        self._credit += self._rise * datagram * sample.acked
        self.most = most + self._credit // most
        self._credit %= most

    def end_up_round(self) -> bool:
        """Return whether it was raised in this round; then it is raised twice as fast in the next."""
        raised, self._raised = self._raised, False
        if raised:
            self._rise = min(2 * self._rise, _MOST_RISE)
        return raised

    # -- mates -------------------------------------------------------------------------------------------------------

    def on_sent(self, in_flight: int, now_ns: int, *, few: bool) -> None:
        """Let mates know that it sends; `few`: packets are in flight."""
        if self._share is not None:
            self._share.on_sent(in_flight, now_ns, few=few)

    def share(self, claim: int, trip_ns: int, sample: AckSample, *, bound: bool) -> None:
        """Let mates know what it claims, and take what they leave; `bound`: it is told to be no faster than that."""
        share = self._share
        if share is None:
            return
        share.on_acked(claim, trip_ns, sample)
        self.unbind()
        if bound:
            self._level, self._room = share.level(sample.now_ns), share.room()

    def unbind(self) -> None:
        """Take no account of mates until they are asked again."""
        self._level = self._room = None

    # -- mistakes ----------------------------------------------------------------------------------------------------

    def before(self) -> LimitsBefore:
        """Return what there is."""
        return LimitsBefore(self.most, self.slow, 0 if self._share is None else self._share.given)

    def restore(self, before: LimitsBefore) -> None:
        """Let nothing be tighter than it was."""
        self.most = _looser(self.most, before.most)
        self.slow = _looser(self.slow, before.slow)
        if self._share is not None:
            self._share.take_back(before.given)


def _looser(one: int | None, other: int | None) -> int | None:
    """Return the higher of two limits."""
    return None if one is None or other is None else max(one, other)
