"""What becomes of a rate that a receiver allots: whether it is tried, and when it is tried again. Sans-IO, integers.

The receiver knows its own line (`arrival_line`), and nothing of the path that leads there, of what else its sender
sends, nor of flows that are not quicoll's. So a fair rate is a hint.

    lowered     who sends more than he is allotted, at a line that is full, with a queue on his path: he has another's
                part. To a quarter of what he sends at the least, at a time
    tried       where a fair rate is clearly more than he sends, and he has more to send: at that rate, for two rounds,
                as with a rate that is remembered (`bbr`, RESUME). Four times what he sends at the most, at a time; with
                a queue on his path only where the line is full, for then it is that of those who are lowered. Who has
                given way to others' losses does not come back to what he had by this, but to clearly more than that
    refused     the path did not carry it. That rate, or nearly that, is tried again after 4 rounds, after 8, 16, ... 64
                where it is refused again

Invariants
    Nothing that a receiver says makes a sender have more under way than four times what its path has carried, for
    longer than such a trial.
    The same calls lead to the same answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll_transport.quic.arrival_line import FairRate

__all__ = ["FairRateTrial"]

_ABOVE = 105  # of a hundred, of a fair rate
_WORTH = 115  # of a hundred, of what is sent
_MOST, _LEAST = 400, 25  # of a hundred, likewise
_PATIENCE, _MOST_PATIENCE = 4, 64  # rounds


class FairRateTrial:
    """See the module's head. is_on: one is being tried."""

    __slots__ = ("_began_round", "_patience", "_refused", "_refused_round", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        self._began_round = 0
        self._refused, self._refused_round = 0, 0  # what the path did not carry, and when; 0: it did
        self._patience = _PATIENCE

    def lowered(self, fair_rate: FairRate, rate: int, *, queue: bool) -> int | None:
        """Return the rate for who sends at `rate` at the expense of others; None: he does not."""
        if not (fair_rate.is_full and queue) or rate * 100 <= fair_rate.rate * _ABOVE:
            return None
        return max(fair_rate.rate, rate * _LEAST // 100, 1)

    def worth(self, fair_rate: FairRate, rate: int, believed: int, *, queue: bool, count: int) -> int | None:
        """Return the rate to try, in round `count`; None: none is.

        Args:
            fair_rate: What is allotted.
            rate: At which he sends.
            believed: The same, before he gave way to others.
            queue: Whether there is one on the path.
            count: The round.
        """
        if queue and not fair_rate.is_full:
            return None
        wanted = min(fair_rate.rate, rate * _MOST // 100)
        if wanted * 100 <= believed * _WORTH or self._was_refused(wanted, count):
            return None
        return wanted

    def _was_refused(self, rate: int, count: int) -> bool:
        is_like = self._refused < rate * 2 < self._refused * 3
        return is_like and count - self._refused_round < self._patience

    def begin(self, count: int) -> None:
        """A fair rate is tried from round `count` on."""
        self.is_on, self._began_round = True, count

    def blames(self, count: int) -> bool:
        """Return whether what is lost in round `count` counts: what was sent before a trial, others' queue has lost."""
        return not self.is_on or count > self._began_round

    def end(self, rate: int, count: int, *, is_right: bool) -> None:
        """Take note of what came of it in round `count`: whether the path carries such a rate."""
        self.is_on = False
        self._patience = _PATIENCE if is_right else min(2 * self._patience, _MOST_PATIENCE)
        self._refused, self._refused_round = 0 if is_right else rate, count
