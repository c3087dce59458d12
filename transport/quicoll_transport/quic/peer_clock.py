"""When a peer's acknowledgements were sent, on our clock: so what they wait for on their way back counts in nothing.

An acknowledgement comes late where data of the other direction is before it in a queue, and several that wait there
come together. Taken by the time at which they came, a round trip is longer though our own direction has no queue, and
the rate at which packets arrived is above the path's. Both ranks of a collective send at once, so it is the rule here:
a rate that was a tenth too high made a queue until packets were lost, and gave way then. (Operations of four ranks, of
which each sends to three others, over paths that lose 2 %, and 1 % in bursts, took 1.50 and 1.44 of the ideal without
stamps, and 1.35 and 1.17 with them.)

So the peer says when it has sent each acknowledgement, by a clock of its own (`StampFrame`; draft-huitema-quic-ts has
the same for delays of one direction, draft-ietf-quic-receive-ts more of it). What such a clock is ahead of ours nobody
has to know: the least difference between a stamp and the arrival of its packet is that and the shortest way back, and
with it a stamp becomes the time at which the acknowledgement would have come if it had met no queue.

    offset      the least difference of the last ten seconds and of the ten before, so clocks that do not run alike may
                be apart by a millisecond after that time (50 millionths, which is what crystals do)

Invariants
    What it says is never later than the arrival.
    It depends on nothing but what it was told.

Failure cases
    The way back has a queue all the time for twenty seconds: its least part passes for the way. That is what there was
    without stamps.
    A peer that says what is not so: its acknowledgements may seem to have come sooner than they did, as with a false
    delay (`controller`, "Hosts that come late"): no round trip is shorter than the shortest that was seen, and no rate
    is above that at which was sent.
"""

from __future__ import annotations

__all__ = ["PeerClock"]

_PERIOD_NS = 10_000_000_000


class PeerClock:
    """See the module's head."""

    __slots__ = ("_before_ns", "_began_ns", "_now_ns")

    def __init__(self) -> None:
        self._began_ns = 0
        self._now_ns: int | None = None  # the least difference of this period, and of the one before
        self._before_ns: int | None = None

    def undelayed(self, stamp_ns: int, arrived_ns: int) -> int:
        """Return when a packet would have come that met no queue, on our clock.

        Args:
            stamp_ns: When it was sent, by the peer's clock.
            arrived_ns: When it came.
        """
        difference = arrived_ns - stamp_ns
        period_ns = arrived_ns - self._began_ns
        if self._now_ns is None or period_ns >= _PERIOD_NS:
            # After a silence it is too old: the clocks have moved apart.
            self._before_ns = self._now_ns if period_ns < 2 * _PERIOD_NS else None
            self._now_ns, self._began_ns = difference, arrived_ns
        elif difference < self._now_ns:
            self._now_ns = difference
        least = self._now_ns if self._before_ns is None else min(self._now_ns, self._before_ns)
        return stamp_ns + least
